"""Re-cost a graph for a target GPU with a named model: the list of passes, in order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import find_gpu, load_gpu
from onerank.annotate.models.attention_kernels import FUSED
from onerank.annotate.models.cost_model import MODELS, CostModel
from onerank.annotate.op_costs.node_costs import characters, compute_mask
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.passes.attention.fuse import FusedAttention, has_eager_attention
from onerank.annotate.passes.attention.unfuse import EagerAttention
from onerank.annotate.passes.fuse_kernels import Fuse
from onerank.annotate.passes.nvlink_active import NvlinkActive
from onerank.annotate.passes.overlap import CHOICES
from onerank.annotate.passes.overlap.maximize import Overlap
from onerank.annotate.passes.overlap.serialize import NoOverlap
from onerank.annotate.passes.pass_config import NO_PASSES, PassOptions
from onerank.annotate.passes.swap_kernels import check_resolves
from onerank.annotate.recost import from_counts as counted
from onerank.annotate.recost import from_cpu as cpu_capture
from onerank.annotate.recost import from_gpu as measured
from onerank.annotate.recost.predict import rows_of
from onerank.ir import UNKNOWN, Evidence, Graph
from onerank.ir.arrays import membership_mask
from onerank.ir.chakra.workload_counts import is_counted
from onerank.ir.errors import AnnotateError

_PREDICTED = (
    Evidence.DATASHEET,
    Evidence.SCALED,
    Evidence.CALIBRATED,
    Evidence.INTERPOLATED,
    Evidence.LOOKED_UP,
)


def check_capture_on_cpu(source: str | None) -> None:
    """Refuse what only a trace of GPU kernels has.

    Raises:
        AnnotateError: a GPU that measured it is named.
    """
    if source is not None:
        raise AnnotateError(
            f"the trace was captured on a CPU, so no GPU such as {source} has measured it; "
            "leave `--source` out",
            code="recost-source-of-cpu",
        )


def check_measured(graph: Graph) -> None:
    """Refuse a graph whose durations are predictions: errors would add up unseen.

    Raises:
        AnnotateError: some are.
    """
    compute = compute_mask(graph)
    predicted = graph.nodes.evidence[compute]
    resized = (predicted == Evidence.EXTRAPOLATED) & (graph.nodes.p10_ns[compute] != UNKNOWN)
    count = int((membership_mask(predicted, _PREDICTED) | resized).sum())
    if count:
        last = graph.job.annotations[-1] if graph.job.annotations else None
        made = f", predicted for {last.target} by the {last.model} model" if last else ""
        raise AnnotateError(
            f"{count} of {len(predicted)} compute nodes are not measured{made}; start from the "
            "measured trace, so that one prediction is not built on another",
            code="recost-not-measured",
        )


def source_gpu(graph: Graph, source: str | None) -> Gpu:
    """Return the GPU a graph was measured on: `source`, else by the name of its device.

    Raises:
        AnnotateError: the device is not known.
        TargetError: `source` names no GPU description.
    """
    if source is not None:
        return load_gpu(source)
    name = graph.job.device.name
    found = find_gpu(name) if name else None
    if found is None:
        measured = (
            f'on "{name}", which is no GPU known here' if name else "on a device it does not name"
        )
        raise AnnotateError(
            f"the trace was measured {measured}; give the GPU it was measured on with `--source` "
            "(a name, or the path of a description)",
            code="recost-source-unknown",
        )
    return found


@dataclass(frozen=True, slots=True)
class Recosting:
    """One re-costing: what every pass may read.

    Attributes:
        captured: the graph as measured, before any pass.
        target: GPU to predict durations for.
        model: cost model.
        source: name or path of the GPU that measured the graph; None: by its device record.
        requested: passes that the user requests.
        databases: kernel databases of the target, in addition to the shipped ones.
    """

    captured: Graph
    target: Gpu
    model: CostModel
    source: str | None
    requested: PassOptions
    databases: Sequence[str | Path]

    @property
    def from_cpu(self) -> bool:
        """Whether the graph is a CPU capture, of operators instead of kernels."""
        return self.captured.job.device.runs_operators

    def fused_attention(self) -> FusedAttention | None:
        """Return the pass that fuses eager attention; None where it is not requested.

        A named kernel such as "flash2" also holds for attention that is fused already, so that a
        graph without eager attention is no error; "fused" requests the rewrite by name.

        Raises:
            AnnotateError: the model cannot tell attention kernels apart.
        """
        kernel = self.requested.attention
        if kernel not in FUSED:
            return None
        if kernel == "fused":
            return FusedAttention(kernel, self.model.alone)
        if not has_eager_attention(self.captured):
            return None
        check_resolves(self.model, kernel)
        return FusedAttention(kernel, self.model.alone)


class Pass(Protocol):
    """A step of re-costing: a frozen dataclass with a precondition and `apply`."""

    def applies(self, recosting: Recosting) -> bool:
        """Return whether the pass has work to do."""
        ...

    def apply(self, graph: Graph, recosting: Recosting) -> Graph:
        """Return the changed graph."""
        ...


@dataclass(frozen=True, slots=True)
class SerializeGpuCapture:
    """Let communication and compute wait for each other, on the times of the source.

    Runs before prediction: the uncontended times of a GPU capture are the source's, and prediction
    drops them.
    """

    def applies(self, recosting: Recosting) -> bool:
        """Return whether overlap is off and the graph was captured on a GPU."""
        return recosting.requested.overlap == "off" and not recosting.from_cpu

    def apply(self, graph: Graph, recosting: Recosting) -> Graph:
        """Return the serialized graph."""
        return NoOverlap().apply(graph, recosting.target)


@dataclass(frozen=True, slots=True)
class FuseCpuAttention:
    """Replace eager attention of a CPU capture by fused operators.

    Runs before prediction, which then costs the fused operator like any other.
    """

    def applies(self, recosting: Recosting) -> bool:
        """Return whether fused attention is requested for a CPU capture."""
        return recosting.from_cpu and recosting.fused_attention() is not None

    def apply(self, graph: Graph, recosting: Recosting) -> Graph:
        """Return the graph with fused operators."""
        fused = recosting.fused_attention()
        assert fused is not None
        return fused.apply(graph, recosting.target)


@dataclass(frozen=True, slots=True)
class PredictDurations:
    """Predict every compute node on the target: of a GPU capture, a CPU capture, or counts."""

    def applies(self, recosting: Recosting) -> bool:
        """Return True: this is what re-costing is."""
        return True

    def apply(self, graph: Graph, recosting: Recosting) -> Graph:
        """Return the graph with predicted durations, evidence and intervals.

        Raises:
            AnnotateError: the graph holds predictions already, or a request does not fit it.
        """
        check_measured(graph)
        target, model = recosting.target, recosting.model
        source, databases = recosting.source, recosting.databases
        requested = _for_captured_attention(graph, recosting.requested)
        if recosting.from_cpu:
            check_capture_on_cpu(source)
            return cpu_capture.to_gpu(graph, target, model, requested, databases=databases)
        if is_counted(graph):
            if source is not None or requested != NO_PASSES or databases:
                raise AnnotateError(
                    "the trace's nodes have counts of work, no times and no shapes, so there is "
                    "nothing to scale or to change; give `--target` alone",
                    code="recost-counts-no-target",
                )
            return counted.to_gpu(graph, target)
        gpus = source_gpu(graph, source), target
        return measured.to_gpu(graph, gpus, model, requested, databases=databases)


@dataclass(frozen=True, slots=True)
class MaximizeOverlap:
    """Let communication overlap compute as far as data dependencies allow.

    Runs right after prediction: later passes replace kernels, and the new ones do not record which
    tensors they access.
    """

    def applies(self, recosting: Recosting) -> bool:
        """Return whether overlap is on."""
        return recosting.requested.overlap == "on"

    def apply(self, graph: Graph, recosting: Recosting) -> Graph:
        """Return the graph with edges for data dependencies alone."""
        return Overlap().apply(graph, recosting.target)


@dataclass(frozen=True, slots=True)
class FuseGpuAttention:
    """Replace the kernels of eager attention in a GPU capture by fused kernels.

    Runs after prediction: the pass weighs fused kernels against the predicted eager ones.
    """

    def applies(self, recosting: Recosting) -> bool:
        """Return whether fused attention is requested for a GPU capture."""
        return not recosting.from_cpu and recosting.fused_attention() is not None

    def apply(self, graph: Graph, recosting: Recosting) -> Graph:
        """Return the graph with fused kernels, looked up where a database has them."""
        fused = recosting.fused_attention()
        assert fused is not None
        target, model = recosting.target, recosting.model
        look_up = rows_of(recosting.captured, target, model, recosting.databases)
        return _without_interval(replace(fused, look_up=look_up).apply(graph, target))


@dataclass(frozen=True, slots=True)
class UnfuseAttention:
    """Replace fused attention by the kernels, memory and time of eager attention."""

    def applies(self, recosting: Recosting) -> bool:
        """Return whether eager attention is requested."""
        return recosting.requested.attention == "eager"

    def apply(self, graph: Graph, recosting: Recosting) -> Graph:
        """Return the graph with eager attention."""
        eager = EagerAttention(recosting.model.alone)
        return _without_interval(eager.apply(graph, recosting.target))


@dataclass(frozen=True, slots=True)
class FuseKernelChains:
    """Fuse chains of memory-bound kernels; after attention, whose kernels may join a chain."""

    def applies(self, recosting: Recosting) -> bool:
        """Return whether fusion is requested."""
        return recosting.requested.fuse is not None

    def apply(self, graph: Graph, recosting: Recosting) -> Graph:
        """Return the graph with one kernel per chain."""
        assert recosting.requested.fuse is not None
        fuse = Fuse(recosting.requested.fuse)
        return _without_interval(fuse.apply(graph, recosting.target))


@dataclass(frozen=True, slots=True)
class ActivateNvlink:
    """Add the power of active NVLink; after all passes that change what kernels draw."""

    def applies(self, recosting: Recosting) -> bool:
        """Return whether links are active."""
        return recosting.requested.nvlink_active

    def apply(self, graph: Graph, recosting: Recosting) -> Graph:
        """Return the graph with longer durations for kernels at the power limit."""
        return NvlinkActive().apply(graph, recosting.target)


@dataclass(frozen=True, slots=True)
class SerializeCpuCapture:
    """Let communication and compute wait for each other, in a graph made from a CPU capture.

    Runs last: a CPU capture has kernels to serialize only after prediction.
    """

    def applies(self, recosting: Recosting) -> bool:
        """Return whether overlap is off and the graph was captured on a CPU."""
        return recosting.requested.overlap == "off" and recosting.from_cpu

    def apply(self, graph: Graph, recosting: Recosting) -> Graph:
        """Return the serialized graph."""
        return NoOverlap().apply(graph, recosting.target)


PASSES: tuple[Pass, ...] = (
    SerializeGpuCapture(),
    FuseCpuAttention(),
    PredictDurations(),
    MaximizeOverlap(),
    FuseGpuAttention(),
    UnfuseAttention(),
    FuseKernelChains(),
    ActivateNvlink(),
    SerializeCpuCapture(),
)
"""Every pass of a re-costing, in the order in which they run; each states why it stands there."""


def recost(
    graph: Graph,
    target: str | Gpu,
    *,
    model: str = "auto",
    source: str | None = None,
    passes: PassOptions = NO_PASSES,
    databases: Sequence[str | Path] = (),
) -> Graph:
    """Return `graph` with the duration of every compute node predicted for another GPU.

    Args:
        graph: a captured or converted graph. A CPU capture becomes the GPU graph it represents,
            costed from shapes and the target's description alone, whatever the model.
        target: a GPU description, its name or its path.
        model: cost model, one of `MODELS`.
        source: GPU the graph was measured on, as `target`; None: by the name of its device.
        passes: another dtype, attention kernel, sequence length, micro-batch, fused kernels,
            other overlap, active NVLink. By default the target's usual attention kernels run.
        databases: kernel databases of the target, in addition to the shipped ones; for "auto".

    Raises:
        TargetError: target or source is unknown or its description malformed.
        AnnotateError: the model is unknown, the graph was re-costed before, its device is
            not known, a requested pass does not fit the graph, or a database is of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a database cannot be read.
    """
    if model not in MODELS:
        raise AnnotateError(
            f'unknown cost model "{model}"; known are {", ".join(MODELS)}',
            code="recost-unknown-model",
        )
    if passes.overlap not in CHOICES:
        known = ", ".join(CHOICES)
        raise AnnotateError(
            f'overlap "{passes.overlap}" is not known; known are {known}',
            code="recost-unknown-overlap",
        )
    gpu = load_gpu(target) if isinstance(target, str) else target
    recosting = Recosting(graph, gpu, MODELS[model], source, passes, databases)
    for step in PASSES:
        if step.applies(recosting):
            graph = step.apply(graph, recosting)
    return graph


def _for_captured_attention(graph: Graph, requested: PassOptions) -> PassOptions:
    """Return the request for prediction: it swaps only fused kernels that the graph has."""
    kernel = requested.attention
    if kernel not in FUSED:
        return requested
    if kernel != "fused" and characters(graph).is_class(OpClass.ATTENTION).any():
        return requested
    return replace(requested, attention="usual")


def _without_interval(graph: Graph) -> Graph:
    """Return the graph without the interval of the step, which held for other kernels."""
    *before, last = graph.job.annotations
    details = {name: value for name, value in last.details.items() if name != "interval"}
    last = msgspec.structs.replace(last, details=details)
    return replace(graph, job=msgspec.structs.replace(graph.job, annotations=(*before, last)))
