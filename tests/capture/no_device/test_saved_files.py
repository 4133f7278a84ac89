"""Files that a script saves and loads without a device."""

import pytest
import torch
from notes import has_note
from safetensors.torch import load_file
from without_device import captured

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
            on_gpu = torch.load("saved.pt", map_location="cuda")
            assert on_gpu["model"]["weight"].is_cuda
            assert on_gpu["optimizer"]["state"][0]["step"].is_cuda
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


SAFETENSORS = """
    import torch
    from pathlib import Path
    from safetensors import safe_open
    from safetensors.torch import load_file, save, save_file
    model = torch.nn.Linear(64, 32, device="cuda")
    large = torch.nn.Linear(2048, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Path("DIRECTORY/kept.safetensors")
    save_file({"weight": torch.full((32, 64), 5.0)}, kept)
    for step in range(5):
        state = {**model.state_dict(), "large": large.weight, "step": torch.tensor(step)}
        save_file(state, "DIRECTORY/saved.safetensors", metadata={"format": "pt"})
        save_file(model.state_dict(), kept)
        loaded = load_file("DIRECTORY/saved.safetensors")
        assert loaded["large"].shape == (1024, 2048)
        with safe_open("DIRECTORY/saved.safetensors", "pt", backend="pread") as file:
            part = file.get_slice("large")
            assert part.get_shape() == [1024, 2048]
            columns = part[:, :1536]
            assert columns.shape == (1024, 1536) and not columns.is_cuda
            # Nobody reads the numbers of weights.
            assert type(columns) is type(file.get_tensor("large")) is type(model.weight.data)
            assert file.get_tensor("step").tolist() == step
        Path("DIRECTORY/bytes.safetensors").write_bytes(save(state))
        model.load_state_dict({name: loaded[name] for name in ("weight", "bias")})
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_safetensors_saves_zeros_and_keeps_files_with_numbers(tmp_path):
    graph = captured(tmp_path, SAFETENSORS.replace("DIRECTORY", str(tmp_path)))
    assert has_note(graph.job.measurement.notes, "no-device-save-skipped")
    for file in ("saved.safetensors", "bytes.safetensors"):
        saved = load_file(tmp_path / file)
        assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {
            "weight": (32, 64),
            "bias": (32,),
            "large": (1024, 2048),
            "step": (),
        }
        # Steps 0 to 2 are captured, and what the script itself computed on the CPU has its numbers.
        assert saved["step"] == 2
    assert load_file(tmp_path / "kept.safetensors")["weight"].eq(5).all()


REFUSED = """
    import torch
    from safetensors.torch import load_file, save, save_file, save_model
    embedding = torch.nn.Embedding(64, 32, device="cuda")
    head = torch.nn.Linear(32, 64, bias=False, device="cuda")
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    file = "DIRECTORY/model.safetensors"
    def refused(error, tensors):
        for call in (lambda: save_file(tensors, file), lambda: save(tensors)):
            try:
                call()
            except error:
                continue
            raise AssertionError(tensors)
    for step in range(5):
        refused(RuntimeError, model.state_dict())
        refused(RuntimeError, {"all": head.weight, "part": head.weight[1:]})
        refused(ValueError, {"transposed": head.weight.T})
        refused(ValueError, {"sparse": torch.eye(2).to_sparse(), "weight": head.weight})
        save_file({"first": head.weight[:32], "second": head.weight[32:]}, file)
        save_model(model, file)
        assert set(load_file(file)) == {"0.weight"}
        model(torch.arange(8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_safetensors_refuses_what_it_refuses_with_numbers(tmp_path):
    captured(tmp_path, REFUSED.replace("DIRECTORY", str(tmp_path)))
