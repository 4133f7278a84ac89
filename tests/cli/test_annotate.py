"""`annotate`: output file, report, targets and overridden figures."""

import json
import shutil
from pathlib import Path

import pytest
from invoke_cli import GPU_NS, invoke, refused
from kept_traces import unpack

from onerank.annotate import MODELS
from onerank.cli import annotate, onerank
from onerank.cli.commands.annotate import AnnotateOptions, default_output
from onerank.cli.dataclass_to_click import choices


def test_annotate_names_its_output_after_the_target(traces):
    invoke(annotate, "--target", "h100", traces / "gpu.et")
    assert (traces / "gpu.h100.et").exists()
    assert default_output(Path("a/trace.et"), "H100", "H100-SXM") == Path("a/trace.H100.et")
    assert default_output(Path("trace.et"), "chips/x1.toml", "X1") == Path("trace.X1.et")


def test_annotate_as_json(traces, tmp_path):
    args = ("--target", "H100", traces / "gpu.et", "-o", tmp_path / "out.et", "--json")
    report = json.loads(invoke(annotate, *args).stdout)
    assert report["before_ns"] == GPU_NS
    assert report["target"] == "H100-SXM"
    assert report["source"] == "H200"
    assert report["evidence"] == {"measured": 1, "calibrated": 849}
    assert report["unknown"] == []
    assert sum(row["after_ns"] for row in report["classes"]) == report["after_ns"]


@pytest.fixture
def stages(traces, tmp_path):
    """Return a directory of two traces alone."""
    directory = tmp_path / "stages"
    directory.mkdir()
    for name in ("cpu.et", "gpu.et"):
        shutil.copy(traces / name, directory)
    return directory


def test_a_directory_of_traces(stages, tmp_path):
    done = json.loads(invoke(annotate, "--target", "H100", stages, "--json").stdout)["traces"]
    assert [row["trace"] for row in done] == [
        str(tmp_path / "stages.H100" / name) for name in ("cpu.et", "gpu.et")
    ]
    assert done[1]["recosting"]["before_ns"] == GPU_NS
    alone = tmp_path / "alone.et"
    for row in done:
        trace = Path(row["trace"])
        report = json.loads(
            invoke(annotate, "--target", "H100", stages / trace.name, "-o", alone, "--json").stdout
        )
        assert report == row["recosting"] | {"step": row["step"]}
        assert trace.read_bytes() == alone.read_bytes()
    table = invoke(annotate, "--target", "H100", stages, "-o", tmp_path / "out").stdout
    assert [line.split()[1] for line in table.splitlines() if ".et " in line] == [
        "cpu.et",
        "gpu.et",
    ]


def test_a_directory_of_traces_is_annotated_whole_or_not_at_all(stages, tmp_path):
    to_h100 = ("--target", "H100", stages)
    refused(annotate, *to_h100, "-o", stages, error="output-is-input")
    refused(annotate, *to_h100, "--explain", "1", error="explain-several-traces")
    cut = stages / "gpu.et"
    cut.write_bytes(cut.read_bytes()[:-7])
    refused(annotate, *to_h100, "-o", tmp_path / "out", error="chakra-truncated", naming="gpu.et")
    cut.unlink()
    (stages / "cpu.et").unlink()
    refused(annotate, *to_h100, error="annotate-no-traces", naming=str(stages))
    assert not (tmp_path / "out").exists()


def test_the_step_before_and_after_as_replay_tells_it(traces, tmp_path):
    args = ("--target", "A100", traces / "gpu.et", "-o", tmp_path / "out.et")
    step = json.loads(invoke(annotate, *args, "--json").stdout)["step"]
    for name, trace in (("before", traces / "gpu.et"), ("after", tmp_path / "out.et")):
        replayed = json.loads(invoke(onerank, "replay", trace, "--json").stdout)
        assert step[name]["step_ns"] == replayed["step_time_ns"]
        fields = ("compute_ns", "exposed_communication_ns", "idle_ns", "host_bound_ns")
        assert [step[name][field] for field in fields] == [replayed[field] for field in fields]
    assert (step["source"], step["measured_ns"]) == ("replay", 31_526_976)
    # compute is 77.5 ms of 79.9, between 73.7 and 81.6: the step moves with it
    off = [step[end] - step["after"]["step_ns"] for end in ("p10_ns", "p90_ns")]
    assert off == [pytest.approx(-3.83e6, abs=0.2e6), pytest.approx(4.09e6, abs=0.2e6)]
    text = " ".join(invoke(annotate, *args).stdout.split())
    assert "step, replayed 34.908 ms on H200 (31.527 ms without the profiler) -> " in text


