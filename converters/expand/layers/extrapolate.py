"""Extrapolate a step from captures with a few layers to all layers of the model."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import msgspec

from onerank.converters.expand.layers.compose import (
    compose,
    layer_containers,
    module_table,
    scope_times,
)
from onerank.converters.expand.layers.ddp_buckets import (
    find_bucket_calls,
    find_buckets,
    insert_bucket_calls,
)
from onerank.converters.expand.layers.fit_report import (
    Captured,
    comm_bytes,
    extrapolated_measurement,
    fit_depths,
)
from onerank.converters.expand.layers.layer_passes import (
    find_layers,
    first_layer,
    layers_module,
    renumber_layers,
)
from onerank.converters.expand.layers.layer_period import (
    LayerPlan,
    Pattern,
    Renaming,
    equal_layers_of,
    find_pattern,
)
from onerank.converters.expand.layers.memory_timeline import NO_BUCKETS, BucketSizes
from onerank.converters.expand.layers.nonlayer_nodes import DepthExtrapolation, match_nonlayer_nodes
from onerank.ir import Graph, LayerExtrapolation
from onerank.ir.errors import DepthError
from onerank.ir.replay.steady_state import with_step_time


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
    layers = sorted(graphs)
    if len(layers) < 2 or layers[0] < 1 or layers[-1] > depth:
        raise DepthError(
            f"captures at {', '.join(map(str, layers))} layers of a model of {depth}: expected at "
            f"least two depths from 1 to {depth}",
            code="depth-too-few-captures",
        )
    first = first_layer(graphs[layers[-1]].job)
    module = layers_module(dict(graphs), first)
    from_zero = {count: renumber_layers(graph, module, -first) for count, graph in graphs.items()}
    return renumber_layers(_extrapolate(from_zero, module, depth, pattern), module, first)


def _extrapolate(
    graphs: Mapping[int, Graph], module: str, depth: int, pattern: Pattern | None
) -> Graph:
    """Return the graph at `depth` from captures whose layers are numbered from 0."""
    layers = sorted(graphs)
    whole = layers[-1] == depth
    calls = {count: find_bucket_calls(graph) for count, graph in graphs.items()}
    repeating, last = dict(graphs), calls[layers[-1]]
    # Gradient buckets span layers, so their calls are removed here and inserted again below.
    if all(calls.values()):
        repeating = {
            count: bucket_calls.without()
            for count, bucket_calls in calls.items()
            if bucket_calls is not None
        }
    deep = find_layers(repeating[layers[-1]], module, layers[-1])
    if pattern is None:
        pattern = Pattern(0, 1) if whole else find_pattern(deep)
    check_depths(layers, depth, pattern)
    shallow = find_layers(repeating[layers[0]], module, layers[0])
    plan = None
    # The fitted lines of a whole capture need no equal layers, so layers that differ are no error.
    with contextlib.suppress(*(DepthError,) if whole else ()):
        plan = LayerPlan.of(pattern.period, equal_layers_of(deep, pattern), layers[-1], depth)
    captured = Captured(dict(graphs), depth, shallow, deep, pattern, plan)
    job = deep.graph.job
    if plan is None or whole:
        graph = graphs[layers[-1]]
        measured = msgspec.structs.replace(job.measurement, depths=fit_depths(captured, graph))
        return replace(graph, job=msgspec.structs.replace(job, measurement=measured))
    extrapolation = DepthExtrapolation((layers[-1] - layers[0]) // pattern.period, plan.copies)
    changes = match_nonlayer_nodes(shallow, deep, extrapolation, plan.equal_layers)
    graph = compose(shallow, deep, plan, changes)
    buckets, first = NO_BUCKETS, calls[layers[0]]
    if first is not None and last is not None and all(calls.values()):
        graph = insert_bucket_calls(graph, last)
        inserted = find_buckets(graph)
        buckets = BucketSizes(first.bytes, last.bytes, inserted.bytes if inserted else [])
    depths = fit_depths(captured, graph)
    _check_communication(captured, depths, graph)
    names = Renaming(module, plan)
    measured = msgspec.structs.replace(
        extrapolated_measurement(captured, depths, changes, graph.job.measurement.memory, buckets),
        scopes=scope_times(
            shallow.graph.job.measurement.scopes,
            job.measurement.scopes,
            whole=layer_containers(job.modules, module) | {"optimizer"},
            names=names,
            plan=plan,
            extrapolation=extrapolation,
        ),
    )
    job = msgspec.structs.replace(
        job, measurement=measured, modules=module_table(job.modules, names)
    )
    graph = replace(graph, job=job)
    return with_step_time(graph, depths.step_ns.at_depth) if depths.step_ns.at_depth > 0 else graph


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
