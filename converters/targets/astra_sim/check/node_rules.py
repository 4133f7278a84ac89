"""Rules on the nodes of one rank: the types, attributes and order ASTRA-sim accepts."""

from dataclasses import dataclass
from typing import Any

from onerank.converters.targets.astra_sim.check.comm_programs import (
    WORLD,
    CommNode,
    NodeType,
    name_of,
)
from onerank.converters.targets.astra_sim.check.config_rules import (
    ALGORITHMS,
    ConfiguredGroups,
    System,
)
from onerank.converters.targets.astra_sim.check.config_text import stoi
from onerank.converters.targets.astra_sim.check.file_rules import Dag, Structure
from onerank.converters.targets.astra_sim.check.findings import Report
from onerank.ir.chakra import Record
from onerank.ir.chakra.third_party_traces import shown_ranks
from onerank.ir.enums import Collective


@dataclass(frozen=True, slots=True)
class CheckedRank:
    """The file, world and configuration that the nodes of one rank are checked against.

    Attributes:
        file: name of the rank's file.
        rank: the rank.
        world: number of ranks.
        groups: process groups of the run.
        system: settings of the run; None without a readable system JSON.
    """

    file: str
    rank: int
    world: int
    groups: ConfiguredGroups
    system: System | None


def check_nodes(nodes: list[Record], setting: CheckedRank, report: Report) -> dict[int, CommNode]:
    """Check every node; return the communication nodes that can be matched, by id."""
    checker = _NodeChecker(setting, report)
    calls: dict[int, CommNode] = {}
    for node in nodes:
        call = checker.check(node)
        if call is not None:
            calls[node.id] = call
    return calls


def integer(node: Record, name: str) -> int | None:
    """Return an attribute's value if it is an integer, else None."""
    attribute = node.attributes.get(name)
    return attribute.value if attribute and type(attribute.value) is int else None


