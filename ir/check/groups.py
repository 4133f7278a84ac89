"""The file of process groups of a run, with its rules."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onerank.ir.check.configuration import as_list, read_json, shown
from onerank.ir.check.findings import Report
from onerank.ir.comm_groups import NAMES, group_files

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
