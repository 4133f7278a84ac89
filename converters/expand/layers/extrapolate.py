"""Extrapolate a step from captures with a few layers to all layers of the model.

Step time, memory and bytes are also fitted as lines over the number of layers, and reported.
"""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import msgspec
import numpy as np

from onerank.converters.expand.layers.captured_layers import (
    LayeredGraph,
    LayerPlan,
    Pattern,
    Renaming,
    equal_layers_of,
    find_layers,
    find_pattern,
    first_layer,
    layers_module,
    renumber_layers,
)
from onerank.converters.expand.layers.compose import (
    compose,
    layer_containers,
    module_table,
    scope_times,
)
from onerank.converters.expand.layers.ddp_buckets import (
    BucketCalls,
    find_bucket_calls,
    find_buckets,
    insert_bucket_calls,
)
from onerank.converters.expand.layers.memory_timeline import (
    NO_BUCKETS,
    BucketSizes,
    resident_at_depth,
)
from onerank.converters.expand.layers.nonlayer_nodes import (
    DepthExtrapolation,
    NonlayerChanges,
    match_nonlayer_nodes,
)
from onerank.ir import UNKNOWN, Graph, Kind, LayerExtrapolation, Line, Measurement, MemoryLog
from onerank.ir.errors import DepthError
from onerank.ir.notes import Note
from onerank.ir.steady_state import with_step_time


def line(depths: Sequence[int], values: Sequence[int], depth: int) -> Line:
    """Fit a line by least squares and evaluate it at `depth`."""
    slope, intercept = np.polyfit(depths, values, 1).tolist()
    residual = None
    if len(depths) > 2:
        residual = max(
            abs(intercept + slope * at - value) / value if value else 0.0
            for at, value in zip(depths, values, strict=True)
        )
    return Line(tuple(values), intercept, slope, residual, round(intercept + slope * depth))


def compute_ns(graph: Graph, members: Sequence[int] | None = None) -> int:
    """Return the summed duration of kernels (operators, on a CPU), of all nodes or of `members`."""
    on_gpu = bool(graph.gpu_compute.any())
    mask = graph.gpu_compute if on_gpu else graph.mask(Kind.HOST_OP)
    index = np.flatnonzero(mask) if members is None else np.array(members, dtype=np.int64)
    return int(graph.nodes.duration_ns[index[mask[index]]].sum())


def comm_bytes(graph: Graph) -> int:
    """Return the summed per-rank input of the communication calls whose size is known."""
    sizes = graph.nodes.comm_bytes[graph.communication]
    return int(sizes[sizes != UNKNOWN].sum())


def replayed_peak_bytes(graph: Graph, start_bytes: int) -> int:
    """Return the peak memory of a replay of the graph's allocations and frees.

    Without a memory log, each operator allocates all its bytes before it frees any.

    Args:
        graph: the step.
        start_bytes: allocated memory when the step begins.
    """
    nodes, log = graph.nodes, graph.job.measurement.memory
    if log is not None:
        return start_bytes + log.most_in_use
    # Sums per operator do not say whether a free precedes an allocation: this is an upper bound.
    order = np.argsort(nodes.start_ns, kind="stable")
    allocated, freed = nodes.bytes_allocated[order], nodes.bytes_freed[order]
    before = np.cumsum(allocated - freed) - (allocated - freed)
    return start_bytes + int((before + allocated).max(initial=0))


