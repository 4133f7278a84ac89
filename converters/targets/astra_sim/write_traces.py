"""Write one Chakra trace per rank, in either encoding of time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from onerank.converters.targets.astra_sim.expand_symmetry import Layout, Place
from onerank.converters.targets.astra_sim.lower import Step, tag_of
from onerank.ir import Graph, Kind
from onerank.ir.atomic_write import replace_file
from onerank.ir.chakra import NodeWriter, Template, attribute, header
from onerank.ir.edges import I64

VERSION = "1.0.0"
COMP = 4
COMM = {Kind.SEND: 5, Kind.RECV: 6, Kind.COLLECTIVE: 7}


@dataclass(frozen=True, slots=True)
class Workload:
    """A step, and where its communications go on the ranks that have it.

    Attributes:
        graph: the graph the step was lowered from.
        step: the nodes, the same on all of `ranks`.
        places: place of each communication, by graph index.
        layout: the grid of ranks.
        ranks: the ranks that have this step.
        numbers: number of each group, by its ranks.
    """

    graph: Graph
    step: Step
    places: dict[int, Place]
    layout: Layout
    ranks: Sequence[int]
    numbers: dict[tuple[int, ...], int]

    def ends(self, place: Place) -> dict[int, int]:
        """Return for each rank the group's number, or for a send or receive the peer."""
        if place.shift:
            return {rank: self.layout.shifted(rank, place.shift) for rank in self.ranks}
        found: dict[int, int] = {}
        for rank in self.ranks:
            if rank not in found:
                members = place.group(self.layout, rank)
                found |= dict.fromkeys(members, self.numbers[members])
        return found


def write_ranks(workload: Workload, prefix: Path, *, roofline: bool) -> None:
    """Write `PREFIX.R.et` for each rank R of a step.

    The step is encoded once; a rank's file differs only in groups, peers and rank. Compute carries
    its time as `duration_micros`, or (roofline) as operations of 1 ps each.
    """
    graph = workload.graph
    ends = {index: (graph.node(index).kind, place) for index, place in workload.places.items()}
    slots = {end: slot for slot, end in enumerate(dict.fromkeys(ends.values()))}
    template = Template(
        _messages(workload, roofline=roofline),
        {
            1 + number: slots[ends[index]]
            for number, index in enumerate(workload.step.index)
            if index in ends
        },
    )
    found = {place: workload.ends(place) for _, place in slots}
    for rank in workload.ranks:
        values = [_ending(kind, found[place][rank], rank) for kind, place in slots]
        replace_file(prefix.with_name(f"{prefix.name}.{rank}.et"), template.fill(values).data)


def micros(durations_ns: list[int]) -> list[int]:
    """Round each duration to microseconds so that no running sum is off by a microsecond.

    ASTRA-sim runs 0 us as 1 ns; the rounding counts that in.
    """
    rounded: list[int] = []
    ahead = 0
    for duration in durations_ns:
        whole = max((duration - ahead + 500) // 1000, 0)
        rounded.append(whole)
        ahead += (whole * 1000 or 1) - duration
    return rounded


def _messages(workload: Workload, *, roofline: bool) -> list[bytes]:
    """Return the metadata and the nodes that all ranks have in common, without their ends."""
    graph, step = workload.graph, workload.step
    index = np.array(step.index, dtype=np.int64)
    nodes = graph.nodes.take(index)
    types = np.full(len(index), COMP)
    for kind, number in COMM.items():
        types[nodes.kind == kind] = number
    compute = np.flatnonzero(types == COMP)
    whole: I64 = nodes.duration_ns // 1000
    whole[compute] = micros(nodes.duration_ns[compute].tolist())
    made = NodeWriter(len(index))
    everyone = np.arange(len(index))
    made.write_heads(graph.strings.decode(nodes.name), types, step.waits_for, whole)
    made.write_flag("is_cpu_op", value=False)
    made.write_integers("duration_ns", "int64_val", everyone, nodes.duration_ns)
    if roofline:
        exact = nodes.duration_ns[compute]
        made.write_integers("num_ops", "int64_val", compute, exact * 1000 + 500)
        made.write_integers("tensor_size", "uint64_val", compute, np.ones_like(exact))
    talks = np.flatnonzero(types != COMP)
    made.write_integers("comm_size", "int64_val", talks, nodes.comm_bytes[talks])
    calls = np.flatnonzero(types == COMM[Kind.COLLECTIVE])
    made.write_integers("comm_type", "int64_val", calls, nodes.collective[calls])
    messages = np.flatnonzero((types != COMP) & (types != COMM[Kind.COLLECTIVE]))
    tags = np.array([tag_of(graph.node(at)) for at in index[messages].tolist()], dtype=np.int64)
    made.write_integers("comm_tag", "int32_val", messages, tags)
    return [header(VERSION), *made.messages()]


def _ending(kind: Kind, end: int, rank: int) -> bytes:
    """Return a collective's group, or a message's ends, as attributes."""
    if kind is Kind.COLLECTIVE:
        return _group(end)
    source, target = (rank, end) if kind is Kind.SEND else (end, rank)
    return attribute("comm_src", "int32_val", source) + attribute("comm_dst", "int32_val", target)


@lru_cache(maxsize=1 << 12)
def _group(number: int) -> bytes:
    return attribute("pg_name", "string_val", str(number))
