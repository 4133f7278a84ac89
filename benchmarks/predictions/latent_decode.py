"""FlashMLA's kernels of decodes, measured on one GPU and predicted by their shapes.

    python -m benchmarks.predictions.latent_decode measure TABLE --library LIBRARY
    python -m benchmarks.predictions.latent_decode compare TABLE --gpu H100

`measure` needs a Hopper GPU and a library with `flash_mla_legacy::dense_decode_fwd`, such as the
wheel of SGLang's fork of FlashMLA has. It checks one result against float64, and writes a CSV file:
one query per sequence with 16 to 128 heads against 1 to 256 sequences of 256 to 65,536 latent
vectors of 576 bf16 elements. Caches rotate through 400 MB, so that they come from memory. The time
is the sum of the medians of both kernels: the attention of each part of the keys, and their
combination. The kernel that divides the keys runs once per step in engines, and is not counted.

`compare` prints the error of `annotate` in percent of the measured time. The coefficients of
`flash_mla` were fitted to other sizes than those that `measure` runs.
"""

import csv
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.harness import gpus_and_torch, parser_of, print_conditions, print_errors
from onerank.annotate import load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.intervals import intervals
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.launch_rules import launches_of
from onerank.annotate.passes.unmeasured_attention import swap_unmeasured_attention
from tools.fit.measured_kernels import Attention, of_attention

COLUMNS = ("heads", "batch", "context", "attention_ns", "combine_ns")
_PAGE, _WIDTH, _VALUE = 64, 576, 512
_CALLS = 6
_ROTATED_BYTES, _MOST_BYTES = 400_000_000, 10_000_000_000


def measure(table: Path, library: Path) -> None:
    """Write the table."""
    import torch

    torch.ops.load_library(str(library))
    dense: Any = torch.ops.flash_mla_legacy.dense_decode_fwd
    print_conditions(*gpus_and_torch())
    print(f"relative error of 3 sequences of 256 tokens, 16 heads: {_error(dense):.4f}")
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for heads in (16, 32, 64, 128):
            for batch in (1, 4, 16, 64, 128, 256):
                for context in (256, 1024, 4096, 16384, 65536):
                    if 2 * batch * context * _WIDTH <= _MOST_BYTES:
                        times = _kernels_ns(dense, heads, batch, context)
                        writer.writerow([heads, batch, context, *times])


