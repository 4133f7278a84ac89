"""SimAI workloads: every cell of a small one, the rules of the format, sums of real captures."""

import os
import re
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from notes import codes, note_of
from raised import raises_code
from stages import FORWARD_NS, INPUT_NS, OPTIMIZER_NS, WEIGHT_NS, captures

from onerank.annotate import characterise, recost
from onerank.converters.expand.pipeline import PipelineSchedule
from onerank.converters.sources.kineto import convert_directory
from onerank.converters.targets.simai.exporter import export_simai
from onerank.converters.targets.simai.gradients import split_gradients
from onerank.converters.targets.simai.rows import leaves_stage
from onerank.ir import (
    Collective,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    Module,
    Phase,
    ProcessGroup,
    Reason,
    World,
)

SIMAI = os.environ.get("SIMAI_ROOT", "")
TRACES = Path(__file__).parents[3] / "traces"
WORLD = World.of(tp=2, dp=4, ep=2)
RANK = 3
GROUPS = [("tp", "tp"), ("dp", "dp"), ("ep", "ep"), ("edp", "edp")]
JOB = Job(
    world=WORLD,
    rank=RANK,
    groups=(
        *[ProcessGroup(name, WORLD.line(axis, RANK), axis) for name, axis in GROUPS],
        ProcessGroup("alone", (RANK,)),
        ProcessGroup("all", tuple(range(8)), "world"),
    ),
    modules=(
        Module("m.embed", role="embedding"),
        Module("m.0", role="layer", layer="m.0"),
        Module("m.0.attn", role="attention", layer="m.0"),
        Module("m.head", role="head"),
    ),
)


class Step(GraphBuilder):
    """Nodes one after another."""

    def compute(self, module: str, phase: Phase, ns: int, **columns: Any) -> None:
        defaults = {"name": "kernel", "kind": Kind.KERNEL, "stream": 7, "start_ns": len(self)}
        self._next(**{**defaults, "module": module, "phase": phase, "duration_ns": ns, **columns})

    def call(self, module: str, phase: Phase, kind: Collective, group: str, size: int) -> None:
        columns = {"collective": kind, "group": group, "comm_bytes": size}
        self.compute(module, phase, 0, kind=Kind.COLLECTIVE, **columns)

    def _next(self, **columns: Any) -> None:
        index = self.add(**columns)
        if index:
            self.edge(index - 1, index, Reason.STREAM_ORDER)


def product_columns(*shapes: list[int]) -> dict[str, str]:
    first, second, out = (str(list(shape)) for shape in shapes)
    return {"op": "aten::mm", "input_shapes": f"[{first},{second}]", "output_shapes": f"[{out}]"}


def training_step() -> Graph:
    """Return an embedding, one layer of attention and experts, a head, an optimizer."""
    step = Step()
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    step.compute("m.embed", forward, 10)
    step.call("m.embed", forward, Collective.ALL_REDUCE, "tp", 100)
    step.compute("m.0.attn", forward, 20, **product_columns([8, 4], [4, 6], [8, 6]))
    step.call("m.0.attn", forward, Collective.ALL_REDUCE, "tp", 200)
    step.compute("m.0", forward, 30)
    step.call("m.0", forward, Collective.ALL_TO_ALL, "ep", 300)
    step.compute("m.0", forward, 31)
    step.compute("m.head", forward, 40)
    step.compute("m.head", backward, 41)
    step.compute("m.0", backward, 32)
    step.compute("m.0.attn", backward, 21, **product_columns([8, 6], [6, 4], [8, 4]))
    step.call("m.0.attn", backward, Collective.ALL_REDUCE, "tp", 201)
    step.compute("m.0.attn", backward, 22, **product_columns([4, 8], [8, 6], [4, 6]))
    step.call("", backward, Collective.ALL_REDUCE, "dp", 400)
    step.compute("m.embed", backward, 11, op="aten::embedding_dense_backward")
    step.call("", Phase.OPTIMIZER, Collective.ALL_REDUCE, "edp", 500)
    step.compute("", Phase.OPTIMIZER, 50)
    return step.build(JOB)


