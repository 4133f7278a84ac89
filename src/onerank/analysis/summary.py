"""Summary of a trace by class, phase and module."""

from pathlib import Path

import msgspec
import numpy as np

from onerank.analysis.breakdown import (
    Share,
    share_of_all,
    shares_by_class,
    shares_by_module,
    shares_by_phase,
)
from onerank.annotate import characterise
from onerank.converters.expand.pipeline import StagePeak, peaks
from onerank.ir import (
    UNKNOWN,
    Collective,
    Compilation,
    Evidence,
    Graph,
    InferenceStep,
    Job,
    Kind,
    LayerExtrapolation,
    Measurement,
    Phase,
    RankClass,
    Sensors,
)
from onerank.ir.arrays import I64
from onerank.ir.notes import Note
from onerank.ir.steady_state import job_step_ns


class CollectiveUse(msgspec.Struct, frozen=True):
    """Equal communication calls of a step.

    Attributes:
        type: "all_reduce", "all_gather", ..., "send" or "recv"; "unknown" for a collective number
            that Chakra does not define.
        bytes: per-rank input of each; -1 if unknown.
        group: name of the process group; "" if unknown.
        group_ranks: its global ranks; empty if unknown.
        count: number of calls.
        phase: "forward", "backward", "optimizer" or "".
    """

    type: str
    bytes: int
    group: str
    group_ranks: tuple[int, ...]
    count: int
    phase: str


class StageSummary(msgspec.Struct, frozen=True):
    """The pipeline stage that a trace belongs to.

    Attributes:
        stage: index of the stage, from 0.
        layers: number of layers of each stage.
        activation_bytes: bytes that a micro-batch keeps from its forward to its backward.
        peaks: peak memory under each schedule with one stage per rank.
    """

    stage: int
    layers: tuple[int, ...]
    activation_bytes: int
    peaks: list[StagePeak]


class Summary(msgspec.Struct, frozen=True):
    """One rank's step. Times are nanoseconds; `gpu_*` excludes communication.

    Attributes:
        nodes: nodes of the graph.
        edges: dependencies.
        kinds: nodes by kind ("kernel", "host_op", "invalid", ...), those that occur.
        gpu_ops: kernels, memcpys and memsets.
        gpu_time_ns: their summed durations.
        compute_ops: the GPU operations, or the operators of a CPU capture.
        compute_time_ns: their summed durations.
        flops: known FLOPs of the compute nodes.
        bytes: known bytes read and written by them.
        without_flops: number of compute nodes whose FLOPs are not known.
        without_flops_share: their share of the compute time, or of the bytes where nothing has a
            time.
        peak_memory_bytes: allocator's peak over the step, 0 if not known.
        start_memory_bytes: allocated when the step began, 0 if not known.
        measured_step_ns: median step without a profiler; None if none was measured.
        step_ns: each of those steps.
        job_step_ns: expected step of the job, whose equal ranks wait for the slowest; None for a
            real rank, a pipeline stage, communication without a time, or too few measured steps.
        timed_step_ns: each step with events around its modules.
        host_step_ns: host time of each of several steps without a profiler that began with an idle
            GPU.
        profiled_host_ns: host time of the profiled step; 0 if not measured.
        profiled_step_ns: the step under the profiler, 0 if not measured.
        data_loading_ns: time in which the script waits for its next batch, operators excluded.
        gpu_busy_ns: part of the profiled step in which the GPU ran anything, 0 if not measured.
        gap_ns: idle time of the GPU: measured step minus busy time; None if either is not measured.
        profiler_overhead: profiled step over measured step, minus 1; None likewise.
        samples: number of steps behind a compute node's median duration; the minimum of all nodes.
        spread_ns: summed spreads of the compute nodes over these steps.
        sensors: clocks, power and temperature of the measured steps; None if not sampled.
        device: the device that the durations are valid for.
        device_type: "cuda", "cpu" or "".
        world: axis -> size.
        rank: global rank.
        by_class: compute by class of work, most time first.
        by_phase: compute by phase, in the order of a step.
        by_module: compute by module, numbered siblings (`layers.0`, `layers.1`) summed.
        evidence: compute nodes by the source of their durations.
        collectives: communication calls, equal ones counted.
        annotations: re-costings applied, as "model for target".
        versions: software the trace was recorded with.
        notes: statements on the quality of the trace.
        pipeline: its pipeline stage; None without a pipeline.
        depths: how the trace was extrapolated from captures with fewer layers; None if it was not.
        compilation: the compiled step compared with the eager one; None if not captured.
        classes: classes of equal ranks; () if not known.
        inference: the captured forward of a script that only infers; None for training.
    """

    nodes: int
    edges: int
    kinds: dict[str, int]
    gpu_ops: int
    gpu_time_ns: int
    compute_ops: int
    compute_time_ns: int
    flops: int
    bytes: int
    without_flops: int
    without_flops_share: float
    peak_memory_bytes: int
    start_memory_bytes: int
    measured_step_ns: int | None
    step_ns: tuple[int, ...]
    job_step_ns: int | None
    timed_step_ns: tuple[int, ...]
    host_step_ns: tuple[int, ...]
    profiled_host_ns: int
    profiled_step_ns: int
    data_loading_ns: int
    gpu_busy_ns: int
    gap_ns: int | None
    profiler_overhead: float | None
    samples: int
    spread_ns: int
    sensors: Sensors | None
    device: str
    device_type: str
    world: dict[str, int]
    rank: int
    by_class: list[Share]
    by_phase: list[Share]
    by_module: list[Share]
    evidence: dict[str, int]
    collectives: list[CollectiveUse]
    annotations: list[str]
    versions: dict[str, str]
    notes: list[Note]
    pipeline: StageSummary | None = None
    depths: LayerExtrapolation | None = None
    compilation: Compilation | None = None
    classes: tuple[RankClass, ...] = ()
    inference: InferenceStep | None = None


