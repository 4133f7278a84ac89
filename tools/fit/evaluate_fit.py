"""Evaluate predictions: by datasheet, by database look-up, and at another size."""

import gzip
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import permutations, product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from onerank.annotate.gpus.datasheet_estimates import with_estimates
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.gpus.spec_schema import Figure
from onerank.annotate.kernel_db.calls import call_of, modelled_ns
from onerank.annotate.kernel_db.database import SHIPPED, Library, read_database, rows_of
from onerank.annotate.kernel_db.look_up import SOURCE_SHARE, Basis, look_up
from onerank.annotate.models.calibration import MeanRates, gemm_shapes, rates_in
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.error_kinds import TINY_NS
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.cost_record import GemmShape, Work
from onerank.annotate.op_costs.node_costs import op_costs_of, work_of_call
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.passes.swap_kernels import scale_to_size
from onerank.annotate.recost.recost import source_gpu
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Graph
from onerank.ir.arrays import I64, Mask
from onerank.ir.chakra import read
from onerank.ir.measurement import LARGE_SHAPES, SKINNY_SHAPES
from tools.fit.fit_tiles import stored_ns
from tools.fit.measured_kernels import (
    F64,
    Attention,
    Products,
    family,
    of_attention,
    of_layers,
    of_products,
    read_products,
)

VIDUR_FILE = "vidur_mlp_fp16.parquet"


@dataclass(frozen=True, slots=True)
class Case:
    """Predictions for one ordered pair of GPUs.

    Attributes:
        kind: kind of prediction, as in `error_kinds.KINDS`.
        source: GPU whose measurement was used.
        target: GPU predicted, its family left out of the fit.
        measured_ns: float64[d].
        predicted_ns: float64[d].
        rows: m of products, queries of attention, 0 of others, float64[d].
        widening: factor on the errors for a GPU this far from those fitted to, see `intervals`.
        by_datasheet: whether only the target's datasheet figures were used.
        without: what the fit left out, a key of `fits_without`; "": the target's die family.
    """

    kind: str
    source: Gpu
    target: Gpu
    measured_ns: F64
    predicted_ns: F64
    rows: F64
    widening: float = 1.0
    by_datasheet: bool = False
    without: str = ""

    @property
    def error(self) -> F64:
        """ln(measured / predicted)."""
        return np.log(self.measured_ns / self.predicted_ns)


Described = Callable[[Gpu], Gpu]
"""Shipped description -> the description that a prediction may use."""


def as_shipped(gpu: Gpu) -> Gpu:
    """Return the GPU with everything in its shipped description."""
    return gpu


def read_layers(folder: Path) -> dict[str, pl.DataFrame]:
    """Return GPU -> norms, rotary embeddings, activations, additions and embeddings in fp16.

    Times are medians in ms, without PyTorch's calls that the cache serves in part (see
    `_partly_cached`) and without phi-2's additions, of which a layer has two in one row.
    """
    rows = pl.read_parquet(folder / VIDUR_FILE).filter(pl.col("kind").cast(pl.String) == "mem")
    rows = rows.cast(dict.fromkeys(("gpu", "model", "op"), pl.String))
    twice = (pl.col("model") == "phi-2") & (pl.col("op") == "add")
    rows = rows.filter(pl.col("time_ms") > 0, ~twice)
    index = ["model", "tp", "tokens", "op", "bytes"]
    medians = rows.group_by("gpu", *index, maintain_order=True).agg(pl.col("time_ms").median())
    tables: dict[str, pl.DataFrame] = {}
    for (name,), table in medians.group_by("gpu", maintain_order=True):
        kernels = of_layers(layer_times(table), table)
        from_memory = ~_partly_cached(kernels, load_gpu(str(name)))
        tables[str(name)] = table.filter(from_memory).drop("gpu")
    return tables


# Times the cache's size up to which it keeps a part of the operands of a call that is repeated.
_KEPT_BY_CACHE = 8.0


def _partly_cached(kernels: KernelFeatures, gpu: Gpu) -> Mask:
    """Return whether a repeated call finds in the cache what a step reads from memory, bool[n].

    vidur repeats a call on the same tensors. Its additions reach 1.97 TB/s on an A100 with
    operands as large as half of the cache, 1.89 with one to 1.2 times its size, 1.80 and 1.78 with
    2 and 4 times, and 1.71 from 8 times on. On an H100, which has 3.35 TB/s, they reach 3.25 with
    2 to 4 times, and larger ones were not measured.
    """
    fewer = kernels.bytes < _KEPT_BY_CACHE * (gpu.l2_bytes or 0)
    return kernels.from_torch & fewer & (kernels.cached_share(gpu) < 1)


