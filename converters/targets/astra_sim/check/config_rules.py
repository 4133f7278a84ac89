"""Rules on the configuration of a run: system, network, memory, logging, groups and run script."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from onerank.converters.targets.astra_sim.check.config_schema import (
    MEMORY,
    NETWORK,
    SYSTEM,
    check_logging,
    check_network_entry,
    check_settings,
    is_algorithm,
)
from onerank.converters.targets.astra_sim.check.config_text import (
    Script,
    read_json,
    read_toml,
    read_yaml_lists,
    read_yaml_paths,
    shown,
    stoi,
    yaml_integer,
    yaml_real,
)
from onerank.converters.targets.astra_sim.check.findings import Report
from onerank.converters.targets.astra_sim.config_files import NETWORK_FILE, SCRIPT_FILE
from onerank.ir.chakra.third_party_traces import GROUP_FILES, group_files
from onerank.ir.enums import Collective

ALGORITHMS: dict[int, str] = {
    Collective.ALL_REDUCE: "all-reduce-implementation",
    Collective.ALL_GATHER: "all-gather-implementation",
    Collective.REDUCE_SCATTER: "reduce-scatter-implementation",
    Collective.ALL_TO_ALL: "all-to-all-implementation",
}
"""Collectives that are simulated, with the key of the system JSON that names their algorithms."""


@dataclass(frozen=True, slots=True)
class System:
    """The settings of a system JSON, on which the rules for a workload depend.

    Attributes:
        file: its name.
        values: the JSON object.
    """

    file: str
    values: dict[str, Any]

    def is_on(self, switch: str) -> bool:
        """Return whether ASTRA-sim takes a switch as on: anything that is not the number 0."""
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
        """Return the time of a compute node in ns, in the floating-point steps of ASTRA-sim."""
        # Another order of the operations would round differently, and ASTRA-sim truncates to whole
        # nanoseconds.
        peak = self.number("peak-perf") * 1e12
        bandwidth = self.number("local-mem-bw") * 1e9
        if num_ops <= 0 or tensor_size <= 0 or peak <= 0 or bandwidth <= 0:
            return None
        speed = min(bandwidth * (float(num_ops) / float(tensor_size)), peak)
        if speed < sys.float_info.min:
            return None
        seconds = float(num_ops) / speed
        return int(seconds * 1e9) if math.isfinite(seconds * 1e9) else None


def read_system(path: Path, report: Report) -> System | None:
    """Read a system JSON and check what does not depend on the workload; None when absent."""
    values = read_json(path, report)
    if values is None:
        return None
    # The switch counts as 1 whatever turns it on.
    system = System(path.name, values)
    on = {"roofline-enabled": int(system.is_on("roofline-enabled"))}
    switch = values.get("roofline-enabled")
    checked = {**values, **on} if type(switch) in (int, float) else values
    check_settings(path.name, checked, SYSTEM, report)
    if system.is_on("replay-only"):
        report.add(
            "replay-only",
            path.name,
            None,
            "replay-only is on: every node lasts its duration_micros, no bytes move and no rank "
            "waits for another: write 0",
        )
    return system


@dataclass(frozen=True, slots=True)
class Use:
    """A collective in use: its type, and how many ranks take part."""

    collective: int
    ranks: int


def check_custom_algorithms(
    directory: Path, system: System, uses: set[Use], report: Report
) -> None:
    """Check that the files of custom algorithms exist where collectives use them.

    A path P means one trace per rank of the group, P.0.et, P.1.et and so on.
    """
    for collective, key in ALGORITHMS.items():
        ranks = max((use.ranks for use in uses if use.collective == collective), default=0)
        paths = as_list(system.values.get(f"{key}-custom")) or []
        for path in paths if len(paths) == 1 else []:
            if missing := _missing_traces(directory, path, ranks):
                report.add("algorithms", system.file, None, f"{key}-custom is {missing}")
    per_node = system.values.get(_PER_NODE_ALGORITHMS)
    if not isinstance(per_node, str):
        return
    file = directory / per_node
    paths_by_node = read_yaml_paths(file, report) if file.is_file() else {}
    if not file.is_file():
        message = f"{_PER_NODE_ALGORITHMS} is {shown(per_node)}, and there is no such file"
        report.add("algorithms", system.file, None, message)
    ranks = max((use.ranks for use in uses), default=0)
    for path in sorted(set((paths_by_node or {}).values())):
        if missing := _missing_traces(directory, path, min(ranks, 1)):
            report.add("algorithms", system.file, None, f"{_PER_NODE_ALGORITHMS} is {missing}")


_PER_NODE_ALGORITHMS = "per-node-custom-implementation"


def _missing_traces(directory: Path, path: object, ranks: int) -> str:
    """Return which trace of a custom algorithm is missing; "" for none."""
    names = [f"{path}.{rank}.et" for rank in range(ranks)]
    missing = [name for name in names if not (directory / name).is_file()]
    return f"{shown(path)}, and there is no {missing[0]}: ASTRA-sim ends" if missing else ""


def check_algorithms(
    system: System, npus: list[int], world: int, uses: set[Use], report: Report
) -> None:
    """Check that every collective in use has an algorithm that serves its ranks."""
    for collective, key in ALGORITHMS.items():
        group_sizes = sorted({use.ranks for use in uses if use.collective == collective})
        value: Any = system.values.get(key)
        if f"{key}-custom" in system.values:
            continue
        if value is None and key not in system.values:
            if group_sizes:
                message = f"no {key}; the workload uses it: list one algorithm per dimension"
                report.add("algorithms", system.file, None, message)
            continue
        names = as_list(value)
        if names is None or not all(isinstance(n, str) and is_algorithm(n) for n in names):
            continue  # reported with the settings
        for problem in _algorithm_faults(
            collective, [str(n) for n in names], npus, world, group_sizes
        ):
            report.add("algorithms", system.file, None, f"{key} is {shown(value)}{problem}")


def _algorithm_faults(
    collective: int, names: list[str], npus: list[int], world: int, sizes: list[int]
) -> list[str]:
    """Return the problems of the algorithms of a collective that groups of `sizes` use."""
    dimensions = len(npus)
    count = (
        f" and the network has {dimensions} dimension(s); "
        "give a list of one algorithm per dimension"
    )
    # oneRing, oneDirect and oneHalvingDoubling span all dimensions.
    spans = bool(names) and names[0].startswith("one")
    if len(names) > dimensions:
        return [count]
    if not sizes:
        return []
    if not names or (len(names) < dimensions and not spans and world in sizes):
        return [count]
    faults: list[str] = []
    if any(name.startswith("one") for name in names[1:]):
        faults.append("; an algorithm of all dimensions must stand first")
    if collective != Collective.ALL_REDUCE and "doubleBinaryTree" in names:
        faults.append("; doubleBinaryTree is an all-reduce only")
    halves = [place for place, name in enumerate(names) if "alvingDoubling" in name]
    if halves and collective == Collective.ALL_TO_ALL:
        return [*faults, "; halvingDoubling does no all-to-all: ASTRA-sim ends"]
    for size in sizes:
        if size == world:
            ringed = [world] if spans else [npus[place] for place in halves]
        elif len(names) > 1:
            continue  # ASTRA-sim takes a ring for a part of the ranks
        else:
            ringed = [size]
            if names[0] == "doubleBinaryTree":
                faults.append(f"; doubleBinaryTree crashes on a group of {size} of {world} ranks")
        odd = [ranks for ranks in ringed if halves and ranks & (ranks - 1)]
        if odd:
            faults.append(
                f"; halvingDoubling stalls on {odd[0]} ranks, which are no power of two: use ring"
            )
    return list(dict.fromkeys(faults))


def read_network(path: Path, report: Report) -> list[int] | None:
    """Return the NPUs of each dimension, or None when the file is absent or faulty."""
    values = read_yaml_lists(path, NETWORK, report)
    if values is None:
        return None
    faults = [
        f"no {key}; expected a line `{key}: [ ... ]` with one entry per dimension"
        if key not in values
        else f"{key} is not a list; expected `{key}: [ ... ]` with one entry per dimension"
        for key in NETWORK
        if values.get(key) is None
    ]
    lists = {key: entries for key in NETWORK if (entries := values.get(key)) is not None}
    topologies = lists.get("topology")
    if topologies is not None and not topologies:
        faults.append("topology is empty; expected one entry per dimension")
    faults.extend(
        f"{key} has {len(entries)} entries and topology {len(topologies)}; "
        "both need one per dimension"
        for key, entries in lists.items()
        if topologies is not None and len(entries) != len(topologies)
    )
    for key, entries in lists.items():
        read = _NETWORK_READERS.get(key)
        for entry in entries:
            if read is not None:
                faults.append(check_network_entry(key, entry, read, NETWORK[key]))
            elif entry not in NETWORK[key].choices:
                faults.append(f"unknown topology {entry!r}; expected {NETWORK[key].expected}")
    faults = [fault for fault in faults if fault]
    for fault in faults:
        report.add("network-dimensions", path.name, None, fault)
    if faults:
        return None
    return [yaml_integer(entry or "") or 0 for entry in lists["npus_count"]]


_NETWORK_READERS: dict[str, Callable[[str], float | None]] = {
    "npus_count": yaml_integer,
    "bandwidth": yaml_real,
    "latency": yaml_real,
}


def check_network(prefix: str, npus: list[int], world: int, script: Script, report: Report) -> None:
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
    if len(npus) > 1 and script.is_congestion_aware:
        report.add(
            "congestion-aware",
            SCRIPT_FILE,
            None,
            f"{SCRIPT_FILE} runs the congestion-aware backend, which has one dimension, and "
            f"{NETWORK_FILE} has {len(npus)}: run AstraSim_Analytical_Congestion_Unaware",
        )


def check_memory(path: Path, report: Report) -> None:
    """Check the remote memory's JSON."""
    values = read_json(path, report, any_value=True)
    if values is not None:
        check_settings(path.name, values, MEMORY, report)


