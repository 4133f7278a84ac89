"""Re-cost a graph for a target GPU: `recost` runs the passes of `PASSES` in order.

`PredictDurations` is the pass that predicts. Those before it change what is predicted, those after
it replace predicted nodes. A pass that the user did not request does not apply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import find_gpu, load_gpu
from onerank.annotate.models.attention_kernels import FUSED
from onerank.annotate.models.cost_model import MODELS, CostModel
from onerank.annotate.models.prediction_terms import TermRecord
from onerank.annotate.op_costs.node_costs import compute_mask, op_costs_of
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.passes.attention.fuse import FusedAttention, has_eager_attention
from onerank.annotate.passes.attention.unfuse import EagerAttention
from onerank.annotate.passes.fuse_kernels import FuseChains
from onerank.annotate.passes.nvlink_power import NvlinkActive
from onerank.annotate.passes.operators_to_kernels import OperatorsToKernels
from onerank.annotate.passes.overlap import CHOICES, MaximizeOverlap, SerializeOverlap
from onerank.annotate.passes.pass_options import NO_PASSES, PassOptions
from onerank.annotate.passes.swap_kernels import check_resolves
from onerank.annotate.recost.from_datasheet import (
    UnmeasuredRequest,
    recost_counts,
    recost_cpu_capture,
)
from onerank.annotate.recost.from_gpu import recost_measured
from onerank.annotate.recost.predict_nodes import MeasuredRequest, database_look_up
from onerank.ir import UNKNOWN, Evidence, Graph
from onerank.ir.arrays import membership_mask
from onerank.ir.chakra.third_party_traces import is_counted
from onerank.ir.errors import AnnotateError


def recost(
    graph: Graph,
    target: str | Gpu,
    *,
    model: str = "auto",
    source: str | None = None,
    passes: PassOptions = NO_PASSES,
    databases: Sequence[str | Path] = (),
    record: TermRecord | None = None,
) -> Graph:
    """Return `graph` with the duration of every compute node predicted for another GPU.

    Args:
        graph: a captured or converted graph. A CPU capture becomes the GPU graph it represents,
            costed only from shapes and the target's description, with every model.
        target: a GPU description, its name or its path.
        model: cost model, one of `MODELS`.
        source: GPU that measured the graph, in the forms of `target`; None: by its device record.
        passes: another dtype, attention kernel, sequence length, micro-batch, fused kernels,
            other overlap, active NVLink. By default the target's usual attention kernels run.
        databases: kernel databases of the target, in addition to the shipped ones; for "auto".
        record: takes the terms of compute nodes, as positions among them, before passes that
            replace nodes.

    Raises:
        TargetError: target or source is unknown or its description malformed.
        AnnotateError: the model is unknown, the graph was re-costed before, its device is unknown,
            a requested pass does not fit the graph, or a database is of other GPUs.
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
    # The request keeps the graph as captured; `graph` is the result of the passes so far.
    request = RecostRequest(graph, gpu, MODELS[model], source, passes, databases, record)
    for pass_ in PASSES:
        if pass_.applies(request):
            graph = pass_.apply(graph, request)
    return graph


_PREDICTED = (
    Evidence.DATASHEET,
    Evidence.SCALED,
    Evidence.CALIBRATED,
    Evidence.INTERPOLATED,
    Evidence.LOOKED_UP,
)


def check_capture_on_cpu(source: str | None) -> None:
    """Raise if a source GPU is named for a CPU capture.

    Raises:
        AnnotateError: `source` is not None.
    """
    if source is not None:
        raise AnnotateError(
            f"the trace was captured on a CPU and has no measurement of a source GPU ({source})\n"
            "  leave out `--source`",
            code="recost-source-of-cpu",
        )


def check_measured(graph: Graph) -> None:
    """Raise if durations of the graph are predictions, whose errors a re-costing would hide.

    Raises:
        AnnotateError: the duration of a compute node is predicted.
    """
    compute = compute_mask(graph)
    predicted = graph.nodes.evidence[compute]
    # --capture-layers also copies measured times as EXTRAPOLATED; predictions alone have an
    # interval.
    resized = (predicted == Evidence.EXTRAPOLATED) & (graph.nodes.p10_ns[compute] != UNKNOWN)
    count = int((membership_mask(predicted, _PREDICTED) | resized).sum())
    if count:
        annotation = graph.job.annotations[-1] if graph.job.annotations else None
        origin = (
            f", predicted for {annotation.target} by the {annotation.model} model"
            if annotation
            else ""
        )
        raise AnnotateError(
            f"{count} of {len(predicted)} compute nodes are not measured{origin}\n"
            "  re-cost the measured trace: a prediction built on a prediction hides its error",
            code="recost-not-measured",
        )


def source_gpu(graph: Graph, source: str | None) -> Gpu:
    """Return the GPU that measured the graph: `source`, or the one named by its device record.

    Raises:
        AnnotateError: no GPU description matches the device.
        TargetError: `source` names no GPU description.
    """
    if source is not None:
        return load_gpu(source)
    name = graph.job.device.name
    gpu = find_gpu(name) if name else None
    if gpu is None:
        device = (
            f'on "{name}", which no GPU description matches' if name else "on an unnamed device"
        )
        raise AnnotateError(
            f"the trace was measured {device}\n"
            "  give the GPU with `--source` (a name, or the path of a description)",
            code="recost-source-unknown",
        )
    return gpu


