"""Sliced mixtures of experts: four Gloo ranks against the whole model; steps without peers."""

import copy
import itertools
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from own_process import run_command
from raised import raises_code
from real_ranks import run_ranks

import onerank
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.experts.expert_parallel import (
    apply_static_routing,
    expert_layers,
    shard_experts,
)
from onerank.capture.parallelize.experts.routing import Routing, parse_routing
from onerank.capture.parallelize.shard_model import SlicingOptions, slice_to_rank
from onerank.capture.parallelize.tensor.apply_tensor_parallel import slice_model
from onerank.capture.parallelize.tensor.moe import cut_experts
from onerank.ir import World
from onerank.ir.errors import SliceError

EXPERTS, TOP_K, HIDDEN, WIDTH, LAYERS = 8, 2, 32, 16, 2
BATCH, SEQUENCE, VOCABULARY = 2, 16, 96
TOKENS = BATCH * SEQUENCE
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQUENCE,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": WIDTH,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
NARROW = {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "qwen2": ("Qwen2Moe", {**NARROW, "shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3Moe", {**NARROW, "head_dim": 8}),
    "deepseek v2": ("DeepseekV2", {**LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek v2 lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None}),
    "deepseek v3": ("DeepseekV3", LATENT),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS}),
    "gpt-oss": ("GptOss", {"num_local_experts": EXPERTS, "head_dim": 8}),
    "llama": ("Llama", {}),
}
WORLDS = {
    "ep 4": World.of(dp=4, ep=4),
    "ep 2": World.of(dp=4, ep=2),
    "tp 2": World.of(tp=2, dp=2),
    "tp 2, ep 2": World.of(tp=2, dp=2, ep=2),
}
RANKS = 4
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
SLICED = [kind for kind in KINDS if kind not in ("gpt-oss", "llama")]
CASES = [
    *((kind, "ep 4", "grouped_mm", "megatron") for kind in (*SLICED, "gpt-oss")),
    *itertools.product(SLICED, ("tp 2", "tp 2, ep 2"), ("grouped_mm",), ("megatron", "hf")),
    *itertools.product(("mixtral", "gpt-oss"), ("ep 2",), IMPLEMENTATIONS, ("megatron",)),
    *itertools.product(("mixtral",), ("tp 2, ep 2",), ("eager", "batched_mm"), ("megatron",)),
    *(
        (kind, "tp 2", "grouped_mm", "sequence")  # with --ep uneven lists, which Gloo has not
        for kind in ("mixtral", "deepseek v2", "deepseek v2 lite", "deepseek v3", "gpt-oss")
    ),
    # biases, of which each rank adds its share; heads' sinks
    *(("gpt-oss", world, "grouped_mm", "megatron") for world in ("tp 2", "tp 2, ep 2")),
    ("gpt-oss", "tp 2", "eager", "megatron"),
]


def model(kind: str, experts: str = "grouped_mm", **changes: Any) -> Any:
    torch.manual_seed(0)
    name, own = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **own, **changes})
    whole = getattr(transformers, f"{name}ForCausalLM")(config)
    if kind != "llama":
        whole.set_experts_implementation(experts)
    with torch.no_grad():
        for parameter in whole.parameters():  # no router, norm or bias at zero or one
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return whole


def small(kind: str, experts: str) -> Any:
    """Return a model with one layer of experts."""
    dense = KINDS[kind][1].get("first_k_dense_replace", 0)
    return model(kind, experts, num_hidden_layers=dense + 1)


def tokens(data: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(data)
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)


def loss_of(model: Any, data: int = 0) -> torch.Tensor:
    return model(input_ids=tokens(data), labels=tokens(data)).loss


def train_rank(rank: int, results: Any) -> None:
    groups: dict[tuple[int, ...], Any] = {}
    for world in WORLDS.values():
        for axis, other in itertools.product(("tp", "ep"), range(RANKS)):
            line = world.line(axis, other)
            if line not in groups:
                groups[line] = dist.new_group(list(line))
    for kind, world, implementation, tp_style in CASES:
        sliced = small(kind, implementation)
        slice_to_rank(
            sliced,
            WORLDS[world],
            rank,
            lambda _, ranks: groups[tuple(ranks)],
            SlicingOptions(
                tp_style="megatron" if tp_style == "sequence" else tp_style,
                sequence=tp_style == "sequence",
                peers_absent=False,
            ),
        )
        loss = loss_of(sliced, WORLDS[world].point(rank).get("dp", 0))
        loss.backward()
        gradients = [
            (getattr(p, "_onerank_axis", "dp"), p.grad.clone()) for p in sliced.parameters()
        ]
        results[kind, world, implementation, tp_style, rank] = loss.item(), gradients