def check_logging_file(path: Path, report: Report) -> None:
    """Check the logging TOML."""
    values = read_toml(path, report)
    if values is not None:
        check_logging(path.name, values, report)


def as_list(value: Any) -> list[Any] | None:
    """Return a value that is a list, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


GROUPS_FILE = GROUP_FILES[0]


@dataclass(frozen=True, slots=True)
class ConfiguredGroups:
    """Process groups of a run.

    Attributes:
        usable: name -> ranks in order, of the groups without fault.
        faulty: names of groups with findings.
        given: whether there is a group file.
        members: ranks of the usable groups, as sets.
        file: its name.
        faults: name of a faulty group -> its problem.
        used: names of faulty groups that nodes use; filled in while nodes are read.
    """

    usable: dict[str, tuple[int, ...]]
    faulty: frozenset[str]
    given: bool
    members: dict[str, frozenset[int]]
    file: str
    faults: dict[str, str] = field(default_factory=dict[str, str])
    used: set[str] = field(default_factory=set[str])

    def report_faults(self, report: Report) -> None:
        """Report the faulty groups; a group that no node uses is a note."""
        for name, message in self.faults.items():
            is_note = name not in self.used
            report.add("group-ranks", self.file, None, message, is_note=is_note)


def read_groups(path: Path, world: int, report: Report) -> ConfiguredGroups:
    """Read the group JSON and check it against the number of ranks.

    ASTRA-sim reads a key with `std::stoi`, in the order of the texts: "02" is group 2. It throws on
    ranks that are no numbers, so these are findings at once; other faults may wait until it is
    known whether a node uses the group (`ConfiguredGroups.report_faults`).
    """
    values = read_json(path, report)
    if values is None:
        return ConfiguredGroups({}, frozenset(), given=path.exists(), members={}, file=path.name)
    usable: dict[str, tuple[int, ...]] = {}
    used: set[str] = set()
    faults: dict[str, str] = {}
    # nlohmann sorts the keys of an object, and of two keys with one number the later one counts.
    for key, listed in sorted(values.items()):
        number = stoi(key)
        if number is None or number < 1:
            message = f"group {shown(key)}: a key must be an integer from 1 to 2147483647"
            report.add("group-key", path.name, None, message)
            continue
        name = str(number)
        if name in usable or name in faults:
            message = f"group {shown(key)} is group {name} again, and replaces it: remove one"
            report.add("group-key", path.name, None, message)
        ranks = _ranks(listed)
        if problem := _bad_ranks(listed, ranks, world):
            message = (
                f"group {shown(key)} {problem}; list distinct global ranks from 0 to {world - 1}"
            )
            faults[name] = message
            if ranks is None:
                used.add(name)
        else:
            usable[name] = tuple(ranks or ())
    return ConfiguredGroups(
        usable,
        frozenset(faults),
        given=True,
        members={name: frozenset(ranks) for name, ranks in usable.items()},
        file=path.name,
        faults=faults,
        used=used,
    )


def _ranks(value: Any) -> list[int] | None:
    """Return the ranks that ASTRA-sim reads from a group; None where it throws or rounds.

    It walks over any container, and takes each number as an int.
    """
    if isinstance(value, Mapping):
        entries = [entry for _, entry in sorted(cast("Mapping[str, Any]", value).items())]
    else:
        entries = cast("list[Any]", value) if isinstance(value, list) else [value]
    # nlohmann converts 1.0, and true, to an int too.
    whole = all(isinstance(entry, int | float) and entry == int(entry) for entry in entries)
    return [int(entry) for entry in entries] if whole else None


def groups_file(directory: Path, prefix: str, report: Report) -> Path:
    """Return the path of the group file of a set; further group files are reported."""
    files = group_files(directory, f"{prefix}.0.et") or [directory / GROUPS_FILE]
    if len(files) > 1:
        message = f"{files[0].name} holds groups of {prefix} too: remove one"
        report.add("configuration-file", files[1].name, None, message)
    return files[0]


def check_group_path(file: Path, script: Script, report: Report) -> None:
    """Check that the group file's path, as the run script passes it, does not hold "empty"."""
    argument = script.argument("comm-group-configuration")
    path = str(file.resolve()) if argument is None or "$" in argument else argument
    if "empty" in path:
        report.add(
            "group-path",
            file.name,
            None,
            f'the path {path} holds "empty", so that ASTRA-sim ignores the file: rename the folder',
        )


def _bad_ranks(value: Any, ranks: list[int] | None, world: int) -> str:
    """Return the problem of a group's ranks, "" for valid ranks."""
    if ranks is None:
        return f"is {shown(value)}, not a list of integers"
    if not ranks:
        return "has no ranks"
    outside = [rank for rank in ranks if not 0 <= rank < world]
    if outside:
        return f"holds rank {outside[0]}, and there are {world} ranks"
    rank, times = Counter(ranks).most_common(1)[0]
    return f"holds rank {rank} {times} times" if times > 1 else ""