class StepSummary(msgspec.Struct, frozen=True):
    """One of several captured steps of a script that only infers.

    Attributes:
        step: "prefill", "decode" or the number of the forward, as chosen.
        trace: file that was written.
        summary: summary of the trace.
    """

    step: str
    trace: Path
    summary: Summary


class StepSummaries(msgspec.Struct, frozen=True):
    """All captured steps of a script that only infers.

    Attributes:
        steps: one record each.
    """

    steps: list[StepSummary]


class RankSummary(msgspec.Struct, frozen=True):
    """One of several captured ranks.

    Attributes:
        rank: the rank that ran.
        represents: all ranks that do the same work, this one included.
        trace: file that was written.
        step_ns: median step without a profiler; for an extrapolated trace, the fitted line's value
            at its depth.
        summary: summary of the trace.
    """

    rank: int
    represents: tuple[int, ...]
    trace: Path
    step_ns: int | None
    summary: Summary


class RankSummaries(msgspec.Struct, frozen=True):
    """All captured ranks.

    Attributes:
        ranks: one record each.
        missing: ranks that no captured rank represents.
    """

    ranks: list[RankSummary]
    missing: tuple[int, ...]


def summarise(graph: Graph) -> Summary:
    """Return the summary of a graph; missing FLOPs and bytes are derived from shapes.

    Raises:
        AnnotateError: the operands of a node cannot be read.
    """
    graph = characterise(graph)
    nodes, job = graph.nodes, graph.job
    gpu, compute = graph.gpu_compute, np.flatnonzero(graph.compute)
    total, measured = share_of_all(graph), job.measurement
    step_ns = measured.median_step_ns
    return Summary(
        nodes=len(graph),
        edges=len(graph.edges),
        kinds={k.name.lower(): n for k in Kind if (n := int(graph.mask(k).sum()))},
        gpu_ops=int(gpu.sum()),
        gpu_time_ns=int(nodes.duration_ns[gpu].sum()),
        compute_ops=len(compute),
        compute_time_ns=total.time_ns,
        flops=total.flops,
        bytes=total.bytes,
        without_flops=total.without_flops,
        without_flops_share=_share_without_flops(graph, compute),
        peak_memory_bytes=measured.peak_memory_bytes,
        start_memory_bytes=measured.start_memory_bytes,
        measured_step_ns=step_ns,
        step_ns=measured.step_ns,
        job_step_ns=job_step_ns(graph, job.world.size),
        timed_step_ns=measured.timed_step_ns,
        host_step_ns=measured.host_step_ns,
        # The first profiled step: it gave the structure of the trace. 0 without any.
        profiled_host_ns=sum(measured.profiled_host_ns[:1]),
        profiled_step_ns=measured.profiled_step_ns,
        data_loading_ns=int(nodes.duration_ns[graph.data_loading].sum()),
        gpu_busy_ns=measured.gpu_busy_ns,
        gap_ns=step_ns - measured.gpu_busy_ns if step_ns and measured.gpu_busy_ns else None,
        profiler_overhead=_profiler_overhead(measured),
        # Merged steps can lack a node in some of them; the minimum promises no more than all have.
        samples=int(nodes.samples[compute].min()) if len(compute) else 0,
        spread_ns=int(nodes.spread_ns[compute].sum()),
        sensors=job.device.sensors,
        device=job.device.name,
        device_type=job.device.type,
        # `ep` divides cp * dp, so it is no axis of the world.
        world=job.world.sizes | ({"ep": job.world.ep} if job.world.ep > 1 else {}),
        rank=job.rank,
        by_class=_by_time(shares_by_class(graph)),
        by_phase=shares_by_phase(graph),
        by_module=_by_time(shares_by_module(graph)),
        evidence=_evidence_counts(graph, compute),
        collectives=_collectives(graph),
        annotations=[f"{done.model} for {done.target}" for done in job.annotations],
        versions=measured.versions,
        notes=list(measured.notes),
        pipeline=_stage(job),
        depths=measured.depths,
        compilation=job.compilation,
        classes=job.classes,
        inference=job.inference,
    )


