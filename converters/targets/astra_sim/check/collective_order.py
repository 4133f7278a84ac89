"""Find collectives of one group whose order on a rank depends on when their inputs arrive.

ASTRA-sim matches the collectives of a group by the order in which each rank issues them. Where no
dependency orders two of them, a late message or a slower kernel may swap them on one rank alone.
The group then stalls, and ASTRA-sim exits with status 0.
"""

from collections.abc import Sequence

import numpy as np

from onerank.converters.targets.astra_sim.check.comm_programs import (
    NodeType,
    Program,
    group_text,
)
from onerank.converters.targets.astra_sim.check.findings import Report


def check_order(programs: Sequence[Program], report: Report) -> None:
    """Report the first two unordered collectives of each group, once for ranks of one comm."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for program in programs:
        numbers: dict[str, int] = {}
        lanes = tuple(
            numbers.setdefault(end, len(numbers)) if isinstance(end, str) else -1
            for end in program.ends
        )
        key = id(program.comm), lanes
        if numbers and key not in seen:
            seen.add(key)
            _check(program, list(numbers), lanes, report)


def _check(program: Program, groups: list[str], lanes: tuple[int, ...], report: Report) -> None:
    """Follow, for each group, the latest of its collectives that each node waits for.

    In an order that respects all dependencies it suffices to compare neighbours: the collectives
    are ordered if each waits for the one before it.
    """
    comm = program.comm
    dag = comm.dag
    awaited = np.full((len(dag.ids), len(groups)), -1, dtype=np.int64)
    latest: dict[int, int] = {}
    issued: list[int] = []
    for node in comm.order:
        call, slot = comm.calls[node], comm.slots[node]
        if call is not None and slot is not None and call.type == NodeType.COLL:
            lane = lanes[slot]
            before = latest.get(lane)
            if before is not None and awaited[node, lane] != before:
                first, second = sorted((dag.ids[issued[before]], dag.ids[node]))
                report.add(
                    "unordered-collectives",
                    program.file,
                    second,
                    f"nodes {first} and {second} are collectives of {group_text(groups[lane])} and "
                    "neither waits for the other: the first to start depends on arrival times, "
                    "and ranks that start different ones stall: add a dependency between them",
                    cause=groups[lane],
                )
            awaited[node, lane] = latest[lane] = len(issued)
            issued.append(node)
        followers = dag.followers_of(node)
        if followers:
            awaited[followers] = np.maximum(awaited[followers], awaited[node])
