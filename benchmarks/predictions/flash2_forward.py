"""FlashAttention 2's forward kernels, measured on one GPU and predicted by their shapes.

    python -m benchmarks.predictions.flash2_forward measure TABLE     on a GPU
    python -m benchmarks.predictions.flash2_forward compare TABLE --gpu H100

`measure` times calls of torch's `_flash_attention_forward` by Kineto, the sum of the kernels of a
call, median of 9 after 6 warm-up calls, and writes a CSV file: prefills of few tiles, of ragged
lengths and with a context; windows of 128 to thousands of tokens; decodes and prefills whose keys
the kernel divides; heads of 64 to 256.

`compare` predicts the calls as `annotate` does those of a capture without a device. The cycles of
`flash2_prefill` were fitted to other calls, but its ragged edges of heads above 64 were chosen with
these in view, after a blind prediction (2026-11-27-flash2-blind-h100).
"""

import csv
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from benchmarks.harness import gpus_and_torch, parser_of, print_conditions, print_errors
from onerank.annotate import load_gpu
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.intervals import intervals
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.op_costs.attention import KeyWindow
from onerank.annotate.op_costs.cost_record import LOWER_RIGHT, AttentionShape
from onerank.annotate.passes.unmeasured_attention import swap_unmeasured_attention
from tools.fit.measured_kernels import Attention, of_attention

_OPERATOR = "aten::_flash_attention_forward"
_WARM_UP, _CALLS = 6, 9


class Case(NamedTuple):
    """A call.

    Attributes:
        batch: sequences.
        heads: heads of queries.
        key_heads: heads of keys and values.
        size: size of heads.
        tokens: queries of a sequence.
        keys: keys of a sequence.
        window: keys that a query sees, with its own; 0: a causal mask alone; -1: no mask.
    """

    batch: int
    heads: int
    key_heads: int
    size: int
    tokens: int
    keys: int
    window: int = 0


def cases() -> Iterator[Case]:
    """Yield the calls."""
    for heads, key_heads, size in (
        *((12, 12, 64), (24, 8, 64), (40, 8, 64), (28, 4, 128), (48, 8, 128), (16, 16, 96)),
        *((32, 32, 80), (16, 8, 192), (12, 4, 256), (16, 8, 256)),
    ):
        for batch, tokens, context in (
            *((1, 640, 0), (1, 900, 0), (1, 1536, 0), (1, 777, 3000), (1, 2048, 6144)),
            *((3, 512, 0), (2, 1000, 500), (1, 6000, 0)),
        ):
            yield Case(batch, heads, key_heads, size, tokens, tokens + context)
    for heads, key_heads, size, window in (
        *((32, 8, 64, 4096), (16, 16, 64, 2048), (24, 8, 64, 512), (40, 10, 128, 2048)),
        *((16, 4, 128, 512), (32, 32, 96, 1024), (16, 8, 192, 4096), (8, 4, 256, 512)),
    ):
        for batch, tokens, context in (
            (1, 3072, 0),
            (1, 1024, 8192),
            (2, 8192, 0),
            (1, 1500, 1500),
        ):
            cached = min(tokens + context, tokens + window - 1)
            yield Case(batch, heads, key_heads, size, tokens, cached, window)
    for heads, key_heads, size in ((24, 8, 64), (28, 4, 128), (16, 8, 256), (16, 16, 96)):
        for batch, tokens, context in (
            *((1, 128, 4096), (1, 96, 1000), (2, 64, 2048), (1, 1, 8191), (4, 1, 4095)),
            *((16, 1, 2047), (48, 1, 1023), (96, 1, 4095)),
        ):
            yield Case(batch, heads, key_heads, size, tokens, tokens + context)
    for heads, size in ((20, 64), (12, 128), (8, 256)):
        for batch, tokens, keys in ((1, 1500, 1500), (4, 1024, 256), (2, 3000, 3000)):
            yield Case(batch, heads, heads, size, tokens, keys, -1)


def measure(table: Path, few: int | None) -> None:
    """Write the table; only the first `few` cases if given."""
    print_conditions(*gpus_and_torch())
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*Case._fields, "time_ns", "kernels"))
        for case in list(cases())[:few]:
            writer.writerow((*case, *_time_ns(case)))
            file.flush()


