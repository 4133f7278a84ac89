"""Context parallelism: ranks compute the same numbers as the whole model."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from context_job import (
    BATCH,
    CAPPED,
    CHUNKS,
    EAGER,
    EXPERTS,
    LATENT,
    LEADING_PADDING,
    PACKED,
    SEQUENCE,
    SINKS,
    TRAILING_PADDING,
    compared,
    gpt2,
    model,
    packed,
    tokens,
)
from torch.utils._pytree import tree_map

from onerank.capture import Options
from onerank.capture.parallelize.context import (
    context_model,
    sequence_attention,
    sharded_batch,
)
from onerank.capture.parallelize.context.sequence_attention import Context
from onerank.capture.parallelize.shard_model import SlicingOptions, slice_to_rank
from onerank.capture.verify.slice_check import compare_slices
from onerank.ir import World

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")


FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cp only": ("Llama", {}, {"cp": 2}),
    "three ranks": ("Llama", {}, {"cp": 3}),
    "sequence parallel": ("Qwen3", {}, {"tp": 2, "cp": 2, "sp": True}),
    "transformers' borders": ("Mistral", {}, {"tp": 2, "cp": 2, "tp_style": "hf"}),
    "stages, tied": ("Gemma", {"head_dim": 8}, {"cp": 2, "pp": 2}),
    "fewer experts' ranks": ("Mixtral", EXPERTS, {"cp": 4, "ep": 2}),
    "more experts' ranks": ("Mixtral", EXPERTS, {"cp": 2, "dp": 2, "ep": 4}),
    "latent attention": ("DeepseekV3", LATENT, {"tp": 2, "cp": 2}),
    "latent attention, stages": ("DeepseekV2", LATENT, {"cp": 3, "pp": 2}),
    "everything": (
        "Mixtral",
        EXPERTS,
        {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "sp": True},
    ),
}


@pytest.mark.parametrize("comm", ["all_gather", "p2p"])
@pytest.mark.parametrize("form", FORMS)
def test_context_parallel_ranks_match_the_whole_model(form, comm):
    kind, changes, options = FORMS[form]
    ignored = tokens()
    ignored[0, 5:9] = -100
    rows = compared(model(kind, **changes), ignored, **options, cp_comm=comm)
    assert sum(row.breaches for row in rows) == 0
    losses = next(row for row in rows if row.what == "loss")
    assert losses.tensors == Options(**options).world.size // options.get("pp", 1)
    gradients = [row for row in rows if row.what == "gradients"]
    assert len(gradients) >= 8
    assert all(0 < row.max_rel < 1e-4 for row in gradients)


@pytest.mark.parametrize("more", [{}, {"attention_mask": TRAILING_PADDING}])
@pytest.mark.parametrize(
    ("kind", "changes", "options"),
    [
        ("Llama", {}, {"cp": 3, "cp_comm": "p2p"}),
        ("Qwen3", {}, {"tp": 2, "cp": 2, "sp": True}),
        ("Mixtral", EXPERTS, {"cp": 2, "ep": 2}),
    ],
)
def test_a_script_that_reads_logits_gets_those_of_the_whole_sequence(kind, changes, options, more):
    """The script computes its own loss, a weighted mean of all logits."""
    options = {**options, "cp_comm": "all_gather"} if more else options
    sliced, batch = model(kind, **changes), {"input_ids": tokens(), **more}
    rows, why_not, _ = compare_slices(sliced, (), batch, Options(**options), lambda _: None)
    assert not why_not
    assert sum(row.breaches for row in rows) == 0
    assert {row.what for row in rows} == {"loss", "logits", "gradients", "weights"}
    assert all(0 < row.max_rel < 1e-4 for row in rows if row.what == "gradients")


def test_unread_logits_are_not_gathered(recorder):
    sliced = model()
    slice_to_rank(sliced, World.of(cp=4), 1, recorder.new_group, SlicingOptions())
    ones = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    output = sliced(tokens(), ones, labels=tokens())  # by position, with a mask that masks nothing
    before = len(recorder.calls)
    output.loss *= 0.5  # in place, as the HF Trainer scales it
    assert output.loss.isfinite()
    for _ in range(2):
        assert output["logits"] is output.logits is output[1] is output.get("logits")
    assert output.logits.shape == (BATCH, SEQUENCE, 96)
    part = BATCH * (SEQUENCE // 4) * 96 * 4
    calls = [(call.collective, call.bytes) for call in recorder.calls[before:]]
    assert calls == [("all_gather", part)]


@pytest.mark.parametrize(
    "read",
    [
        lambda output: list(output.values())[1],
        lambda output: dict(output.items())["logits"],
        lambda output: copy.copy(output).logits,
        lambda output: (
            tree_map(lambda tensor: tensor, output).logits
        ),  # as DistributedDataParallel does
    ],
)
def test_every_read_of_logits_returns_the_whole_sequence(recorder, read):
    sliced = model()
    slice_to_rank(sliced, World.of(cp=4), 1, recorder.new_group, SlicingOptions())
    output = sliced(tokens(), labels=tokens())
    assert read(output).shape == (BATCH, SEQUENCE, 96)


def test_a_script_can_replace_the_logits(recorder):
    sliced = model()
    slice_to_rank(sliced, World.of(cp=4), 1, recorder.new_group, SlicingOptions())
    output = sliced(tokens(), labels=tokens())
    output.logits = output.logits.double()
    assert output["logits"].dtype == output[1].dtype == torch.float64


WINDOWS = {
    "within a chunk": ("Mistral", {"sliding_window": 4}, {"cp": 2}),
    "over chunks": ("Mistral", {"sliding_window": 11}, {"tp": 2, "cp": 3}),
    "alternating layers": (
        "Gemma3Text",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"],
         "head_dim": 8},
        {"cp": 2, "pp": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", WINDOWS)
def test_windows_span_chunks_of_other_ranks(form):
    kind, changes, options = WINDOWS[form]
    rows = compared(model(kind, **changes), **options)
    assert sum(row.breaches for row in rows) == 0
    assert all(0 < row.max_rel < 1e-4 for row in rows if row.what == "gradients")


def test_verification_detects_a_missing_window(monkeypatch):
    attend_all = Context.attend
    monkeypatch.setattr(
        Context, "attend", lambda *given: attend_all(*given[:4], replace(given[4], window=None))
    )
    rows = compared(model("Mistral", sliding_window=11), cp=2)
    assert sum(row.breaches for row in rows if row.what == "gradients") > 0


# Padding, packing and eager attention ------------------------------------------------------------


STRUCTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "leading padding": ("Llama", {}, {"attention_mask": LEADING_PADDING}, {"cp": 3}),
    "trailing padding with labels": (
        "Qwen3",
        {},
        {"attention_mask": TRAILING_PADDING},
        {"tp": 2, "cp": 2},
    ),
    "packed": ("Llama", {}, PACKED, {"cp": 3}),
    "packed, windows": ("Mistral", {"sliding_window": 5}, PACKED, {"cp": 2, "pp": 2}),
    "packed, latent": ("DeepseekV3", LATENT, PACKED, {"cp": 2}),
    "packed, experts": ("Mixtral", EXPERTS, PACKED, {"cp": 2, "ep": 2}),
    "packed, with a cache": ("Llama", {}, {**PACKED, "use_cache": True}, {"cp": 2}),
    "labels shifted already": ("Llama", {}, {"shift_labels": tokens(7)}, {"cp": 2}),
    "eager attention": ("Llama", EAGER, {}, {"cp": 3}),
    "capped": ("Gemma2", CAPPED, {}, {"tp": 2, "cp": 2}),
    "capped, padded": ("Gemma2", CAPPED, {"attention_mask": LEADING_PADDING}, {"cp": 2, "pp": 2}),
    "capped, packed": ("Gemma2", CAPPED, PACKED, {"cp": 3}),
    "sinks": ("GptOss", SINKS, {}, {"cp": 2, "ep": 2}),
    "sinks, packed": ("GptOss", SINKS, PACKED, {"cp": 2}),
    "within chunks": ("Llama4Text", CHUNKS, {"attention_mask": LEADING_PADDING}, {"cp": 2}),
}


@pytest.mark.parametrize("form", STRUCTURES)
def test_padded_and_packed_sequences_match_the_whole_model(form):
    kind, changes, more, sizes = STRUCTURES[form]
    labels = tokens()
    labels[LEADING_PADDING == 0] = -100
    rows = compared(model(kind, **changes), labels, more, **sizes)
    assert sum(row.breaches for row in rows) == 0
    assert all(0 < row.max_rel < 1e-4 for row in rows if row.what == "gradients")


RINGS: dict[str, tuple[str, dict[str, Any], tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "cp only": ("Llama", {}, ((6, 18), (12, 6, 6)), {"cp": 3}),
    "slices": ("Qwen3", {}, ((4, 12, 8), (24,)), {"tp": 2, "cp": 2}),
    "latent, stages": ("DeepseekV3", LATENT, ((8, 16), (4, 20)), {"cp": 2, "pp": 2}),
    "experts": ("Mixtral", EXPERTS, ((8, 16), (12, 12)), {"cp": 2, "ep": 2}),
    "a window longer than all sequences": (
        "Mistral",
        {"sliding_window": 20},
        ((4, 20), (16, 8)),
        {"cp": 2},
    ),
}


@pytest.mark.parametrize("form", RINGS)
def test_rings_of_packed_sequences_match_the_whole_model(form):
    kind, changes, lengths, sizes = RINGS[form]
    options = {**sizes, "cp_comm": "p2p"}
    rows = compared(model(kind, **changes), None, packed(*lengths), **options)
    assert sum(row.breaches for row in rows) == 0
    assert all(0 < row.max_rel < 1e-4 for row in rows if row.what == "gradients")


@pytest.mark.parametrize("comm", ["all_gather", "p2p"])
def test_trailing_padding_without_labels_needs_no_mask(monkeypatch, comm):
    masks: list[Any] = []
    attend_all = Context.attend

    def record_mask(*given: Any) -> torch.Tensor:
        masks.append(given[5])
        return attend_all(*given)

    monkeypatch.setattr(Context, "attend", record_mask)
    labels = tokens().masked_fill(TRAILING_PADDING == 0, -100)
    rows = compared(model(), labels, {"attention_mask": TRAILING_PADDING}, cp=3, cp_comm=comm)
    assert sum(row.breaches for row in rows) == 0
    assert masks == [None] * 3 * 2 + [None] * (len(masks) - 6)


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_verification_detects_attention_across_packed_sequences(monkeypatch, kind):
    monkeypatch.setattr(sharded_batch, "_knows_positions", lambda _: False)
    changes = CAPPED if kind == "Gemma2" else {}
    rows = compared(model(kind, **changes), None, PACKED, cp=2)
    assert sum(row.breaches for row in rows if row.what == "gradients") > 0


def test_learned_positions_match_the_part():
    rows = compared(gpt2(), cp=3)
    assert sum(row.breaches for row in rows) == 0


def test_the_last_token_of_a_chunk_learns_from_the_first_of_the_next():
    labels = torch.full((BATCH, SEQUENCE), -100)
    labels[:, 6] = 5  # the first token of chunk 1, which rank 1 has; rank 0 predicts it
    labels[:, 18] = 7  # the first token of chunk 3, which rank 0 has; rank 1 predicts it
    rows = compared(model(), labels, cp=2)
    assert sum(row.breaches for row in rows) == 0


def test_verification_detects_unreduced_key_gradients(monkeypatch):
    def keep_local_chunks(x: torch.Tensor, group: Any) -> torch.Tensor:
        chunks = x.chunk(2 * group.size(), dim=2)
        return torch.cat([chunks[chunk] for chunk in sequence_attention.chunks_of(group)], dim=2)

    monkeypatch.setattr(sequence_attention, "_reduce_scatter_sequence", keep_local_chunks)
    rows = compared(model(), cp=2)
    wrong = {row.module for row in rows if row.what == "gradients" and row.breaches}
    assert {"LlamaAttention.k_proj", "LlamaAttention.v_proj"} <= wrong
    assert "LlamaForCausalLM.lm_head" not in wrong


def test_verification_detects_an_unreduced_loss(monkeypatch):
    monkeypatch.setattr(context_model._SumOfParts, "apply", lambda loss, *_: loss)
    rows = compared(model(), cp=2)
    assert next(row for row in rows if row.what == "loss").breaches == 2


BALANCED = {**EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Mixtral", {"cp": 2, "ep": 2}),
        ("Mixtral", {"tp": 2, "cp": 2, "sp": True}),
        ("Qwen3Moe", {"tp": 2, "sp": True}),
        ("GptOss", {"cp": 3}),
    ],
)
def test_routers_are_balanced_over_the_whole_sequence(kind, options, padded):
    more = {"attention_mask": LEADING_PADDING} if padded else None
    labels = tokens().masked_fill(LEADING_PADDING == 0, -100)
    rows = compared(model(kind, **BALANCED), labels, more, **options)
    assert sum(row.breaches for row in rows) == 0


def test_verification_detects_a_balancing_loss_over_a_part(monkeypatch):
    monkeypatch.setattr(context_model, "adds_balancing_loss", lambda *_: False)
    rows = compared(model("Mixtral", **BALANCED), cp=2)
    assert sum(row.breaches for row in rows) > 0


def test_routed_token_counts_and_both_losses_are_reduced(recorder):
    sliced = model("Mixtral", **BALANCED)
    slice_to_rank(sliced, World.of(cp=4), 1, recorder.new_group, SlicingOptions())
    output = sliced(input_ids=tokens(), labels=tokens())
    reduced = [call.bytes for call in recorder.calls if call.collective == "all_reduce"]
    assert reduced == [4 * (4 + 1), 4 * 2]  # of 4 experts and all tokens; of both losses
    assert 1 <= output.aux_loss < 4  # 2 experts a token: 2 if they are even
    output.loss.mul_(0.5).backward()  # in place, as the HF Trainer scales it
