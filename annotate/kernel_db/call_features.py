"""A call as a point among comparable calls: shared properties, and the sizes that differ."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.kernel_db.call_keys import CallKey
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.features import F64, floor_share_of, kernels_of
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.op_classes import OpClass, base_name, op_class
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.ir.dtypes import ITEM_BYTES

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
_BY_ROW = (OpClass.NORM, OpClass.SOFTMAX, OpClass.REDUCTION)
# Most operands whose forms distinguish calls; more operands are the lists of an optimizer.
_FEW = 8


class Point(NamedTuple):
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


def point_of(key: CallKey) -> Point | None:
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
        return Point((key.operator, dtypes), _logs(*work.gemm[:4]), work)
    # Packed sequences pass their lengths as int32 tensors, whose values a key does not contain.
    packed = "int32" in key.dtypes
    if work.attention and all(work.attention[:7]) and not packed:
        group = (key.operator, dtypes, *work.attention[5:])
        return Point(group, _logs(*work.attention[:5]), work)
    return None


def _streaming(
    key: CallKey, call: Call, operator_class: OpClass, dtypes: tuple[str, ...]
) -> Point | None:
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
    sizes = [call.input_bytes, *(largest.shape[-1:] if operator_class in _BY_ROW else ())]
    forms = tuple(_form(tensor, largest) for tensor in tensors) if len(tensors) <= _FEW else ()
    return Point((key.operator, dtypes, key.attributes, forms), _logs(*sizes), work)


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
    last = max((int(position) for position in attributes), default=-1)
    values = tuple(attributes.get(str(position)) for position in range(last + 1))
    return Call(base_name(key.operator), inputs, (), values)


def modelled_ns(works: Sequence[Work], gpu: Gpu, from_description: PredictFromDescription) -> F64:
    """Return a model's prediction for unmeasured calls in ns, float64[d]."""
    return from_description(kernels_of(works, np.zeros(len(works))), gpu)[0]
