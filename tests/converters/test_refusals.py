"""What conversion, expansion and exports refuse: each check by its code, on the smallest input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from raised import raises_code
from stages import stage

from onerank.converters.expand.host_delays import insert_host_delays
from onerank.converters.expand.layers import captured_layers, compose, ddp_buckets, nonlayer_nodes
from onerank.converters.expand.pipeline import PipelineSchedule, stages
from onerank.converters.expand.ranks import expand_ranks
from onerank.converters.sources.kineto import collectives, rank_directory
from onerank.converters.sources.kineto.memory_events import read_history
from onerank.converters.sources.kineto.read.json_stream import decode_raw
from onerank.converters.sources.onnx import model as onnx_model
from onerank.converters.targets import goal
from onerank.converters.targets.goal_collectives import CollectiveCall
from onerank.converters.targets.simai import rows as simai_rows
from onerank.converters.targets.simai.exporter import export_simai
from onerank.ir import Collective, Graph, GraphBuilder, Job, Kind, Phase, RankClass, World

EMPTY = GraphBuilder().build(Job())


def kernels(streams: int = 1, **job: Any) -> Graph:
    """Return a graph with a forward kernel of 1 us on each of several streams."""
    builder = GraphBuilder()
    for stream in range(streams):
        builder.add(
            name="gemm", kind=Kind.KERNEL, stream=stream, duration_ns=1000, phase=Phase.FORWARD,
            micro_batch=0,
        )  # fmt: skip
    return builder.build(Job(**job))


def operator() -> Graph:
    """Return a graph with an operator in no layer."""
    builder = GraphBuilder()
    builder.add(name="aten::mm", kind=Kind.HOST_OP, thread=1, duration_ns=10, module="head")
    return builder.build(Job())


def call(size_bytes: int) -> CollectiveCall:
    return CollectiveCall(Collective.ALL_REDUCE, size_bytes, ((0, 1),))


def calls_that_differ() -> None:
    tags = goal.TagAllocator()
    tags.call_tag((0, 1), 0, call(8))
    tags.call_tag((0, 1), 0, call(16))


def call_of_one_member() -> None:
    tags = goal.TagAllocator()
    tags.call_tag((0, 1), 0, call(8))
    tags.check()


GOAL: dict[str, Callable[[Path], Any]] = {
    "goal-calls-differ": lambda _: calls_that_differ(),
    "goal-calls-missing": lambda _: call_of_one_member(),
    "goal-too-many-tags": lambda _: goal.TagAllocator()._allocate(2**32),
    "goal-too-many-cpus": lambda path: goal.export_goal(kernels(goal.MOST_CPUS + 1), path, ranks=2),
    "goal-gpus-per-node": lambda path: goal.export_goal(kernels(), path, ranks=2, gpus_per_node=0),
}

SIMAI: dict[str, Callable[[Path], Any]] = {
    "simai-no-trace": lambda path: export_simai([], path),
    "simai-other-job": lambda path: export_simai(
        [stage(0, 2), stage(1, 2, world=World.of(pp=2, dp=2))],
        path,
        schedule=PipelineSchedule.parse("1f1b"),
    ),
    "simai-row-too-long": lambda _: simai_rows._split(
        simai_rows.WorkloadRow("layer", forward_ns=10_001 * simai_rows.LARGEST_NS)
    ),
    "simai-too-many-bytes": lambda path: export_simai([moving(2**50)], path),
}


def moving(size_bytes: int) -> Graph:
    """Return a step with an all-reduce of a world of two."""
    builder = GraphBuilder()
    builder.add(name="gemm", kind=Kind.KERNEL, stream=7, duration_ns=1000, phase=Phase.FORWARD)
    builder.add(
        name="all_reduce", kind=Kind.COLLECTIVE, collective=Collective.ALL_REDUCE, stream=8,
        comm_bytes=size_bytes, phase=Phase.FORWARD,
    )  # fmt: skip
    return builder.build(Job(world=World.of(dp=2)))


EXPORTS = GOAL | SIMAI


@pytest.mark.parametrize("code", EXPORTS)
def test_exports(code: str, tmp_path: Path) -> None:
    with raises_code(code):
        EXPORTS[code](tmp_path / "out.txt")
    assert not [*tmp_path.iterdir()]


def peer_off_the_axis() -> None:
    world = World.of(tp=2, pp=2)
    graph = stage(0, 2, world=world)
    rows = np.flatnonzero(graph.mask(Kind.SEND, Kind.RECV))
    stages._at_point(
        graph.with_columns(**peers(graph, rows, world.first({"tp": 1, "pp": 1}))), (("tp", 1),)
    )


def peers(graph: Graph, rows: Any, rank: int) -> dict[str, Any]:
    """Return columns in which communication of these nodes goes to `rank`."""
    columns = {}
    for name in ("comm_src", "comm_dst"):
        column = getattr(graph.nodes, name).copy()
        column[rows] = np.where(column[rows] >= 0, rank, column[rows])
        columns[name] = column
    return columns


def other_world() -> None:
    first, second = kernels(world=World.of(dp=2)), kernels(world=World.of(dp=4), rank=1)
    expand_ranks([first, second])


def rank_of_no_class() -> None:
    job = {"world": World.of(dp=2), "classes": (RankClass(1, {"dp": (1,)}),)}
    expand_ranks([kernels(**job, rank=rank) for rank in (0, 1)])


EXPANDED: dict[str, Callable[[], Any]] = {
    "pipeline-no-trace": lambda: stages.group_stages([]),
    "pipeline-missing-phase": lambda: stages.split_into_blocks(kernels()),
    "pipeline-peer-off-axis": peer_off_the_axis,
    "ranks-different-worlds": other_world,
    "ranks-no-class": rank_of_no_class,
    "host-delays-no-kernels": lambda: insert_host_delays(EMPTY),
    "depth-no-layer-nodes": lambda: captured_layers.find_layers(operator(), "model.layers", 2),
    "depth-interleaved-layers": lambda: captured_layers._add_pass(
        SimpleNamespace(layers=2, module="model.layers"),  # type: ignore[arg-type]
        captured_layers.LayerPass(1, "forward", ascending=True),
        [0, 1, 2],
        [(0, 0), (1, 1), (2, 0)],
    ),
    "depth-scattered-nodes": lambda: compose._lane_with_copies(
        SimpleNamespace(
            deep=SimpleNamespace(graph=kernels(3)),
            section_of=np.array([0, 1, 0]),
            sections=[compose.Section([0], 1, before=False)] * 2,
            number={},
        ),  # type: ignore[arg-type]
        [0, 1, 2],
    ),
    "depth-different-threads": lambda: nonlayer_nodes._threads(
        SimpleNamespace(lanes=[("thread", 1)], passes=[]),  # type: ignore[arg-type]
        SimpleNamespace(lanes=[("thread", 1), ("thread", 2)], passes=[]),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("code", EXPANDED)
def test_expansions(code: str) -> None:
    with raises_code(code):
        EXPANDED[code]()


def test_ddp_buckets_of_unknown_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp_buckets, "find_buckets", lambda _: None)
    with raises_code("depth-ddp-bucket-order"):
        ddp_buckets.insert_bucket_calls(EMPTY, None)  # type: ignore[arg-type]


def test_a_history_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "history.0.json"
    path.write_text("[]")
    with raises_code("history-malformed", naming=str(path)):
        read_history(path)


def test_an_operand_that_is_not_utf8(tmp_path: Path) -> None:
    with raises_code("trace-not-utf8", naming="et.json"):
        [*decode_raw(tmp_path / "et.json", [msgspec.Raw(b'"\xff"')])]


def test_a_step_of_a_capture(tmp_path: Path) -> None:
    rank = rank_directory.Rank("trace.0", tmp_path)
    with raises_code("step-of-capture", naming="--step 3"):
        rank_directory.convert_ranks([rank], tmp_path / "out", step="3")
    assert not [*tmp_path.iterdir()]


def test_a_mark_without_execution_trace_node() -> None:
    rows = SimpleNamespace(rf_id=np.array([17]))
    timeline: Any = SimpleNamespace(et=np.array([-1]), rows=rows, name=lambda _: "wait")
    et: Any = SimpleNamespace(path=Path("et.json"))
    with raises_code("trace-mark-not-in-et", naming=("et.json", "record id 17")):
        collectives.awaited_call(timeline, 0, et)


def test_onnx_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"12345")
    with raises_code("onnx-name-not-utf8", naming="node 3"):
        onnx_model._check_text("node 3", "fine", b"\xff")
    monkeypatch.setattr(onnx_model, "_MAX_FILE_BYTES", 4)
    with raises_code("onnx-file-too-large", naming=("5 bytes", "4", str(path))):
        onnx_model._read(path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with raises_code("onnx-not-installed", naming=str(path)):
        onnx_model._read(path)
