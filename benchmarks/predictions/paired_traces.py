"""Predict recordings of one model on two GPUs from each other, by class of work.

    python -m benchmarks.predictions.paired_traces ON_ONE/ ON_OTHER/

Graphs (`onerank convert`) with the same name in both folders are a pair. Calls match if operator,
shapes, types and their number are equal; their mean times are compared. Public
pairs: Kineto traces of five models on H100 and MI300X in AMD-AGI/TraceLens.
"""

import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

import onerank
from benchmarks.harness import parser_of, print_conditions
from onerank.annotate import CLASSES, classify, find_gpu, recost
from onerank.ir import Graph

Key = tuple[str, str, str]


class Call(NamedTuple):
    """Equal calls (operator and shapes): mean times in ns, and the number of calls."""

    measured: float
    predicted: float
    low: float
    high: float
    count: int


def main() -> None:
    """Print both directions."""
    parser = parser_of(__doc__)
    parser.add_argument("folders", type=Path, nargs=2)
    first, second = parser.parse_args().folders
    names = sorted({p.name for p in first.glob("*.et")} & {p.name for p in second.glob("*.et")})
    if not names:
        sys.exit(f"no graph has one name in {first} and {second}")
    print_conditions()
    print(f"{len(names)} models: {', '.join(names)}")
    for source, target in ((first, second), (second, first)):
        pairs = [(onerank.read(source / name), onerank.read(target / name)) for name in names]
        targets = {find_gpu(graph.job.device.name).name for _, graph in pairs}
        calls: dict[str, list[Call]] = defaultdict(list)
        for start, end in pairs:
            add_calls(start, end, calls)
        print_table(f"to {', '.join(sorted(targets))}", calls)


def add_calls(start: Graph, end: Graph, calls: dict[str, list[Call]]) -> None:
    """Add each call of `end` with its measured time and its prediction from `start`."""
    predicted = recost(start, find_gpu(end.job.device.name)).nodes
    measured = by_call(end)
    classes = {int(node): name for name, rows in by_class(start).items() for node in rows}
    for key, rows in by_call(start).items():
        if len(measured.get(key, ())) != len(rows) or (predicted.p10_ns[rows] <= 0).any():
            continue  # the numbers of calls differ, or the calls were not predicted
        means = (
            float(column[rows].mean())
            for column in (predicted.duration_ns, predicted.p10_ns, predicted.p90_ns)
        )
        took = float(end.nodes.duration_ns[measured[key]].mean())
        calls[classes[int(rows[0])]].append(Call(took, *means, len(rows)))


def by_class(graph: Graph) -> dict[str, np.ndarray]:
    """Return the GPU's compute nodes by class."""
    nodes = np.flatnonzero(graph.gpu_compute)
    names = np.array([CLASSES[code].value for code in classify(graph, nodes)])
    return {str(name): nodes[names == name] for name in np.unique(names)}


def by_call(graph: Graph) -> dict[Key, np.ndarray]:
    """Return the GPU's compute nodes by operator, shapes and types."""
    rows_of: dict[Key, list[int]] = defaultdict(list)
    nodes, strings = graph.nodes, graph.strings
    for row in np.flatnonzero(graph.gpu_compute).tolist():
        codes = (column[row] for column in (nodes.op, nodes.input_shapes, nodes.input_types))
        op, shapes, types = (strings[int(code)] for code in codes)
        if op and shapes:
            rows_of[op, shapes, types.replace("c10::", "")].append(row)
    return {key: np.array(rows) for key, rows in rows_of.items()}


def print_table(title: str, calls: dict[str, list[Call]]) -> None:
    """A row a class: time, predicted over measured, errors in ln, the share inside the interval."""
    heads = (
        "shapes",
        "measured us",
        "pred./measured",
        "median",
        "mean |ln|",
        "inside 80%",
        "by time",
    )
    print(f"\n{title:18}" + "".join(f"{head:>15}" for head in heads))
    for name in sorted(
        calls, key=lambda class_name: -sum(c.measured * c.count for c in calls[class_name])
    ):
        measured, predicted, low, high, count = np.array(calls[name]).T
        time, off = measured * count, np.log(predicted / measured)
        inside = (low <= measured) & (measured <= high)
        cells = [
            f"{len(off)}",
            f"{time.sum() / 1e3:,.0f}",
            f"{(predicted * count).sum() / time.sum():.2f}",
            f"{np.exp(np.median(off)):.2f}",
            f"{abs(off).mean():.2f}",
            f"{inside.mean():.0%}",
            f"{(time * inside).sum() / time.sum():.0%}",
        ]
        print(f"{name:18}" + "".join(f"{cell:>15}" for cell in cells))


if __name__ == "__main__":
    main()
