"""Derive every rank's communication program from a workload, as the checker reads it from files."""

import numpy as np

from onerank.converters.targets.astra_sim.check import (
    Call,
    CommProgram,
    Dag,
    End,
    NodeType,
    Program,
    lowest_id_first,
)
from onerank.converters.targets.astra_sim.write_traces import COMM, Workload
from onerank.converters.targets.lower import Step, lower, tag_of
from onerank.ir import Edges, Graph, Job, Kind, Nodes, StringTable


def programs(workload: Workload, name: str) -> dict[int, Program]:
    """Return each rank's communication, and what of it waits for what.

    Args:
        workload: a step and its ranks.
        name: prefix of the files.
    """
    numbers, dag = _communication(workload)
    order = lowest_id_first(dag).order
    indices = [workload.step.index[number] for number in numbers]
    kinds = {index: workload.graph.node(index).kind for index in indices}
    slots = {
        end: slot
        for slot, end in enumerate(
            dict.fromkeys((kinds[index], workload.places[index]) for index in indices)
        )
    }
    ends = {place: workload.ends(place) for _, place in slots}
    first = min(workload.ranks)
    calls: list[Call | None] = [
        _call(workload.graph, index, number, ends[workload.places[index]][first], first)
        for number, index in zip(numbers, indices, strict=True)
    ]
    own: list[int | None] = [slots[kinds[index], workload.places[index]] for index in indices]
    course = CommProgram(dag, order, calls, own)
    return {
        rank: Program(
            f"{name}.{rank}.et",
            course,
            [_end(kind, ends[place][rank], rank) for kind, place in slots],
        )
        for rank in workload.ranks
    }


def _communication(workload: Workload) -> tuple[list[int], Dag]:
    """Return the numbers of a step's communications, and their dependencies through compute."""
    step = workload.step
    counts = [len(awaited) for awaited in step.waits_for]
    source = np.array([one for awaited in step.waits_for for one in awaited], dtype=np.int64)
    target = np.repeat(np.arange(len(step)), counts)
    edges = Edges.from_pairs(len(step), source, target, np.zeros(len(source), dtype=np.uint8))
    graph = Graph(Nodes.of(len(step)), edges, StringTable(), Job())
    lanes = [index if index in workload.places else None for index in step.index]
    for number, index in enumerate(step.index):
        if workload.graph.node(index).kind in (Kind.COLLECTIVE, Kind.SEND):
            lanes[number] = -1  # they are one chain
    contracted: Step = lower(graph, lanes)
    numbers = sorted(contracted.index)
    place = {number: at for at, number in enumerate(numbers)}
    waits = [0] * len(numbers)
    followers: list[list[int]] = [[] for _ in numbers]
    for number, awaited in zip(contracted.index, contracted.waits_for, strict=True):
        waits[place[number]] = len(awaited)
        for other in awaited:
            followers[place[contracted.index[other]]].append(place[number])
    starts = np.concatenate([[0], np.cumsum([len(those) for those in followers])]).astype(int)
    return numbers, Dag(
        numbers, waits, starts.tolist(), [one for those in followers for one in those]
    )


def _call(graph: Graph, index: int, number: int, other: int, rank: int) -> Call:
    node = graph.node(index)
    size = node.value("comm_bytes")
    kind = NodeType(COMM[node.kind])
    end = _end(node.kind, other, rank)
    if isinstance(end, str):
        return Call(number, kind, size, collective=int(node.collective), group=end)
    return Call(number, kind, size, source=end[0], target=end[1], tag=tag_of(node))


def _end(kind: Kind, other: int, rank: int) -> End:
    """Return whom a rank meets, given a group's number or a peer."""
    if kind is Kind.COLLECTIVE:
        return str(other)
    return (rank, other) if kind is Kind.SEND else (other, rank)
