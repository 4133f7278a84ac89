"""How long `annotate --seq` takes for a graph of many nodes: a step, copied one after another.

    python benchmarks/resize_scale.py TRACE [--copies N] [--seq N]

Each copy has tensors of its own. Prints CPU seconds of one core (best of three) and peak memory.
"""

import argparse
import platform
import re
import resource
import time
from dataclasses import replace

import msgspec
import numpy as np

import onerank
from onerank.annotate.what_ifs.what_if import parse_sizes
from onerank.ir import Edges, Graph

_TENSOR = re.compile(r'\[(\d+),(\d+),(?=\d+,\d+,\d+,")')
_FURTHER = 1_000_000


def copies(graph: Graph, count: int) -> Graph:
    """Return a step `count` times, each later than the last and with tensors of its own."""
    nodes, size = graph.nodes, len(graph)
    strings = graph.strings.copy()
    columns = {}
    for name in ("input_values", "output_values"):
        codes, which = np.unique(getattr(nodes, name), return_inverse=True)
        texts, made = strings.decode(codes), []
        for copy in range(count):
            more = copy * _FURTHER
            moved = [
                _TENSOR.sub(lambda at, more=more: f"[{int(at[1]) + more},{int(at[2]) + more},", one)
                for one in texts
            ]
            made.append(strings.encode(moved)[which])
        columns[name] = np.concatenate(made)
    at = np.repeat(np.arange(count), size)
    span = int((nodes.start_ns + nodes.duration_ns).max()) + 1
    all_nodes = nodes.take(np.tile(np.arange(size), count))
    ids = np.arange(count * size, dtype=np.uint64)
    edges = graph.edges
    further = np.repeat(np.arange(count) * size, len(edges))
    sides = (np.tile(side, count) + further for side in (edges.source, edges.target))
    measurement = msgspec.structs.replace(graph.job.measurement, memory=None)
    return replace(
        graph,
        nodes=replace(all_nodes, id=ids, start_ns=all_nodes.start_ns + at * span, **columns),
        edges=Edges.from_pairs(count * size, *sides, np.tile(edges.reason, count)),
        strings=strings,
        job=msgspec.structs.replace(graph.job, measurement=measurement),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--copies", type=int, default=127)
    parser.add_argument("--seq", default="2048")
    given = parser.parse_args()
    graph = copies(onerank.read(given.trace), given.copies)
    sizes = parse_sizes(given.seq, None)
    assert sizes is not None, "a sequence length is given"
    taken = []
    for _ in range(3):
        begin = time.process_time()
        made = sizes.apply(graph)
        taken.append(time.process_time() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{platform.processor() or platform.machine()}, python {platform.python_version()}")
    print(f"{given.trace}, {given.copies} times: {len(graph)} nodes, {made.changed.sum()} resized")
    print(f"{min(taken):.2f} s of CPU (best of {', '.join(f'{one:.2f}' for one in taken)})")
    print(f"{peak:.2f} GB at most, the graph included")


if __name__ == "__main__":
    main()
