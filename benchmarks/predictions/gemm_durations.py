"""Durations of GEMMs in captured steps, and their predictions from shapes alone.

    python -m benchmarks.predictions.gemm_durations TRACE...

TRACE is a graph that `onerank convert` or `capture` wrote on a GPU, also as .et.gz. 16-bit GEMMs
whose main kernel takes at least three quarters of their operator's time are compared; kernels of
one step and shape are one case with their median duration. Printed by duration:

  kernel    mean error and signed mean of predictions as kernels of a step, in percent
  per call  the same of predictions as calls of the benchmark set to which the tiles are fitted

Steps of other GPUs than those of the fit show both effects of the set: its times contain the gap
to the next kernel, and it finds small weights in the cache.
"""

import gzip
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import parser_of, print_conditions
from onerank.annotate.models.features import KernelFeatures, Timing
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.recost.recost import source_gpu
from onerank.ir import Graph
from onerank.ir.chakra import read

BOUNDS_US = (0, 6, 10, 20, 40, 100, 1_000_000)
_LEAST_SHARE = 0.75  # of the operator's time that the main kernel takes
_ITEM_BYTES = 2


def main() -> None:
    """Print one table for each GPU."""
    parser = parser_of(__doc__)
    parser.add_argument("traces", type=Path, nargs="+")
    traces = parser.parse_args().traces
    print_conditions()
    cases = pl.concat([cases_of(opened(path), path.name) for path in traces])
    for (gpu,), of_gpu in cases.group_by("gpu", maintain_order=True):
        heads = ("cases", "kernel", "signed", "per call", "signed")
        print(f"\n{gpu}\n{'us':>16}" + "".join(f"{head:>10}" for head in heads))
        for low, high in pairwise(BOUNDS_US):
            part = of_gpu.filter(pl.col("measured").is_between(low * 1e3, high * 1e3))
            if part.is_empty():
                continue
            print(f"{low:5} to {high:7}{len(part):10}", end="")
            for column in ("kernel", "per_call"):
                error = 100 * (part[column] / part["measured"] - 1).to_numpy()
                print(f"{np.abs(error).mean():10.1f}{error.mean():+10.1f}", end="")
            print()


def opened(path: Path) -> Graph:
    """Return the graph of a file, packed or not."""
    if path.suffix != ".gz":
        return read(path)
    with tempfile.NamedTemporaryFile(suffix=".et") as file:
        Path(file.name).write_bytes(gzip.decompress(path.read_bytes()))
        return read(Path(file.name))


def cases_of(graph: Graph, name: str) -> pl.DataFrame:
    """Return the GEMMs of a step: gpu, step, call, and median times in ns."""
    gpu = source_gpu(graph, None)
    kernels = KernelFeatures.of(graph, op_costs_of(graph))
    shapes = kernels.gemm[kernels.call]
    chosen = kernels.matmul & (shapes[:, 0] > 0) & (shapes[:, 4] == _ITEM_BYTES)
    chosen &= kernels.duration_ns > _LEAST_SHARE * kernels.operator_ns
    kernels = kernels.select(np.flatnonzero(chosen))
    # Without the operator's time, the prediction of a GEMM is not divided among its kernels.
    kernels = replace(kernels, operator_ns=kernels.duration_ns)
    table = pl.DataFrame(
        {
            "gpu": gpu.name,
            "step": name,
            "call": kernels.call,
            "measured": kernels.duration_ns,
            "kernel": predict_from_description(kernels, gpu)[0],
            "per_call": predict_from_description(replace(kernels, timing=Timing.CALL), gpu)[0],
        }
    )
    times = pl.col("measured", "kernel", "per_call").median()
    return table.group_by("gpu", "step", "call", maintain_order=True).agg(times)


if __name__ == "__main__":
    main()
