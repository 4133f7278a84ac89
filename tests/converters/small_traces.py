"""Small traces for tests, written event by event."""

import json
from pathlib import Path
from typing import Any

from onerank.converters.sources.kineto import Conversion, Sources, convert
from onerank.ir import Graph, Reason

SCHEMA = "1.1.1-chakra.0.0.4"


class Trace:
    """A Kineto trace and its execution trace, written event by event; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []

    def op(self, name: str, ts: float, dur: float, *, tid: int = 1, **args: Any) -> int:
        rf_id = len(self.nodes) + 1
        ids = {"External id": rf_id, "Record function id": rf_id, "Ev Idx": rf_id, **args}
        self._event("cpu_op", name, ts, dur, tid, ids)
        empty = {"values": [], "shapes": [], "types": [], "strides": []}
        attrs = [{"name": "rf_id", "type": "uint64", "value": rf_id}]
        self.nodes.append(
            {
                "id": rf_id + 1,
                "name": name,
                "ctrl_deps": 1,
                "inputs": empty,
                "outputs": empty,
                "attrs": attrs,
            }
        )
        return rf_id

    def mark(self, name: str, ts: float, dur: float, *, tid: int = 1, **record: Any) -> None:
        """Add a mark of the capture, with its record in the execution trace."""
        rf_id = self.op(name, ts, dur, tid=tid)
        self.events[-1]["cat"] = "user_annotation"
        self.nodes[-1]["inputs"] = {"values": [json.dumps(record)], "shapes": [], "types": []}
        assert rf_id == len(self.nodes)

    def call(self, sequence: int, ts: float, dur: float, *, tid: int = 1, **record: Any) -> None:
        """Add the mark of an all-reduce among two ranks."""
        plain = {"collective": "all_reduce", "group": "dp", "group_ranks": [0, 1], "bytes": 64}
        self.mark("onerank::comm", ts, dur, tid=tid, **plain | {"sequence": sequence} | record)

    def launch(self, correlation: int, ts: float, *, external: int = 0, tid: int = 1) -> None:
        args = {"correlation": correlation, "External id": external}
        self._event("cuda_runtime", "cudaLaunchKernel", ts, 1, tid, args)

    def kernel(
        self, correlation: int, ts: float, dur: float, *, stream: int = 7, **args: Any
    ) -> None:
        args = {"correlation": correlation, "stream": stream, "device": 0, **args}
        category = args.pop("category", "kernel")
        self._event(category, args.pop("name", "gemm"), ts, dur, stream, args)

    def memory(self, ts: float, size: int, total: int, *, tid: int = 1) -> None:
        """Add an allocation or a free on a GPU, with the allocator's total after it."""
        args = {"Bytes": size, "Total Allocated": total, "Device Type": 1, "Addr": 4096}
        self._event("cpu_instant_event", "[memory]", ts, 0, tid, args)

    def sync(self, name: str, ts: float, **args: Any) -> None:
        self._event("cuda_sync", name, ts, 1, 0, args)

    def runtime(
        self, name: str, correlation: int, ts: float, dur: float = 1, *, tid: int = 1
    ) -> None:
        self._event("cuda_runtime", name, ts, dur, tid, {"correlation": correlation})

    def wait_event(self, correlation: int, ts: float, *, event: int, stream: int) -> None:
        """Add a stream's wait as drivers since CUDA 13 record it: with the event's id only."""
        self.runtime("cudaStreamWaitEvent", correlation, ts)
        nowhere = {"wait_on_stream": -1, "wait_on_cuda_event_record_corr_id": -1}
        ids = {"correlation": correlation, "stream": stream, "wait_on_cuda_event_id": event}
        self.sync("Stream Wait Event", ts, **nowhere, **ids)

    def _event(  # noqa: PLR0917
        self, cat: str, name: str, ts: float, dur: float, tid: int, args: dict[str, Any]
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": ts,
                "dur": dur,
                "args": args,
            }
        )

    def annotation(self, name: str, ts: float, dur: float, *, tid: int = 1) -> None:
        self._event("user_annotation", name, ts, dur, tid, {})

    def frame(self, name: str, ts: float, dur: float, *, tid: int = 1) -> None:
        """Add a Python frame, as the profiler records them with stacks."""
        self._event("python_function", name, ts, dur, tid, {})

    def write(self, directory: Path, **rest: Any) -> tuple[Path, Path]:
        """Write both files; `rest` has the other fields of the Kineto trace."""
        kineto, et = directory / "kineto.json", directory / "et.json"
        kineto.write_text(json.dumps({**rest, "traceEvents": self.events, "INFO": ["a", "b"]}))
        root = [{**node, "id": 1, "name": "process", "attrs": []} for node in self.nodes[:1]]
        et.write_text(json.dumps({"schema": SCHEMA, "nodes": [*root, *self.nodes]}))
        return kineto, et

    def convert(
        self, directory: Path, uncontended: Path | None = None, *, step: str = "all"
    ) -> tuple[Graph, Conversion]:
        kineto, et = self.write(directory)
        return convert(Sources(kineto, et, uncontended=uncontended), step=step)


def edges(graph: Graph, reason: Reason) -> set[tuple[str, str]]:
    frame = graph.edges_frame()
    names = dict(zip(graph.nodes.id.tolist(), graph.text("name"), strict=True))
    rows = frame.filter(frame["reason"] == reason.name.lower()).iter_rows()
    return {(names[source], names[target]) for source, target, _ in rows}
