"""The arithmetic of products and attention of one operator, by their tiles and their bound."""

import numpy as np
import numpy.typing as npt

from onerank.annotate.explain.terms import Lines, wave_lines
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models import datasheet, learned, residual
from onerank.annotate.models import gemm_tiles as misaligned
from onerank.annotate.models.calibration import calibrated_beside
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.error_model import outside, same_die, trust_in, trust_in_parts
from onerank.annotate.models.features import F64, KernelFeatures, Parts
from onerank.annotate.models.provenance import BY_TILES, Rule
from onerank.annotate.models.residual import issue_rate

I64 = npt.NDArray[np.int64]


def tile_lines(kernels: KernelFeatures, here: Gpu, there: Gpu) -> Lines:
    """Return how products and attention go over by their tiles."""
    c = shipped()
    (before,), _ = learned.by_tiles(kernels, here, c, calibrated_beside(here, there, c.gemm))
    (after,), _ = learned.by_tiles(kernels, there, c)
    whole, own = kernels.operator_ns[0], kernels.duration_ns[0]
    bound = residual.predict(kernels, here, there)[0][0]
    weight = trust_in(there, c)
    sort = learned.sorts_of(kernels, np.ones(1, dtype=bool))
    deviation = float(np.log(whole / before))
    carried = float(learned.carried(np.array([deviation]), sort, here, there, c)[0])
    die = f"same die: {'yes' if same_die(here, there) else 'no'}; "
    return [
        _shape(kernels),
        *_rows_off(kernels, here),
        *_rows_off(kernels, there),
        *wave_lines(kernels, there),
        ("operator time", f"{whole:,.0f} ns in all its kernels; this one {own / whole:.2%}"),
        ("by tiles", f"{before:,.0f} ns on {here.name}, {after:,.0f} ns on {there.name}"),
        ("deviation", f"ln(measured / by tiles) = {deviation:+.4f}; carried over {carried:+.4f}"),
        ("by bound", f"{bound:,.0f} ns by the residual model"),
        _weight(there, weight, die),
        (
            "product",
            f"{own:,.0f} x ({after:,.0f} / {whole:,.0f} x e^{carried:+.4f})^{weight:.4f} x "
            f"({bound:,.0f} / {own:,.0f})^{1 - weight:.4f}",
        ),
        _fitted_to(kernels),
    ]


def alone_lines(kernels: KernelFeatures, there: Gpu, made: tuple[float, Rule]) -> Lines:
    """Return how an operator that nobody measured is costed: by datasheet, and by its tiles."""
    moved, rule = made
    rate = kernels.rates(there).sustained[0]
    passes = float(kernels.passes[0])
    memory = np.nan_to_num(kernels.bytes[0] * passes) / there.bandwidth_bytes_per_s * 1e9
    compute = np.nan_to_num(kernels.flops[0] / rate) * 1e9
    floor = float(kernels.floor_ns(there)[0])
    bound = floor + max(memory, compute)
    roofline = f"{floor:,.0f} + max({memory:,.0f}, {compute:,.0f}) = {bound:,.0f} ns"
    one = np.zeros(1, dtype=np.int64)
    if rule is Rule.PARTS:
        made_of = learned.parts_ns(kernels, there, one, shipped())
        weight = trust_in_parts(there, shipped())
        return [
            *_part_lines(made_of, there, "by tiles"),
            ("by bound", f"{roofline} by launch floor and roofline"),
            _weight(there, weight, ""),
            _fitted_to(kernels),
        ]
    if kernels.call[0] in kernels.parts.calls_in_steps and np.isfinite(rate):
        made_of = datasheet.parts_ns(kernels, there, one, np.array([rate]))
        return [("rule", f"launch floor and roofline: {rule.label}"),
                *_part_lines(made_of, there, "by roofline")]  # fmt: skip
    if rule not in BY_TILES:
        cycles = float(kernels.cycles[0])
        issue = cycles / issue_rate(there) * 1e9
        issued = f"{cycles:,.0f} cycles of an SM, {issue:,.0f} ns on all"
        if rule is Rule.ISSUE:
            roofline = f"{floor:,.0f} + max({memory:,.0f}, {issue:,.0f}) = {floor + issue:,.0f} ns"
        streams = f"the bytes {passes:g} times over, by its kernels' passes: {memory:,.0f} ns"
        return [
            ("rule", f"launch floor and roofline: {rule.label}"),
            *([("streams", streams)] if passes != 1 else []),
            *([("elements", issued)] if cycles else []),
            ("datasheet", roofline),
        ]
    c = shipped()
    (tiles,), _ = learned.by_tiles(kernels, there, c)
    weight = trust_in(there, c)
    return [
        _shape(kernels),
        *_rows_off(kernels, there),
        ("by tiles", f"{tiles:,.0f} ns on {there.name}"),
        ("by bound", f"{roofline} by launch floor and roofline"),
        _weight(there, weight, ""),
        (
            "product",
            f"{tiles:,.0f}^{weight:.4f} x {bound:,.0f}^{1 - weight:.4f} = {moved:,.0f} ns",
        ),
        _fitted_to(kernels),
    ]


