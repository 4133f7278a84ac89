"""A small Kineto trace and its execution trace: two operators, a kernel each, on one stream."""

import copy
import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]

KINETO: Json = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100", "totalGlobalMem": 8, "numSms": 132}],
    "baseTimeNanoseconds": 0,
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1,
         "ts": 0.0, "dur": 100.0, "args": {"External id": 9, "Record function id": 0}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10.0,
         "dur": 20.0, "args": {"External id": 11, "Record function id": 1, "Ev Idx": 1}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
         "ts": 12.0, "dur": 5.0, "args": {"External id": 11, "correlation": 101}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 20.0, "dur": 15.0,
         "args": {"External id": 11, "correlation": 101, "stream": 7, "device": 0,
                  "grid": [1, 1, 1], "block": [32, 1, 1]}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 40.0,
         "dur": 20.0, "args": {"External id": 12, "Record function id": 2, "Ev Idx": 2}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
         "ts": 42.0, "dur": 5.0, "args": {"External id": 12, "correlation": 102}},
        {"ph": "X", "cat": "kernel", "name": "add", "pid": 0, "tid": 7, "ts": 50.0, "dur": 15.0,
         "args": {"External id": 12, "correlation": 102, "stream": 7, "device": 0,
                  "grid": [1, 1, 1], "block": [32, 1, 1]}},
    ],
}  # fmt: skip


def node(number: int, name: str, parent: int, record: int) -> Json:
    """Return a node of an execution trace."""
    attributes = {"rf_id": record, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": 1}
    operands = {"values": [], "shapes": [], "types": []}
    return {
        "id": number,
        "name": name,
        "ctrl_deps": parent,
        "inputs": operands,
        "outputs": operands,
        "attrs": [
            *({"name": key, "type": "uint64", "value": value} for key, value in attributes.items()),
            {"name": "op_schema", "type": "string", "value": ""},
        ],
    }


ET: Json = {
    "schema": "1.1.1-chakra.0.0.4",
    "pid": 1,
    "time": "2026-01-01 00:00:00",
    "start_ts": 0,
    "nodes": [
        node(1, "[pytorch|profiler|execution_trace|process]", 1, 0),
        node(2, "[pytorch|profiler|execution_trace|thread]", 1, 0),
        node(3, "aten::mm", 2, 1),
        node(4, "aten::add", 2, 2),
    ],
}


def pair() -> tuple[Json, Json]:
    """Return both, to be changed."""
    return copy.deepcopy(KINETO), copy.deepcopy(ET)


def write(directory: Path, kineto: Json | bytes, et: Json | bytes) -> tuple[Path, Path]:
    """Write both as `k.json` and `et.json`; return their paths."""
    paths = directory / "k.json", directory / "et.json"
    for path, content in zip(paths, (kineto, et), strict=True):
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return paths
