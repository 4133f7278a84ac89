"""Tokens of a captured step: the ids that its model reads, and the number that it trains on."""

import math
from collections import Counter

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.ir import Graph, Phase

I64 = npt.NDArray[np.int64]

_INTEGERS = ("Tensor(long int)", "Tensor(int)", "Tensor(bool)")
_FIRST = 400  # nodes of forward before the embedding, at most
_GRADIENT = "aten::embedding_dense_backward"
_EMBED = ("aten::embedding", "aten::index_select")
_LOOK_UPS: tuple[dict[str, int], ...] = (
    {"aten::embedding": 1, "embedding": 1},
    {"aten::index_select": 2},
)
"""Operator -> which operand holds the indices; the second where no trace of the first is left."""


def token_ids(graph: Graph) -> list[tuple[int, int]]:
    """Return (micro-batch, sequence) of the integer matrices that the step starts with.

    The embedding of a CPU takes token ids laid out flat: then they are the matrices of as many,
    before it or behind, or else those that its gradient takes. Ranks of a cp axis hold a part of
    each sequence; told is the whole one.
    Several where the graph does not tell which are token ids, none where it has no such matrix.
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
            if not tokens or any(math.prod(one) == tokens for one in seen):
                break
    fits = {one for one in seen if not tokens or math.prod(one) == tokens}
    text = fits or before or set(seen) or _of_gradients(graph)
    shifted = {(batch, length + 1) for batch, length in text}  # labels, padded for their shift
    return [(batch, length * parts) for batch, length in text if (batch, length) not in shifted]


def _of_gradients(graph: Graph) -> set[tuple[int, int]]:
    """Return (micro-batch, sequence) of the indices that gradients of embeddings take."""
    nodes, strings = graph.nodes, graph.strings
    codes = [code for code in np.unique(nodes.op).tolist() if strings[code] == _GRADIENT]
    rows = np.flatnonzero(np.isin(nodes.op, codes) & (nodes.input_shapes > 0))
    found = {shape for row in rows.tolist() for shape in _integers(graph, row)}
    return {shape for shape in found if len(shape) == 2 and shape[1] > 1}


def micro_batch_of(graph: Graph) -> int | None:
    """Return of how many sequences a micro-batch is; None where the trace does not tell."""
    found = {batch for batch, _ in token_ids(graph)}
    return found.pop() if len(found) == 1 else None


def tokens_of(graph: Graph) -> tuple[int | None, str]:
    """Return the tokens a step trains on all ranks, from what the step looks up in its embedding.

    The looked-up indices of forward's largest embedding, times the ranks that hold other data (dp)
    or another part of the sequence (cp). None where the graph has no embedding.
    """
    rows = np.flatnonzero(graph.nodes.phase == Phase.FORWARD)
    found = next(filter(None, (_looked_up(graph, rows, one) for one in _LOOK_UPS)), None)
    if found is None:
        return None, "not known"
    own = max(found.values())
    sizes = graph.job.world.sizes
    copies = sizes.get("dp", 1) * sizes.get("cp", 1)
    text = f"{own} looked up in the embedding by this rank"
    return own * copies, text if copies == 1 else f"{text} x {copies} ranks (dp x cp)"


def _looked_up(graph: Graph, rows: I64, operators: dict[str, int]) -> dict[tuple[int, ...], int]:
    """Return per shape of a table how many indices were looked up in it."""
    nodes, strings = graph.nodes, graph.strings
    names = np.unique(nodes.name[rows]).tolist()
    found: dict[tuple[int, ...], int] = {}
    for code in [code for code in names if strings[code] in operators]:
        at = operators[strings[code]]
        given = nodes.input_shapes[rows[nodes.name[rows] == code]]
        for text, count in zip(*np.unique(given, return_counts=True), strict=True):
            shapes: list[list[int]] = msgspec.json.decode(strings[int(text)] or "[]")
            if len(shapes) > at and shapes[0] and shapes[at]:
                weight = tuple(shapes[0])
                found[weight] = found.get(weight, 0) + int(count) * math.prod(shapes[at])
    return found


def _integers(graph: Graph, row: int) -> list[tuple[int, ...]]:
    """Return the shapes of the integer tensors among a call's arguments."""
    types = graph.strings[int(graph.nodes.input_types[row])]
    if not any(kind in types for kind in _INTEGERS):
        return []
    kinds = msgspec.json.decode(types, type=list[str])
    shapes = msgspec.json.decode(graph.strings[int(graph.nodes.input_shapes[row])])
    pairs = zip(kinds, shapes, strict=True)
    return [tuple(shape) for kind, shape in pairs if kind in _INTEGERS]
