"""What a step holds in device memory: its course, its peak by class, and what would make it fit."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.memory.allocator import OutOfMemoryError
from onerank.annotate.memory.beside import Beside, beside
from onerank.annotate.memory.held import columns_of, held_blocks, held_pieces, levels_of
from onerank.annotate.memory.refit import STEP_ROW, Need, Remedy, remedies
from onerank.annotate.memory.reserve import Piece, reserve
from onerank.annotate.tokens import micro_batch_of
from onerank.ir import Graph, MemoryClass, MemoryLog, Phase
from onerank.ir.errors import AnnotateError

I64 = npt.NDArray[np.int64]
_LAYER = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")


class ModuleMemory(msgspec.Struct, frozen=True):
    """Blocks of the step live at the peak: bytes and number, by module and class."""

    module: str
    memory_class: str
    bytes: int
    blocks: int


class NodeMemory(msgspec.Struct, frozen=True):
    """What a node allocated and freed, and what was live after it."""

    id: int
    name: str
    module: str
    phase: str
    allocated_bytes: int
    freed_bytes: int
    live_bytes: int


class MemoryReport(msgspec.Struct, frozen=True):
    """Device memory of a step.

    Attributes:
        peak_bytes: most in use at once, from the allocations and frees of the step.
        measured_peak_bytes: the allocator's own figure, 0 when not known.
        start_bytes: in use when the step began.
        peak_node: id of the node whose operator allocated up to the peak; None when not known.
        classes: class -> bytes in use at the peak; they add up to `peak_bytes`. Empty where the
            graph does not tell blocks apart.
        told_by: how the classes of what was held before the step are known.
        reserved_bytes: most the caching allocator had reserved in the capture, 0 if not known.
        simulated_reserved_bytes: the same by simulation from an empty device; None where the
            graph does not tell blocks apart.
        fragmentation_bytes: reserved but not in use, at the peak; measured where it can be.
        modules: activations, workspace and the like at the peak, the largest first.
        nodes: every node that allocated or freed, in order.
        target: name of the device it is to fit.
        capacity_bytes: memory of that device, 0 when not known.
        beside: what the device holds that the allocator does not see; nothing on a CPU.
        fits: whether it does, with that; None when the capacity is not known.
        fits_alone: whether it would without that; None when the capacity is not known.
        remedies: what would make it fit; empty when it does, and when `beside` alone does not.
        notes: what a reader should know.
    """

    peak_bytes: int
    measured_peak_bytes: int
    start_bytes: int
    peak_node: int | None
    classes: dict[str, int]
    told_by: str
    reserved_bytes: int
    simulated_reserved_bytes: int | None
    fragmentation_bytes: int | None
    modules: tuple[ModuleMemory, ...]
    nodes: tuple[NodeMemory, ...]
    target: str
    capacity_bytes: int
    beside: tuple[Beside, ...]
    fits: bool | None
    fits_alone: bool | None
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Peak:
    """The moment of most memory: its place among the events (-1: before), total and classes."""

    at: int
    bytes: int
    classes: dict[MemoryClass, int]


def report_memory(
    graph: Graph, target: Gpu | None = None, *, beside_bytes: int | None = None
) -> MemoryReport:
    """Return what the step holds in memory, and whether it fits a device.

    Args:
        graph: a captured graph, re-costed or not.
        target: the device it is to fit; None: the one it was captured on.
        beside_bytes: what the device holds that the allocator does not see; None: see `beside`.

    Raises:
        AnnotateError: the graph tells nothing of memory.
    """
    measured = graph.job.measurement
    nodes = _nodes(graph)
    log = measured.memory
    if log is None and not nodes and not measured.peak_memory_bytes:
        raise AnnotateError(
            "the trace tells nothing of memory: no node allocates and no peak was measured; "
            "capture the step with `capture run`, which records both"
        )
    capacity = graph.job.device.memory_bytes if target is None else target.memory_bytes
    name = graph.job.device.name if target is None else target.name
    start = measured.start_memory_bytes
    notes: list[str] = []
    other = () if target is None and graph.job.device.type == "cpu" else beside(graph)
    if beside_bytes is not None:
        other = (Beside("all", beside_bytes, "given"),)
    room = capacity - sum(one.bytes for one in other)
    if log is None:
        live = [node.live_bytes for node in nodes]
        peak = max(measured.peak_memory_bytes, start, *live)
        notes.append(
            "the graph does not tell blocks of memory apart (coarsened or expanded graphs, and "
            "captures of older versions): classes and the reserved figure are not known"
        )
        return MemoryReport(
            *(peak, measured.peak_memory_bytes, start, None, dict[str, int](), "not known"),
            reserved_bytes=0,
            simulated_reserved_bytes=None,
            fragmentation_bytes=None,
            modules=(),
            nodes=nodes,
            target=name,
            capacity_bytes=capacity,
            beside=other,
            fits=peak <= room if capacity else None,
            fits_alone=peak <= capacity if capacity else None,
            remedies=(),
            notes=tuple(notes),
        )
    held, told_by = held_blocks(graph, log)
    levels = levels_of(log, held)
    peak = _peak(levels)
    modules = _modules(graph, log, peak.at)
    pieces = held_pieces(graph, log, held)
    cold = reserve(log, pieces)
    reserved = log.reserved_bytes or cold.reserved_bytes
    fits = _fits(log, pieces, room) if capacity else None
    found: tuple[Remedy, ...] = ()
    if fits is False and room <= 0:
        notes.append(f"what lies beside the allocator's memory fills {name} by itself")
    elif fits is False:
        recomputed, layers = _recomputable(graph, log, peak.at)
        ratio = max(1.0, reserved / peak.bytes)
        sequences = micro_batch_of(graph)
        found = remedies(Need(levels, room, ratio, recomputed, layers, sequences))
    return MemoryReport(
        peak_bytes=peak.bytes,
        measured_peak_bytes=measured.peak_memory_bytes,
        start_bytes=start,
        peak_node=_node_at(log, peak.at),
        classes={one.label: size for one, size in peak.classes.items()},
        told_by=told_by,
        reserved_bytes=log.reserved_bytes,
        simulated_reserved_bytes=cold.reserved_bytes,
        fragmentation_bytes=max(0, reserved - peak.bytes),
        modules=modules,
        nodes=nodes,
        target=name,
        capacity_bytes=capacity,
        beside=other,
        fits=fits,
        fits_alone=(fits or _fits(log, pieces, capacity)) if capacity else None,
        remedies=found,
        notes=tuple(notes),
    )


def _peak(levels: I64) -> _Peak:
    total = levels.sum(axis=0)
    moment = int(total.argmax())
    classes = {one: int(levels[one, moment]) for one in MemoryClass}
    classes[MemoryClass.WORKSPACE] += int(levels[STEP_ROW, moment])
    shown = {one: size for one, size in classes.items() if size}
    return _Peak(moment - 1, int(total[moment]), shown)


def _live(log: MemoryLog, at: int) -> list[int]:
    """Return which of the step's own blocks are live after event `at`."""
    _, _, made, freed = columns_of(log)
    live = np.flatnonzero((made >= 0) & (made <= at) & ((freed < 0) | (freed > at)))
    return live.tolist()


