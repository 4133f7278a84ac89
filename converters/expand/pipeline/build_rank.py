"""Build the graph of one pipeline rank from the blocks of its stages."""

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from onerank.converters.expand.host_delays import host_delay_nodes
from onerank.converters.expand.pipeline.schedule_blocks import AFTER, BEFORE, BEHIND, Block, Stage
from onerank.converters.expand.pipeline.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from onerank.converters.expand.pipeline.split_backward import split_backward
from onerank.converters.expand.pipeline.stage_assignment import AXIS, StagePosition
from onerank.converters.expand.root_ranks import with_roots
from onerank.ir import (
    UNKNOWN,
    Edges,
    Graph,
    Kind,
    Nodes,
    ProcessGroup,
    Reason,
    StringTable,
)
from onerank.ir.nodes import TEXT_COLUMNS


@dataclass(slots=True)
class RankBuilder:
    """Lays blocks of a rank's stages one after another, each a copy of a captured one.

    Within a block the captured edges stay, and those between the forward and the backward of a
    micro-batch. From block to block each stream, each thread and the host go on where they were.
    A send holds nothing up but other communication, and what stays on the rank is not sent. A wait
    of the GPU for its host follows what the GPU did before, not what it received meanwhile.
    """

    chunks: Mapping[int, Stage]
    own: Sequence[int]
    pipeline: StagePosition
    rows: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Chunk, captured index and micro-batch of each node."""
    edges: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    ends: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """Peer and tag of each send and receive between stages."""
    newest: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    made: dict[tuple[int, Block], dict[int, list[int]]] = field(
        default_factory=dict[tuple[int, Block], dict[int, list[int]]]
    )
    """Per chunk and block, what to wait for in place of each captured node."""
    parts: dict[tuple[int, int], tuple[set[int], set[int]]] = field(
        default_factory=dict[tuple[int, int], tuple[set[int], set[int]]]
    )
    """Chunk and captured micro-batch -> nodes of both parts of a split backward."""

    waits: dict[int, Container[int]] = field(default_factory=dict[int, Container[int]])
    """Chunk -> nodes in which the GPU waits for its host."""

    def graph(self, actions: Sequence[Action]) -> Graph:
        """Return the rank's graph."""
        self.waits = {chunk: host_delay_nodes(stage.graph) for chunk, stage in self.chunks.items()}
        for chunk in self.chunks:
            self._lay(chunk, Block(BEFORE), Block(BEFORE))
        for action in actions:
            self._act(action)
        for chunk, stage in self.chunks.items():
            for phase in (FORWARD, BACKWARD):  # what follows, follows the last
                last = self.made[chunk, Block(phase, self.pipeline.micro_batches - 1)]
                self.made[chunk, Block(phase, stage.micro_batches - 1)] = last
        for block in (Block(BEHIND), Block(AFTER)):
            for chunk in self.chunks:
                self._lay(chunk, block, block)
        return self._built()

    def _act(self, action: Action) -> None:
        stage = self.chunks[action.chunk]
        source = stage.source(action.micro_batch, self.pipeline.micro_batches)
        phase = FORWARD if action.phase == FORWARD else BACKWARD
        captured, asked = Block(phase, source), Block(phase, action.micro_batch)
        if action.phase not in (INPUT, WEIGHT):
            self._lay(action.chunk, captured, asked)
            return
        key = action.chunk, source
        if key not in self.parts:
            inputs, weights = split_backward(stage.graph, stage.blocks[captured])
            self.parts[key] = {*inputs}, {*weights}
        part = self.parts[key][action.phase == WEIGHT]
        self._lay(action.chunk, captured, asked, part)

    def _lay(
        self, chunk: int, captured: Block, asked: Block, part: Container[int] | None = None
    ) -> None:
        """Copy a captured block, or a part of it, as the block `asked`."""
        stage = self.chunks[chunk]
        here = self.made.setdefault((chunk, asked), {})
        begun: set[Hashable] = set()
        entered = dict(self.newest)
        for index in stage.blocks.get(captured, []):
            own = part is None or index in part
            if not own and index in here:
                continue  # of the other part, which was laid before
            awaited = self._awaited(chunk, index, captured, asked, entered)
            lanes = _lanes(stage.graph, index)
            if own:
                for lane in lanes:
                    if lane in self.newest and lane not in begun:
                        awaited.setdefault(self.newest[lane], Reason.PROGRAM_ORDER)
                begun.update(lanes)
            message = self._message(chunk, index, asked) if own else None
            if not own or (message is not None and message[0] is None):
                here[index] = [*awaited]  # what waits for it, waits for what it waits for
                continue
            number = len(self.rows)
            micro_batch = asked.micro_batch if asked.phase in (FORWARD, BACKWARD) else UNKNOWN
            self.rows.append((chunk, index, micro_batch))
            self.edges += [(source, number, int(why)) for source, why in awaited.items()]
            here[index] = [number]
            if message is not None:
                peer, tag = message
                assert peer is not None
                self.ends[number] = peer, tag
                if stage.graph.node(index).kind is Kind.SEND:
                    here[index] = [*awaited]
                    continue
            self.newest |= dict.fromkeys(lanes, number)

    def _awaited(
        self, chunk: int, index: int, captured: Block, asked: Block, entered: Mapping[Hashable, int]
    ) -> dict[int, Reason]:
        """Return what the copy of a captured node waits for by the captured edges."""
        stage = self.chunks[chunk]
        awaited: dict[int, Reason] = {}
        for source, reason in stage.graph.edges.of(index):
            block = stage.block_of[source]
            if block == captured:
                block = asked
            elif block == Block(FORWARD, captured.micro_batch) and captured.phase == BACKWARD:
                block = Block(FORWARD, asked.micro_batch)
            elif captured.phase not in (BEHIND, AFTER) and block.phase != BEFORE:
                # of another micro-batch: the lanes keep the order
                if index in self.waits[chunk]:
                    lanes = _lanes(stage.graph, source)
                    awaited |= {entered[lane]: reason for lane in lanes if lane in entered}
                continue
            for number in self.made.get((chunk, block), {}).get(source, []):
                awaited.setdefault(number, reason)
        return awaited

    def _message(self, chunk: int, index: int, block: Block) -> tuple[int | None, int] | None:
        """Return peer and tag of a message between stages, the peer None where it is this rank."""
        graph, line = self.chunks[chunk].graph, self.pipeline
        node = graph.node(index)
        if node.kind not in (Kind.SEND, Kind.RECV):
            return None
        other = node.value("comm_dst" if node.kind is Kind.SEND else "comm_src")
        if not 0 <= other < line.captured.size:
            return None
        here, there = line.captured.point(graph.job.rank), line.captured.point(other)
        step = there[AXIS] - here[AXIS]
        if {**there, AXIS: 0} != {**here, AXIS: 0} or abs(step) != 1:
            return line.moved(other, line.rank), node.value("comm_tag")
        stage = self.own[chunk]
        rank, _ = line.schedule.place(line.ranks, stage + step)
        back = step == (-1 if node.kind is Kind.SEND else 1)
        tag = (2 * min(stage, stage + step) + back) * line.micro_batches + block.micro_batch
        return (None if rank == line.rank else line.moved(other, rank)), tag

    def _built(self) -> Graph:
        strings = StringTable()
        parts: list[Nodes] = []
        order: list[int] = []
        chunk_of = np.array([chunk for chunk, _, _ in self.rows], dtype=np.int64)
        captured = np.array([index for _, index, _ in self.rows], dtype=np.int64)
        groups: dict[str, ProcessGroup] = {}
        for chunk, stage in self.chunks.items():
            graph = with_roots(stage.graph, self.pipeline.root)
            mine = np.flatnonzero(chunk_of == chunk)
            codes = strings.encode(graph.strings.values)
            taken = graph.nodes.take(captured[mine])
            text = {name: codes[getattr(taken, name)] for name in TEXT_COLUMNS}
            parts.append(replace(taken, **text))
            order += mine.tolist()
            for group in graph.job.groups:
                placed = self.pipeline.group(group)
                groups.setdefault(placed.name, placed)
        nodes = Nodes.joined(parts).take(np.argsort(np.array(order, dtype=np.int64)))
        count = len(nodes)
        source, target, tags = nodes.comm_src.copy(), nodes.comm_dst.copy(), nodes.comm_tag.copy()
        for number, (peer, tag) in self.ends.items():
            ends = target if nodes.kind[number] == Kind.SEND else source
            ends[number], tags[number] = peer, tag
        nodes = replace(
            nodes,
            id=np.arange(count, dtype=np.uint64),
            start_ns=np.zeros(count, dtype=np.int64),
            micro_batch=np.array([m for _, _, m in self.rows], dtype=np.int32),
            comm_src=source,
            comm_dst=target,
            comm_tag=tags,
        )
        pairs = np.array(self.edges, dtype=np.int64).reshape(-1, 3)
        edges = Edges.from_pairs(count, pairs[:, 0], pairs[:, 1], pairs[:, 2].astype(np.uint8))
        job = self.chunks[0].graph.job
        job = msgspec.structs.replace(
            job,
            world=self.pipeline.world,
            rank=self.pipeline.moved(job.rank, self.pipeline.rank),
            groups=tuple(groups.values()),
            measurement=msgspec.structs.replace(
                job.measurement, step_ns=(), profiled_step_ns=0, activation_bytes=(), memory=None
            ),
            pipeline=None,
            classes=(),
        )
        return Graph(nodes, edges, strings, job)


def _lanes(graph: Graph, index: int) -> tuple[Hashable, ...]:
    """Return what a node runs in line with: its stream, or its thread and the host as a whole."""
    stream = int(graph.nodes.stream[index])
    if stream != UNKNOWN:
        return (("stream", stream),)
    return f"thread {graph.nodes.thread[index]}", "host"
