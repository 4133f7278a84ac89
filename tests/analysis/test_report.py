"""The page of pictures and tables: what they show, held against the trace's own figures."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from onerank.analysis.report_data import kernels_of, lanes_of, memory_of, parts_of
from onerank.analysis.step_time import replay
from onerank.analysis.summary import summarise
from onerank.annotate import recost
from onerank.annotate.memory.memory_report import report_memory
from onerank.cli import onerank
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Graph
from onerank.ir.replay.scheduler import schedule

TRACES = Path(__file__).parents[2] / "traces"


@pytest.fixture(scope="module")
def gpu() -> Graph:
    return convert_directory(TRACES / "h200-llama-8b-4l-tp4-standin")[0]


@pytest.fixture(scope="module")
def cpu() -> Graph:
    return convert_directory(TRACES / "cpu-llama-2l-tp4")[0]


def test_parts_add_up_to_the_replayed_step(gpu):
    done = replay(gpu)
    parts = {part.name: part.time_ns for part in parts_of(summarise(gpu).by_class, done)}
    assert done.step_time_ns - len(parts) < sum(parts.values()) <= done.step_time_ns
    assert parts["communication"] == done.exposed_communication_ns
    assert list(parts)[:2] == ["gemm", "elementwise"]


def test_lanes_hold_every_operation_of_the_gpu(gpu):
    (lane,) = lanes_of(gpu, schedule(gpu))
    assert lane.title == "stream 7"
    counts = {span.name: len(span.start_ns) for span in lane.spans}
    assert counts["communication"] == 21
    assert sum(counts.values()) == 850 + 21
    time = sum(int(s.duration_ns.sum()) for s in lane.spans if s.name != "communication")
    assert time == gpu.nodes.duration_ns[gpu.gpu_compute].sum()


def test_a_cpu_capture_has_a_lane_for_each_thread(cpu):
    lanes = lanes_of(cpu, schedule(cpu))
    assert [lane.title.split()[0] for lane in lanes] == ["thread"] * len(lanes)
    assert "gemm" in {span.name for lane in lanes for span in lane.spans}
    assert kernels_of(cpu)[0] == []


def test_kernels_lie_below_the_roof_with_all_their_time(gpu):
    made, dtype = kernels_of(gpu)
    found = {kernels.name: kernels for kernels in made}
    assert dtype == "bfloat16"
    assert int(found["gemm"].time_ns.sum()) == 11_283_275  # as `show` has it
    assert 400e12 < found["gemm"].flops_per_s.max() < 989.5e12  # the datasheet's dense peak
    assert found["elementwise"].intensity.max() < 2 < np.median(found["gemm"].intensity)


def test_memory_reaches_the_peak_of_the_memory_report(gpu):
    course, report = memory_of(gpu), report_memory(gpu)
    assert course is not None
    total = course.bytes.sum(axis=0)
    assert int(total.max()) == report.peak_bytes == 6_468_319_232
    assert int(total[0]) == report.start_bytes
    at_peak = dict(zip(course.names, course.bytes[:, int(np.argmax(total))].tolist(), strict=True))
    assert {name: size for name, size in at_peak.items() if size} == report.classes
    order = list(course.phases)
    assert order == ["forward", "backward", "optimizer"]
    assert sorted(course.phases.values()) == list(course.phases.values())


@pytest.mark.parametrize(("name", "pictures"), [("gpu", 4), ("cpu", 3), ("H100", 4)])
def test_the_page_stands_alone(tmp_path, request, name, pictures):
    graph = recost(request.getfixturevalue("gpu"), "H100") if name == "H100" else (
        request.getfixturevalue(name)
    )  # fmt: skip
    trace, page = tmp_path / "a <b>.et", tmp_path / "report.html"
    graph.write(trace)
    done = CliRunner().invoke(onerank, ["report", str(trace), "-o", str(page)])
    assert done.exit_code == 0, done.output
    assert f"{page}: {pictures} pictures and the tables of show and replay" in done.output
    text = page.read_text()
    assert "<title>a &lt;b&gt;.et</title>" in text
    drawn = [part.split("</svg>")[0] for part in text.split("<svg")[1:]]
    assert len(drawn) == pictures
    for picture in drawn:
        ElementTree.fromstring(f"<svg{picture}</svg>")
    assert "Compute by class" in text
    assert "Critical path" in text
    assert 'src="http' not in text
    again = tmp_path / "again.html"
    CliRunner().invoke(onerank, ["report", str(trace), "-o", str(again)])
    assert again.read_text() == text


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, cpu, monkeypatch):
    cpu.write(tmp_path / "trace.et")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = tmp_path / "report.html"
    done = CliRunner().invoke(onerank, ["report", str(tmp_path / "trace.et"), "-o", str(page)])
    assert done.exit_code == 2
    assert "pip install 'onerank[report]'" in done.output
    assert not page.exists()
