"""`capture run --device none`: functions of C++ extensions, which are not built.

The packages around the extensions are empty: the tests call what the packages call.
"""

import textwrap

import pytest
import torch
from without_device import captured, run, write_packages

import onerank
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.capture.no_device.extensions import emulated_modules
from onerank.ir import UNKNOWN, Graph
from onerank.ir.errors import CaptureError

TRAINING = """
import torch
from torch import empty, randn
weight = torch.nn.Parameter(torch.ones(64, 32, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.SGD([weight], lr=0.1)
{setup}
for step in range(5):
    weight.sum().backward()
{statements}
    optimizer.step()
"""


def script(setup: str, statements: str) -> str:
    indented = textwrap.indent(textwrap.dedent(statements).strip(), " " * 4)
    return TRAINING.format(setup=textwrap.dedent(setup).strip(), statements=indented)


def costs(graph: Graph, namespace: str) -> list[tuple[str, int, int, int]]:
    """Return (operator, FLOPs, bytes read, bytes written) of a namespace's operators, in order."""
    work = op_costs_of(graph)
    names = [graph.strings[int(op)] for op in graph.nodes.op[work.index]]
    return [
        (name.removeprefix(f"{namespace}::"), int(flops), int(read), int(written))
        for name, flops, read, written in zip(
            names, work.flops, work.bytes_read, work.bytes_written, strict=True
        )
        if name.startswith(f"{namespace}::")
    ]


TE_SETUP = """
import transformer_engine_torch as tex
def on_gpu(*shape, dtype=torch.bfloat16):
    return randn(*shape, device="cuda", dtype=dtype)
x, w, bias = on_gpu(8, 4, 32), on_gpu(64, 32), on_gpu(64)
workspace = empty(1, device="cuda")
def gemm(a, trans_a, b, trans_b, bias=None, gelu=False, grad=False, d=None):
    rest = (workspace, 1, d is not None, False)
    kind = tex.DType.kBFloat16
    return tex.generic_gemm(
        a, trans_a, b, trans_b, d, None, kind, bias, kind, gelu, None, grad, *rest
    )
"""


def test_products_of_transformer_engine(tmp_path):
    statements = """
    y, _, before, _ = gemm(w, True, x, False, bias=bias, gelu=True)
    assert y.shape == before.shape == (8, 4, 64)
    dx = gemm(w, False, y, False)[0]
    assert dx.shape == x.shape
    dw, dbias, _, _ = gemm(x, False, y, True, bias=bias, grad=True)
    assert dw.shape == w.shape and dbias.shape == bias.shape
    gemm(x, False, y, True, d=dw)
    """
    write_packages(tmp_path, "transformer_engine")
    graph = captured(tmp_path, script(TE_SETUP, statements))
    flops = 2 * 32 * 64 * 32
    x, w, y, bias = 2 * 32 * 32, 2 * 64 * 32, 2 * 32 * 64, 2 * 64
    assert costs(graph, "transformer_engine") == [
        ("generic_gemm", flops, x + w + bias, 2 * y),
        ("generic_gemm", flops, y + w, x),
        ("generic_gemm", flops, x + y, w + bias),
        ("generic_gemm", flops, x + y + w, w),
    ]


