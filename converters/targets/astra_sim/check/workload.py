"""Check a file, or a directory with one file per rank and its configuration.

A rank's file that repeats an earlier one except for groups and peers is not parsed again.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from onerank.converters.targets.astra_sim.check.comm_programs import (
    WORLD,
    CommNode,
    CommProgram,
    End,
    NodeType,
    Program,
    distinct_comms,
    end_of,
)
from onerank.converters.targets.astra_sim.check.config_rules import (
    ConfiguredGroups,
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
from onerank.converters.targets.astra_sim.check.file_rules import Structure, read_structure
from onerank.converters.targets.astra_sim.check.findings import Finding, Report
from onerank.converters.targets.astra_sim.check.matching import check_matching, check_order
from onerank.converters.targets.astra_sim.check.node_rules import (
    CheckedRank,
    check_graph,
    check_nodes,
)
from onerank.converters.targets.astra_sim.config_files import (
    LOGGING_FILE,
    MEMORY_FILE,
    NETWORK_FILE,
    ROOFLINE_SYSTEM_FILE,
    SCRIPT_FILE,
    SYSTEM_FILE,
)
from onerank.ir.chakra import PEERS, RankDiff, Record
from onerank.ir.chakra.third_party_traces import RANK_FILE
from onerank.ir.errors import FormatError

# Number of earlier files that the next one is compared with; a pipeline has few stages.
_KEPT = 16

# Parsed nodes of compared files that are kept.
_MAX_CACHED_NODES = 1 << 12

# Peer of a slot whose calls are all faulty.
_NO_PEER: End = (-1, -1)

_COMMUNICATES = (NodeType.COLL, NodeType.SEND, NodeType.RECV)

# The rules that a node violates, and its peer or group.
_Verdict = tuple[frozenset[str], End]


class RankReader:
    """Reads the files of ranks.

    Files are kept. A file that differs from a kept one only in groups and peers has the same
    findings if these are equally right or wrong; nothing else of it is parsed, and shared findings
    are reported once.

    Args:
        setting: what the files are checked against; file and rank of each are filled in.
        report: receives the findings.
    """

    def __init__(self, setting: CheckedRank, report: Report) -> None:
        self._setting = setting
        self._report = report
        self._models: list[_Model] = []

    def read(self, rank: int, path: Path) -> Program | None:
        """Return a rank's program; None when its file has faults that keep it from running."""
        setting = replace(self._setting, file=path.name, rank=rank)
        # The first file is only parsed: without a kept file there is nothing to compare it with.
        octets = path.read_bytes() if self._models and path.is_file() else b""
        for place, model in enumerate(self._models):
            ends = model.ends(octets, setting)
            if ends is not None:
                # Consecutive ranks mostly run the same step, so the last match is tried first.
                self._models.insert(0, self._models.pop(place))
                self._report.add_file(model.findings, path.name)
                return Program(path.name, model.comm, ends) if model.runs else None
        return self._read_whole(path, setting)

    def _read_whole(self, path: Path, setting: CheckedRank) -> Program | None:
        before = len(self._report)
        structure = read_structure(path, self._report)
        if structure is None:
            return None
        by_id = check_nodes(structure.records.nodes, setting, self._report)
        if structure.sound:
            check_graph(structure, setting, self._report)
        calls = [by_id.get(node_id) for node_id in structure.dag.ids]
        model = _Model(path, structure, calls, setting, self._report.keys_since(before))
        if not model.fits_others:
            program = Program.of(path.name, structure.dag, calls, structure.schedule.order)
            return program if structure.sound else None
        self._models.insert(0, model)
        del self._models[_KEPT:]
        return model.program if model.runs else None


