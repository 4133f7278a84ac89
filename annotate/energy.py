"""Energy of each compute node and of the step, idle gaps included."""

from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.power import (
    PowerCoefficients,
    PowerModel,
    base_share,
    coefficients_of,
    power_model,
    power_share,
    utilization_of,
)
from onerank.annotate.op_costs.node_costs import compute_mask, op_costs_of
from onerank.annotate.op_costs.op_classes import CLASSES
from onerank.display import Displayed
from onerank.ir import Evidence, Graph
from onerank.ir.arrays import F64, I64, U8, Mask
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note

SETTLED_S = 1.5
"""Seconds of steps after which a board's sensor shows their power.

An H200's sensor still showed earlier work after 0.6 s.
"""


def interval_notes(graph: Graph, gpu: Gpu, model: PowerModel) -> tuple[Note, ...]:
    """Return notes on the data of the coefficients and on the errors in the step's interval."""
    shorter, longer = time_ends(graph)
    notes = (
        _fitted_on(gpu, model),
        Note(
            f"the step's interval is the largest error of summed energy outside the fit: "
            f"{model.step_errors}",
            code="energy-interval-source",
        ),
    )
    if longer > 1:
        times = f"x {shorter:.3f} to x {longer:.3f}"
        return *notes, Note(
            f"the step's interval includes the interval of the predicted times, {times}",
            code="energy-interval-with-times",
        )
    if graph.job.annotations and _predicted(graph):
        return *notes, Note(
            "the interval does not include the error of predicted times: it is unknown",
            code="energy-interval-without-times",
        )
    return notes


def limit_notes(wanted_w: float | None, tdp_w: float) -> tuple[Note, ...]:
    """Return a note if the power limit slows the step; `wanted_w` is the power without it."""
    if wanted_w is None:
        return ()
    return (
        Note(
            f"the step is at the power limit: its kernels would draw {wanted_w:.0f} W while busy, "
            f"and the limit is {tdp_w:g} W",
            code="energy-power-limit",
        ),
    )


def sensor_notes(graph: Graph) -> tuple[Note, ...]:
    """Return a note if the sensor was read too briefly to show the step's power."""
    window = sum(graph.job.measurement.step_ns) * 1e-9
    if measured_mw(graph) is None or window >= SETTLED_S:
        return ()
    return (
        Note(
            f"the timed steps lasted {window:.1f} s, and the power sensor lags about 0.6 s\n"
            f"  raise --timed-steps until they last {SETTLED_S:g} s or more",
            code="energy-sensor-too-brief",
        ),
    )


def work_notes(links_w: float, unknown: int) -> tuple[Note, ...]:
    """Return notes on the power of active NVLinks and on nodes whose work is unknown."""
    notes: tuple[Note, ...] = ()
    if links_w:
        notes += (
            Note(
                f"NVLinks to peers are active and draw {links_w:g} W all the time",
                code="energy-links-active",
            ),
        )
    if unknown:
        notes += (
            Note(
                f"{unknown} nodes have unknown FLOPs and bytes and draw the base power",
                code="energy-unknown-work",
            ),
        )
    return notes


def measured_mw(graph: Graph) -> int | None:
    """Return the median of the capture's sensor readings in mW; None if there are none."""
    sensors = graph.job.device.sensors
    return None if sensors is None or sensors.power_mw is None else sensors.power_mw.median


def time_ends(graph: Graph) -> tuple[float, float]:
    """Return the interval of the compute time as factors on the prediction; 1 and 1 if measured."""
    last = graph.job.annotations[-1].details if graph.job.annotations else {}
    low, high = last.get("interval", (1, 1))
    # Intervals are symmetric in ln, so the geometric mean of the ends is the prediction.
    middle = float(np.sqrt(float(low) * float(high)))
    return (low / middle, high / middle) if middle else (1.0, 1.0)


def _predicted(graph: Graph) -> bool:
    """Return whether the durations of compute nodes are predictions."""
    return bool((graph.nodes.evidence[compute_mask(graph)] != Evidence.MEASURED).any())


def _fitted_on(gpu: Gpu, model: PowerModel) -> Note:
    if gpu.power_coefficients is None:
        return Note(f"power model fitted {model.fitted}: {model.source}", code="energy-power-model")
    figure = gpu.figures["power_base"]
    return Note(
        f"coefficients by the description: {gpu.sources[figure.source]}",
        code="energy-described-coefficients",
    )


class ClassEnergy(msgspec.Struct, frozen=True):
    """Energy and mean power of the nodes of a class."""

    op_class: str
    nodes: int
    duration_ns: int
    energy_uj: int
    power_mw: int


