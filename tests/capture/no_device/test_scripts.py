"""`capture run --device none`: what scripts call, and what no capture without a device takes."""

import inspect
import json
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from notes import has_note
from without_device import captured, run

import onerank
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.capture.no_device.operators import block_masks
from onerank.capture.no_device.operators.triton_kernels import launch_of
from onerank.ir import Collective, Graph, Kind, Phase, Reason

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
STATEMENT_OF_CUSTOM = "torch.ops.mylib.product(output.detach(), matrix)"
FLOPS = "2 * inputs[0][1] * outputs[0][0] * outputs[0][1]"


def custom(fake: str = FAKE, flops: str = FLOPS) -> str:
    setup = textwrap.dedent(CUSTOM.format(fake=fake, flops=flops))
    return textwrap.dedent(LINEAR).format(setup=setup, statement=STATEMENT_OF_CUSTOM)


def test_a_custom_operator_has_its_registered_cost(tmp_path):
    graph = captured(tmp_path, custom())
    nodes = graph.nodes
    (row,) = (i for i, op in enumerate(nodes.op) if graph.strings[int(op)] == "mylib::product")
    assert nodes.flops[row] == 2 * 16 * 32 * 8
    assert nodes.bytes_read[row] == 7
    assert nodes.bytes_written[row] == 16 * 8 * 4


def test_a_script_that_stays_on_the_cpu_is_noted(tmp_path):
    script = textwrap.dedent(LINEAR).format(setup="", statement="")
    on_cpu = captured(tmp_path, script.replace(', device="cuda"', ""))
    assert has_note(on_cpu.job.measurement.notes, "no-device-gpu-unused", "cuda")
    on_gpu = captured(tmp_path, script)
    assert not has_note(on_gpu.job.measurement.notes, "no-device-gpu-unused")


def test_a_norm_is_the_operator_that_only_a_cuda_build_has(tmp_path):
    """A CPU build of torch computes `rms_norm` by a formula of eight operators."""
    setup, statement = 'norm = nn.RMSNorm(32, device="cuda")', "loss = norm(output).sum()"
    graph = captured(tmp_path, LINEAR.format(setup=setup, statement=statement))
    operators = Counter(graph.strings[int(op)] for op in graph.nodes.op)
    for name in ("aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"):
        assert operators.pop(name) == 1
    assert not {"aten::pow", "aten::mean", "aten::rsqrt"} & {*operators}


def test_torchscript_compiles_functions_that_call_patched_ones(tmp_path):
    setup = """
    import torch.distributed.optim  # its optimizers are classes of TorchScript

    @torch.jit.script
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(2.0)
    """
    text = textwrap.dedent(LINEAR).format(setup=textwrap.dedent(setup), statement="scaled(output)")
    graph = captured(tmp_path, text)
    operators = Counter(graph.strings[int(op)] for op in graph.nodes.op)
    assert operators["aten::mm"] == 2
    assert operators["aten::mul"] == 1


