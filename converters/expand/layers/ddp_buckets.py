"""DDP's gradient buckets: remove them from a capture and insert those of the deeper model.

Layers repeat, but the all-reduces of DistributedDataParallel do not. Gradients fill buckets in the
order in which they are ready. A bucket is full at CAPACITY_BYTES, the first one at FIRST_BYTES
(`compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp). The buckets of a
deeper model therefore follow from the parameter sizes, which the trace records: each gradient is
copied into its bucket when it is ready, and out of it after the backward.

A capture whose calls do not follow this rule stays unchanged.
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
from onerank.ir.arrays import I64
from onerank.ir.dtypes import ITEM_BYTES, TENSOR_TYPES
from onerank.ir.errors import DepthError

FIRST_BYTES = 1 << 20
"""Capacity of the first bucket: torch's `_DEFAULT_FIRST_BUCKET_BYTES`."""

CAPACITY_BYTES = 25 << 20
"""Capacity of the other buckets: the default of DDP's `bucket_cap_mb`."""

# Host nodes that copy a gradient into its bucket, reduce the bucket, and view its parameters.
_COPY_IN, _CALL, _VIEW = "aten::mul", "c10d::allreduce_", "aten::as_strided"

_COPY_OUT = "torch.distributed.ddp.reducer::copy_bucket_to_grad"

# Type of a gradient -> bytes of an element.
_ITEM_BYTES = {type_: ITEM_BYTES[dtype] for dtype, type_ in TENSOR_TYPES.items()}

_LANES = (Reason.PROGRAM_ORDER, Reason.STREAM_ORDER)


@dataclass(frozen=True, slots=True)
class DdpBuckets:
    """The buckets of a graph; bucket k has the parameters `ends[k - 1]` to `ends[k]`.

    Attributes:
        filled: host node per parameter that copies its gradient in, in order of readiness.
        emptied: host node per parameter that copies its gradient out.
        ends: per bucket, one past its last parameter.
        bytes: size per bucket.
        item_bytes: size of an element.
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
        """Return the first parameter of a bucket."""
        return self.ends[bucket - 1] if bucket else 0


@dataclass(frozen=True, slots=True)
class BucketCalls:
    """The all-reduce calls of a capture's buckets, with the nodes around them.

    Attributes:
        graph: the capture.
        calls: all-reduce per bucket.
        launchers: host node that launched each call; empty on a CPU.
        views: per bucket, host nodes that view its parameters; empty on a CPU.
        waits_each: whether the copy out of each bucket waits for its own call; else the first
            copy waits for all calls.
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
        """Return the capture without these nodes; the edges along lanes bridge the gaps."""
        removed = np.zeros(len(self.graph), dtype=bool)
        removed[[*self.calls, *self.launchers, *chain.from_iterable(self.views)]] = True
        return _without(self.graph, removed)


def find_bucket_calls(graph: Graph) -> BucketCalls | None:
    """Return the calls of DDP's buckets; None if there are none, or unexpected ones."""
    buckets = find_buckets(graph)
    if buckets is None:
        return None
    after = followers(graph)
    nodes = graph.nodes
    calls: list[int] = []
    launchers: list[int] = []
    for bucket, size in enumerate(buckets.bytes):
        next_nodes = after[buckets.last(bucket), Reason.PROGRAM_ORDER]
        by_host = [node for node in next_nodes if graph.node(node).name == _CALL]
        launchers += by_host
        if by_host:
            next_nodes = [c for node in by_host for c in after[node, Reason.LAUNCH]]
        reductions = [c for c in next_nodes if nodes.collective[c] == Collective.ALL_REDUCE]
        # A communication hook, such as compression, sends other bytes: then the rule does not hold.
        if len(reductions) != 1 or nodes.comm_bytes[reductions[0]] != size:
            return None
        calls += reductions
    views = _views(graph, buckets)
    if views is None or len(launchers) not in (0, len(calls)):
        return None
    ends = [on_device(after, buckets.emptied[buckets.first(k)]) for k in range(len(buckets))]
    waiting = [after[call, Reason.SYNC] for call in calls]
    # Either each copy out waits for its bucket, or the first copy waits for all buckets. Calls with
    # other waits are not DDP's.
    if waiting not in ([[end] for end in ends], [ends[:1]] * len(ends)):
        return None
    fills = [on_device(after, buckets.last(k)) for k in range(len(buckets))] if launchers else []
    awaited = [[s for s, why in graph.edges.of(c) if why == Reason.SYNC] for c in calls]
    if awaited != ([[fill] for fill in fills] or [[]] * len(calls)):
        return None
    return BucketCalls(graph, calls, launchers, views, waiting == [[end] for end in ends])


