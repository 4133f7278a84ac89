"""Graphs of several classes of ranks, expanded to all ranks of their job."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from notes import has_note
from raised import raises_code
from stages import stage

from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.expand.ranks import expand_ranks
from onerank.converters.targets.astra_sim.exporter import export_astra_sim, export_astra_sim_ranks
from onerank.converters.targets.goal import export_goal, export_goal_ranks
from onerank.converters.targets.simai.exporter import export_simai
from onerank.ir import (
    Collective,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    Pipeline,
    ProcessGroup,
    RankClass,
    Reason,
    World,
)
from onerank.ir.chakra import read_records

WORLD = World.of(tp=2, dp=4, ep=2)

CLASSES = (RankClass(0, {"ep": (0,)}), RankClass(2, {"ep": (1,)}))


def exchange(rank: int, sent: int, received: int, **job: Any) -> Graph:
    """Return a step of a kernel, an all-to-all among the experts' ranks, and an all-reduce."""
    builder = GraphBuilder()
    kernel = builder.add(name="gemm", kind=Kind.KERNEL, stream=7, duration_ns=1000 + rank)
    moved = builder.add(
        name="all_to_all", kind=Kind.COLLECTIVE, collective=Collective.ALL_TO_ALL, group="ep",
        comm_bytes=sent, stream=8,
        input_values=f'[[1,1,0,{sent // 4},4,"cuda:0"],[2,2,0,{received // 4},4,"cuda:0"]]',
    )  # fmt: skip
    builder.edge(kernel, moved, Reason.SYNC)
    summed = builder.add(
        name="all_reduce", kind=Kind.COLLECTIVE, collective=Collective.ALL_REDUCE, group="edp",
        comm_bytes=512, stream=8,
    )  # fmt: skip
    builder.edge(moved, summed, Reason.STREAM_ORDER)
    groups = tuple(ProcessGroup(axis, WORLD.line(axis, rank), axis) for axis in ("ep", "edp"))
    columns = {"world": WORLD, "rank": rank, "groups": groups, "classes": CLASSES, **job}
    return builder.build(Job(**columns))


def with_values(graph: Graph, values: str) -> Graph:
    """Return the graph with other recorded values of its all-to-all."""
    columns = graph.nodes.input_values.copy()
    columns[1] = graph.strings.intern(values)
    return graph.with_columns(input_values=columns)


def sizes(exported: Any, rank: int) -> list[int]:
    nodes = read_records(exported.directory / f"workload.{rank}.et").nodes
    return [node.attributes["comm_size"].value for node in nodes if node.type == 7]


def test_each_graph_goes_to_the_ranks_of_its_class():
    rank_graphs = expand_ranks([exchange(2, 64, 64), exchange(0, 64, 64)])
    assert [entry.ranks for entry in rank_graphs] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert [entry.graph.job.rank for entry in rank_graphs] == [0, 2]


def test_uneven_exchanges_take_the_size_of_the_busiest_rank(tmp_path):
    """Rank 0 gets 96 bytes, more than any rank sends."""
    exported = export_astra_sim_ranks(
        expand_ranks([exchange(0, 64, 96), exchange(2, 80, 16)]), tmp_path / "out"
    )
    assert [sizes(exported, rank) for rank in range(8)] == [[96, 512]] * 8
    assert has_note(exported.notes, "uneven-all-to-alls")
    even = export_astra_sim_ranks(
        expand_ranks([exchange(0, 64, 64), exchange(2, 64, 64)]), tmp_path / "even"
    )
    assert [sizes(even, rank) for rank in range(8)] == [[64, 512]] * 8
    assert not has_note(even.notes, "uneven-all-to-alls")


def test_what_a_rank_keeps_is_not_exchanged(tmp_path):
    """Rank 0 keeps 90 of its 96 bytes; rank 2 gets most: 30, half of 60 of equal parts."""
    graphs = [
        exchange(rank, 96, 96).with_columns(exchanged_bytes=np.array([-1, exchanged, -1]))
        for rank, exchanged in ((0, 6), (2, 30))
    ]
    exported = export_astra_sim_ranks(expand_ranks(graphs), tmp_path / "out")
    assert [sizes(exported, rank) for rank in range(8)] == [[60, 512]] * 8
    export_goal_ranks(expand_ranks(graphs), tmp_path / "job.goal")
    goal = (tmp_path / "job.goal").read_text()
    assert (goal.count("send 30b"), goal.count("recv 30b")) == (8, 8)
    # One graph alone stands for all ranks: 6 bytes to and from the other.
    export_goal(alone(graphs[0]), tmp_path / "one.goal")
    assert (tmp_path / "one.goal").read_text().count("send 6b") == 8
    export_simai([alone(graphs[0])], tmp_path / "simai.txt")
    assert " ALLTOALL_EP 12 " in (tmp_path / "simai.txt").read_text()


def alone(graph: Graph) -> Graph:
    """Return the graph as that of a job of equal ranks."""
    return replace(graph, job=msgspec.structs.replace(graph.job, classes=()))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # Python's form, as Chakra's converter writes it.
        ("[[1, 1, 0, 16, 4, 'cuda:0'], [2, 2, 0, 24, 4, 'cuda:0']]", 96),
        # The list form: bytes of lists of tensors are not compared.
        ("[" + ",".join(["[" + ",".join(['[1,1,0,99,4,"cuda:0"]'] * 8) + "]"] * 2) + "]", 64),
        ("[[1,1,0],[2,2,0]]", 64),
    ],
)
def test_recorded_values_of_an_exchange_have_several_forms(values, expected, tmp_path):
    graphs = [with_values(exchange(rank, 64, 64), values) for rank in (0, 2)]
    exported = export_astra_sim_ranks(expand_ranks(graphs), tmp_path / "out")
    assert sizes(exported, 0) == [expected, 512]