REFUSED = {
    "no fake implementation": (custom(fake=""), "no-device-operator"),
    "a cost that is no count": (custom(flops="'many'"), "operator-cost-invalid"),
    "a size that depends on numbers": (
        LINEAR.format(setup="", statement="output.nonzero()"),
        "no-device-value",
    ),
    "an array of integers": (
        LINEAR.format(setup="", statement="output.argmax(1).cpu().numpy()"),
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


def test_an_operator_without_fake_implementation_is_named_with_its_lines(tmp_path):
    library = tmp_path / "site-packages" / "trainer"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("def call(function, *args):\n    function(*args)\n")
    call = "trainer.call(torch.ops.mylib.product, output.detach(), matrix)"
    text = f"import sys; sys.path.append({str(library.parent)!r}); import trainer\n"
    done = run(tmp_path, text + custom(fake="").replace(STATEMENT_OF_CUSTOM, call))
    line = (tmp_path / "train.py").read_text().splitlines().index(f"    {call}") + 1
    assert f"train.py:{line} (trainer/__init__.py:2): mylib::product" in done.stderr


TRITON = """
    import inspect
    class JITFunction:  # as far as a launch goes
        def __init__(self, function):
            self.__name__, self.fn = function.__name__, function
            self.arg_names = [*inspect.signature(function).parameters]
        def __getitem__(self, grid):
            return lambda *args, **options: self.run(*args, grid=grid, warmup=False, **options)
        def run(self, *args, grid, warmup, **options):
            raise RuntimeError("0 active drivers")
"""


PACKED = """
    assert "FakeTensor" not in repr(left)
    # As bitsandbytes makes its weights, before and after they are on the GPU.
    class Packed(torch.nn.Parameter):
        def __new__(cls, data):
            return torch.Tensor._make_subclass(cls, data, False)
    for data in (torch.ones(4), torch.ones(4, device="cuda")):
        assert isinstance(Packed(data), Packed)
        assert Packed(data).cuda().shape == (4,)
    whole = [torch.ones(n, 32, dtype=torch.int8, device="cuda") for n in (48, 64)]
    def product(rows):
        integers = torch.ops.higher_order.out_dtype
        return integers(torch.ops.aten.mm.default, torch.int32, whole[0][:rows], whole[1].t())
    try:
        product(16)
        raise SystemExit("cuBLAS takes more than 16 rows")
    except RuntimeError:
        pass
    four = torch.ones(64, 128, dtype=torch.uint8, device="cuda")
    four = torch.ops.aten._convert_weight_to_int4pack(four, 8)
    narrow = torch.ones(24, 256, device="cuda", dtype=torch.bfloat16)
    scales = torch.ones(2, 64, 2, device="cuda", dtype=torch.bfloat16)
    product(48), torch._weight_int4pack_mm(narrow, four, 128, scales)"""


def test_products_of_quantised_weights(tmp_path):
    setup = """
    left, right = (torch.ones(n, 32, device="cuda").to(torch.float8_e4m3fn) for n in (16, 64))
    scale = torch.ones((), device="cuda")
    out = torch.empty(16, 64, device="cuda", dtype=torch.bfloat16)
    """
    call = "torch._scaled_mm(left, right.t(), scale, scale, out_dtype=out.dtype, out=out)"
    packed = textwrap.indent(textwrap.dedent(PACKED), "    ")
    text = textwrap.dedent(LINEAR).format(setup=textwrap.dedent(setup), statement=call + packed)
    graph = captured(tmp_path, text)
    costs = op_costs_of(graph)
    names = [graph.strings[int(code)] for code in graph.nodes.op[costs.index]]
    # Without a fake implementation: a product into a given tensor.
    assert costs.flops[names.index("aten::_scaled_mm")] == 2 * 16 * 32 * 64
    (integers,) = (row for row, name in enumerate(names) if name == "aten::_int_mm")
    assert costs.flops[integers] == 2 * 48 * 32 * 64
    assert costs.bytes_read[integers] == 48 * 32 + 64 * 32
    four = names.index("aten::_weight_int4pack_mm")
    assert costs.flops[four] == 2 * 24 * 256 * 64
    assert costs.bytes_read[four] == 24 * 256 * 2 + 256 * 64 // 2 + 2 * 64 * 2 * 2


READS = """
    import torch
    weight = torch.nn.Parameter(torch.zeros(64, 64, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    counts = torch.arange(8, device="cuda")
    for step in range(5):
        x = torch.ones(64, 64, device="cuda") @ weight
        counts.sum().item()
        x = x.relu()
        counts[:2].tolist()
        x = x.exp()
        torch.nonzero(counts)
        x = x.sin()
        counts[counts > 3]
        x = x.cos()
        torch.ones(4).to("cuda", non_blocking=True)
        x = x.tanh()
        x.new_tensor([counts[0], 1])
        x = x.abs()
        torch.repeat_interleave(counts)
        x = x.neg()
        torch.repeat_interleave(counts, output_size=28)
        x = x.floor()
        torch.equal(counts, counts + 1)
        x = x.ceil()
        torch.cuda.synchronize()
        x.sigmoid().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def waits_of(graph: Graph) -> list[tuple[str, str]]:
    """Return awaited and delayed operator of each wait of the host."""
    edges, nodes = graph.edges, graph.nodes
    chosen = (edges.reason == Reason.SYNC) & (nodes.blocked_ns[edges.target] > 0)
    pairs = zip(edges.source[chosen].tolist(), edges.target[chosen].tolist(), strict=True)
    operators = [name.removeprefix("aten::") for name in graph.text("op")]
    return [(operators[source], operators[target]) for source, target in pairs]


def test_the_host_waits_where_a_script_reads_the_gpu(tmp_path):
    graph = captured(tmp_path, READS, "--like", "H100")
    assert waits_of(graph) == [
        ("_local_scalar_dense", "relu"),
        ("copy_", "exp"),
        ("nonzero", "sin"),
        ("index", "cos"),
        # None after the copy that does not block.
        ("_local_scalar_dense", "copy_"),  # a number of a list, then the list
        ("copy_", "abs"),
        ("repeat_interleave", "neg"),
        ("equal", "ceil"),
        ("ceil", "sigmoid"),
    ]
    predicted = onerank.recost(graph, "H100")
    nodes, edges = predicted.nodes, predicted.edges
    on_host = (nodes.kind == Kind.HOST_OP)[edges.target] & (edges.reason == Reason.SYNC)
    operators = predicted.text("op")
    assert [operators[node] for node in edges.target[on_host].tolist()] == [
        f"aten::{name}"
        for name in ("relu", "exp", "sin", "cos", "copy_", "abs", "neg", "ceil", "sigmoid")
    ]
    assert not nodes.blocked_ns.any()


ASYNCHRONOUS = """
    import torch
    from torch import nn
    from torch.distributed import init_process_group
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module,
    )
    init_process_group("nccl")
    mesh = init_device_mesh("cuda", (4,))
    N = 1024
    up, down = nn.Linear(N, 4 * N, bias=False), nn.Linear(4 * N, N, bias=False)
    model = nn.Sequential(up, nn.ReLU(), down)
    model.to("cuda", torch.bfloat16)
    columns = ColwiseParallel(input_layouts=Shard(1))
    rows = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, {"0": columns, "2": rows})
    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn(2, 512, N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        compiled(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        rows = DTensor.from_local(torch.ones(8, 16, device="cuda"), mesh, [Shard(0)])
        assert rows.redistribute(placements=[Shard(1)]).to_local().shape == (32, 4)
"""


def test_asynchronous_tensor_parallelism_multiplies_rows_while_others_arrive(tmp_path):
    graph = captured(tmp_path, ASYNCHRONOUS, "--torchrun", "--tp", "4")
    # Products of rows: forward and gradient of the input, each fused with three rounds of copies.
    rounds = np.flatnonzero(graph.nodes.collective == Collective.ALL_TO_ALL)
    sizes = graph.nodes.comm_bytes[rounds].tolist()
    sizes.remove(8 * 16 * 4)  # another dimension is sharded
    assert sizes == [2 * 512 * 1024 * 2] * (4 * 3)
    costs = op_costs_of(graph)
    products = graph.nodes.op[costs.index] == graph.strings.encode(["aten::mm"])[0]
    assert costs.flops[products].sum() == 6 * 2 * (2 * 4 * 512) * 1024 * 1024
    assert set(graph.nodes.stream[costs.index[products]].tolist()) == {0, 1}


def test_a_triton_kernel_is_recorded_by_what_it_loads_and_stores(tmp_path):
    package = tmp_path / "triton" / "runtime"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "jit.py").write_text(textwrap.dedent(TRITON))
    setup = """
from triton.runtime.jit import JITFunction
import onerank
@JITFunction
def doubled(source, target, count):
    rows = source + tl.arange(0, 64)
    tl.store(target + tl.arange(0, 64), 2 * tl.load(rows), mask=rows < count)
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
def wrapped(**tensors):  # as `torch.library.wrap_triton` launches
    triton_kernel_wrapper_mutation(
        kernel_idx=table.add_kernel(doubled),
        constant_args_idx=table.add_constant_args({"count": 4}),
        grid=[(1, 1, 1)], tma_descriptor_metadata={}, kwargs=tensors,
    )
onerank.register_operator_cost("triton::doubled", lambda inputs, outputs: inputs[0][0])
"""
    statement = (
        "doubled[(1,)](output.detach(), torch.empty_like(output), count=output.numel()); "
        "wrapped(target=torch.empty_like(output), source=output.detach()[:8])"
    )
    graph = captured(tmp_path, textwrap.dedent(LINEAR).format(setup=setup, statement=statement))
    nodes = graph.nodes
    rows = [i for i, op in enumerate(nodes.op) if graph.strings[int(op)] == "triton::doubled"]
    assert nodes.flops[rows].tolist() == [16, 8]
    assert nodes.bytes_read[rows].tolist() == [16 * 32 * 4, 8 * 32 * 4]
    assert nodes.bytes_written[rows].tolist() == [16 * 32 * 4, 16 * 32 * 4]


def kernel(function: Any) -> Any:
    names = [*inspect.signature(function).parameters]
    return SimpleNamespace(__name__=function.__name__, fn=function, arg_names=names, run=None)


tl: Any = None  # stands for `triton.language`, whose functions are not called


@kernel
def added(address, values):
    tl.atomic_add(address, values)


@kernel
def accumulated(left, right, out, spare, stride):
    address = spare
    for block in range(4):
        value = tl.load(address) if block else tl.load(pointer=left + block * stride)
        if value:
            address = right + value  # read in the next round
    tile = tl.make_block_ptr(base=out, block_shape=(16,))
    added(tl.advance(tile, (16,)), value)


def test_the_source_of_a_triton_kernel_shows_its_accesses():
    operands = [torch.empty(size) for size in (1, 2, 3, 4)]
    # A tuner holds the kernel.
    tuned = SimpleNamespace(fn=accumulated)
    launch = launch_of(tuned, operands[:2], {"out": operands[2], "spare": operands[3], "warps": 4})
    assert launch.name == "triton::accumulated"
    assert [tensor.numel() for tensor in launch.writes] == [3]
    assert [tensor.numel() for tensor in launch.reads[:4]] == [1, 2, 3, 4]
    unknown = launch_of(kernel(lambda first, second: None), operands[:2], {})
    assert (len(unknown.writes), len(unknown.tensors)) == (0, 2)


LOGGING = """
    import io, tempfile, threading
    from torch.distributions import Categorical
    generator = torch.Generator(device="cuda").manual_seed(1)
    moved = []
    thread = threading.Thread(target=lambda: moved.append(torch.ones(4).to("cuda")))
    thread.start(); thread.join()
    assert moved[0].is_cuda and moved[0].tolist() == [1.0] * 4
    assert torch.tensor([1, 2], pin_memory=True).cuda(non_blocking=True).tolist() == [1, 2]
    # As nanotron creates the weights of a model.
    create = torch.empty
    torch.empty = lambda *shape, **options: create(*shape, **options | {"device": "cuda"})
    assert torch.empty(3).is_cuda and torch.arange(4, device="cuda").tolist() == [0, 1, 2, 3]
    torch.empty = create
    dropped = torch.randn(4, device="cuda", generator=generator)
    file = io.BytesIO()
    weights = torch.frombuffer(bytearray(1 << 23), dtype=torch.float32)
    torch.save({"lengths": torch.arange(8), "weights": weights}, file)
    file.seek(0)
    data = torch.load(file)
    assert data["lengths"].tolist() == [*range(8)]
    assert type(data["weights"]) is not torch.Tensor and data["weights"].shape == (1 << 21,)
    assert type(model.weight)(torch.ones(2), requires_grad=False).shape == (2,)
    assert type(model.weight)(torch.ones(2), **vars(model.weight)).shape == (2,)
    tokens = torch.empty(1 << 21, dtype=torch.uint16, pin_memory=True)
    with tempfile.NamedTemporaryFile(buffering=0) as written:
        written.write(bytes([1, 0]) * (1 << 21))
        with open(written.name, "rb", buffering=0) as read:
            assert read.readinto(tokens.numpy()) == 1 << 22
        mapped = torch.from_file(written.name, False, 1 << 21, dtype=torch.int16)
    assert (tokens[-1], mapped[-1]) == (1, 1)
    rows = torch.utils.data.DataLoader(torch.zeros(4, 1 << 20), batch_size=2, num_workers=1)
    assert [batch.shape[0] for batch in rows] == [2, 2]
    pair = torch.tensor([[torch.tensor(2.5, device="cuda")], [4]], device="cuda")
    assert pair.tolist() == [[2.5], [4]] and torch.as_tensor((pair[0, 0], 1)).shape == (2,)
    count = pair[1, 0].long()
    for device in ("cuda", "cpu"):
        both = [count.to(device), 2]
        created = torch.LongTensor(both), count.new_tensor(both), count.new(both)
        assert [each.tolist() for each in created] == [[4, 2]] * 3
        assert torch.asarray(both).tolist() == [4, 2]
        assert torch.FloatTensor([pair[0, 0].to(device)]).tolist() == [2.5]
        assert torch.LongTensor([torch.tensor(3), torch.tensor([4])]).tolist() == [3, 4]
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.uint8):
        assert torch.tensor([torch.ones(1, dtype=dtype)], dtype=dtype).item() == 1
    class Created(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()
        @staticmethod
        def backward(context, gradient):  # in a thread of autograd
            return gradient * torch.tensor(2.0, device="cuda")
    Created.apply(torch.ones(2, device="cuda", requires_grad=True)).sum().backward()
    lists = [[torch.ones(2, device="cuda")] for _ in range(4)]
    rates = dict(beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)
    torch._fused_adamw_(*lists, [], [torch.ones((), device="cuda")], lr=torch.tensor(0.1), **rates)
    torch.cumsum(torch.ones(2, device="cuda"), 0, out=torch.ones(2, device="cuda"))
    torch.sum(torch.ones(2, device="cuda"), 0, out=torch.ones((), device="cuda"))
    unknown, mask = model(torch.zeros(16, 64, device="cuda")), torch.arange(16, device="cuda") > 3
    assert (unknown > 0).all()
    positive = bool((unknown > 0).all())
    assert not positive
    assert unknown[mask].shape == (12, 32)
    rows = torch.arange(16, device="cuda")[:, None] % 3
    chosen = torch.zeros_like(unknown, dtype=torch.bool).scatter_(1, rows, True)
    assert chosen.sum(0).tolist() == [6, 5, 5, *[0] * 29]
    assert unknown.new_full((2,), 3).tolist() == [3, 3]
    assert torch.ones_like(mask).all()
    copied = [torch.zeros(2, device="cuda", dtype=torch.int64) for _ in range(2)]
    torch._foreach_copy_(copied, [rows[1:3, 0], rows[3:5, 0]])
    assert [each.tolist() for each in copied] == [[1, 2], [0, 1]]
    assert unknown.view(4, 4, 32)[mask.view(4, 4), 0].shape == (12,)
    assert unknown.masked_select(mask[:, None]).shape == (12 * 32,)
    with torch.inference_mode():
        assert model(torch.zeros(16, 64).to(device="cuda", non_blocking=True)).is_cuda
"""
STATEMENT = (
    'print(f"{loss:.2f}", output.detach().cpu().numpy().sum()); '
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
    names = ("aten::_cudnn_attention_forward", "aten::_flash_attention_forward", "aten::_softmax")
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


FLEX = """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    heads = torch.nn.Parameter(torch.ones(3, 2, 4, 640, 32, device="cuda"))
    optimizer = torch.optim.SGD([heads], lr=0.1)
    documents = torch.arange(640, device="cuda") // 300
    noise = (torch.randn(640, device="cuda") + heads[0, 0, 0, 0, 0]) > 0
    masks = dict(
        causal=lambda b, h, q, k: q >= k,
        document=lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]),
        window=lambda b, h, q, k: (q >= k) & (q - k < 100 + 300 * h),
        unknown=lambda b, h, q, k: noise[q],
    )
    mask_mod = masks["{mask}"]
    {function}
    def attend(heads, mask):
        return flex_attention(*heads, block_mask=mask).relu()
    for step in range(5):
        mask = create_block_mask(mask_mod, 2, 4, 640, 640, device="cuda")
        attend(heads, mask).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