def _time_ns(case: Case) -> tuple[int, int]:
    """Return the time of the kernels of a call, and their number."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    random: Any = torch.randn
    of = {"dtype": torch.bfloat16, "device": "cuda"}
    q = random(case.batch, case.tokens, case.heads, case.size, **of)
    k, v = (random(case.batch, case.keys, case.key_heads, case.size, **of) for _ in range(2))
    window = (
        {"window_size_left": case.window - 1, "window_size_right": 0} if case.window > 0 else {}
    )
    forward: Any = torch.ops.aten._flash_attention_forward

    def call() -> None:
        forward(
            *(q, k, v, None, None, case.tokens, case.keys, 0.0, case.window >= 0, False),
            scale=case.size**-0.5,
            **window,
        )

    for _ in range(_WARM_UP):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_CALLS):
            call()
        torch.cuda.synchronize()
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if "flash_fwd" in e.name()]
    events.sort(key=lambda event: event.start_ns())
    kernels = len(events) // _CALLS
    assert len(events) == kernels * _CALLS, "as many kernels for each call"
    times = [e.duration_ns() for e in events]
    sums = [sum(times[at : at + kernels]) for at in range(0, len(times), kernels)]
    return round(statistics.median(sums)), kernels


def shape_of(case: Case) -> AttentionShape:
    """Return the shape of a call as `annotate` reads it off the arguments."""
    batch, heads, key_heads, size, tokens, keys, window = case
    causal = 0 if window < 0 or tokens == 1 else LOWER_RIGHT if keys > tokens else 1
    seen, of_last_tile = KeyWindow(window - 1, 0), 0
    if window > 0 and seen.hides(tokens, keys, causal=True):
        causal, of_last_tile = 0, seen.keys_of_last_tile(tokens, keys)
        keys = seen.keys_of_tile(tokens, keys)
    sizes = batch, heads, key_heads, tokens, keys, size, size
    return AttentionShape(*sizes, causal, backward=0, window=of_last_tile)


def compare(table: Path, name: str) -> None:
    """Print the errors."""
    gpu = load_gpu(name)
    rows = pl.read_csv(table)
    calls = [Case(*row) for row in rows.select(Case._fields).iter_rows()]
    measured_ns = rows["time_ns"].to_numpy().astype(np.float64)
    shapes = np.array([shape_of(case) for case in calls], dtype=np.float64)
    kernels = of_attention(Attention(shapes, {}, per_call=False), measured_ns)
    by_usual = predict_from_description(kernels, gpu)
    predicted, _ = swap_unmeasured_attention(
        kernels, by_usual, gpu, "usual", [_OPERATOR] * len(calls)
    )
    (low, high), _ = intervals(kernels, predicted, None, gpu, shipped())
    predicted_ns = predicted.duration_ns
    inside = (low <= measured_ns) & (measured_ns <= high)
    error = 100 * (predicted_ns / measured_ns - 1)
    print_conditions()
    print(f"{gpu.name}, {table.name}")
    print("batch heads  kv size tokens   keys window kernels measured us predicted    error")
    for at, (case, kernels_of_call) in enumerate(zip(calls, rows["kernels"], strict=True)):
        print(f"{case.batch:5}{case.heads:6}{case.key_heads:4}{case.size:5}{case.tokens:7}"
              f"{case.keys:7}{case.window:7}{kernels_of_call:8}{measured_ns[at] / 1e3:12.1f}"
              f"{predicted_ns[at] / 1e3:10.1f}{error[at]:+8.1f}%"
              f"{'' if inside[at] else '  outside'}")  # fmt: skip
    tokens, window = rows["tokens"].to_numpy(), rows["window"].to_numpy()
    groups = {
        "all": tokens > 0,
        "decodes": tokens == 1,
        "divided prefills": (tokens > 1) & (tokens <= 128),
        "prefills": (tokens > 128) & (window == 0),
        "windows": window > 0,
        "without a mask": window < 0,
    }
    sizes = rows["size"].to_numpy()
    groups |= {f"heads of {size}": sizes == size for size in np.unique(sizes)}
    print_errors(error, inside, groups)


def main() -> None:
    """Measure or compare."""
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("table", type=Path, help="CSV file")
    parser.add_argument("--gpu", default="H100", help="description of the GPU that measured")
    parser.add_argument("--few", type=int, help="measure the first N cases only")
    args = parser.parse_args()
    if args.action == "compare":
        compare(args.table, args.gpu)
    else:
        measure(args.table, args.few)


if __name__ == "__main__":
    main()
