"""Data of the report's charts: parts of the step, streams, roofline, memory."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.analysis.breakdown import Share
from onerank.analysis.step_time import Replay
from onerank.annotate import CLASSES, classify
from onerank.annotate.memory.peak import held_blocks, levels_of
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir import UNKNOWN, Graph, Kind, MemoryClass, Phase
from onerank.ir.replay.scheduler import Schedule

I64 = npt.NDArray[np.int64]

COMMUNICATION = "communication"

IDLE = "idle"


class Part(msgspec.Struct, frozen=True):
    """A part of the step: a class of compute, "communication" (exposed) or "idle"."""

    name: str
    time_ns: int


class Spans(msgspec.Struct, frozen=True):
    """Nodes of one class on one stream, in order.

    Attributes:
        name: class of work, or "communication".
        start_ns: from the step's start on, int64[n].
        duration_ns: int64[n].
    """

    name: str
    start_ns: I64
    duration_ns: I64


class Lane(msgspec.Struct, frozen=True):
    """A stream (of a CPU capture, a thread) and what ran on it, by class."""

    title: str
    spans: tuple[Spans, ...]


class RooflinePoints(msgspec.Struct, frozen=True):
    """Distinct kernels of one class, as points of a roofline.

    Attributes:
        name: class of work.
        intensity: FLOPs per byte that operands take, float64[n].
        flops_per_s: float64[n].
        time_ns: summed duration of each, int64[n].
    """

    name: str
    intensity: npt.NDArray[np.float64]
    flops_per_s: npt.NDArray[np.float64]
    time_ns: I64


class MemoryCourse(msgspec.Struct, frozen=True):
    """Device memory by class after each allocation and free, the step's start first.

    Attributes:
        names: classes, int64 rows of `bytes`.
        bytes: int64[classes, events + 1].
        phases: phase -> the first event that belongs to it.
    """

    names: tuple[str, ...]
    bytes: I64
    phases: dict[str, int]


def parts_of(shares: Sequence[Share], done: Replay) -> list[Part]:
    """Return what the replayed step is made of; the parts add up to it, up to a nanosecond each.

    Classes share the time in which the device computes in proportion to their durations, since
    kernels of several streams overlap.

    Args:
        shares: of the compute, by class.
        done: how the graph runs.
    """
    total = sum(share.time_ns for share in shares) or 1
    parts = [Part(share.name, done.compute_ns * share.time_ns // total) for share in shares]
    parts.append(Part(COMMUNICATION, done.exposed_communication_ns))
    parts.append(Part(IDLE, done.idle_ns))
    return [part for part in parts if part.time_ns]


def lanes_of(graph: Graph, times: Schedule) -> list[Lane]:
    """Return what runs when on each stream; a CPU capture's operators by thread."""
    nodes = graph.nodes
    shown = np.flatnonzero(graph.gpu_compute | graph.communication)
    place = nodes.stream
    title = "stream"
    if not graph.gpu_compute.any():
        shown = np.flatnonzero(graph.mask(Kind.HOST_OP) | graph.communication)
        place, title = nodes.thread, "thread"
    shown = shown[times.end_ns[shown] > times.start_ns[shown]]
    names = _names(graph, shown)
    first = int(times.start_ns.min()) if len(graph) else 0
    lanes: list[Lane] = []
    for number in np.unique(place[shown]).tolist():
        rows = place[shown] == number
        spans: list[Spans] = []
        for name in dict.fromkeys(names[rows].tolist()):
            of = shown[rows & (names == name)]
            of = of[np.argsort(times.start_ns[of], kind="stable")]
            spans.append(Spans(name, times.start_ns[of] - first, nodes.duration_ns[of]))
        told = "communication" if number == UNKNOWN else f"{title} {number}"
        lanes.append(Lane(told, tuple(spans)))
    return lanes


def kernels_of(graph: Graph) -> tuple[list[RooflinePoints], str]:
    """Return the kernels whose FLOPs and bytes are known, equal ones once, and the products' type.

    That is the torch data type in which the matrix products do most FLOPs; "" without any.
    """
    costs = op_costs_of(graph)
    duration = graph.nodes.duration_ns[costs.index]
    moved = np.maximum(costs.bytes_read, 0) + np.maximum(costs.bytes_written, 0)
    known = graph.gpu_compute[costs.index] & (costs.flops > 0) & (moved > 0) & (duration > 0)
    names = graph.nodes.name[costs.index].astype(np.int64)
    points: list[RooflinePoints] = []
    codes: list[int] = costs.op_class[known].tolist()
    for code in dict.fromkeys(codes):
        of = np.flatnonzero(known & (costs.op_class == code))
        work = np.stack([names[of], costs.flops[of], moved[of]])
        _, first, which = np.unique(work, axis=1, return_index=True, return_inverse=True)
        which = which.reshape(-1)
        time = np.zeros(len(first), dtype=np.int64)
        np.add.at(time, which, duration[of])
        flops = costs.flops[of][first].astype(np.float64)
        rate = flops * np.bincount(which) / time * 1e9
        points.append(RooflinePoints(CLASSES[code].value, flops / moved[of][first], rate, time))
    by_type = np.zeros(len(costs.dtypes), dtype=np.int64)
    products = costs.matmul & (costs.flops > 0)
    np.add.at(by_type, costs.dtype[products], costs.flops[products])
    return points, costs.dtypes[int(by_type.argmax())] if by_type.any() else ""


def memory_of(graph: Graph) -> MemoryCourse | None:
    """Return memory by class through the step; None if the trace has no allocations."""
    log = graph.job.measurement.memory
    if log is None or not log.events:
        return None
    blocks, _ = held_blocks(graph, log)
    levels = levels_of(log, blocks)
    levels[MemoryClass.WORKSPACE] += levels[-1]  # the workspace of the optimizer's step
    named = [memory_class for memory_class in MemoryClass if levels[memory_class].any()]
    phases: dict[str, int] = {}
    for allocated_at, phase in sorted(zip(log.blocks.allocated_at, log.blocks.phase, strict=True)):
        if allocated_at >= 0 and phase != Phase.NONE:
            phases.setdefault(Phase(phase).name.lower(), allocated_at + 1)
    return MemoryCourse(tuple(memory_class.label for memory_class in named), levels[named], phases)


def _names(graph: Graph, index: I64) -> npt.NDArray[np.object_]:
    """Return the class of each node; communication by that name."""
    labels = np.array([op_class.value for op_class in CLASSES], dtype=object)
    names = labels[classify(graph, index).astype(np.int64)]
    names[graph.communication[index]] = COMMUNICATION
    return names
