"""CPU time of re-costing kept traces, once and copied to a larger step.

    python -m benchmarks.speed.recost_scale [--copies 100] [--turns 7]

To compare two versions, run it in both checkouts by turns: `--turns 1`, several times each.
"""

import gzip
import statistics
import tempfile
import time
from pathlib import Path

import onerank
from benchmarks.harness import parser_of, print_conditions
from benchmarks.speed import repeated_graph
from onerank.ir import Graph

TRACES = Path(__file__).parents[2] / "traces"
STEPS = ("h100-llama-8b-4l-tp4/trace", "h200-llama-8b-4l-tp2-real/slice.0")
CASES = (("H200", "auto"), ("A100", "auto"), ("B200", "learned"), ("MI300X", "residual"))


def kept_trace(name: str) -> Graph:
    """Return a kept trace by its name under `traces/`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.et"
        path.write_bytes(gzip.decompress((TRACES / f"{name}.et.gz").read_bytes()))
        return onerank.read(path)


def main() -> None:
    """Print the median CPU time of each case."""
    parser = parser_of(__doc__)
    parser.add_argument("--copies", type=int, default=100, help="size of the larger step")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    print_conditions()
    for name in STEPS:
        captured = kept_trace(name)
        for graph in (captured, repeated_graph.copies(captured, options.copies)):
            cells: list[str] = []
            for target, model in CASES:
                onerank.recost(graph, target, model=model)  # reads databases and descriptions
                times_s: list[float] = []
                for _ in range(options.turns):
                    start = time.process_time()
                    onerank.recost(graph, target, model=model)
                    times_s.append(time.process_time() - start)
                cells.append(f"{target} {model} {statistics.median(times_s) * 1e3:.1f}")
            print(f"{name}, {len(graph)} nodes, CPU ms: {', '.join(cells)}")


if __name__ == "__main__":
    main()
