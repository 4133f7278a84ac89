"""Node messages into columns, thousands at a time; what is unusual goes to `each`, one by one."""

from dataclasses import dataclass, fields

import numpy as np

from onerank.ir.chakra.attributes import GPU_OPS, NODE_TYPES
from onerank.ir.chakra.block import Columns
from onerank.ir.chakra.dependencies import NONE, Dependencies
from onerank.ir.chakra.each import decode_each, nanoseconds
from onerank.ir.chakra.et_def_pb2 import COMP_NODE
from onerank.ir.chakra.source import Source
from onerank.ir.chakra.words import Mask
from onerank.ir.edges import U8
from onerank.ir.kinds import COMMUNICATION, GPU_COMPUTE, Kind
from onerank.ir.nodes import U64, Nodes
from onerank.ir.strings import StringTable


@dataclass(frozen=True, slots=True)
class Decoded:
    """What node messages hold.

    Attributes:
        nodes: columns, `foreign` not set.
        dependencies: ids that each node waits for.
        duration_micros: the field of that name, uint64[n].
        exact: messages that are what the columns are written as, if `duration_micros` is too,
            bool[n]; of the others it is not known.
    """

    nodes: Nodes
    dependencies: Dependencies
    duration_micros: U64
    exact: Mask


def decode(messages: Source, strings: StringTable) -> Decoded:
    """Return the columns that node messages hold.

    An attribute whose type or value its column cannot hold leaves the column at its default.
    A time in microseconds over the range of int64 nanoseconds becomes the largest of these.

    Raises:
        ChakraError: a message is not a Node; begins with its place.
    """
    columns = Columns(strings)
    for buffer, spans in messages.blocks():
        columns.add(buffer, spans)
    columns.finish()
    rest = np.flatnonzero(~columns.plain)
    _read_times(columns)
    columns.column("kind")[:] = _kinds(columns)
    waits = NONE
    if len(rest):
        given = messages.take(rest)
        each, waits = decode_each(given, strings, lambda at: messages.place(int(rest[at])))
        for spec in fields(Nodes):
            columns.column(spec.name)[rest] = getattr(each, spec.name)
    nodes = Nodes.of(len(columns.plain), **columns.made)
    dependencies = columns.dependencies(rest, waits)
    exact = columns.exact & _is_consistent(columns, nodes)
    return Decoded(nodes, dependencies, columns.duration_micros, exact)


def _read_times(columns: Columns) -> None:
    """Fill in the times that are told in microseconds alone."""
    for name, micros in (
        ("start_ns", columns.start_micros),
        ("duration_ns", columns.duration_micros),
    ):
        made, told = columns.column(name), columns.told[name]
        made[~told] = nanoseconds(micros[~told])


def _kinds(columns: Columns) -> U8:
    by_type = np.full(max(NODE_TYPES.values()) + 2, Kind.INVALID, dtype=np.uint8)
    for kind, node_type in NODE_TYPES.items():
        by_type[node_type] = kind
    by_type[COMP_NODE] = Kind.KERNEL
    kinds = by_type[np.minimum(columns.type, len(by_type) - 1)]
    computes = columns.type == COMP_NODE
    for place, kind in enumerate(GPU_OPS.values()):
        kinds[computes & (columns.gpu_op == place)] = kind
    kinds[computes & (columns.flag == 1)] = Kind.HOST_OP
    return kinds


def _is_consistent(columns: Columns, nodes: Nodes) -> Mask:
    """Whether what depends on several columns is as we write it, bool[n]."""
    types = np.array([NODE_TYPES[kind] for kind in Kind])
    flags = np.full(len(Kind), -1)
    flags[[*GPU_COMPUTE, *COMMUNICATION]] = 0
    flags[Kind.HOST_OP] = 1
    gpu_ops = np.full(len(Kind), -1)
    for place, kind in enumerate(GPU_OPS.values()):
        gpu_ops[kind] = place
    start, duration = nodes.start_ns, nodes.duration_ns
    start_micros = columns.start_micros.astype(np.int64)
    duration_micros = columns.duration_micros.astype(np.int64)
    tells = (duration % 1000 != 0) | (duration // 1000 != duration_micros)
    return (
        (types[nodes.kind] == columns.type)
        & (flags[nodes.kind] == columns.flag)
        & (gpu_ops[nodes.kind] == columns.gpu_op)
        & (start // 1000 == start_micros)
        & (columns.told["start_ns"] == (start % 1000 != 0))
        & (columns.told["duration_ns"] == tells)
    )
