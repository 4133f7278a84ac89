"""Malicious and broken files: a clear error with file and place, exit code 2, nothing written."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from notes import note_of
from pair import Json, node, pair, write

from onerank.cli import onerank
from onerank.ir.chakra.et_def_pb2 import GlobalMetadata, Node
from onerank.ir.chakra.framing import frame

TRACES = Path(__file__).parents[2] / "traces"
H200, CPU = TRACES / "h200-llama-8b-4l-tp4", TRACES / "cpu-llama-2l-tp4"


def refused(arguments: list[str], directory: Path, error: str, *names: str) -> None:
    """Check that a command exits with code 2 and the error `error`, and leaves no file.

    The message must name the files, places and numbers in `names`.
    """
    before = sorted(directory.rglob("*"))
    done = CliRunner().invoke(onerank, arguments)
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code == 2, done.output
    assert f"error[{error}]: " in done.stderr
    for name in names:
        assert name in done.stderr
    assert sorted(directory.rglob("*")) == before


def convert(directory: Path, kineto: Json | bytes, et: Json | bytes, *refusal: str) -> None:
    paths = write(directory, kineto, et)
    names = ["--kineto", str(paths[0]), "--et", str(paths[1])]
    refused(["convert", *names, "-o", str(directory / "out.et")], directory, *refusal)


def test_the_pair_itself_converts(tmp_path: Path) -> None:
    """What the tests below damage is sound, and the command would write."""
    paths = write(tmp_path, *pair())
    names = ["--kineto", str(paths[0]), "--et", str(paths[1]), "-o", str(tmp_path / "out.et")]
    done = CliRunner().invoke(onerank, ["convert", *names])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out.et").exists()


# Kineto and execution traces ---------------------------------------------------------------------

BYTES: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "truncated gzip": (lambda text: gzip.compress(text)[:150], "trace-damaged-gzip", ""),
    "damaged gzip": (
        lambda text: gzip.compress(text)[:-6] + b"\0" * 6,
        *("trace-damaged-gzip", "CRC"),
    ),
    "cut in an event": (lambda text: text[:700], "trace-malformed", "at byte"),
    "garbage": (lambda _: bytes(range(256)) * 40, "trace-malformed", "at byte 0"),
    "empty": (lambda _: b"", "trace-malformed", "at byte 0"),
    "ten million arrays deep": (lambda _: b"[" * 10_000_000, "trace-malformed", ""),
    "a field too deep": (
        lambda text: b'{"x": ' + b"[" * 10**6 + b"]" * 10**6 + b"," + text[1:],
        *("trace-malformed", "recursion"),
    ),
    "a name that is not UTF-8": (
        lambda text: text.replace(b"aten::mm", b"\xff\xfe"),
        *("trace-malformed", "'utf-8'"),
    ),
    "half a surrogate": (
        lambda text: text.replace(b"aten::mm", b"a\\udfff"),
        *("trace-malformed", "utf-16"),
    ),
}


@pytest.mark.parametrize("which", ["k.json", "et.json"])
@pytest.mark.parametrize("damage", BYTES)
def test_bytes(which: str, damage: str, tmp_path: Path) -> None:
    change, error, name = BYTES[damage]
    texts = {file: json.dumps(one).encode() for file, one in zip(NAMES, pair(), strict=True)}
    texts[which] = change(texts[which])
    convert(tmp_path, texts["k.json"], texts["et.json"], error, str(tmp_path / which), name)


NAMES = ("k.json", "et.json")
Change = Callable[[list[Json]], Any]
EVENTS: dict[str, tuple[Change, str, str]] = {
    "negative duration": (
        lambda events: events[3].update(dur=-1.0),
        *("trace-negative-duration", "event 3 ('gemm') lasts -1.0 us"),
    ),
    "operators that overlap": (
        lambda events: events[4].update(ts=20.0),
        *("trace-events-overlap", "by 10000 ns at most ('aten::add' in 'aten::mm')"),
    ),
    "no time of day": (
        lambda events: events[3].update(ts=1e300),
        *("trace-bad-time", "event 'gemm' starts at 1e+300"),
    ),
    "correlation above 2^63": (
        lambda events: events[3]["args"].update(correlation=2**63),
        *("trace-number-too-large", f"event 'gemm' has correlation {2**63}"),
    ),
    "stream above 2^64": (
        lambda events: events[3]["args"].update(stream=2**64),
        *("trace-number-too-large", f"event 'gemm' has stream {2**64}"),
    ),
    "record id above 2^63": (
        lambda events: events[1]["args"].update({"Record function id": 2**63 + 1}),
        *("trace-number-too-large", f"event 'aten::mm' has Record function id {2**63 + 1}"),
    ),
    "text for a number": (
        lambda events: events[3].update(dur="long"),
        *("trace-malformed", "$.traceEvents[3].dur"),
    ),
    "no operator": (
        lambda events: [event.update(cat="python_function") for event in events],
        *("trace-no-operators", ""),
    ),
}
NODES: dict[str, tuple[Change, str, str]] = {
    "duplicate ids": (lambda nodes: nodes[3].update(id=3), "et-repeated-id", "nodes 2 and 3"),
    "an edge to nowhere": (
        lambda nodes: nodes[3].update(ctrl_deps=77),
        *("et-missing-caller", "node 3 (id 4) is called by node 77"),
    ),
    "callers in a circle": (
        lambda nodes: (nodes[2].update(ctrl_deps=4), nodes[3].update(ctrl_deps=3)),
        *("et-caller-cycle", "node 2 (id 3)"),
    ),
    "an id above 2^63": (lambda nodes: nodes[3].update(id=2**63 + 5), "et-number-too-large", ""),
    "an id above 2^64": (lambda nodes: nodes[3].update(id=2**64 + 5), "et-number-too-large", ""),
}


@pytest.mark.parametrize("damage", EVENTS)
def test_events(damage: str, tmp_path: Path) -> None:
    change, error, name = EVENTS[damage]
    kineto, et = pair()
    change(kineto["traceEvents"])
    convert(tmp_path, kineto, et, error, str(tmp_path / "k.json"), name)


@pytest.mark.parametrize("damage", NODES)
def test_nodes(damage: str, tmp_path: Path) -> None:
    change, error, name = NODES[damage]
    kineto, et = pair()
    change(et["nodes"])
    convert(tmp_path, kineto, et, error, str(tmp_path / "et.json"), name)


@pytest.mark.parametrize("given", [b"NaN", b"Infinity", b"1e999", b"-1e999"])
def test_durations_that_are_no_numbers(given: bytes, tmp_path: Path) -> None:
    kineto, et = (json.dumps(one).encode() for one in pair())
    kineto = kineto.replace(b'"dur": 15.0', b'"dur": ' + given)
    convert(tmp_path, kineto, et, "trace-malformed", str(tmp_path / "k.json"))


def test_an_execution_trace_of_another_run(tmp_path: Path) -> None:
    kineto, et = (H200 / "structure.json.gz").read_bytes(), pair()[1]
    names = [str(tmp_path / name) for name in NAMES]
    convert(tmp_path, kineto, et, "trace-et-mismatch", *names)


@pytest.mark.parametrize(
    ("change", "code", "naming"),
    [
        (
            lambda events: events[6].update(ts=25.0),
            "gpu-operations-overlap",
            ("1 of 2", "1 pairs", "'add' within 'gemm' (1)"),
        ),
        (lambda events: events[3].update(ts=1.0), "gpu-starts-before-launch", (11_000,)),
        (lambda events: events[3].update(ts=-50.0), "gpu-starts-before-launch", (62_000,)),
    ],
)
def test_times_of_the_gpu_that_contradict_each_other_are_reported(
    change: Change, code: str, naming: tuple[str | int, ...], tmp_path: Path
) -> None:
    """Real traces have such: kernels that start early, clocks that disagree."""
    kineto, et = pair()
    change(kineto["traceEvents"])
    paths = write(tmp_path, kineto, et)
    names = ["--kineto", str(paths[0]), "--et", str(paths[1]), "-o", str(tmp_path / "out.et")]
    done = CliRunner().invoke(onerank, ["convert", *names, "--json"])
    assert done.exit_code == 0, done.output
    note_of(json.loads(done.stdout)["notes"], code, *naming)


def test_a_deep_call_stack(tmp_path: Path) -> None:
    """Each operator calls the next; nothing recurses. ONERANK_DEEP digs deeper.

    Ten million of them (4.7 GB of files) took 134 s of CPU and 7.2 GB of memory.
    """
    deep = int(os.environ.get("ONERANK_DEEP", "30000"))
    kineto, et = pair()
    kineto["traceEvents"] += [
        {"ph": "X", "cat": "cpu_op", "name": "aten::neg", "pid": 1, "tid": 2, "ts": float(at),
         "dur": float(2 * (deep - at)),
         "args": {"External id": 100 + at, "Record function id": 100 + at, "Ev Idx": 100 + at}}
        for at in range(deep)
    ]  # fmt: skip
    et["nodes"] += [
        node(100 + at, "aten::neg", 99 + at if at else 2, 100 + at) for at in range(deep)
    ]
    paths = write(tmp_path, kineto, et)
    names = ["--kineto", str(paths[0]), "--et", str(paths[1]), "-o", str(tmp_path / "out.et")]
    done = CliRunner().invoke(onerank, ["convert", *names, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["host_ops"] == deep + 2


# Files of two gigabytes --------------------------------------------------------------------------

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
from click.testing import CliRunner
from onerank.cli import onerank
for arguments in {commands!r}:
    done = CliRunner().invoke(onerank, arguments)
    own = isinstance(done.exception, SystemExit)
    print(done.exit_code, own, done.stderr.strip().replace(chr(10), " "))
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")), end="")
"""


