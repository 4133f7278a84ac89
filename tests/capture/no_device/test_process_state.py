"""Process groups, generators and streams of scripts without a device."""

import json

import pytest
from without_device import captured, run

from onerank.ir import Kind

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
    torch.cuda.memory._record_memory_history(max_entries=100)
    torch._C._cuda_attach_out_of_memory_observer(print)
    assert torch.cuda.cudart().cudaProfilerStart() == 0
    torch.cuda.profiler.stop()
    torch.cuda.memory._dump_snapshot("/dev/null")
    kept = torch.empty(1 << 20, device="cuda")
    nested = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"]
    assert nested == torch.cuda.memory_allocated() >= 4 << 20

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
    store = dist.TCPStore("127.0.0.1", 29511, 4, is_master=False)  # the others would not come
    assert isinstance(store, dist.TCPStore) and store.add("arrived", 1) == 4
    dist.init_process_group("cpu:gloo,cuda:nccl")
    assert dist.get_backend() == "cpu:gloo,cuda:nccl"
    from datetime import timedelta
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout, options.config.max_ctas = timedelta(minutes=5), 8
    urgent = dist.new_group(backend="nccl", pg_options=options)
    mesh = dist.init_device_mesh("cuda", (4,), backend_override={0: ("nccl", options)})
    assert urgent.size() == mesh.size() == 4
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


def test_a_deep_copy_takes_memory_until_it_is_deleted(tmp_path):
    """As of a moving average of the weights, which FSDP2 divides."""
    script = """
    import copy
    import torch
    from torch import nn
    allocated = torch.cuda.memory_allocated
    model = nn.Linear(256, 256, bias=False, device="cuda")
    model.weight.note = ["kept"]
    one = allocated()
    copied = copy.deepcopy(nn.ModuleList([model, model]))
    assert allocated() == 2 * one
    weight = copied[0].weight
    assert weight is copied[1].weight is not model.weight
    assert isinstance(weight, nn.Parameter) and weight.is_cuda and weight.requires_grad
    assert weight.note == ["kept"] and weight.note is not model.weight.note
    frozen = copy.deepcopy(model.requires_grad_(False))
    assert not frozen.weight.requires_grad
    weight.data = weight.data[:128].clone()
    del frozen, weight
    assert allocated() == 1.5 * one
    del copied
    assert allocated() == one
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):
        model(torch.ones(2, 256, device="cuda")).sum().backward()
        optimizer.step()
    """
    assert len(captured(tmp_path, script))


MOVED = """
    import torch
    import torch.distributed as dist
    from torch import nn
    dist.init_process_group("nccl")
    model = nn.Linear(64, 64)
    hooked = []
    model.weight.register_hook(hooked.append)
    model.bias.stride = 1  # as Megatron-LM does
    model = nn.parallel.DistributedDataParallel(model.cuda(), static_graph=True)
    model = model.to("cuda:0").cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):  # in the third a static graph orders its buckets
        if step:
            assert len(hooked) == step and model.module.bias.stride == 1
        model(torch.randn(2, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_module_that_moves_keeps_its_hooks_and_no_recorded_step_orders_buckets(tmp_path):
    graph = captured(tmp_path, MOVED, "--dp", 2, "--torchrun")
    sent = [node.value("comm_bytes") for node in graph if node.kind is Kind.COLLECTIVE]
    assert sent == [4 * 64 * 65]


MATCHED = """
    import torch
    from torch import nn
    model = nn.Linear(2, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    boxes = torch.tensor([[3.0, 4.0], [40.0, 60.0], [250.0, 3.0], [9.0, 9.0]], device="cuda")
    y, x = torch.meshgrid(*2 * [torch.arange(400, device="cuda")], indexing="ij")
    anchors = torch.stack([x, y], -1).view(-1, 2).float()  # of 160,000 positions
    for _ in range(3):
        distance = (boxes[:, None] - anchors).abs().sum(-1)
        near = (distance <= 1).any(0).nonzero().squeeze(1)
        assert near.numel() == 4 * 5
        model(anchors[near]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_detector_matches_its_anchors_with_boxes(tmp_path):
    graph = captured(tmp_path, MATCHED)
    operators = zip(graph.text("op"), graph.text("input_shapes"), strict=True)
    assert [json.loads(shapes)[1] for op, shapes in operators if op == "aten::addmm"] == [[20, 2]]
