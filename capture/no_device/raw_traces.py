"""Write the log of a step as raw traces.

The files have the form in which torch's profiler and its execution trace observer write a step, so
the converters read them like those of a device.
"""

import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from onerank.capture.no_device.event_log import EventLog, RecordedEvent, RecordedWait
from onerank.converters.sources.kineto import AllocatorAction, History
from onerank.converters.sources.kineto.lowering.select_nodes import HOST_READS
from onerank.ir import AllocatorSettings
from onerank.ir.python_calls import UNTRACKED, python_calls_text

SCHEMA = "1.1.1-chakra.0.0.4"
"""Schema of the execution trace, as torch 2.11 and 2.13 write it."""


def write_log(log: EventLog, structure: Path, execution_trace: Path, history: Path) -> None:
    """Write a recorded step as a Kineto trace and an execution trace, both gzipped.

    If an operator used the device, operators that only the host runs are left out: on a GPU they
    launch no kernels, so they are no nodes of its graph either.

    Args:
        log: the recorded step.
        structure: receives the Kineto trace.
        execution_trace: receives the execution trace.
        history: receives the allocator's history, if the allocator is configured.
    """
    on_device = any(event.on_device for event in log.events)
    kept = [event for event in log.events if not event.is_operator or event.on_device == on_device]
    _write(structure, {"schemaVersion": 1, "traceEvents": [*_kineto_events(log, kept)]})
    _write(execution_trace, {"schema": SCHEMA, "nodes": [*_nodes(kept)]})
    # The Kineto trace has all of the history but the settings.
    if log.memory.settings != AllocatorSettings():
        history.write_bytes(msgspec.json.encode(_history(log)))


def _history(log: EventLog) -> History:
    allocations = log.allocations
    actions = (AllocatorAction.FREED, AllocatorAction.ALLOCATED)
    return History(
        action=tuple(int(actions[allocation.bytes > 0]) for allocation in allocations),
        address=tuple(allocation.storage for allocation in allocations),
        bytes=tuple(abs(allocation.bytes) for allocation in allocations),
        pool=tuple(allocation.stream for allocation in allocations),
        # Without streams that wait for each other in time, nothing lingers.
        lingers=(0,) * len(allocations),
        reserved_bytes=max((allocation.reserved for allocation in allocations), default=0),
        settings=log.memory.settings,
    )


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(msgspec.json.encode(content))


def _kineto_events(log: EventLog, kept: Sequence[RecordedEvent]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    with_streams = any(event.stream for event in kept)
    python_calls = _python_calls_of_kept(log.events, kept)
    for number, event in enumerate(kept, start=1):
        args: dict[str, Any] = {"Record function id": number, "Ev Idx": number}
        if event.sequence >= 0:
            args |= {"Sequence number": event.sequence, "Fwd thread id": event.forward_thread}
        if with_streams or (event.on_device and event.name in HOST_READS):
            args["stream"] = event.stream
        calls = python_calls[number - 1]
        if event.untracked:
            calls[UNTRACKED] = 1
        if calls:
            args["Python calls"] = python_calls_text(calls)
        events.append(
            {
                "ph": "X",
                "cat": event.category,
                "name": event.name,
                "tid": event.thread,
                "ts": event.begin,
                "dur": event.end - event.begin,
                "args": args,
            }
        )
    for number, allocation in enumerate(log.allocations, start=len(kept) + 1):
        args = {
            "Total Reserved": allocation.reserved,
            "Total Allocated": allocation.allocated,
            "Bytes": allocation.bytes,
            "Device Id": 0,
            "Device Type": 1,
            "Addr": allocation.storage,
            "Ev Idx": number,
        }
        if with_streams:
            args["stream"] = allocation.stream
        events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "s": "t",
                "name": "[memory]",
                "tid": allocation.thread,
                "ts": allocation.tick,
                "args": args,
            }
        )
    # With one stream, waits between streams order nothing.
    events += [_kineto_wait(wait) for wait in log.waits if with_streams or wait.stream is None]
    return events


def _python_calls_of_kept(
    events: Sequence[RecordedEvent], kept: Sequence[RecordedEvent]
) -> list[Counter[str]]:
    """Return the calls of Python before each kept event, with those before events left out.

    Those after the last kept event precede the first one of the next step, and count for the first.
    """
    calls: list[Counter[str]] = []
    pending = Counter[str]()
    for event in events:
        pending += event.python_calls
        if len(calls) < len(kept) and event is kept[len(calls)]:
            calls.append(pending)
            pending = Counter()
    if calls:
        calls[0] += pending
    return calls


def _kineto_wait(wait: RecordedWait) -> dict[str, Any]:
    """Return a wait as the profiler writes it; no runtime call issued it, so a tick names it."""
    args = {"wait_on_cuda_event_id": wait.until}
    if wait.stream is not None:
        args["stream"] = wait.stream
    if wait.awaited is not None:
        args["wait_on_stream"] = wait.awaited
    return {
        "ph": "X",
        "cat": "cuda_sync",
        "name": "Stream Wait Event" if wait.stream is not None else "Stream Sync",
        "tid": 0,
        "ts": wait.tick,
        "dur": 0,
        "args": args,
    }


def _nodes(kept: Sequence[RecordedEvent]) -> list[dict[str, Any]]:
    root = RecordedEvent("[pytorch|profiler|execution_trace|process]", "user_annotation", 0, 0)
    return [_node(record, event) for record, event in enumerate([root, *kept])]


def _node(record: int, event: RecordedEvent) -> dict[str, Any]:
    """Return the node of the event with a record number; number 0 is the root, which calls all."""
    keys = ("values", "shapes", "types", "strides")
    return {
        "id": record + 1,
        "name": event.name,
        "ctrl_deps": 1,
        "inputs": dict(zip(keys, event.inputs, strict=True)),
        "outputs": dict(zip(keys, event.outputs, strict=True)),
        "attrs": [
            {"name": "rf_id", "type": "uint64", "value": record},
            {"name": "tid", "type": "uint64", "value": event.thread},
        ],
    }
