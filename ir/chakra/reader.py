"""Read a Chakra trace (`.et`) into a graph, as it is or without broken dependencies."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from onerank.ir.arrays import I64, Mask
from onerank.ir.chakra.attributes import whole_micros
from onerank.ir.chakra.decode_nodes import Decoded, decode
from onerank.ir.chakra.dependencies import Dependencies, dependencies
from onerank.ir.chakra.encode import Encoder
from onerank.ir.chakra.framing import ChakraFile, MessageSource
from onerank.ir.chakra.metadata import decode_job, has_onerank_schema, is_encoded_job
from onerank.ir.edges import Edges, topological_order
from onerank.ir.errors import GraphError
from onerank.ir.graph import Graph
from onerank.ir.nodes import Nodes, StringTable
from onerank.ir.notes import Note


def read(path: str | Path) -> Graph:
    """Read a Chakra `.et` file; `write` of the graph reproduces every message.

    The column `foreign` keeps the message of every node of another tool's file, and of a node whose
    message contains more than its columns. `Graph.foreign` keeps such metadata.

    Raises:
        ChakraError: the file is not a Chakra 1.0 trace, or is damaged.
        GraphError: two nodes share an id, or a dependency is not in the file. Cycles are accepted.
        OSError: the file cannot be read.
    """

    def resolve(nodes: Nodes, deps: Dependencies, sources: I64) -> Edges:
        _refuse_dangling(Path(path), nodes, deps, sources)
        return Edges(deps.offsets, sources, deps.reason)

    return _read_with(path, resolve)


# (nodes, dependencies, index of each dependency's source or -1 if it is missing) -> edges.
_Resolve = Callable[[Nodes, Dependencies, I64], Edges]


def _read_with(path: str | Path, resolve: _Resolve) -> Graph:
    """Read like `read`; `resolve` decides about dependencies on missing nodes."""
    strings = StringTable()
    with ChakraFile(path) as file:
        job = decode_job(file.metadata, f"{file.path}: message 0 (byte 0)")
        decoded = decode(file, strings)
        deps = decoded.dependencies
        edges = resolve(decoded.nodes, deps, _sources(file.path, decoded.nodes, deps))
        count = len(decoded.nodes)
        rows = np.arange(count)
        # Keeping a message is never wrong, so files of other tools need no comparison.
        if has_onerank_schema(file.metadata):
            rows = _rows_that_say_more(file, decoded, edges, strings)
        foreign = np.full(count, None, dtype=object)
        foreign[rows] = file.take(rows)
        foreign_metadata = None if is_encoded_job(file.metadata, job) else file.metadata
    return Graph(replace(decoded.nodes, foreign=foreign), edges, strings, job, foreign_metadata)


def _sources(path: Path, nodes: Nodes, deps: Dependencies) -> I64:
    """Return the index of each dependency's source, int64[m]; -1 if the file has no such node."""
    order = np.argsort(nodes.id, kind="stable")
    by_id = nodes.id[order]
    repeated = np.flatnonzero(by_id[1:] == by_id[:-1])
    if len(repeated):
        first, second = order[repeated[0]], order[repeated[0] + 1]
        raise GraphError(
            f"{path}: nodes {first} and {second} of the file both have id {by_id[repeated[0]]};"
            " ids must be unique; renumber the nodes",
            code="graph-repeated-id",
        )
    if not len(deps.ids):
        return np.empty(0, dtype=np.int64)
    # An id above all others has no place in the array.
    places = np.minimum(np.searchsorted(by_id, deps.ids), len(by_id) - 1)
    is_there = by_id[places] == deps.ids
    sources = order[places]
    return sources if is_there.all() else np.where(is_there, sources, -1)


def _refuse_dangling(path: Path, nodes: Nodes, deps: Dependencies, sources: I64) -> None:
    missing = np.flatnonzero(sources < 0)
    if len(missing):
        waiting = int(np.count_nonzero(deps.offsets <= missing[0])) - 1
        raise GraphError(
            f"{path}: node {nodes.id[waiting]} waits for node {deps.ids[missing[0]]}, which is"
            f" not in the file ({len(missing)} such edges); `onerank convert --repair` drops them",
            code="graph-dangling-edge",
        )


def _rows_that_say_more(
    messages: MessageSource, decoded: Decoded, edges: Edges, strings: StringTable
) -> I64:
    """Return the nodes whose message differs from their encoded columns."""
    nodes = decoded.nodes
    is_same = decoded.exact & (whole_micros(nodes) == decoded.duration_micros.astype(np.int64))
    # `exact` is a quick, sufficient test; the remaining nodes are encoded and compared. The encoder
    # writes negative times as 0, so nodes with such times differ in any case.
    rows = np.flatnonzero(~is_same & (nodes.start_ns >= 0) & (nodes.duration_ns >= 0))
    if len(rows):
        encoder = Encoder(nodes, dependencies(nodes, edges), strings)
        encoded = encoder.encode(rows).cut()
        stored = messages.take(rows)
        is_same[rows] = [ours == theirs for ours, theirs in zip(encoded, stored, strict=True)]
    return np.flatnonzero(~is_same)