@dataclass(frozen=True, slots=True)
class RecostRequest:
    """The inputs of a re-costing, which every pass may read.

    Attributes:
        captured: the graph as measured, before any pass.
        target: GPU to predict durations for.
        model: cost model.
        source: name or path of the GPU that measured the graph; None: by its device record.
        passes: passes that the user requests.
        databases: kernel databases of the target, in addition to the shipped ones.
        record: takes the terms of predicted compute nodes; None: no terms are kept.
    """

    captured: Graph
    target: Gpu
    model: CostModel
    source: str | None
    passes: PassOptions
    databases: Sequence[str | Path]
    record: TermRecord | None = None

    @property
    def from_cpu(self) -> bool:
        """Whether the graph is a CPU capture, of operators instead of kernels."""
        return self.captured.job.device.runs_operators

    def fused_attention(self) -> FusedAttention | None:
        """Return the pass that fuses eager attention; None where it is not requested.

        A named kernel such as "flash2" also applies to attention that is already fused, so a graph
        without eager attention is valid. "fused" requests the rewrite itself and needs some.

        Raises:
            AnnotateError: the model does not distinguish attention kernels.
        """
        kernel = self.passes.attention
        if kernel not in FUSED:
            return None
        if kernel == "fused":
            return FusedAttention(kernel, self.model.from_description)
        if not has_eager_attention(self.captured):
            return None
        check_resolves(self.model, kernel)
        return FusedAttention(kernel, self.model.from_description)


class Pass(Protocol):
    """A step of re-costing: a frozen dataclass with a precondition and `apply`."""

    def applies(self, request: RecostRequest) -> bool:
        """Return whether the pass has work to do."""
        ...

    def apply(self, graph: Graph, request: RecostRequest) -> Graph:
        """Return the changed graph."""
        ...


@dataclass(frozen=True, slots=True)
class SerializeGpuCapture:
    """Let communication and compute wait for each other, on the times of the source.

    Runs before prediction: the uncontended times of a GPU capture are the source's, and prediction
    drops them.
    """

    def applies(self, request: RecostRequest) -> bool:
        """Return whether overlap is off and the graph was captured on a GPU."""
        return request.passes.overlap == "off" and not request.from_cpu

    def apply(self, graph: Graph, request: RecostRequest) -> Graph:
        """Return the serialized graph."""
        return SerializeOverlap().apply(graph, request.target)


@dataclass(frozen=True, slots=True)
class FuseCpuAttention:
    """Replace eager attention of a CPU capture by fused operators.

    Runs before prediction, which then costs the fused operator like any other.
    """

    def applies(self, request: RecostRequest) -> bool:
        """Return whether fused attention is requested for a CPU capture."""
        return request.from_cpu and request.fused_attention() is not None

    def apply(self, graph: Graph, request: RecostRequest) -> Graph:
        """Return the graph with fused operators."""
        fused = request.fused_attention()
        assert fused is not None
        return fused.apply(graph, request.target)


@dataclass(frozen=True, slots=True)
class PredictDurations:
    """Predict every compute node on the target: of a GPU capture, a CPU capture, or counts."""

    def applies(self, request: RecostRequest) -> bool:
        """Return True: every re-costing predicts durations."""
        return True

    def apply(self, graph: Graph, request: RecostRequest) -> Graph:
        """Return the graph with predicted durations, evidence and intervals.

        Raises:
            AnnotateError: the graph already has predictions, or a request does not fit it.
        """
        check_measured(graph)
        target, model = request.target, request.model
        source, databases = request.source, request.databases
        requested = _for_captured_attention(graph, request.passes)
        if request.from_cpu:
            check_capture_on_cpu(source)
            unmeasured = UnmeasuredRequest(
                target=target,
                model=model,
                passes=requested,
                databases=databases,
                record=request.record,
            )
            return recost_cpu_capture(graph, unmeasured)
        if is_counted(graph):
            if source is not None or requested != NO_PASSES or databases:
                raise AnnotateError(
                    "the trace's nodes have counts of work but neither times nor shapes, so a "
                    "source, a pass or a database has no effect\n  give only `--target`",
                    code="recost-counts-no-target",
                )
            return recost_counts(graph, target)
        measured_on = source_gpu(graph, source)
        measured = MeasuredRequest(
            source=measured_on,
            target=target,
            model=model,
            passes=requested,
            databases=databases,
            record=request.record,
        )
        return recost_measured(graph, measured)


@dataclass(frozen=True, slots=True)
class AllowOverlap:
    """Let communication overlap compute as far as data dependencies allow.

    Runs right after prediction: later passes replace kernels, and the new ones do not record which
    tensors they access.
    """

    def applies(self, request: RecostRequest) -> bool:
        """Return whether overlap is on."""
        return request.passes.overlap == "on"

    def apply(self, graph: Graph, request: RecostRequest) -> Graph:
        """Return the graph with communication ordered only by data dependencies."""
        return MaximizeOverlap().apply(graph, request.target)


