"""Write a Chakra trace for each rank, and derive its communication without reading the file."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from onerank.converters.targets.astra_sim.check import (
    CommNode,
    CommProgram,
    Dag,
    End,
    NodeType,
    Program,
    lowest_id_first,
)
from onerank.converters.targets.communication_placement import Placement, shift_rank
from onerank.converters.targets.lower_step import LoweredStep, lower, tag_of
from onerank.ir import Edges, Graph, Job, Kind, Nodes, StringTable, World
from onerank.ir.arrays import I64
from onerank.ir.chakra import NodeWriter, Template, attribute, header
from onerank.ir.chakra.metadata import VERSION

_COMMUNICATION = {
    Kind.SEND: NodeType.SEND,
    Kind.RECV: NodeType.RECV,
    Kind.COLLECTIVE: NodeType.COLL,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A step, the ranks that run it, and the groups and peers of its communication.

    Attributes:
        graph: the graph that the step was lowered from.
        step: the nodes, the same on all of `ranks`.
        placements: placement of each communication, by graph index.
        world: all ranks of the export.
        ranks: the ranks that run this step.
        group_numbers: number of each group, by its ranks.
    """

    graph: Graph
    step: LoweredStep
    placements: dict[int, Placement]
    world: World
    ranks: Sequence[int]
    group_numbers: dict[tuple[int, ...], int]

    def targets(self, placement: Placement) -> dict[int, int]:
        """Return by rank the number of a collective's group, or the peer of a send or receive."""
        if placement.shift:
            return {rank: shift_rank(self.world, rank, placement.shift) for rank in self.ranks}
        numbers: dict[int, int] = {}
        for rank in self.ranks:
            if rank not in numbers:
                members = placement.group_ranks(self.world, rank)
                numbers |= dict.fromkeys(members, self.group_numbers[members])
        return numbers


def write_ranks(workload: Workload, prefix: Path, *, roofline: bool) -> None:
    """Write `PREFIX.R.et` for each rank R of a step.

    The step is encoded once: the ranks' files differ only in groups and peers.

    Args:
        workload: a step and its ranks.
        prefix: path of the files without rank and suffix.
        roofline: encode compute times exactly, as operations of 1 ps each; otherwise as
            `duration_micros`.

    Raises:
        OSError: a file cannot be written.
    """
    graph = workload.graph
    uses = {
        index: (graph.node(index).kind, placement)
        for index, placement in workload.placements.items()
    }
    slots = {use: slot for slot, use in enumerate(dict.fromkeys(uses.values()))}
    template = Template(
        _messages(workload, roofline=roofline),
        {
            1 + number: slots[uses[index]]  # message 0 is the metadata
            for number, index in enumerate(workload.step.index)
            if index in uses
        },
    )
    targets = {placement: workload.targets(placement) for _, placement in slots}
    for rank in workload.ranks:
        values = [
            _target_attributes(kind, targets[placement][rank], rank) for kind, placement in slots
        ]
        # No temporary file per rank: an export publishes the directory as a whole when complete.
        prefix.with_name(f"{prefix.name}.{rank}.et").write_bytes(template.fill(values).data)