def test_every_cell(tmp_path: Path) -> None:
    exported = export_simai([training_step()], tmp_path / "w.txt")
    assert (tmp_path / "w.txt").read_text() == (
        "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 ep: 2 pp: 1 vpp: 1 ga: 1 "
        "all_gpus: 8 checkpoints: 0 checkpoint_initiates: 0 pp_comm: 0\n"
        "6\n"
        "optimizer -1 0 NONE 0 0 NONE 0 50 ALLREDUCE_DP_EP 500 0\n"
        "m.embed -1 10 ALLREDUCE 100 0 NONE 0 11 NONE 0 0\n"
        "m.0.attn -1 20 ALLREDUCE 200 21 ALLREDUCE 201 22 ALLREDUCE 400 0\n"
        "m.0:0 -1 30 ALLTOALL_EP 300 32 NONE 0 0 NONE 0 0\n"
        "m.0:1 -1 31 NONE 0 0 NONE 0 0 NONE 0 0\n"
        "m.head -1 40 NONE 0 41 NONE 0 0 NONE 0 0\n"
    )
    assert (exported.forward_ns, exported.input_gradient_ns, exported.weight_gradient_ns) == (
        131,
        94,
        33,
    )
    assert (exported.optimizer_ns, exported.rows, exported.micro_batches) == (50, 6, 1)
    # These nodes record no operands.
    assert codes(exported.notes) == [
        "gradients-split-by-shapes",
        "simai-small-collectives",
        "simai-optimizer-row",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["w.txt"]


def test_nodes_without_phase_are_repeated_with_their_micro_batch(tmp_path: Path) -> None:
    step = Step()
    for number in range(3):
        step.compute("m.0", Phase.FORWARD, 10, micro_batch=number)
        step.compute("", Phase.NONE, 7)
        step.compute("m.0", Phase.BACKWARD, 20, micro_batch=number)
    step.compute("", Phase.OPTIMIZER, 50)
    exported = export_simai([step.build(JOB)], tmp_path / "w.txt", micro_batches=5)
    assert exported.forward_ns == 5 * (10 + 7)
    note_of(exported.notes, "phaseless-counts-as-forward", 3 * 7)


def test_layers_as_rows(tmp_path: Path) -> None:
    export_simai([training_step()], tmp_path / "w.txt", granularity="layer")
    names = [row[0] for row in cells(tmp_path / "w.txt")]
    assert names == ["optimizer", "m.embed", "m.0:0", "m.0:1", "m.0:2", "m.head"]


def cells(path: Path) -> list[list[str]]:
    """Return the cells of each row, after checking the rules of the format."""
    header, count, *lines = path.read_text().splitlines()
    words = header.split()
    fields = dict(zip(words[1::2], words[2::2], strict=True))
    assert {"model_parallel_NPU_group:", "ep:", "pp:", "vpp:", "ga:", "all_gpus:"} <= {*fields}
    assert len(lines) == int(count)
    rows = [line.split() for line in lines]
    for row in rows:
        assert len(row) == 12
        assert all(int(row[at]) < 2**31 for at in (2, 5, 8))
        assert all((row[at] == "NONE") == (row[at + 1] == "0") for at in (3, 6, 9))
    return rows


def total_ns(path: Path) -> int:
    return sum(int(row[at]) for row in cells(path) for at in (2, 5, 8))


def compute_ns(graph: Graph) -> int:
    return int(graph.nodes.duration_ns[graph.gpu_compute].sum())


def test_long_cells_are_split(tmp_path: Path) -> None:
    step = Step()
    step.compute("m.head", Phase.FORWARD, 5 * 2**31 + 7)
    step.call("m.head", Phase.FORWARD, Collective.ALL_REDUCE, "tp", 100)
    step.compute("m.head", Phase.BACKWARD, 3)
    step.call("m.head", Phase.BACKWARD, Collective.ALL_REDUCE, "tp", 101)
    exported = export_simai([step.build(JOB)], tmp_path / "w.txt")
    rows = cells(tmp_path / "w.txt")
    assert len(rows) == 6
    assert total_ns(tmp_path / "w.txt") == 5 * 2**31 + 7 + 3
    # down the rows the forward's call comes last, up the rows the backward's
    assert [row[3:5] for row in rows] == [["NONE", "0"]] * 5 + [["ALLREDUCE", "100"]]
    assert [row[6:8] for row in rows] == [["ALLREDUCE", "101"]] + [["NONE", "0"]] * 5
    off = sum(int(np.float32(row[2])) - int(row[2]) for row in rows)
    note_of(exported.notes, "simai-float32-rounding", f"{off:+d} ns off")


def test_gathers_are_split_at_simais_limit(tmp_path: Path) -> None:
    step = Step()
    step.compute("m.head", Phase.FORWARD, 5)
    step.call("m.head", Phase.FORWARD, Collective.ALL_GATHER, "tp", 20 << 30)  # 40 GiB in full
    export_simai([step.build(JOB)], tmp_path / "w.txt")
    sizes = [int(row[4]) for row in cells(tmp_path / "w.txt")]
    assert len(sizes) == 3
    assert sum(sizes) == 40 << 30
    assert max(sizes) <= 16 << 30


@pytest.mark.parametrize(
    ("kind", "group", "size", "loss"),
    [
        (Collective.ALL_REDUCE, "alone", 64, "of a group of one rank: 1, of 64 bytes"),
        (Collective.BROADCAST, "dp", 64, "broadcast, which SimAI lacks: 1, of 64 bytes"),
        (Collective.ALL_REDUCE, "all", 64, "of group 'all', which SimAI has no name for: 1"),
        (Collective.ALL_REDUCE, "tp", 0, "of 0 bytes: 1"),
    ],
)
def test_lost_communication_is_reported(
    kind: Collective, group: str, size: int, loss: str, tmp_path: Path
) -> None:
    step = Step()
    step.compute("m.head", Phase.FORWARD, 5)
    step.call("m.head", Phase.FORWARD, kind, group, size)
    exported = export_simai([step.build(JOB)], tmp_path / "w.txt")
    assert any(loss in reported for reported in exported.losses)
    assert all(row[3] == row[6] == row[9] == "NONE" for row in cells(tmp_path / "w.txt"))


def test_a_gather_of_the_forward_has_one_column_only(tmp_path: Path) -> None:
    step = Step()
    step.call("m.head", Phase.FORWARD, Collective.ALL_GATHER, "dp", 64)
    step.compute("m.head", Phase.FORWARD, 5)
    exported = export_simai([step.build(JOB)], tmp_path / "w.txt")
    assert [row[9:11] for row in cells(tmp_path / "w.txt")][-1] == ["ALLGATHER", "256"]
    assert any("the phase of 1 collectives (forward of dp)" in loss for loss in exported.losses)


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"comm_bytes": -1, "group": "tp"}, "export-no-bytes"),
        ({"comm_bytes": 8, "group": "undefined"}, "export-unknown-group"),
    ],
)
def test_incomplete_records_are_refused(columns: dict[str, Any], code: str, tmp_path: Path) -> None:
    step = Step()
    step.compute("m.head", Phase.FORWARD, 5)
    columns |= {"kind": Kind.COLLECTIVE, "collective": Collective.ALL_REDUCE}
    step.compute("m.head", Phase.FORWARD, 0, **columns)
    with raises_code(code):
        export_simai([step.build(JOB)], tmp_path / "w.txt")
    assert not [*tmp_path.iterdir()]