@dataclass(frozen=True, slots=True)
class FuseGpuAttention:
    """Replace the kernels of eager attention in a GPU capture by fused kernels.

    Runs after prediction: the pass weighs fused kernels against the predicted eager ones.
    """

    def applies(self, request: RecostRequest) -> bool:
        """Return whether fused attention is requested for a GPU capture."""
        return not request.from_cpu and request.fused_attention() is not None

    def apply(self, graph: Graph, request: RecostRequest) -> Graph:
        """Return the graph with fused kernels, looked up where a database has them."""
        fused = request.fused_attention()
        assert fused is not None
        target, model = request.target, request.model
        look_up = database_look_up(request.captured, target, model, request.databases)
        return _without_interval(replace(fused, look_up=look_up).apply(graph, target))


@dataclass(frozen=True, slots=True)
class UnfuseAttention:
    """Replace fused attention by the kernels, memory and time of eager attention."""

    def applies(self, request: RecostRequest) -> bool:
        """Return whether eager attention is requested."""
        return request.passes.attention == "eager"

    def apply(self, graph: Graph, request: RecostRequest) -> Graph:
        """Return the graph with eager attention."""
        eager = EagerAttention(request.model.from_description)
        return _without_interval(eager.apply(graph, request.target))


@dataclass(frozen=True, slots=True)
class FuseKernelChains:
    """Fuse chains of memory-bound kernels; after attention, whose kernels may join a chain."""

    def applies(self, request: RecostRequest) -> bool:
        """Return whether fusion is requested."""
        return request.passes.fuse is not None

    def apply(self, graph: Graph, request: RecostRequest) -> Graph:
        """Return the graph with one kernel per chain."""
        assert request.passes.fuse is not None
        fuse = FuseChains(request.passes.fuse)
        return _without_interval(fuse.apply(graph, request.target))


@dataclass(frozen=True, slots=True)
class LaunchOperators:
    """Replace operators by the kernels that they launch.

    Runs after prediction, whose databases and models know whole operators, and after passes that
    replace operators. The rules are of NVIDIA's libraries. A record has the terms of operators, so
    with one they stay whole.
    """

    def applies(self, request: RecostRequest) -> bool:
        """Return whether the graph was captured on a CPU and the target is NVIDIA's."""
        return request.from_cpu and request.target.is_nvidia and request.record is None

    def apply(self, graph: Graph, request: RecostRequest) -> Graph:
        """Return the graph with one node per launch."""
        return OperatorsToKernels(request.passes.attention).apply(graph, request.target)


@dataclass(frozen=True, slots=True)
class ActivateNvlink:
    """Add the power of active NVLink; after all passes that change what kernels draw."""

    def applies(self, request: RecostRequest) -> bool:
        """Return whether links are active."""
        return request.passes.nvlink_active

    def apply(self, graph: Graph, request: RecostRequest) -> Graph:
        """Return the graph with longer durations for kernels at the power limit."""
        return NvlinkActive().apply(graph, request.target)


@dataclass(frozen=True, slots=True)
class SerializeCpuCapture:
    """Let communication and compute wait for each other, in a graph made from a CPU capture.

    Runs last: a CPU capture has kernels to serialize only after prediction.
    """

    def applies(self, request: RecostRequest) -> bool:
        """Return whether overlap is off and the graph was captured on a CPU."""
        return request.passes.overlap == "off" and request.from_cpu

    def apply(self, graph: Graph, request: RecostRequest) -> Graph:
        """Return the serialized graph."""
        return SerializeOverlap().apply(graph, request.target)


PASSES: tuple[Pass, ...] = (
    SerializeGpuCapture(),
    FuseCpuAttention(),
    PredictDurations(),
    AllowOverlap(),
    FuseGpuAttention(),
    UnfuseAttention(),
    FuseKernelChains(),
    LaunchOperators(),
    ActivateNvlink(),
    SerializeCpuCapture(),
)
"""Every pass of a re-costing in order; the docstring of each states the reason for its place."""


def _for_captured_attention(graph: Graph, requested: PassOptions) -> PassOptions:
    """Return the request for prediction, which swaps only fused kernels present in the graph."""
    kernel = requested.attention
    if kernel not in FUSED:
        return requested
    if kernel != "fused" and op_costs_of(graph).is_class(OpClass.ATTENTION).any():
        return requested
    # Eager attention has no fused kernel to swap; a later pass fuses it with the named kernel.
    return replace(requested, attention="usual")


def _without_interval(graph: Graph) -> Graph:
    """Return the graph without the interval of the step, which applied to the replaced kernels."""
    *earlier, annotation = graph.job.annotations
    details = {name: value for name, value in annotation.details.items() if name != "interval"}
    annotation = msgspec.structs.replace(annotation, details=details)
    return replace(
        graph, job=msgspec.structs.replace(graph.job, annotations=(*earlier, annotation))
    )