def _profiler_overhead(measured: Measurement) -> float | None:
    profiled_ns, step_ns = measured.profiled_step_ns, measured.median_step_ns
    return profiled_ns / step_ns - 1 if profiled_ns and step_ns else None


def _evidence_counts(graph: Graph, compute: I64) -> dict[str, int]:
    evidence, counts = np.unique(graph.nodes.evidence[compute], return_counts=True)
    names = [Evidence(code).name.lower() for code in evidence.tolist()]
    return dict(zip(names, counts.tolist(), strict=True))


def _share_without_flops(graph: Graph, compute: I64) -> float:
    """Return the share of a characterised graph's compute whose FLOPs are not known."""
    nodes = graph.nodes
    weights = nodes.duration_ns[compute]
    if not weights.any():
        read, written = nodes.bytes_read[compute], nodes.bytes_written[compute]
        weights = np.maximum(read, 0) + np.maximum(written, 0)
    total = int(weights.sum())
    return int(weights[nodes.flops[compute] == UNKNOWN].sum()) / total if total else 0.0


def _stage(job: Job) -> StageSummary | None:
    if job.pipeline is None:
        return None
    activation_bytes = max(job.measurement.activation_bytes, default=0)
    return StageSummary(job.pipeline.stage, job.pipeline.layers, activation_bytes, peaks(job))


def _by_time(shares: list[Share]) -> list[Share]:
    return sorted(shares, key=lambda share: (-share.time_ns, share.name))


def _collectives(graph: Graph) -> list[CollectiveUse]:
    counts: dict[tuple[str, int, str, str], int] = {}
    for index in np.flatnonzero(graph.communication).tolist():
        node = graph.node(index)
        kind = node.kind.name.lower()
        if node.kind is Kind.COLLECTIVE:
            is_defined = node.collective is not Collective.NONE
            kind = node.collective.name.lower() if is_defined else "unknown"
        phase = "" if node.phase is Phase.NONE else node.phase.name.lower()
        key = (kind, node.value("comm_bytes"), node.text("group"), phase)
        counts[key] = counts.get(key, 0) + 1
    uses: list[CollectiveUse] = []
    for (kind, size, name, phase), count in counts.items():
        group = graph.job.group(name)
        ranks = group.ranks if group else ()
        uses.append(CollectiveUse(kind, size, name, ranks, count, phase))
    return sorted(uses, key=lambda use: (use.group, use.type, -use.bytes, use.phase))


def rank_summary(graph: Graph, rank: int, represents: tuple[int, ...], trace: Path) -> RankSummary:
    """Return the record of one of several captured ranks; `trace` is the file of `graph`."""
    depths = graph.job.measurement.depths
    summary = summarise(graph)
    step_ns = depths.step_ns.at_depth if depths else summary.measured_step_ns
    return RankSummary(rank, represents, trace, step_ns, summary)
