"""Users' scripts whose models are sliced: what they do with weights and with parts of a model."""

import textwrap

import pytest
import safetensors.torch
import transformers.modeling_utils
from job_options import strategy
from notes import note_of
from own_process import run_command
from raised import raises_code
from safetensors.torch import load_file
from user_script import run

from onerank import read
from onerank.capture.parallelize.tensor.plan_file import read_plan
from onerank.ir import Kind, Phase, World
from onerank.ir.errors import ScriptError

AVERAGED = """
    import copy, torch
    from torch.optim.swa_utils import AveragedModel
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, vocab_size=64))
    {early}
    optimizer = torch.optim.SGD(model.parameters())
    tokens = torch.randint(0, 64, (2, 16))
    for step in range(40):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        {late}
"""
COPY = "averaged = AveragedModel(model)"
SHADOW = "shadow = [p.detach().clone() for p in model.parameters()]"
UPDATE = "[s.lerp_(p.detach(), 0.1) for s, p in zip(shadow, model.parameters())]"


@pytest.mark.parametrize(
    ("world", "form"),
    [
        (World.of(pp=2), None),
        (World.of(tp=2, dp=2), "fsdp"),
    ],
    ids=str,
)
def test_averages_of_the_weights_are_kept_of_the_slice(tmp_path, world, form):
    script = AVERAGED.format(early=COPY, late="averaged.update_parameters(model)")
    graph = run(tmp_path, script, world, **strategy(form))
    assert any(node.kind.is_communication for node in graph)


@pytest.mark.parametrize(
    ("early", "late"), [(SHADOW, UPDATE), ("", "copy.deepcopy(model)")], ids=["tensors", "copy"]
)
def test_whole_tensors_among_shards_are_refused_with_a_remedy(tmp_path, early, late):
    script = AVERAGED.format(early=early, late=late)
    with raises_code("fsdp-mixed-tensors", naming=("line 14", "--zero 1")):
        run(tmp_path, script, World.of(dp=2), fsdp=True)


@pytest.mark.parametrize("form", ["fsdp", "zero1"])
def test_a_model_that_is_saved_within_a_step_is_saved_as_this_rank_has_it(tmp_path, form):
    late = f"if step == 2: model.save_pretrained({str(tmp_path / 'saved')!r})"
    kept = safetensors.torch.save_file
    run(tmp_path, AVERAGED.format(early="", late=late), World.of(dp=2), **strategy(form))
    assert safetensors.torch.save_file is transformers.modeling_utils.safe_save_file is kept
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    rows = 32 if form == "zero1" else 16  # of which FSDP keeps half on each rank
    assert saved["model.layers.0.self_attn.o_proj.weight"].shape == (rows, 32)
    assert len(saved) == 2 + 2 * 9 + 1  # embedding and head, of each layer 7 and 2 norms, a norm


def test_a_model_that_safetensors_saves_by_itself_is_refused_with_a_remedy(tmp_path):
    late = f"import safetensors.torch as s; s.save_model(model, {str(tmp_path / 'saved')!r})"
    script = AVERAGED.format(early="", late=late)
    with raises_code("fsdp-no-storage", naming=("line 14", "save_pretrained")):
        run(tmp_path, script, World.of(dp=2), fsdp=True)
    assert not (tmp_path / "saved").exists()


def test_an_optimizer_that_knows_no_shards_is_named(tmp_path):
    plain = """
    class Plain(torch.optim.SGD):
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.data.add_(torch.zeros(p.shape))
    """
    script = AVERAGED.format(early=plain, late="").replace("optim.SGD(model", "Plain(model")
    script = script.replace("torch.Plain", "Plain")
    with raises_code("fsdp-plain-states", naming=("line 11", "Plain", "--ddp")):
        run(tmp_path, script, World.of(dp=2), fsdp=True)


def test_an_optimizer_that_shards_refuse_is_refused(tmp_path):
    script = AVERAGED.format(early="", late="").replace("SGD(", "Adafactor(")
    with raises_code("fsdp-optimizer-unsupported", naming=("line 12", "Adafactor")):
        run(tmp_path, script, World.of(dp=2), fsdp=True)