def _operands(heads: int, batch: int, context: int) -> tuple[Any, Any, Any]:
    """Return queries, lengths of the sequences, and their pages."""
    import torch

    q = torch.randn(batch, 1, heads, _WIDTH, device="cuda", dtype=torch.bfloat16)
    pages = torch.arange(batch * context // _PAGE, dtype=torch.int32, device="cuda")
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return q, lengths, pages.view(batch, -1)


def _cache(batch: int, context: int) -> Any:
    import torch

    size = batch * context // _PAGE, _PAGE, 1, _WIDTH
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def _error(dense: Any) -> float:
    """Return the error of a result relative to attention in float64."""
    import torch

    torch.manual_seed(0)
    heads, batch, context = 16, 3, 256
    (q, lengths, pages), cache = _operands(heads, batch, context), _cache(batch, context)
    out, *_ = dense(q, cache, _VALUE, lengths, pages, _WIDTH**-0.5, False, None, None)
    keys = cache.view(batch, context, _WIDTH).double()
    scores = torch.einsum("bqhd,bkd->bhqk", q.double(), keys) * _WIDTH**-0.5
    expected = torch.einsum("bhqk,bkd->bqhd", scores.softmax(-1), keys[..., :_VALUE])
    return float((out.double() - expected).norm() / expected.norm())


def _kernels_ns(dense: Any, heads: int, batch: int, context: int) -> list[int]:
    """Return the medians of the two kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    nbytes = 2 * batch * context * _WIDTH
    caches = [_cache(batch, context) for _ in range(max(1, min(16, _ROTATED_BYTES // nbytes)))]
    q, lengths, pages = _operands(heads, batch, context)

    def call(number: int, schedule: tuple[Any, Any]) -> tuple[Any, Any]:
        operands = q, caches[number % len(caches)], _VALUE, lengths, pages
        _, _, *computed = dense(*operands, _WIDTH**-0.5, False, *schedule)
        return computed[0], computed[1]

    schedule = call(0, (None, None))
    for number in range(3):
        call(number, schedule)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(_CALLS):
            call(number, schedule)
        torch.cuda.synchronize()
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if "CUDA" in str(e.device_type())]
    events.sort(key=lambda event: event.start_ns())
    assert len(events) == 2 * _CALLS, "two kernels for each call"
    return [round(statistics.median(e.duration_ns() for e in events[at::2])) for at in (0, 1)]


def _combination_ns(gpu: Gpu, heads: int, batch: int, context: int) -> float:
    """Return the predicted time of the kernel that combines the parts, in ns."""
    shapes = (batch, heads, _WIDTH), (batch, context, _WIDTH), (batch, context, _VALUE)
    inputs = tuple((Tensor(shape, "bfloat16", 2),) for shape in shapes)
    result = Tensor((batch, heads, _VALUE), "bfloat16", 2)
    call = Call("latent_attention", inputs, ((result,),), ())
    launches = launches_of("onerank_serving::latent_attention", call, gpu)
    return sum(launch.floors for launch in launches[1:]) * gpu.launch_floor_ns


def compare(table: Path, name: str) -> None:
    """Print the errors."""
    gpu = load_gpu(name)
    rows = pl.read_csv(table)
    heads, batch, context, attention_ns, combine_ns = (
        rows[column].to_numpy().astype(np.float64) for column in COLUMNS
    )
    ones = np.ones(len(rows))
    sizes = (batch, heads, ones, ones, context, _WIDTH * ones, _VALUE * ones, 0 * ones, 0 * ones)
    measured_ns = attention_ns + combine_ns
    attention = Attention(np.stack(sizes, axis=1), {}, per_call=False)
    kernels = of_attention(attention, measured_ns)
    by_usual = predict_from_description(kernels, gpu)
    operators = ["onerank_serving::latent_attention"] * len(rows)
    attention_only, _ = swap_unmeasured_attention(kernels, by_usual, gpu, "usual", operators)
    combined_ns = [_combination_ns(gpu, *row) for row in rows.select(COLUMNS[:3]).iter_rows()]
    predicted_ns = attention_only.duration_ns + combined_ns
    predicted = attention_only._replace(duration_ns=predicted_ns)
    (low, high), _ = intervals(kernels, predicted, None, gpu, shipped())
    error = 100 * (predicted_ns / measured_ns - 1)
    print_conditions()
    print(f"{gpu.name}, {table.name}")
    print(f"{'heads':>6}{'batch':>6}{'context':>8}{'attention':>11}{'combine':>9}{'sum us':>9}"
          f"{'predicted':>11}{'error':>8}")  # fmt: skip
    for at, row in enumerate(rows.iter_rows()):
        print(f"{row[0]:6}{row[1]:6}{row[2]:8}{row[3] / 1e3:11.1f}{row[4] / 1e3:9.1f}"
              f"{measured_ns[at] / 1e3:9.1f}{predicted_ns[at] / 1e3:11.1f}"
              f"{error[at]:+7.0f}%")  # fmt: skip
    inside = (low <= measured_ns) & (measured_ns <= high)
    groups = {"all": ones > 0} | {f"{h:.0f} heads": heads == h for h in np.unique(heads)}
    groups |= {"over 20 us": measured_ns > 20e3, "up to 20 us": measured_ns <= 20e3}
    print_errors(error, inside, groups)


def main() -> None:
    """Measure or compare."""
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("table", type=Path, help="CSV file")
    parser.add_argument("--library", type=Path, help="shared library of FlashMLA")
    parser.add_argument("--gpu", default="H100", help="description of the GPU that measured")
    args = parser.parse_args()
    if args.action == "compare":
        compare(args.table, args.gpu)
    elif args.library is None:
        parser.error("measure needs --library")
    else:
        measure(args.table, args.library)


if __name__ == "__main__":
    main()
