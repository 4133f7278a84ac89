"""`capture run --device none`: operators and kernels of other libraries, and refused operators."""

import inspect
import textwrap
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from without_device import LINEAR, captured, run

from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.capture.no_device.operators.triton_kernels import launch_of

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


REFUSED = {
    "no fake implementation": (custom(fake=""), "no-device-operator"),
    "a cost that is no count": (custom(flops="'many'"), "operator-cost-invalid"),
    "a size that depends on numbers": (
        LINEAR.format(setup="", statement="output.nonzero()"),
        "no-device-value",
    ),
    "an array of integers": (
        LINEAR.format(setup="", statement="(output > 0).sum(1).cpu().numpy()"),
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
    library = tmp_path / "checkout" / "trainer"
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


SOURCE = '''
    source = """
    // scales: see the documentation
    extern "C" __global__ void scaled(const float *x, float const * factors, float* y, int n) {
      y[threadIdx.x] = factors[0] * x[threadIdx.x];
    }
    """
    scaled = torch.cuda._compile_kernel(source, "scaled", compute_capability="90")
    scaled.set_shared_memory_config(65536)
'''

STATEMENT_OF_SOURCE = (
    "scaled((1, 1, 1), (16, 1, 1), (output.detach(), loss.detach(), torch.empty_like(output), 9))"
)


def test_a_kernel_of_cuda_source_is_recorded_by_its_signature(tmp_path):
    setup = textwrap.dedent(SOURCE)
    graph = captured(
        tmp_path, textwrap.dedent(LINEAR).format(setup=setup, statement=STATEMENT_OF_SOURCE)
    )
    costs = op_costs_of(graph)
    (at,) = [
        row
        for row, node in enumerate(costs.index.tolist())
        if graph.strings[int(graph.nodes.op[node])] == "cuda::scaled"
    ]
    # 16 x 32 outputs and a loss, 4 bytes each.
    assert (costs.bytes_read[at], costs.bytes_written[at]) == (4 * 513, 4 * 512)


NUMBERS_ON_DEVICE = """
    import torch

    @torch.library.custom_op("mylib::copied", mutates_args=(), device_types="cuda")
    def copied(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), torch.empty(0, device=x.device)

    @copied.register_fake
    def _(x):
        return torch.empty_like(x), torch.tensor([], device=x.device)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * gradient.new_tensor([2.0]) * gradient.new_tensor(3)

    model = torch.nn.Linear(64, 32, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        output, empty = torch.ops.mylib.copied(torch.randn(16, 64, device="cuda"))
        assert empty.is_cuda and not len(empty)
        Scaled.apply(model(output)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_tensors_of_numbers_are_created_in_fake_implementations_and_in_backwards(tmp_path):
    graph = captured(tmp_path, NUMBERS_ON_DEVICE)
    operators = Counter(graph.strings[int(op)] for op in graph.nodes.op)
    assert operators["mylib::copied"] == 1
    # The numbers 2 and 3 move to the GPU, and the forward clones.
    assert operators["aten::copy_"] == 3
    assert operators["aten::mul"] == 2


# As fbgemm_gpu 1.8 defines them; its build for CPUs has no implementation for shapes.
TABLES = '''
    import torch
    library = torch.library.Library("fbgemm", "DEF")
    library.define("""split_embedding_codegen_forward_unweighted_pt2_wrapper(Tensor host_weights,
        Tensor dev_weights, Tensor uvm_weights, Tensor lxu_cache_weights, Tensor weights_placements,
        Tensor weights_offsets, Tensor D_offsets, SymInt total_D, SymInt max_D,
        Tensor hash_size_cumsum, Tensor indices, Tensor offsets, int pooling_mode,
        Tensor indice_weights, Tensor lxu_cache_locations, Tensor(f!) uvm_cache_stats,
        bool is_experimental, int output_dtype) -> Tensor""")
    library.define("""split_embedding_backward_codegen_rowwise_adagrad_unweighted_pt2_wrapper(
        Tensor grad_output, Tensor(a!) host_weights, Tensor(b!) dev_weights, Tensor(c!) uvm_weights,
        Tensor(d!) lxu_cache_weights, Tensor weights_placements, Tensor weights_offsets,
        Tensor D_offsets, SymInt max_D, bool mixed_D, Tensor hash_size_cumsum,
        int total_hash_size_bits, Tensor indices, Tensor offsets) -> Tensor""")
    def ints(*shape):
        return torch.zeros(*shape, dtype=torch.int64, device="cuda")
    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weights):
            ctx.weights = weights
            return torch.ops.fbgemm.split_embedding_codegen_forward_unweighted_pt2_wrapper(
                none, weights, none, none, ints(2), ints(2), ints(3), 2 * 64, 64, ints(3),
                ints(300), ints(2 * 50 + 1), 0, none, ints(0), ints(0), False, 1)
        @staticmethod
        def backward(ctx, gradient):
            update = (torch.ops.fbgemm.
                split_embedding_backward_codegen_rowwise_adagrad_unweighted_pt2_wrapper)
            update(gradient, none, ctx.weights, none, none, ints(2), ints(2), ints(3), 64, False,
                   ints(3), 11, ints(300), ints(2 * 50 + 1))
            return None
    none = torch.zeros(0, device="cuda")
    weights = torch.nn.Parameter(torch.zeros(2 * 1000 * 64, device="cuda"))
    head = torch.nn.Linear(128, 8, device="cuda", dtype=torch.float16)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for step in range(5):
        pooled = Lookup.apply(weights)
        assert pooled.shape == (50, 128) and pooled.dtype == torch.float16
        head(pooled).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
'''


def test_batched_tables_of_fbgemm_read_and_update_the_looked_up_rows(tmp_path):
    graph = captured(tmp_path, TABLES)
    costs = op_costs_of(graph)
    ops = [graph.strings[int(graph.nodes.op[i])] for i in costs.index.tolist()]
    (lookup,) = (n for n, op in enumerate(ops) if "codegen_forward" in op)
    (update,) = (n for n, op in enumerate(ops) if "backward_codegen" in op)
    elements = 300 * 64
    assert costs.flops[lookup] == elements
    assert costs.bytes_read[lookup] == elements * 4 + 8 * (300 + 101)
    assert costs.bytes_written[lookup] == 50 * 128 * 2
    assert costs.flops[update] == 6 * elements
    # Rows, a number of Adagrad for each, and two passes of sorting 2,000 rows' numbers of 11 bits.
    changed = elements * 4 + 300 * 4 + 300 * 12 * 2
    assert costs.bytes_written[update] == changed
    assert costs.bytes_read[update] == changed + 50 * 128 * 2
    assert costs.is_class(OpClass.EMBEDDING)[[lookup, update]].all()
