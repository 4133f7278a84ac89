"""Tell the backward's part for the input's gradient from the part for the weights'."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np

from onerank.converters.pipeline.split import split_backward
from onerank.ir import Graph, Node, Phase
from onerank.ir.errors import ExportError
from onerank.ir.graph import Mask

_PRODUCTS = ("mm", "addmm", "linear", "_grouped_mm", "_scaled_mm")
_GRADIENTS_OF_WEIGHTS = ("embedding_dense_backward", "_embedding_bag_dense_backward")


@dataclass(slots=True)
class Split:
    """Which nodes make gradients of weights, and how that was told.

    Attributes:
        weights: of the backward's nodes those for weights, bool[n].
        by_shape: micro-batches whose operands the trace does not tell, so that shapes decided.
        unclear_ns: time of their matrix products that shapes do not place; counted as the
            input's.
    """

    weights: Mask
    by_shape: list[int] = field(default_factory=list[int])
    unclear_ns: int = 0


def split_gradients(graph: Graph, order: list[int]) -> Split:
    """Split every backward of a step.

    Where the trace tells which node reads what, the input's gradient is what the gradient of the
    embedding, or the one sent to another stage, depends on. Else a matrix product of the size of
    a weight of its module makes a weight's gradient.

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
