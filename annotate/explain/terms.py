"""Explain the terms of one kernel: rates, residual, bounds, overrides, interval."""

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models import datasheet, gemm_tiles, learned, residual
from onerank.annotate.models.attention_tiles import attention_tiles
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.error_model import (
    KINDS,
    Uncertainty,
    kinds_of,
    less_known_gpu,
    outside,
    same_die,
    trust_in,
    trust_in_parts,
    widening,
)
from onerank.annotate.models.features import F64, U8, KernelFeatures, Parts
from onerank.annotate.models.intervals import HALF_WIDTH, ErrorKinds, OverrideEffect, node_intervals
from onerank.annotate.models.lower_bounds import clamp_to_lower_bound, lower_bound_ns
from onerank.annotate.models.provenance import BY_DATABASE, BY_TILES, Rule

Lines = list[tuple[str, str]]

"""(term, its arithmetic), in the order they are worked out."""

_BY_BANDWIDTH = (Rule.BANDWIDTH_ONLY, Rule.NO_RATE)


def work_lines(kernels: KernelFeatures, gpu: Gpu) -> Lines:
    """Return a kernel's floor, and its bytes and FLOPs at the rates of a GPU."""
    rate, moved, flops = kernels.rates(gpu).sustained[0], kernels.bytes[0], kernels.flops[0]
    bandwidth = gpu.bandwidth_bytes_per_s
    share, floor = float(kernels.floor_share_on(gpu)[0]), float(kernels.floor_ns(gpu)[0])
    of = "" if share == 1 else f" = {share:g} of a product's, {gpu.launch_floor_ns:,}"
    lines = [("floor", f"{floor:,.0f} ns{of} on {gpu.name}")]
    if np.isfinite(moved):
        took = moved / bandwidth * 1e9
        lines.append(
            (
                "memory",
                f"{moved:,.0f} bytes / {bandwidth / 1e9:,.0f} GB/s = {took:,.0f} ns on {gpu.name}",
            )
        )
    if np.isfinite(flops) and flops and np.isfinite(rate):
        unit = "tensor" if "tensor" in "".join(_rate_figures(kernels, gpu)[:1]) else "vector"
        took = flops / rate * 1e9
        per_s = f"{rate / 1e12:,.1f} TFLOP/s"
        lines.append((unit, f"{flops:,.0f} FLOPs / {per_s} = {took:,.0f} ns on {gpu.name}"))
    return lines


def figure_lines(kernels: KernelFeatures, gpu: Gpu, reference: Gpu | None = None) -> Lines:
    """Return the figures of a description that enter the terms, with their sources.

    If `reference` is the same GPU without overrides, return only overridden figures.
    """
    if kernels.over_link[0]:
        return []
    names = ["launch_floor_ns"]
    names += gpu.bandwidth_figures if np.isfinite(kernels.bytes[0]) else ()
    names += _rate_figures(kernels, gpu) if np.nan_to_num(kernels.flops[0]) else ()
    if reference is not None and reference != gpu and reference == gpu.as_described:
        names = [*gpu.changed]
    figures = [(name, gpu.figures[name]) for name in names]
    return [
        (
            f"{gpu.board} figure",
            f"{name} = {one.value:g} ({one.confidence}): {gpu.sources[one.source]}",
        )
        for name, one in figures
    ]


def _rate_figures(kernels: KernelFeatures, gpu: Gpu) -> tuple[str, ...]:
    """Return the names of the figures that a kernel's rate on a GPU is made of."""
    if not kernels.matmul[0]:
        return gpu.vector_figures
    return gpu.rate_figures(kernels.matmul_dtypes(gpu)[int(kernels.dtype[0])])


def residual_lines(kernels: KernelFeatures, here: Gpu, there: Gpu) -> Lines:
    """Return how the residual model makes one GPU's time of another's."""
    terms = residual.terms_of(kernels, here, there)
    rule = Rule(int(terms.rule[0]))
    lines: Lines = [("rule", f"residual model: {rule.label}")]
    if rule is Rule.KEPT:
        return lines
    floor, above, factor = (float(one[0]) for one in (terms.floor_ns, terms.above_ns, terms.factor))
    moved = floor * float(kernels.floor_ratio(here, there)[0]) + above * factor
    floors = (float(kernels.floor_ns(gpu)[0]) for gpu in (there, here))
    launched = f"{floor:,.0f} x " + " / ".join(f"{floor:,.0f}" for floor in floors)
    if rule is Rule.FLOOR:
        return [*lines, ("residual", f"{launched} = {moved:,.0f} ns")]
    return [
        *lines,
        *_above_the_floor(kernels, terms, here, there),
        ("residual", f"{launched} + {above:,.0f} x {factor:.4f} = {moved:,.0f} ns"),
    ]