def test_two_gigabytes_of_garbage_are_refused_early(tmp_path: Path) -> None:
    """By a process that may have three quarters of that."""
    kineto, et = write(tmp_path, *pair())
    heads = {
        "g.json": b"",
        "begins.json": b'{"traceEvents": [{"ph": "X"},',
        "g.et": b"",
        "begins.et": frame([b"", Node(id=1).SerializeToString()]),
        "g.onnx": b"",
    }
    for name, head in heads.items():
        with (tmp_path / name).open("wb") as file:
            file.write(head)
            file.truncate(2 << 30)
    member = gzip.compress(bytes(64 << 20))
    (tmp_path / "bomb.json.gz").write_bytes(member * 32)
    out = ["-o", str(tmp_path / "out.et")]
    path = {name: str(tmp_path / name) for name in [*heads, "bomb.json.gz"]}
    commands = [
        *(["convert", "--kineto", path[name], "--et", str(et), *out]
          for name in ("g.json", "begins.json", "bomb.json.gz")),
        ["convert", "--kineto", str(kineto), "--et", path["g.json"], *out],
        ["convert", path["g.json"], *out],
        ["convert", path["g.onnx"], *out],
        ["show", path["g.et"]],
        ["annotate", "--target", "H100", path["g.et"], *out],
        ["show", path["begins.et"]],
    ]  # fmt: skip
    code = LIMITED.format(limit=3 << 29, commands=commands)
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    *lines, peak = ran.stdout.splitlines()
    assert len(lines) == len(commands), ran.stderr
    for line, arguments in zip(lines, commands, strict=True):
        assert line.startswith("2 True error"), line
        assert any(name in line for name in path.values() if name in arguments), line
    assert not (tmp_path / "out.et").exists()
    # its own: getrusage counts what the process held that started it
    assert int(peak.removeprefix("VmHWM:").removesuffix("kB")) < 1 << 20


