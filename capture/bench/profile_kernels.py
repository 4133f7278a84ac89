"""The kernels that each call launches, and their times, from torch's profiler."""

import bisect
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from onerank.capture.profiling.profiled_windows import unparsed

_LABEL = "onerank::bench::"
REPEATS = 7


@dataclass(frozen=True, slots=True)
class Launched:
    """The GPU operations that one call launched.

    Attributes:
        names: names of the kernels, copies and fills, in order of launch.
        times_ns: median time of each.
        inside: the innermost operator that launched each.
    """

    names: tuple[str, ...]
    times_ns: tuple[int, ...]
    inside: tuple[str, ...]


def launched(
    calls: Sequence[Callable[[], Any]],
    op: Sequence[str],
    *,
    on_gpu: bool,
    flush: Callable[[], Any],
) -> list[tuple[Launched, Launched]]:
    """Return what each call launches with a cold and with a warm cache.

    On a CPU, which launches nothing, a call's operator counts as its kernel.

    Args:
        calls: functions that have run once. Each runs `REPEATS` times after a flush of the cache
            and `REPEATS` times without.
        op: operator of each call.
        on_gpu: whether they run on a CUDA device.
        flush: evicts the cache.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    recorded = profile(activities=activities, acc_events=True)
    with unparsed(recorded):
        for number, call in enumerate(calls):
            for repeat in range(2 * REPEATS):
                cold = repeat < REPEATS
                if cold:
                    flush()
                with record_function(f"{_LABEL}{2 * number + (not cold)}"):
                    call()
                if on_gpu:
                    torch.cuda.synchronize()
    results: Any = recorded.profiler
    events = list(results.kineto_results.events())
    runs = _device(events) if on_gpu else _host(events, op)
    return [
        (_merged(runs.get(2 * number, [])), _merged(runs.get(2 * number + 1, [])))
        for number in range(len(calls))
    ]


_Run = list[tuple[str, int, str]]
"""(kernel, ns, operator) of one repetition, in the order of launch."""


def _device(events: list[Any]) -> dict[int, list[_Run]]:
    """Return what each repetition of each label launched, by the launches' correlation."""
    labels, operators, launches = [], [], []
    kernels: dict[int, list[Any]] = defaultdict(list)
    for event in events:
        name = event.name()
        if event.device_type() == DeviceType.CUDA:
            if not name.startswith(_LABEL):
                kernels[event.correlation_id()].append(event)
        elif name.startswith(_LABEL):
            labels.append(event)
        elif name.startswith(("cuda", "cu", "hip")) and "::" not in name:
            launches.append(event)
        elif "::" in name:
            operators.append(event)
    launches.sort(key=_start)
    operators.sort(key=_start)
    found: dict[int, list[_Run]] = defaultdict(list)
    for label in sorted(labels, key=_start):
        begin = label.start_ns()
        end = begin + label.duration_ns()
        inside = _between(operators, begin, end)
        found[int(label.name()[len(_LABEL) :])].append(
            [
                (kernel.name(), kernel.duration_ns(), _innermost(inside, launch.start_ns()))
                for launch in _between(launches, begin, end)
                for kernel in kernels.get(launch.correlation_id(), [])
            ]
        )
    return found


def _between(events: list[Any], begin: int, end: int) -> list[Any]:
    """Return the events, ordered by start, that begin between two times in ns."""
    first = bisect.bisect_left(events, begin, key=_start)
    return events[first : bisect.bisect_right(events, end, key=_start)]


def _start(event: Any) -> int:
    return event.start_ns()


def _innermost(operators: Sequence[Any], when: int) -> str:
    """Return the name of the operator that began last among those that run at `when`, in ns."""
    running = (
        operator.name()
        for operator in reversed(operators)
        if operator.start_ns() <= when <= operator.start_ns() + operator.duration_ns()
    )
    return next(running, "")


def _host(events: list[Any], op: Sequence[str]) -> dict[int, list[_Run]]:
    found: dict[int, list[_Run]] = defaultdict(list)
    for event in events:
        if event.name().startswith(_LABEL):
            number = int(event.name()[len(_LABEL) :])
            name = op[number // 2]
            found[number].append([(name, max(1, event.duration_ns()), name)])
    return found


def _merged(runs: list[_Run]) -> Launched:
    """Return the median over the repetitions that launch what the last one launches."""
    if not runs or not runs[-1]:
        return Launched((), (), ())
    names = tuple(name for name, _, _ in runs[-1])
    equal_runs = [run for run in runs if tuple(name for name, _, _ in run) == names]
    times = tuple(
        max(1, round(statistics.median(times)))
        for times in zip(*([ns for _, ns, _ in run] for run in equal_runs), strict=True)
    )
    return Launched(names, times, tuple(inner for _, _, inner in runs[-1]))