def _above_the_floor(
    kernels: KernelFeatures, terms: residual.Terms, here: Gpu, there: Gpu
) -> Lines:
    """Return where the factor on the time above the floor comes from."""
    rule, factor = Rule(int(terms.rule[0])), float(terms.factor[0])
    streams = kernels.transfer[0] or (rule in _BY_BANDWIDTH and np.isnan(kernels.bytes[0]))
    if streams:
        old, new = (gpu.bandwidth_bytes_per_s / 1e9 for gpu in (here, there))
        return [("factor", f"{old:,.0f} GB/s / {new:,.0f} GB/s = {factor:.4f}")]
    if rule is Rule.MATMUL_WITHOUT_FLOPS:
        return [("factor", f"{factor:.4f}: sustained 16-bit rate of {here.name} over {there.name}")]
    above, roof, part, by_roof, by_peak = (
        float(one[0])
        for one in (terms.above_ns, terms.roof_ns, terms.part, terms.by_roof, terms.by_peak)
    )
    roofline = ("roofline", f"of {there.name} over {here.name}: {by_roof:.4f}")
    issue = (
        "issue",
        f"SMs x clock of {here.name} over {there.name}: {terms.by_issue:.4f} (a core counts as "
        "the SMs that its memory could feed, if these are more)",
    )
    power = f"{by_roof:.4f}^{part:.4f} x {terms.by_issue:.4f}^{1 - part:.4f}"
    if terms.cached[0]:
        explained = f"{above:,.0f} ns above the floor / {roof:,.0f} = {part:.4f}: data in cache"
        return [
            roofline,
            issue,
            ("memory's part", explained),
            ("factor", f"{power} = {factor:.4f}"),
        ]
    lines = [roofline, ("explained", f"{min(roof, above):,.0f} / {above:,.0f} ns = {part:.4f}")]
    if rule in (Rule.COMPUTE, Rule.WIDER_RATE):
        rest = by_peak
        lines.append(("rest", f"peak of {here.name} over {there.name}: {rest:.4f}"))
    elif residual.issue_overlaps_memory(kernels, here, there)[0]:
        p, most = residual.OVERLAP_EXPONENT, part**residual.OVERLAP_EXPONENT
        made = (
            f"({most:.4f} x {by_roof:.4f}^{p:g} + {1 - most:.4f} x {terms.by_issue:.4f}^{p:g})"
            f"^{1 / p:.4f} = {factor:.4f}"
        )
        share = f"{part:.4f}^{p:g} = {most:.4f}"
        return [*lines, issue, ("memory's part", share), ("factor", made)]
    else:
        rest = by_roof**part * terms.by_issue ** (1 - part)
        lines += [issue, ("rest", f"{power} = {rest:.4f}")]
    made = f"{part:.4f} x {by_roof:.4f} + {1 - part:.4f} x {rest:.4f} = {factor:.4f}"
    return [*lines, ("factor", made)]


_MEASURED_BY = {
    "composed": "of DeepBench, on a V100 and a T4",
    "looked_up": "of captured steps, looked up in rows of the same versions",
    "looked_up_loosely": "of captured steps, up to 3 us or dependent on data, looked up in rows of "
    "the same versions",
    "looked_up_otherwise": "measured in two campaigns on the same GPU",
}


