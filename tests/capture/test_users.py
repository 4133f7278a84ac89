"""What users' scripts do, against figures reckoned by hand."""

import math
import pickle
import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from notes import has_note, note_of
from own_process import run_command
from raised import raises_code, warns_code
from user_script import run

from onerank import read
from onerank.annotate.op_costs.node_costs import characterise
from onerank.capture import Options, WindowPlan, capture
from onerank.ir import Phase, World
from onerank.ir.errors import ScriptError


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
            dist.all_reduce(torch.stack([loss.detach(), loss.detach() * 2]))
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
        ("all_reduce", 2 * 4): Phase.NONE,
        ("broadcast", 16 * 16 * 4): Phase.NONE,
    }
    # ahead of the model, and forward all the same: it has a backward
    scaled = [node.phase for node in graph if node.name == "aten::mul"]
    assert scaled[0] is Phase.FORWARD


def test_gradients_reduced_behind_a_backward_are_of_that_backward(tmp_path):
    graph = run(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from torch import nn
        dist.init_process_group("gloo")
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1))
        first, last = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mean, buffer, shard = torch.zeros(3), torch.zeros(16), torch.empty(4)
        while True:
            for _ in range(2):
                model(torch.randn(8, 16)).square().mean().backward()
            gradients = [first.weight.grad, last.weight.grad, first.bias.grad]
            norms = torch.stack([one.norm() for one in gradients])
            dist.all_reduce(norms)
            mean += norms
            dist.all_reduce(mean)
            dist.all_reduce(first.weight.grad)
            dist.all_reduce(last.bias.grad)  # of one element
            buffer[:8].copy_(last.weight.grad[0])
            torch._foreach_copy_([buffer[8:]], [first.bias.grad])
            buffer.div_(2)
            scattered = torch.empty(8)
            dist.reduce_scatter_tensor(scattered, buffer)
            dist.reduce(scattered, dst=0)
            dist.all_reduce(torch.cat([one.reshape(-1) for one in gradients]).bfloat16())
            optimizer.step()
            optimizer.zero_grad()
        """,
        World.of(dp=2),
    )
    calls = [
        (node.name, node.value("comm_bytes"), node.phase, node.value("micro_batch"))
        for node in graph
        if node.kind.is_communication
    ]
    assert calls == [
        ("all_reduce", 3 * 4, Phase.NONE, -1),
        ("all_reduce", 3 * 4, Phase.NONE, -1),
        ("all_reduce", 16 * 8 * 4, Phase.BACKWARD, 1),
        ("all_reduce", 1 * 4, Phase.BACKWARD, 1),
        ("reduce_scatter", 16 * 4, Phase.BACKWARD, 1),
        ("reduce", 8 * 4, Phase.BACKWARD, 1),
        ("all_reduce", (16 * 8 + 8 + 8) * 2, Phase.BACKWARD, 1),
    ]


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


def test_an_error_that_is_no_exception_is_reported(tmp_path):
    text = """
        import torch
        class CheckpointException(BaseException): ...
        model = torch.nn.Linear(4, 4)
        torch.optim.SGD(model.parameters()).step()
        raise CheckpointException
    """
    with raises_code("script-checkpoint", ScriptError, naming="line 6"):
        run(tmp_path, text, World())


def test_checkpoints_are_loaded_but_not_saved_with_a_note(tmp_path):
    rows = torch.arange(16.0).view(4, 4)
    dcp.save({"module.weight": rows, "module.bias": rows[0]}, checkpoint_id=tmp_path / "given")
    text = f"""
        import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        dist.init_process_group("cpu:gloo,cuda:nccl")
        shard = DTensor.from_local(torch.zeros(2, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        dcp.load({{"module.weight": shard}}, checkpoint_id="{tmp_path}/given")
        assert shard.to_local()[1].tolist() == [12, 13, 14, 15]
        model = torch.nn.Linear(4, 4)
        model = torch.nn.parallel.DistributedDataParallel(model)
        dcp.load(model.state_dict(), checkpoint_id="{tmp_path}/given")
        assert model.module.bias.tolist() == [0, 1, 2, 3]
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            dcp.save(model.state_dict(), checkpoint_id="{tmp_path}/at_once")
            saved = dcp.async_save(model.state_dict(), checkpoint_id="{tmp_path}/staged")
            getattr(saved, "upload_completion", saved).result()
            dcp.load(model.state_dict(), checkpoint_id="{tmp_path}/at_once")
    """
    graph = run(tmp_path, text, World.of(dp=2), rank=1)
    note = note_of(graph.job.measurement.notes, "checkpoints-skipped")
    saves, loads = (int(count) for count in re.findall(r"(\d+) (?:saves|loads)", note.text))
    assert saves == 2 * loads >= 8  # a step, the last step's not
    assert [(n.name, n.value("comm_bytes")) for n in graph if n.kind.is_communication] == [
        ("all_reduce", 80)  # no plans, results or metadata
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "train.py"]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("mesh", [False, True])
def test_fsdp1_has_the_weights_of_a_loaded_checkpoint(own, mesh, tmp_path):
    """Rank 1 holds elements 19 to 37, and reads the rows 3 to 5 of the first weight: 12 to 23.

    In a process of its own: rank 0, which tells rank 1 the names of the states, runs its backward
    in a fork, and torch refuses that of a process that has run one where there is a GPU.
    """
    names = {"0.weight": (6, 4), "1.weight": (2, 6), "1.bias": (2,)}
    values = torch.arange(38.0).split([math.prod(shape) for shape in names.values()])
    whole = {name: one.view(names[name]) for name, one in zip(names, values, strict=True)}
    states = {name: {"exp_avg": -one} for name, one in whole.items()}
    dcp.save({"model": whole, "optimizer": {"state": states}}, checkpoint_id=tmp_path / "given")
    text = f"""
        import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
        dist.init_process_group("gloo")
        cpu = torch.device("cpu")
        mesh = init_device_mesh("cpu", (2,)) if {mesh} else None
        inside = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 2))
        model = FullyShardedDataParallel(
            inside, device_id=cpu, device_mesh=mesh, use_orig_params={own}
        )
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states = {{"model": model.state_dict()}}
        if not {own}:
            moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
            states["optimizer"] = {{"state": {{
                name: {{"exp_avg": kept["exp_avg"]}} for name, kept in moments.items()
            }}}}
        dcp.load(states, checkpoint_id="{tmp_path}/given")
        model.load_state_dict(states["model"])
        held = torch.cat([one.detach().flatten() for one in model.parameters()])
        mine = range(38)[19 * dist.get_rank():][:19]
        assert held.tolist() == list(mine), held
        if not {own}:
            groups = FullyShardedDataParallel.optim_state_dict(model, optimizer)["param_groups"]
            back = FullyShardedDataParallel.optim_state_dict_to_load(
                model, optimizer, states["optimizer"] | {{"param_groups": groups}}
            )
            assert back["state"][0]["exp_avg"].tolist() == [-one for one in mine]
        while True:
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    path, trace = tmp_path / "train.py", tmp_path / "trace.et"
    path.write_text(textwrap.dedent(text))
    brief = ("--warm-up", 1, "--timed-steps", 1)
    ended = run_command("capture", "run", path, "--dp", 2, "--rank", 1, *brief, "-o", trace)
    assert ended.returncode == 0, ended.stderr
    calls = [n.name for n in read(trace) if n.kind.is_communication]
    assert set(calls) == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("lengths", ["[4, 8, 16, 32, 64]", "[16]"])
