"""Traces with very many events of one kind: fast searches give the results of plain ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from onerank.converters.sources.kineto import Sources, convert
from onerank.converters.sources.kineto.link.host_timeline import NONE, HostTimeline, host_timeline
from onerank.converters.sources.kineto.lowering import sync_edges
from onerank.converters.sources.kineto.memory_events import AllocatorAction, History, join_history
from onerank.converters.sources.kineto.read.execution_trace import without_placeholders
from onerank.converters.sources.kineto.read.kineto_trace import load_kineto
from onerank.converters.sources.kineto.read.trace_columns import MemoryRows
from onerank.ir import Graph
from onerank.ir.replay import schedule

DEPTH = 100
"""More callers than are climbed step by step."""


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": ts, "dur": dur, "args": args}


def timeline_of(directory: Path, events: list[dict]) -> HostTimeline:
    path = directory / "k.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return host_timeline(load_kineto(path))


def nest(cat: str) -> list[dict]:
    """Return events 0 to DEPTH - 1, each in the previous one; event i ends at 1000 - i."""
    return [event(cat, f"aten::n{i}", i, 1000 - 2 * i) for i in range(DEPTH)]


def test_the_innermost_event_of_a_deep_nest(tmp_path: Path) -> None:
    timeline = timeline_of(tmp_path, nest("cpu_op"))
    ends_us = 1000 - np.arange(DEPTH)
    times = np.array([150, 905, 950, 999, 1000, 1001]) * 1000
    around = timeline.innermost(np.zeros(len(times), dtype=np.int64), times)
    expected = [np.flatnonzero(ends_us >= time // 1000).max(initial=NONE) for time in times]
    assert around.tolist() == expected == [99, 95, 50, 1, 0, NONE]


def test_the_operator_and_the_outermost_event_of_a_deep_nest(tmp_path: Path) -> None:
    notes = nest("user_annotation")
    events = [event("cpu_op", "aten::outer", -1, 2000), *notes]
    timeline = timeline_of(tmp_path, events)
    assert timeline.operator(np.array([DEPTH, 1, 0, NONE])).tolist() == [0, 0, 0, NONE]
    assert timeline.outermost(~timeline.rows.is_operator).tolist() == [NONE, *[1] * DEPTH]
    assert timeline_of(tmp_path, notes).operator(np.array([DEPTH - 1])).tolist() == [NONE]


def test_a_history_is_found_among_equal_events() -> None:
    """A match of bytes that begins inside an integer does not count."""
    address = np.array([256, 256, 256, 1, 256], dtype=np.int64)
    zeros = np.zeros(5, dtype=np.int64)
    rows = MemoryRows(zeros, np.arange(5), zeros, np.ones(5, dtype=np.int64), address, *[zeros] * 4)
    for first, expected in ((1, [0, 1, 1, 1, 0]), (2, [0, 0, 1, 1, 1])):
        wanted = address[first : first + 3].tolist()
        history = History(
            (AllocatorAction.ALLOCATED,) * 3,
            tuple(wanted),
            bytes=(1,) * 3,
            pool=(1,) * 3,
            lingers=(0,) * 3,
        )
        columns = join_history(history, rows)
        assert columns is not None
        assert columns.pool.tolist() == expected
    other = History(
        (AllocatorAction.ALLOCATED,) * 2, (256, 2), bytes=(1, 1), pool=(1, 1), lingers=(0, 0)
    )
    assert join_history(other, rows) is None


def test_placeholders_in_any_order() -> None:
    node = np.arange(1, 60)
    marks = np.array([30, 40, 10, 20, 12, 15, 50])
    caller = without_placeholders(node, node, marks)
    placeholders = [*range(11, 20), *range(31, 40)]
    assert np.flatnonzero(caller != node).tolist() == [number - 1 for number in placeholders]
    assert set(caller[np.array(placeholders) - 1].tolist()) == {1}


def waits_on_streams(directory: Path, streams: int) -> Graph:
    """Convert kernels on some streams, with a device-wide wait after every fifth launch."""
    random = np.random.default_rng(0)
    events = [event("cpu_op", "aten::step", 0, 1e6)]
    for number in range(200):
        ts, launch = 20.0 * number, number + 1
        stream = int(random.integers(streams))
        events += [
            event("cpu_op", "aten::a", ts, 9.0),
            event("cuda_runtime", "cudaLaunchKernel", ts + 1, 2.0, correlation=launch),
            event("kernel", "k", ts + 5, float(random.integers(1, 60)), correlation=launch,
                  stream=stream, device=0),
        ]  # fmt: skip
        if number % 5 == 4:
            call, wait = "cudaDeviceSynchronize", 1000 + number
            events += [
                event("cuda_runtime", call, ts + 10, 6.0, correlation=wait),
                event("cuda_sync", "Context Sync", ts + 10, 6.0, correlation=wait, stream=-1),
            ]
    path = directory / "k.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return convert(Sources(path, operators=True))[0]


@pytest.mark.parametrize("streams", [3, 90])
def test_device_wide_waits_on_many_streams(tmp_path: Path, monkeypatch, streams) -> None:
    """Edges that the order of the thread implies are left out, and change no time."""
    monkeypatch.setattr(sync_edges, "_MANY_STREAMS", 1000)
    every_edge = waits_on_streams(tmp_path, streams)
    monkeypatch.setattr(sync_edges, "_MANY_STREAMS", 1)
    fewer_edges = waits_on_streams(tmp_path, streams)
    assert len(fewer_edges.edges) < len(every_edge.edges)
    assert schedule(fewer_edges).end_ns.tolist() == schedule(every_edge).end_ns.tolist()
    assert fewer_edges.nodes.blocked_ns.tolist() == every_edge.nodes.blocked_ns.tolist()
