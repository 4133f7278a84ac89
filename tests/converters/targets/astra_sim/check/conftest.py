"""Small workloads written from text: one line per node, a dict of files per folder."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rule_case import SCRIPT

from onerank.ir.chakra.et_def_pb2 import AttributeProto, GlobalMetadata, Node, NodeType

TYPES = ("invalid", "metadata", "load", "store", "comp", "send", "recv", "coll")
VARIANTS = {
    **dict.fromkeys(("num_ops", "comm_type", "comm_size", "duration_ns"), "int64_val"),
    **dict.fromkeys(("comm_src", "comm_dst", "comm_tag", "comm_priority"), "int32_val"),
    **dict.fromkeys(("inputs", "outputs"), "string_list"),
    "tensor_size": "uint64_val",
    "is_cpu_op": "bool_val",
    "pg_name": "string_val",
    "involved_dim": "bool_list",
}

RANK = """
0 comp us=5
1 coll comm_type=0 comm_size=1024 pg_name=1 after=0
2 comp us=5 after=1
"""
RING = ["ring"]
CONFIGURATION: dict[str, Any] = {
    "system.json": {
        "scheduling-policy": "LIFO",
        "collective-optimization": "localBWAware",
        "preferred-dataset-splits": 4,
        "all-reduce-implementation": RING,
        "all-gather-implementation": RING,
        "reduce-scatter-implementation": RING,
        "all-to-all-implementation": RING,
        "local-mem-bw": 50,
        "peak-perf": 1,
        "roofline-enabled": 0,
    },
    "comm_groups.json": {"1": [0, 1]},
    "network.yml": "topology: [ Ring ]  # one\nnpus_count: [ 2 ]\n"
    "bandwidth: [ 50.0 ]  # GB/s\nlatency: [ 500.0 ]\n",
    "memory.json": {"memory-type": "NO_MEMORY_EXPANSION"},
    "run.sh": SCRIPT,
}


def parse_node(line: str) -> Node:
    """Make a node of `ID KIND key=value ...`: us, name, after, ctrl, or an attribute.

    An attribute has its usual type; `comm_size:uint64_val=8` gives it another.
    """
    number, kind, *words = line.split()
    node = Node(id=int(number), name=f"{kind}-{number}", type=NodeType.Name(TYPES.index(kind)))
    for word in words:
        key, _, value = word.partition("=")
        match key:
            case "us":
                node.duration_micros = int(value)
            case "name":
                node.name = value
            case "after":
                node.data_deps.extend(int(part) for part in value.split(","))
            case "ctrl":
                node.ctrl_deps.extend(int(part) for part in value.split(","))
            case _:
                name, _, variant = key.partition(":")
                node.attr.append(attribute(name, variant or VARIANTS[name], value))
    return node


def attribute(name: str, variant: str, text: str) -> AttributeProto:
    result = AttributeProto(name=name)
    if variant == "string_list":
        result.string_list.values.extend(text.split(",") if text else [])
    elif variant == "bool_list":
        result.bool_list.values.extend(part == "true" for part in text.split(","))
    elif variant == "string_val":
        result.string_val = text
    elif variant == "bool_val":
        result.bool_val = text == "true"
    elif variant == "float_val":
        result.float_val = float(text)
    else:
        setattr(result, variant, int(text))
    return result


def framed(message: bytes) -> bytes:
    length, prefix = len(message), bytearray()
    while length >= 128:
        prefix.append(length % 128 + 128)
        length //= 128
    return bytes([*prefix, length]) + message


def trace(text: str, *, metadata: bool = True) -> bytes:
    """Make the bytes of a `.et` from one line per node."""
    head = framed(GlobalMetadata(version="0.0.4").SerializeToString()) if metadata else b""
    lines = [line for line in text.splitlines() if line.strip()]
    return head + b"".join(framed(parse_node(line).SerializeToString()) for line in lines)


def write(folder: Path, files: Mapping[str, Any]) -> Path:
    """Write the good configuration and `files` over it: bytes, text or JSON; None leaves out."""
    for name, content in {**CONFIGURATION, **files}.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        elif isinstance(content, str) and name.endswith(".et"):
            (folder / name).write_bytes(trace(content))
        elif isinstance(content, str):
            (folder / name).write_text(content)
        elif content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """The functions above, for tests: `make.trace`, `make.write`, and the good files."""
    return SimpleNamespace(trace=trace, write=write, RANK=RANK, system=CONFIGURATION["system.json"])


@pytest.fixture
def workload(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder: two good ranks called `w` and what is given as keyword `files`."""

    def build(files: Mapping[str, Any]) -> Path:
        folder = tmp_path / "w"
        folder.mkdir()
        ranks = {} if any(name.endswith(".et") for name in files) else {"w.0.et": RANK}
        return write(folder, {**({**ranks, "w.1.et": RANK} if ranks else {}), **files})

    return build
