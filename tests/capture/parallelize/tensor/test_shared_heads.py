"""More tensor-parallel ranks than key-value heads or groups of Mamba 2, against whole models."""

import functools
from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import transformers
from job_options import axes
from raised import raises_code
from real_ranks import run_ranks
from torch import nn

from onerank.capture import Options
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.tensor.apply_tensor_parallel import slice_model
from onerank.capture.parallelize.tensor.plan_file import ShardingPlan, shipped_plan
from onerank.capture.verify.slice_check import compare_slices
from onerank.ir import World

RANKS, HEADS, HEAD_DIM, TOKENS = 4, 2, 8, 16
HIDDEN = 8 * HEAD_DIM
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": HEADS,
    "vocab_size": 96,
    "max_position_embeddings": 32,
    "pad_token_id": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "biases": ("Llama", {"attention_bias": True}),
    "one head": ("Llama", {"num_key_value_heads": 1}),
    "norm of each head": ("Qwen3", {"head_dim": HEAD_DIM}),
    "fused": ("Phi3", {}),
    "norm of all heads": ("Olmo2", {}),
    "a plan": ("StableLm", {}),
    "fused by head": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": HEADS}),
    "fused, one head": ("Falcon", {"multi_query": True}),
}
STYLES: Any = {
    "megatron": ("megatron", False),
    "hf": ("hf", False),
    "sequence": ("megatron", True),
}