def layer_times(table: pl.DataFrame, column: str = "time_ms") -> F64:
    """Return a column of times in ms, in ns, float64[n]."""
    return table[column].to_numpy().astype(np.float64) * 1e6


def unmeasured_cases(folder: Path, described: Described = as_shipped) -> Iterator[Case]:
    """Yield norms, rotary embeddings, activations and additions in fp16, by GPU.

    They are predicted like operators of a CPU capture: launch floor and bandwidth. No family is
    excluded, because nothing of this is fitted.
    """
    for name, layers in read_layers(folder).items():
        # The embedding is five times slower than its bytes. PyTorch has replaced that kernel since:
        # the gather of rows in the H200's database is not slow.
        gpu, table = load_gpu(name), layers.filter(pl.col("op") != "emb")
        times = layer_times(table)
        kernels = of_layers(times, table)
        predicted_ns, _ = predict_from_datasheet(kernels, described(gpu))
        for kind, rows in (
            ("memory_unmeasured", kernels.from_torch),
            ("memory_library_unmeasured", ~kernels.from_torch),
        ):
            none = np.zeros(int(rows.sum()))
            yield Case(kind, gpu, gpu, times[rows], predicted_ns[rows], none)


# Captures without concurrent communication, which slows kernels -> their GPU.
_STEPS = {
    "h100-llama-8b-4l-tp4/trace": "H100",
    "h100-llama-8b-prefill/8192": "H100",
    "h200-llama-8b-4l-tp2-graphs/1024": "H200",
    "h200-llama-8b-4l-tp2-graphs/2048": "H200",
    "h200-llama-8b-4l-tp2-real/slice.0": "H200",
}
_TRACES = Path(__file__).parents[2] / "traces"

# The same step on an H100, and as the profiler recorded it on an H200.
_SAME_DIE = "h100-llama-8b-4l-tp4/trace", "h200-llama-8b-4l-tp4"

_NOT_MEMORY = (OpClass.GEMM, OpClass.ATTENTION, OpClass.COMMUNICATION)


def step_cases(described: Described = as_shipped) -> Iterator[Case]:
    """Yield PyTorch's kernels in captured steps that memory bounds, by their shapes, by GPU.

    Their operands are where a step leaves them, unlike those of a benchmark that repeats a call.
    Kernels of one name and call are one entry with their median time. Those whose layout matters
    and is unknown are a kind, to which a capture with strides adds its kernels without them.
    """
    for name, strides in product(dict.fromkeys(_STEPS.values()), (True, False)):
        gpu = load_gpu(name)
        tables = [
            _step_kernels(path, gpu, described, strides=strides)
            for path, of in _STEPS.items()
            if of == name
        ]
        each = pl.concat(tables).group_by("kernel", "operator", "shapes", maintain_order=True)
        table = each.agg(pl.col("measured", "predicted").median())
        times, predicted_ns = (table[column].to_numpy() for column in ("measured", "predicted"))
        kind = "memory_unmeasured" if strides else "memory_unknown_layout"
        yield Case(kind, gpu, gpu, times, predicted_ns, np.zeros(len(table)))


def same_die_steps(model: Callable[[str], Predict]) -> Iterator[Case]:
    """Yield both directions of a step of a Llama-8B, captured on two SKUs of a die.

    Kernels of one name and call are one entry with their median times. Kernels that only one of the
    GPUs ran have no entry.

    Args:
        model: die family that is left out -> the model to use.
    """
    converted, recorded = _SAME_DIE
    graphs = _step(converted), convert_directory(_TRACES / recorded)[0]
    for before, after in (graphs, graphs[::-1]):
        source, target = source_gpu(before, None), source_gpu(after, None)
        costs = op_costs_of(before)
        kernels = KernelFeatures.of(before, costs)
        predicted_ns, rules = model(family(target))(kernels, source, target)
        here, there = _same_kernels(before, after)
        at = np.searchsorted(costs.index, here)
        each = pl.DataFrame(
            {
                "kernel": before.nodes.name[here],
                "call": costs.call[at],
                "memory": ~(costs.is_class(*_NOT_MEMORY) | kernels.over_link)[at],
                "tiles": (rules == Rule.GEMM_TILES)[at],
                "rows": kernels.gemm[kernels.call[at], GemmShape._fields.index("m")],
                "measured": after.nodes.duration_ns[there].astype(np.float64),
                "predicted": predicted_ns[at],
            }
        ).filter(pl.col("measured") > 0)
        of_call = ["kernel", "call", "memory", "tiles", "rows"]
        medians = pl.col("measured", "predicted").median()
        table = each.group_by(of_call, maintain_order=True).agg(medians)
        for kind, chosen in (("memory_same_die", "memory"), ("gemm_same_die", "tiles")):
            of_kind = table.filter(chosen)
            measured_ns, predicted, rows = (
                of_kind[name].to_numpy() for name in ("measured", "predicted", "rows")
            )
            yield Case(kind, source, target, measured_ns, predicted, rows)


