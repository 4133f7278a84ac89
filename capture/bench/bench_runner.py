"""Measure calls on a GPU: first their kernels, then their time, until done or out of time.

`Bench` measures in this process. `measure_isolated` measures in child processes, so that a crash
loses only the call that causes it. A child reports each call that it begins. If it dies, another
child continues with the remaining calls. The calls of the batch in which it died are then tried one
by one, which identifies the culprit.
"""

import contextlib
import datetime
import faulthandler
import importlib
import math
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from onerank.capture.bench.bench_call import BenchCall
from onerank.capture.bench.measure_call import (
    NO_TIME,
    Account,
    Cache,
    Launched,
    Measured,
    Replays,
    launched,
)
from onerank.capture.bench.random_operands import RunnableCall, with_random_operands
from onerank.capture.bench.requests import BenchRequest
from onerank.capture.isolation import ProcessDiedError, process_events
from onerank.capture.profiling.nvml import Board, Power
from onerank.ir.errors import CaptureError, first_line


@dataclass(frozen=True, slots=True)
class BenchDevice:
    """A CUDA device for torch, and its name as CUDA reports it."""

    torch: torch.device
    name: str


@contextlib.contextmanager
def on_device(index: int) -> Generator[BenchDevice]:
    """Make a CUDA device the current device; restore the TF32 setting when the context ends.

    Raises:
        CaptureError: there is no such device.
    """
    count = torch.cuda.device_count()
    if not count:
        raise CaptureError(
            f"torch {torch.__version__} finds no CUDA device; run this on a machine with a GPU "
            "and a build of torch for CUDA",
            code="bench-no-gpu",
        )
    if index >= count:
        raise CaptureError(
            f"no GPU {index}: this machine has GPUs 0 to {count - 1}", code="bench-unknown-gpu"
        )
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.cuda.set_device(index)
    try:
        yield BenchDevice(torch.device("cuda", index), torch.cuda.get_device_name(index))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def versions(driver: str) -> dict[str, str]:
    """Return the versions of the libraries that choose kernels; "" for an absent library."""
    triton = ""
    with contextlib.suppress(ImportError):
        triton = str(importlib.import_module("triton").__version__)
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or torch.version.hip or ""),
        "cudnn": str(cudnn or ""),
        "driver": driver,
        "triton": triton,
    }


# Calls that share one profile: a profiler takes longer to start and stop than most calls run.
_MAX_BATCH = 64

MAX_COPIES = 64
"""Copies of a call's operands that take turns, so that each finds a cold cache."""

# Power is read over the second half, which begins after the 0.6 s by which the counter lags.
_SUSTAINED_S = 1.8

_HOST_CACHE_BYTES = 32 << 20

# Random operators: before each replay, a CUDA graph sets their position in the sequence.
_NOT_IN_GRAPHS = frozenset(
    f"aten::{name}_" for name in ("random", "normal", "uniform", "bernoulli", "exponential")
)


class _Profiled(NamedTuple):
    """A call that runs, and its kernels with a cold and with a warm cache."""

    call: BenchCall
    cold: Launched
    warm: Launched


