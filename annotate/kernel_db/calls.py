"""A measured call: its key in the kernel database, and its features among comparable calls.

A graph node and a benchmark of the same call have the same key: the operator, its operands, and
what selects its kernel. Strides and operands in host memory are not part of the key, because not
every graph records them. The kernels' names decide among the rows of one key, or the strides in a
graph that has operators in the place of kernels. The features of a call are properties that
comparable calls share, and the sizes in which they differ.
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.features import kernels_of
from onerank.annotate.op_costs.attention import causal_position, window_of_call
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.op_classes import OpClass, base_name, floor_share_of, op_class
from onerank.annotate.op_costs.operands import Call, Tensor, UnknownDtypeError, without_tensors
from onerank.ir import Graph
from onerank.ir.arrays import F64, I64, Mask, deduplicate
from onerank.ir.dtypes import ITEM_BYTES

# Classes whose kernels do not depend on scalar arguments: alpha, a learning rate, a fill value.
_KEEPS_NO_VALUES = (
    OpClass.GEMM,
    OpClass.ELEMENTWISE,
    OpClass.OPTIMIZER,
    OpClass.MEMSET,
    OpClass.RANDOM,
)

# These copies have scalar flags (`non_blocking`) that do not select the kernel; other operators of
# their class, such as `cat` by its dimension, do depend on scalars.
_KEEPS_NO_VALUES_EITHER = frozenset({"copy_", "_to_copy", "clone", "contiguous"})


class CallKey(NamedTuple):
    """The key of a call in a kernel database.

    Attributes:
        operator: `aten::mm`, without overload.
        shapes: shapes of all tensor operands in argument order, with lists flattened.
        dtypes: their dtypes, as torch names them without `torch.`.
        attributes: JSON object, position of an argument -> its value, or "=P" if it repeats the
            tensors of argument P; sorted, no spaces.
        tf32: whether its kernel multiplies float32 operands in TF32.
    """

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    attributes: str
    tf32: bool = False


def call_key(
    op: str, shapes: str, types: str, values: str = "", *, tf32: bool = False
) -> CallKey | None:
    """Return the key of a call; None if it has no tensors or one of an unknown dtype.

    Args:
        op: operator, with or without overload.
        shapes: JSON text as in the column `input_shapes` of `Nodes`.
        types: the same for `input_types`.
        values: the same for `input_values`.
        tf32: whether the call multiplies float32 operands in TF32.

    Raises:
        AnnotateError: the text cannot be read.
    """
    try:
        call = Call.parse(base_name(op), (shapes, types), ("", ""), values)
    except UnknownDtypeError:
        return None
    tensors = [tensor for operand in call.inputs for tensor in operand or ()]
    if not tensors:
        return None
    return CallKey(
        operator=op.split(".", 1)[0],
        shapes=tuple(tensor.shape for tensor in tensors),
        dtypes=tuple(tensor.dtype for tensor in tensors),
        attributes=canonical(_attributes(op, call)),
        tf32=tf32,
    )


Layout = Mapping[int, tuple[int, ...]]
"""Index of a tensor operand, with lists flattened -> its strides, for those not contiguous."""


def layout_of(op: str, shapes: str, types: str, strides: str) -> Layout | None:
    """Return the layout of a call; None if it has lists of tensors, or an unknown dtype.

    Args:
        op: operator.
        shapes: JSON text as in the column `input_shapes` of `Nodes`.
        types: the same for `input_types`.
        strides: the same for `input_strides`.

    Raises:
        AnnotateError: the text cannot be read.
    """
    try:
        call = Call.parse(base_name(op), (shapes, types), ("", ""), "", strides)
    except UnknownDtypeError:
        return None
    if any(operand and len(operand) > 1 for operand in call.inputs):
        return None
    tensors = [operand[0] for operand in call.inputs if operand]
    return _used_strides(
        {at: tensor.recorded_strides for at, tensor in enumerate(tensors)},
        [tensor.shape for tensor in tensors],
    )


def layout_of_row(layout: str, shapes: Sequence[tuple[int, ...]]) -> Layout:
    """Return the layout in a row of a database.

    Args:
        layout: JSON text of the row.
        shapes: of its operands.
    """
    record: dict[str, Any] = msgspec.json.decode(layout) if layout else {}
    strides = {
        int(operand): tuple(cast("list[int]", value))
        for operand, value in record.items()
        if isinstance(value, list)
    }
    return _used_strides(strides, shapes)


def _used_strides(
    strides: Mapping[int, tuple[int, ...]], shapes: Sequence[tuple[int, ...]]
) -> Layout:
    """Return the strides of dimensions of several elements, for tensors that are not contiguous."""
    layout: dict[int, tuple[int, ...]] = {}
    for operand, given in strides.items():
        sizes = shapes[operand]
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        if len(given) != len(sizes):
            continue
        used = tuple(given[axis] for axis in axes)
        # Dimensions of one element may have any stride, which no kernel reads.
        if used != tuple(prod(sizes[axis + 1 :]) for axis in axes):
            layout[operand] = used
    return layout


def keeps_values(op: str) -> bool:
    """Return whether the key of an operator's call depends on `values`."""
    return op_class(op) not in _KEEPS_NO_VALUES and base_name(op) not in _KEEPS_NO_VALUES_EITHER


