"""The settings that ASTRA-sim reads from its configuration files, as tables.

Read from the source of master 518bd51: `Sys::initialize_sys`, `CollectiveImplLookup`,
`AnalyticalRemoteMemory`, the analytical backend's `NetworkParser` and `spdlog_setup`. Keys that are
not in a table are not read by ASTRA-sim.
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
    """The type of a value; ASTRA-sim throws on any other type.

    nlohmann's JSON converts true and false to `int` and `float`, and throws for wider types.
    """

    INTEGER = "an integer"  # int
    WIDE_INTEGER = "a whole number"  # uint64_t
    SINGLE = "a real number"  # float
    REAL = "a number"  # double
    TEXT = "a string"
    SWITCH = "0 or 1"
    ALGORITHMS = "a list of algorithms"
    TRACE = "a list of one path"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        form: its type.
        low: least value that works.
        high: greatest value that works, or that is plausible: beyond it times overflow.
        choices: the texts that are known; any if empty.
        required: whether ASTRA-sim has no usable default.
        when: another key and its value, without which the value has no effect.
        read_when: another key and its value, without which the key is not even read.
        harmless: whether values that do not work leave the simulated time as meant.
        rule: code of the finding for a value that does not work.
        why: what ASTRA-sim does with the value, or without it.
    """

    form: Form
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    required: bool = False
    when: tuple[str, Any] | None = None
    read_when: tuple[str, Any] | None = None
    harmless: bool = False
    rule: str = "setting-value"
    why: str = ""

    @property
    def expected(self) -> str:
        """The expected values, as a message names them."""
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

_DELAY = Setting(Form.INTEGER, 0, 1e9)
# ASTRA-sim computes the delays of memory traffic (LogGP) only with model-shared-bus 1. It casts
# L, o and g to unsigned integers.
_ON_BUS = ("model-shared-bus", 1)
_BUS_COST = Setting(Form.SINGLE, 0, 1e9, when=_ON_BUS)
_SWITCH = Setting(Form.SWITCH, rule="switch-number")
_IMPLEMENTATION = Setting(Form.ALGORITHMS, rule="algorithms")
_CUSTOM = Setting(Form.TRACE)

SYSTEM: dict[str, Setting] = {
    "scheduling-policy": Setting(
        Form.TEXT,
        choices=("LIFO", "FIFO", "EXPLICIT"),
        required=True,
        rule="system-choice",
        why=_NO_DEFAULT,
    ),
    "collective-optimization": Setting(
        Form.TEXT,
        choices=("baseline", "localBWAware"),
        required=True,
        rule="system-choice",
        why=_NO_DEFAULT,
    ),
    "preferred-dataset-splits": Setting(
        Form.INTEGER,
        1,
        4096,
        required=True,
        rule="dataset-splits",
        why="it divides every collective's size",
    ),
    "active-chunks-per-dimension": Setting(
        Form.INTEGER, 1, INT32, why="below 1 no collective starts and every rank stalls"
    ),
    "endpoint-delay": _DELAY,
    "local-reduction-delay": Setting(Form.INTEGER, 0, 1e9, when=_ON_BUS),
    "L": _BUS_COST,
    "o": _BUS_COST,
    "g": _BUS_COST,
    "G": _BUS_COST,
    "model-shared-bus": Setting(
        Form.INTEGER, 0, 1, harmless=True, why="ASTRA-sim takes any number but 1 as 0"
    ),
    "peak-perf": Setting(
        Form.REAL,
        1e-6,
        1e9,
        required=True,
        when=("roofline-enabled", 1),
        rule="roofline-configuration",
        why="TFLOP/s; the roofline divides by it",
    ),
    "local-mem-bw": Setting(
        Form.REAL,
        1e-3,
        1e12,
        required=True,
        why="GB/s; every reduction, and the roofline, divide by it",
    ),
    "roofline-enabled": _SWITCH,
    "trace-enabled": Setting(Form.SWITCH, rule="switch-number", harmless=True),
    "replay-only": _SWITCH,
    "track-local-mem": _SWITCH,
    "local-mem-trace-filename": Setting(Form.TEXT),
    "all-reduce-implementation": _IMPLEMENTATION,
    "all-gather-implementation": _IMPLEMENTATION,
    "reduce-scatter-implementation": _IMPLEMENTATION,
    "all-to-all-implementation": _IMPLEMENTATION,
    "all-reduce-implementation-custom": _CUSTOM,
    "all-gather-implementation-custom": _CUSTOM,
    "reduce-scatter-implementation-custom": _CUSTOM,
    "all-to-all-implementation-custom": _CUSTOM,
    "per-node-custom-implementation": Setting(Form.TEXT),
}
"""Settings of the system JSON."""

