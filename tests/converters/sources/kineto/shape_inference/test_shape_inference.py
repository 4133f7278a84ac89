"""Results inferred from the inputs that a Kineto trace records, compared with torch's results."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from raised import raises_code
from small_traces import Trace
from torch.nn import functional

from onerank.annotate.op_costs.node_costs import characterise
from onerank.annotate.passes.resize.resize import Resize
from onerank.annotate.passes.resize.size_change import Change
from onerank.converters.sources.kineto import Sources, convert
from onerank.ir import UNKNOWN, Graph
from onerank.ir.errors import AnnotateError


def image(*sizes: int, grad: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.randn(*sizes, dtype=dtype).requires_grad_(grad)


def _calls() -> None:
    """Run operators of every rule."""
    half, single, whole = torch.randn(4, 8).bfloat16(), image(4, 8), torch.arange(8)
    for a, b in ((half, single), (single, whole), (half, 2.5), (whole, 2.5), (whole, 3)):
        a + b  # type: ignore[operator]
        a * b  # type: ignore[operator]
    half * torch.tensor(2.0)
    half + half.half()
    whole / 3
    whole.exp()
    single.gt(0)
    (single > 0) | (single < 1)
    torch.where(single > 0, single, half)
    torch.addcmul(single, single, single)
    single.add_(1)
    single.to(torch.bfloat16)
    single.cumsum(0), (whole > 2).cumsum(0)
    single.repeat(2, 1, 3)
    functional.pad(single, (1, 2))
    for size in ((), (0,), ((0, 1), True), (-1, True)):
        single.sum(*size) if size else single.sum()
        single.mean(*size) if size else single.mean()
    (whole > 1).sum(), single.sum(0, dtype=torch.float64), single.amax(-1), single.max(1)
    single.argmax(-1), single.any(), single.all(1), single.max(), single.logsumexp(0)
    torch.maximum(single, half), torch.linalg.vector_norm(single, 2, -1, keepdim=True)
    single.sort(0), single.topk(3, 0), single.argsort(-1), single.softmax(-1)
    torch.softmax(half, -1, torch.float32)
    single.index_select(1, torch.tensor([0, 2, 2])), single.gather(1, torch.zeros(4, 2).long())
    table = image(10, 6, grad=True)
    index = torch.randint(10, (3, 4))
    functional.embedding(index, table).sum().backward()
    functional.embedding_bag(
        index.view(-1), table, torch.tensor([0, 5]), mode="sum"
    ).sum().backward()
    scores = image(6, 10, grad=True)
    functional.cross_entropy(scores, torch.randint(10, (6,))).backward()
    functional.mse_loss(scores, torch.randn(6, 10)).backward()
    functional.dropout(scores, 0.5, training=True).sum().backward()
    for x in (image(3, 5, 8, grad=True), image(3, 5, 8, grad=True, dtype=torch.bfloat16)):
        for norm in (torch.nn.LayerNorm(8), torch.nn.RMSNorm(8), torch.nn.GroupNorm(1, 5)):
            norm.to(x.dtype)(x).sum().backward()
    for norm in (torch.nn.BatchNorm2d(4), torch.nn.BatchNorm2d(4).eval()):
        norm(image(2, 4, 6, 6, grad=True)).sum().backward()
    _products()
    _images()


def _products() -> None:
    a, b = image(4, 6), image(6, 5)
    a @ b, a[None] @ b[None].expand(3, 6, 5), torch.addmm(image(5), a, b), a @ b[:, 0]
    torch.baddbmm(image(2, 4, 5), image(2, 4, 6), image(2, 6, 5)), b[:, 0].dot(b[:, 1])
    torch.nn.Linear(6, 3)(image(2, 7, 6, grad=True)).sum().backward()
    heads = [image(2, 3, 16, 8, grad=True) for _ in range(3)]
    functional.scaled_dot_product_attention(*heads, is_causal=True).sum().backward()


def _images() -> None:
    for layer in (
        torch.nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=1, dilation=(1, 2), groups=2),
        torch.nn.Conv1d(4, 4, 3, padding="same", groups=4, bias=False),
        torch.nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        torch.nn.MaxPool2d(3, 2, padding=1, ceil_mode=True),
        torch.nn.AvgPool2d(2),
        torch.nn.AdaptiveAvgPool2d((3, 2)),
        torch.nn.Upsample(scale_factor=2),
        torch.nn.Upsample(size=(7, 9), mode="bilinear"),
    ):
        sizes = (2, 4, 11) if isinstance(layer, torch.nn.Conv1d) else (2, 4, 10, 11)
        layer(image(*sizes, grad=True)).sum().backward()


def _record(path: Path, calls: Callable[[], object]) -> tuple[Graph, Graph]:
    """Return the graphs of the calls, with the execution trace and without."""
    observer = torch.profiler.ExecutionTraceObserver()
    observer.register_callback(str(path / "et.json"))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=True,
        execution_trace_observer=observer,
    ) as profile:
        calls()
    profile.export_chrome_trace(str(path / "k.json"))
    full, _ = convert(Sources(path / "k.json", path / "et.json"))
    kineto_only, _ = convert(Sources(path / "k.json"))
    return full, kineto_only


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Graph, Graph]:
    return _record(tmp_path_factory.mktemp("recorded"), _calls)


def column(graph: Graph, name: str) -> list[str]:
    return [text.replace(" ", "") for text in graph.text(name)]


def test_results_are_those_that_torch_returned(recorded):
    full, kineto_only = recorded
    ops = kineto_only.text("op")
    assert ops == full.text("op")
    for name, differing in (
        ("output_shapes", set[str]()),
        ("output_types", {"aten::native_layer_norm", "aten::cat"}),
    ):
        rows = list(zip(ops, column(full, name), column(kineto_only, name), strict=True))
        assert {
            op for op, real, inferred in rows if inferred not in (real, "")
        } == differing  # sums on a GPU
        assert {op for op, real, inferred in rows if real and not inferred} == {"aten::arange"}


def test_work_is_as_with_an_execution_trace(recorded):
    full, kineto_only = (characterise(graph) for graph in recorded)
    for name in ("flops", "bytes_read", "bytes_written"):
        rows = zip(
            kineto_only.text("op"),
            getattr(full.nodes, name),
            getattr(kineto_only.nodes, name),
            strict=True,
        )
        assert {op for op, real, inferred in rows if inferred not in (real, UNKNOWN)} <= {
            "aten::addcmul",  # one tensor twice: only ids show that
            "aten::native_layer_norm",
        }


def _product(tmp_path, op: str = "aten::mm", kernel: str = "gemm", **args: object) -> Graph:
    trace = Trace()
    operands = {
        "Input Dims": [[64, 32], [32, 16]],
        "Input type": ["c10::BFloat16", "c10::BFloat16"],
        "Concrete Inputs": ["", ""],
    }
    trace.op(op, 0, 10, **operands | args)
    trace.launch(100, 5)
    trace.kernel(100, 20, 5, name=kernel)
    trace.memory(3, 1000, 92_000)
    trace.memory(8, -1000, 91_000)
    kineto, _ = trace.write(tmp_path)
    return convert(Sources(kineto))[0]


def test_a_kernel_has_the_operands_that_the_profiler_recorded(tmp_path):
    kernel = characterise(_product(tmp_path)).node(0)
    assert kernel.text("output_shapes") == "[[64,16]]"
    assert kernel.value("flops") == 2 * 64 * 32 * 16
    assert kernel.value("bytes_read") == 2 * (64 * 32 + 32 * 16)
    assert kernel.value("bytes_written") == 2 * 64 * 16


_CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::(anonymous \
namespace)::OpaqueType<2u>, unsigned int, 3, 128, 1>(int)"
_APPLY = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous \
namespace)::%sMetadata<%s>, at::native::(anonymous namespace)::%s>(int)"
_ADD = _APPLY % ("TensorList", 2, "BinaryOpListAlphaFunctor<c10::BFloat16, 2, 2, 0>")
_COPY = _APPLY % ("TensorList", 2, "CopyFunctor<int, long, 2, 1, 1>")
_SQRT = _APPLY % ("TensorList", 2, "UnaryOpFunctor<double, 2, 1, 1>")
_ADAM = _APPLY % ("FusedOptimizerTensorList", 4, "FusedAdamMathFunctor<float, 4>")
_PAIR = [[6, 8], [6]]


@pytest.mark.parametrize(
    ("op", "kernel", "dims", "moved"),
    [
        # names as public traces of MI300X, H100 and MI250X have them
        ("aten::cat", _CAT, [[[8, 1, 5], [8, 6, 5]]], (2 * 8 * 7 * 5, 2 * 8 * 7 * 5)),
        ("aten::_foreach_add_", _ADD, [_PAIR] * 2, (2 * 2 * 54, 2 * 54)),
        ("aten::_foreach_copy_", _COPY, [_PAIR] * 2, (8 * 54, 4 * 54)),
        ("aten::_foreach_sqrt", _SQRT, [_PAIR], (8 * 54, 8 * 54)),
        # without amsgrad's list; with two counts of steps
        ("aten::_fused_adamw_", _ADAM, [*[_PAIR] * 4, [], [[], []]], (4 * (4 * 54 + 2), 12 * 54)),
        ("aten::_foreach_add_", "vectorized_elementwise_kernel", [_PAIR] * 2, (UNKNOWN, UNKNOWN)),
        ("aten::_foreach_add_", _ADD, [[], []], (UNKNOWN, UNKNOWN)),  # more than 30 tensors
    ],
)
def test_the_kernel_name_gives_the_types_in_a_list_of_tensors(tmp_path, op, kernel, dims, moved):
    operands = {
        "Input Dims": [*dims, []],
        "Input type": [*["TensorList"] * len(dims), "Scalar"],
        "Concrete Inputs": [*[""] * len(dims), "1"],
    }
    kernel_node = characterise(_product(tmp_path, op=op, kernel=kernel, **operands)).node(0)
    assert (kernel_node.value("bytes_read"), kernel_node.value("bytes_written")) == moved


def test_unreadable_operands_are_unknown(tmp_path):
    kernel = characterise(_product(tmp_path, **{"Input Dims": [["s0", 32], [32, 16]]})).node(0)
    assert kernel.text("input_shapes") == ""
    assert kernel.value("flops") == UNKNOWN


def test_the_allocator_total_gives_memory_allocated_before(tmp_path):
    measured = _product(tmp_path).job.measurement
    assert (measured.start_memory_bytes, measured.peak_memory_bytes) == (91_000, 92_000)


def test_other_sizes_need_to_know_which_tensors_are_the_same(tmp_path):
    with raises_code("resize-no-tensor-ids", AnnotateError):
        Resize(batch=Change(64, 128)).apply(_product(tmp_path))


def test_products_of_a_batch_under_vmap_of_sparse_and_of_complex_matrices(tmp_path):
    weight, x = torch.randn(16, 8), torch.randn(32, 1, 8)
    sparse = torch.eye(8).to_sparse()
    complex_ = torch.randn(4, 8, dtype=torch.cfloat)

    def calls() -> None:
        torch.vmap(lambda row: functional.linear(row, weight))(x)
        torch.sparse.mm(sparse, x[:, 0].T)
        complex_ @ complex_.T

    graph = characterise(_record(tmp_path, calls)[0])
    products = {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear"}
    rows = zip(graph.text("op"), graph.nodes.flops.tolist(), strict=True)
    assert [flops for op, flops in rows if op in products] == [
        2 * 32 * 16 * 8,  # of the whole batch, once
        UNKNOWN,  # 8 elements, which the trace does not record
        4 * 2 * 4 * 4 * 8,
    ]
