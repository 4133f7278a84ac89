"""Benchmark kernels in a process of their own, so that a call that kills it costs only itself.

The process reports each call that it begins. When it dies, another one continues with the calls
that remain; calls that were in flight together are then tried one by one, to name the next culprit.
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
from onerank.capture.bench.trace_calls import Wanted
from onerank.capture.isolation import ProcessDiedError, process_events
from onerank.ir.errors import CaptureError

_MOST_DEATHS = 12

Message = Measured | tuple[str, Any]
"""What a child tells: a measurement; ("begin", positions); ("end", (position, account));
("broken", why); ("finished", account)."""
Start = Callable[[Sequence[Wanted], frozenset[int], float], Iterator[Message]]
"""Starts a child: what to measure, positions to be tried by themselves, seconds. It ends without
"finished" when the child dies, with ("died", exit code)."""


def measured_apart(
    wanted: Sequence[Wanted],
    account: Account,
    start: Start,
    *,
    seconds: float = math.inf,
    told: Callable[[], Any] = lambda: None,
) -> Generator[Measured]:
    """Yield what children measure, one after another until all is done or time is up.

    Args:
        wanted: what to measure, in order.
        account: is filled in, also when the caller closes the generator before its end.
        start: starts a child.
        seconds: no call is begun after so long.
        told: is called after each call.

    Raises:
        CaptureError: a child dies before it tries a call.
    """
    until = time.monotonic() + seconds
    left = list(range(len(wanted)))
    alone: set[int] = set()
    for _ in range(_MOST_DEATHS):
        run = _Run(left)
        given = [wanted[at] for at in left]
        by_themselves = frozenset(place for place, at in enumerate(left) if at in alone)
        try:
            for message in start(given, by_themselves, until - time.monotonic()):
                if isinstance(message, Measured):
                    yield message
                elif run.takes(message):
                    told()
        except (KeyboardInterrupt, GeneratorExit):
            account.untried["interrupted"] += len(run.left())
            raise
        finally:
            account.add(run.account)
        left = run.left()
        if not run.finished and not run.tried:
            raise CaptureError(
                f"what measures {run.why} before it tried a call; see above",
                code="bench-process-died",
            )
        if not run.finished and len(run.tried) == 1:
            culprit = run.tried[0]
            account.failed[f"{wanted[culprit].layouts[0].op}: {run.why}"] += 1
            left = [at for at in left if at != culprit]
            told()
        alone |= set(run.tried)
        if not left:
            return
        if run.finished or time.monotonic() >= until:
            account.untried[NO_TIME] += len(left)
            return
    account.untried[f"{_MOST_DEATHS} calls before them ended the process"] += len(left)


@dataclass(slots=True)
class _Run:
    """What became of one child. Positions are those of the parent."""

    given: list[int]
    account: Account = field(default_factory=Account)
    tried: list[int] = field(default_factory=list[int])
    done: set[int] = field(default_factory=set[int])
    finished: bool = False
    why: str = "ended the process"

    def takes(self, message: tuple[str, Any]) -> bool:
        """Take note of a message; return whether it ends a call."""
        kind, told = message
        if kind == "begin":
            self.tried = [self.given[place] for place in told]
        elif kind == "end":
            place: int
            place, self.account = told
            self.done.add(self.given[place])
        elif kind == "finished":
            self.account, self.finished = told, True
        elif kind == "broken":
            self.why = f"left the GPU in an error: {told}"
        elif kind == "died" and not self.why.startswith("left"):
            self.why = _cause(told)
        return kind == "end"

    def left(self) -> list[int]:
        """Return the calls that were not done."""
        return [at for at in self.given if at not in self.done]


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended the process by signal {-code} ({signal.Signals(-code).name})"
    return f"ended the process with exit code {code}"


def child_on(device: torch.device) -> Start:
    """Return a function that starts a process which measures on a device."""

    def start(wanted: Sequence[Wanted], alone: frozenset[int], seconds: float) -> Iterator[Message]:
        try:
            with process_events(_measure, (str(device), list(wanted), alone, seconds)) as events:
                for kind, message in events:
                    if kind == "event":
                        yield message
        except ProcessDiedError as error:
            yield "died", error.exit_code

    return start


def _measure(
    device: str,
    wanted: list[Wanted],
    alone: frozenset[int],
    seconds: float,
    report: Callable[[Message], None],
) -> None:
    """Measure in this process; report each measurement, and each call as it begins and ends."""
    faulthandler.enable()
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    account = Account(asked=len(wanted))

    def end(place: int) -> None:
        report(("end", (place, account)))

    def begin(places: Sequence[int]) -> None:
        report(("begin", list(places)))

    try:
        bench = Bench(where)
        measured = bench.measure(
            wanted, account, seconds=seconds, alone=alone, begin=begin, end=end
        )
        for measurement in measured:
            report(measurement)
        report(("finished", account))
    except BrokenDeviceError as error:
        report(("broken", str(error)))
    except Exception:  # noqa: BLE001  costs the call that was tried, like a signal
        traceback.print_exc()
        sys.exit(1)
