"""Resize a step: shapes, communication and memory at another sequence length or micro-batch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.op_costs.node_costs import compute_mask
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Tensor, with_shapes
from onerank.annotate.passes.resize.dimensions import Powers
from onerank.annotate.passes.resize.infer_seq_batch import sizing_of
from onerank.annotate.passes.resize.resized_memory import resized_memory
from onerank.annotate.passes.resize.size_change import (
    Change,
    Sizing,
    check_products,
    misfits,
    numel,
)
from onerank.annotate.passes.resize.tensor_growth import Growths, Operands, growths
from onerank.annotate.unique_rows import combine
from onerank.ir import UNKNOWN, Graph, Phase, StringTable
from onerank.ir.errors import AnnotateError

Mask = npt.NDArray[np.bool_]
Columns = dict[str, npt.NDArray[Any]]

_KINDS, _LIST = msgspec.json.Decoder(list[str]), msgspec.json.Decoder(list[Any])


class Resized(NamedTuple):
    """A graph with other shapes.

    Attributes:
        graph: its compute nodes have the durations that were measured at the captured sizes.
        changed: whether a node's operands have other shapes, bool[n].
        notes: what a reader should know.
    """

    graph: Graph
    changed: Mask
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resize:
    """What if the sequences were longer or the micro-batch larger.

    Attributes:
        seq: sequence length; None: as captured.
        batch: sequences in a micro-batch; None: as captured.
    """

    seq: Change | None = None
    batch: Change | None = None

    def apply(self, graph: Graph) -> Resized:
        """Return the graph with the operands that its calls would have.

        Changes shapes of operators and kernels, communication bytes, and memory allocated and
        freed. FLOPs and bytes follow from the shapes. Parameters, their gradients and the optimizer
        stay. Timed communication grows in proportion to its bytes.

        Raises:
            AnnotateError: the sizes cannot be inferred or followed, do not divide, or change
                nothing.
        """
        sizing = sizing_of(graph, self.seq, self.batch)
        found = growths(graph, sizing)
        changed = found.spread([_changes(one, sizing) for one in found.operands], False)
        if not changed.any():
            raise AnnotateError(
                f"no operand grows with a sequence length of {sizing.seq.before} or a micro-batch "
                f"of {sizing.batch.before}; are these what the step was captured with?",
                code="resize-nothing-grows",
            )
        strings = graph.strings.copy()
        columns = _shapes(graph, found, changed, sizing, strings)
        for name in ("flops", "bytes_read", "bytes_written"):
            columns[name] = np.where(changed, UNKNOWN, getattr(graph.nodes, name))
        columns |= _communication(graph, found, changed, sizing)
        columns["input_values"] = _values(graph, found, changed, sizing, strings)
        memory = resized_memory(graph, found, sizing)
        columns |= memory.columns
        made = replace(graph, strings=strings).with_columns(**columns)
        check_products(graph, made, changed)
        made = replace(made, job=msgspec.structs.replace(graph.job, measurement=memory.measurement))
        notes = (_note(found, changed, sizing), *_silent(graph, found), *misfits(made, changed))
        notes = (*notes, *memory.notes)
        return Resized(made, changed, notes)


def new_shapes(
    pairs: Iterable[tuple[Tensor, Powers]], sizing: Sizing
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that tensors become.

    Raises:
        AnnotateError: a size would be no whole number.
    """
    return tuple(sizing.shape(tensor.shape, powers) for tensor, powers in pairs)


def _changes(operands: Operands, sizing: Sizing) -> bool:
    sides = (*operands.inputs, *operands.outputs)
    new = new_shapes(sides, sizing)
    return any(shape != tensor.shape for shape, (tensor, _) in zip(new, sides, strict=True))


