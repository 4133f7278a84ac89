"""Which layer and role each module of a model gets; the models are never filled with numbers."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from onerank.capture.profiling.module_roles import describe
from onerank.ir import Module

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "intermediate_size": 48}


class Block(nn.Module):
    """A block with names that say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(8)
        self.mix = nn.ModuleDict({"query": nn.Linear(8, 8), "key": nn.Linear(8, 8)})
        self.grow = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def nanogpt() -> nn.Module:
    layers = nn.ModuleList(Block() for _ in range(2))
    parts = {"a": nn.Embedding(64, 8), "b": layers, "c": nn.LayerNorm(8)}
    return nn.ModuleDict({"body": nn.ModuleDict(parts), "out": nn.Linear(8, 64)})


MODELS = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SMALL)),
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64)),
    "BERT": lambda: BertForMaskedLM(BertConfig(num_hidden_layers=1, **SMALL)),
    "Mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(num_hidden_layers=1, num_key_value_heads=4, num_local_experts=4, **SMALL)
    ),
    "DeepSeek-V3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            num_hidden_layers=2,
            first_k_dense_replace=1,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            **SMALL,
        )
    ),
    "T5": lambda: T5ForConditionalGeneration(
        T5Config(num_layers=1, d_model=32, d_ff=64, num_heads=4, vocab_size=64)
    ),
    "Mamba": lambda: MambaForCausalLM(
        MambaConfig(num_hidden_layers=1, hidden_size=32, vocab_size=64)
    ),
    "names that say nothing": nanogpt,
    "torch's own encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
    ),
    "no layers": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)),
}

EXPECTED = {
    "Llama": {
        "model": ("other", ""),
        "model.embed_tokens": ("embedding", ""),
        "model.layers.1": ("layer", "model.layers.1"),
        "model.layers.1.self_attn": ("attention", "model.layers.1"),
        "model.layers.1.self_attn.q_proj": ("attention", "model.layers.1"),
        "model.layers.1.mlp.act_fn": ("mlp", "model.layers.1"),
        "model.layers.1.input_layernorm": ("norm", "model.layers.1"),
        "model.norm": ("norm", ""),
        "lm_head": ("head", ""),
    },
    "GPT-2": {  # its projections are Conv1D, its head shares the embedding's weight
        "transformer.wpe": ("embedding", ""),
        "transformer.h.0.attn.c_attn": ("attention", "transformer.h.0"),
        "transformer.h.0.mlp": ("mlp", "transformer.h.0"),
        "transformer.ln_f": ("norm", ""),
        "lm_head": ("head", ""),
    },
    "BERT": {
        "bert.embeddings.LayerNorm": ("embedding", ""),
        "bert.encoder.layer.0.attention.output.LayerNorm": ("attention", "bert.encoder.layer.0"),
        "bert.encoder.layer.0.intermediate": ("mlp", "bert.encoder.layer.0"),
        "bert.encoder.layer.0.output": ("mlp", "bert.encoder.layer.0"),
        "cls": ("head", ""),
    },
    "Mixtral": {
        "model.layers.0.mlp": ("mlp", "model.layers.0"),
        "model.layers.0.mlp.gate": ("router", "model.layers.0"),
        "model.layers.0.mlp.experts": ("experts", "model.layers.0"),
    },
    "DeepSeek-V3": {  # the first layer is dense; queries and keys pass through small ranks
        "model.layers.0.self_attn.kv_b_proj": ("attention", "model.layers.0"),
        "model.layers.0.mlp": ("mlp", "model.layers.0"),
        "model.layers.1.mlp.gate": ("router", "model.layers.1"),
        "model.layers.1.mlp.experts": ("experts", "model.layers.1"),
        "model.layers.1.mlp.shared_experts.up_proj": ("mlp", "model.layers.1"),
    },
    "T5": {
        "encoder.block.0.layer.0.SelfAttention": ("attention", "encoder.block.0"),
        "decoder.block.0.layer.1.EncDecAttention": ("attention", "decoder.block.0"),
        "decoder.block.0.layer.2": ("mlp", "decoder.block.0"),
        "lm_head": ("head", ""),
    },
    "Mamba": {  # a mixer is neither attention nor an mlp
        "backbone.layers.0": ("layer", "backbone.layers.0"),
        "backbone.layers.0.mixer": ("other", "backbone.layers.0"),
        "backbone.layers.0.mixer.in_proj": ("other", "backbone.layers.0"),
        "backbone.layers.0.norm": ("norm", "backbone.layers.0"),
    },
    "names that say nothing": {
        "body.a": ("embedding", ""),
        "body.b.0": ("layer", "body.b.0"),
        "body.b.0.mix": ("attention", "body.b.0"),
        "body.b.0.grow.2": ("mlp", "body.b.0"),
        "body.c": ("norm", ""),
        "out": ("head", ""),
    },
    "torch's own encoder": {
        "layers.0.self_attn.out_proj": ("attention", "layers.0"),
        "layers.0.linear1": ("mlp", "layers.0"),
        "layers.0.dropout1": ("layer", "layers.0"),
    },
    "no layers": {"0": ("other", ""), "2": ("other", "")},
}


def described(model: nn.Module) -> dict[str, Module]:
    return {known.path: known for _, known in describe(model)}


@pytest.mark.parametrize("model", MODELS)
def test_roles(model):
    with torch.device("meta"):
        table = described(MODELS[model]())
    found = {path: (table[path].role, table[path].layer) for path in EXPECTED[model]}
    assert found == EXPECTED[model]


def test_the_scope_is_the_outermost_module_of_a_role():
    with torch.device("meta"):
        table = described(MODELS["Mixtral"]())
    scopes = {path: module.scope for path, module in table.items()}
    assert scopes["model.layers.0.self_attn.q_proj"] == "model.layers.0.self_attn"
    assert scopes["model.layers.0.self_attn"] == ""
    assert scopes["model.layers.0.mlp.experts.act_fn"] == "model.layers.0.mlp.experts"


@pytest.mark.parametrize("model", ["Llama", "Mixtral", "names that say nothing"])
def test_what_wraps_a_module_goes_by_its_name(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # DataParallel would move it
    with torch.device("meta"):
        whole = MODELS[model]()
    expected = described(whole)
    for parent in [*whole.modules()]:
        if isinstance(parent, nn.ModuleList):
            for place, layer in enumerate(parent):
                parent[place] = torch.compile(checkpoint_wrapper(layer))
    assert described(nn.DataParallel(torch.compile(whole))) == expected
