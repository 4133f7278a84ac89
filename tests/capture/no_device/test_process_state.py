"""Saved files, process groups, generators and streams of scripts without a device."""

import pytest
import torch
from notes import has_note
from without_device import captured, run

from onerank.ir.errors import CaptureError

SAVES = """
    import io
    import os
    import torch
    from torch import nn
    torch.save({"a": 1}, "existing.pt")
    model = nn.Linear(8, 4, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        model(torch.randn(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            torch.save(model, "module.pt")
            module = torch.load("module.pt", weights_only=False)
            assert isinstance(module.weight, nn.Parameter) and module.weight.is_leaf
            assert module.weight.is_cuda and module.weight.shape == (4, 8)

            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            states["rows"] = torch.arange(3, device="cuda")
            torch.save(states, "saved.tmp")
            os.rename("saved.tmp", "saved.pt")
            on_cpu = torch.load("saved.pt", map_location="cpu")
            assert not on_cpu["model"]["weight"].is_cuda
            assert on_cpu["rows"].tolist() == [0, 1, 2]
            assert on_cpu["optimizer"]["state"][0]["step"] == 2
            model.load_state_dict(on_cpu["model"])
            optimizer.load_state_dict(torch.load("saved.pt")["optimizer"])

            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            assert torch.load(file)["bias"].is_cuda

            torch.save(model.state_dict(), "existing.pt")
            assert torch.load("existing.pt") == {"a": 1}
"""


def test_a_script_loads_the_shapes_that_it_has_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = captured(tmp_path, SAVES)
    assert has_note(graph.job.measurement.notes, "no-device-save-skipped")
    with pytest.raises(CaptureError) as error:
        torch.load("saved.pt", weights_only=False)
    assert error.value.code == "no-device-file"


ASYNC_SAVE = """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("cpu:gloo,cuda:nccl")
    model = fully_shard(nn.Linear(8, 4, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        model(torch.randn(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
            dcp.async_save(states, checkpoint_id="saved").result()
"""


def test_an_asynchronous_save_stages_shards_on_the_host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = captured(tmp_path, ASYNC_SAVE, "--dp", 2, "--torchrun")
    assert has_note(graph.job.measurement.notes, "checkpoints-skipped")


PROCESS = """
    import torch
    import torch.distributed as dist
    from torch import nn
    assert not dist.is_initialized()
    {init}
    assert dist.is_initialized() and dist.get_rank() == 3

    generator = torch.Generator()
    for state, restore in (
        (generator.get_state(), generator.set_state), (torch.get_rng_state(), torch.set_rng_state)
    ):
        sent = state.cuda()
        dist.broadcast(sent, 0)
        restore(sent.cpu())
    assert torch.randperm(4, generator=generator).sum() == 6

    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.get_sync_debug_mode() == torch.cuda.utilization() == 0
    assert torch.cuda.device_memory_used() == torch.cuda.memory_reserved()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 0

    copies, compute = torch.Stream(), torch.accelerator.current_stream()
    model = nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):
        loss = model(torch.randn(2, 8, device="cuda")).sum()
        copies.wait_stream(compute)
        with copies:
            copy = loss.detach().exp()
        compute.wait_event(copies.record_event(torch.Event()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
INIT = """
    dist.init_process_group("cpu:gloo,cuda:nccl")
    assert dist.get_backend() == "cpu:gloo,cuda:nccl"
"""
MESH = "torch.distributed.init_device_mesh('cuda', (4,))"


def _process(directory, init):
    return captured(directory, PROCESS.format(init=init), "--dp", 4, "--rank", 3, "--torchrun")


def test_a_script_creates_its_process_group(tmp_path):
    graph = _process(tmp_path, INIT.strip())
    names = [graph.strings[int(op)] for op in graph.nodes.op]
    product, side = names.index("aten::addmm"), names.index("aten::exp")
    assert graph.nodes.stream[product] != graph.nodes.stream[side]


def test_a_device_mesh_creates_the_process_group(tmp_path):
    _process(tmp_path, MESH)


UNKNOWN_INTEGERS = """
    import torch
    import torch.distributed as dist
    from torch import nn
    dist.init_process_group("nccl")
    model = nn.Linear(8, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):
        output = model(torch.randn(2, 8, device="cuda"))
        dist.broadcast((output > 0).sum(0), 0)
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_send_integers_that_no_device_computed(rank, tmp_path):
    done = run(tmp_path, UNKNOWN_INTEGERS, "--dp", 2, "--rank", rank, "--torchrun")
    assert done.returncode == 0, done.stderr
    assert ("CaptureWarning: broadcast" in done.stderr) == (rank == 1)
