"""Account for NVLinks that stay active in the real job.

On Hopper an NVLink enters a low-power state some tens of milliseconds after its last packet. In a
job that communicates more often the links stay active and draw power, which a slice on one GPU has
available for its kernels. Kernels at the power limit are slower in the job: on two H200s with
active links GEMMs took 1.5 to 2.7% longer, and in eight ranks of real jobs GEMMs took 1.1 to 3.5%
longer than in the slices (benchmarks/results/2026-11-22-nvlink-power-2xh200.txt and
2026-11-22-slices-vs-real-nvlink-active-2xh200.txt).
"""

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.power import coefficients_of, drawn, power_model, uses_of
from onerank.annotate.models.provenance import by_evidence
from onerank.annotate.op_costs.node_costs import characters
from onerank.ir import UNKNOWN, Evidence, Graph
from onerank.ir.errors import AnnotateError

F64 = npt.NDArray[np.float64]

I64 = npt.NDArray[np.int64]

_LESS, _MORE = 0.7, 1.5
"""Between how many times the predicted excess four of five of those eight ranks' lay."""

_REALLY_RAN = ("nccl", "rccl")
"""What names of kernels begin with that communicate."""


@dataclass(frozen=True, slots=True)
class NvlinkActive:
    """What the links to the peers of a job draw while its step runs."""

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
        every, index, factor = _slower(graph, target)
        residual_ns = _more_ns(graph, index, factor)
        note = (
            f"Links awake: they draw {target.link_awake_w:g} W of the limit's {target.tdp_w:g} W, "
            f"so that {len(index)} kernels that would draw all of it take "
            f"{factor.max(initial=1) - 1:.1%} longer at most, {residual_ns / 1e6:.3f} ms in all."
        )
        told = graph.job.measurement
        if len(index):
            told = told.untimed(note)
        else:
            told = msgspec.structs.replace(told, notes=(*told.notes, note))
        made = _with_factors(graph, index, factor)
        made = replace(made, job=msgspec.structs.replace(made.job, measurement=told))
        return _with_books(made, every, residual_ns, target)


def nvlink_idle_note(graph: Graph, target: Gpu) -> tuple[str, ...]:
    """Return a note on the effect of active links on a graph for `target`, if there is one."""
    try:
        _check(graph, target)
    except AnnotateError:
        return ()
    _, index, factor = _slower(graph, target)
    if not len(index):
        return ()
    return (
        "The links to peers slept while this was captured. In the job they are awake, and kernels "
        f"at the power limit take {_more_ns(graph, index, factor) / 1e6:.3f} ms longer in all: "
        "--nvlink-active.",
    )


def slowed(kernels: KernelFeatures, gpu: Gpu) -> F64:
    """Return the slowdown of kernels while the links are active, float64[n].

    A kernel's power above idle grows about with the square of the clock (f V^2; on an H200 at its
    limit, 4.0% less power gave 2.0% less clock), and a kernel at the power limit is slower by the
    same factor as the clock: ((min(drawn, limit) - idle) / (limit - links - idle)) ^ 1/2, where
    that is above 1.

    Args:
        kernels: with their durations on `gpu`.
        gpu: with power limit, idle power and power of active links.
    """
    tdp, idle, links = _watts(gpu)
    share = drawn(uses_of(kernels, gpu), coefficients_of(gpu, power_model()))
    wanted = np.minimum(1.0, share) * tdp - idle
    return np.sqrt(np.maximum(1.0, wanted / (tdp - links - idle)))


def _slower(graph: Graph, target: Gpu) -> tuple[I64, I64, F64]:
    """Return the compute nodes; those that take longer; and how many times as long."""
    found = characters(graph)
    kernels = KernelFeatures.of(graph, found)
    factor = np.where(kernels.duration_ns > 0, slowed(kernels, target), 1.0)
    slower = factor > 1
    return found.index, found.index[slower], factor[slower]