PEAK_AGREES = 0.005
"""Relative difference up to which the fitted peak and the replayed peak count as equal."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Captures at several depths, with their layers.

    Attributes:
        graphs: number of layers -> capture.
        depth: layers of the model.
        shallow: the capture with the fewest layers.
        deep: the capture with the most layers.
        pattern: how the layers repeat.
        plan: layers to copy; None if the deepest capture is whole and its layers differ.
    """

    graphs: dict[int, Graph]
    depth: int
    shallow: LayeredGraph
    deep: LayeredGraph
    pattern: Pattern
    plan: LayerPlan | None

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each capture, ascending."""
        return tuple(sorted(self.graphs))

    @property
    def differing_layers(self) -> list[int]:
        """Inner layers of the deepest capture that differ from its repeating layers."""
        inner = range(max(self.pattern.first, 1), self.layers[-1] - 1)
        return [
            layer
            for layer in inner
            if self.plan is not None and layer not in self.plan.equal_layers
        ]

    @property
    def lacks_copied_layers(self) -> bool:
        """Whether the shallowest capture has none of the layers that are copied."""
        inner = range(max(self.pattern.first, 1), self.layers[0])
        return bool(inner) and all(layer in self.differing_layers for layer in inner)

    def line(self, values: list[int]) -> Line:
        """Return the line through a value per capture."""
        return line(self.layers, values, self.depth)

    @property
    def measured(self) -> list[Measurement]:
        """The measurement of each capture."""
        return [self.graphs[count].job.measurement for count in self.layers]

    @property
    def start_memory_bytes(self) -> int:
        """Memory allocated when a step of the whole model begins."""
        return self.line([measurement.start_memory_bytes for measurement in self.measured]).at_depth


def fit_depths(captured: Captured, graph: Graph) -> LayerExtrapolation:
    """Return the lines through the captures, and the figures of the composed `graph`."""
    graphs = [captured.graphs[count] for count in captured.layers]
    measured = captured.measured
    return LayerExtrapolation(
        layers=captured.layers,
        depth=captured.depth,
        module=captured.deep.module,
        first=captured.pattern.first,
        period=captured.pattern.period,
        copied=captured.depth - captured.layers[-1],
        compute_ns=captured.line([compute_ns(graph) for graph in graphs]),
        step_ns=captured.line([step.median_step_ns or 0 for step in measured]),
        peak_memory_bytes=captured.line([step.peak_memory_bytes for step in measured]),
        comm_bytes=captured.line([comm_bytes(graph) for graph in graphs]),
        composed_compute_ns=compute_ns(graph),
        replayed_peak_bytes=replayed_peak_bytes(graph, captured.start_memory_bytes),
        layer_mismatch=_layer_mismatch(captured.shallow, captured.deep, captured.plan)
        if captured.plan
        else None,
    )


def extrapolated_measurement(
    captured: Captured,
    depths: LayerExtrapolation,
    changes: NonlayerChanges,
    log: MemoryLog | None,
    buckets: BucketSizes,
) -> Measurement:
    """Return the deepest capture's measurement, adapted to the extrapolated step.

    Args:
        captured: the captures.
        depths: the lines through them.
        changes: changes outside the layers.
        log: allocations and frees of the composed graph.
        buckets: sizes of DDP's gradient buckets.
    """
    peak, notes = _peak(captured, depths, log)
    resident = resident_at_depth(
        captured.measured[0], captured.measured[-1], changes.extrapolation, buckets
    )
    deepest = captured.measured[-1]
    if log is None and deepest.memory is not None:
        notes.append(
            Note(
                "memory by class and allocator blocks are unknown: a capture records none, or the "
                "allocations of its layers overlap",
                code="extrapolated-blocks-unknown",
            )
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
        resident_bytes=resident.bytes,
        resident_pools=resident.pools,
        memory=log,
    )


def _activation_bytes(captured: Captured) -> tuple[int, ...]:
    """Return the activation bytes of each micro-batch of the whole model, () if unknown."""
    by_capture = [measurement.activation_bytes for measurement in captured.measured]
    if len({len(sizes) for sizes in by_capture}) > 1:
        return ()
    return tuple(captured.line(list(sizes)).at_depth for sizes in zip(*by_capture, strict=True))


def _layer_mismatch(shallow: LayeredGraph, deep: LayeredGraph, plan: LayerPlan) -> float | None:
    """Return the relative difference of layer compute from the deepened shallowest capture."""
    periods = [
        sum(_layer_ns(deep, layer + ahead) for ahead in range(plan.period))
        for layer in plan.equal_layers[: len(plan.equal_layers) - plan.period + 1]
    ]
    whole = sum(_layer_ns(deep, layer) for layer in range(deep.layers))
    part = sum(_layer_ns(shallow, layer) for layer in range(shallow.layers))
    added = (deep.layers - shallow.layers) / plan.period
    total = compute_ns(deep.graph)
    return abs(part + added * float(np.median(periods)) - whole) / total if total else None


def _layer_ns(capture: LayeredGraph, layer: int) -> int:
    return sum(compute_ns(capture.graph, layer_pass.blocks[layer]) for layer_pass in capture.passes)


def _peak(
    captured: Captured, depths: LayerExtrapolation, log: MemoryLog | None
) -> tuple[int, list[Note]]:
    """Return the peak memory of the whole model, and notes on it.

    With a memory log, the peak is the replay of the composed graph plus the error of the replay of
    the deepest capture. Without one, it is the higher of that replay and the line through the
    captured peaks.
    """
    # A peak is the highest of many levels, each linear in the depth. The line through two peaks is
    # therefore a lower bound: at another depth another moment of the step may be the highest. With
    # activation checkpoints it was 5% low for 8 layers.
    replay_errors = [
        measured.peak_memory_bytes - replayed_peak_bytes(graph, measured.start_memory_bytes)
        for graph in (captured.graphs[count] for count in captured.layers)
        if (measured := graph.job.measurement).peak_memory_bytes
    ]
    fitted = depths.peak_memory_bytes.at_depth
    if len(replay_errors) < len(depths.layers):
        return 0, [
            Note(
                "a capture records no peak memory, so the peak is unknown",
                code="extrapolated-peak-unknown",
            )
        ]
    if captured.lacks_copied_layers:
        return depths.replayed_peak_bytes + replay_errors[-1], [
            Note(
                "peak memory: from the replay of the graph's allocations; the line does not apply, "
                "since the shallowest capture has none of the copied layers",
                code="extrapolated-peak-by-replay",
            )
        ]
    correction = replay_errors[-1] if log is not None else captured.line(replay_errors).at_depth
    replayed = depths.replayed_peak_bytes + correction
    if abs(replayed - fitted) <= PEAK_AGREES * fitted:
        return fitted if log is None else replayed, []
    peak, which = (max(replayed, fitted), "higher") if log is None else (replayed, "latter")
    return peak, [
        Note(
            f"peak memory: the line through the captures gives {fitted} bytes, the replay of the "
            f"graph's allocations {replayed}: another moment of the step is the highest at "
            f"{depths.depth} layers; the {which} is used",
            code="extrapolated-peaks-differ",
        )
    ]


def _notes(captured: Captured, depths: LayerExtrapolation, changes: NonlayerChanges) -> list[Note]:
    listed = ", ".join(map(str, depths.layers[:-1])) + f" and {depths.layers[-1]}"
    pipeline = captured.deep.graph.job.pipeline
    stage = "" if pipeline is None else f"stage {pipeline.stage} "
    copies = "layer of {} is a copy" if depths.copied == 1 else "layers of {} are copies"
    notes = [
        Note(
            f"{stage}extrapolated to {depths.depth} layers from captures with {listed}: "
            f"{depths.copied} {copies.format(depths.module)}",
            code="layers-extrapolated",
        )
    ]
    if len(depths.layers) == 2:
        notes.append(
            Note(
                "a line through two depths has no residual; it is confirmed by equal layers in "
                "both captures",
                code="extrapolated-from-two-depths",
            )
        )
    notes += [
        Note(
            f"{what}: the line through the captures falls by {-fitted.slope:.0f} ns with each "
            "layer, so other work slowed the steps with fewer layers: capture again on an idle "
            "machine",
            code="extrapolated-time-falls",
        )
        for what, fitted in (("step time", depths.step_ns), ("compute", depths.compute_ns))
        # Other work on the machine gave -14 ms per layer once; the line would hide it.
        if round(fitted.slope) < 0
    ]
    if differing := captured.differing_layers:
        notes.append(
            Note(
                f"layers {', '.join(map(str, differing))} of the {depths.layers[-1]} captured "
                "differ from the others, and stay as captured",
                code="extrapolated-layers-differ",
            )
        )
    for counts, what, code in (
        (changes.unmatched, "are in only one of the captures", "extrapolated-operators-unmatched"),
        (changes.unruled, "have operands that follow no line", "extrapolated-operands-unruled"),
    ):
        if counts:
            text = f"{counts.total()} operators outside the layers {what}, and stay as captured: "
            notes.append(Note(text + _most(counts), code=code))
    return notes


def _most(counts: Counter[str]) -> str:
    shown = ", ".join(f"{count} {name}" for name, count in counts.most_common(4))
    return shown + (", ..." if len(counts) > 4 else "")


def extrapolate(graphs: Mapping[int, Graph], depth: int, pattern: Pattern | None = None) -> Graph:
    """Return the graph of a model of `depth` layers from captures of it with fewer.

    Repeats an inner period of layers of the deepest capture. A copy has the median duration of its
    equivalent captured layers. Work outside the layers that grows with depth (optimizer, clipping)
    follows the line through the shallowest and the deepest capture. If the deepest capture has all
    layers, its graph is returned and only the fitted lines are added.

    Captures of a pipeline stage give the graph of the stage at its own depth. Its layers keep their
    numbers in the whole model.

    Args:
        graphs: number of layers -> capture; at least two.
        depth: layers of the model, or of its stage.
        pattern: how its layers repeat; None finds it from equal sequences of nodes.

    Raises:
        DepthError: the captures do not suffice, or their layers differ.
    """
    return DepthCaptures(graphs, pattern).graph(depth)


class DepthCaptures:
    """Captures of a model with few layers, to extrapolate to several depths.

    Layers are found once for all depths.
    """

    def __init__(self, graphs: Mapping[int, Graph], pattern: Pattern | None = None) -> None:
        """Take captures, as `extrapolate` does."""
        self._given = dict(graphs)
        self._pattern = pattern
        self._equal: dict[Pattern, range] = {}

    def graph(self, depth: int) -> Graph:
        """Return the graph at a depth; errors are those of `extrapolate`."""
        return self._renumbered(depth, linked=True)

    def measurement(self, depth: int) -> Measurement:
        """Return the measurement of the graph at a depth, in a third of the time."""
        return self._renumbered(depth, linked=False).job.measurement

    def _renumbered(self, depth: int, *, linked: bool) -> Graph:
        layers = self._layers
        if len(layers) < 2 or layers[0] < 1 or layers[-1] > depth:
            raise DepthError(
                f"captures at {', '.join(map(str, layers))} layers of a model of {depth}: expected "
                f"at least two depths from 1 to {depth}",
                code="depth-too-few-captures",
            )
        return renumber_layers(self._extrapolated(depth, linked=linked), self._module, self._first)

    def _extrapolated(self, depth: int, *, linked: bool) -> Graph:
        """Return the graph at a depth, its layers numbered from 0."""
        layers, graphs, calls = self._layers, self._graphs, self._bucket_calls
        whole = layers[-1] == depth
        deep = self._deep
        pattern = self._pattern
        if pattern is None:
            pattern = Pattern(0, 1) if whole else self._found_pattern
        check_depths(layers, depth, pattern)
        shallow = self._shallow
        plan = None
        # The fitted lines of a whole capture need no equal layers, so layers that differ are no
        # error.
        with contextlib.suppress(*(DepthError,) if whole else ()):
            plan = LayerPlan.of(pattern.period, self._equal_layers(pattern), layers[-1], depth)
        captured = Captured(graphs, depth, shallow, deep, pattern, plan)
        job = deep.graph.job
        if plan is None or whole:
            graph = graphs[layers[-1]]
            measured = msgspec.structs.replace(job.measurement, depths=fit_depths(captured, graph))
            return replace(graph, job=msgspec.structs.replace(job, measurement=measured))
        extrapolation = DepthExtrapolation((layers[-1] - layers[0]) // pattern.period, plan.copies)
        changes = match_nonlayer_nodes(shallow, deep, extrapolation, plan.equal_layers)
        # Where bucket calls are inserted depends on edges.
        linked = linked or all(calls.values())
        graph = compose(shallow, deep, plan, changes, linked=linked)
        buckets, first, last = NO_BUCKETS, calls[layers[0]], calls[layers[-1]]
        if first is not None and last is not None and all(calls.values()):
            graph = insert_bucket_calls(graph, last)
            inserted = find_buckets(graph)
            buckets = BucketSizes(first.bytes, last.bytes, inserted.bytes if inserted else [])
        depths = fit_depths(captured, graph)
        _check_communication(captured, depths, graph)
        names = Renaming(self._module, plan)
        log = graph.job.measurement.memory
        measured = msgspec.structs.replace(
            extrapolated_measurement(captured, depths, changes, log, buckets),
            scopes=scope_times(
                shallow.graph.job.measurement.scopes,
                job.measurement.scopes,
                whole=layer_containers(job.modules, self._module) | {"optimizer"},
                names=names,
                plan=plan,
                extrapolation=extrapolation,
            ),
        )
        job = msgspec.structs.replace(
            job, measurement=measured, modules=module_table(job.modules, names)
        )
        graph = replace(graph, job=job)
        # Captures that timed no step have a line of zeros.
        step_ns = depths.step_ns.at_depth
        return with_step_time(graph, step_ns) if step_ns > 0 else graph

    # What does not depend on the depth -----------------------------------------------------------

    @cached_property
    def _layers(self) -> list[int]:
        return sorted(self._given)

    @cached_property
    def _first(self) -> int:
        return first_layer(self._given[self._layers[-1]].job)

    @cached_property
    def _module(self) -> str:
        return layers_module(self._given, self._first)

    @cached_property
    def _graphs(self) -> dict[int, Graph]:
        """The captures, with layers numbered from 0."""
        return {count: renumber_layers(graph, self._module, -self._first)
                for count, graph in self._given.items()}  # fmt: skip

    @cached_property
    def _bucket_calls(self) -> dict[int, BucketCalls | None]:
        # Buckets fill up to a size, not to a layer. Composed with the buckets of few layers, a DDP
        # step has wrong calls.
        return {count: find_bucket_calls(graph) for count, graph in self._graphs.items()}

    def _repeating(self, count: int) -> Graph:
        """Return a capture without calls that span layers."""
        calls = self._bucket_calls[count]
        # Gradient buckets span layers, so their calls are removed here and inserted again later.
        every = all(self._bucket_calls.values())
        return self._graphs[count] if calls is None or not every else calls.without()

    @cached_property
    def _deep(self) -> LayeredGraph:
        return find_layers(self._repeating(self._layers[-1]), self._module, self._layers[-1])

    @cached_property
    def _shallow(self) -> LayeredGraph:
        return find_layers(self._repeating(self._layers[0]), self._module, self._layers[0])

    @cached_property
    def _found_pattern(self) -> Pattern:
        return find_pattern(self._deep)

    def _equal_layers(self, pattern: Pattern) -> range:
        if pattern not in self._equal:
            self._equal[pattern] = equal_layers_of(self._deep, pattern)
        return self._equal[pattern]


def _check_communication(captured: Captured, depths: LayerExtrapolation, graph: Graph) -> None:
    """Check that the composed calls send the bytes on the line through both captures."""
    # A call that spans layers, such as ZeRO's reduce-scatter of a flat buffer, does not repeat with
    # a layer. Only the total shows that. Rounding may change it by a byte per call.
    layers, sizes = depths.layers, depths.comm_bytes.values
    added = Fraction(sizes[-1] - sizes[0], layers[-1] - layers[0]) * (depths.depth - layers[-1])
    composed, expected = comm_bytes(graph), sizes[-1] + round(added)
    if captured.lacks_copied_layers or abs(composed - expected) <= int(graph.communication.sum()):
        return
    raise DepthError(
        f"the captures with {layers[0]} and {layers[-1]} layers communicate {sizes[0]} and "
        f"{sizes[-1]} bytes, which makes {expected} at {depths.depth} layers, but repeated layers "
        f"make {composed}: some calls span layers, as gradient buckets do\n"
        "  capture the whole model",
        code="depth-calls-span-layers",
    )


def check_depths(layers: list[int], depth: int, pattern: Pattern, model: str = "the model") -> None:
    """Check that captures at these depths suffice for a model of `depth` layers.

    Args:
        layers: the captured depths, ascending.
        depth: layers of the model, or of its pipeline stage.
        pattern: how its layers repeat.
        model: what has these layers, for the message.

    Raises:
        DepthError: they do not; the message names depths that would.
    """
    first, period = pattern.first, pattern.period
    unfit = [count for count in layers if not pattern.fits(count, depth)]
    if not unfit and (layers[-1] >= pattern.deepest or layers[-1] == depth):
        return
    repeating = f"the first {first} are unique and the others" if first else "they"
    fit = [count for count in range(1, depth + 1) if pattern.fits(count, depth)]
    least = next((count for count in fit if count >= pattern.deepest), depth)
    lower = max((count for count in fit if count < least), default=least)
    why = (
        f"{unfit[0]} contains no whole period, or does not differ from {depth} by whole periods"
        if unfit
        else f"{layers[-1]} is too few for a whole period with layers on both sides"
    )
    repeats = "are equal" if period == 1 else f"repeat every {period}"
    raise DepthError(
        f"--capture-layers {','.join(map(str, layers))}: of the {depth} layers of {model} "
        f"{repeating} {repeats}, and {why}; the deepest must have at least {pattern.deepest}\n  "
        + (
            f"try --capture-layers {lower},{least}"
            if lower < least
            else "leave --capture-layers out"
        ),
        code="depth-capture-layers",
    )
