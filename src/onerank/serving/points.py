"""Figures of one composition: from its measured graph, or predicted for a GPU."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from onerank.analysis.breakdown import shares_by_module
from onerank.analysis.step_time import step_change
from onerank.annotate import PassOptions, characterise, recost, summarise
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.hosts.host import Host
from onerank.annotate.memory.memory_report import non_allocator_bytes, report_memory
from onerank.annotate.models.attention_kernels import family_of, family_of_operator, resolve
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.gpu_distance import same_die
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.op_costs.op_classes import CLASSES, OpClass, classify, op_class
from onerank.annotate.passes.host_time import with_host
from onerank.annotate.passes.pass_options import NO_PASSES
from onerank.annotate.recost.recost import source_gpu
from onerank.annotate.recost.recosting_summary import Recosting
from onerank.capture.serving.compositions import Composition
from onerank.ir import Evidence, Graph, Kind
from onerank.ir.replay import ReplayedRank
from onerank.serving.tables import KernelRow, Part, Source, StepRow, fits, p10_median_p90


class PointMemory(msgspec.Struct, frozen=True):
    """Memory of a step in bytes; fields as in `tables.RankMemory`."""

    workspace_bytes: int
    activations_bytes: int
    outside_bytes: int
    gaps_bytes: int = 0


class Point(msgspec.Struct, frozen=True):
    """A composition with its figures, as a run stores it.

    Attributes:
        row: its row of `steps.parquet`.
        modules: its rows of `kernels.parquet`, whose `row` is 0.
        memory: memory of the step; None if it does not fit.
        trace: its graph as a Chakra file; empty if it does not fit.
        device: name of the device that the graph was captured on.
        device_type: as in `tables.Manifest`.
        versions: software of the capture.
        collectives: collectives of the step.
        messages: its sends and receives.
        attention: as `attention_kernels` in `tables.Manifest`, of this step.
    """

    row: StepRow
    modules: tuple[KernelRow, ...] = ()
    memory: PointMemory | None = None
    trace: bytes = b""
    device: str = ""
    device_type: str = ""
    versions: dict[str, str] = {}
    collectives: int = 0
    messages: int = 0
    attention: tuple[str, ...] = ()


def misfit(composition: Composition, needed_bytes: int, source: Source) -> Point:
    """Return the point of a step that does not fit into memory.

    Args:
        composition: sequences of the step.
        needed_bytes: memory that it needs at least.
        source: source of the other points.
    """
    nothing = dict.fromkeys(
        (*("step_ns", "p10_ns", "p90_ns", "graph_ns"),
         *("graph_low_ns", "graph_high_ns", "gpu_ns", "host_ns"))
    )  # fmt: skip
    row = StepRow.of(composition, **nothing, peak_bytes=needed_bytes, fits=False, source=source)
    return Point(row)


def measured(composition: Composition, graph: Graph, graph_ns: Sequence[int]) -> Point:
    """Return the figures of a measured step.

    Args:
        composition: sequences of the step.
        graph: its graph.
        graph_ns: times of the step as a CUDA graph; () for none.
    """
    measurement = graph.job.measurement
    low, high = _ends(measurement.step_ns)
    graph_low, graph_high = _ends(graph_ns)
    hosts = measurement.host_step_ns
    row = StepRow.of(
        composition,
        step_ns=measurement.median_step_ns,
        p10_ns=low,
        p90_ns=high,
        graph_ns=round(statistics.median(graph_ns)) if graph_ns else None,
        graph_low_ns=graph_low,
        graph_high_ns=graph_high,
        gpu_ns=int(graph.nodes.duration_ns[graph.compute].sum()),
        host_ns=round(statistics.median(hosts)) if hosts else None,
        peak_bytes=measurement.peak_memory_bytes,
        fits=True,
        source="measured",
    )
    return _point(row, graph, _attention_families(graph))


def _ends(times_ns: Sequence[int]) -> tuple[int | None, int | None]:
    if not times_ns:
        return None, None
    low, _, high = p10_median_p90(times_ns)
    return low, high


@dataclass(frozen=True)
class Target:
    """What steps are predicted for.

    Attributes:
        gpu: the GPU.
        host: host of a capture without a GPU, and for the interval of a step on another GPU.
        model: cost model, as for `onerank.recost`.
        databases: kernel databases of the GPU.
        passes: what if.
    """

    gpu: Gpu
    host: Host | None
    model: str = "auto"
    databases: tuple[Path, ...] = ()
    passes: PassOptions = NO_PASSES


def predicted(
    composition: Composition, before: Graph, target: Target, measured_row: StepRow | None = None
) -> Point:
    """Return the figures of a step predicted for a GPU, or that it does not fit into its memory.

    Args:
        composition: sequences of the step.
        before: the captured graph.
        target: what to predict for.
        measured_row: the row of a step that was measured on another GPU.
    """
    after, recosting = _recosted(before, target)
    step = step_change(before, after, recosting.interval)
    assert step.after is not None, "a re-costed graph takes time"
    peak_bytes = before.job.measurement.peak_memory_bytes
    row = StepRow.of(
        composition,
        step_ns=step.after.step_ns,
        p10_ns=step.p10_ns,
        p90_ns=step.p90_ns,
        **_graph_times(recosting, before, after, measured_row, target.gpu),
        host_ns=_host_ns(after),
        peak_bytes=peak_bytes,
        fits=True,
        source="predicted",
    )
    point = _point(row, after, _families_on(before, target))
    assert point.memory is not None, "a point with a graph has its memory"
    if not fits(target.gpu.memory_bytes, peak_bytes, point.memory.outside_bytes):
        return misfit(composition, peak_bytes, "predicted")
    return point


def predicted_recording(row: StepRow, before: Graph, target: Target) -> tuple[StepRow, Graph]:
    """Return the row of a recorded step predicted for a GPU, and its graph.

    The time to the next step contains the wait for requests, and is not predicted.

    Args:
        row: the recorded step.
        before: its graph.
        target: what to predict for.
    """
    after, recosting = _recosted(before, target)
    measured_row = row if row.source == "recorded" else None
    predicted_row = msgspec.structs.replace(
        row,
        step_ns=None,
        p10_ns=None,
        p90_ns=None,
        **_graph_times(recosting, before, after, measured_row, target.gpu),
        source="predicted",
    )
    return predicted_row, after


def _recosted(before: Graph, target: Target) -> tuple[Graph, Recosting]:
    after = recost(
        *(before, target.gpu),
        model=target.model,
        passes=target.passes,
        databases=target.databases,
    )
    after = with_host(after, before, target.host)
    return after, summarise(before, after)


# From the end of a kernel of a replayed CUDA graph to the start of the next, in ns: the median of
# 22 decodes of a Llama-8B at TP 2 (1,439 to 1,534 kernels) on an H100, 352 to 383 in most of them.
_GRAPH_GAP_NS = 370

# Half the width of the 80% interval of the gap after a kernel, in ns. Measured gaps of decodes are
# 173 to 303 ns on H100s (Llama-8B, Llama-1B and a Qwen3-MoE, whole) and 357 to 417 ns on an H200
# (the two Llamas). Gaps predicted for another GPU of the same die differ by up to 90 ns from the
# measured ones. Measured gaps of one composition differ by up to 41 ns between two H100s.
_GRAPH_GAP_HALF_WIDTH_NS = 150
_GRAPH_GAP_SAME_DIE_HALF_WIDTH_NS = 75

# Half the width of the 80% interval of `_GraphGaps.stretch`. That of a prefill changes by 0.001 to
# 0.006 between two H100s, and by 0.007 to 0.009 from an H100 to an H200.
_GRAPH_STRETCH_HALF_WIDTH = 0.008


@dataclass(frozen=True)
class _GraphGaps:
    """The time of a replayed CUDA graph beyond the sum of its kernels under the profiler.

    Attributes:
        gaps_ns: gaps between the kernels.
        stretch: the difference beyond the gaps, as a share of the kernels' time: positive where the
            clock falls during a long graph; negative where kernels overlap in the graph, or run
            faster than under the profiler.
        half_width_ns: half the width of the 80% interval of `gaps_ns`.
    """

    gaps_ns: float
    stretch: float
    half_width_ns: float

    @classmethod
    def predicted(cls, after: Graph) -> "_GraphGaps":
        """Return the gaps of a step that was not measured as a CUDA graph."""
        width_ns = _GRAPH_GAP_HALF_WIDTH_NS * int(after.gpu_compute.sum())
        return cls(_GRAPH_GAP_NS * _kernels_without_gap(after), 0.0, width_ns)

    @classmethod
    def transferred(cls, row: StepRow, before: Graph, gpu: Gpu) -> "_GraphGaps | None":
        """Return the gaps of a measured step on another GPU; None if it has no measured graph."""
        if not (row.graph_ns and row.gpu_ns):
            return None
        count = int(before.gpu_compute.sum())
        longer_ns = row.graph_ns - row.gpu_ns
        # A difference beyond the usual gaps has another cause, such as a lower clock, whose effect
        # grows with the kernels.
        gaps_ns = min(max(0, longer_ns), _GRAPH_GAP_NS * count)
        stretch = (longer_ns - gaps_ns) / row.gpu_ns
        source = source_gpu(before, None)
        if not same_die(source, gpu):
            return cls(gaps_ns, stretch, _GRAPH_GAP_HALF_WIDTH_NS * count)
        # `launch_floor_ns` is the time from the start of one of the shortest GEMMs in a replayed
        # graph to the start of the next. If kernels become shorter by more than this period does,
        # the gaps become longer: an H200's short kernels are 0.2 us shorter than an H100's, and its
        # period is only 0.05 us shorter.
        kernels = KernelFeatures.of(before, op_costs_of(before))
        longer_period_ns = gpu.launch_floor_ns - source.launch_floor_ns
        change_ns = float((longer_period_ns - kernels.launch_change_ns(source, gpu)).sum())
        width_ns = _GRAPH_GAP_SAME_DIE_HALF_WIDTH_NS * count
        return cls(max(0.0, gaps_ns + change_ns), stretch, width_ns)

    def step(self, recosting: Recosting) -> tuple[int, int | None, int | None]:
        """Return the time of the replayed graph and the ends of its interval."""
        gpu_ns = recosting.after_ns
        graph_ns = gpu_ns * (1 + self.stretch) + self.gaps_ns
        if not recosting.interval:
            return round(graph_ns), None, None
        # The errors of kernels, gaps and stretch have different causes, so they add in quadrature.
        stretch_ns = _GRAPH_STRETCH_HALF_WIDTH * gpu_ns
        below, above = (
            math.hypot(end_ns - gpu_ns, self.half_width_ns, stretch_ns)
            for end_ns in recosting.interval
        )
        return round(graph_ns), round(graph_ns - below), round(graph_ns + above)


def _graph_times(
    recosting: Recosting, before: Graph, after: Graph, measured_row: StepRow | None, gpu: Gpu
) -> dict[str, int | None]:
    """Return the times of kernels, and of a CUDA graph of them, as columns of `StepRow`.

    Args:
        recosting: the change of the kernels.
        before: the captured graph.
        after: the predicted graph.
        measured_row: the row of `before`, if it was measured on another GPU.
        gpu: what the step is predicted for.
    """
    gaps = None if measured_row is None else _GraphGaps.transferred(measured_row, before, gpu)
    graph_ns, low, high = (gaps or _GraphGaps.predicted(after)).step(recosting)
    return {
        "graph_ns": graph_ns,
        "graph_low_ns": low,
        "graph_high_ns": high,
        "gpu_ns": recosting.after_ns,
    }


def _kernels_without_gap(graph: Graph) -> int:
    """Return the number of kernels whose predicted time does not contain the gap after it.

    The time of a GEMM from shapes contains it: the tile model was fitted to the time per call of
    replayed graphs.
    """
    index = np.flatnonzero(graph.gpu_compute)
    gemm = classify(graph, index) == CLASSES.index(OpClass.GEMM)
    return int((~gemm | (graph.nodes.evidence[index] != Evidence.DATASHEET)).sum())


def _host_ns(graph: Graph) -> int:
    """Return the time of the step if its kernels took none: that of the host."""
    durations = np.where(graph.compute, 0, graph.nodes.duration_ns)
    times = ReplayedRank(graph).with_gpu_durations(durations).schedule()
    return int(times.end_ns.max() - times.start_ns.min())


def _gaps_bytes(graph: Graph) -> int:
    """Return what the allocator reserves beyond the peak, simulated from an empty device.

    Measured steps are simulated as well, so that bundles with and without a device compare: without
    one, nothing is measured. For a prefill of 8,192 tokens of a Llama-8B on an H100, the simulation
    gives 0.33 GB, and a process that ran only this step measured 0.33 GB.
    """
    report = report_memory(graph)
    return max(0, (report.simulated_reserved_bytes or 0) - report.peak_bytes)


def _attention_families(graph: Graph) -> set[str]:
    """Return the families of the kernels that compute the attention of a step's parts.

    They are those of `attention_kernels`; "" stands for any other kernel, such as the products of
    attention without a fused kernel.
    """
    nodes, index = graph.nodes, np.flatnonzero(graph.compute)
    columns = [getattr(nodes, name)[index] for name in ("module", "op", "name", "kind")]
    families: set[str] = set()
    for *codes, kind in np.unique(np.stack(columns), axis=1).T.tolist():
        module, op, name = (graph.strings[code] for code in codes)
        if _part(module, {}, "") not in ("prefill_attention", "decode_attention"):
            continue
        # Copies of queries, keys and results are no attention.
        if op_class(op, name, Kind(kind)) in (OpClass.ATTENTION, OpClass.GEMM):
            families.add(family_of(name) or family_of_operator(op))
    return families


def _families_on(graph: Graph, target: Target) -> set[str]:
    """Return the families of the kernels that a captured step has when it is predicted for a GPU.

    Raises:
        AnnotateError: a requested kernel does not run there.
    """
    families, requested = _attention_families(graph), target.passes.attention
    if graph.job.device.runs_operators:
        # Operators that name FlashAttention's or cuDNN's kernel on an NVIDIA GPU run others on AMD.
        named = families if target.gpu.is_nvidia else {""}
        return named if requested in ("usual", "same") else {requested}
    source = source_gpu(graph, None)
    return {
        resolve(family, source, target.gpu, requested).runs if family else "" for family in families
    }


def _point(row: StepRow, graph: Graph, families: set[str]) -> Point:
    measurement, device = graph.job.measurement, graph.job.device
    resident = measurement.resident_bytes or {}
    known = sum(sum(sizes) for name, sizes in resident.items() if name != "workspace")
    memory = PointMemory(
        # torch allocates cuBLAS workspaces without a tensor.
        workspace_bytes=max(0, measurement.start_memory_bytes - known),
        activations_bytes=max(0, measurement.peak_memory_bytes - measurement.start_memory_bytes),
        outside_bytes=0 if device.runs_operators else non_allocator_bytes(graph),
        gaps_bytes=0 if device.runs_operators else _gaps_bytes(graph),
    )
    return Point(
        row,
        _modules(graph),
        memory,
        device=device.name,
        device_type=device.type,
        versions=measurement.versions,
        collectives=int(graph.mask(Kind.COLLECTIVE).sum()),
        messages=int(graph.mask(Kind.SEND, Kind.RECV).sum()),
        attention=tuple(sorted(families)),
    )


def _modules(graph: Graph) -> tuple[KernelRow, ...]:
    roles = {module.path: module.role for module in graph.job.modules}
    root = next((module.type for module in graph.job.modules if module.path == module.type), "")
    return tuple(
        KernelRow(
            row=0,
            module=share.name,
            part=_part(share.name, roles, root),
            kernels=share.count,
            time_ns=share.time_ns,
            flops=share.flops,
            bytes=share.bytes,
        )
        for share in shares_by_module(characterise(graph))
    )


# End of a module's path -> what its time depends on.
_PARTS: Mapping[str, Part] = {
    ".step_attention.prefill": "prefill_attention",
    ".step_attention.decode": "decode_attention",
    ".step_index.prefill": "prefill_index",
    ".step_index.decode": "decode_index",
    ".step_state.prefill": "prefill_state",
    ".step_state.decode": "decode_state",
}


def _part(module: str, roles: Mapping[str, str], root: str) -> Part:
    """Return what the time of a module depends on."""
    for end, part in _PARTS.items():
        if module.endswith(end):
            return part
    # The model's own operators select the last tokens before its head, and gather logits after it.
    if roles.get(module) == "head" or module in ("", root):
        return "head"
    return "tokens"
