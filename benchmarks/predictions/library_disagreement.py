"""How far libraries disagree on the time of one call, which bounds a prediction by its shape.

    python -m benchmarks.predictions.library_disagreement DATA

A trace without kernels does not show which library will run a call. For each call that several
libraries or versions of the public sets measured on one GPU, the table takes the one time that is
nearest to all of them in the mean: no prediction by GPU and shape alone can be nearer. The mean of
that time's errors is the bound, over 10 us and under.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import given_folder
from onerank.ir.arrays import F64

GPUS = ("A100-SXM-80GB", "H100-SXM", "H200", "B200", "L40S")
SHORT_US = 10
LEAST_CALLS = 300

# Kind of call -> file, its dtype or phase there ("" for all rows), and the columns of its sizes.
_GEMM = ("m", "n", "k")
_ATTENTION = ("batch", "rows", "keys", "heads", "kv_heads", "head_dim")
SORTS = {
    # vLLM's and SGLang's layers have a scale for each row, TensorRT-LLM's one for the tensor.
    "GEMMs in fp8, scales of rows or one": ("linears", "fp8", _GEMM),
    "GEMMs in fp8, scales of blocks": ("linears", "fp8_block", _GEMM),
    "GEMMs in NVFP4": ("linears", "nvfp4", _GEMM),
    "attention, prefill": ("attention", "context", _ATTENTION),
    "attention, decode": ("attention", "generation", _ATTENTION),
    "MLA, decode": ("latent", "", ("batch", "keys", "heads")),
}


def calls(folder: Path, file: str, part: str, sizes: Sequence[str]) -> pl.DataFrame:
    """Return the rows of a sort: GPU, library, sizes and median time in us."""
    rows = pl.read_parquet(folder / f"{file}.parquet")
    texts = [name for name, dtype in rows.schema.items() if dtype == pl.Categorical]
    rows = rows.with_columns(pl.col(texts).cast(pl.String))
    if part:
        rows = rows.filter(pl.col("dtype" if file == "linears" else "phase") == part)
    library = pl.concat_str("kernel", "dataset", separator=" ")
    # A GPU has a die in several descriptions of the sets: H100 and H100-SXM.
    gpu = pl.col("gpu").replace({"H100": "H100-SXM", "A100": "A100-SXM-80GB"})
    rows = rows.with_columns(library=library, gpu=gpu).filter(pl.col("gpu").is_in(GPUS))
    return rows.group_by("gpu", "library", *sizes).agg(pl.col("time_us").median())


def nearest_errors(times: F64) -> F64:
    """Return the errors of the nearest single time of each call, nan without one, [calls, l].

    The mean of |x / time - 1| is piecewise linear in x, so one of the times is the nearest.

    Args:
        times: of each library, nan if it did not measure the call, float64[calls, l].
    """
    errors = np.abs(times[:, :, None] / times[:, None, :] - 1)
    means = np.nanmean(np.where(np.isnan(times)[:, :, None], np.inf, errors), axis=2)
    nearest = np.nanargmin(means, axis=1)
    return errors[np.arange(len(times)), nearest]


def main() -> None:
    """Print the table."""
    folder = given_folder(__doc__, "linears.parquet", "attention.parquet", "latent.parquet")
    print(f"{'':36}{'GPU':15}{'libraries':>10}{'calls':>8}{'over 10 us':>12}{'under':>8}")
    for sort, (file, part, sizes) in SORTS.items():
        table = calls(folder, file, part, sizes)
        if table.is_empty():
            sys.exit(f"{folder / file}.parquet has no rows for {sort}")
        for name in GPUS:
            of_gpu = table.filter(pl.col("gpu") == name)
            if of_gpu["library"].n_unique() < 2:
                continue
            wide = of_gpu.pivot(on="library", index=list(sizes), values="time_us")
            times = wide.drop(*sizes).to_numpy().astype(np.float64)
            times = times[(~np.isnan(times)).sum(axis=1) > 1]
            if len(times) < LEAST_CALLS:
                continue
            errors, measured = nearest_errors(times), ~np.isnan(times)
            over = errors[measured & (times > SHORT_US)] * 100
            under = errors[measured & (times <= SHORT_US)] * 100
            short = f"{under.mean():7.1f}%" if len(under) > LEAST_CALLS else f"{'-':>8}"
            print(
                f"{sort:36}{name:15}{times.shape[1]:10}{len(times):8,}{over.mean():11.1f}%{short}"
            )


if __name__ == "__main__":
    main()
