"""Memory report of a step: its peak by class and module, and whether it fits a device.

The peak comes from the log of allocations (`peak.py`), the reserve from the capture or from the
simulated allocator (`allocator.py`), and what a trace cannot record from measurements
(`non_allocator.py`). `mitigations.py` proposes changes for a step that does not fit.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.memory.allocator import OutOfMemoryError
from onerank.annotate.memory.mitigations import Mitigation, Need, mitigations
from onerank.annotate.memory.non_allocator import NonAllocatorMemory, non_allocator_memory
from onerank.annotate.memory.peak import (
    ModuleMemory,
    levels_of,
    modules_at,
    node_at,
    peak_of,
    recomputable,
    resident_blocks,
    resident_requests,
)
from onerank.annotate.memory.reserved_memory import AllocationRequest, simulate_reserved
from onerank.annotate.token_count import micro_batch_of
from onerank.display import Displayed
from onerank.ir import Collective, Graph, MemoryClass, MemoryLog, Phase
from onerank.ir.arrays import I64
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note
from onerank.ir.python_calls import REDUCER, python_calls_of


class NodeMemory(msgspec.Struct, frozen=True):
    """Bytes that a node allocated and freed, and bytes live after it.

    Attributes:
        peak_bytes: the most bytes live at one of its allocations, or after it.
    """

    id: int
    name: str
    module: str
    phase: str
    allocated_bytes: int
    freed_bytes: int
    live_bytes: int
    peak_bytes: int


class MemoryReport(Displayed, msgspec.Struct, frozen=True):
    """Device memory of a step.

    Attributes:
        peak_bytes: maximum bytes in use, from the allocations and frees of the step.
        measured_peak_bytes: the allocator's figure, 0 if not known.
        early_peak_bytes: what the step in which DDP allocates its buckets again can have in use at
            most; None without operators of DDP's reducer, which captures without a device mark.
        start_bytes: bytes in use when the step began.
        peak_node: id of the node whose operator allocated up to the peak; None if not known.
        classes: class -> bytes in use at the peak; they sum to `peak_bytes`. Empty if the graph
            does not distinguish blocks.
        source: source of the classes of memory allocated before the step.
        reserved_bytes: maximum that the caching allocator reserved in the capture, 0 if not known.
        simulated_reserved_bytes: the same by simulation from an empty device; None if the graph
            does not distinguish blocks.
        fragmentation_bytes: reserved but not in use, at the peak; measured if possible.
        modules: the step's blocks at the peak by module and class, the largest first.
        nodes: every node that allocated or freed, in order.
        target: name of the device that it should fit.
        capacity_bytes: memory of that device, 0 if not known.
        non_allocator: memory outside the allocator; empty on a CPU.
        fits: whether it fits, including `non_allocator`, by `reserved_bytes` or else by simulation;
            None if the capacity is not known.
        fits_without_overhead: whether it would fit without `non_allocator`; None if the
            capacity is not known.
        mitigations: changes that make it fit; empty if it fits, or if `non_allocator` alone does
            not.
        notes: statements on the quality of the result.
    """

    units: ClassVar[Mapping[str, str]] = {"classes": "bytes"}

    peak_bytes: int
    measured_peak_bytes: int
    early_peak_bytes: int | None
    start_bytes: int
    peak_node: int | None
    classes: dict[str, int]
    source: str
    reserved_bytes: int
    simulated_reserved_bytes: int | None
    fragmentation_bytes: int | None
    modules: tuple[ModuleMemory, ...]
    nodes: tuple[NodeMemory, ...]
    target: str
    capacity_bytes: int
    non_allocator: tuple[NonAllocatorMemory, ...]
    fits: bool | None
    fits_without_overhead: bool | None
    mitigations: tuple[Mitigation, ...]
    notes: tuple[Note, ...]


def report_memory(
    graph: Graph, target: Gpu | None = None, *, non_allocator_bytes: int | None = None
) -> MemoryReport:
    """Return the memory of the step, and whether it fits a device.

    Args:
        graph: a captured graph, re-costed or not.
        target: the device it should fit; None: the device of the capture.
        non_allocator_bytes: memory outside the allocator; None: the estimate of
            `non_allocator_memory`.

    Raises:
        AnnotateError: the graph has no memory information.
    """
    measured, nodes = graph.job.measurement, _nodes(graph)
    if measured.memory is None and not nodes and not measured.peak_memory_bytes:
        raise AnnotateError(
            "the trace records no memory: no node allocates and no peak was measured\n"
            "  capture the step with `capture run`, which records both; with --device none, of a "
            "script that puts its tensors on the GPU",
            code="memory-not-recorded",
        )
    device = _device(graph, target, non_allocator_bytes)
    if measured.memory is None:
        return _without_blocks(graph, nodes, device)
    return _with_blocks(graph, measured.memory, nodes, device)


def fragmentation_of(graph: Graph, *, own_process: bool = True) -> float:
    """Return reserved over allocated memory at the peak of a step.

    The reserve is that of the capture, or else of the simulated allocator. 1.0 if the graph has no
    log of its memory.

    Args:
        graph: the step.
        own_process: whether no unlike step ran before it in its process. The allocator keeps what a
            larger one reserved, so the reserve of the capture is not that of the step.
    """
    log = graph.job.measurement.memory
    if log is None:
        return 1.0
    resident, _ = resident_blocks(graph, log)
    peak = peak_of(levels_of(log, resident))
    reserved = log.reserved_bytes if own_process else 0
    if not reserved:
        reserved = simulate_reserved(log, resident_requests(graph, log, resident)).reserved_bytes
    return max(1.0, reserved / max(1, peak.bytes))


class _Device(NamedTuple):
    """The device to fit: its name, its memory (0: not known), and memory outside the allocator."""

    name: str
    capacity_bytes: int
    non_allocator: tuple[NonAllocatorMemory, ...]

    @property
    def room_bytes(self) -> int:
        """Memory available to the allocator."""
        return self.capacity_bytes - sum(memory.bytes for memory in self.non_allocator)


def _device(graph: Graph, target: Gpu | None, non_allocator_bytes: int | None) -> _Device:
    captured_on = graph.job.device
    name, capacity = (captured_on.name, captured_on.memory_bytes) if target is None else (
        target.name, target.memory_bytes)  # fmt: skip
    if non_allocator_bytes is not None:
        return _Device(name, capacity, (NonAllocatorMemory("all", non_allocator_bytes, "given"),))
    on_cpu = target is None and captured_on.type == "cpu"
    return _Device(name, capacity, () if on_cpu else non_allocator_memory(graph))


def _without_blocks(graph: Graph, nodes: tuple[NodeMemory, ...], device: _Device) -> MemoryReport:
    """Return a report from sums only: the peak, and whether it fits."""
    measured, known = graph.job.measurement, device.capacity_bytes
    start = measured.start_memory_bytes
    peak = max(measured.peak_memory_bytes, start, *(node.live_bytes for node in nodes))
    return MemoryReport(
        peak_bytes=peak,
        measured_peak_bytes=measured.peak_memory_bytes,
        early_peak_bytes=_early_peak(graph, peak),
        start_bytes=start,
        peak_node=None,
        classes={},
        source="not known",
        reserved_bytes=0,
        simulated_reserved_bytes=None,
        fragmentation_bytes=None,
        modules=(),
        nodes=nodes,
        target=device.name,
        capacity_bytes=device.capacity_bytes,
        non_allocator=device.non_allocator,
        fits=peak <= device.room_bytes if known else None,
        fits_without_overhead=peak <= device.capacity_bytes if known else None,
        mitigations=(),
        notes=(
            Note(
                "the graph does not distinguish blocks of memory (it is coarsened, expanded, or "
                "of an older version), so classes and reserved memory are not known",
                code="memory-blocks-unknown",
            ),
        ),
    )


def _with_blocks(
    graph: Graph, log: MemoryLog, nodes: tuple[NodeMemory, ...], device: _Device
) -> MemoryReport:
    """Return a report from blocks: classes at the peak, reserved memory, mitigations."""
    measured, capacity, room = graph.job.measurement, device.capacity_bytes, device.room_bytes
    resident, source = resident_blocks(graph, log)
    levels = levels_of(log, resident)
    peak = peak_of(levels)
    requests = resident_requests(graph, log, resident)
    simulated = simulate_reserved(log, requests)
    # A simulated step stands in for allocators that report no
    # reserved memory, such as that of a trace without snapshots.
    reserved = log.reserved_bytes or simulated.reserved_bytes
    fits = _fits(log, requests, room) if capacity else None
    changes, notes = tuple[Mitigation, ...](), tuple[Note, ...]()
    if fits is False and room <= 0:
        notes = (
            Note(
                f"memory outside the allocator by itself exceeds the capacity of {device.name}",
                code="memory-outside-allocator",
            ),
        )
    elif fits is False:
        recomputed, layers = recomputable(graph, log, peak.at)
        # Fragmentation of the changed step is unknown and assumed to be that of the capture.
        ratio = max(1.0, reserved / peak.bytes)
        sequences = micro_batch_of(graph)
        changes = mitigations(Need(levels, room, ratio, recomputed, layers, sequences))
    return MemoryReport(
        peak_bytes=peak.bytes,
        measured_peak_bytes=measured.peak_memory_bytes,
        early_peak_bytes=_early_peak(graph, peak.bytes),
        start_bytes=measured.start_memory_bytes,
        peak_node=node_at(log, peak.at),
        classes={memory_class.label: size for memory_class, size in peak.classes.items()},
        source=source,
        reserved_bytes=log.reserved_bytes,
        simulated_reserved_bytes=simulated.reserved_bytes,
        fragmentation_bytes=max(0, reserved - peak.bytes),
        modules=modules_at(graph, log, peak.at),
        nodes=_with_peaks(nodes, log, levels),
        target=device.name,
        capacity_bytes=capacity,
        non_allocator=device.non_allocator,
        fits=fits,
        fits_without_overhead=(fits or _fits(log, requests, capacity)) if capacity else None,
        mitigations=changes,
        notes=notes,
    )


def _early_peak(graph: Graph, peak_bytes: int) -> int | None:
    """Return the most that the step in which DDP allocates its buckets again has in use.

    At the start of its second step, with `static_graph` of its third, DDP orders its buckets by the
    gradients of an earlier backward and allocates them again. NCCL still holds the first ones: DDP
    waits for a future, so an asynchronous call keeps its tensors until the watchdog, which looks
    every 100 ms, has seen its end and another call begins. Two H200s had exactly one copy of the
    buckets more at the peak of that step, and often of the next (2026-11-28-early-steps-2xh200). If
    more than 100 ms pass between a backward and the next forward, they have none.
    """
    nodes = graph.nodes
    marked = [
        code
        for code in np.unique(nodes.python_calls).tolist()
        if python_calls_of(graph.strings[code])[REDUCER]
    ]
    if not marked:
        return None
    reduced = (nodes.collective == Collective.ALL_REDUCE) & (nodes.phase == Phase.BACKWARD)
    return peak_bytes + int(nodes.comm_bytes[reduced & (nodes.comm_bytes > 0)].sum())


def _fits(
    log: MemoryLog, requests: Mapping[MemoryClass, Sequence[AllocationRequest]], capacity: int
) -> bool:
    # If the capture's reserve fits, the allocator behaves on the device as it did in the capture.
    # The simulation starts from an empty device, and its reserve may be some percent off, because
    # it does not know what the process did before the step.
    if 0 < log.reserved_bytes <= capacity:
        return True
    try:
        simulate_reserved(log, requests, capacity)
    except OutOfMemoryError:
        return False
    return True


def _with_peaks(
    nodes: tuple[NodeMemory, ...], log: MemoryLog, levels: I64
) -> tuple[NodeMemory, ...]:
    """Return the nodes with the peaks that blocks show; `levels` are as in `levels_of`."""
    in_use = levels.sum(axis=0)[1:].tolist()
    peaks = dict[int, int]()
    for node, event in zip(log.blocks.node, log.blocks.allocated_at, strict=True):
        if event >= 0:
            peaks[node] = max(peaks.get(node, 0), in_use[event])
    return tuple(
        msgspec.structs.replace(node, peak_bytes=max(node.live_bytes, peaks.get(node.id, 0)))
        for node in nodes
    )


def _nodes(graph: Graph) -> tuple[NodeMemory, ...]:
    nodes = graph.nodes
    touched = np.flatnonzero((nodes.bytes_allocated != 0) | (nodes.bytes_freed != 0))
    # In order of time, because the live bytes are a running sum.
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
            live.tolist(),  # unless blocks show more
            strict=True,
        )
    )
