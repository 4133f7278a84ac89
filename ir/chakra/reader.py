"""Read a Chakra file into a graph."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from onerank.ir.chakra.attributes import whole_micros
from onerank.ir.chakra.decode import Decoded, decode
from onerank.ir.chakra.dependencies import Dependencies, dependencies
from onerank.ir.chakra.encode import Encoder
from onerank.ir.chakra.framing import File, Source
from onerank.ir.chakra.metadata import decode_job, is_own, says_own
from onerank.ir.edges import I64, Edges
from onerank.ir.errors import GraphError
from onerank.ir.graph import Graph
from onerank.ir.nodes import Nodes
from onerank.ir.string_table import StringTable


def read(path: str | Path) -> Graph:
    """Read a Chakra `.et` file; `write` of the graph gives back every message of it.

    A node whose message says more than its columns do, and every node of another tool's file,
    keeps that message in the column `foreign`; the graph keeps such metadata in its `foreign`.

    Raises:
        ChakraError: the file is not a Chakra 1.0 trace, or is damaged.
        GraphError: two nodes share an id, or an edge leads to no node; cycles are let pass.
        OSError: the file cannot be read.
    """
    strings = StringTable()
    with File(path) as file:
        job = decode_job(file.metadata, f"{file.path}: message 0 (byte 0)")
        decoded = decode(file, strings)
        edges = _resolve(file.path, decoded.nodes, decoded.dependencies)
        count = len(decoded.nodes)
        rows = np.arange(count)
        if says_own(file.metadata):  # others need no look: keeping a message is never wrong
            rows = _rows_that_say_more(file, decoded, edges, strings)
        foreign = np.full(count, None, dtype=object)
        foreign[rows] = file.take(rows)
        kept = None if is_own(file.metadata, job) else file.metadata
    return Graph(replace(decoded.nodes, foreign=foreign), edges, strings, job, kept)


def _resolve(path: Path, nodes: Nodes, deps: Dependencies) -> Edges:
    """Turn ids into indices."""
    order = np.argsort(nodes.id, kind="stable")
    by_id = nodes.id[order]
    twice = np.flatnonzero(by_id[1:] == by_id[:-1])
    if len(twice):
        first, second = order[twice[0]], order[twice[0] + 1]
        raise GraphError(
            f"{path}: nodes {first} and {second} of the file both have id {by_id[twice[0]]};"
            " ids must be unique, number them again"
        )
    if not len(deps.ids):
        return Edges(deps.offsets, np.empty(0, dtype=np.int64), deps.reason)
    places = np.minimum(np.searchsorted(by_id, deps.ids), len(by_id) - 1)
    missing = np.flatnonzero(by_id[places] != deps.ids)
    if len(missing):
        waiting = int(np.count_nonzero(deps.offsets <= missing[0])) - 1
        raise GraphError(
            f"{path}: node {nodes.id[waiting]} waits for node {deps.ids[missing[0]]}, which is"
            f" not in the file ({len(missing)} such edges); add the node or drop the edge"
        )
    return Edges(deps.offsets, order[places], deps.reason)


def _rows_that_say_more(
    messages: Source, decoded: Decoded, edges: Edges, strings: StringTable
) -> I64:
    """Return the nodes whose message is not what their columns are written as."""
    nodes = decoded.nodes
    same = decoded.exact & (whole_micros(nodes) == decoded.duration_micros.astype(np.int64))
    rows = np.flatnonzero(~same & (nodes.start_ns >= 0) & (nodes.duration_ns >= 0))
    if len(rows):
        encoder = Encoder(nodes, dependencies(nodes, edges), strings)
        encoded = encoder.encode(rows).cut()
        given = messages.take(rows)
        same[rows] = [one == other for one, other in zip(encoded, given, strict=True)]
    return np.flatnonzero(~same)
