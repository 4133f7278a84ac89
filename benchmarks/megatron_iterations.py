"""Iterations of small Megatron-DeepSpeed models on A100s, predicted without a GPU.

    python benchmarks/megatron_iterations.py DATA CAPTURES

DATA holds megatron_a100_iterations.csv: 720 iterations on 2 to 8 A100s, of vTrain's authors.
CAPTURES holds HIDDEN-MICRO_BATCH-TP.et of benchmarks/jobs/megatron_layers.py, captured without a
device; rows whose capture is absent are left out. Nothing is fitted to the measured iterations.

A micro-batch is the time of the layers of a stage plus that of embedding, head and loss, both from
two captured layers: kernels by `annotate --target A100`, and the host by its calls, with those of
collectives. Of each part the longer of kernels and host counts. To it come four all-reduces per
layer with tensor parallelism, the 1F1B schedule's fill and drain with the slowest stage, the
optimizer's memory traffic, and the all-reduce of fp16 gradients.

Assumed, not measured: 44 bytes of optimizer traffic per parameter (mixed-precision Adam with a
gradient norm), 230 GB/s of bus bandwidth and 25 us per collective within a node of NVLink A100s.
The layers run eager attention with dropout, without Megatron's fused kernels. The data do not state
recomputation, so lines show the step without it and with recomputed layers.
"""

import csv
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from harness import parser_of

import onerank
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.hosts.host import load_host
from onerank.ir import Graph, Kind, Phase

GPU = "A100"
LAYERS = 2  # of a capture
SEQUENCE = 1024
VOCABULARY = 51200
BUS_BYTES_PER_NS = 230.0
CALL_NS = 25_000
OPTIMIZER_BYTES = 44
HOST = load_host("typical")
assert HOST is not None
COLLECTIVE_HOST_NS = HOST.figures["collective"].p50_ns


@dataclass(frozen=True)
class Part:
    """Time of one micro-batch, forward and backward, in ns, of a layer or of all the rest."""

    kernels_ns: float
    forward_ns: float
    host_ns: float
    host_forward_ns: float


def parts_of(graph: Graph) -> tuple[Part, Part]:
    """Return the times of one layer, and of embedding, head and loss."""
    nodes = graph.nodes
    in_layer = np.array(
        [graph.node(i).text("module").startswith("layers.") for i in range(len(graph))]
    )
    forward, host = nodes.phase == Phase.FORWARD, graph.mask(Kind.HOST_OP)
    used = nodes.phase != Phase.OPTIMIZER

    def total(*masks: np.ndarray) -> float:
        return float(nodes.duration_ns[np.logical_and.reduce([used, *masks])].sum())

    layer, rest = (
        Part(
            total(chosen, ~host),
            total(chosen, ~host, forward),
            total(chosen, host),
            total(chosen, host, forward),
        )
        for chosen in (in_layer, ~in_layer)
    )
    each = Part(*(value / LAYERS for value in vars(layer).values()))
    return each, rest


def iteration_ms(
    row: Mapping[str, int], layer: Part, rest: Part, *, host: float, recompute: bool = False
) -> float:
    """Return the predicted iteration of a row of the data.

    Args:
        row: sizes and axes.
        layer: one layer.
        rest: embedding, head and loss.
        host: factor on the host; 0: kernels only.
        recompute: whether the backward pass computes the layers' forward pass again.
    """
    tp, dp, pp, size = row["tp"], row["dp"], row["pp"], row["micro_batch"]
    micro_batches = row["global_batch"] // (size * dp)
    activation_bytes = size * SEQUENCE * row["hidden"] * 2
    reduces = (4 + 2 * recompute) * all_reduce_ns(activation_bytes, tp)
    again = layer.forward_ns if recompute else 0.0
    host_again = layer.host_forward_ns if recompute else 0.0

    def stage_ns(layers: float, ends: float) -> float:
        kernels = layers * (layer.kernels_ns + again + reduces) + ends * rest.kernels_ns
        calls = COLLECTIVE_HOST_NS * (4 + 2 * recompute) * (tp > 1)
        on_host = layers * (layer.host_ns + host_again + calls) + ends * rest.host_ns
        return max(kernels, on_host * host)

    slowest = stage_ns(row["layers"] / pp, 1)
    once = (pp - 1) * stage_ns(row["layers"] / pp, 0) + slowest
    sends = 2 * (pp - 1) * (CALL_NS + activation_bytes / BUS_BYTES_PER_NS)
    hidden = row["hidden"]
    parameters = 12 * hidden**2 * row["layers"] / pp / tp + VOCABULARY * hidden / tp
    optimizer = OPTIMIZER_BYTES * parameters / load_gpu(GPU).bandwidth_bytes_per_s * 1e9
    total = (micro_batches - 1) * slowest + once + sends + optimizer
    return (total + all_reduce_ns(2 * parameters, dp)) / 1e6


