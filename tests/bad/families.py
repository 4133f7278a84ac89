"""Families of input files: how each is changed, and how onerank reads it."""

import copy
import gzip
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from google.protobuf import json_format
from mutations import Choices, change_message, changed_json, changed_lines, damaged
from pair import pair
from seeds import chakra, model

import onerank
from onerank.annotate.cost import load_prices
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.kernel_db.database import read_database
from onerank.capture.collective_kernels.network import load_network
from onerank.capture.parallelize.experts.routing import parse_routing
from onerank.capture.parallelize.tensor.plan_file import read_plan
from onerank.cli import onerank as command
from onerank.converters.sources.kineto import Sources, convert
from onerank.converters.sources.onnx import convert_onnx
from onerank.ir.chakra import from_json, to_json
from onerank.ir.chakra.et_def_pb2 import GlobalMetadata, Node
from onerank.ir.chakra.framing import frame
from onerank.ir.errors import OneRankError

ROOT = Path(__file__).parents[2]
Files = dict[str, bytes]
"""Path in a directory -> content."""


@dataclass(frozen=True)
class Family:
    """Files of one kind.

    Attributes:
        change: returns a mutant of the files.
        read: reads them from a directory; raises OneRankError where onerank refuses them.
        examples: mutants per run of the tests; all families together take under a minute.
    """

    change: Callable[[Choices], Files]
    read: Callable[[Path], object]
    examples: int

    def attempt(self, choices: Choices) -> tuple[bool, int]:
        """Read a mutant; return whether onerank accepted it, and its bytes.

        Raises:
            Exception: any that is not onerank's own: a bug.
        """
        files = self.change(choices)
        with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
            directory = Path(name)
            for path, content in files.items():
                (directory / path).parent.mkdir(parents=True, exist_ok=True)
                (directory / path).write_bytes(content)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self.read(directory)
            except OneRankError:
                return False, sum(map(len, files.values()))
        return True, sum(map(len, files.values()))


