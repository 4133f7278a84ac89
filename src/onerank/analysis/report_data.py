"""Data of the report's charts: parts of the step, timeline, modules, roofline, memory."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.analysis.breakdown import Share
from onerank.analysis.step_time import Replay
from onerank.annotate import CLASSES, classify
from onerank.annotate.memory.memory_report import report_memory
from onerank.annotate.memory.peak import (
    ModuleMemory,
    levels_by_class,
    levels_of,
    resident_blocks,
)
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir import UNKNOWN, Graph, Kind, MemoryClass, Phase
from onerank.ir.arrays import F64, I64
from onerank.ir.replay import ReplayTimes

COMMUNICATION = "communication"

IDLE = "idle"

UNATTRIBUTED = "(none)"
"""Label of work outside all modules, such as the optimizer's."""


class StepPart(msgspec.Struct, frozen=True):
    """A part of the step: a class of compute, "communication" (exposed) or "idle"."""

    name: str
    time_ns: int


class ClassSpans(msgspec.Struct, frozen=True):
    """Nodes of one class on one stream, in order.

    Attributes:
        name: class of work, or "communication".
        start_ns: from the start of the step, int64[n].
        duration_ns: int64[n].
        node: row of each in the graph, int64[n].
    """

    name: str
    start_ns: I64
    duration_ns: I64
    node: I64


class Lane(msgspec.Struct, frozen=True):
    """A stream, or a thread of a CPU capture, with its spans by class."""

    title: str
    spans: tuple[ClassSpans, ...]


class ModuleCompute(msgspec.Struct, frozen=True):
    """Compute of a module and everything below it.

    Attributes:
        path: dotted name; "" for the whole step.
        parent: path of the enclosing module; "" for the whole step and for top-level modules.
        time_ns: summed durations, those of submodules included.
        nodes: number of compute nodes.
    """

    path: str
    parent: str
    time_ns: int
    nodes: int


class RooflinePoints(msgspec.Struct, frozen=True):
    """Distinct kernels of one class, as points of a roofline.

    Attributes:
        name: class of work.
        kernels: name of each.
        intensity: FLOPs per byte of the operands, float64[n].
        flops_per_s: float64[n].
        time_ns: summed duration of each, int64[n].
        calls: number of calls of each, int64[n].
    """

    name: str
    kernels: tuple[str, ...]
    intensity: F64
    flops_per_s: F64
    time_ns: I64
    calls: I64


class MemoryChart(msgspec.Struct, frozen=True):
    """Device memory by class after each allocation and free, the start of the step first.

    Attributes:
        names: classes, in the order of the rows of `bytes`.
        bytes: int64[classes, events + 1].
        phases: phase -> its first event.
        peak_event: column of `bytes` with the largest sum.
        at_peak: blocks of the step in use at the peak, by module; most bytes first.
    """

    names: tuple[str, ...]
    bytes: I64
    phases: dict[str, int]
    peak_event: int
    at_peak: tuple[ModuleMemory, ...]