def test_a_cpu_capture_needs_a_gpu(tmp_path: Path) -> None:
    graph, _ = convert_directory(TRACES / "cpu-llama-2l-tp4")
    with raises_code("export-empty-graph"):
        export_simai([graph], tmp_path / "w.txt")


# Pipelines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved:2", 2)])
def test_a_pipeline_is_its_slowest_rank(schedule: str, chunks: int, tmp_path: Path) -> None:
    graphs = captures()
    exported = export_simai(
        graphs, tmp_path / "w.txt", schedule=PipelineSchedule.parse(schedule), micro_batches=6
    )
    assert exported.forward_ns == 6 * chunks * FORWARD_NS
    assert exported.optimizer_ns == chunks * OPTIMIZER_NS
    first = 6 if exported.rank == 0 else 0  # kernels of 1 ns for the embedding's gradient
    assert exported.input_gradient_ns == 6 * chunks * INPUT_NS
    assert exported.weight_gradient_ns == 6 * chunks * WEIGHT_NS + first
    header = (tmp_path / "w.txt").read_text().splitlines()[0]
    assert f"pp: {4 // chunks} vpp: {chunks} ga: 6 all_gpus: {4 // chunks} " in header
    assert header.endswith("pp_comm: 64")
    rows = cells(tmp_path / "w.txt")
    assert {row[0] for row in rows[:chunks]} == {"embedding_layer"}  # makes no bubble
    note_of(exported.notes, "simai-embedding-row", "embedding_layer")
    assert "embedding_layer" not in {row[0] for row in rows[chunks:]}