def canonical(record: dict[str, Any]) -> str:
    """Return a record as canonical JSON text: equal records give equal texts."""
    return msgspec.json.encode(record, order="deterministic").decode()


def _attributes(op: str, call: Call) -> dict[str, Any]:
    """Return the arguments that affect the kernel's time, by position."""
    # An operand passed twice is read once: Adam's addcmul of the gradient with itself took 35 us on
    # an H200, and 45 us with two different tensors.
    return {**_twice(call), **_picking(op, call)}


def _twice(call: Call) -> dict[str, str]:
    """Return position -> "=P" for arguments whose tensors have the ids of argument P."""
    ids = [
        _ids(value) if position < len(call.inputs) and call.inputs[position] else ()
        for position, value in enumerate(call.values)
    ]
    return {
        str(position): f"={ids.index(operand_ids)}"
        for position, operand_ids in enumerate(ids)
        if operand_ids and ids.index(operand_ids) < position
    }


def _ids(value: Any) -> tuple[int, ...]:
    """Return the ids of a tensor or of a list's tensors; () if one has no id."""
    if not isinstance(value, list) or not value:
        return ()
    items = cast("list[Any]", value)
    tensors = cast("list[list[Any]]", items if isinstance(items[0], list) else [items])
    ids = tuple(tensor[0] if isinstance(tensor, list) and tensor else 0 for tensor in tensors)
    return ids if all(ids) else ()


def _picking(op: str, call: Call) -> dict[str, Any]:
    """Return the arguments that select the kernel: dimensions, lengths, flags and dropout."""
    if not keeps_values(op):
        return {}
    causal = causal_position(call.op)
    return {
        str(position): value
        for position, value in enumerate(call.values)
        if not (position < len(call.inputs) and call.inputs[position])
        # Floats scale results and select nothing, except a dropout
        # probability, which precedes `is_causal` in every schema of attention.
        and (_whole(value) or (isinstance(value, float) and value and position < causal))
    }


