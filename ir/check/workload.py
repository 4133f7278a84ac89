"""Check a file, or a folder of one file per rank with the configuration beside it."""

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from onerank.ir.check.configuration import (
    GROUPS_FILE,
    MEMORY_FILE,
    NETWORK_FILE,
    SCRIPT_FILE,
    check_algorithms,
    check_group_path,
    check_network,
    read_groups,
    read_network,
    read_script,
    read_system,
)
from onerank.ir.check.contract import (
    WORLD,
    NodeType,
    Setting,
    check_graph,
    check_nodes,
)
from onerank.ir.check.findings import Finding, Report
from onerank.ir.check.matching import check_matching
from onerank.ir.check.programs import Program
from onerank.ir.check.structure import read_structure
from onerank.ir.errors import FormatError

_RANK_FILE = re.compile(r"(.+)\.(0|[1-9][0-9]*)\.et")


class _Extent(NamedTuple):
    """What of a set is looked at: all where None."""

    ranks: Collection[int] | None
    programs: Sequence[Program] | None


def check(path: Path | str) -> list[Finding]:
    """Check a file or a folder; see `check_file` and `check_workload`."""
    return check_workload(path) if Path(path).is_dir() else check_file(path)


def check_file(path: Path | str) -> list[Finding]:
    """Return the structural faults of one `.et` file.

    Raises:
        FormatError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FormatError(f"{path} is not a file; expected a Chakra trace (`.et`)")
    report = Report()
    read_structure(path, report)
    return report.findings


def check_workload(
    directory: Path | str,
    *,
    read: Collection[int] | None = None,
    programs: Sequence[Program] | None = None,
) -> list[Finding]:
    """Return every fault that would stop ASTRA-sim, or make it report wrong figures.

    Files are taken as sets by PREFIX of PREFIX.RANK.et. A set whose prefix ends in `_roofline`
    runs with system_roofline.json, any other with system.json; all share the other files.
    Ranks are matched with each other only when every file of the set is sound by itself.

    Args:
        directory: the folder.
        read: ranks whose files are read; None for all. Who writes the others from the same step
            knows that they differ in nothing but their groups and peers.
        programs: each rank's communication, in place of what the files hold.

    Raises:
        FormatError: there is no such folder, or no `.et` file in it.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FormatError(f"{directory} is not a folder; expected one of PREFIX.RANK.et files")
    traces = sorted(directory.glob("*.et"))
    if not traces:
        raise FormatError(f"{directory} holds no `.et` file; expected PREFIX.0.et, PREFIX.1.et ...")
    report = Report()
    sets: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in traces:
        match = _RANK_FILE.fullmatch(path.name)
        if match:
            sets[match[1]][int(match[2])] = path
        else:
            message = "not named PREFIX.RANK.et, so that no run reads it: rename or remove it"
            report.add("rank-files", path.name, None, message)
            read_structure(path, report)
    for prefix, files in sets.items():
        _check_set(directory, prefix, files, _Extent(read, programs), report)
    return report.findings


def _check_set(
    directory: Path,
    prefix: str,
    files: dict[int, Path],
    extent: _Extent,
    report: Report,
) -> None:
    world = max(files) + 1
    complete = _check_ranks(prefix, files, world, report)
    script = read_script(directory / SCRIPT_FILE)
    name = "system_roofline.json" if prefix.endswith("_roofline") else "system.json"
    _check_presence(directory, prefix, name, report)
    system = read_system(directory / name, report)
    npus = read_network(directory / NETWORK_FILE, report)
    if npus is not None:
        check_network(prefix, npus, world, script, report)
    groups = read_groups(directory / GROUPS_FILE, world, report)
    programs: list[Program] = []
    named: set[str] = set()
    used: set[int] = set()
    first_on_world: tuple[str, int] | None = None
    for rank, path in sorted(files.items()):
        if extent.ranks is not None and rank not in extent.ranks:
            continue
        program = _check_rank(path, Setting(path.name, rank, world, groups, system), report)
        if program is None:
            complete = False
            continue
        programs.append(program)
        for call in program.issued():
            if call.type == NodeType.COLL:
                used.add(call.collective)
                named.add(call.group)
                if call.group == WORLD and first_on_world is None:
                    first_on_world = (path.name, call.node)
    if named - {WORLD}:
        check_group_path(directory, script, report)
        if first_on_world is not None:
            _report_default_group(*first_on_world, report)
    if system is not None and npus is not None:
        check_algorithms(system, len(npus), used, report)
    if complete:
        check_matching(extent.programs or programs, groups.usable, report)


def _check_rank(path: Path, setting: Setting, report: Report) -> Program | None:
    structure = read_structure(path, report)
    if structure is None:
        return None
    calls = check_nodes(structure.records.nodes, setting, report)
    if not structure.sound:
        return None
    check_graph(structure, setting, report)
    dag = structure.dag
    in_order = [calls.get(node_id) for node_id in dag.ids]
    return Program(path.name, dag, in_order, structure.schedule.order)


def _check_ranks(prefix: str, files: dict[int, Path], world: int, report: Report) -> bool:
    missing = [rank for rank in range(world) if rank not in files]
    if missing:
        report.add(
            "rank-files",
            f"{prefix}.{missing[0]}.et",
            None,
            f"no such file, and there is {prefix}.{world - 1}.et: {len(missing)} of {world} ranks "
            "are missing; write all of them",
        )
    if world < 2:
        report.add(
            "rank-files",
            f"{prefix}.0.et",
            None,
            "the only rank; ASTRA-sim needs at least 2: expand the graph to more ranks",
        )
    return not missing and world >= 2


def _check_presence(directory: Path, prefix: str, system: str, report: Report) -> None:
    """Report missing files of a folder that is to be run; bare traces need none."""
    names = [system, NETWORK_FILE, MEMORY_FILE]
    runs = any((directory / name).exists() for name in ("system.json", SCRIPT_FILE, *names))
    for name in names:
        if runs and not (directory / name).exists():
            message = f"missing, and {prefix} runs with it; write it as ASTRA-sim's examples do"
            report.add("configuration-file", name, None, message)


def _report_default_group(file: str, node: int, report: Report) -> None:
    report.add(
        "default-group",
        file,
        node,
        f"node {node} runs on the default group while other nodes name groups; it can stall every "
        f"rank: list the world in {GROUPS_FILE} and name it in pg_name",
    )
