"""Compute time and communication of each layer, split into forward, input and weight gradient."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np

from onerank.converters.expand.pipeline import AXIS
from onerank.converters.expand.pipeline.split_backward import split_backward
from onerank.converters.expand.preconditions import REMEDY
from onerank.converters.targets.simai.layer_slots import Losses, Slot, Slots
from onerank.converters.targets.simai.workload_rows import Scope
from onerank.ir import Graph, Kind, Node, Phase
from onerank.ir.coarsen import Grain, scopes_of
from onerank.ir.errors import ExportError
from onerank.ir.graph import Mask

_PRODUCTS = ("mm", "addmm", "linear", "_grouped_mm", "_scaled_mm")

_GRADIENTS_OF_WEIGHTS = ("embedding_dense_backward", "_embedding_bag_dense_backward")


@dataclass(slots=True)
class Split:
    """The nodes that compute weight gradients, and how they were identified.

    Attributes:
        weights: backward nodes for weights, bool[n].
        by_shape: micro-batches without recorded operands, where shapes decided.
        unclear_ns: time of GEMMs that shapes do not decide; counted as the input's.
    """

    weights: Mask
    by_shape: list[int] = field(default_factory=list[int])
    unclear_ns: int = 0


def split_gradients(graph: Graph, order: list[int]) -> Split:
    """Split every backward of a step into input and weight gradients.

    If the trace records which node reads what, the input gradient is everything that the gradient
    of the embedding, or the one sent to another stage, depends on. Otherwise a GEMM with the size
    of a weight of its module computes that weight's gradient.

    Args:
        graph: one rank's step.
        order: its nodes on the device, in topological order.
    """
    split = Split(np.zeros(len(graph), dtype=bool))
    blocks: defaultdict[int, list[int]] = defaultdict(list)
    backward = (graph.nodes.phase == Phase.BACKWARD).tolist()
    micro_batch = graph.nodes.micro_batch.tolist()
    for index in order:
        if backward[index]:
            blocks[max(micro_batch[index], 0)].append(index)
    shapes: dict[str, set[tuple[int, ...]]] | None = None
    for number, block in blocks.items():
        try:
            _, weights = split_backward(graph, block)
        except ExportError:  # no operands in the trace, or no gradient leaves the block
            shapes = _weight_shapes(graph, order) if shapes is None else shapes
            weights, unclear_ns = _by_shape(graph, block, shapes)
            split.by_shape.append(number)
            split.unclear_ns += unclear_ns
        split.weights[weights] = True
    return split


def _by_shape(
    graph: Graph, block: list[int], shapes: dict[str, set[tuple[int, ...]]]
) -> tuple[list[int], int]:
    """Return the nodes for weights, and the time of products that could be for either."""
    weights: list[int] = []
    unclear_ns = 0
    for index in block:
        node = graph.node(index)
        operator = _operator(node)
        if operator in _GRADIENTS_OF_WEIGHTS or "wgrad" in node.name.lower():
            weights.append(index)
        if operator not in _PRODUCTS:
            continue
        known = shapes.get(node.text("module"), set())
        made = any(shape in known for shape in _shapes(node, "output_shapes"))
        used = any(shape in known for shape in _shapes(node, "input_shapes"))
        if made and not used:
            weights.append(index)
        elif made == used:
            unclear_ns += node.duration_ns
    return weights, unclear_ns


def _weight_shapes(graph: Graph, order: list[int]) -> dict[str, set[tuple[int, ...]]]:
    """Return module -> shapes of the weights that its products multiply by, and transposed."""
    found: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for index in order:
        node = graph.node(index)
        if node.phase is Phase.FORWARD and _operator(node) in _PRODUCTS:
            for shape in _shapes(node, "input_shapes")[-1:]:
                found[node.text("module")] |= {shape, (*shape[:-2], *shape[:-3:-1])}
    return found


def _operator(node: Node) -> str:
    return node.text("op").rsplit("::", 1)[-1].split(".", 1)[0]


def _shapes(node: Node, column: str) -> list[tuple[int, ...]]:
    """Return the shapes of a node's matrices."""
    text = node.text(column)
    values = cast("list[Any]", msgspec.json.decode(text)) if text else []
    sizes = (cast("list[Any]", value) for value in values if isinstance(value, list))
    return [
        tuple(size) for size in sizes if len(size) > 1 and all(type(one) is int for one in size)
    ]


