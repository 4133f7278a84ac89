"""Tasks run in processes, their results are stored, and a run that was killed resumes."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from raised import raises_code

from onerank.ir.errors import OneRankError
from onerank.plan import tasks as tasks_module
from onerank.plan.layouts import PredictedRange
from onerank.plan.tasks import (
    LocalPool,
    RayCluster,
    Store,
    Task,
    _call_on_ray,
    content_key,
    run_tasks,
)


def task(function: str, *arguments: Any, needs: tuple[str, ...] | None = None) -> Task:
    key = content_key(function, arguments, needs)
    return Task(key, function, f"plan_tasks:{function}", arguments, needs)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_results_are_records_and_tasks_take_results_they_need(store: Store):
    squares = [task("square", number) for number in range(4)]
    results = run_tasks(squares, store, LocalPool(2))
    assert [results[square.key] for square in squares] == [
        PredictedRange(float(number**2), 0.0, 1.0) for number in range(4)
    ]
    total = task("total", needs=tuple(square.key for square in squares))
    assert run_tasks([total], store, LocalPool(1)) == {total.key: 14.0}


def test_what_is_stored_does_not_run_again(store: Store, tmp_path: Path):
    log = tmp_path / "log"
    tasks = [task("log_call", str(log), number) for number in (1, 2, 2)]
    steps: list[int] = []
    run_tasks(tasks[:1], store, LocalPool(1))
    run_tasks(tasks, store, LocalPool(1), steps.append)
    assert log.read_text().split() == ["1", "2"]
    assert sum(steps) == 3


def test_a_refusal_holds_for_its_run_alone(tmp_path: Path):
    log, cause = tmp_path / "log", tmp_path / "data.bin"
    refused = task("refused_without", str(cause), str(log))
    found = {}
    for run, calls in (("first", 1), ("second", 2), ("third", 3), ("fourth", 3)):
        if run == "third":
            cause.touch()
        store = Store(tmp_path / "store")
        for _ in range(2):
            found[run] = run_tasks([refused], store, LocalPool(1))[refused.key].found
        assert log.read_text().count("call") == calls
    assert found == {"first": False, "second": False, "third": True, "fourth": True}


def test_results_of_ended_runs_are_removed_after_a_week(tmp_path: Path):
    first = Store(tmp_path)
    first.write("key", b"refused", lasts=False)
    assert (Store(tmp_path).read("key"), first.read("key")) == (None, b"refused")
    (path,) = tmp_path.iterdir()
    os.utime(path, (0, 0))
    Store(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_result_is_computed_again(store: Store):
    square = task("square", 3)
    run_tasks([square], store, LocalPool(1))
    (path,) = store.directory.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert square.key not in store
    assert run_tasks([square], store, LocalPool(1))[square.key].value == 9


def test_a_worker_that_dies_is_replaced_once(store: Store, tmp_path: Path):
    once = task("die_once", str(tmp_path / "marker"))
    assert run_tasks([once], store, LocalPool(1))[once.key] == 2
    square = task("square", 5)
    with pytest.raises(OneRankError, match="signal 9") as caught:
        run_tasks([square, task("die")], store, LocalPool(1))
    assert caught.value.code == "plan-worker-died"
    assert square.key in store  # what was complete is kept


def test_errors_of_a_task_reach_the_caller(store: Store):
    with pytest.raises(OneRankError) as caught:
        run_tasks([task("refuse")], store, LocalPool(1))
    assert caught.value.code == "plan-no-layout"
    with pytest.raises(ZeroDivisionError) as bug:
        run_tasks([task("divide", 0)], store, LocalPool(1))
    assert "in divide" in bug.value.__notes__[0]


def test_a_full_disk_is_an_error_and_leaves_no_part_of_a_result(store: Store):
    # A process over its limit on the size of files gets EFBIG, as others get ENOSPC. The server of
    # the pool may already run without the limit, so that the task runs in this process.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as caught:
            store.write("key", os.urandom(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(store.directory / "key.result")
    assert list(store.directory.iterdir()) == []


_RUN = """
import sys
from onerank.plan.tasks import LocalPool, Store, run_tasks
from test_tasks import interrupted_tasks
if __name__ == "__main__":
    log, until, store = sys.argv[1:]
    run_tasks(interrupted_tasks(log, until), Store(__import__("pathlib").Path(store)), LocalPool(2))
"""


def interrupted_tasks(log: str, until: str) -> list[Task]:
    """Two tasks that complete, and four of which two wait when the run is killed."""
    done = [task("log_call", log, number) for number in (0, 1)]
    return done + [task("log_then_wait", log, number, until) for number in (2, 3, 4, 5)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_run_resumes(store: Store, tmp_path: Path, number: signal.Signals):
    log, until = tmp_path / "log", tmp_path / "until"
    log.touch()
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, str(log), str(until), str(store.directory)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
    )
    while len(log.read_text().split()) < 4:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    tasks = interrupted_tasks(str(log), str(until))
    assert [task.key in store for task in tasks] == [True, True, False, False, False, False]
    until.touch()  # a worker that outlives its killed run ends now, and stores its result
    results = run_tasks(tasks, store, LocalPool(2))
    assert [results[task.key] for task in tasks] == [0, 1, 2, 3, 4, 5]
    assert log.read_text().split().count("0") == log.read_text().split().count("1") == 1


_RUN_COPY = """
import sys
from pathlib import Path
from test_tasks import task
from onerank.ir.errors import OneRankError
from onerank.plan.tasks import LocalPool, Store, run_tasks
if __name__ == "__main__":
    log, until, store = sys.argv[1:]
    try:
        run_tasks([task("log_then_wait", log, 0, until)], Store(Path(store)), LocalPool(1))
    except OneRankError as error:
        print(error.code)
"""


def test_a_checkout_that_changes_during_a_run_ends_it(store: Store, tmp_path: Path):
    package = Path(tasks_module.__file__).parents[1]
    shutil.copytree(package, tmp_path / "onerank", ignore=shutil.ignore_patterns("__pycache__"))
    log, until = tmp_path / "log", tmp_path / "until"
    log.touch()
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN_COPY, str(log), str(until), str(store.directory)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    while not log.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    changed = tmp_path / "onerank" / "plan" / "layouts.py"
    changed.write_text(changed.read_text() + "\n")
    until.touch()
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.split()) == (0, ["plan-code-changed"])
    assert not store.directory.exists()


def test_a_worker_of_another_checkout_runs_no_task(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tasks_module, "_code", lambda: ("2.13.0", "another digest"))
    log = tmp_path / "log"
    with raises_code("plan-code-changed"):
        run_tasks([task("log_call", str(log), 1)], store, LocalPool(1))
    assert not log.exists()
    assert not store.directory.exists()


def test_ray_that_is_not_installed(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises_code("plan-ray-not-installed"):
        run_tasks([task("square", 1)], store, RayCluster(store.directory, None))


def test_a_ray_worker_of_another_version_returns_no_result():
    with raises_code("plan-ray-version", naming="0.0.1"):
        _call_on_ray(task("square", 1), ("0.0.1", "digest"))
