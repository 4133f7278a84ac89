"""DDP's gradient buckets: remove them from a capture and insert those of the deeper model.

DDP's buckets of gradients: taken out of a capture, and put where a deeper model has them.

Layers repeat, and the all-reduces of DistributedDataParallel do not: gradients fill buckets in the
order in which they are ready, and a bucket that holds CAPACITY_BYTES is full, the first one with
FIRST_BYTES (`compute_bucket_assignment_by_size` of torch/csrc/distributed/c10d/reducer.cpp). So
they follow from the sizes of all parameters, which the trace tells: each is copied into its bucket
once it is ready, and out of it after the backward. A capture whose calls are not the ones that
follow so is left as it is.
"""

import json
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from onerank.ir import UNKNOWN, Collective, Edges, Evidence, Graph, Job, Kind, Nodes, Phase, Reason
from onerank.ir.edges import I64
from onerank.ir.errors import DepthError

FIRST_BYTES = 1 << 20

CAPACITY_BYTES = 25 << 20
"""torch's defaults: `_DEFAULT_FIRST_BUCKET_BYTES` and `bucket_cap_mb`."""

_FILL, _CALL, _VIEW = "aten::mul", "c10d::allreduce_", "aten::as_strided"

_EMPTY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"

_BYTES = {"Tensor(float)": 4, "Tensor(c10::BFloat16)": 2, "Tensor(c10::Half)": 2}

_LANES = (Reason.PROGRAM_ORDER, Reason.STREAM_ORDER)


@dataclass(frozen=True, slots=True)
class DdpBuckets:
    """The buckets of a graph, the k-th of parameters `filled[ends[k - 1]:ends[k]]`.

    Attributes:
        filled: host node per parameter, in the order of readiness, that copies its gradient in.
        emptied: host node per parameter that copies it out.
        ends: of the buckets.
        bytes: of the buckets.
        item_bytes: of an element.
    """

    filled: list[int]
    emptied: list[int]
    ends: list[int]
    bytes: list[int]
    item_bytes: int

    def __len__(self) -> int:
        return len(self.ends)

    def last(self, bucket: int) -> int:
        """Return the host node that completes a bucket."""
        return self.filled[self.ends[bucket] - 1]

    def first(self, bucket: int) -> int:
        """Return the parameter that a bucket begins with."""
        return self.ends[bucket - 1] if bucket else 0


@dataclass(frozen=True, slots=True)
class BucketCalls:
    """The calls of a capture's buckets, and what goes with each.

    Attributes:
        graph: the capture.
        calls: all-reduce per bucket.
        launchers: host node that launched each; empty on a CPU.
        views: host nodes that view a bucket's parameters, per bucket; empty on a CPU.
        waits_each: whether what empties a bucket waits for its call; else the first for all.
    """

    graph: Graph
    calls: list[int]
    launchers: list[int]
    views: list[list[int]]
    waits_each: bool

    @property
    def bytes(self) -> list[int]:
        """Sizes of the buckets."""
        return self.graph.nodes.comm_bytes[self.calls].tolist()

    def without(self) -> Graph:
        """Return the capture without these nodes; lanes are closed."""
        gone = np.zeros(len(self.graph), dtype=bool)
        gone[[*self.calls, *self.launchers, *chain.from_iterable(self.views)]] = True
        return _without(self.graph, gone)


def find_calls(graph: Graph) -> BucketCalls | None:
    """Return the calls of DDP's buckets, None where there are none, or others."""
    buckets = find_buckets(graph)
    if buckets is None:
        return None
    after = followers(graph)
    nodes = graph.nodes
    calls: list[int] = []
    launchers: list[int] = []
    for bucket, size in enumerate(buckets.bytes):
        asked = after[buckets.last(bucket), Reason.PROGRAM_ORDER]
        by_host = [node for node in asked if graph.node(node).name == _CALL]
        launchers += by_host
        asked = [c for node in by_host for c in after[node, Reason.LAUNCH]] if by_host else asked
        found = [c for c in asked if nodes.collective[c] == Collective.ALL_REDUCE]
        if len(found) != 1 or nodes.comm_bytes[found[0]] != size:
            return None
        calls += found
    views = _views(graph, buckets)
    if views is None or len(launchers) not in (0, len(calls)):
        return None
    ends = [on_device(after, buckets.emptied[buckets.first(k)]) for k in range(len(buckets))]
    waited = [after[call, Reason.SYNC] for call in calls]
    if waited not in ([[end] for end in ends], [ends[:1]] * len(ends)):
        return None
    fills = [on_device(after, buckets.last(k)) for k in range(len(buckets))] if launchers else []
    awaited = [[s for s, why in graph.edges.of(c) if why == Reason.SYNC] for c in calls]
    if awaited != ([[fill] for fill in fills] or [[]] * len(calls)):
        return None
    return BucketCalls(graph, calls, launchers, views, waited == [[end] for end in ends])


