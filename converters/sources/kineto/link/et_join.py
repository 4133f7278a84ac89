"""Pair host events with the nodes of the execution trace.

`join` pairs them by record id, or by order within a thread if the ids do not match.
"""

from collections import Counter
from pathlib import Path

import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import NONE, HostTimeline, groups
from onerank.converters.sources.kineto.read.execution_trace import load_execution_trace
from onerank.converters.sources.kineto.read.trace_columns import ExecutionTrace, last_of
from onerank.ir.arrays import I64
from onerank.ir.errors import TraceError
from onerank.ir.notes import Note

# A public pair of files without record ids (DLRM) aligns 984 to 988 of 988 operators.
MIN_ALIGNED_SHARE = 0.95
"""Share of operators that must align by order if the Kineto trace has no record ids."""

MIN_ALIGNED_SHARE_OTHER_RUN = 0.99
"""Share of operators that must align by order if record ids show two different runs."""

_EQUAL_NAMES = 4  # consecutive equal names after which two sequences count as aligned again

_MAX_THREADS = 256  # the longest of each file; comparing all pairs takes threads^2 steps

_MAX_SKIPPED = 64  # consecutive events that only one of the files may have


def join(
    timeline: HostTimeline, et: ExecutionTrace, kineto: Path
) -> tuple[ExecutionTrace, list[Note]]:
    """Set the execution trace node of every host event, by record id, else by order.

    Args:
        timeline: the host events; `timeline.et` is set.
        et: the execution trace.
        kineto: the file of the host events, for messages.

    Returns:
        The execution trace, read again with all operands if events were aligned by order; notes.

    Raises:
        TraceError: there are no operators, or too few align.
    """
    rows = timeline.rows
    operators = int(rows.is_operator.sum())
    both = f"{kineto} and {et.path}"
    if not operators:
        raise TraceError(
            f"{kineto}: has no operators: profile with ProfilerActivity.CPU",
            code="trace-no-operators",
        )
    # Record ids are 0 if no execution trace observer ran during the profile.
    if not rows.rf_id[rows.is_operator].any():
        reason = f"the Kineto trace has no `Record function id` on any of its {operators} operators"
        error = f"{both} cannot be linked: {reason}"
        return _join_by_order(timeline, et, reason, error, MIN_ALIGNED_SHARE)
    # The record function id is the only key that both files share. Kineto's `External id` equals it
    # by accident only.
    et_row = last_of(et.rf_id, rows.rf_id)
    known = et_row >= 0
    equal = known.copy()
    equal[known] = et.name[et_row[known]] == rows.name[known]
    different = np.flatnonzero(known & ~equal)
    # Record ids of another run join operators at random; a few may differ in one run.
    if not equal.any() or len(different) > int(equal.sum()) // 10:
        example = ""
        if len(different):
            strings = timeline.strings
            pairs = zip(
                rows.name[different].tolist(), et.name[et_row[different]].tolist(), strict=True
            )
            (name, et_name), _ = Counter(pairs).most_common(1)[0]
            example = f" (for example {strings[name]!r} against {strings[et_name]!r})"
        reason = (
            f"of the {known.sum()} record ids they share, {len(different)} name different "
            f"operators{example}"
        )
        error = f"{both} are of different runs: {reason}"
        return _join_by_order(timeline, et, reason, error, MIN_ALIGNED_SHARE_OTHER_RUN)
    timeline.et = np.where(equal, et_row, NONE)
    return et, []


