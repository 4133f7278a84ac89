"""Captures of every parallel form, handed to simulators that read one file."""

from pathlib import Path
from typing import Any

import pytest
from goal_machine import parse, run
from raised import raises_code
from small_job import capture_small

from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.targets import goal
from onerank.converters.targets.simai.exporter import export_simai
from onerank.ir import Graph, World

FORMS: dict[str, tuple[str, World, int, dict[str, Any]]] = {
    "tp": ("Llama", World.of(tp=2), 0, {"sp": True}),
    "dp": ("Llama", World.of(tp=2, dp=2), 3, {}),
    "fsdp": ("Llama", World.of(dp=4), 0, {"fsdp": True}),
    "ep": ("Mixtral", World.of(dp=4, ep=2), 1, {}),
    "pp": ("Llama", World.of(pp=2), 1, {}),
}


@pytest.fixture(scope="module", params=FORMS)
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    kind, world, rank, options = FORMS[request.param]
    return capture_small(tmp_path_factory.mktemp(request.param), kind, world, rank, **options)


def compute_ns(graph: Graph) -> int:
    return int(graph.nodes.duration_ns[graph.gpu_compute].sum())


def test_simai_conserves_compute(captured: Graph, tmp_path: Path) -> None:
    made = export_simai([captured], tmp_path / "w.txt")
    lines = (tmp_path / "w.txt").read_text().splitlines()[2:]
    rows = [line.split() for line in lines]
    assert sum(int(row[at]) for row in rows for at in (2, 5, 8)) == compute_ns(captured)
    assert made.weight_gradient_ns > 0
    assert made.input_gradient_ns > made.weight_gradient_ns / 2
    assert made.micro_batches == 2
    assert made.notes[0].code == "gradients-split-by-operands"
    names = {row[at] for row in rows for at in (3, 6, 9)} - {"NONE"}
    world = captured.job.world
    assert ("ALLTOALL_EP" in names or "ALLGATHER_EP" in names) == (world.ep > 1)


def test_simai_repeats_micro_batches(captured: Graph, tmp_path: Path) -> None:
    few, many = (export_simai([captured], tmp_path / "w.txt", micro_batches=m) for m in (2, 5))
    assert many.optimizer_ns == few.optimizer_ns
    assert many.input_gradient_ns > 2.3 * few.input_gradient_ns


def test_goal_runs_as_long_as_the_kernels(captured: Graph, tmp_path: Path) -> None:
    """All ranks, collectives as messages, on a network that takes no time."""
    path = tmp_path / "job.goal"
    if captured.job.pipeline:
        with raises_code("pipeline-missing-stage"):
            goal.export_goal_ranks(expand([captured], PipelineSchedule.parse("1f1b"), 2), path)
        return
    made = goal.export_goal(captured, path)
    assert made.ranks == captured.job.world.size
    streams = captured.nodes.stream[captured.gpu_compute]
    assert len(set(streams.tolist())) == 1
    assert run(parse(path)) == [compute_ns(captured)] * made.ranks
