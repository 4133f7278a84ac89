"""Time of `annotate --seq` for a graph of many nodes: a step, copied one after another.

    python benchmarks/resize_scale.py TRACE [--copies N] [--seq N]

Each copy has separate tensors. Prints CPU seconds of one core (best of three) and peak memory.
"""

import argparse
import platform
import resource
import time

from repeated_graph import copies

import onerank
from onerank.annotate.passes.pass_config import parse_sizes


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