@pytest.mark.parametrize("captured", [1, 3])
def test_an_evaluation_runs_once(captured: int, tmp_path: Path) -> None:
    """However many micro-batches there are, and no part of the pipeline's bubble."""
    graphs = captures(captured=captured, evaluated=captured // 2)
    schedule = PipelineSchedule.parse("1f1b")
    exported = export_simai(graphs, tmp_path / "w.txt", schedule=schedule, micro_batches=6)
    assert exported.forward_ns == (6 + 1) * FORWARD_NS
    rows = cells(tmp_path / "w.txt")
    assert [(row[0], row[2]) for row in rows if row[0] == "embedding_layer"] == [
        ("embedding_layer", "0"),  # the optimizer
        ("embedding_layer", str(FORWARD_NS)),
    ]
    assert (tmp_path / "w.txt").read_text().splitlines()[0].endswith("pp_comm: 64")


def test_stages_need_a_schedule(tmp_path: Path) -> None:
    with raises_code("simai-schedule-missing"):
        export_simai(captures(), tmp_path / "w.txt")
    # A script that runs its own pipeline has no stages of ours to schedule.
    own = [
        replace(graph, job=msgspec.structs.replace(graph.job, pipeline=None))
        for graph in captures()
    ]
    with raises_code("simai-several-ranks"):
        export_simai(own, tmp_path / "w.txt")
    with raises_code("simai-same-rank"):
        export_simai(
            [*captures(), captures()[0]],
            tmp_path / "w.txt",
            schedule=PipelineSchedule.parse("1f1b"),
        )
    with raises_code("simai-schedule-impossible") as caught:
        export_simai([captures()[0]], tmp_path / "w.txt", schedule=PipelineSchedule.parse("1f1b"))
    assert "[1, 2, 3]" in str(caught.value)


# Real captures -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["h200-llama-8b-4l-tp4", "cpu-llama-2l-tp4"])
def real(request: pytest.FixtureRequest) -> Graph:
    graph, _ = convert_directory(TRACES / request.param)
    return recost(graph, target="H100") if request.param.startswith("cpu") else graph


def test_compute_is_conserved(real: Graph, tmp_path: Path) -> None:
    exported = export_simai([real], tmp_path / "w.txt")
    assert total_ns(tmp_path / "w.txt") == compute_ns(real)
    parts = (
        exported.forward_ns,
        exported.input_gradient_ns,
        exported.weight_gradient_ns,
        exported.optimizer_ns,
    )
    assert sum(parts) == compute_ns(real)
    assert exported.notes[0].code == "gradients-split-by-operands"


def test_each_gradient_takes_the_forwards_products(real: Graph) -> None:
    """FLOPs of matrix products: X W forward, G W' for the input, X' G for the weight."""
    graph = characterise(real)
    device = graph.gpu_compute | graph.communication
    order = [index for index in graph.topological_order().tolist() if device[index]]
    weights = split_gradients(graph, order).weights
    products = np.array([op in ("aten::mm", "aten::addmm") for op in graph.text("op")])
    products &= graph.nodes.flops > 0
    backward = graph.nodes.phase == Phase.BACKWARD
    flops = [
        int(graph.nodes.flops[products & part].sum())
        for part in (graph.nodes.phase == Phase.FORWARD, backward & ~weights, backward & weights)
    ]
    assert flops[0] > 0
    assert flops[0] == flops[1] == flops[2]


def test_the_output_is_reproducible(real: Graph, tmp_path: Path) -> None:
    first, second = (export_simai([real], tmp_path / name).path.read_bytes() for name in "ab")
    assert first == second


def test_export_holds_every_call_of_the_step(real: Graph, tmp_path: Path) -> None:
    export_simai([real], tmp_path / "w.txt")
    rows = cells(tmp_path / "w.txt")
    sizes = sorted(int(row[at + 1]) for row, at in product(rows, (3, 6, 9)) if row[at] != "NONE")
    full = np.where(real.nodes.collective == Collective.ALL_GATHER, 4, 1) * real.nodes.comm_bytes
    assert sizes == sorted(full[real.communication].tolist())


# SimAI itself ------------------------------------------------------------------------------------

needs_simai = pytest.mark.skipif(
    not SIMAI, reason="SIMAI_ROOT is not set: a checkout of SimAI with bin/SimAI_analytical"
)


def simulated(directory: Path, gpus: int) -> dict[str, float]:
    """Run SimAI-Analytical on `w.txt`; return its totals in microseconds."""
    root = Path(SIMAI).resolve()
    (directory / "results").mkdir()
    (directory / "astra-sim-alibabacloud").symlink_to(root / "astra-sim-alibabacloud")
    network = "-g_p_s 8 -nv 360 -nic 48.5 -n_p_s 8 -r res-".split()
    command = [root / "bin" / "SimAI_analytical", "-w", "w.txt", "-g", str(gpus), *network]
    subprocess.run(command, cwd=directory, capture_output=True, check=True, timeout=120)
    text = next(directory.glob("results/*EndToEnd.csv")).read_text()
    names, values = (line.split(",") for line in text.splitlines()[:2])
    matches = [re.match(r"[\d.]+", value.strip()) for value in values]
    return {
        name.strip(): float(value[0])
        for name, value in zip(names, matches, strict=True)
        if value is not None
    }


@pytest.mark.parametrize(
    ("peer", "leaves"), [(1, False), (2, True), (3, True), (-1, True), (4, True)]
)
def test_messages_of_the_pipeline_go_to_another_stage(peer: int, leaves: bool) -> None:
    step = Step()
    step.compute("m.0", Phase.FORWARD, 0, kind=Kind.SEND, comm_dst=peer, comm_bytes=9000)
    graph = step.build(Job(world=World({"cp": 2, "pp": 2})))
    assert leaves_stage(graph.job, graph.node(0)) is leaves


def test_messages_of_a_ring_are_a_loss(tmp_path: Path) -> None:
    step = Step()
    step.compute("m.0", Phase.FORWARD, 10)
    step.compute("m.0", Phase.FORWARD, 0, kind=Kind.SEND, comm_dst=1, comm_bytes=9000)
    step.compute("m.0", Phase.FORWARD, 0, kind=Kind.RECV, comm_src=1, comm_bytes=9000)
    exported = export_simai([step.build(Job(world=World({"cp": 2})))], tmp_path / "w.txt")
    assert [loss for loss in exported.losses if "pp_comm" in loss] == []
    assert len([loss for loss in exported.losses if "18000 bytes" in loss]) == 1


@needs_simai
def test_simai_computes_what_the_graph_does(real: Graph, tmp_path: Path) -> None:
    """TP 4 of 33.5 MB all-reduces: compute to the microsecond, communication by bus bandwidth."""
    export_simai([real], tmp_path / "w.txt")
    totals = simulated(tmp_path, 4)
    assert totals["total comp"] == pytest.approx(compute_ns(real) / 1000, abs=1)
    assert totals["Expose TP comm"] > 0


@needs_simai
def test_simais_bubble_excludes_the_optimizer(tmp_path: Path) -> None:
    """(P - 1) micro-batches of forward and backward; the optimizer is no part of it."""
    export_simai(
        captures(), tmp_path / "w.txt", schedule=PipelineSchedule.parse("1f1b"), micro_batches=8
    )
    totals = simulated(tmp_path, 4)
    both_us = (FORWARD_NS + INPUT_NS + WEIGHT_NS) / 1000
    assert totals["bubble time"] == pytest.approx(3 * both_us, abs=1)
    assert totals["total comp"] == pytest.approx(8 * both_us + OPTIMIZER_NS / 1000, abs=1)