class EnergyReport(Displayed, msgspec.Struct, frozen=True):
    """Energy of one step on one GPU; 80 % intervals.

    Attributes:
        gpu: name of the description.
        coefficients: of the power model.
        source: data that they were fitted to.
        step_ns: duration of the step.
        step_source: source of the duration.
        busy_ns: part of it in which the GPU computes or communicates.
        idle_ns: the rest.
        busy_uj: energy while busy.
        idle_uj: energy of the gaps, at idle power.
        step_uj: both.
        step_low_uj: lower end of the interval.
        step_high_uj: upper end.
        mean_power_mw: over the step.
        measured_power_mw: median reading of the capture's sensor; None without a sensor or if it is
            another GPU's.
        classes: by class of work, the largest first; "communication" is at base power.
        node_ids: compute nodes with a duration.
        node_uj: energy of each.
        node_low_uj: lower end of its interval.
        node_high_uj: upper end.
        notes: statements on the quality of the result.
    """

    gpu: str
    coefficients: PowerCoefficients
    source: str
    step_ns: int
    step_source: str
    busy_ns: int
    idle_ns: int
    busy_uj: int
    idle_uj: int
    step_uj: int
    step_low_uj: int
    step_high_uj: int
    mean_power_mw: int
    measured_power_mw: int | None
    classes: tuple[ClassEnergy, ...]
    node_ids: tuple[int, ...]
    node_uj: tuple[int, ...]
    node_low_uj: tuple[int, ...]
    node_high_uj: tuple[int, ...]
    notes: tuple[Note, ...]


class StepDurations(msgspec.Struct, frozen=True):
    """Duration of a step and of its busy part in ns, and their source."""

    step_ns: int
    busy_ns: int
    source: str


def report_energy(
    graph: Graph, gpu: Gpu, durations: StepDurations, *, model: PowerModel | None = None
) -> EnergyReport:
    """Return the energy of each compute node and of the step on `gpu`.

    A node draws power according to its use of the GPU (see `power.power_share`), for a short time
    even above the power limit. If the mean over the busy time would exceed the limit, all nodes
    draw less in proportion. Overlapping work adds its power above the base; the base counts once.
    A GPU that only communicates draws the base (`power.base_share`); an idle one its idle power.
    Active links (`NvlinkActive`) draw power all the time. Intervals combine the errors of the power
    model and of predicted times.

    Args:
        graph: a captured graph of this GPU, or one re-costed for it.
        gpu: the GPU.
        durations: duration of the step, and of its busy part.
        model: fitted power model; None: the shipped one.

    Raises:
        AnnotateError: the description lacks the power limit or the idle power, or no compute node
            has a duration.
    """
    tdp, idle = _limits(gpu)
    model = model or power_model()
    links = _nvlink_active_w(graph)
    costs = op_costs_of(graph)
    kernels = KernelFeatures.of(graph, costs)
    timed = _timed(kernels)
    busy = _busy_energy(kernels, gpu, model, links, durations)
    idle_ns = max(0, durations.step_ns - durations.busy_ns)
    idle_uj = (idle + links) * idle_ns * 1e-3
    step = busy.uj + idle_uj
    less, more = _step_errors(graph, model)
    unknown = int((timed & np.isnan(kernels.bytes) & np.isnan(kernels.flops)).sum())
    wanted_w = busy.wanted_uj / durations.busy_ns * 1e3 if busy.wanted_uj > busy.uj else None
    index, energy = costs.index[timed], busy.each_uj[timed]
    low, high = _node_ends(graph, index, model)
    return EnergyReport(
        gpu=gpu.name,
        coefficients=coefficients_of(gpu, model),
        source=_source_of_coefficients(gpu, model),
        step_ns=durations.step_ns,
        step_source=durations.source,
        busy_ns=durations.busy_ns,
        idle_ns=idle_ns,
        busy_uj=round(busy.uj),
        idle_uj=round(idle_uj),
        step_uj=round(step),
        step_low_uj=round(step * (1 - min(less, 1.0))),
        step_high_uj=round(step * (1 + more)),
        mean_power_mw=round(step / durations.step_ns * 1e6) if durations.step_ns else 0,
        measured_power_mw=measured_mw(graph),
        classes=_classes(costs.op_class[timed], kernels.duration_ns[timed], energy),
        node_ids=tuple(graph.nodes.id[index].tolist()),
        node_uj=_whole(energy),
        node_low_uj=_whole(energy * np.exp(-low)),
        node_high_uj=_whole(energy * np.exp(high)),
        notes=(
            *interval_notes(graph, gpu, model),
            *limit_notes(wanted_w, tdp),
            *sensor_notes(graph),
            *work_notes(links, unknown),
        ),
    )


def _timed(kernels: KernelFeatures) -> Mask:
    """Return which kernels have a duration.

    Raises:
        AnnotateError: none has.
    """
    timed = kernels.duration_ns > 0
    if not timed.any():
        raise AnnotateError(
            "no compute node has a duration, so its energy is unknown\n"
            "  annotate the trace for a GPU first",
            code="energy-no-durations",
        )
    return timed


