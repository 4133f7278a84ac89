"""The settings that ASTRA-sim reads from its configuration files, as tables.

Read from the source of master 518bd51: `Sys::initialize_sys`, `CollectiveImplLookup`,
`AnalyticalRemoteMemory`, the analytical backend's `NetworkParser` and `spdlog_setup`. Keys that are
not in a table are not read by ASTRA-sim and mean nothing to it.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from onerank.converters.targets.astra_sim.check.config_text import INT32, shown, stoi
from onerank.converters.targets.astra_sim.check.findings import Report


class Form(Enum):
    """What a value must be; ASTRA-sim throws on any other type."""

    INTEGER = "an integer"
    REAL = "a number"
    TEXT = "a string"
    SWITCH = "0 or 1"
    ALGORITHMS = "a list of algorithms"
    TRACE = "a list of one path"


@dataclass(frozen=True, slots=True)
class Key:
    """One setting.

    Attributes:
        form: its type.
        low: least value that works.
        high: greatest value that works, or that is plausible: beyond it times overflow.
        choices: the texts that are known; any if empty.
        required: whether ASTRA-sim has no usable default.
        when: another key and its value, without which this one is not read.
        rule: code of the finding for a value that does not work.
        why: what ASTRA-sim does with it, or without it.
    """

    form: Form
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    required: bool = False
    when: tuple[str, Any] | None = None
    rule: str = "setting-value"
    why: str = ""

    @property
    def expected(self) -> str:
        """What a message asks for."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if math.isinf(self.low):
            return self.form.value
        return f"{self.form.value} from {self.low:g} to {self.high:g}"


_ALGORITHM = re.compile(
    r"ring|oneRing|doubleBinaryTree|halvingDoubling|oneHalvingDoubling|(?:direct|oneDirect)(.*)",
    re.DOTALL,
)

# ASTRA-sim reads any number. Upper bounds without a `why` are limits of plausibility, chosen here
# far beyond real hardware: a larger value is a slip of the unit or of the exponent.
_DAY_NS = 86_400e9

_NO_DEFAULT = "ASTRA-sim has no default for it and reads uninitialised memory"

_DELAY = Key(Form.INTEGER, 0, 1e9)
_COST = Key(Form.REAL, 0, 1e9)
_SWITCH = Key(Form.SWITCH, rule="switch-number")
_IMPLEMENTATION = Key(Form.ALGORITHMS, rule="algorithms")
_CUSTOM = Key(Form.TRACE)

SYSTEM: dict[str, Key] = {
    "scheduling-policy": Key(
        Form.TEXT,
        choices=("LIFO", "FIFO", "EXPLICIT"),
        required=True,
        rule="system-choice",
        why=_NO_DEFAULT,
    ),
    "collective-optimization": Key(
        Form.TEXT,
        choices=("baseline", "localBWAware"),
        required=True,
        rule="system-choice",
        why=_NO_DEFAULT,
    ),
    "preferred-dataset-splits": Key(
        Form.INTEGER,
        1,
        4096,
        required=True,
        rule="dataset-splits",
        why="it divides every collective's size",
    ),
    "active-chunks-per-dimension": Key(
        Form.INTEGER, 1, INT32, why="below 1 no collective starts and every rank stalls"
    ),
    "endpoint-delay": _DELAY,
    "local-reduction-delay": _DELAY,
    "L": _COST,
    "o": _COST,
    "g": _COST,
    "G": _COST,
    "model-shared-bus": Key(Form.INTEGER, 0, 1),
    "peak-perf": Key(
        Form.REAL,
        1e-6,
        1e9,
        required=True,
        when=("roofline-enabled", 1),
        rule="roofline-configuration",
        why="TFLOP/s; the roofline divides by it",
    ),
    "local-mem-bw": Key(
        Form.REAL,
        1e-3,
        1e12,
        required=True,
        why="GB/s; every reduction, and the roofline, divide by it",
    ),
    "roofline-enabled": _SWITCH,
    "trace-enabled": _SWITCH,
    "replay-only": _SWITCH,
    "track-local-mem": _SWITCH,
    "local-mem-trace-filename": Key(Form.TEXT),
    "all-reduce-implementation": _IMPLEMENTATION,
    "all-gather-implementation": _IMPLEMENTATION,
    "reduce-scatter-implementation": _IMPLEMENTATION,
    "all-to-all-implementation": _IMPLEMENTATION,
    "all-reduce-implementation-custom": _CUSTOM,
    "all-gather-implementation-custom": _CUSTOM,
    "reduce-scatter-implementation-custom": _CUSTOM,
    "all-to-all-implementation-custom": _CUSTOM,
    "per-node-custom-implementation": Key(Form.TEXT),
}
"""Of the system JSON."""