def test_times_and_shapes_come_from_steps_of_equal_shapes(lengths, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import itertools, torch\n"
        "model = torch.nn.Linear(16, 16)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        f"for length in itertools.cycle({lengths}):\n"
        "    model(torch.randn(length, 16)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    graph = capture(path, [], Options(windows=WindowPlan(warm_up=1, timed_steps=1))).graph
    measured = graph.job.measurement
    assert not has_note(measured.notes, "times-of-other-shapes")
    varied = "," in lengths
    assert (measured.input_spread > 0.3) == varied
    assert has_note(measured.notes, "input-shapes-vary") == varied


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
    options = Options(dp=4, ep=2, windows=WindowPlan(2, 1), fsdp=True)
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
    with raises_code("spawn-rank-count") as caught:
        run(tmp_path, SPAWNS, World.of(dp=3))
    assert "starts 2 processes" in str(caught.value)
    assert "3 ranks" in str(caught.value)
    assert "--dp 2" in str(caught.value)


def test_start_processes_runs_one_rank(tmp_path):
    launch = 'mp.start_processes(work, args=(2,), nprocs=2, start_method="spawn")'
    script = SPAWNS.replace("mp.spawn(work, args=(2,), nprocs=2)", launch)
    graph = run(tmp_path, script, World.of(dp=2))
    assert [n.value("comm_bytes") for n in graph if n.kind.is_communication] == [8 * 8 * 4]


def test_processes_that_create_a_group_run_as_one_rank(tmp_path):
    launch = """
        others = mp.Process(target=print)  # no rank
        others.start()
        ranks = [mp.Process(target=work, args=(rank, 2)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in (others, *ranks):
            process.join()
    """
    script = SPAWNS.replace("        mp.spawn(work, args=(2,), nprocs=2)", launch[1:])
    graph = run(tmp_path, script, World.of(dp=2))
    assert [n.value("comm_bytes") for n in graph if n.kind.is_communication] == [8 * 8 * 4]


def test_ranks_started_by_elastic_are_an_error(tmp_path):
    script = """
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch
        def work():
            raise SystemExit("a rank ran")
        if __name__ == "__main__":
            config = LaunchConfig(1, 1, 2, rdzv_backend="static", rdzv_endpoint="localhost:29513",
                                  rdzv_configs={"rank": 0}, max_restarts=0)
            elastic_launch(config, work)()
    """
    with raises_code("spawn-launcher"):
        run(tmp_path, script, World.of(dp=2))


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
        config = [{"width": 24} if rank == 0 else {}]  # as torch's, of what a state holds
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
            for message in ("epoch", 10 * step):
                message = [message if rank == 0 else None]
                dist.broadcast_object_list(message, src=0)
            assert isinstance(message[0], int)
            if step == 5:  # not in the steps before, so its objects are unknown
                dist.broadcast_object_list(message := [rank or None], src=0)
                assert message == [3]
        """
    path, trace = Path("train.py"), Path("trace.et")
    path.write_text(textwrap.dedent(script))
    brief = ("--warm-up", "1", "--timed-steps", "1")
    # it forks, and torch 2.11 ends a fork of a process whose autograd has run
    ended = run_command("capture", "run", path, "--dp", 4, "--rank", 3, *brief, "-o", trace)
    assert ended.returncode == 0, ended.stderr
    graph = read(trace)
    products = [node.text("input_shapes") for node in graph if node.name == "aten::addmm"]
    assert products == ["[[4],[9,24],[24,4],[],[]]"]
    calls = [(n.name, n.value("comm_bytes")) for n in graph if n.kind.is_communication]
    sizes = [len(pickle.dumps(message)) for message in ("epoch", 0)]
    assert calls == [("broadcast", size) for message in sizes for size in (8, message)]


def test_objects_that_the_script_as_another_rank_does_not_send_are_reported(tmp_path):
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
    with warns_code("objects-unknown", naming=("rank 0", "rank 1", "only here")):
        run(tmp_path, text, World.of(dp=2), rank=1)


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
    done = capture(path, [], Options(dp=2, windows=WindowPlan(warm_up=1, timed_steps=1)))
    calls = [(n.name, n.value("comm_bytes")) for n in done.graph if n.kind.is_communication]
    assert calls == [("all_reduce", 20 * 72 * 4)]
    note_of(done.conversion.notes, "calls-without-arguments", 1)
