"""Benchmark calls in a child process, so that a call that crashes it is the only one lost.

The child reports each call that it begins. If it dies, another child continues with the remaining
calls. The calls that were tried together are then tried one by one, which identifies the culprit.
"""

import faulthandler
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from onerank.capture.bench.bench_runner import Bench, BrokenDeviceError
from onerank.capture.bench.measured_call import NO_TIME, Account, Measured
from onerank.capture.bench.requests import BenchRequest
from onerank.capture.isolation import ProcessDiedError, process_events
from onerank.ir.errors import CaptureError

_MAX_DEATHS = 12
"""Children that may die before the remaining calls are given up: each starts torch again."""

Message = Measured | tuple[str, Any]
"""A child's report: a measurement; ("begin", positions); ("end", (position, account));
("broken", reason); ("finished", account); ("died", exit code)."""
Start = Callable[[Sequence[BenchRequest], frozenset[int], float], Iterator[Message]]
"""Starts a child: (requests, positions to try one by one, seconds) -> its reports."""


def measure_isolated(
    requests: Sequence[BenchRequest],
    account: Account,
    start: Start,
    *,
    seconds: float = math.inf,
    advance: Callable[[], Any] = lambda: None,
) -> Generator[Measured]:
    """Yield the measurements of successive children, until all calls are done or time is up.

    Args:
        requests: in order of priority.
        account: counts the outcomes, also if the caller closes the generator early.
        start: starts a child.
        seconds: time limit; no call begins after it.
        advance: is called after each call.

    Raises:
        CaptureError: a child dies before it tries a call.
    """
    deadline = time.monotonic() + seconds
    remaining = list(range(len(requests)))
    isolated: set[int] = set()  # tried together with a call that ended the child
    for _ in range(_MAX_DEATHS):
        run = _ChildRun(remaining)
        left = [requests[position] for position in remaining]
        one_by_one = frozenset(
            index for index, position in enumerate(remaining) if position in isolated
        )
        try:
            for message in start(left, one_by_one, deadline - time.monotonic()):
                if isinstance(message, Measured):
                    yield message
                elif run.update(message):
                    advance()
        except (KeyboardInterrupt, GeneratorExit):
            account.untried["interrupted"] += len(run.remaining())
            raise
        finally:
            account.add(run.account)
        remaining = run.remaining()
        if not run.finished and not run.tried:
            raise CaptureError(
                f"the measuring process {run.reason} before it tried a call; its output is above",
                code="bench-process-died",
            )
        if not run.finished and len(run.tried) == 1:
            culprit = run.tried[0]
            account.failed[f"{requests[culprit].layouts[0].op}: {run.reason}"] += 1
            remaining = [position for position in remaining if position != culprit]
            advance()
        isolated |= set(run.tried)
        if not remaining:
            return
        if run.finished or time.monotonic() >= deadline:
            account.untried[NO_TIME] += len(remaining)
            return
    account.untried[f"{_MAX_DEATHS} calls before them ended the process"] += len(remaining)


@dataclass(slots=True)
class _ChildRun:
    """The progress of one child; its positions are translated to the parent's."""

    positions: list[int]
    account: Account = field(default_factory=Account)
    tried: list[int] = field(default_factory=list[int])
    done: set[int] = field(default_factory=set[int])
    finished: bool = False
    reason: str = "ended the process"

    def update(self, message: tuple[str, Any]) -> bool:
        """Apply a message; return whether it ends a call."""
        kind, content = message
        if kind == "begin":
            self.tried = [self.positions[index] for index in content]
        elif kind == "end":
            index: int
            index, self.account = content
            self.done.add(self.positions[index])
        elif kind == "finished":
            self.account, self.finished = content, True
        elif kind == "broken":
            self.reason = f"left the GPU in an error: {content}"
        elif kind == "died" and not self.reason.startswith("left"):
            self.reason = _cause(content)
        return kind == "end"

    def remaining(self) -> list[int]:
        """Return the positions of calls that are not done."""
        return [position for position in self.positions if position not in self.done]


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended the process by signal {-code} ({signal.Signals(-code).name})"
    return f"ended the process with exit code {code}"


def child_on(device: torch.device) -> Start:
    """Return a function that starts a process which measures on a device."""

    def start(
        requests: Sequence[BenchRequest], one_by_one: frozenset[int], seconds: float
    ) -> Iterator[Message]:
        try:
            call = (str(device), list(requests), one_by_one, seconds)
            with process_events(_measure, call) as events:
                for kind, message in events:
                    if kind == "event":
                        yield message
        except ProcessDiedError as error:
            yield "died", error.exit_code

    return start


def _measure(
    device: str,
    requests: list[BenchRequest],
    one_by_one: frozenset[int],
    seconds: float,
    report: Callable[[Message], None],
) -> None:
    """Measure in this process; report each measurement, and each call as it begins and ends."""
    faulthandler.enable()
    torch_device = torch.device(device)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    account = Account(requested=len(requests))

    def end(position: int) -> None:
        report(("end", (position, account)))

    def begin(positions: Sequence[int]) -> None:
        report(("begin", list(positions)))

    try:
        bench = Bench(torch_device)
        measured = bench.measure(
            requests, account, seconds=seconds, one_by_one=one_by_one, begin=begin, end=end
        )
        for measurement in measured:
            report(measurement)
        report(("finished", account))
    except BrokenDeviceError as error:
        report(("broken", str(error)))
    except Exception:  # noqa: BLE001  loses only the tried call, as a signal does
        traceback.print_exc()
        sys.exit(1)
