"""Estimate what a datasheet does not state: achievable bandwidth, rates, launch floor.

A description may have only datasheet figures. The figures that only a measurement gives are then
estimated from GPUs whose GEMMs and attention were measured in one benchmark run (`REFERENCES`), and
`Gpu.by_datasheet` is true. Predictions for such a GPU have the errors of these estimates, measured
with the target's die family left out (`datasheet_errors` in `models/coefficients.toml`). A float32
rate that is not stated follows from SMs, lanes and clock.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median

import msgspec

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.spec_schema import (
    ASYNCHRONOUS,
    ESTIMATE_SOURCE,
    FRACTIONS,
    SIXTEEN_BIT,
    TENSOR,
    VECTOR,
    Figure,
)
from onerank.ir.notes import Note

REFERENCES = ("A100-SXM-80GB", "L40S", "H100-SXM", "H200", "B200")
"""Shipped descriptions whose specs were all measured in one benchmark set (see `sources`)."""

_SOURCE_TEXT = (
    "estimated by onerank, as the datasheet does not state it: a float32 rate from SMs, lanes and "
    "clock, other figures from measured GPUs (A100, L40S, H100, H200, B200)"
)

# Power of a chip at one speed relative to TSMC's 5 nm class, which the other references share:
# N5 needs 30% less than N7 (TSMC, 2020). Ampere's A100 is in N7.
_NODE_POWER = {"ampere": 1 / 0.7}

# No reference sustains more than 0.79 of its bf16 peak. Above 0.9 the power limit does not limit
# GEMMs (H20, GeForce cards: 0.93 to 1.0 of the peak), so the estimate stops there.
_MOST_SUSTAINED = 0.9


_FP32 = VECTOR["fp32"]

# float32 lanes of an SM or compute unit, each with a multiply-add per cycle. Ampere's consumer dies
# (compute capability 8.6 and 8.7) have twice those of the A100.
_FP32_LANES = {
    **dict.fromkeys(("volta", "turing", "cdna2"), 64),
    **dict.fromkeys(("ada", "hopper", "blackwell", "blackwell-rtx", "cdna3"), 128),
    "ampere": 64,
}
_CONSUMER_AMPERE = range(81, 89)

_GRAPHICS = ("turing", "ada", "blackwell-rtx")  # and consumer Ampere


def with_estimates(gpu: Gpu, references: Callable[[], Sequence[Gpu]]) -> Gpu:
    """Return the GPU with estimates in place of figures that its description lacks.

    Args:
        gpu: a checked description; it has at least the datasheet's figures.
        references: returns measured GPUs; called only if a figure is missing. GPUs of one
            architecture count as one.
    """
    missing = _missing(gpu)
    if not missing:
        return gpu
    measured = references()
    estimates = {
        "memory_achievable_fraction": lambda: of_same_sort(
            gpu, measured, "memory_achievable_fraction"
        ),
        "launch_floor_ns": lambda: launch_floor_ns(gpu, measured),
        "tensor_sustained_fraction": lambda: sustained_fraction(gpu, measured),
        _FP32: lambda: fp32_vector_tflops(gpu),
        "vector_sustained_fraction": lambda: of_same_sort(
            gpu, measured, "vector_sustained_fraction"
        ),
    }
    figures = {name: Figure(estimates[name](), ESTIMATE_SOURCE, "estimated") for name in missing}
    return msgspec.structs.replace(
        gpu,
        sources={**gpu.sources, ESTIMATE_SOURCE: _SOURCE_TEXT},
        figures={**gpu.figures, **figures},
    )


def estimate_notes(gpu: Gpu) -> tuple[Note, ...]:
    """Return a note that lists the estimated figures; none if no figure is estimated."""
    estimated = [
        f"{n} {f.value:.4g}" for n, f in gpu.figures.items() if f.source == ESTIMATE_SOURCE
    ]
    if not estimated:
        return ()
    return (
        Note(
            f"The description of {gpu.name} does not state {', '.join(estimated)}: estimated from "
            "measured GPUs, or a float32 rate from SMs, lanes and clock. Intervals have the errors "
            "of such estimates.",
            code="target-figures-estimated",
        ),
    )


def _missing(gpu: Gpu) -> list[str]:
    """Return the names of figures that the cost models need and the description lacks."""
    figures = gpu.figures
    missing: list[str] = []
    if _FP32 not in figures and gpu.architecture in _FP32_LANES:
        missing.append(_FP32)
    if not figures.keys() & {"memory_achievable_fraction", "measured_copy_gb_per_s"}:
        missing.append("memory_achievable_fraction")
    if "launch_floor_ns" not in figures:
        missing.append("launch_floor_ns")
    for peaks, fraction in (
        (TENSOR.values(), "tensor_sustained_fraction"),
        (VECTOR.values(), "vector_sustained_fraction"),
    ):
        by_measurement = fraction.startswith("tensor") and "measured_gemm_tflops" in figures
        stated = [p for p in peaks if p in figures or p in missing]
        lacking = [p for p in stated if not figures.keys() & {*FRACTIONS[p]}]
        if lacking and not by_measurement:
            missing.append(fraction)
    return missing


def mean_over_families(gpus: Sequence[Gpu], figure: Callable[[Gpu], float]) -> float:
    """Return the mean of a figure over architectures, of the mean over each one's GPUs."""
    return fmean(_family_means(gpus, figure))


