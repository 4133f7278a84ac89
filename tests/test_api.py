"""The public names, and the library as a user would call it."""

import doctest
import operator
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import networkx as nx
import pytest
from kept_traces import unpack
from own_process import call
from raised import raises_code

import onerank
from onerank.converters.sources.kineto import convert_directory
from onerank.display import Displayed, Records
from onerank.ir.errors import CaptureError, ExportError, FormatError, ScriptError

TRACES = Path(__file__).parents[1] / "traces"

RAW = TRACES / "h200-llama-8b-4l-tp4"

SCRIPT = """
import sys
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
while True:
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("api") / "trace.et"
    convert_directory(RAW)[0].write(path)
    return path


@pytest.fixture(scope="module")
def slice_trace(tmp_path_factory) -> Path:
    """Rank 0 of TP=2 of four Llama-8B layers, captured on one H200."""
    return unpack("h200-llama-8b-4l-tp2-real/slice.0", tmp_path_factory.mktemp("slice"))


def test_public_names():
    for name in onerank.__all__:
        assert getattr(onerank, name).__doc__
    for name in onerank.export.__all__:
        assert getattr(onerank.export, name).__doc__
    assert onerank.capture.run.__doc__


def test_examples_of_the_reference_run(slice_trace, tmp_path, monkeypatch):
    (tmp_path / "trace.et").symlink_to(slice_trace)
    (tmp_path / "raw").symlink_to(TRACES / "cpu-llama-2l-tp4")
    (tmp_path / "prices.toml").symlink_to(TRACES.parent / "examples" / "prices.toml")
    monkeypatch.chdir(tmp_path)
    page = (TRACES.parent / "docs" / "reference" / "python.md").read_text()
    names = re.findall(r"^::: onerank\.((?:export\.)?[a-z_]+)$", page, re.MULTILINE)
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    for name in names:
        function = operator.attrgetter(name)(onerank)
        examples = parser.get_doctest(function.__doc__, {"onerank": onerank}, name, None, None)
        # Those that register an operator have an example whose effect lasts.
        assert examples.examples or name.startswith("register_"), name
        runner.run(examples)
    assert runner.summarize(verbose=False).failed == 0
    assert len(names) == 17


def test_importing_it_is_light():
    """Neither torch nor polars nor protobuf is loaded before it is needed."""
    heavy = "{'torch', 'polars', 'google.protobuf', 'numpy', 'networkx', 'rich', 'transformers'}"
    imports = "import sys, onerank, onerank.cli, onerank.capture, onerank.export"
    code = f"{imports}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_capture_loads_no_torch_in_the_calling_process(tmp_path):
    """Numbers of the script's own are those of the command line."""
    (tmp_path / "train.py").write_text(SCRIPT)
    code = (
        "import sys, onerank\n"
        "options = dict(dp=2, warm_up=1, timed_steps=1)\n"
        "graphs = onerank.capture.run('train.py', ['0.5'], ranks=[1, 0], **options)\n"
        "print({rank: graph.job.rank for rank, graph in graphs.items()})\n"
        "calls = int(graphs[0].communication.sum())\n"
        "print(calls, graphs[0].job.world.size, {'torch', 'click'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    # DDP has one bucket.
    assert done.stdout.splitlines() == ["{0: 0, 1: 1}", "1 2 set()"]
    assert "· " in done.stderr


def test_a_capture_of_one_rank_is_a_graph_and_of_distinct_ranks_a_graph_each(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = {"dp": 2, "warm_up": 1, "timed_steps": 1}
    graph = call(onerank.capture.run, script, ["0.5"], **options)
    assert (int(graph.communication.sum()), graph.job.world.size) == (1, 2)
    graphs = call(onerank.capture.run, script, ["0.5"], ranks="distinct", **options)
    assert [*graphs] == [0]
    assert int(graphs[0].communication.sum()) == 1


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"tp": 0}, "option-out-of-range"),
        ({"tp": "two"}, "option-out-of-range"),
        ({"tp_style": "other"}, "option-not-a-choice"),
        ({"collective_kernels": "maybe"}, "option-not-a-choice"),
        ({"warm_up": 0}, "option-out-of-range"),
        ({"sharding_plan": "absent.toml"}, "file-unreadable"),
    ],
)
def test_a_wrong_option_of_a_capture_is_an_error_before_the_script_runs(tmp_path, options, code):
    (tmp_path / "train.py").write_text("raise AssertionError")
    with raises_code(code, CaptureError):
        onerank.capture.run(tmp_path / "train.py", **options)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"ranks": [0, 2]}, "ranks-out-of-range"),
        ({"ranks": [1, 1]}, "ranks-repeated"),
        ({"ranks": "all"}, "option-not-a-choice"),
        ({"ranks": [0, 1], "rank": 1}, "ranks-with-rank"),
        ({"ranks": "distinct", "compile": "default"}, "ranks-with-compile"),
        ({"ranks": "distinct", "record_real_job": True}, "ranks-with-real-job"),
        ({"compile": "fast"}, "option-not-a-choice"),
        ({"compile": "default", "capture_layers": [1, 2]}, "compile-with-layers"),
        ({"compile": "default", "record_real_job": True}, "compile-with-real-job"),
    ],
)
def test_options_that_capture_in_turn_are_checked_before_the_script_runs(tmp_path, options, code):
    (tmp_path / "train.py").write_text("raise AssertionError")
    with raises_code(code, CaptureError):
        onerank.capture.run(tmp_path / "train.py", dp=2, **options)


