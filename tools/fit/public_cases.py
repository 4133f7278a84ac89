"""Predictions of vector units and of attention kernels, from the tables of `public_sets`.

The coefficients of a prediction are fitted without the target's die family, or without the kernel.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import scipy.optimize

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.attention_time import (
    LATENT_ARCHITECTURES,
    attention_ns,
    decode_terms,
    latent_terms,
)
from onerank.annotate.models.coefficients import (
    AttentionCoefficients,
    Decode,
    LatentDecode,
    shipped,
)
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.gpu_distance import same_die
from onerank.annotate.models.learned import predict_from_description, predict_learned
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.op_classes import OpClass, floor_share_of
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.ir.arrays import F64
from tools.fit.evaluate_fit import Case, Described, as_shipped
from tools.fit.fit_tiles import fit_robustly, rates_of, robust_loss, stored_ns
from tools.fit.measured_kernels import (
    Attention,
    Products,
    family,
    of_attention,
    of_memory,
    of_products,
    read_table,
)

_optimize: Any = scipy.optimize  # it has no types

ATTENTION_KERNELS_FILE, LATENT_FILE = "attention.parquet", "latent.parquet"
VECTOR_FILE, QUANTISATION_FILE = "vector.parquet", "quantisation.parquet"

# architecture -> names of the kernels that libraries run there, as `attention_kernels` has them.
_USUAL = {
    "ampere": ("flash_attention", "vllm_flash_attn"),
    "ada": ("vllm_flash_attn_fa2",),
    "hopper": ("fa3", "vllm_flash_attn_fa3"),
    "blackwell": ("trtllm_mha", "vllm_flashinfer_trtllmprefill"),
}

# The same of attention with one query per sequence. SGLang's on an A100 is FlashAttention-3's code
# for Ampere, which no other framework runs there.
_USUAL_DECODE = {
    **_USUAL,
    "ampere": ("vllm_flash_attn",),
    "blackwell": ("trtllm_mha", "vllm_flashinfer_trtllmdecode"),
}
# Other kernels of one query per sequence: cases, but no part of a fit.
_OTHER_DECODE = {"ampere": ("flash_attention",)}

# Heads up to which the factor of other kernels is computed. With heads of 512 single kernels take
# 1.6 (TensorRT-LLM's, B200) to 6.3 times (Triton's, H100) as long as by their shape, which says
# nothing about usual heads.
_WIDEST_HEAD = 256

# Widths of a key and a value of latent attention: DeepSeek's.
_LATENT_SIZES = 576, 512

_LEAST_QUERIES = 16  # frameworks run other kernels for fewer

_CALLS = 400  # of each GPU, attention kernel and head size

_DECODE_CALLS = 2000  # of each GPU, dataset and kernel

# Benchmarks repeat a call with the same keys and values, so the last-level cache serves them if
# they fit. Calls whose keys and values have between these shares of its size are omitted; smaller
# ones take little time from memory, too. The omission does not flatter: with the dataset left out
# of the fit, omitted calls over 10 us are 13 to 18% off, the others 9 to 27%, by dataset.
_SERVED = 0.1, 2.0

_SEED = 4

_SIZES = ["m", "n", "k"]

ATTENTION_SIZES = ["batch", "rows", "keys", "heads", "kv_heads", "head_dim"]
"""Columns with the sizes of a call."""

# Least share of attention in a measured time that includes a write to a cache.
_LEAST_ALONE = 0.2


def vector_cases(
    folder: Path,
    model: Predict = predict_learned,
    by_shape: PredictFromDescription = predict_from_description,
) -> Iterator[Case]:
    """Yield fp32 operators by shape, and from another GPU's time.

    No family is excluded: the tiles are those of 16-bit GEMMs. The sustained fractions of the
    vector units are medians over the largest linear layers of this set.

    Args:
        folder: has `vector.parquet`.
        model: of measured kernels.
        by_shape: of unmeasured kernels.

    Raises:
        FormatError: `vector.parquet` is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    rows = read_table(folder / VECTOR_FILE, ["gpu", "op", "b", *_SIZES, "time_us"])
    cases: dict[tuple[str, str, str], list[Case]] = {}
    for (op,), table in rows.group_by("op", maintain_order=True):
        kind = "product" if op in ("linear", "bmm") else "memory"
        times = table.pivot(
            on="gpu", index=["b", *_SIZES], values="time_us", aggregate_function="median"
        )
        names = times.columns[4:]
        for name in names:
            measured = times.drop_nulls([name])
            gpu, kernels = load_gpu(name), _vector_kernels(str(op), measured, name)
            predicted_ns, _ = by_shape(kernels, gpu)
            times_ns = kernels.duration_ns
            case = Case(f"{kind}_unmeasured", gpu, gpu, times_ns, predicted_ns, kernels.bytes)
            cases.setdefault((case.kind, name, name), []).append(case)
        for source, target in permutations(names, 2):
            both = times.drop_nulls([source, target])
            gpus = load_gpu(source), load_gpu(target)
            is_same_die = same_die(*gpus)
            # The two A100s differ in memory alone, so their products say little about other pairs.
            if len(both) < 30 or (is_same_die and kind == "product"):
                continue
            kernels = _vector_kernels(str(op), both, source)
            predicted_ns, _ = model(kernels, *gpus)
            measured_ns = both[target].to_numpy() * 1000
            memory = "memory_same_die" if is_same_die else "memory_other_die"
            name = memory if kind == "memory" else kind
            case = Case(name, *gpus, measured_ns, predicted_ns, kernels.bytes)
            cases.setdefault((name, source, target), []).append(case)
    # One case for all operators of a pair: what one operator is off is not shared by the others.
    for of_pair in cases.values():
        measured_ns = np.concatenate([case.measured_ns for case in of_pair])
        predicted_ns = np.concatenate([case.predicted_ns for case in of_pair])
        moved = np.concatenate([case.rows for case in of_pair])
        first = of_pair[0]
        yield Case(first.kind, first.source, first.target, measured_ns, predicted_ns, moved)


