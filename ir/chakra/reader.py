"""Read a Chakra trace (`.et`) into a graph, as it is or without broken dependencies."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import I64, U8, U64, Mask
from onerank.ir.chakra.attributes import (
    GPU_OPS,
    IO_COLUMNS,
    NODE_TYPES,
    readers,
    variant_of,
    whole_micros,
)
from onerank.ir.chakra.decode_columns import ColumnDecoder
from onerank.ir.chakra.dependencies import NONE, Dependencies, dependencies
from onerank.ir.chakra.encode import Encoder
from onerank.ir.chakra.et_def_pb2 import COMP_NODE, AttributeProto, IOInfo
from onerank.ir.chakra.framing import UNREADABLE, ChakraFile, MessageSource, parse_raw_node
from onerank.ir.chakra.metadata import decode_job, has_onerank_schema, is_encoded_job
from onerank.ir.edges import Edges, topological_order
from onerank.ir.enums import COMMUNICATION, GPU_COMPUTE, Kind, Reason
from onerank.ir.errors import ChakraError, GraphError
from onerank.ir.graph import Graph
from onerank.ir.nodes import Nodes, StringTable, default_of, dtype_of, is_text
from onerank.ir.notes import Note

# Most distinct attributes that stay decoded; further ones (exact times, counts) hardly repeat.
_REMEMBERED = 1 << 16


def decode_each(
    messages: Iterable[bytes], strings: StringTable, place: Callable[[int], str]
) -> tuple[Nodes, Dependencies]:
    """Parse node messages with protobuf; return their columns (`foreign` not set).

    An attribute whose type or value its column cannot hold leaves the column at its default.
    A time in microseconds over the range of int64 nanoseconds becomes the largest of these.

    Raises:
        ChakraError: a message is not a Node; begins with `place(its index)`.
    """
    collected = _Collected(strings)
    for index, message in enumerate(messages):
        try:
            collected.add(index, message)
        except UNREADABLE as error:
            raise not_a_node(place(index), error) from error
    return collected.nodes(), collected.dependencies()


def not_a_node(place: str, error: Exception) -> ChakraError:
    """Return the error for bytes that protobuf cannot parse as a Node."""
    reason = str(error)
    if isinstance(error, UnicodeDecodeError) or "UTF-8" in reason:
        reason = f"a text in it is not UTF-8 ({reason})"
    return ChakraError(
        f"{place} is not a Chakra Node: {reason}; the file is damaged, or not a Chakra 1.0 trace",
        code="chakra-bad-node",
    )


class _Collected:
    """Column values of the messages parsed so far.

    `_rows` maps column -> (node index -> value), because most nodes set few columns.
    """

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._readers = readers(strings.intern)
        self._rows: dict[str, dict[int, Any]] = {}
        for column, _ in self._readers.values():
            self._rows[column] = {}
        for columns in IO_COLUMNS.values():
            self._rows.update({column: {} for column in columns})
        self._attributes: dict[bytes, tuple[dict[int, Any], Any] | None] = {}
        self._names: dict[bytes, int] = {}
        self._ids: list[int] = []
        self._name: list[int] = []
        self._type: list[int] = []
        self._start: list[int] = []
        self._duration: list[int] = []
        self._deps: list[int] = []
        self._ctrl: list[int] = []
        self._data: list[int] = []

    def add(self, index: int, message: bytes) -> None:
        node = parse_raw_node(message)
        self._ids.append(node.id)
        name = node.name
        code = self._names.get(name)
        if code is None:
            code = self._names[name] = self._strings.intern(name.decode())
        self._name.append(code)
        self._type.append(node.type)
        self._start.append(node.start_time_micros)
        self._duration.append(node.duration_micros)
        deps = self._deps
        before = len(deps)
        deps.extend(node.ctrl_deps)
        between = len(deps)
        deps.extend(node.data_deps)
        self._ctrl.append(between - before)
        self._data.append(len(deps) - between)
        if node.inputs:
            self._add_io(index, "inputs", node.inputs)
        if node.outputs:
            self._add_io(index, "outputs", node.outputs)
        attributes = self._attributes
        for attribute in node.attr:
            try:
                entry = attributes[attribute]
            except KeyError:
                entry = self._read(attribute)
            if entry is not None:
                entry[0][index] = entry[1]

    def _add_io(self, index: int, side: str, parts: list[bytes]) -> None:
        info = IOInfo()
        # A message field that occurs several times is merged (protobuf, "Encoding", "Last One
        # Wins"), so each part may hold some of the fields.
        for part in parts:
            info.MergeFromString(part)
        texts = (info.values, info.shapes, info.types)
        for column, text in zip(IO_COLUMNS[side], texts, strict=True):
            if text:
                self._rows[column][index] = self._strings.intern(text)

    def _read(self, message: bytes) -> tuple[dict[int, Any], Any] | None:
        """Return (rows of the column it fills, value), or None when it fills none."""
        attribute = AttributeProto.FromString(message)
        entry = None
        column_reader = self._readers.get(attribute.name)
        if column_reader is not None:
            variant = variant_of(attribute)
            value = column_reader[1](variant, getattr(attribute, variant)) if variant else None
            if value is not None:
                entry = (self._rows[column_reader[0]], value)
        if len(self._attributes) < _REMEMBERED:
            self._attributes[message] = entry
        return entry

    def nodes(self) -> Nodes:
        count = len(self._ids)
        columns: dict[str, npt.NDArray[Any]] = {
            "id": np.array(self._ids, dtype=np.uint64),
            "name": np.array(self._name, dtype=np.int32),
            "kind": self._kinds(),
            "start_ns": nanoseconds(self._start),
            "duration_ns": nanoseconds(self._duration),
        }
        for spec in fields(Nodes):
            rows = self._rows.get(spec.name)
            if rows:
                column = columns.get(spec.name)
                if column is None:
                    default = 0 if is_text(spec) else default_of(spec)
                    column = np.full(count, default, dtype=dtype_of(spec))
                column[list(rows)] = np.array(list(rows.values()), dtype=column.dtype)
                columns[spec.name] = column
        return Nodes.of(count, **columns)

    def _kinds(self) -> U8:
        by_type = {node_type: kind for kind, node_type in NODE_TYPES.items()}
        by_type[COMP_NODE] = Kind.KERNEL
        kinds = [by_type.get(node_type, Kind.INVALID) for node_type in self._type]
        for index, text in self._rows["gpu_op"].items():
            if self._type[index] == COMP_NODE:
                kinds[index] = GPU_OPS.get(text, Kind.KERNEL)
        for index, flag in self._rows["is_cpu_op"].items():
            if flag and self._type[index] == COMP_NODE:
                # After `gpu_op`, which a host flag overrides.
                kinds[index] = Kind.HOST_OP
        return np.array(kinds, dtype=np.uint8)

    def dependencies(self) -> Dependencies:
        ctrl = np.array(self._ctrl, dtype=np.int64)
        data = np.array(self._data, dtype=np.int64)
        offsets = np.zeros(len(ctrl) + 1, dtype=np.int64)
        np.cumsum(ctrl + data, out=offsets[1:])
        kinds = np.tile(np.array([Reason.CONTROL, Reason.DATA], dtype=np.uint8), len(ctrl))
        reason = np.repeat(kinds, np.stack([ctrl, data], axis=1).ravel())
        for index, octets in self._rows["data_dep_reasons"].items():
            # Another tool may add or remove dependencies without updating onerank's attribute.
            if len(octets) == data[index] and all(octet < Reason.CONTROL for octet in octets):
                start = offsets[index] + ctrl[index]
                reason[start : offsets[index + 1]] = list(octets)
        return Dependencies(offsets, np.array(self._deps, dtype=np.uint64), reason)


def nanoseconds(micros: list[int] | U64) -> I64:
    """Return microseconds as nanoseconds, clipped to the largest int64."""
    largest = np.uint64(np.iinfo(np.int64).max)
    counts = np.array(micros, dtype=np.uint64)
    # Chakra's times are uint64 microseconds; above 2**63 / 1000 the product would wrap around.
    exact = np.minimum(counts, largest // np.uint64(1000)) * np.uint64(1000)
    return np.where(counts > largest // np.uint64(1000), largest, exact).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Contents of node messages.

    Attributes:
        nodes: columns, `foreign` not set.
        dependencies: ids that each node waits for.
        duration_micros: the field of that name, uint64[n].
        exact: messages that equal the encoded columns provided that `duration_micros` does,
            bool[n]. The other messages may or may not be equal.
    """

    nodes: Nodes
    dependencies: Dependencies
    duration_micros: U64
    exact: Mask