def find_buckets(graph: Graph) -> DdpBuckets | None:
    """Return the buckets that follow from the gradients of a graph, None if there are none."""
    filled = [node for node in _named(graph, _COPY_IN) if _is_fill(graph, node)]
    if not filled:
        return None
    types = {json.loads(graph.node(node).text("input_types"))[0] for node in filled}
    item = _ITEM_BYTES.get(types.pop(), 0) if len(types) == 1 else 0
    # torch fills buckets per dtype, and gradients of several threads have no common order.
    if not item or len(np.unique(graph.nodes.thread[filled])) > 1:
        return None
    shapes = [operand_shapes(graph, node)[0] for node in filled]
    copies = [node for node in _named(graph, _COPY_OUT)
              if node > filled[-1] and graph.nodes.thread[node] == graph.nodes.thread[filled[0]]
              ][: len(filled)]  # fmt: skip
    if [operand_shapes(graph, node) for node in copies] != [[shape] for shape in shapes]:
        return None
    ends: list[int] = []
    sizes: list[int] = []
    size = 0
    for number, shape in enumerate(shapes, start=1):
        size += item * math.prod(shape)
        # torch closes a bucket once it reaches its capacity, so a bucket may exceed the capacity.
        if size >= (CAPACITY_BYTES if ends else FIRST_BYTES) or number == len(shapes):
            ends.append(number)
            sizes.append(size)
            size = 0
    return DdpBuckets(filled, copies, ends, sizes, item)


def _without(graph: Graph, removed: Any) -> Graph:
    """Return the graph without `removed` nodes, bool[n]; lane edges lead through them."""
    place = np.cumsum(~removed) - 1
    through: dict[tuple[int, Reason], list[int]] = {}
    edges: list[tuple[int, int, int]] = []
    for node in graph.topological_order().tolist():
        for source, why in graph.edges.of(node):
            if not removed[source]:
                sources = [source]
            else:
                sources = through.get((source, why), []) if why in _LANES else []
            if removed[node]:
                through.setdefault((node, why), []).extend(sources)
            else:
                edges += [(int(place[start]), int(place[node]), int(why)) for start in sources]
    source, target, reason = np.array(sorted(set(edges)), dtype=np.int64).reshape(-1, 3).T
    kept = np.flatnonzero(~removed)
    nodes = replace(graph.nodes.take(kept), id=np.arange(len(kept), dtype=np.uint64))
    kept_edges = Edges.from_pairs(len(kept), source, target, reason.astype(np.uint8))
    return replace(
        graph,
        nodes=nodes,
        edges=kept_edges,
        job=renumbered(graph.job, np.where(removed, -1, place)),
    )


def renumbered(job: Job, ids: I64) -> Job:
    """Return a job whose memory log has the new node ids, -1 for removed nodes."""
    log = job.measurement.memory
    if log is None:
        return job
    measured = msgspec.structs.replace(job.measurement, memory=log.renumbered(ids.tolist()))
    return msgspec.structs.replace(job, measurement=measured)


