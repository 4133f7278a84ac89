"""Split a captured stage's step into the blocks that a schedule reorders."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from onerank.converters.expand.host_delays import host_delay_nodes
from onerank.converters.expand.pipeline.schedules import BACKWARD, FORWARD
from onerank.ir import Graph, Kind, Node, Phase, Reason
from onerank.ir.errors import ExportError

BEFORE, BEHIND, AFTER = "before", "behind", "after"
"""Parts of a step outside the micro-batches.

BEFORE ends at the first forward. BEHIND has evaluations after the micro-batches. AFTER has the
optimizer.
"""


class Block(NamedTuple):
    """A part of a step: a phase of a micro-batch, or `BEFORE`, `BEHIND` or `AFTER` all of them."""

    phase: str
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A captured stage's step in blocks.

    Attributes:
        graph: the captured graph.
        blocks: node indices of each block, in topological order.
        block_of: block of each node.
        micro_batches: number of captured micro-batches.
    """

    graph: Graph
    blocks: dict[Block, list[int]]
    block_of: list[Block]
    micro_batches: int

    def source(self, micro_batch: int, count: int) -> int:
        """Return the captured micro-batch to copy for one of `count`.

        The first and the last are copied once; those between are repeated in turn.
        """
        # The first micro-batch writes gradients where the others add to them. The last one may
        # synchronise them.
        last = self.micro_batches - 1
        if micro_batch == count - 1:
            return last
        if micro_batch == 0 or last == 0:
            return 0
        return 1 + (micro_batch - 1) % (last - 1) if last > 1 else last


def split_into_blocks(graph: Graph) -> Stage:
    """Split a stage's step into blocks.

    - A node without a phase, such as the preparation of a batch, joins the next forward. Between
      the forward and the backward of a micro-batch it joins that forward.
    - An evaluation joins `BEFORE` if no micro-batch has begun, else `BEHIND`.
    - A GPU node joins the operator that launched it.
    - A host delay joins the node that it holds back.

    Raises:
        ExportError: the graph is not one step with forward and backward of every micro-batch.
        GraphError: the graph has a cycle.
    """
    order: list[int] = graph.topological_order().tolist()
    hosts = graph.mask(Kind.HOST_OP)
    # The order of the host decides: streams run behind it and overlap micro-batches.
    host_order = [index for index in order if hosts[index]] if hosts.any() else order
    evaluating: list[bool] = graph.evaluating.tolist()
    block_of = _blocks_in_order(graph, host_order, evaluating)
    current = Block(BEFORE)
    delayed_node = host_delay_nodes(graph)
    for index in order:
        deciding = delayed_node.get(index, index)
        block = block_of.get(deciding)
        if block is None and not evaluating[deciding]:
            block = _named_block(graph.node(deciding))
        if block is None:
            launchers = (i for i, why in graph.edges.of(deciding) if why is Reason.LAUNCH)
            block = next((block_of[i] for i in launchers), current)
            if graph.node(deciding).phase is Phase.OPTIMIZER and block.phase == BACKWARD:
                block = Block(AFTER)
        block_of[index] = current = block
    blocks: dict[Block, list[int]] = {}
    for index in order:
        blocks.setdefault(block_of[index], []).append(index)
    count = 1 + max((block.micro_batch for block in blocks), default=0)
    for block in _expected(count):
        if block not in blocks:
            raise ExportError(
                f"the graph has no {'forward' if block.phase == FORWARD else 'backward'} of "
                f"micro-batch {block.micro_batch} ({count} in all), which a schedule needs\n"
                "  capture a training step with `capture run --pp`",
                code="pipeline-missing-phase",
            )
    return Stage(graph, blocks, [block_of[index] for index in range(len(graph))], count)


def _blocks_in_order(graph: Graph, order: list[int], evaluating: list[bool]) -> dict[int, Block]:
    """Return the block of each node of a sequence."""
    block_of: dict[int, Block] = {}
    undecided: list[int] = []
    current = Block(BEFORE)
    optimizer: Node | None = None
    for index in order:
        node = graph.node(index)
        block = _named_block(node)
        if node.phase is Phase.OPTIMIZER:
            # An optimizer node in front of all backwards, such as zero_grad, is no step yet.
            after_backward = current.phase == BACKWARD
            optimizer = node if after_backward else optimizer
            block_of[index] = Block(AFTER if after_backward else BEFORE)
        elif evaluating[index]:
            # An evaluation runs once per step, so a schedule must not repeat it with a micro-batch.
            evaluation = Block(BEFORE if current.phase == BEFORE else BEHIND)
            block_of |= dict.fromkeys([*undecided, index], evaluation)
            undecided = []
        elif block is None:
            undecided.append(index)
        elif optimizer is not None:
            raise ExportError(
                f"{node.name!r} (node {node.id}) follows {optimizer.name!r} (node {optimizer.id}) "
                "of the optimizer; expected one step whose micro-batches all precede the optimizer"
                "\n  capture one optimizer step",
                code="pipeline-two-steps",
            )
        else:
            inside_backward = block == current and block.phase == BACKWARD
            for earlier in undecided:
                block_of[earlier] = block if inside_backward else Block(FORWARD, block.micro_batch)
            undecided = []
            block_of[index] = current = block
    return block_of | dict.fromkeys(undecided, Block(AFTER))


def _named_block(node: Node) -> Block | None:
    """Return the block that the phase of a forward or backward node names, else None."""
    phases = {Phase.FORWARD: FORWARD, Phase.BACKWARD: BACKWARD}
    phase = phases.get(node.phase)
    return None if phase is None else Block(phase, max(node.value("micro_batch"), 0))


def _expected(count: int) -> Iterator[Block]:
    for micro_batch in range(count):
        yield Block(FORWARD, micro_batch)
        yield Block(BACKWARD, micro_batch)
