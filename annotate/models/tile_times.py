"""Times of operators on a GPU by their tiles, from shapes alone.

`tile_times` divides a GEMM into tiles (`gemm_tiles`) and attention into tiles and waves
(`attention_time`). `part_times` has the operators that libraries run as several GEMMs:
convolutions, recurrent layers and experts. `learned` makes predictions of these times.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_time import attention_ns
from onerank.annotate.models.calibration import Calibration, calibrated, without_overrides
from onerank.annotate.models.coefficients import Coefficients
from onerank.annotate.models.features import KernelFeatures, KernelRates, Timing
from onerank.annotate.models.gemm_tiles import GemmTarget, Rates, gemm_ns, p_norm
from onerank.annotate.models.misaligned_gemms import misaligned_lower_bound_ns
from onerank.annotate.models.prediction_terms import (
    Term,
    TermRecord,
    factor,
    longest,
    product,
    quantity,
)
from onerank.annotate.models.roofline import PartTimes
from onerank.annotate.models.tile_kernels import (
    LONG_SIZE,
    TileKernel,
    batched_vector_kernel,
    convolution_kernels,
    experts_kernels,
    grouped_kernels,
    launches_on,
    library_factors,
    long_vector_kernel,
    scaled_kernels,
    tf32_kernel,
)
from onerank.annotate.op_costs.cost_record import AttentionSizes, GemmShape, Scales
from onerank.ir.arrays import F64, I64, U8, Mask, deduplicate

_FITTED_TYPES = ("bfloat16", "float16", "tfloat32", "int8", "float8_e4m3fn", "float8_e5m2",
                 "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2")  # fmt: skip

# Multiplied by vector units, where it takes the tiles of 16-bit GEMMs unchanged. NeuSight's fp32
# linear layers on V100, T4, A100 and H100 (torch 2.1) are 7 to 11% off by their shapes, in the
# mean, and its batched products 9 to 22%.
_VECTOR_TYPE = "float32"

# cuBLAS multiplies few rows in float32 by `gemmSN_TN_kernel`. A block takes eight columns and waits
# for each step of the inner size: SM cycles of a step by rows, and passes over the bytes, of which
# each row adds some. Nine calls of 2 to 8 rows on an H100, which chose the figures, are 5% off in
# the mean, and one of an H200 5% (2026-11-28-hopper-kernels-3-h100).
_FEW_ROWS, _STEP_CYCLES = 8, ((4, 10.8), (8, 19.2))
_FEW_PASSES, _PASSES_OF_ROW, _FEW_OVERLAP = 1.05, 0.075, 4.0
_SIDES = [GemmShape._fields.index(name) for name in ("m", "n")]

_ITEM_BYTES = 2  # of the GEMMs that two microbenchmarks calibrate


def tile_times(
    kernels: KernelFeatures,
    gpu: Gpu,
    c: Coefficients,
    measured: Calibration | None = None,
    record: TermRecord | None = None,
) -> tuple[F64, Mask]:
    """Return (time of each node's whole operator in ns by its tiles, whether it is attention).

    nan without a shape or without units for the dtype. Each distinct call is computed once.
    GEMMs in 16 bits use the calibration `measured`, by default that of the GPU's description.
    `record` takes the times as terms.
    """
    operator_ns = np.full(len(kernels.call), np.nan)
    has_gemm: Mask = np.all(kernels.gemm > 0, axis=1)
    # The flags after the sizes (causal, backward) are 0 for valid calls too.
    sizes = kernels.attention[:, : len(AttentionSizes._fields)]
    has_attention: Mask = np.all(sizes > 0, axis=1)
    is_attention: Mask = has_attention[kernels.call]
    where, first, inverse = _distinct(kernels, has_attention | has_gemm)
    if not len(where):
        return operator_ns, is_attention
    kernels = kernels.select(where[first])
    times = np.full(len(first), np.nan)
    rates, call = kernels.rates(gpu), kernels.call
    known, attention = _able(kernels, gpu), has_attention[call]
    # No kernel of attention in float32 was measured.
    in_vector = kernels.has_dtype(_VECTOR_TYPE)
    # One row or column in float32 runs a kernel of vectors, which memory alone limits.
    single: Mask = kernels.gemm[:, _SIDES].min(axis=1) <= 1
    gemms = np.flatnonzero(known & ~attention & ~(in_vector & single[call]))
    fused = np.flatnonzero(known & attention & ~in_vector)
    before, per_call = without_overrides(gpu), kernels.per_call
    rates_before = kernels.rates(before)
    described = before, Rates(rates_before.sustained[fused], rates_before.peak[fused])
    calls = fused_calls = gemm_calls = None
    if record is not None:
        calls = TermRecord(inverse[[position for _, position in record.among(where)]])
        fused_calls, gemm_calls = calls.within(fused), calls.within(gemms)
    times[fused] = attention_ns(
        gpu,
        Rates(rates.sustained[fused], rates.peak[fused]),
        kernels.attention[call[fused]],
        c.attention_on(gpu, per_call=per_call),
        described,
        decode=(c.decode_on(gpu, per_call=per_call), c.latent_decode_on(per_call=per_call)),
        record=fused_calls,
    )
    times[gemms] = _gemm_operators_ns(kernels, gemms, gpu, c, measured, record=gemm_calls)
    operator_ns[where] = times[inverse]
    if record is not None and calls is not None and fused_calls is not None and gemm_calls:
        calls.take(fused, fused_calls)
        calls.take(gemms, gemm_calls)
        for row, position in record.among(where):
            root = calls.roots.get(int(inverse[position]))
            if root is not None:
                record.roots[row] = root
    return operator_ns, is_attention


def _gemm_operators_ns(
    kernels: KernelFeatures,
    gemms: I64,
    gpu: Gpu,
    c: Coefficients,
    measured: Calibration | None,
    *,
    record: TermRecord | None,
) -> F64:
    """Return the times of operators that run one GEMM, float64[d].

    Args:
        kernels: operators of a step.
        gemms: those that run a GEMM, int64[d].
        gpu: where they run.
        c: fitted coefficients.
        measured: as for `tile_times`.
        record: takes the times as terms.
    """
    call = kernels.call[gemms]
    products = _Products(kernels, gemms, kernels.gemm[call])
    aligned_ns = _products_ns(products, gpu, c, measured, record)
    of_step = kernels.timing is Timing.STEP
    few = kernels.has_dtype(_VECTOR_TYPE)[gemms] & _has_few_rows(products.shapes)
    if few.any():
        few_ns = _few_rows_ns(products.shapes, gpu, c, per_call=kernels.per_call)
        aligned_ns = np.where(few, few_ns, aligned_ns)
        if record is not None:
            note = f"columns of a block on {gpu.name}"
            record.update_where(few, lambda i, _: quantity("few rows", few_ns[i], note=note))
    least_ns = misaligned_lower_bound_ns(gpu, kernels.gemm, of_step=of_step)[call]
    if of_step and gpu.architecture == "hopper":
        slow = kernels.has_dtype("tfloat32")[gemms] & is_weight_gradient(kernels.gemm)[call]
        aligned_ns = np.where(slow, _TF32_GRADIENT * aligned_ns, aligned_ns)
        if record is not None:
            record.update_where(slow, _transposed_term)
    if record is not None:
        _record_misaligned(record, aligned_ns, least_ns, gpu)
    return np.maximum(aligned_ns, least_ns)


def _has_few_rows(shapes: F64) -> Mask:
    """Return which GEMMs have up to `_FEW_ROWS` rows or columns and are in no batch, bool[d].

    A long inner size is divided among tiles, not taken by one block.
    """
    single: Mask = shapes[:, GemmShape._fields.index("batch")] == 1
    return single & (shapes[:, _SIDES].min(axis=1) <= _FEW_ROWS) & ~_is_long(shapes)


def _is_long(shapes: F64) -> Mask:
    is_long: Mask = shapes[:, GemmShape._fields.index("k")] >= LONG_SIZE
    return is_long


def _few_rows_ns(shapes: F64, gpu: Gpu, c: Coefficients, *, per_call: bool) -> F64:
    """Return the time of float32 GEMMs of few rows, float64[d]; `shapes` as in `_Products`."""
    _, m, n, k, item, result, *_ = shapes.T
    rows = np.minimum(m, n)
    moved = item * (m * k + k * n) + result * m * n
    passes = _FEW_PASSES + _PASSES_OF_ROW * rows
    steps = np.select([rows <= most for most, _ in _STEP_CYCLES], [s for _, s in _STEP_CYCLES])
    floors = c.gemm.floor + (c.gemm.call_gap if per_call else 0.0)
    waited_ns = k * steps / gpu.max_clock_hz * 1e9
    streamed_ns = passes * moved / gpu.bandwidth_bytes_per_s * 1e9
    return floors * gpu.launch_floor_ns + p_norm(_FEW_OVERLAP, streamed_ns, waited_ns)


# Time of a GEMM in TF32 on Hopper whose operands are both transposed over that of a plain one: the
# gradient of a weight. 1.4 to 1.6 for three sizes (2026-11-28-hopper-kernels-h200), 1.3 to 1.7 for
# four of five of the shipped H200's rows.
_TF32_GRADIENT = 1.5


def is_weight_gradient(gemm: F64) -> Mask:
    """Return which GEMMs of a step are the gradients of weights, by its other GEMMs, bool[d].

    The gradient [m, k] x [k, n] of a weight belongs to the forward [k, n] x [n, m]. A GEMM of one
    size in all dimensions counts as a forward. `gemm` as for `misaligned_lower_bound_ns`.
    """
    batch, m, n, k, *_ = gemm.T
    single: Mask = batch == 1
    sizes = {*zip(*(size[single].tolist() for size in (m, n, k)), strict=True)}
    forward = zip(k.tolist(), m.tolist(), n.tolist(), strict=True)
    found = np.array([each in sizes for each in forward], dtype=bool)
    return single & found & ~((m == n) & (n == k))


def _transposed_term(_: int, root: Term | None) -> Term | None:
    if root is None:
        return None
    slower = factor(_TF32_GRADIENT, "transposed", "both operands, in TF32")
    return product(root, slower, name="by tiles")


def part_times(
    kernels: KernelFeatures, gpu: Gpu, c: Coefficients, record: TermRecord | None = None
) -> F64:
    """Return the time of each operator that consists of several GEMMs, in ns, float64[n].

    nan for other operators, and if the tiles do not apply. GEMMs run one after another, each with
    its additional launches. `record` takes the times as terms.
    """
    operator_ns = np.full(len(kernels.call), np.nan)
    composed = np.zeros(len(kernels.gemm), dtype=bool)
    composed[kernels.parts.call] = True
    where, first, inverse = _distinct(kernels, composed)
    if not len(where):
        return operator_ns
    kernels = kernels.select(where[first])
    # Convolutions in float32 are measured on Hopper alone.
    vector = kernels.has_dtype(_VECTOR_TYPE)
    able = _able(kernels, gpu) & (~vector | (gpu.architecture == "hopper"))
    known = np.flatnonzero(able)
    parts, owner = kernels.parts.of_calls(kernels.call[known])
    products = _Products(kernels, known[owner], parts.shapes, parts.kernels)
    single_ns = _products_ns(products, gpu, c)
    operand_bytes = parts.shapes[:, GemmShape._fields.index("operand_bytes")]
    single_ns *= library_factors(gpu, parts.kernels, operand_bytes, vector[known[owner]])
    parts = parts._replace(launches=launches_on(gpu, parts))
    part_times = PartTimes(parts, owner, single_ns, gpu, len(known))
    times = np.full(len(first), np.nan)
    times[known] = part_times.operator_ns
    operator_ns[where] = times[inverse]
    if record is not None:
        position_of = {int(call): i for i, call in enumerate(known)}
        for row, position in record.among(where):
            i = position_of.get(int(inverse[position]))
            if i is not None:
                record.roots[row] = part_times.term(i, "by tiles", f"on {gpu.name}")
    return operator_ns


def _record_misaligned(record: TermRecord, aligned_ns: F64, least_ns: F64, gpu: Gpu) -> None:
    """Add the lower bound of misaligned rows to the terms of the GEMMs that it determines."""
    note = f"rows not aligned to 16 bytes on {gpu.name}"

    def misaligned_term(i: int, aligned: Term | None) -> Term | None:
        if aligned is None or least_ns[i] <= aligned_ns[i]:
            return aligned
        least = quantity("rows", least_ns[i], note=note)
        return longest(aligned, least, name="by rows", note=f"on {gpu.name}")

    record.update(slice(0, len(aligned_ns)), misaligned_term)


def _distinct(kernels: KernelFeatures, calls: Mask) -> tuple[I64, I64, I64]:
    """Return the GEMM nodes of the selected calls, grouped by call and dtype.

    Returns:
        Their rows, int64[p]; the first of each group, int64[d]; the group of each, int64[p].
    """
    where = np.flatnonzero(kernels.matmul & calls[kernels.call])
    return where, *deduplicate([kernels.call[where], kernels.dtype[where]])


def _able(kernels: KernelFeatures, gpu: Gpu) -> Mask:
    """Return whether the tile model covers a node: its dtype is fitted and the GPU has units."""
    rates = kernels.rates(gpu)
    # Other vendors multiply float32 in matrix cores, whose kernels were not measured.
    vector = (_VECTOR_TYPE,) if gpu.is_nvidia else ()
    typed = kernels.has_dtype(*_FITTED_TYPES, *vector)
    return kernels.matmul & typed & ~rates.wider & np.isfinite(rates.sustained)


@dataclass(frozen=True, slots=True)
class _Products:
    """The d GEMMs that some nodes compute.

    Attributes:
        kernels: the nodes.
        rows: node of each GEMM, int64[d].
        shapes: as for `gemm_tiles.gemm_ns`, float64[d, 6 or 7].
        part_kernels: a `PartKernel` for each, uint8[d]; None: the library's.
    """

    kernels: KernelFeatures
    rows: I64
    shapes: F64
    part_kernels: U8 | None = None


def _products_ns(
    products: _Products,
    gpu: Gpu,
    c: Coefficients,
    measured: Calibration | None = None,
    record: TermRecord | None = None,
) -> F64:
    """Return the times of GEMMs, float64[d].

    Args:
        products: the GEMMs.
        gpu: where they run.
        c: fitted coefficients.
        measured: calibration of `gpu`; None: that of its description.
        record: takes the times as terms.
    """
    times = np.empty(len(products.rows))
    described_gpu = without_overrides(gpu)
    rates = products.kernels.rates(gpu)
    for group in _product_groups(products, gpu, c, measured):
        chosen = group.chosen
        described = None
        if described_gpu.figures != gpu.figures:
            described_rates = products.kernels.rates(described_gpu)
            described = _run(products, group, group.as_described, described_rates)
        scratch = None if record is None else record.within(chosen)
        run = _run(products, group, group.calibration, rates)
        times[chosen] = gemm_ns(
            run, products.shapes[chosen], c.gemm, described, kernel=group.kernel, record=scratch
        )
        if record is not None and scratch is not None:
            record.take(chosen, scratch)
    return times


class _ProductGroup(NamedTuple):
    """GEMMs that kernels of one kind compute.

    Attributes:
        chosen: the GEMMs, int64[k].
        calibration: calibration of the GPU.
        as_described: calibration of the GPU without overridden figures.
        on_vector: whether they run on vector units.
        kernel: the tile kernel; None: the library's.
    """

    chosen: I64
    calibration: Calibration
    as_described: Calibration
    on_vector: bool = False
    kernel: TileKernel | None = None


def _product_groups(
    products: _Products, gpu: Gpu, c: Coefficients, measured: Calibration | None
) -> Iterator[_ProductGroup]:
    """Yield the GEMMs by the kernels that compute them; arguments as for `_products_ns`."""
    kernels, rows, shapes = products.kernels, products.rows, products.shapes
    described_gpu = without_overrides(gpu)
    # The calibration is of 16-bit GEMMs; with its rates, 8-bit ones were less accurate.
    operand_bytes = shapes[:, GemmShape._fields.index("operand_bytes")]
    sixteen_bit: Mask = operand_bytes == _ITEM_BYTES
    vector = kernels.has_dtype(_VECTOR_TYPE)[rows]
    batched: Mask = shapes[:, GemmShape._fields.index("batch")] > 1
    uncalibrated = Calibration(gpu, 1.0), Calibration(described_gpu, 1.0)
    # With one scale for a tensor cuBLAS multiplies 8 bits as it does 16.
    scales = kernels.scales[kernels.call[rows]]
    fine = np.flatnonzero((operand_bytes <= 1) & (scales != Scales.TENSOR))
    special = [
        (fine[chosen], kernel)
        for chosen, kernel in scaled_kernels(
            gpu, shapes[fine], scales[fine], c.gemm, c.finely_scaled_on(gpu)
        )
    ]
    grouped: list[tuple[I64, TileKernel]] = []
    if products.part_kernels is not None:
        special += experts_kernels(gpu, products.part_kernels, c)
        special += convolution_kernels(gpu, products.part_kernels, c.gemm)
        grouped += grouped_kernels(gpu, shapes, products.part_kernels, c.gemm)
    of_library = np.ones(len(rows), dtype=bool)
    for chosen, _ in (*special, *grouped):
        of_library[chosen] = False
    by_calibration = measured or calibrated(gpu, c.gemm), calibrated(described_gpu, c.gemm)
    of_batches = batched_vector_kernel(gpu, c.gemm)
    yield _ProductGroup(np.flatnonzero(sixteen_bit & of_library), *by_calibration)
    long = vector & ~batched & _is_long(shapes)
    of_long = long_vector_kernel(c.gemm)
    yield _ProductGroup(np.flatnonzero(vector & ~batched & ~long), *uncalibrated, on_vector=True)
    yield _ProductGroup(np.flatnonzero(long), *uncalibrated, True, of_long)
    yield _ProductGroup(np.flatnonzero(vector & batched), *uncalibrated, True, of_batches)
    others: Mask = ~sixteen_bit & of_library & ~vector
    # Convolutions have kernels of their own.
    tf32: Mask = others & kernels.has_dtype("tfloat32")[rows] & (products.part_kernels is None)
    yield _ProductGroup(np.flatnonzero(others & ~tf32), *uncalibrated)
    yield _ProductGroup(np.flatnonzero(tf32), *uncalibrated, kernel=tf32_kernel(gpu, c.gemm))
    for chosen, kernel in special:
        yield _ProductGroup(chosen, *uncalibrated, kernel=kernel)
    for chosen, kernel in grouped:
        yield _ProductGroup(chosen, *by_calibration, kernel=kernel)


def _run(
    products: _Products, group: _ProductGroup, at: Calibration, rates: KernelRates
) -> GemmTarget:
    """Return where the GEMMs of a group run.

    Args:
        products: the GEMMs.
        group: the group.
        at: calibration of the GPU, with or without overridden figures.
        rates: rates of all nodes on that GPU.
    """
    rows = products.rows[group.chosen]
    sustained = rates.sustained[rows]
    # No power cap limits vector units: their sustained rate is that of the kernels' code.
    peak = sustained if group.on_vector else rates.peak[rows]
    # No calibration may lift the sustained rate above the datasheet's peak.
    calibrated_rates = Rates(np.minimum(peak, sustained * at.compute), peak)
    return GemmTarget(at.gpu, calibrated_rates, group.on_vector, products.kernels.per_call)
