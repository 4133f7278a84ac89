"""Derive every rank's communication program from its workload, without reading its file."""

import numpy as np

from onerank.converters.targets.astra_sim.check import (
    CommCall,
    CommProgram,
    Dag,
    End,
    NodeType,
    Program,
    lowest_id_first,
)
from onerank.converters.targets.astra_sim.write_traces import COMM, Workload
from onerank.converters.targets.lower import LoweredStep, lower, tag_of
from onerank.ir import Edges, Graph, Job, Kind, Nodes, StringTable


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
    calls: list[CommCall | None] = [
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


def _call(graph: Graph, index: int, number: int, target: int, rank: int) -> CommCall:
    """Return a communication of `rank`, given its group's number or its peer."""
    node = graph.node(index)
    size = node.value("comm_bytes")
    kind = NodeType(COMM[node.kind])
    end = _end(node.kind, target, rank)
    if isinstance(end, str):
        return CommCall(number, kind, size, collective=int(node.collective), group=end)
    return CommCall(number, kind, size, source=end[0], target=end[1], tag=tag_of(node))


def _end(kind: Kind, target: int, rank: int) -> End:
    """Return the group's name, or the sending and the receiving rank."""
    if kind is Kind.COLLECTIVE:
        return str(target)
    return (rank, target) if kind is Kind.SEND else (target, rank)
