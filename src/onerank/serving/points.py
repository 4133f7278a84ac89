"""Figures of one composition: from its measured graph, or predicted for a GPU."""

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
from onerank.annotate.memory.memory_report import report_memory
from onerank.annotate.memory.non_allocator import non_allocator_bytes
from onerank.annotate.models.attention_kernels import family_of, family_of_operator, resolve
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.passes.host_time import with_host
from onerank.annotate.passes.pass_options import NO_PASSES
from onerank.annotate.recost.recost import source_gpu
from onerank.annotate.recost.recosting_summary import Recosting
from onerank.capture.serving.compositions import Composition
from onerank.ir import Graph, Kind
from onerank.ir.replay import ReplayedRank
from onerank.serving.graph_gaps import graph_times
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
    row = StepRow.of(
        composition,
        step_ns=None,
        p10_ns=None,
        p90_ns=None,
        graph_ns=None,
        graph_low_ns=None,
        graph_high_ns=None,
        gpu_ns=None,
        host_ns=None,
        peak_bytes=needed_bytes,
        fits=False,
        source=source,
    )
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
        **graph_times(recosting, before, after, measured_row, target.gpu),
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
        **graph_times(recosting, before, after, measured_row, target.gpu),
        source="predicted",
    )
    return predicted_row, after


def _recosted(before: Graph, target: Target) -> tuple[Graph, Recosting]:
    after = recost(
        before,
        target.gpu,
        model=target.model,
        passes=target.passes,
        databases=target.databases,
    )
    after = with_host(after, before, target.host)
    return after, summarise(before, after)


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
    reserved_bytes = report_memory(graph).simulated_reserved_bytes or 0
    return max(0, reserved_bytes - graph.job.measurement.peak_memory_bytes)


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
    ".cache_write": "cache_write",
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
