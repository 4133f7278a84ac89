"""Print the content of a kernel database, and compare its times with captured steps.

    python benchmarks/kernel_database.py h200.parquet [TRACE.et ...]

Of each TRACE, captured on the database's GPU, the kernels are looked up by operator, operands and
kernel name, and the rows' times are compared with the measured ones, class by class.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import polars as pl

import onerank
from onerank.annotate import op_class
from onerank.annotate.kernel_db.call_keys import CallKey, call_key
from onerank.annotate.kernel_db.database import KernelRow, contents, read_database, rows_of
from onerank.ir import Graph

LONG_NS = 50_000


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("database", type=Path)
    parser.add_argument("traces", type=Path, nargs="*")
    given = parser.parse_args()
    table = read_database(given.database)
    print(f"{given.database.name}: {len(table)} rows, {given.database.stat().st_size} bytes")
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
        rows[CallKey(row.operator, row.shapes, row.dtypes, row.attributes)].append(row)
    for path in given.traces:
        _against_a_step(onerank.read(path), rows, path.name)


def _operators(table: pl.DataFrame) -> None:
    print(
        "\noperator                            type           calls  rows   shortest    longest us"
    )
    for one in contents(table).iter_rows(named=True):
        print(
            f"{one['operator']:35} {one['dtype']:13} {one['calls']:6} {one['rows']:5} "
            f"{one['shortest_ns'] / 1e3:10.1f} {one['longest_ns'] / 1e3:10.1f}"
        )


def _against_each_other(table: pl.DataFrame) -> None:
    """Print the call's time over the sum of its kernels', and the spread of the samples."""
    whole = table.with_columns(
        ratio=pl.col("median_ns") / pl.col("kernel_ns").list.sum(),
        spread=pl.col("p90_ns") / pl.col("p10_ns") - 1,
        sort=pl.col("operator").map_elements(lambda op: op_class(op).value, pl.String),
        long=pl.col("median_ns") > LONG_NS,
    )
    print(
        "\nreplays over the kernels' own times, and 90th over 10th percentile of the replays\n"
        "class            cache  over 50 us  rows   p10 ratio median   p90   median spread"
    )
    grouped = whole.group_by("sort", "l2", "long").agg(
        pl.len(),
        *(pl.col("ratio").quantile(at).alias(f"p{at}") for at in (0.1, 0.5, 0.9)),
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
    """Print what large products and copies reach, by the replays and by the profiler."""
    print("\nrates, cold: replays (clocks settled) and profiler (a pause before each)")
    products = table.filter(
        pl.col("operator").is_in(["aten::mm", "aten::_scaled_mm"]) & (pl.col("l2") == "cold")
    )
    for dtype in products["dtypes"].list.first().unique().sort():
        for tf32 in (False, True):
            some = products.filter(
                (pl.col("dtypes").list.first() == dtype)
                & (pl.col("layout").str.contains("tf32") == tf32)
            )
            shapes = some["shapes"].to_list()
            flops = np.array([2 * a[0] * a[1] * b[1] for a, b, *_ in shapes], dtype=np.float64)
            long = flops > 2 * 4096**3 * 0.99
            if not long.any():
                continue
            replayed = flops[long] / some["median_ns"].to_numpy()[long] / 1e3
            alone = flops[long] / some["kernel_ns"].list.sum().to_numpy()[long] / 1e3
            print(
                f"  {dtype + (' TF32' if tf32 else ''):16} {long.sum():4} products over 2 * 4096^3 "
                f"FLOPs: {np.median(replayed):6.0f} and {np.median(alone):6.0f} TFLOPS median, "
                f"{replayed.max():6.0f} and {alone.max():6.0f} most"
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
    texts = zip(*(np.array(graph.text(one), dtype=object)[index] for one in columns), strict=True)
    pairs: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    missed = 0
    durations = graph.nodes.duration_ns[index].tolist()
    for (op, shapes, types, values, kernel), ns in zip(texts, durations, strict=True):
        key = call_key(op, shapes, types, values)
        found = [row for row in rows.get(key, []) if kernel in row.kernels] if key else []
        if not found:
            missed += ns
            continue
        row = min(found, key=lambda one: one.l2 != "cold")
        times = [t for k, t in zip(row.kernels, row.kernel_ns, strict=True) if k == kernel]
        own = float(np.mean(times))
        pairs[op_class(op, kernel).value].append(
            (ns, own, own * row.median_ns / sum(row.kernel_ns))
        )
    whole = sum(durations)
    print(
        f"\n{name} ({graph.job.device.name}): {1 - missed / whole:.2%} of {whole / 1e6:.2f} ms of "
        "kernels have a row of the same operator, operands and kernel\n"
        "class            nodes       ms   profiler  replays   (summed)   mean |error|: "
        "profiler replays"
    )
    everything = [pair for some in pairs.values() for pair in some]
    for sort, some in [*sorted(pairs.items()), ("all", everything)]:
        ns, own, replayed = np.array(some, dtype=np.float64).T
        print(
            f"{sort:16} {len(ns):5} {ns.sum() / 1e6:8.3f}   {own.sum() / ns.sum() - 1:+8.1%} "
            f"{replayed.sum() / ns.sum() - 1:+8.1%}               "
            f"{np.abs(own / ns - 1).mean():8.1%} {np.abs(replayed / ns - 1).mean():8.1%}"
        )


if __name__ == "__main__":
    main()