class Bench:
    """Measures calls on the current CUDA device.

    Args:
        device: where to measure. A CPU has no kernels: its operators are timed, for tests.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.board = Board() if self.on_gpu else None
        if self.on_gpu:
            self.cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        else:
            self.cache_bytes = _HOST_CACHE_BYTES
        self._cache_filler = torch.ones(2, self.cache_bytes // 4, device=device)

    def measure(
        self,
        requests: Sequence[BenchRequest],
        account: Account,
        *,
        seconds: float = math.inf,
        one_by_one: frozenset[int] = frozenset(),
        begin: Callable[[Sequence[int]], Any] = lambda _: None,
        end: Callable[[int], Any] = lambda _: None,
    ) -> Generator[Measured]:
        """Yield the measurements of calls.

        Args:
            requests: in order of priority.
            account: counts the outcome of each call before `end` is called for it.
            seconds: time limit; no call begins after it.
            one_by_one: positions of calls that form a batch of one.
            begin: is called with the positions of the calls that are tried next.
            end: is called with the position of each finished call.
        """
        deadline = time.monotonic() + seconds
        done_count = 0
        for batch in self._batches(requests, one_by_one):
            begin(batch)
            for at, layouts, outcome in self._profiled([(at, requests[at]) for at in batch]):
                if time.monotonic() >= deadline:
                    account.untried[NO_TIME] += len(requests) - done_count
                    return
                if len(batch) > 1:
                    begin([at])
                yield from self._timed(requests[at], layouts, outcome)
                account.add(outcome)
                done_count += 1
                end(at)

    def _batches(
        self, requests: Sequence[BenchRequest], one_by_one: frozenset[int]
    ) -> Iterator[list[int]]:
        """Yield the positions of calls whose operands fit the device together."""
        # The calls of a batch keep their operands until all are profiled.
        room = 0.15 * _memory_bytes(self.device) if self.on_gpu else math.inf
        batch: list[int] = []
        batch_bytes = 0
        for at, request in enumerate(requests):
            size = sum(2 * call.nbytes for call in request.layouts)  # operands and results
            full = len(batch) == _MAX_BATCH or batch_bytes + size > room
            if batch and (full or at in one_by_one or batch[-1] in one_by_one):
                yield batch
                batch, batch_bytes = [], 0
            batch.append(at)
            batch_bytes += size
        if batch:
            yield batch

    def _profiled(
        self, batch: Iterable[tuple[int, BenchRequest]]
    ) -> Iterator[tuple[int, list[_Profiled], Account]]:
        """Yield each call's position, the layouts to measure, and an account of the others."""
        attempts: list[tuple[int, BenchRequest, list[BenchCall], Account]] = []
        functions: list[Callable[[], Any]] = []
        for at, request in batch:
            runs: list[BenchCall] = []
            outcome = Account()
            reason = ""
            for call in request.layouts:
                try:
                    warm_call = self._warm(call)
                    functions.append(warm_call.function)
                    runs.append(warm_call.call)
                except CaptureError as error:
                    reason = reason or str(error)
            if not runs:
                outcome.failed[reason] += 1
            attempts.append((at, request, runs, outcome))
        ops = [call.op for _, _, runs, _ in attempts for call in runs]
        launch_records = iter(launched(functions, ops, on_gpu=self.on_gpu, flush=self._flush))
        # Else the operands of the whole batch would stay allocated while its calls are timed.
        functions.clear()
        warm_call = None
        profiled = [
            (
                at,
                _matching(
                    request, [_Profiled(call, *next(launch_records)) for call in runs], outcome
                ),
                outcome,
            )
            for at, request, runs, outcome in attempts
        ]
        # Long calls first: in the seconds after a profile small kernels start more slowly.
        profiled.sort(key=lambda each: -sum(sum(layout.cold.times_ns) for layout in each[1]))
        yield from profiled

    def _flush(self) -> None:
        """Evict the cache: a copy reads half of its size and writes the other half."""
        self._cache_filler[0].copy_(self._cache_filler[1])

    def _warm(self, call: BenchCall) -> RunnableCall:
        """Create operands for a call, run it once, and return it.

        Raises:
            CaptureError: it cannot run.
        """
        try:
            runnable = with_random_operands(call, self.device)
            runnable.function()
            if self.on_gpu:
                torch.cuda.synchronize()
                _refuse_waiting(runnable.function)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            self._refuse_broken(error)
            raise CaptureError(
                f"{call.op}: {first_line(error)}", code="bench-call-failed"
            ) from error
        return runnable

    def _timed(
        self, request: BenchRequest, layouts: list[_Profiled], account: Account
    ) -> Iterator[Measured]:
        measured = False
        for layout in layouts:
            call = layout.call
            inner = {name for name in layout.cold.inside if name != call.op}
            account.inner.update(f"{call.op} > {name}" for name in inner)
            for l2, copies in self._cache_states(call.nbytes):
                kernels = layout.cold if l2 == "cold" else layout.warm
                try:
                    yield self._measured(call, kernels, l2, copies, sustained=request.sustained)
                    measured = True
                except CaptureError as error:
                    account.failed[str(error)] += 1
        account.done += measured
        # The allocator caches blocks per size. Calls of many sizes would fill the device with them.
        if self.on_gpu and torch.cuda.memory_reserved() > 0.5 * _memory_bytes(self.device):
            torch.cuda.empty_cache()

    def _cache_states(self, nbytes: int) -> Iterator[tuple[Cache, int]]:
        """Yield the cache states to measure for operands of `nbytes`, with the number of copies.

        Copies that take turns are cold if together they have twice the cache's size. Operands that
        would need more than 64 copies are measured warm only.
        """
        copies = math.ceil(2 * self.cache_bytes / max(1, nbytes))
        if copies <= MAX_COPIES:
            yield "cold", copies
        if nbytes <= self.cache_bytes / 2:
            yield "warm", 1

    def _measured(
        self, call: BenchCall, kernels: Launched, l2: Cache, copies: int, *, sustained: bool
    ) -> Measured:
        calls = [self._warm(call).function for _ in range(copies)]
        power: Power | None = None
        try:
            # The driver's copies are slower in a CUDA graph, see `Replays`.
            queued = call.op in _NOT_IN_GRAPHS or any(
                name.startswith("Memcpy") for name in kernels.names
            )
            replays = Replays(calls, on_gpu=self.on_gpu, queued=queued)
            if sustained and self.board is not None:
                with self.board.power() as power:
                    timing = replays.sustain(_SUSTAINED_S)
            else:
                timing = replays.timing()
        except RuntimeError as error:
            self._refuse_broken(error)
            raise CaptureError(
                f"{call.op}: {first_line(error)}", code="bench-call-failed"
            ) from error
        reading = self.board.reading() if self.board else None
        clock = power.sm_clock_mhz if power else None
        now = datetime.datetime.now(datetime.UTC)
        return Measured(
            call=call,
            launched=kernels,
            timing=timing,
            l2=l2,
            sm_clock_mhz=clock or (reading.sm_clock_mhz if reading else None),
            temperature_c=reading.temperature_c if reading else None,
            power_w=power.watts if power else None,
            date=now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        )

    def _refuse_broken(self, error: Exception) -> None:
        """Raise `BrokenDeviceError` if an error has left the device unusable."""
        if not self.on_gpu:
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise BrokenDeviceError(first_line(error)) from error


