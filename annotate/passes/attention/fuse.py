"""Replace eager attention by one fused kernel per pass.

The new nodes have PyTorch's operator, operands and results of the fused kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_kernels import Resolution, resolve_unmeasured
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.error_kinds import Uncertainty
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.intervals import intervals
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.models.prediction_terms import PredictedDurations
from onerank.annotate.op_costs.node_costs import OpCosts, op_costs_of
from onerank.annotate.passes.attention.fused_columns import backward_columns, forward_columns
from onerank.annotate.passes.attention.match_eager import EagerCall, eager_calls, softmaxes
from onerank.annotate.passes.attention.remove_eager import find_removal, remove_and_shift
from onerank.annotate.passes.attention.score_memory import without_scores
from onerank.annotate.passes.dataflow import TEXTS, Flow
from onerank.ir import UNKNOWN, Evidence, Graph, Kind, Measurement
from onerank.ir.arrays import I64, U8, Mask
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note

BY_TORCH = frozenset({"flash2", "cudnn", "aotriton"})
"""Kernel families that operators of PyTorch run."""


class LookedUpDurations(NamedTuple):
    """Durations from a kernel database, in addition to a model's.

    Attributes:
        durations: of n nodes.
        evidence: of each duration, `DATASHEET` if the database has no row, uint8[n].
        uncertainty: of the look-ups.
        notes: statements on the quality of the result.
    """

    durations: PredictedDurations
    evidence: U8
    uncertainty: Uncertainty
    notes: tuple[Note, ...]


LookUp = Callable[[Graph, OpCosts, KernelFeatures, PredictedDurations, Mask], LookedUpDurations]
"""(graph, costs of its nodes, their features, the model's prediction, nodes to look up)."""


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Replace eager attention by a fused kernel.

    Attributes:
        kernel: "fused" for the kernel that PyTorch runs on the target, or a family of
            `attention_kernels`.
        from_description: the cost model of unmeasured kernels.
        look_up: how to query the kernel databases; None for no query.
    """

    kernel: str = "fused"
    from_description: PredictFromDescription = predict_from_description
    look_up: LookUp | None = None

    def apply(self, graph: Graph, target: Gpu) -> Graph:
        """Return the graph with a forward and a backward kernel per call of eager attention.

        Each kernel replaces the product with the values, or the first product of backward.
        Operations that build masks only for eager attention are removed, and so are host operators
        that launched removed operations. The fused kernel's launch takes the time of that product's
        launch. The new kernels are unmeasured: their evidence is DATASHEET, or that of the
        databases. In a CPU capture they get their time later, from the prediction of all operators.

        Args:
            graph: re-costed for `target`, or captured on it or on a CPU.
            target: the GPU they run on.

        Raises:
            AnnotateError: the graph has no recognisable eager attention, or the target does not run
                the kernel.
        """
        resolution = resolve_unmeasured(target, self.kernel)
        flow = Flow.of(graph)
        calls = [] if graph.job.measurement.depths is not None else eager_calls(flow)
        if not calls:
            raise AnnotateError(
                _reason_none(graph, softmaxes(flow)), code="fuse-no-eager-attention"
            )
        removal = find_removal(graph, flow, calls)
        measurement, peak_note = without_scores(graph, flow, calls, removal.mask_makers)
        before_ns = int(graph.nodes.duration_ns[removal.dropped & graph.gpu_compute].sum())
        before_ns += int(graph.nodes.duration_ns[removal.heads].sum())
        kernels = int((removal.dropped & graph.gpu_compute).sum()) + len(removal.heads)
        host_operators = int((removal.dropped & graph.mask(Kind.HOST_OP)).sum())
        fused = _with_kernels(graph, calls, (removal.heads, removal.launchers), resolution.runs)
        fused = remove_and_shift(fused, removal.dropped)
        # By id, because the removal has changed the indices.
        fused_nodes = np.flatnonzero(np.isin(fused.nodes.id, graph.nodes.id[removal.heads]))
        kernel_name = resolution.runs or "one kernel"
        notes = tuple[Note, ...]()
        text = f"What if attention were fused ({kernel_name}): {len(calls)} calls, "
        if graph.job.device.runs_operators:
            before = int(removal.dropped.sum()) + len(fused_nodes)
            text += f"{before} operators become {len(fused_nodes)}; {peak_note}"
        else:
            fused, notes = self._predict(fused, fused_nodes, target, resolution)
            after_ns = int(fused.nodes.duration_ns[fused_nodes].sum())
            text += (
                f"{kernels} kernels ({before_ns / 1e6:.3f} ms) become {len(fused_nodes)} "
                f"({after_ns / 1e6:.3f} ms on {target.name}), {host_operators} host operators are "
                f"removed; {peak_note}"
            )
        notes = (
            Note(text, code="what-if-fused-attention"),
            *_mask_notes(calls),
            *_remaining_note(softmaxes(flow) - len(calls)),
            *notes,
        )
        measurement = _without_dropped_nodes(measurement, graph, removal.dropped).untimed(*notes)
        return replace(fused, job=msgspec.structs.replace(fused.job, measurement=measurement))

    def _predict(
        self, graph: Graph, fused_nodes: I64, target: Gpu, kernel: Resolution
    ) -> tuple[Graph, tuple[Note, ...]]:
        """Return the graph with times of the new kernels, and notes on them."""
        costs = op_costs_of(graph)
        kernels = KernelFeatures.of(graph, costs)
        predicted = self.from_description(kernels, target)
        count = len(predicted.rules)
        evidence = np.full(count, Evidence.DATASHEET, dtype=np.uint8)
        is_fused = np.isin(costs.index, fused_nodes)
        looked_up = LookedUpDurations(predicted, evidence, Uncertainty.none(count), ())
        # The databases have times of the kernels that PyTorch's operators launch. Another family,
        # such as FlashAttention 3, has the same operator here and would get their times.
        if self.look_up is not None and kernel.runs in BY_TORCH:
            looked_up = self.look_up(graph, costs, kernels, predicted, is_fused)
        backward = kernels.is_attention_backward
        factor = np.where(backward, kernel.backward, kernel.forward)
        # A looked-up time is of the kernel itself and already includes its slowdown.
        factor = np.where(looked_up.evidence == Evidence.DATASHEET, factor, 1.0)
        # The launch floor does not depend on the kernel: only the time above it changes.
        usual_ns, rules = looked_up.durations
        above = np.maximum(usual_ns - target.launch_floor_ns, 0)
        predicted_ns = usual_ns + above * (factor - 1)
        ends, _ = intervals(
            kernels,
            PredictedDurations(predicted_ns, rules),
            None,
            target,
            shipped(),
            uncertainty=looked_up.uncertainty,
        )
        counts = ("flops", "bytes_read", "bytes_written")
        names = ("duration_ns", "p10_ns", "p90_ns", "evidence", *counts)
        columns = {name: getattr(graph.nodes, name).copy() for name in names}
        for name, values in zip(
            ("duration_ns", "p10_ns", "p90_ns"), (predicted_ns, *ends), strict=True
        ):
            columns[name][costs.index[is_fused]] = np.rint(values[is_fused]).astype(np.int64)
        columns["evidence"][costs.index[is_fused]] = looked_up.evidence[is_fused]
        for name in counts:
            columns[name][costs.index[is_fused]] = getattr(costs, name)[is_fused]
        return graph.with_columns(**columns), looked_up.notes


def has_eager_attention(graph: Graph) -> bool:
    """Return whether a graph has eager attention that `FusedAttention` can fuse."""
    if graph.job.measurement.depths is not None:
        return False
    return bool(eager_calls(Flow.of(graph)))


def _with_kernels(
    graph: Graph,
    calls: list[EagerCall],
    heads_and_launchers: tuple[list[int], list[int]],
    family: str,
) -> Graph:
    """Return the graph with fused kernels in place of the heads, and with renamed launchers."""
    texts = {name: graph.text(name) for name in TEXTS}
    columns = [forward_columns(call, family) if pass_ is call.forward
               else backward_columns(call, family)
               for call in calls for pass_ in call.passes]  # fmt: skip
    for head, launcher, text in zip(*heads_and_launchers, columns, strict=True):
        for name in TEXTS:
            texts[name][head] = text[name]
            if launcher >= 0:
                texts[name][launcher] = text["op"] if name == "name" else text[name]
    nodes, heads = graph.nodes, np.array(heads_and_launchers[0])
    if graph.job.device.runs_operators:
        return graph.with_columns(**texts)
    names = ("kind", "evidence", "spread_ns", "samples", "uncontended_ns", "flops", "bytes_read",
             "bytes_written")  # fmt: skip
    values = (Kind.KERNEL, Evidence.DATASHEET, 0, 0, *[UNKNOWN] * 4)
    changed = {name: getattr(nodes, name).copy() for name in names}
    for name, value in zip(names, values, strict=True):
        changed[name][heads] = value
    return graph.with_columns(**texts, **changed)


def _reason_none(graph: Graph, softmaxes_: int) -> str:
    """Return the message of the error for a graph without attention to fuse."""
    if graph.job.measurement.depths is not None:
        return (
            "the graph was extrapolated, and its copied layers share the tensors of one layer, so "
            "eager attention cannot be matched\n  capture all layers"
        )
    if graph.job.compilation is not None:
        return (
            "the step was compiled, and generated kernels do not record their operands, so eager "
            "attention cannot be matched\n  capture it without torch.compile"
        )
    if softmaxes_:
        return (
            f"{softmaxes_} calls of eager attention cannot be fused: other operators read their "
            "scores, they add a bias per head, or part of their backward pass is missing"
        )
    return (
        "the graph has no eager attention to fuse (a GEMM, its softmax, and a GEMM with it)\n"
        "  matching needs recorded operands: an execution trace of an eager, uncoarsened step"
    )


def _mask_notes(calls: list[EagerCall]) -> tuple[Note, ...]:
    """Return notes on the assumptions about masks and dropout."""
    counts = (
        (
            sum(call.causal == "compared" for call in calls),
            "are causal, because their masks come from comparing positions",
            "fused-causal",
        ),
        (
            sum(call.causal == "square" for call in calls),
            "are assumed to be causal: they add a square mask shared by all sequences, whose "
            "values the trace does not record",
            "fused-assumed-causal",
        ),
        (
            sum(call.padded for call in calls),
            "lose a mask that is not causal (padding), which fused kernels do not read",
            "fused-without-padding",
        ),
        (
            sum(call.dropout for call in calls),
            "use dropout, which adds no time to the predicted fused kernel",
            "fused-dropout",
        ),
    )
    return tuple(
        Note(f"Fused attention: {count} calls {what}.", code=code)
        for count, what, code in counts
        if count
    )


def _remaining_note(count: int) -> tuple[Note, ...]:
    if not count:
        return ()
    text = (
        f"Fused attention: {count} more calls stay eager, because other operators read their "
        "scores, they add a bias per head, or part of their backward pass is missing."
    )
    return (Note(text, code="fused-stays-eager"),)


def _without_dropped_nodes(measurement: Measurement, graph: Graph, dropped: Mask) -> Measurement:
    """Return the measurement with memory blocks that do not refer to dropped nodes."""
    if measurement.memory is None:
        return measurement
    ids = {int(id_) for id_ in graph.nodes.id[dropped]}
    blocks = measurement.memory.blocks
    node = tuple(-1 if id_ in ids else id_ for id_ in blocks.node)
    blocks = msgspec.structs.replace(blocks, node=node)
    memory = msgspec.structs.replace(measurement.memory, blocks=blocks)
    return msgspec.structs.replace(measurement, memory=memory)