@dataclass(frozen=True, slots=True)
class Repairs:
    """Number of dropped dependencies, by kind.

    Attributes:
        dangling: dependencies on a node that is not in the file.
        self_dependencies: dependencies of a node on itself.
        cyclic: dependencies that closed a cycle of two nodes or more.
    """

    dangling: int = 0
    self_dependencies: int = 0
    cyclic: int = 0

    @property
    def total(self) -> int:
        """Number of dropped dependencies."""
        return self.dangling + self.self_dependencies + self.cyclic

    @property
    def note(self) -> Note:
        """The counts as a note on the trace."""
        return Note(
            f"{self.total} broken dependencies were dropped: {self.dangling} on nodes that are "
            f"not in the file, {self.self_dependencies} of nodes on themselves, {self.cyclic} "
            "that closed a cycle; start times in replay may be too early",
            code="dependencies-dropped",
        )


def read_repaired(path: str | Path) -> tuple[Graph, Repairs]:
    """Read a Chakra `.et` file, and drop dangling and cyclic dependencies.

    The graph's notes count the dropped ones. An intact file gives the same graph as `read`.

    Raises:
        ChakraError: the file is not a Chakra 1.0 trace, or is damaged.
        GraphError: two nodes share an id, so a dependency on it is ambiguous.
        OSError: the file cannot be read.
    """
    repairs_made: list[Repairs] = []

    def resolve(nodes: Nodes, dependencies: Dependencies, sources: I64) -> Edges:
        edges, repairs = _repaired(nodes, dependencies, sources)
        repairs_made.append(repairs)
        return edges

    graph = _read_with(path, resolve)
    (repairs,) = repairs_made
    if repairs.total:
        measurement = graph.job.measurement
        notes = (*measurement.notes, repairs.note)
        measurement = msgspec.structs.replace(measurement, notes=notes)
        graph = replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))
    return graph, repairs


def _repaired(nodes: Nodes, dependencies: Dependencies, sources: I64) -> tuple[Edges, Repairs]:
    """Return the remaining edges, and the number of dropped ones.

    Args:
        nodes: columns of the n nodes.
        dependencies: ids that each node waits for, m in all.
        sources: index of each dependency's source, int64[m]; -1 if the file has no such node.
    """
    targets: I64 = np.repeat(np.arange(len(nodes)), np.diff(dependencies.offsets))
    dangling, on_itself = sources < 0, sources == targets
    is_kept = ~(dangling | on_itself)
    edges = _edges(len(nodes), sources, targets, dependencies, is_kept)
    # First the order, because the search is slow and needed only for the nodes on cycles and after
    # them.
    leftover = topological_order(edges)[1]
    cyclic = 0
    if len(leftover):
        closes = np.zeros(len(is_kept), dtype=bool)
        closes[np.flatnonzero(is_kept)] = _closing_edges(nodes, edges, leftover)
        cyclic = int(closes.sum())
        is_kept &= ~closes
        edges = _edges(len(nodes), sources, targets, dependencies, is_kept)
    return edges, Repairs(int(dangling.sum()), int(on_itself.sum()), cyclic)


def _edges(
    count: int, sources: I64, targets: I64, dependencies: Dependencies, is_kept: Mask
) -> Edges:
    return Edges.from_pairs(count, sources[is_kept], targets[is_kept], dependencies.reason[is_kept])


def _closing_edges(nodes: Nodes, edges: Edges, leftover: I64) -> Mask:
    """Return the back edges of a depth-first search, bool[m]: they close the cycles.

    The search walks from each node to the nodes it waits for. It starts at the latest nodes, so a
    back edge is one on which an earlier node waits for a later one.
    """
    by_time = np.lexsort((leftover, nodes.start_ns[leftover]))
    unvisited, within, done = 0, 1, 2
    state = np.full(len(nodes), done, dtype=np.uint8)
    state[leftover] = unvisited
    closing = np.zeros(len(edges), dtype=bool)
    sources, offsets = edges.source.tolist(), edges.offsets.tolist()
    for root in leftover[by_time][::-1].tolist():
        if state[root] != unvisited:
            continue
        state[root] = within
        stack = [(root, offsets[root])]
        while stack:
            node, edge = stack.pop()
            if edge == offsets[node + 1]:
                state[node] = done
                continue
            stack.append((node, edge + 1))
            source = sources[edge]
            if state[source] == within:
                closing[edge] = True
            elif state[source] == unvisited:
                state[source] = within
                stack.append((source, offsets[source]))
    return closing
