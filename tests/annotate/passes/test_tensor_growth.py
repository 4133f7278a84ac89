"""Growth of the tensors of a step; equal segments are analysed once."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onerank.annotate.passes.resize import tensor_growth
from onerank.annotate.passes.resize.size_change import Change, infer_sizing
from onerank.annotate.passes.resize.tensor_growth import step_growth
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Edges, Graph

TRACES = Path(__file__).parents[3] / "traces"
FURTHER = 1_000_000


def twice(graph: Graph) -> Graph:
    """Return a step followed by a copy with other tensors."""
    nodes, count = graph.nodes, len(graph)
    strings = graph.strings.copy()

    def moved(text: str) -> str:
        def further(at: re.Match[str]) -> str:
            return f"[{int(at[1]) + FURTHER},{int(at[2]) + FURTHER},"

        return re.sub(r"\[(\d+),(\d+),(?=\d+,\d+,\d+,)", further, text)

    texts = {
        name: strings.encode(graph.text(name) + [moved(text) for text in graph.text(name)])
        for name in ("input_values", "output_values")
    }
    both = nodes.take(np.tile(np.arange(count), 2))
    ids = np.arange(2 * count, dtype=np.uint64)
    later = nodes.start_ns.max() + nodes.duration_ns.max() + 1
    start = np.concatenate([nodes.start_ns, nodes.start_ns + later])
    edges = graph.edges
    doubled = (np.concatenate([side, side + count]) for side in (edges.source, edges.target))
    return replace(
        graph,
        nodes=replace(both, id=ids, start_ns=start, **texts),
        edges=Edges.from_pairs(2 * count, *doubled, np.tile(edges.reason, 2)),
        strings=strings,
    )


def test_a_repeated_step_has_the_same_growth() -> None:
    graph = convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]
    sizing = infer_sizing(graph, Change(0, 8192), None)
    once, repeated = step_growth(graph, sizing), step_growth(twice(graph), sizing)
    count = len(graph)
    has_operands = once.of >= 0
    assert has_operands.sum() > 3000
    assert len(repeated.operands) == len(once.operands) < 700, "distinct ones, however many calls"
    for half in (repeated.of[:count], repeated.of[count:]):
        assert (half >= 0).tolist() == has_operands.tolist()
        rows = np.flatnonzero(has_operands).tolist()
        assert all(repeated.operands[half[row]] == once.at(row) for row in rows)
    assert {
        name: 2 * n for name, n in once.inferred_from_sizes.items()
    } == repeated.inferred_from_sizes


@pytest.mark.parametrize("length", [0, 8, 512, 1 << 32])
def test_the_length_of_segments_does_not_change_the_growth(monkeypatch, length: int) -> None:
    """From cuts only at the maximum length to a cut before every call."""
    graph = twice(convert_directory(TRACES / "cpu-llama-2l-tp4")[0])
    sizing = infer_sizing(graph, Change(0, 512), None)
    usual = step_growth(graph, sizing)
    monkeypatch.setattr(tensor_growth, "SEGMENT_LENGTH", length)
    growth = step_growth(graph, sizing)
    assert all(growth.at(node) == usual.at(node) for node in range(len(graph)))
    assert growth.inferred_from_sizes == usual.inferred_from_sizes