def _run(*arguments: str) -> None:
    """Run a command; an exit code other than 0 counts as refused."""
    done = CliRunner().invoke(command, [*arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code:
        raise OneRankError(done.output)


# Traces ------------------------------------------------------------------------------------------


def _changed_text(choices: Choices, value: Any) -> bytes:
    """Return JSON text, changed as a value in three of four cases, otherwise as bytes."""
    if choices.number(0, 3):
        return json.dumps(changed_json(choices, value)).encode()
    return damaged(choices, json.dumps(value).encode())


def _shapes(kineto: Any) -> Any:
    """Return a trace with operands as `record_shapes` leaves them, for reading without the ET."""
    kineto = copy.deepcopy(kineto)
    for event in kineto["traceEvents"]:
        if event["cat"] == "cpu_op":
            event["args"] |= {
                "Input Dims": [[2, 3], [3, 4], []],
                "Input type": ["float", "c10::BFloat16", "Scalar"],
                "Concrete Inputs": ["", "", "1.5"],
            }
    return kineto


def _kineto(choices: Choices) -> Files:
    kineto, et = pair()
    if choices.number(0, 1):
        return {"k.json": _changed_text(choices, _shapes(kineto))}
    return {"k.json": _changed_text(choices, kineto), "et.json": json.dumps(et).encode()}


def _execution_trace(choices: Choices) -> Files:
    kineto, et = pair()
    return {"k.json": json.dumps(kineto).encode(), "et.json": _changed_text(choices, et)}


def _gzip(choices: Choices) -> Files:
    files = _kineto(choices) if choices.number(0, 1) else _execution_trace(choices)
    zipped = {name: gzip.compress(content, 1) for name, content in files.items()}
    name = choices.pick([*zipped])
    if choices.number(0, 2):
        zipped[name] = damaged(choices, zipped[name])
    else:  # several members, which gzip reads as one stream
        zipped[name] += gzip.compress(b" " * choices.number(0, 60000) * 100, 1)
    return zipped


def _read_traces(directory: Path) -> None:
    et = directory / "et.json"
    graph, _ = convert(Sources(directory / "k.json", et if et.exists() else None, operators=True))
    graph.write(directory / "out.et")
    onerank.read(directory / "out.et")


# Graphs ------------------------------------------------------------------------------------------


@cache
def _messages() -> tuple[bytes, ...]:
    """Return the messages of the small file: its metadata, then its nodes."""
    parsed = [
        json_format.ParseDict(value, Node() if place else GlobalMetadata())
        for place, value in enumerate(_json_values())
    ]
    return tuple(message.SerializeToString() for message in parsed)


@cache
def _json_text() -> str:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "small.et")
        path.write_bytes(chakra_bytes())
        return to_json(path)


@cache
def _json_values() -> tuple[Any, ...]:
    """Return the objects of the small file as Chakra JSON, which stand one after another."""
    text, values, at = _json_text().strip(), list[Any](), 0
    while at < len(text):
        value, at = json.JSONDecoder().raw_decode(text, at)
        values.append(value)
        at += len(text[at:]) - len(text[at:].lstrip())
    return tuple(values)


def _chakra(choices: Choices) -> Files:
    if choices.number(0, 1):
        return {"x.et": damaged(choices, chakra_bytes())}
    messages = [*_messages()]
    for _ in range(choices.number(1, 4)):
        at = choices.number(0, len(messages) - 1)
        message = Node.FromString(messages[at]) if at else GlobalMetadata.FromString(messages[0])
        change_message(choices, message)
        messages[at] = message.SerializeToString()
    if choices.number(0, 3) == 0:
        messages.insert(choices.number(0, len(messages)), choices.pick(messages))
    return {"x.et": frame(messages)}


@cache
def chakra_bytes() -> bytes:
    return chakra()


@cache
def onnx_bytes() -> bytes:
    return model()


def _read_chakra(directory: Path) -> None:
    graph = onerank.read(directory / "x.et")
    graph.nodes_frame()
    graph.write(directory / "again.et")
    to_json(directory / "x.et")
    _run("show", str(directory / "x.et"), "--text")


def _json(choices: Choices) -> Files:
    if choices.number(0, 2) == 0:
        return {"x.json": damaged(choices, _json_text().encode())}
    values = [*_json_values()]
    at = choices.number(0, len(values) - 1)
    values[at] = changed_json(choices, values[at])
    return {"x.json": "\n".join(json.dumps(value) for value in values).encode()}


def _onnx(choices: Choices) -> Files:
    if choices.number(0, 2) == 0:
        return {"x.onnx": damaged(choices, onnx_bytes())}
    from onnx import ModelProto

    proto = ModelProto.FromString(onnx_bytes())
    for _ in range(choices.number(1, 4)):
        change_message(choices, proto)
    return {"x.onnx": proto.SerializeToString()}


def _read_onnx(directory: Path) -> None:
    graph, _ = convert_onnx(directory / "x.onnx", sizes={}, batch=2, seq=None, train=True)
    graph.write(directory / "out.et")


# Databases and files that users write ------------------------------------------------------------


@cache
def _database() -> bytes:
    import polars as pl

    table = pl.read_parquet(ROOT / "annotate" / "databases" / "H200.parquet").head(30)
    with tempfile.TemporaryDirectory() as name:
        table.write_parquet(Path(name, "small.parquet"))
        return Path(name, "small.parquet").read_bytes()


def _parquet(choices: Choices) -> Files:
    import polars as pl

    if choices.number(0, 1):
        return {"x.parquet": damaged(choices, _database())}
    table = pl.read_parquet(_database())
    name = choices.pick(table.columns)
    match choices.number(0, 3):
        case 0:
            table = table.drop(name)
        case 1:
            table = table.rename({name: choices.pick(["", "é", "gpu2"])})
        case 2:
            odd = choices.pick([None, -1, 2**62, 1e300, float("nan"), "", "\x1b[31m", [1]])
            table = table.with_columns(pl.lit(odd).alias(name))
        case _:
            table = pl.concat([table, table]).head(choices.number(0, len(table) * 2))
    with tempfile.TemporaryDirectory() as directory:
        table.write_parquet(Path(directory, "x.parquet"))
        return {"x.parquet": Path(directory, "x.parquet").read_bytes()}


def _of_lines(name: str, text: bytes) -> Callable[[Choices], Files]:
    def change(choices: Choices) -> Files:
        how = changed_lines if choices.number(0, 3) else damaged
        return {name: how(choices, text)}

    return change


NETWORK = b"""node_size = 8
nvls = false
[default]
busbw_gb_per_s = 100.0
latency_us = 12.0
[group.tp]
busbw_gb_per_s = 400.0
[size.16]
busbw_gb_per_s = 50.0
"""
ROUTING = b"10,20,30,40\n5,5,5,85\n1.5,2,3,4\n"
ROUTING_JSON = b"[[10, 20, 30, 40],\n [5, 5, 5, 85.5]]\n"


def _routing(choices: Choices) -> Files:
    if choices.number(0, 1):
        return _of_lines("x.csv", ROUTING)(choices)
    return _of_lines("x.json", ROUTING_JSON)(choices)


def _read_routing(directory: Path) -> None:
    (path,) = directory.iterdir()
    parse_routing(str(path))


# Workloads ---------------------------------------------------------------------------------------


@cache
def _workload() -> tuple[tuple[str, bytes], ...]:
    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name, "small.et"), Path(name, "workload")
        source.write_bytes(chakra(peer=False))
        _run("export", "astra-sim", str(source), "-o", str(out))
        files = sorted(path for path in out.rglob("*") if path.is_file())
        return tuple((str(path.relative_to(out)), path.read_bytes()) for path in files)


