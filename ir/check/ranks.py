"""The files of a workload's ranks read one by one, those like an earlier one without parsing."""

from dataclasses import replace
from pathlib import Path

from onerank.ir.chakra import Likeness, Record
from onerank.ir.check.contract import WORLD, Setting, check_nodes
from onerank.ir.check.findings import Report
from onerank.ir.check.graph_rules import check_graph
from onerank.ir.check.programs import Course, End, Program, end_of
from onerank.ir.check.structure import Structure, read_structure

_KEPT = 16
"""Files that the next one is held against."""

_REMEMBERED = 1 << 12
"""Endings of nodes kept parsed."""


class RankReader:
    """Reads the files of ranks.

    A file without findings is kept. One that differs from it in groups and peers alone has none
    either where these are right, so that nothing else of it is looked at.

    Args:
        setting: what the files are checked against; file and rank of each are filled in.
        report: gets the findings.
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
                return Program(path.name, model.course, ends)
        return self._read_whole(path, setting)

    def _read_whole(self, path: Path, setting: Setting) -> Program | None:
        before = len(self._report)
        structure = read_structure(path, self._report)
        if structure is None:
            return None
        calls = check_nodes(structure.records.nodes, setting, self._report)
        if not structure.sound:
            return None
        check_graph(structure, setting, self._report)
        in_order = [calls.get(node_id) for node_id in structure.dag.ids]
        program = Program.of(path.name, structure.dag, in_order, structure.schedule.order)
        if len(self._report) > before:
            return program
        model = _Model(path, structure, program)
        if not model.fits_others:
            return program
        self._models.insert(0, model)
        del self._models[_KEPT:]
        return model.program


class _Model:
    """A file without findings.

    Attributes:
        course: its course; the slots are those of its likeness, then one of the default group.
        program: its program.
        fits_others: whether all that names a rank lies in a slot, and each slot has a call: one on
            a faulty group has none, and no finding of its own.
    """

    def __init__(self, path: Path, structure: Structure, program: Program) -> None:
        self._likeness = Likeness(path)
        place = {node.id: node.position for node in structure.records.nodes}
        own = [self._likeness.slots[place[node_id]] for node_id in structure.dag.ids]
        calls = program.course.calls
        count = len(self._likeness.own)
        ends: list[End] = [WORLD] * count
        without = {
            end_of(call) for call, slot in zip(calls, own, strict=True) if call and slot is None
        }
        for call, slot in zip(calls, own, strict=True):
            if call is not None and slot is not None:
                ends[slot] = end_of(call)
        called = {slot for call, slot in zip(calls, own, strict=True) if call and slot is not None}
        self.fits_others = without <= {WORLD} and len(called) == count
        self._rest: list[End] = [*without]
        slots = [
            count if call is not None and slot is None else slot
            for call, slot in zip(calls, own, strict=True)
        ]
        self._records: dict[tuple[int, bytes], Record | None] = {}
        self.course = Course(structure.dag, program.course.order, calls, slots)
        self.program = Program(path.name, self.course, ends + self._rest)

    def ends(self, octets: bytes, setting: Setting) -> list[End] | None:
        """Return whom another file's calls meet; None where more differs, or one meets nobody."""
        endings = self._likeness.endings(octets)
        if endings is None:
            return None
        ends: list[End] = []
        for slot, ending in enumerate(endings):
            record = self._record(slot, ending)
            if record is None:
                return None
            report = Report()
            calls = check_nodes([record], setting, report)
            if len(report) or not calls:
                return None
            ends.append(end_of(calls[record.id]))
        return ends + self._rest

    def _record(self, slot: int, ending: bytes) -> Record | None:
        key = slot, ending
        if key not in self._records:
            if len(self._records) > _REMEMBERED:
                self._records.clear()
            self._records[key] = self._likeness.record(slot, ending)
        return self._records[key]
