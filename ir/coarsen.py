"""Granularity: the module, layer or phase of each node, and a graph with one node per scope."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import I64, Mask
from onerank.ir.enums import Kind, Phase, Reason
from onerank.ir.errors import GraphError
from onerank.ir.graph import Graph, GraphBuilder
from onerank.ir.job import Job, Module
from onerank.ir.nodes import TEXT_COLUMNS, UNKNOWN, Nodes
from onerank.ir.notes import Note
from onerank.ir.python_calls import python_calls_of, python_calls_text

CoarseGranularity = Literal["layer", "submodule"]

# Roles of modules that are not sub-modules of a layer.
_NO_ROLE = ("layer", "other")


@dataclass(frozen=True, slots=True)
class Scope:
    """A layer or sub-module. Nodes outside all of them are grouped by role.

    Attributes:
        path: qualified name of the module; "" if the scope is not a module.
        role: role of the sub-module (see `Module`), "loss", "optimizer" or "other"; "layer" for
            everything in a layer if the granularity is layers.
    """

    path: str
    role: str


@dataclass(frozen=True, slots=True)
class NodeScopes:
    """The scope of each node.

    Attributes:
        scopes: in the order in which the nodes name them first.
        of: position of each node's scope, int64[n].
    """

    scopes: list[Scope]
    of: I64


def scopes_of(graph: Graph, granularity: CoarseGranularity) -> NodeScopes:
    """Return the scope of every node.

    A node belongs to the layer and sub-module that `Job.modules` names for its module. The
    optimizer phase is the scope "optimizer". A node outside all sub-modules and layers is "loss" if
    it follows the head in forward or precedes the model in backward; otherwise "other".

    Raises:
        GraphError: the graph has no module table.
    """
    if not graph.job.modules:
        raise GraphError(
            "the trace has no module table, so layers and roles are not known; "
            "capture the script again, or omit --granularity",
            code="graph-no-modules",
        )
    table = {module.path: module for module in graph.job.modules}
    unknown = Module(path="")
    codes, module_index = np.unique(graph.nodes.module, return_inverse=True)
    modules: list[Module] = [table.get(graph.strings[code], unknown) for code in codes.tolist()]
    optimizer = graph.nodes.phase == Phase.OPTIMIZER
    loss = _loss(graph, np.array([module.role for module in modules])[module_index])
    index_of: dict[Scope, int] = {}
    scope_index: list[int] = []
    for code, is_optimizer, is_loss in zip(
        cast("list[int]", module_index.tolist()), optimizer.tolist(), loss.tolist(), strict=True
    ):
        scope = _scope(modules[code], granularity, is_optimizer=is_optimizer, is_loss=is_loss)
        scope_index.append(index_of.setdefault(scope, len(index_of)))
    return NodeScopes(list(index_of), np.array(scope_index, dtype=np.int64))


def _scope(
    module: Module, granularity: CoarseGranularity, *, is_optimizer: bool, is_loss: bool
) -> Scope:
    if is_optimizer:
        return Scope("", "optimizer")
    if module.layer and (granularity == "layer" or module.role == "layer"):
        return Scope(module.layer, "layer")
    if module.role not in _NO_ROLE:
        return Scope(module.scope or module.path, module.role)
    return Scope("", "loss") if is_loss else Scope(module.layer, "other")


def _loss(graph: Graph, roles: npt.NDArray[np.str_]) -> Mask:
    """Return the nodes that run after the head in forward, or before the model in backward.

    Host operators run ahead of the GPU, so they are ordered by their own times.
    """
    nodes = graph.nodes
    is_loss = np.zeros(len(graph), dtype=bool)
    in_model = ~np.isin(roles, ["other", "loss"])
    host = graph.mask(Kind.HOST_OP)
    for host_or_gpu in (host, ~host):
        for micro_batch in np.unique(nodes.micro_batch[host_or_gpu]).tolist():
            in_batch = host_or_gpu & (nodes.micro_batch == micro_batch)
            forward = in_batch & (nodes.phase == Phase.FORWARD)
            head = forward & (roles == "head")
            if not head.any():
                continue
            last = nodes.start_ns[forward & in_model].max()
            is_loss |= forward & ~in_model & (nodes.start_ns >= last)
            backward = in_batch & (nodes.phase == Phase.BACKWARD)
            first = nodes.start_ns[backward & in_model].min(initial=np.iinfo(np.int64).max)
            is_loss |= backward & ~in_model & (nodes.start_ns < first)
    return is_loss


_SUMMED = ("duration_ns", "spread_ns", "bytes_allocated", "bytes_freed")

_SUMMED_WHERE_KNOWN = ("flops", "bytes_read", "bytes_written", "instructions")


@dataclass(slots=True)
class _Group:
    """Consecutive nodes of one lane that become one node.

    Attributes:
        key: shared (scope, phase, micro-batch); None for a node that is kept unchanged.
        members: their indices, in order.
        sealed: whether a node of another lane waits for a member; then no node may join.
        awaited: index of a group that must come before -> reason.
    """

    key: tuple[int, int, int] | None
    members: list[int]
    sealed: bool = False
    awaited: dict[int, Reason] = field(default_factory=dict[int, Reason])


def coarsen(graph: Graph, granularity: CoarseGranularity) -> Graph:
    """Return a graph with one node per scope, phase and micro-batch between communications.

    Consecutive compute nodes of a stream (on a CPU: operators of a thread) become one node while
    scope, phase and micro-batch stay the same and no other stream has started to wait for them.
    Communication is unchanged. Durations and bytes allocated and freed are summed; FLOPs and bytes
    moved are summed where known. The spread of a sum is the sum of the spreads, an upper bound.
    Host operators of a GPU capture are contracted: a node that waits for one waits for all its
    dependencies. Their bytes go to the node that they launch, or to the next node launched.

    The result has no cycle: a node of one group waits for another group only after that group is
    closed, so along edges the time of the last member grows.

    Raises:
        GraphError: the graph has a cycle, or has no module table.
    """
    scoping = scopes_of(graph, granularity)
    work = _Coarsening(graph, scoping.of)
    for node in graph.topological_order().tolist():
        work.place(node)
    work.hand_over_host_bytes()
    return work.build(scoping.scopes, granularity)


class _Coarsening:
    """Assigns the nodes to groups, one after another in topological order.

    `_frontiers[node]` maps lane -> latest group of that lane that the node waits for, directly or
    through contracted host operators.
    """

    def __init__(self, graph: Graph, scope: I64) -> None:
        self._graph = graph
        self._scope: list[int] = scope.tolist()
        on_gpu = bool(graph.gpu_compute.any())
        compute = graph.gpu_compute if on_gpu else graph.mask(Kind.HOST_OP)
        self._order = Reason.STREAM_ORDER if on_gpu else Reason.PROGRAM_ORDER
        self._compute: list[bool] = compute.tolist()
        is_kept = ~graph.mask(Kind.HOST_OP) | compute
        self._kept: list[bool] = is_kept.tolist()
        self._lane: list[int] = (graph.nodes.stream if on_gpu else graph.nodes.thread).tolist()
        self._phase: list[int] = graph.nodes.phase.tolist()
        self._micro_batch: list[int] = graph.nodes.micro_batch.tolist()
        self._groups: list[_Group] = []
        self._newest: dict[int, int] = {}
        # All entries share one dict, which is safe: an entry is replaced, never changed in place.
        self._frontiers: list[dict[int, int]] = [{}] * len(graph)
        self._group_of = np.full(len(graph), -1, dtype=np.int64)
        self._host_group: list[tuple[int, int]] = []

    def place(self, node: int) -> None:
        """Add `node` to the open group of its lane, or to a new group."""
        dependencies = self._graph.edges.of(node)
        frontier: dict[int, int] = {}
        reasons: dict[int, Reason] = {}
        for source, reason in dependencies:
            for lane, group_index in self._frontiers[source].items():
                # Groups of a lane are numbered in order, so waiting for the latest implies all
                # earlier ones.
                frontier[lane] = max(group_index, frontier.get(lane, -1))
            if self._group_of[source] >= 0:
                reasons.setdefault(int(self._group_of[source]), reason)
        if not self._kept[node]:
            self._frontiers[node] = frontier
            return
        lane = self._lane[node]
        for waiting_lane, group_index in frontier.items():
            if waiting_lane != lane:
                # A later member would run before the waiting node and close a cycle.
                self._groups[group_index].sealed = True
        group_index = self._group_for(node, lane)
        group = self._groups[group_index]
        for waiting_lane, source in frontier.items():
            if waiting_lane != lane:
                group.awaited.setdefault(source, reasons.get(source, Reason.SYNC))
        self._group_of[node] = group_index
        self._frontiers[node] = {**frontier, lane: group_index}

    def _group_for(self, node: int, lane: int) -> int:
        key = (self._scope[node], self._phase[node], self._micro_batch[node])
        last = self._newest.get(lane)
        if last is not None and self._compute[node]:
            open_group = self._groups[last]
            if open_group.key == key and not open_group.sealed:
                open_group.members.append(node)
                return last
        group = _Group(key if self._compute[node] else None, [node])
        if last is not None:
            group.awaited[last] = self._order
        self._groups.append(group)
        self._newest[lane] = len(self._groups) - 1
        return self._newest[lane]

    def hand_over_host_bytes(self) -> None:
        """Assign each contracted host operator to the group that takes its bytes."""
        if not self._groups:
            return
        graph = self._graph
        launched_group = dict[int, int]()
        launches = graph.edges.reason == Reason.LAUNCH
        pairs = zip(graph.edges.source[launches], graph.edges.target[launches], strict=True)
        for source, target in pairs:
            if self._group_of[target] >= 0:
                launched_group.setdefault(int(source), int(self._group_of[target]))
        next_group: dict[int, int] = {}
        threads = graph.nodes.thread.tolist()
        # Operators after a thread's last launch have no next group; their bytes go to the last one.
        last = len(self._groups) - 1
        # Backwards in time, so that `next_group` is the group that the thread launches next.
        for node in np.argsort(graph.nodes.start_ns, kind="stable")[::-1].tolist():
            if self._kept[node]:
                continue
            group = launched_group.get(node, next_group.get(threads[node], last))
            next_group[threads[node]] = group
            self._host_group.append((node, group))

    def build(self, scopes: list[Scope], granularity: CoarseGranularity) -> Graph:
        """Return the graph of the groups, numbered in the order of their first member."""
        nodes = self._graph.nodes
        builder = GraphBuilder()
        host_ops_of: dict[int, list[int]] = {}
        for node, group in self._host_group:
            host_ops_of.setdefault(group, []).append(node)
        for group_index, group in enumerate(self._groups):
            if group.key is None:
                columns = self._row(group.members[0])
            else:
                columns = self._summed(group, scopes[group.key[0]])
            hosts = host_ops_of.get(group_index, [])
            for name in ("bytes_allocated", "bytes_freed"):
                columns[name] += int(getattr(nodes, name)[hosts].sum())
            builder.add(**columns)
        for group_index, group in enumerate(self._groups):
            for source, reason in group.awaited.items():
                builder.edge(source, group_index, reason)
        return builder.build(self._job(granularity))

    def _row(self, index: int) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        for name in Nodes.__dataclass_fields__:
            value = getattr(self._graph.nodes, name)[index]
            columns[name] = self._graph.strings[int(value)] if name in TEXT_COLUMNS else value
        del columns["id"]
        return columns

    def _summed(self, group: _Group, scope: Scope) -> dict[str, Any]:
        nodes, members = self._graph.nodes, group.members
        first = members[0]
        phase = Phase(int(nodes.phase[first]))
        phase_name = "" if phase is Phase.NONE else phase.name.lower()
        columns: dict[str, Any] = {
            "name": " ".join(dict.fromkeys((scope.role, phase_name))) if phase_name else scope.role,
            "op": f"onerank::{scope.role}",
            "kind": Kind.KERNEL if nodes.kind[first] != Kind.HOST_OP else Kind.HOST_OP,
            "module": scope.path,
            "start_ns": int(nodes.start_ns[members].min()),
            # A sum rests on no more steps than its least measured part.
            "samples": int(nodes.samples[members].min()),
            # A sum is as well founded as its least certain part.
            "evidence": int(nodes.evidence[members].min()),
        }
        for name in ("stream", "thread", "phase", "micro_batch"):
            columns[name] = int(getattr(nodes, name)[first])
        for name in _SUMMED:
            columns[name] = int(getattr(nodes, name)[members].sum())
        texts = [self._graph.strings[code] for code in nodes.python_calls[members].tolist() if code]
        columns["python_calls"] = python_calls_text(
            sum(map(python_calls_of, texts), Counter[str]())
        )
        for name in _SUMMED_WHERE_KNOWN:
            values = getattr(nodes, name)[members]
            is_known = values != UNKNOWN
            columns[name] = int(values[is_known].sum()) if is_known.any() else UNKNOWN
        return columns

    def _job(self, granularity: CoarseGranularity) -> Job:
        """Return the job with a note that counts the merged and contracted nodes."""
        graph = self._graph
        compute, is_kept = np.array(self._compute), np.array(self._kept)
        group_count = sum(group.key is not None for group in self._groups)
        text = (
            f"coarsened to one node per {granularity}: "
            f"{int(compute.sum())} compute nodes became {group_count}"
        )
        if not is_kept.all():
            host_ns = int(graph.nodes.duration_ns[~is_kept].sum())
            text += f"; {int((~is_kept).sum())} host operators ({host_ns} ns) were contracted"
        unknown = int((graph.nodes.flops[compute] == UNKNOWN).sum())
        if unknown:
            text += f"; {unknown} nodes with unknown FLOPs count as 0"
        # The memory log refers to nodes by id, and the merged nodes have lost theirs.
        notes = (*graph.job.measurement.notes, Note(text, code="graph-coarsened"))
        measurement = msgspec.structs.replace(graph.job.measurement, notes=notes, memory=None)
        return msgspec.structs.replace(graph.job, measurement=measurement)
