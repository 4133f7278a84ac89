"""The commands, on real captures: exact output where it is short, figures where it is long."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from onerank.annotate import MODELS
from onerank.cli import annotate, capture, onerank, render
from onerank.cli.annotate import MODELS as NAMED
from onerank.cli.annotate import default_output
from onerank.converters.kineto import convert_directory
from onerank.ir.chakra.et_def_pb2 import (
    COMM_COLL_NODE,
    COMP_NODE,
    AttributeProto,
    GlobalMetadata,
    Node,
)
from onerank.ir.chakra.wire import frame

TRACES = Path(__file__).parents[1] / "traces"
GPU_NS = 29_865_307


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("traces")
    convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0].write(directory / "gpu.et")
    convert_directory(TRACES / "cpu-llama-2l-tp4")[0].write(directory / "cpu.et")
    return directory


def invoke(command, *args, code: int = 0):
    result = CliRunner().invoke(command, [str(arg) for arg in args])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_show_as_json_holds_what_others_build_on(traces):
    told = json.loads(invoke(onerank, "show", traces / "gpu.et", "--json").stdout)
    assert told["nodes"] == 4056
    assert sum(told["kinds"].values()) == 4056
    assert told["kinds"]["collective"] == 21
    assert told["gpu_ops"] == 850
    assert told["gpu_time_ns"] == GPU_NS
    assert told["peak_memory_bytes"] == 6_468_319_232
    assert told["measured_step_ns"] == 31_526_976
    uses = [(u["type"], u["bytes"], u["group_ranks"], u["count"]) for u in told["collectives"]]
    assert uses == [
        ("all_reduce", 33_554_432, [0, 1, 2, 3], 9),
        ("all_reduce", 33_554_432, [0, 1, 2, 3], 9),
        ("all_reduce", 16_384, [0, 1, 2, 3], 3),
    ]
    by_class = {share["name"]: share for share in told["by_class"]}
    assert sum(share["time_ns"] for share in told["by_class"]) == GPU_NS
    assert sum(share["time_ns"] for share in told["by_phase"]) == GPU_NS
    assert sum(share["time_ns"] for share in told["by_module"]) == GPU_NS
    assert "unknown" not in by_class
    assert by_class["gemm"]["count"] == 88


def test_show_as_tables(traces):
    text = invoke(onerank, "show", traces / "gpu.et").stdout
    assert "29.865 ms in 850 GPU operations" in text
    assert "6.468 GB" in text
    assert "model.layers.*.self_attn.q_proj" in text


def test_show_as_text_has_a_line_for_every_node(traces):
    text = invoke(onerank, "show", "--text", traces / "cpu.et").stdout
    nodes = [line for line in text.splitlines() if line[0].isdigit()]
    assert len(nodes) == 480
    assert nodes[0].startswith('0 host_op "aten::random_" op=aten::random_ thread=0 start=0')


def test_annotate_names_its_output_after_the_target(traces):
    invoke(annotate, "--target", "h100", traces / "gpu.et")
    assert (traces / "gpu.h100.et").exists()
    assert default_output(Path("a/trace.et"), "H100", "H100-SXM") == Path("a/trace.H100.et")
    assert default_output(Path("trace.et"), "chips/x1.toml", "X1") == Path("trace.X1.et")


def test_annotate_as_json(traces, tmp_path):
    args = ("--target", "H100", traces / "gpu.et", "-o", tmp_path / "out.et", "--json")
    told = json.loads(invoke(annotate, *args).stdout)
    assert told["before_ns"] == GPU_NS
    assert told["target"] == "H100-SXM"
    assert told["source"] == "H200"
    assert told["evidence"] == {"measured": 1, "calibrated": 849}
    assert told["unknown"] == []
    assert sum(row["after_ns"] for row in told["classes"]) == told["after_ns"]


def test_annotating_a_cpu_capture_says_how_weak_it_is(traces, tmp_path):
    text = invoke(annotate, "--target", "H100", traces / "cpu.et", "-o", tmp_path / "o.et").stdout
    assert "weakest evidence" in text
    assert "evidence      463 datasheet" in text
    assert "80% interval" in text


def test_the_arithmetic_of_a_node(traces):
    text = invoke(annotate, "--target", "A100", "--explain", 2, traces / "gpu.et", code=2).stderr
    assert "no compute node has the id 2" in text
    shown = invoke(onerank, "show", "--text", traces / "gpu.et").stdout.splitlines()
    product = next(line.split()[0] for line in shown if "kernel" in line and "op=aten::mm" in line)
    args = ("--target", "A100", "--explain", product, traces / "gpu.et")
    text = invoke(annotate, *args).stdout
    assert "batch, m, n, k = 1, 4096, " in text
    told = json.loads(invoke(annotate, *args, "--json").stdout)
    assert str(told["node"]) == product
    assert dict(told["lines"])["predicted"].startswith(f"{told['duration_ns']:,} ns on A100")
    assert "not ratio's" in invoke(annotate, *args, "--model", "ratio", code=2).stderr
    assert not list(traces.glob("gpu.A100.et"))


def test_what_if_the_memory_were_faster(traces, tmp_path):
    out = ("-o", tmp_path / "o.et", "--json", traces / "gpu.et")
    told = invoke(annotate, "--target", "H200", "--set", "memory_bandwidth_gbps=9600", *out).stdout
    rows = {row["op_class"]: row for row in json.loads(told)["classes"]}
    assert json.loads(told)["target"] == "H200 (memory_bandwidth_gbps=9600)"
    assert 0.5 < rows["optimizer"]["after_ns"] / rows["optimizer"]["before_ns"] < 0.6
    assert rows["gemm"]["after_ns"] / rows["gemm"]["before_ns"] > 0.9
    for setting in ("memory_bandwidth_gbps", "memory_bandwidth_gbps=fast"):
        wrong = invoke(annotate, "--target", "H200", "--set", setting, *out, code=2)
        assert "is no number; the form is" in wrong.stderr


def test_an_unknown_gpu_lists_near_names(traces):
    result = invoke(annotate, "--target", "H1000", traces / "gpu.et", code=2)
    assert "H100-SXM, H100-PCIe" in result.stderr
    assert list(traces.glob("*H1000*")) == []


def test_models_named_on_the_command_line_are_those_there_are():
    assert set(NAMED) == set(MODELS)


def test_export_check_and_their_exit_codes(traces, tmp_path):
    out = tmp_path / "workload"
    made = json.loads(
        invoke(onerank, "export", "astra-sim", traces / "gpu.et", "-o", out, "--json").stdout
    )
    assert made["ranks"] == 4
    assert made["gpu_time_ns"] == GPU_NS
    assert invoke(onerank, "check", out).stdout.splitlines()[-1].endswith("no findings")
    assert json.loads(invoke(onerank, "check", out, "--json").stdout) == []
    damaged = out / "workload.2.et"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    findings = json.loads(invoke(onerank, "check", out, "--json", code=1).stdout)
    assert {(f["rule"], f["file"]) for f in findings} == {("truncated-file", "workload.2.et")}
    assert set(findings[0]) == {"rule", "file", "node", "message"}


def test_a_cpu_capture_must_be_annotated_before_it_is_exported(traces, tmp_path):
    out = tmp_path / "workload"
    result = invoke(onerank, "export", "astra-sim", traces / "cpu.et", "-o", out, code=2)
    assert "annotate --target" in result.stderr
    assert not out.exists()


def test_diff(traces):
    invoke(annotate, "--target", "A100", traces / "gpu.et", "-o", traces / "a100.et")
    args = (traces / "gpu.et", traces / "a100.et")
    told = json.loads(invoke(onerank, "diff", *args, "--json").stdout)
    assert told["same_kernels"] is True
    assert told["same_collectives"] is True
    assert told["total"]["time_before_ns"] == GPU_NS
    assert told["total"]["time_after_ns"] > 2 * GPU_NS
    same = invoke(onerank, "diff", traces / "gpu.et", traces / "gpu.et").stdout
    assert "(x1.000)" in same
    different = invoke(onerank, "diff", traces / "gpu.et", traces / "cpu.et").stdout
    assert "names and counts DIFFERENT" in different


def test_convert_files_from_elsewhere(tmp_path):
    raw = TRACES / "h200-llama-8b-4l-tp4"
    args = ("--kineto", raw / "structure.json.gz", "--et", raw / "et.json.gz")
    result = invoke(onerank, "convert", *args, "-o", tmp_path / "t.et")
    assert "GPU operations  850: 850 by external id" in result.stdout
    assert (tmp_path / "t.et").exists()


@pytest.mark.parametrize(
    "args",
    [
        ("convert", "--et", TRACES / "cpu-llama-2l-tp4" / "et.json.gz"),
        ("convert",),
        ("convert", TRACES / "cpu-llama-2l-tp4", "--et", __file__),
        ("convert", TRACES.parent),
        ("convert", TRACES, "--step", "3"),
        ("convert", TRACES / "cpu-llama-2l-tp4", "--step", "median"),
        ("show", __file__),
    ],
)
def test_bad_input_exits_with_2_and_writes_nothing(args, tmp_path):
    out = ("-o", tmp_path / "t.et") if args[0] == "convert" else ()
    result = invoke(onerank, *args, *out, code=2)
    assert "rror: " in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args",
    [
        ("show",),
        ("diff", TRACES / "README.md"),
        ("annotate", "--target", "H100"),
        ("export", "astra-sim", "-o", "workload"),
    ],
)
@pytest.mark.parametrize("content", ["missing", "directory", "empty", "garbage", "cut"])
def test_no_trace(args, content, traces, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.et"
    data = (traces / "cpu.et").read_bytes()
    if content == "directory":
        path.mkdir()
    elif content != "missing":
        path.write_bytes({"empty": b"", "garbage": data[3:999], "cut": data[:-9]}[content])
    result = invoke(onerank, *args, path, code=2)
    assert "rror: " in result.stderr
    assert not result.stdout
    assert [entry.name for entry in tmp_path.iterdir()] in (["bad.et"], [])


@pytest.mark.parametrize(
    "args",
    [
        ("convert", TRACES / "cpu-llama-2l-tp4"),
        ("annotate", "--target", "H100", "gpu.et"),
        ("capture", "run", __file__),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(args, traces, tmp_path, monkeypatch):
    monkeypatch.chdir(traces)
    result = invoke(onerank, *args, "-o", tmp_path / "no" / "t.et", code=2)
    assert f"there is no directory '{tmp_path / 'no'}'" in result.stderr.replace("\n", "")
    assert not result.stdout
    assert "is a directory" in invoke(onerank, *args, "-o", tmp_path, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_lets_nobody_write_is_named(traces, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    args = ("--target", "H100", traces / "gpu.et", "-o", tmp_path / "t.et")
    assert "is not writable" in invoke(annotate, *args, code=2).stderr


def test_a_failed_write_names_the_output_and_leaves_nothing(traces, tmp_path):
    out = tmp_path / "t.et"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        result = invoke(annotate, "--target", "H100", traces / "gpu.et", "-o", out, code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.stderr == f"error: {out}: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_no_command_writes_over_its_input(traces, tmp_path):
    trace = tmp_path / "t.et"
    trace.write_bytes((traces / "gpu.et").read_bytes())
    beside = tmp_path / "link.et"
    beside.symlink_to(trace)
    for output in (trace, beside):
        args = ("--target", "H100", trace, "-o", output)
        assert "is the input" in invoke(annotate, *args, code=2).stderr
    raw = TRACES / "cpu-llama-2l-tp4"
    copy = tmp_path / "raw"
    shutil.copytree(raw, copy)
    assert (
        "is the input" in invoke(onerank, "convert", copy, "-o", copy / "job.json", code=2).stderr
    )
    assert (copy / "job.json").read_bytes() == (raw / "job.json").read_bytes()
    assert trace.read_bytes() == (traces / "gpu.et").read_bytes()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", 'unknown GPU ""'),
        ("H100/SXM", "did you mean H100-SXM"),
        ("../h100.toml", "../h100.toml: cannot be read: No such file or directory"),
        ("bad", "bad: [figures] lacks sm_count"),
        ("bad.toml", "bad.toml: [figures] lacks sm_count"),
        ("gpu.et", "gpu.et: not valid TOML"),
        (".", 'unknown GPU "."'),
    ],
)
def test_weird_targets(target, message, traces, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpu.et").write_bytes((traces / "gpu.et").read_bytes())
    for name in ("bad", "bad.toml"):
        Path(name).write_text(
            'name = "a/b"\nvendor = "v"\narchitecture = "a"\n[sources]\n[figures]\n'
        )
    result = invoke(annotate, "--target", target, "gpu.et", code=2)
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(list(tmp_path.iterdir())) == 3


def test_the_default_output_is_always_a_file_name():
    assert default_output(Path("t.et"), "NVIDIA H100 PCIe", "H100-PCIe").name == (
        "t.NVIDIA-H100-PCIe.et"
    )
    assert default_output(Path("t.et"), "x.toml", "My GPU/2").name == "t.My-GPU-2.et"


def test_a_prediction_is_not_annotated_again(traces, tmp_path):
    made = tmp_path / "h100.et"
    invoke(annotate, "--target", "H100", traces / "gpu.et", "-o", made)
    result = invoke(annotate, "--target", "A100", made, code=2)
    assert "849 of 850 compute nodes are not measured" in result.stderr
    assert list(tmp_path.iterdir()) == [made]


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """Return a trace as Chakra's generator writes them: no shapes, no device, no world."""

    def node(number: int, name: str, kind: int, duration_us: int, **attributes: int) -> bytes:
        made = Node(id=number, name=name, type=kind, duration_micros=duration_us)
        made.data_deps.extend([number - 1] if number else [])
        made.attr.append(AttributeProto(name="is_cpu_op", bool_val=False))
        for attribute, value in attributes.items():
            made.attr.append(AttributeProto(name=attribute, int64_val=value))
        return made.SerializeToString()

    messages = [
        GlobalMetadata(version="0.0.4").SerializeToString(),
        node(0, "COMP_NODE", COMP_NODE, 100),
        node(1, "COMP_NODE", COMP_NODE, 0, num_ops=10**9, tensor_size=10**6),
        node(2, "COMM_COLL_NODE_ALL_REDUCE", COMM_COLL_NODE, 0, comm_type=0, comm_size=65536),
    ]
    path = tmp_path / "chakra.et"
    path.write_bytes(frame(messages))
    return path


