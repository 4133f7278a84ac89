"""The outcome of layouts: their captures re-costed, laid out by the schedule, and summed up."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import onerank
from onerank.annotate import load_gpu
from onerank.annotate.energy import StepDurations, report_energy
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.memory.memory_report import fragmentation_of
from onerank.annotate.models.power import base_share, power_model
from onerank.annotate.passes.nvlink_power import lacking_figures
from onerank.converters.expand.layers import DepthCaptures
from onerank.converters.expand.pipeline import PipelineSchedule
from onerank.converters.expand.pipeline.schedules import FORWARD
from onerank.converters.expand.pipeline.stages import StageBlock
from onerank.display import size
from onerank.ir import Graph, Measurement, World
from onerank.ir.arrays import I64
from onerank.ir.errors import DepthError, OneRankError
from onerank.ir.notes import Note
from onerank.plan.captures import (
    StageCapture,
    StageSource,
    described,
    group_key,
    has_layers,
    parse_step,
    stage_sources,
)
from onerank.plan.cluster import ClusterNetwork, PlannedJob, network_of
from onerank.plan.layout_commands import commands_of
from onerank.plan.layouts import Dropped, Layout, Outcome, PredictedRange, Underived
from onerank.plan.micro_batches import MicroBatchError, with_micro_batch
from onerank.plan.pipeline_step import PipelineStep, step_of
from onerank.plan.run_captures import CaptureResult, recorded_step, trace_of
from onerank.plan.shard_memory import ShardError
from onerank.plan.shards import with_shards
from onerank.plan.stage_times import Figures, StageTimes, at_depth, memory_of, stage_times
from onerank.plan.tasks import Task, TaskResult, content_key

_HOST_BOUND = 0.05
"""Share of a step that the GPU waits for its host above which a plan says so."""

_LONGER = 6
"""Layers of a composed stage: a line through it and the deepest capture gives the times of deeper
ones. Between 2 and 4 layers communication overlaps differently: a line through these was 6% long
for a first stage of 20 layers (benchmarks/results/2026-11-26-plan-host-bound.txt)."""

_HOST_NEAR_STEP = 0.95
"""Host's time over the step on the line, above which a deep stage is replayed whole. By what a
layer adds, the line holds up to a ratio of 1.02 and is 2% short at 1.05
(benchmarks/results/2026-11-26-plan-host-bound.txt); the margin is a choice."""

_SIMULATED_PEAK_ERROR = 0.01
"""Largest error of peak memory without a device against captures on an H100 (0.85%), rounded up."""


def plan_evaluations(
    job: PlannedJob,
    layouts: Sequence[Layout],
    layers: int,
    captures: Sequence[Task],
    *,
    exact: bool = False,
) -> list[Task]:
    """Return the tasks that evaluate layouts; each has the layouts that share their captures.

    Args:
        job: the job.
        layouts: the layouts.
        layers: layers of the model.
        captures: their captures, as `plan_captures` returns them.
        exact: as for `stage_sources`.
    """
    # The last argument of a capture is its group.
    key_of = {task.arguments[-1]: task.key for task in captures}
    batches: dict[tuple[Any, ...], list[Layout]] = {}
    for layout in layouts:
        # Layouts that differ only in pp, dp or schedule share captures, and one task re-costs each
        # of these once.
        shared = (layout.tp, layout.sp, layout.cp, layout.ep, layout.micro_batch, layout.recompute,
                  layout.seq, layout.sharding, layout.variant)  # fmt: skip
        batches.setdefault(shared, []).append(layout)
    tasks: list[Task] = []
    for batch in batches.values():
        keys: dict[str, None] = {}
        for layout in batch:
            if has_layers(layout, layers):
                for source in stage_sources(job, layout, layers, exact=exact):
                    keys |= dict.fromkeys(key_of[group_key(job, c)] for c in source.captures)
        tasks.append(
            Task(
                content_key(job, batch, layers, [*keys], described(job.cluster.host)),
                f"evaluate {len(batch)} layouts with tp {batch[0].tp}",
                f"{__name__}:evaluate",
                (job, tuple(batch), layers, exact),
                needs=tuple(keys),
                amount=len(batch),
            )
        )
    return tasks


class Evaluation(TaskResult):
    """Evaluated layouts. It lasts if the captures do.

    Attributes:
        outcomes: of the layouts that have figures.
        dropped: those that a capture refused, or that do not fit the model.
        underived: those that need captures with their own replicas and micro-batches.
    """

    outcomes: list[Outcome]
    dropped: list[Dropped]
    underived: list[Underived]


def evaluate(
    captures: Mapping[str, CaptureResult],
    job: PlannedJob,
    layouts: Sequence[Layout],
    layers: int,
    exact: bool = False,
) -> Evaluation:
    """Return the outcomes of layouts.

    Args:
        captures: results of their captures.
        job: the job.
        layouts: layouts that share captures.
        layers: layers of the model.
        exact: as for `stage_sources`.
    """
    by_group = {result.group: result for result in captures.values()}
    evaluator = _Evaluator(job, layers, by_group, exact)
    outcomes: list[Outcome] = []
    dropped: list[Dropped] = []
    underived: list[Underived] = []
    for layout in layouts:
        try:
            outcomes.append(evaluator.outcome(layout))
        except (ShardError, MicroBatchError) as error:
            # `make_plan` captures these layouts with their own replicas and micro-batches.
            underived.append(Underived(layout, str(error)))
        except OneRankError as error:
            dropped.append(Dropped(str(layout), error.code, str(error)))
    # A layout that a capture of this run refused may be evaluated in a later one.
    lasts = all(result.lasts for result in captures.values())
    return Evaluation(outcomes=outcomes, dropped=dropped, underived=underived, lasts=lasts)


@dataclass(frozen=True, slots=True)
class _Costed:
    """A re-costed capture.

    Attributes:
        captured: as captured.
        graph: with durations and a host.
        energy_uj: energy of each node, int64[n]; None if the GPU's power is not known.
        energy_factors: interval of the energy as factors.
    """

    captured: Graph
    graph: Graph
    energy_uj: I64 | None
    energy_factors: tuple[float, float]


@dataclass(frozen=True, slots=True)
class _JobRanks:
    """What decides the times of a captured stage: the sizes of the job's axes, and the schedule.

    Attributes:
        tp: as in `Layout`; so are `cp`, `dp`, `pp` and `ep`.
        splits_backward: whether the schedule splits backwards.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    splits_backward: bool

    @classmethod
    def of(cls, layout: Layout) -> "_JobRanks":
        """Return the ranks of a layout."""
        splits = layout.schedule == "zbv" and layout.pp > 1
        return cls(layout.tp, layout.cp, layout.dp, layout.pp, layout.ep, splits)

    @property
    def world(self) -> World:
        """The ranks as points of a grid."""
        return World.of(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep)


