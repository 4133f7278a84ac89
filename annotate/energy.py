"""Energy of each compute node and of the step, idle gaps included."""

import functools
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpu import Gpu
from onerank.annotate.models.kernels import Kernels
from onerank.annotate.work.characters import characters
from onerank.annotate.work.classes import CLASSES
from onerank.ir import Graph
from onerank.ir.errors import AnnotateError

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_FILE = Path(__file__).with_name("energy.toml")


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Power over the limit: min(1, base + tensor * u_t + memory * u_m)."""

    base: float
    tensor: float
    memory: float


class PowerModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fitted power model, as `energy.toml` has it.

    Attributes:
        source: where the measurements come from.
        fitted: when, and on which GPUs.
        kernel_low: ln(measured / predicted) of a kernel on a GPU left out of the fit, 10 %.
        kernel_high: the same, 90 %.
        step_error: largest error of all kernels' energy together on a GPU left out.
        coefficients: name of a description, or "default" for the others.
    """

    source: str
    fitted: str
    kernel_low: float
    kernel_high: float
    step_error: float
    coefficients: dict[str, Coefficients]


class ClassEnergy(msgspec.Struct, frozen=True):
    """Energy of the nodes of a class, and their mean power."""

    op_class: str
    nodes: int
    duration_ns: int
    energy_uj: int
    power_mw: int


class EnergyReport(msgspec.Struct, frozen=True):
    """Energy of one step on one GPU; 80 % intervals.

    Attributes:
        gpu: name of the description.
        coefficients: of the power model.
        told_by: what they were fitted on.
        step_ns: duration of the step.
        step_told_by: where that is from.
        busy_ns: part of it in which the GPU computes or communicates.
        idle_ns: the rest.
        busy_uj: energy while busy.
        idle_uj: energy of the gaps, at idle power.
        step_uj: both.
        step_low_uj: lower end of the interval.
        step_high_uj: upper end.
        mean_power_mw: over the step.
        measured_power_mw: median reading of the capture's sensor; None where there is none, or it
            is another GPU's.
        classes: by class of work, the largest first; "communication" is at base power.
        node_ids: compute nodes with a duration.
        node_uj: energy of each.
        node_low_uj: lower end of its interval.
        node_high_uj: upper end.
        notes: what a reader should know.
    """

    gpu: str
    coefficients: Coefficients
    told_by: str
    step_ns: int
    step_told_by: str
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
    notes: tuple[str, ...]


class Course(msgspec.Struct, frozen=True):
    """How long a step takes, and how long of it the GPU is busy, in ns."""

    step_ns: int
    busy_ns: int
    told_by: str


@functools.cache
def power_model() -> PowerModel:
    """Return the fitted power model."""
    return msgspec.convert(tomllib.loads(_FILE.read_text(encoding="utf-8")), PowerModel)


def report_energy(graph: Graph, gpu: Gpu, course: Course) -> EnergyReport:
    """Return the energy of each compute node and of the step on `gpu`.

    A node draws TDP * min(1, base + tensor * u_t + memory * u_m), where u_t is its matrix FLOPs and
    u_m its bytes, over its duration and what the GPU sustains of each. What runs beside other work
    adds what it draws above the base, which counts once; a GPU that communicates alone draws the
    base; one that does nothing its idle power.

    Args:
        graph: a captured graph of this GPU, or one re-costed for it.
        gpu: the GPU.
        course: how long the step takes, and is busy.

    Raises:
        AnnotateError: the description lacks the power limit or the idle power, or no compute node
            has a duration.
    """
    tdp, idle = _limits(gpu)
    model = power_model()
    c, told_by = _coefficients(gpu, model)
    found = characters(graph)
    kernels = Kernels.of(graph, found)
    timed = kernels.duration_ns > 0
    if not timed.any():
        raise AnnotateError(
            "no compute node has a duration, so there is no energy to reckon; annotate the trace "
            "for a GPU first"
        )
    power = _power(kernels, gpu, c) * tdp
    energy = power * kernels.duration_ns * 1e-3  # W x ns = nJ; in uJ
    above = np.maximum(power - c.base * tdp, 0) * kernels.duration_ns * 1e-3
    busy_uj = c.base * tdp * course.busy_ns * 1e-3 + above.sum()
    idle_ns = max(0, course.step_ns - course.busy_ns)
    idle_uj = idle * idle_ns * 1e-3
    step = busy_uj + idle_uj
    off = model.step_error
    unknown = int((timed & np.isnan(kernels.bytes) & np.isnan(kernels.flops)).sum())
    notes = [
        _fitted_on(gpu, model),
        "the step's interval is the largest error of summed energy on a GPU left out of the fit "
        f"({off:.1%}); the nodes' errors do not cancel in it",
    ]
    if unknown:
        notes.append(f"{unknown} nodes of unknown FLOPs and bytes draw the base power")
    index = found.index[timed]
    return EnergyReport(
        gpu=gpu.name,
        coefficients=c,
        told_by=told_by,
        step_ns=course.step_ns,
        step_told_by=course.told_by,
        busy_ns=course.busy_ns,
        idle_ns=idle_ns,
        busy_uj=round(busy_uj),
        idle_uj=round(idle_uj),
        step_uj=round(step),
        step_low_uj=round(step * (1 - off)),
        step_high_uj=round(step * (1 + off)),
        mean_power_mw=round(step / course.step_ns * 1e6) if course.step_ns else 0,
        measured_power_mw=_measured(graph),
        classes=_classes(found.op_class[timed], kernels.duration_ns[timed], energy[timed]),
        node_ids=tuple(graph.nodes.id[index].tolist()),
        node_uj=_whole(energy[timed]),
        node_low_uj=_whole(energy[timed] * np.exp(model.kernel_low)),
        node_high_uj=_whole(
            np.minimum(energy * np.exp(model.kernel_high), tdp * kernels.duration_ns * 1e-3)[timed]
        ),
        notes=tuple(notes),
    )


