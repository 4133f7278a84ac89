"""GEMMs and attention of decoding on one GPU, measured and predicted by their shapes.

    python -m benchmarks.predictions.decode_kernels measure TABLE
    python -m benchmarks.predictions.decode_kernels compare TABLE --gpu H100

`measure` needs a GPU and writes a CSV file: linear layers of Llama 8B and 70B with 1 to 256 tokens
at tensor parallelism 1 to 8, in bf16 and in fp8 with one scale for a tensor or a scale for each
row, and `scaled_dot_product_attention` of one query per sequence by FlashAttention and cuDNN.
Operands rotate through 200 MB, so that weights and caches come from memory.

  kernel  sum of the medians of the call's kernels, as the profiler records them: a trace has these
  graph   time per call of a replayed CUDA graph: the kernels and the gaps between them
  inside  calls whose measured time is in the 80% interval

`compare` prints mean errors in percent of the measured time, and their mean with its sign; a GEMM's
predicted time of a call is that of its kernel and the gap of the benchmark set of the fit. No row
of such a measurement is part of the fit; attention has the fit's coefficients, of FlashAttention-3.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import gpus_and_torch, parser_of, print_conditions
from onerank.annotate import load_gpu
from onerank.annotate.models import roofline
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.features import KernelFeatures, Timing
from onerank.annotate.models.intervals import intervals
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.op_costs.cost_record import Scales
from tools.fit.measured_kernels import Attention, Products, of_attention, of_products

COLUMNS = ("op", "name", "a", "b", "c", "d", "e", "kernel", "position", "median_ns", "graph_ns")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Name, hidden and intermediate size, heads, key heads.
MODELS = (("8b", 4096, 14336, 32, 8), ("70b", 8192, 28672, 64, 8))
HEADS = ((32, 8), (8, 2), (64, 8), (8, 1), (32, 32))
_POOL = 700_000_000  # elements that operands are views of
_ROTATED_BYTES = 200_000_000
_REPLAYS = 4

Case = tuple[tuple[str | int, ...], list[Callable[[], object]]]


def main() -> None:
    """Measure or compare."""
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("table", type=Path, help="CSV file")
    parser.add_argument("--gpu", help="description of the GPU that measured")
    options = parser.parse_args()
    if options.action == "measure":
        measure(options.table)
    else:
        compare(options)


def measure(table: Path) -> None:
    """Write the table."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to measure")
    print_conditions(*gpus_and_torch())
    pool = torch.empty(_POOL, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for case, calls in (*_linears(pool), *_attention(pool)):
            graph_ns = _graph_ns(calls)
            for position, (kernel, median_ns) in enumerate(_kernels(calls)):
                writer.writerow([*case, kernel, position, median_ns, graph_ns])


def _linears(pool) -> Iterator[Case]:
    import torch
    from torch.nn.functional import linear

    narrow_pool = torch.cat([(part * 100).to(torch.float8_e4m3fn) for part in pool.split(2**26)])
    one = torch.ones((), device="cuda")
    shapes: dict[tuple[int, int], str] = {}
    for (name, hidden, inner, heads, keys), tp in product(MODELS, (1, 2, 4, 8)):
        for layer, n, k in (
            ("qkv", (heads + 2 * max(keys, tp)) * 128 // tp, hidden),
            ("o", hidden, heads * 128 // tp),
            ("up", 2 * inner // tp, hidden),
            ("down", hidden, inner // tp),
        ):
            shapes.setdefault((n, k), f"{name}-{layer}-tp{tp}")
    for ((n, k), name), m in product(shapes.items(), TOKENS):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        narrow_x = x.to(torch.float8_e4m3fn)
        rows, columns = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
        wide, narrow = (_views(source, n, k) for source in (pool, narrow_pool))

        def scaled(w, a, b, x=narrow_x):
            return torch._scaled_mm(x, w.t(), a, b, out_dtype=torch.bfloat16)

        yield (
            ("linear_bf16", name, m, n, k, 0, 0),
            [lambda w=w, x=x: linear(x, w) for w in wide],
        )
        yield (
            ("scaled_mm_tensor", name, m, n, k, 0, 0),
            [lambda w=w: scaled(w, one, one) for w in narrow],
        )
        yield (
            ("scaled_mm_row", name, m, n, k, 0, 0),
            [lambda w=w, a=rows, b=columns: scaled(w, a, b) for w in narrow],
        )


def _attention(pool) -> Iterator[Case]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for (heads, keys), length, batch in product(
        HEADS, (128, 512, 2048, 8192, 32768), (1, 4, 16, 64, 256)
    ):
        size = batch * keys * length * 128
        if 2 * size > _POOL:
            continue
        caches = [
            view.view(2, batch, keys, length, 128)
            for view in _views(pool, 2 * batch, size // batch)
        ]
        q = torch.randn(batch, heads, 1, 128, device="cuda", dtype=torch.bfloat16)
        for name, kernel in kernels.items():

            def call(cache, q=q, kernel=kernel, grouped=heads != keys):
                with sdpa_kernel(kernel):
                    return attend(q, cache[0], cache[1], enable_gqa=grouped)

            yield (
                (f"sdpa_{name}", f"h{heads}-kv{keys}", batch, length, 128, heads, keys),
                [lambda cache=cache, call=call: call(cache) for cache in caches],
            )


def _views(pool, rows: int, columns: int) -> list:
    size = rows * columns
    wanted = max(2, -(-_ROTATED_BYTES // (size * pool.element_size())))
    count = max(1, min(wanted, _POOL // size, 48))
    return [pool[at * size : (at + 1) * size].view(rows, columns) for at in range(count)]


def _graph_ns(calls: list[Callable[[], object]]) -> int:
    import torch

    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
        side.synchronize()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e6 / len(calls))
    return round(sorted(times)[1])


def _kernels(calls: list[Callable[[], object]]) -> list[tuple[str, int]]:
    """Return (name, median duration in ns) of each kernel of a call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            call()
        torch.cuda.synchronize()
    recorded = profiler.profiler.kineto_results
    events = [e for e in recorded.events() if "CUDA" in str(e.device_type())]
    events.sort(key=lambda event: event.start_ns())
    each = len(events) // len(calls)
    return [
        (events[at].name()[:90], int(np.median([e.duration_ns() for e in events[at::each]])))
        for at in range(each)
    ]


def compare(options: argparse.Namespace) -> None:
    """Print the errors."""
    gpu = load_gpu(options.gpu)
    rows = pl.read_csv(options.table, infer_schema_length=None)
    calls = rows.group_by("op", "name", "a", "b", "c", "d", "e", maintain_order=True).agg(
        pl.col("median_ns").sum(), pl.col("graph_ns").first()
    )
    print(f"{gpu.name}, {options.table.name}")
    print(f"{'':20}{'calls':>6}{'kernel':>8}{'signed':>8}{'graph':>8}{'signed':>8}{'roofline':>10}"
          f"{'inside':>8}")  # fmt: skip
    for (op,), table in calls.group_by("op", maintain_order=True):
        kernels = features(str(op), table)
        if kernels is None:
            continue
        predicted = predict_from_description(kernels, gpu)
        of_call, _ = predict_from_description(replace(kernels, timing=Timing.CALL), gpu)
        (low, high), _ = intervals(kernels, predicted, None, gpu, shipped())
        by_roofline, _ = roofline.predict_from_datasheet(kernels, gpu)
        kernel_ns, graph_ns = (
            table[name].to_numpy().astype(np.float64) for name in ("median_ns", "graph_ns")
        )
        groups = {"": np.ones(len(table), dtype=bool)}
        column = "a" if not str(op).startswith("sdpa") else "b"
        groups |= {f"{each}": (table[column] == each).to_numpy() for each in table[column].unique()}
        for name, chosen in groups.items():
            error, graph_error, roof = (
                100 * (ns[chosen] / of[chosen] - 1)
                for ns, of in (
                    (predicted[0], kernel_ns),
                    (of_call, graph_ns),
                    (by_roofline, kernel_ns),
                )
            )
            inside = ((low <= kernel_ns) & (kernel_ns <= high))[chosen].mean()
            print(f"{op if not name else '  ' + name:20}{chosen.sum():6}"
                  f"{np.abs(error).mean():8.1f}{error.mean():+8.1f}{np.abs(graph_error).mean():8.1f}"
                  f"{graph_error.mean():+8.1f}{np.abs(roof).mean():10.1f}"
                  f"{100 * inside:7.0f}%")  # fmt: skip


def features(op: str, table: pl.DataFrame) -> KernelFeatures | None:
    """Return the calls of an operator as the cost models take them; None for other operators."""
    times_ns = table["median_ns"].to_numpy().astype(np.float64)
    ones = np.ones(len(table))
    a, b, c, d, e = (table[name].to_numpy().astype(np.float64) for name in "abcde")
    if op.startswith("sdpa"):
        shapes = np.stack([a, d, e, ones, b, c, c, 0 * ones, 0 * ones], axis=1)
        return of_attention(Attention(shapes, {}, per_call=False), times_ns)
    if not op.startswith(("linear", "scaled_mm")):
        return None
    item = 2 if op == "linear_bf16" else 1
    dtype = "bfloat16" if item == 2 else "float8_e4m3fn"
    shapes = np.stack([ones, a, b, c, item * ones, 2 * ones], axis=1)
    scales = Scales.ROW if op == "scaled_mm_row" else Scales.TENSOR
    return of_products(Products(dtype, shapes, {}, scales, per_call=False), times_ns)


if __name__ == "__main__":
    main()
