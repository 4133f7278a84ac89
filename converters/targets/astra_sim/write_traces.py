"""Write one Chakra trace per rank, with compute times in microseconds or exact."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from onerank.converters.targets.expand_symmetry import Placement, shift_rank
from onerank.converters.targets.lower import LoweredStep, tag_of
from onerank.ir import Graph, Kind, World
from onerank.ir.chakra import NodeWriter, Template, attribute, header
from onerank.ir.graph import I64
from onerank.ir.output_files import replace_file

VERSION = "1.0.0"
COMP = 4
COMM = {Kind.SEND: 5, Kind.RECV: 6, Kind.COLLECTIVE: 7}


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
        replace_file(prefix.with_name(f"{prefix.name}.{rank}.et"), template.fill(values).data)


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
    types = np.full(len(index), COMP)
    for kind, number in COMM.items():
        types[nodes.kind == kind] = number
    compute = np.flatnonzero(types == COMP)
    whole: I64 = nodes.duration_ns // 1000
    whole[compute] = micros(nodes.duration_ns[compute].tolist())
    writer = NodeWriter(len(index))
    all_nodes = np.arange(len(index))
    writer.write_heads(graph.strings.decode(nodes.name), types, step.waits_for, whole)
    writer.write_flag("is_cpu_op", value=False)
    writer.write_integers("duration_ns", "int64_val", all_nodes, nodes.duration_ns)
    if roofline:
        # 1000 operations of 1 ps are 1 ns. Without the extra 500 ASTRA-sim truncates: a chain of
        # 1000 nodes lost 27 ns.
        exact = nodes.duration_ns[compute]
        writer.write_integers("num_ops", "int64_val", compute, exact * 1000 + 500)
        writer.write_integers("tensor_size", "uint64_val", compute, np.ones_like(exact))
    communications = np.flatnonzero(types != COMP)
    writer.write_integers(
        "comm_size", "int64_val", communications, nodes.comm_bytes[communications]
    )
    collectives = np.flatnonzero(types == COMM[Kind.COLLECTIVE])
    writer.write_integers("comm_type", "int64_val", collectives, nodes.collective[collectives])
    messages = np.flatnonzero((types != COMP) & (types != COMM[Kind.COLLECTIVE]))
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
