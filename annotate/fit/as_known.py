"""Target GPUs as who has only their datasheet knows them, or two microbenchmarks beside."""

from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from onerank.annotate.fit.data import Products, family
from onerank.annotate.gpus.figures import Figure
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.calibration import MeanRates, rates_in, shapes_of
from onerank.annotate.models.likeness import is_asynchronous
from onerank.ir.errors import TargetError
from onerank.ir.job.microbenchmarks import LARGE, SKINNY


def as_by_datasheet(gpus: Sequence[Gpu]) -> Callable[[Gpu], Gpu]:
    """Return the function that forgets what was measured on a target.

    Achievable bandwidth and launch floor, in clock cycles, become the means over the families of
    the other GPUs, the sustained fraction what the power limit allows, see `capped_fraction`.
    """

    def described(target: Gpu) -> Gpu:
        means = _means(gpus, target)
        figures = {
            name: figure
            for name, figure in target.figures.items()
            if not (name.endswith("_sustained_fraction") or name.startswith("measured"))
            or name.startswith("vector")
        }
        source = next(iter(target.sources))
        figures |= {name: Figure(value, source, "estimated") for name, value in means.items()}
        return msgspec.structs.replace(target, figures=figures)

    return described


def as_calibrated(gpus: Sequence[Gpu], products: Products) -> Callable[[Gpu], Gpu]:
    """Return the function that knows a target by its datasheet and two microbenchmarks."""
    forget = as_by_datasheet(gpus)
    place = {tuple(size): row for row, size in enumerate(products.shapes[:, 1:4].tolist())}

    def reached(target: Gpu, sizes: Sequence[tuple[int, int, int]]) -> MeanRates:
        times = products.times_ns[target.name]
        return rates_in(shapes_of(sizes), times[[place[size] for size in sizes]])

    def described(target: Gpu) -> Gpu:
        measured = {
            "measured_gemm_tflops": reached(target, LARGE).flops / 1e12,
            "measured_skinny_gbps": reached(target, SKINNY).bytes / 1e9,
        }
        source = next(iter(target.sources))
        figures = {n: Figure(value, source, "measured") for n, value in measured.items()}
        known = forget(target)
        return msgspec.structs.replace(known, figures={**known.figures, **figures})

    return described


def _means(gpus: Sequence[Gpu], target: Gpu) -> dict[str, float]:
    rest = [gpu for gpu in gpus if family(gpu) != family(target)]
    families = sorted({family(gpu) for gpu in rest})

    def mean(figure: Callable[[Gpu], float]) -> float:
        return fmean(fmean(figure(g) for g in rest if family(g) == f) for f in families)

    fraction = capped_fraction(target, rest)
    names = ("bf16_sustained_fraction", "tensor_sustained_fraction")
    return {
        "memory_achievable_fraction": mean(lambda g: g.figures["memory_achievable_fraction"].value),
        "launch_floor_ns": mean(lambda g: g.launch_floor_ns * g.clock_hz) / target.clock_hz,
        **dict.fromkeys(names, fraction),
    }


_NODE_POWER = {"ampere": 1 / 0.7}
"""Power at one speed over that of the 5 nm class: TSMC, 2020: N5 takes 30% less than N7."""
_MOST_SUSTAINED = 0.9


def capped_fraction(target: Gpu, others: Sequence[Gpu]) -> float:
    """Return the part of the peak that the power limit lets long products hold.

    Power goes with rate * voltage^2, and voltage with the clock. So the part x of peak and clock at
    which the limit is met has

        node's power * peak * clock^2 * x^3 = limit * what a product needs

    What a product needs is known from GPUs whose matrix units are fed in the same way: the larger
    products of newer units move fewer operands.

    Args:
        target: its peak, boost clock, power limit and architecture are read.
        others: GPUs whose sustained fractions are known; those of one family count once.

    Raises:
        TargetError: a GPU has no bf16 rate or no power limit.
    """
    alike = [gpu for gpu in others if is_asynchronous(gpu) == is_asynchronous(target)] or others
    families = sorted({family(gpu) for gpu in alike})
    needs = [
        fmean(
            gpu.figures["bf16_sustained_fraction"].value / _power_share(gpu)
            for gpu in alike
            if family(gpu) == f
        )
        for f in families
    ]
    return min(_MOST_SUSTAINED, fmean(needs) * _power_share(target))


def _power_share(gpu: Gpu) -> float:
    peak = gpu.peak_tensor_flops_per_s("bfloat16")
    if not peak or not gpu.tdp_w:
        raise TargetError(f"{gpu.name}: what it sustains by power needs a bf16 rate and tdp_w")
    needed = _NODE_POWER.get(gpu.architecture, 1.0) * (peak / 1e12) * (gpu.clock_hz / 1e9) ** 2
    return (gpu.tdp_w / needed) ** (1 / 3)