def _step_errors(graph: Graph, model: PowerModel) -> tuple[float, float]:
    """Return the relative errors of the step's energy, downwards and upwards."""
    shorter, longer = time_ends(graph)
    # The errors of power and of time are independent, so they add in squares.
    less, more = (float(np.hypot(model.step_error, end)) for end in (1 - shorter, longer - 1))
    return less, more


class _Busy(NamedTuple):
    """Energy of the busy time of a GPU.

    Attributes:
        each_uj: energy of each compute node, float64[n].
        uj: energy of the whole busy time, including communication.
        wanted_uj: the same without the power limit.
    """

    each_uj: F64
    uj: float
    wanted_uj: float


def _busy_energy(
    kernels: KernelFeatures,
    gpu: Gpu,
    model: PowerModel,
    links_w: float,
    durations: StepDurations,
) -> _Busy:
    """Return the energy of kernels under the power limit, which applies to the busy time's mean.

    The limit applies to a mean over hundredths of a second, far longer than a kernel, so single
    kernels may exceed it (see `power.power_share`).

    Args:
        kernels: the compute nodes.
        gpu: the GPU, whose limits are known.
        model: the power model.
        links_w: power of active links.
        durations: busy time of the GPU.
    """
    tdp, _ = _limits(gpu)
    floor = base_share(gpu, model)
    # Active links draw power in every busy moment, like the base; in gaps it adds to idle power.
    base = floor + links_w / tdp
    share = power_share(utilization_of(kernels, gpu), coefficients_of(gpu, model))
    at_limit_uj = tdp * kernels.duration_ns * 1e-3  # W x ns = nJ; in uJ
    above_uj = np.maximum(0, share - floor) * at_limit_uj
    least, limit = (part * tdp * durations.busy_ns * 1e-3 for part in (base, model.at_limit))
    wanted = used = least + above_uj.sum()
    if wanted > limit > 0:
        # Only the part above the base slows down with the clock.
        used = limit
        above_uj = above_uj * ((limit - least) / above_uj.sum())
    return _Busy(base * at_limit_uj + above_uj, used, wanted)


def _nvlink_active_w(graph: Graph) -> float:
    """Return the power of NVLinks that `NvlinkActive` made active; 0 otherwise."""
    last = graph.job.annotations[-1].details if graph.job.annotations else {}
    return float(last.get("nvlink_active_w", 0))


def _node_ends(graph: Graph, index: I64, model: PowerModel) -> tuple[F64, F64]:
    """Return the distances in ln from each node's energy down and up to its interval's ends.

    They combine the errors of the power model and of the predicted time, which are independent.
    """
    nodes, ns = graph.nodes, graph.nodes.duration_ns[index]
    p10_ns, p90_ns = nodes.p10_ns[index], nodes.p90_ns[index]
    # For a measured time only the error of the power model counts.
    timed = (p10_ns > 0) & (ns > 0)
    below = np.log(np.where(timed, ns, 1) / np.where(timed, p10_ns, 1))
    above = np.log(np.where(timed, p90_ns, 1) / np.where(timed, ns, 1))
    return np.hypot(model.kernel_low, below), np.hypot(model.kernel_high, above)


def _source_of_coefficients(gpu: Gpu, model: PowerModel) -> str:
    return f"fitted {model.fitted}" if gpu.power_coefficients is None else "the GPU's description"


def _limits(gpu: Gpu) -> tuple[float, float]:
    lacking = [name for name, value in (("tdp_w", gpu.tdp_w), ("idle_w", gpu.idle_w)) if not value]
    if gpu.tdp_w is None or gpu.idle_w is None:
        raise AnnotateError(
            f"the description of {gpu.name} lacks {' and '.join(lacking)}: set "
            f"{'them' if len(lacking) > 1 else 'it'} with "
            f"{' '.join(f'--override {name}=WATTS' for name in lacking)}",
            code="energy-gpu-incomplete",
        )
    return gpu.tdp_w, gpu.idle_w


def _classes(codes: U8, ns: F64, uj: F64) -> tuple[ClassEnergy, ...]:
    size = len(CLASSES)
    counts = np.bincount(codes, minlength=size).tolist()
    times, energies = (
        np.bincount(codes, weights=weights, minlength=size).tolist() for weights in (ns, uj)
    )
    rows = [
        ClassEnergy(op_class.value, count, round(time), round(energy), round(energy / time * 1e6))
        for op_class, count, time, energy in zip(CLASSES, counts, times, energies, strict=True)
        if count
    ]
    return tuple(sorted(rows, key=lambda row: -row.energy_uj))


def _whole(values: F64) -> tuple[int, ...]:
    return tuple(np.rint(values).astype(np.int64).tolist())
