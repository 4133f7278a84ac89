"""A job replayed by blocks takes as long as the expanded graphs of all its ranks."""

import pytest
from stages import captures

from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.expand.ranks import RankGraph
from onerank.ir import Kind
from onerank.plan.cluster import ClusterLink, ClusterNetwork
from onerank.plan.pipeline_step import replay_job

INSTANT = ClusterNetwork(8, ClusterLink(1e9, 0.0), ClusterLink(1e9, 0.0))


def end_of_expanded(rank_graphs: list[RankGraph]) -> int:
    """Return the end of the last node; a receive waits for its send, and messages take no time."""
    graphs = [entry.graph for entry in rank_graphs]
    order = [graph.topological_order().tolist() for graph in graphs]
    ends: list[dict[int, int]] = [{} for _ in graphs]
    sent: dict[tuple[int, int, int], int] = {}
    place = [0] * len(graphs)
    advanced = True
    while advanced:
        advanced = False
        for rank, graph in enumerate(graphs):
            while place[rank] < len(order[rank]):
                index = order[rank][place[rank]]
                node = graph.node(index)
                begin = max((ends[rank][source] for source, _ in graph.edges.of(index)), default=0)
                if node.kind is Kind.RECV:
                    message = node.value("comm_src"), rank, node.value("comm_tag")
                    if message not in sent:
                        break
                    begin = max(begin, sent[message])
                elif node.kind is Kind.SEND:
                    sent[rank, node.value("comm_dst"), node.value("comm_tag")] = begin
                ends[rank][index] = begin + node.value("duration_ns")
                place[rank] += 1
                advanced = True
    assert all(at == len(nodes) for at, nodes in zip(place, order, strict=True))
    return max(max(of_rank.values()) for of_rank in ends)


@pytest.mark.parametrize("micro_batches", [3, 8, 13])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2", "zbv"])
def test_blocks_take_as_long_as_all_ranks(schedule: str, micro_batches: int) -> None:
    if schedule == "interleaved:2" and micro_batches == 13:
        micro_batches = 12
    parsed = PipelineSchedule.parse(schedule)
    graphs = captures()
    expanded = expand(graphs, parsed, micro_batches)
    replayed = replay_job(graphs, INSTANT, parsed, micro_batches)
    assert replayed.step_ns == pytest.approx(end_of_expanded(expanded), rel=1e-4)
    assert replayed.compute_ns + replayed.bubble_ns == pytest.approx(replayed.step_ns, rel=1e-4)