_PER_NODE = ("memory-type", "PER_NODE_MEMORY_EXPANSION")

MEMORY: dict[str, Key] = {
    "memory-type": Key(
        Form.TEXT,
        choices=(
            "NO_MEMORY_EXPANSION",
            "PER_NODE_MEMORY_EXPANSION",
            "PER_NPU_MEMORY_EXPANSION",
            "MEMORY_POOL",
        ),
        required=True,
        why=_NO_DEFAULT,
    ),
    "num-nodes": Key(Form.INTEGER, 1, INT32, required=True, when=_PER_NODE),
    "num-npus-per-node": Key(Form.INTEGER, 1, INT32, required=True, when=_PER_NODE),
    "remote-mem-latency": Key(Form.INTEGER, 0, 2**63 - 1),
    "remote-mem-bw": Key(Form.INTEGER, 0, 2**63 - 1),
}
"""Of the remote memory's JSON."""

NETWORK: dict[str, Key] = {
    "topology": Key(Form.TEXT, choices=("Ring", "FullyConnected", "Switch")),
    "npus_count": Key(Form.INTEGER, 2, INT32),
    "bandwidth": Key(Form.REAL, 1e-3, 1e9, why="GB/s"),
    "latency": Key(Form.REAL, 0, _DAY_NS / 1e3, why="ns"),
}
"""Of the network's YAML; each is a list with one entry per dimension."""

_LEVELS = ("trace", "debug", "info", "warn", "err", "critical", "off")

_FILE = {"filename": str}
_ROTATING = {"base_filename": str, "max_size": str, "max_files": int}
_DAILY = {"base_filename": str, "rotation_hour": int, "rotation_minute": int}

_SINKS: dict[str, dict[str, type]] = {
    f"{name}_{threads}": needs
    for threads in ("st", "mt")
    for name, needs in {
        "stdout_sink": dict[str, type](),
        "stderr_sink": dict[str, type](),
        "color_stdout_sink": dict[str, type](),
        "color_stderr_sink": dict[str, type](),
        "null_sink": dict[str, type](),
        "syslog_sink": dict[str, type](),
        "basic_file_sink": _FILE,
        "rotating_file_sink": _ROTATING,
        "daily_file_sink": _DAILY,
    }.items()
}
"""Types of sinks of the logging TOML, and the fields that each needs."""


def check_settings(
    file: str, values: Mapping[str, Any], schema: Mapping[str, Key], report: Report
) -> None:
    """Check the values of a JSON file against its table."""
    for name, key in schema.items():
        read = key.when is None or values.get(key.when[0]) == key.when[1]
        if name not in values:
            if key.required and read:
                _report(file, name, None, key, report)
            continue
        value = values[name]
        if not _has_form(value, key.form):
            if key.form is Form.SWITCH:
                message = (
                    f"{name} is {shown(value)}; ASTRA-sim compares it with the number 0, so that "
                    "even false turns it on: write 0 or 1"
                )
                report.add("switch-number", file, None, message)
            else:
                message = f"{name} is {_shown(value)}; expected {key.expected}, or ASTRA-sim throws"
                report.add("setting-type", file, None, message)
        elif read and not _works(value, key):
            _report(file, name, value, key, report)
    _check_names(file, values, schema, report)


def _shown(value: Any) -> str:
    return "null" if value is None else shown(value)


def _report(file: str, name: str, value: Any, key: Key, report: Report) -> None:
    why = f": {key.why}" if key.why else ""
    message = f"{name} is {shown(value)}; expected {key.expected}{why}"
    report.add(key.rule, file, None, message)


def _has_form(value: Any, form: Form) -> bool:
    match form:
        case Form.INTEGER:  # nlohmann makes an int of a bool
            return isinstance(value, int | float)
        case Form.REAL | Form.SWITCH:
            return isinstance(value, int | float) and not isinstance(value, bool)
        case Form.TEXT:
            return isinstance(value, str)
        case Form.ALGORITHMS | Form.TRACE:
            return isinstance(value, list) and all(
                isinstance(entry, str) for entry in cast("list[Any]", value)
            )


def _works(value: Any, key: Key) -> bool:
    match key.form:
        case Form.INTEGER:
            return key.low <= value <= key.high and value == math.trunc(value)
        case Form.REAL:
            return key.low <= value <= key.high
        case Form.TEXT:
            return not key.choices or value in key.choices
        case Form.SWITCH:
            return True
        case Form.ALGORITHMS:
            return all(is_algorithm(name) for name in value)
        case Form.TRACE:
            return len(value) == 1