def _coefficients(gpu: Gpu, model: PowerModel) -> tuple[Coefficients, str]:
    """Return the coefficients of a GPU, its description's before the fitted ones, and whose."""
    if gpu.power_coefficients is not None:
        return Coefficients(*gpu.power_coefficients), "the GPU's description"
    key = gpu.board if gpu.board in model.coefficients else "default"
    whose = "all of them" if key == "default" else "this GPU"
    return model.coefficients[key], f"fitted {model.fitted}, to {whose}"


def _fitted_on(gpu: Gpu, model: PowerModel) -> str:
    if gpu.power_coefficients is None:
        return f"fitted on matrix products alone: {model.source}"
    figure = gpu.figures["power_base"]
    return f"coefficients by the description: {gpu.sources[figure.source]}"


def _limits(gpu: Gpu) -> tuple[float, float]:
    lacking = [name for name, value in (("tdp_w", gpu.tdp_w), ("idle_w", gpu.idle_w)) if not value]
    if gpu.tdp_w is None or gpu.idle_w is None:
        raise AnnotateError(
            f"the description of {gpu.name} lacks {' and '.join(lacking)}: set "
            f"{'them' if len(lacking) > 1 else 'it'} with "
            f"{' '.join(f'--set {name}=WATTS' for name in lacking)}"
        )
    return gpu.tdp_w, gpu.idle_w


def _power(kernels: Kernels, gpu: Gpu, c: Coefficients) -> F64:
    """Return each node's power as a share of the limit, float64[n]."""
    seconds = np.maximum(kernels.duration_ns, 1) * 1e-9
    rate = kernels.rates(gpu).sustained
    work = np.where(kernels.matmul, kernels.flops, 0.0)
    tensor = np.nan_to_num(work / seconds / rate)
    memory = np.nan_to_num(kernels.bytes / seconds / gpu.bandwidth_bytes_per_s)
    return np.minimum(1, c.base + c.tensor * tensor + c.memory * np.minimum(memory, 1))


def _measured(graph: Graph) -> int | None:
    sensors = graph.job.device.sensors
    return None if sensors is None or sensors.power_mw is None else sensors.power_mw.median


def _classes(codes: npt.NDArray[np.uint8], ns: F64, uj: F64) -> tuple[ClassEnergy, ...]:
    size = len(CLASSES)
    counts = np.bincount(codes, minlength=size).tolist()
    times, energies = (np.bincount(codes, weights=one, minlength=size).tolist() for one in (ns, uj))
    rows = [
        ClassEnergy(one.value, count, round(time), round(energy), round(energy / time * 1e6))
        for one, count, time, energy in zip(CLASSES, counts, times, energies, strict=True)
        if count
    ]
    return tuple(sorted(rows, key=lambda row: -row.energy_uj))


def _whole(values: F64) -> tuple[int, ...]:
    return tuple(np.rint(values).astype(np.int64).tolist())