@pytest.mark.parametrize("layout", ["SBHD_SBHD_SBHD", "BSHD_BSHD_BSHD", "SB3HD"])
def test_attention_of_transformer_engine(layout, tmp_path):
    first = "BSHD" if layout[0] == "B" else "SBHD"
    shape = (2, 64, 4, 16) if first == "BSHD" else (64, 2, 4, 16)
    statements = f"""
    q = on_gpu(*{shape})
    layout, order = tex.NVTE_QKV_Layout.NVTE_{layout}, tex.NVTE_QKV_Format.NVTE_{first}
    lengths = torch.tensor([0, 64, 128], device="cuda", dtype=torch.int32)
    kinds = tex.NVTE_Bias_Type(0), tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK, tex.NVTE_Softmax_Type(0)
    window, none = ([-1, 0], False), [None] * 4
    out, stats, state = tex.fused_attn_fwd(
        64, 64, True, 0.1, 0.0, True, layout, order, order, *kinds, *window, lengths, lengths,
        q, q, q, q.dtype, *none, None, None, None, None, None, 16, False, False,
    )
    assert out.shape == q.shape and stats.shape == (2, 4, 64, 1)
    dq, dk, dv, _, _ = tex.fused_attn_bwd(
        64, 64, 0.1, 0.0, True, layout, order, order, layout, order, order, *kinds, *window,
        False, lengths, lengths, q, q, q, out, out, q.dtype, [stats, state], *none[:2],
        None, None, None, False,
    )
    assert dq.shape == dk.shape == dv.shape == q.shape
    """
    write_packages(tmp_path, "transformer_engine")
    graph = captured(tmp_path, script(TE_SETUP, statements))
    pairs = 2 * 4 * 64 * 64 // 2
    tensor, stats = 2 * 2 * 64 * 4 * 16, 4 * 2 * 4 * 64
    assert costs(graph, "transformer_engine") == [
        ("fused_attn_fwd", 2 * pairs * 32, 3 * tensor, tensor + stats),
        ("fused_attn_bwd", 2 * pairs * 80, 5 * tensor + stats, 3 * tensor),
    ]


def test_norms_softmax_and_optimizers_of_apex(tmp_path):
    setup = """
    import amp_C, fused_layer_norm_cuda as norms, scaled_masked_softmax_cuda as softmax
    x, w = (randn(*shape, device="cuda") for shape in ((8, 4, 32), (32,)))
    scores = randn(2, 4, 16, 16, device="cuda")
    mask = torch.zeros(2, 1, 16, 16, dtype=torch.uint8, device="cuda")
    """
    statements = """
    y, mean, scale = norms.forward_affine(x, (32,), w, w, 1e-5)
    dx, dw, db = norms.backward_affine(y, mean, scale, x, (32,), w, w, 1e-5, False)
    assert dx.shape == x.shape and dw.shape == db.shape == w.shape and mean.shape == (32,)
    flag = torch.zeros(1, dtype=torch.int, device="cuda")
    norm, _ = amp_C.multi_tensor_l2norm(65536, flag, [[x, w]], False)
    amp_C.multi_tensor_adam(65536, flag, [[x, w]] * 4, 0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)
    shares = softmax.forward(scores, mask, 0.5)
    assert softmax.backward(torch.ones_like(shares), shares, 0.5).shape == scores.shape
    """
    write_packages(tmp_path, "apex")
    graph = captured(tmp_path, script(setup, statements))
    x, w, elements = 4 * 32 * 32, 4 * 32, 32 * 32 + 32
    scores = 2 * 4 * 16 * 16
    assert costs(graph, "apex") == [
        ("layer_norm_forward", 7 * 32 * 32, x + 2 * w, x + 2 * w),
        ("layer_norm_backward", 14 * 32 * 32, 2 * x + 4 * w, x + 2 * w),
        ("multi_tensor_l2norm", 2 * elements, 4 * elements, 4),
        ("multi_tensor_adam", 14 * elements, 4 * 4 * elements, 3 * 4 * elements),
        ("scaled_masked_softmax_forward", 6 * scores, 4 * scores + 512, 4 * scores),
        ("scaled_masked_softmax_backward", 5 * scores, 2 * 4 * scores, 4 * scores),
    ]


