"""What a reader of a step's energy should know: how it is told, and what it leaves open."""

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.power import PowerModel
from onerank.annotate.work.characters import compute_mask
from onerank.ir import Evidence, Graph

SETTLED_S = 1.5
"""Seconds of steps after which a board's sensor tells their power."""


def interval_notes(graph: Graph, gpu: Gpu, model: PowerModel) -> tuple[str, ...]:
    """Return what the coefficients were fitted to, and what the step's interval holds."""
    shorter, longer = time_ends(graph)
    notes = (
        _fitted_on(gpu, model),
        f"the step's interval is the largest error of summed energy that was not fitted to: "
        f"{model.step_errors}",
    )
    if longer > 1:
        times = f"x {shorter:.3f} to x {longer:.3f}"
        return *notes, f"and the interval of the predicted times, {times}, beside it"
    if graph.job.annotations and _predicted(graph):
        return *notes, "how sure the predicted times are is not known, and not in the interval"
    return notes


def limit_notes(wanted_w: float | None, tdp_w: float) -> tuple[str, ...]:
    """Return what the kernels would draw while busy, where the limit holds them back."""
    if wanted_w is None:
        return ()
    return (
        f"the power limit holds the step back: its kernels would draw {wanted_w:.0f} W while busy, "
        f"and the limit is {tdp_w:g} W",
    )


def sensor_notes(graph: Graph) -> tuple[str, ...]:
    """Return a sentence where the sensor was read for too short a time to tell the step's power."""
    window = sum(graph.job.measurement.step_ns) * 1e-9
    if measured_mw(graph) is None or window >= SETTLED_S:
        return ()
    return (
        f"the sensor was read over {window:.1f} s of steps, and shows what ran before for some "
        f"0.6 s: --pure-steps for {SETTLED_S:g} s or more tells the step's power",
    )


def work_notes(links_w: float, unknown: int) -> tuple[str, ...]:
    """Return what awake links draw, and of how many nodes the work is not known."""
    notes: tuple[str, ...] = ()
    if links_w:
        notes += (f"links to peers are awake and draw {links_w:g} W all the time",)
    if unknown:
        notes += (f"nodes that draw the base power, their FLOPs and bytes unknown: {unknown}",)
    return notes


def measured_mw(graph: Graph) -> int | None:
    """Return the median of what the capture's sensor read, in mW; None where there is none."""
    sensors = graph.job.device.sensors
    return None if sensors is None or sensors.power_mw is None else sensors.power_mw.median


def time_ends(graph: Graph) -> tuple[float, float]:
    """Return between how many times its prediction the compute's time lies, 1 and 1 if measured."""
    last = graph.job.annotations[-1].details if graph.job.annotations else {}
    low, high = last.get("interval", (1, 1))
    middle = float(np.sqrt(float(low) * float(high)))
    return (low / middle, high / middle) if middle else (1.0, 1.0)


def _predicted(graph: Graph) -> bool:
    """Return whether the durations of compute nodes are predictions."""
    return bool((graph.nodes.evidence[compute_mask(graph)] != Evidence.MEASURED).any())


def _fitted_on(gpu: Gpu, model: PowerModel) -> str:
    if gpu.power_coefficients is None:
        return f"power model fitted {model.fitted}: {model.source}"
    figure = gpu.figures["power_base"]
    return f"coefficients by the description: {gpu.sources[figure.source]}"