_Captures = tuple[StageCapture, ...]


@dataclass(slots=True)
class _Evaluator:
    """Evaluates layouts, and keeps what several of them need."""

    job: PlannedJob
    layers: int
    captures: Mapping[str, CaptureResult]
    exact: bool
    gpu: Gpu = field(init=False)
    network: ClusterNetwork = field(init=False)
    graphs: dict[StageCapture, Graph] = field(default_factory=dict[StageCapture, Graph])
    costed: dict[tuple[StageCapture, int], _Costed] = field(
        default_factory=dict[tuple[StageCapture, int], _Costed]
    )
    times: dict[tuple[StageSource, _JobRanks], StageTimes] = field(
        default_factory=dict[tuple[StageSource, _JobRanks], StageTimes]
    )
    capture_times: dict[tuple[StageCapture, _JobRanks], StageTimes] = field(
        default_factory=dict[tuple[StageCapture, _JobRanks], StageTimes]
    )
    longer_times: dict[tuple[_Captures, _JobRanks], StageTimes | None] = field(
        default_factory=dict[tuple[_Captures, _JobRanks], "StageTimes | None"]
    )
    memory: dict[tuple[StageSource, int], Measurement | None] = field(
        default_factory=dict[tuple[StageSource, int], Measurement | None]
    )
    fragmentation: dict[StageCapture, float] = field(default_factory=dict[StageCapture, float])
    longer: dict[tuple[_Captures, int], tuple[Graph, I64 | None] | None] = field(
        default_factory=dict[tuple[_Captures, int], "tuple[Graph, I64 | None] | None"]
    )
    depths: dict[tuple[_Captures, int], DepthCaptures] = field(
        default_factory=dict[tuple[_Captures, int], DepthCaptures]
    )

    def __post_init__(self) -> None:
        self.gpu = load_gpu(self.job.cluster.gpu)
        self.network = network_of(self.job.cluster, self.gpu)

    def outcome(self, layout: Layout) -> Outcome:
        """Return the outcome of a layout.

        Raises:
            OneRankError: a capture was refused, or the layout does not fit the model.
        """
        sources = stage_sources(self.job, layout, self.layers, exact=self.exact)
        stages = [self._stage(source, layout) for source in sources]
        schedule = PipelineSchedule.parse(layout.schedule if layout.pp > 1 else "1f1b")
        step = step_of(stages, layout.world, self.network, schedule, layout.micro_batches)
        return self._summary(layout, sources, stages, step)

    def _stage(self, source: StageSource, layout: Layout) -> StageTimes:
        """Return the times and the memory of a stage with its layers."""
        ranks = _JobRanks.of(layout)
        key = source, ranks
        if key not in self.times:
            if len(source.captures) == 1:
                self.times[key] = self._of_capture(source.captures[0], ranks)
            else:
                self.times[key] = self._of_depths(source, ranks)
        return self.times[key]

    def _of_capture(self, capture: StageCapture, ranks: _JobRanks) -> StageTimes:
        """Return the times of a captured stage as it is."""
        key = capture, ranks
        if key not in self.capture_times:
            costed = self._costed(capture, ranks.dp)
            self.capture_times[key] = self._times_of(costed.graph, costed.energy_uj, ranks)
        return self.capture_times[key]

    def _of_depths(self, source: StageSource, ranks: _JobRanks) -> StageTimes:
        """Return the times of a stage with more or fewer layers than its two captures."""
        longer = self._of_longer(source, ranks) if source.layers > source.depths[-1] else None
        deep = self._of_capture(source.captures[1], ranks)
        if longer is None:
            shallow = self._of_capture(source.captures[0], ranks)
            less, more = source.depths
            stage = at_depth(shallow, deep, (less, more), source.layers)
        else:
            stage = at_depth(deep, longer, (source.depths[-1], _LONGER), source.layers)
        return self._deepened(source, stage, ranks)

    def _of_longer(self, source: StageSource, ranks: _JobRanks) -> StageTimes | None:
        """Return the times of a stage composed to `_LONGER` layers; None if it has none."""
        key = source.captures, ranks
        if key not in self.longer_times:
            longer = self._longer(source, ranks.dp)
            times = None if longer is None else self._times_of(*longer, ranks)
            self.longer_times[key] = times
        return self.longer_times[key]

    def _times_of(self, graph: Graph, energy_uj: I64 | None, ranks: _JobRanks) -> StageTimes:
        """Return the times of a re-costed graph with the energy of its nodes."""
        return stage_times(
            graph,
            self.network,
            ranks.world,
            energy_uj=energy_uj,
            splits_backward=ranks.splits_backward,
        )

    def _deepened(self, source: StageSource, stage: StageTimes, ranks: _JobRanks) -> StageTimes:
        """Return a stage with its memory; its times, too, if its host is the limit.

        Args:
            source: where its figures come from.
            stage: its times on a line through two depths.
            ranks: the ranks of the job.
        """
        dp = ranks.dp
        # A step is no shorter than its host's time. In a shallow stage the GPU may never wait,
        # because the host begins ahead; a deep stage whose host is the slower one uses that up.
        if stage.host_ns > _HOST_NEAR_STEP * stage.elapsed_ns:
            deep = self._composed(source, dp, source.layers)
            if deep is not None:
                graph = self._recosted(deep)
                return self._times_of(graph, _energy(graph, self.gpu)[0], ranks)
        if (source, dp) not in self.memory:
            # The peak lies on no line: at another depth another moment of the step is the highest.
            # With a line the peak of a Llama of 16 layers was 8% low.
            self.memory[source, dp] = self._composed_memory(source, dp)
        composed = self.memory[source, dp]
        return stage if composed is None else replace(stage, **memory_of(composed))

    def _longer(self, source: StageSource, dp: int) -> tuple[Graph, I64 | None] | None:
        """Return a re-costed stage with `_LONGER` layers and its energy; None if it has none."""
        key = source.captures, dp
        if key not in self.longer:
            composed = self._composed(source, dp, _LONGER)
            graph = None if composed is None else self._recosted(composed)
            self.longer[key] = None if graph is None else (graph, _energy(graph, self.gpu)[0])
        return self.longer[key]

    def _composed(self, source: StageSource, dp: int, layers: int) -> Graph | None:
        """Return a stage composed to some layers; None if it cannot be composed."""
        captures = self._depth_captures(source, dp)
        with contextlib.suppress(DepthError):
            return None if captures is None else captures.graph(layers)
        return None

    def _composed_memory(self, source: StageSource, dp: int) -> Measurement | None:
        """Return the measurement of a composed stage; None if it cannot be composed."""
        captures = self._depth_captures(source, dp)
        with contextlib.suppress(DepthError):
            return None if captures is None else captures.measurement(source.layers)
        return None

    def _depth_captures(self, source: StageSource, dp: int) -> DepthCaptures | None:
        first = source.captures[0]
        if first.dp > 1 and first.sharding.startswith("zero"):
            # Calls of ZeRO 1 and 2 span layers, so their steps cannot be composed.
            return None
        key = source.captures, dp
        if key not in self.depths:
            graphs = [self._costed(capture, dp).captured for capture in source.captures]
            self.depths[key] = DepthCaptures(dict(zip(source.depths, graphs, strict=True)))
        return self.depths[key]

    def _recosted(self, captured: Graph) -> Graph:
        # In the job the links are active; on one GPU there are none.
        active = bool(captured.communication.any()) and not lacking_figures(self.gpu)
        cluster = self.job.cluster
        return onerank.recost(captured, cluster.gpu, nvlink_active=active, host=cluster.host)

    def _captured(self, capture: StageCapture) -> Graph:
        if capture not in self.graphs:
            result = self.captures[group_key(self.job, capture)]
            recorded = recorded_step(result, capture.step)
            graph = _read(trace_of(result, recorded))
            if recorded != capture.step:
                prime, size = (parse_step(step)[1] for step in (recorded, capture.step))
                count = parse_step(recorded)[0]
                same = (step for step in result.traces if parse_step(step)[0] == count)
                smallest = min(same, key=lambda step: parse_step(step)[1])
                of_smallest = _read(trace_of(result, smallest))
                graph = with_micro_batch(graph, of_smallest, prime, size)
            self.graphs[capture] = graph
        return self.graphs[capture]

    def _costed(self, capture: StageCapture, dp: int) -> _Costed:
        """Return a re-costed capture, of a job with `dp` replicas."""
        # DDP's buckets and all-reduces have the same size for every number of replicas.
        dp = capture.dp if capture.sharding == "ddp" else dp
        if (capture, dp) not in self.costed:
            captured = with_shards(self._captured(capture), dp)
            graph = self._recosted(captured)
            energy_uj, factors = _energy(graph, self.gpu)
            self.costed[capture, dp] = _Costed(captured, graph, energy_uj, factors)
        return self.costed[capture, dp]

    def _fragmentation(self, capture: StageCapture) -> float:
        """Return reserved over allocated memory at the peak of a capture."""
        # The simulated allocator takes as long as the rest of the evaluation, and the ratio only
        # raises the upper end of an interval: other numbers of replicas have that of the capture.
        if capture not in self.fragmentation:
            # Captures that differ in their step run one after another in a process.
            graph, own_process = self._captured(capture), not capture.step
            self.fragmentation[capture] = fragmentation_of(graph, own_process=own_process)
        return self.fragmentation[capture]

    def _summary(
        self,
        layout: Layout,
        sources: Sequence[StageSource],
        stages: Sequence[StageTimes],
        step: PipelineStep,
    ) -> Outcome:
        slowest, fullest = step.slowest, step.fullest
        costed = [self._costed(source.captures[-1], layout.dp) for source in sources]
        step_ns = _step_range(slowest.end_ns, slowest.busy, stages)
        peak = fullest.peak_bytes + fullest.other_bytes
        fragmentation = max(self._fragmentation(source.captures[-1]) for source in sources)
        peak_bytes = PredictedRange(
            peak,
            peak * (1 - _SIMULATED_PEAK_ERROR),
            fullest.peak_bytes * fragmentation * (1 + _SIMULATED_PEAK_ERROR) + fullest.other_bytes,
        )
        capacity = self.job.cluster.memory_bytes
        tokens = layout.tokens_per_step
        # A backward has twice the FLOPs of its forward; a recomputed forward is no work of the
        # model.
        forward = sum(stage.blocks[StageBlock(FORWARD)].flops for stage in stages)
        model_flops = 3 * forward * layout.micro_batches * layout.gpus / layout.pp
        peak_flops = self.gpu.peak_tensor_flops_per_s("bfloat16")
        energy_j = self._energy_j(layout, step, costed)
        price = self.job.cluster.price_per_gpu_hour
        hours = step_ns * (1 / 3.6e12)
        return Outcome(
            layout=layout,
            gpus=layout.gpus,
            step_ns=step_ns,
            tokens_per_s_per_gpu=step_ns.per(tokens / layout.gpus * 1e9),
            mfu=step_ns.per(model_flops / layout.gpus / peak_flops * 1e9) if peak_flops else None,
            peak_bytes=peak_bytes,
            fits=peak <= capacity,
            over_bytes=max(0, round(peak - capacity)),
            energy_j=energy_j,
            money=None if price is None else hours * (price * layout.gpus),
            compute_ns=slowest.busy.compute_ns,
            exposed_communication_ns=slowest.busy.exposed_ns,
            bubble_ns=max(0.0, slowest.end_ns - slowest.busy.elapsed_ns),
            commands=commands_of(
                self.job, layout, self.layers, links_active=not lacking_figures(self.gpu)
            ),
            notes=_notes(self.gpu, stages, layout, peak_bytes, capacity),
        )

    def _energy_j(
        self, layout: Layout, step: PipelineStep, costed: Sequence[_Costed]
    ) -> PredictedRange | None:
        """Return the energy of all GPUs: kernels, communication at base power, the rest idle.

        None if the GPU's description lacks its power.
        """
        tdp_w, idle_w = self.gpu.tdp_w, self.gpu.idle_w
        if tdp_w is None or idle_w is None:
            return None
        base_w = base_share(self.gpu, power_model()) * tdp_w
        total_ns = step.slowest.end_ns
        joules = 0.0
        for rank in step.ranks:
            busy_ns = rank.busy.compute_ns + rank.busy.exposed_ns
            idle_ns = max(0.0, total_ns - busy_ns)
            joules += rank.busy.energy_uj * 1e-6
            joules += (rank.busy.exposed_ns * base_w + idle_ns * idle_w) * 1e-9
        joules *= layout.gpus / layout.pp
        low = min(each.energy_factors[0] for each in costed)
        high = max(each.energy_factors[1] for each in costed)
        return PredictedRange(joules, joules * low, joules * high)


