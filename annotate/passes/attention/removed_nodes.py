"""Nodes that disappear with eager attention, and start times without them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.passes.attention.dataflow import Flow
from onerank.annotate.passes.attention.match_eager import EagerCall
from onerank.annotate.passes.remove_nodes import contract
from onerank.ir import Edges, Graph, Kind, Reason

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Taken(NamedTuple):
    """What goes and what stays in its place.

    Attributes:
        dropped: nodes that go, bool[n].
        heads: of each pass of each call, the operation in whose place the fused kernel runs.
        launchers: the host operator that launches it, -1 for none.
        unused: calls that made nothing but masks and the like for eager attention.
    """

    dropped: Mask
    heads: list[int]
    launchers: list[int]
    unused: set[int]


def taken(graph: Graph, flow: Flow, found: list[EagerCall]) -> Taken:
    """Return what goes with calls of eager attention.

    Their operations but one for each pass; what made their masks, if nobody else reads them; and
    the host operators that launched these, with those before each that launch nothing (views,
    allocations, nodes of autograd).
    """
    members = {at for call in found for at in call.members}
    unused = _unused(flow, members, {one for call in found for one in call.inputs})
    dropped = np.zeros(len(graph), dtype=bool)
    for at in members | unused:
        dropped[list(flow.calls[at].nodes)] = True
    heads, launching = list[int](), list[int]()
    for one in (one for call in found for one in call.passes):
        product = flow.calls[one.product]
        nodes = np.array(product.nodes)
        heads.append(int(nodes[np.argmax(graph.nodes.duration_ns[nodes])]))
        launching.append(product.launcher)
    dropped[heads] = False
    made = {one.content for at in members for one in flow.calls[at].writes}
    passing = [one for one in flow.passing if one[2] in made]
    dropped[[node for node, _, _ in passing]] = True
    if not graph.job.device.runs_operators:
        gone = {flow.calls[at].launcher for at in members | unused} - {-1}
        gone |= {launcher for _, launcher, _ in passing} - {-1}
        dropped[_host_operators(graph, gone - set(launching), set(launching))] = True
    return Taken(dropped, heads, launching, unused)


def _unused(flow: Flow, members: set[int], inputs: set[int]) -> set[int]:
    """Return calls all of whose results are read, and by none but the members and one another.

    Who makes the inputs of the fused kernels is not among them.
    """
    gone = set[int]()
    waiting = list(members)
    while waiting:
        for content in {one.content for one in flow.calls[waiting.pop()].reads}:
            at = flow.contents[content].maker
            if at < 0 or at in members or at in gone:
                continue
            results = {one.content for one in flow.calls[at].writes}
            others = members | gone
            if not results & inputs and all(_read_by(flow, one, others) for one in results):
                gone.add(at)
                waiting.append(at)
    return gone


def _read_by(flow: Flow, content: int, calls: set[int]) -> bool:
    """Return whether a content is read, and by none but these calls."""
    read = flow.readers[content]
    return bool(read) and set(read) | set(flow.beside[content]) <= calls


def _host_operators(graph: Graph, gone: set[int], kept: set[int]) -> list[int]:
    """Return the host operators that go: launchers, and what launches nothing before each.

    Args:
        graph: captured.
        gone: launchers of which all operations go.
        kept: those that launch fused kernels.
    """
    nodes = graph.nodes
    launches = np.zeros(len(graph), dtype=bool)
    edges = graph.edges
    launches[edges.source[edges.reason == Reason.LAUNCH]] = True
    asks = {code for code in np.unique(nodes.op).tolist()
            if op_class(graph.strings[code]) is OpClass.COMMUNICATION}  # fmt: skip
    host = np.flatnonzero(graph.mask(Kind.HOST_OP))
    found = list[int]()
    for thread in np.unique(nodes.thread[host]).tolist():
        own = host[nodes.thread[host] == thread]
        own = own[np.argsort(nodes.start_ns[own], kind="stable")]
        run, after_gone = list[int](), False
        for node in own.tolist():
            if node in gone:
                found += [*run, node]
            elif node in kept and after_gone:
                found += run
            elif not launches[node] and int(nodes.op[node]) not in asks:
                run.append(node)
                continue
            run, after_gone = [], node in gone
    return found


def without(graph: Graph, dropped: Mask) -> Graph:
    """Return the graph without nodes; those that follow start as much sooner as they took."""
    start = _sooner(graph, dropped)
    edges, on_host = graph.edges, graph.mask(Kind.HOST_OP)
    source, target = edges.source, edges.target
    ends = dropped[target] & (edges.reason == Reason.LAUNCH)
    ends |= dropped[target] & on_host[target] & ~on_host[source]
    ends |= dropped[source] & ~on_host[source] & on_host[target] & graph.mask(Kind.MEMCPY)[source]
    left = Edges.from_pairs(len(graph), source[~ends], target[~ends], edges.reason[~ends])
    source, target, reason = contract(left, dropped)
    kept, place = np.flatnonzero(~dropped), np.cumsum(~dropped) - 1
    joined = Edges.from_pairs(len(kept), place[source], place[target], reason)
    made = graph.with_columns(start_ns=start)
    return replace(made, nodes=made.nodes.take(kept), edges=joined)


def _sooner(graph: Graph, dropped: Mask) -> I64:
    """Return when each node starts if the host spends no time on operators that go.

    What the device runs keeps its distance from its launch, and its order on each stream.
    """
    nodes = graph.nodes
    start = nodes.start_ns.copy()
    host = np.flatnonzero(graph.mask(Kind.HOST_OP))
    if not dropped[host].any():
        return start
    order = host[np.argsort(nodes.start_ns[host], kind="stable")]
    saved = np.zeros(len(order), dtype=np.int64)
    last = dict[int, int]()
    for rank in reversed(range(len(order))):
        node = int(order[rank])
        following = last.get(int(nodes.thread[node]))
        if dropped[node]:
            saved[rank] = nodes.duration_ns[node]
            if following is not None and dropped[following]:
                saved[rank] = nodes.start_ns[following] - nodes.start_ns[node]
        last[int(nodes.thread[node])] = node
    until = np.concatenate([[0], np.cumsum(saved)])
    sooner = until[np.searchsorted(nodes.start_ns[order], nodes.start_ns, side="left")]
    edges = graph.edges
    launched = edges.reason == Reason.LAUNCH
    sooner[edges.target[launched]] = sooner[edges.source[launched]]
    start -= sooner
    for stream in _streams(graph):
        start[stream] = np.maximum.accumulate(start[stream])
    return start


def _streams(graph: Graph) -> Iterable[I64]:
    """Return the operations of each stream in order."""
    nodes = graph.nodes
    device = np.flatnonzero(~graph.mask(Kind.HOST_OP) & (nodes.stream >= 0))
    device = device[np.argsort(nodes.start_ns[device], kind="stable")]
    return [device[nodes.stream[device] == one] for one in np.unique(nodes.stream[device])]
