"""Options that exclude each other, and sources that a command does not read: refused by a code."""

import os

import pytest
from invoke_cli import TRACES, refused

from onerank.cli import onerank

RAW = TRACES / "cpu-llama-2l-tp4"
KINETO, ET = RAW / "profile.json.gz", RAW / "et.json.gz"
H100 = ("--target", "H100")

REFUSED = {
    ("convert", RAW, "--kineto", KINETO, "-o", "t.et"): "convert-two-sources",
    ("convert", "gpu.et", "--max-bytes", 9, "-o", "t.et"): "usage-unknown-option",
    ("convert", "gpu.et", "--size", "batch=4", "-o", "t.et"): "convert-model-option",
    ("convert", RAW, "--repair", "-o", "t.et"): "convert-repair-source",
    ("convert", "notes.txt", "-o", "t.et"): "convert-unknown-source",
    ("convert", "--et", ET, "-o", "t.et"): "convert-no-kineto",
    (
        *("convert", "--kineto", KINETO, "--et", ET, "--profile", KINETO),
        *("--step", 1, "-o", "t.et"),
    ): "convert-profile-and-step",
    (
        *("convert", "--kineto", KINETO, "--et", ET, "--operators"),
        *("-o", "t.et"),
    ): "convert-operators-and-et",
    ("convert", "model.onnx", "--size", "batch", "-o", "t.et"): "convert-size-malformed",
    ("annotate", *H100, "--explain", 139, "--fuse", "elementwise", "gpu.et"): "explain-with-passes",
    ("show", "gpu.et", "--text", "--granularity", "layer"): "show-two-forms",
    ("show", "gpu.et", "--text", "--json"): "show-two-forms",
    ("show", "pipe"): "input-no-file",
    ("replay", "."): "replay-directory",
    ("replay", "gpu.et", "--micro-batches", 4): "replay-needs-cluster",
    ("replay", "gpu.et", "--schedule", "1f1b"): "replay-needs-cluster",
    ("replay", ".", "--cluster", "gpu.et", "--busbw-gb-s", 9): "replay-cluster-alone",
    ("report", "gpu.et", "gpu.et", "gpu.et", "-o", "r.html"): "report-trace-count",
    ("report", "gpu.et", "-o", "r.png"): "output-not-html",
    ("predict", "rows.csv", *H100, "--m", 8): "predict-file-and-sizes",
    ("export", "goal", "gpu.et", "-o", "g", "--schedule", "1f1b"): "export-schedule-micro-batches",
    ("export", "goal", "gpu.et", "-o", "g", "--micro-batches", 4): "export-micro-batches-schedule",
    ("export", "astra-sim", "gpu.et", "-o", "."): "export-input-in-output",
    (
        *("export", "goal", "gpu.et", "gpu.et"),
        *("-o", "g", "--ranks", 4),
    ): "export-ranks-several-traces",
    ("convert", TRACES / "h200-p2p-2-ranks", "-o", "notes.txt"): "output-is-file",
    (
        *("capture", "run", "train.py", "--device", "none", "--like", "H100"),
        *("--compile", "-o", "t.et"),
    ): "no-device-compile",
    ("capture", "run", "train.ipynb", "-o", "t.et"): "script-notebook",
    ("capture", "run", "gpu.et", "-o", "t.et"): "script-not-python",
    ("capture", "serve", "config.json", "--host", "typical", "-o", "bundle"): "option-unused",
}


@pytest.mark.parametrize(("args", "error"), REFUSED.items(), ids=REFUSED.values())
def test_is_refused_and_nothing_is_written(args, error, traces, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpu.et").write_bytes((traces / "gpu.et").read_bytes())
    for name in ("notes.txt", "model.onnx", "rows.csv", "train.ipynb", "config.json"):
        (tmp_path / name).write_text("op\ngemm\n")
    (tmp_path / "train.py").write_text("raise AssertionError('the script ran')")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(path.name for path in tmp_path.iterdir())
    refused(onerank, *args, error=error)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_mistyped_captures_are_named_as_they_were_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass\n")
    refused(onerank, "capture", "train.py", error="usage-error", naming="capture run train.py")
    run = ("capture", "run", "train.py")
    refused(onerank, *run, "-tp", 4, error="usage-unknown-option", naming=("-tp", "'--tp'"))
    refused(onerank, "anotate", "t.et", error="usage-unknown-command", naming="'annotate'")
    # What comes after -- is the script's.
    refused(onerank, *run, "-q", "--", "-tp", error="script-arguments-unseparated", naming="-- -q")