def model(case: str, layers: int = 2) -> Any:
    kind, changes = MODELS[case]
    torch.manual_seed(0)
    shape = {**SHAPE, "num_hidden_layers": layers}
    config = getattr(transformers, f"{kind}Config")(**{**shape, **changes})
    whole = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in whole.parameters():  # no bias or norm at zero or one
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
    return whole


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(6, 96, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def run_rank(rank: int, results: Any) -> None:
    for style, (tp_style, sequence) in STYLES.items():
        for case in MODELS:
            sliced = model(case, layers=1)
            slice_model(sliced, dist.group.WORLD, tp_style, peers_absent=False, sequence=sequence)
            output = sliced(**batch())
            output.loss.backward()
            gradients = {name: p.grad.clone() for name, p in sliced.named_parameters()}
            results[case, style, rank] = (output.loss.item(), gradients, output.logits.detach())


@pytest.fixture(scope="module")
def slices() -> Any:
    """Loss, gradients and logits of every case, style and rank."""
    return run_ranks(run_rank, RANKS)


def rows_of_rank(case: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Rows of a fused projection's weight or bias: queries, keys, then values."""
    queries, heads = SHAPE["num_attention_heads"], MODELS[case][1].get("num_kv_heads", 1)
    if case == "fused":
        parts = whole.split([queries * HEAD_DIM, HEADS * HEAD_DIM, HEADS * HEAD_DIM])
    else:
        grouped = whole.unflatten(0, (heads, queries // heads + 2, HEAD_DIM))
        split = grouped.split([queries // heads, 1, 1], dim=1)
        parts = tuple(part.flatten(0, 2) for part in split)
    return torch.cat([part.chunk(RANKS)[rank] for part in parts])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", MODELS)
def test_ranks_that_share_heads_match_the_whole_model(slices, case, style):
    whole = model(case, layers=1)
    output = whole(**batch())
    output.loss.backward()
    for rank in range(RANKS):
        loss, gradients, logits = slices[case, style, rank]
        assert loss == pytest.approx(output.loss.item(), abs=1e-5)
        torch.testing.assert_close(logits, output.logits.detach(), atol=1e-5, rtol=1e-4)
        for name, parameter in whole.named_parameters():
            expected, actual = parameter.grad, gradients[name]
            leaf = name.split(".")[-2]
            if leaf == "gate_up_proj" and style != "hf":
                expected = torch.cat([part.chunk(RANKS)[rank] for part in expected.chunk(2)])
            if leaf == "query_key_value" or (leaf == "qkv_proj" and style != "hf"):
                expected = rows_of_rank(case, expected, rank)
            for dim in range(expected.dim()):
                if expected.shape[dim] != actual.shape[dim]:
                    expected = expected.chunk(RANKS, dim)[rank]
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4, msg=name)


def mamba() -> Any:
    torch.manual_seed(0)
    config = transformers.BambaConfig(
        **SHAPE, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=HIDDEN // 4,
        mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8,
    )  # fmt: skip
    whole = transformers.BambaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
    return whole


def infer_with_one_group(rank: int, results: Any) -> None:
    sliced = mamba()
    before = sliced.model.layers[0].mamba.in_proj.weight.detach().clone()
    slice_model(sliced, dist.group.WORLD, "megatron", peers_absent=False, replicate_heads=True)
    with torch.no_grad():
        logits = sliced(input_ids=batch()["input_ids"]).logits
    results[rank] = logits, before, sliced.model.layers[0].mamba.in_proj.weight.detach()


def test_ranks_share_the_only_group_of_mamba_2_in_inference():
    with torch.no_grad():
        expected = mamba()(input_ids=batch()["input_ids"]).logits
    ranks = 2
    results = run_ranks(infer_with_one_group, ranks)
    gate, inputs, group = 2 * HIDDEN, 2 * HIDDEN, 8
    for rank in range(ranks):
        logits, whole, rows = results[rank]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        parts = whole.split([gate, inputs, group, group, 8])
        # The group is whole on each rank; gates, inputs and steps of the heads are divided.
        kept = [p if p.shape[0] == group and n in (2, 3) else p.chunk(ranks)[rank]
                for n, p in enumerate(parts)]  # fmt: skip
        torch.testing.assert_close(rows, torch.cat(kept), atol=0, rtol=0)


def infer_with_norms(rank: int, results: Any, kind: str) -> None:
    sliced = model_with_norms(kind)
    slice_model(sliced, dist.group.WORLD, "megatron", peers_absent=False, replicate_heads=True)
    with torch.no_grad():
        logits = sliced(input_ids=batch()["input_ids"]).logits
    attention = sliced.model.layers[0].self_attn
    results[rank] = logits, attention.k_proj.weight.shape, attention.k_norm.weight.shape


def model_with_norms(kind: str) -> Any:
    torch.manual_seed(0)
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": HEAD_DIM}
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
    whole = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
    return whole


@pytest.mark.parametrize("kind", ["Olmo3", "MiniMaxM2"])
def test_ranks_norm_their_heads_over_all_heads_in_inference(kind: str):
    with torch.no_grad():
        expected = model_with_norms(kind)(input_ids=batch()["input_ids"]).logits
    results = run_ranks(functools.partial(infer_with_norms, kind=kind), 2)
    for rank in range(2):
        logits, projection, norm = results[rank]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        assert projection == (HEADS // 2 * HEAD_DIM, HIDDEN)
        assert norm == (HEADS // 2 * HEAD_DIM,)


def test_training_needs_a_group_of_mamba_2_for_each_rank():
    with raises_code("tp-unplanned-module", naming=("mamba.in_proj",)):
        slice_on_recorder(mamba(), "megatron")


def test_a_rank_holds_a_quarter_of_each_projection_and_one_head():
    llama = model("plain")
    slice_on_recorder(llama, "megatron")
    attention = llama.model.layers[0].self_attn
    rows = {key: getattr(attention, key).weight.shape[0] for key in ("q_proj", "k_proj", "v_proj")}
    assert rows == {"q_proj": 2 * HEAD_DIM, "k_proj": HEAD_DIM // 2, "v_proj": HEAD_DIM // 2}
    assert attention.num_key_value_groups == 2  # query heads of the rank on its one head


def slice_on_recorder(whole: Any, tp_style: Any) -> Counter[tuple[str, int]]:
    """Slice as rank 1 without peers; return the collectives of a step that are not reductions."""
    recorder = Recorder(1, RANKS)
    recorder.start()
    try:
        slice_model(whole, recorder.new_group("tp", range(RANKS)), tp_style)
        whole(**batch()).loss.backward()
    finally:
        recorder.stop()
    calls = ((call.collective, call.bytes) for call in recorder.calls)
    return Counter(call for call in calls if call[0] != "all_reduce")


@pytest.mark.parametrize(("case", "gathers"), [("plain", 3), ("fused", 1)])
def test_bytes_gathered_in_the_megatron_style(case, gathers):
    """It gathers the fused projection of each token: queries, keys and values."""
    collectives = slice_on_recorder(model(case), "megatron")
    layers, features = SHAPE["num_hidden_layers"], (8 + 2 * HEADS) * HEAD_DIM
    whole = 2 * TOKENS * features * 4
    shards = {size: n for (kind, size), n in collectives.items() if kind == "all_gather"}
    sums = {size: n for (kind, size), n in collectives.items() if kind == "reduce_scatter"}
    assert sum(size * n for size, n in shards.items()) == layers * whole // RANKS  # a rank's part
    assert sum(size * n for size, n in sums.items()) == layers * whole
    assert sum(shards.values()) == sum(sums.values()) == layers * gathers


def test_the_hf_style_gathers_only_keys_and_values():
    whole = 2 * TOKENS * HEADS * HEAD_DIM * 4
    collectives = slice_on_recorder(model("plain"), "hf")
    sums = {call: n for call, n in collectives.items() if call[0] == "reduce_scatter"}
    assert collectives["all_gather", whole // RANKS] == 2 * SHAPE["num_hidden_layers"]
    assert sums == {("reduce_scatter", whole): 2 * SHAPE["num_hidden_layers"]}


class Adapted(nn.Module):
    """LoRA around a linear layer, with PEFT's names."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer = linear
        self.lora_A = nn.ModuleDict({"default": nn.Linear(linear.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, linear.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def matches_whole(whole: Any, world: World, **options: Any) -> bool:
    rows, why_not, _ = compare_slices(
        whole, (), batch(), Options(**axes(world), **options), lambda _: None
    )
    assert {row.what for row in rows} >= {"loss", "gradients", "weights"}, why_not
    return not [row for row in rows if row.breaches]


@pytest.mark.parametrize("case", ["plain", "fused", "fused by head"])
@pytest.mark.parametrize("tp_style", ["megatron", "hf"])
def test_adapters_on_shared_heads(case, tp_style):
    if case == "fused" and tp_style == "hf":
        pytest.skip("transformers' plan gathers Phi-3's projection, so its adapters are refused")
    whole = model(case)
    for module in [*whole.modules()]:
        for key in ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"):
            if isinstance(linear := getattr(module, key, None), nn.Linear):
                setattr(module, key, Adapted(linear))
    assert matches_whole(whole, World.of(tp=RANKS), tp_style=tp_style)


@pytest.mark.parametrize("axis", ["cp", "pp", "dp"])
def test_shared_heads_with_another_axis(axis):
    assert matches_whole(model("plain"), World.of(tp=RANKS, **{axis: 2}))


def test_a_norm_with_a_row_for_each_head():
    torch.manual_seed(0)
    whole = transformers.CohereForCausalLM(transformers.CohereConfig(**SHAPE, use_qk_norm=True))
    assert matches_whole(whole, World.of(tp=RANKS))


def test_heads_that_neither_divide_nor_are_divided_are_refused_with_sizes_that_fit():
    changes = {"hidden_size": 96, "intermediate_size": 96}
    heads = {"num_key_value_heads": 3, "num_attention_heads": 12}
    whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **changes, **heads}))
    with raises_code("tp-indivisible-heads") as caught:
        matches_whole(whole, World.of(tp=RANKS))
    assert "(3 = 4 x 0 + 3)" in str(caught.value)
    assert str(caught.value).endswith("--tp 1, 3, 6, 12")


def changed_plan(whole: Any, module: str, **changes: Any) -> ShardingPlan:
    plan = shipped_plan(whole)
    assert plan is not None
    rules = {**plan.modules, module: msgspec.structs.replace(plan.modules[module], **changes)}
    return ShardingPlan(plan.model, rules)


@pytest.mark.parametrize(
    ("module", "changes", "code"),
    [
        ("model.layers.*.self_attn", {"divide": ("num_heads",)}, "plan-kv-heads"),
        ("model.layers.*.self_attn.k_proj", {"parts": 2}, "plan-kv-heads-parts"),
    ],
)
def test_a_plan_without_the_heads_of_a_layer_is_refused(module, changes, code):
    whole = model("a plan")
    with raises_code(code):
        plan = changed_plan(whole, module, **changes)
        matches_whole(whole, World.of(tp=RANKS), sharding_plan=plan)
