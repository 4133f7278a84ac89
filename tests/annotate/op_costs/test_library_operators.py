"""FLOPs of fused kernels of libraries and engines, most against the operators that they replace."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, einsum, nn
from torch.utils.flop_counter import FlopCounterMode

from onerank.annotate.op_costs import engine_operators, library_operators
from onerank.annotate.op_costs.node_costs import needs_values, work_of
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.capture.patch_registry import DEEP_GEMM

Shape = Sequence[int] | None
BF16 = "Tensor(c10::BFloat16)"


def work(op: str, inputs: Sequence[Shape], outputs: Sequence[Shape] = (), values: Any = ()) -> Any:
    """Return the work of a call with operands in bfloat16; None is an operand that is no tensor."""

    def columns(shapes: Sequence[Shape]) -> tuple[str, str]:
        types = ["None" if shape is None else BF16 for shape in shapes]
        return json.dumps([[] if shape is None else [*shape] for shape in shapes]), json.dumps(
            types
        )

    return work_of(op, columns(inputs), columns(outputs), json.dumps(values))


def eager(*operators: str, shape: Sequence[int] = (64, 32), operands: int = 3) -> int:
    """Return the sum of the FLOPs of torch's operators on tensors of one shape."""
    return sum(work(f"aten::{op}", [shape] * operands, [shape]).flops for op in operators)


def products(function: Callable[..., Tensor], *shapes: Sequence[int]) -> tuple[int, int]:
    """Return the FLOPs of the GEMMs and convolutions of a function, forward and backward."""
    operands = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        output = function(*operands)
    forward = counter.get_total_flops()
    with counter:  # counts anew
        output.sum().backward()
    return forward, counter.get_total_flops()


X, ROW, STAT = (64, 32), (32,), (64,)
NORM, NORM_BACKWARD = eager("native_layer_norm"), eager("native_layer_norm_backward")
SWIGLU_BACKWARD = eager("silu", "mul", "mul", "silu_backward")
GEGLU_BACKWARD = eager("gelu", "mul", "mul", "gelu_backward")

POINTWISE = {
    "triton::_rms_norm_forward_kernel": ([None, None, X, None, ROW], [X, STAT], NORM),
    "triton::_rms_norm_backward_kernel": (
        [X, None, None, None, X, None, None, ROW, None, STAT],
        [X, (8, 32)],
        NORM_BACKWARD,
    ),
    "triton::_fused_add_rms_norm_forward_kernel": (
        [None, None, None, None, X, None, X, None, ROW],
        [X, X, STAT],
        NORM + eager("add"),
    ),
    "triton::layer_norm_bwd_kernel": ([X, ROW, None, None, X, STAT], [X, ROW], NORM_BACKWARD),
    "flash_attn::layer_norm_fwd_impl": ([X, ROW, None, None, X], [STAT], NORM),
    "quack::_rmsnorm_bwd": ([X, ROW, X, STAT, X, (8, 32)], [], NORM_BACKWARD),
    "triton::_swiglu_forward_kernel": ([X, X, None], [X], eager("silu", "mul")),
    "triton::_swiglu_backward_kernel": ([X, X, X], [X, X], SWIGLU_BACKWARD),
    "triton::_geglu_tanh_forward_kernel": ([X, X, None], [X], eager("gelu", "mul")),
    "triton::_geglu_tanh_backward_kernel": ([X, X, X], [X, X], GEGLU_BACKWARD),
    # x * cos + rotated(x) * sin, of queries and of half as many keys.
    "triton::rotary_kernel": ([None, X, (16, 8), (16, 8)], [X], eager("mul", "mul", "add")),
    "triton::_triton_rope": (
        [X, None, (32, 32), None, (16, 8), None, (16, 8)],
        [X, (32, 32)],
        eager("mul", "mul", "add") * 3 // 2,
    ),
    "triton::liger_cross_entropy_kernel": (
        [X, None, STAT],
        [X, STAT],
        eager("_log_softmax", "_log_softmax_backward_data"),
    ),
    "triton::cross_entropy_bwd_kernel": ([None, STAT, X], [X], eager("_log_softmax_backward_data")),
    "quack::cross_entropy_fwd_out": ([X, STAT, None, STAT, STAT], [], eager("_log_softmax")),
}


