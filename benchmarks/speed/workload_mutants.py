"""Mutants of an exported ASTRA-sim workload, each with one change.

A mutant is `legitimate` if it only makes the workload another sound one, such as a slower link:
ASTRA-sim may then report another time, and the check must have no finding.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onerank.ir.chakra.et_def_pb2 import AttributeProto, GlobalMetadata, Node
from onerank.ir.chakra.framing import ChakraFile, frame

Edit = Callable[[Path], None]
"""Changes a copy of the workload in place."""

RANKS = 4
COMP, SEND, RECV, COLL = 4, 5, 6, 7
SYSTEMS = ("system.json", "system_roofline.json")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a workload.

    Attributes:
        name: file, field and value.
        edit: makes the change.
        legitimate: whether the changed workload is sound; None if the change is random, so that a
            new time may or may not be a surprise.
    """

    name: str
    edit: Edit
    legitimate: bool | None


def mutants() -> Iterator[Mutant]:
    """Yield every mutant; the names are unique."""
    yield from _system()
    yield from _network()
    yield from _memory()
    yield from _logging()
    yield from _groups()
    yield from _script()
    yield from _files()
    yield from _nodes()
    yield from _dependencies()
    yield from _arrivals()
    yield from _random_fields(300)


# Text and JSON -----------------------------------------------------------------------------------

REMOVED = object()
ABSENT = "<removed>"

_VALUES: tuple[Any, ...] = (
    REMOVED,
    None,
    True,
    False,
    "1",
    "",
    [],
    {},
    0,
    -1,
    0.5,
    1,
    2,
    1e-9,
    2**31,
    2**63,
    1e30,
)


def _json(file: str, key: str, value: object) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / file
        settings = json.loads(path.read_text())
        if value is REMOVED:
            settings.pop(key, None)
        else:
            settings[key] = value
        path.write_text(json.dumps(settings))

    return edit


def _settings(file: str, settings: dict[str, Any]) -> Edit:
    def edit(folder: Path) -> None:
        for key, value in settings.items():
            _json(file, key, value)(folder)

    return edit


def _both(edit_of: Callable[[str], Edit]) -> Edit:
    """Return an edit of the system files of both encodings."""
    edits = [edit_of(file) for file in SYSTEMS]

    def edit(folder: Path) -> None:
        for one_edit in edits:
            one_edit(folder)

    return edit


def _text(file: str, change: Callable[[str], str | bytes]) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / file
        changed = change(path.read_text())
        path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())

    return edit


def _label(value: object) -> str:
    return ABSENT if value is REMOVED else json.dumps(value)[:40]


_NUMBERS: dict[str, tuple[float, float]] = {
    "endpoint-delay": (0, 1e6),
    "local-reduction-delay": (0, 1e6),
    "active-chunks-per-dimension": (1, 2**20),
    "preferred-dataset-splits": (1, 8),
    "local-mem-bw": (0.5, 1e10),
    "model-shared-bus": (0, 1),
    "L": (0, 1e3),
    "o": (0, 1e3),
    "g": (0, 1e3),
    "G": (0, 1e3),
    "boost-mode": (-1e99, 1e99),  # not read
}
"""Sound values of numbers; integers where ASTRA-sim reads integers."""

_REAL = ("local-mem-bw", "L", "o", "g", "G", "boost-mode")

_ALGORITHMS = ("ring", "direct", "direct1", "oneRing", "oneDirect", "halvingDoubling")
_BAD_ALGORITHMS = ("direct0", "direct-2", "directX", "Ring", "tree", "", "ring ", "oneDirect0")


def _sound(key: str, value: object) -> bool:
    """Whether a value is one that a user may write, so that a new time is not a surprise."""
    if value is REMOVED:
        return key in ("endpoint-delay", "local-reduction-delay", "active-chunks-per-dimension")
    if isinstance(value, bool):
        value = int(value)
    if key in _NUMBERS and isinstance(value, int | float):
        low, high = _NUMBERS[key]
        return low <= value <= high and (key in _REAL or value == int(value))
    return False


def _system() -> Iterator[Mutant]:  # noqa: PLR0912
    def mutant(key: str, value: object, *, legitimate: bool) -> Mutant:
        name = f"system.json {key} {_label(value)}"
        return Mutant(name, _both(lambda file: _json(file, key, value)), legitimate)

    for key in (*_NUMBERS, "roofline-enabled", "trace-enabled", "replay-only", "track-local-mem"):
        for value in _VALUES:
            yield mutant(key, value, legitimate=_sound(key, value))
    for value in (*_VALUES, 1e-3, 0.999, 1.001):
        yield mutant("peak-perf", value, legitimate=value == 1)
    for value in (1e-3, 50, 3350.5, 1e5, "3350", [3350]):
        yield mutant("local-mem-bw", value, legitimate=isinstance(value, int | float))
    for value in (4, 16, 64, 4.0):
        yield mutant("preferred-dataset-splits", value, legitimate=True)
        yield mutant("active-chunks-per-dimension", value, legitimate=True)
    for value in ("LIFO", "FIFO", "EXPLICIT", "lifo", "", None, 1, [], REMOVED):
        sound = value in ("LIFO", "FIFO", "EXPLICIT")
        yield mutant("scheduling-policy", value, legitimate=sound)
    for value in ("baseline", "localBWAware", "none", "", None, 0, {}, REMOVED):
        yield mutant(
            "collective-optimization", value, legitimate=value in ("baseline", "localBWAware")
        )
    for call in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        key = f"{call}-implementation"
        for name in _ALGORITHMS:
            yield mutant(key, [name], legitimate=True)
        yield mutant(key, ["doubleBinaryTree"], legitimate=call == "all-reduce")
        for name in _BAD_ALGORITHMS:
            yield mutant(key, [name], legitimate=False)
        for value in (REMOVED, None, "ring", [], [1], [None], {}, ["ring", "ring"], {"a": "ring"}):
            yield mutant(key, value, legitimate=False)
        for value in ([], ["no-such-file"], "no-such-file", ["a", "b"], None):
            yield mutant(f"{key}-custom", value, legitimate=False)
    for key in ("L", "o", "g", "G", "local-reduction-delay"):
        for value in (0, 5, 5.5, True, -5, 1e30, None):
            settings = {"model-shared-bus": 1, key: value}
            yield Mutant(
                f"system.json shared bus, {key} {_label(value)}",
                _both(lambda file, settings=settings: _settings(file, settings)),
                legitimate=_sound(key, value),
            )
    for value in ("", "no-such-file", [], None):
        yield mutant("per-node-custom-implementation", value, legitimate=False)
    for value in ("trace", "", 5, None):
        yield mutant("local-mem-trace-filename", value, legitimate=isinstance(value, str))
    for key in ("notes", "endpoint_delay", "endpoint-dealy", "Endpoint-delay", "", "\u00e9"):
        yield mutant(key, {"a": [1]}, legitimate=True)
    for label, change in _JSON_TEXTS.items():
        sound = not label.startswith("bad")
        edit = _both(lambda file, change=change: _text(file, change))
        yield Mutant(f"system.json text: {label}", edit, legitimate=sound)


