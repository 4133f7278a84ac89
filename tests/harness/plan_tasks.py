"""Tasks of the tests of `onerank.plan.tasks`; workers import them by name."""

import os
import signal
import time
from pathlib import Path

from onerank.plan.layouts import PlanError, PredictedRange
from onerank.plan.tasks import TaskResult


def square(number: int) -> PredictedRange:
    """Return the square, as a record."""
    return PredictedRange(number**2, 0.0, 1.0)


def total(results: dict[str, PredictedRange]) -> float:
    """Return the sum of the needed squares."""
    return sum(result.value for result in results.values())


def log_call(log: str, number: int) -> int:
    """Append a number to a file; return the number."""
    with Path(log).open("a") as file:
        file.write(f"{number}\n")
    return number


def log_then_wait(log: str, number: int, until: str) -> int:
    """Append a number to a file; return it once another file exists."""
    log_call(log, number)
    while not Path(until).exists():
        time.sleep(0.01)
    return number


def die_once(marker: str) -> int:
    """Kill this process the first time; return its number of calls afterwards."""
    path = Path(marker)
    if not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 2


def die() -> int:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def refuse() -> int:
    """Fail as for a user's error."""
    raise PlanError("no such layout", code="plan-no-layout")


def divide(number: int) -> float:
    """Fail as a bug does, if the number is 0."""
    return 1 / number


def large(size: int) -> bytes:
    """Return bytes that do not compress."""
    return os.urandom(size)


def read_local(name: str) -> str:
    """Return the text of a file of the plan's directory."""
    return Path(name).read_text()


class Found(TaskResult):
    """Whether a file exists."""

    found: bool


def refused_without(path: str, log: str) -> Found:
    """Return a result for this run alone if a file is missing, after adding a line to `log`."""
    with Path(log).open("a") as file:
        file.write("call\n")
    return Found(found=Path(path).exists(), lasts=Path(path).exists())
