"""Report of the fit over depths: lines, residuals, peak memory, notes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from onerank.converters.expand.layers.layer_passes import LayeredGraph
from onerank.converters.expand.layers.layer_period import LayerPlan, Pattern
from onerank.converters.expand.layers.memory_timeline import BucketSizes, held_at_depth
from onerank.converters.expand.layers.nonlayer_nodes import NonlayerChanges
from onerank.ir import UNKNOWN, Graph, Kind, LayerExtrapolation, Line, Measurement, MemoryLog


def line(depths: Sequence[int], values: Sequence[int], depth: int) -> Line:
    """Fit a line by least squares; `depth` is where it is read."""
    slope, intercept = np.polyfit(depths, values, 1).tolist()
    residual = None
    if len(depths) > 2:
        residual = max(
            abs(intercept + slope * at - value) / value if value else 0.0
            for at, value in zip(depths, values, strict=True)
        )
    return Line(tuple(values), intercept, slope, residual, round(intercept + slope * depth))


def compute_ns(graph: Graph, members: Sequence[int] | None = None) -> int:
    """Return the summed durations of kernels (on a CPU of operators), all or those of `members`."""
    on_gpu = bool(graph.gpu_compute.any())
    mask = graph.gpu_compute if on_gpu else graph.mask(Kind.HOST_OP)
    index = np.flatnonzero(mask) if members is None else np.array(members, dtype=np.int64)
    return int(graph.nodes.duration_ns[index[mask[index]]].sum())


def comm_bytes(graph: Graph) -> int:
    """Return the summed per-rank input of the communication calls, those that are known."""
    sizes = graph.nodes.comm_bytes[graph.communication]
    return int(sizes[sizes != UNKNOWN].sum())


def replayed_peak_bytes(graph: Graph, start_bytes: int) -> int:
    """Return the highest level of memory in the graph's allocations and frees, in order.

    Where it does not tell them apart: when its operators allocate and free in order, and each all
    it allocates before anything is freed.

    Args:
        graph: the step.
        start_bytes: level when it begins.
    """
    nodes, log = graph.nodes, graph.job.measurement.memory
    if log is not None:
        steps = np.zeros(log.events, dtype=np.int64)
        for places, sign in ((log.blocks.allocated_at, 1), (log.blocks.freed_at, -1)):
            place, size = np.array(places, np.int64), np.array(log.blocks.bytes, np.int64)
            steps[place[place >= 0]] = sign * size[place >= 0]
        return start_bytes + max(0, int(np.cumsum(steps).max(initial=0)))
    order = np.argsort(nodes.start_ns, kind="stable")
    allocated, freed = nodes.bytes_allocated[order], nodes.bytes_freed[order]
    before = np.cumsum(allocated - freed) - (allocated - freed)
    return start_bytes + int((before + allocated).max(initial=0))


PEAK_AGREES = 0.005
"""Share by which the line through the peaks and the replay of the graph may differ."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Captures at several depths, and what was found in them.

    Attributes:
        graphs: layers built -> capture.
        depth: layers of the model.
        shallow: the capture of least layers.
        deep: that of most.
        pattern: how the layers repeat.
        plan: what is copied; None where the deepest capture is whole and its layers are unlike.
    """

    graphs: dict[int, Graph]
    depth: int
    shallow: LayeredGraph
    deep: LayeredGraph
    pattern: Pattern
    plan: LayerPlan | None

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each capture, ascending."""
        return tuple(sorted(self.graphs))

    @property
    def unlike(self) -> list[int]:
        """Layers of the deepest capture that should be alike, and differ from those that are."""
        inner = range(max(self.pattern.first, 1), self.layers[-1] - 1)
        return [layer for layer in inner if self.plan is not None and layer not in self.plan.alike]

    @property
    def ends_alone(self) -> bool:
        """Whether the shallowest capture has none of the layers that are copied."""
        own = range(max(self.pattern.first, 1), self.layers[0])
        return bool(own) and all(layer in self.unlike for layer in own)

    def line(self, values: list[int]) -> Line:
        """Return the line through a value per capture."""
        return line(self.layers, values, self.depth)

    @property
    def measured(self) -> list[Measurement]:
        """How each capture was measured."""
        return [self.graphs[count].job.measurement for count in self.layers]

    @property
    def start_memory_bytes(self) -> int:
        """Memory allocated when a step of the whole model begins."""
        return self.line([one.start_memory_bytes for one in self.measured]).at_depth


def fit_depths(captured: Captured, graph: Graph) -> LayerExtrapolation:
    """Return the lines through the captures, beside what `graph`, at the model's depth, has."""
    graphs = [captured.graphs[count] for count in captured.layers]
    measured = captured.measured
    return LayerExtrapolation(
        layers=captured.layers,
        depth=captured.depth,
        module=captured.deep.module,
        first=captured.pattern.first,
        period=captured.pattern.period,
        copied=captured.depth - captured.layers[-1],
        compute_ns=captured.line([compute_ns(one) for one in graphs]),
        step_ns=captured.line([one.median_step_ns or 0 for one in measured]),
        peak_memory_bytes=captured.line([one.peak_memory_bytes for one in measured]),
        comm_bytes=captured.line([comm_bytes(one) for one in graphs]),
        composed_compute_ns=compute_ns(graph),
        replayed_peak_bytes=replayed_peak_bytes(graph, captured.start_memory_bytes),
        layer_mismatch=captured.plan and _unlike(captured.shallow, captured.deep, captured.plan),
    )


