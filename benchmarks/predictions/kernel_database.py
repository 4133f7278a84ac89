"""Print the content of a kernel database, and compare its times with captured steps.

    python -m benchmarks.predictions.kernel_database h200.parquet [TRACE.et ...]

Each TRACE was captured on the database's GPU. Its kernels are looked up by operator, operands and
kernel name, and the rows' times are compared with the measured ones, class by class.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
import polars as pl

import onerank
from benchmarks.harness import parser_of
from onerank.annotate import op_class
from onerank.annotate.kernel_db.calls import CallKey, call_key
from onerank.annotate.kernel_db.database import KernelRow, contents, read_database, rows_of
from onerank.ir import Graph

LONG_NS = 50_000


def main() -> None:
    """Print the content of the database, and the comparison with each trace."""
    parser = parser_of(__doc__)
    parser.add_argument("database", type=Path)
    parser.add_argument("traces", type=Path, nargs="*")
    arguments = parser.parse_args()
    table = read_database(arguments.database)
    print(
        f"{arguments.database.name}: {len(table)} rows, {arguments.database.stat().st_size} bytes"
    )
    for name in ("gpu", "torch", "cuda", "cudnn", "driver", "triton"):
        print(f"  {name:8} {', '.join(table[name].unique().sort())}")
    print(f"  measured {table['date'].min()} to {table['date'].max()}")
    print(
        f"  clock    {table['sm_clock_mhz'].min()} to {table['sm_clock_mhz'].max()} MHz, "
        f"at {table['temperature_c'].min()} to {table['temperature_c'].max()} C; "
        f"{table['power_w'].count()} rows with power"
    )
    _operators(table)
    _against_each_other(table)
    _rates(table)
    rows: dict[CallKey, list[KernelRow]] = defaultdict(list)
    for row in rows_of(table):
        rows[row.key].append(row)
    for path in arguments.traces:
        _against_a_step(onerank.read(path), rows, path.name)


def _operators(table: pl.DataFrame) -> None:
    print(
        "\noperator                            type           calls  rows   shortest    longest us"
    )
    for row in contents(table).iter_rows(named=True):
        print(
            f"{row['operator']:35} {row['dtype']:13} {row['calls']:6} {row['rows']:5} "
            f"{row['shortest_ns'] / 1e3:10.1f} {row['longest_ns'] / 1e3:10.1f}"
        )


def _against_each_other(table: pl.DataFrame) -> None:
    """Print the call's time over the sum of its kernels', and the spread of the samples."""
    with_ratios = table.with_columns(
        ratio=pl.col("median_ns") / pl.col("kernel_ns").list.sum(),
        spread=pl.col("p90_ns") / pl.col("p10_ns") - 1,
        sort=pl.col("operator").map_elements(lambda op: op_class(op).value, pl.String),
        long=pl.col("median_ns") > LONG_NS,
    )
    print(
        "\nreplays over the kernels' own times, and 90th over 10th percentile of the replays\n"
        "class            cache  over 50 us  rows   p10 ratio median   p90   median spread"
    )
    grouped = with_ratios.group_by("sort", "l2", "long").agg(
        pl.len(),
        *(pl.col("ratio").quantile(quantile).alias(f"p{quantile}") for quantile in (0.1, 0.5, 0.9)),
        pl.col("spread").median(),
    )
    for sort, l2, long, count, low, middle, high, spread in grouped.sort(
        "sort", "l2", "long"
    ).iter_rows():
        print(
            f"{sort:16} {l2:6} {'yes' if long else 'no':10} {count:5}   {low:9.2f} "
            f"{middle:12.2f} {high:5.2f}   {spread:12.1%}"
        )


def _rates(table: pl.DataFrame) -> None:
    """Print the rates of large GEMMs and copies, from the replays and from the profiler."""
    print("\nrates, cold: replays (clocks settled) and profiler (a pause before each)")
    products = table.filter(
        pl.col("operator").is_in(["aten::mm", "aten::_scaled_mm"]) & (pl.col("l2") == "cold")
    )
    for dtype in products["dtypes"].list.first().unique().sort():
        for tf32 in (False, True):
            of_type = products.filter(
                (pl.col("dtypes").list.first() == dtype)
                & (pl.col("layout").str.contains("tf32") == tf32)
            )
            shapes = of_type["shapes"].to_list()
            flops = np.array([2 * a[0] * a[1] * b[1] for a, b, *_ in shapes], dtype=np.float64)
            long = flops > 2 * 4096**3 * 0.99
            if not long.any():
                continue
            replayed = flops[long] / of_type["median_ns"].to_numpy()[long] / 1e3
            profiled = flops[long] / of_type["kernel_ns"].list.sum().to_numpy()[long] / 1e3
            print(
                f"  {dtype + (' TF32' if tf32 else ''):16} {long.sum():4} products over 2 * 4096^3 "
                f"FLOPs: {np.median(replayed):6.0f} and {np.median(profiled):6.0f} TFLOPS median, "
                f"{replayed.max():6.0f} and {profiled.max():6.0f} most"
            )
    copies = table.filter(
        (pl.col("operator") == "aten::copy_") & (pl.col("median_ns") > LONG_NS)
        & pl.col("kernels").list.first().str.starts_with("Memcpy")
    )  # fmt: skip
    for row in copies.sort("median_ns").iter_rows(named=True):
        size = int(np.prod(row["shapes"][0])) * (4 if row["dtypes"][0] == "float32" else 2)
        rates = [2 * size / ns for ns in (row["median_ns"], sum(row["kernel_ns"]))]
        print(f"  copy of {size / 1e6:7.1f} MB: {rates[0]:.0f} and {rates[1]:.0f} GB/s")


def _against_a_step(graph: Graph, rows: dict[CallKey, list[KernelRow]], name: str) -> None:
    """Print the rows' times over the step's, class by class: cold rows, else warm ones."""
    index = np.flatnonzero(graph.gpu_compute)
    columns = ("op", "input_shapes", "input_types", "input_values", "name")
    texts = zip(
        *(np.array(graph.text(column), dtype=object)[index] for column in columns), strict=True
    )
    pairs: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    missed = 0
    durations = graph.nodes.duration_ns[index].tolist()
    for (op, shapes, types, values, kernel), ns in zip(texts, durations, strict=True):
        key = call_key(op, shapes, types, values)
        candidates = [row for row in rows.get(key, []) if kernel in row.kernels] if key else []
        if not candidates:
            missed += ns
            continue
        row = min(candidates, key=lambda column: column.l2 != "cold")
        times = [t for k, t in zip(row.kernels, row.kernel_ns, strict=True) if k == kernel]
        profiled = float(np.mean(times))
        pairs[op_class(op, kernel).value].append(
            (ns, profiled, profiled * row.median_ns / sum(row.kernel_ns))
        )
    total_ns = sum(durations)
    print(
        f"\n{name} ({graph.job.device.name}): {1 - missed / total_ns:.2%} of "
        f"{total_ns / 1e6:.2f} ms of kernels have a row of the same operator, operands and kernel\n"
        "class            nodes       ms   profiler  replays   (summed)   mean |error|: "
        "profiler replays"
    )
    everything = [pair for class_pairs in pairs.values() for pair in class_pairs]
    for sort, class_pairs in [*sorted(pairs.items()), ("all", everything)]:
        ns, profiled, replayed = np.array(class_pairs, dtype=np.float64).T
        print(
            f"{sort:16} {len(ns):5} {ns.sum() / 1e6:8.3f}   {profiled.sum() / ns.sum() - 1:+8.1%} "
            f"{replayed.sum() / ns.sum() - 1:+8.1%}               "
            f"{np.abs(profiled / ns - 1).mean():8.1%} {np.abs(replayed / ns - 1).mean():8.1%}"
        )


if __name__ == "__main__":
    main()