def test_the_step_in_a_row_where_the_host_was_timed_without_the_profiler(tmp_path):
    path = unpack("h200-llama-8b-4l-tp2-graphs/2048", tmp_path)
    args = ("--target", "H200", "--override", "memory_bandwidth_gb_per_s=9600", path)
    step = json.loads(invoke(annotate, *args, "-o", tmp_path / "o.et", "--json").stdout)["step"]
    assert step["source"] == "steady_state"
    before, after = step["before"], step["after"]
    assert before["step_ns"] == step["measured_ns"] == 36_071_072
    assert step["p10_ns"] < after["step_ns"] < step["p90_ns"] < before["step_ns"]
    assert after["compute_ns"] < before["compute_ns"]
    for step_parts in (before, after):
        assert (
            step_parts["compute_ns"]
            + step_parts["exposed_communication_ns"]
            + step_parts["idle_ns"]
            == step_parts["step_ns"]
        )
        assert 0 <= step_parts["host_bound_ns"] <= step_parts["idle_ns"]


def test_annotating_a_cpu_capture_says_how_weak_it_is(traces, tmp_path):
    text = invoke(annotate, "--target", "H100", traces / "cpu.et", "-o", tmp_path / "o.et").stdout
    words = " ".join(text.split())
    assert "45 GEMMs, convolutions and attention by their tiles, 418 by launch floor" in words
    assert "evidence 467 datasheet" in words  # nodes: the launches of 463 operators
    assert "463 operators launch 467 kernels" in words
    assert text.count("80% interval") == 2  # of the step and of all compute
    assert "exposed communication, 17 calls not timed" in words


def test_the_arithmetic_of_a_node(traces):
    args = ("--target", "A100", "--explain", 2, traces / "gpu.et")
    refused(annotate, *args, error="explain-unknown-node", naming="id 2")
    shown = invoke(onerank, "show", "--text", traces / "gpu.et").stdout.splitlines()
    product = next(line.split()[0] for line in shown if "kernel" in line and "op=aten::mm" in line)
    args = ("--target", "A100", "--explain", product, traces / "gpu.et")
    text = invoke(annotate, *args).stdout
    assert "batch, m, n, k = 1, 4096, " in text
    explanation = json.loads(invoke(annotate, *args, "--json").stdout)
    assert str(explanation["node"]) == product
    assert dict(explanation["lines"])["predicted"].startswith(
        f"{explanation['duration_ns']:,} ns on A100"
    )
    by_ratio = json.loads(invoke(annotate, *args, "--model", "ratio", "--json").stdout)
    measured, ratio = by_ratio["terms"]["operands"]
    assert measured["value"] * ratio["value"] == pytest.approx(by_ratio["duration_ns"], abs=0.5)
    assert not list(traces.glob("gpu.A100.et"))


def test_what_if_the_memory_were_faster(traces, tmp_path):
    out = ("-o", tmp_path / "o.et", "--json", traces / "gpu.et")
    output = invoke(
        annotate, "--target", "H200", "--override", "memory_bandwidth_gb_per_s=4800", *out
    ).stdout
    same = json.loads(output)
    assert (same["target"], same["evidence"], same["interval"]) == ("H200", {"measured": 850}, [])
    output = invoke(
        annotate, "--target", "H200", "--override", "memory_bandwidth_gb_per_s=9600", *out
    ).stdout
    rows = {row["op_class"]: row for row in json.loads(output)["classes"]}
    assert json.loads(output)["target"] == "H200 (memory_bandwidth_gb_per_s=9600)"
    assert 0.6 < rows["optimizer"]["after_ns"] / rows["optimizer"]["before_ns"] < 0.7
    assert rows["gemm"]["after_ns"] / rows["gemm"]["before_ns"] > 0.9
    for setting in ("memory_bandwidth_gb_per_s", "memory_bandwidth_gb_per_s=fast"):
        args = ("--target", "H200", "--override", setting, *out)
        refused(annotate, *args, error="override-not-a-number", naming=setting)


