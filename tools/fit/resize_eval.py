"""Evaluate predictions at another size on the GPU that measured one size."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.roofline import predict
from onerank.annotate.passes.swap_kernels import scale_to_size
from tools.fit.datasheet_eval import VIDUR_FILE, Case
from tools.fit.measured_kernels import (
    F64,
    Attention,
    Products,
    family,
    of_attention,
    of_layers,
    of_products,
)

FACTORS = (2, 4, 8)
"""Ratios of the larger to the smaller size."""

_LEAST = 256  # rows of a product, tokens: no training step has fewer


def product_cases(
    products: Products, model: Callable[[str], PredictFromDescription]
) -> Iterator[Case]:
    """Yield products at 2, 4 and 8 times the rows, and back.

    Args:
        products: the measured GEMMs.
        model: family that is left out -> the model of unmeasured kernels.
    """
    sizes = products.shapes[:, 1:4]
    pairs = _pairs(sizes, grows=0, least=_LEAST)
    for name, times in products.times_ns.items():
        gpu = load_gpu(name)
        kernels = of_products(products, times)
        yield from _both_ways(
            "resized_product", (gpu, model(family(gpu))), kernels, pairs, sizes[:, 0]
        )


def attention_cases(
    attention: Attention, model: Callable[[str], PredictFromDescription]
) -> Iterator[Case]:
    """Yield attention of 2, 4 and 8 times the sequence or the batch, and back."""
    sizes = attention.shapes[:, [0, 3, 1, 2, 5]]  # batch, rows, heads, key heads, width
    for grows in (0, 1):
        pairs = _pairs(sizes, grows=grows, least=_LEAST if grows else 1)
        long = sizes[:, 1] >= _LEAST
        pairs = [(a, b) for a, b in pairs if long[a] and long[b]]
        for name, times in attention.times_ns.items():
            gpu = load_gpu(name)
            kernels = of_attention(attention, times)
            yield from _both_ways(
                "resized_attention", (gpu, model(family(gpu))), kernels, pairs, sizes[:, 1]
            )


def memory_cases(folder: Path) -> Iterator[Case]:
    """Yield norms, rotary embeddings, activations and additions of 2, 4 and 8 times the tokens."""
    rows = pl.read_parquet(folder / VIDUR_FILE).filter(pl.col("kind").cast(pl.String) == "mem")
    index = ["model", "tp", "op", "tokens"]
    for name in ("A100", "H100"):
        gpu_rows = rows.filter(pl.col("gpu").cast(pl.String) == name, pl.col("time_ms") > 0)
        table = gpu_rows.group_by(*index, maintain_order=True).agg(
            pl.col("time_ms").median(), pl.col("bytes").first()
        )
        codes = [
            table[column].cast(pl.String).rank("dense").to_numpy()
            for column in ("model", "tp", "op")
        ]
        sizes = np.stack([table["tokens"].to_numpy(), *codes], axis=1).astype(np.float64)
        times = table["time_ms"].to_numpy().astype(np.float64) * 1e6
        kernels = of_layers(times, table)
        gpu = load_gpu(name)
        pairs = _pairs(sizes, grows=0, least=_LEAST)
        yield from _both_ways("resized_memory", (gpu, predict), kernels, pairs, sizes[:, 0])


def _pairs(sizes: F64, *, grows: int, least: int) -> list[tuple[int, int]]:
    """Return the pairs of rows (a, b) that differ only in size `grows`, by one of `FACTORS`."""
    place = {tuple(size): row for row, size in enumerate(sizes.tolist())}
    pairs: list[tuple[int, int]] = []
    for size, row in place.items():
        if size[grows] < least:
            continue
        for factor in FACTORS:
            other = (*size[:grows], size[grows] * factor, *size[grows + 1 :])
            if other in place:
                pairs.append((row, place[other]))
    return pairs


def _both_ways(
    kind: str,
    on: tuple[Gpu, PredictFromDescription],
    kernels: KernelFeatures,
    pairs: list[tuple[int, int]],
    rows: F64,
) -> Iterator[Case]:
    gpu, from_description = on
    times = kernels.duration_ns
    small, large = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    for start, end in ((small, large), (large, small)):
        before, after = kernels.select(start), kernels.select(end)
        predicted_ns = scale_to_size(times[start], before, after, gpu, from_description)
        yield Case(kind, gpu, gpu, times[end], predicted_ns, rows[end])
