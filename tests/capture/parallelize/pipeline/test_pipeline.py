"""Pipeline stages against the whole model, on Gloo ranks that communicate."""

import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from job_options import axes
from raised import raises_code
from real_ranks import run_ranks

import onerank
from onerank.annotate import recost
from onerank.capture import Options, WindowPlan, capture
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.data.data_groups import DataGroups
from onerank.capture.parallelize.data.fsdp import FullyShardedModel
from onerank.capture.parallelize.data.optimizers import cutting_states
from onerank.capture.parallelize.model_structure import split_layers
from onerank.capture.parallelize.pipeline.stage import stage_model
from onerank.capture.parallelize.shard_model import SlicingOptions, slice_to_rank
from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.expand.pipeline.split_backward import split_backward
from onerank.converters.expand.pipeline.stages import StageBlock, split_into_blocks
from onerank.converters.targets.astra_sim.exporter import export_astra_sim_ranks
from onerank.ir import Graph, Kind, Phase, Pipeline, World
from onerank.ir.errors import SliceError

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 16,
}

GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 16}

QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

TIED = {"tie_word_embeddings": True}

RANKS = 4

REPLICAS, SLICES = World.of(dp=2, pp=2), World.of(tp=2, pp=2)

# the world, layers of each stage, model, changes, whether activations are recomputed
CASES: dict[str, tuple[World, tuple[int, ...], str, dict[str, Any], bool]] = {
    "plain": (REPLICAS, (2, 1), "Llama", {}, False),
    "tied": (REPLICAS, (1, 2), "Llama", TIED, False),
    "layer types": (
        REPLICAS,
        (1, 2),
        "Gemma2",
        {"head_dim": 8, "sliding_window": 4, "layer_types": TYPES},
        False,
    ),
    "positions": (REPLICAS, (2, 1), "GPT2", QUIET, False),
    "recomputed": (REPLICAS, (1, 2), "Llama", {}, True),
    "four stages": (World.of(pp=4), (1, 1, 1, 1), "Llama", {**TIED, "num_hidden_layers": 4}, False),
    "tensor parallel": (SLICES, (2, 1), "Llama", TIED, False),
    "shards of the sequence": (SLICES, (2, 1), "Llama", TIED, False),
    "recomputed shards of the sequence": (SLICES, (1, 2), "Llama", {}, True),
    "shards of the sequence, under FSDP": (SLICES, (2, 1), "Llama", {}, False),
}

MICRO_BATCHES = 2


