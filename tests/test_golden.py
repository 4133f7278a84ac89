"""Whole outputs on the kept captures, held as files that a person can read in review.

To renew them after a change that is meant: ONERANK_RENEW_GOLDEN=1 make test
"""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from onerank.cli import annotate, onerank
from onerank.converters.sources.kineto import convert_directory

HERE = Path(__file__).parent
TRACES = HERE.parent / "traces"
GOLDEN = HERE / "golden"


@pytest.fixture(autouse=True)
def in_a_directory_with_traces(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("h200-llama-8b-4l-tp4", "cpu-llama-2l-tp4"):
        convert_directory(TRACES / name)[0].write(f"{name}.et")


def holds(name: str, command, *args: str, lines: int | None = None) -> None:
    result = CliRunner().invoke(command, list(args))
    assert result.exit_code == 0, result.output
    text = "".join(result.stdout.splitlines(keepends=True)[:lines])
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("ONERANK_RENEW_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_show_a_gpu_capture():
    holds("show-h200", onerank, "show", "h200-llama-8b-4l-tp4.et")


def test_show_a_cpu_capture():
    holds("show-cpu", onerank, "show", "cpu-llama-2l-tp4.et")


def test_text_of_a_cpu_capture():
    holds("text-cpu", onerank, "show", "--text", "cpu-llama-2l-tp4.et", lines=48)


def test_annotate_a_gpu_capture():
    holds("annotate-h200-to-a100", annotate, "--target", "A100", "h200-llama-8b-4l-tp4.et")


def test_export_a_gpu_capture():
    args = ("export", "astra-sim", "h200-llama-8b-4l-tp4.et", "-o", "workload")
    holds("export-h200", onerank, *args)
    holds("check-h200", onerank, "check", "workload")


def test_convert_a_gpu_capture():
    args = ("convert", str(TRACES / "h200-llama-8b-4l-tp4"), "-o", "again.et")
    holds("convert-h200", onerank, *args)