@dataclass(frozen=True, slots=True)
class _Quantisation:
    """What a framework runs to quantise activations from 16 bits to 8.

    Attributes:
        framework: of the dataset.
        name: of the kernels.
        rows: operators in `quantisation.parquet` whose times add up to that of the kernels.
        moved: bytes that each kernel moves for an element.
        footprint: bytes of all operands and results for an element.
    """

    framework: str
    name: str
    rows: tuple[str, ...]
    moved: tuple[int, ...]
    footprint: int


# The dataset has a quantisation with a given scale ("scale_matrix"), and one that computes its
# scale: "compute_scale" is how much longer that takes. vLLM finds the scale of a row and quantises
# it in one kernel, which reads the row twice; TensorRT-LLM's kernel for the scale of a tensor runs
# before the other. SGLang quantises with a given scale by four operators of torch in float32:
# division, clamp, conversion and copy.
_QUANTISATIONS = (
    _Quantisation("trtllm", "quantise a tensor", ("scale_matrix",), (3,), 3),
    _Quantisation("trtllm", "scale of a tensor", ("compute_scale",), (2,), 2),
    _Quantisation("vllm", "quantise a tensor", ("scale_matrix",), (3,), 3),
    _Quantisation("vllm", "quantise rows", ("scale_matrix", "compute_scale"), (5,), 3),
    _Quantisation("sglang", "torch's operators", ("scale_matrix",), (6, 8, 5, 2), 12),
)