def model(kind: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    shape = GPT2 if kind == "GPT2" else SHAPE
    config = getattr(transformers, f"{kind}Config")(**{**shape, **changes})
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    whole = getattr(transformers, head)(config)
    with torch.no_grad():
        for parameter in whole.parameters():  # no bias or norm at zero or one
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
    return whole


def tokens(micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + micro_batch)
    return torch.randint(0, SHAPE["vocab_size"], (2, 16), generator=generator)


def train(stage: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Take one step of two micro-batches; return the summed loss and the gradients."""
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)
    total = 0.0
    for micro_batch in range(MICRO_BATCHES):
        loss = stage(input_ids=tokens(micro_batch), labels=tokens(micro_batch)).loss / MICRO_BATCHES
        loss.backward()
        total += loss.item()
    optimizer.step()
    gradients = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    return total, {n: getattr(g, "_local_tensor", g).clone() for n, g in gradients.items()}


def train_rank(rank: int, results: Any) -> None:
    for case, (world, layers, kind, changes, recomputed) in CASES.items():

        def new_group(_: str, ranks: Any) -> Any:
            return dist.new_group(list(ranks), use_local_synchronization=True)

        stage = model(kind, changes)
        summary = slice_to_rank(
            stage,
            world,
            rank,
            new_group,
            SlicingOptions(sequence="sequence" in case, peers_absent=False, pp_layers=layers),
        )
        summary = pickle.loads(pickle.dumps(summary))  # as --ranks distinct does
        if recomputed:
            stage.gradient_checkpointing_enable()
            stage.train()
        if "FSDP" in case:  # every rank forms a data-parallel group of one
            FullyShardedModel(stage, DataGroups(new_group, world, rank))
        results[case, rank] = (*train(stage), summary.elements_after)


@pytest.fixture(scope="module")
def stages() -> Any:
    """Loss, gradients and elements of every case and rank."""
    return run_ranks(train_rank, RANKS)


@pytest.mark.parametrize("case", CASES)
def test_stages_match_the_whole_model(stages, case):
    world, layers, kind, changes, _ = CASES[case]
    whole = model(kind, changes)
    loss, expected = train(whole)
    names = [name for name, _ in whole.named_parameters()]
    tied = next(n for n, p in whole.named_parameters() if p is whole.get_input_embeddings().weight)
    names_with_gradients: set[str] = set()
    elements = 0
    for rank in range(world.size):
        stage = world.point(rank)["pp"]
        stage_loss, gradients, stage_elements = stages[case, rank]
        elements += stage_elements // len(world.line("dp", rank))
        assert stage_loss == (pytest.approx(loss, abs=1e-5) if stage == len(layers) - 1 else 0)
        for name, gradient in gradients.items():
            expected_gradient = expected[
                name if name in names else tied
            ]  # the head's on the last stage
            for dim in range(expected_gradient.dim()):
                if expected_gradient.shape[dim] != gradient.shape[dim]:
                    expected_gradient = expected_gradient.chunk(world.sizes["tp"], dim)[
                        world.point(rank)["tp"]
                    ]
            torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4, msg=name)
        names_with_gradients |= gradients.keys()
    assert names_with_gradients >= set(expected)
    if world.sizes.get("tp", 1) == 1:
        head_copy = (
            whole.get_output_embeddings().weight.numel()
            if len(names_with_gradients) > len(expected)
            else 0
        )
        assert elements == sum(p.numel() for p in whole.parameters()) + head_copy


def test_stages_exchange_a_shard_of_the_sequence():
    recorder = Recorder(2, 8)  # a middle stage has two boundaries
    recorder.start()
    stage = model("Llama", {"num_hidden_layers": 4})
    world = World.of(tp=2, pp=4)
    slice_to_rank(stage, world, 2, recorder.new_group, SlicingOptions(sequence=True))
    batch = tokens(0)
    stage(input_ids=batch, labels=batch).loss.backward()
    recorder.stop()
    shard = 2 * (16 // 2) * SHAPE["hidden_size"] * 4  # batch, sequence, hidden, fp32
    calls = [(call.collective, call.bytes, call.peer) for call in recorder.calls]
    messages = [call for call in calls if call[0] in ("send", "recv")]
    assert messages == [
        ("recv", shard, 0),
        ("send", shard, 4),
        ("recv", shard, 4),
        ("send", shard, 0),
    ]
    with raises_code("sp-sequence-indivisible", naming="(15 = 2 x 7 + 1)"):
        stage(input_ids=batch[:, :15], labels=batch[:, :15])


class StageGroup:
    """A process group with the methods that staging calls."""

    def __init__(self, stage: int, stages: int) -> None:
        self._stage, self._stages = stage, stages

    def size(self) -> int:
        return self._stages

    def rank(self) -> int:
        return self._stage


def cut_to_stage(model_to_cut: Any, stage: int, stages: int, layers: tuple[int, ...] = ()) -> Any:
    group: Any = StageGroup(stage, stages)
    return stage_model(model_to_cut, group, range(stages), lambda *_: group, layers)


def test_the_first_stages_get_the_remaining_layers():
    assert split_layers(30, 4) == (8, 8, 7, 7)
    assert split_layers(4, 4) == (1, 1, 1, 1)
    assert split_layers(5, 2, (1, 4)) == (1, 4)


@pytest.mark.parametrize(
    ("requested", "code", "arithmetic"),
    [
        ((), "pp-too-many-stages", "3 layers, so 1 stages would be empty"),
        ((1, 2), "pp-layers-malformed", "1 + 2 = 3"),
        ((1, 1, 1, 1), "pp-layers-malformed", "1 + 1 + 1 + 1 = 4"),
        ((0, 1, 1, 1), "pp-layers-malformed", "0 + 1 + 1 + 1 = 3"),
    ],
)
def test_stage_layers_that_do_not_add_up_are_refused(requested, code, arithmetic):
    with raises_code(code, SliceError) as refused:
        cut_to_stage(model("Llama", {}), 0, 4, requested)
    assert arithmetic in str(refused.value)


def test_layers_keep_their_names_and_stages_with_other_work_have_other_keys():
    llama = model("Llama", {"num_hidden_layers": 6})
    summary = cut_to_stage(llama, 1, 4, (1, 2, 2, 1))
    names = {name.split(".")[2] for name, _ in llama.named_parameters()}
    assert names == {"1", "2"}
    assert summary.pipeline.layers == (1, 2, 2, 1)
    assert summary.work_keys[1] == summary.work_keys[2]
    assert len(set(summary.work_keys)) == 3
    types = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    mixed = model("Qwen2", {"num_hidden_layers": 4, "layer_types": types, "sliding_window": 4})
    assert len(set(cut_to_stage(mixed, 1, 4).work_keys)) == 4


def test_dropped_parameters_are_freed_in_an_optimizer_that_lists_them():
    llama = model("Llama", {})
    optimizer = torch.optim.Adagrad(llama.parameters())  # creates its states at construction
    cut_to_stage(llama, 0, 3)
    listed = sum(p.numel() for p in optimizer.param_groups[0]["params"])
    assert listed == sum(p.numel() for p in llama.parameters())
    with cutting_states({llama: None}):
        optimizer.step()
    assert sum(state["sum"].numel() for state in optimizer.state.values()) == listed


def test_a_balancing_loss_of_routers_in_several_stages_is_refused():
    mixtral = model("Mixtral", {"num_local_experts": 4})
    cut_to_stage(mixtral, 1, 2)
    with raises_code("pp-balancing-loss"):
        mixtral(input_ids=tokens(0), labels=tokens(0), output_router_logits=True)


def test_logits_on_a_stage_without_a_head_are_refused():
    llama = model("Llama", {})
    cut_to_stage(llama, 0, 2)
    sent: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "send", lambda tensor, **_: sent.append(tensor))
        output = llama(tokens(0), labels=tokens(0))
        loss, *_ = llama(tokens(0), labels=tokens(0), return_dict=False)
    assert output.loss == loss == 0
    assert [list(tensor.shape) for tensor in sent] == [[2, 16, 32]] * 2
    logits = dict(output.items())["logits"]  # the HF Trainer reads all outputs
    for use in (lambda it: it.float(), torch.argmax, lambda it: it[:, :-1], lambda it: 2 * it):
        with raises_code("output-not-available", SliceError) as refused:
            use(logits)
        assert "stage 1 computes, on stage 0" in str(refused.value)


SCRIPT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256, tie_word_embeddings=True,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(60):
    optimizer.zero_grad()
    for micro_batch in range(3):
        tokens = torch.randint(0, 256, (2, 32))
        (model(input_ids=tokens, labels=tokens, use_cache=False).loss / 3).backward()
    optimizer.step()
"""


def test_captured_stages_run_as_a_pipeline(tmp_path):
    """Three captures of a script without distributed code, for four ranks and 1F1B."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    graphs: list[Graph] = []
    for rank in (0, 1, 3):
        world = World.of(pp=4)
        graphs.append(
            capture(path, [], Options(**axes(world), rank=rank, windows=WindowPlan(1, 1))).graph
        )
        job = graphs[-1].job
        assert job.pipeline == Pipeline(rank, (1, 1, 1, 1))
        assert [(rank_class.representative, rank_class.where) for rank_class in job.classes] == [
            (0, {"pp": (0,)}),
            (1, {"pp": (1, 2)}),
            (3, {"pp": (3,)}),
        ]
    messages = [
        (node.kind, node.phase, node.value("micro_batch"), node.value("comm_bytes"))
        for node in graphs[1]
        if node.kind in (Kind.SEND, Kind.RECV)
    ]
    hidden_states = 2 * 32 * 64 * 4
    order = [
        (Kind.RECV, Phase.FORWARD),
        (Kind.SEND, Phase.FORWARD),
        (Kind.RECV, Phase.BACKWARD),
        (Kind.SEND, Phase.BACKWARD),
    ]
    assert messages == [
        (*message, micro_batch, hidden_states) for micro_batch in range(3) for message in order
    ]
    (tied,) = [node for node in graphs[0] if node.kind is Kind.COLLECTIVE]
    assert (tied.phase, tied.value("comm_bytes")) == (Phase.OPTIMIZER, 256 * 64 * 4)
    assert graphs[0].job.group("embedding").ranks == (0, 3)
    activation_bytes = [graph.job.measurement.activation_bytes for graph in graphs]
    assert all(len({*each}) == 1 and len(each) == 3 for each in activation_bytes), activation_bytes
    # the last stage keeps its logits too, [2, 32, 256] in fp32
    assert activation_bytes[2][0] - activation_bytes[1][0] > 2 * 32 * 256 * 4
    on_h100 = [recost(graph, "H100") for graph in graphs]
    for schedule, ranks in (("1f1b", 4), ("interleaved:2", 2), ("zbv", 2)):
        expanded = expand(on_h100, PipelineSchedule.parse(schedule), 8)
        assert export_astra_sim_ranks(expanded, tmp_path / schedule.replace(":", "")).ranks == ranks
    # the weight gradients of a backward: 7 matrix products and two norms per layer
    block = split_into_blocks(graphs[1]).blocks[StageBlock("B", 1)]
    for nodes in split_backward(graphs[1], block):
        assert sum(graphs[1].node(index).name == "aten::mm" for index in nodes) == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_stages_of_a_gpu_run_as_a_pipeline(tmp_path):
    """Kernels belong to the block of their operator; ZB-V splits off the weight gradients."""
    path = tmp_path / "train.py"
    on_gpu = SCRIPT.replace("(config)\n", "(config).to('cuda', torch.bfloat16)\n")
    path.write_text(on_gpu.replace("(2, 32))", "(2, 32), device='cuda')"))
    graphs: list[Graph] = []
    for rank in (0, 1, 3):
        trace = tmp_path / f"stage.{rank}.et"
        command = ["capture", "run", path, "--pp", "4", "--rank", str(rank), "-o", trace]
        subprocess.run([sys.executable, "-m", "onerank", *map(str, command)], check=True)
        graphs.append(onerank.read(trace))
        blocks = split_into_blocks(graphs[-1]).blocks
        of_blocks = sum(int(graphs[-1].gpu_compute[block].sum()) for block in blocks.values())
        assert of_blocks == graphs[-1].gpu_compute.sum() > 0
        products = 8 if rank == 3 else 7  # the last has the head
        for part in split_backward(graphs[-1], blocks[StageBlock("B", 1)]):
            nodes = [graphs[-1].node(index) for index in part]
            calls = {n.text("input_values") for n in nodes if n.text("op") == "aten::mm"}
            assert len(calls) >= products  # on an H200 a part was seen with one more
    for schedule, ranks in (("1f1b", 4), ("interleaved:2", 2), ("zbv", 2)):
        expanded = expand(graphs, PipelineSchedule.parse(schedule), 8)
        assert export_astra_sim_ranks(expanded, tmp_path / schedule.replace(":", "")).ranks == ranks


REFUSED = {
    "no head": (
        lambda: transformers.LlamaModel(transformers.LlamaConfig(**SHAPE)),
        "pp-model-structure",
        "its 3 layers",
    ),
    "embeddings in a module": (
        lambda: transformers.BertLMHeadModel(transformers.BertConfig(**SHAPE, is_decoder=True)),
        "pp-module-order",
        "bert.embeddings.word_embeddings.weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_of_unsupported_structure_are_refused(case):
    build, code, detail = REFUSED[case]
    with raises_code(code, SliceError) as refused:
        cut_to_stage(build(), 0, 2)
    assert detail in str(refused.value)


def test_an_operation_before_the_first_layer_is_refused():
    llama = model("Llama", {})
    cut_to_stage(llama, 1, 2)
    rotary = llama.model.rotary_emb

    class Scaled(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return hidden.square()

    first = next(iter(llama.model.layers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "recv", lambda *_, **__: None)
        ids = tokens(0)
        received = llama.model.embed_tokens(ids)
        assert type(received * 2.0) is type(received)  # scaling is ignored
        assert rotary(received, position_ids=ids)[0].shape == (2, 16, 8)
        with raises_code("pp-work-before-layer"):
            first(Scaled()(received))