def _named(graph: Graph, name: str) -> list[int]:
    hosts: I64 = np.flatnonzero(graph.mask(Kind.HOST_OP))
    names = graph.strings.decode(graph.nodes.name[hosts])
    return [
        node for node, node_name in zip(hosts.tolist(), names, strict=True) if node_name == name
    ]


def operand_shapes(graph: Graph, node: int) -> list[Any]:
    """Return the shapes of a node's operands, [] if the trace records none."""
    return json.loads(graph.node(node).text("input_shapes") or "[]")


def _is_fill(graph: Graph, node: int) -> bool:
    """Return whether a node scales a gradient into a given tensor, as DDP fills a bucket."""
    shapes = operand_shapes(graph, node)
    scales_into = len(shapes) == 3 and shapes[0] == shapes[2] and shapes[1] == []
    return scales_into and graph.node(node).phase is Phase.BACKWARD


def followers(graph: Graph) -> dict[tuple[int, Reason], list[int]]:
    """Return (node, reason) -> the nodes that wait for it."""
    after: dict[tuple[int, Reason], list[int]] = defaultdict(list)
    edges = graph.edges
    for source, target, why in zip(
        edges.source.tolist(), edges.target.tolist(), edges.reason.tolist(), strict=True
    ):
        after[source, Reason(why)].append(target)
    return after


def on_device(after: dict[tuple[int, Reason], list[int]], host: int) -> int:
    """Return the node that a host node, or the next one, launched; on a CPU the node itself."""
    for node in (host, *after.get((host, Reason.PROGRAM_ORDER), ())):
        if launched := after.get((node, Reason.LAUNCH)):
            return launched[0]
    return host