def test_a_compiled_capture_compares_itself_with_the_eager_step(tmp_path, monkeypatch):
    # The flags of g++ in tests/capture/test_compile.py: both then share one precompiled header.
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")
    script = tmp_path / "train.py"
    module = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x))
model = Model()
"""
    script.write_text(SCRIPT.replace("model = torch.nn.Linear(8, 8)\n", module))
    windows = {"warm_up": 2, "timed_steps": 2}
    graph = call(onerank.capture.run, script, ["0.5"], compile="default", **windows)
    compilation = graph.job.compilation
    assert compilation is not None
    assert compilation.mode == "default"
    assert compilation.graphs == 2  # forward and backward
    assert sum(fusion.launches for fusion in compilation.fusions) >= 1
    assert (compilation.eager_step_ns or 0) > 0
    assert (compilation.compiled_step_ns or 0) > 0


def test_an_error_of_the_script_keeps_its_code_and_traceback(tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('no data')\n")
    last = tmp_path / "message"
    with raises_code("script-raised", ScriptError) as error:
        script = tmp_path / "train.py"
        call(onerank.capture.run, script, torchrun=False, progress=last.write_text)
    assert "no data" in error.value.script_traceback
    assert last.read_text()


WRAPPED = """
def load():
    try:
        {}["tokens"]
    except KeyError as error:
        raise ValueError("no data") from error