def _shapes(
    graph: Graph, found: Growths, changed: Mask, sizing: Sizing, strings: StringTable
) -> Columns:
    nodes, rows = graph.nodes, np.flatnonzero(changed)
    made: Columns = {}
    for place, side in enumerate(("input", "output")):
        shapes, types = getattr(nodes, f"{side}_shapes"), getattr(nodes, f"{side}_types")
        first, which = combine([shapes[rows], types[rows], found.of[rows]])
        texts: list[str] = []
        for row in rows[first].tolist():
            new = new_shapes(found.operands[int(found.of[row])][place], sizing)
            texts.append(with_shapes(strings[int(shapes[row])], strings[int(types[row])], new))
        column = shapes.copy()
        column[rows] = strings.encode(texts)[which]
        made[f"{side}_shapes"] = column
    # The grid was that of the captured shape; 0 is the code of no text.
    made["grid"] = np.where(changed & graph.gpu_compute, 0, graph.nodes.grid)
    return made


def _values(
    graph: Graph, found: Growths, changed: Mask, sizing: Sizing, strings: StringTable
) -> npt.NDArray[np.int32]:
    """Return argument values with the lengths that attention takes in addition to its operands.

    All other values stay as captured.
    """
    nodes = graph.nodes
    codes = np.unique(nodes.op[changed])
    attention = [code for code in codes if op_class(strings[int(code)]) is OpClass.ATTENTION]
    rows = np.flatnonzero(changed & np.isin(nodes.op, attention) & (nodes.input_values > 0))
    first, which = combine(
        [column[rows] for column in (nodes.input_values, nodes.input_types, found.of)]
    )
    texts: list[str] = []
    for row in rows[first].tolist():
        sizes = {
            size: sizing.resized(size, power)
            for tensor, powers in found.operands[int(found.of[row])].inputs
            for size, power in zip(tensor.shape, powers, strict=True)
            if power[0]
        }
        kinds = _KINDS.decode(strings[int(nodes.input_types[row])])
        values = _LIST.decode(strings[int(nodes.input_values[row])])
        pairs = zip(kinds, values, strict=True)
        made = [sizes.get(one, one) if kind == "Int" else one for kind, one in pairs]
        texts.append(msgspec.json.encode(made).decode())
    column = nodes.input_values.copy()
    column[rows] = strings.encode(texts)[which]
    return column


def _communication(graph: Graph, found: Growths, changed: Mask, sizing: Sizing) -> Columns:
    """Return bytes of communication and, where it was timed, its duration in proportion."""
    ratios = found.spread([_ratio(one, sizing) for one in found.operands], 1.0)
    made: Columns = {}
    for name in ("comm_bytes", "duration_ns", "uncontended_ns"):
        column = getattr(graph.nodes, name)
        moves = changed & graph.communication & (column > 0)
        made[name] = np.where(moves, np.rint(column * ratios).astype(np.int64), column)
    return made


def _ratio(operands: Operands, sizing: Sizing) -> float:
    """Return how many times as many elements a collective moves."""
    pairs = operands.inputs[:1] or operands.outputs[:1]
    before = sum(numel(tensor.shape) for tensor, _ in pairs)
    return sum(map(numel, new_shapes(pairs, sizing))) / before if before else 1.0


def _silent(graph: Graph, found: Growths) -> tuple[str, ...]:
    """Return a note if kernels have no recorded operands."""
    compute = np.flatnonzero(compute_mask(graph) & (graph.nodes.phase != Phase.OPTIMIZER))
    silent = compute[found.of[compute] < 0]
    taken = int(graph.nodes.duration_ns[silent].sum())
    if not taken:
        return ()
    return (
        f"{len(silent)} kernels of forward and backward, {taken} ns, do not tell their operands "
        "and are as captured.",
    )


def _note(found: Growths, changed: Mask, sizing: Sizing) -> str:
    seq, batch = sizing.seq, sizing.batch
    asked = [
        f"the {name} were {change.after} instead of {change.before}"
        for name, change in (("sequence", seq), ("micro-batch", batch))
        if change.after != change.before
    ]
    sort = [f"{n} {name}" for name, n in sorted(found.unruled.items(), key=lambda one: -one[1])]
    told = f" By sizes alone are told results of {', '.join(sort[:6])}." if sort else ""
    return (
        f"What if {' and '.join(asked)}: {int(changed.sum())} of {len(changed)} nodes have other "
        "shapes. A product or attention takes what was measured times what the cost "
        "model says of both sizes, all else what was measured in proportion to its bytes; host "
        "operators and other argument values are as captured, and so are the kernels, where the "
        f"libraries may pick others at another size.{told}"
    )