def extrapolated_measurement(
    captured: Captured,
    depths: LayerExtrapolation,
    changes: NonlayerChanges,
    log: MemoryLog | None,
    buckets: BucketSizes,
) -> Measurement:
    """Return the deepest capture's measurement, for a step that was not measured itself.

    Args:
        captured: the captures.
        depths: what they say together.
        changes: what changes outside of the layers.
        log: the allocations and frees of the graph put together.
        buckets: sizes of DDP's.
    """
    peak, notes = _peak(captured, depths, log)
    held = held_at_depth(captured.measured[0], captured.measured[-1], changes.stretch, buckets)
    deepest = captured.measured[-1]
    if log is None and deepest.memory is not None:
        notes.append(
            "memory by class and the allocator's blocks are not told: not all captures tell "
            "theirs, or their layers' allocations come in no order"
        )
    return msgspec.structs.replace(
        deepest,
        step_ns=(),
        timed_step_ns=(),
        host_step_ns=(),
        profiled_host_ns=(),
        profiled_step_ns=0,
        gpu_busy_ns=0,
        start_memory_bytes=captured.start_memory_bytes,
        peak_memory_bytes=peak,
        activation_bytes=_activation_bytes(captured),
        notes=(*deepest.notes, *_notes(captured, depths, changes), *notes),
        depths=depths,
        resident_bytes=held.bytes,
        resident_pools=held.pools,
        memory=log,
    )


def _activation_bytes(captured: Captured) -> tuple[int, ...]:
    """Return what each micro-batch of the whole model adds; nothing where captures lack it."""
    added = [one.activation_bytes for one in captured.measured]
    if len({len(one) for one in added}) > 1:
        return ()
    return tuple(captured.line(list(of)).at_depth for of in zip(*added, strict=True))


def _unlike(shallow: LayeredGraph, deep: LayeredGraph, plan: LayerPlan) -> float | None:
    """Hold the layers of the deepest capture against those of the shallowest, deepened."""
    periods = [
        sum(_layer_ns(deep, layer + ahead) for ahead in range(plan.period))
        for layer in plan.alike[: len(plan.alike) - plan.period + 1]
    ]
    whole = sum(_layer_ns(deep, layer) for layer in range(deep.layers))
    part = sum(_layer_ns(shallow, layer) for layer in range(shallow.layers))
    added = (deep.layers - shallow.layers) / plan.period
    total = compute_ns(deep.graph)
    return abs(part + added * float(np.median(periods)) - whole) / total if total else None


def _layer_ns(one: LayeredGraph, layer: int) -> int:
    return sum(compute_ns(one.graph, walk.blocks[layer]) for walk in one.passes)


def _peak(
    captured: Captured, depths: LayerExtrapolation, log: MemoryLog | None
) -> tuple[int, list[str]]:
    """Return the peak at the model's own depth.

    A peak is the highest of many levels, each linear in the depth, so the line through two
    peaks is a lower bound: at another depth another level may be the highest. The blocks of the
    graph know; they are corrected by what those of the deepest capture miss. Without them the
    replay of its operators does.
    """
    missed = [
        measured.peak_memory_bytes - replayed_peak_bytes(graph, measured.start_memory_bytes)
        for graph in (captured.graphs[count] for count in captured.layers)
        if (measured := graph.job.measurement).peak_memory_bytes
    ]
    fitted = depths.peak_memory_bytes.at_depth
    if len(missed) < len(depths.layers):
        return 0, ["a capture does not tell its peak memory, so the peak is not known"]
    if captured.ends_alone:
        return depths.replayed_peak_bytes + missed[-1], [
            "peak memory: by the replay of the graph's allocations, since the shallowest capture "
            "has none of the layers that are copied, so that the line tells nothing of it"
        ]
    correction = missed[-1] if log is not None else captured.line(missed).at_depth
    replayed = depths.replayed_peak_bytes + correction
    if abs(replayed - fitted) <= PEAK_AGREES * fitted:
        return fitted if log is None else replayed, []
    taken, which = (max(replayed, fitted), "higher") if log is None else (replayed, "latter")
    return taken, [
        f"peak memory: the line through the captures gives {fitted} bytes, the replay of the "
        f"graph's allocations {replayed}: another moment of the step is the highest at "
        f"{depths.depth} layers; the {which} is taken"
    ]


def _notes(captured: Captured, depths: LayerExtrapolation, changes: NonlayerChanges) -> list[str]:
    listed = ", ".join(map(str, depths.layers[:-1])) + f" and {depths.layers[-1]}"
    notes = [
        f"extrapolated to {depths.depth} layers from captures with {listed}: {depths.copied} "
        f"layers of {depths.module} are copies"
    ]
    if len(depths.layers) == 2:
        notes.append(
            "a line through two depths has no residual; what bears it out is that the layers of "
            "both captures are alike"
        )
    notes += [
        f"{what}: the line through the captures falls by {-told.slope:.0f} ns with each layer, so "
        "other work slowed the steps with fewer layers: capture again on an idle machine"
        for what, told in (("step time", depths.step_ns), ("compute", depths.compute_ns))
        if round(told.slope) < 0
    ]
    if ends := captured.unlike:
        notes.append(
            f"layers {', '.join(map(str, ends))} of the {depths.layers[-1]} captured differ from "
            "those between, and stay as captured"
        )
    for counts, what in (
        (changes.unmatched, "operators outside the layers are in one of the captures only"),
        (changes.unruled, "operators outside the layers have operands that follow no line"),
    ):
        if counts:
            notes.append(f"{counts.total()} {what}, and stay as captured: {_most(counts)}")
    return notes


def _most(counts: Counter[str]) -> str:
    shown = ", ".join(f"{count} {name}" for name, count in counts.most_common(4))
    return shown + (", ..." if len(counts) > 4 else "")