def quantisation_cases(
    folder: Path, model: Predict = predict_learned, described: Described = as_shipped
) -> Iterator[tuple[str, Case]]:
    """Yield (kernels, case) of frameworks' kernels that quantise, from another die's time.

    No family is excluded, and the intervals do not contain these errors. Benchmarks repeat a call
    with the same operands, so calls that the last-level cache of either GPU serves in part are
    omitted. The time of several kernels is divided among them as they would take it by their bytes.

    Args:
        folder: has `quantisation.parquet`.
        model: of measured kernels.
        described: returns the description of a target that the prediction may use.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    rows = read_table(folder / QUANTISATION_FILE, ["gpu", "dataset", "op", "m", "k", "time_us"])
    rows = rows.with_columns(framework=pl.col("dataset").str.split(" ").list.first())
    medians = rows.group_by("framework", "gpu", "m", "k", "op").agg(pl.col("time_us").median())
    for kernels in _QUANTISATIONS:
        of_kernels = medians.filter(
            pl.col("framework") == kernels.framework, pl.col("op").is_in(kernels.rows)
        )
        # Negative differences are 0 in the dataset, and the table omits rows of 0.
        complete = pl.col("op").n_unique() == len(kernels.rows)
        sums = of_kernels.group_by("gpu", "m", "k").agg(pl.col("time_us").sum(), complete=complete)
        times = sums.filter("complete").sort("gpu", "m", "k")
        times = times.pivot(on="gpu", index=["m", "k"], values="time_us")
        for source, target in permutations(times.columns[2:], 2):
            gpus = load_gpu(source), load_gpu(target)
            if same_die(*gpus):
                continue
            caches = sorted(gpu.l2_bytes or 1 for gpu in gpus)
            filled = kernels.footprint * pl.col("m") * pl.col("k")
            least, most = _SERVED[0] * caches[0], _SERVED[1] * caches[1]
            both = times.drop_nulls([source, target]).filter(~filled.is_between(least, most))
            if both.is_empty():
                continue
            sizes = (both["m"] * both["k"]).to_numpy().astype(np.float64)
            measured_ns = both[source].to_numpy() * 1000
            share = np.full(len(both), floor_share_of(OpClass.ELEMENTWISE))
            each = [
                replace(of_memory(measured_ns, moved * sizes), floor_share=share)
                for moved in kernels.moved
            ]
            by_shape = np.array([predict_from_datasheet(one, gpus[0])[0] for one in each])
            predicted_ns = np.zeros(len(both))
            for one, part in zip(each, by_shape / by_shape.sum(axis=0), strict=True):
                part_ns = part * measured_ns
                timed = replace(one, duration_ns=part_ns, operator_ns=part_ns)
                predicted_ns += model(timed, gpus[0], described(gpus[1]))[0]
            target_ns = both[target].to_numpy() * 1000
            case = Case("memory_other_die", *gpus, target_ns, predicted_ns, sizes)
            yield f"{kernels.framework}: {kernels.name}", case


def _vector_kernels(op: str, table: pl.DataFrame, gpu: str) -> KernelFeatures:
    times_ns = table[gpu].to_numpy() * 1000
    b, m, n, k = (table[size].to_numpy().astype(np.float64) for size in ("b", *_SIZES))
    if op in ("linear", "bmm"):
        fours = np.full(len(table), 4.0)
        shapes = np.stack([b, m, n, k, fours, fours], axis=1)
        return of_products(Products("float32", shapes, {}), times_ns)
    tensors = 3 if op in ("add", "mul", "div", "pow") else 2
    op_class = {"ln": OpClass.NORM, "softmax": OpClass.SOFTMAX}.get(op, OpClass.ELEMENTWISE)
    kernels = of_memory(times_ns, 4 * tensors * m * n)
    kernels = replace(kernels, floor_share=floor_share_of(op_class) * np.ones(len(table)))
    if op not in _ROW_OPERATORS:
        return kernels
    works = [_row_work(op, *sizes) for sizes in table.select("m", "n").iter_rows()]
    # Arrays of the works' attributes of the same names.
    columns = ("passes", "rereads", "cycles", "chain", "far_load")
    values: dict[str, Any] = {c: np.array([getattr(w, c) for w in works]) for c in columns}
    return replace(kernels, **values)


# Operators that read rows more than once -> their names in PyTorch.
_ROW_OPERATORS = {"ln": "native_layer_norm", "softmax": "_softmax"}


def _row_work(op: str, rows: int, columns: int) -> Work:
    tensor = Tensor((rows, columns), "float32", 4)
    name = _ROW_OPERATORS[op]
    return work_of_call(f"aten::{name}", Call(name, ((tensor,),), ((tensor,),), ()))


@dataclass(frozen=True, slots=True)
class _Calls:
    """Causal attention of one GPU, kernel and head size.

    Attributes:
        gpu: the GPU.
        usual: whether libraries run this kernel on the architecture.
        shapes: `AttentionShape` of each call without a window, float64[d, 9].
        times_ns: times with the write of keys and values, float64[d].
    """

    gpu: Gpu
    usual: bool
    shapes: F64
    times_ns: F64


def _read_calls(folder: Path) -> Iterator[_Calls]:
    """Yield the calls in `attention.parquet`, without those that are nearly decoding.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    rows = _read_attention(folder)
    rows = rows.filter(pl.col("phase") == "context", pl.col("rows") >= _LEAST_QUERIES)
    groups = rows.group_by("gpu", "dataset", "kernel", "head_dim", maintain_order=True)
    for (name, _, kernel, _), measured in groups:
        gpu = load_gpu(str(name))
        table = measured.sample(min(_CALLS, len(measured)), seed=_SEED)
        usual = str(kernel) in _USUAL.get(gpu.architecture, ())
        shapes = forward_shapes(table, causal=True)
        yield _Calls(gpu, usual, shapes, table["time_us"].to_numpy() * 1000)


