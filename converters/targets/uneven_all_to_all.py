"""Equalize all-to-alls whose ranks send different numbers of bytes.

The simulators send equal parts to all members, and ASTRA-sim matches calls by equal size. The rank
that sends or receives most determines the time of a call, so each member's call gets its bytes.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onerank.converters.expand.ranks import RankGraph
from onerank.converters.targets.expand_symmetry import Placement, group_placement
from onerank.ir import Collective, Graph, Kind, Node, World

UNEVEN = (
    "All-to-alls of uneven sizes run as even ones: every rank sends as many bytes as the busiest "
    "rank sends or receives."
)


def equalize_all_to_alls(
    rank_graphs: Sequence[RankGraph], world: World, *, unequal_along: str
) -> tuple[list[RankGraph], int]:
    """Return the graphs with equal sizes in each all-to-all, and the number of changed calls.

    The k-th all-to-alls that ranks issue on a group belong together. Calls that other members lack
    are unchanged; the check of the export reports them.

    Args:
        rank_graphs: graphs that together represent every rank of `world`.
        world: the ranks to export.
        unequal_along: as for `place_communications`.
    """
    calls = {
        (placement, number): indices
        for number, entry in enumerate(rank_graphs)
        for placement, indices in _all_to_alls(entry.graph, world, unequal_along).items()
    }
    sizes = [entry.graph.nodes.comm_bytes.copy() for entry in rank_graphs]
    changed = 0
    for placement in dict.fromkeys(placement for placement, _ in calls):
        users = [number for other, number in calls if other == placement]
        for sharing in _sharing_groups(rank_graphs, world, placement, users):
            for indices in zip(*(calls[placement, number] for number in sharing), strict=False):
                members = [*zip(sharing, indices, strict=True)]
                largest = max(
                    _busiest_bytes(rank_graphs[number].graph.node(index))
                    for number, index in members
                )
                for number, index in members:
                    changed += int(sizes[number][index] != largest)
                    sizes[number][index] = largest
    equalized = [
        replace(entry, graph=entry.graph.with_columns(comm_bytes=size))
        for entry, size in zip(rank_graphs, sizes, strict=True)
    ]
    return equalized, changed


def _all_to_alls(graph: Graph, world: World, unequal_along: str) -> dict[Placement, list[int]]:
    """Return the indices of the all-to-alls of each placement, in issue order."""
    calls: dict[Placement, list[int]] = {}
    if not (graph.nodes.collective == Collective.ALL_TO_ALL).any():
        return calls
    for index in graph.topological_order().tolist():
        node = graph.node(index)
        if node.kind is Kind.COLLECTIVE and node.collective is Collective.ALL_TO_ALL:
            placement = group_placement(node.text("group"), graph.job, world, unequal_along)
            if placement is not None:
                calls.setdefault(placement, []).append(index)
    return calls


def _sharing_groups(
    rank_graphs: Sequence[RankGraph], world: World, placement: Placement, users: Sequence[int]
) -> list[list[int]]:
    """Return the sets of two or more graphs whose ranks are members of the same groups."""
    graphs_by_group: dict[tuple[int, ...], set[int]] = {}
    for number in users:
        for rank in rank_graphs[number].ranks:
            members = placement.group_ranks(world, rank)
            graphs_by_group.setdefault(members, set()).add(number)
    sharing: list[set[int]] = []
    for numbers in graphs_by_group.values():
        joined = numbers.union(*(other for other in sharing if other & numbers))
        sharing = [other for other in sharing if not other & joined] + [joined]
    return [sorted(numbers) for numbers in sharing if len(numbers) > 1]


def _busiest_bytes(node: Node) -> int:
    """Return the larger of the bytes that a rank sends and, if recorded, those it receives."""
    sent = node.value("comm_bytes")
    operands: list[Any] = json.loads(node.text("input_values") or "[]")
    # The sizes are compared only where the operands are one input and one output tensor; the
    # list form of all-to-all records lists of tensors.
    if len(operands) != 2 or not all(isinstance(operand, list) for operand in operands):
        return sent
    return max(sent, *(elements * size for _, _, _, elements, size, *_ in operands))
