"""Tensor locations from the texts of operand values."""

from pathlib import Path

import numpy as np
import pytest

from onerank.annotate.passes.parse_tensor_ids import parse_tensor_ids
from onerank.annotate.passes.tensor_locations import (
    TensorLocation,
    ValueTexts,
    call_of_node,
    parse_locations,
    tensor_accesses,
)
from onerank.converters.sources.kineto import convert_directory

TRACES = Path(__file__).parents[3] / "traces"


@pytest.mark.parametrize(
    ("text", "tensors"),
    [
        ('[[12,34,5,67,2,"cuda:0"],[1,4096,8],true,"<None>"]', [(12, 34, 5)]),
        ('[[[1,2,0,4,2,"cpu"],[3,4,0,4,2,"cpu"]],7,"x"]', [(1, 2, 0), (3, 4, 0)]),
        ('[[12345678,123456789012345,0,4,2,"cuda:0"]]', [(12345678, 123456789012345, 0)]),
        ('[[1,1234567890123456,0,4,2,"cuda:0"]]', []),  # no id has 16 digits
        ('[1,2,3,4,5,"five numbers, then a word"]', [(1, 2, 3)]),
        ('[0.5,2,3,4,5,"no id"]', []),
        ('[1,2,3,4,"too few"]', []),
        ('[1,2,3,4,5,6,"too many"]', []),
        ('[[1,,0,4,2,"cuda:0"]]', []),
        ('["1,2,3,4,5,"]', []),
        ('"', []),
        ('[1,"', []),
        ("", []),
        ("[12345678", []),
        ('[[7,8,9,1,2,"ünïcode:0"],[7,8,9,1,2,"cpu"]]', [(7, 8, 9), (7, 8, 9)]),
    ],
)
def test_a_tensor_is_six_values_the_last_a_device(text: str, tensors: list[tuple[int, int, int]]):
    other = '[[7,8,9,1,2,"cpu"]]'
    counts, *columns = parse_tensor_ids([other, text, other])
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    assert counts.tolist() == [1, len(tensors), 1]
    assert rows == [(7, 8, 9), *tensors, (7, 8, 9)]


def test_all_calls_of_a_capture_equal_calls_read_one_by_one():
    graph = convert_directory(TRACES / "cpu-llama-2l-tp4")[0]
    nodes, call_of = graph.nodes, call_of_node(graph)
    rows = [row for row in range(len(graph)) if call_of(row) is not None]
    pairs = [(call_of(row), graph.strings[int(nodes.input_values[row])]) for row in rows]
    wanted = [parse_locations(call.inputs, text) for call, text in pairs]
    counts = [len(locations) for locations in wanted]
    places = np.arange(len(rows))
    accesses = tensor_accesses(
        ValueTexts([text for _, text in pairs], places, np.zeros(len(rows), dtype=np.int64)),
        (np.array(counts), np.zeros(len(rows), dtype=np.int64)),
        lambda call, result, text: () if result else parse_locations(pairs[call][0].inputs, text),
    )
    assert [tuple(accesses.places(call)) for call in range(len(rows))] == wanted


def test_an_unrecorded_location_stays_unknown():
    single = np.array([1])
    accesses = tensor_accesses(
        ValueTexts(["", '[[1, 2, 3, 4, 2, "cpu"]]'], single, single - 1),
        (single, single),
        lambda call, result, text: (None,) if result else (TensorLocation(1, 2, 3),),
    )
    assert accesses.places(0) == [TensorLocation(1, 2, 3), None]
    assert accesses.result.tolist() == [False, True]