def _read_attention(folder: Path) -> pl.DataFrame:
    columns = ["gpu", "dataset", "kernel", "phase", *ATTENTION_SIZES, "time_us"]
    return read_table(folder / ATTENTION_KERNELS_FILE, columns)


def forward_shapes(table: pl.DataFrame, *, causal: bool) -> F64:
    """Return `AttentionShape` of forward attention without a window, float64[d, 9]."""
    batch, queries, keys, heads, key_heads, d = (
        table[column].to_numpy().astype(np.float64) for column in ATTENTION_SIZES
    )
    none = np.zeros(len(table))
    return np.stack([batch, heads, key_heads, queries, keys, d, d, none + causal, none], axis=1)


@dataclass(frozen=True, slots=True)
class Decodes:
    """Attention of one query per sequence, of one GPU, dataset and kernel.

    Attributes:
        gpu: the GPU.
        dataset: framework and version.
        shapes: `AttentionShape` of each call without a window, float64[d, 9].
        times_ns: times with the write of a key and a value per sequence, float64[d].
        usual: whether libraries run the kernel on the architecture.
        latent: whether it is latent attention.
    """

    gpu: Gpu
    dataset: str
    shapes: F64
    times_ns: F64
    usual: bool = True
    latent: bool = False

    @property
    def name(self) -> str:
        """GPU, dataset and kind of attention."""
        return f"{self.gpu.name}, {self.dataset}{', latent' if self.latent else ''}"

    @property
    def framework(self) -> str:
        """Framework of the dataset."""
        return self.dataset.split(" ", 1)[0]

    @property
    def alone_ns(self) -> F64:
        """The time without that write, whose bytes are negligible, float64[d]."""
        return np.maximum(self.times_ns - self.gpu.launch_floor_ns, _LEAST_ALONE * self.times_ns)


