"""Tokens of a captured step: the shape of its token ids, and the number of trained tokens."""

import math
from collections import Counter

import msgspec
import numpy as np

from onerank.ir import Graph, Phase
from onerank.ir.arrays import I64

_INTEGERS = ("Tensor(long int)", "Tensor(int)", "Tensor(bool)")
# Forward nodes that are searched for the embedding, from the start of the step.
_FIRST = 400
_GRADIENT = "aten::embedding_dense_backward"
_EMBED = ("aten::embedding", "aten::index_select")
# Operator -> position of the indices. The second applies to traces without the first. A CPU's
# embedding is a selection by index.
_LOOK_UPS: tuple[dict[str, int], ...] = (
    {"aten::embedding": 1, "embedding": 1},
    {"aten::index_select": 2},
)


def token_ids(graph: Graph) -> list[tuple[int, int]]:
    """Return (micro-batch, sequence) of the integer matrices at the start of the step.

    The embedding of a CPU takes flat token ids. Then the result has the matrices with as many
    elements before or after it, or else those of its gradient. Ranks of a cp axis have a part of
    each sequence; the result has the length of the whole one. There are several results if the
    graph does not distinguish token ids from other integers, and none without such a matrix.
    """
    nodes, strings = graph.nodes, graph.strings
    rows = np.flatnonzero((nodes.input_shapes > 0) & (nodes.phase == Phase.FORWARD))
    rows = rows[np.argsort(nodes.start_ns[rows], kind="stable")]
    parts = graph.job.world.sizes.get("cp", 1)
    seen = Counter[tuple[int, int]]()
    tokens, before = 0, set[tuple[int, int]]()
    for row in rows[:_FIRST].tolist():
        shapes = _integers(graph, row)
        seen.update(shape for shape in shapes if len(shape) == 2 and shape[1] > 1)
        if not tokens and strings[int(nodes.op[row])] in _EMBED:
            tokens = math.prod(shapes[-1]) if shapes else 0
            before = set(seen)
            if not tokens or any(math.prod(shape) == tokens for shape in seen):
                break
    fits = {shape for shape in seen if not tokens or math.prod(shape) == tokens}
    text = fits or before or set(seen) or _of_gradients(graph)
    # transformers pads labels by one token before it shifts them.
    shifted = {(batch, length + 1) for batch, length in text}
    return [(batch, length * parts) for batch, length in text if (batch, length) not in shifted]


def _of_gradients(graph: Graph) -> set[tuple[int, int]]:
    """Return (micro-batch, sequence) of the indices of embedding gradients."""
    nodes, strings = graph.nodes, graph.strings
    codes = [code for code in np.unique(nodes.op).tolist() if strings[code] == _GRADIENT]
    rows = np.flatnonzero(np.isin(nodes.op, codes) & (nodes.input_shapes > 0))
    shapes = {shape for row in rows.tolist() for shape in _integers(graph, row)}
    return {shape for shape in shapes if len(shape) == 2 and shape[1] > 1}


def micro_batch_of(graph: Graph) -> int | None:
    """Return the number of sequences in a micro-batch; None if the trace does not show it."""
    batches = {batch for batch, _ in token_ids(graph)}
    return batches.pop() if len(batches) == 1 else None


def tokens_of(graph: Graph) -> tuple[int | None, str]:
    """Return (tokens that all ranks train in a step, source) from the embedding's look-ups.

    These are the indices of the forward's largest embedding, times the ranks with other data (dp)
    or another part of the sequence (cp). None without an embedding.
    """
    rows = np.flatnonzero(graph.nodes.phase == Phase.FORWARD)
    counts = next(
        filter(None, (_looked_up(graph, rows, operators) for operators in _LOOK_UPS)), None
    )
    if counts is None:
        return None, "not known"
    tokens = max(counts.values())
    sizes = graph.job.world.sizes
    copies = sizes.get("dp", 1) * sizes.get("cp", 1)
    text = f"{tokens} looked up in the embedding by this rank"
    return tokens * copies, text if copies == 1 else f"{text} x {copies} ranks (dp x cp)"


def _looked_up(graph: Graph, rows: I64, operators: dict[str, int]) -> dict[tuple[int, ...], int]:
    """Return shape of an embedding table -> number of indices looked up in it."""
    nodes, strings = graph.nodes, graph.strings
    names = np.unique(nodes.name[rows]).tolist()
    counts: dict[tuple[int, ...], int] = {}
    for code in [code for code in names if strings[code] in operators]:
        at = operators[strings[code]]
        shape_codes = nodes.input_shapes[rows[nodes.name[rows] == code]]
        for text, count in zip(*np.unique(shape_codes, return_counts=True), strict=True):
            shapes: list[list[int]] = msgspec.json.decode(strings[int(text)] or "[]")
            if len(shapes) > at and shapes[0] and shapes[at]:
                weight = tuple(shapes[0])
                counts[weight] = counts.get(weight, 0) + int(count) * math.prod(shapes[at])
    return counts


def _integers(graph: Graph, row: int) -> list[tuple[int, ...]]:
    """Return the shapes of the integer tensors among a call's arguments."""
    types = graph.strings[int(graph.nodes.input_types[row])]
    if not any(kind in types for kind in _INTEGERS):
        return []
    kinds = msgspec.json.decode(types, type=list[str])
    shapes = msgspec.json.decode(graph.strings[int(graph.nodes.input_shapes[row])])
    pairs = zip(kinds, shapes, strict=True)
    return [tuple(shape) for kind, shape in pairs if kind in _INTEGERS]
