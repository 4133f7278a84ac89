"""Timelines, tables, drawings and JSON of a real capture."""

import gzip
import json
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner
from raised import raises_code

import onerank
from onerank.cli import onerank as command
from onerank.converters.sources.kineto import convert_directory
from onerank.converters.targets.parquet_graphviz import to_dot
from onerank.converters.targets.perfetto import perfetto_events
from onerank.ir import Graph, GraphBuilder, Job, Kind, Reason

CAPTURE = Path(__file__).parents[3] / "traces" / "h200-llama-8b-4l-tp4"


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "step.et"
    convert_directory(CAPTURE)[0].write(path)
    return path


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(command, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_timeline_of_the_h200_capture(trace, tmp_path):
    target = tmp_path / "timeline.json.gz"
    assert "slices" in run("export", "perfetto", trace, "-o", target)
    events = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    graph = onerank.read(trace)
    assert len(slices) == len(graph)
    kernels = [s for s in slices if s["cat"] in ("kernel", "memcpy", "memset")]
    assert len(kernels) == 850
    assert round(sum(s["dur"] for s in kernels) * 1000) == 29_865_307
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert any(name.startswith("stream ") for name in names)
    memory = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert memory
    assert 0.9 * 6_468_319_232 < max(memory) <= 6_468_319_232
    flows = Counter(e["ph"] for e in events if e["ph"] in "sf")
    assert flows["s"] == flows["f"] > 0


def test_nothing_overlaps_on_a_track_of_a_timeline(trace, tmp_path):
    """Viewers drop overlapping slices: an operator's slice ends where the next one starts."""
    target = tmp_path / "timeline.json"
    run("replay", trace, "--perfetto", target)
    events = json.loads(target.read_text())["traceEvents"]
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    ends: dict[tuple[int, int], float] = {}
    for event in events:
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert event["ts"] >= ends.get(track, 0) - 1e-6
            ends[track] = event["ts"] + event["dur"]
    assert any("own_ns" in event.get("args", {}) for event in events)


def test_concurrent_kernels_of_a_stream_get_separate_tracks():
    builder = GraphBuilder()
    for start, name in ((0, "long"), (5, "within"), (20, "behind")):
        builder.add(name=name, kind=Kind.KERNEL, stream=7, start_ns=start, duration_ns=10)
    events = perfetto_events(builder.build(Job()))
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks = {e["name"]: named[e["tid"]] for e in events if e["ph"] == "X"}
    concurrent = "stream 7, at once 1"
    assert tracks == {"long": "stream 7", "within": concurrent, "behind": "stream 7"}


def test_timelines_are_the_same_each_time(trace):
    graph = onerank.read(trace)
    assert perfetto_events(graph) == perfetto_events(graph)


def test_tables_hold_every_node_and_edge(trace, tmp_path):
    run("export", "parquet", trace, "-o", tmp_path / "tables")
    nodes = pl.read_parquet(tmp_path / "tables" / "nodes.parquet")
    edges = pl.read_parquet(tmp_path / "tables" / "edges.parquet")
    graph = onerank.read(trace)
    assert (len(nodes), len(edges)) == (len(graph), len(graph.edges))
    gpu = nodes.filter(pl.col("kind").is_in(["kernel", "memcpy", "memset"]))
    assert gpu["duration_ns"].sum() == 29_865_307


def two_nodes(*, name: str = 'a "quoted" name') -> Graph:
    builder = GraphBuilder()
    first = builder.add(name=name, kind=Kind.HOST_OP, duration_ns=1500)
    second = builder.add(name="kernel", kind=Kind.KERNEL, duration_ns=2500, start_ns=1500)
    builder.edge(first, second, Reason.LAUNCH)
    return builder.build(Job())


def test_drawing():
    assert to_dot(two_nodes()).splitlines()[2:5] == [
        '  0 [label="a \\"quoted\\" name\\n1.5 us", shape=ellipse];',
        '  1 [label="kernel\\n2.5 us", shape=box];',
        '  0 -> 1 [style=dashed, tooltip="launch"];',
    ]


def test_a_graph_too_large_to_draw():
    builder = GraphBuilder()
    for _ in range(5001):
        builder.add(name="n")
    with raises_code("dot-too-large"):
        to_dot(builder.build(Job()))


def test_json_there_and_back_is_the_same_graph(trace, tmp_path):
    text, back = tmp_path / "step.json", tmp_path / "back.et"
    run("export", "chakra-json", trace, "-o", text)
    run("convert", text, "-o", back)
    first, second = onerank.read(trace), onerank.read(back)
    assert first.nodes_frame().equals(second.nodes_frame())
    assert first.edges_frame().equals(second.edges_frame())
    assert first.job == second.job


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "error[chakra-json-empty]: {path}"),
        ('{"version": "1.0.0"}\n{"id": "1",', "error[chakra-json-malformed]: {path}: line 2"),
        (
            '{"version": "1.0.0"}\n\n{"id": "1", "colour": 3}',
            "error[chakra-json-schema]: {path}: line 3:",
        ),
        ('{"version": "1.0.0"}\n[1]', "error[chakra-json-schema]: {path}: line 2:"),
        ('{"version": "1.0.0"}' + "[" * 100_000, "error[chakra-json-malformed]: {path}: line 1"),
    ],
)
def test_bad_json_names_the_line_and_writes_nothing(tmp_path, text, message):
    path, target = tmp_path / "bad.json", tmp_path / "out.et"
    path.write_text(text)
    result = CliRunner().invoke(command, ["convert", str(path), "-o", str(target)])
    assert result.exit_code == 2
    assert message.format(path=path) in " ".join(result.output.split())
    assert not target.exists()


def test_json_that_is_not_utf8(tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(b'{"version": "\xff"}')
    result = CliRunner().invoke(command, ["convert", str(path), "-o", str(tmp_path / "out.et")])
    assert result.exit_code == 2
    assert f"error[chakra-json-not-utf8]: {path}: byte 13" in " ".join(result.output.split())
