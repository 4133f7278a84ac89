"""Bad input and impossible outputs: exit code 2 before the work, and nothing left behind."""

import gzip
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from invoke_cli import ROOT, TRACES, invoke, refused

from onerank.cli import annotate, onerank
from onerank.cli.common import exit_on_errors
from onerank.ir.errors import OneRankError


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
    assert "error[" in result.stderr
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
    assert "error[" in result.stderr
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
    out = tmp_path / "no" / "no" / "t.et"
    result = refused(onerank, *args, "-o", out, error="output-no-directory", naming="/no/no'")
    assert not result.stdout
    error = "output-is-directory" if args[0] == "convert" else "usage-invalid-value"
    refused(onerank, *args, "-o", tmp_path, error=error, naming=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_an_output_is_made_with_it(traces, tmp_path):
    out = tmp_path / "stages.H100" / "trace.0.et"
    invoke(annotate, "--target", "Nothing", traces / "gpu.et", "-o", out, code=2)
    assert not out.parent.exists()
    invoke(annotate, "--target", "H100", traces / "gpu.et", "-o", out)
    assert [entry.name for entry in out.parent.iterdir()] == ["trace.0.et"]


def test_a_directory_that_cannot_be_written_is_refused_before_any_work(traces):
    # In /proc nothing can be written, whoever runs the test; access(2) tells root otherwise.
    args = ("--target", "H100", traces / "gpu.et", "-o", "/proc/t.et")
    refused(annotate, *args, error="output-not-writable", naming="'/proc'")


def test_a_failed_write_names_the_output_and_leaves_nothing(traces, tmp_path):
    out = tmp_path / "t.et"
    with no_file_beyond(4096):
        result = invoke(annotate, "--target", "H100", traces / "gpu.et", "-o", out, code=2)
    assert f"error[disk-full]: {out}: " in result.stderr
    assert list(tmp_path.iterdir()) == []


@contextmanager
def no_file_beyond(size: int):
    """Let a write past `size` bytes of a file fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_tables_on_a_full_disk_leave_the_old_ones(traces, tmp_path):
    out = tmp_path / "tables"
    invoke(onerank, "export", "parquet", traces / "gpu.et", "-o", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with no_file_beyond(4096):
        result = invoke(onerank, "export", "parquet", traces / "cpu.et", "-o", out, code=2)
    assert f"error[disk-full]: {out / 'nodes.parquet'}: " in result.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("target", ["astra-sim", "parquet"])
def test_a_directory_created_for_an_export_is_removed_on_a_full_disk(traces, tmp_path, target):
    with no_file_beyond(2048):
        out = tmp_path / "a" / "b" / "out"
        result = invoke(onerank, "export", target, traces / "gpu.et", "-o", out, code=2)
    assert f"error[disk-full]: {out}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_ranks_on_a_full_disk_are_named_by_their_place(tmp_path):
    ranks, out = tmp_path / "ranks", tmp_path / "out"
    for rank in (0, 1):
        shutil.copytree(TRACES / "cpu-llama-2l-tp4", ranks / f"rank-{rank}")
    with no_file_beyond(4096):
        result = invoke(onerank, "convert", ranks, "-o", out, code=2)
    assert f"error[disk-full]: {out / 'trace.0.et'}: " in result.stderr
    assert list(tmp_path.iterdir()) == [ranks]


@pytest.mark.parametrize(
    ("target", "limit"), [("astra-sim", 4096), ("astra-sim", 100_000), ("goal", 4096)]
)
def test_an_export_on_a_full_disk_is_named(target, limit, traces, tmp_path):
    out = tmp_path / "out"
    with no_file_beyond(limit):
        result = invoke(onerank, "export", target, traces / "gpu.et", "-o", out, code=2)
    assert f"error[disk-full]: {out}" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_database_on_a_full_disk_is_named(tmp_path):
    out = tmp_path / "merged.parquet"
    shipped = sorted((ROOT / "annotate" / "databases").glob("*.parquet"))
    with no_file_beyond(4096):
        result = invoke(onerank, "bench", "merge", *shipped, "-o", out, code=2)
    assert f"error[disk-full]: {out}: " in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_takes_no_more_is_named(traces):
    args = ("--target", "H100", traces / "gpu.et", "-o", "/dev/full")
    assert "error[disk-full]: /dev/full: " in invoke(annotate, *args, code=2).stderr


@pytest.mark.parametrize(
    "args",
    [
        ("annotate", "--target", "H100", TRACES / "README.md"),
        ("capture", "run", __file__),
        ("convert", TRACES / "cpu-llama-2l-tp4"),
        ("coarsen", "--granularity", "layer", TRACES / "README.md"),
        ("storage", "--storage-gb-s", 1, TRACES / "README.md"),
    ],
)
def test_a_trace_is_named_et(args, tmp_path):
    out = ("-o", tmp_path / "t.json")
    refused(onerank, *args, *out, error="output-not-et", naming=f"'{tmp_path / 't.et'}'")
    assert list(tmp_path.iterdir()) == []


def test_a_profilers_file_by_itself_is_refused_with_its_option(tmp_path):
    recorded = TRACES / "cpu-llama-2l-tp4"
    for name, option in (
        ("profile.json.gz", "--kineto"),
        ("et.json.gz", "--et"),
    ):
        plain = tmp_path / name.removesuffix(".gz")
        plain.write_bytes(gzip.decompress((recorded / name).read_bytes()))
        for path in (recorded / name, plain):
            args = ("convert", path, "-o", tmp_path / "t.et")
            refused(onerank, *args, error="convert-recording-option", naming=option)
    assert not (tmp_path / "t.et").exists()


def test_no_command_writes_over_its_input(traces, tmp_path):
    trace = tmp_path / "t.et"
    trace.write_bytes((traces / "gpu.et").read_bytes())
    link = tmp_path / "link.et"
    link.symlink_to(trace)
    for output in (trace, link):
        args = ("--target", "H100", trace, "-o", output)
        refused(annotate, *args, error="output-is-input")
    raw = TRACES / "cpu-llama-2l-tp4"
    copy = tmp_path / "raw"
    shutil.copytree(raw, copy)
    refused(onerank, "convert", copy, "-o", copy / "job.json", error="output-is-input")
    assert (copy / "job.json").read_bytes() == (raw / "job.json").read_bytes()
    assert trace.read_bytes() == (traces / "gpu.et").read_bytes()


@pytest.mark.parametrize(
    ("args", "error", "names"),
    [
        (("replay", "--busbw-gb-s", "nan"), "number-not-finite", ("'--busbw-gb-s'", "'nan'")),
        (("memory", "--non-allocator-gb", "nan"), "number-not-finite", ("'nan'",)),
        (("replay", "--busbw-gb-s", "1e-320"), "usage-invalid-value", ("0.001<=x",)),
        (("storage", "-o", "s.et", "--storage-gb-s", "inf"), "usage-invalid-value", ("inf",)),
        (
            ("storage", "-o", "s.et", "--storage-gb-s", "5", "--batch-bytes", 10**24),
            *("usage-invalid-value", ("'--batch-bytes'",)),
        ),
        (("export", "astra-sim", "-o", "w", "--latency-ns", "nan"), "number-not-finite", ()),
        (("annotate", "--target", "H100", "--host-scale", "nan"), "number-not-finite", ()),
        (
            ("export", "vidur", "-o", "w", "--model", "m", "--checkout", "no"),
            "usage-invalid-value",
            ("'no'",),
        ),
        (("export", "llmservingsim", "-o", "w", "--link-gb-per-s", "inf"), "number-not-finite", ()),
        (("export", "astra-sim", "-o", "w", "--kv-bytes", "8"), "disaggregated-kv-bytes", ()),
        (
            ("export", "astra-sim", "-o", "w", "--decode", "no.et", "--kv-bytes", "8"),
            *("usage-invalid-value", ("'no.et'",)),
        ),
        (
            ("export", "astra-sim", "-o", "w", "--kv-bytes", "0"),
            *("usage-invalid-value", ("'--kv-bytes'",)),
        ),
        (("export", "simai", "-o", "w", "--schedule", "1f1b"), "simai-no-pipeline", ()),
        (("annotate", "--target", "H100", "--explain", "-1"), "usage-invalid-value", ("-1",)),
        (
            ("annotate", "--target", "H100", "--explain", 2**64),
            *("usage-invalid-value", ("'--explain'",)),
        ),
    ],
    ids=str,
)
def test_numbers_and_schedules_that_cannot_be(  # noqa: PLR0917
    args, error, names, traces, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    refused(onerank, *args, traces / "gpu.et", error=error, naming=names)
    assert list(tmp_path.iterdir()) == []


def test_real_ranks_need_torchrun(tmp_path, monkeypatch):
    for rank in ("", "first"):
        monkeypatch.setenv("RANK", rank)
        args = ("capture", "run", "--record-real-job", __file__, "-o", tmp_path / "t.et")
        names = (f"'{rank}'", "torchrun --nproc-per-node")
        refused(onerank, *args, error="real-job-no-rank", naming=names)


@pytest.mark.parametrize(
    ("args", "error", "name"),
    [
        (("--pp-layers", "2,2", "--tp", "2"), "pp-layers-unused", "--pp-layers"),
        (("--raw-dir", "."), "raw-directory-is-cwd", "--raw-dir ."),
        (("--raw-dir", "no/raw"), "output-no-directory", "'no'"),
        (("--like", "H200"), "option-unused", ("--like H200", "--device none")),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) else "",
)
def test_what_a_capture_cannot_do_is_refused_before_the_script_runs(
    args, error, name, tmp_path, monkeypatch
):
    (tmp_path / "train.py").write_text("raise AssertionError('the script ran')")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    command = ("capture", "run", "../train.py", *args, "-o", "../t.et")
    done = refused(onerank, *command, error=error, naming=name)
    assert "the script ran" not in done.stderr
    assert list(Path.cwd().iterdir()) == []


def test_a_bundle_is_no_trace(tmp_path):
    (tmp_path / "bundle.json").write_text("{}")
    for command in (("show", tmp_path), ("export", "astra-sim", tmp_path, "-o", tmp_path / "sim")):
        refused(onerank, *command, error="input-is-bundle", naming="traces/1.et")
    assert not (tmp_path / "sim").exists()


def test_a_directory_is_no_file_to_write(traces, tmp_path):
    args = ("export", "goal", traces / "gpu.et", "-o", f"{tmp_path}/new/")
    refused(onerank, *args, error="output-is-directory")


def test_an_error_that_an_interrupt_caused_is_an_interrupt(capsys):
    error = ImportError("initialization failed")
    error.__cause__ = KeyboardInterrupt()  # as pybind11 does while a module is imported
    with pytest.raises(SystemExit) as ended, exit_on_errors({}):
        raise error
    assert ended.value.code == 130
    assert "initialization" not in capsys.readouterr().err


def test_an_error_that_is_its_own_cause_ends_the_command():
    error = OneRankError("of the script", code="script-raised")
    with pytest.raises(SystemExit) as ended, exit_on_errors({}):
        raise error from error
    assert ended.value.code == 2
