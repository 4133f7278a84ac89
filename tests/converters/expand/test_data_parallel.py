"""More and fewer replicas of a captured job: groups, peers and shards."""

from typing import Any

import pytest
from notes import note_of
from raised import raises_code

from onerank.converters.expand.data_parallel import replica_notes, with_replicas
from onerank.ir import (
    Collective,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    ProcessGroup,
    RankClass,
    World,
    axis_of,
)


def job(rank: int, names: dict[str, str], **sizes: int) -> Job:
    """Return a job with a group for each name, of the axis given for it."""
    world = World.of(**sizes)
    groups = []
    for name, axis in names.items():
        ranks = (rank,) if axis == "" else world.line(axis, rank)
        groups.append(ProcessGroup(name, ranks, axis_of(ranks, world, rank, name)))
    return Job(world=world, rank=rank, groups=tuple(groups))


def step(captured_job: Job, *calls: tuple[Collective, int, str], **message: Any) -> Graph:
    builder = GraphBuilder()
    for collective, size, group in calls:
        columns = {"collective": collective, "comm_bytes": size, "group": group}
        builder.add(name="nccl", kind=Kind.COLLECTIVE, **columns)
    if message:
        builder.add(name="message", comm_bytes=64, **message)
    return builder.build(captured_job)


def groups(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {group.name: group.ranks for group in graph.job.groups}


def test_lines_of_every_axis():
    names = {"t": "tp", "c": "cp", "d": "dp", "both": "cp+dp", "p": "pp", "one": ""}
    captured_job = job(13, names, tp=2, cp=2, dp=2, pp=2)  # tp 1, cp 0, dp 1, pp 1
    scaled = with_replicas(step(captured_job), 64)
    # rank = tp + 2 * (cp + 2 * (dp + 64 * pp)): 1 + 4 * (1 + 64)
    assert scaled.job.rank == 261
    assert scaled.job.world == World.of(tp=2, cp=2, dp=64, pp=2)
    scaled_groups = groups(scaled)
    assert (scaled_groups["t"], scaled_groups["c"], scaled_groups["p"]) == (
        (260, 261),
        (261, 263),
        (5, 261),
    )
    assert scaled_groups["d"] == tuple(range(257, 512, 4))
    assert scaled_groups["both"] == tuple(range(257, 512, 2))
    assert scaled_groups["one"] == (261,)


def test_experts_stay_where_they_are_and_get_more_copies():
    names = {"ep": "ep", "edp": "edp"}
    scaled = with_replicas(step(job(5, names, dp=8, ep=4)), 16)
    assert groups(scaled) == {"ep": (4, 5, 6, 7), "edp": (1, 5, 9, 13)}


def test_the_world_and_groups_within_a_replica():
    world = World.of(tp=2, dp=2, pp=2)
    captured_job = Job(
        world=world,
        rank=3,
        groups=(
            ProcessGroup("all", tuple(range(8)), "world"),
            ProcessGroup("ends", (3, 7)),
            ProcessGroup("model", (2, 3, 6, 7), "tp+pp"),
        ),
        classes=(RankClass(2, {"pp": (0,)}), RankClass(6, {"pp": (1,)})),
    )
    scaled = with_replicas(step(captured_job), 4)
    assert groups(scaled) == {
        "all": tuple(range(16)),
        "ends": (3, 11),
        "model": (2, 3, 10, 11),
    }
    assert [rank_class.representative for rank_class in scaled.job.classes] == [2, 10]


def test_bytes_of_shards_alone_change():
    captured_job = job(1, {"dp": "dp", "tp": "tp"}, tp=2, dp=4)
    graph = step(
        captured_job,
        (Collective.ALL_REDUCE, 4096, "dp"),
        (Collective.REDUCE_SCATTER, 4096, "dp"),
        (Collective.ALL_GATHER, 1024, "dp"),
        (Collective.ALL_GATHER, 1000, "tp"),
    )
    assert with_replicas(graph, 8).nodes.comm_bytes.tolist() == [4096, 4096, 512, 1000]
    assert with_replicas(graph, 2).nodes.comm_bytes.tolist() == [4096, 4096, 2048, 1000]
    assert with_replicas(graph, 3).nodes.comm_bytes.tolist()[2] == 1366  # 4096 / 3, rounded up
    notes = replica_notes([graph], 8)
    note_of(notes, "replicas-repeat-work", "dp 4", "dp 8")
    note_of(notes, "replicas-gather-shards", "4/8", "dp 4")
    assert replica_notes([graph], 4) == []
    assert with_replicas(graph, 4) is graph


def test_peers_go_with_their_replica():
    captured_job = job(1, {}, dp=2, pp=2)
    scaled = with_replicas(step(captured_job, kind=Kind.SEND, comm_dst=3), 8)
    assert scaled.nodes.comm_dst.tolist() == [9]
    assert scaled.nodes.comm_src.tolist() == [-1]


def cut(ranks: tuple[int, ...], **sizes: int) -> Graph:
    return step(Job(world=World.of(**sizes), rank=ranks[0], groups=(ProcessGroup("x", ranks),)))


UNLIKE = Job(world=World.of(dp=4), classes=(RankClass(0, {"dp": (0,)}), RankClass(1)))


@pytest.mark.parametrize(
    ("graph", "dp", "code", "detail"),
    [
        (step(job(0, {}, tp=2)), 8, "dp-single-replica", "(tp 2 = 2 ranks)"),
        (step(job(0, {}, dp=2)), 1, "dp-too-small", "--dp 1"),
        (step(job(0, {}, dp=8, ep=4)), 6, "dp-indivisible-experts", "(6 = 4 x 1 + 2)"),
        (step(job(0, {}, dp=4, ep=4)), 8, "dp-single-expert-copy", "(cp * dp = ep = 4)"),
        (cut((0, 1, 2), dp=4), 8, "dp-group-across-replicas", "'x' (ranks [0, 1, 2])"),
        (step(UNLIKE), 8, "dp-replicas-differ", "dp [0]"),
        (
            step(job(0, {}, dp=4), kind=Kind.RECV, comm_src=1),
            8,
            "dp-peer-across-replicas",
            "from rank 1",
        ),
    ],
)
def test_jobs_that_cannot_scale(graph: Graph, dp: int, code: str, detail: str):
    with raises_code(code) as caught:
        with_replicas(graph, dp)
    assert detail in str(caught.value)
