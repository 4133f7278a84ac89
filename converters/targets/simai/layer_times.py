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
from onerank.converters.targets.simai.layer_slots import Losses, Slot, SlotAssigner
from onerank.converters.targets.simai.workload_rows import Scope
from onerank.ir import Graph, Kind, Node, Phase
from onerank.ir.coarsen import Grain, scopes_of
from onerank.ir.errors import ExportError
from onerank.ir.graph import Mask

_GEMMS = ("mm", "addmm", "linear", "_grouped_mm", "_scaled_mm")

_WEIGHT_GRADIENTS = ("embedding_dense_backward", "_embedding_bag_dense_backward")


@dataclass(slots=True)
class GradientSplit:
    """The nodes that compute weight gradients, and how they were identified.

    Attributes:
        weights: backward nodes of weight gradients, bool[n].
        by_shape: micro-batches split by GEMM shapes, since they have no recorded operands.
        unclear_ns: time of GEMMs whose shapes are ambiguous; counted as input gradient.
    """

    weights: Mask
    by_shape: list[int] = field(default_factory=list[int])
    unclear_ns: int = 0


def split_gradients(graph: Graph, order: list[int]) -> GradientSplit:
    """Split every backward of a step into input and weight gradients.

    If the trace records operands, the input gradient consists of all nodes that the embedding's
    gradient, or the gradient sent to another stage, depends on. Otherwise a GEMM whose output has
    the shape of a weight of its module computes that weight's gradient.

    Args:
        graph: one rank's step.
        order: its GPU and communication nodes, in topological order.
    """
    split = GradientSplit(np.zeros(len(graph), dtype=bool))
    backwards: defaultdict[int, list[int]] = defaultdict(list)
    in_backward = (graph.nodes.phase == Phase.BACKWARD).tolist()
    micro_batch = graph.nodes.micro_batch.tolist()
    for index in order:
        if in_backward[index]:
            backwards[max(micro_batch[index], 0)].append(index)
    shapes: dict[str, set[tuple[int, ...]]] | None = None
    for number, block in backwards.items():
        try:
            _, weights = split_backward(graph, block)
        except ExportError:
            # The trace records no operands, or no gradient leaves the backward.
            shapes = _weight_shapes(graph, order) if shapes is None else shapes
            weights, unclear_ns = _split_by_shape(graph, block, shapes)
            split.by_shape.append(number)
            split.unclear_ns += unclear_ns
        split.weights[weights] = True
    return split


def _split_by_shape(
    graph: Graph, block: list[int], shapes: dict[str, set[tuple[int, ...]]]
) -> tuple[list[int], int]:
    """Return the nodes of weight gradients, and the time of GEMMs that fit both gradients."""
    weights: list[int] = []
    unclear_ns = 0
    for index in block:
        node = graph.node(index)
        operator = _operator(node)
        if operator in _WEIGHT_GRADIENTS or "wgrad" in node.name.lower():
            weights.append(index)
        if operator not in _GEMMS:
            continue
        # The weight's gradient has the weight's shape; the input's gradient reads the weight.
        weight_shapes = shapes.get(node.text("module"), set())
        writes_weight = any(shape in weight_shapes for shape in _shapes(node, "output_shapes"))
        reads_weight = any(shape in weight_shapes for shape in _shapes(node, "input_shapes"))
        if writes_weight and not reads_weight:
            weights.append(index)
        elif writes_weight == reads_weight:
            unclear_ns += node.duration_ns
    return weights, unclear_ns


def _weight_shapes(graph: Graph, order: list[int]) -> dict[str, set[tuple[int, ...]]]:
    """Return module -> shapes of the weights of its GEMMs, as read and transposed."""
    shapes: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for index in order:
        node = graph.node(index)
        if node.phase is Phase.FORWARD and _operator(node) in _GEMMS:
            for shape in _shapes(node, "input_shapes")[-1:]:
                shapes[node.text("module")] |= {shape, (*shape[:-2], *shape[:-3:-1])}
    return shapes


def _operator(node: Node) -> str:
    return node.text("op").rsplit("::", 1)[-1].split(".", 1)[0]


def _shapes(node: Node, column: str) -> list[tuple[int, ...]]:
    """Return the shapes of two or more dimensions in a column."""
    text = node.text(column)
    values = cast("list[Any]", msgspec.json.decode(text)) if text else []
    sizes = (cast("list[Any]", value) for value in values if isinstance(value, list))
    return [
        tuple(size) for size in sizes if len(size) > 1 and all(type(side) is int for side in size)
    ]


