"""What nobody measured, by its bytes and a datasheet alone, beside what it takes."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from onerank.annotate.fit.case import VIDUR_FILE, Case
from onerank.annotate.fit.kernels import of_layers
from onerank.annotate.gpus.descriptions import load_gpu
from onerank.annotate.models.datasheet import predict


def alone_cases(folder: Path) -> Iterator[Case]:
    """Yield norms, rotary embeddings, activations, additions and embeddings in fp16, by GPU.

    As an operator of a CPU capture is costed: launch floor and bandwidth. Nothing is left out, for
    nothing of that is fitted.
    """
    rows = pl.read_parquet(folder / VIDUR_FILE).filter(pl.col("kind").cast(pl.String) == "mem")
    index = ["model", "tp", "tokens", "op", "bytes"]
    grouped = rows.group_by("gpu", *index, maintain_order=True).agg(pl.col("time_ms").median())
    for (name,), table in grouped.filter(pl.col("time_ms") > 0).group_by(
        "gpu", maintain_order=True
    ):
        gpu = load_gpu(str(name))
        times = table["time_ms"].to_numpy().astype(np.float64) * 1e6
        made, _ = predict(of_layers(times, table), gpu)
        yield Case("memory_alone", gpu, gpu, times, made, np.zeros(len(times)))