# Chakra ------------------------------------------------------------------------------------------


def messages(*nodes: Node | bytes) -> bytes:
    metadata = GlobalMetadata(version="1.0.0").SerializeToString()
    given = (one if isinstance(one, bytes) else one.SerializeToString() for one in nodes)
    return frame([metadata, *given])


def small(number: int, *data_deps: int) -> Node:
    return Node(id=number, name="n", type=4, data_deps=data_deps, duration_micros=5)


CHAKRA: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "chakra-empty-file", ""),
    "cut": (messages(small(0), small(1))[:-3], "chakra-truncated", "message 2 at byte 16"),
    "gzip": (gzip.compress(messages(small(0))), "chakra-compressed", ""),
    "garbage": (b"\xff" * 1000, "chakra-message-too-long", "message 0 at byte 0"),
    "zeros": (bytes(1000), "chakra-empty-messages", "messages 1 and 2 (byte 2)"),
    "zeros behind": (
        messages(small(1)) + bytes(50),
        *("chakra-empty-messages", "messages 2 and 3 (byte 19)"),
    ),
    "duplicate ids": (messages(small(1), small(1)), "graph-repeated-id", "nodes 0 and 1"),
    "an edge to nowhere": (
        messages(small(0), small(1, 7)),
        *("graph-dangling-edge", "node 1 waits for node 7"),
    ),
    "a name that is not UTF-8": (
        messages(small(0).SerializeToString().replace(b"\x01n", b"\x01\xff")),
        *("chakra-bad-node", "node 0 (message 1, byte 8)"),
    ),
}
FILES = {"IN": "bad.et", "OUT": "out", "OUT.et": "out.et"}
READERS = [
    ["show", "IN"],
    ["annotate", "--target", "H100", "IN", "-o", "OUT.et"],
    ["replay", "IN"],
    ["coarsen", "--granularity", "layer", "IN", "-o", "OUT.et"],
    *(["export", to, "IN", "-o", "OUT"] for to in ("astra-sim", "simai", "goal", "perfetto",
                                                   "parquet", "dot")),
]  # fmt: skip