def _matching(request: BenchRequest, layouts: list[_Profiled], outcome: Account) -> list[_Profiled]:
    """Return the layouts that launch a kernel of the trace; the first layout if none does."""
    repeatable = [
        layout for layout in layouts if layout.cold.names and layout.warm.names == layout.cold.names
    ]
    if layouts and not repeatable:
        outcome.failed[
            f"{layouts[0].call.op}: launches no kernel, or different ones cold and warm"
        ] += 1
    if not request.kernels or not repeatable:
        return repeatable
    # Many operators clear a buffer first, so a Memset identifies none of them.
    identifying = {
        name for name in request.kernels if not name.startswith("Memset")
    } or request.kernels
    matching: dict[tuple[str, ...], _Profiled] = {}
    for layout in repeatable:
        if identifying & set(layout.cold.names):
            matching.setdefault(layout.cold.names, layout)
    if not matching:
        outcome.other_kernels[request.layouts[0].op] += 1
        return repeatable[:1]
    return list(matching.values())


def _refuse_waiting(function: Callable[[], Any]) -> None:
    """Raise `RuntimeError` for a call that makes the host wait: no CUDA graph can contain it."""
    # Checked before the graph capture: a capture that fails half-way would leave the state of
    # torch's allocator and generator behind.
    with warnings.catch_warnings():
        # torch warns that this mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class BrokenDeviceError(Exception):
    """A call has left the device in an error state that lasts as long as the process."""


def _memory_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


# Children that may die before the remaining calls are given up: each starts torch again.
_MAX_DEATHS = 12

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