@pytest.fixture(scope="module")
def slices() -> Any:
    """Loss and gradients of every case and rank."""
    for kind in KINDS:
        model(kind)  # imports its module
    return run_ranks(train_rank, RANKS)


def cut_to_rank(
    name: str, whole: torch.Tensor, gradient: torch.Tensor, rank: int, size: int
) -> torch.Tensor:
    """Cut a whole gradient to a tensor-parallel rank's shape; fused projections in halves."""
    for dim in range(whole.dim()):
        if whole.shape[dim] != gradient.shape[dim]:
            halves = 2 if name.endswith("gate_up_proj") and dim == 1 else 1
            parts = [part.chunk(size, dim)[rank] for part in whole.chunk(halves, dim)]
            whole = torch.cat(parts, dim)
    return whole


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_slices_match_the_whole_model(slices, case):
    kind, name, implementation, _ = case
    world = WORLDS[name]
    tp, dp = world.sizes.get("tp", 1), world.sizes["dp"]
    whole = small(kind, implementation)
    losses = [loss_of(whole, data) for data in range(dp)]
    (sum(losses) / dp).backward()
    for rank in range(RANKS):
        assert slices[(*case, rank)][0] == pytest.approx(losses[rank // tp].item(), abs=1e-5)
    for index, (name, parameter) in enumerate(whole.named_parameters()):
        for rank in range(RANKS):
            axis, gradient = slices[(*case, rank)][1][index]
            assert axis == ("edp" if world.ep > 1 and ".experts." in name else "dp"), name
            # sum over the ranks with the same parameter, mean over the data
            summed = sum(slices[(*case, r)][1][index][1] for r in world.line(axis, rank)) / dp
            expected = parameter.grad
            if axis == "edp":
                expected = expected.chunk(world.ep)[world.line("ep", rank).index(rank)]
            expected = cut_to_rank(name, expected, gradient, rank % tp, tp)
            torch.testing.assert_close(summed, expected, atol=1e-5, rtol=1e-4, msg=name)


def step_without_peers(kind: str, world: World, rank: int, routing: str, **options: Any) -> Any:
    """Take one step as a rank without peers; return the recorder, the model and the summary."""
    recorder = Recorder(rank, world.size)
    recorder.start()
    try:
        sliced = model(kind, **options)
        summary = slice_to_rank(
            sliced, world, rank, recorder.new_group, SlicingOptions(routing=parse_routing(routing))
        )
        loss_of(sliced).backward()
    finally:
        recorder.stop()
    return recorder, sliced, summary


def all_to_alls(recorder: Recorder) -> list[Any]:
    return [call for call in recorder.calls if call.collective == "all_to_all"]


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_the_collectives_of_a_step_and_their_bytes(kind):
    recorder, _, _ = step_without_peers(kind, World.of(dp=4, ep=4), 1, "balanced")
    calls = Counter((call.group, call.collective, call.bytes) for call in recorder.calls)
    assert calls == {
        ("ep", "all_gather", EXPERTS * 8): LAYERS,  # int64 counts
        ("ep", "all_to_all", TOKENS * TOP_K * HIDDEN * 4): 4
        * LAYERS,  # dispatch and combine, forward and backward
    }
    even = (TOKENS * TOP_K // 4,) * 4
    assert all(
        call.in_split_sizes == call.out_split_sizes == even for call in all_to_alls(recorder)
    )


def test_experts_are_cut_along_both_axes():
    world = World.of(tp=2, dp=4, ep=4)
    whole = sum(p.numel() for p in model("mixtral").parameters())
    recorder, sliced, summary = step_without_peers("mixtral", world, 3, "balanced")
    layer = sliced.model.layers[0].mlp.experts
    assert layer.num_experts == 2
    assert layer.gate_up_proj.shape == (2, 2 * 64 // 2, HIDDEN)
    assert layer.down_proj.shape == (2, HIDDEN, 64 // 2)
    assert summary.elements_before == whole
    assert summary.elements_after == sum(p.numel() for p in sliced.parameters())
    assert summary.modules["expert_parallel"] == summary.modules["moe_tp_experts"] == LAYERS
    assert recorder.groups["ep"] == (1, 3, 5, 7)
    all_reduces = Counter(c.bytes for c in recorder.calls if c.collective == "all_reduce")
    # attention, experts, both ways; embedding and the head's input
    assert all_reduces[TOKENS * HIDDEN * 4] == 4 * LAYERS + 2
    assert all_reduces[TOKENS * TOP_K * 4] == LAYERS  # gradients of the routing weights


def test_zipf_routing_gives_ranks_unequal_token_counts():
    per_rank = []
    counts = Routing("zipf:1", 1.0).tokens_per_expert(0, EXPERTS, TOKENS, TOP_K)
    assert counts == [23, 12, 8, 6, 5, 4, 3, 3]  # 64 / i / (1 + 1/2 + ... + 1/8), to 64 in all
    for rank in range(4):
        recorder, sliced, _ = step_without_peers("mixtral", World.of(dp=4, ep=4), rank, "zipf:1")
        dispatch, combine = all_to_alls(recorder)[:2]
        assert dispatch.in_split_sizes == combine.out_split_sizes == (35, 14, 9, 6)
        from_each = (35, 14, 9, 6)[rank]
        assert dispatch.out_split_sizes == combine.in_split_sizes == (from_each,) * 4
        assert combine.bytes == 4 * from_each * HIDDEN * 4
        per_rank.append(4 * from_each)
        for weight in sliced.model.layers[1].mlp.experts.parameters():
            assert all(expert.norm() > 0 for expert in weight.grad)  # every expert got tokens
    assert sum(per_rank) == 4 * TOKENS * TOP_K


def test_a_rank_without_tokens_still_steps(tmp_path):
    table = tmp_path / "popular.csv"
    table.write_text("1,1,1,1,1,1,0,0\n")
    recorder, sliced, _ = step_without_peers("mixtral", World.of(dp=4, ep=4), 3, str(table))
    assert all_to_alls(recorder)[0].out_split_sizes == (0, 0, 0, 0)
    assert len(all_to_alls(recorder)) == 4 * LAYERS
    for weight in sliced.model.layers[0].mlp.experts.parameters():
        assert not weight.grad.any()


def test_the_router_computes_the_weights_under_static_routing():
    _, sliced, _ = step_without_peers("mixtral", World.of(dp=4, ep=4), 0, "balanced")
    assert all(layer.mlp.gate.weight.grad.norm() > 0 for layer in sliced.model.layers)


def test_peers_repeat_the_routing_of_the_models_router():
    recorder, _, _ = step_without_peers("mixtral", World.of(dp=4, ep=4), 2, "model")
    dispatch = all_to_alls(recorder)[0]
    assert sum(dispatch.in_split_sizes) == TOKENS * TOP_K
    assert len(set(dispatch.in_split_sizes)) > 1
    assert dispatch.out_split_sizes == (dispatch.in_split_sizes[2],) * 4


def test_expert_marks_survive_a_move_from_the_meta_device():
    recorder = Recorder(0, 2)
    recorder.start()
    try:
        with torch.device("meta"):
            sliced = model("mixtral")
        shard_experts(sliced, recorder.new_group("ep", (0, 1)))
        sliced = sliced.to_empty(device="cpu")
        twin = copy.deepcopy(sliced)
        apply_static_routing(twin, Routing("balanced"))
        for candidate in (sliced, twin):
            candidate.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
            with torch.no_grad():
                for parameter in candidate.parameters():
                    parameter.normal_(0, 0.02)
            loss_of(candidate)
            for layer in expert_layers(candidate).values():
                assert layer.forward.__self__ is layer
                assert {p._onerank_axis for p in layer.parameters()} == {"edp"}
    finally:
        recorder.stop()


class FirstOfGroup:
    """Rank 0 of a process group, with the methods that slicing calls."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def test_models_whose_experts_cannot_be_sharded_are_refused():
    with raises_code("ep-indivisible-experts", SliceError) as refused:
        shard_experts(model("mixtral"), FirstOfGroup(3))
    assert "8 = 3 x 2 + 2" in str(refused.value)
    with raises_code("ep-no-experts", SliceError):
        shard_experts(model("llama"), FirstOfGroup(2))
    with torch.device("meta"):
        config = transformers.SwitchTransformersConfig(num_layers=2, num_experts=EXPERTS)
        unfused = transformers.SwitchTransformersForConditionalGeneration(config)
    with raises_code("ep-no-experts", SliceError) as refused:
        shard_experts(unfused, FirstOfGroup(2))
    assert "8 experts" in str(refused.value)


def test_experts_that_cannot_be_sliced_are_refused():
    normed = model("gpt-oss").model.layers[0].mlp.experts
    normed.has_post_expert_norm = True
    with raises_code("tp-experts-norm", SliceError):
        cut_experts(normed, "experts", FirstOfGroup(2))
    odd = model("qwen3", moe_intermediate_size=15)
    with raises_code("tp-indivisible-features", naming="(15 = 2 x 7 + 1)"):
        slice_model(odd, FirstOfGroup(2), "megatron")


def test_routing_for_another_model_is_refused():
    with raises_code("routing-expert-count", SliceError):
        apply_static_routing(model("mixtral"), Routing("f.csv", table=((1.0,) * 4,)))
    with raises_code("routing-no-experts", SliceError):
        apply_static_routing(model("llama"), Routing("zipf:1", 1.0))
    apply_static_routing(model("llama"), Routing("balanced"))


EXAMPLE = Path(__file__).parents[4] / "examples" / "train_mixtral.py"
SMALL = ["--", "--layers", "1", "--seq", "16", "--batch", "2"]


def capture(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command("capture", "run", *args)


def test_a_script_captured_as_rank_1_of_4_expert_parallel_ranks(tmp_path):
    trace = tmp_path / "trace.et"
    done = capture(
        EXAMPLE,
        "--ep",
        "4",
        "--rank",
        "1",
        "--moe-routing",
        "zipf:1",
        "-o",
        trace,
        "--json",
        *SMALL,
    )
    assert done.returncode == 0, done.stderr
    job = onerank.read(trace).job
    assert job.world.ep == 4
    assert [(g.name, g.ranks, g.axis) for g in job.groups if g.name == "ep"] == [
        ("ep", (0, 1, 2, 3), "ep")
    ]
    uses = {
        (use["phase"], use["bytes"]): use["count"]
        for use in json.loads(done.stdout)["collectives"]
        if use["type"] == "all_to_all"
    }
    out, back = 2 * 16 * 2 * 256 * 4, 4 * 14 * 256 * 4  # 64 rows go, 14 come from each of 4
    assert uses == {
        (phase, bytes_): 1 for phase in ("forward", "backward") for bytes_ in (out, back)
    }


def test_routing_without_slicing_is_refused(tmp_path):
    trace = tmp_path / "trace.et"
    done = capture(EXAMPLE, "--moe-routing", "zipf:1", "-o", trace, *SMALL)
    assert done.returncode == 2
    assert "error[routing-unused]: --moe-routing zipf:1" in done.stderr
    assert not trace.exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("routing", ["balanced", "zipf:1"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_on_a_gpu(implementation, routing):
    recorder = Recorder(1, 4)
    recorder.start()
    try:
        sliced = model("mixtral", implementation)
        static = parse_routing(routing)
        world = World.of(tp=2, dp=2, ep=2)
        slice_to_rank(sliced, world, 1, recorder.new_group, SlicingOptions(routing=static))
        sliced.to("cuda", torch.bfloat16)
        batch = tokens().cuda()
        loss = sliced(input_ids=batch, labels=batch).loss
        loss.backward()
    finally:
        recorder.stop()
    assert loss.isfinite()
    assert all_to_alls(recorder)[0].bytes == TOKENS * TOP_K * HIDDEN * 2
    assert len(all_to_alls(recorder)) == 4 * LAYERS
    for layer in expert_layers(sliced).values():
        for weight in layer.parameters():
            assert all(expert.norm() > 0 for expert in weight.grad)
