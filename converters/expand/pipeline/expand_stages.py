"""Expand captured stages to every rank of the pipeline, with each rank's peak memory.

`RankBuilder` builds the graph of one rank from the blocks of its stages.
"""

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.converters.expand.host_delays import host_delay_nodes
from onerank.converters.expand.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    PipelineSchedule,
    most_in_flight,
)
from onerank.converters.expand.pipeline.split_backward import split_backward
from onerank.converters.expand.pipeline.stages import (
    AFTER,
    AXIS,
    BEFORE,
    EVALUATION,
    Stage,
    StageBlock,
    StagePosition,
    group_stages,
    phases_of,
)
from onerank.converters.expand.ranks import RankGraph, with_roots
from onerank.ir import (
    UNKNOWN,
    Edges,
    Graph,
    Job,
    Kind,
    Nodes,
    ProcessGroup,
    Reason,
    StringTable,
    World,
)
from onerank.ir.errors import ExportError, division
from onerank.ir.nodes import TEXT_COLUMNS

# Chunk, captured index and micro-batch of a node of the new graph.
_NodeOfChunk = tuple[int, int, int]


@dataclass(slots=True)
class RankBuilder:
    """Appends blocks of a rank's stages in schedule order, each a copy of a captured block.

    Captured edges stay within a block, and between the forward and the backward of a micro-batch.
    Across blocks, every stream, every thread and the host continue where they were. A send delays
    only other communication. Messages between two stages on this rank are dropped. A host delay
    follows the previous work of its GPU, not a message received in between.

    Attributes:
        chunks: chunk -> the stage that it runs.
        stages: chunk -> number of the pipeline stage.
        position: place of the rank in the expanded pipeline.
        nodes: source of each node of the new graph.
        edges: (source, target, reason) of each edge of the new graph.
        message_ends: node -> peer and tag, for sends and receives between stages.
        lane_ends: stream, thread or host -> its latest node.
        copies: (chunk, block) -> captured node -> nodes to wait for instead of it.
        split_parts: (chunk, captured micro-batch) -> nodes of the two parts of a split backward.
        delays: chunk -> its host-delay nodes.
    """

    chunks: Mapping[int, Stage]
    stages: Sequence[int]
    position: StagePosition
    nodes: list[_NodeOfChunk] = field(default_factory=list[_NodeOfChunk])
    edges: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    message_ends: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    lane_ends: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    copies: dict[tuple[int, StageBlock], dict[int, list[int]]] = field(
        default_factory=dict[tuple[int, StageBlock], dict[int, list[int]]]
    )
    split_parts: dict[tuple[int, int], tuple[set[int], set[int]]] = field(
        default_factory=dict[tuple[int, int], tuple[set[int], set[int]]]
    )
    delays: dict[int, Container[int]] = field(default_factory=dict[int, Container[int]])

    def build(self, actions: Sequence[Action]) -> Graph:
        """Return the graph of the rank that runs `actions`."""
        self.delays = {chunk: host_delay_nodes(stage.graph) for chunk, stage in self.chunks.items()}
        for chunk in self.chunks:
            self._append(chunk, StageBlock(BEFORE), StageBlock(BEFORE))
        for action in actions:
            self._append_action(action)
        for chunk, stage in self.chunks.items():
            # Nodes after the micro-batches wait for the last captured one, so its entry must lead
            # to the last one of the schedule.
            for phase in phases_of(stage.graph.job):
                last = self.copies[chunk, StageBlock(phase, self.position.micro_batches - 1)]
                self.copies[chunk, StageBlock(phase, stage.micro_batches - 1)] = last
        for block in (StageBlock(EVALUATION), StageBlock(AFTER)):
            for chunk in self.chunks:
                self._append(chunk, block, block)
        return self._assemble()

    def _append_action(self, action: Action) -> None:
        """Append the block, or the part of a split backward, that an action runs."""
        stage = self.chunks[action.chunk]
        source = stage.source(action.micro_batch, self.position.micro_batches)
        phase = FORWARD if action.phase == FORWARD else BACKWARD
        captured, target = StageBlock(phase, source), StageBlock(phase, action.micro_batch)
        if action.phase not in (INPUT, WEIGHT):
            self._append(action.chunk, captured, target)
            return
        key = action.chunk, source
        if key not in self.split_parts:
            inputs, weights = split_backward(stage.graph, stage.blocks[captured])
            self.split_parts[key] = {*inputs}, {*weights}
        part = self.split_parts[key][action.phase == WEIGHT]
        self._append(action.chunk, captured, target, part)

    def _append(
        self,
        chunk: int,
        captured: StageBlock,
        target: StageBlock,
        part: Container[int] | None = None,
    ) -> None:
        """Append a copy of the block `captured`, or of its nodes in `part`, as block `target`."""
        stage = self.chunks[chunk]
        copies = self.copies.setdefault((chunk, target), {})
        entered_lanes: set[Hashable] = set()
        ends_at_entry = dict(self.lane_ends)
        for index in stage.blocks.get(captured, []):
            included = part is None or index in part
            if not included and index in copies:
                # It belongs to the other part, which is already in the graph.
                continue
            awaited = self._dependencies(chunk, index, captured, target, ends_at_entry)
            lanes = _lanes(stage.graph, index)
            if included:
                for lane in lanes:
                    if lane in self.lane_ends and lane not in entered_lanes:
                        awaited.setdefault(self.lane_ends[lane], Reason.PROGRAM_ORDER)
                entered_lanes.update(lanes)
            message = self._message(chunk, index, target) if included else None
            if not included or (message is not None and message[0] is None):
                # Followers of the dropped node inherit its dependencies.
                copies[index] = [*awaited]
                continue
            number = len(self.nodes)
            micro_batch = target.micro_batch if target.phase in (FORWARD, BACKWARD) else UNKNOWN
            self.nodes.append((chunk, index, micro_batch))
            self.edges += [(source, number, int(why)) for source, why in awaited.items()]
            copies[index] = [number]
            if message is not None:
                peer, tag = message
                assert peer is not None
                self.message_ends[number] = peer, tag
                if stage.graph.node(index).kind is Kind.SEND:
                    # A send completes in the background: followers wait for its data, not for it.
                    copies[index] = [*awaited]
                    continue
            self.lane_ends |= dict.fromkeys(lanes, number)

    def _dependencies(
        self,
        chunk: int,
        index: int,
        captured: StageBlock,
        target: StageBlock,
        ends_at_entry: Mapping[Hashable, int],
    ) -> dict[int, Reason]:
        """Return the nodes that the copy of a captured node waits for by its captured edges."""
        stage = self.chunks[chunk]
        awaited: dict[int, Reason] = {}
        for source, reason in stage.graph.edges.of(index):
            block = stage.block_of[source]
            if block == captured:
                block = target
            elif block == StageBlock(FORWARD, captured.micro_batch) and captured.phase == BACKWARD:
                block = StageBlock(FORWARD, target.micro_batch)
            elif captured.phase not in (EVALUATION, AFTER) and block.phase != BEFORE:
                # An edge from another micro-batch only kept the order of a lane, and the schedule
                # gives a new order. A host delay keeps it: it follows whatever its GPU ran before.
                if index in self.delays[chunk]:
                    lanes = _lanes(stage.graph, source)
                    awaited |= {
                        ends_at_entry[lane]: reason for lane in lanes if lane in ends_at_entry
                    }
                continue
            for number in self.copies.get((chunk, block), {}).get(source, []):
                awaited.setdefault(number, reason)
        return awaited

    def _message(self, chunk: int, index: int, block: StageBlock) -> tuple[int | None, int] | None:
        """Return peer and tag of a message between stages; the peer is None on this rank."""
        graph, position = self.chunks[chunk].graph, self.position
        node = graph.node(index)
        if node.kind not in (Kind.SEND, Kind.RECV):
            return None
        peer = node.value("comm_dst" if node.kind is Kind.SEND else "comm_src")
        # Traces of other tools may have a peer outside the world, or none.
        if not 0 <= peer < position.captured.size:
            return None
        point = position.captured.point(graph.job.rank)
        peer_point = position.captured.point(peer)
        step = peer_point[AXIS] - point[AXIS]
        if {**peer_point, AXIS: 0} != {**point, AXIS: 0} or abs(step) != 1:
            return position.expanded_rank(peer, position.rank), node.value("comm_tag")
        stage = self.stages[chunk]
        rank, _ = position.schedule.place(position.ranks, stage + step)
        backward = step == (-1 if node.kind is Kind.SEND else 1)
        # A tag per stage boundary, direction and micro-batch: a schedule reorders the messages of
        # two ranks, and the boundaries of several chunks may lie between the same two.
        tag = (2 * min(stage, stage + step) + backward) * position.micro_batches + block.micro_batch
        return (None if rank == position.rank else position.expanded_rank(peer, rank)), tag

    def _assemble(self) -> Graph:
        """Return the graph of all appended nodes and edges."""
        strings = StringTable()
        parts: list[Nodes] = []
        order: list[int] = []
        chunk_of = np.array([chunk for chunk, _, _ in self.nodes], dtype=np.int64)
        captured = np.array([index for _, index, _ in self.nodes], dtype=np.int64)
        groups: dict[str, ProcessGroup] = {}
        for chunk, stage in self.chunks.items():
            graph = with_roots(stage.graph, self.position.root)
            of_chunk = np.flatnonzero(chunk_of == chunk)
            codes = strings.encode(graph.strings.values)
            copied = graph.nodes.take(captured[of_chunk])
            text = {name: codes[getattr(copied, name)] for name in TEXT_COLUMNS}
            parts.append(replace(copied, **text))
            order += of_chunk.tolist()
            for group in graph.job.groups:
                expanded = self.position.group(group)
                groups.setdefault(expanded.name, expanded)
        nodes = Nodes.joined(parts).take(np.argsort(np.array(order, dtype=np.int64)))
        count = len(nodes)
        source, target, tags = nodes.comm_src.copy(), nodes.comm_dst.copy(), nodes.comm_tag.copy()
        for number, (peer, tag) in self.message_ends.items():
            peers = target if nodes.kind[number] == Kind.SEND else source
            peers[number], tags[number] = peer, tag
        nodes = replace(
            nodes,
            id=np.arange(count, dtype=np.uint64),
            start_ns=np.zeros(count, dtype=np.int64),
            micro_batch=np.array([number for _, _, number in self.nodes], dtype=np.int32),
            comm_src=source,
            comm_dst=target,
            comm_tag=tags,
        )
        pairs = np.array(self.edges, dtype=np.int64).reshape(-1, 3)
        edges = Edges.from_pairs(count, pairs[:, 0], pairs[:, 1], pairs[:, 2].astype(np.uint8))
        job = self.chunks[0].graph.job
        # Step times and memory were measured for the captured schedule; they hold for no other.
        job = msgspec.structs.replace(
            job,
            world=self.position.world,
            rank=self.position.expanded_rank(job.rank, self.position.rank),
            groups=tuple(groups.values()),
            measurement=msgspec.structs.replace(
                job.measurement, step_ns=(), profiled_step_ns=0, activation_bytes=(), memory=None
            ),
            pipeline=None,
            classes=(),
        )
        return Graph(nodes, edges, strings, job)


