"""Extrapolate a step to the model's own depth, with the residuals of the captured depths."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import msgspec

from onerank.converters.expand.layers.compose import compose, holding, module_table, scope_times
from onerank.converters.expand.layers.ddp_buckets import find_buckets, find_calls, with_calls
from onerank.converters.expand.layers.fit_report import (
    Captured,
    comm_bytes,
    extrapolated_measurement,
    fit_depths,
)
from onerank.converters.expand.layers.layer_passes import find_layers, layers_module
from onerank.converters.expand.layers.layer_period import (
    LayerPlan,
    Pattern,
    Renaming,
    alike_layers,
    find_pattern,
)
from onerank.converters.expand.layers.memory_timeline import NO_BUCKETS, BucketSizes
from onerank.converters.expand.layers.nonlayer_nodes import DepthExtrapolation, match_nonlayer_nodes
from onerank.ir import Graph, LayerExtrapolation
from onerank.ir.errors import DepthError
from onerank.ir.replay.steady_state import with_step_time


def extrapolate(graphs: Mapping[int, Graph], depth: int, pattern: Pattern | None = None) -> Graph:
    """Return the graph of a model of `depth` layers from captures of it with fewer.

    The deepest capture's graph with an inner period of its layers repeated. Copies have the
    median duration of the captured layers that do the same; what grows outside of the layers
    (optimizer, clipping) follows the line through the shallowest and the deepest capture. Where
    the deepest has all layers, it is returned with the lines alone.

    Args:
        graphs: layers built -> capture; at least two.
        depth: layers of the model.
        pattern: how its layers repeat; found from equal sequences of nodes if None.

    Raises:
        DepthError: the captures do not suffice, or their layers are unlike.
    """
    layers = sorted(graphs)
    if len(layers) < 2 or layers[0] < 1 or layers[-1] > depth:
        raise DepthError(
            f"captures at {', '.join(map(str, layers))} layers of a model of {depth}: expected at "
            f"least two depths from 1 to {depth}"
        )
    whole = layers[-1] == depth
    module = layers_module(dict(graphs))
    calls = {count: find_calls(graph) for count, graph in graphs.items()}
    given, last = dict(graphs), calls[layers[-1]]
    if all(calls.values()):  # of what does not repeat with the layers
        given = {count: one.without() for count, one in calls.items() if one is not None}
    deep = find_layers(given[layers[-1]], module, layers[-1])
    if pattern is None:
        pattern = Pattern(0, 1) if whole else find_pattern(deep)
    check_depths(layers, depth, pattern)
    shallow = find_layers(given[layers[0]], module, layers[0])
    plan = None
    with contextlib.suppress(*(DepthError,) if whole else ()):  # lines alone need no like layers
        plan = LayerPlan.of(pattern.period, alike_layers(deep, pattern), layers[-1], depth)
    captured = Captured(dict(graphs), depth, shallow, deep, pattern, plan)
    job = deep.graph.job
    if plan is None or whole:
        graph = graphs[layers[-1]]
        measured = msgspec.structs.replace(job.measurement, depths=fit_depths(captured, graph))
        return replace(graph, job=msgspec.structs.replace(job, measurement=measured))
    stretch = DepthExtrapolation((layers[-1] - layers[0]) // pattern.period, plan.copies)
    changes = match_nonlayer_nodes(shallow, deep, stretch, plan.alike)
    graph = compose(shallow, deep, plan, changes)
    buckets, first = NO_BUCKETS, calls[layers[0]]
    if first is not None and last is not None and all(calls.values()):
        graph = with_calls(graph, last)
        made = find_buckets(graph)
        buckets = BucketSizes(first.bytes, last.bytes, made.bytes if made else [])
    depths = fit_depths(captured, graph)
    _check_communication(captured, depths, graph)
    names = Renaming(module, plan)
    measured = msgspec.structs.replace(
        extrapolated_measurement(captured, depths, changes, graph.job.measurement.memory, buckets),
        scopes=scope_times(
            shallow.graph.job.measurement.scopes,
            job.measurement.scopes,
            whole=holding(job.modules, module) | {"optimizer"},
            names=names,
            plan=plan,
            stretch=stretch,
        ),
    )
    job = msgspec.structs.replace(
        job, measurement=measured, modules=module_table(job.modules, names)
    )
    graph = replace(graph, job=job)
    return with_step_time(graph, depths.step_ns.at_depth) if depths.step_ns.at_depth > 0 else graph


def _check_communication(captured: Captured, depths: LayerExtrapolation, graph: Graph) -> None:
    """Check that the calls composed add up to what the first and last capture's do on a line."""
    layers, sizes = depths.layers, depths.comm_bytes.values
    added = Fraction(sizes[-1] - sizes[0], layers[-1] - layers[0]) * (depths.depth - layers[-1])
    found, expected = comm_bytes(graph), sizes[-1] + round(added)
    if captured.ends_alone or abs(found - expected) <= int(graph.communication.sum()):
        return
    raise DepthError(
        f"the captures with {layers[0]} and {layers[-1]} layers communicate {sizes[0]} and "
        f"{sizes[-1]} bytes, which makes {expected} at {depths.depth} layers; the calls of the "
        f"layers, repeated, make {found}: some span layers (buckets of gradients, say), so that "
        "they are others at another depth. Capture the model whole"
    )


def check_depths(layers: list[int], depth: int, pattern: Pattern) -> None:
    """Check that captures at these depths suffice for a model of `depth` layers.

    Raises:
        DepthError: they do not; the message names depths that would.
    """
    first, period = pattern.first, pattern.period
    unfit = [count for count in layers if not pattern.fits(count, depth)]
    if not unfit and (layers[-1] >= pattern.deepest or layers[-1] == depth):
        return
    alone = f"the first {first} stand alone and the others" if first else "they"
    fit = [count for count in range(1, depth + 1) if pattern.fits(count, depth)]
    least = next((count for count in fit if count >= pattern.deepest), depth)
    lower = max((count for count in fit if count < least), default=least)
    why = (
        f"{unfit[0]} holds no whole period, or does not differ from {depth} by whole periods"
        if unfit
        else f"{layers[-1]} is too few for a whole period between other layers"
    )
    repeats = "do the same" if period == 1 else f"repeat every {period}"
    raise DepthError(
        f"--capture-layers {','.join(map(str, layers))}: of the model's {depth} layers {alone} "
        f"{repeats}, "
        f"and {why}; the deepest must have at least {pattern.deepest}: "
        + (
            f"try --capture-layers {lower},{least}"
            if lower < least
            else "leave --capture-layers out"
        )
    )
