"""Scripts that close their streams, crash, are killed, or fill the disk."""

import builtins
import errno
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from own_process import run_command
from raised import raises_code

from onerank.capture import Options, WindowPlan, capture
from onerank.capture.profiling import profiled_windows
from onerank.capture.script.runner import CaptureComplete, Eviction, Script, play_script
from onerank.ir.errors import CaptureError, ScriptError

SCRIPT = """
import os, sys, torch
sys.path.insert(0, os.path.dirname(__file__))
import library
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for step in range(60):
    if step == 2:
        library.act(sys.argv[1])
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""

LIBRARY = """
import ctypes, os, signal, sys
def act(how):
    if how == "stdout":
        sys.stdout.close()
    if how == "both":
        sys.stdout.close()
        sys.stderr.close()
    if how == "descriptors":
        print("lost", end="")
        os.closerange(0, 3)
    if how == "redirect":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout = open(os.devnull, "w")
    if how == "abort":
        os.abort()
    if how == "segfault":
        ctypes.string_at(0)
    if how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "exit":
        sys.exit(3)
"""

SHORT = ("--warm-up", "1", "--timed-steps", "1")


def run(directory: Path, how: str, *options: str):
    (directory / "train.py").write_text(SCRIPT)
    (directory / "library.py").write_text(LIBRARY)
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    output = directory / "t.et"
    done = run_command(
        "capture", "run", directory / "train.py", *SHORT, "-o", output, *options, "--", how,
        environment={"TMPDIR": str(temporary)},
    )  # fmt: skip
    left = [path for path in temporary.iterdir() if path.name.startswith("onerank-")]
    return done, output.exists(), left


@pytest.mark.parametrize("how", ["stdout", "both", "descriptors", "redirect"])
def test_a_script_may_close_or_redirect_the_standard_streams(tmp_path, how):
    done, written, left = run(tmp_path, how, "--json")
    assert (done.returncode, written, left) == (0, True, [])
    assert done.stdout.lstrip().startswith("{")
    assert done.stdout.rstrip().endswith("}")
    assert "linking the traces" in done.stderr


def test_sigterm_leaves_nothing_behind(tmp_path):
    done, written, left = run(tmp_path, "term")
    assert (done.returncode, written, left) == (130, False, [])


@pytest.mark.parametrize(
    ("how", "number"), [("abort", signal.SIGABRT), ("segfault", signal.SIGSEGV)]
)
def test_a_crash_names_its_line_and_the_next_run_removes_what_it_left(tmp_path, how, number):
    done, written, left = run(tmp_path, how)
    assert (done.returncode, written, len(left)) == (-number, False, 1)
    assert f'library.py", line {16 if how == "abort" else 18} in act' in done.stderr
    assert 'train.py", line 9 in <module>' in done.stderr
    done, written, left = run(tmp_path, "nothing")
    assert (done.returncode, written, left) == (0, True, [])


def test_an_exit_inside_a_library_names_both_lines(tmp_path):
    done, written, left = run(tmp_path, "exit")
    assert (done.returncode, written, left) == (2, False, [])
    assert "error[script-exited]: train.py line 9 (" in done.stderr
    assert "library.py line 22 (act)" in done.stderr


def test_a_trace_that_cannot_be_written_is_no_error_of_the_script(tmp_path, monkeypatch):
    def full(profiler: object, file: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(profiled_windows, "write", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("import library", "").replace("library.act", "len"))
    with raises_code("capture-unwritten", CaptureError) as info:
        capture(script, ["x"], Options(windows=WindowPlan(1, 1)))
    assert str(tmp_path) in str(info.value)
    assert list(tmp_path.glob("onerank-*")) == []


NO_OPTIMIZER = """
import sys, torch
model = torch.nn.Linear(8, 8)
if "create" in sys.argv:
    optimizer = torch.optim.SGD(model.parameters())
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(4, 8)).sum()
    if "infer" not in sys.argv:
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
print("ended")
"""


@pytest.mark.parametrize(
    ("arguments", "early"),
    [
        (["200"], True),
        (["2000", "infer"], True),
        (["60"], False),
        (["900", "infer"], False),
        (["200", "create"], False),  # it may step later
    ],
)
def test_a_script_without_an_optimizer_is_refused_early(tmp_path, arguments, early):
    script = tmp_path / "train.py"
    script.write_text(NO_OPTIMIZER)
    # In a process of its own: optimizers of other tests may still be alive here.
    done = run_command("capture", "run", script, "-o", tmp_path / "t.et", "--", *arguments)
    assert done.returncode == 2
    assert "error[script-no-step]" in done.stderr
    assert ("ended" in done.stdout) is not early
    assert "\u00b7 16 " in done.stderr


TRAIN = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
while True:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


def test_what_happens_before_the_first_step_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("onerank.capture.script.before_first_step.HEARTBEAT_S", 0.02)
    script, seen = tmp_path / "train.py", tmp_path / "seen"
    # The script's second line ends once it is reported: a sleep may pass while the machine stalls.
    wait = f"for _ in range(3000): os.path.exists({str(seen)!r}) or time.sleep(0.01)"
    script.write_text(f"import os, time\n{wait}\n{TRAIN}")
    events: list[str] = []

    def progress(event: str) -> None:
        events.append(event)
        if f"line 2: {wait}" in event:
            seen.touch()

    # With another handler of the alarm there are no reports.
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    capture(script, [], Options(windows=WindowPlan(1, 1)), progress)
    assert events[0] == "running train.py"
    assert seen.exists()
    # Reports of the current line may stand between these.
    expected = ("72 parameters", "first backward pass done", "timed, step 1 of 1")
    places = [next(i for i, event in enumerate(events) if text in event) for text in expected]
    assert places == sorted(places)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_no_alarm_is_left_behind_by_a_script_that_catches_its_end(tmp_path):
    script = tmp_path / "train.py"
    body = TRAIN.replace("\n    model(", "\n  try:\n    model(")
    script.write_text(f"{body}  except BaseException:\n    continue\n")
    capture(script, [], Options(windows=WindowPlan(1, 1)))
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


CATCHES_ITS_END = """
eviction.begin()
while True:
    try:
        sum(range(9))
    except BaseException:
        pass