def decode(messages: MessageSource, strings: StringTable) -> Decoded:
    """Return the columns of node messages; protobuf parses only what `scan` cannot.

    An attribute whose type or value its column cannot hold leaves the column at its default.
    A time in microseconds over the range of int64 nanoseconds becomes the largest of these.

    Raises:
        ChakraError: a message is not a Node; begins with its place.
    """
    decoder = ColumnDecoder(strings)
    for buffer, spans in messages.blocks():
        decoder.add(buffer, spans)
    decoder.finish()
    unparsed = np.flatnonzero(~decoder.plain)
    _read_times(decoder)
    decoder.column("kind")[:] = _kinds(decoder)
    parsed_dependencies = NONE
    if len(unparsed):
        unparsed_messages = messages.take(unparsed)
        parsed, parsed_dependencies = decode_each(
            unparsed_messages, strings, lambda at: messages.place(int(unparsed[at]))
        )
        for spec in fields(Nodes):
            decoder.column(spec.name)[unparsed] = getattr(parsed, spec.name)
    nodes = Nodes.of(len(decoder.plain), **decoder.columns)
    dependencies = decoder.dependencies(unparsed, parsed_dependencies)
    exact = decoder.exact & _is_consistent(decoder, nodes)
    return Decoded(nodes, dependencies, decoder.duration_micros, exact)


