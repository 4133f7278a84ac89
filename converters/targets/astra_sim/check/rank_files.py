"""Read the files of a workload's ranks; a file that repeats an earlier one is not parsed again."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

from onerank.converters.targets.astra_sim.check.comm_programs import (
    WORLD,
    CommCall,
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
"""Number of earlier files that the next one is compared with; a pipeline has few stages."""

_MAX_CACHED_NODES = 1 << 12
"""Parsed nodes of compared files that are kept."""

_NO_PEER: End = (-1, -1)
"""Peer of a slot whose calls are all faulty."""

_COMMUNICATES = (NodeType.COLL, NodeType.SEND, NodeType.RECV)

_Verdict = tuple[frozenset[str], End]
"""The rules that a node violates, and its peer or group."""


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
                self._report.add_file(model.findings, path.name)
                return Program(path.name, model.comm, ends) if model.runs else None
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
        calls: list[CommCall | None],
        setting: Setting,
        findings: Sequence[Hashable],
    ) -> None:
        self.findings = findings
        self.runs = structure.sound
        self._diff = RankDiff(path)
        place = {node.id: node.position for node in structure.records.nodes}
        own_slots = [self._diff.slots[place[node_id]] for node_id in structure.dag.ids]
        count = len(self._diff.template_endings)
        ends: list[End] = [_NO_PEER] * count
        first_in_slot = self._diff.slots.index
        self._examples = [first_in_slot(slot) for slot in range(count)]
        on_world = {call.node for call in calls if call is not None and end_of(call) == WORLD}
        on_default_group = False
        for node_id, call, slot in zip(structure.dag.ids, calls, own_slots, strict=True):
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
            for call, slot in zip(calls, own_slots, strict=True)
        ]
        self._records: dict[tuple[int, bytes], Record | None] = {}
        self.comm = CommProgram(structure.dag, structure.schedule.order, calls, slots)
        self.program = Program(path.name, self.comm, ends + self._rest)
        self._verdicts = [
            self._verdict(slot, ending, setting)
            for slot, ending in enumerate(self._diff.template_endings)
        ]

    def ends(self, octets: bytes, setting: Setting) -> list[End] | None:
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

    def _verdict(self, slot: int, ending: bytes, setting: Setting) -> _Verdict | None:
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