def interval_lines(
    kernels: KernelFeatures,
    made: tuple[F64, U8, Uncertainty],
    here: Gpu | None,
    there: Gpu,
    overrides: OverrideEffect,
) -> Lines:
    """Return the interval of a prediction; `here` is None if the kernel was not measured."""
    moved, rules, doubt = made
    c = shipped().for_gpus(here, there)
    kinds = kinds_of(kernels, (moved, rules), here, there, doubt)
    errors = ErrorKinds.of(kinds).with_overrides(kernels, moved, overrides, there, c)
    unlike = less_known_gpu(here, there)
    low, high = node_intervals(moved, errors, unlike, c, doubt)
    kind, other = (KINDS[int(one[0])] for one in (kinds, errors.overrides))
    if kind == other == "kept":
        return []
    if kind == "kept":
        return [
            (
                "80% interval",
                f"{low[0]:,.0f} to {high[0]:,.0f} ns: {errors.part[0]:.2f} of the errors of "
                f"{other} from one GPU to another of its die, as no more can be wrong than changes",
            )
        ]
    error, ends = c.errors[kind], f"{low[0]:,.0f} to {high[0]:,.0f} ns: "
    if rules[0] in BY_DATABASE:
        own = HALF_WIDTH * doubt.own[0]
        return [
            (
                "80% interval",
                f"{ends}x e^+-({error.high:.4f}^2 + {own:.4f}^2)^0.5, of {error.count:,} calls "
                f"{_MEASURED_BY[kind]}, and of this one"
                + ("" if other == "kept" else "; and those of what the figures set make of it"),
            )
        ]
    wide = widening(unlike, c, kind)
    return [
        (
            "80% interval",
            f"{ends}x e^({wide:.4f} x {error.low:+.4f}) to "
            f"x e^({wide:.4f} x {error.high:+.4f}), the errors of {kind} over {error.count:,} "
            "predictions for GPUs that no fit had seen",
        )
    ]


def override_lines(looked_up_ns: F64, rules: U8, before: F64, after: F64, there: Gpu) -> Lines:
    """Return a looked-up time after the target's figures were overridden.

    Args:
        looked_up_ns: the looked-up time, float64[1].
        rules: its rule, uint8[1].
        before: the model's prediction without overrides, float64[1].
        after: the model's prediction with them, float64[1].
        there: the target with overrides.
    """
    if rules[0] not in BY_DATABASE:
        return []
    made = looked_up_ns[0] * after[0] / before[0]
    product = f"{looked_up_ns[0]:,.0f} x {after[0]:,.0f} / {before[0]:,.0f} = {made:,.0f} ns"
    said = f"what the model says with {there.changes} over what it says without"
    return [("figures set", f"{product}: {said}")]


def lower_bound_lines(kernels: KernelFeatures, here: Gpu, there: Gpu) -> Lines:
    """Return what the target's description allows, where the prediction is no more than that."""
    (moved,), _ = learned.predict_learned(kernels, here, there)
    (least,) = clamp_to_lower_bound(np.zeros(1), kernels, here, kernels, there)
    if not 0 < moved <= least:
        return []
    allowed = float(lower_bound_ns(kernels, there)[0])
    measured = ", as the part of it that was measured on " + here.name if least < allowed else ""
    return [
        (
            "least",
            f"{least:,.0f} ns{measured}: products at the datasheet's peak, bytes beyond the "
            f"last-level cache at its bandwidth on {there.name} take {allowed:,.0f}",
        )
    ]


def wave_lines(kernels: KernelFeatures, there: Gpu) -> Lines:
    """Return how tiles divide over another number of SMs, if the SM count is overridden."""
    before = there.as_described
    if before.sm_count == there.sm_count:
        return []
    call = int(kernels.call[0])
    if kernels.attention[call, :7].all():
        tiles, what = attention_tiles(kernels.attention[[call]]).item(), "tiles of 128 queries"
    else:
        batch, m, n, *_ = kernels.gemm[call]
        tiles = batch * np.ceil(m / 128) * np.ceil(n / 128)
        what = "tiles, if they are of 128 x 128"
    waves = [f"{tiles / gpu.sm_count:.2f} on {gpu.sm_count} SMs" for gpu in (before, there)]
    old, new = (_of_one_sm(kernels, gpu) for gpu in (before, there))
    text = f"{tiles:.0f} {what}: {waves[0]}, {waves[1]}; a part of a wave takes as long as one; "
    return [("waves", f"{text}an SM does {new:.2f} TFLOP/s at the peak, {old:.2f} as described")]


