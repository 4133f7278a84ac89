"""Compose the graph of all layers by repeating an inner period of the deepest capture.

The graph of all layers: the deepest capture's, with an inner period of layers repeated.

Forward the copies follow the layers they copy, backward they come before them. In every thread
and stream they are chained to what stands before and after; any other edge keeps its distance in
layers: where layer 3 waits for layer 2, a copy that becomes layer 7 waits for layer 6. Waits for
the launch queue are left out: at another depth it is full elsewhere, and a host that is a whole
queue ahead delays nothing by being further ahead.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.converters.expand.layers.layer_passes import LayeredGraph
from onerank.converters.expand.layers.layer_period import LayerPlan, Renaming
from onerank.converters.expand.layers.memory_timeline import Copies, Copying, composed_log
from onerank.converters.expand.layers.nonlayer_nodes import DepthExtrapolation, NonlayerChanges
from onerank.ir import Edges, Evidence, Graph, Module, Reason, ScopeTime
from onerank.ir.errors import DepthError
from onerank.ir.nodes import TEXT_COLUMNS


def module_table(captured: Iterable[Module], names: Renaming) -> tuple[Module, ...]:
    """Return the modules of all layers, in the order of the layers."""
    before: list[Module] = []
    layers: dict[int, list[Module]] = {}
    after: list[Module] = []
    for module in captured:
        layer = names.layer(module.path)
        if layer is None:
            (after if layers else before).append(module)
            continue
        for _, number in names.instances(layer):
            moved = {part: names.moved(getattr(module, part), number)
                     for part in ("path", "layer", "scope")}  # fmt: skip
            layers.setdefault(number, []).append(msgspec.structs.replace(module, **moved))
    inside = [module for number in sorted(layers) for module in layers[number]]
    return (*before, *inside, *after)


def scope_times(
    shallow: Iterable[ScopeTime],
    deep: Iterable[ScopeTime],
    *,
    whole: AbstractSet[str],
    names: Renaming,
    plan: LayerPlan,
    stretch: DepthExtrapolation,
) -> tuple[ScopeTime, ...]:
    """Return the times of all layers' modules, layer by layer.

    A copy has the median of the captured layers that do the same, and no samples. The scopes
    `whole`, which hold the layers or work on all of them, are on the line through both captures.
    All else is as captured.
    """
    of = {(time.path, time.phase): time for time in deep}
    few = {(time.path, time.phase): time.duration_ns for time in shallow}
    made: list[tuple[int, ScopeTime]] = []
    for (path, phase), time in of.items():
        layer = names.layer(path)
        if layer is None:
            on_line = path in whole and (path, phase) in few
            made.append((-1, _on_line(few[path, phase], time, stretch) if on_line else time))
            continue
        for copy, number in names.instances(layer):
            moved = msgspec.structs.replace(time, path=names.moved(path, number))
            if copy:
                like = [of.get((names.moved(path, at), phase)) for at in plan.like(layer)]
                median = statistics.median(one.duration_ns for one in like if one is not None)
                moved = _not_measured(moved, round(median))
            made.append((number, moved))
    return tuple(time for _, time in sorted(made, key=lambda one: one[0]))


def holding(modules: Iterable[Module], layers: str) -> set[str]:
    """Return the paths of the modules that hold the layers, the model itself among them."""
    return {m.path for m in modules if layers.startswith(f"{m.path}.") or m.path == m.type}


def _on_line(few_ns: int, time: ScopeTime, stretch: DepthExtrapolation) -> ScopeTime:
    return _not_measured(time, stretch.number(few_ns, time.duration_ns))


def _not_measured(time: ScopeTime, duration_ns: int) -> ScopeTime:
    return msgspec.structs.replace(time, duration_ns=duration_ns, spread_ns=0, samples=0)


I64 = npt.NDArray[np.int64]

Instance = tuple[int, int]
"""(node of the deepest capture, 0 for itself or the number of its copy)."""


@dataclass(slots=True)
class Section:
    """Nodes that are copied together.

    Attributes:
        nodes: of the deepest capture.
        copies: how many more there are to be.
        before: whether the copies run before the nodes (backward) or after them.
        span_ns: how long the nodes take in the thread or stream where they take longest.
    """

    nodes: list[int]
    copies: int
    before: bool = False
    span_ns: int = 0


@dataclass(slots=True)
class _Composition:
    deep: LayeredGraph
    plan: LayerPlan
    changes: NonlayerChanges
    sections: list[Section]
    section_of: I64
    lanes: list[tuple[str, list[Instance]]] = field(
        default_factory=list[tuple[str, list[Instance]]]
    )
    number: dict[Instance, int] = field(default_factory=dict[Instance, int])


def compose(
    shallow: LayeredGraph, deep: LayeredGraph, plan: LayerPlan, changes: NonlayerChanges
) -> Graph:
    """Return the graph at the model's own depth; its job is the deepest capture's.

    Of the job only the log of memory is the model's; it has none where a capture has none.

    Raises:
        DepthError: the nodes to be repeated are not together in a thread or stream.
    """
    sections = [*_layers(deep, plan), *(Section(nodes, copies) for nodes, copies in changes.units)]
    sections = [section for section in sections if section.copies]
    section_of = np.full(len(deep.graph), -1, dtype=np.int64)
    for number, section in enumerate(sections):
        section_of[section.nodes] = number
    work = _Composition(deep, plan, changes, sections, section_of)
    for (sort, _), members in deep.lanes.items():
        work.lanes.append((sort, _lane(work, members)))
    instances: list[Instance] = [one for _, lane in work.lanes for one in lane]
    old = np.array([node for node, _ in instances], dtype=np.int64)
    copy = np.array([tag for _, tag in instances], dtype=np.int64)
    duration = _durations(work, old, copy)
    start = _starts(work, old, copy, duration)
    order = np.lexsort((np.arange(len(old)), start))
    for number, place in enumerate(order):
        work.number[instances[int(place)]] = number
    old, copy, start, duration = old[order], copy[order], start[order], duration[order]
    nodes = replace(deep.graph.nodes.take(old), id=np.arange(len(old), dtype=np.uint64))
    graph = replace(deep.graph, nodes=nodes, edges=_edges(work, old, copy))
    graph = graph.with_columns(
        start_ns=start - start.min(),
        duration_ns=duration,
        **_origin(work, old, copy),
        module=_modules(work, old, copy),
    )
    graph = _with_changes(graph, changes, old)
    graph.topological_order()
    copying = [Copying(one.nodes, one.copies, one.before) for one in sections]
    log = composed_log(shallow, deep, plan, changes, Copies(copying, work.number))
    measured = msgspec.structs.replace(graph.job.measurement, memory=log)
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measured))


def _layers(deep: LayeredGraph, plan: LayerPlan) -> Iterator[Section]:
    layers = range(plan.start, plan.start + plan.period)
    for one in deep.passes:
        ordered = layers if one.ascending else reversed(layers)
        nodes = [node for layer in ordered for node in one.blocks[layer]]
        yield Section(nodes, plan.copies, before=not one.ascending)


def _lane(work: _Composition, members: list[int]) -> list[Instance]:
    """Return a lane with the copies in their places; note how long the sections take in it."""
    start, duration = work.deep.graph.nodes.start_ns, work.deep.graph.nodes.duration_ns
    made: list[Instance] = []
    done: set[int] = set()
    position = 0
    for number, run in groupby(members, lambda node: int(work.section_of[node])):
        nodes = list(run)
        position += len(nodes)
        if number < 0:
            made += [(node, 0) for node in nodes]
            continue
        if number in done:
            name = work.deep.graph.node(nodes[0]).name
            raise DepthError(
                f"{name} and what is to be repeated with it do not run one after another: another "
                "thread works on the same stream. Capture the model at its own depth"
            )
        done.add(number)
        section = work.sections[number]
        end = int(start[nodes[-1]] + duration[nodes[-1]])
        if position < len(members):
            end = max(int(start[members[position]]), int(start[nodes[0]]))
        section.span_ns = max(section.span_ns, end - int(start[nodes[0]]))
        tags = range(section.copies + 1)
        made += [(node, tag) for tag in (reversed(tags) if section.before else tags)
                 for node in nodes]  # fmt: skip
    return made


def _durations(work: _Composition, old: I64, copy: I64) -> I64:
    """Return durations: of copied layers the median over the captured layers between others."""
    nodes, plan = work.deep.graph.nodes, work.plan
    known = nodes.duration_ns.copy()
    median = known.copy()
    for one in work.deep.passes:
        for layer in range(plan.start, plan.start + plan.period):
            block = one.blocks[layer]
            like = [one.blocks[other] for other in plan.like(layer)]
            median[block] = np.median(known[np.array(like)], axis=0).round().astype(np.int64)
    for node, columns in work.changes.columns.items():
        known[node] = median[node] = columns.get("duration_ns", known[node])
    return np.where(copy > 0, median[old], known[old])


def _starts(work: _Composition, old: I64, copy: I64, duration: I64) -> I64:
    """Return start times: what follows a copy or grows is put off by as much."""
    asked, nodes = work.deep.asked_ns, work.deep.graph.nodes
    events: list[tuple[int, int]] = []
    for section in work.sections:
        last = max(int(asked[node]) for node in section.nodes)
        first = min(int(asked[node]) for node in section.nodes)
        events.append((first if section.before else last + 1, section.copies * section.span_ns))
    for node, columns in work.changes.columns.items():
        if (more := columns.get("duration_ns", 0) - int(nodes.duration_ns[node])) > 0:
            events.append((int(asked[node]) + 1, more))
    events.sort()
    total = np.concatenate([[0], np.cumsum([amount for _, amount in events], dtype=np.int64)])
    put_off = total[np.searchsorted([at for at, _ in events], asked, side="right")]
    step = np.array(
        [(-1 if section.before else 1) * section.span_ns for section in work.sections] + [0]
    )
    start = nodes.start_ns[old] + put_off[old] + copy * step[work.section_of[old]]
    return _end_to_end(work, start, duration)


def _end_to_end(work: _Composition, start: I64, duration: I64) -> I64:
    """Put off what would begin before its forerunner in a stream (a CPU's thread) has ended."""
    streams = any(sort == "stream" for sort, _ in work.lanes)
    start = start.copy()
    place = 0
    for sort, lane in work.lanes:
        span = slice(place, place := place + len(lane))
        if sort != "thread" or not streams:
            before = np.cumsum(duration[span]) - duration[span]
            start[span] = before + np.maximum.accumulate(start[span] - before)
    return start


def _origin(work: _Composition, old: I64, copy: I64) -> dict[str, npt.NDArray[Any]]:
    """Return evidence, samples and spread: what was not run has no samples."""
    nodes = work.deep.graph.nodes
    timed = [node for node, columns in work.changes.columns.items() if "duration_ns" in columns]
    derived = (copy > 0) | np.isin(old, timed)
    measured = derived & (nodes.evidence[old] == Evidence.MEASURED)
    return {
        "evidence": np.where(measured, np.uint8(Evidence.EXTRAPOLATED), nodes.evidence[old]),
        "samples": np.where(derived, 0, nodes.samples[old]),
        "spread_ns": np.where(derived, 0, nodes.spread_ns[old]),
    }


def _modules(work: _Composition, old: I64, copy: I64) -> list[str]:
    """Return the modules, layers renumbered."""
    names = Renaming(work.deep.module, work.plan)
    modules = work.deep.graph.text("module")
    made: list[str] = []
    for node, tag in zip(map(int, old), map(int, copy), strict=True):
        own, place = names.layer(modules[node]), work.deep.place[node]
        if own is None:
            made.append(modules[node])
            continue
        layer = own if place is None else place[1]
        made.append(names.moved(modules[node], own + work.plan.layer(layer, tag) - layer))
    return made


def _with_changes(graph: Graph, changes: NonlayerChanges, old: I64) -> Graph:
    """Set what changes outside the layers, in the nodes and in the copies of them."""
    where: dict[int, list[int]] = defaultdict(list)
    changed = np.isin(old, list(changes.columns))
    for place in np.flatnonzero(changed).tolist():
        where[int(old[place])].append(place)
    columns = {name for given in changes.columns.values() for name in given} - {"duration_ns"}
    for name in columns:
        values = graph.text(name) if name in TEXT_COLUMNS else getattr(graph.nodes, name).copy()
        for node, given in changes.columns.items():
            for place in where[node] if name in given else ():
                values[place] = given[name]
        graph = graph.with_columns(**{name: values})
    return graph


def _edges(work: _Composition, old: I64, copy: I64) -> Edges:
    """Return all edges: those of the capture, of the copies, and along the lanes."""
    given = work.deep.graph.edges
    along = {(a, b) for members in work.deep.lanes.values() for a, b in pairwise(members)}
    apart = along - {(a, b) for b in range(len(work.deep.graph)) for a, _ in given.of(b)}
    found: dict[tuple[int, int], int] = {}
    order = (Reason.PROGRAM_ORDER, Reason.STREAM_ORDER)
    for target, (node, tag) in enumerate(zip(old.tolist(), copy.tolist(), strict=True)):
        for source, reason in given.of(node):
            if reason != Reason.LAUNCH_QUEUE and not (reason in order and (source, node) in along):
                for waited in _sources(work, source, node, tag):
                    found.setdefault((waited, target), int(reason))
    for sort, lane in work.lanes:
        reason = Reason.PROGRAM_ORDER if sort == "thread" else Reason.STREAM_ORDER
        for a, b in pairwise(lane):
            if a[1] == b[1] == 0 and (a[0], b[0]) in apart:
                continue  # calls that do not wait for each other
            found.setdefault((work.number[a], work.number[b]), int(reason))
    pairs = np.array(list(found), dtype=np.int64).reshape(-1, 2)
    reasons = np.fromiter(found.values(), dtype=np.uint8, count=len(found))
    return Edges.from_pairs(len(old), pairs[:, 0], pairs[:, 1], reasons)


def _sources(work: _Composition, source: int, node: int, tag: int) -> list[int]:
    """Return the nodes that an instance of `node` waits for where `node` waits for `source`."""
    deep, plan = work.deep, work.plan
    mine, other = deep.place[node], deep.place[source]
    itself = work.number[source, 0]
    if mine is None and other is None:
        return [work.number.get((source, tag), itself)]
    if mine is None:  # outside the layers, for what each of them does
        tags = range(plan.copies + 1)
        return [work.number[source, copy] for copy in tags if (source, copy) in work.number]
    if other is None:
        return [itself]
    layer = plan.layer(mine[1], tag) + other[1] - mine[1]
    captured, copied = plan.instance(layer)
    block = deep.passes[other[0]].blocks.get(captured, [])
    if other[2] < len(block) and _same_name(deep, block[other[2]], source):
        return [work.number.get((block[other[2]], copied), itself)]
    return [itself]


def _same_name(deep: LayeredGraph, a: int, b: int) -> bool:
    return bool(deep.graph.nodes.name[a] == deep.graph.nodes.name[b])