def test_an_unknown_gpu_lists_near_names(traces):
    args = ("--target", "H1000", traces / "gpu.et")
    refused(annotate, *args, error="gpu-unknown", naming="H100-SXM, H100-NVL, H100-PCIe")
    assert list(traces.glob("*H1000*")) == []


def test_models_named_on_the_command_line_are_those_there_are():
    assert set(choices(AnnotateOptions, "model")) == set(MODELS)


@pytest.mark.parametrize(
    ("target", "error", "name"),
    [
        ("", "gpu-unknown", '""'),
        ("H100/SXM", "gpu-unknown", "H100-SXM"),
        ("../h100.toml", "file-unreadable", "../h100.toml"),
        ("bad", "gpu-figures-missing", "bad: [figures] lacks sm_count"),
        ("bad.toml", "gpu-figures-missing", "bad.toml: [figures] lacks sm_count"),
        ("gpu.et", "file-not-utf8", "gpu.et"),
        (".", "gpu-unknown", '"."'),
    ],
)
def test_weird_targets(  # noqa: PLR0917
    target, error, name, traces, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpu.et").write_bytes((traces / "gpu.et").read_bytes())
    for file in ("bad", "bad.toml"):
        Path(file).write_text(
            'name = "a/b"\nvendor = "v"\narchitecture = "ada"\n[sources]\n[figures]\n'
        )
    result = refused(annotate, "--target", target, "gpu.et", error=error, naming=name)
    assert result.stderr.startswith("error[")
    assert len(list(tmp_path.iterdir())) == 3


def test_the_default_output_is_always_a_file_name():
    assert default_output(Path("t.et"), "NVIDIA H100 PCIe", "H100-PCIe").name == (
        "t.NVIDIA-H100-PCIe.et"
    )
    assert default_output(Path("t.et"), "x.toml", "My GPU/2").name == "t.My-GPU-2.et"


def test_a_prediction_is_not_annotated_again(traces, tmp_path):
    prediction = tmp_path / "h100.et"
    invoke(annotate, "--target", "H100", traces / "gpu.et", "-o", prediction)
    args = ("--target", "A100", prediction)
    refused(annotate, *args, error="recost-not-measured", naming="849 of 850")
    assert list(tmp_path.iterdir()) == [prediction]


def test_figures_of_the_target_can_be_set(traces, tmp_path):
    out = tmp_path / "x.et"
    args = ("--target", "H200", "--override", "memory_bandwidth_gb_per_s=9600", "--host-scale", "0")
    report = json.loads(invoke(annotate, *args, traces / "gpu.et", "-o", out, "--json").stdout)
    assert report["target"] == "H200 (memory_bandwidth_gb_per_s=9600)"
    assert report["after_ns"] < report["before_ns"]
    args = ("--target", "H200", "--override", "tdp_w=0", traces / "gpu.et")
    names = ("tdp_w is 0", "5 to 10000")
    refused(annotate, *args, error="gpu-figure-out-of-range", naming=names)


def test_another_host_is_seen_in_the_replay_of_the_file(traces, tmp_path):
    """The step of the file that `annotate` wrote, not of the graph in memory."""
    steps = {}
    for host in ("0", "1", "2"):
        out = tmp_path / f"{host}.et"
        invoke(annotate, "--target", "H200", "--host-scale", host, traces / "gpu.et", "-o", out)
        steps[host] = json.loads(invoke(onerank, "replay", out, "--json").stdout)["step_time_ns"]
    assert steps["0"] < 0.95 * steps["1"]
    assert steps["2"] > 1.2 * steps["1"]
    for host in ("-1", "1001", "fast"):
        invoke(annotate, "--target", "H200", "--host-scale", host, traces / "gpu.et", code=2)


def test_explain_refuses_what_it_would_not_do(traces, tmp_path):
    for option in (("--host-scale", "0"), ("-o", tmp_path / "x.et")):
        args = ("--target", "H100", "--explain", 139, *option, traces / "gpu.et")
        refused(annotate, *args, error="explain-writes-nothing")
