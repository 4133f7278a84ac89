"""Export a graph as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing."""

import gzip
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from onerank.ir import UNKNOWN, Collective, Evidence, Graph, Kind, Phase, Reason
from onerank.ir.arrays import I64
from onerank.ir.output_files import replace_file

_FLOWS = (Reason.LAUNCH, Reason.SYNC, Reason.LAUNCH_QUEUE)
_COUNTER = "memory allocated by the step"
# Added to a stream's number, so that streams sort after all threads.
_STREAM_ORDER = 1_000_000


def perfetto_events(
    graph: Graph, start_ns: I64 | None = None, *, process: int = 0, title: str = "measured"
) -> list[dict[str, Any]]:
    """Return trace events: slices by thread and stream, arrows for launches and waits, memory.

    Args:
        graph: one rank's step.
        start_ns: start of each node, int64[n]; by default the measured starts.
        process: number of the process that contains the tracks.
        title: name of the process.
    """
    start = graph.nodes.start_ns if start_ns is None else start_ns
    tracks, shown_ns = _without_overlaps(graph, _tracks(graph), start)
    number = {track: place for place, track in enumerate(sorted(set(tracks)))}
    events: list[dict[str, Any]] = [_metadata("process_name", process, 0, title)]
    events += [
        _metadata("thread_name", process, place, name) for (_, name), place in number.items()
    ]
    events += [
        {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": place,
         "args": {"sort_index": place}}
        for place in number.values()
    ]  # fmt: skip
    lanes = [number[track] for track in tracks]
    events += _slices(graph, start, shown_ns, lanes, process)
    events += _arrows(graph, start, lanes, process)
    events += _memory(graph, start, process)
    return events


def write_timeline(events: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write trace events as JSON, sorted by time; compressed if the name ends in .gz.

    Equal events give equal bytes.

    Raises:
        OSError: the file cannot be written.
    """
    # mtime=0: gzip would otherwise store the time of writing.
    by_time = sorted(events, key=lambda event: event.get("ts", float("-inf")))
    data = msgspec.json.encode({"displayTimeUnit": "ns", "traceEvents": by_time})
    replace_file(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _tracks(graph: Graph) -> list[tuple[int, str]]:
    """Return (order, name) of the track of each node."""
    tracks: list[tuple[int, str]] = []
    kinds, streams, threads = (
        column.tolist() for column in (graph.nodes.kind, graph.nodes.stream, graph.nodes.thread)
    )
    for kind, stream, thread in zip(kinds, streams, threads, strict=True):
        if Kind(kind) is Kind.HOST_OP or stream == UNKNOWN:
            tracks.append((thread, f"thread {thread}" if thread != UNKNOWN else "host"))
        else:
            tracks.append((_STREAM_ORDER + stream, f"stream {stream}"))
    return tracks


def _metadata(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _without_overlaps(
    graph: Graph, tracks: list[tuple[int, str]], start: I64
) -> tuple[list[tuple[int, str]], I64]:
    """Return the track of each node, and the duration of its slice in nanoseconds.

    An operator's slice ends at the next operator of its thread. Concurrent operations of a stream
    go to additional tracks.
    """
    # The viewers drop slices that overlap without nesting.
    shown_ns = graph.nodes.duration_ns.copy()
    on_host = (graph.nodes.kind == Kind.HOST_OP).tolist()
    free_tracks = list(tracks)
    order: list[int] = np.argsort(start, kind="stable").tolist()
    newest: dict[tuple[int, str], int] = {}
    ends_by_track: dict[tuple[int, str], list[int]] = {}
    for index in order:
        track, begin = tracks[index], int(start[index])
        if on_host[index]:
            before = newest.get(track)
            if before is not None:
                shown_ns[before] = min(int(shown_ns[before]), begin - int(start[before]))
            newest[track] = index
            continue
        ends = ends_by_track.setdefault(track, [])
        place = next((n for n, end in enumerate(ends) if end <= begin), len(ends))
        # Replaces the entry, or appends at the end of the list.
        ends[place : place + 1] = [begin + int(shown_ns[index])]
        if place:
            free_tracks[index] = (track[0], f"{track[1]}, at once {place}")
    return free_tracks, shown_ns


def _slices(
    graph: Graph, start: I64, shown_ns: I64, lanes: list[int], process: int
) -> Iterator[dict[str, Any]]:
    nodes = graph.nodes
    names, modules, ops = (graph.text(column) for column in ("name", "module", "op"))
    shapes, groups = graph.text("input_shapes"), graph.text("group")
    for index, lane in enumerate(lanes):
        kind = Kind(int(nodes.kind[index]))
        details: dict[str, Any] = {
            "node": int(nodes.id[index]),
            "kind": kind.name.lower(),
            "operator": ops[index],
            "module": modules[index],
            "phase": Phase(int(nodes.phase[index])).name.lower(),
            "evidence": Evidence(int(nodes.evidence[index])).name.lower(),
            "shapes": shapes[index],
        }
        if shown_ns[index] != nodes.duration_ns[index]:
            # The slice was cut; without this its width would be taken for the duration.
            details["own_ns"] = int(nodes.duration_ns[index])
        for column in ("flops", "instructions", "bytes_read", "bytes_written", "comm_bytes"):
            if (value := int(getattr(nodes, column)[index])) != UNKNOWN:
                details[column] = value
        if kind.is_communication:
            details |= {
                "collective": Collective(int(nodes.collective[index])).name.lower(),
                "group": groups[index],
            }
        yield {
            "ph": "X",
            "cat": kind.name.lower(),
            "name": names[index],
            "pid": process,
            "tid": lane,
            "ts": int(start[index]) / 1e3,
            "dur": int(shown_ns[index]) / 1e3,
            "args": details,
        }


def _arrows(graph: Graph, start: I64, lanes: list[int], process: int) -> Iterator[dict[str, Any]]:
    edges = graph.edges
    shown = np.flatnonzero(np.isin(edges.reason, _FLOWS))
    for flow in shown.tolist():
        source, target = int(edges.source[flow]), int(edges.target[flow])
        if lanes[source] == lanes[target]:
            continue
        name = Reason(int(edges.reason[flow])).name.lower()
        # Ids of flows are global, so each process has its own range.
        common = {"cat": name, "name": name, "pid": process, "id": process * (1 << 32) + flow}
        # A launch can return after its kernel starts; an arrow must not point back in time.
        end = int(start[source] + graph.nodes.duration_ns[source])
        yield {**common, "ph": "s", "tid": lanes[source], "ts": min(end, int(start[target])) / 1e3}
        yield {**common, "ph": "f", "bp": "e", "tid": lanes[target], "ts": int(start[target]) / 1e3}


def _memory(graph: Graph, start: I64, process: int) -> Iterator[dict[str, Any]]:
    """Yield the allocated bytes over time, starting from those allocated before the step."""
    change = graph.nodes.bytes_allocated - graph.nodes.bytes_freed
    changing = np.flatnonzero(change)
    changing = changing[np.argsort(start[changing], kind="stable")]
    live = graph.job.measurement.start_memory_bytes + np.cumsum(change[changing])
    points = [*zip((start[changing] / 1e3).tolist(), live.tolist(), strict=True)]
    for (time, size), (after, _) in pairwise([*points, (None, None)]):
        if time != after:  # of several changes at one time, only the last
            yield {"ph": "C", "name": _COUNTER, "pid": process, "ts": time, "args": {"bytes": size}}
