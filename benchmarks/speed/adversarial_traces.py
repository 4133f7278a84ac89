"""Kineto traces that make a converter slow: many events that overlap, nest, wait or coincide.

`TRACES` maps what a trace has many of to a function that returns about n events. Real traces have
a little of each; a converter that compares all pairs of some kind takes quadratic time on one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def host(name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    """Return an operator, or with `cat` an annotation."""
    cat = args.pop("cat", "cpu_op")
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def call(ts: float, correlation: int, name: str = "cudaLaunchKernel", **changes: Any) -> Event:
    """Return a call of the CUDA runtime."""
    event = {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 1, "tid": 1, "ts": ts,
             "dur": 1.0, "args": {"External id": 0, "correlation": correlation}}  # fmt: skip
    return event | changes


def kernel(ts: float, dur: float, correlation: int, stream: int = 7, name: str = "k") -> Event:
    """Return a kernel."""
    args = {"External id": 0, "correlation": correlation, "stream": stream, "device": 0,
            "grid": [1, 1, 1], "block": [32, 1, 1]}  # fmt: skip
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts,
            "dur": dur, "args": args}  # fmt: skip


def sync(ts: float, correlation: int, stream: int, name: str) -> Event:
    """Return a synchronisation event as CUPTI records it."""
    args = {"correlation": correlation, "stream": stream, "device": 0}
    return {"ph": "X", "cat": "cuda_sync", "name": name, "pid": 0, "tid": 0, "ts": ts, "dur": 1.0,
            "args": args}  # fmt: skip


def allocation(ts: float, size: int, address: int, tid: int = 1) -> Event:
    """Return an allocation, or with a negative size a free."""
    args = {"Device Type": 1, "Device Id": 0, "Addr": address, "Bytes": size,
            "Total Allocated": 0, "Total Reserved": 0, "Ev Idx": 0}  # fmt: skip
    return {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1,
            "tid": tid, "ts": ts, "args": args}  # fmt: skip


def _around(n: int) -> Event:
    return host("aten::step", 0.0, 100.0 * n)


def overlapping(n: int) -> list[Event]:
    """Return kernels of one stream that all run at once."""
    return [_around(n)] + [
        event for i in range(n // 2)
        for event in (call(10.0 * i, i + 1), kernel(10 * i + 5.0, 1e6, i + 1))
    ]  # fmt: skip


def streams(n: int) -> list[Event]:
    """Return kernels each on its own stream, launched just in time."""
    return [_around(n)] + [
        event for i in range(n // 2)
        for event in (call(10.0 * i, i + 1), kernel(10 * i + 5.0, 50, i + 1, stream=i))
    ]  # fmt: skip


def late(n: int) -> list[Event]:
    """Return kernels of many streams that start long after their launch."""
    return [_around(n)] + [
        event for i in range(n // 2)
        for event in (
            call(10.0 * i, i + 1),
            kernel(10 * i + 500.0 + 100 * (i % 2), 50, i + 1, stream=i % (n // 4)),
        )
    ]  # fmt: skip


def unlaunched(n: int) -> list[Event]:
    """Return kernels of many streams whose launches are not in the trace."""
    kernels = [kernel(5.0 + i, 0.5, 0, stream=i % (n // 2)) for i in range(n)]
    return [_around(n), *kernels, call(1, 1), kernel(3, 1, 1)]


def threads(n: int) -> list[Event]:
    """Return operators each on its own thread, with a kernel each."""
    return [
        event for i in range(n // 3)
        for event in (
            host("aten::a", 10.0 * i, 8.0, tid=i),
            call(10 * i + 1.0, i + 1, tid=i),
            kernel(10 * i + 5.0, 3, i + 1),
        )
    ]  # fmt: skip


def nested(n: int) -> list[Event]:
    """Return operators each in the previous one, and launches in the innermost."""
    depth = n // 3
    operators = [host("aten::a", float(i), 4.0 * n - 2 * i) for i in range(depth)]
    return operators + [
        event for i in range(depth)
        for event in (call(depth + 1.0 + i, i + 1), kernel(depth + 5.0 + i, 0.5, i + 1))
    ]  # fmt: skip


def nested_annotations(n: int) -> list[Event]:
    """Return annotations each in the previous one, and launches in the innermost."""
    depth = n // 3
    notes = [host("note", i + 1.0, 4.0 * n - 2 * i, cat="user_annotation") for i in range(depth)]
    return [_around(n), *notes] + [
        event for i in range(depth)
        for event in (call(depth + 2.0 + i, i + 1), kernel(depth + 5.0 + i, 0.5, i + 1))
    ]  # fmt: skip


def after_a_nest(n: int) -> list[Event]:
    """Return launches after operators that were nested deeply and have all ended."""
    depth = n // 3
    operators = [host("aten::a", 1 + 0.001 * i, n - 0.002 * i) for i in range(depth)]
    return [_around(n), *operators] + [
        event for i in range(depth)
        for event in (call(n + 10.0 + i, i + 1), kernel(n + 15.0 + i, 0.5, i + 1))
    ]  # fmt: skip


def equal_times(n: int) -> list[Event]:
    """Return operators, launches and kernels that all start at one time."""
    return [
        event for i in range(n // 3)
        for event in (host("aten::a", 1, 10), call(1, i + 1), kernel(5, 10, i + 1))
    ]  # fmt: skip


def flows(n: int) -> list[Event]:
    """Return flow events."""
    flow = {"pid": 1, "tid": 1, "cat": "ac2g", "name": "ac2g", "bp": "e"}
    return [_around(n), call(1, 1), kernel(5, 1, 1)] + [
        flow | {"ph": "sf"[i % 2], "id": i // 2, "ts": float(i)} for i in range(n)
    ]


def host_waits(n: int) -> list[Event]:
    """Return device-wide waits of the host, 50 streams."""
    launched = [
        event for i in range(n // 4)
        for event in (call(20.0 * i, i + 1), kernel(20 * i + 2.0, 3, i + 1, stream=i % 50))
    ]  # fmt: skip
    waits = [
        event for i in range(n // 4)
        for event in (
            call(20 * i + 10.0, n + i, "cudaDeviceSynchronize"),
            sync(20 * i + 10.0, n + i, -1, "Context Sync"),
        )
    ]  # fmt: skip
    return [_around(n), *launched, *waits]


def inferred_host_waits(n: int) -> list[Event]:
    """Return host waits on many streams, without synchronisation events."""
    launched = [
        event for i in range(n // 3)
        for event in (call(10.0 * i, i + 1), kernel(10 * i + 2.0, 3, i + 1, stream=i % (n // 6)))
    ]  # fmt: skip
    names = ("cudaDeviceSynchronize", "cudaEventSynchronize")
    waits = [call(10 * i + 4.0, n + i, names[i % 2], dur=5.0) for i in range(n // 3)]
    return [_around(n), *launched, *waits]


def inferred_stream_waits(n: int) -> list[Event]:
    """Return event records and waits of streams, without synchronisation events."""
    return [_around(n)] + [
        event for i in range(n // 4)
        for event in (
            call(10.0 * i, i + 1),
            kernel(10 * i + 2.0, 3, i + 1, stream=7 + i % 2),
            call(10 * i + 3.0, n + 2 * i, "cudaEventRecord"),
            call(10 * i + 5.0, n + 2 * i + 1, "cudaStreamWaitEvent"),
        )
    ]  # fmt: skip


def waits_for_itself(n: int) -> list[Event]:
    """Return waits of a stream for events that its own thread recorded, after all launches."""
    launched = [
        event for i in range(n // 4)
        for event in (call(10.0 * i, i + 1), kernel(10 * i + 2.0, 3, i + 1))
    ]  # fmt: skip
    begin = 2.5 * n
    waits = [
        event for i in range(n // 6)
        for event in (
            call(begin + 6 * i, 3 * n + i, "cudaEventRecord"),
            call(begin + 6 * i + 2, n + i, "cudaStreamWaitEvent"),
            sync(begin + 6 * i + 2, n + i, 7, "Stream Wait Event"),
        )
    ]  # fmt: skip
    return [_around(n), *launched, *waits]


def allocations(n: int) -> list[Event]:
    """Return allocations and frees in operators that are nested deeply."""
    depth = n // 2
    operators = [host("aten::a", float(i), 4.0 * n - 2 * i) for i in range(depth)]
    events = [
        allocation(depth + 1 + 0.01 * i, 512 * (1 - 2 * (i % 2)), 4096 + 512 * (i // 2))
        for i in range(depth)
    ]
    return [*operators, call(depth + 1.0, 1), kernel(depth + 5.0, 1, 1), *events]


def allocations_of_threads(n: int) -> list[Event]:
    """Return allocations each on its own thread, outside of operators."""
    events = [allocation(10.0 + i, 512, 4096 + 512 * i, tid=i) for i in range(n)]
    return [_around(n), call(1, 1), kernel(5, 1, 1), *events]


def coalesced_calls(n: int) -> list[Event]:
    """Return NCCL calls that launch nothing, then kernels that may run them."""
    args = {"Collective name": "allreduce", "In msg nelems": 4, "dtype": "Float",
            "Process Group Name": "0", "Group size": 2}  # fmt: skip
    calls = [host("record_param_comms", 1.0 + i, 0.5, **args) for i in range(n // 2)]
    kernels = [
        event for i in range(n // 4)
        for event in (
            call(2.0 * n + 1 + i, i + 1),
            kernel(2.0 * n + 5 + i, 0.5, i + 1, name="ncclDevKernel_AllReduce"),
        )
    ]  # fmt: skip
    return [*calls, host("nccl:coalesced", 2.0 * n, 2.0 * n), *kernels]


def launch_names(n: int) -> list[Event]:
    """Return launches that each have a name of their own, far ahead of the GPU."""
    return [_around(n)] + [
        event for i in range(n // 2)
        for event in (call(10.0 * i, i + 1, f"launch{i}"), kernel(10 * i + 20_000.0, 3, i + 1))
    ]  # fmt: skip


TRACES: dict[str, Callable[[int], list[Event]]] = {
    "kernels that overlap on a stream": overlapping,
    "streams": streams,
    "late kernels on streams": late,
    "kernels without launch": unlaunched,
    "threads": threads,
    "nested operators": nested,
    "nested annotations": nested_annotations,
    "launches after a nest": after_a_nest,
    "events of one time": equal_times,
    "flow events": flows,
    "device-wide waits": host_waits,
    "inferred host waits": inferred_host_waits,
    "inferred stream waits": inferred_stream_waits,
    "waits for their own stream": waits_for_itself,
    "allocations in a nest": allocations,
    "allocations on threads": allocations_of_threads,
    "coalesced NCCL calls": coalesced_calls,
    "names of launches": launch_names,
}


def write(path: Path, events: list[Event]) -> None:
    """Write events as a Kineto trace of an H100."""
    device = {"id": 0, "name": "NVIDIA H100", "totalGlobalMem": 80 << 30, "numSms": 132}
    trace = {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": events}
    path.write_text(json.dumps(trace))