def test_another_tools_trace(elsewhere, tmp_path):
    shown = invoke(onerank, "show", elsewhere).stdout
    assert "device          not known\n" in shown
    assert "100.000 us in 2 GPU operations" in shown
    assert "2 of unknown origin" in shown
    assert "--source" in invoke(annotate, "--target", "A100", elsewhere, code=2).stderr
    out = tmp_path / "a100.et"
    args = ("--target", "A100", "--source", "H100", elsewhere, "-o", out)
    made = invoke(annotate, *args).stdout
    assert "1 of unknown origin (0.0% of the time), 1 calibrated (100.0% of the time)" in made
    assert "1 node: flops and bytes unknown: memory bandwidth" in made
    assert "1 node: kept: the trace has no duration to scale" in made
    assert "2 nodes without a class or formula" in made
    workload = tmp_path / "workload"
    export = ("export", "astra-sim", elsewhere, "-o", workload)
    assert "number of ranks" in invoke(onerank, *export, code=2).stderr
    assert not workload.exists()
    assert "1: GPU nodes of 0 ns" in invoke(onerank, *export, "--ranks", 4).stdout
    invoke(onerank, "check", workload)


def test_an_unknown_collective_is_named_everywhere(tmp_path):
    strange = Node(id=1, name="WHAT", type=COMM_COLL_NODE)
    strange.attr.append(AttributeProto(name="comm_type", int64_val=42))
    strange.attr.append(AttributeProto(name="comm_size", int64_val=65536))
    invalid = Node(id=2, name="X", type=77)
    path = tmp_path / "t.et"
    messages = [GlobalMetadata(version="0.0.4"), strange, invalid]
    path.write_bytes(frame(message.SerializeToString() for message in messages))
    told = json.loads(invoke(onerank, "show", path, "--json").stdout)
    assert told["kinds"] == {"collective": 1, "invalid": 1}
    assert told["collectives"][0]["type"] == "unknown"
    export = ("export", "astra-sim", path, "-o", tmp_path / "w", "--ranks", 2)
    assert "is of an unknown collective" in invoke(onerank, *export, code=2).stderr