EMBEDDING = "embedding_layer"
"""SimAI leaves rows of this name out of the pipeline's bubble."""


@dataclass(slots=True)
class Step:
    """A graph's step in scopes.

    Attributes:
        graph: the graph.
        micro_batches: scopes of each captured micro-batch, in the order of its forward.
        updates: the optimizer's.
        evaluation: forwards that train nothing, once a step.
        split: which nodes of the backward are for weights.
        losses: communication that the format cannot say.
        sent_bytes: most that a micro-batch sends on, forward or backward.
        phaseless_ns: compute of no phase.
    """

    graph: Graph
    micro_batches: list[list[Scope]]
    updates: Scope
    evaluation: Scope
    split: Split
    losses: Losses
    sent_bytes: int
    phaseless_ns: int

    @property
    def total_ns(self) -> int:
        """Compute of the step as captured."""
        compute = self.graph.gpu_compute
        return int(self.graph.nodes.duration_ns[compute].sum())


def step_of(graph: Graph, grain: Grain) -> Step:
    """Divide a graph's step into scopes.

    Raises:
        ExportError: the graph has no GPU time, or an incompletely recorded communication.
        GraphError: the graph has a cycle.
    """
    if not (graph.gpu_compute & (graph.nodes.duration_ns > 0)).any():
        raise ExportError(
            "the graph holds no GPU time, so a workload of it would be empty. " + REMEDY,
            code="export-empty-graph",
        )
    device = (graph.gpu_compute | graph.communication).tolist()
    indices: list[int] = graph.topological_order().tolist()
    order = [index for index in indices if device[index]]
    split, losses = split_gradients(graph, order), Losses()
    slots = Slots(graph, losses)
    names = _names(graph, grain)
    made: dict[int, dict[str, Scope]] = {}
    staged = graph.job.world.sizes.get(AXIS, 1) > 1
    updates = Scope(EMBEDDING if staged else "optimizer")
    evaluation = Scope(EMBEDDING if staged else "evaluation")
    evaluating: list[bool] = graph.evaluating.tolist()
    sent, phaseless_ns = Counter[tuple[int, Phase]](), 0
    behind_backward = False
    number = 0
    newest = ""  # module whose backward a gradient bucket follows
    for index in order:
        node = graph.node(index)
        told = node.value("micro_batch")
        number = number if told < 0 else told  # without one it goes with what came before
        forward = node.phase in (Phase.FORWARD, Phase.NONE)
        slot = Slot.FORWARD if forward else Slot.INPUT
        if node.phase is not Phase.NONE:
            behind_backward = node.phase is Phase.BACKWARD
        elif behind_backward and node.kind.is_communication:
            slot = Slot.WEIGHT  # of gradients that the script reduces itself
        if split.weights[index] or node.phase is Phase.OPTIMIZER:
            slot = Slot.WEIGHT
        name = names[index]
        if node.kind.is_communication:
            name = name if node.text("module") else newest or name
        elif node.phase is not Phase.OPTIMIZER:
            newest = name
        if node.phase is Phase.NONE and not node.kind.is_communication:
            phaseless_ns += node.duration_ns
        if node.kind is Kind.SEND and not evaluating[index]:
            sent[number, node.phase] += max(node.value("comm_bytes"), 0)
        scope = evaluation if evaluating[index] else updates
        if node.phase is not Phase.OPTIMIZER and not evaluating[index]:
            scope = made.setdefault(number, {}).setdefault(name, Scope(name))
        if not node.kind.is_communication:
            scope.compute(slot, node.duration_ns)
        elif (call := slots.place(node, slot)) is not None:
            scope.communicate(call, slot)
    batches = [[*made[number].values()] for number in sorted(made)]
    return Step(graph, batches or [[]], updates, evaluation, split, losses,
                max(sent.values(), default=0), phaseless_ns)  # fmt: skip


def _names(graph: Graph, grain: Grain) -> list[str]:
    """Return the name of each node's row."""
    if not graph.job.modules:
        return [_clean(path) or "other" for path in graph.text("module")]
    scoping = scopes_of(graph, grain)
    names = [_clean(scope.path) or scope.role for scope in scoping.scopes]
    for at, scope in enumerate(scoping.scopes):
        if scope.role == "other" and scope.path:
            names[at] += ".other"
    positions: list[int] = scoping.of.tolist()
    return [names[position] for position in positions]


def _clean(path: str) -> str:
    return re.sub(r"\s+", "_", path)
