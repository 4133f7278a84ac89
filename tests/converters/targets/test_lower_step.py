"""Lowering: the nodes that a simulator runs and the dependencies between them."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from onerank.converters.targets.lower_step import LoweredStep, lower
from onerank.ir import Graph, GraphBuilder, Job, Kind, Reason

HOST = None


def lowered(lanes: list[str | None], edges: list[tuple[int, int]]) -> LoweredStep:
    return lower(graph_of(len(lanes), edges), lanes)


def graph_of(count: int, edges: list[tuple[int, int]]) -> Graph:
    builder = GraphBuilder()
    for index in range(count):
        builder.add(name=str(index), kind=Kind.KERNEL)
    for source, target in edges:
        builder.edge(source, target, Reason.DATA)
    return builder.build(Job())


def test_host_nodes_become_an_edge() -> None:
    # kernel 0 -> synchronise 1 -> host 2 -> launch 3 -> kernel 4 on another stream
    step = lowered(["7", HOST, HOST, HOST, "8"], [(0, 1), (1, 2), (2, 3), (3, 4)])
    assert step == LoweredStep(index=[0, 4], waits_for=[[], [0]])


def test_a_host_node_joins_streams() -> None:
    # kernels 0, 1 on stream 7 and 2 on stream 8 -> synchronise 3 -> kernel 4 on stream 9
    step = lowered(["7", "7", "8", HOST, "9"], [(0, 1), (0, 3), (1, 3), (2, 3), (3, 4)])
    assert step == LoweredStep(index=[0, 1, 2, 4], waits_for=[[], [0], [], [1, 2]])


def test_an_edge_that_others_imply_is_dropped() -> None:
    # kernel 0 -> collective 1 -> kernel 2; the stream's own edge 0 -> 2 adds nothing
    step = lowered(["7", "comm", "7"], [(0, 1), (1, 2), (0, 2)])
    assert step.waits_for == [[], [0], [1]]


def test_a_sync_edge_between_streams_stays() -> None:
    step = lowered(["7", "8", "7", "8"], [(0, 2), (1, 3), (0, 3)])
    assert step.waits_for == [[], [], [0], [0, 1]]


def test_a_lane_is_chained_lowest_index_first() -> None:
    # 0 has to wait for 2, so the order is 1, 2, 0
    step = lowered(["comm", "comm", "comm"], [(2, 0)])
    assert step == LoweredStep(index=[1, 2, 0], waits_for=[[], [0], [1]])


def ancestors(count: int, edges: list[tuple[int, int]]) -> list[set[int]]:
    """Return the ancestors of each node; edges point to higher numbers."""
    before: list[set[int]] = [set() for _ in range(count)]
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        before[target] |= before[source] | {source}
    return before


@given(st.data())
def test_lowering_keeps_the_order_and_no_more(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 15))
    lanes = data.draw(st.lists(st.sampled_from([HOST, "a", "b"]), min_size=count, max_size=count))
    numbers = st.integers(0, count - 1)
    pairs = data.draw(st.lists(st.tuples(numbers, numbers), max_size=40))
    edges = sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
    step = lowered(lanes, edges)
    kept = [index for index, lane in enumerate(lanes) if lane is not HOST]
    chains = [
        pair
        for lane in ("a", "b")
        for pair in pairwise([index for index in kept if lanes[index] == lane])
    ]
    whole = ancestors(count, [*edges, *chains])
    direct = [
        (predecessor, number)
        for number, predecessors in enumerate(step.waits_for)
        for predecessor in predecessors
    ]
    small = ancestors(len(step), direct)
    assert step.index == kept
    for number, index in enumerate(kept):
        assert {kept[other] for other in small[number]} == whole[index] & set(kept)
        for other in step.waits_for[number]:
            others = set(step.waits_for[number]) - {other}
            assert not any(other in small[third] for third in others)