def is_algorithm(name: str) -> bool:
    """Whether ASTRA-sim knows an algorithm, and it ends: `direct0` never sends a message."""
    match = _ALGORITHM.fullmatch(name)
    if match is None:
        return False
    if not match[1]:
        return True
    window = stoi(match[1][:5])
    return window is not None and (window == -1 or window >= 1)


def _check_names(
    file: str, values: Mapping[str, Any], schema: Mapping[str, Key], report: Report
) -> None:
    """Report keys that are not read and look like one that is and is not given."""
    absent = [name for name in schema if len(name) > 1 and name not in values]
    for name in values:
        if name in schema:
            continue
        near = difflib.get_close_matches(name.lower().replace("_", "-"), absent, cutoff=0.9)
        if near:
            message = f"{name} is not read by ASTRA-sim; did you mean {near[0]}?"
            report.add("setting-name", file, None, message)


def check_network_entry(
    name: str, entry: str | None, read: Callable[[str], float | None], key: Key
) -> str:
    """Return what is wrong with one entry of a list of the network file, "" when nothing is."""
    value = None if entry is None else read(entry)
    if value is not None and key.low <= value <= key.high:
        return ""
    unit = f" ({key.why})" if key.why else ""
    text = "a nested value" if entry is None else repr(entry[:40])
    return f"{name} holds {text}; each entry must be {key.expected}{unit}"


def check_logging(file: str, values: Mapping[str, Any], report: Report) -> None:
    """Check the logging TOML as spdlog_setup reads it: it throws on all that is reported."""
    for message in _logging_faults(values):
        report.add("logging-configuration", file, None, message)


def _logging_faults(values: Mapping[str, Any]) -> list[str]:
    faults: list[str] = []
    sinks: set[str] = set()
    for sink in _tables(values, "sink", faults):
        name, kind = sink.get("name"), sink.get("type")
        if not isinstance(name, str):
            faults.append("a [[sink]] has no name; give it one")
            continue
        sinks.add(name)
        if not isinstance(kind, str) or kind not in _SINKS:
            faults.append(
                f"sink {name} has type {shown(kind)}; expected one of {', '.join(_SINKS)}"
            )
            continue
        for field, needed in _SINKS[kind].items():
            if type(sink.get(field)) is not needed:
                faults.append(f"sink {name}, a {kind}, has {field} {shown(sink.get(field))}")
        faults.extend(_level_faults(f"sink {name}", sink, ("level",)))
    named = {
        kind: {table.get("name") for table in _tables(values, kind, None)}
        for kind in ("pattern", "thread_pool")
    }
    for logger in _tables(values, "logger", faults):
        name, uses = logger.get("name"), logger.get("sinks")
        if not isinstance(name, str):
            faults.append("a [[logger]] has no name; give it one")
            continue
        if not isinstance(uses, list):
            faults.append(f"logger {name} has no list of sinks")
            continue
        unknown = [one for one in cast("list[Any]", uses) if one not in sinks]
        if unknown:
            faults.append(f"logger {name} names sink {shown(unknown[0])}, which is not defined")
        if logger.get("type", "sync") not in ("sync", "async"):
            faults.append(f"logger {name} has type {shown(logger['type'])}; expected sync or async")
        for kind in ("pattern", "thread_pool"):
            if kind in logger and logger[kind] not in named[kind]:
                faults.append(f"logger {name} names {kind} {shown(logger[kind])}, not defined")
        faults.extend(_level_faults(f"logger {name}", logger, ("level", "flush_level")))
    return faults


def _tables(
    values: Mapping[str, Any], kind: str, faults: list[str] | None
) -> list[Mapping[str, Any]]:
    """Return the tables [[kind]]; if they are needed, their absence is a fault."""
    tables = values.get(kind)
    if isinstance(tables, list) and tables:
        entries = cast("list[Any]", tables)
        return [cast("Mapping[str, Any]", entry) for entry in entries if isinstance(entry, Mapping)]
    if faults is not None:
        faults.append(f"no [[{kind}]]; spdlog_setup needs at least one")
    return []


def _level_faults(what: str, table: Mapping[str, Any], fields: tuple[str, ...]) -> list[str]:
    return [
        f"{what} has {field} {shown(table[field])}; expected one of {', '.join(_LEVELS)}"
        for field in fields
        if field in table and table[field] not in _LEVELS
    ]