def test_unreadable_values_of_an_exchange_are_refused(tmp_path):
    graphs = [with_values(exchange(rank, 64, 64), "[[1,") for rank in (0, 2)]
    with raises_code("graph-bad-operands", naming=("node 1", "all_to_all")):
        export_astra_sim_ranks(expand_ranks(graphs), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_rank_that_sends_nothing_takes_part_all_the_same(tmp_path):
    exported = export_astra_sim_ranks(
        expand_ranks([exchange(0, 0, 96), exchange(2, 80, 0)]), tmp_path / "out"
    )
    assert [sizes(exported, rank) for rank in range(8)] == [[96, 512]] * 8
    assert exported.dropped == {}


REFUSED: dict[str, tuple[list[Graph], str, str]] = {
    "a class is missing": (
        [exchange(0, 64, 64)],
        "ranks-missing-class",
        "the job has 2 classes of equivalent ranks; the classes of ranks 2 have",
    ),
    "a class twice": (
        [exchange(0, 64, 64), exchange(5, 64, 64)],
        "ranks-duplicate-class",
        "ranks 0 and 5",
    ),
    "another world": (
        [exchange(0, 64, 64), exchange(2, 64, 64, world=World.of(dp=8, ep=2))],
        "ranks-different-jobs",
        "(tp 2 * dp 4 = 8",
    ),
    "no class recorded": (
        [exchange(rank, 64, 64, classes=()) for rank in (0, 2)],
        "ranks-incomplete",
        "rank 0",
    ),
    "ranks of no class": (
        [exchange(rank, 64, 64, classes=(
            RankClass(0, {"dp": (0,)}), RankClass(2, {"dp": (1,)}))) for rank in (0, 2)],
        "ranks-incomplete",
        "4 of the 8 ranks",
    ),
    "a pipeline": (
        [exchange(0, 64, 64, pipeline=Pipeline(0, (1, 1)))],
        "ranks-need-schedule",
        "stage 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_graphs_that_do_not_make_all_ranks_are_refused(case):
    graphs, code, detail = REFUSED[case]
    with raises_code(code) as caught:
        expand_ranks(graphs)
    assert detail in str(caught.value)


def test_one_graph_does_not_represent_several_classes(tmp_path):
    with raises_code("ranks-single-class") as caught:
        export_astra_sim(exchange(0, 64, 64), tmp_path / "out")
    assert "(ranks 0, 2)" in str(caught.value)


# Pipelines whose stages have several classes -----------------------------------------------------

GRID = World.of(tp=2, dp=2, pp=3, ep=2)

MIDDLE = [RankClass(4, {"pp": (1,), "ep": (0,)}), RankClass(6, {"pp": (1,), "ep": (1,)})]

OF_STAGES = (RankClass(0, {"pp": (0,)}), *MIDDLE, RankClass(8, {"pp": (2,)}))


def part(number: int, place: int = 0, *, scale: int = 1) -> Graph:
    graph = stage(number, 3, world=GRID, at={"ep": place}, scale=scale)
    return replace(graph, job=msgspec.structs.replace(graph.job, classes=OF_STAGES))


def test_each_class_of_a_stage_runs_on_its_own_ranks(tmp_path):
    """The second rank of the middle stage takes half the time; other stages are captured once."""
    graphs = [part(0), part(1, 0), part(1, 1, scale=2), part(2)]
    assert [graph.job.rank for graph in graphs] == [0, 4, 6, 8]
    rank_graphs = expand(graphs, PipelineSchedule("1f1b"), 2)
    assert [entry.ranks for entry in rank_graphs] == [
        *[(0, 1), (2, 3)], *[(4, 5), (6, 7)], *[(8, 9), (10, 11)]]  # fmt: skip
    assert all(entry.graph.job.rank in entry.ranks for entry in rank_graphs)
    forward = [
        next(n.duration_ns for n in entry.graph if n.name == "forward") for entry in rank_graphs
    ]
    assert forward == [1_000_000] * 3 + [500_000] + [1_000_000] * 2
    done = export_astra_sim_ranks(
        rank_graphs, tmp_path / "out"
    )  # checked: every send meets its receive
    groups = {*done.groups.values()}
    assert {(0, 1), (2, 3), (4, 6), (5, 7), (0, 8), (2, 10), (3, 11)} <= groups
    messages = {
        (node.attributes["comm_src"].value, node.attributes["comm_dst"].value)
        for rank in range(12)
        for node in read_records(done.directory / f"workload.{rank}.et").nodes
        if node.type == 5
    }
    steps = [(rank, rank + 4) for rank in range(8)]
    assert messages == {*steps, *((b, a) for a, b in steps)}


def test_a_class_of_a_stage_that_is_missing_is_named():
    with raises_code("pipeline-missing-stage") as caught:
        expand([part(0), part(1, 0), part(2)], PipelineSchedule("1f1b"), 2)
    assert "stages [1] of the pipeline's 3" in str(caught.value)
    assert "ranks [6]" in str(caught.value)
