"""The step markers of `profiler.step()`, and a trace cut to one step."""

import re
from dataclasses import dataclass, replace

import numpy as np

from onerank.converters.sources.kineto.read.trace_columns import (
    I64,
    KinetoTrace,
    Mask,
    last_of,
    pick,
)
from onerank.ir.errors import TraceError

ALL = "all"
MEDIAN = "median"
_MARK = re.compile(r"ProfilerStep#(\d+)")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a trace: its number, and the host's times at its begin and end, nanoseconds."""

    number: int
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Time from begin to end."""
        return self.end_ns - self.start_ns


def steps(trace: KinetoTrace) -> list[Step]:
    """Return the steps of a trace in their order; none where the profiler was not told of any."""
    found: list[Step] = []
    host = trace.host
    for code in np.unique(host.name[~host.is_operator]).tolist():
        if mark := _MARK.fullmatch(trace.strings[code]):
            for row in np.flatnonzero((host.name == code) & ~host.is_operator).tolist():
                span = int(host.start_ns[row]), int(host.end_ns[row])
                found.append(Step(int(mark.group(1)), *span))
    return sorted(found, key=lambda step: step.start_ns)


def choose(trace: KinetoTrace, step: str) -> Step | None:
    """Return the step asked for.

    Args:
        trace: the trace.
        step: "all" for the whole trace, "median" for the step of median duration (of two, the
            shorter), or a step's number.

    Returns:
        The step; None for the whole trace.

    Raises:
        TraceError: the trace has no such step, or none.
    """
    if step == ALL:
        return None
    found = steps(trace)
    if not found:
        raise TraceError(
            f"{trace.path}: asked for step {step}, and the trace has no steps (no ProfilerStep "
            "annotation): call profiler.step() behind each step, or take the whole trace "
            "(--step all)"
        )
    if step == MEDIAN:
        return sorted(found, key=lambda one: one.duration_ns)[(len(found) - 1) // 2]
    for one in found:
        if str(one.number) == step:
            return one
    numbers = ", ".join(str(one.number) for one in found)
    raise TraceError(
        f"{trace.path}: asked for step {step}, expected one of its steps {numbers}, {MEDIAN!r} or "
        f"{ALL!r}"
    )


def cut(trace: KinetoTrace, step: Step) -> tuple[KinetoTrace, str]:
    """Return what belongs to one step, and a sentence on what was left out.

    The host's events, launches and allocations are those that begin within it; GPU operations
    those that were launched within it, whenever they ran.
    """
    launches = trace.launches.take(_within(trace.launches.start_ns, step))
    launched = last_of(launches.correlation, trace.gpu.correlation) >= 0
    known = last_of(trace.launches.correlation, trace.gpu.correlation) >= 0
    own = launched | (~known & _within(trace.gpu.start_ns, step))
    host = trace.host.take(_within(trace.host.start_ns, step))
    made = replace(
        trace,
        host=host,
        launches=launches,
        gpu=trace.gpu.take(own),
        syncs=trace.syncs.take(last_of(launches.correlation, trace.syncs.correlation) >= 0),
        memory=trace.memory.take(_within(trace.memory.start_ns, step)),
    )
    note = (
        f"step {step.number} alone ({step.duration_ns / 1e6:.3f} ms of host time): "
        f"{len(trace.host) - len(host)} host events and {int((~own).sum())} GPU operations of "
        "other steps are left out"
    )
    if left_ns := _left_running_ns(trace, step):
        note += (
            f"; of these the GPU still ran {left_ns / 1e6:.3f} ms when the step began, and what is "
            "launched first waited for that: a replay keeps the wait"
        )
    return made, note


def _left_running_ns(trace: KinetoTrace, step: Step) -> int:
    """Return how long the GPU runs, from the step's begin on, what was launched before."""
    gpu, launches = trace.gpu, trace.launches
    launch = last_of(launches.correlation, gpu.correlation)
    launched_ns = np.where(launch >= 0, pick(launches.start_ns, launch, 0), gpu.start_ns)
    end = gpu.start_ns + gpu.duration_ns
    left = (launched_ns < step.start_ns) & (end > step.start_ns)
    begin, end = np.maximum(gpu.start_ns[left], step.start_ns), end[left]
    order = np.argsort(begin)
    begin, end = begin[order], np.maximum.accumulate(end[order])
    before = np.concatenate([begin[:1], end[:-1]])
    return int(np.maximum(end - np.maximum(begin, before), 0).sum())


def _within(start_ns: I64, step: Step) -> Mask:
    return (start_ns >= step.start_ns) & (start_ns < step.end_ns)