def _part_lines(made_of: tuple[Parts, I64, F64], there: Gpu, how: str) -> Lines:
    """Return the products of an operator, and their sum."""
    parts, _, once = made_of
    lines: Lines = []
    floor, total = there.launch_floor_ns, 0.0
    for shape, times, launches, ns in zip(
        parts.shapes, parts.times, parts.launches, once, strict=True
    ):
        each = times * (ns + launches * floor)
        sizes = ", ".join(f"{size:.0f}" for size in shape[:4])
        beside = f" + {launches:.0f} launches of {floor:,.0f}" if launches else ""
        told = f"batch, m, n, k = {sizes}: {times:g} x ({ns:,.0f}{beside}) = {each:,.0f} ns"
        lines.append(("product", told))
        total += each
    return [*lines, (how, f"the products in turn: {total:,.0f} ns on {there.name}")]


def part_lines(kernels: KernelFeatures, here: Gpu, there: Gpu) -> Lines:
    """Return how a convolution or a recurrent layer goes over by the tiles of its products."""
    c, one = shipped(), np.zeros(1, dtype=np.int64)
    lines: Lines = []
    for gpu in (here, there):
        lines += _part_lines(learned.parts_ns(kernels, gpu, one, c), gpu, "by tiles")
    (before,), (after,) = (learned.by_parts(kernels, gpu, c) for gpu in (here, there))
    own, bound = kernels.duration_ns[0], residual.predict(kernels, here, there)[0][0]
    told = f"{own:,.0f} x {after:,.0f} / {before:,.0f} = {own * after / before:,.0f} ns"
    return [
        *lines,
        ("in proportion", told),
        ("by bound", f"{bound:,.0f} ns by the residual model"),
        _weight(there, trust_in_parts(there, c), ""),
        _fitted_to(kernels),
    ]


def _shape(kernels: KernelFeatures) -> tuple[str, str]:
    call = int(kernels.call[0])
    attention = kernels.attention[call][:7]
    if attention.all():
        names, sizes = "b, h, key h, sq, sk, d, dv", attention
    else:
        names, sizes = "batch, m, n, k", kernels.gemm[call][:4]
    return ("shape", f"{names} = {', '.join(f'{size:.0f}' for size in sizes)}")


def _rows_off(kernels: KernelFeatures, gpu: Gpu) -> Lines:
    """Return what a product takes at least whose rows begin off 16 bytes; of others nothing."""
    least = misaligned.least_ns(gpu, kernels.gemm)[int(kernels.call[0])]
    told = f"begin off 16 bytes: at least {least:,.0f} ns on {gpu.name}"
    return [("rows", told)] if least else []


def _fitted_to(kernels: KernelFeatures) -> tuple[str, str]:
    """Return what the tiles' coefficients were fitted to."""
    told = shipped().provenance
    sort = "attention" if kernels.attention[int(kernels.call[0])][:7].all() else "gemm"
    return ("coefficients", f"fitted {told['fitted']}: {told[sort]}")


def _weight(there: Gpu, weight: float, die: str) -> tuple[str, str]:
    distance = outside(there.as_described, shipped())
    told = f"{die}{there.name} is {distance:.2f} outside the GPUs fitted to"
    return ("weight", f"{weight:.4f} of the tiles, {1 - weight:.4f} of the bound ({told})")
