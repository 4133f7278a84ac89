"""Times, memory and energy of a pipeline stage by block: the forward and backward of a micro-batch.

A stage is replayed once, with its micro-batches one after another. The time of a block lasts from
the end of the previous block's compute to the end of the block's compute. Communication that
overlaps the next block therefore counts where it delays something. A block's message can leave
before its end: a gradient does before the last reduce-scatters of FSDP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onerank.analysis.contention import CallShape, contention_of
from onerank.annotate.memory.non_allocator import non_allocator_bytes
from onerank.converters.expand.pipeline.schedules import BACKWARD, FORWARD, INPUT, WEIGHT
from onerank.converters.expand.pipeline.split_backward import split_backward
from onerank.converters.expand.pipeline.stages import (
    AFTER,
    AXIS,
    BEFORE,
    Stage,
    StageBlock,
    captured_micro_batch,
    split_into_blocks,
)
from onerank.ir import Graph, Kind, Measurement, Node, Phase, World
from onerank.ir.all_to_all import even_bytes
from onerank.ir.arrays import I64, Mask, union_duration_ns
from onerank.ir.contention import Contention
from onerank.ir.nodes import SYMMETRIC_BARRIER, SYMMETRIC_COPY
from onerank.ir.replay import ReplayTimes, schedule
from onerank.ir.steady_state import steady_state_step, with_steady_state_kernels
from onerank.plan.cluster import ClusterNetwork


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a block, or a sum of them. All grow linearly with a stage's layers.

    Attributes:
        elapsed_ns: time from the end of the block before.
        compute_ns: part of it in which the GPU computes.
        exposed_ns: part in which it communicates and computes nothing.
        energy_uj: energy of its kernels.
        flops: FLOPs of its kernels.
        send_lead_ns: how long before the block's end its message is sent; negative if after, 0
            without a message.
    """

    elapsed_ns: float = 0.0
    compute_ns: float = 0.0
    exposed_ns: float = 0.0
    energy_uj: float = 0.0
    flops: float = 0.0
    send_lead_ns: float = 0.0

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(
            self.elapsed_ns + other.elapsed_ns,
            self.compute_ns + other.compute_ns,
            self.exposed_ns + other.exposed_ns,
            self.energy_uj + other.energy_uj,
            self.flops + other.flops,
            self.send_lead_ns + other.send_lead_ns,
        )

    def __mul__(self, factor: float) -> "Figures":
        return Figures(
            self.elapsed_ns * factor,
            self.compute_ns * factor,
            self.exposed_ns * factor,
            self.energy_uj * factor,
            self.flops * factor,
            self.send_lead_ns * factor,
        )


NO_FIGURES = Figures()


@dataclass(frozen=True, slots=True)
class StageTimes:
    """A stage's step by block.

    Attributes:
        blocks: figures of each captured block.
        micro_batches: captured micro-batches.
        input_share: part of a backward's time that the gradient of the input needs.
        sent_bytes: bytes of an activation and of a gradient that the stage sends.
        start_bytes: memory in use when a step begins.
        activation_bytes: memory that a micro-batch keeps until its backward.
        temporary_bytes: rest of the peak.
        other_bytes: memory outside the allocator.
        compute_factors: interval of the compute time as factors.
        host_factors: interval of the host's time as factors.
        host_bound_share: part of the step in which the GPU waits for a launch.
        host_ns: time that the host works in the step.
    """

    blocks: Mapping[StageBlock, Figures]
    micro_batches: int
    input_share: float
    sent_bytes: tuple[int, int]
    start_bytes: float
    activation_bytes: float
    temporary_bytes: float
    other_bytes: int
    compute_factors: tuple[float, float]
    host_factors: tuple[float, float]
    host_bound_share: float
    host_ns: float = 0.0

    @property
    def elapsed_ns(self) -> float:
        """Time of the step, its blocks one after another."""
        return sum(figures.elapsed_ns for figures in self.blocks.values())

    def block(self, phase: str, micro_batch: int, count: int) -> Figures:
        """Return the figures of a forward or backward of one of `count` micro-batches.

        The phases "I" and "W" are the parts of a split backward.
        """
        captured = captured_micro_batch(micro_batch, count, self.micro_batches)
        figures = self.blocks[StageBlock(FORWARD if phase == FORWARD else BACKWARD, captured)]
        if phase == INPUT:
            return figures * self.input_share
        return figures * (1 - self.input_share) if phase == WEIGHT else figures


