"""Cut a captured stage's step into the blocks that a schedule reorders."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from onerank.converters.expand.host_delays import host_delay_nodes
from onerank.converters.expand.pipeline.schedules import BACKWARD, FORWARD
from onerank.ir import Graph, Kind, Node, Phase, Reason
from onerank.ir.errors import ExportError

BEFORE, BEHIND, AFTER = "before", "behind", "after"
"""Parts of a step outside of micro-batches.

Up to the first forward; evaluations after that; the optimizer.
"""


class Block(NamedTuple):
    """A part of a step: a phase of a micro-batch, or what is `BEFORE`, `BEHIND` or `AFTER` all."""

    phase: str
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A captured stage's step in blocks.

    Attributes:
        graph: the captured graph.
        blocks: node indices of each block, in topological order.
        block_of: block of each node.
        micro_batches: how many were captured.
    """

    graph: Graph
    blocks: dict[Block, list[int]]
    block_of: list[Block]
    micro_batches: int

    def source(self, micro_batch: int, count: int) -> int:
        """Return the captured micro-batch that stands for one of `count`.

        The first and the last stand for themselves (the first writes gradients where the others
        add to them, the last may synchronise them); those between are repeated in turn.
        """
        last = self.micro_batches - 1
        if micro_batch == count - 1:
            return last
        if micro_batch == 0 or last == 0:
            return 0
        return 1 + (micro_batch - 1) % (last - 1) if last > 1 else last


def split_into_blocks(graph: Graph) -> Stage:
    """Cut a stage's step into blocks.

    A node outside of any phase (a batch being made, a loss being read) goes with the forward that
    follows; between the forward and the backward of a micro-batch with that forward. An evaluation,
    which a step has once, goes before all micro-batches where none has begun, else after all. The
    host's order counts: what it launched goes where the operator that launched it goes, and a wait
    of the GPU for its host where the node goes that it holds back.

    Raises:
        ExportError: the graph is not of one step with forward and backward.
        GraphError: the graph has a cycle.
    """
    order: list[int] = graph.topological_order().tolist()
    hosts = graph.mask(Kind.HOST_OP)
    spine = [index for index in order if hosts[index]] if hosts.any() else order
    evaluating: list[bool] = graph.evaluating.tolist()
    block_of = _along(graph, spine, evaluating)
    newest = Block(BEFORE)
    held_back = host_delay_nodes(graph)
    for index in order:
        told = held_back.get(index, index)
        block = block_of.get(told)
        if block is None and not evaluating[told]:
            block = _own(graph.node(told))
        if block is None:
            launchers = (i for i, why in graph.edges.of(told) if why is Reason.LAUNCH)
            block = next((block_of[i] for i in launchers), newest)
            if graph.node(told).phase is Phase.OPTIMIZER and block.phase == BACKWARD:
                block = Block(AFTER)
        block_of[index] = newest = block
    blocks: dict[Block, list[int]] = {}
    for index in order:
        blocks.setdefault(block_of[index], []).append(index)
    count = 1 + max((block.micro_batch for block in blocks), default=0)
    for block in _expected(count):
        if block not in blocks:
            raise ExportError(
                f"the graph has no {'forward' if block.phase == FORWARD else 'backward'} of "
                f"micro-batch {block.micro_batch} ({count} in all): a schedule orders the forwards "
                "and backwards of a stage's step; capture a training step with `capture run --pp`"
            )
    return Stage(graph, blocks, [block_of[index] for index in range(len(graph))], count)


def _along(graph: Graph, spine: list[int], evaluating: list[bool]) -> dict[int, Block]:
    """Return the block of each node of a sequence."""
    block_of: dict[int, Block] = {}
    pending: list[int] = []
    newest = Block(BEFORE)
    stepped: Node | None = None
    for index in spine:
        node = graph.node(index)
        own = _own(node)
        if node.phase is Phase.OPTIMIZER:
            began = newest.phase == BACKWARD
            stepped = node if began else stepped
            block_of[index] = Block(AFTER if began else BEFORE)
        elif evaluating[index]:
            once = Block(BEFORE if newest.phase == BEFORE else BEHIND)
            block_of |= dict.fromkeys([*pending, index], once)
            pending = []
        elif own is None:
            pending.append(index)
        elif stepped is not None:
            raise ExportError(
                f"{node.name!r} (node {node.id}) comes after {stepped.name!r} (node {stepped.id}) "
                "of the optimizer: expected one step, whose micro-batches all come before the "
                "optimizer. Capture one optimizer step"
            )
        else:
            inside = own == newest and own.phase == BACKWARD
            for waiting in pending:
                block_of[waiting] = own if inside else Block(FORWARD, own.micro_batch)
            pending = []
            block_of[index] = newest = own
    return block_of | dict.fromkeys(pending, Block(AFTER))


def _own(node: Node) -> Block | None:
    """Return the block that a node of a forward or backward names itself."""
    phases = {Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD}
    phase = phases.get(node.phase)
    return None if phase is None else Block(phase, max(node.value("micro_batch"), 0))


def _expected(count: int) -> Iterator[Block]:
    for micro_batch in range(count):
        yield Block(FORWARD, micro_batch)
        yield Block(BACKWARD, micro_batch)
