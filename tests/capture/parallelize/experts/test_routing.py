"""Static routing: the `--moe-routing` option, tokens per expert, and expert indices."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raised import raises_code

from onerank.capture.parallelize.experts.routing import (
    GroupRank,
    Routing,
    StaticRouting,
    chosen_experts,
    parse_routing,
)
from onerank.ir.errors import CaptureError, FormatError, SliceError


def shares(text, *, experts=8, tokens=64, top_k=2):
    return parse_routing(text).tokens_per_expert(0, experts, tokens, top_k)


def test_balanced_routing_gives_experts_equal_counts():
    assert shares("balanced") == [16] * 8
    assert shares("balanced", tokens=9, top_k=2) == [3, 3, 2, 2, 2, 2, 2, 2]  # 18 = 8 x 2 + 2


def test_zipf_gives_expert_i_a_weight_of_one_over_i_plus_one():
    # weights 1, 1/2, 1/3, 1/4 of 25/12: 100 tokens go 48, 24, 16, 12
    assert shares("zipf:1", experts=4, tokens=100, top_k=1) == [48, 24, 16, 12]
    assert shares("zipf:0") == shares("balanced")


def test_tokens_above_an_experts_limit_go_to_other_experts():
    # weights 1, 1/4, 1/9, 1/16: the first would get 70% of 200; it gets the 100 tokens there are,
    # the others share 100 by 36 : 16 : 9
    assert shares("zipf:2", experts=4, tokens=100, top_k=2) == [100, 59, 26, 15]


@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(4, 12),
    st.floats(0, 3),
)
def test_indices_repeat_each_expert_by_its_count(tokens, top_k, experts, exponent):
    routing = Routing("zipf", exponent)
    counts = routing.tokens_per_expert(0, experts, tokens, top_k)
    index = chosen_experts(counts, top_k)
    assert index.shape == (tokens, top_k)
    assert torch.bincount(index.flatten(), minlength=experts).tolist() == counts
    assert all(len(set(row)) == top_k for row in index.tolist())


def test_tokens_are_shuffled_from_a_separate_seed():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    index = chosen_experts([16] * 8, 2)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(index, chosen_experts([16] * 8, 2))
    assert len({tuple(row) for row in index[:8].tolist()}) > 4


def test_layers_with_equal_distributions_share_indices():
    chosen = torch.zeros(64, 2, dtype=torch.long)
    balanced = StaticRouting(Routing("balanced"))
    assert balanced.indices(0, 8, chosen) is balanced.indices(5, 8, chosen)
    table = StaticRouting(Routing("file", table=((1,) * 8, (2,) + (1,) * 7)))
    assert table.indices(0, 8, chosen) is not table.indices(1, 8, chosen)


FILES = {
    "one.json": ("[3, 1, 2, 2]", ((3.0, 1.0, 2.0, 2.0),)),
    "two.json": ("[[3, 1], [0.5, 0.5]]", ((3.0, 1.0), (0.5, 0.5))),
    "one.csv": ("3,1,2,2\n", ((3.0, 1.0, 2.0, 2.0),)),
    "two.csv": ("3,1\n\n0.5,0.5\n", ((3.0, 1.0), (0.5, 0.5))),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_one_line_for_all_layers_or_one_for_each(tmp_path, name):
    text, table = FILES[name]
    (tmp_path / name).write_text(text)
    routing = parse_routing(str(tmp_path / name))
    assert routing.table == table
    routing.check(layers=len(table), experts=len(table[0]))


def test_each_line_of_a_file_is_for_one_layer(tmp_path):
    (tmp_path / "f.json").write_text(json.dumps([[1, 1, 1, 1], [0, 0, 2, 2]]))
    routing = parse_routing(str(tmp_path / "f.json"))
    assert routing.tokens_per_expert(0, 4, 8, 2) == [4, 4, 4, 4]
    assert routing.tokens_per_expert(1, 4, 8, 2) == [0, 0, 8, 8]


BAD_OPTIONS = {
    "zipf:-1": "routing-bad-exponent",
    "zipf:nan": "routing-bad-exponent",
    "zipf:": "routing-bad-exponent",
    "zipf": "routing-bad-exponent",
    "balance": "routing-unknown",
}


@pytest.mark.parametrize("text", BAD_OPTIONS)
def test_unknown_routings_are_refused(text):
    with raises_code(BAD_OPTIONS[text], CaptureError):
        parse_routing(text)


BAD_FILES = {
    "heading.csv": ("a,b\n1,2\n", "csv-malformed", ("line 1", "'a'")),
    "negative.csv": ("1,2\n1,-2\n", "routing-bad-line", ("line 2", "[1.0, -2.0]")),
    "zero.csv": ("0,0\n", "routing-bad-line", ("line 1", "[0.0, 0.0]")),
    "empty.csv": ("", "routing-file-empty", ()),
    "empty.json": ("[]", "routing-file-empty", ()),
    "broken.json": ("[1,", "json-malformed", ()),
    "object.json": ('{"0": [1]}', "json-malformed", ("`object`",)),
    "mixed.json": ("[1, [2]]", "routing-file-malformed", ()),
    "infinite.csv": ("1,inf\n", "routing-bad-line", ("line 1", "[1.0, inf]")),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_malformed_files_are_refused(tmp_path, name):
    text, code, names = BAD_FILES[name]
    (tmp_path / name).write_text(text)
    with raises_code(code, FormatError, naming=(name, *names)):
        parse_routing(str(tmp_path / name))


def test_a_table_for_another_model_is_refused():
    routing = Routing("f.csv", table=((1.0,) * 8, (1.0,) * 8))
    with raises_code("routing-layer-count", SliceError):
        routing.check(layers=3, experts=8)
    with raises_code("routing-expert-count", SliceError):
        routing.check(layers=2, experts=16)


def test_a_table_that_gives_an_expert_a_token_twice_is_refused():
    routing = Routing("f.csv", table=((6.0, 1.0, 2.0, 1.0),))
    with raises_code("routing-share-too-large", naming=("f.csv", "60.0%", "1 / 2 = 50.0%")):
        routing.tokens_per_expert(0, 4, 10, 2)


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks", "tokens"), [(8, 2, 4, 2048), (256, 8, 8, 4096), (64, 6, 8, 4096)]
)
def test_experts_of_a_token_are_independent(experts, top_k, ranks, tokens):
    # Of C(n, k) sets of experts, those without an expert of a rank miss the rank.
    each = experts // ranks
    visited = 1 - math.comb(experts - each, top_k) / math.comb(experts, top_k)
    chosen = chosen_experts([tokens * top_k // experts] * experts, top_k)
    assert torch.bincount(chosen.flatten()).tolist() == [tokens * top_k // experts] * experts
    assert all(len({*row}) == top_k for row in chosen.tolist())
    visits = sum(int((chosen // each == rank).any(1).sum()) for rank in range(ranks))
    assert visits / (ranks * tokens) == pytest.approx(visited, rel=0.02)


def test_ranks_send_balanced_tokens_that_are_left_over_to_different_experts():
    # Eight ranks with one token of 8 of 128 experts: each receives eight, for eight of its experts.
    chosen = torch.zeros(1, 8, dtype=torch.int64)
    static = StaticRouting(Routing("balanced"))
    counts = static.counts(0, 128, 8, chosen)
    assert counts.sum(dim=0).tolist() == ([1] * 8 + [0] * 8) * 8
    assert counts.view(8, 8, 16).sum(dim=2).tolist() == [[1] * 8] * 8  # [from, to]
    for rank in range(8):
        index = static.indices(0, 128, chosen, GroupRank(rank, 8))
        assert torch.equal(torch.bincount(index.flatten(), minlength=128), counts[rank])
    # 40 tokens of 3 of 8 experts divide evenly: all ranks route alike.
    even = static.counts(0, 8, 4, torch.zeros(40, 3, dtype=torch.int64))
    assert even.tolist() == [[15] * 8] * 4
