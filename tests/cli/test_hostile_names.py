"""Names and paths with markup, escape sequences or bytes that are not UTF-8; streams and pipes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from invoke_cli import ROOT, invoke
from own_process import run_command

import onerank as package
from onerank.cli import annotate, onerank
from onerank.cli.charts.plotly_figure import plotly_js
from onerank.cli.terminal import visible, visible_line

ESCAPE = "\x1b]0;title\x07\x1b[31m"
EVIL = f"{ESCAPE}[/][bold]\u202ered\u2066\x9b1m\nforged  line"
LONG = "a" * 300
NOT_UTF8 = os.fsdecode(b"x\xff\x1b[31m")
_SEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


@pytest.fixture(scope="module")
def evil(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trace whose names of kernels, modules, operators and groups are hostile."""
    graph = package.read(traces / "gpu.et")
    columns = {
        column: [EVIL + text if text else "" for text in graph.text(column)]
        for column in ("name", "module", "op")
    }
    path = tmp_path_factory.mktemp("evil") / "[/x].et"
    graph.with_columns(**columns).write(path)
    return path


VIEWS = (
    ("show",),
    ("show", "--granularity", "kernel"),
    ("show", "--text"),
    ("show", "--json"),
    ("replay",),
    ("replay", "--json"),
    ("memory",),
    ("energy",),
    ("check",),
)


@pytest.mark.parametrize("view", VIEWS, ids=" ".join)
def test_hidden_characters_of_names_are_shown_escaped(view, evil):
    result = invoke(onerank, view[0], evil, *view[1:])
    assert _SEEN.findall(result.output) == []
    if "--json" in view:
        json.loads(result.stdout)
    assert "\nforged" not in result.output


def test_json_has_the_names_unchanged(evil):
    parts = json.loads(invoke(onerank, "show", evil, "--granularity", "kernel", "--json").stdout)
    assert any(part["name"].startswith(EVIL) for part in parts)


def test_names_of_two_traces_and_in_a_page(evil, traces, tmp_path):
    result = invoke(onerank, "diff", traces / "gpu.et", evil)
    assert _SEEN.findall(result.output) == []
    out, page = tmp_path / "out.et", tmp_path / "page.html"
    result = invoke(annotate, evil, "--target", "A100", "-o", out)
    assert _SEEN.findall(result.output) == []
    invoke(onerank, "report", evil, "-o", page)
    # Plotly's own code, which the page holds, has control characters in its patterns.
    assert _SEEN.findall(page.read_text().replace(plotly_js(), "")) == []


def test_a_gpu_whose_name_is_markup(traces, tmp_path):
    shipped = (ROOT / "annotate" / "gpus" / "H100-SXM.toml").read_text()
    gpu = tmp_path / "[bold].toml"
    name = '"[/]\\u001b[31m"'
    gpu.write_text(re.sub(r"(?m)^name = .*$", lambda _: f"name = {name}", shipped))
    out = tmp_path / "[/out].et"
    result = invoke(annotate, traces / "gpu.et", "--target", gpu, "-o", out)
    assert out.exists()
    assert "[/]\\x1b[31m" in result.stdout
    assert _SEEN.findall(result.output) == []
    assert "[/]\\x1b[31m" in invoke(onerank, "show", out).stdout
    invoke(onerank, "memory", traces / "gpu.et", "--target", gpu)
    invoke(onerank, "gpus", "--check", gpu)


def commands(trace: str, output: str) -> list[tuple[str, ...]]:
    out = f"{output}.et"
    return [
        ("show", trace),
        ("show", trace, "--json"),
        ("diff", trace, trace),
        ("replay", trace),
        ("memory", trace, "--json"),
        ("check", trace),
        ("annotate", trace, "--target", "A100", "-o", out),
        ("annotate", trace, "--target", "A100", "-o", out, "--json"),
        ("annotate", trace, "--target", f"{output}.toml", "-o", "other.et"),
        ("coarsen", trace, "--granularity", "layer", "-o", out, "--json"),
        ("convert", trace, "-o", out),
        ("report", trace, "-o", f"{output}.html"),
        ("export", "astra-sim", trace, "-o", f"{output}-a"),
        ("export", "astra-sim", trace, "-o", f"{output}-a2", "--json"),
        ("export", "goal", trace, "-o", f"{output}.goal", "--json"),
        ("export", "simai", trace, "-o", f"{output}.txt", "--json"),
        ("export", "perfetto", trace, "-o", f"{output}.json"),
        ("export", "parquet", trace, "-o", f"{output}-p"),
        ("export", "dot", trace, "-o", f"{output}.dot"),
        ("export", "chakra-json", trace, "-o", f"{output}.json"),
        ("cost", trace, "--prices", f"{output}.toml"),
        ("gpus", "--check", f"{output}.toml"),
        ("capture", "run", f"{output}.py"),
        ("bench", "show", f"{output}.parquet"),
    ]


