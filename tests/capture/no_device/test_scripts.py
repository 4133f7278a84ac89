"""`capture run --device none`: what scripts call, and what no capture without a device takes."""

import textwrap
from pathlib import Path

import pytest
from notes import has_note
from own_process import run_command

import onerank
from onerank.ir import Graph, Reason

LINEAR = """
    import torch
    from torch import nn
    model = nn.Linear(64, 32, bias=False, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    {setup}
    for step in range(5):
        output = model(torch.randn(16, 64, device="cuda"))
        loss = output.sum()
        {statement}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def run(directory: Path, text: str, *options: object):
    (directory / "train.py").write_text(textwrap.dedent(text))
    command = ("capture", "run", directory / "train.py", "--device", "none", *options)
    return run_command(*command, "-o", directory / "trace.et")


def captured(directory: Path, text: str, *options: object) -> Graph:
    done = run(directory, text, *options)
    assert done.returncode == 0, done.stderr
    return onerank.read(directory / "trace.et")


CUSTOM = """
    from torch.library import custom_op
    import onerank
    @custom_op("mylib::product", mutates_args=())
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight
    {fake}
    onerank.register_operator_cost(
        "mylib::product", lambda inputs, outputs: {flops}, bytes_read=lambda inputs, outputs: 7
    )
    matrix = torch.randn(32, 8, device="cuda")
"""
FAKE = "product.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[1]))"
FLOPS = "2 * inputs[0][1] * outputs[0][0] * outputs[0][1]"


def custom(fake: str = FAKE, flops: str = FLOPS) -> str:
    setup = textwrap.dedent(CUSTOM.format(fake=fake, flops=flops))
    return textwrap.dedent(LINEAR).format(
        setup=setup, statement="torch.ops.mylib.product(output.detach(), matrix)"
    )


def test_a_custom_operator_has_its_registered_cost(tmp_path):
    graph = captured(tmp_path, custom())
    nodes = graph.nodes
    (row,) = (i for i, op in enumerate(nodes.op) if graph.strings[int(op)] == "mylib::product")
    assert nodes.flops[row] == 2 * 16 * 32 * 8
    assert nodes.bytes_read[row] == 7
    assert nodes.bytes_written[row] == 16 * 8 * 4


REFUSED = {
    "no fake implementation": (custom(fake=""), "no-device-operator"),
    "a cost that is no count": (custom(flops="'many'"), "operator-cost-invalid"),
    "a size that depends on numbers": (
        LINEAR.format(setup="", statement="output.nonzero()"),
        "no-device-value",
    ),
    "an array of numbers": (
        LINEAR.format(setup="", statement="output.detach().cpu().numpy()"),
        "no-device-value",
    ),
    "a CUDA graph": (
        LINEAR.format(setup="graph = torch.cuda.CUDAGraph()", statement=""),
        "no-device-cuda-graph",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_captured_is_an_error(case, tmp_path):
    text, code = REFUSED[case]
    done = run(tmp_path, text)
    assert done.returncode == 2
    assert f"error[{code}]" in done.stderr
    assert not (tmp_path / "trace.et").exists()


def test_an_operator_without_fake_implementation_is_named_with_its_line(tmp_path):
    done = run(tmp_path, custom(fake=""))
    line = (tmp_path / "train.py").read_text().splitlines().index(
        "    torch.ops.mylib.product(output.detach(), matrix)"
    ) + 1
    assert f"train.py:{line}: mylib::product" in done.stderr


TRITON = """
    class JITFunction:  # as far as a launch goes
        def __init__(self, function):
            self.__name__ = function.__name__
        def __getitem__(self, grid):
            return lambda *args, **options: self.run(*args, grid=grid, warmup=False, **options)
        def run(self, *args, grid, warmup, **options):
            raise RuntimeError("0 active drivers")
"""


def test_a_triton_kernel_is_recorded_by_its_operands(tmp_path):
    package = tmp_path / "triton" / "runtime"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "jit.py").write_text(textwrap.dedent(TRITON))
    setup = """
from triton.runtime.jit import JITFunction
import onerank
@JITFunction
def doubled(source, target, count): ...
onerank.register_operator_cost("triton::doubled", lambda inputs, outputs: inputs[0][0])
"""
    statement = "doubled[(1,)](output.detach(), torch.empty_like(output), output.numel())"
    graph = captured(tmp_path, textwrap.dedent(LINEAR).format(setup=setup, statement=statement))
    nodes = graph.nodes
    (row,) = (i for i, op in enumerate(nodes.op) if graph.strings[int(op)] == "triton::doubled")
    assert nodes.flops[row] == 16
    assert nodes.bytes_read[row] == 2 * 16 * 32 * 4  # of both tensors: its code is not read


LOGGING = """
    import threading, io
    from torch.distributions import Categorical
    generator = torch.Generator(device="cuda").manual_seed(1)
    moved = []
    thread = threading.Thread(target=lambda: moved.append(torch.ones(4).to("cuda")))
    thread.start(); thread.join()
    assert moved[0].is_cuda and moved[0].tolist() == [1.0] * 4
    dropped = torch.randn(4, device="cuda", generator=generator)