def _whole(value: Any) -> bool:
    """Return whether a value is an integer, a flag, or a list of integers."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, int) for item in value)
    return isinstance(value, int)


class Keyed(NamedTuple):
    """The call keys of n nodes.

    Attributes:
        key: position in `keys`, -1 for a node without a key, int64[n].
        keys: the distinct keys.
    """

    key: I64
    keys: tuple[CallKey, ...]


def keys_of(graph: Graph, index: I64, operators: Collection[str], tf32: Mask) -> Keyed:
    """Return the keys of the nodes at `index` whose operator is one of `operators`.

    Args:
        graph: the graph.
        index: the nodes, int64[n].
        operators: operators that have rows.
        tf32: which nodes multiply float32 operands in TF32, bool[n].

    Raises:
        AnnotateError: the text of an operand column cannot be read.
    """
    nodes, strings = graph.nodes, graph.strings
    columns = (nodes.op, nodes.input_shapes, nodes.input_types)
    first, form = deduplicate([*(column[index] for column in columns), tf32])
    rows = index[first]
    ops = [strings[int(op)] for op in nodes.op[rows]]
    wanted = [op.split(".", 1)[0] in operators for op in ops]
    by_value = np.array([w and keeps_values(op) for w, op in zip(wanted, ops, strict=True)])
    values = np.zeros(len(index), dtype=np.int64)
    where = np.flatnonzero(by_value[form]) if len(rows) else first
    texts = [""]
    if len(where):
        values[where], texts = without_tensors(graph, nodes.input_values[index[where]])
    first, call = deduplicate([form, values])
    positions = dict[CallKey, int]()
    key_of_call = np.full(len(first), -1, dtype=np.int64)
    for position, row in enumerate(first.tolist()):
        if not wanted[form[row]]:
            continue
        node = index[row]
        op, shapes, types = (strings[int(column[node])] for column in columns)
        if key := call_key(op, shapes, types, texts[values[row]], tf32=bool(tf32[row])):
            key_of_call[position] = positions.setdefault(key, len(positions))
    return Keyed(key_of_call[call], tuple(positions))


_STREAMING = (
    OpClass.NORM,
    OpClass.SOFTMAX,
    OpClass.ELEMENTWISE,
    OpClass.REDUCTION,
    OpClass.OPTIMIZER,
    OpClass.COPY,
    OpClass.MEMSET,
    OpClass.RANDOM,
)
BY_LAYOUT = OpClass.ELEMENTWISE, OpClass.COPY
"""Classes whose kernels take longer if their operands are not contiguous: twice as long in the
cache, as the sum of a rotary embedding (2026-11-28-serving-blind-2-h200)."""

# Their time depends on the length of a row, and not only on the number of elements.
_BY_ROW = (OpClass.NORM, OpClass.SOFTMAX, OpClass.REDUCTION)
# Most operands whose forms distinguish calls; more operands are the lists of an optimizer.
_FEW = 8


class CallPoint(NamedTuple):
    """A call as a point among comparable calls.

    Attributes:
        group: properties that comparable calls share.
        sizes: ln of the sizes in which they differ.
        work: work of the call. A key does not contain results, so a streaming operator is assumed
            to write as many bytes as its largest operand has.
    """

    group: tuple[object, ...]
    sizes: tuple[float, ...]
    work: Work


def point_of(key: CallKey) -> CallPoint | None:
    """Return the point of a call; None if its sizes do not determine its time.

    The sizes of GEMMs are batch, m, n and k; of attention batch, heads, key heads and lengths; of
    streaming operators the bytes and, if they work by rows, the length of a row.
    """
    call = call_of(key)
    if call is None:
        return None
    operator_class, dtypes = op_class(key.operator), tuple(dict.fromkeys(key.dtypes))
    if operator_class in _STREAMING:
        return _streaming(key, call, operator_class, dtypes)
    work = work_of_call(key.operator, call)
    if work.gemm and all(work.gemm):
        batch, m, n, k, _, _ = work.gemm
        # In TF32 the time also depends on the layout, which a key does not have: with both operands
        # transposed, as in the gradient of a weight, it is 1.3 to 1.7 times as long on an H200.
        if key.tf32:
            return None
        return CallPoint((key.operator, dtypes), _logs(batch, m, n, k), work)
    # Packed sequences pass their lengths as int32 tensors, whose values a key does not contain.
    packed = "int32" in key.dtypes
    shape = work.attention
    if shape and all(shape.sizes) and not packed:
        batch, heads, key_heads, rows, keys, *fixed, window = shape
        # Keys by which the last queries see more than the mean of a window.
        beyond = window - keys if window else None
        group = (key.operator, dtypes, window_of_call(call), *fixed, beyond)
        return CallPoint(group, _logs(batch, heads, key_heads, rows, keys), work)
    return None


def _streaming(
    key: CallKey, call: Call, operator_class: OpClass, dtypes: tuple[str, ...]
) -> CallPoint | None:
    tensors = [operand[0] for operand in call.inputs if operand]
    largest = max(tensors, key=lambda tensor: tensor.numel)
    if not largest.numel:
        return None
    work = Work(
        flops=0,
        bytes_read=call.input_bytes,
        bytes_written=largest.nbytes,
        floor_share=floor_share_of(operator_class),
    )
    # A scalar is a row of one element, so all points of a group have as many sizes.
    row_length = largest.shape[-1] if largest.shape else 1
    sizes = [call.input_bytes, *((row_length,) if operator_class in _BY_ROW else ())]
    forms = tuple(_form(tensor, largest) for tensor in tensors) if len(tensors) <= _FEW else ()
    return CallPoint((key.operator, dtypes, key.attributes, forms), _logs(*sizes), work)


def _form(operand: Tensor, largest: Tensor) -> str:
    """Return how an operand broadcasts to the largest one; PyTorch picks the kernel by it."""
    if operand.shape == largest.shape:
        return "whole"
    if operand.numel == 1:
        return "one"
    return "row" if operand.shape[-1:] == largest.shape[-1:] else "column"


def _logs(*sizes: int) -> tuple[float, ...]:
    return tuple(np.log(np.array(sizes, dtype=np.float64)).tolist())


def call_of(key: CallKey) -> Call | None:
    """Return the call of a key, without results; None if a dtype is unknown."""
    if any(dtype not in ITEM_BYTES for dtype in key.dtypes):
        return None
    operands = zip(key.shapes, key.dtypes, strict=True)
    inputs = tuple((Tensor(shape, dtype, ITEM_BYTES[dtype]),) for shape, dtype in operands)
    attributes: dict[str, Any] = msgspec.json.decode(key.attributes)
    # `work_of_call` reads values by position, so those that the key leaves out are None.
    last = max((int(position) for position in attributes), default=-1)
    values = tuple(attributes.get(str(position)) for position in range(last + 1))
    return Call(base_name(key.operator), inputs, (), values)


def modelled_ns(works: Sequence[Work], gpu: Gpu, from_description: PredictFromDescription) -> F64:
    """Return a model's prediction for unmeasured calls in ns, float64[d]."""
    return from_description(kernels_of(works, np.zeros(len(works))), gpu)[0]
