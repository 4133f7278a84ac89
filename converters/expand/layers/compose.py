"""Compose the graph of all layers by repeating an inner period of the deepest capture.

In a forward pass the copies follow the layers that they copy, in a backward pass they precede
them. Each thread and stream chains the copies to its nodes before and after them. Every other edge
keeps its distance in layers: if layer 3 waits for layer 2, a copy that becomes layer 7 waits for
layer 6.
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

from onerank.converters.expand.layers.captured_layers import LayeredGraph, LayerPlan, Renaming
from onerank.converters.expand.layers.memory_timeline import Copies, Copying, compose_memory_log
from onerank.converters.expand.layers.nonlayer_nodes import DepthExtrapolation, NonlayerChanges
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Module, Reason, ScopeTime
from onerank.ir.arrays import I64
from onerank.ir.errors import DepthError
from onerank.ir.nodes import TEXT_COLUMNS


def module_table(captured: Iterable[Module], names: Renaming) -> tuple[Module, ...]:
    """Return the modules of the whole model, in the order of the layers."""
    before: list[Module] = []
    layers: dict[int, list[Module]] = {}
    after: list[Module] = []
    for module in captured:
        layer = names.layer(module.path)
        if layer is None:
            (after if layers else before).append(module)
            continue
        for _, number in names.instances(layer):
            paths = {name: names.moved(getattr(module, name), number)
                     for name in ("path", "layer", "scope")}  # fmt: skip
            layers.setdefault(number, []).append(msgspec.structs.replace(module, **paths))
    inside = [module for number in sorted(layers) for module in layers[number]]
    return (*before, *inside, *after)


def scope_times(
    shallow: Iterable[ScopeTime],
    deep: Iterable[ScopeTime],
    *,
    whole: AbstractSet[str],
    names: Renaming,
    plan: LayerPlan,
    extrapolation: DepthExtrapolation,
) -> tuple[ScopeTime, ...]:
    """Return the times of the modules of all layers, layer by layer.

    A copy has the median of its equivalent captured layers, and no samples. The scopes `whole`,
    which contain the layers or work on all of them, are extrapolated along the line through both
    captures. All others keep their captured times.
    """
    deep_times = {(time.path, time.phase): time for time in deep}
    shallow_ns = {(time.path, time.phase): time.duration_ns for time in shallow}
    times: list[tuple[int, ScopeTime]] = []
    for (path, phase), time in deep_times.items():
        layer = names.layer(path)
        if layer is None:
            if path in whole and (path, phase) in shallow_ns:
                duration = extrapolation.value(shallow_ns[path, phase], time.duration_ns)
                times.append((-1, _not_measured(time, duration)))
            else:
                times.append((-1, time))
            continue
        for copy, number in names.instances(layer):
            moved = msgspec.structs.replace(time, path=names.moved(path, number))
            if copy:
                paths = (names.moved(path, at) for at in plan.equivalents(layer))
                measured = [deep_times.get((equivalent, phase)) for equivalent in paths]
                median = statistics.median(known.duration_ns for known in measured if known)
                moved = _not_measured(moved, round(median))
            times.append((number, moved))
    return tuple(time for _, time in sorted(times, key=lambda item: item[0]))


def layer_containers(modules: Iterable[Module], layers: str) -> set[str]:
    """Return the paths of the modules that contain the layers, including the model itself."""
    return {m.path for m in modules if layers.startswith(f"{m.path}.") or m.path == m.type}


def _not_measured(time: ScopeTime, duration_ns: int) -> ScopeTime:
    return msgspec.structs.replace(time, duration_ns=duration_ns, spread_ns=0, samples=0)


Instance = tuple[int, int]
"""(node of the deepest capture, 0 for itself or the number of its copy)."""


@dataclass(slots=True)
class Section:
    """Nodes that are copied together.

    Attributes:
        nodes: nodes of the deepest capture.
        copies: number of copies to add.
        before: whether the copies run before the nodes (backward) or after them.
        span_ns: duration of the nodes in the lane where they take longest.
    """

    nodes: list[int]
    copies: int
    before: bool = False
    span_ns: int = 0


@dataclass(slots=True)
class _Composition:
    """The state of a composition.

    Attributes:
        deep: the deepest capture.
        plan: layers to copy.
        changes: changes outside the layers.
        sections: nodes that are copied together.
        section_of: index of the section of each node of `deep`, -1 for none, int64[n].
        lanes: kind and instances of each lane, in order.
        number: instance -> its index in the composed graph.
    """

    deep: LayeredGraph
    plan: LayerPlan
    changes: NonlayerChanges
    sections: list[Section]
    section_of: I64
    lanes: list[tuple[str, list[Instance]]] = field(
        default_factory=list[tuple[str, list[Instance]]]
    )
    number: dict[Instance, int] = field(default_factory=dict[Instance, int])


def _composition(deep: LayeredGraph, plan: LayerPlan, changes: NonlayerChanges) -> _Composition:
    """Return the sections of the deepest capture that are copied, and the lanes with the copies."""
    sections = [
        *_layer_sections(deep, plan),
        *(Section(nodes, copies) for nodes, copies in changes.units),
    ]
    sections = [section for section in sections if section.copies]
    section_of = np.full(len(deep.graph), -1, dtype=np.int64)
    for number, section in enumerate(sections):
        section_of[section.nodes] = number
    work = _Composition(deep, plan, changes, sections, section_of)
    for (kind, _), members in deep.lanes.items():
        work.lanes.append((kind, _lane_with_copies(work, members)))
    return work


def compose(
    shallow: LayeredGraph,
    deep: LayeredGraph,
    plan: LayerPlan,
    changes: NonlayerChanges,
    *,
    linked: bool = True,
) -> Graph:
    """Return the graph at the depth of the model.

    Its job is the deepest capture's except for the memory log, which is extrapolated, or absent if
    a capture has none.

    Args:
        shallow: the capture with the fewest layers.
        deep: the capture with the most layers.
        plan: layers of `deep` that are copied.
        changes: changes outside the layers.
        linked: whether the graph gets edges and the modules of its layers, which take a third of
            the time; memory needs neither.

    Raises:
        DepthError: the nodes to repeat are not consecutive in a thread or stream.
    """
    work = _composition(deep, plan, changes)
    old, copy, start, duration = _instances_by_start(work)
    # Only edges read these numbers.
    if linked:
        instances = zip(old.tolist(), copy.tolist(), strict=True)
        work.number.update((instance, number) for number, instance in enumerate(instances))
    nodes = replace(deep.graph.nodes.take(old), id=np.arange(len(old), dtype=np.uint64))
    no_edges = np.zeros(0, dtype=np.int64)
    edges = (
        _edges(work, old, copy)
        if linked
        else Edges.from_pairs(len(old), no_edges, no_edges, no_edges.astype(np.uint8))
    )
    graph = replace(deep.graph, nodes=nodes, edges=edges)
    graph = graph.with_columns(
        start_ns=start - start.min(),
        duration_ns=duration,
        **_origin(work, old, copy),
        **({"module": _modules(work, old, copy)} if linked else {}),
    )
    graph = _with_changes(graph, changes, old)
    graph.topological_order()  # raises if the spliced edges have a cycle
    copying = [Copying(part.nodes, part.copies, part.before) for part in work.sections]
    number = np.full((len(deep.graph), 1 + int(copy.max(initial=0))), UNKNOWN, dtype=np.int64)
    number[old, copy] = np.arange(len(old))
    log = compose_memory_log(shallow, deep, plan, changes, Copies(copying, number))
    measured = msgspec.structs.replace(graph.job.measurement, memory=log)
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measured))


def _instances_by_start(work: _Composition) -> tuple[I64, I64, I64, I64]:
    """Return node, copy, start and duration of each instance, by start, int64[m] each."""
    instances: list[Instance] = [instance for _, lane in work.lanes for instance in lane]
    old = np.array([node for node, _ in instances], dtype=np.int64)
    copy = np.array([tag for _, tag in instances], dtype=np.int64)
    duration = _durations(work, old, copy)
    start = _starts(work, old, copy, duration)
    # Ties keep the order of the lanes, so that a node never precedes one that it follows on its
    # lane.
    order = np.lexsort((np.arange(len(old)), start))
    return old[order], copy[order], start[order], duration[order]


def _layer_sections(deep: LayeredGraph, plan: LayerPlan) -> Iterator[Section]:
    layers = range(plan.start, plan.start + plan.period)
    for layer_pass in deep.passes:
        ordered = layers if layer_pass.ascending else reversed(layers)
        nodes = [node for layer in ordered for node in layer_pass.blocks[layer]]
        yield Section(nodes, plan.copies, before=not layer_pass.ascending)


def _lane_with_copies(work: _Composition, members: list[int]) -> list[Instance]:
    """Return a lane with the copies inserted; record the span of each section in it."""
    start, duration = work.deep.graph.nodes.start_ns, work.deep.graph.nodes.duration_ns
    instances: list[Instance] = []
    finished: set[int] = set()
    position = 0
    for number, run in groupby(members, lambda node: int(work.section_of[node])):
        nodes = list(run)
        position += len(nodes)
        if number < 0:
            instances += [(node, 0) for node in nodes]
            continue
        if number in finished:
            name = work.deep.graph.node(nodes[0]).name
            raise DepthError(
                f"{name} and the nodes to repeat with it are not consecutive: another thread uses "
                "the same stream\n  capture the model at its own depth",
                code="depth-scattered-nodes",
            )
        finished.add(number)
        section = work.sections[number]
        end = int(start[nodes[-1]] + duration[nodes[-1]])
        # To the start of the next node, so that idle time within the layers is repeated with them.
        if position < len(members):
            end = max(int(start[members[position]]), int(start[nodes[0]]))
        section.span_ns = max(section.span_ns, end - int(start[nodes[0]]))
        tags = range(section.copies + 1)
        instances += [(node, tag) for tag in (reversed(tags) if section.before else tags)
                      for node in nodes]  # fmt: skip
    return instances


def _durations(work: _Composition, old: I64, copy: I64) -> I64:
    """Return durations; a copied layer has the median over the inner captured layers."""
    nodes, plan = work.deep.graph.nodes, work.plan
    known = nodes.duration_ns.copy()
    median = known.copy()
    for layer_pass in work.deep.passes:
        for layer in range(plan.start, plan.start + plan.period):
            block = layer_pass.blocks[layer]
            equal = [layer_pass.blocks[other] for other in plan.equivalents(layer)]
            # The median of equal layers, not the copied layer alone: one slow kernel would be
            # repeated in every copy.
            median[block] = np.median(known[np.array(equal)], axis=0).round().astype(np.int64)
    for node, columns in work.changes.columns.items():
        known[node] = median[node] = columns.get("duration_ns", known[node])
    return np.where(copy > 0, median[old], known[old])


def _starts(work: _Composition, old: I64, copy: I64, duration: I64) -> I64:
    """Return start times; nodes after a copy or a node that grows are delayed accordingly."""
    issued, nodes = work.deep.issued_ns, work.deep.graph.nodes
    events: list[tuple[int, int]] = []
    for section in work.sections:
        last = max(int(issued[node]) for node in section.nodes)
        first = min(int(issued[node]) for node in section.nodes)
        # Copies before the nodes delay these too; copies after them delay only what follows.
        events.append((first if section.before else last + 1, section.copies * section.span_ns))
    for node, columns in work.changes.columns.items():
        if (growth := columns.get("duration_ns", 0) - int(nodes.duration_ns[node])) > 0:
            events.append((int(issued[node]) + 1, growth))
    events.sort()
    total = np.concatenate([[0], np.cumsum([amount for _, amount in events], dtype=np.int64)])
    delay = total[np.searchsorted([at for at, _ in events], issued, side="right")]
    # Nodes outside all sections have section -1, which selects the 0 at the end.
    step = np.array(
        [(-1 if section.before else 1) * section.span_ns for section in work.sections] + [0]
    )
    start = nodes.start_ns[old] + delay[old] + copy * step[work.section_of[old]]
    return _without_overlap(work, start, duration)


def _without_overlap(work: _Composition, start: I64, duration: I64) -> I64:
    """Delay each node until its predecessor in the stream (thread, on a CPU) has ended."""
    streams = any(kind == "stream" for kind, _ in work.lanes)
    start = start.copy()
    place = 0
    for kind, lane in work.lanes:
        span = slice(place, place := place + len(lane))
        if kind != "thread" or not streams:
            before = np.cumsum(duration[span]) - duration[span]
            # The recurrence start[i] = max(start[i], end[i-1]) without a loop: subtract the time of
            # all predecessors, take the running maximum, add it again.
            start[span] = before + np.maximum.accumulate(start[span] - before)
    return start


def _origin(work: _Composition, old: I64, copy: I64) -> dict[str, npt.NDArray[Any]]:
    """Return the columns evidence, samples and spread; extrapolated nodes have no samples."""
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
    """Return the module of each node with its layer renumbered."""
    names = Renaming(work.deep.module, work.plan)
    modules = work.deep.graph.text("module")
    renamed: list[str] = []
    for node, tag in zip(map(int, old), map(int, copy), strict=True):
        named_layer, place = names.layer(modules[node]), work.deep.place[node]
        if named_layer is None:
            renamed.append(modules[node])
            continue
        # A node can run in one layer and name another: states are fetched for the next layer.
        layer = named_layer if place is None else place[1]
        number = named_layer + work.plan.layer(layer, tag) - layer
        renamed.append(names.moved(modules[node], number))
    return renamed


def _with_changes(graph: Graph, changes: NonlayerChanges, old: I64) -> Graph:
    """Apply the changes outside the layers to the nodes and to their copies."""
    where: dict[int, list[int]] = defaultdict(list)
    changed = np.isin(old, list(changes.columns))
    for place in np.flatnonzero(changed).tolist():
        where[int(old[place])].append(place)
    # `_durations` has applied these.
    columns = {name for values in changes.columns.values() for name in values} - {"duration_ns"}
    for name in columns:
        values = graph.text(name) if name in TEXT_COLUMNS else getattr(graph.nodes, name).copy()
        for node, changed_values in changes.columns.items():
            for place in where[node] if name in changed_values else ():
                values[place] = changed_values[name]
        graph = graph.with_columns(**{name: values})
    return graph


def _edges(work: _Composition, old: I64, copy: I64) -> Edges:
    """Return all edges: those of the capture, of the copies, and along the lanes."""
    captured = work.deep.graph.edges
    adjacent = {(a, b) for members in work.deep.lanes.values() for a, b in pairwise(members)}
    unordered = adjacent - {(a, b) for b in range(len(work.deep.graph)) for a, _ in captured.of(b)}
    edges: dict[tuple[int, int], int] = {}
    order = (Reason.PROGRAM_ORDER, Reason.STREAM_ORDER)
    for target, (node, tag) in enumerate(zip(old.tolist(), copy.tolist(), strict=True)):
        for source, reason in captured.of(node):
            # The launch queue is full at other nodes at another depth, and a host that is a whole
            # queue ahead delays nothing by being further ahead. With such waits, 8 composed layers
            # of an H200 replayed 18% too slow. Edges along a lane are added below.
            if reason == Reason.LAUNCH_QUEUE or (reason in order and (source, node) in adjacent):
                continue
            for awaited in _sources(work, source, node, tag):
                edges.setdefault((awaited, target), int(reason))
    for reason, lane in _ordered(work):
        for a, b in pairwise(lane):
            if a[1] == b[1] == 0 and (a[0], b[0]) in unordered:
                # These concurrent calls do not wait for each other in the capture.
                continue
            edges.setdefault((work.number[a], work.number[b]), int(reason))
    pairs = np.array(list(edges), dtype=np.int64).reshape(-1, 2)
    reasons = np.fromiter(edges.values(), dtype=np.uint8, count=len(edges))
    return Edges.from_pairs(len(old), pairs[:, 0], pairs[:, 1], reasons)


def _ordered(work: _Composition) -> Iterator[tuple[Reason, list[Instance]]]:
    """Yield the instances that run one after another, and the reason."""
    stream: list[int] = work.deep.graph.nodes.stream.tolist()
    for kind, lane in work.lanes:
        if kind != "thread":
            yield Reason.STREAM_ORDER, lane
            continue
        # Without a device a thread holds the operators of all streams. Program order would not
        # order them: re-costing keeps it for hosts only, and kernels of a stream would overlap.
        by_stream: dict[int, list[Instance]] = defaultdict(list)
        for instance in lane:
            by_stream[stream[instance[0]]].append(instance)
        for number, instances in by_stream.items():
            reason = Reason.PROGRAM_ORDER if number == UNKNOWN else Reason.STREAM_ORDER
            yield reason, instances


def _sources(work: _Composition, source: int, node: int, tag: int) -> list[int]:
    """Return the nodes that copy `tag` of `node` waits for, by its captured edge from `source`."""
    deep, plan = work.deep, work.plan
    place, other = deep.place[node], deep.place[source]
    captured_source = work.number[source, 0]
    if place is None and other is None:
        return [work.number.get((source, tag), captured_source)]
    # A node outside the layers waits for the source in every copy of its layer, as clipping waits
    # for the gradients of all layers.
    if place is None:
        tags = range(plan.copies + 1)
        return [work.number[source, copy] for copy in tags if (source, copy) in work.number]
    if other is None:
        return [captured_source]
    layer = plan.layer(place[1], tag) + other[1] - place[1]
    captured, copied = plan.instance(layer)
    block = deep.passes[other[0]].blocks.get(captured, [])
    # The layer at that distance may be the first or last, which can have other nodes at this
    # position.
    if other[2] < len(block) and _same_name(deep, block[other[2]], source):
        return [work.number.get((block[other[2]], copied), captured_source)]
    return [captured_source]


def _same_name(deep: LayeredGraph, a: int, b: int) -> bool:
    return bool(deep.graph.nodes.name[a] == deep.graph.nodes.name[b])
