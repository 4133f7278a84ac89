"""Predictions of operators of vector units and of quantising kernels, from tables of `public_sets`.

The coefficients of a prediction are fitted without the target's die family.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.cost_model import Predict, PredictFromDescription
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.gpu_distance import same_die
from onerank.annotate.models.learned import predict_from_description, predict_learned
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.op_classes import OpClass, floor_share_of
from onerank.annotate.op_costs.operands import Call, Tensor
from tools.fit.evaluate_fit import Case, Described, as_shipped
from tools.fit.measured_kernels import (
    CACHE_SERVED,
    Products,
    of_memory,
    of_products,
    read_table,
)

VECTOR_FILE, QUANTISATION_FILE = "vector.parquet", "quantisation.parquet"

_SIZES = ["m", "n", "k"]


def vector_cases(
    folder: Path,
    model: Predict = predict_learned,
    by_shape: PredictFromDescription = predict_from_description,
    described: Described = as_shipped,
) -> Iterator[Case]:
    """Yield fp32 operators by shape, and from another GPU's time.

    No family is excluded: the tiles are those of 16-bit GEMMs. The sustained fractions of the
    vector units are medians over the largest linear layers of this set.

    Args:
        folder: has `vector.parquet`.
        model: of measured kernels.
        by_shape: of unmeasured kernels.
        described: returns the description of a target that the prediction may use.

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
            target = described(gpu)
            predicted_ns, _ = by_shape(kernels, target)
            times_ns = kernels.duration_ns
            case = Case(f"{kind}_unmeasured", gpu, target, times_ns, predicted_ns, kernels.bytes)
            cases.setdefault((case.kind, name, name), []).append(case)
        for source, target in permutations(names, 2):
            both = times.drop_nulls([source, target])
            gpus = load_gpu(source), described(load_gpu(target))
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
            least, most = CACHE_SERVED[0] * caches[0], CACHE_SERVED[1] * caches[1]
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
    cached = np.array([work.cached_passes or work.passes for work in works])
    return replace(kernels, cached_passes=cached, **values)


# Operators that read rows more than once -> their names in PyTorch.
_ROW_OPERATORS = {"ln": "native_layer_norm", "softmax": "_softmax"}


def _row_work(op: str, rows: int, columns: int) -> Work:
    tensor = Tensor((rows, columns), "float32", 4)
    name = _ROW_OPERATORS[op]
    return work_of_call(f"aten::{name}", Call(name, ((tensor,),), ((tensor,),), ()))
