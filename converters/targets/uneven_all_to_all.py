"""All-to-alls whose ranks send different numbers of bytes, which ASTRA-sim does not support.

ASTRA-sim sends equal parts and matches calls by equal sizes. The busiest rank, which sends or
receives most, determines the time of the call, so every rank's call gets its size.
"""

import json
from collections.abc import Sequence
from typing import Any

from onerank.converters.targets.expand_symmetry import Layout, Place, place_of
from onerank.ir import Collective, Graph, Kind, Node

UNEVEN = (
    "All-to-alls of uneven sizes run as even ones, in which every rank sends what the busiest one "
    "sends or receives."
)

Part = tuple[Graph, Layout, tuple[int, ...]]
"""A graph, the grid of ranks as it sees it, and the ranks that have it."""


def levelled(parts: Sequence[Part], *, along: str) -> tuple[list[Graph], int]:
    """Return the graphs with equal all-to-all sizes, and the number of changed calls.

    Ranks with different numbers of calls are unchanged; the check reports them.

    Args:
        parts: graphs that together represent every rank.
        along: as for `place`.
    """
    calls = {
        (place, at): found
        for at, (graph, layout, _) in enumerate(parts)
        for place, found in _calls(graph, layout, along).items()
    }
    sizes = [graph.nodes.comm_bytes.copy() for graph, _, _ in parts]
    changed = 0
    for place in dict.fromkeys(place for place, _ in calls):
        for some in _meeting(parts, place, [at for other, at in calls if other == place]):
            for indices in zip(*(calls[place, at] for at in some), strict=False):
                met = [*zip(some, indices, strict=True)]
                largest = max(_largest(parts[at][0].node(index)) for at, index in met)
                for at, index in met:
                    changed += int(sizes[at][index] != largest)
                    sizes[at][index] = largest
    made = [
        graph.with_columns(comm_bytes=size) for (graph, *_), size in zip(parts, sizes, strict=True)
    ]
    return made, changed


def _calls(graph: Graph, layout: Layout, along: str) -> dict[Place, list[int]]:
    """Return the all-to-alls of each place, in the order in which they are issued."""
    found: dict[Place, list[int]] = {}
    if not (graph.nodes.collective == Collective.ALL_TO_ALL).any():
        return found
    for index in graph.topological_order().tolist():
        node = graph.node(index)
        if node.kind is Kind.COLLECTIVE and node.collective is Collective.ALL_TO_ALL:
            place = place_of(node.text("group"), graph.job, layout, along)
            if place is not None:
                found.setdefault(place, []).append(index)
    return found


def _meeting(parts: Sequence[Part], place: Place, having: Sequence[int]) -> list[list[int]]:
    """Return the sets of parts that share groups of a place, those of several parts."""
    owners: dict[tuple[int, ...], set[int]] = {}
    for at in having:
        _, layout, ranks = parts[at]
        for rank in ranks:
            owners.setdefault(place.group(layout, rank), set()).add(at)
    sets: list[set[int]] = []
    for some in owners.values():
        joined = some.union(*(other for other in sets if other & some))
        sets = [other for other in sets if not other & joined] + [joined]
    return [sorted(some) for some in sets if len(some) > 1]


def _largest(node: Node) -> int:
    """Return what a rank sends, or receives if it is known to be more, in bytes."""
    sent = node.value("comm_bytes")
    values: list[Any] = json.loads(node.text("input_values") or "[]")
    if len(values) != 2 or not all(isinstance(value, list) for value in values):
        return sent  # lists of tensors
    return max(sent, *(elements * size for _, _, _, elements, size, *_ in values))
