"""The order of the example's hand-written pipeline is the order the export expands to."""

import runpy
import sys
from pathlib import Path

import pytest

from onerank.converters.expand.pipeline import PipelineSchedule

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.mark.parametrize(
    ("schedule", "script", "chunks"),
    [("1f1b", "1f1b", 1), ("gpipe", "gpipe", 1), ("interleaved:2", "1f1b", 2)],
)
def test_the_example_s_order(schedule, script, chunks, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    actions = runpy.run_path(str(EXAMPLES / "train_llama_pp.py"))["actions"]
    for ranks, micro_batches in ((2, 8), (4, 8), (4, 4)):
        expanded = PipelineSchedule.parse(schedule).actions(ranks, micro_batches)
        for rank, expected in enumerate(expanded):
            script_actions = actions(script, rank, ranks, micro_batches, chunks)
            assert [*script_actions] == [(a.phase == "B", a.micro_batch, a.chunk) for a in expected]