def _family_means(gpus: Sequence[Gpu], figure: Callable[[Gpu], float]) -> list[float]:
    """Return the mean of a figure over the GPUs of each architecture."""
    # H100 and H200 are one die and would otherwise count twice.
    families = sorted({gpu.architecture for gpu in gpus})
    return [fmean(figure(g) for g in gpus if g.architecture == f) for f in families]


# Exponent of the clock. It is below 1, because a launch also waits for memory, which the SM clock
# does not speed up. The floors of A100, L40S and H100 follow from each other within 3%, over clocks
# of 1.41, 2.52 and 1.83 GHz; a B200's is 0.7 times as long.
_FLOOR_BY_CLOCK = 2 / 3


def launch_floor_ns(target: Gpu, references: Sequence[Gpu]) -> float:
    """Return the launch floor of measured GPUs of the architecture, scaled with the clock.

    If none was measured, it is the median over architectures.
    """
    same = [gpu for gpu in references if gpu.architecture == target.architecture]
    at_1_hz = _family_means(
        same or references, lambda gpu: gpu.launch_floor_ns * gpu.clock_hz**_FLOOR_BY_CLOCK
    )
    return median(at_1_hz) / target.clock_hz**_FLOOR_BY_CLOCK


def of_same_sort(target: Gpu, references: Sequence[Gpu], fraction: str) -> float:
    """Return the mean of a fraction over the measured architectures of the target's sort.

    Dies for graphics have GDDR memory, of which 0.76 (T4) to 0.84 (L40S) is achieved, and sustain
    0.63 to 0.66 of their float32 peak (RTX 3090, 4090, 5090). Those for data centers have HBM, with
    0.80 to 0.91, and sustain 0.76 to 0.95 (V100, A100, H100). A board of little power sustains
    less, such as 0.51 on a T4 of 70 W.
    """
    sort = [gpu for gpu in references if _is_for_graphics(gpu) == _is_for_graphics(target)]
    return mean_over_families(sort or references, lambda gpu: gpu.figures[fraction].value)


def _is_for_graphics(gpu: Gpu) -> bool:
    consumer_ampere = gpu.architecture == "ampere" and (gpu.capability or 0) in _CONSUMER_AMPERE
    return consumer_ampere or gpu.architecture in _GRAPHICS


def fp32_vector_tflops(gpu: Gpu) -> float:
    """Return the float32 rate of the vector units, from SMs, lanes and clock.

    Without it, GEMMs in float32 would be predicted by bandwidth alone.
    """
    lanes = _FP32_LANES[gpu.architecture]
    if gpu.architecture == "ampere" and (gpu.capability or 0) in _CONSUMER_AMPERE:
        lanes *= 2
    return 2 * lanes * gpu.sm_count * gpu.clock_hz / 1e12


def sustained_fraction(target: Gpu, references: Sequence[Gpu]) -> float:
    """Return the fraction of the peak that the power limit lets long GEMMs sustain.

    Power is proportional to rate * voltage^2, and voltage to the clock. The fraction x of peak and
    clock at which power meets the limit therefore satisfies

        power of the process node * peak * clock^2 * x^3 = limit / need of a GEMM

    The need of a GEMM comes from GPUs whose tensor cores are fed in the same way: the larger tiles
    of newer units move fewer operands. Without a 16-bit peak or a power limit in the description
    the result is the mean of the references' fractions.

    Args:
        target: its peak, boost clock, power limit and architecture are read.
        references: GPUs whose sustained fractions were measured.
    """
    share = _power_share(target)
    if share is None:
        return mean_over_families(references, _bf16_fraction)
    asynchronous = target.architecture in ASYNCHRONOUS
    same_feeding = [gpu for gpu in references if (gpu.architecture in ASYNCHRONOUS) == asynchronous]

    def need(gpu: Gpu) -> float:
        reference_share = _power_share(gpu)
        assert reference_share is not None, f"{gpu.name} is a reference without peak or tdp_w"
        return _bf16_fraction(gpu) / reference_share

    return min(_MOST_SUSTAINED, mean_over_families(same_feeding or references, need) * share)


def _bf16_fraction(gpu: Gpu) -> float:
    return gpu.figures["bf16_sustained_fraction"].value


def _power_share(gpu: Gpu) -> float | None:
    """Return x of `sustained_fraction` for a GEMM that needs 1; None if a figure is missing."""
    peak = next((gpu.figures[name].value for name in SIXTEEN_BIT if name in gpu.figures), None)
    if peak is None or gpu.tdp_w is None:
        return None
    needed = _NODE_POWER.get(gpu.architecture, 1.0) * peak * (gpu.clock_hz / 1e9) ** 2
    return float((gpu.tdp_w / needed) ** (1 / 3))