def _lanes(graph: Graph, index: int) -> tuple[Hashable, ...]:
    """Return the lanes that order a node: its stream, or its thread and the host as a whole."""
    stream = int(graph.nodes.stream[index])
    if stream != UNKNOWN:
        return (("stream", stream),)
    return f"thread {graph.nodes.thread[index]}", "host"


class StagePeak(NamedTuple):
    """Peak memory of a stage under a schedule; 0 bytes if a figure is missing."""

    schedule: str
    micro_batches: int
    in_flight: int
    bytes: int


def peak_memory(jobs: Sequence[Job], actions: Sequence[Action]) -> int:
    """Return the peak bytes of a rank that runs `actions` on one stage per chunk.

    Args:
        jobs: the captured job of the stage of each chunk.
        actions: the rank's part of the schedule.

    Returns:
        Start memory of all stages, activations of the micro-batches in flight, and the largest
        temporary memory. 0 if a figure is missing.
    """
    measured = [job.measurement for job in jobs]
    if not all(stage.peak_memory_bytes and stage.activation_bytes for stage in measured):
        return 0
    activations = {chunk: max(stage.activation_bytes) for chunk, stage in enumerate(measured)}
    # Each capture had one micro-batch in flight. The rest of its peak is temporary, and only one
    # chunk runs at a time.
    temporary = max(
        stage.peak_memory_bytes - stage.start_memory_bytes - activations[chunk]
        for chunk, stage in enumerate(measured)
    )
    start = sum(stage.start_memory_bytes for stage in measured)
    return start + temporary + most_in_flight(actions, activations)


