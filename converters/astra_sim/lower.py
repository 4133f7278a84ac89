"""Lower a graph to the nodes ASTRA-sim runs; paths through all other nodes become edges."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from onerank.ir import Graph


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's nodes, numbered 0.. in the order in which every rank issues them.

    Attributes:
        index: graph index of each node.
        waits_for: numbers of the nodes each one waits for, ascending, none implied by another.
    """

    index: list[int]
    waits_for: list[list[int]]

    def __len__(self) -> int:
        return len(self.index)


def lower(graph: Graph, lanes: Sequence[Hashable | None]) -> Step:
    """Return the nodes that have a lane, and what each one waits for.

    The nodes of a lane run one after another, in topological order (the lowest graph index
    first). A node without a lane is contracted: what waits for it waits for all it waits for.
    So of each lane only the newest node counts, and a node's past is one number per lane.

    Args:
        graph: the graph to lower.
        lanes: lane of each node, None for a node to contract.

    Raises:
        GraphError: the graph has a cycle.
    """
    starts, source = graph.edges.offsets.tolist(), graph.edges.source.tolist()
    step = Step([], [])
    newest: dict[Hashable, int] = {}
    pasts: list[dict[Hashable, int]] = []
    frontiers: list[dict[Hashable, int]] = [{}] * len(graph)
    for node in graph.topological_order().tolist():
        awaited = source[starts[node] : starts[node + 1]]
        frontier = _newest_of_each([frontiers[dependency] for dependency in awaited])
        lane = lanes[node]
        if lane is None:
            frontiers[node] = frontier
            continue
        if lane in newest:
            frontier = {**frontier, lane: newest[lane]}
        waits_for = sorted(
            number
            for past, number in frontier.items()
            if not any(
                other != number and pasts[other].get(past, -1) >= number
                for other in frontier.values()
            )
        )
        number = len(step)
        newest[lane] = number
        pasts.append({**_newest_of_each([pasts[other] for other in waits_for]), lane: number})
        frontiers[node] = {lane: number}
        step.index.append(node)
        step.waits_for.append(waits_for)
    return step


def _newest_of_each(parts: list[dict[Hashable, int]]) -> dict[Hashable, int]:
    if len(parts) == 1:
        return parts[0]
    merged: dict[Hashable, int] = {}
    for part in parts:
        for lane, number in part.items():
            if merged.get(lane, -1) < number:
                merged[lane] = number
    return merged


def hold_back(step: Step, receives: Sequence[int]) -> None:
    """Let receives be issued only when what waits for them waits for nothing else.

    ASTRA-sim rescans all nodes that are ready at every event, and a receive is ready from the
    start. Held back until its one waiter's other dependencies are done, it is complete when it
    was: a message that has come before is received at once.

    Args:
        step: changed in place; afterwards a node may wait for one of a higher number.
        receives: numbers of the receives.
    """
    waiters: dict[int, list[int]] = {number: [] for number in receives}
    for number, awaited in enumerate(step.waits_for):
        for other in awaited:
            if other in waiters:
                waiters[other].append(number)
    awaited_before = [*step.waits_for]
    for number, waiting in waiters.items():
        if len(waiting) == 1 and not awaited_before[number]:
            waiter = waiting[0]
            others = [other for other in awaited_before[waiter] if other not in waiters]
            step.waits_for[number] = others
            step.waits_for[waiter] = [one for one in step.waits_for[waiter] if one not in others]
