"""Resize a step: shapes, communication and memory at another sequence length or micro-batch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.gemm_tiles import has_misaligned_rows
from onerank.annotate.op_costs.node_costs import compute_mask, op_costs_of
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Tensor, with_shapes
from onerank.annotate.passes.resize.dimensions import Powers
from onerank.annotate.passes.resize.infer_seq_batch import infer_sizing
from onerank.annotate.passes.resize.resized_memory import resized_memory
from onerank.annotate.passes.resize.size_change import (
    NO_SEQUENCE,
    Change,
    Sizing,
    check_products,
    mismatch_notes,
    numel,
)
from onerank.annotate.passes.resize.tensor_growth import Operands, StepGrowth, step_growth
from onerank.annotate.unique_rows import combine
from onerank.ir import UNKNOWN, Graph, Phase, StringTable
from onerank.ir.errors import AnnotateError

Mask = npt.NDArray[np.bool_]
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
    notes: tuple[str, ...]


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
        for name in ("flops", "bytes_read", "bytes_written"):
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
            *_misaligned_note(graph, resized, sizing),
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
        first, inverse = combine([shapes[rows], types[rows], growth.of[rows]])
        texts: list[str] = []
        for row in rows[first].tolist():
            new = new_shapes(growth.operands[int(growth.of[row])][side_index], sizing)
            texts.append(with_shapes(strings[int(shapes[row])], strings[int(types[row])], new))
        column = shapes.copy()
        column[rows] = strings.encode(texts)[inverse]
        columns[f"{side}_shapes"] = column
    # The captured grid belongs to the captured shape; 0 is the string code of an empty text.
    columns["grid"] = np.where(changed & graph.gpu_compute, 0, graph.nodes.grid)
    return columns


def _values(
    graph: Graph, growth: StepGrowth, changed: Mask, sizing: Sizing, strings: StringTable
) -> npt.NDArray[np.int32]:
    """Return argument values with new sequence lengths for attention, int32 codes.

    Attention operators take lengths as integer arguments; all other values stay as captured.
    """
    nodes = graph.nodes
    codes = np.unique(nodes.op[changed])
    attention = [code for code in codes if op_class(strings[int(code)]) is OpClass.ATTENTION]
    rows = np.flatnonzero(changed & np.isin(nodes.op, attention) & (nodes.input_values > 0))
    first, inverse = combine(
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
    """Return communication bytes, and durations of timed communication, scaled by its elements."""
    ratios = growth.spread([_ratio(operands, sizing) for operands in growth.operands], 1.0)
    columns: Columns = {}
    for name in ("comm_bytes", "duration_ns", "uncontended_ns"):
        column = getattr(graph.nodes, name)
        is_timed = changed & graph.communication & (column > 0)
        columns[name] = np.where(is_timed, np.rint(column * ratios).astype(np.int64), column)
    return columns


def _ratio(operands: Operands, sizing: Sizing) -> float:
    """Return the ratio of new to captured elements that a collective moves."""
    pairs = operands.inputs[:1] or operands.outputs[:1]
    before = sum(numel(tensor.shape) for tensor, _ in pairs)
    return sum(map(numel, new_shapes(pairs, sizing))) / before if before else 1.0


def _unresized_note(graph: Graph, growth: StepGrowth) -> tuple[str, ...]:
    """Return a note if kernels have no recorded operands."""
    compute = np.flatnonzero(compute_mask(graph) & (graph.nodes.phase != Phase.OPTIMIZER))
    unresized = compute[growth.of[compute] < 0]
    time_ns = int(graph.nodes.duration_ns[unresized].sum())
    if not time_ns:
        return ()
    return (
        f"{len(unresized)} kernels of forward and backward, {time_ns} ns, do not record their "
        "operands and stay as captured.",
    )


_ALIGNED_ELEMENTS = 8
"""Elements of 16 bits in the 16 bytes at which rows of a fast product begin (`gemm_tiles`)."""


def _misaligned_note(before: Graph, after: Graph, sizing: Sizing) -> tuple[str, ...]:
    """Return a note if the new size moves rows of matrix products off 16-byte boundaries."""
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
        f"A {name} of {size} is no multiple of {_ALIGNED_ELEMENTS}: in 16 bits the rows of "
        f"{resized} matrix products begin off 16-byte boundaries (as captured: {captured}), and "
        f"libraries then run slower kernels. Compare with {nearest}.",
    )


def _misaligned_products(graph: Graph) -> int:
    """Return how many matrix products have misaligned rows if they run in 16 bits."""
    kernels = KernelFeatures.of(graph, op_costs_of(graph))
    gemm = kernels.gemm.copy()
    gemm[:, 4] = np.where(gemm[:, 4] > 0, 2, 0)
    operands, results = has_misaligned_rows(gemm)
    return int((operands | results)[kernels.call].sum())


def _note(growth: StepGrowth, changed: Mask, sizing: Sizing) -> str:
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
    return (
        f"What if {' and '.join(changes)}: {int(changed.sum())} of {len(changed)} nodes have other "
        "shapes. Products and attention scale by the cost model's ratio of both sizes, other "
        "kernels by their bytes. Host operators, other argument values and kernel choices stay as "
        f"captured, although libraries may pick other kernels at another size.{by_sizes_note}"
    )