def _changed_workload(choices: Choices) -> Files:
    files = dict(_workload())
    for _ in range(choices.number(1, 2)):
        name = choices.pick([*files])
        match choices.number(0, 7):
            case 0 if len(files) > 1:
                del files[name]
            case 1:
                files[name] = b""
            case 2 | 3:
                files[name] = damaged(choices, files[name])
            case _ if name.endswith(".json"):
                try:
                    files[name] = json.dumps(
                        changed_json(choices, json.loads(files[name]))
                    ).encode()
                except ValueError:  # changed already
                    files[name] = changed_lines(choices, files[name])
            case _ if name.endswith(".et"):
                files[name] = damaged(choices, files[name])
            case _:
                files[name] = changed_lines(choices, files[name])
    return {f"w/{name}": content for name, content in files.items()}


def _text(path: str) -> bytes:
    return (ROOT / path).read_bytes()


FAMILIES: dict[str, Family] = {
    "chakra": Family(_chakra, _read_chakra, 300),
    "kineto": Family(_kineto, _read_traces, 500),
    "execution-trace": Family(_execution_trace, _read_traces, 500),
    "gzip": Family(_gzip, _read_traces, 300),
    "json": Family(_json, lambda path: from_json(path / "x.json", path / "out.et"), 600),
    "onnx": Family(_onnx, _read_onnx, 600),
    "parquet": Family(_parquet, lambda path: read_database(path / "x.parquet"), 400),
    "gpu-toml": Family(
        _of_lines("x.toml", _text("annotate/gpus/H200.toml")),
        lambda path: load_gpu(path / "x.toml"),
        500,
    ),
    "prices-toml": Family(
        _of_lines("x.toml", _text("examples/prices.toml")),
        lambda path: load_prices(path / "x.toml"),
        500,
    ),
    "plan-toml": Family(
        _of_lines("x.toml", _text("examples/plans/nanogpt.toml")),
        lambda path: read_plan(path / "x.toml"),
        500,
    ),
    "network-toml": Family(
        _of_lines("x.toml", NETWORK), lambda path: load_network(path / "x.toml"), 500
    ),
    "routing": Family(_routing, _read_routing, 500),
    "workload": Family(_changed_workload, lambda path: _run("check", str(path / "w")), 150),
}