"""
STATEMENT = (
    'print(f"{loss:.2f}", loss.detach().cpu().numpy()); '
    "Categorical(logits=output).log_prob(torch.zeros(16, device='cuda')); "
    "torch.save(model.state_dict(), '/dev/full'); "
    "torch.cuda.nvtx.range_push('a')"
)


def test_what_scripts_log_draw_and_save(tmp_path):
    text = textwrap.dedent(LINEAR).format(setup=textwrap.dedent(LOGGING), statement=STATEMENT)
    graph = captured(tmp_path, text)
    assert has_note(graph.job.measurement.notes, "no-device-save-skipped")


FSDP = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
    dist.init_process_group("nccl")
    device = torch.cuda.current_device()
    first = FullyShardedDataParallel(
        nn.Linear(64, 64), device_id=device, mixed_precision=MixedPrecision(torch.bfloat16)
    )
    second = fully_shard(nn.Linear(64, 64, device="cuda"))
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    for step in range(5):
        second(first(torch.randn(8, 64, device="cuda")).float()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_fsdp_of_both_kinds_moves_its_parameters(tmp_path):
    graph = captured(tmp_path, FSDP, "--dp", 4)
    nodes = graph.nodes
    # The weight and bias of each layer, gathered in 16 bits and in 32, in forward and backward;
    # a root of FSDP keeps what it gathered in forward.
    gathered = [int(size) for size in nodes.comm_bytes[nodes.comm_bytes > 0]]
    assert {64 * 65 * 2, 64 * 65 * 4} <= set(gathered)


ATTENTION = """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout
    from datetime import timedelta
    from torch import nn
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
    dist.init_process_group("nccl")
    _set_pg_timeout(timedelta(seconds=100), dist.group.WORLD)
    flash, math, cudnn = (
        SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION
    )
    model = nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):
        x = model(torch.randn(2, 4, 32, 64, device="cuda", dtype=torch.bfloat16))
        scaled_dot_product_attention(x, x, x)
        for backends, in_order in (([flash], False), ([math], False), ([flash, cudnn], True)):
            with sdpa_kernel(backends, set_priority=in_order):
                scaled_dot_product_attention(x, x, x)
        x.sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
"""


def attention_operators(directory: Path) -> list[str]:
    graph = captured(directory, ATTENTION, "--torchrun", "--dp", 2, "--like", "H100")
    ops = [graph.strings[int(op)] for op in graph.nodes.op]
    names = ("aten::_cudnn_attention_forward", "aten::_flash_attention_forward", "aten::softmax")
    return [op.removeprefix("aten::").removeprefix("_") for op in ops if op in names]


def test_attention_runs_by_the_backends_that_a_script_enables(tmp_path, monkeypatch):
    cudnn, flash = "cudnn_attention_forward", "flash_attention_forward"
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    assert attention_operators(tmp_path) == [cudnn, flash, "softmax", flash]
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert attention_operators(tmp_path) == [flash, flash, "softmax", flash]


FSDP2 = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("nccl")
    layers = [nn.Linear(64, 64, bias=False, device="cuda") for _ in range(4)]
    model = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model(torch.randn(16, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_streams_of_fsdp_overlap_communication_and_compute(tmp_path):
    graph = captured(tmp_path, FSDP2, "--torchrun", "--dp", 4)
    nodes, edges = graph.nodes, graph.edges
    ops = [graph.strings[int(op or name)] for op, name in zip(nodes.op, nodes.name, strict=True)]
    # FSDP2 copies shards on one stream, gathers on a second and reduces on a third
    products = [i for i, op in enumerate(ops) if op == "aten::mm"]
    assert set(nodes.stream[products].tolist()) == {0}
    of = {
        name: [i for i, op in enumerate(ops) if op == name]
        for name in ("all_gather", "reduce_scatter", "aten::_chunk_cat")
    }
    streams = {name: {int(nodes.stream[i]) for i in rows} for name, rows in of.items()}
    assert streams["aten::_chunk_cat"] == {0}
    assert len(streams["all_gather"] | streams["reduce_scatter"] | {0}) == 3
    # the buffer of a layer's reduction is filled once that of the layer before is sent
    waiting = Reason.SYNC, Reason.STREAM_ORDER
    for reduction, following, fill in zip(
        of["reduce_scatter"], of["reduce_scatter"][1:], of["aten::_chunk_cat"][1:], strict=False
    ):
        after = {
            int(target)
            for source, target, reason in zip(edges.source, edges.target, edges.reason, strict=True)
            if source == reduction and reason in waiting
        }
        plan = fill - 1  # what the host writes for the kernel that fills the buffer
        assert ops[plan] == "aten::copy_"
        assert {following, plan} <= after  # on torch 2.11 its own result is waited for, too
    step = onerank.recost(graph, "H100", host="none")
    assert (
        set(step.nodes.stream.tolist())
        == {0, 1, *streams["all_gather"]} | streams["reduce_scatter"]
    )
    assert not (step.edges.reason == Reason.PROGRAM_ORDER).any()
    # gradients are allocated on the stream that reduces them
    pools = set(graph.job.measurement.memory.blocks.pool)
    assert len(pools) == 3