def _join_by_order(
    timeline: HostTimeline, et: ExecutionTrace, reason: str, error: str, min_share: float
) -> tuple[ExecutionTrace, list[Note]]:
    """Set the execution trace nodes of host events by the order of operators in each thread.

    Args:
        timeline: the host events; `timeline.et` is set.
        et: the execution trace.
        reason: why record ids do not join the two files.
        error: beginning of the error message.
        min_share: share of the operators that must align.

    Raises:
        TraceError: too few operators align.
    """
    rows, share = align(timeline, et)
    operators = int(timeline.rows.is_operator.sum())
    aligned = int((timeline.rows.is_operator & (rows >= 0)).sum())
    if share < min_share:
        raise TraceError(
            f"{error}. Only {aligned} of {operators} operators ({share:.1%}) align by order, "
            f"expected {min_share:.0%}. Record both in one window: start an ExecutionTraceObserver "
            "inside torch.profiler.profile()",
            code="trace-et-mismatch",
        )
    timeline.et = rows
    if not et.whole:  # operands were kept by record ids
        et = load_execution_trace(et.path, timeline.strings)
    return et, [
        Note(
            f"{aligned} of {operators} operators ({share:.2%}) are aligned with the execution "
            f"trace by their order in each thread, because {reason}",
            code="operators-aligned-by-order",
        )
    ]


def align(timeline: HostTimeline, et: ExecutionTrace) -> tuple[I64, float]:
    """Align host events with execution trace nodes by the order of names in each thread.

    Returns:
        Each host event's row in the execution trace or NONE, int64[n]; the share of operators that
        have a row.
    """
    rows = np.full(len(timeline), NONE)
    et_threads = {
        # The observer numbers nodes as they begin, so ids give the call order that the file's order
        # need not.
        int(et.tid[members[0]]): members[np.argsort(et.id[members], kind="stable")]
        for members in groups(et.tid)
    }
    name_counts: dict[int, Counter[int]] = {
        tid: Counter(et.name[et_rows].tolist()) for tid, et_rows in et_threads.items()
    }
    # The files number threads differently. The longest thread chooses first, by the names that it
    # shares with each thread of the execution trace.
    spans = sorted(timeline.threads.values(), key=len, reverse=True)
    longest = sorted(name_counts, key=lambda tid: len(et_threads[tid]), reverse=True)
    name_counts = {tid: name_counts[tid] for tid in sorted(longest[:_MAX_THREADS])}
    for span in spans[:_MAX_THREADS]:
        names = timeline.rows.name[span.start : span.stop]
        span_counts: Counter[int] = Counter(names.tolist())
        shared = {tid: (span_counts & counts).total() for tid, counts in name_counts.items()}
        tid = max(shared, key=shared.__getitem__, default=None)
        # Threads without a common name (data loaders, monitoring) stay without a partner.
        if tid is None or not shared[tid]:
            continue
        et_rows = et_threads.pop(tid)
        del name_counts[tid]
        places, et_places = _align_names(names.tolist(), et.name[et_rows].tolist())
        rows[np.array(places, dtype=np.int64) + span.start] = et_rows[et_places]
    operators = timeline.rows.is_operator
    aligned = int((operators & (rows != NONE)).sum())
    return rows, aligned / max(int(operators.sum()), 1)


def _align_names(names: list[int], et_names: list[int]) -> tuple[list[int], list[int]]:
    """Return the places of equal names in both sequences, in order."""
    places: list[int] = []
    et_places: list[int] = []
    window = _MAX_SKIPPED + _EQUAL_NAMES
    place, et_place = 0, 0
    while place < len(names) and et_place < len(et_names):
        if names[place] == et_names[et_place]:
            places.append(place)
            et_places.append(et_place)
            place += 1
            et_place += 1
            continue
        skipped, et_skipped = _skip_to_equal(
            names[place : place + window], et_names[et_place : et_place + window]
        )
        place += skipped
        et_place += et_skipped
    return places, et_places


def _skip_to_equal(names: list[int], et_names: list[int]) -> tuple[int, int]:
    """Return how many names of each sequence to skip until they agree; 1 and 1 if they never do."""
    for total in range(1, _MAX_SKIPPED):
        for skipped in range(total + 1):
            et_skipped = total - skipped
            following = names[skipped : skipped + _EQUAL_NAMES]
            if following and following == et_names[et_skipped : et_skipped + _EQUAL_NAMES]:
                return skipped, et_skipped
    return 1, 1