@pytest.mark.parametrize("name", [LONG, NOT_UTF8, "[/x]", "$(touch pwned)"], ids=ascii)
def test_paths_that_are_long_or_not_utf8(name, traces, tmp_path, monkeypatch):
    """Each command works or says what is wrong; none ends in a traceback."""
    monkeypatch.chdir(tmp_path)
    Path("[").mkdir()
    trace = "t.et" if name == LONG else f"{name}.et"
    shutil.copy(traces / "gpu.et", trace)
    codes: list[int] = []
    for command in [*commands(trace, name), *commands(f"{LONG}.et", "out")]:
        result = CliRunner().invoke(onerank, command)
        assert isinstance(result.exception, SystemExit | None), (command, repr(result.exception))
        assert result.exit_code in (0, 2), command
        assert _SEEN.findall(result.output) == [], command
        codes.append(result.exit_code)
    assert codes.count(0) == (6 if name == LONG else 15)
    assert not Path("pwned").exists()


def test_a_pipe_in_the_place_of_a_trace_is_refused(tmp_path):
    pipe = tmp_path / "pipe.et"
    os.mkfifo(pipe)
    for command in ("show", "check", "memory"):
        done = run(command, str(pipe), stdout=subprocess.PIPE)
        assert done.returncode == 2
    code = f"import onerank\ntry: onerank.read({str(pipe)!r})\nexcept Exception as e: print(e.code)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "file-not-regular"


def run(*arguments: str, **streams: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onerank", *arguments]
    return subprocess.run(
        command, stderr=subprocess.PIPE, text=True, timeout=120, check=False, **streams
    )


def test_stdout_that_cannot_be_written(traces):
    with Path("/dev/full").open("w") as full:
        for option in ((), ("--json",), ("--text",)):
            done = run("show", str(traces / "gpu.et"), *option, stdout=full)
            assert done.returncode == 2
            assert done.stderr.startswith("error[disk-full]: ")
            assert "Traceback" not in done.stderr


def test_closed_streams(traces):
    script = f"exec {sys.executable} -m onerank show {traces / 'gpu.et'}"
    for closed in (">&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            f"{script} {closed}",
            shell=True,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("closing", "fresh"),
    [
        ("sys.stdout.close()", False),
        ("sys.stdout.close(); sys.stderr.close()", False),
        ("os.closerange(0, 3)", True),  # an interpreter flushes its streams when it ends
        ("sys.stdout = sys.stderr = None", False),
    ],
)
def test_a_script_that_closes_its_streams_is_captured(closing, fresh, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        "import os, sys, torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"{closing}\n"
        "while True:\n"
        "    model(torch.randn(2, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    brief = ("--warm-up", "1", "--timed-steps", "1", "-o", "t.et", "--json")
    monkeypatch.chdir(tmp_path)
    command = ("capture", "run", "train.py", *brief)
    done = run(*command, stdout=subprocess.PIPE) if fresh else run_command(*command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nodes"] == len(package.read(tmp_path / "t.et"))


def test_escapes():
    assert (
        visible("a\tb\n\x1b[0m\x85\u202e\udcff\ud800") == "a\tb\n\\x1b[0m\\x85\\u202e\\xff\\ud800"
    )
    assert visible_line("a\nb") == "a\\nb"
    assert visible("é 日本 …") == "é 日本 …"


def test_an_output_whose_name_has_the_longest_length(traces, tmp_path):
    out = tmp_path / f"{'é' * 126}.et"  # 255 bytes
    invoke(annotate, traces / "gpu.et", "--target", "A100", "-o", out)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    too_long = tmp_path / f"{'é' * 127}.et"
    assert (
        "error[file-access]"
        in invoke(annotate, traces / "gpu.et", "--target", "A100", "-o", too_long, code=2).stderr
    )
