"""`capture run` as a user calls it: what it writes, and what it says when a script is not fit."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from own_process import run_command

import onerank
from onerank.analysis.summary import summarise
from onerank.capture.capture_script import keep
from onerank.ir import Kind, Phase

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_llama.py"
CAPTURE = [sys.executable, "-c", "from onerank.cli import capture; capture()", "run"]
TINY = ["--layers", "1", "--seq", "16", "--batch", "1"]

LOOP = """
    import torch
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(50):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


CPU_ONLY = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command("capture", "run", *args)


def script(directory: Path, text: str) -> Path:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_the_example_as_rank_2_of_4(tmp_path):
    trace = tmp_path / "trace.et"
    raw = tmp_path / "raw"
    # A fork, which saves imports; `test_imports` captures in a fresh interpreter, as a user does.
    options = ["--tp", "4", "--rank", "2", "-o", trace, "--raw-dir", raw, "--json"]
    done = run_command("capture", "run", EXAMPLE, *options, "--", *TINY, forks=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    graph = onerank.read(trace)
    assert report["nodes"] == len(graph)
    assert report["rank"] == graph.job.rank == 2
    assert report["world"] == {"tp": 4}
    assert report["gpu_ops"] == 0
    assert len(report["step_ns"]) == 5
    assert report["peak_memory_bytes"] > report["start_memory_bytes"] > 0
    uses = {
        (use["type"], use["phase"], use["bytes"]): use["count"] for use in report["collectives"]
    }
    hidden_states = 16 * 512 * 4
    assert uses == {
        ("all_reduce", "forward", hidden_states): 3,  # attention, MLP, embedding
        ("all_reduce", "backward", hidden_states): 3,  # attention, MLP, head
        ("all_reduce", "forward", 16 * 4): 3,  # of the loss
    }
    assert sorted(p.name for p in raw.iterdir()) == [
        "et.json.gz",
        "job.json",
        "profile.json.gz",
        "structure.json.gz",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["raw", "trace.et"]
    converted = run_command("convert", raw, "-o", tmp_path / "again.et")
    assert converted.returncode == 0, converted.stderr
    assert "times from     profile.json.gz" in converted.stdout
    again = onerank.read(tmp_path / "again.et")
    assert again.nodes_frame().equals(graph.nodes_frame())


def test_without_tp_a_plain_script_is_captured_whole(tmp_path):
    done = run(script(tmp_path, LOOP), "-o", tmp_path / "t.et")
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "t.et")
    assert not graph.communication.any()
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= {node.phase for node in graph}


def test_a_script_that_distributes_itself_runs_as_it_is(tmp_path):
    path = script(
        tmp_path,
        """
        import os
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        assert os.environ["RANK"] == "1" and dist.get_world_size() == 4
        model = DistributedDataParallel(torch.nn.Linear(100, 100, bias=False))
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(torch.randn(4, 100)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = run(path, "--tp", "4", "--rank", "1", "-o", tmp_path / "t.et")
    assert done.returncode == 0, done.stderr
    uses = summarise(onerank.read(tmp_path / "t.et")).collectives
    assert [(use.type, use.bytes, use.count, use.group_ranks) for use in uses] == [
        ("all_reduce", 100 * 100 * 4, 1, (0, 1, 2, 3))
    ]


def test_gradient_accumulation_numbers_micro_batches(tmp_path):
    path = script(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        while True:
            for _ in range(3):
                model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = run(path, "-o", tmp_path / "t.et")
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "t.et")
    products = [n for n in graph if n.name == "aten::addmm" and n.kind is Kind.HOST_OP]
    assert [product.value("micro_batch") for product in products] == [0, 1, 2]


def test_with_two_optimizers_a_step_holds_both(tmp_path):
    path = script(
        tmp_path,
        """
        import torch
        models = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
        optimizers = [torch.optim.SGD(model.parameters()) for model in models]
        while True:
            for model, optimizer in zip(models, optimizers):
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
    )
    done = run(path, "-o", tmp_path / "t.et")
    assert done.returncode == 0, done.stderr
    products = [n for n in onerank.read(tmp_path / "t.et") if n.name == "aten::addmm"]
    assert len(products) == 2


FAILURES = {
    "unsliced": (
        LOOP,
        ["--tp", "4"],
        [
            "error[nothing-parallel]",
            "Linear",
            'model = "Linear"\n[modules]\n',
        ],
    ),
    "raises": (
        LOOP + "        if step == 2: raise ValueError('bad batch')\n",
        [],
        [
            "error[script-raised]",
            "ValueError after 3 optimizer steps: bad batch",
            'train.py", line 9',
        ],
    ),
    "exits": (
        LOOP + "        if step == 1: __import__('sys').exit(3)\n",
        [],
        ["error[script-exited]", "sys.exit(3) after 2 optimizer steps", "14", "train.py line 9"],
    ),
    "exits before it trains": (
        "import argparse\nargparse.ArgumentParser().parse_args()",
        ["--", "--lr", "4"],
        [
            "unrecognized arguments: --lr 4",
            "error[script-exited]: train.py line 2 (argparse.ArgumentParser().parse_args())",
            "sys.exit(2) after 0",
        ],
    ),
    "never steps": ("print('hello')", [], ["error[script-no-step]"]),
    "too few steps": (
        LOOP.replace("50", "4"),
        [],
        ["error[script-too-few-steps]", "4 optimizer steps", "at least 14", "--warm-up"],
    ),
    "syntax": ("def (:", [], ["error[script-not-python]", "line 1", "def (:"]),
    "rank out of range": (
        LOOP,
        ["--tp", "4", "--rank", "4"],
        ["error[rank-out-of-range]", "--rank 4", "tp 4 = 4", "0 to 3"],
    ),
    "world that does not factor": (
        LOOP,
        ["--dp", "4", "--ep", "3"],
        ["error[world-ep-indivisible]", "--ep 3"],
    ),
    "sequence of one rank": (LOOP, ["--sp"], ["error[sp-unused]", "1 rank"]),
    "mistyped option": (LOOP, ["--tpp", "4"], ["error[script-arguments-unseparated]", "--tpp"]),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_say_what_to_do_and_write_nothing(tmp_path, case):
    text, options, expected = FAILURES[case]
    path = script(tmp_path, text)
    done = run(path, "-o", tmp_path / "t.et", "--raw-dir", tmp_path / "raw", *options)
    assert done.returncode == 2
    assert "argparse.py" not in done.stderr
    for part in expected:
        assert part in done.stderr
    assert "onerank/" not in done.stderr  # the script's own traceback alone
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


def test_sizes_that_do_not_divide(tmp_path):
    done = run(EXAMPLE, "--tp", "3", "-o", tmp_path / "t.et", "--", *TINY)
    assert done.returncode == 2
    assert "error[tp-indivisible-heads]" in done.stderr
    assert "(8 = 3 x 2 + 2)" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_filled_directory_for_the_raw_traces_is_refused_before_the_script_runs(tmp_path):
    path = script(tmp_path, "raise AssertionError('the script ran')")
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "mine.txt").write_text("kept")
    done = run(path, "-o", tmp_path / "t.et", "--raw-dir", tmp_path / "raw")
    assert done.returncode == 2
    assert "error[raw-directory-not-empty]" in done.stderr
    assert "the script ran" not in done.stderr
    assert (tmp_path / "raw" / "mine.txt").read_text() == "kept"


def test_raw_traces_on_a_full_disk_leave_nothing(tmp_path):
    scratch, raw = tmp_path / "scratch", tmp_path / "kept" / "raw"
    scratch.mkdir()
    (scratch / "profile.json").write_bytes(bytes(8192))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as failed:
            keep(scratch, raw)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.value.filename == str(raw)
    assert list(tmp_path.iterdir()) == [scratch]


def interrupted(process):
    for _ in range(3):  # Python loses one that comes within a destructor
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=30)[1]
    raise AssertionError("the capture goes on")


def test_interrupting_leaves_nothing_behind(tmp_path):
    path = script(tmp_path, LOOP.replace("range(50)", "range(10**9)"))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [*CAPTURE, path, "--timed-steps", "1000000", "-o", tmp_path / "t.et"],
        stderr=subprocess.PIPE,
        text=True,
        env={**CPU_ONLY, "TMPDIR": str(temporary)},
    )
    assert process.stderr is not None
    while "timed, step" not in (line := process.stderr.readline()):
        assert line, "the capture ended before it was interrupted"
    time.sleep(0.2)
    rest = interrupted(process)
    assert process.returncode == 130
    assert "interrupted: nothing was written" in rest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tmp", "train.py"]
    assert list(temporary.glob("onerank-*")) == []
