"""A graph into a Chakra file."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from onerank.ir.chakra.amend import Changes, amend, find_changes
from onerank.ir.chakra.decode import decode
from onerank.ir.chakra.dependencies import Dependencies, dependencies
from onerank.ir.chakra.encode import Encoder
from onerank.ir.chakra.metadata import amend_job, decode_job, encode_job
from onerank.ir.chakra.source import Packed
from onerank.ir.chakra.values import check_values
from onerank.ir.chakra.wire import frame
from onerank.ir.edges import I64
from onerank.ir.errors import GraphError
from onerank.ir.files import replacing
from onerank.ir.graph import Graph, Mask
from onerank.ir.nodes import U64

_BLOCK = 16384
"""Nodes encoded at a time: the memory of their messages is used again for the next."""


def write(graph: Graph, path: str | Path) -> None:
    """Write a Chakra `.et` file; it appears under its name only when complete.

    A node read from another tool's file is written as it was there, but for the columns that
    changed since.

    Raises:
        ChakraError: a value does not fit Chakra's schema.
        GraphError: two nodes share an id.
        OSError: the file cannot be written.
    """
    with replacing(Path(path)) as file:
        file.write(frame([_metadata(graph)]))
        file.writelines(_nodes(graph))


def _metadata(graph: Graph) -> bytes:
    if graph.foreign is None:
        return encode_job(graph.job)
    return amend_job(graph.foreign, decode_job(graph.foreign, "graph.foreign"), graph.job)


def _nodes(graph: Graph) -> Iterator[bytes]:
    """Yield the node messages, each behind its length."""
    nodes = graph.nodes
    if not (nodes.id[1:] > nodes.id[:-1]).all():
        _require_unique(nodes.id)
    deps = dependencies(nodes, graph.edges)
    messages = nodes.foreign.tolist()
    is_kept = np.zeros(len(nodes), dtype=bool)
    if messages.count(None) < len(messages):
        is_kept[:] = [message is not None for message in messages]
    kept = np.flatnonzero(is_kept)
    if not len(kept):
        check_values(nodes, ~is_kept, ~is_kept)
        encoder = Encoder(nodes, deps, graph.strings)
        for begin in range(0, len(nodes), _BLOCK):
            rows = np.arange(begin, min(begin + _BLOCK, len(nodes)))
            yield encoder.encode(rows).join()
    else:
        yield frame(_amended(graph, deps, is_kept, kept))


def _require_unique(ids: U64) -> None:
    distinct, counts = np.unique(ids, return_counts=True)
    if len(distinct) < len(ids):
        raise GraphError(
            f"{int(counts.max())} nodes have id {distinct[np.argmax(counts)]}; ids must be unique,"
            " number the nodes again"
        )


def _amended(graph: Graph, deps: Dependencies, is_kept: Mask, kept: I64) -> list[bytes]:
    """Return the node messages of a graph that keeps some of another tool."""
    nodes = graph.nodes
    changes = _changes(graph, deps, kept)
    own_start, own_duration = ~is_kept, ~is_kept
    own_start[kept] = changes["start_ns"]
    own_duration[kept] = changes["duration_ns"]
    check_values(nodes, own_start, own_duration)
    any_change = np.any(list(changes.values()), axis=0)
    rows: I64 = np.sort(np.concatenate([np.flatnonzero(~is_kept), kept[any_change]]))
    messages: list[bytes] = nodes.foreign.tolist()
    kept_messages: list[bytes] = [messages[row] for row in kept.tolist()]
    encoded = Encoder(nodes, deps, graph.strings).encode(rows).cut()
    for row, message in zip(rows.tolist(), encoded, strict=True):
        messages[row] = message
    for place in np.flatnonzero(any_change).tolist():
        row = int(kept[place])
        changed = [column for column, which in changes.items() if which[place]]
        messages[row] = amend(kept_messages[place], messages[row], changed)
    return messages


def _changes(graph: Graph, deps: Dependencies, kept: I64) -> Changes:
    """Find what changed since reading in the nodes that keep their message."""
    messages = graph.nodes.foreign[kept].tolist()
    strings = graph.strings.copy()
    read = decode(Packed(messages, "graph.foreign"), strings)
    return find_changes(graph.nodes.take(kept), _take(deps, kept), read.nodes, read.dependencies)


def _take(deps: Dependencies, rows: I64) -> Dependencies:
    counts = np.diff(deps.offsets)[rows]
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    shift: I64 = np.repeat(deps.offsets[rows] - offsets[:-1], counts)
    index = np.arange(len(shift)) + shift
    return Dependencies(offsets, deps.ids[index], deps.reason[index])