def _read(trace: bytes) -> Graph:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="onerank-") as directory:
        path = Path(directory) / "trace.et"
        path.write_bytes(trace)
        return onerank.read(path)


def _energy(graph: Graph, gpu: Gpu) -> tuple[I64 | None, tuple[float, float]]:
    """Return the energy of each node in uJ and the interval of their sum as factors."""
    if gpu.tdp_w is None or gpu.idle_w is None:
        return None, (1.0, 1.0)
    busy_ns = int(graph.nodes.duration_ns[graph.compute].sum())
    report = report_energy(graph, gpu, StepDurations(busy_ns, busy_ns, "sum of kernels"))
    place = {int(node): index for index, node in enumerate(graph.nodes.id.tolist())}
    energy_uj = np.zeros(len(graph), dtype=np.int64)
    rows = np.array([place[node] for node in report.node_ids], dtype=np.int64)
    energy_uj[rows] = report.node_uj
    total = max(1, report.step_uj)
    return energy_uj, (report.step_low_uj / total, report.step_high_uj / total)


def _step_range(step_ns: float, busy: Figures, stages: Sequence[StageTimes]) -> PredictedRange:
    """Return the step with its interval.

    Compute, and the time in which a rank waits for the compute of others, scale with the interval
    of compute. Time in which the GPU waits for its host scales with the interval of the host.
    """
    host_ns = step_ns * max(stage.host_bound_share for stage in stages)
    exposed = busy.exposed_ns / max(1.0, busy.elapsed_ns)
    compute_ns = max(0.0, step_ns - host_ns) * (1 - exposed)
    ends: list[float] = []
    for side in (0, 1):
        # The least certain stage decides.
        factor = (min, max)[side](stage.compute_factors[side] for stage in stages)
        host = (min, max)[side](stage.host_factors[side] for stage in stages)
        by_compute, by_host = (factor - 1) * compute_ns, (host - 1) * host_ns
        ends.append(step_ns + (-1, 1)[side] * float(np.hypot(by_compute, by_host)))
    return PredictedRange(step_ns, max(ends[0], 0.0), ends[1])


