"""Split a backward into input and weight gradients, which a SimAI row has in separate columns."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np

from onerank.converters.expand.pipeline.split_backward import split_backward
from onerank.ir import Graph, Node, Phase
from onerank.ir.arrays import Mask
from onerank.ir.errors import ExportError

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
    """Return the nodes of weight gradients, and the time of GEMMs that could be either gradient."""
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
            # The weight is the last matrix. `addmm` reads it transposed and `linear` does not, so
            # both orientations count.
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