def _in(directory: Path, command: list[str]) -> list[str]:
    """Return the command with its files in a directory."""
    paths = {word: str(directory / name) for word, name in FILES.items()}
    return [paths.get(word, word) for word in command]


@pytest.mark.parametrize("damage", CHAKRA)
def test_chakra(damage: str, tmp_path: Path) -> None:
    content, error, name = CHAKRA[damage]
    (tmp_path / "bad.et").write_bytes(content)
    # `show` drops broken edges, so that a broken trace can be looked at (tests/cli).
    readers = READERS[1:] if damage == "an edge to nowhere" else READERS
    for command in readers:
        refused(_in(tmp_path, command), tmp_path, error, str(tmp_path / "bad.et"), name)


def test_a_cycle_is_refused_where_order_matters(tmp_path: Path) -> None:
    (tmp_path / "bad.et").write_bytes(messages(small(0, 1), small(1, 0)))
    ranks = ["--ranks", "2"]  # of a network to simulate
    replay, astra_sim, simai, goal = READERS[2], READERS[4], READERS[5], READERS[6]
    for command in (replay, [*astra_sim, *ranks], simai, [*goal, *ranks]):
        refused(_in(tmp_path, command), tmp_path, "graph-cycle", "node 0 waits for node 1")


def test_the_largest_id_is_an_id(tmp_path: Path) -> None:
    (tmp_path / "large.et").write_bytes(messages(small(2**64 - 1), small(1, 2**64 - 1)))
    done = CliRunner().invoke(onerank, ["show", str(tmp_path / "large.et"), "--text"])
    assert done.exit_code == 0
    assert f"{2**64 - 1} kernel" in done.stdout


@pytest.mark.parametrize(
    ("content", "error", "place"),
    [
        (b'{"version": "1"}\n{"id": ', "chakra-json-malformed", "line 2"),
        (b'{"version": "1"}\n{"id": -1}', "chakra-json-schema", "line 2: the node 0"),
        (b'{"version": "1"}\n{"id": 18446744073709551616}', "chakra-json-schema", "line 2"),
        (b'{"version": "1"}\n{"durationMicros": NaN}', "chakra-json-schema", "line 2"),
        (b'{"version": "1"}\n{"name": "\xff"}', "chakra-json-not-utf8", "byte 27"),
        (b'{"version": "1"}\n{"attr": ' + b"[" * 100_000, "chakra-json-malformed", "line 2"),
        (b"\x00\xff" * 50, "chakra-json-malformed", "line 1"),
        (b"", "chakra-json-empty", ""),
        (b"{}", "chakra-json-empty", ""),
    ],
)
def test_chakra_json(content: bytes, error: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    out = ["-o", str(tmp_path / "out.et")]
    refused(["convert", str(path), *out], tmp_path, error, str(path), place)


# The same output every time ----------------------------------------------------------------------


def test_output_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    """Every file, byte for byte, from two processes whose sets and dicts hash apart."""
    code = (
        "import sys; from click.testing import CliRunner; from onerank.cli import onerank\n"
        "source, out = sys.argv[1:]\n"
        "commands = [['convert', source, '-o', f'{out}/t.et']]\n"
        "commands += [['annotate', '--target', 'H100', f'{out}/t.et', '-o', f'{out}/a.et']]\n"
        "for to in 'astra-sim simai goal perfetto parquet dot chakra-json'.split():\n"
        "    commands.append(['export', to, f'{out}/a.et', '-o', f'{out}/{to}'])\n"
        "for command in commands:\n"
        "    done = CliRunner().invoke(onerank, command)\n"
        "    assert done.exit_code == 0, (command, done.output)\n"
    )
    made: list[dict[str, bytes]] = []
    for seed in ("1", "4242"):
        out = tmp_path / seed
        out.mkdir()
        command = [sys.executable, "-c", code, str(CPU), str(out)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, timeout=120)
        files = sorted(path for path in out.rglob("*") if path.is_file())
        made.append({str(path.relative_to(out)): path.read_bytes() for path in files})
    assert len(made[0]) > 18
    assert made[0].keys() == made[1].keys()
    assert [name for name, content in made[0].items() if made[1][name] != content] == []