def all_reduce_ns(size_bytes: float, ranks: int) -> float:
    """Return the time of an all-reduce; 0 for one rank."""
    if ranks == 1:
        return 0.0
    return CALL_NS + 2 * (ranks - 1) / ranks * size_bytes / BUS_BYTES_PER_NS


def main() -> None:
    """Print the errors with and without a host."""
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("captures", type=Path)
    options = parser.parse_args()
    path = options.data / "megatron_a100_iterations.csv"
    if not path.is_file():
        sys.exit(f"{path}: no such file; give the directory that holds it")
    print(f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}")
    print((__doc__ or "").split("\n\n", 2)[2])
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    parts: dict[tuple[int, int, int], tuple[Part, Part]] = {}
    intervals: dict[tuple[int, int, int], tuple[float, float]] = {}
    for capture in sorted(options.captures.glob("*.et")):
        hidden, size, tp = (int(word) for word in capture.stem.split("-"))
        graph = onerank.recost(onerank.read(capture), GPU)
        parts[hidden, size, tp] = parts_of(graph)
        low, high = graph.job.annotations[-1].details["host_interval"]
        intervals[hidden, size, tp] = low, high
    if not parts:
        sys.exit(f"{options.captures}: no .et file; give the directory of the captures")
    cases = ("kernels only", "typical host", "kernels only, recomputed", "typical host, recomputed")
    errors: dict[str, list[float]] = defaultdict(list)
    bound: list[bool] = []
    inside = [0, 0]
    for text in rows:
        row = {name: int(value) for name, value in text.items() if name != "iteration_ms"}
        key = row["hidden"], row["micro_batch"], row["tp"]
        if key not in parts:
            continue
        predicted = [
            iteration_ms(row, *parts[key], host=host, recompute=recompute)
            for recompute in (False, True)
            for host in (0.0, 1.0)
        ]
        for case, value in zip(cases, predicted, strict=True):
            errors[case].append(value / float(text["iteration_ms"]) - 1)
        bound.append(predicted[1] > predicted[0])
        for recompute in (False, True):
            low, high = (
                iteration_ms(row, *parts[key], host=host, recompute=recompute)
                for host in intervals[key]
            )
            inside[recompute] += low <= float(text["iteration_ms"]) <= high
    print(f"{len(bound)} of {len(rows)} iterations from {len(parts)} captures; "
          f"{sum(bound)} predicted to wait for their host\n")  # fmt: skip
    print(f"{'':28}{'mean abs':>10}{'median':>10}{'worst':>10}{'  waiting: mean abs':>20}")
    for case in cases:
        each = errors[case]
        waiting = [abs(e) for e, b in zip(each, bound, strict=True) if b]
        mean, median = statistics.mean(map(abs, each)), statistics.median(each)
        worst = max(each, key=abs)
        of_waiting = f"{statistics.mean(waiting):19.1%}" if waiting else ""
        print(f"{case:28}{mean:10.1%}{median:+10.1%}{worst:+10.1%} {of_waiting}")
    print(
        f"\nmeasured within the hosts' 10th to 90th percentile: {inside[0]} of {len(bound)}, "
        f"recomputed {inside[1]}"
    )


if __name__ == "__main__":
    main()