@dataclass(frozen=True, slots=True)
class TimedStage:
    """A stage on a network.

    Attributes:
        graph: the stage with its communication timed. Messages between stages take no time: the
            schedule adds it.
        sends: whether a node is a message to another stage, bool[n].
        sent_bytes: bytes of an activation and of a gradient that the stage sends, 0 for none.
        contention: shares of the GPU that its operations occupy; None if `contention_of` has none.
    """

    graph: Graph
    sends: Mask
    sent_bytes: tuple[int, int]
    contention: Contention | None


def stage_times(
    graph: Graph,
    network: ClusterNetwork,
    world: World,
    *,
    energy_uj: I64 | None = None,
    splits_backward: bool = False,
) -> StageTimes:
    """Return the times of a re-costed stage on a network.

    Args:
        graph: a stage's step, or the step of a whole model.
        network: times its communication.
        world: the ranks that its groups lie in; it may have other sizes than the captured world.
        energy_uj: energy of each node, int64[n]; None: not known.
        splits_backward: whether the schedule splits backwards.

    Raises:
        ExportError: the graph is not one step, or its backward cannot be split.
        GraphError: the graph has a cycle, or takes no time.
    """
    timed = with_network(graph, network, world)
    graph = timed.graph
    stage = split_into_blocks(graph)
    times, begin_ns, host_bound_share = _replayed(timed)
    nodes = graph.nodes
    blocks = _block_figures(timed, stage.blocks, times, begin_ns, energy_uj)
    details = graph.job.annotations[-1].details if graph.job.annotations else {}
    low, high = details.get("interval", (1, 1))
    total = int(nodes.duration_ns[graph.compute].sum())
    host = tuple(details.get("host_interval", (1.0, 1.0)))
    return StageTimes(
        blocks={StageBlock(BEFORE): NO_FIGURES, **blocks},
        micro_batches=stage.micro_batches,
        input_share=_input_share(graph, stage) if splits_backward else 1.0,
        sent_bytes=timed.sent_bytes,
        **memory_of(graph.job.measurement),
        other_bytes=non_allocator_bytes(graph),
        # (1, 1) stands for a re-costing without an interval.
        compute_factors=(low / total, high / total) if high > 1 else (1.0, 1.0),
        host_factors=(host[0], host[1]),
        host_bound_share=host_bound_share,
        host_ns=float(nodes.duration_ns[graph.mask(Kind.HOST_OP)].sum()),
    )


def _block_figures(
    timed: TimedStage,
    members: Mapping[StageBlock, list[int]],
    times: ReplayTimes,
    begin_ns: int,
    energy_uj: I64 | None,
) -> dict[StageBlock, Figures]:
    """Return the figures of each block of the step, which follow each other without a gap.

    A block ends with its last compute node; the time until then counts as its time.
    """
    graph = timed.graph
    nodes = graph.nodes
    device = graph.compute | graph.communication
    blocks: dict[StageBlock, Figures] = {}
    ends = {
        block: int(times.end_ns[_members(indices, graph.compute, device)].max(initial=begin_ns))
        for block, indices in members.items()
    }
    after_ns = int(times.end_ns[device].max(initial=begin_ns))
    # The step ends with its last operation, communication included.
    ends[StageBlock(AFTER)] = after_ns
    previous_ns = begin_ns
    # AFTER last, even where a backward ends at the same time.
    for block in sorted(ends, key=lambda block: (block.phase == AFTER, ends[block])):
        indices = np.array(members.get(block, []), dtype=np.int64)
        begin, end = previous_ns, max(previous_ns, ends[block])
        compute_ns = _within(times, graph.compute, begin, end)
        busy_ns = _within(times, device, begin, end)
        flops = nodes.flops[indices]
        sends = indices[timed.sends[indices]]
        sent_ns = int(times.start_ns[sends].max(initial=0)) if len(sends) else end
        blocks[block] = Figures(
            elapsed_ns=end - begin,
            compute_ns=compute_ns,
            exposed_ns=busy_ns - compute_ns,
            energy_uj=0.0 if energy_uj is None else float(energy_uj[indices].sum()),
            flops=float(flops[(flops > 0) & graph.compute[indices]].sum()),
            send_lead_ns=end - sent_ns,
        )
        previous_ns = end
    return blocks


