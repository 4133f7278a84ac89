"""Account for NVLinks that stay active in the real job.

On Hopper an NVLink enters a low-power state some tens of milliseconds after its last packet. In a
job that communicates more often, the links stay active and draw power that the kernels of a
single-GPU capture have available. Kernels at the power limit are slower in the job: on two H200s
with active links GEMMs took 1.5 to 2.7% longer, and in eight ranks of real jobs GEMMs took 1.1 to
3.5% longer than in the captured slices (benchmarks/results/2026-11-22-nvlink-power-2xh200.txt and
2026-11-22-slices-vs-real-nvlink-active-2xh200.txt).
"""

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.power import coefficients_of, power_model, power_share, utilization_of
from onerank.annotate.models.prediction_terms import by_evidence
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.display import time
from onerank.ir import UNKNOWN, Evidence, Graph
from onerank.ir.arrays import F64, I64
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note

# Four of five of the eight measured ranks had 0.7 to 1.5 times the predicted slowdown.
_EXCESS_P10, _EXCESS_P90 = 0.7, 1.5

# Prefixes of kernels that really communicated during the capture, so the links were active.
_REAL_KERNELS = ("nccl", "rccl")


@dataclass(frozen=True, slots=True)
class NvlinkActive:
    """Slow down the kernels at the power limit by what the active links draw."""

    def apply(self, graph: Graph, target: Gpu) -> Graph:
        """Return the graph with longer kernels at the power limit, see `slowed`.

        Their evidence becomes EXTRAPOLATED if it was MEASURED, and they get an interval.

        Args:
            graph: re-costed for `target`, or captured on it; with GPU kernels.
            target: the GPU they run on.

        Raises:
            AnnotateError: the rank does not communicate, its peers existed in the capture, or the
                description has no power of active links or one above the limit.
        """
        _check(graph, target)
        compute, index, factor = _slowed_nodes(graph, target)
        added_ns = _added_ns(graph, index, factor)
        note = Note(
            f"NVLink active: links draw {target.nvlink_active_w:g} W of the {target.tdp_w:g} W "
            f"limit, so {len(index)} kernels at the limit take up to "
            f"{factor.max(initial=1) - 1:.1%} longer, {time(added_ns)} in all.",
            code="nvlink-active",
        )
        measurement = graph.job.measurement
        if len(index):
            measurement = measurement.slowed(note)
        else:
            measurement = msgspec.structs.replace(measurement, notes=(*measurement.notes, note))
        slowed_graph = _with_factors(graph, index, factor)
        slowed_graph = replace(
            slowed_graph, job=msgspec.structs.replace(slowed_graph.job, measurement=measurement)
        )
        return _with_annotation(slowed_graph, compute, added_ns, target)


def nvlink_idle_note(graph: Graph, target: Gpu) -> tuple[Note, ...]:
    """Return a note on the effect of active links on a graph for `target`; empty for no effect."""
    try:
        _check(graph, target)
    except AnnotateError:
        return ()
    _, index, factor = _slowed_nodes(graph, target)
    added_ns = _added_ns(graph, index, factor)
    if not added_ns:
        return ()
    return (
        Note(
            "NVLink was idle during this capture. In the job the links are active, and kernels "
            f"at the power limit take {time(added_ns)} longer in total; `--nvlink-active` adds "
            "that.",
            code="nvlink-idle",
        ),
    )


def slowed(kernels: KernelFeatures, gpu: Gpu) -> F64:
    """Return the slowdown of kernels while the links are active, float64[n].

    A kernel at the power limit slows down with the clock, and power above idle grows about with
    the square of the clock. The factor is at least 1, and otherwise
    ((min(power_share, limit) - idle) / (limit - links - idle)) ^ 1/2.

    Args:
        kernels: with their durations on `gpu`.
        gpu: with power limit, idle power and power of active links.
    """
    tdp, idle, links = _watts(gpu)
    share = power_share(utilization_of(kernels, gpu), coefficients_of(gpu, power_model()))
    above_idle = np.minimum(1.0, share) * tdp - idle
    # Links draw 23 of the 700 W of an H200 (two GPUs that exchanged copies of 4 KiB).
    # Square root: on an H200 at its limit, 4.0% less power gave 2.0% less clock (f V^2).
    return np.sqrt(np.maximum(1.0, above_idle / (tdp - links - idle)))


