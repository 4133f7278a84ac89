"""Output of show, diff, gpus and --help."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from invoke_cli import GPU_NS, ROOT, invoke, refused
from rich.console import Console

from onerank import read
from onerank.cli import annotate, capture, onerank
from onerank.cli import terminal as render


def test_show_as_json_holds_what_others_build_on(traces):
    summary = json.loads(invoke(onerank, "show", traces / "gpu.et", "--json").stdout)
    assert summary["nodes"] == 4056
    assert sum(summary["kinds"].values()) == 4056
    assert summary["kinds"]["collective"] == 21
    assert summary["gpu_ops"] == 850
    assert summary["gpu_time_ns"] == GPU_NS
    assert summary["peak_memory_bytes"] == 6_468_319_232
    assert summary["measured_step_ns"] == 31_526_976
    uses = [(u["type"], u["bytes"], u["group_ranks"], u["count"]) for u in summary["collectives"]]
    assert uses == [
        ("all_reduce", 33_554_432, [0, 1, 2, 3], 9),
        ("all_reduce", 33_554_432, [0, 1, 2, 3], 9),
        ("all_reduce", 16_384, [0, 1, 2, 3], 3),
    ]
    by_class = {share["name"]: share for share in summary["by_class"]}
    assert sum(share["time_ns"] for share in summary["by_class"]) == GPU_NS
    assert sum(share["time_ns"] for share in summary["by_phase"]) == GPU_NS
    assert sum(share["time_ns"] for share in summary["by_module"]) == GPU_NS
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


def test_diff(traces):
    invoke(annotate, "--target", "A100", traces / "gpu.et", "-o", traces / "a100.et")
    args = (traces / "gpu.et", traces / "a100.et")
    difference = json.loads(invoke(onerank, "diff", *args, "--json").stdout)
    assert difference["same_kernels"] is True
    assert difference["same_collectives"] is True
    assert difference["total"]["time_before_ns"] == GPU_NS
    assert difference["total"]["time_after_ns"] > 2 * GPU_NS
    same = invoke(onerank, "diff", traces / "gpu.et", traces / "gpu.et").stdout
    assert "(x1.000)" in same
    different = invoke(onerank, "diff", traces / "gpu.et", traces / "cpu.et").stdout
    assert "names and counts DIFFERENT" in different
    graph = read(traces / "gpu.et")
    untimed = graph.with_columns(duration_ns=np.zeros_like(graph.nodes.duration_ns))
    untimed.write(traces / "untimed.et")
    lacking = invoke(onerank, "diff", traces / "untimed.et", traces / "gpu.et").stdout
    assert "0 ns" not in lacking
    assert "new" not in lacking


@pytest.mark.parametrize("option", ["--json", "--text"])
def test_a_reader_that_stops_early(option, traces):
    script = f"{sys.executable} -c 'from onerank.cli import onerank; onerank()'"
    line = f"{script} show {option} {traces / 'gpu.et'} | head -c 9 | wc -c"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "9"
    assert done.stderr == ""


@pytest.mark.parametrize("width", [80, 120])
def test_tables_keep_figures_whole_on_a_narrow_terminal(width, traces, tmp_path, monkeypatch):
    trace = tmp_path / "a100.et"
    invoke(annotate, "--target", "A100-SXM-80GB", traces / "gpu.et", "-o", trace)
    monkeypatch.setattr(
        render, "console", lambda: Console(width=width, highlight=False, no_color=True)
    )
    annotated = ("annotate", "--target", "A100-SXM-80GB", traces / "gpu.et", "-o", trace)
    commands = [("show", trace), ("diff", traces / "gpu.et", trace), ("gpus",), annotated]
    for command in commands:
        text = invoke(onerank, *command).stdout
        tables = [line for line in text.splitlines() if line.startswith(" ") and line[1:2] != " "]
        assert len(tables) > 10
        assert max(len(line) for line in tables) <= width
        for number in re.findall(r"(?m)^.*?(\d+\.\d{3})$", text):
            pytest.fail(f"{number} is cut from its unit")
        assert "\x1b" not in text


def test_gpus(traces):
    descriptions = json.loads(invoke(onerank, "gpus", "--json").stdout)
    names = {gpu["name"] for gpu in descriptions}
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


def test_a_description_is_checked_against_its_schema():
    example = ROOT / "examples" / "gpus" / "imaginary.toml"
    assert "imaginary" in invoke(onerank, "gpus", "--check", example).stdout
    bad = ROOT / "tests" / "annotate" / "gpus" / "data" / "bad_gpus" / "zero_sms.toml"
    names = ("sm_count is 0", "1 to 2048")
    refused(onerank, "gpus", "--check", bad, error="gpu-figure-out-of-range", naming=names)
    schema = json.loads(invoke(onerank, "gpus", "--schema").stdout)
    assert schema["properties"]["figures"]["properties"]["sm_count"]["properties"]["value"] == {
        "type": "number",
        "minimum": 1,
        "maximum": 2048,
    }
    assert "memory_bandwidth_gb_per_s" in schema["properties"]["figures"]["required"]


def test_verify_takes_the_options_of_a_job_and_none_of_its_output():
    text = invoke(capture, "verify", "--help").stdout
    assert "--tp N" in text
    assert "--raw-dir" not in text
    assert "--record-real-job" not in text


@pytest.mark.parametrize(
    "command", [("capture", "run"), ("capture", "verify"), ("annotate",), ("export", "astra-sim")]
)
def test_every_option_stands_under_one_heading(command):
    help_text = invoke(onerank, *command, "--help").stdout
    current = onerank
    for name in command:
        current = current.get_command(None, name)
    options = [item for item in current.params if item.param_type_name == "option"]
    for option in options:
        pattern = rf"^  (?:-[om], )?{option.opts[-1]} "
        assert len(re.findall(pattern, help_text, re.MULTILINE)) == 1, option
    headings = re.findall(r"^(\w.+):$", help_text, re.MULTILINE)
    assert headings == [item for item in current.sections if item in headings]
    listed = {name for names in current.sections.values() for name in names}
    assert {option.name for option in options} <= listed | {"as_json"}


def test_every_command_is_listed_with_its_whole_sentence():
    help_text = invoke(onerank, "--help").stdout.partition("Make a trace:")[2]
    assert "..." not in help_text.replace("TRACE... -o", "")
    listed = {line.split()[0] for line in help_text.splitlines() if re.match(r"  [a-z]", line)}
    assert set(onerank.list_commands(None)) <= listed


def test_a_description_is_checked_or_its_form_shown():
    description = ROOT / "examples" / "gpus" / "imaginary.toml"
    assert "nothing wrong" in invoke(onerank, "gpus", "--check", description).stdout
    refused(onerank, "gpus", "--check", description, "--schema", error="gpus-two-forms")


def test_a_long_value_is_wrapped_next_to_its_label(monkeypatch, capsys):
    pairs = [("note", "word " * 40), ("longest label", "short")]
    render.lines(pairs)
    assert len(capsys.readouterr().out.splitlines()) == 2  # a pipe has a value on one line
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then writes as to a terminal
    monkeypatch.setenv("COLUMNS", "80")
    render.lines(pairs)
    *wrapped, last = capsys.readouterr().out.splitlines()
    assert len(wrapped) == 4
    assert all(len(line) <= 80 for line in wrapped)
    assert all(line.startswith(" " * 17 + "word") for line in wrapped[1:])
    assert last == "  longest label  short"