def _input_share(graph: Graph, stage: Stage) -> float:
    """Return the share of the input gradients in the time of the last backward."""
    backward = stage.blocks[StageBlock(BACKWARD, stage.micro_batches - 1)]
    parts = split_backward(graph, backward)
    inputs_ns, weights_ns = (int(graph.nodes.duration_ns[part].sum()) for part in parts)
    return inputs_ns / max(1, inputs_ns + weights_ns)


def memory_of(measured: Measurement) -> dict[str, Any]:
    """Return the memory of a stage, by the names of fields of `StageTimes`."""
    activation = max(measured.activation_bytes, default=0)
    start = measured.start_memory_bytes
    return {
        "start_bytes": start,
        "activation_bytes": activation,
        "temporary_bytes": measured.peak_memory_bytes - start - activation,
    }


def with_network(
    graph: Graph, network: ClusterNetwork, world: World, *, receives_wait: bool = False
) -> TimedStage:
    """Return the stage with its communication timed by a network.

    Kernels take their time in steady state (`with_steady_state_kernels`), which also determines how
    long they compete with the communication.

    Args:
        graph: the re-costed stage.
        network: times its communication.
        world: the ranks that its groups lie in.
        receives_wait: whether receives from other stages occupy the GPU while they wait.
    """
    graph = with_steady_state_kernels(graph)
    communication = _StageCommunication(graph, network, world, receives_wait=receives_wait)
    for index in np.flatnonzero(graph.communication).tolist():
        communication.time(index)
    timed = graph.with_columns(duration_ns=communication.duration_ns)
    sent = communication.sent_bytes
    return TimedStage(
        timed,
        communication.sends,
        (sent[Phase.FORWARD], sent[Phase.BACKWARD]),
        contention_of(timed, communication.shapes, persistent=network.has_persistent_products),
    )


class _StageCommunication:
    """Times the messages and collectives of a stage, node by node.

    Args:
        graph: the stage.
        network: times its communication.
        world: the ranks that its groups lie in.
        receives_wait: as for `with_network`.

    Attributes:
        duration_ns: duration of each node, int64[n].
        sends: whether a node is a message to another stage, bool[n].
        sent_bytes: largest message to the next stage, in the forward, and to the previous one.
        shapes: node -> what its kernel occupies.
    """

    def __init__(
        self, graph: Graph, network: ClusterNetwork, world: World, *, receives_wait: bool
    ) -> None:
        self.duration_ns = graph.nodes.duration_ns.copy()
        self.sends = np.zeros(len(graph), dtype=np.bool_)
        self.sent_bytes = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
        self.shapes: dict[int, CallShape] = {}
        self._graph, self._network, self._world = graph, network, world
        self._receives_wait = receives_wait
        self._groups: dict[str, tuple[int, ...]] = {}
        # The layout may have fewer stages or replicas than the capture.
        point = graph.job.world.point(graph.job.rank)
        self._rank = world.at(
            {axis: min(at, world.sizes.get(axis, 1) - 1) for axis, at in point.items()}
        )

    def time(self, index: int) -> None:
        """Set the duration of a node."""
        node, job = self._graph.node(index), self._graph.job
        if node.kind not in (Kind.SEND, Kind.RECV):
            self._time_call(index, node, self._ranks_of(node.text("group")))
            return
        peer = node.value("comm_dst" if node.kind is Kind.SEND else "comm_src")
        ranks = (self._rank, self._rank + peer - job.rank)
        stages_ahead = job.world.point(peer).get(AXIS, 0) - job.world.point(job.rank).get(AXIS, 0)
        if stages_ahead:
            self._add_message(index, node, ranks, stages_ahead)
        else:
            self._time_call(index, node, ranks)

    def _add_message(
        self, index: int, node: Node, ranks: tuple[int, ...], stages_ahead: int
    ) -> None:
        """Note a message between stages, whose time the schedule adds."""
        self.duration_ns[index] = 0
        size = _bytes_of(node)
        if node.kind is Kind.SEND:
            phase = Phase.FORWARD if stages_ahead > 0 else Phase.BACKWARD
            self.sent_bytes[phase] = max(self.sent_bytes[phase], size)
            self.sends[index] = True
        elif self._receives_wait and (shape := self._network.call_shape("recv", size, ranks)):
            self.shapes[index] = shape

    def _time_call(self, index: int, node: Node, ranks: tuple[int, ...]) -> None:
        """Set the duration of a collective, or of a message within the stage."""
        op, network = node.text("op"), self._network
        if op == SYMMETRIC_COPY:
            self.duration_ns[index] = round(network.copy_ns(_bytes_of(node), ranks))
            return
        if op == SYMMETRIC_BARRIER:
            self.duration_ns[index] = round(network.symmetric_barrier_ns(ranks))
            return
        call = node.collective.name.lower(), max(0, even_bytes(node, len(ranks))), ranks
        self.duration_ns[index] = round(network.time_ns(*call))
        if shape := network.call_shape(*call):
            self.shapes[index] = shape

    def _ranks_of(self, group: str) -> tuple[int, ...]:
        if group not in self._groups:
            self._groups[group] = _ranks_of(self._graph, group, self._world, self._rank)
        return self._groups[group]


