"""Read the files of a workload's ranks; a file that repeats an earlier one is not parsed again."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

from onerank.converters.targets.astra_sim.check.comm_programs import (
    WORLD,
    Call,
    CommProgram,
    End,
    NodeType,
    Program,
    end_of,
)
from onerank.converters.targets.astra_sim.check.file_rules import Structure, read_structure
from onerank.converters.targets.astra_sim.check.findings import Report
from onerank.converters.targets.astra_sim.check.node_rules import Setting, check_graph, check_nodes
from onerank.ir.chakra import PEERS, RankDiff, Record

_KEPT = 16
"""Number of earlier files that the next one is compared with."""

_REMEMBERED = 1 << 12
"""Endings of nodes kept parsed."""

_NOBODY: End = (-1, -1)
"""Whom the calls of a slot meet that are all faulty."""

_TALKS = (NodeType.COLL, NodeType.SEND, NodeType.RECV)

_Told = tuple[frozenset[str], End]
"""The rules that a node breaks, and whom it meets."""


class RankReader:
    """Reads the files of ranks.

    Files are kept. A file that differs from a kept one only in groups and peers has the same
    findings if these are equally right or wrong; nothing else of it is parsed, and shared findings
    are reported once.

    Args:
        setting: what the files are checked against; file and rank of each are filled in.
        report: receives the findings.
    """

    def __init__(self, setting: Setting, report: Report) -> None:
        self._setting = setting
        self._report = report
        self._models: list[_Model] = []

    def read(self, rank: int, path: Path) -> Program | None:
        """Return a rank's program; None when its file has faults that keep it from running."""
        setting = replace(self._setting, file=path.name, rank=rank)
        octets = path.read_bytes() if self._models and path.is_file() else b""
        for place, model in enumerate(self._models):
            ends = model.ends(octets, setting)
            if ends is not None:
                self._models.insert(0, self._models.pop(place))
                self._report.add_alike(model.findings, path.name)
                return Program(path.name, model.course, ends) if model.runs else None
        return self._read_whole(path, setting)

    def _read_whole(self, path: Path, setting: Setting) -> Program | None:
        before = len(self._report)
        structure = read_structure(path, self._report)
        if structure is None:
            return None
        by_id = check_nodes(structure.records.nodes, setting, self._report)
        if structure.sound:
            check_graph(structure, setting, self._report)
        calls = [by_id.get(node_id) for node_id in structure.dag.ids]
        model = _Model(path, structure, calls, setting, self._report.since(before))
        if not model.fits_others:
            program = Program.of(path.name, structure.dag, calls, structure.schedule.order)
            return program if structure.sound else None
        self._models.insert(0, model)
        del self._models[_KEPT:]
        return model.program if model.runs else None


class _Model:
    """A file that others are compared with.

    Args:
        path: the file.
        structure: its parsed contents.
        calls: per node of its dependencies, its communication; None also for a faulty one.
        setting: what it was checked against.
        findings: names of its findings, see `Report.since`.

    Attributes:
        findings: as given.
        runs: whether it has no structural faults.
        course: its common part with others; slots are those of its template, then one of the
            default group.
        program: its program.
        fits_others: whether everything that names a rank lies in a slot.
    """

    def __init__(
        self,
        path: Path,
        structure: Structure,
        calls: list[Call | None],
        setting: Setting,
        findings: Sequence[Hashable],
    ) -> None:
        self.findings = findings
        self.runs = structure.sound
        self._likeness = RankDiff(path)
        place = {node.id: node.position for node in structure.records.nodes}
        own = [self._likeness.slots[place[node_id]] for node_id in structure.dag.ids]
        count = len(self._likeness.own)
        ends: list[End] = [_NOBODY] * count
        shown = self._likeness.slots.index
        self._shown = [shown(slot) for slot in range(count)]
        on_world = {call.node for call in calls if call is not None and end_of(call) == WORLD}
        without = False
        for node_id, call, slot in zip(structure.dag.ids, calls, own, strict=True):
            if call is not None and slot is not None:
                ends[slot], self._shown[slot] = end_of(call), place[node_id]
            without |= call is not None and slot is None
        self.fits_others = all(
            slot is not None
            or node.type not in _TALKS
            or node.id in on_world
            or not PEERS & node.attributes.keys()
            for node, slot in zip(structure.records.nodes, self._likeness.slots, strict=True)
        )
        self._rest: list[End] = [WORLD] if without else []
        slots = [
            count if call is not None and slot is None else slot
            for call, slot in zip(calls, own, strict=True)
        ]
        self._records: dict[tuple[int, bytes], Record | None] = {}
        self.course = CommProgram(structure.dag, structure.schedule.order, calls, slots)
        self.program = Program(path.name, self.course, ends + self._rest)
        self._told = [
            self._tell(slot, ending, setting) for slot, ending in enumerate(self._likeness.own)
        ]

    def ends(self, octets: bytes, setting: Setting) -> list[End] | None:
        """Return whom another file's calls meet; None where more differs, or other rules fail."""
        endings = self._likeness.endings(octets)
        if endings is None:
            return None
        ends: list[End] = []
        for slot, ending in enumerate(endings):
            told = self._tell(slot, ending, setting)
            own = self._told[slot]
            if told is None or own is None or told[0] != own[0]:
                return None
            if (told[1] == _NOBODY) != (own[1] == _NOBODY):
                return None
            ends.append(told[1])
        return ends + self._rest

    def _tell(self, slot: int, ending: bytes, setting: Setting) -> _Told | None:
        """Return the rules that a slot's node breaks, and its peers; None if it is no slot.

        A communication node shows all faults of its ending; if no node of the slot communicates,
        the first one represents it.
        """
        record = self._record(slot, ending)
        if record is None:
            return None
        report = Report()
        call = check_nodes([record], setting, report).get(record.id)
        return report.rules, _NOBODY if call is None else end_of(call)

    def _record(self, slot: int, ending: bytes) -> Record | None:
        key = slot, ending
        if key not in self._records:
            if len(self._records) > _REMEMBERED:
                self._records.clear()
            self._records[key] = self._likeness.record(self._shown[slot], ending)
        return self._records[key]
