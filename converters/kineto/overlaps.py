"""What a trace says that cannot be: events at once that follow each other."""

from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onerank.converters.kineto.device import GpuOps
from onerank.converters.kineto.host import HostTimeline
from onerank.ir.errors import TraceError

I64 = npt.NDArray[np.int64]

CLOCK_NS = 1000
"""Overlaps up to a microsecond, the unit of older traces, are rounding."""
_PAIRS = 3
"""Pairs of GPU operations that overlap, told by name."""


def overlap_notes(path: Path, timeline: HostTimeline, gpu: GpuOps) -> list[str]:
    """Return a sentence for each sort of overlap, with how many and how long.

    Operators of a thread call each other or follow each other. The operations of a stream follow
    each other, though a kernel may begin before the one before it has ended; none starts before its
    launch.

    Raises:
        TraceError: over a tenth of the operators overlap, so that nothing tells who called whom.
    """
    notes: list[str] = []
    rows, parent = timeline.rows, timeline.parent
    inner = np.flatnonzero(rows.is_operator & (parent >= 0))
    inner = inner[rows.is_operator[parent[inner]]]
    over_ns = rows.end_ns[inner] - rows.end_ns[parent[inner]]
    if (over_ns > CLOCK_NS).any():
        count, operators = int((over_ns > CLOCK_NS).sum()), int(rows.is_operator.sum())
        worst = int(inner[over_ns.argmax()])
        told = (
            f"{count} of {operators} operators outlast the one they begin in, by {over_ns.max()} "
            f"ns at most ({timeline.name(worst)!r} in {timeline.name(int(parent[worst]))!r})"
        )
        if count > operators // 10:
            raise TraceError(
                f"{path}: {told}; operators of a thread call each other or follow each other: "
                "record the trace again"
            )
        notes.append(told)
    rows = gpu.rows
    before, after, by_ns = _overlaps(gpu)
    if len(by_ns):
        names = timeline.strings
        pairs = Counter(zip(rows.name[before].tolist(), rows.name[after].tolist(), strict=True))
        most = "; ".join(
            f"{names[second]!r} within {names[first]!r} ({count})"
            for (first, second), count in pairs.most_common(_PAIRS)
        )
        notes.append(
            f"{len(by_ns)} of {len(gpu)} GPU operations begin before the one before them on their "
            f"stream has ended, by {by_ns.max()} ns at most; so they do in a replay "
            f"(of {len(pairs)} pairs the most frequent: {most})"
        )
    early = gpu.launch_ns - rows.start_ns
    early = early[early > CLOCK_NS]
    if len(early):
        notes.append(
            f"{len(early)} of {len(gpu)} GPU operations start before they are launched, by "
            f"{early.max()} ns at most: the clocks of host and GPU disagree"
        )
    return notes


def _overlaps(gpu: GpuOps) -> tuple[I64, I64, I64]:
    """Return neighbours of a stream that overlap, the earlier and the later, and by how much."""
    rows = gpu.rows
    order = np.lexsort((rows.start_ns, rows.stream, rows.device))
    one, other = order[:-1], order[1:]
    alike = (rows.device[one] == rows.device[other]) & (rows.stream[one] == rows.stream[other])
    by_ns = rows.start_ns[one] + rows.duration_ns[one] - rows.start_ns[other]
    overlap = alike & (by_ns > CLOCK_NS)
    return one[overlap], other[overlap], by_ns[overlap]