def peaks(job: Job) -> list[StagePeak]:
    """Return the peaks of a captured stage for P, 2P and 4P micro-batches of P stages.

    Covers the schedules with one stage per rank; the others need the graphs of other stages.
    """
    if job.pipeline is None:
        return []
    stages = len(job.pipeline.layers)
    stage_peaks: list[StagePeak] = []
    for kind in ("gpipe", "1f1b"):
        for micro_batches in (stages, 2 * stages, 4 * stages):
            actions = PipelineSchedule(kind).actions(stages, micro_batches)[job.pipeline.stage]
            in_flight = most_in_flight(actions, {0: 1})
            peak = peak_memory([job], actions)
            stage_peaks.append(StagePeak(kind, micro_batches, in_flight, peak))
    return stage_peaks


def expand(
    graphs: Sequence[Graph], schedule: PipelineSchedule, micro_batches: int
) -> list[RankGraph]:
    """Return a graph for each rank of the pipeline, in the order of the pipeline axis.

    If the ranks of a stage differ, there is a graph for each of their classes. Each rank runs
    `schedule.chunks` captured stages: eight captured stages make four ranks of interleaved:2.

    Args:
        graphs: one per class of equivalent ranks, in any order.
        schedule: the order of forwards and backwards.
        micro_batches: micro-batches of a step; captured ones are repeated, see `Stage.source`. Of
            inference, each is a whole captured step.

    Raises:
        ExportError: the graphs are not the stages of one pipeline, or do not fit the schedule.
        GraphError: a graph has a cycle.
    """
    stage_groups = group_stages(graphs)
    phases = phases_of(graphs[0].job)
    if BACKWARD not in phases and schedule.kind != "gpipe":
        raise ExportError(
            f"--schedule {schedule} orders forwards and backwards, and a step of inference has no "
            "backward\n  use gpipe: each stage computes the micro-batches one after another",
            code="pipeline-inference-schedule",
        )
    captured = graphs[0].job.world
    stages = captured.sizes[AXIS]
    if stages % schedule.chunks:
        raise ExportError(
            f"--schedule {schedule} puts {schedule.chunks} stages on each rank, which does not "
            f"divide the {stages} captured stages ({division(stages, schedule.chunks)})\n"
            f"  capture with --pp a multiple of {schedule.chunks}",
            code="pipeline-indivisible-stages",
        )
    if schedule.chunks > 1 and (shared := _groups_of_shared_weights(graphs)):
        # With several stages on a rank, the ranks of such a group would make different calls.
        raise ExportError(
            f"--schedule {schedule}: stages share weights and sum their gradients over the groups "
            f"{', '.join(shared)}, which {schedule.chunks} stages per rank do not support\n"
            "  use gpipe or 1f1b, as Megatron-LM does for an encoder and its decoder",
            code="pipeline-shared-weights",
        )
    ranks = stages // schedule.chunks
    sizes = {axis: ranks if axis == AXIS else size for axis, size in captured.sizes.items()}
    world = World(sizes, captured.ep)
    rank_graphs: list[RankGraph] = []
    for rank, every_action in enumerate(schedule.actions(ranks, micro_batches)):
        actions = [action for action in every_action if action.phase != BACKWARD or phases[1:]]
        numbers = [schedule.stage(ranks, rank, chunk) for chunk in range(schedule.chunks)]
        position = StagePosition(schedule, ranks, rank, micro_batches, captured, world)
        for group in stage_groups:
            chunks = [group.stages[number] for number in numbers]
            graph = RankBuilder(dict(enumerate(chunks)), numbers, position).build(actions)
            peak = peak_memory([stage.graph.job for stage in chunks], actions)
            # Ranks of one group do equal work on every stage, so they share this graph.
            members = group.ranks(world, rank)
            rank_graphs.append(RankGraph(graph, members, tuple(numbers), peak))
    return rank_graphs


def _groups_of_shared_weights(graphs: Sequence[Graph]) -> list[str]:
    """Return the groups of stages that share weights, unless only the first and the last do."""
    shared: set[tuple[str, int]] = set()
    for job in (graph.job for graph in graphs):
        for group in job.groups:
            points = [{**job.world.point(rank), AXIS: 0} for rank in group.ranks]
            along_pipeline = all(point == points[0] for point in points)
            if along_pipeline and group.name not in job.world.sizes and len(group.ranks) > 1:
                shared.add((group.name, len(group.ranks)))
    # One pair of first and last stage (tied embedding and head) works with every schedule.
    only_ends = len(shared) < 2 and all(size == 2 for _, size in shared)
    return [] if only_ends else sorted({name for name, _ in shared})
