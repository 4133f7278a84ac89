"""Launches outside of any operator: the calls themselves stand in the host's order then.

A script may launch without an operator: the replay of a CUDA graph, a kernel of its own. Nothing
would hold back what it launches.
"""

from dataclasses import fields, replace

import numpy as np

from onerank.converters.kineto.columns import (
    NO_CALL,
    OWN_CALL,
    HostRows,
    KinetoTrace,
    last_of,
    pick,
)
from onerank.converters.kineto.host import NONE, HostTimeline, host_timeline


def with_calls(trace: KinetoTrace, timeline: HostTimeline) -> tuple[KinetoTrace, HostTimeline]:
    """Return both with the calls that launched something outside of any operator or mark."""
    launches = trace.launches
    rows = np.unique(last_of(launches.correlation, trace.gpu.correlation))
    rows = rows[rows >= 0]
    around = timeline.innermost(launches.thread[rows], launches.start_ns[rows])
    marked = pick(timeline.in_mark, around, NONE) >= 0
    rows = rows[(timeline.operator(around) < 0) & ~marked]
    if not len(rows):
        return trace, timeline
    zeros = np.zeros(len(rows), dtype=np.int64)
    calls = HostRows(
        name=launches.name[rows],
        is_operator=zeros.astype(bool),
        thread=launches.thread[rows],
        start_ns=launches.start_ns[rows],
        end_ns=launches.end_ns[rows],
        rf_id=zeros,
        external_id=zeros,
        sequence=zeros - 1,
        forward_thread=zeros,
        event_index=zeros + OWN_CALL,
        call=zeros + NO_CALL,
        operands=np.zeros((len(rows), 3), dtype=np.int32),
    )
    columns = {
        spec.name: np.concatenate([getattr(trace.host, spec.name), getattr(calls, spec.name)])
        for spec in fields(calls)
    }
    trace = replace(trace, host=replace(trace.host, **columns))
    return trace, host_timeline(trace)
