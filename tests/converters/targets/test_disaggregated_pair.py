"""A prefill and a decode on separate ranks of one workload."""

from onerank.converters.targets.disaggregated_pair import disaggregated_pair
from onerank.ir import Collective, Graph, GraphBuilder, Job, Kind, World


def side(world: World) -> Graph:
    """Return a step of all ranks, with calls of their default group."""
    builder = GraphBuilder()
    for collective in (Collective.ALL_REDUCE, Collective.BROADCAST):
        builder.add(
            name="call",
            kind=Kind.COLLECTIVE,
            collective=collective,
            comm_src=0,
            comm_bytes=64,
            stream=7,
            duration_ns=10,
        )
    return builder.build(Job(world=world))


def test_default_groups_stay_within_their_side() -> None:
    ranks = disaggregated_pair([side(World.of(tp=2))], [side(World.of(tp=4))], 4096)
    assert [entry.ranks for entry in ranks] == [(rank,) for rank in range(6)]
    for rank, entry in enumerate(ranks):
        members = (0, 1) if rank < 2 else (2, 3, 4, 5)
        calls = [node for node in entry.graph if node.kind == Kind.COLLECTIVE]
        groups = [entry.graph.job.group(node.text("group")) for node in calls]
        assert [group.ranks for group in groups if group is not None] == [members] * 2
        assert calls[1].root == members[0]
