"""Error of the cost models that transfer bf16 GEMM times between GPUs.

    python -m benchmarks.predictions.gemm_transfer DATA_DIRECTORY

DATA_DIRECTORY holds `gemm.parquet`: columns gpu, dtype, m, n, k, time_us; the same shapes measured
on every GPU in one harness, CUDA graph replay. Each ordered pair of GPUs is a re-costing through
the public API: a graph of aten::mm kernels with the source's times, re-costed for the target,
compared with the target's times. "datasheet" uses the target's description alone, no measurement.
The descriptions' floors and sustained fractions were measured on the same dataset, so absolute
errors are those of a well described GPU; the models' formulas hold no coefficient fitted to it.
The set's times are of calls, with the gap to the next kernel, and "datasheet" predicts kernels.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import parser_of, print_conditions
from onerank.annotate import find_gpu, recost
from onerank.ir import Device, Edges, Evidence, Graph, Job, Kind, Nodes, StringTable
from onerank.ir.arrays import F64, Mask

BINS = {
    "all": pl.lit(value=True),
    "m>=512": pl.col("m") >= 512,
    "m<=64": pl.col("m") <= 64,
}


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, help="directory with gemm.parquet")
    path = parser.parse_args().data / "gemm.parquet"
    if not path.is_file():
        sys.exit(f"{path}: no such file; give the directory that holds gemm.parquet")
    rows = pl.read_parquet(path).filter(pl.col("dtype") == "bfloat16")
    table = rows.pivot(on="gpu", index=["m", "n", "k"], values="time_us").drop_nulls()
    gpus = [name for name in table.columns[3:] if find_gpu(name) is not None]
    masks = {name: table.select(test).to_series() for name, test in BINS.items()}
    full = {name: np.broadcast_to(mask.to_numpy(), len(table)) for name, mask in masks.items()}
    print_conditions()
    print(f"{len(table)} bf16 shapes ({', '.join(f'{n} {int(m.sum())}' for n, m in full.items())})")
    print(f"from {path.name}")
    print(f"GPUs without a description here: {sorted({*table.columns[3:]} - {*gpus}) or 'none'}")
    print(
        "Error of the predicted time, percent of the measured: mean / median of absolute values\n"
    )
    print(f"{'from':9} {'to':9} {'model':10}" + "".join(f"{name:>15}" for name in BINS))

    errors_of_model: dict[str, list[list[float]]] = {}
    for source, target in itertools.permutations(gpus, 2):
        for model in ("ratio", "residual"):
            graph = mm_graph(table, source, device=source)
            errors = compare(recost(graph, target, model=model), table[target], full)
            errors_of_model.setdefault(model, []).append(errors)
            show(source, target, model, errors)
    for target in gpus:
        graph = mm_graph(table, target, device="")
        errors = compare(recost(graph, target), table[target], full)
        errors_of_model.setdefault("datasheet", []).append(errors)
        show("-", target, "datasheet", errors)
    print()
    for model, errors in errors_of_model.items():
        show("mean of", str(len(errors)), model, np.mean(errors, axis=0).tolist())


def mm_graph(table: pl.DataFrame, gpu: str, *, device: str) -> Graph:
    """Return one aten::mm for each shape: a kernel measured on `device`, or a CPU's operator."""
    strings = StringTable()
    count = len(table)
    shapes = [f"[[{m},{k}],[{k},{n}]]" for m, n, k in table.select("m", "n", "k").iter_rows()]
    results = [f"[[{m},{n}]]" for m, n in table.select("m", "n").iter_rows()]
    kind = Kind.KERNEL if device else Kind.HOST_OP
    nodes = Nodes.of(
        count,
        id=np.arange(count),
        op=strings.encode(["aten::mm"] * count),
        kind=np.full(count, kind),
        duration_ns=np.rint(table[gpu].to_numpy() * 1000.0),
        evidence=np.full(count, Evidence.MEASURED),
        input_shapes=strings.encode(shapes),
        input_types=strings.encode(['["Tensor(c10::BFloat16)","Tensor(c10::BFloat16)"]'] * count),
        output_shapes=strings.encode(results),
        output_types=strings.encode(['["Tensor(c10::BFloat16)"]'] * count),
    )
    none = np.zeros(0, dtype=np.int64)
    edges = Edges.from_pairs(count, none, none, none.astype(np.uint8))
    job = Job(device=Device("cuda" if device else "cpu", device))
    return Graph(nodes, edges, strings, job)


def compare(graph: Graph, measured: pl.Series, bins: dict[str, Mask]) -> list[float]:
    """Return the mean and median absolute error in percent of each bin."""
    times: F64 = measured.to_numpy().astype(np.float64) * 1000.0
    error = np.abs(graph.nodes.duration_ns - times) / times * 100
    return [float(figure(error[mask])) for mask in bins.values() for figure in (np.mean, np.median)]


def show(source: str, target: str, model: str, errors: list[float]) -> None:
    """Print one row."""
    cells = [
        f"{mean:7.1f} /{median:6.1f}"
        for mean, median in zip(errors[::2], errors[1::2], strict=True)
    ]
    print(f"{source:9} {target:9} {model:10}" + "".join(cells))


if __name__ == "__main__":
    main()