def _views(graph: Graph, buckets: DdpBuckets) -> list[list[int]] | None:
    """Return the views of each bucket's parameters; [] for none, None for unexpected ones."""
    span = range(buckets.filled[-1], buckets.emptied[-1])
    views = [node for node in _named(graph, _VIEW) if node in span]
    sizes = [operand_shapes(graph, node)[0] for node in views]
    counts = np.diff([0, *buckets.ends]).tolist()
    expected = [[size // buckets.item_bytes] for size, count in
              zip(buckets.bytes, counts, strict=True) for _ in range(count)]  # fmt: skip
    if not views:
        return []
    if sizes != expected:
        return None
    return [views[end - count : end] for end, count in zip(buckets.ends, counts, strict=True)]


def insert_bucket_calls(graph: Graph, captured: BucketCalls) -> Graph:
    """Return the graph with bucket calls inserted, modelled on those of a capture.

    Args:
        graph: composed from captures without bucket calls.
        captured: calls of the deepest capture, whose strings `graph` has.

    Raises:
        DepthError: the buckets of all layers cannot be derived.
    """
    buckets = find_buckets(graph)
    if buckets is None:
        raise DepthError(
            "gradients leave DDP's buckets in another order than they enter them, so the buckets "
            "of all layers are unknown\n  capture the whole model",
            code="depth-ddp-bucket-order",
        )
    work = _Insertion(graph, captured, buckets)
    for bucket in range(len(buckets)):
        work.add(bucket)
    for bucket in range(len(buckets) if captured.views else 0):
        work.add_views(bucket)
    return work.build()


class _Insertion:
    """Collects nodes and edges to add to a graph, then builds it."""

    def __init__(self, graph: Graph, captured: BucketCalls, buckets: DdpBuckets) -> None:
        self._graph, self._captured, self._buckets = graph, captured, buckets
        self._after = followers(graph)
        self._rows: list[tuple[int, dict[str, Any]]] = []
        self._edges: list[tuple[int, int, Reason]] = []
        self._closed: set[tuple[int, int]] = set()
        views = chain.from_iterable(captured.views)
        # Key: number of dimensions. The view of a new parameter copies one with as many.
        self._views = {len(operand_shapes(captured.graph, view)[1]): view for view in views}
        self._latest = self._next = -1
        self._free_ns = 0

    def add(self, bucket: int) -> None:
        """Add the call of a bucket, its launcher and its edges."""
        captured, nodes = self._captured, self._graph.nodes
        # The model has more buckets than the capture; the others are copies of its last one.
        template = min(bucket, len(captured.calls) - 1)
        last = self._buckets.last(bucket)
        size = self._buckets.bytes[bucket]
        elements = size // self._buckets.item_bytes
        at = int(nodes.start_ns[last] + nodes.duration_ns[last])
        context = {"module": nodes.module[last], "micro_batch": nodes.micro_batch[last]}
        launcher = last
        if captured.launchers:
            changes = self._resized(captured.launchers[template], elements)
            launcher = self._host(captured.launchers[template], last, at, {**context, **changes})
            fill = on_device(self._after, last)
            at = max(at, int(nodes.start_ns[fill] + nodes.duration_ns[fill]))
        changes = self._resized(captured.calls[template], elements)
        duration = self._duration(size)
        # One bucket at a time: calls of a group share a stream.
        at = max(at, self._free_ns)
        self._free_ns = at + duration
        call = self._row(
            captured.calls[template],
            {**context, **changes, "comm_bytes": size, "start_ns": at, "duration_ns": duration},
        )
        if captured.launchers:
            self._edges.append((launcher, call, Reason.LAUNCH))
            self._edges.append((on_device(self._after, last), call, Reason.SYNC))
        else:
            self._edges.append((last, call, Reason.PROGRAM_ORDER))
        self._chain(call, last)
        first = self._buckets.first(bucket)
        waiter = self._buckets.emptied[first if captured.waits_each else 0]
        self._edges.append((call, on_device(self._after, waiter), Reason.SYNC))

    def add_views(self, bucket: int) -> None:
        """Add the views of a bucket's parameters in front of the copies out of it."""
        buckets = self._buckets
        first, elements = buckets.first(bucket), buckets.bytes[bucket] // buckets.item_bytes
        for number in range(first, buckets.ends[bucket]):
            view = self._views[len(operand_shapes(self._graph, buckets.filled[number])[0])]
            self._before(view, buckets.emptied[first], self._resized(view, elements))

    def _resized(self, template: int, elements: int) -> dict[str, Any]:
        """Return the column of input shapes with the bucket's dimension replaced."""
        shapes = operand_shapes(self._captured.graph, template)
        if not shapes:
            return {}
        # An all-reduce takes a list of tensors, a view a single one.
        inner = shapes[0] if isinstance(shapes[0][0], int) else shapes[0][0]
        inner[0] = elements
        text = json.dumps(shapes, separators=(",", ":"))
        return {"input_shapes": text}

    def _duration(self, size: int) -> int:
        """Return the duration of a call of `size` bytes, interpolated between captured calls."""
        captured = self._captured.graph.nodes
        # np.interp needs ascending sizes, and returns the nearest duration beyond the captured
        # sizes.
        known = sorted((int(captured.comm_bytes[c]), int(captured.duration_ns[c])) for c in
                       self._captured.calls)  # fmt: skip
        sizes, durations = zip(*known, strict=True)
        return round(float(np.interp(size, sizes, durations)))

    def _row(self, template: int, columns: dict[str, Any]) -> int:
        """Add a copy of a captured node with these columns; return its index in the new graph."""
        self._rows.append((template, columns))
        return len(self._graph) + len(self._rows) - 1

    def _host(self, template: int, previous: int, at: int, columns: dict[str, Any]) -> int:
        """Add a host node after another on its thread."""
        added = self._row(template, {**columns, "start_ns": at})
        for following in self._after[previous, Reason.PROGRAM_ORDER]:
            self._closed.add((previous, following))
            self._edges.append((added, following, Reason.PROGRAM_ORDER))
        self._edges.append((previous, added, Reason.PROGRAM_ORDER))
        return added

    def _before(self, template: int, following: int, columns: dict[str, Any]) -> None:
        """Add a host node in front of another on its thread."""
        graph = self._graph
        added = self._row(template, {**columns, "start_ns": int(graph.nodes.start_ns[following])})
        into = [e for e in self._edges if e[1:] == (following, Reason.PROGRAM_ORDER)]
        captured = (s for s, why in graph.edges.of(following) if why == Reason.PROGRAM_ORDER)
        previous = into[-1][0] if into else next(captured)
        self._edges = [e for e in self._edges if e not in into]
        self._closed.add((previous, following))
        self._edges.append((previous, added, Reason.PROGRAM_ORDER))
        self._edges.append((added, following, Reason.PROGRAM_ORDER))

    def _chain(self, call: int, last: int) -> None:
        """Put a call into its stream, on a CPU into the sequence of concurrent calls."""
        nodes = self._graph.nodes
        if self._latest < 0:
            lane = self._lane()
            before = [node for node in lane if nodes.start_ns[node] <= nodes.start_ns[last]]
            after = [node for node in lane if node not in before]
            self._latest = before[-1] if before else -1
            self._next = after[0] if after else -1
            self._closed.add((self._latest, self._next))
        if self._latest >= 0:
            self._edges.append((self._latest, call, Reason.STREAM_ORDER))
        self._latest = call

    def _lane(self) -> list[int]:
        """Return the nodes of the lane that the calls belong to."""
        nodes, calls = self._graph.nodes, self._captured
        call = calls.calls[0]
        captured = calls.graph.nodes
        if captured.stream[call] != UNKNOWN:
            return np.flatnonzero(nodes.stream == captured.stream[call]).tolist()
        followed = {s for s, why in self._after if why == Reason.PROGRAM_ORDER}
        concurrent = self._graph.communication & (nodes.stream == UNKNOWN)
        concurrent &= nodes.group == captured.group[call]
        return [node for node in np.flatnonzero(concurrent).tolist() if node not in followed]

    def build(self) -> Graph:
        """Return the graph with all additions, ordered by start."""
        if self._next >= 0:
            self._edges.append((self._latest, self._next, Reason.STREAM_ORDER))
        graph, strings = self._graph, self._graph.strings.copy()
        added = self._captured.graph.nodes.take(np.array([template for template, _ in self._rows]))
        for name in {name for _, columns in self._rows for name in columns}:
            column = getattr(added, name).copy()
            for place, (_, columns) in enumerate(self._rows):
                value = columns.get(name, column[place])
                column[place] = strings.intern(value) if isinstance(value, str) else value
            added = replace(added, **{name: column})
        measured = added.evidence == Evidence.MEASURED
        added = replace(
            added,
            evidence=np.where(measured, np.uint8(Evidence.EXTRAPOLATED), added.evidence),
            samples=np.zeros_like(added.samples),
            spread_ns=np.zeros_like(added.spread_ns),
        )
        nodes = Nodes.joined([graph.nodes, added])
        edges = graph.edges
        pairs = zip(edges.source.tolist(), edges.target.tolist(), strict=True)
        kept = [pair not in self._closed for pair in pairs]
        source, target, reason = np.array(self._edges, dtype=np.int64).T
        source = np.concatenate([edges.source[kept], source])
        target = np.concatenate([edges.target[kept], target])
        reason = np.concatenate([edges.reason[kept], reason.astype(np.uint8)])
        # At equal starts an inserted node precedes the captured node that waits for it.
        order = np.lexsort((np.arange(len(nodes)) < len(graph), nodes.start_ns))
        place = np.argsort(order)
        nodes = replace(nodes.take(order), id=np.arange(len(nodes), dtype=np.uint64))
        whole = Edges.from_pairs(len(nodes), place[source], place[target], reason)
        return replace(
            graph, nodes=nodes, edges=whole, strings=strings, job=renumbered(graph.job, place)
        )