def _node_at(log: MemoryLog, at: int) -> int | None:
    places = dict(zip(log.blocks.allocated_at, log.blocks.node, strict=True))
    node = places.get(at, -1) if at >= 0 else -1
    return node if node >= 0 else None


def _module_of(graph: Graph) -> dict[int, str]:
    ids: list[int] = graph.nodes.id.tolist()
    return dict(zip(ids, graph.text("module"), strict=True))


def _modules(graph: Graph, log: MemoryLog, at: int) -> tuple[ModuleMemory, ...]:
    module = _module_of(graph)
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for row in _live(log, at):
        kind = MemoryClass(log.blocks.memory_class[row]).label
        key = (module.get(log.blocks.node[row], ""), kind)
        size, count = sums.get(key, (0, 0))
        sums[key] = (size + log.blocks.bytes[row], count + 1)
    rows = [ModuleMemory(*key, *value) for key, value in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _recomputable(graph: Graph, log: MemoryLog, at: int) -> tuple[int, int]:
    """Return (activations at the peak that recomputing every layer does not hold, layers).

    It holds every layer's input and all of one layer. A layer's input is as large as the last
    block that forward allocated in the layer before.
    """
    module = _module_of(graph)
    activations, last = dict[str, int](), dict[str, int]()
    for row in _live(log, at):
        blocks = log.blocks
        if blocks.memory_class[row] != MemoryClass.ACTIVATIONS:
            continue
        found = _LAYER.match(module.get(blocks.node[row], ""))
        if found is None:
            continue
        layer = found.group()
        activations[layer] = activations.get(layer, 0) + blocks.bytes[row]
        if blocks.phase[row] == Phase.FORWARD:
            last[layer] = blocks.bytes[row]
    most = max(activations.values(), default=0)
    inputs = sum(last.values())
    return max(0, sum(activations.values()) - inputs - most), len(activations)


def _fits(log: MemoryLog, pieces: Mapping[MemoryClass, Sequence[Piece]], capacity: int) -> bool:
    try:
        reserve(log, pieces, capacity)
    except OutOfMemoryError:
        return False
    return True


def _nodes(graph: Graph) -> tuple[NodeMemory, ...]:
    nodes = graph.nodes
    touched = np.flatnonzero((nodes.bytes_allocated != 0) | (nodes.bytes_freed != 0))
    order = touched[np.argsort(nodes.start_ns[touched], kind="stable")]
    change = nodes.bytes_allocated[order] - nodes.bytes_freed[order]
    live = graph.job.measurement.start_memory_bytes + np.cumsum(change)
    name, module = (
        graph.strings.decode(nodes.name[order]),
        graph.strings.decode(nodes.module[order]),
    )
    return tuple(
        NodeMemory(*row)
        for row in zip(
            nodes.id[order].tolist(),
            name,
            module,
            [Phase(code).name.lower() for code in nodes.phase[order].tolist()],
            nodes.bytes_allocated[order].tolist(),
            nodes.bytes_freed[order].tolist(),
            live.tolist(),
            strict=True,
        )
    )


__all__ = ["MemoryReport", "ModuleMemory", "NodeMemory", "report_memory"]