def _same_kernels(graph: Graph, other: Graph) -> tuple[I64, I64]:
    """Return the nodes of the kernels that both graphs have in the same order, int64[n] each."""
    index = np.flatnonzero(graph.gpu_compute), np.flatnonzero(other.gpu_compute)
    names = [
        [(g.strings[int(g.nodes.op[node])], g.strings[int(g.nodes.name[node])]) for node in nodes]
        for g, nodes in zip((graph, other), index, strict=True)
    ]
    blocks = SequenceMatcher(None, *names, autojunk=False).get_matching_blocks()
    here = [at for block in blocks for at in range(block.a, block.a + block.size)]
    there = [at for block in blocks for at in range(block.b, block.b + block.size)]
    return index[0][here], index[1][there]


def _step(path: str) -> Graph:
    with tempfile.NamedTemporaryFile(suffix=".et") as file:
        Path(file.name).write_bytes(gzip.decompress((_TRACES / f"{path}.et.gz").read_bytes()))
        return read(Path(file.name))


def _step_kernels(path: str, gpu: Gpu, described: Described, *, strides: bool) -> pl.DataFrame:
    """Return the kernels of known layout, or without strides those of unknown layout."""
    graph = _step(path)
    if not strides:
        graph = graph.with_columns(input_strides=np.zeros_like(graph.nodes.input_strides))
    costs = op_costs_of(graph)
    kernels = KernelFeatures.of(graph, costs)
    predicted_ns, _ = predict_from_datasheet(kernels, described(gpu))
    nodes = graph.nodes
    chosen = kernels.from_torch & (kernels.duration_ns > 0)
    chosen &= ~(costs.is_class(*_NOT_MEMORY) | kernels.over_link)
    chosen &= kernels.unknown_layout != strides
    index = costs.index[chosen]
    return pl.DataFrame(
        {
            "kernel": nodes.name[index],
            "operator": nodes.op[index],
            "shapes": nodes.input_shapes[index],
            "measured": kernels.duration_ns[chosen],
            "predicted": predicted_ns[chosen],
        }
    ).with_columns(
        pl.col("kernel", "operator", "shapes").map_elements(
            lambda code: graph.strings[int(code)], return_dtype=pl.String
        )
    )