_PER_NODE = ("memory-type", "PER_NODE_MEMORY_EXPANSION")

MEMORY: dict[str, Setting] = {
    "memory-type": Setting(
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
    # These values matter only for memory nodes, which the rule host-node reports. ASTRA-sim
    # allocates a queue per node at the start, so a huge number ends it.
    "num-nodes": Setting(Form.INTEGER, high=1e6, read_when=_PER_NODE),
    "num-npus-per-node": Setting(Form.INTEGER, read_when=_PER_NODE),
    "remote-mem-latency": Setting(Form.WIDE_INTEGER),
    "remote-mem-bw": Setting(Form.WIDE_INTEGER),
}
"""Settings of the remote memory's JSON."""

NETWORK: dict[str, Setting] = {
    "topology": Setting(Form.TEXT, choices=("Ring", "FullyConnected", "Switch")),
    "npus_count": Setting(Form.INTEGER, 2, INT32),
    "bandwidth": Setting(Form.REAL, 1e-3, 1e9, why="GB/s"),
    "latency": Setting(Form.REAL, 0, _DAY_NS / 1e3, why="ns"),
}
"""Settings of the network's YAML; each is a list with one entry per dimension."""

_LEVELS = ("trace", "debug", "info", "warn", "err", "critical", "off")

_FILE = {"filename": str}
_ROTATING = {"base_filename": str, "max_size": str, "max_files": int}
_DAILY = {"base_filename": str, "rotation_hour": int, "rotation_minute": int}

# Types of sinks of the logging TOML, and the fields that each needs.
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


def check_settings(
    file: str, values: Mapping[str, Any], schema: Mapping[str, Setting], report: Report
) -> None:
    """Check the values of a JSON file against its table."""
    for name, key in schema.items():
        if not _holds(key.read_when, values):
            continue
        in_effect = _holds(key.when, values)
        if name not in values:
            if key.required and in_effect:
                _report(file, name, None, key, report)
            continue
        value = values[name]
        if not _has_form(value, key.form):
            if key.form is Form.SWITCH:
                message = (
                    f"{name} is {shown(value)}; ASTRA-sim compares it with the number 0, so that "
                    "even false turns it on: write 0 or 1"
                )
                report.add("switch-number", file, None, message, is_note=key.harmless)
            else:
                message = f"{name} is {_shown(value)}; expected {key.expected}, or ASTRA-sim throws"
                report.add("setting-type", file, None, message)
        elif in_effect and not _works(value, key):
            _report(file, name, value, key, report)
    _check_names(file, values, schema, report)


def _holds(condition: tuple[str, Any] | None, values: Mapping[str, Any]) -> bool:
    return condition is None or values.get(condition[0]) == condition[1]


def _shown(value: Any) -> str:
    return "null" if value is None else shown(value)


def _report(file: str, name: str, value: Any, key: Setting, report: Report) -> None:
    why = f": {key.why}" if key.why else ""
    message = f"{name} is {shown(value)}; expected {key.expected}{why}"
    report.add(key.rule, file, None, message, is_note=key.harmless)


def _has_form(value: Any, form: Form) -> bool:
    match form:
        case Form.INTEGER | Form.SINGLE:
            return isinstance(value, int | float)
        case Form.REAL | Form.WIDE_INTEGER | Form.SWITCH:
            return isinstance(value, int | float) and not isinstance(value, bool)
        case Form.TEXT:
            return isinstance(value, str)
        case Form.ALGORITHMS | Form.TRACE:
            return isinstance(value, list) and all(
                isinstance(entry, str) for entry in cast("list[Any]", value)
            )


def _works(value: Any, key: Setting) -> bool:
    match key.form:
        case Form.INTEGER:
            whole = math.isinf(key.low) or value == math.trunc(value)
            return key.low <= value <= key.high and whole
        case Form.REAL | Form.SINGLE | Form.WIDE_INTEGER:
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
    """Return whether ASTRA-sim knows an algorithm, and it ends: `direct0` never sends a message."""
    match = _ALGORITHM.fullmatch(name)
    if match is None:
        return False
    if not match[1]:
        return True
    window = stoi(match[1][:5])
    return window is not None and (window == -1 or window >= 1)


def _check_names(
    file: str, values: Mapping[str, Any], schema: Mapping[str, Setting], report: Report
) -> None:
    """Note keys that ASTRA-sim does not read and that resemble a key that is not given."""
    absent = [name for name in schema if len(name) > 1 and name not in values]
    for name in values:
        if name in schema:
            continue
        # The cutoff is high, so that only slips of spelling are noted and not the keys of another
        # version.
        near = difflib.get_close_matches(name.lower().replace("_", "-"), absent, cutoff=0.9)
        if near:
            message = f"{name} is not read by ASTRA-sim; did you mean {near[0]}?"
            report.add("setting-name", file, None, message, is_note=True)


def check_network_entry(
    name: str, entry: str | None, read: Callable[[str], float | None], key: Setting
) -> str:
    """Return the problem of an entry of a list of the network file, "" for a valid entry."""
    value = None if entry is None else read(entry)
    if value is not None and key.low <= value <= key.high:
        return ""
    unit = f" ({key.why})" if key.why else ""
    text = "a nested value" if entry is None else repr(entry[:40])
    return f"{name} holds {text}; each entry must be {key.expected}{unit}"


def check_logging(file: str, values: Mapping[str, Any], report: Report) -> None:
    """Check the logging TOML; spdlog_setup throws on everything that is reported."""
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
            value = sink.get(field)
            accepted = _SINK_VALUES.get(field, _any_value)
            if type(value) is not needed or not accepted(value):
                faults.append(f"sink {name}, a {kind}, has {field} {shown(value)}")
        faults.extend(_level_faults(f"sink {name}", sink, ("level",)))
    named = {
        kind: {table.get("name") for table in _tables(values, kind, None)}
        for kind in ("pattern", "thread_pool")
    }
    loggers: set[str] = set()
    for logger in _tables(values, "logger", faults):
        name, uses = logger.get("name"), logger.get("sinks")
        if not isinstance(name, str):
            faults.append("a [[logger]] has no name; give it one")
            continue
        if name in loggers:
            faults.append(f"logger {name} is defined twice; remove one")
        loggers.add(name)
        if not isinstance(uses, list):
            faults.append(f"logger {name} has no list of sinks")
            continue
        unknown = [sink for sink in cast("list[Any]", uses) if sink not in sinks]
        if unknown:
            faults.append(f"logger {name} names sink {shown(unknown[0])}, which is not defined")
        faults.extend(_type_faults(name, logger))
        for kind in ("pattern", "thread_pool"):
            if isinstance(logger.get(kind), str) and logger[kind] not in named[kind]:
                faults.append(f"logger {name} names {kind} {shown(logger[kind])}, not defined")
        faults.extend(_level_faults(f"logger {name}", logger, ("level", "flush_level")))
    return faults


def _any_value(_: Any) -> bool:
    return True


# spdlog_setup accepts a lower-case suffix in its pattern and then throws on it.
_MAX_SIZE = re.compile(r"\s*\d+\s*[TGMK]?:?[bB]?\s*")

# Accepted values of the fields of sinks.
_SINK_VALUES: dict[str, Callable[[Any], bool]] = {
    "max_size": lambda text: _MAX_SIZE.fullmatch(text) is not None,
    "rotation_hour": lambda hour: 0 <= hour < 24,
    "rotation_minute": lambda minute: 0 <= minute < 60,
}


def _type_faults(name: str, logger: Mapping[str, Any]) -> list[str]:
    kind = logger.get("type")
    if not isinstance(kind, str) or kind == "sync":
        return []  # a value of another type counts as absent
    if kind == "async":
        # ASTRA-sim replaces spdlog's thread pool after it has set up this file, so that an
        # asynchronous logger prints "thread pool doesn't exist anymore" and nothing else.
        return [f"logger {name} has type async, and ASTRA-sim drops its lines: use sync"]
    return [f"logger {name} has type {shown(kind)}; expected sync"]


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
        # A level that is no string counts as absent.
        if isinstance(table.get(field), str) and table[field] not in _LEVELS
    ]