def _more_ns(graph: Graph, index: I64, factor: F64) -> int:
    before = graph.nodes.duration_ns[index]
    return int((np.rint(before * factor) - before).sum())


def _check(graph: Graph, target: Gpu) -> None:
    names = [graph.strings[code].casefold() for code in _names_of_calls(graph)]
    if not names:
        raise AnnotateError(
            "the graph's rank communicates with nobody, so no link is awake: leave "
            "`--nvlink-active` out",
            code="nvlink-no-communication",
        )
    if any(name.startswith(_REALLY_RAN) for name in names):
        raise AnnotateError(
            "the graph's communication really ran when it was captured, its links awake: leave "
            "`--nvlink-active` out",
            code="nvlink-already-active",
        )
    lacking = [n for n in ("link_awake_w", "tdp_w", "idle_w") if getattr(target, n) is None]
    if lacking:
        settings = " ".join(f"--override {name}=WATTS" for name in lacking)
        raise AnnotateError(
            f"the description of {target.name} lacks {' and '.join(lacking)}; give {settings}, or "
            "leave `--nvlink-active` out",
            code="nvlink-gpu-incomplete",
        )
    tdp, idle, links = (
        value or 0.0 for value in (target.tdp_w, target.idle_w, target.link_awake_w)
    )
    if links >= tdp - idle:
        raise AnnotateError(
            f"link_awake_w is {links:g}, and of {target.name}'s limit of {tdp:g} W its idle power "
            f"leaves {tdp - idle:g}: links cannot draw as much",
            code="nvlink-power-above-limit",
        )


def _watts(gpu: Gpu) -> tuple[float, float, float]:
    """Return the power limit, and what the idle GPU and awake links draw; all are described."""
    return gpu.tdp_w or 0.0, gpu.idle_w or 0.0, gpu.link_awake_w or 0.0


def _names_of_calls(graph: Graph) -> list[int]:
    return np.unique(graph.nodes.name[graph.communication]).tolist()


def _with_factors(graph: Graph, index: I64, factor: F64) -> Graph:
    """Return the graph with the durations at `index` so many times as long."""
    nodes = graph.nodes
    names = ("duration_ns", "uncontended_ns", "p10_ns", "p90_ns", "evidence")
    columns = {name: getattr(nodes, name).copy() for name in names}
    before, alone = nodes.duration_ns[index], nodes.uncontended_ns[index]
    columns["duration_ns"][index] = np.rint(before * factor)
    columns["uncontended_ns"][index] = np.where(alone == UNKNOWN, UNKNOWN, np.rint(alone * factor))
    for name, share in (("p10_ns", _LESS), ("p90_ns", _MORE)):
        ends = getattr(nodes, name)[index]
        own = before * (1 + share * (factor - 1))
        columns[name][index] = np.rint(np.where(ends == UNKNOWN, own, ends * factor))
    measured = nodes.evidence[index] == Evidence.MEASURED
    columns["evidence"][index[measured]] = Evidence.EXTRAPOLATED
    return graph.with_columns(**columns)


def _with_books(made: Graph, index: I64, residual_ns: int, gpu: Gpu) -> Graph:
    """Return the graph with counts and interval of its last re-costing as they are now."""
    *others, last = made.job.annotations
    now = int(made.nodes.duration_ns[index].sum())
    was = now - residual_ns
    ends = last.details.get("interval")
    if ends:
        ends = [round(end * now / was) for end in ends]
    elif residual_ns:  # as measured but for the links: one error for all
        ends = [round(was + share * residual_ns) for share in (_LESS, _MORE)]
    details = {**last.details, "evidence": by_evidence(made, index)}
    details |= {"interval": ends} if ends else {}
    details["link_awake_w"] = gpu.link_awake_w
    last = msgspec.structs.replace(last, details=details)
    return replace(made, job=msgspec.structs.replace(made.job, annotations=(*others, last)))
