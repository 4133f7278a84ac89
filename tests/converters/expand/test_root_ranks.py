"""Roots of collectives in expanded jobs."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from stages import captures, stage

from onerank.converters.expand.data_parallel import with_replicas
from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.targets.goal import export_goal
from onerank.ir import Collective, Graph, GraphBuilder, Job, Kind, ProcessGroup, RankClass, World
from onerank.ir.chakra import read, read_records, write

WORLD = World.of(tp=2, dp=2)
JOB = Job(world=WORLD, rank=1, groups=(ProcessGroup("tp", (0, 1), "tp"),
                                       ProcessGroup("dp", (1, 3), "dp")))  # fmt: skip


ENDS = ("comm_src", "comm_dst")


def step(*calls: tuple[Collective, str, dict[str, int]]) -> Graph:
    builder = GraphBuilder()
    for collective, group, end in calls:
        columns: dict[str, Any] = {"collective": collective, "group": group, **end}
        builder.add(
            name="call", kind=Kind.COLLECTIVE, comm_bytes=64, stream=7, duration_ns=10, **columns
        )
    return builder.build(JOB)


ROOTED = step(
    (Collective.BROADCAST, "tp", {"comm_src": 0}),
    (Collective.SCATTER, "dp", {"comm_src": 3}),
    (Collective.REDUCE, "tp", {"comm_dst": 0}),
    (Collective.GATHER, "dp", {"comm_dst": 3}),
    (Collective.GATHER, "dp", {}),
    (Collective.BROADCAST, "tp", {"comm_src": 2}),  # no member
    (Collective.ALL_REDUCE, "tp", {"comm_src": 1}),  # has none
)


def roots(graph: Graph) -> list[int]:
    return [node.root for node in graph]


def test_a_root_is_where_the_payload_comes_from_or_goes(tmp_path: Path) -> None:
    assert roots(ROOTED) == [0, 3, 0, 3, -1, 2, -1]
    write(ROOTED, tmp_path / "t.et")
    assert roots(read(tmp_path / "t.et")) == roots(ROOTED)
    recorded_ends = [
        {name: attribute.value for name, attribute in node.attributes.items() if name in ENDS}
        for node in read_records(tmp_path / "t.et").nodes
    ]
    assert recorded_ends[:5] == [
        {"comm_src": 0},
        {"comm_src": 3},
        {"comm_dst": 0},
        {"comm_dst": 3},
        {},
    ]


def test_roots_go_with_their_replica() -> None:
    # rank = tp + 2 dp, so with more replicas only roots in the last replica move
    assert roots(with_replicas(ROOTED, 4)) == [0, 3, 0, 3, -1, -1, -1]


@pytest.mark.parametrize(("end", "sends"), [(0, [True, False]), (1, [False, True])])
def test_a_broadcast_of_the_job_comes_from_its_root(
    end: int, sends: list[bool], tmp_path: Path
) -> None:
    export_goal(step((Collective.BROADCAST, "tp", {"comm_src": end})), tmp_path / "job.goal")
    text = (tmp_path / "job.goal").read_text()
    ranks = re.split(r"rank \d+ \{", text)[1:]
    # each pair of tensor-parallel ranks has the root at the same place
    assert [bool(re.search(r": send", program)) for program in ranks] == sends * 2
    assert [bool(re.search(r": recv", program)) for program in ranks] == [
        not is_sender for is_sender in sends
    ] * 2


def with_broadcasts(graph: Graph, root: int) -> Graph:
    kinds = graph.nodes.collective.copy()
    kinds[kinds == Collective.ALL_REDUCE] = Collective.BROADCAST
    source = np.where(kinds == Collective.BROADCAST, root, graph.nodes.comm_src)
    nodes = replace(graph.nodes, collective=kinds, comm_src=source.astype(np.int32))
    return replace(graph, nodes=nodes)


def broadcasts(graph: Graph) -> set[int]:
    return {node.root for node in graph if node.collective is Collective.BROADCAST}


def test_roots_go_with_the_stages_of_a_pipeline() -> None:
    # the first and last of 4 stages share an embedding; stages 0 and 2 come to rank 0, 1 and 3 to 1
    stages = [with_broadcasts(graph, 3) for graph in captures()]
    expanded = expand(stages, PipelineSchedule.parse("interleaved:2"), 4)
    assert {entry.graph.job.rank: broadcasts(entry.graph) for entry in expanded} == {0: {1}, 1: {1}}


def test_roots_go_with_the_place_outside_the_pipeline() -> None:
    """Ranks 4 to 7 of the middle stage: two data-parallel groups, 4 and 6, 5 and 7."""
    grid = World.of(tp=2, dp=2, pp=3)
    stages = []
    for number, place in ((0, 0), (1, 0), (1, 1), (2, 0)):
        graph = stage(number, 3, world=grid, at={"tp": place})
        middle = tuple(RankClass(4 + tp, {"pp": (1,), "tp": (tp,)}) for tp in (0, 1))
        classes = (RankClass(0, {"pp": (0,)}), *middle, RankClass(8, {"pp": (2,)}))
        graph = replace(graph, job=msgspec.structs.replace(graph.job, classes=classes))
        stages.append(with_broadcasts(graph, graph.job.rank))
    expanded = {
        entry.graph.job.rank: entry.graph
        for entry in expand(stages, PipelineSchedule.parse("1f1b"), 2)
    }
    # captured rank 0 is the root of its lines. As rank 1 it is the second of its tensor-parallel
    # line, whose root is still the first; of its other lines it is the first
    for rank, root_of_tp in ((0, 0), (1, 0), (4, 4), (5, 5), (8, 8), (9, 8)):
        for node in expanded[rank]:
            if node.collective is Collective.BROADCAST:
                expected = root_of_tp if node.text("group") == "tp" else rank
                assert node.root == expected
