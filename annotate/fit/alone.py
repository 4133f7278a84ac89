"""What nobody measured, by its bytes and a datasheet alone, beside what it takes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl

from onerank.annotate.fit.case import VIDUR_FILE, Case
from onerank.annotate.fit.data import Attention, family
from onerank.annotate.fit.fitting import stored_ns
from onerank.annotate.fit.kernels import of_attention, of_layers
from onerank.annotate.gpus.descriptions import load_gpu
from onerank.annotate.lookup.call_key import CallKey
from onerank.annotate.lookup.database import read_database, rows_of
from onerank.annotate.lookup.points import call_of, modelled_ns
from onerank.annotate.models.datasheet import predict
from onerank.annotate.models.model import Alone
from onerank.annotate.work.operators import work_of_call
from onerank.annotate.work.record import Work

DATABASES = Path(__file__).parents[1] / "databases"


def alone_cases(folder: Path) -> Iterator[Case]:
    """Yield norms, rotary embeddings, activations and additions in fp16, by GPU.

    As an operator of a CPU capture is costed: launch floor and bandwidth. Nothing is left out, for
    nothing of that is fitted. Left out is the embedding, five times as slow as its bytes: PyTorch
    has had another kernel for it since, which is not (a gather of rows in the H200's database).
    """
    rows = pl.read_parquet(folder / VIDUR_FILE).filter(pl.col("kind").cast(pl.String) == "mem")
    rows = rows.filter(pl.col("op").cast(pl.String) != "emb")
    index = ["model", "tp", "tokens", "op", "bytes"]
    grouped = rows.group_by("gpu", *index, maintain_order=True).agg(pl.col("time_ms").median())
    for (name,), table in grouped.filter(pl.col("time_ms") > 0).group_by(
        "gpu", maintain_order=True
    ):
        gpu = load_gpu(str(name))
        times = table["time_ms"].to_numpy().astype(np.float64) * 1e6
        made, _ = predict(of_layers(times, table), gpu)
        yield Case("memory_alone", gpu, gpu, times, made, np.zeros(len(times)))


def attention_cases(attention: Attention, model: Callable[[str], Alone]) -> Iterator[Case]:
    """Yield attention of the campaign by its shape, by GPU, with the GPU's die family left out."""
    for name, times in attention.times_ns.items():
        gpu = load_gpu(name)
        made, _ = model(family(gpu))(of_attention(attention, times), gpu)
        made = made + stored_ns(gpu, attention.shapes)
        yield Case("attention_alone", gpu, gpu, times, made, attention.shapes[:, 3])


def database_cases(model: Callable[[str], Alone]) -> Iterator[Case]:
    """Yield both passes of cuDNN's attention in the shipped H200's database, by their shapes."""
    gpu = load_gpu("H200")
    works: list[Work] = []
    times: list[int] = []
    for row in rows_of(read_database(DATABASES / "H200.parquet")):
        if "_cudnn_attention" not in row.operator:
            continue
        call = call_of(CallKey(row.operator, row.shapes, row.dtypes, row.attributes))
        assert call is not None, "attention's types are known"
        works.append(work_of_call(row.operator, call))
        times.append(sum(row.kernel_ns))
    rows = np.array([work.attention[3] for work in works], dtype=np.float64)
    made = modelled_ns(works, gpu, model(family(gpu)))
    yield Case("attention_alone", gpu, gpu, np.array(times, dtype=np.float64), made, rows)
