"""Rules on one file: it parses, its ids are unique, its dependencies exist and have no cycle."""

import heapq
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onerank.converters.targets.astra_sim.check.findings import Report
from onerank.ir.chakra import (
    ChakraRecords,
    EmptyFileError,
    MissingMetadataError,
    Record,
    TruncatedError,
    read_records,
)
from onerank.ir.errors import ChakraError


@dataclass(frozen=True, slots=True)
class Dag:
    """Dependencies of one file. Node i has the i-th lowest id, so the lowest index goes first.

    Attributes:
        ids: ids in ascending order.
        waits: per node, how many nodes it waits for.
        starts: the followers of node i are `followers[starts[i]:starts[i + 1]]`.
        followers: nodes that wait for a node, in the order of `starts`.
    """

    ids: list[int]
    waits: list[int]
    starts: list[int]
    followers: list[int]

    def followers_of(self, node: int) -> list[int]:
        """Return the nodes that wait for `node`."""
        return self.followers[self.starts[node] : self.starts[node + 1]]


@dataclass(frozen=True, slots=True)
class CompletionOrder:
    """The order of nodes when each completes at once and the lowest id goes first.

    Attributes:
        order: nodes in order of completion, without nodes on a cycle or after one.
        width: most nodes ready at the same time.
        widest_after: node after whose completion that was, None before the first.
    """

    order: list[int]
    width: int
    widest_after: int | None


@dataclass(frozen=True, slots=True)
class Structure:
    """A file that could be read.

    Attributes:
        records: its nodes.
        dag: their dependencies, without dangling ones and self-dependencies.
        schedule: the order that these dependencies allow.
        sound: whether there are no structural faults.
    """

    records: ChakraRecords
    dag: Dag
    schedule: CompletionOrder
    sound: bool


def read_structure(path: Path, report: Report) -> Structure | None:
    """Read a file and report its structural faults; return None if it has no readable node."""
    records = _read(path, report)
    if records is None:
        return None
    if not records.nodes:
        message = "no nodes after the metadata; expected at least one: export the graph again"
        report.add("no-nodes", path.name, None, message)
        return None
    before = len(report)
    _check_ids(path.name, records.nodes, report)
    dag = _build(path.name, records.nodes, report)
    schedule = lowest_id_first(dag)
    if len(schedule.order) < len(dag.ids):
        _report_cycle(path.name, dag, schedule, report)
    return Structure(records, dag, schedule, sound=len(report) == before)


def lowest_id_first(dag: Dag) -> CompletionOrder:
    """Complete the nodes one by one, the lowest ready id first."""
    # ASTRA-sim issues ready nodes in this order, so the result is its order on a rank that never
    # waits for another rank.
    waits = dag.waits.copy()
    ready = [node for node, count in enumerate(waits) if count == 0]
    order: list[int] = []
    width, widest_after = len(ready), None
    starts, followers = dag.starts, dag.followers
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for follower in followers[starts[node] : starts[node + 1]]:
            waits[follower] -= 1
            if waits[follower] == 0:
                heapq.heappush(ready, follower)
        if len(ready) > width:
            width, widest_after = len(ready), node
    return CompletionOrder(order, width, widest_after)


def _read(path: Path, report: Report) -> ChakraRecords | None:
    try:
        return read_records(path)
    except EmptyFileError as error:
        rule, problem = "empty-file", error
    except TruncatedError as error:
        rule, problem = "truncated-file", error
    except MissingMetadataError as error:
        rule, problem = "metadata-first", error
    except (ChakraError, OSError) as error:
        rule, problem = "unreadable-file", error
    report.add(rule, path.name, None, str(problem).removeprefix(f"{path}: "))
    return None


def _check_ids(file: str, nodes: list[Record], report: Report) -> None:
    first: dict[int, Record] = {}
    for node in nodes:
        other = first.setdefault(node.id, node)
        if other is not node:
            report.add(
                "unique-ids",
                file,
                node.id,
                f"id {node.id} is that of node number {other.position} ({other.name!r}) and of "
                f"number {node.position} ({node.name!r}); the last wins: give each its own id",
                cause="duplicate",
            )


def _build(file: str, nodes: list[Record], report: Report) -> Dag:
    # The feeder indexes a file by id. Of two nodes with the same id it issues the last.
    last = {node.id: node for node in nodes}
    ids = sorted(last)
    index = {node_id: place for place, node_id in enumerate(ids)}
    sources: list[int] = []
    counts: list[int] = []
    for node_id in ids:
        node = last[node_id]
        # Feeder v3 waits for both kinds of dependency.
        named = dict.fromkeys(node.data_deps + node.ctrl_deps)
        before = len(sources)
        for dependency in named:
            source = index.get(dependency)
            if dependency == node_id:
                message = f"node {node_id} ({node.name!r}) waits for itself: remove the dependency"
                report.add("self-dependency", file, node_id, message, cause="self")
            elif source is None:
                report.add(
                    "dangling-edge",
                    file,
                    node_id,
                    f"node {node_id} ({node.name!r}) waits for node {dependency}, which the file "
                    "does not hold: add that node or remove the dependency",
                    cause="dangling",
                )
            else:
                sources.append(source)
        counts.append(len(sources) - before)
    source = np.array(sources, dtype=np.int64)
    target = np.repeat(np.arange(len(ids)), counts)
    by_source = np.argsort(source, kind="stable")
    starts = np.searchsorted(source[by_source], np.arange(len(ids) + 1))
    return Dag(ids, counts, starts.tolist(), target[by_source].tolist())


def _report_cycle(file: str, dag: Dag, schedule: CompletionOrder, report: Report) -> None:
    done = set(schedule.order)
    left = [node for node in range(len(dag.ids)) if node not in done]
    # Every node that is left waits for another one that is left, so a walk against the dependencies
    # returns to a node that it has visited.
    before: dict[int, int] = {}
    for node in left:
        for follower in dag.followers_of(node):
            before.setdefault(follower, node)
    place: dict[int, int] = {}
    walk: list[int] = []
    node = left[0]
    while node not in place:
        place[node] = len(walk)
        walk.append(node)
        node = before[node]
    loop = [*walk[place[node] :], node]
    named = [str(dag.ids[member]) for member in loop]
    shown = named if len(named) <= 12 else [*named[:6], "...", *named[-5:]]
    report.add(
        "cycle",
        file,
        dag.ids[loop[0]],
        f"cycle of {len(loop) - 1} nodes: {' waits for '.join(shown)}; {len(left)} of "
        f"{len(dag.ids)} nodes, on or behind it, would be skipped: remove one dependency",
    )