def test_the_scan_of_mamba(tmp_path):
    setup = """
    import selective_scan_cuda
    u, a = randn(2, 16, 4096, device="cuda"), randn(16, 8, device="cuda")
    b, d = randn(2, 1, 8, 4096, device="cuda"), randn(16, device="cuda")
    """
    statements = """
    y, states, gated = selective_scan_cuda.fwd(u, u, a, b, b, d, u, d, True)
    assert states.shape == (2, 16, 2, 16) and gated.shape == u.shape
    results = selective_scan_cuda.bwd(u, u, a, b, b, d, u, d, y, states, y, None, True, True)
    assert [tuple(t.shape) for t in results] == [
        tuple(t.shape) for t in (u, u, a, b, b, d, d, u, u)
    ]
    """
    write_packages(tmp_path, "mamba_ssm")
    graph = captured(tmp_path, script(setup, statements))
    elements = 2 * 16 * 4096
    u, b, a, d, states = 4 * elements, 4 * 2 * 8 * 4096, 4 * 16 * 8, 4 * 16, 4 * 2 * 16 * 2 * 16
    read, flops = 3 * u + a + 2 * b + 2 * d, elements * (8 * 8 + 8)
    assert costs(graph, "mamba_ssm") == [
        ("selective_scan_fwd", flops, read, 2 * u + states),
        ("selective_scan_bwd", 3 * flops, read + 2 * u + states, 4 * u + a + 2 * b + 2 * d),
    ]


def test_a_registered_function_of_an_extension(tmp_path):
    setup = """
    import onerank
    onerank.register_extension_function(
        "my_ext::gemm", lambda a, b, out: a.new_empty(a.shape[0], 1), writes=[2]
    )
    onerank.register_operator_cost("my_ext::gemm", lambda inputs, outputs: 2 * inputs[0][1])
    import my_ext
    out = empty(64, 32, device="cuda")
    """
    graph = captured(tmp_path, script(setup, "my_ext.gemm(weight, weight, out)"))
    assert costs(graph, "my_ext") == [("gemm", 2 * 32, 2 * 2 * 64 * 32, 2 * 64 + 4 * 64 * 32)]


@pytest.mark.parametrize(
    ("setup", "statement", "function"),
    [
        ("import transformer_engine_torch as ext", "ext.ep_dispatch(weight)", "ep_dispatch"),
        (
            "from torch.utils import cpp_extension\n"
            "ext = cpp_extension.load(name='my_kernels', sources=['k.cpp', 'k.cu'])",
            "ext.Scan.apply(weight)",
            "my_kernels::Scan.apply",
        ),
        (
            "from torch.utils import cpp_extension\n"
            "made = cpp_extension.load(name='my_kernels', sources=['k.cpp']).Adam(0.1)",
            "made.step(weight)",
            "my_kernels::Adam.step",
        ),
    ],
)
def test_another_function_of_an_extension_is_an_error(setup, statement, function, tmp_path):
    write_packages(tmp_path, "transformer_engine")
    done = run(tmp_path, script(setup, statement))
    assert done.returncode == 2
    assert "error[no-device-extension]: train.py:" in done.stderr
    assert function in done.stderr
    assert "register_extension_function" in done.stderr
    assert not (tmp_path / "trace.et").exists()


def test_a_library_that_registers_operators_is_refused(tmp_path):
    setup = "from torch.utils import cpp_extension"
    load = "cpp_extension.load(name='my_kernels', sources=['k.cpp'], is_python_module=False)"
    done = run(tmp_path, script(setup, load))
    assert done.returncode == 2
    assert "error[no-device-extension]: train.py:" in done.stderr
    assert "my_kernels" in done.stderr
    assert not (tmp_path / "trace.et").exists()


def test_an_extension_without_its_package_is_absent(tmp_path):
    setup = "import importlib.util\nassert importlib.util.find_spec('deep_ep') is None\n"
    done = run(tmp_path, script(setup + "import transformer_engine_torch", "pass"))
    assert done.returncode == 2
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("name", ["gemm", "::gemm", "my_ext::", "my_ext::a b"])
def test_a_name_that_is_no_function_is_refused(name):
    with pytest.raises(CaptureError) as error:
        onerank.register_extension_function(name, lambda: None)
    assert error.value.code == "extension-function-name"