_JSON_TEXTS: dict[str, Callable[[str], str | bytes]] = {
    "byte order mark": lambda text: "\ufeff" + text,
    "text behind the object": lambda text: text + " more",
    "one line": lambda text: text.replace("\n", " "),
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "tabs": lambda text: text.replace("  ", "\t"),
    "leading blank lines": lambda text: "\n\n " + text,
    "unknown number beyond 64 bits": lambda text: text.replace(
        "{", '{ "x": 123456789012345678901234567890,', 1
    ),
    "escaped key": lambda text: text.replace('"endpoint-delay"', '"endpoint\\u002ddelay"').replace(
        '"memory-type"', '"memory\\u002dtype"'
    ),
    "bad: empty": lambda text: "",
    "bad: list": lambda text: "[]",
    "bad: number": lambda text: "5",
    "bad: null": lambda text: "null",
    "bad: trailing comma": lambda text: text.rstrip()[:-1] + ",}",
    "bad: comment": lambda text: "// note\n" + text,
    "bad: block comment": lambda text: "/* note */\n" + text,
    "bad: NaN": lambda text: text.replace("{", '{ "x": NaN,', 1),
    "bad: Infinity": lambda text: text.replace("{", '{ "x": Infinity,', 1),
    "bad: number out of range": lambda text: text.replace("{", '{ "x": 1e999,', 1),
    "bad: single quotes": lambda text: text.replace('"', "'"),
    "bad: cut": lambda text: text[: len(text) // 2],
    "bad: leading zero": lambda text: text.replace("{", '{ "x": 012,', 1),
    "bad: invalid UTF-8": lambda text: (
        text.replace("{", '{ "x": "@",', 1).encode().replace(b"@", b"\xff")
    ),
    "bad: control character": lambda text: text.replace("{", '{ "x": "a\tb",', 1),
    "bad: NUL": lambda text: "\0" + text,
    "bad: UTF-16": lambda text: text.encode("utf-16"),
    "bad: lone surrogate": lambda text: text.replace("{", '{ "x": "\\ud800",', 1),
    "bad: no braces": lambda text: text.strip()[1:-1],
    "bad: equals": lambda text: text.replace(":", " ="),
    "bad: missing comma": lambda text: text.replace(",", "", 1),
}


# Network -----------------------------------------------------------------------------------------


def _network() -> Iterator[Mutant]:
    file = "network.yml"

    def entry(key: str, text: str) -> Edit:
        def change(text_before: str) -> str:
            lines = [line for line in text_before.splitlines() if not line.startswith(f"{key}:")]
            return "\n".join([*lines, f"{key}: {text}"]) + "\n"

        return _text(file, change)

    sound = {
        "npus_count": (
            "[ 4 ]",
            "[4]",
            "[ 0x4 ]",
            "[ 04 ]",
            '[ "4" ]',
            "[ +4 ]",
            "[ 4, ]",
            "\n  - 4",
        ),
        "bandwidth": (
            "[ 100 ]",
            "[ 100. ]",
            "[ 1e2 ]",
            "[ +50.5 ]",
            "['50']",
            "[ .5e3 ]",
            "\n- 50",
            "[ 1 ]",
        ),
        "latency": ("[ 0 ]", "[ 250 ]", "[ 1e3 ]", "[ .5 ]", "[ 2.5E2 ]", "\n  - 100", "[ 0.0 ]"),
        "topology": (
            "[ Ring ]",
            "[ FullyConnected ]",
            "[ 'Switch' ]",
            '["Switch"]',
            "\n  - Switch",
        ),
    }
    broken = {
        "npus_count": (
            "[ 4.0 ]",
            "[ 2 ]",
            "[ 8 ]",
            "[ 0 ]",
            "[ 1 ]",
            "[ -4 ]",
            "4",
            "[]",
            "[ 08 ]",
            "[ 4e0 ]",
            "[ 4_0 ]",
            "[ four ]",
            "[ ~ ]",
            "[ null ]",
            "[ [4] ]",
            "[ {a: 4} ]",
            "[ 4, 4 ]",
            "[ 2, 2 ]",
            "[ 99999999999 ]",
            "[ 0b100 ]",
            "[ 0o4 ]",
            '[ "" ]',
            "[ ! 4 ]",
            "{ a: 4 }",
            "[ 4 4 ]",
        ),
        "bandwidth": (
            "[ 0 ]",
            "[ -1 ]",
            "[ 1e-9 ]",
            "[ 1e30 ]",
            "[ 1e999 ]",
            "[ inf ]",
            "[ .inf ]",
            "[ .nan ]",
            "[ nan ]",
            "[ 4_50 ]",
            "[ 0x5 ]",
            "[ 5 0 ]",
            "50",
            "[]",
            "[ 50, 50 ]",
            "[ fast ]",
            "[ ~ ]",
            "[ 450GB ]",
            "[ '' ]",
            "[ 1,5 ]",
            "{ a: 50 }",
            "[ [50] ]",
        ),
        "latency": (
            "[ -1 ]",
            "[ 1e30 ]",
            "[ .inf ]",
            "[ nan ]",
            "[ 5us ]",
            "500",
            "[]",
            "[ 5, 5 ]",
            "[ ~ ]",
            "[ 1_0 ]",
            "[ {a: 1} ]",
            "[ 1e14 ]",
        ),
        "topology": (
            "[ ring ]",
            "[ Torus ]",
            "[ Mesh ]",
            "[ '' ]",
            "[ ~ ]",
            "Switch",
            "[]",
            "[ Switch, Switch ]",
            "[ 1 ]",
            "[ SWITCH ]",
            "[ Switch ",
            "{ Switch }",
        ),
    }
    for legitimate, table in ((True, sound), (False, broken)):
        for key, texts in table.items():
            for text in texts:
                # An int of [ 2 ] describes another world; RANKS files are there.
                yield Mutant(f"network.yml {key} {text.strip()}", entry(key, text), legitimate)
    for key in sound:
        edit = _text(
            file,
            lambda text_before, key=key: (
                "\n".join(
                    line for line in text_before.splitlines() if not line.startswith(f"{key}:")
                )
                + "\n"
            ),
        )
        yield Mutant(f"network.yml {key} {ABSENT}", edit, legitimate=False)
    texts: dict[str, tuple[bool, Callable[[str], str | bytes]]] = {
        "document start": (True, lambda text: "---\n" + text),
        "document start and end": (True, lambda text: f"---\n{text}...\n"),
        "second document, broken": (True, lambda text: text + "---\na: [\n"),
        "extra keys": (True, lambda text: text + "name: mine\nnotes: [a, {b: c}]\n"),
        "flow mapping": (
            True,
            lambda text: (
                "{topology: [Switch], npus_count: [4], bandwidth: [419.0], latency: [250]}"
            ),
        ),
        "byte order mark": (True, lambda text: "\ufeff" + text),
        "CRLF": (True, lambda text: text.replace("\n", "\r\n")),
        "comments only at the end": (True, lambda text: text + "# end"),
        "anchor and alias": (
            True,
            lambda text: text.replace("npus_count: [ 4 ]", "n: &n [ 4 ]\nnpus_count: *n"),
        ),
        "quoted keys": (
            True,
            lambda text: text.replace("topology:", '"topology":').replace("latency:", "'latency':"),
        ),
        "explicit key": (
            True,
            lambda text: text.replace("topology: [ Switch ]", "? topology\n: [ Switch ]"),
        ),
        "UTF-16": (True, lambda text: text.encode("utf-16")),
        "tag on a list": (True, lambda text: text.replace("topology: [", "topology: !!seq [")),
        "indented": (True, lambda text: "".join(f"  {line}\n" for line in text.splitlines())),
        "blank first lines": (True, lambda text: "\n\n\n" + text),
        "YAML directive": (True, lambda text: "%YAML 1.2\n---\n" + text),
        "duplicate bandwidth behind": (False, lambda text: text + "bandwidth: [ 1 ]\n"),
        "duplicate bandwidth before": (False, lambda text: "bandwidth: [ 1 ]\n" + text),
        "duplicate npus_count": (False, lambda text: text + "npus_count: [ 8 ]\n"),
        "duplicate unread key": (True, lambda text: text + "name: a\nname: b\n"),
        "empty": (False, lambda text: ""),
        "comment only": (False, lambda text: "# nothing\n"),
        "a list": (False, lambda text: "- a\n"),
        "a scalar": (False, lambda text: "Switch\n"),
        "tab": (False, lambda text: "\t" + text),
        "unclosed list": (False, lambda text: text.replace("]", "", 1)),
        "no space behind the colon": (False, lambda text: text.replace("topology: ", "topology:")),
        "unknown alias": (False, lambda text: text.replace("[ 4 ]", "*n")),
        "unclosed quote": (False, lambda text: text.replace("Switch", "'Switch")),
        "NUL": (False, lambda text: "\0" + text),
        "keys in capitals": (False, lambda text: text.upper()),
        "cut": (False, lambda text: text[: len(text) * 2 // 3]),
        "merge key": (
            False,
            lambda text: (
                "d: &d {topology: [ Switch ]}\n<<: *d\n" + text.replace("topology: [ Switch ]", "")
            ),
        ),
    }
    for label, (legitimate, change) in texts.items():
        yield Mutant(f"network.yml text: {label}", _text(file, change), legitimate)
    for algorithms, legitimate in (
        (["ring", "ring"], True),
        (["ring"], False),
        (["oneRing"], True),
    ):
        yield Mutant(
            f"network.yml two dimensions, {json.dumps(algorithms)}",
            _two_dimensions(algorithms),
            legitimate,
        )


def _two_dimensions(algorithms: list[str]) -> Edit:
    def edit(folder: Path) -> None:
        for file in SYSTEMS:
            for call in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
                _json(file, f"{call}-implementation", algorithms)(folder)
        (folder / "network.yml").write_text(
            "topology: [ Switch, Switch ]\nnpus_count: [ 2, 2 ]\n"
            "bandwidth: [ 400, 50 ]\nlatency: [ 250, 1000 ]\n"
        )

    return edit


# Memory and logging ------------------------------------------------------------------------------


def _memory() -> Iterator[Mutant]:
    file = "memory.json"
    for value in _VALUES:
        yield Mutant(
            f"memory.json memory-type {_label(value)}",
            _json(file, "memory-type", value),
            legitimate=False,
        )
        for key in ("remote-mem-latency", "remote-mem-bw", "num-nodes", "num-npus-per-node"):
            sound = value is REMOVED or (isinstance(value, bool | int) and 0 <= value <= 2)
            if key.startswith("num-"):
                sound = True  # not read with this memory type
            yield Mutant(f"memory.json {key} {_label(value)}", _json(file, key, value), sound)
    for kind in (
        "PER_NODE_MEMORY_EXPANSION",
        "PER_NPU_MEMORY_EXPANSION",
        "MEMORY_POOL",
        "NONE",
        "no_memory_expansion",
    ):
        sound = kind in ("PER_NPU_MEMORY_EXPANSION", "MEMORY_POOL")
        yield Mutant(f"memory.json memory-type {kind}", _json(file, "memory-type", kind), sound)
    for nodes, npus, sound in (
        (1, 4, True),
        (2, 2, True),
        (0, 4, False),
        (-1, 4, False),
        (1, 0, False),
        ("1", 4, False),
        (1.5, 4, False),
    ):
        settings = {
            "memory-type": "PER_NODE_MEMORY_EXPANSION",
            "num-nodes": nodes,
            "num-npus-per-node": npus,
        }
        yield Mutant(
            f"memory.json per node {nodes!r} x {npus!r}",
            _text(file, lambda _, settings=settings: json.dumps(settings)),
            sound,
        )
    for label, change in _JSON_TEXTS.items():
        yield Mutant(
            f"memory.json text: {label}",
            _text(file, change),
            legitimate=not label.startswith("bad"),
        )


def _logging() -> Iterator[Mutant]:
    sink = '[[sink]]\nname = "more"\ntype = "TYPE"\n'

    def added(kind: str, more: str = "") -> Callable[[str], str]:
        return lambda text: sink.replace("TYPE", kind) + more + "\n" + text

    def changed(before: str, after: str) -> Callable[[str], str]:
        return lambda text: text.replace(before, after)

    sound: dict[str, Callable[[str], str | bytes]] = {
        "byte order mark": lambda text: "\ufeff" + text,
        "CRLF": lambda text: text.replace("\n", "\r\n"),
        "comment": lambda text: "# note\n" + text,
        "unknown table": lambda text: text + "\n[mine]\na = 1\n",
        "unknown key": changed('name = "nowhere"', 'name = "nowhere"\nmine = 1'),
        "level info": changed('level = "debug"\n', 'level = "info"\n'),
        "level trace": changed('level = "debug"\n', 'level = "trace"\n'),
        "single quotes": changed('"', "'"),
        "stderr sink": added("stderr_sink_st"),
        "stdout sink": added("color_stdout_sink_mt"),
        "file sink": added("basic_file_sink_mt", 'filename = "more.txt"\ntruncate = true'),
        "rotating sink": added(
            "rotating_file_sink_mt", 'base_filename = "more.txt"\nmax_size = "1M"\nmax_files = 2'
        ),
        "daily sink": added(
            "daily_file_sink_mt",
            'base_filename = "more.txt"\nrotation_hour = 1\nrotation_minute = 0',
        ),
        "async logger": lambda text: (
            "[global_thread_pool]\nqueue_size = 8192\nnum_threads = 1\n\n"
            + text.replace('sinks = ["nowhere"]', 'sinks = ["nowhere"]\ntype = "async"')
        ),
        "pattern": lambda text: (
            '[[pattern]]\nname = "p"\nvalue = "%v"\n\n'
            + text.replace('sinks = ["nowhere"]', 'sinks = ["nowhere"]\npattern = "p"')
        ),
        "global pattern": lambda text: 'global_pattern = "%v"\n\n' + text,
        "without flush level": changed('flush_level = "info"\n', ""),
        "inline table": changed('name = "workload"', 'name = "workload"\nmine = { a = 1 }'),
        "one more logger": lambda text: text + '\n[[logger]]\nname = "mine"\nsinks = ["nowhere"]\n',
    }
    broken: dict[str, Callable[[str], str | bytes]] = {
        "empty": lambda _: "",
        "bracket": lambda _: "[",
        "NUL": lambda text: "\0" + text,
        "not TOML": lambda text: text.replace("=", ":"),
        "cut": lambda text: text[: len(text) // 3],
        "sink type unknown": changed("null_sink_mt", "null_sink"),
        "sink type in capitals": changed("null_sink_mt", "NULL_SINK_MT"),
        "sink type number": changed('type = "null_sink_mt"', "type = 5"),
        "sink without type": changed('type = "null_sink_mt"\n', ""),
        "sink without name": changed('name = "nowhere"\n', ""),
        "sink renamed": changed('name = "nowhere"', 'name = "elsewhere"'),
        "no sink": lambda text: text[text.index("[[logger]]") :],
        "no logger": lambda text: text.split("[[logger]]")[0],
        "logger without sinks": changed('sinks = ["nowhere"]\n', ""),
        "logger without name": changed('name = "workload"\n', ""),
        "logger sinks a string": changed('sinks = ["nowhere"]', 'sinks = "nowhere"'),
        "logger sinks numbers": changed('sinks = ["nowhere"]', "sinks = [ 1 ]"),
        "logger twice": lambda text: text + text[text.index("[[logger]]") :],
        "sink twice": lambda text: text[: text.index("[[logger]]")] + text,
        "level unknown": changed('level = "debug"', 'level = "verbose"'),
        "level number": changed('level = "debug"', "level = 1"),
        "level in capitals": changed('level = "debug"', 'level = "DEBUG"'),
        "level warning": changed('level = "debug"', 'level = "warning"'),
        "flush level unknown": changed('flush_level = "info"', 'flush_level = "always"'),
        "type unknown": changed('sinks = ["nowhere"]', 'sinks = ["nowhere"]\ntype = "lazy"'),
        "pattern unknown": changed('sinks = ["nowhere"]', 'sinks = ["nowhere"]\npattern = "p"'),
        "thread pool unknown": changed(
            'sinks = ["nowhere"]', 'sinks = ["nowhere"]\ntype = "async"\nthread_pool = "p"'
        ),
        "file sink without name": added("basic_file_sink_mt"),
        "file sink in a missing folder": added(
            "basic_file_sink_mt", 'filename = "no/such/more.txt"'
        ),
        "rotating sink without size": added(
            "rotating_file_sink_mt", 'base_filename = "more.txt"\nmax_files = 2'
        ),
        "rotating sink, size a number": added(
            "rotating_file_sink_mt", 'base_filename = "more.txt"\nmax_size = 1024\nmax_files = 2'
        ),
        "rotating sink, size of words": added(
            "rotating_file_sink_mt", 'base_filename = "more.txt"\nmax_size = "big"\nmax_files = 2'
        ),
        "daily sink, hour 25": added(
            "daily_file_sink_mt",
            'base_filename = "more.txt"\nrotation_hour = 25\nrotation_minute = 0',
        ),
        "sink a table": lambda text: text.replace("[[sink]]", "[sink]"),
        "duplicate key": changed('name = "nowhere"', 'name = "nowhere"\nname = "nowhere"'),
        "unquoted value": changed('"debug"', "debug"),
    }
    for legitimate, table in ((True, sound), (False, broken)):
        for label, change in table.items():
            yield Mutant(f"logging.toml {label}", _text("logging.toml", change), legitimate)


# Groups and script -------------------------------------------------------------------------------


def _groups() -> Iterator[Mutant]:
    file = "comm_groups.json"

    def regrouped(change: Callable[[dict[str, Any]], None]) -> Edit:
        def edit(folder: Path) -> None:
            groups = json.loads((folder / file).read_text())
            change(groups)
            (folder / file).write_text(json.dumps(groups))

        return edit

    def put(key: str, ranks: object) -> Callable[[dict[str, Any]], None]:
        return lambda groups: groups.__setitem__(key, ranks)

    def rename(before: str, after: str) -> Callable[[dict[str, Any]], None]:
        return lambda groups: groups.__setitem__(after, groups.pop(before))

    sound = {
        "unused group": put("90", [0, 1]),
        "unused group of one": put("90", [2]),
        "largest key": put("2147483647", [0, 1]),
        "key 02": rename("2", "02"),
        "key with a sign": rename("2", "+2"),
        "key with text": rename("2", "2 and more"),
        "key with spaces": rename("2", "  2"),
        "real ranks": put("1", [0.0, 1.0, 2.0, 3.0]),
        "Boolean ranks": lambda groups: groups.update({"90": [False, True]}),
        "an object": put("1", {"a": 0, "b": 1, "c": 2, "d": 3}),
    }
    broken = {
        "key 0": put("0", [0, 1]),
        "key -1": put("-1", [0, 1]),
        "key empty": put("", [0, 1]),
        "key of words": put("tp", [0, 1]),
        "key 2147483648": put("2147483648", [0, 1]),
        "key of 5000 digits": put("9" * 5000, [0, 1]),
        "key 1.5": put("0.5", [0, 1]),
        "same key, other ranks": put("02", [2, 3]),
        "group 1 removed": lambda groups: groups.pop("1"),
        "group 2 removed": lambda groups: groups.pop("2"),
        "no groups": lambda groups: groups.clear(),
        "group 2 empty": put("2", []),
        "group 2 null": put("2", None),
        "group 2 a string": put("2", "01"),
        "group 2 a number": put("2", 0),
        "group 2 strings": put("2", ["0", "1"]),
        "group 2 real": put("2", [0.5, 1]),
        "group 2 nested": put("2", [[0, 1]]),
        "group 2 beyond the world": put("2", [0, 9]),
        "group 2 negative": put("2", [0, -1]),
        "group 2 twice a rank": put("2", [0, 1, 1]),
        "group 2 of one": put("2", [0]),
        "group 2 of other ranks": put("2", [2, 3]),
        "group 2 of all": put("2", [0, 1, 2, 3]),
        "group 1 of three": put("1", [0, 1, 2]),
        "unused group beyond the world": put("90", [0, 77]),
        "unused group of strings": put("90", ["0"]),
        "rank beyond int32": put("2", [0, 2**40]),
    }
    for legitimate, table in ((True, sound), (False, broken)):
        for label, change in table.items():
            yield Mutant(f"comm_groups.json {label}", regrouped(change), legitimate)
    # A rank's place in the list is its place in the ring.
    yield Mutant(
        "comm_groups.json reversed ranks",
        regrouped(lambda groups: groups["1"].reverse()),
        legitimate=True,
    )
    for label, change in _JSON_TEXTS.items():
        sound_text = not label.startswith("bad") and "unknown" not in label
        yield Mutant(f"comm_groups.json text: {label}", _text(file, change), sound_text)


def _script() -> Iterator[Mutant]:
    file = "run.sh"

    def changed(before: str, after: str) -> Edit:
        return _text(file, lambda text: text.replace(before, after))

    sound = {
        "comment": changed(
            "set -eu", "# note: not the AstraSim_Analytical_Congestion_Aware\nset -eu"
        ),
        "more options": changed("--logging-folder", "--num-queues-per-dim=1 --logging-folder"),
        "comm-scale 2": changed("--logging-folder", "--comm-scale=2 --logging-folder"),
        "no logging": changed(
            "--logging-configuration=logging.toml", "--logging-configuration=empty"
        ),
        "quoted path": changed(
            "--network-configuration=network.yml", '--network-configuration="network.yml"'
        ),
        "path with dot": changed(
            "--network-configuration=network.yml", "--network-configuration=./network.yml"
        ),
        "option with a space": changed(
            "--network-configuration=network.yml", "--network-configuration network.yml"
        ),
    }
    broken = {
        "groups of another name": changed("=comm_groups.json", "=groups.json"),
        "no groups": changed(
            "--comm-group-configuration=comm_groups.json", "--comm-group-configuration=empty"
        ),
        "groups in a path with empty": changed("=comm_groups.json", "=empty/../comm_groups.json"),
        "network of another name": changed("=network.yml", "=net.yml"),
        "memory of another name": changed("=memory.json", "=mem.json"),
        "logging of another name": changed("=logging.toml", "=log.toml"),
        "without network": changed("--network-configuration=network.yml", ""),
        "without memory": changed("--remote-memory-configuration=memory.json", ""),
        "without system": changed('--system-configuration="$system"', ""),
        "without workload": changed('--workload-configuration="./$workload"', ""),
        "system of the other encoding": changed(
            "system=system_roofline.json", "system=system.json"
        ),
        "misspelt option": changed("--network-configuration", "--network-config"),
    }
    for legitimate, table in ((True, sound), (False, broken)):
        for label, edit in table.items():
            yield Mutant(f"run.sh {label}", edit, legitimate)


def _files() -> Iterator[Mutant]:
    names = ("system.json", "system_roofline.json", "network.yml", "memory.json", "logging.toml")
    traces = ("workload.0.et", "workload.3.et", "workload_roofline.2.et")
    for name in (*names, "comm_groups.json", *traces):
        yield Mutant(
            f"{name} removed", lambda folder, name=name: (folder / name).unlink(), legitimate=False
        )
        for label, content in (("empty", b""), ("zeros", b"\0" * 64), ("text", b"hello, world\n")):
            yield Mutant(
                f"{name} {label}",
                lambda folder, name=name, content=content: (
                    (folder / name).write_bytes(content) and None
                ),
                legitimate=False,
            )
    for name in traces:
        for cut in (1, 7, 40):
            yield Mutant(
                f"{name} shorter by {cut} bytes",
                lambda folder, name=name, cut=cut: (
                    (folder / name).write_bytes((folder / name).read_bytes()[:-cut]) and None
                ),
                legitimate=False,
            )
    yield Mutant(
        "rank 4 added",
        lambda folder: (
            (folder / "workload.4.et").write_bytes((folder / "workload.3.et").read_bytes()) and None
        ),
        legitimate=False,
    )
    yield Mutant(
        "an unrelated file added",
        lambda folder: (folder / "notes.txt").write_text("mine") and None,
        legitimate=True,
    )


# Nodes -------------------------------------------------------------------------------------------

Change = Callable[[list[Node], int], None]
"""Changes the nodes of a rank in place."""


def _nodes_of(path: Path) -> list[Node]:
    with ChakraFile(path) as file:
        return [Node.FromString(message) for message in file.nodes()]


def _write(path: Path, nodes: list[Node]) -> None:
    header = GlobalMetadata(version="1.0.0").SerializeToString()
    path.write_bytes(frame([header, *(node.SerializeToString() for node in nodes)]))


def _edited(
    change: Change,
    *,
    ranks: tuple[int, ...] = (1,),
    sets: tuple[str, ...] = ("workload", "workload_roofline"),
) -> Edit:
    def edit(folder: Path) -> None:
        for name in sets:
            for rank in ranks:
                path = folder / f"{name}.{rank}.et"
                nodes = _nodes_of(path)
                change(nodes, rank)
                _write(path, nodes)

    return edit


def attribute(node: Node, name: str) -> AttributeProto | None:
    """Return an attribute of a node."""
    return next((entry for entry in node.attr if entry.name == name), None)


def _set(name: str, variant: str, value: object) -> Callable[[Node], None]:
    """Return an edit that sets an attribute of a node, or removes it."""

    def edit(node: Node) -> None:
        remaining = [
            AttributeProto.FromString(a.SerializeToString()) for a in node.attr if a.name != name
        ]
        del node.attr[:]
        node.attr.extend(remaining)
        if value is REMOVED:
            return
        added = node.attr.add(name=name)
        if variant == "bool_list":
            added.bool_list.values.extend(value)  # pyright: ignore[reportArgumentType]
        else:
            setattr(added, variant, value)

    return edit


def _at(kind: int, edit: Callable[[Node], None], place: int = 2) -> Change:
    """Return a change of the node of a kind at a place among those of its kind."""

    def change(nodes: list[Node], _: int) -> None:
        of_kind = [node for node in nodes if node.type == kind]
        edit(of_kind[min(place, len(of_kind) - 1)])

    return change


ALL = tuple(range(RANKS))


def _nodes() -> Iterator[Mutant]:
    for label, kind, name, variant, value, legitimate in _ATTRIBUTES:
        for ranks in ((1,), ALL):
            where = "all ranks" if len(ranks) > 1 else "rank 1"
            for place in (0, 2):
                edit = _edited(_at(kind, _set(name, variant, value), place), ranks=ranks)
                sound = legitimate is True or (legitimate == "all" and ranks == ALL)
                yield Mutant(
                    f"{label} {place} {name} {variant} {_label(value)}, {where}", edit, sound
                )
    for value in (0, 1, 7, 2**31, 2**40, 2**62, 2**64 - 5):
        for place in (0, 2):

            def lasts(node: Node, value: int = value) -> None:
                node.duration_micros = value

            yield Mutant(
                f"compute {place} duration_micros {value}",
                _edited(_at(COMP, lasts, place)),
                legitimate=False,
            )

            def lasts_without(node: Node, value: int = value) -> None:
                node.duration_micros = value
                _set("duration_ns", "", REMOVED)(node)

            yield Mutant(
                f"compute {place} duration_micros {value} without duration_ns",
                _edited(_at(COMP, lasts_without, place), sets=("workload",)),
                legitimate=value <= 2**31,
            )
    for kind, label in ((COMP, "compute"), (SEND, "send"), (RECV, "receive"), (COLL, "collective")):
        for number in (0, 1, 2, 3, 4, 5, 6, 7, 8, 99):
            if number == kind:
                continue

            def becomes(node: Node, number: int = number) -> None:
                node.type = number  # pyright: ignore[reportAttributeAccessIssue]

            for ranks in ((1,), ALL):
                where = "all ranks" if len(ranks) > 1 else "rank 1"
                edit = _edited(_at(kind, becomes), ranks=ranks)
                yield Mutant(f"{label} becomes type {number}, {where}", edit, legitimate=False)

        def removed(nodes: list[Node], _: int, kind: int = kind) -> None:
            of_kind = [node for node in nodes if node.type == kind]
            victim = of_kind[min(2, len(of_kind) - 1)]
            for node in nodes:
                kept = [dep for dep in node.data_deps if dep != victim.id]
                if len(kept) < len(node.data_deps):
                    del node.data_deps[:]
                    node.data_deps.extend(dict.fromkeys([*kept, *victim.data_deps]))
            nodes.remove(victim)

        sound = kind == COMP
        yield Mutant(f"{label} removed, rank 1", _edited(removed), sound)
        yield Mutant(
            f"{label} removed, all ranks", _edited(removed, ranks=ALL), sound or kind == COLL
        )

        def repeated(nodes: list[Node], _: int, kind: int = kind) -> None:
            of_kind = [node for node in nodes if node.type == kind]
            copy = Node.FromString(of_kind[min(2, len(of_kind) - 1)].SerializeToString())
            copy.data_deps.append(copy.id)
            copy.id = max(node.id for node in nodes) + 1
            nodes.append(copy)

        yield Mutant(f"{label} repeated, rank 1", _edited(repeated), sound)
        yield Mutant(
            f"{label} repeated, all ranks", _edited(repeated, ranks=ALL), sound or kind == COLL
        )

    def renamed(node: Node) -> None:
        node.name = "\u00e9 [b] \x1b[31m" * 5

    yield Mutant("compute renamed", _edited(_at(COMP, renamed)), legitimate=True)

    def nameless(node: Node) -> None:
        node.ClearField("name")

    yield Mutant("collective without name", _edited(_at(COLL, nameless)), legitimate=True)

    def started(node: Node) -> None:
        node.start_time_micros = 2**60

    yield Mutant("start_time_micros 2**60", _edited(_at(COMP, started)), legitimate=True)
    for label, write in _WHOLE_FILES.items():

        def edit(folder: Path, write: Callable[[list[Node]], list[bytes]] = write) -> None:
            for name in ("workload", "workload_roofline"):
                path = folder / f"{name}.1.et"
                path.write_bytes(frame(write(_nodes_of(path))))

        yield Mutant(f"file of rank 1: {label}", edit, legitimate=not label.startswith("bad"))


_HEADER = GlobalMetadata(version="1.0.0").SerializeToString()

_WHOLE_FILES: dict[str, Callable[[list[Node]], list[bytes]]] = {
    "shuffled": lambda nodes: [
        _HEADER,
        *(n.SerializeToString() for n in random.Random(0).sample(nodes, len(nodes))),
    ],
    "reversed": lambda nodes: [_HEADER, *(n.SerializeToString() for n in reversed(nodes))],
    "metadata of another version": lambda nodes: [
        GlobalMetadata(version="9.9").SerializeToString(),
        *(n.SerializeToString() for n in nodes),
    ],
    "empty metadata": lambda nodes: [b"", *(n.SerializeToString() for n in nodes)],
    "bad: no metadata": lambda nodes: [n.SerializeToString() for n in nodes],
    "bad: only metadata": lambda _: [_HEADER],
    "bad: metadata twice": lambda nodes: [
        _HEADER,
        _HEADER,
        *(n.SerializeToString() for n in nodes),
    ],
    "without the last node": lambda nodes: [
        _HEADER,
        *(n.SerializeToString() for n in nodes[:-1] if n.type != COMP or n is not nodes[-1]),
    ],
    "bad: first node twice": lambda nodes: [
        _HEADER,
        nodes[0].SerializeToString(),
        *(n.SerializeToString() for n in nodes),
    ],
    "bad: empty message inside": lambda nodes: [
        _HEADER,
        *(n.SerializeToString() for n in nodes[:3]),
        b"",
        *(n.SerializeToString() for n in nodes[3:]),
    ],
    "bad: broken message inside": lambda nodes: [
        _HEADER,
        *(n.SerializeToString() for n in nodes[:3]),
        b"\xff\xff\xff",
        *(n.SerializeToString() for n in nodes[3:]),
    ],
}

_I32, _I64, _U64 = "int32_val", "int64_val", "uint64_val"

_ATTRIBUTES: list[tuple[str, int, str, str, Any, bool | str]] = [
    *(
        ("compute", COMP, "num_ops", _I64, value, False)
        for value in (REMOVED, 0, -1, 1, 500, 2**62)
    ),
    ("compute", COMP, "num_ops", _U64, 2**63 + 5, False),
    ("compute", COMP, "num_ops", "string_val", "5500", False),
    ("compute", COMP, "num_ops", "float_val", 5500.0, False),
    *(("compute", COMP, "tensor_size", _U64, value, False) for value in (REMOVED, 0, 2**40, 2**63)),
    ("compute", COMP, "tensor_size", _I64, -1, False),
    ("compute", COMP, "is_cpu_op", "bool_val", False, True),
    ("compute", COMP, "is_cpu_op", "bool_val", REMOVED, True),
    ("compute", COMP, "is_cpu_op", "bool_val", True, False),
    ("compute", COMP, "is_cpu_op", _I32, 0, True),
    ("compute", COMP, "is_cpu_op", "string_val", "no", False),
    *(("compute", COMP, "duration_ns", _I64, value, False) for value in (0, 1, 10**12)),
    ("compute", COMP, "duration_ns", _I64, REMOVED, True),
    ("compute", COMP, "mine", "string_val", "note", True),
    *(
        ("collective", COLL, "comm_size", _I64, value, False)
        for value in (REMOVED, 0, -1, 2**46, 2**62)
    ),
    *(("collective", COLL, "comm_size", _I64, value, "all") for value in (4096, 2**20)),
    ("collective", COLL, "comm_size", "string_val", "4096", False),
    ("collective", COLL, "comm_size", "double_val", 4096.0, False),
    ("collective", COLL, "comm_size", _U64, 2**20, "all"),
    *(("collective", COLL, "comm_type", _I64, value, "all") for value in (0, 2, 6, 7)),
    *(
        ("collective", COLL, "comm_type", _I64, value, False)
        for value in (1, 3, 4, 5, 8, 9, 10, 99, -1, REMOVED)
    ),
    ("collective", COLL, "comm_type", "string_val", "ALL_REDUCE", False),
    *(
        ("collective", COLL, "pg_name", "string_val", value, False)
        for value in ("", "0", "99", "tp", "-1", "2.5", "99999999999")
    ),
    ("collective", COLL, "pg_name", "string_val", "1", "all"),
    ("collective", COLL, "pg_name", "string_val", "01", "all"),
    ("collective", COLL, "pg_name", "string_val", "1e3", "all"),  # std::stoi reads 1
    ("collective", COLL, "pg_name", "string_val", " 1", "all"),
    ("collective", COLL, "pg_name", "string_val", REMOVED, False),
    ("collective", COLL, "pg_name", _I32, 1, False),
    ("collective", COLL, "comm_priority", _I32, 0, True),
    ("collective", COLL, "comm_priority", _I32, 5, True),
    ("collective", COLL, "comm_priority", "string_val", "high", False),
    ("collective", COLL, "involved_dim", "bool_list", [True], True),
    ("collective", COLL, "involved_dim", "bool_list", [False], False),
    ("collective", COLL, "involved_dim", "bool_list", [], False),
    ("collective", COLL, "involved_dim", "bool_val", True, False),
    ("collective", COLL, "is_cpu_op", "bool_val", True, False),
    ("collective", COLL, "duration_ns", _I64, 10**15, True),
    *(
        ("send", SEND, "comm_dst", _I32, value, False)
        for value in (REMOVED, -1, 1, 4, 99, 2**31 - 1)
    ),
    *(("send", SEND, "comm_src", _I32, value, False) for value in (-1, 2, 99)),
    ("send", SEND, "comm_src", _I32, REMOVED, True),
    *(("send", SEND, "comm_tag", _I32, value, False) for value in (REMOVED, -1, 77)),
    *(("send", SEND, "comm_size", _I64, value, False) for value in (REMOVED, 0, -1, 4097, 2**62)),
    ("send", SEND, "comm_dst", _I64, 2, False),
    ("send", SEND, "comm_dst", "string_val", "2", False),
    *(("receive", RECV, "comm_src", _I32, value, False) for value in (REMOVED, -1, 1, 4, 99)),
    *(("receive", RECV, "comm_dst", _I32, value, False) for value in (-1, 2, 99)),
    ("receive", RECV, "comm_dst", _I32, REMOVED, True),
    *(("receive", RECV, "comm_tag", _I32, value, False) for value in (REMOVED, -1, 77)),
    *(("receive", RECV, "comm_size", _I64, value, False) for value in (REMOVED, 0, -1, 4097)),
    ("receive", RECV, "comm_tag", "string_val", "3", False),
]
"""Kind of node, attribute, type, value, and whether the change is sound (on "all" ranks only)."""


# Dependencies ------------------------------------------------------------------------------------


def _dependencies() -> Iterator[Mutant]:
    for place in (0, 3, 9, 17):
        for label, change, legitimate in (
            ("dangling", lambda node, nodes: node.data_deps.append(10**6), False),
            ("dangling control", lambda node, nodes: node.ctrl_deps.append(10**6), False),
            ("on itself", lambda node, nodes: node.data_deps.append(node.id), False),
            ("control on itself", lambda node, nodes: node.ctrl_deps.append(node.id), False),
            ("on the last node", lambda node, nodes: node.data_deps.append(nodes[-1].id), False),
            ("twice", lambda node, nodes: node.data_deps.extend([*node.data_deps]), True),
            ("as control too", lambda node, nodes: node.ctrl_deps.extend([*node.data_deps]), True),
            ("moved to control", _move_to_control, True),
        ):
            for ranks in ((1,), ALL):

                def each(
                    nodes: list[Node], _: int, change: Any = change, place: int = place
                ) -> None:
                    change(nodes[min(place, len(nodes) - 2)], nodes)

                where = "all ranks" if len(ranks) > 1 else "rank 1"
                name = f"dependency of node {place} {label}, {where}"
                yield Mutant(name, _edited(each, ranks=ranks), legitimate)

    def backwards(nodes: list[Node], _: int) -> None:
        number = {node.id: 10**5 - node.id for node in nodes}
        for node in nodes:
            deps = [number[dep] for dep in node.data_deps]
            del node.data_deps[:]
            node.data_deps.extend(deps)
            node.id = number[node.id]

    yield Mutant("ids in opposite order, rank 1", _edited(backwards), legitimate=True)
    yield Mutant("ids in opposite order, all ranks", _edited(backwards, ranks=ALL), legitimate=True)

    def large(nodes: list[Node], _: int) -> None:
        for node in nodes:
            deps = [dep + 2**63 for dep in node.data_deps]
            del node.data_deps[:]
            node.data_deps.extend(deps)
            node.id += 2**63

    yield Mutant("ids from 2**63 on", _edited(large), legitimate=True)

    def unchained(nodes: list[Node], _: int) -> None:
        """Remove the order of two collectives of one group."""
        kinds = {node.id: node.type for node in nodes}
        for node in nodes:
            kept = [
                d for d in node.data_deps if not (node.type == COLL and kinds[d] in (COLL, SEND))
            ]
            del node.data_deps[:]
            node.data_deps.extend(kept)

    yield Mutant("communication unchained, rank 1", _edited(unchained), legitimate=False)
    yield Mutant(
        "communication unchained, all ranks", _edited(unchained, ranks=ALL), legitimate=False
    )

    def free(nodes: list[Node], _: int) -> None:
        for node in nodes:
            del node.data_deps[:]

    yield Mutant("no dependencies, rank 1", _edited(free), legitimate=False)
    yield Mutant("no dependencies, all ranks", _edited(free, ranks=ALL), legitimate=False)


def _move_to_control(node: Node, _: list[Node]) -> None:
    node.ctrl_deps.extend(node.data_deps)
    del node.data_deps[:]


# Order by arrival --------------------------------------------------------------------------------

_SHARED_GROUPS: dict[str, tuple[dict[str, list[int]], str, str, bool]] = {
    "one group": ({"1": [0, 1]}, "1", "1", False),
    "two groups of the same ranks": ({"1": [0, 1], "2": [0, 1]}, "1", "2", False),
    "two groups that share two ranks": ({"1": [0, 1, 3], "2": [0, 1]}, "1", "2", False),
    "two groups that share one rank": ({"1": [0, 1], "2": [0, 3]}, "1", "2", True),
}
"""Name -> groups, the groups of collectives A and B, whether their order is free."""


def _arrivals() -> Iterator[Mutant]:
    """Replace the workload by one in which late messages decide the order of two collectives.

    Rank 0 may issue A at once, and B after a message that rank 2 sends 100 us later. Rank 1 may
    issue B at once, and A after such a message.
    """
    for label, (groups, first, second, free) in _SHARED_GROUPS.items():
        for ordered in (False, True):

            def edit(
                folder: Path,
                groups: dict[str, list[int]] = groups,
                ends: tuple[str, str] = (first, second),
                ordered: bool = ordered,
            ) -> None:
                (folder / "comm_groups.json").write_text(json.dumps(groups))
                for rank in range(RANKS):
                    calls = {
                        name: group
                        for name, group in zip("AB", ends, strict=True)
                        if rank in groups[group]
                    }
                    for name in ("workload", "workload_roofline"):
                        nodes = _late_step(rank, calls, ordered=ordered)
                        _write(folder / f"{name}.{rank}.et", nodes)

            order = "with an order" if ordered else "without an order"
            yield Mutant(f"late messages, {label}, {order}", edit, legitimate=ordered or free)


def _late_step(rank: int, calls: dict[str, str], *, ordered: bool) -> list[Node]:
    """Return the step of a rank with the collectives `calls`, name -> group."""
    nodes = [_node(1, COMP, 5_000)]
    if rank == 2:
        nodes.append(_node(2, COMP, 100_000, after=1))
        for target in (0, 1):
            message = {"comm_dst": target, "comm_tag": target}
            nodes.append(_node(3 + target, SEND, after=2 + target, comm_size=64, **message))
        return nodes
    late = {0: "B", 1: "A"}.get(rank, "")
    if rank in (0, 1):
        nodes.append(_node(2, RECV, comm_size=64, comm_src=2, comm_tag=rank))
    for number, (name, size) in enumerate((("A", 4096), ("B", 8192)), start=10):
        if name in calls:
            node = _node(number, COLL, after=2 if name == late else 1, comm_type=0, comm_size=size)
            _set("pg_name", "string_val", calls[name])(node)
            if ordered and name == "B" and "A" in calls:
                node.data_deps.append(10)
            nodes.append(node)
    return nodes


def _node(number: int, kind: int, duration_ns: int = 0, *, after: int = 0, **values: int) -> Node:
    node = Node(id=number, name=f"node {number}", duration_micros=duration_ns // 1000)
    node.type = kind  # pyright: ignore[reportAttributeAccessIssue]
    if after:
        node.data_deps.append(after)
    if kind == COMP:
        values |= {"num_ops": duration_ns * 1000 + 500, "duration_ns": duration_ns}
        _set("tensor_size", _U64, 1)(node)
    for name, value in values.items():
        small = name in ("comm_dst", "comm_src", "comm_tag")
        _set(name, _I32 if small else _I64, value)(node)
    return node


# Random ------------------------------------------------------------------------------------------


def _random_fields(count: int) -> Iterator[Mutant]:
    """Change one random attribute of one random node on one rank or all, from a fixed seed."""
    draw = random.Random(20261125)
    for number in range(count):
        seed = draw.randrange(2**32)

        def change(nodes: list[Node], rank: int, seed: int = seed) -> None:
            rng = random.Random(seed)
            node = rng.choice(nodes)
            action = rng.choice(("attribute", "attribute", "dependency", "swap", "drop"))
            if action == "attribute" and node.attr:
                field = rng.choice(list(node.attr))
                variant = field.WhichOneof("value")
                before = getattr(field, variant) if variant else None
                if isinstance(before, bool) or before is None:
                    field.bool_val = not before
                elif isinstance(before, int):
                    bits = 31 if variant == _I32 else 63
                    after = rng.choice(
                        (0, 1, before + 1, before * 2, before * 1000, 2 ** (bits - 1))
                    )
                    setattr(field, str(variant), min(after, 2**bits - 1))
                elif isinstance(before, str):
                    field.string_val = rng.choice(("", "0", "1", "2", "9", "x"))
            elif action == "dependency" and node.data_deps:
                node.data_deps[rng.randrange(len(node.data_deps))] = rng.choice(nodes).id
            elif action == "swap":
                other = rng.choice(nodes)
                node.type, other.type = other.type, node.type
                kept = [AttributeProto.FromString(a.SerializeToString()) for a in node.attr]
                del node.attr[:]
                node.attr.extend(other.attr)
                del other.attr[:]
                other.attr.extend(kept)
            else:
                nodes.remove(node)

        ranks = (draw.randrange(RANKS),) if draw.random() < 0.7 else ALL
        where = "all ranks" if len(ranks) > 1 else f"rank {ranks[0]}"
        yield Mutant(f"random {number}, {where}", _edited(change, ranks=ranks), legitimate=None)