def _of_one_sm(kernels: KernelFeatures, gpu: Gpu) -> float:
    """Return the peak rate of one SM, in TFLOP/s."""
    return float(kernels.rates(gpu).peak[0]) / 1e12 / gpu.sm_count


I64 = npt.NDArray[np.int64]


def tile_lines(kernels: KernelFeatures, here: Gpu, there: Gpu) -> Lines:
    """Return how products and attention go over by their tiles."""
    by_residual, _ = residual.predict(kernels, here, there)
    terms = learned.tile_terms(kernels, here, there, by_residual, shipped())
    whole, own, before, after, deviation, carried, bound = (
        float(column[0])
        for column in (
            *(terms.operator_ns, terms.duration_ns, terms.source_ns, terms.target_ns),
            *(terms.deviation, terms.carried, terms.residual_ns),
        )
    )
    weight = terms.trust
    die = f"same die: {'yes' if same_die(here, there) else 'no'}; "
    return [
        _shape(kernels),
        *_misaligned_lines(kernels, here),
        *_misaligned_lines(kernels, there),
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


def unmeasured_lines(kernels: KernelFeatures, there: Gpu, made: tuple[float, Rule]) -> Lines:
    """Return how an unmeasured operator is costed: by datasheet, and by its tiles."""
    moved, rule = made
    terms = datasheet.terms_of(kernels, there)
    rate, floor = terms.rate[0], float(terms.floor_ns[0])
    memory, compute, issue = (
        float(column[0]) * 1e9 for column in (terms.memory_s, terms.compute_s, terms.issue_s)
    )
    passes = float(kernels.passes[0])
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
    (tiles,), _ = learned.tile_times(kernels, there, c)
    weight = trust_in(there, c)
    return [
        _shape(kernels),
        *_misaligned_lines(kernels, there),
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
        floors = f" + {launches:.0f} launches of {floor:,.0f}" if launches else ""
        text = f"batch, m, n, k = {sizes}: {times:g} x ({ns:,.0f}{floors}) = {each:,.0f} ns"
        lines.append(("product", text))
        total += each
    return [*lines, (how, f"the products in turn: {total:,.0f} ns on {there.name}")]


def part_lines(kernels: KernelFeatures, here: Gpu, there: Gpu) -> Lines:
    """Return how a convolution or a recurrent layer goes over by the tiles of its products."""
    c, one = shipped(), np.zeros(1, dtype=np.int64)
    lines: Lines = []
    for gpu in (here, there):
        lines += _part_lines(learned.parts_ns(kernels, gpu, one, c), gpu, "by tiles")
    by_residual, _ = residual.predict(kernels, here, there)
    terms = learned.part_terms(kernels, here, there, by_residual, c)
    own, before, after, bound, proportional = (
        float(column[0])
        for column in (
            *(terms.duration_ns, terms.source_ns, terms.target_ns, terms.residual_ns),
            terms.proportional_ns,
        )
    )
    text = f"{own:,.0f} x {after:,.0f} / {before:,.0f} = {proportional:,.0f} ns"
    return [
        *lines,
        ("in proportion", text),
        ("by bound", f"{bound:,.0f} ns by the residual model"),
        _weight(there, terms.trust, ""),
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


def _misaligned_lines(kernels: KernelFeatures, gpu: Gpu) -> Lines:
    """Return what a product takes at least whose rows begin off 16 bytes; none otherwise."""
    least = gemm_tiles.misaligned_lower_bound_ns(gpu, kernels.gemm)[int(kernels.call[0])]
    text = f"begin off 16 bytes: at least {least:,.0f} ns on {gpu.name}"
    return [("rows", text)] if least else []


def _fitted_to(kernels: KernelFeatures) -> tuple[str, str]:
    """Return what the tiles' coefficients were fitted to."""
    provenance = shipped().provenance
    sort = "attention" if kernels.attention[int(kernels.call[0])][:7].all() else "gemm"
    return ("coefficients", f"fitted {provenance['fitted']}: {provenance[sort]}")


def _weight(there: Gpu, weight: float, die: str) -> tuple[str, str]:
    distance = outside(there.as_described, shipped())
    text = f"{die}{there.name} is {distance:.2f} outside the GPUs fitted to"
    return ("weight", f"{weight:.4f} of the tiles, {1 - weight:.4f} of the bound ({text})")