def test_a_call_without_an_optional_argument_that_it_would_write():
    launches = []
    registered = emulated_modules._Registered(lambda x, out=None: x if out is None else out, (1,))
    function = emulated_modules._as_registered("my_ext::gemm", registered)
    x, out = torch.zeros(2), torch.zeros(2)
    for args in ((x,), (x, out)):
        function(lambda name, reads, writes: launches.append((len(reads), len(writes))), *args)
    assert launches == [(1, 1), (2, 2)]


EXTENSIONS = """
    import torch
    import deep_gemm, grouped_gemm_backend
    weight = torch.nn.Parameter(torch.ones(4, 32, 64, device="cuda", dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    counts = torch.tensor([5, 7, 2, 2])
    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, device="cuda", dtype=dtype)
    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(context, x, weight):
            context.save_for_backward(x)
            grouped_gemm_backend.gmm(x, weight, y := empty(16, 64), counts, False, False)
            return y
        @staticmethod
        def backward(context, gradient):
            (x,) = context.saved_tensors
            grouped_gemm_backend.gmm(x, gradient, dw := empty(4, 32, 64), counts, True, False)
            return None, dw
    eight = torch.float8_e4m3fn
    a, b = empty(16, 256, dtype=eight), empty(4, 128, 256, dtype=eight)
    scales = empty(16, 2, dtype=torch.float32), empty(4, 1, 2, dtype=torch.float32)
    layout = torch.zeros(16, device="cuda", dtype=torch.int32)
    for step in range(5):
        Grouped.apply(empty(16, 32), weight).sum().backward()
        deep_gemm.fp8_gemm_nt((a, scales[0]), (b[0], scales[1][0]), d := empty(16, 128))
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a, scales[0]), (b, scales[1]), d, layout)
        deep_gemm.bf16_gemm_tn(empty(256, 16), empty(256, 128), d, c=d)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_products_of_extensions_are_operators(tmp_path):
    for name in ("deep_gemm", "grouped_gemm_backend"):  # not built: modules without functions
        (tmp_path / f"{name}.py").write_text("")
    graph = captured(tmp_path, EXTENSIONS)
    costs = op_costs_of(graph)
    names = [graph.strings[int(op)] for op in graph.nodes.op[costs.index]]
    rows = [at for at, name in enumerate(names) if name.startswith(("deep_gemm", "grouped"))]
    assert {(names[at], int(costs.flops[at]), int(costs.bytes_written[at])) for at in rows} == {
        ("grouped_gemm::gmm", 2 * 16 * 32 * 64, 2 * 16 * 64),
        ("grouped_gemm::gmm", 2 * 16 * 32 * 64, 2 * 4 * 32 * 64),
        ("deep_gemm::fp8_gemm_nt", 2 * 16 * 256 * 128, 2 * 16 * 128),
        ("deep_gemm::m_grouped_fp8_gemm_nt_contiguous", 2 * 16 * 256 * 128, 2 * 16 * 128),
        ("deep_gemm::bf16_gemm_tn", 2 * 16 * 256 * 128, 2 * 16 * 128),
    }
    read = dict(zip((names[at] for at in rows), costs.bytes_read[rows].tolist(), strict=True))
    scales, layout = 4 * 16 * 2, 4 * 16
    assert read["deep_gemm::fp8_gemm_nt"] == 16 * 256 + scales + 128 * 256 + 4 * 2
    assert read["deep_gemm::m_grouped_fp8_gemm_nt_contiguous"] == (
        16 * 256 + scales + 4 * (128 * 256 + 4 * 2) + layout
    )
    assert read["deep_gemm::bf16_gemm_tn"] == 2 * (256 * 16 + 256 * 128 + 16 * 128)


ROUTER = """
tokens, experts, chosen = 24, 12, 2
logits = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)
"""


@pytest.mark.parametrize(
    ("function", "softmax_first", "flops"),
    [
        # Softmax of the chosen logits, or of all.
        ("softmax", False, 5 * 48),
        ("softmax", True, 5 * 288),
        # Sigmoid of all, and the bias; the weights' sum and division.
        ("sigmoid", False, 3 * 288 + 288 + 2 * 48),
    ],
)
def test_fused_routers_of_transformer_engine(function, softmax_first, flops, tmp_path):
    bias = 'torch.zeros(experts, device="cuda")' if function == "sigmoid" else None
    statements = f"""
    weights, routed, scores = tex.fused_topk_with_score_function_fwd(
        logits, chosen, {softmax_first}, None, None, None, "{function}", {bias}, 0, None
    )
    assert routed.sum(0).tolist() == [8] * 3 + [4] * 6 + [0] * 3, routed.sum(0).tolist()
    assert routed.sum(1).tolist() == [2] * tokens
    gradient = torch.empty_like(weights)
    tex.fused_topk_with_score_function_bwd(
        routed, scores, weights, gradient, chosen, {softmax_first}, None, "{function}", False, 0
    )
    """
    write_packages(tmp_path, "transformer_engine")
    (tmp_path / "lines.csv").write_text("2,2,2,1,1,1,1,1,1,0,0,0\n")
    setup = "import transformer_engine_torch as tex\n" + ROUTER
    graph = captured(tmp_path, script(setup, statements), "--moe-routing", tmp_path / "lines.csv")
    forward, backward = costs(graph, "transformer_engine")
    bias_bytes = 4 * 12 if bias else 0
    # Weights have the logits' dtype, the map a byte and the saved scores four for each expert.
    assert forward == (
        "fused_topk_with_score_function_fwd",
        flops,
        2 * 288 + bias_bytes,
        (2 + 1 + 4) * 288,
    )
    assert backward[0] == "fused_topk_with_score_function_bwd"
    assert backward[2:] == ((2 + 1 + 4) * 288, 2 * 288)


def test_forms_of_a_fused_router_s_choice(tmp_path):
    statements = """
    bits = tex.fused_score_for_moe_aux_loss_fwd(logits, chosen, "softmax", 1)[1]
    assert bits.shape == (tokens, 2) and int(bits[0, 0]) == 3, bits[0].tolist()
    indices = torch.empty(tokens, chosen, device="cuda", dtype=torch.int16)
    tex.fused_topk_with_score_function_fwd(
        logits, chosen, False, None, None, 2.5, "softmax", None, 0, indices
    )
    assert indices[0].tolist() == [0, 1]
    counts = torch.ones(experts, device="cuda")
    loss, factor = tex.fused_moe_aux_loss_fwd(
        logits, counts, tokens, experts, tokens, experts, chosen, 0.1
    )
    assert loss.shape == () and loss.dtype == logits.dtype
    assert tex.fused_moe_aux_loss_bwd(factor, counts, tokens, experts, loss).shape == logits.shape
    """
    write_packages(tmp_path, "transformer_engine")
    (tmp_path / "lines.csv").write_text("12,12" + ",0" * 10 + "\n")
    setup = "import transformer_engine_torch as tex\n" + ROUTER
    graph = captured(tmp_path, script(setup, statements), "--moe-routing", tmp_path / "lines.csv")
    flops = {name: flops for name, flops, *_ in costs(graph, "transformer_engine")}
    assert flops["fused_score_for_moe_aux_loss_fwd"] == 5 * 288
    assert flops["fused_topk_with_score_function_fwd"] == 6 * 48  # scaled by 2.5
    assert flops["fused_moe_aux_loss_fwd"] == 288 + 2 * 12


METHOD = """
    import onerank
    from torch.utils import cpp_extension
    onerank.register_extension_function("my_kernels::sCell.forward", lambda x: x.new_empty(3, 5))
    cpp_extension.load(name="my_kernels", sources=["k.cu"])
    import my_kernels
    cell = my_kernels.sCell(True, 64)
"""


def test_a_registered_method_of_an_extension_is_recorded(tmp_path):
    statement = "assert cell.forward(weight).shape == (3, 5)"
    graph = captured(tmp_path, script(METHOD, statement))
    assert costs(graph, "my_kernels") == [("sCell.forward", UNKNOWN, 2 * 64 * 32, 2 * 3 * 5)]