def _slowed_nodes(graph: Graph, target: Gpu) -> tuple[I64, I64, F64]:
    """Return the compute nodes, the slowed ones, and the slowdown of each of these."""
    costs = op_costs_of(graph)
    kernels = KernelFeatures.of(graph, costs)
    factor = np.where(kernels.duration_ns > 0, slowed(kernels, target), 1.0)
    slower = factor > 1
    return costs.index, costs.index[slower], factor[slower]


def _added_ns(graph: Graph, index: I64, factor: F64) -> int:
    before = graph.nodes.duration_ns[index]
    return int((np.rint(before * factor) - before).sum())


def lacking_figures(target: Gpu) -> list[str]:
    """Return the figures that the pass needs and a GPU's description lacks."""
    return [
        name for name in ("nvlink_active_w", "tdp_w", "idle_w") if getattr(target, name) is None
    ]


def _check(graph: Graph, target: Gpu) -> None:
    names = [graph.strings[code].casefold() for code in _call_names(graph)]
    if not names:
        raise AnnotateError(
            "the graph has no communication, so no link is active\n  leave out `--nvlink-active`",
            code="nvlink-no-communication",
        )
    # Measured durations of a real rank include the power of active links already.
    if any(name.startswith(_REAL_KERNELS) for name in names):
        raise AnnotateError(
            "the communication of the graph ran during the capture, with active links\n"
            "  leave out `--nvlink-active`",
            code="nvlink-already-active",
        )
    if lacking := lacking_figures(target):
        settings = " ".join(f"--override {name}=WATTS" for name in lacking)
        raise AnnotateError(
            f"the description of {target.name} lacks {' and '.join(lacking)}\n  give "
            f"{settings}, or leave out `--nvlink-active`",
            code="nvlink-gpu-incomplete",
        )
    tdp, idle, links = (
        value or 0.0 for value in (target.tdp_w, target.idle_w, target.nvlink_active_w)
    )
    if links >= tdp - idle:
        raise AnnotateError(
            f"nvlink_active_w is {links:g} W, but {target.name} has only {tdp - idle:g} W above "
            f"idle ({tdp:g} W limit - {idle:g} W idle)",
            code="nvlink-power-above-limit",
        )


def _watts(gpu: Gpu) -> tuple[float, float, float]:
    """Return the power limit, the idle power and the power of active links, in W."""
    return gpu.tdp_w or 0.0, gpu.idle_w or 0.0, gpu.nvlink_active_w or 0.0


def _call_names(graph: Graph) -> list[int]:
    return np.unique(graph.nodes.name[graph.communication]).tolist()


def _with_factors(graph: Graph, index: I64, factor: F64) -> Graph:
    """Return the graph with the durations at `index` multiplied by `factor`."""
    nodes = graph.nodes
    names = ("duration_ns", "uncontended_ns", "p10_ns", "p90_ns", "evidence")
    columns = {name: getattr(nodes, name).copy() for name in names}
    before, uncontended = nodes.duration_ns[index], nodes.uncontended_ns[index]
    columns["duration_ns"][index] = np.rint(before * factor)
    columns["uncontended_ns"][index] = np.where(
        uncontended == UNKNOWN, UNKNOWN, np.rint(uncontended * factor)
    )
    for name, share in (("p10_ns", _EXCESS_P10), ("p90_ns", _EXCESS_P90)):
        ends = getattr(nodes, name)[index]
        from_measured = before * (1 + share * (factor - 1))
        columns[name][index] = np.rint(np.where(ends == UNKNOWN, from_measured, ends * factor))
    measured = nodes.evidence[index] == Evidence.MEASURED
    columns["evidence"][index[measured]] = Evidence.EXTRAPOLATED
    return graph.with_columns(**columns)


def _with_annotation(graph: Graph, index: I64, added_ns: int, gpu: Gpu) -> Graph:
    """Return the graph with updated counts and interval in its last annotation."""
    *earlier, annotation = graph.job.annotations
    after_ns = int(graph.nodes.duration_ns[index].sum())
    before_ns = after_ns - added_ns
    ends = annotation.details.get("interval")
    if ends:
        ends = [round(end * after_ns / before_ns) for end in ends]
    elif added_ns:  # only the links change a measured step, so all kernels share one error
        ends = [round(before_ns + share * added_ns) for share in (_EXCESS_P10, _EXCESS_P90)]
    details = {**annotation.details, "evidence": by_evidence(graph, index)}
    details |= {"interval": ends} if ends else {}
    details["nvlink_active_w"] = gpu.nvlink_active_w
    annotation = msgspec.structs.replace(annotation, details=details)
    return replace(
        graph, job=msgspec.structs.replace(graph.job, annotations=(*earlier, annotation))
    )