def find_buckets(graph: Graph) -> DdpBuckets | None:
    """Return the buckets that follow from the gradients of a graph, None where it has none."""
    filled = [node for node in _named(graph, _FILL) if _is_fill(graph, node)]
    if not filled:
        return None
    types = {json.loads(graph.node(node).text("input_types"))[0] for node in filled}
    item = _BYTES.get(types.pop(), 0) if len(types) == 1 else 0
    if not item or len(np.unique(graph.nodes.thread[filled])) > 1:
        return None
    shapes = [operand_shapes(graph, node)[0] for node in filled]
    copies = [node for node in _named(graph, _EMPTY)
              if node > filled[-1] and graph.nodes.thread[node] == graph.nodes.thread[filled[0]]
              ][: len(filled)]  # fmt: skip
    if [operand_shapes(graph, node) for node in copies] != [[shape] for shape in shapes]:
        return None
    ends: list[int] = []
    sizes: list[int] = []
    size = 0
    for number, shape in enumerate(shapes, start=1):
        size += item * math.prod(shape)
        if size >= (CAPACITY_BYTES if ends else FIRST_BYTES) or number == len(shapes):
            ends.append(number)
            sizes.append(size)
            size = 0
    return DdpBuckets(filled, copies, ends, sizes, item)


def _without(graph: Graph, gone: Any) -> Graph:
    place = np.cumsum(~gone) - 1
    through: dict[tuple[int, Reason], list[int]] = {}
    edges: list[tuple[int, int, int]] = []
    for node in graph.topological_order().tolist():
        for source, why in graph.edges.of(node):
            if not gone[source]:
                found = [source]
            else:
                found = through.get((source, why), []) if why in _LANES else []
            if gone[node]:
                through.setdefault((node, why), []).extend(found)
            else:
                edges += [(int(place[one]), int(place[node]), int(why)) for one in found]
    source, target, reason = np.array(sorted(set(edges)), dtype=np.int64).reshape(-1, 3).T
    kept = np.flatnonzero(~gone)
    nodes = replace(graph.nodes.take(kept), id=np.arange(len(kept), dtype=np.uint64))
    made = Edges.from_pairs(len(kept), source, target, reason.astype(np.uint8))
    return replace(
        graph, nodes=nodes, edges=made, job=renumbered(graph.job, np.where(gone, -1, place))
    )


def renumbered(job: Job, ids: I64) -> Job:
    """Return a job whose log of memory names nodes by other ids, -1 for those that are gone."""
    log = job.measurement.memory
    if log is None:
        return job
    measured = msgspec.structs.replace(job.measurement, memory=log.renumbered(ids.tolist()))
    return msgspec.structs.replace(job, measurement=measured)


def _named(graph: Graph, name: str) -> list[int]:
    hosts: I64 = np.flatnonzero(graph.mask(Kind.HOST_OP))
    names = graph.strings.decode(graph.nodes.name[hosts])
    return [node for node, own in zip(hosts.tolist(), names, strict=True) if own == name]


def operand_shapes(graph: Graph, node: int) -> list[Any]:
    """Return the shapes of a node's operands, [] where the trace tells none."""
    return json.loads(graph.node(node).text("input_shapes") or "[]")


def _is_fill(graph: Graph, node: int) -> bool:
    """Whether a product of a gradient and a number is written to a tensor given for it."""
    shapes = operand_shapes(graph, node)
    given = len(shapes) == 3 and shapes[0] == shapes[2] and shapes[1] == []
    return given and graph.node(node).phase is Phase.BACKWARD


def followers(graph: Graph) -> dict[tuple[int, Reason], list[int]]:
    """Return by node and reason what waits for it."""
    found: dict[tuple[int, Reason], list[int]] = defaultdict(list)
    edges = graph.edges
    for source, target, why in zip(
        edges.source.tolist(), edges.target.tolist(), edges.reason.tolist(), strict=True
    ):
        found[source, Reason(why)].append(target)
    return found


def on_device(after: dict[tuple[int, Reason], list[int]], host: int) -> int:
    """Return what a host node, or the one behind it, launched; itself where that is nothing."""
    for own in (host, *after.get((host, Reason.PROGRAM_ORDER), ())):
        if launched := after.get((own, Reason.LAUNCH)):
            return launched[0]
    return host


def _views(graph: Graph, buckets: DdpBuckets) -> list[list[int]] | None:
    """Return the views of each bucket's parameters; [] for none, None for others than expected."""
    span = range(buckets.filled[-1], buckets.emptied[-1])
    views = [node for node in _named(graph, _VIEW) if node in span]
    sizes = [operand_shapes(graph, node)[0] for node in views]
    counts = np.diff([0, *buckets.ends]).tolist()
    wanted = [[size // buckets.item_bytes] for size, count in
              zip(buckets.bytes, counts, strict=True) for _ in range(count)]  # fmt: skip
    if not views:
        return []
    if sizes != wanted:
        return None
    return [views[end - count : end] for end, count in zip(buckets.ends, counts, strict=True)]


def with_calls(graph: Graph, like: BucketCalls) -> Graph:
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

    def __init__(self, graph: Graph, like: BucketCalls, buckets: DdpBuckets) -> None:
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