EMBEDDING = "embedding_layer"
"""SimAI excludes rows of this name from the pipeline's bubble."""


@dataclass(slots=True)
class LayerTimes:
    """One rank's step, by scope.

    Attributes:
        graph: the step.
        micro_batches: scopes of each captured micro-batch, in forward order.
        updates: the optimizer.
        evaluation: forwards without a backward, once per step.
        split: nodes of the backward that compute weight gradients.
        losses: communication that the format cannot express.
        sent_bytes: maximum over micro-batches and phases of the bytes sent to other stages.
        phaseless_ns: compute without a phase.
    """

    graph: Graph
    micro_batches: list[list[Scope]]
    updates: Scope
    evaluation: Scope
    split: GradientSplit
    losses: Losses
    sent_bytes: int
    phaseless_ns: int

    @property
    def total_ns(self) -> int:
        """Compute time of the step as captured."""
        compute = self.graph.gpu_compute
        return int(self.graph.nodes.duration_ns[compute].sum())


def layer_times(graph: Graph, grain: Grain) -> LayerTimes:
    """Return the compute and communication of each scope of a step.

    Args:
        graph: one rank's step.
        grain: scope of a row; without module roles in the trace, each module is one.

    Raises:
        ExportError: the graph has no GPU time, or a communication without bytes or group.
        GraphError: the graph has a cycle.
    """
    if not (graph.gpu_compute & (graph.nodes.duration_ns > 0)).any():
        raise ExportError(
            f"the graph has no GPU time, so its workload would be empty\n  {REMEDY}",
            code="export-empty-graph",
        )
    device = (graph.gpu_compute | graph.communication).tolist()
    indices: list[int] = graph.topological_order().tolist()
    order = [index for index in indices if device[index]]
    split, losses = split_gradients(graph, order), Losses()
    slots = SlotAssigner(graph, losses)
    names = _row_names(graph, grain)
    scopes: dict[int, dict[str, Scope]] = {}
    in_pipeline = graph.job.world.sizes.get(AXIS, 1) > 1
    # Optimizer and evaluation run once per step and are no part of the bubble.
    updates = Scope(EMBEDDING if in_pipeline else "optimizer")
    evaluation = Scope(EMBEDDING if in_pipeline else "evaluation")
    evaluating: list[bool] = graph.evaluating.tolist()
    sent, phaseless_ns = Counter[tuple[int, Phase]](), 0
    after_backward = False
    number = 0  # micro-batch; a node without one belongs to that of the node before it
    newest = ""  # scope of the newest compute; a gradient bucket is counted there
    for index in order:
        node = graph.node(index)
        recorded = node.value("micro_batch")
        number = number if recorded < 0 else recorded
        forward = node.phase in (Phase.FORWARD, Phase.NONE)
        slot = Slot.FORWARD if forward else Slot.INPUT
        if node.phase is not Phase.NONE:
            after_backward = node.phase is Phase.BACKWARD
        elif after_backward and node.kind.is_communication:
            # The script itself reduces gradients after the backward.
            slot = Slot.WEIGHT
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
            scope = scopes.setdefault(number, {}).setdefault(name, Scope(name))
        if not node.kind.is_communication:
            scope.compute(slot, node.duration_ns)
        elif (call := slots.assign(node, slot)) is not None:
            scope.communicate(call, slot)
    batches = [[*scopes[number].values()] for number in sorted(scopes)]
    return LayerTimes(graph, batches or [[]], updates, evaluation, split, losses,
                max(sent.values(), default=0), phaseless_ns)  # fmt: skip


def _row_names(graph: Graph, grain: Grain) -> list[str]:
    """Return the row name of each node."""
    if not graph.job.modules:
        return [_without_spaces(path) or "other" for path in graph.text("module")]
    scoping = scopes_of(graph, grain)
    names = [_without_spaces(scope.path) or scope.role for scope in scoping.scopes]
    for at, scope in enumerate(scoping.scopes):
        if scope.role == "other" and scope.path:
            names[at] += ".other"
    positions: list[int] = scoping.of.tolist()
    return [names[position] for position in positions]


def _without_spaces(path: str) -> str:
    return re.sub(r"\s+", "_", path)
