"""Check a file, or a directory with one file per rank and its configuration."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from onerank.converters.targets.astra_sim.check.collective_order import check_order
from onerank.converters.targets.astra_sim.check.comm_programs import (
    WORLD,
    NodeType,
    Program,
    distinct_comms,
)
from onerank.converters.targets.astra_sim.check.config_rules import (
    LOGGING_FILE,
    MEMORY_FILE,
    NETWORK_FILE,
    SCRIPT_FILE,
    Groups,
    Use,
    check_algorithms,
    check_custom_algorithms,
    check_group_path,
    check_logging_file,
    check_memory,
    check_network,
    groups_file,
    read_groups,
    read_network,
    read_system,
)
from onerank.converters.targets.astra_sim.check.config_text import Script
from onerank.converters.targets.astra_sim.check.file_rules import read_structure
from onerank.converters.targets.astra_sim.check.findings import Finding, Report
from onerank.converters.targets.astra_sim.check.matching import check_matching
from onerank.converters.targets.astra_sim.check.node_rules import Setting
from onerank.converters.targets.astra_sim.check.rank_files import RankReader
from onerank.ir.chakra.other_tools import RANK_FILE
from onerank.ir.errors import FormatError

Progress = Callable[[str, int, int], None]
"""Gets the prefix of a set, how many of its files are read, and how many there are."""


class _Common(NamedTuple):
    """The configuration that all sets of a folder share.

    Attributes:
        script: the run script.
        npus: NPUs of each network dimension, None where the file is absent or faulty.
    """

    script: Script
    npus: list[int] | None


class _Extent(NamedTuple):
    """What to check of a set: some ranks, all if None; the shared files; and progress."""

    common: _Common
    ranks: Collection[int] | None
    programs: Sequence[Program] | None
    progress: Progress


def _no_progress(prefix: str, done: int, files: int) -> None:
    """Ignore progress."""


def check(path: Path | str, *, progress: Progress = _no_progress) -> list[Finding]:
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
    progress: Progress = _no_progress,
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
    if not sets:
        return report.findings
    common = _read_common(directory, report)
    for prefix, files in sets.items():
        _check_set(directory, prefix, files, _Extent(common, read, programs, progress), report)
    return report.findings


_OPTIONS = {
    "network-configuration": NETWORK_FILE,
    "remote-memory-configuration": MEMORY_FILE,
    "logging-configuration": LOGGING_FILE,
}
"""Option of ASTRA-sim -> file that an export passes."""

_REQUIRED_OPTIONS = (
    "workload-configuration",
    "system-configuration",
    "network-configuration",
    "remote-memory-configuration",
)


def _read_common(directory: Path, report: Report) -> _Common:
    script = Script.read(directory / SCRIPT_FILE)
    files = {
        option: script.file_of(option, directory) or directory / name
        for option, name in _OPTIONS.items()
    }
    network = files["network-configuration"]
    npus = read_network(network, report)
    check_memory(files["remote-memory-configuration"], report)
    check_logging_file(files["logging-configuration"], report)
    _check_script(directory, script, report)
    return _Common(script, npus)


def _check_script(directory: Path, script: Script, report: Report) -> None:
    """Check that a run script passes every option that ASTRA-sim needs, and files that exist."""
    for option in _REQUIRED_OPTIONS if script.passes_options else ():
        if script.argument(option) is None:
            message = f"passes no --{option}: ASTRA-sim ends without it"
            report.add("configuration-file", SCRIPT_FILE, None, message)
    for option in (*_OPTIONS, "comm-group-configuration"):
        file = script.file_of(option, directory)
        if file is not None and not file.exists() and "empty" not in str(file):
            message = f"missing, and {SCRIPT_FILE} passes it as --{option}: ASTRA-sim ends"
            report.add("configuration-file", file.name, None, message)


def _check_set(
    directory: Path,
    prefix: str,
    files: dict[int, Path],
    extent: _Extent,
    report: Report,
) -> None:
    world = max(files) + 1
    complete = _check_ranks(prefix, files, world, report)
    script, npus = extent.common
    # An export holds both encodings of one step, and run.sh distinguishes them by this suffix.
    exact = prefix.endswith("_roofline")
    default = "system_roofline.json" if exact else "system.json"
    name = script.system_of(prefix) or default
    _check_presence(directory, prefix, name, script, report)
    system = read_system(directory / name, report)
    if exact and system is not None and not system.is_on("roofline-enabled"):
        report.add(
            "roofline-configuration",
            system.file,
            None,
            f"roofline-enabled is off, and {prefix} runs with it: whole microseconds are simulated "
            "in place of the exact times; write 1",
        )
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
    groups.report_faults(report)
    uses = _uses(programs, groups, world)
    if system is not None and npus is not None:
        check_algorithms(system, npus, world, uses, report)
    if system is not None:
        check_custom_algorithms(directory, system, uses, report)
    # The order is checked per rank, so that it is reported even if some files have faults.
    check_order(extent.programs or programs, groups.members, report)
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


def _check_presence(
    directory: Path, prefix: str, system: str, script: Script, report: Report
) -> None:
    """Report missing files of a directory that is to be run; bare traces need none."""
    names = [system, NETWORK_FILE, MEMORY_FILE]
    runs = any((directory / name).exists() for name in ("system.json", SCRIPT_FILE, *names))
    named = {file.name for option in _OPTIONS if (file := script.file_of(option, directory))}
    # A file that the script names under another name was reported with the script.
    passed = {name for option, name in _OPTIONS.items() if script.argument(option) is not None}
    for name in names:
        if runs and name not in named | passed and not (directory / name).exists():
            message = f"missing, and {prefix} runs with it; write it as ASTRA-sim's examples do"
            report.add("configuration-file", name, None, message)


def _uses(programs: Sequence[Program], groups: Groups, world: int) -> set[Use]:
    """Return the types of the collectives that are issued, with the sizes of their groups."""
    slots = {
        id(comm): {
            (call.collective, slot)
            for call, slot in zip(comm.calls, comm.slots, strict=True)
            if call is not None and slot is not None and call.type == NodeType.COLL
        }
        for comm in distinct_comms(programs)
    }
    uses: set[Use] = set()
    for program in programs:
        for collective, slot in slots[id(program.comm)]:
            ranks = groups.usable.get(str(program.ends[slot]))
            uses.add(Use(collective, world if ranks is None else len(ranks)))
    return uses


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
