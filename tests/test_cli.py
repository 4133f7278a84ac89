"""The commands, on real captures: exact output where it is short, figures where it is long."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from onerank.annotate import MODELS
from onerank.cli import annotate, onerank
from onerank.cli.annotate import MODELS as NAMED
from onerank.cli.annotate import default_output
from onerank.converters.kineto import convert_directory

TRACES = Path(__file__).parents[1] / "traces"
GPU_NS = 29_614_034


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
    assert told["nodes"] == 4048
    assert told["gpu_ops"] == 850
    assert told["gpu_time_ns"] == GPU_NS
    assert told["peak_memory_bytes"] == 6_468_319_232
    assert told["measured_step_ns"] == 31_258_512
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
    assert "29.614 ms in 850 GPU operations" in text
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
    assert told["evidence"] == {"measured": 1, "scaled": 849}
    assert told["unknown"] == []
    assert sum(row["after_ns"] for row in told["classes"]) == told["after_ns"]


def test_annotating_a_cpu_capture_says_how_weak_it_is(traces, tmp_path):
    text = invoke(annotate, "--target", "H100", traces / "cpu.et", "-o", tmp_path / "o.et").stdout
    assert "weakest evidence" in text
    assert "evidence  463 datasheet" in text


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
        ("convert", "--kineto", TRACES / "cpu-llama-2l-tp4" / "structure.json.gz"),
        ("convert",),
        ("convert", TRACES / "cpu-llama-2l-tp4", "--et", __file__),
        ("convert", TRACES),
        ("show", __file__),
    ],
)
def test_bad_input_exits_with_2_and_writes_nothing(args, tmp_path):
    out = ("-o", tmp_path / "t.et") if args[0] == "convert" else ()
    result = invoke(onerank, *args, *out, code=2)
    assert "rror: " in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


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