# 640 tokens are 5 blocks of 128; queries and keys of two sequences.
BLOCKS = {
    "causal": 4 * 15,
    # Tokens from 300, in the third block, are another document: it starts with the third block.
    "document": 4 * (1 + 2 + 3 + 2 + 3),
    # Windows of 100, 400, 700 and 1000 tokens: query 512 sees key 113 in the second.
    "window": (1 + 4 * 2) + 3 * 15,
    "unknown": 4 * 25,
}


@pytest.mark.parametrize("mask", BLOCKS)
def test_flex_attention_counts_the_blocks_of_its_mask(mask, tmp_path):
    graph = captured(tmp_path, textwrap.dedent(FLEX).format(mask=mask, function=""))
    flops = flops_of(graph)
    assert flops["flex_attention"] == 2 * BLOCKS[mask] * 2 * 128 * 128 * (32 + 32)
    assert flops["flex_attention_backward"] == flops["flex_attention"] * 5 // 2
    assert has_note(graph.job.measurement.notes, "flex-attention-whole") == (mask == "unknown")
    assert has_note(graph.job.measurement.notes, "flex-attention-unfused")


def flops_of(graph: Graph) -> dict[str, int]:
    """Return operator -> FLOPs of its last call."""
    costs = op_costs_of(graph)
    operators = [graph.strings[int(op)] for op in graph.nodes.op[costs.index]]
    names = (op.removeprefix("aten::") for op in operators)
    return dict(zip(names, costs.flops.tolist(), strict=True))


