"""Find collectives whose order on a rank depends on when their inputs arrive.

A rank of ASTRA-sim runs one collective at a time and matches the collectives of a group by the
order in which each rank issues them. Where no dependency orders two of them, a late message or a
slower kernel may swap them on one rank alone. Both ranks then wait for each other, and ASTRA-sim
exits with status 0. The two may be of one group, or of two groups that share another rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onerank.converters.targets.astra_sim.check.comm_programs import (
    WORLD,
    CommProgram,
    NodeType,
    Program,
    group_text,
)
from onerank.converters.targets.astra_sim.check.findings import Report


def check_order(
    programs: Sequence[Program], members: Mapping[str, frozenset[int]], report: Report
) -> None:
    """Report the first two unordered collectives of each group and pair of groups, once per step.

    Args:
        programs: the ranks' programs.
        members: ranks of each group.
        report: receives the findings.
    """
    unordered: dict[tuple[int, tuple[int, ...]], list[_Pair]] = {}
    reported: set[tuple[int, tuple[int, ...], _Pair]] = set()
    shared = _SharedRanks(members)
    for program in programs:
        lanes_by_group: dict[str, int] = {}
        lanes = tuple(
            lanes_by_group.setdefault(end, len(lanes_by_group)) if isinstance(end, str) else -1
            for end in program.ends
        )
        # Equal ranks have one CommProgram and number their groups alike, so one is searched.
        key = id(program.comm), lanes
        if lanes_by_group and key not in unordered:
            unordered[key] = _unordered(program.comm, lanes, len(lanes_by_group))
        groups = [*lanes_by_group]
        for pair in unordered.get(key, ()):
            first_group, second_group = groups[pair.lanes[0]], groups[pair.lanes[1]]
            if (*key, pair) not in reported and shared.between(first_group, second_group):
                reported.add((*key, pair))
                _report(program.file, pair, first_group, second_group, report)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two collectives without an order.

    Attributes:
        nodes: their ids, ascending.
        lanes: the numbers of their groups on the rank.
    """

    nodes: tuple[int, int]
    lanes: tuple[int, int]


class _SharedRanks:
    """Answers whether two groups share two ranks or more.

    Args:
        members: ranks of each group; the default group is not among them.
    """

    def __init__(self, members: Mapping[str, frozenset[int]]) -> None:
        self._members = members
        self._known: dict[tuple[str, str], bool] = {}

    def between(self, first: str, second: str) -> bool:
        """Whether groups of a rank share another rank; every group is within the default one."""
        if first == second or WORLD in (first, second):
            return True
        key = (first, second)
        if key not in self._known:
            few, many = sorted((self._members[first], self._members[second]), key=len)
            self._known[key] = sum(rank in many for rank in few) > 1
        return self._known[key]


def _unordered(comm: CommProgram, lanes: tuple[int, ...], groups: int) -> list[_Pair]:
    """Return the first unordered collectives of each lane and pair of lanes.

    Follows, for each lane, the latest of its collectives that each node waits for. In an order that
    respects all dependencies it suffices to compare neighbours: the collectives are ordered if each
    waits for the one before it.

    Args:
        comm: a step's communication.
        lanes: number of the group of each slot, -1 for a message.
        groups: number of groups.
    """
    dag = comm.dag
    awaited = np.full((len(dag.ids), groups), -1, dtype=np.int64)
    latest = np.full(groups, -1, dtype=np.int64)
    issued: list[int] = []
    pairs: dict[tuple[int, int], _Pair] = {}
    for node in comm.order:
        call, slot = comm.calls[node], comm.slots[node]
        if call is not None and slot is not None and call.type == NodeType.COLL:
            lane = lanes[slot]
            others: list[int] = np.flatnonzero(awaited[node] != latest).tolist()
            for other in others:
                before = issued[int(latest[other])]
                ends = sorted(((dag.ids[before], other), (dag.ids[node], lane)))
                pair = _Pair((ends[0][0], ends[1][0]), (ends[0][1], ends[1][1]))
                pairs.setdefault((min(lane, other), max(lane, other)), pair)
            awaited[node, lane] = latest[lane] = len(issued)
            issued.append(node)
        followers = dag.followers_of(node)
        if followers:
            awaited[followers] = np.maximum(awaited[followers], awaited[node])
    return [*pairs.values()]


def _report(file: str, pair: _Pair, first_group: str, second_group: str, report: Report) -> None:
    first, second = pair.nodes
    if first_group == second_group:
        groups = f"of {group_text(first_group)}"
    else:
        groups = f"of {group_text(first_group)} and {group_text(second_group)}, which share ranks,"
    report.add(
        "unordered-collectives",
        file,
        second,
        f"nodes {first} and {second} are collectives {groups} and neither waits for the other: "
        "arrival times decide which starts first, and ranks that start different ones stall: add "
        "a dependency between them",
        cause=tuple(sorted((first_group, second_group))),
    )
