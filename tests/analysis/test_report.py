"""The interactive report: its charts show the trace's own figures, and a browser draws them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from kept_traces import kept_graph

from onerank.analysis.report_data import (
    memory_chart,
    module_tree,
    roofline,
    step_parts,
    stream_spans,
)
from onerank.analysis.step_time import replay
from onerank.analysis.summary import summarise
from onerank.annotate import recost
from onerank.annotate.memory.memory_report import report_memory
from onerank.cli import onerank
from onerank.cli.charts import trace_charts as charts
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Graph
from onerank.ir.replay import schedule

TRACES = Path(__file__).parents[2] / "traces"


@pytest.fixture(scope="module")
def gpu() -> Graph:
    return convert_directory(TRACES / "h200-llama-8b-4l-tp4-standin")[0]


@pytest.fixture(scope="module")
def cpu() -> Graph:
    return convert_directory(TRACES / "cpu-llama-2l-tp4")[0]


def test_parts_add_up_to_the_steady_state_step(tmp_path):
    # Its host was timed without a profiler, so its steady-state step is known.
    graph = kept_graph("h200-llama-8b-4l-tp2-real/slice.0", tmp_path)
    done = replay(graph)
    assert done.steady_state is not None
    parts = {part.name: part.time_ns for part in step_parts(summarise(graph).by_class, done)}
    step = done.steady_state
    assert step.step_ns - len(parts) < sum(parts.values()) <= step.step_ns
    assert parts["communication"] == step.exposed_communication_ns
    assert list(parts)[:2] == ["gemm", "optimizer"]


def test_parts_of_a_cpu_capture_add_up_to_the_replayed_step(cpu):
    done = replay(cpu)
    assert done.steady_state is None
    total = sum(part.time_ns for part in step_parts(summarise(cpu).by_class, done))
    assert done.step_time_ns - 12 < total <= done.step_time_ns


def test_the_timeline_has_every_operation_of_the_gpu(gpu):
    (lane,) = stream_spans(gpu, schedule(gpu))
    assert lane.title == "stream 7"
    counts = {span.name: len(span.start_ns) for span in lane.spans}
    assert counts["communication"] == 21
    assert sum(counts.values()) == 850 + 21
    time = sum(int(s.duration_ns.sum()) for s in lane.spans if s.name != "communication")
    assert time == gpu.nodes.duration_ns[gpu.gpu_compute].sum()


def test_a_long_timeline_keeps_its_longest_operations(gpu, monkeypatch):
    monkeypatch.setattr(charts, "MOST_SPANS", 100)
    lanes = stream_spans(gpu, schedule(gpu))
    figure, dropped = charts.timeline_chart(gpu, lanes)
    drawn = [length for bar in figure["data"] for length in bar["x"]]
    assert len(drawn) + dropped == 871
    assert 0 < len(drawn) <= 100
    longest = sorted(int(ns) for lane in lanes for s in lane.spans for ns in s.duration_ns)
    assert min(drawn) * 1e6 == pytest.approx(longest[-len(drawn)])


def test_a_cpu_capture_has_a_lane_for_each_thread(cpu):
    lanes = stream_spans(cpu, schedule(cpu))
    assert [lane.title.split()[0] for lane in lanes] == ["thread"] * len(lanes)
    assert "gemm" in {span.name for lane in lanes for span in lane.spans}
    assert roofline(cpu)[0] == []


def test_the_time_of_a_module_includes_its_submodules(gpu):
    tree = {module.path: module for module in module_tree(gpu)}
    total = int(gpu.nodes.duration_ns[gpu.gpu_compute].sum())
    assert tree[""].time_ns == total
    assert tree[""].nodes == 850
    for path, module in tree.items():
        below = [m for m in tree.values() if m.path and m.parent == path]
        assert sum(m.time_ns for m in below) <= module.time_ns
    assert sum(m.time_ns for m in tree.values() if m.path and m.parent == "") == total
    layers = [tree[f"model.layers.{number}"].time_ns for number in range(4)]
    assert tree["model.layers"].time_ns == sum(layers)


def test_kernels_lie_below_the_roof_with_all_their_time(gpu):
    points, dtype = roofline(gpu)
    by_class = {kind.name: kind for kind in points}
    assert dtype == "bfloat16"
    assert int(by_class["gemm"].time_ns.sum()) == 11_283_275  # as `show` has it
    assert 400e12 < by_class["gemm"].flops_per_s.max() < 989.5e12  # the datasheet's dense peak
    assert by_class["elementwise"].intensity.max() < 2 < np.median(by_class["gemm"].intensity)
    assert all(len(kind.kernels) == len(kind.calls) == len(kind.time_ns) for kind in points)


def test_memory_reaches_the_peak_of_the_memory_report(gpu):
    memory, report = memory_chart(gpu), report_memory(gpu)
    assert memory is not None
    total = memory.bytes.sum(axis=0)
    assert int(total.max()) == int(total[memory.peak_event]) == report.peak_bytes == 6_468_319_232
    assert int(total[0]) == report.start_bytes
    at_peak = dict(zip(memory.names, memory.bytes[:, memory.peak_event].tolist(), strict=True))
    assert {name: size for name, size in at_peak.items() if size} == report.classes
    order = list(memory.phases)
    assert order == ["forward", "backward", "optimizer"]
    assert sorted(memory.phases.values()) == list(memory.phases.values())
    assert memory.at_peak == report.modules


def test_a_memory_chart_of_many_events_keeps_the_peak(gpu, monkeypatch):
    monkeypatch.setattr(charts, "_MOST_EVENTS", 50)
    memory = memory_chart(gpu)
    assert memory is not None
    figure = charts.memory_chart(memory, 0)
    heights = np.sum([series["y"] for series in figure["data"]], axis=0)
    assert len(heights) == 50
    assert heights.max() == pytest.approx(6.468319232)


def _page(traces: list[Path], page: Path) -> str:
    done = CliRunner().invoke(onerank, ["report", *map(str, traces), "-o", str(page)])
    assert done.exit_code == 0, done.output
    return page.read_text()


def _figures(page: str) -> dict[str, dict[str, list[dict[str, object]]]]:
    match = re.search(r"^const figures = (.*);$", page, re.MULTILINE)
    assert match is not None
    return json.loads(match[1])


@pytest.mark.parametrize(("name", "expected"), [("gpu", 6), ("cpu", 5), ("H100", 6)])
def test_the_page_stands_alone(tmp_path, request, name, expected):
    graph = recost(request.getfixturevalue("gpu"), "H100") if name == "H100" else (
        request.getfixturevalue(name)
    )  # fmt: skip
    trace = tmp_path / "a <b>.et"
    graph.write(trace)
    page = _page([trace], tmp_path / "report.html")
    assert len(_figures(page)) == expected
    assert "<title>a &lt;b&gt;.et</title>" in page
    assert "Compute by class" in page
    assert "Critical path" in page
    assert 'src="http' not in page
    assert _page([trace], tmp_path / "again.html") == page


def test_two_traces_stand_side_by_side(tmp_path, gpu):
    gpu.write(tmp_path / "a.et")
    recost(gpu, "H100").write(tmp_path / "b.et")
    page = _page([tmp_path / "a.et", tmp_path / "b.et"], tmp_path / "report.html")
    assert len(_figures(page)) == 12
    assert page.count("<h2>Roofline</h2>") == 1


def test_three_traces_are_refused(tmp_path, cpu):
    cpu.write(tmp_path / "a.et")
    page = tmp_path / "report.html"
    done = CliRunner().invoke(onerank, ["report", *[str(tmp_path / "a.et")] * 3, "-o", str(page)])
    assert done.exit_code == 2
    assert not page.exists()


def test_a_name_cannot_end_the_script(tmp_path, cpu):
    names = [f"</script><b>{name}" for name in cpu.text("name")]
    cpu.with_columns(name=names).write(tmp_path / "a.et")
    page = _page([tmp_path / "a.et"], tmp_path / "report.html")
    assert "</script><b>" not in page


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_browser_draws_every_chart(tmp_path, gpu):
    gpu.write(tmp_path / "a.et")
    _page([tmp_path / "a.et"], tmp_path / "report.html")
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync",
               "--disable-quic", f"--user-data-dir={tmp_path / 'profile'}",
               "--virtual-time-budget=20000", "--dump-dom"]  # fmt: skip
    done = subprocess.run(
        [BROWSER, *options, f"file://{tmp_path / 'report.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    drawn = re.findall(r'<div id="figure-0-(\d)" class="js-plotly-plot"', done.stdout)
    assert drawn == ["0", "1", "2", "3", "4", "5"]
    charts_in_page = done.stdout.split('<div id="figure-0-')
    timeline_bars = charts_in_page[2].count('<g class="point">')
    assert timeline_bars == 850 + 21


def test_without_plotly_the_error_says_what_to_install(tmp_path, cpu, monkeypatch):
    cpu.write(tmp_path / "trace.et")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page = tmp_path / "report.html"
    done = CliRunner().invoke(onerank, ["report", str(tmp_path / "trace.et"), "-o", str(page)])
    assert done.exit_code == 2
    assert "error[report-not-installed]" in done.output
    assert not page.exists()
