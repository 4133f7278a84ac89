"""Check a file, or a directory with one file per rank and its configuration."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from onerank.converters.targets.astra_sim.check.comm_programs import (
    WORLD,
    NodeType,
    Program,
    courses_of,
)
from onerank.converters.targets.astra_sim.check.config_rules import (
    MEMORY_FILE,
    NETWORK_FILE,
    SCRIPT_FILE,
    check_algorithms,
    check_group_path,
    check_network,
    groups_file,
    read_groups,
    read_network,
    read_script,
    read_system,
)
from onerank.converters.targets.astra_sim.check.file_rules import read_structure
from onerank.converters.targets.astra_sim.check.findings import Finding, Report
from onerank.converters.targets.astra_sim.check.matching import check_matching
from onerank.converters.targets.astra_sim.check.node_rules import Setting
from onerank.converters.targets.astra_sim.check.rank_files import RankReader
from onerank.ir.errors import FormatError
from onerank.ir.job.comm_groups import RANK_FILE

Progress = Callable[[str, int, int], None]
"""Gets the prefix of a set, how many of its files are read, and how many there are."""


class _Extent(NamedTuple):
    """The part of a set to check, all if None; and the progress callback."""

    ranks: Collection[int] | None
    programs: Sequence[Program] | None
    progress: Progress


def _untold(prefix: str, done: int, files: int) -> None:
    """Ignore progress."""


def check(path: Path | str, *, progress: Progress = _untold) -> list[Finding]:
    """Check a file or a folder; see `check_file` and `check_workload`."""
    if Path(path).is_dir():
        return check_workload(path, progress=progress)
    return check_file(path)


def check_file(path: Path | str) -> list[Finding]:
    """Return the structural faults of one `.et` file.

    Raises:
        FormatError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FormatError(
            f"{path} is not a file; expected a Chakra trace (`.et`)", code="check-not-a-file"
        )
    report = Report()
    read_structure(path, report)
    return report.findings


def check_workload(
    directory: Path | str,
    *,
    read: Collection[int] | None = None,
    programs: Sequence[Program] | None = None,
    progress: Progress = _untold,
) -> list[Finding]:
    """Return every fault that would stop ASTRA-sim, or make it report wrong figures.

    Files form sets by PREFIX of PREFIX.RANK.et. A set whose prefix ends in `_roofline` runs with
    system_roofline.json, any other with system.json; all share the other files. Ranks are matched
    with each other only if every file of the set is valid.

    Args:
        directory: the directory.
        read: ranks whose files are read; None for all. An exporter that writes ranks from the same
            step knows that they differ only in groups and peers.
        programs: each rank's communication, instead of the files' contents.
        progress: called after each file.

    Raises:
        FormatError: there is no such directory, or no `.et` file in it.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FormatError(
            f"{directory} is not a folder; expected one of PREFIX.RANK.et files",
            code="check-not-a-directory",
        )
    traces = sorted(directory.glob("*.et"))
    if not traces:
        raise FormatError(
            f"{directory} holds no `.et` file; expected PREFIX.0.et, PREFIX.1.et ...",
            code="check-no-traces",
        )
    report = Report()
    sets: dict[str, dict[int, Path]] = defaultdict(dict)
    for path in traces:
        match = RANK_FILE.fullmatch(path.name)
        if match:
            sets[match[1]][int(match[2])] = path
        else:
            message = "not named PREFIX.RANK.et, so that no run reads it: rename or remove it"
            report.add("rank-files", path.name, None, message)
            read_structure(path, report)
    for prefix, files in sets.items():
        _check_set(directory, prefix, files, _Extent(read, programs, progress), report)
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
    groups_at = groups_file(directory, prefix, report)
    groups = read_groups(groups_at, world, report)
    reader = RankReader(Setting("", 0, world, groups, system), report)
    programs: list[Program] = []
    for done, (rank, path) in enumerate(sorted(files.items()), start=1):
        if extent.ranks is not None and rank not in extent.ranks:
            continue
        program = reader.read(rank, path)
        if program is None:
            complete = False
        else:
            programs.append(program)
        extent.progress(prefix, done, len(files))
    if any(isinstance(end, str) and end != WORLD for program in programs for end in program.ends):
        check_group_path(groups_at, script, report)
        _report_default_group(programs, groups.file, report)
    if system is not None and npus is not None:
        check_algorithms(system, len(npus), _collectives(programs), report)
    if complete:
        check_matching(extent.programs or programs, groups.usable, report)


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


def _collectives(programs: Sequence[Program]) -> set[int]:
    """Return the types of the collectives that are issued."""
    calls = (call for course in courses_of(programs) for call in course.calls)
    return {call.collective for call in calls if call and call.type == NodeType.COLL}


def _report_default_group(programs: Sequence[Program], file: str, report: Report) -> None:
    """Report the first call on the default group."""
    program = next((program for program in programs if WORLD in program.ends), None)
    if program is None:
        return
    call = next(c for c in program.issued() if c.type == NodeType.COLL and c.group == WORLD)
    report.add(
        "default-group",
        program.file,
        call.node,
        f"node {call.node} runs on the default group while other nodes name groups; it can stall "
        f"every rank: list the world in {file} and name it in pg_name",
    )
