"""Strides of operands in an execution trace."""

import json

import pytest

from onerank.converters.sources.kineto.read.execution_trace import load_execution_trace
from onerank.ir import StringTable

ROWS, COLUMNS = [8, 1], [1, 8]


@pytest.mark.parametrize(
    ("shapes", "strides", "kept"),
    [
        ([[8, 8], [8, 8]], [ROWS, ROWS], False),
        ([[8, 8], [8, 8]], [ROWS, COLUMNS], True),
        ([[[8, 8], [8, 8]], []], [[ROWS, COLUMNS], []], True),  # a list of tensors, and a number
        ([[[8, 8], [8, 8]], []], [[ROWS, ROWS], []], False),
        ([[1, 8]], [[64, 1]], False),  # the stride of a single row is not used
        ([[]], [[]], False),
        ([[8, 8]], [ROWS, ROWS], False),  # not those of these operands
        ([[8, 8]], "<Object>", False),
    ],
)
def test_only_strides_of_other_than_contiguous_operands_are_kept(shapes, strides, kept, tmp_path):
    operands = {"values": shapes, "shapes": shapes, "types": ["Tensor(float)"] * len(shapes)}
    attribute = {"name": "rf_id", "type": "uint64", "value": 1}
    root = {"id": 1, "name": "root", "ctrl_deps": 1, "attrs": []}
    node = {"id": 2, "name": "aten::mm", "ctrl_deps": 1, "attrs": [attribute]}
    empty = {"values": [], "shapes": [], "types": []}
    trace = {
        "schema": "1.1.1-chakra.0.0.4",
        "nodes": [
            {**root, "inputs": empty, "outputs": empty},
            {**node, "inputs": {**operands, "strides": strides}, "outputs": empty},
        ],
    }
    path = tmp_path / "et.json"
    path.write_text(json.dumps(trace, separators=(",", ":")))
    strings = StringTable()
    (code,) = load_execution_trace(path, strings).operands[6]
    assert strings[int(code)] == (json.dumps(strides, separators=(",", ":")) if kept else "")
