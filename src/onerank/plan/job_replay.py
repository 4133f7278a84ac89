"""Replay the captured ranks of a job together, on a cluster.

A schedule orders the blocks of a sliced model's stages. All other ranks are replayed in the order
of their traces: `torch.distributed.pipelining`, Megatron-LM and hand-written loops run their own
schedule, and Inductor orders the graph of each rank of a ring by the sizes of its tensors. A rank
receives a message a transfer time after its sender sends it, and a collective begins when the last
of its ranks reaches it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from onerank.annotate.memory.non_allocator import non_allocator_bytes
from onerank.converters.expand.pipeline import AXIS, PipelineSchedule
from onerank.converters.expand.pipeline.stages import group_stages
from onerank.display import Displayed
from onerank.ir import Graph, Kind, World
from onerank.ir.arrays import I64, Mask, union_duration_ns
from onerank.ir.errors import ExportError, GraphError, division
from onerank.ir.replay import ReplayedRank
from onerank.ir.steady_state import replay_without_profiler
from onerank.plan.cluster import ClusterNetwork
from onerank.plan.joint_replay import JointRanks, JointTimes, find_rendezvous, replay_together
from onerank.plan.pipeline_step import step_of
from onerank.plan.stage_times import StageTimes, stage_times, with_network


class JobReplay(Displayed, msgspec.Struct, frozen=True):
    """A replayed step of a job; times in ns.

    Attributes:
        step_ns: the step.
        compute_ns: time in which the slowest rank computes.
        exposed_communication_ns: time in which it communicates and computes nothing.
        bubble_ns: time in which it waits for other ranks.
        idle_ns: time in which it does neither, as when its GPU waits for the host.
        peak_bytes: memory of the fullest rank, that outside the allocator included.
        ranks: ranks of the job.
    """

    step_ns: int
    compute_ns: int
    exposed_communication_ns: int
    bubble_ns: int
    idle_ns: int
    peak_bytes: int
    ranks: int


def replay_job(
    graphs: Sequence[Graph],
    network: ClusterNetwork,
    schedule: PipelineSchedule,
    micro_batches: int | None,
) -> JobReplay:
    """Return the step of a job from the re-costed graphs of its stages.

    Args:
        graphs: one per class of equivalent ranks. Several ranks without a pipeline wait for each
            other in the collectives of groups that they share; so do those of a script that runs
            its own pipeline, if a stage has several. Ranks of inference, which has no backward,
            keep the order of their traces.
        network: times the communication.
        schedule: order of forwards and backwards. Ranks whose script runs its own pipeline keep
            the order of their trace instead.
        micro_batches: micro-batches of the step, which repeat those of the capture; None: as
            captured.

    Raises:
        ExportError: the graphs are not the stages of one pipeline, or do not fit the schedule; a
            rank has two graphs; or `micro_batches` is given for ranks that keep their order.
        GraphError: a graph has a cycle, or its compute nodes take no time.
    """
    for graph in graphs:
        # The network would time communication alone.
        if graph.compute.any() and not graph.nodes.duration_ns[graph.compute].any():
            raise GraphError(
                f"no compute node of rank {graph.job.rank} takes time\n"
                "  annotate the trace for a GPU first: annotate --target H100 ...",
                code="replay-no-durations",
            )
    job = graphs[0].job
    stages = job.world.sizes.get(AXIS, 1)
    has_schedule = job.pipeline is not None if stages > 1 else len(graphs) == 1
    if has_schedule and job.inference is None:
        return _scheduled_step(graphs, network, schedule, micro_batches)
    if micro_batches is not None:
        raise ExportError(
            f"--micro-batches {micro_batches} needs a schedule, but these ranks keep the order of "
            "their traces, as do ranks of inference, ranks of a script that runs its own pipeline, "
            "and several ranks without a pipeline\n"
            "  leave out --micro-batches, or capture with another number of them",
            code="pipeline-own-micro-batches",
        )
    return _joint_step(_pipeline(graphs) if stages > 1 else _separate_ranks(graphs), network)


def _scheduled_step(
    graphs: Sequence[Graph],
    network: ClusterNetwork,
    schedule: PipelineSchedule,
    micro_batches: int | None,
) -> JobReplay:
    """Return the step of stages that a schedule lays out; arguments as for `replay_job`.

    Raises:
        ExportError: the graphs are not the stages of one pipeline, or do not fit the schedule.
    """
    captured = graphs[0].job.world
    stages = captured.sizes.get(AXIS, 1)
    if stages % schedule.chunks:
        raise ExportError(
            f"--schedule {schedule} puts {schedule.chunks} stages on each rank, which does not "
            f"divide the {stages} captured stages ({division(stages, schedule.chunks)})",
            code="pipeline-indivisible-stages",
        )
    if stages == 1:
        of_stages = [graphs[0]]
    else:
        of_stages = [stage.graph for stage in group_stages(graphs)[0].stages]
    # Each captured stage is a rank of the capture; some schedules put several on one rank.
    ranks = stages // schedule.chunks
    sizes = {axis: ranks if axis == AXIS else size for axis, size in captured.sizes.items()}
    world = World({axis: size for axis, size in sizes.items() if size > 1}, captured.ep)
    splits = schedule.kind == "zbv"
    by_graph: dict[int, StageTimes] = {}
    for graph in of_stages:
        # A graph may stand for several stages, and is replayed once.
        if id(graph) not in by_graph:
            by_graph[id(graph)] = stage_times(graph, network, world, splits_backward=splits)
    stages_of_rank = [by_graph[id(graph)] for graph in of_stages]
    count = micro_batches or stages_of_rank[0].micro_batches
    step = step_of(stages_of_rank, world, network, schedule, count)
    last, fullest = step.slowest, step.fullest
    busy = last.busy
    return JobReplay(
        step_ns=round(last.end_ns),
        compute_ns=round(busy.compute_ns),
        exposed_communication_ns=round(busy.exposed_ns),
        bubble_ns=round(max(0.0, last.end_ns - busy.elapsed_ns)),
        idle_ns=round(max(0.0, busy.elapsed_ns - busy.compute_ns - busy.exposed_ns)),
        peak_bytes=round(fullest.peak_bytes + fullest.other_bytes),
        ranks=world.size,
    )


# Ranks in the order of their traces ---------------------------------------------------------------


def _pipeline(graphs: Sequence[Graph]) -> JointRanks:
    """Return the ranks of a job with a pipeline.

    The only rank of a stage represents all ranks of it. If a stage has several, each rank
    represents itself.

    Raises:
        ExportError: a stage has no trace, a rank has two, or a rank that represents itself
            exchanges messages with a rank without a trace.
    """
    world = graphs[0].job.world
    by_stage: dict[int, list[Graph]] = defaultdict(list)
    for graph in graphs:
        by_stage[world.point(graph.job.rank)[AXIS]].append(graph)
    shared = next((stage for stage, found in by_stage.items() if len(found) > 1), None)
    if shared is not None:
        job = _separate_ranks(graphs)
        _check_peers(job, shared)
        return job
    missing = [stage for stage in range(world.sizes[AXIS]) if stage not in by_stage]
    if missing:
        first = graphs[0].job.rank
        ranks = [world.at({**world.point(first), AXIS: stage}) for stage in missing]
        raise ExportError(
            f"stages {missing} of the pipeline's {world.sizes[AXIS]} have no trace, and its script "
            f"runs its own schedule\n  capture one rank of each stage: the ranks {ranks} too",
            code="pipeline-missing-stage",
        )
    places = {rank: world.point(rank)[AXIS] for rank in range(world.size)}
    return JointRanks([by_stage[stage][0] for stage in sorted(by_stage)], places)


def _check_peers(job: JointRanks, stage: int) -> None:
    """Check that ranks of pipelines, several of which run `stage`, have all their peers.

    The messages decide, not the axes of the world: picotron's stages are adjacent ranks.
    """
    world, given = job.graphs[0].job.world, {*job.places}
    # Peer without a trace -> a rank that exchanges messages with it.
    absent = {
        peer: graph.job.rank
        for graph in job.graphs
        for peer in _message_peers(graph)
        if peer not in given
    }
    if not absent:
        return
    # Messages name only the next stage. Along the axis of the world all stages are known.
    lines = {world.line(AXIS, rank) for rank in given}
    incomplete = {rank for line in lines if not given.issuperset(line) for rank in line}
    along_axis = all(peer in world.line(AXIS, rank) for peer, rank in absent.items())
    added = sorted(incomplete - given if along_axis else absent)
    removed = sorted(incomplete & given)
    remedy = (
        f"remove those of the ranks {removed}"
        if along_axis and len(removed) < len(given)
        else "keep one rank of each stage"
    )
    peer = min(absent)
    on_stage = sorted(other for other in given if world.point(other)[AXIS] == stage)
    raise ExportError(
        f"the ranks {on_stage} are all on stage {stage} of a pipeline whose script runs its own "
        f"schedule, so each represents itself; but rank {peer}, with which "
        f"rank {absent[peer]} exchanges messages, has no trace\n"
        f"  add the traces of the ranks {added}, or {remedy}",
        code="pipeline-duplicate-rank",
    )


def _message_peers(graph: Graph) -> set[int]:
    """Return the ranks to which a rank sends, or from which it receives."""
    nodes = graph.nodes
    sent = nodes.comm_dst[nodes.kind == Kind.SEND]
    received = nodes.comm_src[nodes.kind == Kind.RECV]
    return {rank for rank in np.concatenate([sent, received]).tolist() if rank >= 0}


def _separate_ranks(graphs: Sequence[Graph]) -> JointRanks:
    """Return ranks each of which represents itself."""
    places: dict[int, int] = {}
    for place, graph in enumerate(graphs):
        if graph.job.rank in places:
            raise ExportError(
                f"rank {graph.job.rank} has two traces\n  give one trace of each rank",
                code="replay-duplicate-rank",
            )
        places[graph.job.rank] = place
    return JointRanks(graphs, places)


@dataclass(frozen=True, slots=True)
class _PreparedRank:
    """A rank that is ready for scheduling.

    Attributes:
        graph: its step, timed.
        replayed: that step, ready for scheduling.
        floor: earliest start of each node in ns, int64[n]: the end of the step before, replayed
            without the other ranks.
        begin_ns: end of that step on the GPU.
    """

    graph: Graph
    replayed: ReplayedRank
    floor: I64
    begin_ns: int

    def floor_from(self, begin_ns: int) -> I64:
        """Return the floor of a step that begins at `begin_ns` with the same lead of the host."""
        return self.floor + (begin_ns - self.begin_ns)


def _joint_step(job: JointRanks, network: ClusterNetwork) -> JobReplay:
    """Return the step of ranks that keep the order of their traces.

    All ranks begin the step together, with as much lead of the host as the step before leaves.

    Args:
        job: the ranks, with re-costed graphs.
        network: times the communication.

    Raises:
        ExportError: the ranks make other calls than their peers, or they wait for each other.
        GraphError: a graph has a cycle, or takes no time.
    """
    rendezvous = find_rendezvous(job, network)
    ranks = [_prepared(graph, network) for graph in job.graphs]
    begin_ns = max(rank.begin_ns for rank in ranks)
    floors = [rank.floor_from(begin_ns) for rank in ranks]
    steps = replay_together(job, [rank.replayed for rank in ranks], floors, rendezvous)

    def end_and_compute_ns(place: int) -> tuple[int, int]:
        # Ranks that leave a last collective together end together. The one for which the others
        # waited computes most.
        compute = ranks[place].graph.compute
        return int(steps[place].times.end_ns.max()), _busy_ns(steps[place], compute, begin_ns)

    last = max(range(len(ranks)), key=end_and_compute_ns)
    slowest, step = ranks[last], steps[last]
    step_ns = int(step.times.end_ns.max()) - begin_ns
    compute, communication = slowest.graph.compute, slowest.graph.communication
    compute_ns = _busy_ns(step, compute, begin_ns)
    busy_ns = _busy_ns(step, compute | communication, begin_ns)
    # Replayed without the others, a rank is idle only where it waits for its host.
    times = slowest.replayed.schedule(floors[last])
    separate = JointTimes(times, np.zeros(len(slowest.graph), dtype=np.int64))
    separate_ns = int(times.end_ns.max()) - begin_ns
    idle_ns = separate_ns - _busy_ns(separate, compute | communication, begin_ns)
    idle_ns = min(idle_ns, step_ns - busy_ns)
    return JobReplay(
        step_ns=step_ns,
        compute_ns=compute_ns,
        exposed_communication_ns=busy_ns - compute_ns,
        bubble_ns=step_ns - busy_ns - idle_ns,
        idle_ns=idle_ns,
        peak_bytes=max(
            graph.job.measurement.peak_memory_bytes + non_allocator_bytes(graph)
            for graph in job.graphs
        ),
        ranks=job.graphs[0].job.world.size,
    )


def _prepared(graph: Graph, network: ClusterNetwork) -> _PreparedRank:
    """Return a rank whose floor is the end of the step before, replayed without the other ranks."""
    timed = with_network(graph, network, graph.job.world, receives_wait=True)
    graph, contention = timed.graph, timed.contention
    overhead, emulated = graph.job.measurement.host_overhead, graph.job.measurement.emulated_calls
    is_host = graph.mask(Kind.HOST_OP)
    if overhead is None or not is_host.any():
        replayed = ReplayedRank(graph, contention=contention)
        return _PreparedRank(graph, replayed, np.zeros(len(graph), dtype=np.int64), 0)
    factor = graph.job.host_factor
    excess_ns = emulated.excess_ns * factor if emulated else 0.0
    replayed = replay_without_profiler(graph, overhead.host_factor, excess_ns, contention)
    times = replayed.schedule()
    host_ns = int(times.end_ns[is_host].max()) + round(overhead.inter_step_host_ns * factor)
    # A host that is the slower one begins its step after the GPU has ended the one before.
    gpu_ns = int(times.end_ns.max())
    return _PreparedRank(graph, replayed, np.where(is_host, host_ns, gpu_ns), gpu_ns)


def _busy_ns(step: JointTimes, chosen: Mask, begin_ns: int) -> int:
    """Return how long, from `begin_ns` on, a chosen node runs and does not wait."""
    since_ns = np.maximum(step.arrival_ns[chosen], begin_ns)
    starts, ends = step.times.start_ns[chosen], step.times.end_ns[chosen]
    return union_duration_ns(np.maximum(starts, since_ns), np.maximum(ends, since_ns))