def test_check_names_the_missing_rank(traces, tmp_path):
    out = tmp_path / "workload"
    invoke(onerank, "export", "astra-sim", traces / "gpu.et", "-o", out)
    (out / "workload.2.et").unlink()
    text = invoke(onerank, "check", out, code=1).stdout
    assert "1 finding\n" in re.sub(" +\n", "\n", text)
    assert "1 of 4 ranks are missing" in text
    assert "holds no `.et` file" in invoke(onerank, "check", empty(tmp_path), code=2).stderr


def empty(directory: Path) -> Path:
    made = directory / "empty"
    made.mkdir()
    return made


@pytest.mark.parametrize("option", ["--json", "--text"])
def test_a_reader_that_stops_early(option, traces):
    script = f"{sys.executable} -c 'from onerank.cli import onerank; onerank()'"
    line = f"{script} show {option} {traces / 'gpu.et'} | head -c 9 | wc -c"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "9"
    assert done.stderr == ""


@pytest.mark.parametrize("width", [80, 120])
def test_tables_keep_figures_whole_on_a_narrow_terminal(width, traces, tmp_path, monkeypatch):
    made = tmp_path / "a100.et"
    invoke(annotate, "--target", "A100-SXM-80GB", traces / "gpu.et", "-o", made)
    monkeypatch.setattr(
        render, "console", lambda: Console(width=width, highlight=False, no_color=True)
    )
    annotated = ("annotate", "--target", "A100-SXM-80GB", traces / "gpu.et", "-o", made)
    commands = [("show", made), ("diff", traces / "gpu.et", made), ("gpus",), annotated]
    for command in commands:
        text = invoke(onerank, *command).stdout
        tables = [line for line in text.splitlines() if line.startswith(" ") and line[1:2] != " "]
        assert len(tables) > 10
        assert max(len(line) for line in tables) <= width
        for number in re.findall(r"(?m)^.*?(\d+\.\d{3})$", text):
            pytest.fail(f"{number} is cut from its unit")
        assert "\x1b" not in text


