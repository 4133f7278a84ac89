"""Sliced mixtures of experts against whole ones on four gloo ranks; what one rank does alone."""

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
from real_ranks import run_ranks

import onerank
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.experts.expert_parallel import (
    apply_static_routing,
    expert_layers,
    shard_experts,
)
from onerank.capture.parallelize.experts.routing import Routing, parse_routing
from onerank.capture.parallelize.shard_model import slice_to_rank
from onerank.capture.parallelize.tensor.moe import cut_experts
from onerank.capture.parallelize.tensor.slicer import slice_model
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


def tokens(data: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(data)
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)


def loss_of(model: Any, data: int = 0) -> torch.Tensor:
    return model(input_ids=tokens(data), labels=tokens(data)).loss


def one_rank(rank: int, results: Any) -> None:
    made: dict[tuple[int, ...], Any] = {}
    for world in WORLDS.values():
        for axis, other in itertools.product(("tp", "ep"), range(RANKS)):
            line = world.line(axis, other)
            if line not in made:
                made[line] = dist.new_group(list(line))
    for kind, world, implementation, tp_style in CASES:
        sliced = model(kind, implementation)
        slice_to_rank(
            sliced,
            WORLDS[world],
            rank,
            lambda _, ranks: made[tuple(ranks)],
            tp_style="megatron" if tp_style == "sequence" else tp_style,
            sequence=tp_style == "sequence",
            peers_absent=False,
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
    return run_ranks(one_rank, RANKS)


def share_of(
    name: str, whole: torch.Tensor, like: torch.Tensor, rank: int, size: int
) -> torch.Tensor:
    """Cut a whole gradient to a tensor-parallel rank's shape; fused projections in halves."""
    for dim in range(whole.dim()):
        if whole.shape[dim] != like.shape[dim]:
            halves = 2 if name.endswith("gate_up_proj") and dim == 1 else 1
            parts = [part.chunk(size, dim)[rank] for part in whole.chunk(halves, dim)]
            whole = torch.cat(parts, dim)
    return whole


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_the_slices_compute_what_the_whole_model_does(slices, case):
    kind, name, implementation, _ = case
    world = WORLDS[name]
    tp, dp = world.sizes.get("tp", 1), world.sizes["dp"]
    whole = model(kind, implementation)
    losses = [loss_of(whole, data) for data in range(dp)]
    (sum(losses) / dp).backward()
    for rank in range(RANKS):
        assert slices[(*case, rank)][0] == pytest.approx(losses[rank // tp].item(), abs=1e-5)
    for place, (name, parameter) in enumerate(whole.named_parameters()):
        for rank in range(RANKS):
            axis, own = slices[(*case, rank)][1][place]
            assert axis == ("edp" if world.ep > 1 and ".experts." in name else "dp"), name
            # the sum over the ranks that hold the same, and the mean over all data
            found = sum(slices[(*case, r)][1][place][1] for r in world.line(axis, rank)) / dp
            expected = parameter.grad
            if axis == "edp":
                expected = expected.chunk(world.ep)[world.line("ep", rank).index(rank)]
            expected = share_of(name, expected, own, rank % tp, tp)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, msg=name)


def alone(kind: str, world: World, rank: int, routing: str, **options: Any) -> Any:
    """Take one step as a rank without peers; return the recorder, the model and what was sliced."""
    recorder = Recorder(rank, world.size)
    recorder.start()
    try:
        sliced = model(kind, **options)
        found = slice_to_rank(
            sliced,
            world,
            rank,
            recorder.new_group,
            tp_style="megatron",
            routing=parse_routing(routing),
        )
        loss_of(sliced).backward()
    finally:
        recorder.stop()
    return recorder, sliced, found


def travels(recorder: Recorder) -> list[Any]:
    return [call for call in recorder.calls if call.collective == "all_to_all"]


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_the_collectives_of_a_step_and_their_bytes(kind):
    recorder, _, _ = alone(kind, World.of(dp=4, ep=4), 1, "balanced")
    calls = Counter((call.group, call.collective, call.bytes) for call in recorder.calls)
    assert calls == {
        ("ep", "all_gather", EXPERTS * 8): LAYERS,  # int64 counts
        ("ep", "all_to_all", TOKENS * TOP_K * HIDDEN * 4): 4 * LAYERS,  # there and back, twice
    }
    even = (TOKENS * TOP_K // 4,) * 4
    assert all(call.in_split_sizes == call.out_split_sizes == even for call in travels(recorder))


def test_experts_are_cut_along_both_axes():
    world = World.of(tp=2, dp=4, ep=4)
    whole = sum(p.numel() for p in model("mixtral").parameters())
    recorder, sliced, found = alone("mixtral", world, 3, "balanced")
    layer = sliced.model.layers[0].mlp.experts
    assert layer.num_experts == 2
    assert layer.gate_up_proj.shape == (2, 2 * 64 // 2, HIDDEN)
    assert layer.down_proj.shape == (2, HIDDEN, 64 // 2)
    assert found.elements_before == whole
    assert found.elements_after == sum(p.numel() for p in sliced.parameters())
    assert found.modules["expert_parallel"] == found.modules["moe_tp_experts"] == LAYERS
    assert recorder.groups["ep"] == (1, 3, 5, 7)
    borders = Counter(c.bytes for c in recorder.calls if c.collective == "all_reduce")
    # attention, experts, both ways; embedding and the head's input
    assert borders[TOKENS * HIDDEN * 4] == 4 * LAYERS + 2
    assert borders[TOKENS * TOP_K * 4] == LAYERS  # gradients of the routing weights


def test_unevenly_popular_experts_make_uneven_ranks():
    per_rank = []
    counts = Routing("zipf:1", 1.0).tokens_per_expert(0, EXPERTS, TOKENS, TOP_K)
    assert counts == [23, 12, 8, 6, 5, 4, 3, 3]  # 64 / i / (1 + 1/2 + ... + 1/8), to 64 in all
    for rank in range(4):
        recorder, sliced, _ = alone("mixtral", World.of(dp=4, ep=4), rank, "zipf:1")
        there, back = travels(recorder)[:2]
        assert there.in_split_sizes == back.out_split_sizes == (35, 14, 9, 6)
        from_each = (35, 14, 9, 6)[rank]
        assert there.out_split_sizes == back.in_split_sizes == (from_each,) * 4
        assert back.bytes == 4 * from_each * HIDDEN * 4
        per_rank.append(4 * from_each)
        for weight in sliced.model.layers[1].mlp.experts.parameters():
            assert all(expert.norm() > 0 for expert in weight.grad)  # real rows came to each
    assert sum(per_rank) == 4 * TOKENS * TOP_K


def test_a_rank_whose_experts_get_no_token_still_steps(tmp_path):
    table = tmp_path / "popular.csv"
    table.write_text("1,1,1,1,1,1,0,0\n")
    recorder, sliced, _ = alone("mixtral", World.of(dp=4, ep=4), 3, str(table))
    assert travels(recorder)[0].out_split_sizes == (0, 0, 0, 0)
    assert len(travels(recorder)) == 4 * LAYERS
    for weight in sliced.model.layers[0].mlp.experts.parameters():
        assert not weight.grad.any()


def test_the_router_still_decides_the_weights():
    _, sliced, _ = alone("mixtral", World.of(dp=4, ep=4), 0, "balanced")
    assert all(layer.mlp.gate.weight.grad.norm() > 0 for layer in sliced.model.layers)


def test_the_models_own_router_can_decide_with_peers_that_route_alike():
    recorder, _, _ = alone("mixtral", World.of(dp=4, ep=4), 2, "model")
    there = travels(recorder)[0]
    assert sum(there.in_split_sizes) == TOKENS * TOP_K
    assert len(set(there.in_split_sizes)) > 1
    assert there.out_split_sizes == (there.in_split_sizes[2],) * 4


def test_marks_outlive_a_move_from_the_meta_device():
    recorder = Recorder(0, 2)
    recorder.start()
    try:
        with torch.device("meta"):
            sliced = model("mixtral")
        shard_experts(sliced, recorder.new_group("ep", (0, 1)))
        sliced = sliced.to_empty(device="cpu")
        twin = copy.deepcopy(sliced)
        apply_static_routing(twin, Routing("balanced"))
        for one in (sliced, twin):
            one.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.normal_(0, 0.02)
            loss_of(one)
            for layer in expert_layers(one).values():
                assert layer.forward.__self__ is layer
                assert {p._onerank_axis for p in layer.parameters()} == {"edp"}
    finally:
        recorder.stop()


class OneOf:
    """As much of a process group as slicing itself needs."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def test_what_cannot_be_shared_out_is_refused():
    with pytest.raises(SliceError, match=r"--ep 3 must divide .* 8 experts \(8 = 3 x 2 \+ 2\)"):
        shard_experts(model("mixtral"), OneOf(3))
    with pytest.raises(SliceError, match=r"--ep 2 shards experts .* LlamaForCausalLM has none"):
        shard_experts(model("llama"), OneOf(2))
    with torch.device("meta"):
        config = transformers.SwitchTransformersConfig(num_layers=2, num_experts=EXPERTS)
        unfused = transformers.SwitchTransformersForConditionalGeneration(config)
    with pytest.raises(SliceError, match="has 8 experts, but not in the fused"):
        shard_experts(unfused, OneOf(2))


def test_what_cannot_be_cut_is_refused():
    normed = model("gpt-oss").model.layers[0].mlp.experts
    normed.has_post_expert_norm = True
    with pytest.raises(SliceError, match=r"experts with a norm .* cannot be sliced by --tp"):
        cut_experts(normed, "experts", OneOf(2))
    odd = model("qwen3", moe_intermediate_size=15)
    with pytest.raises(SliceError, match=r"15 features per expert \(15 = 2 x 7 \+ 1\)"):
        slice_model(odd, OneOf(2), "megatron")


def test_routing_for_another_model_is_refused():
    with pytest.raises(SliceError, match=r"f.csv: line 1 names tokens for 4 experts.* has 8"):
        apply_static_routing(model("mixtral"), Routing("f.csv", table=((1.0,) * 4,)))
    with pytest.raises(SliceError, match=r"--moe-routing zipf:1: LlamaForCausalLM has no experts"):
        apply_static_routing(model("llama"), Routing("zipf:1", 1.0))
    apply_static_routing(model("llama"), Routing("balanced"))


EXAMPLE = Path(__file__).parents[4] / "examples" / "train_mixtral.py"
SMALL = ["--", "--layers", "1", "--seq", "16", "--batch", "2"]


def capture(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command("capture", "run", *args)


def test_a_script_as_rank_1_of_4_that_share_out_the_experts(tmp_path):
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


def test_routing_where_nothing_is_sliced_is_refused(tmp_path):
    trace = tmp_path / "trace.et"
    done = capture(EXAMPLE, "--moe-routing", "zipf:1", "-o", trace, *SMALL)
    assert done.returncode == 2
    assert "--moe-routing zipf:1: it holds for models that onerank slices" in done.stderr
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
        slice_to_rank(sliced, world, 1, recorder.new_group, tp_style="megatron", routing=static)
        sliced.to("cuda", torch.bfloat16)
        batch = tokens().cuda()
        loss = sliced(input_ids=batch, labels=batch).loss
        loss.backward()
    finally:
        recorder.stop()
    assert loss.isfinite()
    assert travels(recorder)[0].bytes == TOKENS * TOP_K * HIDDEN * 2
    assert len(travels(recorder)) == 4 * LAYERS
    for layer in expert_layers(sliced).values():
        for weight in layer.parameters():
            assert all(expert.norm() > 0 for expert in weight.grad)
