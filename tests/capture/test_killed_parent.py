"""A process of a capture ends with the process that started it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onerank.capture.isolation import process_events

_PARENT = """
import sys
from test_killed_parent import start
if __name__ == "__main__":
    start(*sys.argv[1:])
"""


def wait_forever(report: object) -> None:
    report(os.getpid())  # type: ignore[operator]
    while True:
        time.sleep(0.01)


def start(method: str) -> None:
    """Start the process, write its id, and wait for what never comes."""
    with process_events(wait_forever, (), method=method) as events:  # type: ignore[arg-type]
        for _, process in events:
            sys.stdout.write(f"{process}\n")
            sys.stdout.flush()


def runs(process: int) -> bool:
    """Whether a process exists and is no zombie, which only waits for its new parent."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_ends_when_its_parent_is_killed(method: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, method],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    process = int(parent.stdout.readline())
    assert runs(process)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while runs(process):
        assert time.monotonic() < deadline, f"process {process} still runs"
        time.sleep(0.02)
