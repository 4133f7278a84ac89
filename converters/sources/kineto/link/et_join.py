"""Join host events with execution-trace nodes: by record id, else by order within a thread."""

from collections import Counter
from pathlib import Path

import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import NONE, HostTimeline
from onerank.converters.sources.kineto.read.execution_trace import load_execution_trace
from onerank.converters.sources.kineto.read.schema import I64, ExecutionTrace, last_of
from onerank.ir.errors import TraceError

LEAST_FITTING = 0.95

_AGREE = 4  # names in a row that must be equal again behind these

_REACH = 64  # events that one file may have more than the other, in a row


def _resume(names: list[int], others: list[int]) -> tuple[int, int]:
    """Return how much of each sequence to leave out until they agree again; 1 and 1 if never."""
    for total in range(1, _REACH):
        for mine in range(total + 1):
            here, there = names[mine : mine + _AGREE], others[total - mine : total - mine + _AGREE]
            if here and here == there:
                return mine, total - mine
    return 1, 1


def _follow(names: list[int], others: list[int]) -> tuple[list[int], list[int]]:
    """Return places of equal names in both sequences, in order."""
    places: list[int] = []
    twins: list[int] = []
    at, other = 0, 0
    while at < len(names) and other < len(others):
        if names[at] == others[other]:
            places.append(at)
            twins.append(other)
            at += 1
            other += 1
            continue
        skipped = _resume(names[at : at + _REACH + _AGREE], others[other : other + _REACH + _AGREE])
        at += skipped[0]
        other += skipped[1]
    return places, twins


def align(timeline: HostTimeline, et: ExecutionTrace) -> tuple[I64, float]:
    """Return each host event's row in the execution trace (or NONE), and the share that fitted.

    The share is that of the operators.
    """
    rows = np.full(len(timeline), NONE)
    threads = {
        int(tid): np.flatnonzero(et.tid == tid)[np.argsort(et.id[et.tid == tid], kind="stable")]
        for tid in np.unique(et.tid)
    }
    names: dict[int, Counter[int]] = {
        tid: Counter(et.name[own].tolist()) for tid, own in threads.items()
    }
    spans = sorted(timeline.threads.values(), key=len, reverse=True)
    for span in spans:
        mine = timeline.rows.name[span.start : span.stop]
        counted: Counter[int] = Counter(mine.tolist())
        shared = {tid: (counted & own).total() for tid, own in names.items()}
        tid = max(shared, key=shared.__getitem__, default=None)
        if tid is None or not shared[tid]:
            continue
        theirs = threads.pop(tid)
        del names[tid]
        places, others = _follow(mine.tolist(), et.name[theirs].tolist())
        rows[np.array(places, dtype=np.int64) + span.start] = theirs[others]
    operators = timeline.rows.is_operator
    fitted = int((operators & (rows != NONE)).sum())
    return rows, fitted / max(int(operators.sum()), 1)


LEAST_FITTING_OTHER_RUN = 0.99

"""Share of operators that must fit by order if record ids show two different runs."""


def join(
    timeline: HostTimeline, et: ExecutionTrace, kineto: Path
) -> tuple[ExecutionTrace, list[str]]:
    """Give every host event its execution trace node, by record id, else by order.

    Args:
        timeline: the host events; their `et` is set.
        et: the execution trace.
        kineto: the file of the host events, for messages.

    Returns:
        The execution trace, read whole where record ids did not help, and sentences a reader
        should know.

    Raises:
        TraceError: there are no operators, or too few of the two fit each other.
    """
    rows = timeline.rows
    operators = int(rows.is_operator.sum())
    both = f"{kineto} and {et.path}"
    if not operators:
        raise TraceError(
            f"{kineto}: holds no operator: profile with the CPU activity on",
            code="trace-no-operators",
        )
    if not rows.rf_id[rows.is_operator].any():
        why = f"the Kineto trace has no `Record function id` on any of its {operators} operators"
        what = f"{both} cannot be linked: {why}"
        return _join_by_order(timeline, et, why, what, LEAST_FITTING)
    found = last_of(et.rf_id, rows.rf_id)
    known = found >= 0
    same = known.copy()
    same[known] = et.name[found[known]] == rows.name[known]
    other = np.flatnonzero(known & ~same)
    if not same.any() or len(other) > int(same.sum()) // 10:
        example = ""
        if len(other):
            strings = timeline.strings
            pairs = zip(rows.name[other].tolist(), et.name[found[other]].tolist(), strict=True)
            (mine, theirs), _ = Counter(pairs).most_common(1)[0]
            example = f" (for example {strings[mine]!r} against {strings[theirs]!r})"
        why = (
            f"of the {known.sum()} record ids they share, {len(other)} name different "
            f"operators{example}"
        )
        what = f"{both} are of different runs: {why}"
        return _join_by_order(timeline, et, why, what, LEAST_FITTING_OTHER_RUN)
    timeline.et = np.where(same, found, -1)
    return et, []


def _join_by_order(
    timeline: HostTimeline, et: ExecutionTrace, why: str, what: str, least: float
) -> tuple[ExecutionTrace, list[str]]:
    """Give host events execution trace nodes by the order of operators, if that fits.

    Args:
        timeline: the host events.
        et: the execution trace.
        why: why record ids do not join them.
        what: what an error begins with.
        least: share of the operators that must fit.

    Raises:
        TraceError: too few operators fit.
    """
    rows, share = align(timeline, et)
    operators = int(timeline.rows.is_operator.sum())
    fitted = int((timeline.rows.is_operator & (rows >= 0)).sum())
    if share < least:
        raise TraceError(
            f"{what}. By the order of operators only {fitted} of {operators} ({share:.1%}) fit, "
            f"expected {least:.0%}. Record both in one window: start an ExecutionTraceObserver "
            "inside torch.profiler.profile()",
            code="trace-et-mismatch",
        )
    timeline.et = rows
    if not et.whole:  # operands were kept by record ids
        et = load_execution_trace(et.path, timeline.strings)
    return et, [
        f"aligned with the execution trace by the order of operators per thread, since {why}: "
        f"{fitted} of {operators} operators ({share:.2%}) fitted"
    ]