def _notes(
    gpu: Gpu,
    stages: Sequence[StageTimes],
    layout: Layout,
    peak_bytes: PredictedRange,
    capacity: float,
) -> tuple[Note, ...]:
    """Return the notes of a layout whose GPUs have `capacity` bytes."""
    notes: list[Note] = []
    if peak_bytes.value <= capacity < peak_bytes.high:
        notes.append(
            Note(
                f"may not fit: with fragmentation up to {size(peak_bytes.high)} of "
                f"{size(capacity)}",
                code="plan-may-not-fit",
            )
        )
    if lacking := lacking_figures(gpu):
        notes.append(
            Note(
                f"the description of {gpu.name} lacks {', '.join(lacking)}: active links slow no "
                "kernel",
                code="plan-link-power-unknown",
            )
        )
    if stages[0].micro_batches == 1 and layout.micro_batches > 1:
        notes.append(
            Note(
                "the script captures one micro-batch per step: with several, each would "
                "synchronise gradients; give it a {micro_batches} argument",
                code="plan-one-micro-batch",
            )
        )
    share = max(stage.host_bound_share for stage in stages)
    if share > _HOST_BOUND:
        notes.append(
            Note(f"the GPU waits for its host in {share:.0%} of the step", code="plan-host-bound")
        )
    return tuple(notes)