def read_decodes(folder: Path) -> list[Decodes]:
    """Read the calls with one query per sequence in `attention.parquet` and `latent.parquet`.

    Raises:
        FormatError: a file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    return [*_read_grouped(folder), *_read_latent(folder)]


def _read_grouped(folder: Path) -> Iterator[Decodes]:
    """Yield the calls in `attention.parquet`, by kernels in `_USUAL_DECODE`, `_OTHER_DECODE`."""
    rows = _read_attention(folder)
    rows = rows.filter(pl.col("phase") == "generation").sort(rows.columns)
    for (name, dataset, kernel), table in rows.group_by(
        "gpu", "dataset", "kernel", maintain_order=True
    ):
        gpu = load_gpu(str(name))
        usual = str(kernel) in _USUAL_DECODE.get(gpu.architecture, ())
        if not usual and str(kernel) not in _OTHER_DECODE.get(gpu.architecture, ()):
            continue
        cache_bytes = 4 * pl.col("batch") * pl.col("kv_heads") * pl.col("keys") * pl.col("head_dim")
        drawn = _drawn_cold(table, cache_bytes, gpu, ATTENTION_SIZES)
        shapes = forward_shapes(drawn, causal=False)
        times_ns = drawn["time_us"].to_numpy() * 1000
        yield Decodes(gpu, str(dataset), shapes, times_ns, usual=usual)


def _read_latent(folder: Path) -> Iterator[Decodes]:
    """Yield the calls in `latent.parquet`; on architectures without a kernel none is usual."""
    sizes = ["batch", "keys", "heads"]
    rows = read_table(folder / LATENT_FILE, ["gpu", "dataset", *sizes, "time_us"])
    for (name, dataset), table in rows.group_by("gpu", "dataset", maintain_order=True):
        gpu, (d, dv) = load_gpu(str(name)), _LATENT_SIZES
        times = table.group_by(sizes).agg(pl.col("time_us").median()).sort(sizes)
        drawn = _drawn_cold(times, 2 * d * pl.col("batch") * pl.col("keys"), gpu, sizes)
        batch, keys, heads = (drawn[size].to_numpy().astype(np.float64) for size in sizes)
        none = np.zeros(len(drawn))
        columns = [batch, heads, none + 1, none + 1, keys, none + d, none + dv, none, none]
        times_ns = drawn["time_us"].to_numpy() * 1000
        usual = gpu.architecture in LATENT_ARCHITECTURES
        shapes = np.stack(columns, axis=1)
        yield Decodes(gpu, str(dataset), shapes, times_ns, usual=usual, latent=True)


def _drawn_cold(
    table: pl.DataFrame, cache_bytes: pl.Expr, gpu: Gpu, sizes: Sequence[str]
) -> pl.DataFrame:
    """Return calls drawn from those that memory serves, or that take little time from it."""
    share = cache_bytes / (gpu.l2_bytes or 1)
    cold = table.filter(~share.is_between(*_SERVED))
    return cold.sample(min(_DECODE_CALLS, len(cold)), seed=_SEED).sort(sizes)


DECODE_START = Decode(
    floor=2, unit_cycles=4000, bytes_per_cycle=16, split_floors=0.5, overlap=3, copy_floors=1.5
)
# On Hopper the multiply-adds hide the reads: a fit to it alone keeps the bytes per cycle.
LATENT_START = LatentDecode(floor=2, unit_cycles=4000, bytes_per_cycle=30, split_floors=0.5)


def fit_decode(decodes: Sequence[Decodes]) -> dict[str, Decode]:
    """Return architecture -> the coefficients of its attention of a few queries."""
    usual = [each for each in decodes if each.usual and not each.latent]

    def fitted(architecture: str) -> Decode:
        of_architecture = [each for each in usual if each.gpu.architecture == architecture]

        def model(each: Decodes, x: F64) -> F64:
            return decode_terms(each.gpu, each.shapes, Decode(*x.tolist())).predicted_ns

        return Decode(*_fit(of_architecture, model, msgspec.structs.astuple(DECODE_START)))

    return {name: fitted(name) for name in sorted({each.gpu.architecture for each in usual})}


def fit_latent(decodes: Sequence[Decodes]) -> LatentDecode:
    """Return the coefficients of latent attention of a few queries."""

    def model(each: Decodes, x: F64) -> F64:
        rates = rates_of(each.gpu, "bfloat16", len(each.shapes))
        return latent_terms(each.gpu, rates, each.shapes, LatentDecode(*x.tolist())).predicted_ns

    usual = [each for each in decodes if each.usual and each.latent]
    return LatentDecode(*_fit(usual, model, msgspec.structs.astuple(LATENT_START)))


def _fit(
    decodes: Sequence[Decodes], model: Callable[[Decodes, F64], F64], start: Sequence[float]
) -> list[float]:
    """Return the coefficients near `start` with which the model predicts the calls.

    Each time also has the write of a key and a value per sequence, one launch.
    """

    def residuals(x: F64) -> F64:
        return np.concatenate(
            [
                np.log(model(each, np.exp(x)) + each.gpu.launch_floor_ns) - np.log(each.times_ns)
                for each in decodes
            ]
        )

    return np.exp(fit_robustly(residuals, np.log(start))).tolist()


def elsewhere(each: Decodes, decodes: Sequence[Decodes]) -> list[Decodes]:
    """Return the calls of other datasets on the architecture; of other GPUs, if there are any.

    Kernels that are not usual are not predicted from each other.
    """
    others = [
        other
        for other in decodes
        if (other.gpu.architecture, other.latent) == (each.gpu.architecture, each.latent)
        and other.dataset != each.dataset
        and other.usual
    ]
    return [other for other in others if other.gpu != each.gpu] or others


def decode_cases(
    decodes: Sequence[Decodes],
    by_shape: Callable[[str], PredictFromDescription],
    model: Callable[[str], Predict],
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield attention of one query per sequence by its shape, and from another GPU's time.

    By shape a call has the kind "decode_unmeasured", with the coefficients of the architecture from
    other datasets, and "decode_other" or "latent_other", without the architecture. The two also
    have calls by a kernel that no other dataset has for the architecture.

    Args:
        decodes: the calls.
        by_shape: the omitted die family, or GPU and dataset -> the model of unmeasured kernels.
        model: family that is left out -> the model of measured kernels.
        described: returns the description of a target that the prediction may use.
    """
    for each in decodes:
        gpu, target = each.gpu, described(each.gpu)
        kernels = of_attention(Attention(each.shapes, {}), each.times_ns)
        other = "latent_other" if each.latent else "decode_other"
        kinds = [(other, "")]
        if elsewhere(each, decodes):
            # The other datasets have measured another kernel, if this one is unusual.
            kinds.append(("decode_unmeasured" if each.usual else other, each.name))
        for kind, without in kinds:
            # A datasheet's other figures are estimated from the architecture, if it was measured.
            known = gpu if without else target
            predicted_ns = by_shape(without or family(gpu))(kernels, known)[0]
            predicted_ns = predicted_ns + known.launch_floor_ns
            case = Case(kind, gpu, gpu, each.times_ns, predicted_ns, each.shapes[:, 3])
            yield replace(case, without=without)
    for before, after in permutations(decodes, 2):
        # A framework's datasets run one kernel, in the version for each architecture.
        if before.gpu == after.gpu or before.framework != after.framework:
            continue
        # `of_attention` counts keys and values separately; latent attention reads them as one.
        if before.latent or after.latent:
            continue
        row_of = {tuple(shape): row for row, shape in enumerate(before.shapes.tolist())}
        rows = np.array([row_of.get(tuple(shape), -1) for shape in after.shapes.tolist()])
        both = np.flatnonzero(rows >= 0)
        kernels = of_attention(Attention(after.shapes[both], {}), before.alone_ns[rows[both]])
        target = described(after.gpu)
        predicted_ns = model(family(after.gpu))(kernels, before.gpu, target)[0]
        predicted_ns = predicted_ns + target.launch_floor_ns
        kind = "attention_same_die" if same_die(before.gpu, after.gpu) else "decode"
        gpus, rows = (before.gpu, after.gpu), after.shapes[both][:, 3]
        yield Case(kind, *gpus, after.times_ns[both], predicted_ns, rows)