def test_flex_attention_is_an_operator_between_compiled_graphs(tmp_path):
    text = textwrap.dedent(FLEX).format(mask="window", function="@torch.compile")
    graph = captured(tmp_path, text)
    flops = flops_of(graph)
    assert flops["flex_attention"] == 2 * BLOCKS["window"] * 2 * 128 * 128 * (32 + 32)
    assert any(op.startswith("triton_") and "relu" in op for op in flops)
    assert not has_note(graph.job.measurement.notes, "flex-attention-unfused")
    assert not has_note(graph.job.measurement.notes, "compile-failed")


def test_a_long_mask_is_evaluated_on_a_grid(monkeypatch):
    numbers = {size: torch.arange(1000) // size for size in (90, 333)}
    masks = [
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: (q - k).abs() <= 70,
        *(lambda b, h, q, k, n=n: (q >= k) & (n[q] == n[k]) for n in numbers.values()),
    ]
    for mask in masks:
        exact = block_masks._visited(mask, (1, 2, 1000, 1000), (128, 64), ())
        with monkeypatch.context() as patch:
            patch.setattr(block_masks, "_EVALUATED", 1 << 13)
            sampled = block_masks._visited(mask, (1, 2, 1000, 1000), (128, 64), ())
        assert sampled.tolist() == exact.tolist()
        assert exact.shape == (1, 2, 8)
        assert 0 < exact.sum() < 2 * 8 * 16


ROUTED = """
    import torch
    from torch import nn
    experts = nn.ModuleList(nn.Linear(32, 32, bias=False, device="cuda") for _ in range(4))
    gate = nn.Linear(32, 4, device="cuda")
    optimizer = torch.optim.SGD([*experts.parameters(), *gate.parameters()], lr=0.1)
    for step in range(5):
        x = torch.randn(2, 60, 32, device="cuda")
        weights, chosen = gate(x).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            mask = chosen == number
            if mask.any():
                first, second, slot = mask.nonzero(as_tuple=True)
                y[first, second] += weights[mask][:, None] * expert(x[first, second])
        assert len(torch.bincount(chosen.flatten(), minlength=4).tolist()) == 4
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("routing", "tokens"), [("balanced", [60] * 4), ("lines.csv", [120, 60, 60, 0])]
)
def test_a_router_of_the_script_chooses_experts_by_moe_routing(routing, tokens, tmp_path):
    (tmp_path / "lines.csv").write_text("2,1,1,0\n")
    path = tmp_path / routing if routing.endswith("csv") else routing
    graph = captured(tmp_path, ROUTED, "--moe-routing", path)
    rows = [shapes[0][0] for shapes in shapes_of(graph, "aten::mm") if shapes[0][1:] == [32]]
    assert [n for n in rows if n != 32] == [n for n in tokens if n]
    assert has_note(graph.job.measurement.notes, "no-device-routers", str(path))


def test_a_router_with_one_expert_a_token_chooses_by_argmax(tmp_path):
    text = ROUTED.replace(".topk(2, dim=-1)", ".max(-1, keepdim=True)").replace(
        "        y = torch.zeros_like(x)",
        "        chosen = gate(x).argmax(-1, keepdim=True)\n        y = torch.zeros_like(x)",
    )
    graph = captured(tmp_path, text)
    rows = [shapes[0][0] for shapes in shapes_of(graph, "aten::mm") if shapes[0][1:] == [32]]
    assert [n for n in rows if n != 32] == [30] * 4


@pytest.mark.parametrize("routing", ["two.csv", "three.csv", "model"])
def test_a_choice_of_experts_needs_one_distribution_of_these_experts(routing, tmp_path):
    (tmp_path / "two.csv").write_text("1,1,1,1\n2,1,1,0\n")
    (tmp_path / "three.csv").write_text("1,1,1\n")
    path = tmp_path / routing if routing.endswith("csv") else routing
    done = run(tmp_path, ROUTED.replace("if mask.any():", "if True:"), "--moe-routing", path)
    assert done.returncode == 2
    assert "error[no-device-value]: train.py:14: aten::nonzero" in done.stderr
    assert not (tmp_path / "trace.et").exists()


GATED = """
    import torch
    from torch import nn
    experts = nn.ModuleList(nn.Linear(32, 32, bias=False, device="cuda") for _ in range(4))
    gate = nn.Linear(32, 4, device="cuda")
    optimizer = torch.optim.SGD([*experts.parameters(), *gate.parameters()], lr=0.1)
    tokens = {tokens}
    rows, four = torch.arange(tokens, device="cuda")[:, None], torch.arange(4, device="cuda")
    for step in range(5):
        x = torch.randn(tokens, 32, device="cuda")
        scores = gate(x)
        weights, chosen = scores.topk(2, dim=-1)
        gates = {gates}
        gates = gates / gates.sum(-1, keepdim=True)
        places = {places}
        parts = [e(p) for e, p in zip(experts, x[places].split((gates > 0).sum(0).tolist()))]
        mixed = torch.cat(parts) * gates.t()[gates.t() > 0][:, None]
        y = torch.zeros_like(x).index_add(0, places, mixed)
        loss = y.sum()
        loss *= torch.tensor(0.5, device="cuda")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SCATTERED = "torch.zeros_like(scores).scatter(1, chosen, weights.softmax(-1))"
ONE_HOT = "(nn.functional.one_hot(chosen, 4) * weights.softmax(-1)[..., None]).sum(1)"
INDEXED = "torch.zeros_like(scores).index_put((rows, chosen), weights)"
MASKED = "scores.softmax(-1).masked_fill((chosen[..., None] != four).all(1), 0)"


@pytest.mark.parametrize(
    ("tokens", "gates", "places"),
    [
        (120, SCATTERED, "gates.nonzero()[gates.nonzero()[:, 1].argsort(), 0]"),
        (120, SCATTERED, "torch.where(gates.t())[1]"),
        # Too many for their numbers to be kept, if they were known.
        (32768, SCATTERED, "torch.where(gates.t() != 0)[1]"),
        (120, ONE_HOT, "torch.where(gates.t().bool())[1]"),
        (120, INDEXED, "torch.where(~(gates.t() == 0))[1]"),
        (120, MASKED, "gates.t().contiguous().nonzero(as_tuple=True)[1]"),
    ],
)
def test_the_tokens_of_experts_are_those_with_weights_above_0(tokens, gates, places, tmp_path):
    (tmp_path / "lines.csv").write_text("2,1,1,0\n")
    text = GATED.format(tokens=tokens, gates=gates, places=places)
    graph = captured(tmp_path, text, "--moe-routing", tmp_path / "lines.csv")
    rows = [shapes[0][0] for shapes in shapes_of(graph, "aten::mm") if shapes[0][1:] == [32]]
    assert [n for n in rows if n != 32] == [tokens, tokens // 2, tokens // 2, 0]
    assert has_note(graph.job.measurement.notes, "no-device-nonzero-weights", "train.py:16")


@pytest.mark.parametrize(
    "statement",
    [
        "zeros = torch.zeros_like(output); zeros[:, 0] += output[:, 0]; zeros.nonzero()",
        "zeros = torch.zeros_like(output); zeros.copy_(output); zeros.nonzero()",
        "torch.zeros_like(output).index_add(1, torch.arange(32).cuda(), output).nonzero()",
        "(torch.zeros_like(output) < output).nonzero()",
        "zeros = torch.zeros_like(output); zeros.data = output.detach(); zeros.nonzero()",
        "(output * torch.ones_like(output).tril()).clamp_min(0.1).nonzero()",
    ],
)
def test_zeros_that_unknown_numbers_overwrite_are_unknown(statement, tmp_path):
    done = run(tmp_path, LINEAR.format(setup="", statement=statement))
    assert done.returncode == 2
    assert "error[no-device-value]" in done.stderr


FOLLOWED = """
    import copy
    import torch
    gate = torch.nn.Linear(32, 4, device="cuda")
    optimizer = torch.optim.SGD(gate.parameters(), lr=0.1)
    out = torch.empty(16, 4, device="cuda")
    for step in range(5):
        s = gate(torch.randn(16, 32, device="cuda"))
        w, c = s.topk(2, -1)
        g = torch.zeros_like(s).scatter(-1, c, w)
        with torch.no_grad():
            torch.mul(g, g, out=out)
            g.view(4, 16).t().reshape(-1).view(torch.int32)
            torch.zeros(4, 6, device="cuda").expand(2, 4, 6).reshape(8, 6).view(-1)
            g.sum((0, 1)), g.mean(dtype=torch.float64), g.sum(dim=0, keepdim=True)
            sizes = [torch.cat([g, part]).split([16, 16])[0].nonzero().shape for part in (g, s)]
            g.as_strided((2, 2), (1, 1)), g[::2, None, ..., 1:], g * 2, 3 * g
            torch.where(g > 0, g, 0.0), torch.where(s > 0, g, s)
            zeros = torch.nn.init.zeros_(torch.nn.Linear(8, 512).weight)
            zeros.data = zeros.data[256:].clone()
            zeros.cuda()
            copy.deepcopy(torch.nn.LayerNorm(8)).cuda()
            half = g.mul_(s).t().clone()[:2].nonzero().shape[0]
            g[:, 0] = s[:, 0]
            g.masked_fill_(s > 0, 1.0)
        print(sizes, half)
        s.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_zero_patterns_follow_operators_of_many_kinds(tmp_path):
    """Two of four experts of 16 tokens are chosen; a balanced choice gives 16 to two of them."""
    done = run(tmp_path, FOLLOWED)
    assert done.returncode == 0, done.stderr
    assert "[torch.Size([32, 2]), torch.Size([32, 2])] 16" in done.stdout + done.stderr


LAYERED = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
            self.gate = nn.Linear(32, 4)

        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
            y = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                row, slot = torch.where(chosen == number)
                y = y.index_add(0, row, expert(x[row]) * weights[row, slot, None])
            return y

    model = nn.Sequential(*(Experts() for _ in range(3))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn(120, 32, device="cuda", requires_grad=True)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_each_router_of_a_script_has_a_line_of_a_routing_file(tmp_path):
    lines = [[2, 1, 1, 0], [1, 1, 1, 1], [0, 0, 2, 2]]
    table = tmp_path / "lines.csv"
    table.write_text("\n".join(",".join(map(str, line)) for line in lines) + "\n")
    graph = captured(tmp_path, LAYERED, "--moe-routing", table)
    products = shapes_of(graph, "aten::mm", graph.nodes.phase == Phase.FORWARD)
    of_experts = [first[0] for first, second in products if second == [32, 32]]
    assert of_experts == [120, 60, 60, 0, 60, 60, 60, 60, 0, 0, 120, 120]


@pytest.mark.parametrize("lines", [2, 4])
def test_a_routing_file_needs_a_line_for_each_router_of_a_script(lines, tmp_path):
    (tmp_path / "lines.csv").write_text("1,1,1,1\n" * lines)
    done = run(tmp_path, LAYERED, "--moe-routing", tmp_path / "lines.csv")
    assert done.returncode == 2
    assert "error[routing-layer-count]" in done.stderr
    assert f"{lines} lines" in done.stderr
    assert not (tmp_path / "trace.et").exists()


EXCHANGED = """
    import torch, torch.distributed as dist
    from torch import nn
    dist.init_process_group("nccl")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    experts = nn.ModuleList(nn.Linear(32, 32, bias=False, device="cuda") for _ in range(2))
    gate = nn.Linear(32, 2 * ranks, device="cuda")
    optimizer = torch.optim.SGD([*experts.parameters(), *gate.parameters()], lr=0.1)
    def exchanged(counts):
        if {base}:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts)
            return received
        received = [*torch.empty_like(counts).view(ranks, -1).unbind()]
        dist.all_to_all(received, [*counts.view(ranks, -1).unbind()])
        return torch.cat(received)
    for step in range(5):
        x = torch.randn(96, 32, device="cuda")
        _, chosen = gate(x).topk(1, dim=-1)
        sent = torch.bincount(chosen.flatten(), minlength=2 * ranks)
        received = exchanged(sent)
        splits = [c.view(ranks, 2).sum(1).tolist() for c in (received, sent)]
        rows = torch.empty(sum(splits[0]), 32, device="cuda")
        dist.all_to_all_single(rows, x[chosen.flatten().argsort()], *splits)
        parts = rows.split(received.tolist())
        loss = sum(experts[n % 2](part).sum() for n, part in enumerate(parts)) + gate(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("base", [True, False])
def test_a_rank_gets_the_tokens_that_equal_peers_route_to_its_experts(base, tmp_path):
    (tmp_path / "lines.csv").write_text("4,2,1,1\n")
    text = EXCHANGED.format(base=base)
    rows: dict[int, list[int]] = {}
    for rank in (0, 1):
        options = ("--dp", "2", "--rank", rank, "--moe-routing", tmp_path / "lines.csv")
        graph = captured(tmp_path, text, *options)
        sizes = [shapes[0][0] for shapes in shapes_of(graph, "aten::mm") if shapes[0][1:] == [32]]
        rows[rank] = [n for n in sizes if n != 32]
    # Both ranks route 96 tokens; experts 0 and 1 are on rank 0.
    assert rows == {0: [48, 24, 48, 24], 1: [12, 12, 12, 12]}


GROUPED_HEADS = """
    import contextlib
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    query = torch.nn.Parameter(torch.ones(2, 4, 64, 32, device="cuda"))
    key = torch.ones(2, 2, 64, 32, device="cuda")
    optimizer = torch.optim.SGD([query], lr=0.1)
    for step in range(5):
        with {context}:
            y = scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("context", "operator", "calls"),
    [
        ("contextlib.nullcontext()", "aten::bmm", 2),
        ("torch.autocast('cuda', torch.bfloat16)", "aten::_cudnn_attention_forward", 1),
    ],
)
def test_attention_of_32_bits_with_grouped_heads(context, operator, calls, tmp_path):
    """The memory-efficient kernel takes no groups; autocast converts the operands."""
    graph = captured(tmp_path, GROUPED_HEADS.format(context=context), "--like", "H100")
    forward = graph.nodes.phase == Phase.FORWARD
    operators = [op for op, kept in zip(graph.text("op"), forward, strict=True) if kept]
    assert operators.count(operator) == calls
    assert "aten::_efficient_attention_forward" not in operators


SHUFFLED = """
    import torch
    torch.set_default_device("cuda")
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.randperm(6)
    assert sorted(order.tolist()) == list(range(6)) and order.tolist() != [1] * 6
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.set_state(generator.get_state())
    for step in range(5):
        output = model(torch.randn(16, 8))
        assert output.sum().tolist() == 1.0
        output.sum().backward()
        optimizer.step()
"""


def test_a_permutation_on_the_default_device_is_one(tmp_path):
    graph = captured(tmp_path, SHUFFLED)
    assert graph.text("op").count("aten::addmm") == 1


def shapes_of(graph: Graph, operator: str, chosen: Any = None) -> list[Any]:
    """Return the shapes of the operands of each call of an operator, of all or chosen nodes."""
    rows = [i for i, op in enumerate(graph.text("op")) if op == operator]
    rows = [i for i in rows if chosen is None or chosen[i]]
    shapes = graph.text("input_shapes")
    return [json.loads(shapes[row]) for row in rows]


SUMMED_BY_HAND = """
    import torch
    import torch.distributed as dist
    from torch import nn
    dist.init_process_group("nccl")
    model = nn.Linear(64, 64, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_call_after_backward_waits_for_the_thread_of_autograd(tmp_path):
    graph = captured(tmp_path, SUMMED_BY_HAND, "--dp", 4)
    (call,) = np.flatnonzero(graph.communication)
    operators = graph.text("op")
    threads = graph.nodes.thread
    before = [source for source, _ in graph.edges.of(call)]
    # The product for the gradient of the weight is the last of the backward.
    (gradient,) = (source for source in before if operators[source] == "aten::mm")
    assert graph.nodes.phase[gradient] == Phase.BACKWARD
    assert threads[gradient] != threads[call]
