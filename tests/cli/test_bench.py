"""`onerank bench` without a GPU: what it merges and shows, and what it says."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result
from notes import note_of

import onerank
from onerank.annotate.kernel_db.database import KernelRow, read_database, table_of, write_database
from onerank.capture.bench.bench_call import BenchCall, BenchOperand
from onerank.capture.bench.bench_runner import Bench, BenchDevice, Message
from onerank.capture.bench.measure_call import Account
from onerank.capture.bench.requests import BenchRequest
from onerank.cli import onerank as command
from onerank.cli.commands.bench import lacking
from onerank.ir.errors import CaptureError

TRACES = Path(__file__).parents[2] / "traces"

ROW = KernelRow("GPU", "aten::mm", ((8, 4), (4, 2)), ("bfloat16", "bfloat16"), "{}", "{}", ("k",),
          (2100,), 2000, 1900, 2200, 20, "warm", None, None, None, None, "2.11", "13.0", "", "", "",
          "2026-11-21T15:00:00Z")  # fmt: skip


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, ["bench", *map(str, arguments)])


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    one, other = tmp_path / "one.parquet", tmp_path / "other.parquet"
    write_database(table_of([ROW]), one)
    later = msgspec.structs.replace(ROW, median_ns=2050, date="2026-11-22T15:00:00Z")
    write_database(table_of([later, msgspec.structs.replace(ROW, operator="aten::bmm")]), other)
    return one, other


def test_databases_merge_and_show(two: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "all.parquet"
    done = run("merge", *two, "-o", output)
    assert done.exit_code == 0, done.output
    assert "2 rows; 1 were replaced" in done.output
    assert sorted(read_database(output)["median_ns"].to_list()) == [2000, 2050]
    shown = run("show", output)
    assert "aten::bmm  bfloat16      1     1  2.000 us  2.000 us" in " ".join(
        line for line in shown.output.splitlines() if "bmm" in line
    )
    message = msgspec.json.decode(run("show", output, "--json").output)
    assert [(one["operator"], one["rows"]) for one in message] == [
        ("aten::bmm", 1),
        ("aten::mm", 1),
    ]


def test_what_is_no_database_is_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"no table")
    done = run("merge", two[0], bad, "-o", tmp_path / "all.parquet")
    assert done.exit_code == 2
    assert "error[database-unreadable]" in done.output
    assert "bad.parquet" in done.output
    assert not (tmp_path / "all.parquet").exists()


def test_nothing_to_measure_and_a_trace_of_a_cpu_are_refused(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    done = run("-o", output)
    assert done.exit_code == 2
    assert "error[bench-nothing-to-measure]" in done.output
    from onerank.converters.sources.kineto import convert_directory

    trace = tmp_path / "cpu.et"
    convert_directory(TRACES / "cpu-llama-2l-tp4")[0].write(trace)
    done = run(trace, "-o", output)
    assert done.exit_code == 2
    assert "error[bench-no-operators]" in done.output
    assert run(trace, "-o", trace).exit_code == 2
    assert onerank.read(trace)


def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for arguments in (("--grid", "training"), ("describe",)):
        done = run(*arguments, "-o", tmp_path / "out")
        assert done.exit_code == 2
        assert "error[bench-no-gpu]" in done.output
        assert not list(tmp_path.iterdir())


def test_a_gpu_that_no_description_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="ACME X9")
    name = "onerank.capture.bench.bench_runner.on_device"
    monkeypatch.setattr(name, lambda _: contextlib.nullcontext(device))
    done = run("describe", "-o", tmp_path / "x9.toml")
    assert done.exit_code == 2
    assert "error[gpu-no-description]" in done.output
    assert "ACME X9" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stop", "code", "message"),
    [
        (KeyboardInterrupt(), 0, "[bench-interrupted]"),
        (CaptureError("broken", code="bench-broken"), 2, "error[bench-broken]: broken; the 1 rows"),
    ],
)
def test_what_was_measured_until_the_end_is_kept(
    stop: BaseException, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is played by the CPU, without a process of its own."""
    small = BenchOperand((8, 8), "float32")
    requests = [BenchRequest((BenchCall(f"aten::{op}", (small,)),)) for op in ("silu", "relu")]

    def start(given: Sequence[BenchRequest], *_: Any) -> Iterator[Message]:
        account = Account(requested=len(given))
        yield "begin", [0]
        yield from Bench(torch.device("cpu")).measure(given[:1], account)
        yield "end", (0, account)
        raise stop

    device = contextlib.nullcontext(BenchDevice(torch.device("cpu"), "CPU"))
    monkeypatch.setattr("onerank.capture.bench.bench_runner.on_device", lambda _: device)
    monkeypatch.setattr("onerank.capture.bench.bench_runner.child_on", lambda _: start)
    monkeypatch.setattr("onerank.capture.bench.requests.training_grid", lambda: requests)
    output = tmp_path / "out.parquet"
    done = run("--grid", "training", "-o", output)
    assert done.exit_code == code
    assert message in " ".join(done.output.split("\n"))
    assert read_database(output)["operator"].to_list() == ["aten::silu"]


def test_calls_of_the_updated_database_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [BenchRequest((BenchCall(f"aten::{op}", ()),)) for op in ("silu", "relu")]
    device = contextlib.nullcontext(BenchDevice(torch.device("cpu"), "CPU"))
    runner = "onerank.capture.bench.bench_runner"
    monkeypatch.setattr(f"{runner}.on_device", lambda _: device)
    monkeypatch.setattr(f"{runner}.measure_isolated", lambda *_, **__: (row for row in ()))
    monkeypatch.setattr("onerank.capture.bench.requests.training_grid", lambda: requests)
    monkeypatch.setattr("onerank.cli.commands.bench.lacking", lambda given, *_: given[1:])
    known = tmp_path / "known.parquet"
    write_database(table_of([ROW]), known)
    done = run("--grid", "training", "--update", known, "-o", tmp_path / "out.parquet", "--json")
    assert done.exit_code == 0, done.output
    note_of(msgspec.json.decode(done.stdout)["notes"], "bench-calls-known", 1, "known.parquet")


def test_a_gpu_that_is_not_there_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    done = run("--grid", "training", "--gpu", "2", "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "error[bench-unknown-gpu]" in done.output
    assert "GPU 2" in done.output


def test_what_a_database_holds_is_not_measured_again() -> None:
    left, right = BenchOperand((8, 4)), BenchOperand((4, 2))
    plain = BenchCall("aten::mm", (left, right))
    turned = BenchCall("aten::mm", (left, right.swapped(0, 1)))
    versions = {"torch": "2.11", "cuda": "13.0", "cudnn": "", "driver": "", "triton": ""}
    database = table_of([ROW])
    grid = [BenchRequest((plain,)), BenchRequest((turned,))]
    assert lacking(grid, database, "GPU", versions) == [BenchRequest((turned,))]
    assert lacking(grid, database, "another", versions) == grid
    assert lacking(grid, database, "GPU", {**versions, "torch": "2.12"}) == grid
    traced = [BenchRequest((turned, plain), frozenset({name})) for name in ("k", "other")]
    assert lacking(traced, database, "GPU", versions) == traced[1:]