@pytest.mark.parametrize("op", POINTWISE)
def test_a_fused_kernel_counts_what_the_operators_that_it_replaces_count(op):
    inputs, outputs, expected = POINTWISE[op]
    assert work(op, inputs, outputs).flops == expected


def test_arguments_that_an_operator_only_writes_are_its_results():
    norm = work("flash_attn::layer_norm_fwd_impl", [X, ROW, None, None, X], [STAT])
    assert (norm.bytes_read, norm.bytes_written) == ((64 * 32 + 32) * 2, (64 * 32 + 64) * 2)


def test_causal_convolution():
    x, weight = (2, 16, 40), (16, 4)

    def convolution(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.conv1d(x, weight[:, None], padding=3, groups=16)[..., :40]

    forward, _ = products(convolution, x, weight)
    ahead = 43 / 40  # torch computes three points more, which are cut off
    silu = 2 * 16 * 40 * 3
    own = work("DaoAILab::_causal_conv1d_fwd_cpp", [x, weight, (16,), None, None, x, None])
    assert own.flops == forward / ahead + silu
    assert own.bytes_written == 2 * 2 * 16 * 40
    assert own.cycles == 0
    inputs = [x, weight, (16,), x, None, None, None, x, weight, (16,), None]
    # Two gradients, and the forward once more for that of SiLU. torch's own count of the backward
    # takes every channel of a depthwise filter for all channels.
    gradients = work("DaoAILab::_causal_conv1d_bwd_cpp", inputs)
    assert gradients.flops == 3 * forward / ahead + 2 * silu


HIDDEN, VOCABULARY = (24, 32), (96, 32)


def test_cut_cross_entropy():
    forward, backward = products(lambda hidden, table: hidden @ table.t(), HIDDEN, VOCABULARY)
    lse = work("triton::_cce_lse_forward_kernel", [HIDDEN, VOCABULARY], [(24,)])
    assert lse.flops == forward
    gradients = [HIDDEN, VOCABULARY, (24,), (24,)]
    # The backward computes the logits again.
    kernel = work("triton::_cce_backward_kernel", gradients, [HIDDEN, VOCABULARY])
    assert kernel.flops == forward + backward
    dot = work("triton::_indexed_neg_dot_forward_kernel", [HIDDEN, VOCABULARY, (24,)], [(24,)])
    assert dot.flops == work("aten::mv", [(24, 32), ROW], [(24,)]).flops
    assert dot.bytes_read == 2 * (24 * 32 + 24 * 32 + 24)


def test_flash_attention_3_counts_what_version_2_counts():
    query, key = (2, 64, 8, 32), (2, 64, 2, 32)
    operands, values = [query, key, key, *[None] * 22], [None] * 24 + [True]
    of_torch = [None] * 8 + [True]
    expected = work(
        "aten::_flash_attention_forward",
        [query, key, key, None, None, *[None] * 4],
        [query],
        [*of_torch[:5], 64, 64, 0.0, True],
    ).flops
    assert expected == 2 * 2 * 8 * 64 * 64 * 32
    assert needs_values("flash_attn_3::_flash_attn_forward")
    forward = work("flash_attn_3::_flash_attn_forward", operands, [query], values)
    assert forward.flops == expected
    gradients = [query, query, key, key, query, (2, 8, 64), *[None] * 16]
    backward = work(
        "flash_attn_3::_flash_attn_backward", gradients, [(2, 8, 64)], [None] * 16 + [True]
    )
    assert backward.flops == expected * 5 // 2
    inner = work("flash_attn_3::fwd", operands, [query], values)
    assert (inner.flops, needs_values("flash_attn_3::fwd")) == (expected, True)
    inner = work("flash_attn_3::bwd", gradients, [(2, 8, 64)], [None] * 16 + [True])
    assert (inner.flops, needs_values("flash_attn_3::bwd")) == (expected * 5 // 2, True)
    assert needs_values("flash_attn_3::fwd.default")
    assert not needs_values("another_library::fwd")
    # 8 keys before each query's own: 9 queries see less, and the own key counts as a half.
    windowed = round(2 * 2 * 8 * (9 * 4.5 + 55 * 8.5) * (32 + 32))
    limits = [*values, 8, 0]
    name = "flash_attn_3::_flash_attn_forward"
    assert work(name, [*operands, None, None], [query], limits).flops == windowed
    name, limits = "flash_attn_3::_flash_attn_backward", [None] * 16 + [True, 8, 0]
    found = work(name, [*gradients, None, None], [(2, 8, 64)], limits)
    assert found.flops == windowed * 5 // 2


@pytest.mark.parametrize("pairs", [None, 2 * 8 * 64 * 64, 12345])
def test_flex_attention_counts_the_pairs_of_its_block_mask(pairs):
    query, key = (2, 8, 64, 32), (2, 2, 64, 32)
    computed = 2 * 8 * 64 * 64 if pairs is None else pairs
    operands = [query, key, key, *[None] * 7]
    values = [None] * 9 + [pairs]
    forward = work("aten::flex_attention", operands, [query, (2, 8, 64)], values)
    assert forward.flops == 2 * computed * (32 + 32)
    assert forward.attention is not None
    keys = -(-computed // (2 * 8 * 64))
    assert forward.attention.sizes == (2, 8, 2, 64, keys, 32, 32)
    gradients = [query, key, key, query, (2, 8, 64), query, *[None] * 9]
    values = [None] * 14 + [pairs]
    backward = work("aten::flex_attention_backward", gradients, [query, key, key], values)
    assert backward.flops == forward.flops * 5 // 2


@pytest.mark.parametrize(
    ("name", "reads", "written", "group"),
    [
        ("grouped_gemm::gmm", [(96, 32), (4, 32, 64), (4,)], (96, 64), (4, 24, 64, 32)),
        ("grouped_gemm::gmm", [(96, 32), (4, 64, 32), (4,)], (96, 64), (4, 24, 64, 32)),
        ("grouped_gemm::gmm", [(96, 32), (96, 64), (4,)], (4, 32, 64), (4, 32, 64, 24)),
        ("deep_gemm::bf16_gemm_nt", [(96, 32), (64, 32)], (96, 64), (1, 96, 64, 32)),
        ("deep_gemm::bf16_gemm_tn", [(32, 96), (32, 64)], (96, 64), (1, 96, 64, 32)),
        (
            "deep_gemm::m_grouped_bf16_gemm_nt_contiguous",
            *([(96, 32), (4, 64, 32), None, None, (96,)], (96, 64), (4, 24, 64, 32)),
        ),
        (
            "deep_gemm::k_grouped_bf16_gemm_tn_contiguous",
            *([(96, 32), (96, 64), None, None, (4,)], (4, 32, 64), (4, 32, 64, 24)),
        ),
    ],
)
def test_products_of_grouped_gemm_and_deep_gemm(name, reads, written, group):
    product = work(name, reads, [written])
    assert product.flops == 2 * 96 * 32 * 64
    assert [tuple(part[:4]) for part in product.parts] == [group]


def test_each_product_of_deep_gemm_that_is_recorded_has_a_formula():
    """But for masked ones: how many rows of each group count is on the device."""
    recorded = {f"deep_gemm::{name}" for name in DEEP_GEMM if not name.endswith("_masked")}
    formulas = {name for name in library_operators.FORMULAS if name.startswith("deep_gemm::")}
    assert formulas == recorded
    assert {op_class(f"deep_gemm::{name}") for name in DEEP_GEMM} == {OpClass.GEMM}


@pytest.mark.parametrize("mask", [[], [(2, 1, 16, 16)]])
def test_softmax_of_transformer_engine_counts_its_scale(mask):
    scores = (2, 4, 16, 16)
    name = "te_softmax::scaled_masked_softmax" if mask else "te_softmax::scaled_softmax"
    softmax = work("aten::_softmax", [scores], [scores]).flops
    gradient = work("aten::_softmax_backward_data", [scores, scores], [scores]).flops
    elements = 2 * 4 * 16 * 16
    assert work(f"{name}_fwd", [scores, *mask, None], [scores]).flops == softmax + elements
    assert work(f"{name}_bwd", [scores, scores, None], [scores]).flops == gradient + elements


# Batch, chunks, tokens of a chunk, heads, groups of B and C, width of a head, states.
B, N, C, H, G, P, S = 2, 3, 8, 4, 1, 16, 32
TOKENS, BC, STATES, CB = (B, N * C, H, P), (B, N * C, G, S), (B, N, H, P, S), (B, N, G, C, C)


def mamba(name: str, inputs: Sequence[Shape], outputs: Sequence[Shape] = ()) -> int:
    return work(f"triton::{name}", inputs, outputs).flops


def test_mamba_2():
    """The parts of listing 1 of arXiv:2405.21060, and their gradients."""
    b, x = (B, N, C, G, S), (B, N, C, H, P)
    scores, backward_scores = products(lambda c, b: einsum("bncgs,bndgs->bngcd", c, b), b, b)
    states, backward_states = products(
        lambda right, x: einsum("bncs,bnchp->bnhps", right[:, :, :, 0], x), b, x
    )
    # In a chunk, each token meets those before it: half of the products.
    inside, backward_inside = products(
        lambda scores, x: einsum("bncd,bndhp->bnchp", scores[:, :, 0], x), CB, x
    )
    across, backward_across = products(
        lambda left, states: einsum("bncs,bnhps->bnchp", left[:, :, :, 0], states), b, STATES
    )
    assert mamba("_bmm_chunk_fwd_kernel", [BC, BC], [CB]) == scores
    assert mamba("_chunk_state_fwd_kernel", [TOKENS, BC], [STATES]) == states
    scan = [CB, TOKENS, *[None] * 6, BC, STATES]
    assert mamba("_chunk_scan_fwd_kernel", scan, [TOKENS]) == inside // 2 + across
    # Each forward product has two gradients, in different kernels.
    of_x = mamba("_chunk_scan_chunk_state_bwd_dx_kernel", [TOKENS, CB, TOKENS, *[None] * 4, BC])
    of_scores = mamba("_chunk_scan_bwd_dcb_kernel", [TOKENS, TOKENS], [(B, N, H, C, C)])
    of_b = mamba("_chunk_state_bwd_db_kernel", [TOKENS, STATES], [BC])
    of_c = mamba("_chunk_scan_bwd_dc_kernel", [TOKENS, STATES], [BC])
    of_states = mamba("_chunk_scan_bwd_dstates_kernel", [TOKENS, BC], [STATES])
    assert of_x + of_scores == backward_inside // 2 + states
    assert of_x - inside // 2 + of_b == backward_states
    assert of_c + of_states == backward_across
    both = 2 * mamba("_bmm_chunk_bwd_kernel", [BC, CB], [BC])  # of B and of C
    assert both == backward_scores


KEYS, VALUES, KV = (B, N * C, H, P), (B, N * C, H, S), (B, N, H, P, S)


def test_linear_attention_of_fla():
    k, v = (B, N, C, H, P), (B, N, C, H, S)
    state, backward_state = products(lambda k, v: einsum("bnchp,bnchs->bnhps", k, v), k, v)
    across, backward_across = products(lambda q, h: einsum("bnchp,bnhps->bnchs", q, h), k, KV)
    scores, backward_scores = products(lambda q, k: einsum("bnchp,bndhp->bnhcd", q, k), k, k)
    inside, backward_inside = products(
        lambda scores, v: einsum("bnhcd,bndhs->bnchs", scores, v), (B, N, H, C, C), v
    )
    assert mamba("chunk_fwd_kernel_h", [KEYS, VALUES], [KV]) == state
    output = mamba("chunk_fwd_kernel_o", [KEYS, KEYS, VALUES, KV], [VALUES])
    assert output == across + scores + inside
    states = mamba("chunk_bwd_kernel_dh", [KEYS, *[None] * 4, VALUES], [KV])
    keys = [KEYS, KEYS, VALUES, None, None, KV, VALUES, KV]
    of_keys = mamba("chunk_bwd_kernel_dqkwg", keys, [KEYS, KEYS])
    of_values = mamba("chunk_bwd_kernel_dv", [KEYS, KEYS, None, None, VALUES, None, KV], [VALUES])
    backward = backward_state + backward_across + backward_scores + backward_inside
    # The scores are computed again for the gradient of the values.
    assert states + of_keys + of_values == backward + scores
    # The delta rule multiplies the states by the keys, too.
    delta = "chunk_gated_delta_rule_{}_blockdim64"
    assert mamba(delta.format("fwd_kernel_h"), [KEYS, VALUES], [KV]) == 2 * state
    gradient = [KEYS, KEYS, KEYS, *[None] * 4, VALUES, None, VALUES]
    assert mamba(delta.format("bwd_kernel_dhu"), gradient, [KV]) == 3 * state


def test_each_formula_has_a_class():
    names = (*library_operators.FORMULAS, *engine_operators.FORMULAS)
    assert all(op_class(name) is not OpClass.UNKNOWN for name in names)


INPUT, CHOICES = (1024, 2048), (1024, 8)
EXPERTS = (128, 1536, 2048), (128, 2048, 768)


@pytest.mark.parametrize(
    ("op", "inputs", "kernel"),
    [
        ("vllm::outplace_fused_experts", [INPUT, *EXPERTS, CHOICES, CHOICES], "VLLM_EXPERTS"),
        ("sglang::inplace_fused_experts", [INPUT, *EXPERTS, CHOICES, CHOICES], "SGLANG_EXPERTS"),
        (
            "trtllm::fused_moe",
            [INPUT, CHOICES, CHOICES, EXPERTS[0], None, EXPERTS[1], None],
            "CUTLASS_EXPERTS",
        ),
    ],
)
def test_experts_of_inference_engines_are_two_grouped_gemms(op, inputs, kernel):
    """8 experts for each of 1024 tokens are 64 rows for each of 128 experts."""
    cost = work(op, inputs, [INPUT])
    rows = 8 * 1024
    first, second = cost.parts
    assert first[:5] == (128, 64, 1536, 2048, 2)
    assert second[:5] == (128, 64, 2048, 768, 2)
    assert {part.kernel.name for part in cost.parts} == {kernel}
    assert cost.flops == 2 * rows * (1536 * 2048 + 2048 * 768)
    # The activation reads two halves and writes one; the sum reads rows and writes tokens.
    tokens = 2 * (rows + 1024) * 2048
    copied = tokens if kernel == "CUTLASS_EXPERTS" else 0
    assert first.also_moved == 2 * rows * (1536 + 768) + copied
    assert second.also_moved == tokens
    assert op_class(op) is OpClass.GEMM


def test_few_tokens_read_their_experts_alone():
    """Two tokens choose 16 of 128 experts; Triton's tile for few tokens has 16 rows."""
    inputs = [(2, 2048), *EXPERTS, (2, 8), (2, 8)]
    cost = work("vllm::outplace_fused_experts", inputs, [(2, 2048)])
    assert [part[:2] for part in cost.parts] == [(16, 1), (16, 1)]
    assert {part.kernel.name for part in cost.parts} == {"VLLM_FEW_TOKENS"}
    assert cost.bytes_read == 2 * (2 * 2048 + 2 * 2 * 8 + 16 * (1536 * 2048 + 2048 * 768))


@pytest.mark.parametrize("dtype", ["c10::Float8_e4m3fn", "c10::Float8_e4m3fnuz", "signed char"])
def test_experts_in_8_bits_read_the_weights_of_those_that_are_chosen(dtype: str):
    """Two tokens choose 16 of 128 experts, whose weights have a byte each, and scales of blocks."""
    few, chosen, scales = (2, 2048), (2, 8), (128, 12, 16)
    shapes = [few, *EXPERTS, chosen, chosen, scales]
    types = [BF16, dtype, dtype, BF16, BF16, "float"]
    columns = json.dumps([[*s] for s in shapes]), json.dumps([_typed(t) for t in types])
    result = json.dumps([[*few]]), json.dumps([BF16])
    cost = work_of("vllm::outplace_fused_experts", columns, result, json.dumps(()))
    weights = 1536 * 2048 + 2048 * 768
    assert cost.flops == 2 * 16 * weights
    assert cost.bytes_read == 2 * (2 * 2048 + 2 * 2 * 8) + 16 * weights + 4 * 128 * 12 * 16
    assert cost.parts == ()


def _typed(name: str) -> str:
    return name if name.startswith("Tensor") else f"Tensor({name})"


@pytest.mark.parametrize(
    "weights",
    [((128, 1536, 1024), (128, 2048, 768)), ((128, 1536, 2048), (64, 2048, 768))],
    ids=["width", "experts"],
)
def test_experts_whose_weights_do_not_fit_have_bytes_alone(weights):
    inputs = [INPUT, *weights, CHOICES, CHOICES]
    cost = work("vllm::outplace_fused_experts", inputs, [INPUT])
    assert cost.parts == ()
    assert cost.bytes_written == 2 * 1024 * 2048