def step_parts(shares: Sequence[Share], replayed: Replay) -> list[StepPart]:
    """Return the parts of the steady-state step, or of the replayed step if that is not known.

    Their sum equals the step within a nanosecond per part. Kernels of several streams overlap, so
    the compute time is divided among the classes in proportion to their summed durations.

    Args:
        shares: compute by class.
        replayed: the parts of both steps.
    """
    step = replayed.steady_state or replayed
    total = sum(share.time_ns for share in shares) or 1
    parts = [StepPart(share.name, step.compute_ns * share.time_ns // total) for share in shares]
    parts.append(StepPart(COMMUNICATION, step.exposed_communication_ns))
    parts.append(StepPart(IDLE, step.idle_ns))
    return [part for part in parts if part.time_ns]


def stream_spans(graph: Graph, times: ReplayTimes) -> list[Lane]:
    """Return the spans of each stream; for a CPU capture, of each thread."""
    nodes = graph.nodes
    shown = np.flatnonzero(graph.gpu_compute | graph.communication)
    lane_of, title = nodes.stream, "stream"
    if not graph.gpu_compute.any():
        shown = np.flatnonzero(graph.mask(Kind.HOST_OP) | graph.communication)
        lane_of, title = nodes.thread, "thread"
    # Nodes of 0 ns would be invisible bars that count against the limit of spans.
    shown = shown[times.end_ns[shown] > times.start_ns[shown]]
    names = _class_names(graph, shown)
    first = int(times.start_ns.min()) if len(graph) else 0
    lanes: list[Lane] = []
    for number in np.unique(lane_of[shown]).tolist():
        in_lane = lane_of[shown] == number
        spans: list[ClassSpans] = []
        for name in dict.fromkeys(names[in_lane].tolist()):
            rows = shown[in_lane & (names == name)]
            rows = rows[np.argsort(times.start_ns[rows], kind="stable")]
            spans.append(
                ClassSpans(name, times.start_ns[rows] - first, nodes.duration_ns[rows], rows)
            )
        lanes.append(
            Lane(COMMUNICATION if number == UNKNOWN else f"{title} {number}", tuple(spans))
        )
    return lanes


def module_tree(graph: Graph) -> list[ModuleCompute]:
    """Return the compute time of every module with its sub-modules; the whole step comes first."""
    compute = np.flatnonzero(graph.compute)
    codes, inverse = np.unique(graph.nodes.module[compute], return_inverse=True)
    time = np.zeros(len(codes), dtype=np.int64)
    np.add.at(time, inverse, graph.nodes.duration_ns[compute])
    count = np.bincount(inverse, minlength=len(codes))
    totals: dict[str, tuple[int, int]] = {"": (0, 0)}
    for code, own_ns, nodes in zip(codes.tolist(), time.tolist(), count.tolist(), strict=True):
        name = graph.strings[code] or UNATTRIBUTED
        steps = name.split(".")
        for depth in range(len(steps) + 1):
            path = ".".join(steps[:depth])
            sum_ns, sum_nodes = totals.get(path, (0, 0))
            totals[path] = (sum_ns + own_ns, sum_nodes + nodes)
    return [
        ModuleCompute(path, path.rpartition(".")[0], time_ns, nodes)
        for path, (time_ns, nodes) in totals.items()
    ]


def roofline(graph: Graph) -> tuple[list[RooflinePoints], str]:
    """Return the kernels whose FLOPs and bytes are known, and the data type of the GEMMs.

    Equal calls are a single point. The data type is the torch type with the most FLOPs in
    GEMMs; "" without GEMMs.
    """
    costs = op_costs_of(graph)
    duration = graph.nodes.duration_ns[costs.index]
    # Unknown bytes are -1.
    moved = np.maximum(costs.bytes_read, 0) + np.maximum(costs.bytes_written, 0)
    is_known = graph.gpu_compute[costs.index] & (costs.flops > 0) & (moved > 0) & (duration > 0)
    names = graph.nodes.name[costs.index].astype(np.int64)
    points: list[RooflinePoints] = []
    codes: list[int] = costs.op_class[is_known].tolist()
    for code in dict.fromkeys(codes):
        rows = np.flatnonzero(is_known & (costs.op_class == code))
        work = np.stack([names[rows], costs.flops[rows], moved[rows]])
        _, first, point = np.unique(work, axis=1, return_index=True, return_inverse=True)
        # numpy 2.0 returns the inverse with the dimensions of `work`.
        point = point.reshape(-1)
        time = np.zeros(len(first), dtype=np.int64)
        np.add.at(time, point, duration[rows])
        calls = np.bincount(point)
        flops = costs.flops[rows][first].astype(np.float64)
        points.append(
            RooflinePoints(
                CLASSES[code].value,
                tuple(graph.strings[name] for name in names[rows][first].tolist()),
                flops / moved[rows][first],
                flops * calls / time * 1e9,
                time,
                calls,
            )
        )
    flops_by_type = np.zeros(len(costs.dtypes), dtype=np.int64)
    products = costs.matmul & (costs.flops > 0)
    np.add.at(flops_by_type, costs.dtype[products], costs.flops[products])
    dtype = costs.dtypes[int(flops_by_type.argmax())] if flops_by_type.any() else ""
    return points, dtype


def memory_chart(graph: Graph) -> MemoryChart | None:
    """Return memory by class through the step; None if the trace has no allocations."""
    log = graph.job.measurement.memory
    if log is None or not log.events:
        return None
    resident, _ = resident_blocks(graph, log)
    levels = levels_by_class(levels_of(log, resident))
    classes = [kind for kind in MemoryClass if levels[kind].any()]
    phases: dict[str, int] = {}
    for event, phase in sorted(zip(log.blocks.allocated_at, log.blocks.phase, strict=True)):
        if event >= 0 and phase != Phase.NONE:
            # Column 0 of the levels is the start of the step.
            phases.setdefault(Phase(phase).name.lower(), event + 1)
    used = levels[classes]
    return MemoryChart(
        tuple(kind.label for kind in classes),
        used,
        phases,
        int(used.sum(axis=0).argmax()),
        report_memory(graph).modules,
    )


def _class_names(graph: Graph, index: I64) -> npt.NDArray[np.object_]:
    """Return the class of each node, or "communication"."""
    labels = np.array([op_class.value for op_class in CLASSES], dtype=object)
    names = labels[classify(graph, index).astype(np.int64)]
    names[graph.communication[index]] = COMMUNICATION
    return names
