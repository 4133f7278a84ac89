"""Mutants of the other configuration files of a workload, of its groups and its script."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.speed.mutant_edits import (
    JSON_TEXTS,
    REMOVED,
    VALUES,
    Edit,
    Mutant,
    both_systems,
    json_edit,
    label_of,
    settings_edit,
    text_edit,
)


def config_mutants() -> Iterator[Mutant]:
    """Yield the mutants of each file."""
    yield from _system()
    yield from _memory()
    yield from _logging()
    yield from _groups()
    yield from _script()
    yield from _files()


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
        name = f"system.json {key} {label_of(value)}"
        return Mutant(name, both_systems(lambda file: json_edit(file, key, value)), legitimate)

    for key in (*_NUMBERS, "roofline-enabled", "trace-enabled", "replay-only", "track-local-mem"):
        for value in VALUES:
            yield mutant(key, value, legitimate=_sound(key, value))
    for value in (*VALUES, 1e-3, 0.999, 1.001):
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
                f"system.json shared bus, {key} {label_of(value)}",
                both_systems(lambda file, settings=settings: settings_edit(file, settings)),
                legitimate=_sound(key, value),
            )
    for value in ("", "no-such-file", [], None):
        yield mutant("per-node-custom-implementation", value, legitimate=False)
    for value in ("trace", "", 5, None):
        yield mutant("local-mem-trace-filename", value, legitimate=isinstance(value, str))
    for key in ("notes", "endpoint_delay", "endpoint-dealy", "Endpoint-delay", "", "\u00e9"):
        yield mutant(key, {"a": [1]}, legitimate=True)
    for label, change in JSON_TEXTS.items():
        sound = not label.startswith("bad")
        edit = both_systems(lambda file, change=change: text_edit(file, change))
        yield Mutant(f"system.json text: {label}", edit, legitimate=sound)


def _memory() -> Iterator[Mutant]:
    file = "memory.json"
    for value in VALUES:
        yield Mutant(
            f"memory.json memory-type {label_of(value)}",
            json_edit(file, "memory-type", value),
            legitimate=False,
        )
        for key in ("remote-mem-latency", "remote-mem-bw", "num-nodes", "num-npus-per-node"):
            sound = value is REMOVED or (isinstance(value, bool | int) and 0 <= value <= 2)
            if key.startswith("num-"):
                sound = True  # not read with this memory type
            yield Mutant(f"memory.json {key} {label_of(value)}", json_edit(file, key, value), sound)
    for kind in (
        "PER_NODE_MEMORY_EXPANSION",
        "PER_NPU_MEMORY_EXPANSION",
        "MEMORY_POOL",
        "NONE",
        "no_memory_expansion",
    ):
        sound = kind in ("PER_NPU_MEMORY_EXPANSION", "MEMORY_POOL")
        yield Mutant(f"memory.json memory-type {kind}", json_edit(file, "memory-type", kind), sound)
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
            text_edit(file, lambda _, settings=settings: json.dumps(settings)),
            sound,
        )
    for label, change in JSON_TEXTS.items():
        yield Mutant(
            f"memory.json text: {label}",
            text_edit(file, change),
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
            yield Mutant(f"logging.toml {label}", text_edit("logging.toml", change), legitimate)


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
    for label, change in JSON_TEXTS.items():
        sound_text = not label.startswith("bad") and "unknown" not in label
        yield Mutant(f"comm_groups.json text: {label}", text_edit(file, change), sound_text)


def _script() -> Iterator[Mutant]:
    file = "run.sh"

    def changed(before: str, after: str) -> Edit:
        return text_edit(file, lambda text: text.replace(before, after))

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
