"""What users' scripts do, against figures reckoned by hand."""

import pickle
import textwrap
from pathlib import Path
from typing import Any

import pytest
from own_process import run_command

from onerank import read
from onerank.annotate.work.characters import characterise
from onerank.capture import Options, Plan, capture
from onerank.ir import Graph, Kind, Phase, World
from onerank.ir.errors import CaptureError, ScriptError


def run(directory: Path, text: str, world: World, **options: Any) -> Graph:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text))
    return capture(path, [], Options(world, plan=Plan(warm_up=1, pure=1), **options)).graph


def test_products_of_dtensors_are_the_local_ones(tmp_path):
    graph = run(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel, RowwiseParallel, parallelize_module)
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (4,))
        model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        World.of(tp=4),
    )
    found = characterise(graph)
    products = found.nodes.flops[found.nodes.op == found.strings.intern("aten::mm")]
    # 8 rows x 32 x 64 / 4 ranks: forward twice, backward twice for weights and once for inputs
    assert products.tolist() == [2 * 8 * 32 * 16] * 5


def test_what_a_script_does_between_backward_and_forward_is_neither(tmp_path):
    graph = run(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from torch import nn
        dist.init_process_group("gloo")
        model, outer = nn.Linear(16, 16), nn.Parameter(torch.ones(16))
        optimizer = torch.optim.SGD([*model.parameters(), outer], lr=0.1)
        while True:
            loss = model(torch.randn(8, 16) * outer).square().mean()
            dist.all_reduce(loss.detach())  # behind the model, ahead of backward
            loss.backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
            dist.broadcast(model.weight.data, 0)
            optimizer.zero_grad()
        """,
        World.of(dp=2),
    )
    calls = {
        (node.name, node.value("comm_bytes")): node.phase
        for node in graph
        if node.kind.is_communication
    }
    assert calls == {
        ("all_reduce", 4): Phase.FORWARD,
        ("all_reduce", 16 * 16 * 4): Phase.NONE,
        ("broadcast", 16 * 16 * 4): Phase.NONE,
    }
    # ahead of the model, and forward all the same: it has a backward
    scaled = [node.phase for node in graph if node.name == "aten::mul"]
    assert scaled[0] is Phase.FORWARD


def test_process_groups_may_be_set_up_by_a_module_that_is_imported(tmp_path):
    package = tmp_path / "parallel"
    package.mkdir()
    (package / "__init__.py").write_text("from .groups import join\n")
    (package / "groups.py").write_text(
        "import torch.distributed as dist\ndef join():\n    dist.init_process_group('gloo')\n"
        "    return dist.all_reduce\n"
    )
    text = """
        import torch
        from parallel import join
        all_reduce, model = join(), torch.nn.Linear(16, 16, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(torch.randn(8, 16)).sum().backward()
            all_reduce(model.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
    """
    graph = run(tmp_path, text, World.of(dp=2))
    calls = [(n.name, n.text("group")) for n in graph if n.kind.is_communication]
    assert calls == [("all_reduce", "world")]  # and none that --dp would add


def test_an_error_that_is_no_exception_is_told(tmp_path):
    text = """
        import torch
        class CheckpointException(BaseException): ...
        model = torch.nn.Linear(4, 4)
        torch.optim.SGD(model.parameters()).step()
        raise CheckpointException
    """
    with pytest.raises(ScriptError, match=r"line 6 .*every rank what it holds"):
        run(tmp_path, text, World())


def test_checkpoints_are_left_out_and_told(tmp_path):
    text = f"""
        import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        dist.init_process_group("cpu:gloo,cuda:nccl")
        model = torch.nn.Linear(4, 4)
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            dcp.save(model.state_dict(), checkpoint_id="{tmp_path}/at_once")
            saved = dcp.async_save(model.state_dict(), checkpoint_id="{tmp_path}/staged")
            getattr(saved, "upload_completion", saved).result()
    """
    graph = run(tmp_path, text, World.of(dp=2), rank=1)
    (note,) = [note for note in graph.job.measurement.notes if "checkpoint" in note]
    assert int(note.split()[0]) >= 8  # two a step, the last step's not
    assert [(n.name, n.value("comm_bytes")) for n in graph if n.kind.is_communication] == [
        ("all_reduce", 80)  # no plans, results or metadata
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("lengths", ["[4, 8, 16, 32, 64]", "[16]"])
def test_steps_of_other_shapes_are_told(lengths, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import itertools, torch\n"
        "model = torch.nn.Linear(16, 16)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        f"for length in itertools.cycle({lengths}):\n"
        "    model(torch.randn(length, 16)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    notes = capture(path, [], Options(plan=Plan(warm_up=1, pure=1))).conversion.notes
    assert ("times and shapes do not belong together" in str(notes)) == ("," in lengths)


def test_gradients_of_experts_and_others_are_clipped_together(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "from transformers import MixtralConfig, MixtralForCausalLM\n"
        "model = MixtralForCausalLM(MixtralConfig(hidden_size=32, intermediate_size=64,\n"
        "    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,\n"
        "    num_local_experts=4))\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "tokens = torch.randint(0, 64, (2, 8))\n"
        "while True:\n"
        "    model(input_ids=tokens, labels=tokens).loss.backward()\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    options = Options(World.of(dp=4, ep=2), plan=Plan(2, 1), data_parallel="fsdp")
    graph = capture(path, [], options).graph
    reduced = [(n.text("group"), n.value("comm_bytes")) for n in graph if n.name == "all_reduce"]
    # a norm of each parameter: 2 of experts; embedding, head, 3 norms, router, 4 of attention
    assert sorted(reduced) == [("dp", 10 * 4), ("edp", 2 * 4), ("ep", 4)]


SPAWNS = """
    import os, torch, torch.distributed as dist, torch.multiprocessing as mp
    def work(rank, size):
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29512")
        dist.init_process_group("gloo", rank=rank, world_size=size)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8, bias=False))
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    if __name__ == "__main__":
        mp.spawn(work, args=(2,), nprocs=2)
"""


def test_a_script_that_starts_its_ranks_is_run_as_one(tmp_path):
    graph = run(tmp_path, SPAWNS, World.of(dp=2))
    reduced = [n.value("comm_bytes") for n in graph if n.kind.is_communication]
    assert reduced == [8 * 8 * 4]
    with pytest.raises(CaptureError, match=r"starts 2 processes, .* 3 ranks.*--dp 2"):
        run(tmp_path, SPAWNS, World.of(dp=3))


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
    graph = run(tmp_path, script, world, data_parallel=form)
    assert any(node.kind.is_communication for node in graph)


@pytest.mark.parametrize(
    ("early", "late"), [(SHADOW, UPDATE), ("", "copy.deepcopy(model)")], ids=["tensors", "copy"]
)
def test_whole_tensors_beside_shards_are_told_how_to_be_made(tmp_path, early, late):
    script = AVERAGED.format(early=early, late=late)
    with pytest.raises(CaptureError, match=r"shards from its first forward on.* or use --zero 1"):
        run(tmp_path, script, World.of(dp=2), data_parallel="fsdp")


def test_an_optimizer_that_knows_no_shards_is_named(tmp_path):
    plain = """
    class Plain(torch.optim.SGD):
        def step(self):
            for p in self.param_groups[0]["params"]:
                p.data.add_(torch.zeros(p.shape))
    """
    script = AVERAGED.format(early=plain, late="").replace("optim.SGD(model", "Plain(model")
    script = script.replace("torch.Plain", "Plain")
    with pytest.raises(CaptureError, match=r"Plain makes its states .* use another optimizer"):
        run(tmp_path, script, World.of(dp=2), data_parallel="fsdp")


def test_advice_on_shards_is_for_those_of_ours(tmp_path):
    script = """
        import torch, torch.distributed as dist
        from torch.distributed.tensor import distribute_tensor
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (2,))
        distribute_tensor(torch.ones(4), mesh) + torch.ones(4)
    """
    with pytest.raises(CaptureError, match=r"got mixed torch\.Tensor and DTensor") as caught:
        run(tmp_path, script, World.of(tp=2))
    assert "--fsdp" not in str(caught.value)


def test_matrices_that_are_updated_slice_by_slice_are_told(tmp_path):
    script = AVERAGED.format(early="", late="").replace(
        "SGD(model.parameters())", "Muon([p for p in model.parameters() if p.ndim > 1])"
    )
    notes = run(tmp_path, script, World.of(tp=2)).job.measurement.notes
    assert any(note.startswith("Muon does not update element by element") for note in notes)


def test_objects_of_the_first_rank_are_those_it_broadcasts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    script = """
        import os, torch, torch.distributed as dist
        os.chdir("run")  # as Hydra does; the trace lies where the command ran
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        half = dist.new_group([2, 3])
        dist.broadcast_object_list([torch.arange(3).numpy()], src=0)  # each rank has its own
        config = [{"width": 24} if rank == 0 else None]
        dist.broadcast_object_list(config, src=0)
        rows = [None]
        dist.scatter_object_list(rows, [3, 5, 7, 9] if rank == 0 else None, src=0)
        deep = [None if rank == 3 else 4]
        if rank > 1:
            dist.broadcast_object_list(deep, src=2, group=half)
        model = torch.nn.Linear(config[0]["width"], deep[0])
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(40):
            model(torch.randn(rows[0], config[0]["width"])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for told in ("epoch", 10 * step):
                told = [told if rank == 0 else None]
                dist.broadcast_object_list(told, src=0)
            assert isinstance(told[0], int)
            if step == 5:  # unlike the steps before: nobody knows
                dist.broadcast_object_list(told := [rank or None], src=0)
                assert told == [3]
        """
    path, trace = Path("train.py"), Path("trace.et")
    path.write_text(textwrap.dedent(script))
    brief = ("--warm-up", "1", "--pure-steps", "1")
    # it forks, and torch 2.11 ends a fork of a process whose autograd has run
    ended = run_command("capture", "run", path, "--dp", 4, "--rank", 3, *brief, "-o", trace)
    assert ended.returncode == 0, ended.stderr
    graph = read(trace)
    products = [node.text("input_shapes") for node in graph if node.name == "aten::addmm"]
    assert products == ["[[4],[9,24],[24,4],[],[]]"]
    calls = [(n.name, n.value("comm_bytes")) for n in graph if n.kind.is_communication]
    sizes = [len(pickle.dumps(told)) for told in ("epoch", 0)]
    assert calls == [("broadcast", size) for told in sizes for size in (8, told)]


def test_objects_that_the_script_as_another_rank_does_not_send_are_told(tmp_path):
    text = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        assert dist.get_rank() == 1, "only here"
        dist.broadcast_object_list([None], src=0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            dist.all_reduce(model.weight.grad)
    """
    with pytest.warns(UserWarning, match=r"rank 1 keeps its own .*as rank 0 it failed") as told:
        run(tmp_path, text, World.of(dp=2), rank=1)
    assert any("only here" in str(one.message) for one in told)


def test_parameters_may_be_averaged_behind_the_first_step(tmp_path):
    text = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            dist.all_reduce(model.weight.data)
    """
    graph = run(tmp_path, text, World.of(dp=2))
    calls = [(n.name, n.value("comm_bytes")) for n in graph if n.kind.is_communication]
    assert calls == [("all_reduce", 64)]


def test_a_loss_summed_for_a_log_in_the_profiled_step_alone_is_left_out(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))\n"
        "model = torch.nn.parallel.DistributedDataParallel(model)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for step in range(40):\n"
        "    loss = model(torch.randn(2, 8)).sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    if step == 5:\n"
        "        dist.all_reduce(loss.detach(), async_op=True).wait()\n"
    )
    done = capture(path, [], Options(World.of(dp=2), plan=Plan(warm_up=1, pure=1)))
    calls = [(n.name, n.value("comm_bytes")) for n in done.graph if n.kind.is_communication]
    assert calls == [("all_reduce", 20 * 72 * 4)]
    notes = [note for note in done.conversion.notes if "communication call" in note]
    assert len(notes) == 1
    assert notes[0].startswith("the profiled step has 1 communication call that the structure")


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
    held = graph.job.measurement.held_bytes
    parameters = sum(held["parameters"])
    assert parameters == ((2 * embedding + attention + 3 * 32 * 64) // 2 + norms) * 4
    assert sum(held["optimizer"]) == parameters + 12 * 4  # and a count of steps for each


@pytest.mark.parametrize(
    ("world", "complaint"),
    [
        (World.of(tp=2), r"--tp: Fused did not call lm_head .* keep it whole by a plan"),
        (World.of(pp=2), r"--pp: the weight of the model's head is read, not the head called"),
    ],
    ids=str,
)
def test_a_loss_that_reads_the_weight_of_a_sliced_head_is_refused(tmp_path, world, complaint):
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
    with pytest.raises(CaptureError, match=complaint):
        run(tmp_path, text, world)


def test_a_trunk_called_alone_has_no_part_of_the_sequence(tmp_path):
    with pytest.raises(CaptureError, match=r"LlamaModel is called by itself.*LlamaForCausalLM"):
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


CRITIC_AND_GENERATOR = """
    import torch
    critic, generator = torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(4, 8, bias=False)
    optimizers = [torch.optim.SGD(m.parameters()) for m in (critic, generator)]
    while True:
        for _ in range(3):
            critic(generator(torch.randn(2, 4)).detach()).sum().backward()
            optimizers[0].step()
        critic(generator(torch.randn(2, 4))).sum().backward()
        optimizers[1].step()
"""


@pytest.mark.parametrize("together", [1, 3])
def test_steps_of_unlike_work_are_told_or_captured_as_one(together, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(CRITIC_AND_GENERATOR))
    plan = Plan(warm_up=1, pure=1, optimizer_steps=together)
    graph = capture(path, [], Options(plan=plan)).graph
    products = sum(node.name == "aten::mm" for node in graph)
    told = [note for note in graph.job.measurement.notes if "unlike work" in note]
    if together == 3:  # 2 forward and 1 backward for each of the critic's, 2 and 3 the generator's
        assert products == 3 * 3 + 5
        assert not told
    else:
        assert products in (3, 3 + 5)
        assert "models 2 to 4 times" in told[0]
        assert "--optimizer-steps 3 captures" in told[0]


def test_a_script_may_end_before_a_step_does_the_work_of_the_profiled_one(tmp_path):
    path, raw = tmp_path / "train.py", tmp_path / "raw"
    path.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for step in range(9):\n"
        "    for _ in range(step + 1):\n"
        "        model(torch.randn(2, 8)).sum().backward()\n"
        "    optimizer.step()\n"
        "raise SystemExit(0)\n"
    )
    plan = Plan(warm_up=1, pure=1)
    graph = capture(path, [], Options(plan=plan, keep_raw=raw)).graph
    told = [note for note in graph.job.measurement.notes if "unlike work" in note]
    assert "models 2 to 9 times, the one in this graph 7." in told[0]
    assert sorted(p.name for p in raw.glob("*et*")) == ["et.json.gz"]


def test_a_script_that_ends_within_the_first_of_several_steps(tmp_path):
    path = tmp_path / "train.py"
    text = CRITIC_AND_GENERATOR.replace("while True:", "for _ in range(4):")
    path.write_text(textwrap.dedent(text))
    plan = Plan(warm_up=1, pure=1, optimizer_steps=25)
    with pytest.raises(ScriptError, match=r"ended after 12 optimizer steps; .* at least 200 "):
        capture(path, [], Options(plan=plan))
