"""Put the calls of DDP's buckets into a graph composed without them."""

import json
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from onerank.converters.depths.buckets import (
    Buckets,
    Calls,
    find_buckets,
    followers,
    on_device,
    operand_shapes,
    renumbered,
)
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Nodes, Reason
from onerank.ir.errors import DepthError


def with_calls(graph: Graph, like: Calls) -> Graph:
    """Return a graph with the calls of its buckets, made like those of a capture.

    Args:
        graph: composed of captures without theirs.
        like: of the deepest capture, whose strings `graph` has.

    Raises:
        DepthError: the buckets cannot be told.
    """
    buckets = find_buckets(graph)
    if buckets is None:
        raise DepthError(
            "gradients are not copied out of DDP's buckets in the order in which they are copied "
            "into them, so that the buckets of all layers cannot be told: capture the model whole"
        )
    work = _Insertion(graph, like, buckets)
    for bucket in range(len(buckets)):
        work.add(bucket)
    for bucket in range(len(buckets) if like.views else 0):
        work.add_views(bucket)
    return work.built()


class _Insertion:
    """Nodes and edges to be added to a graph."""

    def __init__(self, graph: Graph, like: Calls, buckets: Buckets) -> None:
        self._graph, self._like, self._buckets = graph, like, buckets
        self._after = followers(graph)
        self._rows: list[tuple[int, dict[str, Any]]] = []
        self._edges: list[tuple[int, int, Reason]] = []
        self._closed: set[tuple[int, int]] = set()
        views = chain.from_iterable(like.views)
        self._views = {len(operand_shapes(like.graph, view)[1]): view for view in views}
        self._newest = self._next = -1
        self._free_ns = 0

    def add(self, bucket: int) -> None:
        """Add a bucket's call, and what goes with it."""
        like, nodes = self._like, self._graph.nodes
        model = min(bucket, len(like.calls) - 1)
        last = self._buckets.last(bucket)
        size = self._buckets.bytes[bucket]
        elements = size // self._buckets.item_bytes
        at = int(nodes.start_ns[last] + nodes.duration_ns[last])
        context = {"module": nodes.module[last], "micro_batch": nodes.micro_batch[last]}
        launcher = last
        if like.launchers:
            given = self._resized(like.launchers[model], elements)
            launcher = self._host(like.launchers[model], last, at, {**context, **given})
            fill = on_device(self._after, last)
            at = max(at, int(nodes.start_ns[fill] + nodes.duration_ns[fill]))
        given = self._resized(like.calls[model], elements)
        duration = self._duration(size)
        at = max(at, self._free_ns)
        self._free_ns = at + duration
        call = self._row(
            like.calls[model],
            {**context, **given, "comm_bytes": size, "start_ns": at, "duration_ns": duration},
        )
        if like.launchers:
            self._edges.append((launcher, call, Reason.LAUNCH))
            self._edges.append((on_device(self._after, last), call, Reason.SYNC))
        else:
            self._edges.append((last, call, Reason.PROGRAM_ORDER))
        self._chain(call, last)
        first = self._buckets.first(bucket)
        waiter = self._buckets.emptied[first if like.waits_each else 0]
        self._edges.append((call, on_device(self._after, waiter), Reason.SYNC))

    def add_views(self, bucket: int) -> None:
        """Add the views of a bucket's parameters ahead of what empties it."""
        buckets = self._buckets
        first, elements = buckets.first(bucket), buckets.bytes[bucket] // buckets.item_bytes
        for number in range(first, buckets.ends[bucket]):
            view = self._views[len(operand_shapes(self._graph, buckets.filled[number])[0])]
            self._before(view, buckets.emptied[first], self._resized(view, elements))

    def _resized(self, like: int, elements: int) -> dict[str, Any]:
        """Return a node's input shapes with its bucket's one dimension changed."""
        shapes = operand_shapes(self._like.graph, like)
        if not shapes:
            return {}
        inner = shapes[0] if isinstance(shapes[0][0], int) else shapes[0][0]
        inner[0] = elements
        text = json.dumps(shapes, separators=(",", ":"))
        return {"input_shapes": text}

    def _duration(self, size: int) -> int:
        like = self._like.graph.nodes
        known = sorted((int(like.comm_bytes[c]), int(like.duration_ns[c])) for c in
                       self._like.calls)  # fmt: skip
        sizes, durations = zip(*known, strict=True)
        return round(float(np.interp(size, sizes, durations)))

    def _row(self, like: int, columns: dict[str, Any]) -> int:
        self._rows.append((like, columns))
        return len(self._graph) + len(self._rows) - 1

    def _host(self, like: int, behind: int, at: int, columns: dict[str, Any]) -> int:
        """Add a host node behind another on its thread."""
        made = self._row(like, {**columns, "start_ns": at})
        for following in self._after[behind, Reason.PROGRAM_ORDER]:
            self._closed.add((behind, following))
            self._edges.append((made, following, Reason.PROGRAM_ORDER))
        self._edges.append((behind, made, Reason.PROGRAM_ORDER))
        return made

    def _before(self, like: int, following: int, columns: dict[str, Any]) -> None:
        """Add a host node ahead of another on its thread."""
        graph = self._graph
        made = self._row(like, {**columns, "start_ns": int(graph.nodes.start_ns[following])})
        into = [e for e in self._edges if e[1:] == (following, Reason.PROGRAM_ORDER)]
        given = (s for s, why in graph.edges.of(following) if why == Reason.PROGRAM_ORDER)
        behind = into[-1][0] if into else next(given)
        self._edges = [e for e in self._edges if e not in into]
        self._closed.add((behind, following))
        self._edges.append((behind, made, Reason.PROGRAM_ORDER))
        self._edges.append((made, following, Reason.PROGRAM_ORDER))

    def _chain(self, call: int, last: int) -> None:
        """Put a call into its stream, or behind what else runs beside the thread."""
        nodes = self._graph.nodes
        if self._newest < 0:
            before = [node for node in self._line() if nodes.start_ns[node] <= nodes.start_ns[last]]
            after = [node for node in self._line() if node not in before]
            self._newest = before[-1] if before else -1
            self._next = after[0] if after else -1
            self._closed.add((self._newest, self._next))
        if self._newest >= 0:
            self._edges.append((self._newest, call, Reason.STREAM_ORDER))
        self._newest = call

    def _line(self) -> list[int]:
        nodes, like = self._graph.nodes, self._like
        call = like.calls[0]
        own = like.graph.nodes
        if own.stream[call] != UNKNOWN:
            return np.flatnonzero(nodes.stream == own.stream[call]).tolist()
        followed = {s for s, why in self._after if why == Reason.PROGRAM_ORDER}
        beside = self._graph.communication & (nodes.stream == UNKNOWN)
        beside &= nodes.group == own.group[call]
        return [node for node in np.flatnonzero(beside).tolist() if node not in followed]

    def built(self) -> Graph:
        """Return the graph with all that was added, ordered by start."""
        if self._next >= 0:
            self._edges.append((self._newest, self._next, Reason.STREAM_ORDER))
        graph, strings = self._graph, self._graph.strings.copy()
        made = self._like.graph.nodes.take(np.array([like for like, _ in self._rows]))
        for name in {name for _, given in self._rows for name in given}:
            column = getattr(made, name).copy()
            for place, (_, given) in enumerate(self._rows):
                value = given.get(name, column[place])
                column[place] = strings.intern(value) if isinstance(value, str) else value
            made = replace(made, **{name: column})
        measured = made.evidence == Evidence.MEASURED
        made = replace(
            made,
            evidence=np.where(measured, np.uint8(Evidence.EXTRAPOLATED), made.evidence),
            samples=np.zeros_like(made.samples),
            spread_ns=np.zeros_like(made.spread_ns),
        )
        nodes = Nodes.joined([graph.nodes, made])
        edges = graph.edges
        pairs = zip(edges.source.tolist(), edges.target.tolist(), strict=True)
        kept = [pair not in self._closed for pair in pairs]
        source, target, reason = np.array(self._edges, dtype=np.int64).T
        source = np.concatenate([edges.source[kept], source])
        target = np.concatenate([edges.target[kept], target])
        reason = np.concatenate([edges.reason[kept], reason.astype(np.uint8)])
        order = np.lexsort((np.arange(len(nodes)) < len(graph), nodes.start_ns))
        place = np.argsort(order)
        nodes = replace(nodes.take(order), id=np.arange(len(nodes), dtype=np.uint64))
        whole = Edges.from_pairs(len(nodes), place[source], place[target], reason)
        return replace(
            graph, nodes=nodes, edges=whole, strings=strings, job=renumbered(graph.job, place)
        )
