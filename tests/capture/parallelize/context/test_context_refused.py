"""Context parallelism: what is refused, each with its reason."""

from typing import Any

import pytest
import torch
import transformers
from context_job import (
    BATCH,
    CAPPED,
    CHUNKS,
    LEADING_PADDING,
    PACKED,
    SEQUENCE,
    SHAPE,
    model,
    packed,
    tokens,
)
from raised import raises_code

from onerank.capture.parallelize.shard_model import SlicingOptions, slice_to_rank
from onerank.ir import World
from onerank.ir.errors import SliceError

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")


REFUSED: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "length": (
        model,
        {"input_ids": tokens(length=18), "labels": tokens(length=18)},
        "cp-sequence-indivisible",
        "18 = 8 x 2 + 2",
    ),
    "window": (
        lambda: model("Mistral", sliding_window=8),
        {"cp_comm": "p2p"},
        "cp-ring-window",
        "8 tokens of 24",
    ),
    "padding": (
        model,
        {"attention_mask": LEADING_PADDING, "cp_comm": "p2p"},
        "cp-ring-padding",
        "",
    ),
    "packing": (
        model,
        {**PACKED, "cp_comm": "p2p"},
        "cp-packed-indivisible",
        "14 = 8 x 1 + 6",
    ),
    "a window of packed sequences": (
        lambda: model("Mistral", sliding_window=8),
        {**packed((16, 8), (24,)), "cp_comm": "p2p"},
        "cp-ring-window",
        "8 tokens of 24",
    ),
    "packing without position_ids": (
        lambda: model("OPT", ffn_dim=64, word_embed_proj_dim=32),
        {**packed((16, 8), (24,)), "cp_comm": "p2p"},
        "cp-ring-packed-rows",
        "position_ids",
    ),
    "eager attention": (
        lambda: model("Gemma2", **CAPPED),
        {"cp_comm": "p2p"},
        "cp-ring-eager",
        "eager",
    ),
    "a mask of four dimensions": (
        model,
        {"attention_mask": torch.ones(BATCH, 1, SEQUENCE, SEQUENCE)},
        "cp-mask-shape",
        "[2, 1, 24, 24]",
    ),
    "positions of three axes": (
        model,
        {"position_ids": torch.arange(SEQUENCE).expand(3, BATCH, -1)},
        "cp-positions-shape",
        "[3, 2, 24]",
    ),
    "packed chunks": (lambda: model("Llama4Text", **CHUNKS), PACKED, "cp-chunked-packed", ""),
    "positions counted from the mask": (
        lambda: model("OPT", ffn_dim=64, word_embed_proj_dim=32),
        {"attention_mask": LEADING_PADDING},
        "cp-positions-from-mask",
        "5 of 48 tokens",
    ),
    "no tokens": (model, {"input_ids": None, "labels": None}, "cp-no-input-ids", "Llama"),
    "some logits": (model, {"logits_to_keep": 1, "labels": None}, "cp-logits-to-keep", ""),
    "a tuple": (model, {"return_dict": False}, "cp-returns-tuple", ""),
    "attention outside the interface": (
        lambda: model("Falcon"),
        {},
        "cp-attention-implementation",
        "outside the interface",
    ),
    "flex attention": (
        lambda: model(attn_implementation="flex_attention"),
        {},
        "cp-attention-implementation",
        "'flex_attention'",
    ),
    "linear layers": (
        lambda: model("Llama", layer_types=["linear_attention", "full_attention"]),
        {},
        "cp-layer-type",
        "linear_attention",
    ),
    "no language model": (
        lambda: transformers.LlamaModel(transformers.LlamaConfig(**SHAPE)),
        {},
        "cp-not-causal-lm",
        "LlamaModel",
    ),
}  # fmt: skip


def test_logits_of_packed_sequences_on_a_ring_are_refused(recorder):
    sliced = model()
    slice_to_rank(sliced, World.of(cp=4), 1, recorder.new_group, SlicingOptions(cp_comm="p2p"))
    output = sliced(input_ids=tokens(), labels=tokens(), **packed((16, 8), (24,)))
    assert output.loss.isfinite()
    with raises_code("output-not-available"):
        output.logits.float()


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_calls_are_refused(recorder, case):
    make, changes, code, detail = REFUSED[case]
    sliced = make()

    arguments = {"input_ids": tokens(), "labels": tokens(), **changes}
    comm = arguments.pop("cp_comm", "all_gather")

    def slice_and_call() -> None:
        new_group = recorder.new_group
        slice_to_rank(sliced, World.of(cp=4), 1, new_group, SlicingOptions(cp_comm=comm))
        sliced(**arguments)

    with raises_code(code, SliceError) as refused:
        slice_and_call()
    assert detail in str(refused.value)
