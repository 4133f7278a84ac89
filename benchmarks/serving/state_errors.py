"""Operators of layers with a state per sequence, predicted from shapes against measured steps.

    python -m benchmarks.serving.state_errors BUNDLES... [--without "OPERATOR:MODEL GPU"]

BUNDLES are MODEL:GPU:CAPTURED:MEASURED. CAPTURED is a bundle of `capture serve --device none`,
whose steps are predicted for GPU (a name of `onerank gpus`), and MEASURED the bundle of the same
model on that GPU; traces may be compressed with xz. For each operator the errors of all steps in
ln(measured / predicted), and how many of them the 80% error of the other operators holds.
`--without` leaves a model's calls of an operator out of the second table.
"""

import argparse
import lzma
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from onerank.annotate import load_gpu, recost
from onerank.annotate.gpus.gpu import Gpu
from onerank.ir import Graph
from onerank.ir.chakra import read

_STEP = ["decodes", "decode_context", "prefills", "prefill_tokens", "prefill_context"]

# Names of an operator or of its kernels -> the operator; the first match wins.
_OPERATORS = {
    r"causal_conv1d_update": "causal_conv1d_update",
    r"causal_conv1d": "causal_conv1d",
    r"selective_scan_fwd|onerank_serving::selective_scan": "selective_scan",
    r"recurrent": "recurrent_gated_delta_rule",
    r"selective": "selective_state_update",
    r"Mamba|mamba_chunk": "mamba_chunk_scan",
    r"Chunk|chunk": "chunk_gated_delta_rule",
}


def main() -> None:
    """Print the errors of each operator, by model and in all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="+", metavar="MODEL:GPU:CAPTURED:MEASURED")
    parser.add_argument("--without", action="append", default=[], metavar="OPERATOR:MODEL GPU")
    errors: dict[str, dict[str, list[float]]] = defaultdict(dict)
    options = parser.parse_args()
    for text in options.bundles:
        model, gpu, captured, measured = text.split(":")
        for operator, error in _errors(load_gpu(gpu), Path(captured), Path(measured)):
            errors[operator].setdefault(f"{model} {gpu}", []).append(error)
    for operator, models in errors.items():
        print(operator)
        for model, values in models.items():
            print(f"  {model:24}" + " ".join(f"{math.exp(value):.2f}" for value in values))
    print("\noperator                       calls     mean error   80% of the others   held")
    pooled = {
        operator: np.concatenate(
            [v for model, v in models.items() if f"{operator}:{model}" not in options.without]
        )
        for operator, models in errors.items()
    }
    for operator, own in pooled.items():
        others = {name: values for name, values in pooled.items() if name != operator}
        bound = _bound(others)
        held, error = (np.abs(own) <= bound).mean(), np.abs(np.expm1(own)).mean()
        print(f"{operator:30}{len(own):6}{error:15.1%}{bound:20.3f}{held:7.0%}")
    mean = math.sqrt(np.mean([values.mean() ** 2 for values in pooled.values()]))
    around = math.sqrt(np.mean([values.var() for values in pooled.values()]))
    print(
        f"80% of all {_bound(pooled):.3f}, root mean squares: of an operator's mean {mean:.3f}, "
        f"around it {around:.3f}"
    )


def _bound(errors: dict[str, np.ndarray]) -> float:
    """Return the absolute error that 80% do not exceed; every operator has the same weight."""
    values = np.abs(np.concatenate([*errors.values()]))
    weights = np.concatenate([np.full(len(own), 1 / len(own)) for own in errors.values()])
    order = np.argsort(values)
    reached = np.searchsorted(np.cumsum(weights[order]), 0.8 * weights.sum())
    return float(values[order][min(int(reached), len(values) - 1)])


def _errors(gpu: Gpu, captured: Path, measured: Path) -> Iterator[tuple[str, float]]:
    """Yield operator and ln(measured / predicted) of each step of both bundles."""
    ours, theirs = (
        pl.read_parquet(bundle / "steps.parquet").with_row_index("row", 1)
        for bundle in (captured, measured)
    )
    for row in theirs.join(ours, on=_STEP, nulls_equal=True, suffix="_ours").iter_rows(named=True):
        expected = _times(recost(_trace(captured, row["row_ours"]), gpu))
        for operator, time_ns in _times(_trace(measured, row["row"])).items():
            if expected.get(operator):
                yield operator, math.log(time_ns / expected[operator])


def _trace(bundle: Path, number: int) -> Graph:
    file = next((bundle / "traces").glob(f"{number}.et*"))
    if file.suffix != ".xz":
        return read(file)
    with tempfile.NamedTemporaryFile(suffix=".et") as plain:
        plain.write(lzma.decompress(file.read_bytes()))
        plain.flush()
        return read(Path(plain.name))


def _times(graph: Graph) -> dict[str, int]:
    """Return the time of each operator of the states in ns.

    Mamba 1's scan has the copies of its operands, which are operators of their own in a measured
    step.
    """
    times: dict[str, int] = defaultdict(int)
    nodes, copies = graph.nodes, 0
    for node in np.flatnonzero(graph.compute).tolist():
        if ".step_state" not in graph.strings[nodes.module[node]]:
            continue
        op, name = graph.strings[nodes.op[node]], graph.strings[nodes.name[node]]
        time_ns = int(nodes.duration_ns[node])
        if op.startswith("aten::"):
            copies += time_ns if op == "aten::copy_" else 0
            continue
        text = f"{op} {name}"
        operator = next((o for pattern, o in _OPERATORS.items() if re.search(pattern, text)), "")
        times[operator] += time_ns
    if "selective_scan" in times:
        times["selective_scan"] += copies
    return times


if __name__ == "__main__":
    main()