load()
"""


def test_an_error_that_the_script_wraps_is_named_and_in_the_traceback(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WRAPPED)
    with raises_code("script-raised", ScriptError) as error:
        call(onerank.capture.run, script, torchrun=False)
    assert "KeyError: 'tokens'" in str(error.value)
    causes, _, own = error.value.script_traceback.partition("direct cause")
    assert "line 4, in load" in causes
    assert "line 7, in <module>" in own


def test_an_error_that_is_its_own_cause_is_raised(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("error = ValueError('no data')\nraise error from error\n")
    with raises_code("script-raised", ScriptError) as error:
        call(onerank.capture.run, script, torchrun=False)
    assert "no data" in str(error.value)


def test_an_unknown_option_of_a_capture_is_named(tmp_path):
    with pytest.raises(TypeError, match="tensor_parallel"):
        onerank.capture.run(tmp_path / "train.py", tensor_parallel=2)


def test_read_recost_write(trace, tmp_path):
    graph = onerank.read(trace)
    h100 = onerank.recost(graph, target="H100")
    h100.write(tmp_path / "h100.et")
    again = onerank.read(tmp_path / "h100.et")
    assert again.job.device.name == "H100-SXM"
    assert again.job.annotations[-1].source == "H200"
    gpu = again.gpu_compute
    before, after = graph.nodes.duration_ns[gpu].sum(), again.nodes.duration_ns[gpu].sum()
    assert 1.0 < after / before < 4800 / 3350  # slower memory, equal tensor cores


def test_memory_and_replay_of_a_kept_capture(slice_trace):
    graph = onerank.read(slice_trace)
    report = onerank.memory(graph, "A40")
    assert report.peak_bytes / 1e9 == pytest.approx(11.662, abs=5e-4)
    assert report.fits
    steady = onerank.replay(slice_trace).steady_state
    assert steady is not None
    assert steady.step_ns / 1e6 == pytest.approx(56.351, abs=5e-4)
    assert onerank.replay(graph, busbw_gb_s=1.0).exposed_communication_ns > (
        10 * onerank.replay(graph).exposed_communication_ns
    )


def test_what_ifs_of_a_prediction_are_those_of_the_command(slice_trace):
    """The README shows the 57.467 ms."""
    h100 = onerank.recost(slice_trace, "H100", nvlink_active=True)
    compute_ns = h100.nodes.duration_ns[h100.gpu_compute].sum()
    assert compute_ns / 1e6 == pytest.approx(57.467, abs=5e-4)
    slow = onerank.recost(slice_trace, "H100", override={"memory_bandwidth_gb_per_s": 1000})
    assert slow.nodes.duration_ns[slow.gpu_compute].sum() > 1.5 * compute_ns


def test_energy_and_cost(slice_trace):
    graph = onerank.read(slice_trace)
    energy = onerank.energy(graph)
    assert energy.step_uj / 1e6 == pytest.approx(energy.mean_power_mw / 1e3 * 0.056351, rel=1e-2)
    prices = TRACES.parent / "examples" / "prices.toml"
    one, eight = (onerank.cost(graph, prices, gpus=gpus).bills[0] for gpus in (1, 8))
    assert eight.per_step == pytest.approx(8 * one.per_step)


def test_diff_of_a_trace_with_itself(slice_trace):
    difference = onerank.diff(slice_trace, slice_trace)
    assert difference.same_kernels
    assert difference.total.time_before_ns == difference.total.time_after_ns > 0


def test_convert_is_read_after_the_command(trace):
    graph = onerank.convert(RAW)
    assert len(graph) == len(onerank.read(trace)) == len(onerank.convert(trace))
    with raises_code("convert-not-a-capture", FormatError):
        onerank.convert(TRACES)


def test_exports(slice_trace, tmp_path):
    graph = onerank.read(slice_trace)
    workload = onerank.export.astra_sim(graph, tmp_path / "workload")
    assert workload.ranks == 2
    assert onerank.check(workload.directory) == []
    (tmp_path / "workload" / "comm_groups.json").unlink()
    findings = onerank.check(workload.directory)
    assert findings
    assert onerank.export.goal(slice_trace, tmp_path / "step.goal").ranks == 2
    assert onerank.export.simai([graph], tmp_path / "step.txt").all_gpus == 2
    slices = onerank.export.perfetto(graph, tmp_path / "step.json")
    assert slices >= int((graph.nodes.duration_ns > 0).sum())
    with raises_code("export-no-traces", ExportError):
        onerank.export.simai(TRACES, tmp_path / "none.txt")


def test_every_result_prints_as_tables(slice_trace):
    graph = onerank.read(slice_trace)
    report = onerank.memory(graph)
    assert re.search(r"peak_bytes +11\.662 GB", repr(report))
    assert re.search(r"activations +3\.896 GB", repr(report))
    assert re.search(r"step_ns +56\.351 ms", str(graph))
    # A node does not print the columns that it is read from, nor a job each block of memory.
    assert len(repr(graph.node(int(graph.nodes.id[0])))) < 200
    assert str(len(graph.nodes)) in repr(graph.nodes)
    memory = graph.job.measurement.memory
    assert str(len(memory.blocks)) in repr(memory)
    page = report._repr_html_()
    assert page.count("<table>") == page.count("</table>") == 5
    assert '<td style="text-align: left">11.662 GB</td>' in page


def test_names_in_a_table_are_escaped():
    class Row(Displayed, msgspec.Struct):
        name: str
        time_ns: int

    rows = Records([Row("<b>\x1b[2J\nkernel", 1500)])
    assert repr(rows) == "  name                time_ns\n  <b>\\x1b[2J\\nkernel  1.500 us"
    assert "<b>" not in rows._repr_html_()
    assert "&lt;b&gt;\\x1b[2J\\nkernel" in rows._repr_html_()


def test_gpus_show_as_one_table():
    gpus = onerank.gpus()
    assert {gpu.name for gpu in gpus} >= {"H100-SXM", "H200", "A40"}
    assert (
        '<td style="text-align: left">H200</td>'
        in Records(gpu for gpu in gpus if gpu.name == "H200")._repr_html_()
    )


def test_frames(trace):
    graph = onerank.read(trace)
    nodes, edges = graph.nodes_frame(), graph.edges_frame()
    assert nodes.height == len(graph)
    kernels = nodes.filter(nodes["kind"] == "kernel")
    assert kernels["duration_ns"].sum() > 0
    assert set(edges["reason"]) == {"launch", "program_order", "stream_order", "sync"}
    assert set(edges["source"]) | set(edges["target"]) <= set(nodes["id"])


def test_networkx(trace):
    graph = onerank.read(trace)
    made = graph.to_networkx()
    assert nx.is_directed_acyclic_graph(made)
    assert made.number_of_nodes() == len(graph)
    assert made.number_of_edges() == len(graph.edges)
    source, target, data = next(iter(made.edges(data=True)))
    assert data["reason"] in {"launch", "program_order", "stream_order", "sync"}
    assert made.nodes[source]["name"]
    assert source != target
