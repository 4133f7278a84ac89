"""Captures of every parallel form, exported to ASTRA-sim with more replicas than captured.

With ASTRA_SIM_BIN set to its congestion-unaware binary, ASTRA-sim runs them.
"""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from notes import note_of
from small_job import capture_small

from onerank.converters.expand.data_parallel import replica_notes, with_replicas
from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.targets.astra_sim.exporter import (
    AstraSimExport,
    export_astra_sim,
    export_astra_sim_ranks,
)
from onerank.ir import Collective, Graph, World
from onerank.ir.chakra import read_records

GPU = "H100"
GATHER, REDUCE = int(Collective.ALL_GATHER), int(Collective.ALL_REDUCE)
BIN = os.environ.get("ASTRA_SIM_BIN", "")
needs_astra_sim = pytest.mark.skipif(
    not BIN, reason="ASTRA_SIM_BIN is not set: name ASTRA-sim's analytical binary"
)
FORMS: dict[str, tuple[str, World, int, dict[str, Any]]] = {
    "tp": ("Llama", World.of(tp=2), 1, {}),
    "dp": ("Llama", World.of(dp=2), 1, {}),
    "fsdp": ("Llama", World.of(dp=4), 1, {"fsdp": True}),
    "ep": ("Mixtral", World.of(dp=4, ep=2), 1, {}),
    "tp-dp": ("Llama", World.of(tp=2, dp=2), 3, {}),
    "cp-dp": ("Llama", World.of(cp=2, dp=2), 1, {"ddp": True}),
    "pp": ("Llama", World.of(pp=2), 0, {}),
    "pp-tp-dp": ("Llama", World.of(tp=2, dp=2, pp=2), 0, {}),
}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Graph]]:
    """Return a function that captures a form, one graph per class of equal ranks."""
    known: dict[str, list[Graph]] = {}

    def graphs(form: str) -> list[Graph]:
        if form not in known:
            kind, world, rank, options = FORMS[form]
            directory = tmp_path_factory.mktemp(form)
            stages = world.sizes.get("pp", 1)
            ranks = [rank + world.size // stages * stage for stage in range(stages)]
            known[form] = [capture_small(directory, kind, world, rank, **options) for rank in ranks]
        return known[form]

    return graphs


def exported(graphs: list[Graph], directory: Path, dp: int | None) -> AstraSimExport:
    notes = replica_notes(graphs, dp) if dp else []
    scaled = [with_replicas(graph, dp) for graph in graphs] if dp else graphs
    if "pp" in scaled[0].job.world.sizes:
        rank_graphs = expand(scaled, PipelineSchedule.parse("1f1b"), 4)
        return export_astra_sim_ranks(rank_graphs, directory, notes=notes)
    return export_astra_sim(scaled[0], directory, notes=notes)


def calls(workload: AstraSimExport, rank: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (collective, bytes, ranks of its group) of each collective of a rank, in order."""
    nodes = read_records(workload.directory / f"workload.{rank}.et").nodes
    return [
        (
            cast("int", node.attributes["comm_type"].value),
            cast("int", node.attributes["comm_size"].value),
            workload.groups[int(cast("str", node.attributes["pg_name"].value))],
        )
        for node in nodes
        if "comm_type" in node.attributes
    ]


def test_replicas_of_pipeline_stages_and_slices(captured, tmp_path):
    graphs = captured("pp-tp-dp")
    workload = exported(graphs, tmp_path / "out", 8)
    assert workload.ranks == 2 * 8 * 2
    note_of(workload.notes, "replicas-repeat-work", "dp 2", "dp 8")
    first, last = calls(workload, 5), calls(workload, 16 + 5)  # tp 1, dp 2 of both stages
    replicas = tuple(range(1, 16, 2))
    assert {ranks for _, _, ranks in first} == {(4, 5), replicas}
    assert {ranks for _, _, ranks in last} == {(20, 21), tuple(16 + rank for rank in replicas)}
    few = calls(exported(graphs, tmp_path / "few", 2), 1)
    gradients = [size for kind, size, ranks in few if ranks == (1, 3) and kind == REDUCE]
    assert [s for kind, s, ranks in first if ranks == replicas and kind == REDUCE] == gradients
    assert max(gradients) > 100_000
    # 64 bytes that a replica broadcasts before the step: 1/n from each
    assert [(a, b) for (k, a, _), (_, b, _) in zip(few, first, strict=True) if k == GATHER] == [
        (32, 8)
    ]


@needs_astra_sim
@pytest.mark.parametrize("encoding", ["micros", "roofline"])
@pytest.mark.parametrize("form", FORMS)
def test_astra_sim_runs_every_form_with_more_replicas(form, encoding, captured, tmp_path):
    graphs = captured(form)
    world = graphs[0].job.world
    dp = 8 if "dp" in world.sizes else None
    workload = exported(graphs, tmp_path / "out", dp)
    assert workload.ranks == world.size // world.sizes.get("dp", 1) * (dp or 1)
    process = subprocess.run(
        [workload.directory / "run.sh", encoding, Path(BIN).resolve()],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    finished = re.findall(r"sys\[(\d+)\] finished, \d+ cycles", process.stdout)
    assert sorted(map(int, finished)) == list(range(workload.ranks))
    times = [int(time) for time in re.findall(r"sys\[\d+\], GPU time: (\d+)", process.stdout)]
    assert len(times) == workload.ranks
    off = 0 if encoding == "roofline" else 1000
    assert abs(max(times) - workload.gpu_time_ns) <= off


@needs_astra_sim
def test_shards_gathered_by_more_replicas_are_smaller(captured, tmp_path):
    graphs = captured("fsdp")
    few, many = (calls(exported(graphs, tmp_path / str(n), n), 3) for n in (4, 8))
    assert [kind for kind, _, _ in few] == [kind for kind, _, _ in many]
    gathers = [(a, b) for (kind, a, _), (_, b, _) in zip(few, many, strict=True) if kind == GATHER]
    assert len(gathers) > 4
    assert all(b == -(-a // 2) for a, b in gathers)
    others = [(a, b) for (k, a, _), (_, b, _) in zip(few, many, strict=True) if k != GATHER]
    assert all(a == b for a, b in others)
    notes = exported(graphs, tmp_path / "8", 8).notes
    note_of(notes, "replicas-gather-shards", "4/8")