class _Model:
    """A parsed file, with which later files are compared.

    Args:
        path: the file.
        structure: its parsed contents.
        calls: communication of each node of `structure.dag`; None for compute and faulty nodes.
        setting: what it was checked against.
        findings: keys of its findings, see `Report.keys_since`.

    Attributes:
        findings: as above.
        runs: whether it has no structural faults.
        comm: the part that it shares with equal files; its slots are those of the byte
            comparison, then one of the default group.
        program: its program.
        fits_others: whether each node that names a rank or group has a slot, so that other files
            can be compared with it.
    """

    def __init__(
        self,
        path: Path,
        structure: Structure,
        calls: list[CommNode | None],
        setting: CheckedRank,
        findings: Sequence[Hashable],
    ) -> None:
        self.findings = findings
        self.runs = structure.sound
        self._diff = RankDiff(path)
        place = {node.id: node.position for node in structure.records.nodes}
        node_slots = [self._diff.slots[place[node_id]] for node_id in structure.dag.ids]
        count = len(self._diff.template_endings)
        ends: list[End] = [_NO_PEER] * count
        first_in_slot = self._diff.slots.index
        self._examples = [first_in_slot(slot) for slot in range(count)]
        on_world = {call.node for call in calls if call is not None and end_of(call) == WORLD}
        on_default_group = False
        for node_id, call, slot in zip(structure.dag.ids, calls, node_slots, strict=True):
            if call is not None and slot is not None:
                ends[slot], self._examples[slot] = end_of(call), place[node_id]
            on_default_group |= call is not None and slot is None
        self.fits_others = all(
            slot is not None
            or node.type not in _COMMUNICATES
            or node.id in on_world
            or not PEERS & node.attributes.keys()
            for node, slot in zip(structure.records.nodes, self._diff.slots, strict=True)
        )
        self._rest: list[End] = [WORLD] if on_default_group else []
        slots = [
            count if call is not None and slot is None else slot
            for call, slot in zip(calls, node_slots, strict=True)
        ]
        self._records: dict[tuple[int, bytes], Record | None] = {}
        self.comm = CommProgram(structure.dag, structure.schedule.order, calls, slots)
        self.program = Program(path.name, self.comm, ends + self._rest)
        self._verdicts = [
            self._verdict(slot, ending, setting)
            for slot, ending in enumerate(self._diff.template_endings)
        ]

    def ends(self, octets: bytes, setting: CheckedRank) -> list[End] | None:
        """Return the peer or group of each slot in another file.

        Returns None if the file differs in more than that, or violates other rules.
        """
        endings = self._diff.endings(octets)
        if endings is None:
            return None
        ends: list[End] = []
        for slot, ending in enumerate(endings):
            verdict = self._verdict(slot, ending, setting)
            expected = self._verdicts[slot]
            if verdict is None or expected is None or verdict[0] != expected[0]:
                return None
            if (verdict[1] == _NO_PEER) != (expected[1] == _NO_PEER):
                return None
            ends.append(verdict[1])
        return ends + self._rest

    def _verdict(self, slot: int, ending: bytes, setting: CheckedRank) -> _Verdict | None:
        """Return the verdict on a slot with other peers; None if `ending` is no such bytes.

        A communication node shows all faults that its peers can have. If no node of the slot
        communicates, its first node represents it.
        """
        record = self._record(slot, ending)
        if record is None:
            return None
        report = Report()
        call = check_nodes([record], setting, report).get(record.id)
        return report.rules, _NO_PEER if call is None else end_of(call)

    def _record(self, slot: int, ending: bytes) -> Record | None:
        key = slot, ending
        if key not in self._records:
            if len(self._records) > _MAX_CACHED_NODES:
                self._records.clear()
            self._records[key] = self._diff.record(self._examples[slot], ending)
        return self._records[key]


Progress = Callable[[str, int, int], None]
"""Called with the prefix of a set, the number of its files read so far, and of all its files."""


class _Common(NamedTuple):
    """The configuration that all sets of a folder share.

    Attributes:
        script: the run script.
        npus: NPUs of each network dimension, None where the file is absent or faulty.
    """

    script: Script
    npus: list[int] | None


class _Extent(NamedTuple):
    """The part of a set of traces to check, and its context.

    Attributes:
        common: configuration that all sets share.
        ranks: ranks whose files are read; None for all.
        programs: each rank's communication, instead of the files' contents.
        progress: called after each file.
    """

    common: _Common
    ranks: Collection[int] | None
    programs: Sequence[Program] | None
    progress: Progress


def _no_progress(prefix: str, done: int, files: int) -> None:
    """Ignore progress."""


def check(path: Path | str, *, progress: Progress = _no_progress) -> list[Finding]:
    """Check a file or a directory; see `check_file` and `check_workload`."""
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

    Files PREFIX.RANK.et with one PREFIX form a set. A set whose prefix ends in `_roofline` runs
    with system_roofline.json, any other with system.json; all share the other files. Ranks are
    matched with each other only if every file of the set is valid.

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


# Option of ASTRA-sim -> file that an export passes.
_OPTIONS = {
    "network-configuration": NETWORK_FILE,
    "remote-memory-configuration": MEMORY_FILE,
    "logging-configuration": LOGGING_FILE,
}

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
    # An export contains both encodings of one step, and run.sh distinguishes them by this suffix.
    exact = prefix.endswith("_roofline")
    default = ROOFLINE_SYSTEM_FILE if exact else SYSTEM_FILE
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
    reader = RankReader(CheckedRank("", 0, world, groups, system), report)
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
    # A missing or faulty file would show as communication without a counterpart on other ranks.
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
    runs = any((directory / name).exists() for name in (SYSTEM_FILE, SCRIPT_FILE, *names))
    named = {file.name for option in _OPTIONS if (file := script.file_of(option, directory))}
    # A file that the script names under another name was reported with the script.
    passed = {name for option, name in _OPTIONS.items() if script.argument(option) is not None}
    for name in names:
        if runs and name not in named | passed and not (directory / name).exists():
            message = f"missing, and {prefix} runs with it; write it as ASTRA-sim's examples do"
            report.add("configuration-file", name, None, message)


def _uses(programs: Sequence[Program], groups: ConfiguredGroups, world: int) -> set[Use]:
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
