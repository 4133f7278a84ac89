"""The communication of every rank of an export, to match ranks without reading all their files."""

import numpy as np

from onerank.converters.astra_sim.encode import COMM, Workload
from onerank.converters.astra_sim.lower import Step, lower
from onerank.converters.astra_sim.peers import tag_of
from onerank.ir import Edges, Graph, Job, Kind, Nodes, StringTable
from onerank.ir.check import Call, Dag, NodeType, Program, lowest_id_first


def programs(workload: Workload, name: str) -> dict[int, Program]:
    """Return each rank's communication, and what of it waits for what.

    Args:
        workload: a step and its ranks.
        name: prefix of the files.
    """
    numbers, dag = _communication(workload)
    order = lowest_id_first(dag).order
    indices = [workload.step.index[number] for number in numbers]
    made: dict[tuple[int, int, int], Call] = {}
    ends = {place: workload.ends(place) for place in dict.fromkeys(workload.places.values())}
    found: dict[int, Program] = {}
    for rank in workload.ranks:
        calls: list[Call | None] = []
        for number, index in zip(numbers, indices, strict=True):
            place = workload.places[index]
            end = ends[place][rank]
            key = (number, end, rank if place.shift else -1)
            if key not in made:
                made[key] = _call(workload.graph, index, number, end, rank)
            calls.append(made[key])
        found[rank] = Program(f"{name}.{rank}.et", dag, calls, order)
    return found


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


def _call(graph: Graph, index: int, number: int, end: int, rank: int) -> Call:
    node = graph.node(index)
    size = node.value("comm_bytes")
    kind = NodeType(COMM[node.kind])
    if node.kind is Kind.COLLECTIVE:
        return Call(number, kind, size, collective=int(node.collective), group=str(end))
    source, target = (rank, end) if node.kind is Kind.SEND else (end, rank)
    return Call(number, kind, size, source=source, target=target, tag=tag_of(node))
