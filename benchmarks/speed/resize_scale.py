"""Time of `annotate --seq` for a graph of many nodes: a step, copied one after another.

    python -m benchmarks.speed.resize_scale TRACE [--copies N] [--seq N]

Each copy has separate tensors. Prints CPU seconds of one core (best of three) and peak memory.
"""

import argparse
import resource
import time

import onerank
from benchmarks.harness import print_conditions
from benchmarks.speed.repeated_graph import copies
from onerank.annotate.passes.pass_options import parse_sizes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--copies", type=int, default=127)
    parser.add_argument("--seq", default="2048")
    arguments = parser.parse_args()
    graph = copies(onerank.read(arguments.trace), arguments.copies)
    sizes = parse_sizes(arguments.seq, None)
    assert sizes is not None, "a sequence length is given"
    times = []
    for _ in range(3):
        begin = time.process_time()
        resized = sizes.apply(graph)
        times.append(time.process_time() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print_conditions()
    counts = f"{len(graph)} nodes, {resized.changed.sum()} resized"
    print(f"{arguments.trace}, {arguments.copies} times: {counts}")
    print(f"{min(times):.2f} s of CPU (best of {', '.join(f'{one:.2f}' for one in times)})")
    print(f"{peak:.2f} GB at most, the graph included")


if __name__ == "__main__":
    main()
