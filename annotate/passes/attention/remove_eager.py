"""Remove the nodes of eager attention, with what only served them, and close the gaps."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.passes.attention.match_eager import EagerCall
from onerank.annotate.passes.dataflow import Flow
from onerank.ir import Edges, Graph, Kind, Reason
from onerank.ir.arrays import I64, Mask
from onerank.ir.edges import edges_without


class Removal(NamedTuple):
    """The nodes to remove, and the nodes that fused kernels replace.

    Attributes:
        dropped: nodes to remove, bool[n].
        heads: per pass of each call, the operation that the fused kernel replaces.
        launchers: per head, the host operator that launches it; -1 for none.
        mask_makers: calls that only build masks for eager attention.
    """

    dropped: Mask
    heads: list[int]
    launchers: list[int]
    mask_makers: set[int]


def find_removal(graph: Graph, flow: Flow, calls: list[EagerCall]) -> Removal:
    """Return everything to remove with calls of eager attention.

    These are all operations of the calls except one per pass, the operations that only build their
    masks, and the host operators that launched both. Host operators that launch nothing (views,
    allocations, autograd nodes) go with the removed launcher that follows them.
    """
    members = {index for call in calls for index in call.members}
    mask_makers = _find_mask_makers(
        flow, members, {content for call in calls for content in call.inputs}
    )
    dropped = np.zeros(len(graph), dtype=bool)
    for index in members | mask_makers:
        dropped[list(flow.calls[index].nodes)] = True
    heads, launchers = list[int](), list[int]()
    for pass_ in (pass_ for call in calls for pass_ in call.passes):
        product = flow.calls[pass_.product]
        nodes = np.array(product.nodes)
        # Of a split product the longest kernel stays, not the sum of its parts.
        heads.append(int(nodes[np.argmax(graph.nodes.duration_ns[nodes])]))
        launchers.append(product.launcher)
    dropped[heads] = False
    written = {operand.content for index in members for operand in flow.calls[index].writes}
    # Dropout with p = 0 returns the probabilities themselves; without them it has nothing to
    # return.
    identities = [identity for identity in flow.identities if identity[2] in written]
    dropped[[node for node, _, _ in identities]] = True
    # In a CPU capture the operators are the compute, and `members` already has them.
    if not graph.job.device.runs_operators:
        removed = {flow.calls[index].launcher for index in members | mask_makers} - {-1}
        removed |= {launcher for _, launcher, _ in identities} - {-1}
        dropped[_removable_host_operators(graph, removed - set(launchers), set(launchers))] = True
    return Removal(dropped, heads, launchers, mask_makers)


def _find_mask_makers(flow: Flow, members: set[int], inputs: set[int]) -> set[int]:
    """Return calls whose results are read, and only by the members and by one another.

    Calls that write inputs of the fused kernels are excluded.
    """
    mask_makers = set[int]()
    queue = list(members)
    while queue:
        for content in {operand.content for operand in flow.calls[queue.pop()].reads}:
            writer = flow.contents[content].writer
            if writer < 0 or writer in members or writer in mask_makers:
                continue
            results = {operand.content for operand in flow.calls[writer].writes}
            removed = members | mask_makers
            if not results & inputs and all(
                _read_only_by(flow, content, removed) for content in results
            ):
                mask_makers.add(writer)
                queue.append(writer)
    return mask_makers


def _read_only_by(flow: Flow, content: int, calls: set[int]) -> bool:
    """Return whether a content is read, and only by these calls."""
    read = flow.readers[content]
    return bool(read) and set(read) | set(flow.remainder_readers[content]) <= calls


def _removable_host_operators(graph: Graph, removed: set[int], kept: set[int]) -> list[int]:
    """Return the host operators to remove: launchers, and preceding ones that launch nothing.

    Args:
        graph: captured.
        removed: launchers whose operations are all removed.
        kept: launchers of fused kernels.
    """
    nodes = graph.nodes
    launches = np.zeros(len(graph), dtype=bool)
    edges = graph.edges
    launches[edges.source[edges.reason == Reason.LAUNCH]] = True
    # A capture emulates collectives, so their operators may launch nothing and still matter.
    communication_ops = {code for code in np.unique(nodes.op).tolist()
            if op_class(graph.strings[code]) is OpClass.COMMUNICATION}  # fmt: skip
    host = np.flatnonzero(graph.mask(Kind.HOST_OP))
    result = list[int]()
    for thread in np.unique(nodes.thread[host]).tolist():
        on_thread = host[nodes.thread[host] == thread]
        on_thread = on_thread[np.argsort(nodes.start_ns[on_thread], kind="stable")]
        pending, after_removed = list[int](), False
        for node in on_thread.tolist():
            if node in removed:
                result += [*pending, node]
            # Views between a removed launcher and the kept one prepared operands of the removed
            # product.
            elif node in kept and after_removed:
                result += pending
            elif not launches[node] and int(nodes.op[node]) not in communication_ops:
                pending.append(node)
                continue
            pending, after_removed = [], node in removed
    return result


def remove_and_shift(graph: Graph, dropped: Mask) -> Graph:
    """Return the graph without the dropped nodes; later nodes start earlier by their host time."""
    start = _shifted_starts(graph, dropped)
    edges, on_host = graph.edges, graph.mask(Kind.HOST_OP)
    source, target = edges.source, edges.target
    # Contracting these edges would make a successor wait for what only a dropped node waited for:
    # its launch, or a wait of the host for the GPU (a copy to the host that only the mask needed).
    cut = dropped[target] & (edges.reason == Reason.LAUNCH)
    cut |= dropped[target] & on_host[target] & ~on_host[source]
    cut |= dropped[source] & ~on_host[source] & on_host[target] & graph.mask(Kind.MEMCPY)[source]
    cut_edges = Edges.from_pairs(len(graph), source[~cut], target[~cut], edges.reason[~cut])
    source, target, reason = edges_without(cut_edges, dropped)
    kept, new_index = np.flatnonzero(~dropped), np.cumsum(~dropped) - 1
    edges_of_kept = Edges.from_pairs(len(kept), new_index[source], new_index[target], reason)
    shifted = graph.with_columns(start_ns=start)
    return replace(shifted, nodes=shifted.nodes.take(kept), edges=edges_of_kept)


def _shifted_starts(graph: Graph, dropped: Mask) -> I64:
    """Return start times without the host time of dropped operators, int64[n].

    Device operations keep their distance from their launch, and their order on each stream.
    """
    nodes = graph.nodes
    start = nodes.start_ns.copy()
    host = np.flatnonzero(graph.mask(Kind.HOST_OP))
    if not dropped[host].any():
        return start
    order = host[np.argsort(nodes.start_ns[host], kind="stable")]
    saved = np.zeros(len(order), dtype=np.int64)
    next_of_thread = dict[int, int]()
    for rank in reversed(range(len(order))):
        node = int(order[rank])
        following = next_of_thread.get(int(nodes.thread[node]))
        if dropped[node]:
            saved[rank] = nodes.duration_ns[node]
            if following is not None and dropped[following]:
                # Up to the next dropped operator, so that the host time between the two goes as
                # well.
                saved[rank] = nodes.start_ns[following] - nodes.start_ns[node]
        next_of_thread[int(nodes.thread[node])] = node
    saved_total = np.concatenate([[0], np.cumsum(saved)])
    saved_before = saved_total[np.searchsorted(nodes.start_ns[order], nodes.start_ns, side="left")]
    edges = graph.edges
    launched = edges.reason == Reason.LAUNCH
    saved_before[edges.target[launched]] = saved_before[edges.source[launched]]
    start -= saved_before
    # Launch distances differ, so a shift can reorder a stream: push later operations back.
    for stream in _nodes_by_stream(graph):
        start[stream] = np.maximum.accumulate(start[stream])
    return start


def _nodes_by_stream(graph: Graph) -> Iterable[I64]:
    """Return the operations of each stream in order."""
    nodes = graph.nodes
    device = np.flatnonzero(~graph.mask(Kind.HOST_OP) & (nodes.stream >= 0))
    device = device[np.argsort(nodes.start_ns[device], kind="stable")]
    return [device[nodes.stream[device] == stream] for stream in np.unique(nodes.stream[device])]
