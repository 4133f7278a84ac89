"""Rules on the configuration of a run: system, network, process groups and run script."""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from onerank.converters.targets.astra_sim.check.findings import Report
from onerank.ir.enums import Collective
from onerank.ir.job.comm_groups import NAMES, group_files

NETWORK_FILE = "network.yml"

MEMORY_FILE = "memory.json"

SCRIPT_FILE = "run.sh"

ALGORITHMS: dict[int, str] = {
    Collective.ALL_REDUCE: "all-reduce-implementation",
    Collective.ALL_GATHER: "all-gather-implementation",
    Collective.REDUCE_SCATTER: "reduce-scatter-implementation",
    Collective.ALL_TO_ALL: "all-to-all-implementation",
}
"""Collectives that are simulated, with the key of the system JSON that names their algorithms."""

_CHOICES = {
    "scheduling-policy": ("LIFO", "FIFO", "EXPLICIT"),
    "collective-optimization": ("baseline", "localBWAware"),
}

_SWITCHES = ("roofline-enabled", "trace-enabled", "replay-only", "track-local-mem")

_NETWORK_LINE = re.compile(r"([A-Za-z_]+):\s*\[([^\[\]]*)\]\s*(?:#.*)?")


@dataclass(frozen=True, slots=True)
class System:
    """What a system JSON says, as far as a workload depends on it.

    Attributes:
        file: its name.
        values: the JSON object.
    """

    file: str
    values: dict[str, Any]

    def is_on(self, switch: str) -> bool:
        """Whether ASTRA-sim takes a switch as on: anything that is not the number 0."""
        value = self.values.get(switch, 0)
        return isinstance(value, bool) or value != 0

    def number(self, key: str) -> float:
        """Return a number, 0 when absent or not a number (ASTRA-sim's default is 0 too)."""
        value = self.values.get(key, 0)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else 0

    @property
    def splits(self) -> int:
        """Chunks a collective is cut into, at least 1."""
        return max(1, int(self.number("preferred-dataset-splits")))

    def roofline_ns(self, num_ops: int, tensor_size: int) -> int | None:
        """Return the time ASTRA-sim gives a compute node, in its own floating-point steps."""
        peak = self.number("peak-perf") * 1e12
        bandwidth = self.number("local-mem-bw") * 1e9
        if num_ops <= 0 or tensor_size <= 0 or peak <= 0 or bandwidth <= 0:
            return None
        speed = min(bandwidth * (float(num_ops) / float(tensor_size)), peak)
        return int(float(num_ops) / speed * 1e9)


def read_system(path: Path, report: Report) -> System | None:
    """Read a system JSON and check what does not depend on the workload; None when absent."""
    values = read_json(path, report)
    if values is None:
        return None
    system = System(path.name, values)
    splits = values.get("preferred-dataset-splits")
    if not isinstance(splits, int) or splits < 1 or splits is True:
        report.add(
            "dataset-splits",
            path.name,
            None,
            f"preferred-dataset-splits is {shown(splits)}; it divides every collective's size "
            "and must be an integer >= 1",
        )
    for key, choices in _CHOICES.items():
        if values.get(key) not in choices:
            report.add(
                "system-choice",
                path.name,
                None,
                f"{key} is {shown(values.get(key))}; expected one of {', '.join(choices)}: "
                "ASTRA-sim has no default for it and reads uninitialised memory",
            )
    for switch in _SWITCHES:
        if isinstance(values.get(switch), bool):
            report.add(
                "switch-number",
                path.name,
                None,
                f"{switch} is {shown(values[switch])}; ASTRA-sim compares it with the number 0, "
                "so that even false turns it on: write 0 or 1",
            )
    if system.is_on("roofline-enabled"):
        for key, unit in (("peak-perf", "TFLOP/s"), ("local-mem-bw", "GB/s")):
            if system.number(key) <= 0:
                report.add(
                    "roofline-configuration",
                    path.name,
                    None,
                    f"roofline-enabled is on and {key} is {shown(values.get(key))}; "
                    f"it must be a number > 0 ({unit})",
                )
    return system


