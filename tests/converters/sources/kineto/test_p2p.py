"""Messages between two ranks on two H200s, recorded by `traces/h200-p2p-2-ranks/record.py`."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from notes import has_note

from onerank.analysis.step_time import replay
from onerank.converters.sources.kineto import Conversion, Sources, convert
from onerank.ir import Graph, Kind, Reason

FOLDER = Path(__file__).parents[4] / "traces" / "h200-p2p-2-ranks"
LARGE, SMALL = 2048 * 4096 * 2, 4096 * 4  # bfloat16, float32


@pytest.fixture(scope="module", params=[0, 1])
def rank(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def converted(rank: int) -> tuple[Graph, Conversion]:
    return convert(
        Sources(FOLDER / f"kineto.rank{rank}.json.gz", FOLDER / f"et.rank{rank}.json.gz")
    )


def recorded(rank: int) -> list[dict[str, Any]]:
    """Return NCCL's kernels of the step that sent or received, by start."""
    events = json.loads(gzip.decompress((FOLDER / f"kineto.rank{rank}.json.gz").read_bytes()))
    launched = {
        event["args"].get("correlation")
        for event in events["traceEvents"]
        if event.get("cat") in {"cuda_runtime", "cuda_driver"}
    }
    chosen = [
        event
        for event in events["traceEvents"]
        if event.get("cat") == "kernel" and event["name"].startswith("ncclDevKernel_SendRecv")
    ]
    of_step = [event for event in chosen if event["args"]["correlation"] in launched]
    return sorted(of_step, key=lambda event: event["ts"])


def test_each_message_has_its_peer_and_bytes(converted, rank):
    graph, report = converted
    calls = [graph.node(i) for i in np.flatnonzero(graph.communication).tolist()]
    figures = [
        (call.kind.name, call.value("comm_dst"), call.value("comm_src"), call.value("comm_bytes"))
        for call in calls
    ]
    send, receive = ("SEND", 1 - rank, -1), ("RECV", -1, 1 - rank)
    single = [(*send, LARGE), (*receive, LARGE)]
    assert figures == [
        *[(*send, LARGE), (*receive, LARGE)] * 4,
        *(single if rank == 0 else single[::-1]),
        *[(*send, LARGE), (*send, SMALL), (*receive, LARGE), (*receive, SMALL)],
        ("COLLECTIVE", -1, -1, 4),
    ]
    assert {call.text("group") for call in calls} == {"default_pg"}
    assert has_note(report.notes, "nccl-kernel-of-several-calls", 5)


def test_batches_are_found_in_a_window_for_times_too(converted, rank):
    """Profiled windows have no events for launches outside operators."""
    times = FOLDER / f"kineto.rank{rank}.json.gz"
    graph, _ = convert(Sources(times, FOLDER / f"et.rank{rank}.json.gz", (times,)))
    for column in ("comm_dst", "comm_src", "comm_bytes", "duration_ns"):
        column_values, expected = (
            getattr(one.nodes, column)[one.communication] for one in (graph, converted[0])
        )
        assert column_values.tolist() == expected.tolist()


def test_calls_among_one_rank_are_of_no_kernel():
    """Megatron-core also calls groups of one rank, between the batches of its pipeline."""
    raw = FOLDER.with_name("h200-megatron-core-pp2")
    structure, et, times = (raw / f"{k}.json.gz" for k in ("structure", "et", "profile"))
    graph, report = convert(Sources(structure, et, (times,)))
    calls = [graph.node(i) for i in np.flatnonzero(graph.communication).tolist()]
    figures = Counter((call.kind, call.text("group"), call.value("comm_bytes")) for call in calls)
    pipeline = ("PIPELINE_MODEL_PARALLEL_GROUP", 1024 * 1024 * 2)
    assert figures == {
        (Kind.SEND, *pipeline): 4,
        (Kind.RECV, *pipeline): 4,
        (Kind.COLLECTIVE, "MODEL_PARALLEL_GROUP", 4): 1,
    }
    assert has_note(report.notes, "nccl-kernel-of-several-calls", 3)


def test_the_calls_of_a_batch_share_the_time_of_its_kernel(converted, rank):
    graph, _ = converted
    kernels = recorded(rank)
    messages = (graph.nodes.kind == Kind.SEND) | (graph.nodes.kind == Kind.RECV)
    lasted = graph.nodes.duration_ns[messages].tolist()
    own = iter(lasted)
    for kernel, calls in zip(kernels, [2, 2, 2, 2, 1, 1, 4], strict=True):
        shares = [next(own) for _ in range(calls)]
        assert sum(shares) == round(kernel["dur"] * 1000)
        assert max(shares[:2]) - min(shares[:1]) <= 1 or calls != 2


def test_it_replays_as_measured(converted, rank):
    done = replay(converted[0])
    assert done.measured_ns is not None
    assert abs(done.step_time_ns / done.measured_ns - 1) < 0.01
    assert done.unexplained_ns == 0
    kineto_only, _ = convert(Sources(FOLDER / f"kineto.rank{rank}.json.gz", operators=True))
    assert replay(kineto_only).step_time_ns == done.step_time_ns


def test_a_batch_waits_for_what_computed_what_it_sends():
    """Without synchronisation events, by the records and waits of events around NCCL's call.

    In two of the batches, NCCL's kernel also waited for the last blocks of another kernel.
    """
    graph, _ = convert(Sources(FOLDER / "kineto.rank0.json.gz", FOLDER / "et.rank0.json.gz"))
    sends: list[int] = np.flatnonzero(graph.nodes.kind == Kind.SEND).tolist()
    reasons: list[set[Reason]] = []
    for send in sends[1:4]:  # what the first waited for, GELU too, was launched within the step
        waited = [(graph.node(s).name, why) for s, why in graph.edges.of(send)]
        assert any("GeluCUDAKernel" in name for name, why in waited if why is Reason.SYNC)
        reasons.append({why for _, why in waited})
    assert [Reason.ROOM in one for one in reasons] == [False, True, True]
