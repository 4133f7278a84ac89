"""The same step with another sequence length or micro-batch: shapes, communication and memory."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.what_ifs.captured_sizes import sizing_of
from onerank.annotate.what_ifs.dimensions import Powers
from onerank.annotate.what_ifs.growth import Growths, Operands, growths
from onerank.annotate.what_ifs.resized_memory import resized_memory
from onerank.annotate.what_ifs.sizing import Change, Sizing, numel
from onerank.annotate.work.characters import compute_mask
from onerank.annotate.work.classes import OpClass, op_class
from onerank.annotate.work.shapes import Tensor, with_shapes
from onerank.ir import UNKNOWN, Graph, Phase
from onerank.ir.errors import AnnotateError

Mask = npt.NDArray[np.bool_]

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

        Shapes of operators and kernels, bytes of communication, memory allocated and freed. FLOPs
        and bytes follow from the shapes; parameters, their gradients and the optimizer stay.
        Communication that was timed takes as much longer as it has more bytes.

        Raises:
            AnnotateError: the sizes cannot be told, do not divide, or change nothing.
        """
        sizing = sizing_of(graph, self.seq, self.batch)
        found = growths(graph, sizing)
        changed = _changed(graph, found, sizing)
        if not changed.any():
            raise AnnotateError(
                f"no operand grows with a sequence length of {sizing.seq.before} or a micro-batch "
                f"of {sizing.batch.before}; are these what the step was captured with?"
            )
        columns = _shapes(graph, found, changed, sizing)
        for name in ("flops", "bytes_read", "bytes_written"):
            columns[name] = np.where(changed, UNKNOWN, getattr(graph.nodes, name))
        columns |= _communication(graph, found, changed, sizing)
        columns["input_values"] = _values(graph, found, changed, sizing)
        memory = resized_memory(graph, found.operands, sizing)
        columns |= memory.columns
        made = graph.with_columns(**columns)
        made = replace(made, job=msgspec.structs.replace(graph.job, measurement=memory.measurement))
        notes = (_note(found, changed, sizing), *_silent(graph, found), *memory.notes)
        return Resized(made, changed, notes)


def new_shapes(
    pairs: Iterable[tuple[Tensor, Powers]], sizing: Sizing
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that tensors become.

    Raises:
        AnnotateError: a size would be no whole number.
    """
    return tuple(sizing.shape(tensor.shape, powers) for tensor, powers in pairs)


def _changed(graph: Graph, found: Growths, sizing: Sizing) -> Mask:
    known = dict[Operands, bool]()
    made = np.zeros(len(graph), dtype=bool)
    for node, operands in found.operands.items():
        if operands not in known:
            sides = (*operands.inputs, *operands.outputs)
            known[operands] = any(s != t.shape for s, (t, _) in zip(
                new_shapes(sides, sizing), sides, strict=True))  # fmt: skip
        made[node] = known[operands]
    return made


def _shapes(
    graph: Graph, found: Growths, changed: Mask, sizing: Sizing
) -> dict[str, npt.NDArray[np.generic] | list[str]]:
    nodes, strings = graph.nodes, graph.strings
    made: dict[str, npt.NDArray[np.generic] | list[str]] = {}
    for place, side in enumerate(("input", "output")):
        texts = graph.text(f"{side}_shapes")
        shapes, types = getattr(nodes, f"{side}_shapes"), getattr(nodes, f"{side}_types")
        known = dict[tuple[object, ...], str]()
        for node in np.flatnonzero(changed).tolist():
            pairs = found.operands[node][place]
            key = (int(shapes[node]), int(types[node]), pairs)
            if key not in known:
                new = new_shapes(pairs, sizing)
                known[key] = with_shapes(texts[node], strings[int(types[node])], new)
            texts[node] = known[key]
        made[f"{side}_shapes"] = texts
    # The grid was that of the captured shape; 0 is the code of no text.
    made["grid"] = np.where(changed & graph.gpu_compute, 0, graph.nodes.grid)
    return made


def _values(graph: Graph, found: Growths, changed: Mask, sizing: Sizing) -> list[str]:
    """Return argument values with the lengths that attention is told beside its operands.

    All others are as captured.
    """
    nodes, strings, texts = graph.nodes, graph.strings, graph.text("input_values")
    codes = np.unique(nodes.op[changed])
    attention = [code for code in codes if op_class(strings[int(code)]) is OpClass.ATTENTION]
    for node in np.flatnonzero(changed & np.isin(nodes.op, attention)).tolist():
        if not texts[node]:
            continue
        sizes = {
            size: sizing.resized(size, power)
            for tensor, powers in found.operands[node].inputs
            for size, power in zip(tensor.shape, powers, strict=True)
            if power[0]
        }
        kinds = _KINDS.decode(strings[int(nodes.input_types[node])])
        pairs = zip(kinds, _LIST.decode(texts[node]), strict=True)
        made = [sizes.get(one, one) if kind == "Int" else one for kind, one in pairs]
        texts[node] = msgspec.json.encode(made).decode()
    return texts


def _communication(
    graph: Graph, found: Growths, changed: Mask, sizing: Sizing
) -> dict[str, npt.NDArray[np.generic]]:
    """Return bytes of communication and, where it was timed, its duration in proportion."""
    nodes = graph.nodes
    sizes, duration, alone = (
        getattr(nodes, n).copy() for n in ("comm_bytes", "duration_ns", "alone_ns")
    )
    for node in np.flatnonzero(changed & graph.communication).tolist():
        pairs = found.operands[node].inputs[:1] or found.operands[node].outputs[:1]
        before = sum(numel(tensor.shape) for tensor, _ in pairs)
        after = sum(map(numel, new_shapes(pairs, sizing)))
        if not before:
            continue
        for column in (sizes, duration, alone):
            if column[node] > 0:
                column[node] = round(int(column[node]) * after / before)
    return {"comm_bytes": sizes, "duration_ns": duration, "alone_ns": alone}


def _silent(graph: Graph, found: Growths) -> tuple[str, ...]:
    """Return a sentence if there are kernels that do not tell their operands."""
    compute = np.flatnonzero(compute_mask(graph) & (graph.nodes.phase != Phase.OPTIMIZER))
    silent = compute[[node not in found.operands for node in compute.tolist()]]
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
