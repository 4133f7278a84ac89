"""`capture run --device none`: the kernel of an attention, and the blocks that its mask leaves."""

import inspect
import json
import textwrap
from pathlib import Path

import pytest
import torch
from notes import has_note
from torch.nn.attention.varlen import varlen_attn
from without_device import captured, run

from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.capture.no_device.operators import block_masks
from onerank.ir import Graph, Phase

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
        torch.ops.aten.scaled_dot_product_attention.default(x, x, x)
        heads_last = torch.randn(32, 32, 4, device="cuda", dtype=torch.bfloat16)
        bias = heads_last.permute(2, 0, 1)[None]
        scaled_dot_product_attention(x, x, x, bias)
        scaled_dot_product_attention(x, x, x, bias.contiguous())
        x.sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
"""


def attention_operators(directory: Path) -> list[str]:
    graph = captured(directory, ATTENTION, "--torchrun", "--dp", 2, "--like", "H100")
    ops = [graph.strings[int(op)] for op in graph.nodes.op]
    kernels = [f"aten::_{kernel}_attention_forward" for kernel in ("cudnn", "flash", "efficient")]
    names = (*kernels, "aten::_softmax")
    return [op.removeprefix("aten::").removeprefix("_") for op in ops if op in names]


def test_attention_runs_by_the_backends_that_a_script_enables(tmp_path, monkeypatch):
    cudnn, flash = "cudnn_attention_forward", "flash_attention_forward"
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    # Only the math takes a bias with its heads last: T5's on four H100s, torch 2.11.
    biased = ["softmax", cudnn]
    assert attention_operators(tmp_path) == [cudnn, flash, "softmax", flash, cudnn, *biased]
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    biased[1] = "efficient_attention_forward"
    assert attention_operators(tmp_path) == [flash, flash, "softmax", flash, flash, *biased]


FLASH_3 = """
    import importlib.util
    import torch
    from torch import nn
    from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn
    from torch.nn.functional import scaled_dot_product_attention
    activate_flash_attention_impl("FA3")
    assert importlib.util.find_spec("flash_attn_interface") is None
    mixed = nn.Linear(64, 256, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(mixed.parameters(), lr=0.1)
    for step in range(4):
        ends = torch.tensor([0, 30, 42, 47, 98], device="cuda").int()
        x = torch.randn(98, 64, device="cuda", dtype=torch.bfloat16)
        heads = mixed(x).view(98, 8, 32).split((4, 2, 2), 1)
        y = varlen_attn(*heads, ends, ends, 51, 51, window_size=(-1, 0), enable_gqa=True)
        y = y + varlen_attn(*heads, ends, ends, 51, 51, window_size=(9, 0), enable_gqa=True)
        padded = [tensor.transpose(0, 1)[None] for tensor in heads]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            z = scaled_dot_product_attention(*padded, enable_gqa=True)
        (y.sum() + z.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


_NO_GROUPED_HEADS = pytest.mark.skipif(
    "enable_gqa" not in inspect.signature(varlen_attn).parameters,
    reason="varlen_attn of this torch has no grouped heads",
)


@_NO_GROUPED_HEADS
def test_flash_attention_3_that_a_script_activates(tmp_path):
    """Its package is absent: torch's own code calls its operators, 4 query heads of 32 and 2."""
    graph = captured(tmp_path, FLASH_3, "--like", "H100")
    costs = op_costs_of(graph)
    ops = [graph.strings[int(op)] for op in graph.nodes.op[costs.index]]
    lengths = (30, 12, 5, 51)
    causal = 4 * sum(length * length for length in lengths) * (32 + 32)
    near = 4 * 2 * sum(min(at + 1, 10) for n in lengths for at in range(n)) * (32 + 32)
    every = 4 * 2 * 98 * 98 * (32 + 32)
    found = sorted(pair for pair in zip(ops, costs.flops.tolist(), strict=True) if "fla" in pair[0])
    forward = [("flash_attn_3::fwd", flops) for flops in (near, causal, every)]
    backward = [("flash_attn_3::bwd", flops * 5 // 2) for flops in (near, causal, every)]
    assert found == [*backward, *forward]
    # Of the padded call: dq, and dk and dv of fewer heads, in float32 and rounded up to tiles.
    shapes = [
        json.loads(graph.strings[int(shapes)])
        for op, shapes in zip(graph.nodes.op, graph.nodes.output_shapes, strict=True)
        if graph.strings[int(op)] == "flash_attn_3::bwd"
    ]
    sums = [[1, 4, 128], [1, 4, 128], [1, 4, 128 * 64], [1, 2, 128 * 64], [1, 2, 128 * 64]]
    assert sums in shapes


@_NO_GROUPED_HEADS
def test_flash_attention_3_is_refused_as_on_an_a100(tmp_path):
    done = run(tmp_path, FLASH_3, "--like", "A100-SXM-80GB")
    assert done.returncode == 2
    assert "FA3 requires compute capability 9.0" in done.stderr


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


GROUPED_HEADS = """
    import contextlib
    import torch
    from torch.nn.attention import SDPBackend
    from torch.nn.functional import scaled_dot_product_attention
    MATH = SDPBackend.MATH
    torch.set_float32_matmul_precision("high")
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
    ("context", "operator", "calls", "unit"),
    [
        ("contextlib.nullcontext()", "aten::bmm", 2, "tfloat32"),
        ("torch.autocast('cuda', torch.bfloat16)", "aten::_cudnn_attention_forward", 1, "bfloat16"),
        (
            "torch.autocast('cuda', torch.bfloat16), torch.nn.attention.sdpa_kernel(MATH)",
            "aten::bmm",
            2,
            "tfloat32",
        ),
    ],
)
def test_attention_of_32_bits_with_grouped_heads(context, operator, calls, unit, tmp_path):
    """The memory-efficient kernel takes no groups; autocast converts the operands.

    The products of the math, which computes in 32 bits, are within the operator that autocast cast.
    Products of float32 are in TF32, as the script allows.
    """
    graph = captured(tmp_path, GROUPED_HEADS.format(context=context), "--like", "H100")
    forward = graph.nodes.phase == Phase.FORWARD
    operators = [op for op, kept in zip(graph.text("op"), forward, strict=True) if kept]
    assert operators.count(operator) == calls
    assert "aten::_efficient_attention_forward" not in operators
    costs = op_costs_of(graph)
    assert {costs.dtypes[code] for code in costs.dtype[costs.matmul]} == {unit}


XFORMERS = {
    # The extension of its wheel does not load beside a torch for CPUs.
    "common.py": "_built_with_cuda = False",
    "cutlass.py": """
        import torch
        class FwOp:
            SUPPORTED_ATTN_BIAS_TYPES = (type(None), torch.Tensor)
        class BwOp(FwOp):
            SUPPORTED_ATTN_BIAS_TYPES = (type(None), torch.Tensor)
    """,
}
"""What xformers 0.0.35 asks before it chooses a kernel, in `xformers.ops.fmha`."""

ATTENTION_OF_XFORMERS = """
    import torch
    assert torch.backends.cuda.is_flash_attention_available()
    from xformers.ops.fmha import common, cutlass
    mask = torch.zeros(2, 4, 64, 64, device="cuda")
    for operator in (cutlass.FwOp, cutlass.BwOp):
        assert type(mask) in operator.SUPPORTED_ATTN_BIAS_TYPES
    assert common._built_with_cuda

    T = torch.Tensor
    @torch.library.custom_op("xformers_flash::flash_fwd", mutates_args=())
    def forward(
        query: T, key: T, value: T, cu_seqlens_q: T | None, cu_seqlens_k: T | None,
        seqused_k: T | None, max_seqlen_q: int, max_seqlen_k: int, p: float, softmax_scale: float,
        is_causal: bool, window_left: int, window_right: int, return_softmax: bool,
        block_tables: T | None,
    ) -> tuple[T, T, T]:
        raise NotImplementedError
    @forward.register_fake
    def _(query, *args):
        batch, length, heads, _ = query.shape
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        return torch.empty_like(query), sums, query.new_empty(2, dtype=torch.int64)
    @torch.library.custom_op("xformers_flash::flash_bwd", mutates_args=())
    def backward(
        grads_share_storage: bool, grad: T, query: T, key: T, value: T, out: T, lse: T,
        cu_seqlens_q: T | None, cu_seqlens_k: T | None, max_seqlen_q: int, max_seqlen_k: int,
        p: float, softmax_scale: float, is_causal: bool, window_left: int, window_right: int,
        rng_state: T,
    ) -> tuple[T, T, T]:
        raise NotImplementedError
    @backward.register_fake
    def _(shares, grad, query, key, value, *args):
        return tuple(torch.empty_like(each) for each in (query, key, value))

    weight = torch.nn.Parameter(torch.randn(2, 64, 4, 32, device="cuda", dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight])
    for step in range(3):
        (weight.sum()).backward()
        packed = None, None
        options = 64, 64, 0.0, 0.125, True, -1, 0
        inputs = weight.detach(), weight.detach(), weight.detach()
        out, sums, random = forward(*inputs, *packed, None, *options, False, None)
        backward(False, out, *inputs, out, sums, *packed, *options, random)
        optimizer.step()
"""


def test_attention_of_xformers_runs_torchs_flash_attention(tmp_path):
    directory = tmp_path / "xformers" / "ops" / "fmha"
    directory.mkdir(parents=True)
    for package in (directory, directory.parent, directory.parent.parent):
        (package / "__init__.py").write_text("")
    for name, text in XFORMERS.items():
        (directory / name).write_text(textwrap.dedent(text))
    graph = captured(tmp_path, ATTENTION_OF_XFORMERS)
    called = {name: flops for name, flops in flops_of(graph).items() if "flash_attention" in name}
    half = 2 * 2 * 2 * 4 * 64 * 64 * 32 // 2  # two GEMMs of 2 x 4 heads, causal
    assert called == {
        "_flash_attention_forward": half,
        "_flash_attention_backward": half * 5 // 2,
    }