def kernel_cases(
    folder: Path,
    model: Callable[[str], PredictFromDescription],
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield attention by its shape, by GPU and kernel.

    Kernels that libraries run on the architecture have the kind "attention_unmeasured", others
    "attention_other". The fit has seen no kernel of the target's die family.

    Args:
        folder: has `attention.parquet`.
        model: family that is left out -> the model of unmeasured kernels.
        described: returns the description of a target that the prediction may use.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    cases: list[tuple[Case, bool]] = []
    others: list[Case] = []
    for call in _read_calls(folder):
        kernels = of_attention(Attention(call.shapes, {}), call.times_ns)
        predicted_ns, rules = model(family(call.gpu))(kernels, described(call.gpu))
        predicted_ns = predicted_ns + stored_ns(call.gpu, call.shapes)
        # Without Blackwell, the model already takes its usual kernels for others.
        slow = bool((rules == Rule.OTHER_ATTENTION).any())
        kind = "attention_other" if slow or not call.usual else "attention_unmeasured"
        queries = call.shapes[:, 3]
        case = Case(kind, call.gpu, call.gpu, call.times_ns, predicted_ns, queries)
        as_usual = call.usual or slow
        cases.append((case, as_usual))
        if not as_usual and float(call.shapes[:, 5].max()) <= _WIDEST_HEAD:
            others.append(case)
    for case, as_usual in cases:
        if as_usual:
            yield case
            continue
        slower = other_attention([o for o in others if family(o.target) != family(case.target)])
        floor_ns = _floor_ns(case.target)
        above_ns = np.maximum(case.predicted_ns - floor_ns, 0)
        yield replace(case, predicted_ns=case.predicted_ns + above_ns * (slower - 1))


def _floor_ns(gpu: Gpu) -> float:
    """Return the floors of attention and of its write to a cache, which no kernel changes."""
    return (shipped().attention_on(gpu).floor + 1) * gpu.launch_floor_ns


def fit_attention_floor(
    folder: Path, c: AttentionCoefficients, gpus: Sequence[Gpu], without: Collection[str]
) -> dict[str, float]:
    """Return architecture -> factor on the floors of attention, by its usual kernels.

    Args:
        folder: has `attention.parquet`.
        c: fitted to FlashAttention.
        gpus: GPUs to fit to.
        without: architectures to omit, on which FlashAttention was measured.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    names = sorted({gpu.architecture for gpu in gpus} - {*without})
    return {name: _attention_floor(folder, c, name) for name in names}


def _attention_floor(folder: Path, c: AttentionCoefficients, architecture: str) -> float:
    calls = [
        call for call in _read_calls(folder) if call.usual and call.gpu.architecture == architecture
    ]

    def cost(x: F64) -> float:
        floors = msgspec.structs.replace(c, floor=c.floor * float(np.exp(x[0])))
        costs: list[float] = []
        for call in calls:
            rates = rates_of(call.gpu, "bfloat16", len(call.shapes))
            kernel_ns = attention_ns(call.gpu, rates, call.shapes, floors)
            predicted_ns = kernel_ns + stored_ns(call.gpu, call.shapes)
            costs.append(robust_loss(np.log(call.times_ns / predicted_ns)))
        return float(np.mean(costs))

    options = {"initial_simplex": [[0.0], [0.3]], "xatol": 0.01, "fatol": 1e-4}
    solution = _optimize.minimize(cost, np.zeros(1), method="Nelder-Mead", options=options)
    return float(np.exp(solution.x[0]))


def other_attention(cases: list[Case]) -> float:
    """Return the factor on the time of attention by other kernels than its architecture's usual.

    The geometric mean over die families of measured over predicted time above the floors, of calls
    that take at least twice those.
    """
    families = sorted({family(case.target) for case in cases})
    errors: list[float] = []
    for name in families:
        of_family = [case for case in cases if family(case.target) == name]
        ratios: list[F64] = []
        for case in of_family:
            floor_ns = _floor_ns(case.target)
            long = np.minimum(case.measured_ns, case.predicted_ns) > 2 * floor_ns
            measured_ns, predicted_ns = (
                times[long] - floor_ns for times in (case.measured_ns, case.predicted_ns)
            )
            ratios.append(np.log(measured_ns / predicted_ns))
        errors.append(float(np.mean(np.concatenate(ratios))))
    return float(np.exp(np.mean(errors)))