def check_algorithms(system: System, dimensions: int, used: set[int], report: Report) -> None:
    """Check that every collective in use has an algorithm per network dimension."""
    for collective, key in ALGORITHMS.items():
        value: Any = system.values.get(key)
        if value is None:
            if collective in used and f"{key}-custom" not in system.values:
                message = f"no {key}; the workload uses it: list one algorithm per dimension"
                report.add("algorithms", system.file, None, message)
            continue
        names = as_list(value)
        # oneRing, oneDirect and oneHalvingDoubling span all dimensions.
        spans = bool(names) and str(names[0]).startswith("one")
        if names is None or (len(names) != dimensions and not spans):
            report.add(
                "algorithms",
                system.file,
                None,
                f"{key} is {shown(value)} and the network has {dimensions} dimension(s); "
                "give a list of one algorithm per dimension",
            )


def read_network(path: Path, report: Report) -> list[int] | None:
    """Return the NPUs of each dimension, or None when the file is absent or faulty."""
    if not path.exists():
        return None
    values = _read_lists(path, report)
    if values is None:
        return None
    before = len(report)
    for key in ("topology", "npus_count", "bandwidth", "latency"):
        if key not in values:
            message = f"no {key}; expected a line `{key}: [ ... ]` with one entry per dimension"
            report.add("network-dimensions", path.name, None, message)
    topologies = values.get("topology", [])
    for key, entries in values.items():
        if len(entries) != len(topologies) and "topology" in values:
            report.add(
                "network-dimensions",
                path.name,
                None,
                f"{key} has {len(entries)} entries and topology {len(topologies)}; "
                "both need one per dimension",
            )
    unknown = [name for name in topologies if name not in ("Ring", "FullyConnected", "Switch")]
    if unknown:
        message = f"unknown topology {unknown[0]!r}; expected Ring, FullyConnected or Switch"
        report.add("network-dimensions", path.name, None, message)
    for key, (fits, expected) in _NETWORK_NUMBERS.items():
        for entry in values.get(key, []):
            if not fits(entry):
                message = f"{key} holds {entry!r}; each entry must be {expected}"
                report.add("network-dimensions", path.name, None, message)
    return [int(n) for n in values["npus_count"]] if len(report) == before else None


def check_network(prefix: str, npus: list[int], world: int, script: str, report: Report) -> None:
    """Check the network against the number of ranks and the backend the script runs."""
    total = math.prod(npus)
    if total != world:
        product = " * ".join(str(n) for n in npus)
        report.add(
            "network-ranks",
            NETWORK_FILE,
            None,
            f"npus_count is {product} = {total} and {prefix} has {world} ranks; make them equal",
        )
    if len(npus) > 1 and "congestion_aware" in script.lower():
        report.add(
            "congestion-aware",
            SCRIPT_FILE,
            None,
            f"{SCRIPT_FILE} runs the congestion-aware backend, which has one dimension, and "
            f"{NETWORK_FILE} has {len(npus)}: run AstraSim_Analytical_Congestion_Unaware",
        )


def read_script(path: Path) -> str:
    """Return the run script's text, "" if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read_json(path: Path, report: Report) -> dict[str, Any] | None:
    """Return a JSON object, None when it is absent or faulty."""
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, OSError, UnicodeDecodeError) as error:
        message = f"not a JSON object: {error}; expected one as ASTRA-sim reads it"
        report.add("configuration-file", path.name, None, message)
        return None


def _read_lists(path: Path, report: Report) -> dict[str, list[str]] | None:
    values: dict[str, list[str]] = {}
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        match = _NETWORK_LINE.fullmatch(content)
        if match is None:
            report.add(
                "configuration-file",
                path.name,
                None,
                f"line {number}, {content!r}, is not of the form `key: [ a, b ]`, the only form "
                "of yml that this check reads: rewrite the line",
            )
            return None
        values[match[1]] = [entry.strip() for entry in match[2].split(",")] if match[2] else []
    return values


def _npus(entry: str) -> bool:
    return entry.isdecimal() and int(entry) > 1


def _number(entry: str) -> float:
    try:
        return float(entry)
    except ValueError:
        return math.nan


def _positive(entry: str) -> bool:
    return _number(entry) > 0


def _not_negative(entry: str) -> bool:
    return _number(entry) >= 0


_NETWORK_NUMBERS: dict[str, tuple[Callable[[str], bool], str]] = {
    "npus_count": (_npus, "an integer > 1"),
    "bandwidth": (_positive, "a number > 0 (GB/s)"),
    "latency": (_not_negative, "a number >= 0 (ns)"),
}


def as_list(value: Any) -> list[Any] | None:
    """Return a value that is a list, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    return "not given" if value is None else msgspec.json.encode(value).decode()