def attention_cases(
    attention: Attention,
    model: Callable[[str], PredictFromDescription],
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield attention of the dataset by its shape, by GPU, with the GPU's die family left out."""
    for name, times in attention.times_ns.items():
        gpu = load_gpu(name)
        predicted_ns, _ = model(family(gpu))(of_attention(attention, times), described(gpu))
        # The dataset's kernels also write keys and values to a cache, which no operator of a step
        # does.
        predicted_ns = predicted_ns + stored_ns(gpu, attention.shapes)
        yield Case("attention_unmeasured", gpu, gpu, times, predicted_ns, attention.shapes[:, 3])


def database_cases(
    model: Callable[[str], PredictFromDescription], described: Described = as_shipped
) -> Iterator[Case]:
    """Yield both passes of cuDNN's attention in the shipped H200's database, by their shapes."""
    gpu = load_gpu("H200")
    works: list[Work] = []
    times: list[int] = []
    for row in rows_of(read_database(SHIPPED / "H200.parquet")):
        # The kernel of torch on an H200; the dataset has only flash-attention's.
        if "_cudnn_attention" not in row.operator:
            continue
        call = call_of(row.key)
        assert call is not None, "attention's types are known"
        works.append(work_of_call(row.operator, call))
        times.append(sum(row.kernel_ns))
    rows = np.array(
        [work.attention.rows if work.attention else 0 for work in works], dtype=np.float64
    )
    predicted_ns = modelled_ns(works, described(gpu), model(family(gpu)))
    measured_ns = np.array(times, dtype=np.float64)
    yield Case("attention_unmeasured", gpu, gpu, measured_ns, predicted_ns, rows)


_ESTIMATED = ("memory_achievable_fraction", "launch_floor_ns")


def as_by_datasheet(gpus: Sequence[Gpu]) -> Described:
    """Return a function that replaces the measured figures of a target by the loader's estimates.

    The estimates come from those of `gpus` that are of another die family than the target.
    """

    def described(target: Gpu) -> Gpu:
        known = {
            name: figure
            for name, figure in target.figures.items()
            if name not in _ESTIMATED
            and not name.startswith("measured")
            and not name.endswith("_sustained_fraction")
        }
        others = [gpu for gpu in gpus if family(gpu) != family(target)]
        return with_estimates(msgspec.structs.replace(target, figures=known), lambda: others)

    return described


def as_calibrated(gpus: Sequence[Gpu], products: Products) -> Described:
    """Return a function that describes a target by its datasheet and two microbenchmarks."""
    forget = as_by_datasheet(gpus)
    place = {tuple(size): row for row, size in enumerate(products.shapes[:, 1:4].tolist())}

    def reached(target: Gpu, sizes: Sequence[tuple[int, int, int]]) -> MeanRates:
        times = products.times_ns[target.name]
        return rates_in(gemm_shapes(sizes), times[[place[size] for size in sizes]])

    def described(target: Gpu) -> Gpu:
        measured = {
            "measured_gemm_tflops": reached(target, LARGE_SHAPES).flops / 1e12,
            "measured_skinny_gb_per_s": reached(target, SKINNY_SHAPES).bytes / 1e9,
        }
        # A figure must name a source of its description; which one does not matter here.
        source = next(iter(target.sources))
        figures = {n: Figure(value, source, "measured") for n, value in measured.items()}
        known = forget(target)
        return msgspec.structs.replace(known, figures={**known.figures, **figures})

    return described


POWER_FILE = "gemm_power.parquet"
STEP_KINDS = ("looked_up", "looked_up_short_or_data_dependent")
# Shortest layers that are compared: their times are whole microseconds.
_LONG_NS = 10_000
_SIZES = ["m", "n", "k"]


class DatasetPair(NamedTuple):
    """The same 16-bit products measured twice.

    Attributes:
        name: name of the second dataset.
        sizes: m, n and k, float64[d, 3].
        first: name of a description -> times of the first dataset in ns, float64[d].
        second: the same for the second dataset.
    """

    name: str
    sizes: F64
    first: dict[str, F64]
    second: dict[str, F64]


def dataset_pairs(folder: Path) -> Iterator[DatasetPair]:
    """Yield each dataset in the folder, paired with that of `gemm.parquet`.

    `gemm_power.parquet` has the same bf16 GEMMs on two GPUs. `vidur_mlp_fp16.parquet` has layers in
    fp16 on two others, of which those over 10 us are used.

    Raises:
        FormatError: `gemm.parquet` is missing or lacks a column.
        TargetError: a file has a GPU without a description.
    """
    products = read_products(folder)
    for name in (POWER_FILE, VIDUR_FILE):
        if not (folder / name).is_file():
            continue
        rows = pl.read_parquet(folder / name).with_columns(pl.col("gpu").cast(pl.String))
        # vidur's table has layers of all kinds, in milliseconds.
        if "time_ms" in rows.columns:
            rows = rows.filter(pl.col("kind").cast(pl.String) == "gemm")
            rows = rows.with_columns(time_us=pl.col("time_ms") * 1000)
            rows = rows.filter(pl.col("time_us") * 1000 > _LONG_NS)
        rows = rows.with_columns(pl.col(_SIZES).cast(pl.Float64))
        # Layers of several models have the same sizes.
        times = rows.group_by("gpu", *_SIZES).agg(pl.col("time_us").median())
        table = times.pivot(on="gpu", index=_SIZES, values="time_us").drop_nulls()
        names = {gpu: load_gpu(gpu).name for gpu in table.columns[len(_SIZES) :]}
        first = pl.DataFrame(products.shapes[:, 1:4], schema=_SIZES).with_columns(
            pl.Series(f"first {gpu}", products.times_ns[description])
            for gpu, description in names.items()
        )
        both = table.join(first, on=_SIZES).sort(_SIZES)
        yield DatasetPair(
            name,
            both.select(_SIZES).to_numpy(),
            {description: both[f"first {gpu}"].to_numpy() for gpu, description in names.items()},
            {
                description: both[gpu].to_numpy().astype(np.float64) * 1000
                for gpu, description in names.items()
            },
        )


def looked_up_cases(folder: Path) -> Iterator[Case]:
    """Yield look-ups of the first dataset for the second, on one GPU and on two.

    No family is excluded, because nothing of a look-up is fitted.
    """
    for pair in dataset_pairs(folder):
        rows = pair.sizes[:, 0]
        for name, times in pair.second.items():
            gpu = load_gpu(name)
            yield Case("looked_up_other_versions", gpu, gpu, times, pair.first[name], rows)
        for source, target in permutations(pair.second, 2):
            gpus = load_gpu(source), load_gpu(target)
            predicted_ns = (
                pair.first[target] * (pair.second[source] / pair.first[source]) ** SOURCE_SHARE
            )
            yield Case("looked_up_other_versions", *gpus, pair.second[target], predicted_ns, rows)


def captured_cases(graph: Graph, library: Library) -> Iterator[Case]:
    """Yield the kernels of a captured step with look-ups for the GPU that ran it.

    Kernels of one name and call are one entry with their median time.

    Raises:
        AnnotateError: the GPU is not known.
    """
    gpu = source_gpu(graph, None)
    costs = op_costs_of(graph)
    all_nodes = np.ones(len(costs.index), dtype=bool)
    lookups = look_up(
        graph, costs, all_nodes, Basis(library, None, gpu, predict_from_description, shipped())
    )
    known = np.isfinite(lookups.time_ns) & (lookups.rules == Rule.LOOKED_UP)
    rows = pl.DataFrame(
        {
            "call": costs.call[known],
            "name": graph.nodes.name[costs.index[known]],
            "measured": graph.nodes.duration_ns[costs.index[known]].astype(np.float64),
            "looked_up": lookups.time_ns[known],
            "data_dependent": lookups.uncertainty.data_dependent[known],
        }
    )
    kernels = rows.filter(pl.col("measured") > 0).group_by("call", "name")
    medians = pl.col("measured", "looked_up").median()
    each = kernels.agg(medians, pl.col("data_dependent").first()).sort("call", "name")
    times, looked_up_ns = (each[name].to_numpy() for name in ("measured", "looked_up"))
    data_dependent = (looked_up_ns <= TINY_NS) | each["data_dependent"].to_numpy()
    for kind, selected in (
        ("looked_up", ~data_dependent),
        ("looked_up_short_or_data_dependent", data_dependent),
    ):
        yield Case(
            kind, gpu, gpu, times[selected], looked_up_ns[selected], np.zeros(int(selected.sum()))
        )


FACTORS = (2, 4, 8)
"""Ratios of the larger to the smaller size."""

_LEAST = 256  # rows of a product, tokens: no training step has fewer


def resized_product_cases(
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


def resized_attention_cases(
    attention: Attention, model: Callable[[str], PredictFromDescription]
) -> Iterator[Case]:
    """Yield attention of 2, 4 and 8 times the sequence or the batch, and back."""
    sizes = attention.shapes[:, [0, 3, 1, 2, 5]]  # batch, rows, heads, key heads, width
    for grows in (0, 1):
        pairs = _pairs(sizes, grows=grows, least=_LEAST if grows else 1)
        # With the batch growing, `least` is about the batch, so the rows are checked here.
        long = sizes[:, 1] >= _LEAST
        pairs = [(a, b) for a, b in pairs if long[a] and long[b]]
        for name, times in attention.times_ns.items():
            gpu = load_gpu(name)
            kernels = of_attention(attention, times)
            yield from _both_ways(
                "resized_attention", (gpu, model(family(gpu))), kernels, pairs, sizes[:, 1]
            )


def resized_memory_cases(folder: Path) -> Iterator[Case]:
    """Yield norms, rotary embeddings, activations and additions of 2, 4 and 8 times the tokens."""
    for name, table in read_layers(folder).items():
        codes = [
            table[column].cast(pl.String).rank("dense").to_numpy()
            for column in ("model", "tp", "op")
        ]
        sizes = np.stack([table["tokens"].to_numpy(), *codes], axis=1).astype(np.float64)
        kernels = of_layers(layer_times(table), table)
        gpu = load_gpu(name)
        pairs = _pairs(sizes, grows=0, least=_LEAST)
        yield from _both_ways(
            "resized_memory", (gpu, predict_from_datasheet), kernels, pairs, sizes[:, 0]
        )


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