# Types of attributes that the feeder converts into each other.
_INTEGERS = frozenset(
    f"{kind}_val"
    for kind in (
        *("bool", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
        *("fixed32", "fixed64", "sfixed32", "sfixed64"),
    )
)


class _NodeChecker:
    """Checks the nodes of one file against its setting."""

    def __init__(self, setting: CheckedRank, report: Report) -> None:
        self.setting = setting
        self.report = report
        system = setting.system
        self.roofline = system is not None and system.is_on("roofline-enabled")
        self.memory = system is not None and system.is_on("track-local-mem")
        self.written: dict[str, int] = {}

    def check(self, node: Record) -> CommNode | None:
        """Check one node; return it as a call when it is communication that can be matched."""
        # Absent means false in ASTRA-sim's feeder.
        on_cpu = self._read(node, "is_cpu_op", "bool_val", required=False)
        if on_cpu is True:
            self._add("host-node", node, "is a CPU operation (is_cpu_op); leave it out", "cpu")
        if self.memory:
            self._check_memory(node)
        match node.type:
            case NodeType.COMP:
                if self.roofline and on_cpu is not True:
                    self._check_roofline(node)
                else:
                    self._check_duration(node, node.duration_micros * 1000)
            case NodeType.COLL:
                return self._collective(node)
            case NodeType.SEND | NodeType.RECV:
                return self._point_to_point(node)
            case NodeType.MEM_LOAD | NodeType.MEM_STORE:
                message = f"is a {NodeType(node.type).name} node; leave memory nodes out"
                self._add("host-node", node, message, "memory")
            case NodeType.METADATA | NodeType.INVALID:
                message = f"is a {NodeType(node.type).name} node; leave it out"
                self._add("node-type", node, message, node.type)
            case _:
                message = f"is of the unknown type {node.type}; expected COMP or a COMM type"
                self._add("node-type", node, message, node.type)
        return None

    def _add(
        self, rule: str, node: Record, message: str, cause: object, is_note: bool = False
    ) -> None:
        text = f"node {node.id} ({node.name!r}) {message}"
        self.report.add(rule, self.setting.file, node.id, text, cause=str(cause), is_note=is_note)

    def _read(self, node: Record, name: str, variant: str, *, required: bool = True) -> Any:
        """Return an attribute's value; None when it is absent or not of the variant's type."""
        attribute = node.attributes.get(name)
        if attribute is None:
            if required:
                message = f"has no attribute {name}; it needs one, a {variant}"
                self._add("missing-attribute", node, message, (node.type, name))
            return None
        if attribute.variant != variant:
            # The feeder of this ASTRA-sim converts between integers; earlier ones throw.
            converts = {variant, attribute.variant} <= _INTEGERS
            message = f"holds {name} as {attribute.variant}; write it as {variant}"
            self._add("attribute-type", node, message, (name, attribute.variant), converts)
        expected = {"bool_val": bool, "string_val": str}.get(variant, int)
        # The feeder casts an integer to bool, so 0 and 1 are accepted with a note on their type.
        if expected is bool and isinstance(attribute.value, int):
            return bool(attribute.value)
        return attribute.value if type(attribute.value) is expected else None

    def _check_memory(self, node: Record) -> None:
        for name in ("inputs", "outputs"):
            attribute = node.attributes.get(name)
            if attribute is None:
                message = f"has no attribute {name}; track-local-mem needs one on every node"
                self._add("memory-attributes", node, message, name)
                continue
            pairs = _pairs(attribute.variant, attribute.value)
            if pairs is None:
                message = f"holds {name} as {attribute.value!r}; expected [name, size, ...] strings"
                self._add("memory-attributes", node, message, (name, "form"))
                continue
            for tensor, size in pairs if name == "outputs" else ():
                if int(size) and self.written.setdefault(tensor, node.id) != node.id:
                    message = (
                        f"writes tensor {tensor!r}, which node {self.written[tensor]} writes too; "
                        "track-local-mem asserts on a second write: name each output once"
                    )
                    self._add("memory-attributes", node, message, "twice")

    def _check_roofline(self, node: Record) -> None:
        system = self.setting.system
        assert system is not None
        num_ops = self._read(node, "num_ops", "int64_val")
        tensor_size = self._read(node, "tensor_size", "uint64_val")
        for name, value in (("num_ops", num_ops), ("tensor_size", tensor_size)):
            if value is not None and value <= 0:
                message = f"has {name} {value}; with the roofline on it must be > 0"
                self._add("roofline-values", node, message, name)
        if not num_ops or not tensor_size:
            return
        simulated = system.roofline_ns(num_ops, tensor_size)
        if simulated is None:
            return
        self._check_duration(node, simulated)
        exact = integer(node, "duration_ns")
        if exact is None:
            return
        # In the exact encoding, one byte at one operation per picosecond, nothing is rounded.
        allowed = 0 if tensor_size == 1 else max(exact, 1) * _DRIFT
        if abs(simulated - max(exact, 1)) > allowed:
            message = (
                f"lasts {exact} ns (duration_ns) and would be simulated as {simulated} ns with "
                f"peak-perf {system.number('peak-perf'):g} and local-mem-bw "
                f"{system.number('local-mem-bw'):g}; num_ops is {num_ops}, expected "
                f"{max(exact, 1)} * 1000 + 500 with peak-perf 1 and tensor_size 1"
            )
            self._add("roofline-time", node, message, "time")

    def _check_duration(self, node: Record, duration_ns: int) -> None:
        if not 0 <= duration_ns <= _LONGEST_NS:
            message = (
                f"would be simulated for {duration_ns} ns, more than a day; a negative "
                "duration_micros is read as a huge one, and beyond 2**64 ns time wraps around"
            )
            self._add("duration-range", node, message, "duration")

    def _size(self, node: Record) -> int | None:
        size = self._read(node, "comm_size", "int64_val")
        if size is not None and size <= 0:
            self._add("comm-size", node, f"has comm_size {size}; it must be > 0", "size")
        elif size is not None and size > _MOST_BYTES:
            message = f"has comm_size {size}, more than {_MOST_BYTES} bytes of one GPU"
            self._add("comm-size", node, message, "size")
        return size

    def _collective(self, node: Record) -> CommNode | None:
        kind = self._read(node, "comm_type", "int64_val")
        size = self._size(node)
        group = self._group(node)
        self._read(node, "comm_priority", "int32_val", required=False)
        if "involved_dim" in node.attributes:
            self._read(node, "involved_dim", "bool_list")
        if kind is None or size is None:
            return None
        if kind == Collective.BROADCAST:
            message = (
                "is a broadcast, which ASTRA-sim replays for duration_micros without moving bytes "
                "or waiting for the group: replace it by a collective it simulates"
            )
            self._add("collective-replayed", node, message, "broadcast")
            return None
        if kind not in ALGORITHMS:
            names = ", ".join(f"{name_of(known)} {known}" for known in ALGORITHMS)
            message = f"is {name_of(kind)} (comm_type {kind}); supported are {names}"
            self._add("collective-type", node, message, kind)
            return None
        splits = self.setting.system.splits if self.setting.system else 1
        if kind == Collective.ALL_GATHER and 0 < size < splits:
            message = (
                f"gathers {size} bytes per rank, fewer than the {splits} preferred-dataset-splits "
                f"of {self.setting.system.file if self.setting.system else ''}: lower the splits"
            )
            self._add("dataset-splits", node, message, "splits")
        charged = splits * self.setting.world
        if kind != Collective.ALL_GATHER and charged > max(_PADDED_BYTES, 2 * size) and size > 0:
            message = (
                f"moves {size} bytes and is charged for {charged}, one byte for each of "
                f"{self.setting.world} ranks in each of {splits} preferred-dataset-splits"
            )
            self._add("dataset-splits", node, message, "charged")
        if group is None:
            return None
        return CommNode(node.id, NodeType.COLL, size, collective=kind, group=group)

    def _group(self, node: Record) -> str | None:
        """Return the name of a group that a call can be matched in, else None."""
        name = self._read(node, "pg_name", "string_val", required=False)
        groups = self.setting.groups
        if name is None:
            return None if "pg_name" in node.attributes else WORLD
        # ASTRA-sim takes both as the group of all ranks.
        if name in ("", "0"):
            return WORLD
        number = stoi(name)
        if number is None:
            message = f"has pg_name {name!r}; expected an integer, a key of {groups.file}"
            self._add("group-name", node, message, name)
        elif str(number) in groups.usable:
            return self._member_of(node, str(number), groups.usable[str(number)])
        elif not groups.given:
            message = f"has pg_name {name!r} and there is no {groups.file}: write one"
            self._add("group-unknown", node, message, "no file")
        elif str(number) in groups.faulty:
            groups.used.add(str(number))
        else:
            message = f"has pg_name {name!r}, which {groups.file} does not define: add it"
            self._add("group-unknown", node, message, name)
        return None

    def _member_of(self, node: Record, name: str, ranks: tuple[int, ...]) -> str | None:
        if self.setting.rank not in self.setting.groups.members[name]:
            message = (
                f"of rank {self.setting.rank} runs on group {name}, whose ranks are "
                f"{shown_ranks(ranks)}: use a group that contains the rank"
            )
            self._add("group-member", node, message, name)
            return None
        if len(ranks) == 1:
            message = f"runs on group {name} of one rank ({ranks[0]}); leave the node out"
            self._add("group-of-one", node, message, name)
            return None
        return name

    def _point_to_point(self, node: Record) -> CommNode | None:
        sends = node.type == NodeType.SEND
        rank_key, peer_key = ("comm_src", "comm_dst") if sends else ("comm_dst", "comm_src")
        rank, world = self.setting.rank, self.setting.world
        size = self._size(node)
        tag = self._read(node, "comm_tag", "int32_val")
        peer = self._read(node, peer_key, "int32_val")
        rank_value = self._read(node, rank_key, "int32_val", required=False)
        if rank_value is not None and rank_value != rank:
            message = f"has {rank_key} {rank_value} in the file of rank {rank}: write {rank}"
            self._add("endpoint", node, message, rank_key)
            return None
        if tag is not None and tag < 0:
            self._add("endpoint", node, f"has comm_tag {tag}; it must be >= 0", "tag")
            return None
        if peer is not None and (not 0 <= peer < world or peer == rank):
            message = f"has {peer_key} {peer}; expected another rank from 0 to {world - 1}"
            self._add("endpoint", node, message, peer_key)
            return None
        if size is None or tag is None or peer is None:
            return None
        source, target = (rank, peer) if sends else (peer, rank)
        return CommNode(node.id, NodeType(node.type), size, source=source, target=target, tag=tag)


def _pairs(variant: str, value: Any) -> list[tuple[str, str]] | None:
    """Return (tensor, size) pairs of a string_list; None if the list has another form."""
    if variant != "string_list":
        return None
    words = [str(word) for word in value]
    if len(words) % 2 or not all(size.isdecimal() for size in words[1::2]):
        return None
    return list(zip(words[::2], words[1::2], strict=True))


# Longest plausible duration of a node: one day.
_LONGEST_NS = 86_400 * 10**9

# Most bytes that one communication may move: 16 TiB, more than any GPU holds.
_MOST_BYTES = 1 << 44

# Bytes up to which a collective may be charged for more than it moves.
_PADDED_BYTES = 1 << 16

READY_BOUND = 64
"""Number of simultaneously ready nodes up to which ASTRA-sim's rescans stay cheap: 20,000 nodes in
one lane took 5 s, in 256 lanes 121 s."""

# Largest relative difference between simulated and measured compute time.
_DRIFT = 0.001


def check_graph(structure: Structure, setting: CheckedRank, report: Report) -> None:
    """Check how many nodes get ready at once, what runs at time 0, and how time adds up."""
    dag, schedule = structure.dag, structure.schedule
    if schedule.width > READY_BOUND:
        after = schedule.widest_after
        when = "at the start" if after is None else f"after node {dag.ids[after]}"
        report.add(
            "ready-width",
            setting.file,
            None if after is None else dag.ids[after],
            f"{schedule.width} nodes are ready at once {when}; ASTRA-sim rescans all of them at "
            f"every event: keep it to {READY_BOUND} by chaining the nodes of each stream",
        )
    nodes = structure.records.nodes
    _check_control(nodes, setting.file, report)
    system = setting.system
    if system is not None and system.is_on("roofline-enabled"):
        _check_start(nodes, dag, setting.file, system, report)
    else:
        _check_drift(nodes, setting.file, report)


def _check_control(nodes: list[Record], file: str, report: Report) -> None:
    for node in nodes:
        control_only = set(node.ctrl_deps) - set(node.data_deps)
        if control_only:
            report.add(
                "control-edge",
                file,
                node.id,
                f"node {node.id} ({node.name!r}) waits for node {min(control_only)} by ctrl_deps "
                "only, which older feeders do not read: name it in data_deps too",
                cause="control",
                is_note=True,
            )


def _check_drift(nodes: list[Record], file: str, report: Report) -> None:
    """Compare the compute time in whole microseconds with the sum of `duration_ns`."""
    exact = simulated = 0
    for node in nodes:
        duration = integer(node, "duration_ns")
        if node.type == NodeType.COMP and duration is not None:
            exact += duration
            simulated += node.duration_micros * 1000 or 1  # 0 us run as 1 ns
    # One microsecond is what rounding without a loss leaves.
    if abs(simulated - exact) > max(1000, exact * _DRIFT):
        report.add(
            "time-drift",
            file,
            None,
            f"compute lasts {exact} ns by its duration_ns, and {simulated} ns as simulated by "
            "duration_micros: round so that the remainder goes to the next node, or use the "
            "roofline encoding",
        )


def _check_start(nodes: list[Record], dag: Dag, file: str, system: System, report: Report) -> None:
    by_id = {node.id: node for node in nodes}
    roots = (by_id[dag.ids[index]] for index, waits in enumerate(dag.waits) if waits == 0)
    first = next((node for node in roots if node.type == NodeType.COMP), None)
    if first is None:
        return
    num_ops, tensor_size = integer(first, "num_ops"), integer(first, "tensor_size")
    if num_ops is None or tensor_size is None:
        return
    if num_ops == 0 or system.roofline_ns(num_ops, tensor_size) == 0:
        report.add(
            "zero-at-start",
            file,
            first.id,
            f"node {first.id} ({first.name!r}) runs at time 0 and, with num_ops {num_ops}, takes "
            "0 ns; ASTRA-sim asserts: give the first node at least 1 ns",
        )