def test_advice_on_shards_is_for_those_of_ours(tmp_path):
    script = """
        import torch, torch.distributed as dist
        from torch.distributed.tensor import distribute_tensor
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (2,))
        distribute_tensor(torch.ones(4), mesh) + torch.ones(4)
    """
    with raises_code("script-raised", naming="DTensor") as caught:
        run(tmp_path, script, World.of(tp=2))
    assert "--fsdp" not in str(caught.value)


def test_matrices_that_are_updated_slice_by_slice_are_reported(tmp_path):
    script = AVERAGED.format(early="", late="").replace(
        "SGD(model.parameters())", "Muon([p for p in model.parameters() if p.ndim > 1])"
    )
    notes = run(tmp_path, script, World.of(tp=2)).job.measurement.notes
    # Optimizers of scripts before, which nothing has collected yet, stand in the note too.
    note_of(notes, "tp-optimizer-inexact", "Muon")


TRUNK_AND_HEAD = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64))
    optimizer = torch.optim.Adagrad(model.parameters())  # which makes its states here
    while True:
        tokens = torch.randint(0, 64, (2, 16))
        hidden = model.model(input_ids=tokens).last_hidden_state.flatten(0, 1)
        for chunk, labels in zip(hidden.chunk(2), tokens.flatten().chunk(2)):
            loss = torch.nn.functional.cross_entropy(model.lm_head(chunk), labels)
            loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_model_called_part_by_part_is_sliced_whole(tmp_path):
    script, out = tmp_path / "train.py", tmp_path / "t.et"
    script.write_text(textwrap.dedent(TRUNK_AND_HEAD))
    done = run_command("capture", "run", script, "--tp", "2", "-o", out)  # no other test's tensors
    assert done.returncode == 0, done.stderr
    graph = read(out)
    calls = [(n.name, n.value("comm_bytes")) for n in graph if n.kind.is_communication]
    # each chunk's logits, 16 tokens x 64 / 2 entries, and backward the gradient of its input
    assert calls.count(("all_gather", 16 * 32 * 4)) == 2
    assert calls.count(("all_reduce", 16 * 32 * 4)) == 2
    embedding, attention, norms = 64 * 32, 32 * 32 + 2 * 16 * 32 + 32 * 32, 3 * 32
    held = graph.job.measurement.resident_bytes
    parameters = sum(held["parameters"])
    assert parameters == ((2 * embedding + attention + 3 * 32 * 64) // 2 + norms) * 4
    assert sum(held["optimizer"]) == parameters + 12 * 4  # and a count of steps for each


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (World.of(tp=2), ("--tp:", "Fused", "lm_head", "--sharding-plan", "\n\nmodel")),
        (World.of(pp=2), ("--pp:",)),
    ],
    ids=str,
)
def test_a_loss_that_reads_the_weight_of_a_sliced_head_is_refused(tmp_path, world, names):
    text = """
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        class Fused(LlamaForCausalLM):
            def forward(self, input_ids):
                hidden = self.model(input_ids=input_ids).last_hidden_state
                return (hidden @ self.lm_head.weight.t()).logsumexp(-1).mean()
        model = Fused(LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64))
        model(input_ids=torch.ones(2, 16, dtype=torch.long)).backward()
    """
    with raises_code("head-weight-read", naming=names) as refused:
        run(tmp_path, text, world)
    if "tp" in world.sizes:
        plan = tmp_path / "plan.toml"
        plan.write_text(str(refused.value).partition("\n\n")[2])
        assert plan.read_text().count("replicated") == 1
        with raises_code("script-no-step", ScriptError):
            run(tmp_path, text, world, sharding_plan=read_plan(plan))


def test_a_trunk_called_alone_has_no_part_of_the_sequence(tmp_path):
    with raises_code("cp-called-directly"):
        run(tmp_path, TRUNK_AND_HEAD, World.of(cp=2))


def test_a_stage_that_trains_nothing_receives_its_gradient(tmp_path):
    text = """
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64))
        model.requires_grad_(False).lm_head.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            tokens = torch.randint(0, 64, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    """
    graph = run(tmp_path, text, World.of(pp=2))
    calls = [(n.kind, n.value("comm_bytes"), n.phase) for n in graph if n.kind.is_communication]
    hidden = 2 * 16 * 32 * 4
    assert calls == [(Kind.SEND, hidden, Phase.FORWARD), (Kind.RECV, hidden, Phase.BACKWARD)]
    assert not any(node.name == "aten::mm" for node in graph if node.phase is Phase.BACKWARD)