def test_gpus(traces):
    told = json.loads(invoke(onerank, "gpus", "--json").stdout)
    names = {gpu["name"] for gpu in told}
    assert {"A100-SXM-80GB", "H100-SXM", "H200", "B200", "MI300X", "T4"} <= names


def test_help_loads_neither_torch_nor_tables():
    code = (
        "import sys; from onerank.cli import annotate\n"
        "try: annotate(['--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'rich', 'numpy', 'polars'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--target" in done.stdout
    assert done.stderr.strip() == "set()"


def test_memory_tells_the_peak_by_class_and_that_it_fits(traces):
    told = json.loads(
        invoke(onerank, "memory", traces / "gpu.et", "--target", "T4", "--json").stdout
    )
    assert told["peak_bytes"] == told["measured_peak_bytes"] == 6_468_319_232
    assert told["fits"] is True
    assert told["capacity_bytes"] == 16_000_000_000
    shown = invoke(onerank, "memory", traces / "gpu.et").stdout
    assert "6.694 GB measured, 6.705 GB simulated (+0.16%)" in shown
    assert "optimizer      1.925 GB  29.8%" in shown


def test_memory_of_an_unknown_gpu_is_an_error(traces):
    result = invoke(onerank, "memory", traces / "gpu.et", "--target", "H999", code=2)
    assert 'unknown GPU "H999"' in result.stderr


def test_figures_of_the_target_can_be_set(traces, tmp_path):
    out = tmp_path / "x.et"
    args = ("--target", "H200", "--set", "memory_bandwidth_gbps=9600", "--host", "none")
    told = json.loads(invoke(annotate, *args, traces / "gpu.et", "-o", out, "--json").stdout)
    assert told["target"] == "H200 (memory_bandwidth_gbps=9600)"
    assert told["after_ns"] < told["before_ns"]
    result = invoke(annotate, "--target", "H200", "--set", "tdp_w=0", traces / "gpu.et", code=2)
    assert "tdp_w is 0, outside 5 to 10000" in result.stderr


def test_a_description_is_checked_against_its_schema():
    example = Path(__file__).parents[1] / "examples" / "gpus" / "imaginary.toml"
    assert "imaginary" in invoke(onerank, "gpus", "--check", example).stdout
    bad = Path(__file__).parent / "annotate" / "data" / "bad_gpus" / "zero_sms.toml"
    assert (
        "sm_count is 0, outside 1 to 2048" in invoke(onerank, "gpus", "--check", bad, code=2).stderr
    )
    schema = json.loads(invoke(onerank, "gpus", "--schema").stdout)
    assert schema["properties"]["figures"]["properties"]["sm_count"]["properties"]["value"] == {
        "type": "number",
        "minimum": 1,
        "maximum": 2048,
    }
    assert "launch_floor_ns" in schema["properties"]["figures"]["required"]


def test_energy_and_cost_of_a_captured_step(traces):
    told = json.loads(invoke(onerank, "energy", traces / "gpu.et", "--json").stdout)
    assert told["step_ns"] == 31_526_976
    assert len(told["node_uj"]) == 850
    assert told["step_low_uj"] < told["step_uj"] < told["step_high_uj"]
    assert "Energy by class" in invoke(onerank, "energy", traces / "gpu.et").stdout
    prices = ("--prices", Path(__file__).parents[1] / "examples" / "prices.toml")
    told = json.loads(invoke(onerank, "cost", traces / "gpu.et", *prices, "--json").stdout)
    assert (told["gpus"], told["tokens"]) == (4, 4096)
    assert told["bills"][0]["per_step"] == pytest.approx(4 * 4.0 * 0.031526976 / 3600)
    assert "Reckoning: own" in invoke(onerank, "cost", traces / "gpu.et", *prices).stdout


def test_energy_without_a_known_gpu_or_power_is_an_error(traces):
    result = invoke(onerank, "energy", traces / "gpu.et", "--target", "TPU-v6e", code=2)
    assert "set them with --set tdp_w=WATTS --set idle_w=WATTS" in result.stderr
    assert "is no GPU known here" in invoke(onerank, "energy", traces / "cpu.et", code=2).stderr


def test_explain_refuses_what_it_would_not_do(traces, tmp_path):
    for given in (("--host", "none"), ("-o", tmp_path / "x.et")):
        args = ("--target", "H100", "--explain", 139, *given, traces / "gpu.et")
        assert "--explain writes nothing" in invoke(annotate, *args, code=2).stderr


def test_a_directory_is_no_file_to_write(traces, tmp_path):
    result = invoke(onerank, "export", "goal", traces / "gpu.et", "-o", f"{tmp_path}/new/", code=2)
    assert "names a directory; name the file to write" in result.stderr


def test_verify_says_what_it_does():
    assert "losses, outputs" in invoke(capture, "verify", "--help").stdout


def test_a_description_is_checked_or_its_form_told():
    one = Path(__file__).parents[1] / "examples" / "gpus" / "imaginary.toml"
    assert "nothing wrong" in invoke(onerank, "gpus", "--check", one).stdout
    result = invoke(onerank, "gpus", "--check", one, "--schema", code=2)
    assert "give --check or --schema, not both" in result.stderr


def test_storage_is_added_as_nodes(traces, tmp_path):
    out = tmp_path / "s.et"
    args = ("--storage-gbps", 2, "--batch-bytes", 100_000, "--checkpoint-every", 500)
    told = json.loads(
        invoke(onerank, "storage", traces / "gpu.et", "-o", out, *args, "--json").stdout
    )
    assert [(row["kind"], row["bytes"]) for row in told["nodes"]] == [
        ("mem_load", 100_000),
        ("mem_store", 5_775_999),
    ]
    args = ("-o", out, "--storage-gbps", 0, "--batch-bytes", 1)
    result = invoke(onerank, "storage", traces / "gpu.et", *args, code=2)
    assert "storage of 0 GB/s" in result.stderr


def test_convert_a_directory_of_captures(tmp_path):
    result = invoke(onerank, "convert", TRACES, "-o", tmp_path / "out", "--json")
    found = {Path(rank["path"]).name: rank["nodes"] for rank in json.loads(result.stdout)}
    assert found == {
        "cpu-llama-2l-tp4.et": 480,
        "h200-llama-8b-4l-tp4.et": 4056,
        "h200-llama-8b-4l-tp4-standin.et": 4056,
    }
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(found)


def test_convert_a_kineto_trace_alone(tmp_path):
    kineto = TRACES / "h200-llama-8b-4l-tp4" / "profile.json.gz"
    result = invoke(onerank, "convert", "--kineto", kineto, "-o", tmp_path / "t.et")
    assert f"{tmp_path / 't.et'}: 850 nodes" in result.stdout
    text = " ".join(result.stdout.split())
    assert "the graph holds GPU operations alone" in text
