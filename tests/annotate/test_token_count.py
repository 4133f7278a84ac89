"""Tokens of a step: the ids that its model reads, and how many it trains."""

from pathlib import Path

import numpy as np

from onerank.annotate.token_count import micro_batch_of, token_ids, tokens_of
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Phase

TRACES = Path(__file__).parents[2] / "traces"
LONG = "Tensor(long int)"


def test_a_step_trains_what_its_embedding_looks_up():
    graph = convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]
    assert tokens_of(graph) == (4096, "4096 looked up in the embedding by this rank")
    on_cpu = convert_directory(TRACES / "cpu-llama-2l-tp4")[0]
    assert tokens_of(on_cpu)[0] == 2 * 64


def test_tokens_of_a_graph_without_embedding_are_not_known(trace, mm):
    assert tokens_of(trace(mm(8, 8, 8))) == (None, "not known")


def test_token_ids_may_stand_behind_positions_that_are_no_tokens(trace):
    # BERT on a CPU: a row of 512 types is cut to 40 before the 3 x 40 tokens are looked up, flat
    graph = trace(
        {"op": "aten::gather", "inputs": [(LONG, [1, 512]), ("Int", []), (LONG, [1, 40])]},
        {"op": "aten::index_select", "inputs": [("Tensor(float)", [9, 8]), ("Int", []),
                                               (LONG, [120])]},
        {"op": "aten::copy_", "inputs": [(LONG, [3, 40]), (LONG, [3, 40])]},
        {"op": "aten::index_select", "inputs": [("Tensor(float)", [2, 8]), ("Int", []),
                                               (LONG, [120])]},
    )  # fmt: skip
    phase = np.full(len(graph), Phase.FORWARD, dtype=np.uint8)
    assert micro_batch_of(graph.with_columns(phase=phase)) == 3


def test_token_ids_that_forward_has_flat_are_those_of_the_gradient(trace):
    # nn.Embedding on a CPU, of a script that makes its tokens before forward
    table = ("Tensor(float)", [9, 8])
    graph = trace(
        {"op": "aten::index_select", "inputs": [table, ("Int", []), (LONG, [120])]},
        {"op": "aten::embedding_dense_backward",
         "inputs": [("Tensor(float)", [3, 40, 8]), (LONG, [3, 40]), ("Int", [])]},
        {"op": "aten::embedding_dense_backward",  # positions
         "inputs": [("Tensor(float)", [40, 8]), (LONG, [40]), ("Int", [])]},
    )  # fmt: skip
    phase = np.where(np.arange(len(graph)) < 2, Phase.FORWARD, Phase.BACKWARD)
    assert token_ids(graph.with_columns(phase=phase.astype(np.uint8))) == [(3, 40)]