"""


def test_an_evicted_script_leaves_main_arguments_and_path_as_they_were(tmp_path, monkeypatch):
    restore = runpy._TempModule.__exit__

    def slowly(*args: object) -> None:
        end = time.monotonic() + 0.02  # the alarm comes every 0.1 ms
        while time.monotonic() < end:
            pass
        restore(*args)

    monkeypatch.setattr(runpy._TempModule, "__exit__", slowly)
    monkeypatch.setattr(builtins, "eviction", Eviction(CaptureComplete, play_script), raising=False)
    script = tmp_path / "train.py"
    script.write_text(CATCHES_ITS_END)
    before = sys.modules["__main__"], sys.argv, list(sys.path), Path.cwd()
    with pytest.raises(CaptureComplete), builtins.eviction:
        play_script(Script(script, ["argument"]))
    assert (sys.modules["__main__"], sys.argv, sys.path, Path.cwd()) == before


@pytest.mark.parametrize("data", ["cpu", "meta"])
def test_a_model_on_the_meta_device_is_refused_with_advice(tmp_path, data):
    script = tmp_path / "train.py"
    text = TRAIN.replace("Linear(8, 8)", "Linear(8, 8, device='meta')")
    script.write_text(text.replace("randn(4, 8)", f"randn(4, 8, device='{data}')"))
    with raises_code("script-meta-model", ScriptError) as info:
        capture(script, [], Options(windows=WindowPlan(1, 1)))
    assert "model.to_empty(device=...)" in str(info.value)