def micros(durations_ns: list[int]) -> list[int]:
    """Return the durations in microseconds, with every running sum off by less than one.

    The remainder of each rounding is carried to the next duration.
    """
    rounded: list[int] = []
    ahead = 0  # simulated minus exact time so far, in ns
    for duration in durations_ns:
        whole = max((duration - ahead + 500) // 1000, 0)
        rounded.append(whole)
        ahead += (whole * 1000 or 1) - duration  # ASTRA-sim runs 0 us as 1 ns
    return rounded


def _messages(workload: Workload, *, roofline: bool) -> list[bytes]:
    """Return the metadata and the nodes, without the attributes that differ between ranks."""
    graph, step = workload.graph, workload.step
    index = np.array(step.index, dtype=np.int64)
    nodes = graph.nodes.take(index)
    types = np.full(len(index), int(NodeType.COMP))
    for kind, number in _COMMUNICATION.items():
        types[nodes.kind == kind] = number
    compute = np.flatnonzero(types == NodeType.COMP)
    whole: I64 = nodes.duration_ns // 1000
    whole[compute] = micros(nodes.duration_ns[compute].tolist())
    # Ids are the numbers of the step. ASTRA-sim issues ready nodes lowest id first, so all ranks
    # issue their collectives in one order; opposite orders on two ranks would deadlock.
    writer = NodeWriter(len(index))
    all_nodes = np.arange(len(index))
    # Every dependency goes into data_deps: older feeders of ASTRA-sim read no ctrl_deps. Attribute
    # types are those that both versions of the feeder accept; each throws on some others.
    writer.write_heads(graph.strings.decode(nodes.name), types, step.waits_for, whole)
    # A CPU operation would cost the run's statistics.
    writer.write_flag("is_cpu_op", value=False)
    writer.write_integers("duration_ns", "int64_val", all_nodes, nodes.duration_ns)
    if roofline:
        # 1000 operations of 1 ps are 1 ns. Without the extra 500 ASTRA-sim truncates: a chain of
        # 1000 nodes lost 27 ns.
        exact = nodes.duration_ns[compute]
        writer.write_integers("num_ops", "int64_val", compute, exact * 1000 + 500)
        writer.write_integers("tensor_size", "uint64_val", compute, np.ones_like(exact))
    communications = np.flatnonzero(types != NodeType.COMP)
    writer.write_integers(
        "comm_size", "int64_val", communications, nodes.comm_bytes[communications]
    )
    collectives = np.flatnonzero(types == NodeType.COLL)
    writer.write_integers("comm_type", "int64_val", collectives, nodes.collective[collectives])
    messages = np.flatnonzero((types != NodeType.COMP) & (types != NodeType.COLL))
    tags = np.array([tag_of(graph.node(at)) for at in index[messages].tolist()], dtype=np.int64)
    writer.write_integers("comm_tag", "int32_val", messages, tags)
    return [header(VERSION), *writer.messages()]


def _target_attributes(kind: Kind, target: int, rank: int) -> bytes:
    """Return the attributes that name a collective's group, or a message's two ranks."""
    if kind is Kind.COLLECTIVE:
        return _group_attribute(target)
    source, destination = (rank, target) if kind is Kind.SEND else (target, rank)
    return attribute("comm_src", "int32_val", source) + attribute(
        "comm_dst", "int32_val", destination
    )


@lru_cache(maxsize=1 << 12)
def _group_attribute(number: int) -> bytes:
    return attribute("pg_name", "string_val", str(number))


def rank_programs(workload: Workload, name: str) -> dict[int, Program]:
    """Return the communication program of each rank of a workload.

    Args:
        workload: a step and its ranks.
        name: prefix of the files.
    """
    numbers, dag = _communication_dag(workload)
    order = lowest_id_first(dag).order
    indices = [workload.step.index[number] for number in numbers]
    kinds = {index: workload.graph.node(index).kind for index in indices}
    slots = {
        use: slot
        for slot, use in enumerate(
            dict.fromkeys((kinds[index], workload.placements[index]) for index in indices)
        )
    }
    targets = {placement: workload.targets(placement) for _, placement in slots}
    first = min(workload.ranks)
    calls: list[CommNode | None] = [
        _call(workload.graph, index, number, targets[workload.placements[index]][first], first)
        for number, index in zip(numbers, indices, strict=True)
    ]
    node_slots: list[int | None] = [
        slots[kinds[index], workload.placements[index]] for index in indices
    ]
    program = CommProgram(dag, order, calls, node_slots)
    return {
        rank: Program(
            f"{name}.{rank}.et",
            program,
            [_end(kind, targets[placement][rank], rank) for kind, placement in slots],
        )
        for rank in workload.ranks
    }


def _communication_dag(workload: Workload) -> tuple[list[int], Dag]:
    """Return the numbers of a step's communications, and their dependencies through compute."""
    step = workload.step
    counts = [len(predecessors) for predecessors in step.waits_for]
    source = np.array(
        [predecessor for predecessors in step.waits_for for predecessor in predecessors],
        dtype=np.int64,
    )
    target = np.repeat(np.arange(len(step)), counts)
    edges = Edges.from_pairs(len(step), source, target, np.zeros(len(source), dtype=np.uint8))
    graph = Graph(Nodes.of(len(step)), edges, StringTable(), Job())
    lanes = [index if index in workload.placements else None for index in step.index]
    for number, index in enumerate(step.index):
        if workload.graph.node(index).kind in (Kind.COLLECTIVE, Kind.SEND):
            # The exporter put collectives and sends on one lane, so they are one chain.
            lanes[number] = -1
    contracted: LoweredStep = lower(graph, lanes)
    # `Dag` requires ascending ids; `lower` gives a topological order.
    numbers = sorted(contracted.index)
    position = {number: at for at, number in enumerate(numbers)}
    waits = [0] * len(numbers)
    followers: list[list[int]] = [[] for _ in numbers]
    for number, predecessors in zip(contracted.index, contracted.waits_for, strict=True):
        waits[position[number]] = len(predecessors)
        for predecessor in predecessors:
            followers[position[contracted.index[predecessor]]].append(position[number])
    starts = np.concatenate([[0], np.cumsum([len(nodes) for nodes in followers])]).astype(int)
    return numbers, Dag(
        numbers, waits, starts.tolist(), [node for nodes in followers for node in nodes]
    )


def _call(graph: Graph, index: int, number: int, target: int, rank: int) -> CommNode:
    """Return a communication of `rank`, given its group's number or its peer."""
    node = graph.node(index)
    size = node.value("comm_bytes")
    kind = _COMMUNICATION[node.kind]
    end = _end(node.kind, target, rank)
    if isinstance(end, str):
        return CommNode(number, kind, size, collective=int(node.collective), group=end)
    return CommNode(number, kind, size, source=end[0], target=end[1], tag=tag_of(node))


def _end(kind: Kind, target: int, rank: int) -> End:
    """Return the group's name, or the sending and the receiving rank."""
    if kind is Kind.COLLECTIVE:
        return str(target)
    return (rank, target) if kind is Kind.SEND else (target, rank)
