"""Resize a step: shapes, communication and memory at another sequence length or micro-batch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.misaligned_gemms import has_misaligned_rows
from onerank.annotate.op_costs.cost_record import GemmShape
from onerank.annotate.op_costs.node_costs import compute_mask, op_costs_of
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Tensor, with_shapes
from onerank.annotate.passes.resize.resized_memory import resized_memory
from onerank.annotate.passes.resize.size_change import (
    NO_SEQUENCE,
    Change,
    Powers,
    Sizing,
    check_products,
    infer_sizing,
    mismatch_notes,
    numel,
)
from onerank.annotate.passes.resize.tensor_growth import Operands, StepGrowth, step_growth
from onerank.ir import UNKNOWN, Graph, Phase, StringTable
from onerank.ir.arrays import I32, Mask, deduplicate
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note

Columns = dict[str, npt.NDArray[Any]]

_KINDS, _LIST = msgspec.json.Decoder(list[str]), msgspec.json.Decoder(list[Any])


class Resized(NamedTuple):
    """A graph with other shapes.

    Attributes:
        graph: the resized graph; its compute nodes still have the captured durations.
        changed: whether the shapes of a node's operands changed, bool[n].
        notes: notes on the quality of the result.
    """

    graph: Graph
    changed: Mask
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class Resize:
    """Change the sequence length or the micro-batch.

    Attributes:
        seq: sequence length; None: as captured.
        batch: sequences in a micro-batch; None: as captured.
    """

    seq: Change | None = None
    batch: Change | None = None

    def apply(self, graph: Graph) -> Resized:
        """Return the graph with the operands of its calls at the new size.

        Shapes of operators and kernels, communication bytes, and memory allocated and freed change.
        FLOPs and bytes follow from the shapes. Parameters, their gradients and the optimizer stay.
        Timed communication grows in proportion to its bytes.

        Raises:
            AnnotateError: the sizes cannot be inferred or followed, do not divide, or change
                nothing.
        """
        sizing = infer_sizing(graph, self.seq, self.batch)
        growth = step_growth(graph, sizing)
        changed = growth.spread(
            [_is_changed(operands, sizing) for operands in growth.operands], False
        )
        if not changed.any():
            raise AnnotateError(
                f"no operand grows with a sequence length of {sizing.seq.before} or a micro-batch "
                f"of {sizing.batch.before}\n  check that these are the captured sizes",
                code="resize-nothing-grows",
            )
        strings = graph.strings.copy()
        columns = _shapes(graph, growth, changed, sizing, strings)
        for name in ("flops", "bytes_read", "bytes_written", "instructions"):
            columns[name] = np.where(changed, UNKNOWN, getattr(graph.nodes, name))
        columns |= _communication(graph, growth, changed, sizing)
        columns["input_values"] = _values(graph, growth, changed, sizing, strings)
        memory = resized_memory(graph, growth, sizing)
        columns |= memory.columns
        resized = replace(graph, strings=strings).with_columns(**columns)
        check_products(graph, resized, changed)
        resized = replace(
            resized, job=msgspec.structs.replace(graph.job, measurement=memory.measurement)
        )
        notes = (
            _note(growth, changed, sizing),
            *_unresized_note(graph, growth),
            *mismatch_notes(resized, changed),
            *misaligned_note(graph, resized, sizing),
        )
        notes = (*notes, *memory.notes)
        return Resized(resized, changed, notes)


def new_shapes(
    pairs: Iterable[tuple[Tensor, Powers]], sizing: Sizing
) -> tuple[tuple[int, ...], ...]:
    """Return the new shapes of tensors.

    Raises:
        AnnotateError: a new size is not a whole number.
    """
    return tuple(sizing.shape(tensor.shape, powers) for tensor, powers in pairs)


def _is_changed(operands: Operands, sizing: Sizing) -> bool:
    sides = (*operands.inputs, *operands.outputs)
    new = new_shapes(sides, sizing)
    return any(shape != tensor.shape for shape, (tensor, _) in zip(new, sides, strict=True))


def _shapes(
    graph: Graph, growth: StepGrowth, changed: Mask, sizing: Sizing, strings: StringTable
) -> Columns:
    nodes, rows = graph.nodes, np.flatnonzero(changed)
    columns: Columns = {}
    for side_index, side in enumerate(("input", "output")):
        shapes, types = getattr(nodes, f"{side}_shapes"), getattr(nodes, f"{side}_types")
        first, inverse = deduplicate([shapes[rows], types[rows], growth.of[rows]])
        texts: list[str] = []
        for row in rows[first].tolist():
            new = new_shapes(growth.operands[int(growth.of[row])][side_index], sizing)
            texts.append(with_shapes(strings[int(shapes[row])], strings[int(types[row])], new))
        column = shapes.copy()
        column[rows] = strings.encode(texts)[inverse]
        columns[f"{side}_shapes"] = column
    columns["input_strides"] = _strides(graph, changed, columns["input_shapes"], strings)
    # The captured grid belongs to the captured shape; 0 is the string code of an empty text.
    columns["grid"] = np.where(changed & graph.gpu_compute, 0, graph.nodes.grid)
    return columns


def _strides(graph: Graph, changed: Mask, new_shapes: I32, strings: StringTable) -> I32:
    """Return strides for new shapes, int32 codes."""
    nodes = graph.nodes
    rows = np.flatnonzero(changed & (nodes.input_strides > 0))
    columns = (nodes.input_strides, nodes.input_shapes, new_shapes)
    first, inverse = deduplicate([column[rows] for column in columns])
    texts: list[str] = []
    for row in rows[first].tolist():
        strides, before, after = (_LIST.decode(strings[int(column[row])]) for column in columns)
        texts.append(msgspec.json.encode(_grown_strides(strides, before, after)).decode())
    resized = nodes.input_strides.copy()
    resized[rows] = strings.encode(texts)[inverse]
    return resized


def _grown_strides(strides: Any, before: Any, after: Any) -> Any:
    """Return the strides of a tensor, or of nested ones, whose sizes grow.

    An axis steps over all axes of smaller strides, so its stride grows as their sizes do.
    """
    if not isinstance(strides, list) or not isinstance(before, list):
        return cast("Any", strides)
    axes: list[tuple[Any, Any, Any]] = [*zip(strides, before, after, strict=False)]
    if any(isinstance(size, list) for _, size, _ in axes):
        return [_grown_strides(*each) for each in axes]
    grown: list[int] = []
    for stride, size, _ in axes:
        inner = [
            (old, new)
            for step, old, new in axes
            if 0 < step < stride or (step == stride and size == 1 < old)
        ]
        old, new = (prod(sizes) for sizes in zip(*inner, strict=True)) if inner else (1, 1)
        grown.append(stride * new // old)
    return grown


def _values(
    graph: Graph, growth: StepGrowth, changed: Mask, sizing: Sizing, strings: StringTable
) -> I32:
    """Return argument values with new sequence lengths for attention, int32 codes.

    Attention operators take lengths as integer arguments; all other values stay as captured.
    """
    nodes = graph.nodes
    codes = np.unique(nodes.op[changed])
    attention = [code for code in codes if op_class(strings[int(code)]) is OpClass.ATTENTION]
    rows = np.flatnonzero(changed & np.isin(nodes.op, attention) & (nodes.input_values > 0))
    first, inverse = deduplicate(
        [column[rows] for column in (nodes.input_values, nodes.input_types, growth.of)]
    )
    texts: list[str] = []
    for row in rows[first].tolist():
        sizes = {
            size: sizing.resized(size, power)
            for tensor, powers in growth.operands[int(growth.of[row])].inputs
            for size, power in zip(tensor.shape, powers, strict=True)
            if power[0]
        }
        kinds = _KINDS.decode(strings[int(nodes.input_types[row])])
        values = _LIST.decode(strings[int(nodes.input_values[row])])
        pairs = zip(kinds, values, strict=True)
        resized_values = [
            sizes.get(value, value) if kind == "Int" else value for kind, value in pairs
        ]
        texts.append(msgspec.json.encode(resized_values).decode())
    column = nodes.input_values.copy()
    column[rows] = strings.encode(texts)[inverse]
    return column


def _communication(graph: Graph, growth: StepGrowth, changed: Mask, sizing: Sizing) -> Columns:
    """Return communication bytes, and durations of timed communication, scaled by its elements.

    Raises:
        AnnotateError: one of them is out of range.
    """
    ratios = growth.spread([_comm_ratio(operands, sizing) for operands in growth.operands], 1.0)
    columns: Columns = {}
    for name in ("comm_bytes", "duration_ns", "uncontended_ns"):
        column = getattr(graph.nodes, name)
        is_timed = changed & graph.communication & (column > 0)
        scaled = np.rint(column * np.where(is_timed, ratios, 1.0))
        if scaled.max(initial=0) >= _LARGEST:
            node = graph.node(int(scaled.argmax()))
            raise AnnotateError(
                f"node {node.id} ({node.name!r}): {name} would be {scaled.max():.3g}, at a "
                f"sequence length of {sizing.seq.after} and a micro-batch of {sizing.batch.after}"
                "\n  choose smaller ones",
                code="resize-too-large",
            )
        columns[name] = np.where(is_timed, scaled.astype(np.int64), column)
    return columns


_LARGEST = float(1 << 62)  # of a time or bytes


def _comm_ratio(operands: Operands, sizing: Sizing) -> float:
    """Return the ratio of new to captured elements that a collective moves."""
    pairs = operands.inputs[:1] or operands.outputs[:1]
    before = sum(numel(tensor.shape) for tensor, _ in pairs)
    return sum(map(numel, new_shapes(pairs, sizing))) / before if before else 1.0


def _unresized_note(graph: Graph, growth: StepGrowth) -> tuple[Note, ...]:
    """Return a note if kernels have no recorded operands."""
    compute = np.flatnonzero(compute_mask(graph) & (graph.nodes.phase != Phase.OPTIMIZER))
    unresized = compute[growth.of[compute] < 0]
    time_ns = int(graph.nodes.duration_ns[unresized].sum())
    if not time_ns:
        return ()
    return (
        Note(
            f"{len(unresized)} kernels of forward and backward, {time_ns} ns, do not record their "
            "operands and stay as captured.",
            code="resize-operands-unknown",
        ),
    )


# Elements of 16 bits in the 16 bytes at which rows of a fast product begin (`gemm_tiles`).
_ALIGNED_ELEMENTS = 8


def misaligned_note(before: Graph, after: Graph, sizing: Sizing) -> tuple[Note, ...]:
    """Return a note if the new size moves rows of GEMMs off 16-byte boundaries."""
    has_sequence = sizing.seq != NO_SEQUENCE
    name, change = ("sequence", sizing.seq) if has_sequence else ("micro-batch", sizing.batch)
    size = change.after
    # Checked first, because the costs of both steps take longer.
    if not any(size // part % _ALIGNED_ELEMENTS for part in sizing.parts):
        return ()
    captured, resized = _misaligned_products(before), _misaligned_products(after)
    # Other sizes, such as a vocabulary of 50257, are misaligned at every sequence length.
    if (resized <= captured and change.before % _ALIGNED_ELEMENTS == 0) or not resized:
        return ()
    lower = size - size % _ALIGNED_ELEMENTS
    nearest = " or ".join(str(size) for size in (lower, lower + _ALIGNED_ELEMENTS) if size)
    return (
        Note(
            f"A {name} of {size} is no multiple of {_ALIGNED_ELEMENTS}: in 16 bits the rows of "
            f"{resized} GEMMs begin off 16-byte boundaries (as captured: {captured}), "
            f"and libraries then run slower kernels. Compare with {nearest}.",
            code="resize-misaligned-rows",
        ),
    )


def _misaligned_products(graph: Graph) -> int:
    """Return how many GEMMs have misaligned rows if they run in 16 bits."""
    kernels = KernelFeatures.of(graph, op_costs_of(graph))
    gemm = kernels.gemm.copy()
    operand_bytes = GemmShape._fields.index("operand_bytes")
    gemm[:, operand_bytes] = np.where(gemm[:, operand_bytes] > 0, 2, 0)
    operands, results = has_misaligned_rows(gemm)
    return int((operands | results)[kernels.call].sum())


def _note(growth: StepGrowth, changed: Mask, sizing: Sizing) -> Note:
    seq, batch = sizing.seq, sizing.batch
    changes = [
        f"the {name} were {change.after} instead of {change.before}"
        for name, change in (("sequence", seq), ("micro-batch", batch))
        if change.after != change.before
    ]
    by_sizes = [
        f"{count} {name}"
        for name, count in sorted(growth.inferred_from_sizes.items(), key=lambda entry: -entry[1])
    ]
    by_sizes_note = (
        f" Results that only sizes determine: {', '.join(by_sizes[:6])}." if by_sizes else ""
    )
    return Note(
        f"What if {' and '.join(changes)}: {int(changed.sum())} of {len(changed)} nodes have other "
        "shapes. Products and attention scale by the cost model's ratio of both sizes, other "
        "kernels by their bytes. Host operators, other argument values and kernel choices stay as "
        f"captured, although libraries may pick other kernels at another size.{by_sizes_note}",
        code="what-if-size",
    )
