"""A graph of many nodes, for benchmarks: a captured step, copied one after another."""

import re
from dataclasses import replace

import msgspec
import numpy as np

from onerank.ir import Edges, Graph

_TENSOR = re.compile(r'\[(\d+),(\d+),(?=\d+,\d+,\d+,")')
_FURTHER = 1_000_000


def copies(graph: Graph, count: int) -> Graph:
    """Return a step `count` times, each after the last and with separate storages."""
    nodes, size = graph.nodes, len(graph)
    strings = graph.strings.copy()
    columns = {}
    for name in ("input_values", "output_values"):
        codes, inverse = np.unique(getattr(nodes, name), return_inverse=True)
        texts, code_columns = strings.decode(codes), []
        for copy in range(count):
            more = copy * _FURTHER
            moved = [
                _TENSOR.sub(
                    lambda copy_number, more=more: (
                        f"[{int(copy_number[1]) + more},{int(copy_number[2]) + more},"
                    ),
                    text,
                )
                for text in texts
            ]
            code_columns.append(strings.encode(moved)[inverse])
        columns[name] = np.concatenate(code_columns)
    copy_number = np.repeat(np.arange(count), size)
    span = int((nodes.start_ns + nodes.duration_ns).max()) + 1
    all_nodes = nodes.take(np.tile(np.arange(size), count))
    ids = np.arange(count * size, dtype=np.uint64)
    edges = graph.edges
    further = np.repeat(np.arange(count) * size, len(edges))
    sides = (np.tile(side, count) + further for side in (edges.source, edges.target))
    measurement = msgspec.structs.replace(graph.job.measurement, memory=None)
    return replace(
        graph,
        nodes=replace(
            all_nodes, id=ids, start_ns=all_nodes.start_ns + copy_number * span, **columns
        ),
        edges=Edges.from_pairs(count * size, *sides, np.tile(edges.reason, count)),
        strings=strings,
        job=msgspec.structs.replace(graph.job, measurement=measurement),
    )