def _bytes_of(node: Node) -> int:
    return max(0, node.value("comm_bytes"))


def _ranks_of(graph: Graph, name: str, world: World, rank: int) -> tuple[int, ...]:
    """Return the ranks of a captured group in `world`."""
    group = graph.job.group(name)
    if group is None or group.axis == "world":
        return tuple(range(world.size))
    if not group.axis:
        return group.ranks
    axes = [axis for axis in group.axis.split("+") if axis in ("ep", "edp") or axis in world.sizes]
    return world.line("+".join(axes), rank) if axes else (rank,)


def _replayed(timed: TimedStage) -> tuple[ReplayTimes, int, float]:
    """Return the times of the step, its begin in ns, and the share of waiting for launches."""
    graph, contention = timed.graph, timed.contention
    step = steady_state_step(graph, contention=contention)
    device = graph.compute | graph.communication
    if step is None:
        times = schedule(graph, contention)
        return times, int(times.start_ns.min()), 0.0
    end_ns = int(step.times.end_ns[device].max(initial=0))
    begin_ns = end_ns - step.step_ns
    busy_ns = _within(step.times, device, begin_ns, end_ns)
    return step.times, begin_ns, max(0.0, 1 - busy_ns / max(1, step.step_ns))


def _members(indices: list[int], compute: np.ndarray, device: np.ndarray) -> I64:
    """Return the compute nodes among `indices`; without any, those that communicate."""
    members = np.array(indices, dtype=np.int64)
    computing = members[compute[members]]
    return computing if len(computing) else members[device[members]]


def _within(times: ReplayTimes, chosen: np.ndarray, begin: int, end: int) -> int:
    """Return the time between two moments in which at least one of the chosen nodes runs."""
    starts = np.clip(times.start_ns[chosen], begin, end)
    return union_duration_ns(starts, np.clip(times.end_ns[chosen], begin, end))


def at_depth(
    shallow: StageTimes, deep: StageTimes, depths: tuple[int, int], layers: int
) -> StageTimes:
    """Return the stage with another number of layers, on the line through two captures."""
    weight = (layers - depths[0]) / (depths[1] - depths[0])

    def line(first: float, second: float) -> float:
        return first + weight * (second - first)

    blocks = {
        block: shallow.blocks[block] * (1 - weight) + deep.blocks[block] * weight
        for block in deep.blocks
    }
    return replace(
        deep,
        blocks=blocks,
        start_bytes=line(shallow.start_bytes, deep.start_bytes),
        activation_bytes=line(shallow.activation_bytes, deep.activation_bytes),
        temporary_bytes=line(shallow.temporary_bytes, deep.temporary_bytes),
        host_ns=line(shallow.host_ns, deep.host_ns),
    )
