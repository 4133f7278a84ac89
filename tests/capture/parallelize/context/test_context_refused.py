"""Context parallelism: what is refused, each with its reason."""

from typing import Any

import pytest
import torch
import transformers
from context_job import (
    BATCH,
    BEFORE,
    CAPPED,
    CHUNKS,
    PACKED,
    SEQUENCE,
    SHAPE,
    model,
    packed,
    tokens,
)
from raised import raises_code

from onerank.capture.parallelize.shard_model import slice_to_rank
from onerank.ir import World
from onerank.ir.errors import SliceError

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")


NOT_KNOWN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "length": (
        model,
        {"input_ids": tokens(length=18), "labels": tokens(length=18)},
        r"2 x 4 = 8 chunks, and the sequence has 18 tokens \(18 = 8 x 2 \+ 2\)",
    ),
    "window": (
        lambda: model("Mistral", sliding_window=8),
        {"cp_comm": "p2p"},
        r"a window of 8 tokens of 24, .* use --cp-comm all_gather",
    ),
    "padding": (model, {"attention_mask": BEFORE, "cp_comm": "p2p"}, r"use --cp-comm all_gather"),
    "packing": (
        model,
        {**PACKED, "cp_comm": "p2p"},
        r"each packed sequence into 2 x 4 = 8 chunks, and one has 14 tokens \(14 = 8 x 1 \+ 6\)",
    ),
    "a window of packed sequences": (
        lambda: model("Mistral", sliding_window=8),
        {**packed((16, 8), (24,)), "cp_comm": "p2p"},
        r"a window of 8 tokens of 24, .* use --cp-comm all_gather",
    ),
    "packing that the model knows nothing of": (
        lambda: model("OPT", ffn_dim=64, word_embed_proj_dim=32),
        {**packed((16, 8), (24,)), "cp_comm": "p2p"},
        r"passes no position_ids to its",
    ),
    "own attention": (
        lambda: model("Gemma2", **CAPPED),
        {"cp_comm": "p2p"},
        r"runs its attention as 'eager', on all keys at once",
    ),
    "a mask of four dimensions": (
        model,
        {"attention_mask": torch.ones(BATCH, 1, SEQUENCE, SEQUENCE)},
        r"expected an attention_mask \[batch, 24\], or none; found \[2, 1, 24, 24\]",
    ),
    "positions of three axes": (
        model,
        {"position_ids": torch.arange(SEQUENCE).expand(3, BATCH, -1)},
        r"expected position_ids \[batch, 24\], or none; found \[3, 2, 24\]",
    ),
    "packed chunks": (lambda: model("Llama4Text", **CHUNKS), PACKED, r"uses chunked attention"),
    "positions counted from the mask": (
        lambda: model("OPT", ffn_dim=64, word_embed_proj_dim=32),
        {"attention_mask": BEFORE},
        r"OPTLearnedPositionalEmbedding\), which leaves out 5 of 48 tokens",
    ),
    "no tokens": (model, {"input_ids": None, "labels": None}, r"was called without input_ids"),
    "some logits": (model, {"logits_to_keep": 1, "labels": None}, r"with logits_to_keep"),
    "a tuple": (model, {"return_dict": False}, "leave return_dict=False out"),
    "attention by code of its own": (
        lambda: model("Falcon"),
        {},
        r"(?s)'sdpa', outside the interface; .*leave --cp out",
    ),
    "flex attention": (
        lambda: model(attn_implementation="flex_attention"),
        {},
        r"(?s)runs its attention as 'flex_attention'; .*attn_implementation='sdpa'",
    ),
    "linear layers": (
        lambda: model("Llama", layer_types=["linear_attention", "full_attention"]),
        {},
        r"layers of linear_attention",
    ),
    "no language model": (
        lambda: transformers.LlamaModel(transformers.LlamaConfig(**SHAPE)),
        {},
        r"LlamaModel is none \(transformers.PreTrainedModel with a head\)",
    ),
}  # fmt: skip


def test_logits_of_packed_sequences_that_are_each_cut_are_refused(recorder):
    one = model()
    slice_to_rank(one, World.of(cp=4), 1, recorder.new_group, tp_style="megatron", cp_comm="p2p")
    output = one(input_ids=tokens(), labels=tokens(), **packed((16, 8), (24,)))
    assert output.loss.isfinite()
    with raises_code("output-not-available"):
        output.logits.float()


@pytest.mark.parametrize("case", NOT_KNOWN)
def test_what_is_not_known_is_refused(recorder, case):
    make, changes, message = NOT_KNOWN[case]
    one = make()

    called = {"input_ids": tokens(), "labels": tokens(), **changes}
    comm = called.pop("cp_comm", "all_gather")

    def slice_and_call() -> None:
        new_group = recorder.new_group
        slice_to_rank(one, World.of(cp=4), 1, new_group, tp_style="megatron", cp_comm=comm)
        one(**called)

    with pytest.raises(SliceError, match=message):
        slice_and_call()