GROUPS_FILE = NAMES[0]

_GROUP_KEY = re.compile(r"[1-9][0-9]*")

_GROUP_ARGUMENT = re.compile(r"--comm-group-configuration[= ]\s*[\"']?([^\s\"']+)")


@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups of a run.

    Attributes:
        usable: name -> ranks in order, of the groups without fault.
        faulty: names of groups that have findings of their own.
        given: whether there is a group file.
        members: the ranks of the usable ones again, as sets.
        file: its name.
    """

    usable: dict[str, tuple[int, ...]]
    faulty: frozenset[str]
    given: bool
    members: dict[str, frozenset[int]]
    file: str


def read_groups(path: Path, world: int, report: Report) -> Groups:
    """Read the group JSON and check it against the number of ranks."""
    values = read_json(path, report)
    if values is None:
        return Groups({}, frozenset(), given=False, members={}, file=path.name)
    usable: dict[str, tuple[int, ...]] = {}
    for name, ranks in values.items():
        if not _GROUP_KEY.fullmatch(name):
            message = f'group "{name}": a key must be an integer >= 1, without leading zeros'
            report.add("group-key", path.name, None, message)
        elif problem := _bad_ranks(ranks, world):
            message = f'group "{name}" {problem}; list distinct global ranks from 0 to {world - 1}'
            report.add("group-ranks", path.name, None, message)
        else:
            usable[name] = tuple(ranks)
    faulty = frozenset(values) - frozenset(usable)
    members = {name: frozenset(ranks) for name, ranks in usable.items()}
    return Groups(usable, faulty, given=True, members=members, file=path.name)


def groups_file(directory: Path, prefix: str, report: Report) -> Path:
    """Return where the groups of a set lie, or would; of several files the first, reported."""
    found = group_files(directory, f"{prefix}.0.et") or [directory / GROUPS_FILE]
    if len(found) > 1:
        message = f"{found[0].name} holds groups of {prefix} too: remove one"
        report.add("configuration-file", found[1].name, None, message)
    return found[0]


def check_group_path(file: Path, script: str, report: Report) -> None:
    """Check that the group file's path, as the run script passes it, does not hold "empty"."""
    argument = _GROUP_ARGUMENT.search(script)
    literal = argument is not None and "$" not in argument[1]
    path = argument[1] if argument and literal else str(file.resolve())
    if "empty" in path:
        report.add(
            "group-path",
            file.name,
            None,
            f'the path {path} holds "empty", so that ASTRA-sim ignores the file: rename the folder',
        )


def _bad_ranks(value: Any, world: int) -> str:
    """Return what is wrong with a group's ranks, "" when nothing is."""
    ranks = as_list(value)
    if ranks is None or not all(_is_int(rank) for rank in ranks):
        return f"is {shown(value)}, not a list of integers"
    if not ranks:
        return "has no ranks"
    outside = [rank for rank in ranks if not 0 <= rank < world]
    if outside:
        return f"holds rank {outside[0]}, and there are {world} ranks"
    rank, times = Counter(ranks).most_common(1)[0]
    return f"holds rank {rank} {times} times" if times > 1 else ""


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