def _read_times(decoder: ColumnDecoder) -> None:
    """Fill in times that are given only in microseconds."""
    for name, micros in (
        ("start_ns", decoder.start_micros),
        ("duration_ns", decoder.duration_micros),
    ):
        values, is_set = decoder.column(name), decoder.has_ns[name]
        values[~is_set] = nanoseconds(micros[~is_set])


def _kinds(decoder: ColumnDecoder) -> U8:
    # One more than the known types, for all others.
    by_type = np.full(max(NODE_TYPES.values()) + 2, Kind.INVALID, dtype=np.uint8)
    for kind, node_type in NODE_TYPES.items():
        by_type[node_type] = kind
    by_type[COMP_NODE] = Kind.KERNEL
    kinds = by_type[np.minimum(decoder.type, len(by_type) - 1)]
    computes = decoder.type == COMP_NODE
    for place, kind in enumerate(GPU_OPS.values()):
        kinds[computes & (decoder.gpu_op == place)] = kind
    # Last, as in `_Collected._kinds`: a host flag counts more than `gpu_op`.
    kinds[computes & (decoder.flag == 1)] = Kind.HOST_OP
    return kinds


def _is_consistent(decoder: ColumnDecoder, nodes: Nodes) -> Mask:
    """Return which nodes have the fields that onerank derives from several columns, bool[n]."""
    types = np.array([NODE_TYPES[kind] for kind in Kind])
    flags = np.full(len(Kind), -1)
    flags[[*GPU_COMPUTE, *COMMUNICATION]] = 0
    flags[Kind.HOST_OP] = 1
    gpu_ops = np.full(len(Kind), -1)
    for place, kind in enumerate(GPU_OPS.values()):
        gpu_ops[kind] = place
    start, duration = nodes.start_ns, nodes.duration_ns
    start_micros = decoder.start_micros.astype(np.int64)
    duration_micros = decoder.duration_micros.astype(np.int64)
    needs_attribute = (duration % 1000 != 0) | (duration // 1000 != duration_micros)
    return (
        (types[nodes.kind] == decoder.type)
        & (flags[nodes.kind] == decoder.flag)
        & (gpu_ops[nodes.kind] == decoder.gpu_op)
        & (start // 1000 == start_micros)
        & (decoder.has_ns["start_ns"] == (start % 1000 != 0))
        & (decoder.has_ns["duration_ns"] == needs_attribute)
    )


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
