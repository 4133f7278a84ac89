"""FLOPs of operators and Triton kernels of libraries, by their full name.

Their base names are not unique: `_flash_attn_forward` has other arguments in FlashAttention 3 than
in version 2. A Triton kernel is `triton::NAME`; a capture without a device records its arguments
in the order of its signature, without those that it only writes, which are its results.

The formulas count what torch's own operators for the same mathematics count, so that a model has
the same FLOPs with a fused kernel as without (`memory_bound`, `gemm`, `attention`). Two kinds
differ: a kernel that computes less than the masked product, and one that recomputes.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod

from onerank.annotate.op_costs import gemm
from onerank.annotate.op_costs.attention import LIBRARY_LAYOUTS, attention_formula
from onerank.annotate.op_costs.cost_record import (
    ComponentGemm,
    Formula,
    PartKernel,
    Work,
    matmul_work,
    vector_work,
)
from onerank.annotate.op_costs.memory_bound import (
    NORM_BACKWARD,
    NORM_FORWARD,
    SOFTMAX_BACKWARD,
    SOFTMAX_FORWARD,
)
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.ir import UNKNOWN


def _per_element(flops: int, written: tuple[int, ...] = (), *, returns: bool = True) -> Formula:
    """Return the formula of a kernel whose FLOPs are proportional to its largest operand.

    Args:
        flops: FLOPs per element of this operand.
        written: positions of arguments that the operator writes and does not read.
        returns: whether it returns tensors; if not, a capture without a device records as its
            results what it writes.
    """

    def formula(call: Call) -> Work | None:
        read = [at for at in range(len(call.inputs)) if at not in written]
        elements = max((call.numel(at) for at in read), default=0)
        results = call.list_bytes(*written) + (call.output_bytes if returns else 0)
        return vector_work(call, flops * elements, call.list_bytes(*read), results)

    return formula


# Sizes of an operand, by its position among the arguments; negative ones count from the results.
_Shapes = Callable[[int], tuple[int, ...]]


def _products(flops: Callable[[_Shapes], int], operand: int = 0) -> Formula:
    """Return the formula of a kernel whose FLOPs are those of matrix products.

    Args:
        flops: computes FLOPs from a function that returns the shape at a position; -1 is the first
            result.
        operand: position of the operand whose dtype the products have.
    """

    def formula(call: Call) -> Work | None:
        def shape(at: int) -> tuple[int, ...]:
            tensor = call.tensor(at) if at >= 0 else call.output(-1 - at)
            if tensor is None:
                raise _AbsentError
            return tensor.shape

        given: Tensor | None = call.tensor(operand)
        try:
            count = flops(shape)
        except (_AbsentError, IndexError, ZeroDivisionError, ValueError):
            return None
        return given and matmul_work(call, given, count)

    return formula


class _AbsentError(Exception):
    """An operand that a formula needs is not recorded."""


# Per element: a*sigmoid(a)*b, and its three gradients with the product recomputed. GELU the same.
_SWIGLU, _SWIGLU_BACKWARD = 3 + 1, 3 + 2 + 6
_GEGLU, _GEGLU_BACKWARD = 4 + 1, 4 + 2 + 8
# Two elements of a head become two sums of two products.
_ROTARY = 3


def _rotary_of_both(call: Call) -> Work | None:
    """Return the work of Liger's rotary embedding, which changes queries and keys in place."""
    return vector_work(call, _ROTARY * (call.numel(0) + call.numel(2)))


def _causal_convolution(times: int, written: tuple[int, ...]) -> Formula:
    """Return the formula of a depthwise convolution of [b, d, l] with a filter [d, w], then SiLU.

    Args:
        times: products per point of the filter: 1 in the forward; 3 in the backward, which computes
            the gradients of input and filter and repeats the forward.
        written: positions of arguments that the operator writes and does not read.
    """
    silu = 3 if times == 1 else 6

    def formula(call: Call) -> Work | None:
        filters = call.tensor(1)
        if filters is None:
            return None
        count = (2 * times * filters.shape[-1] + silu) * call.numel(0)
        read = [at for at in range(len(call.inputs)) if at not in written]
        return vector_work(call, count, call.list_bytes(*read), call.list_bytes(*written))

    return formula


def _chunk(sequence: int, states: tuple[int, ...]) -> int:
    """Return the tokens of a chunk, given its states [b, chunks, ...]."""
    return -(-sequence // states[1])


# Mamba 2 (arXiv:2405.21060): x [b, l, h, p], B and C [b, l, groups, n], states [b, chunks, h, p, n]
# and products of C and B [b, chunks, groups, c, c], of which x meets the lower half.
_MAMBA = {
    "_bmm_chunk_fwd_kernel": _products(lambda shape: 2 * prod(shape(-1)) * shape(0)[-1]),
    "_bmm_chunk_bwd_kernel": _products(lambda shape: 2 * prod(shape(1)) * shape(0)[-1]),
    "_chunk_state_fwd_kernel": _products(lambda shape: 2 * prod(shape(0)) * shape(1)[-1]),
    # Of the states, and of the tokens of the chunk before each token.
    "_chunk_scan_fwd_kernel": _products(
        lambda shape: prod(shape(1)) * (2 * shape(8)[-1] + shape(0)[-1]), operand=1
    ),
    "_chunk_scan_chunk_state_bwd_dx_kernel": _products(
        lambda shape: prod(shape(0)) * (2 * shape(7)[-1] + shape(1)[-1])
    ),
    "_chunk_scan_bwd_dstates_kernel": _products(lambda shape: 2 * prod(shape(0)) * shape(1)[-1]),
    "_chunk_scan_bwd_dc_kernel": _products(lambda shape: 2 * prod(shape(0)) * shape(1)[-1]),
    "_chunk_state_bwd_db_kernel": _products(lambda shape: 2 * prod(shape(0)) * shape(1)[-1]),
    "_chunk_scan_bwd_dcb_kernel": _products(lambda shape: prod(shape(0)) * shape(-1)[-1]),
    # They multiply once more for the gradient of the decay.
    "_chunk_scan_bwd_ddAcs_stable_kernel": _products(lambda shape: prod(shape(0)) * shape(4)[-1]),
    "_chunk_state_bwd_ddAcs_stable_kernel": _products(
        lambda shape: 2 * prod(shape(0)) * shape(1)[-1]
    ),
}

# Linear attention of fla: q and k [b, t, h, K], v and o [b, t, h, V], states [b, chunks, h, K, V].
# A chunk's scores are computed whole, then masked.
_FLA = {
    "chunk_fwd_kernel_h": _products(lambda shape: 2 * prod(shape(0)) * shape(1)[-1]),
    "chunk_bwd_kernel_dh": _products(lambda shape: 2 * prod(shape(0)) * shape(5)[-1]),
    "chunk_fwd_kernel_o": _products(
        lambda shape: (
            2 * prod(shape(0)) * shape(2)[-1]
            + 2 * _chunk(shape(0)[1], shape(3)) * (prod(shape(0)) + prod(shape(2)))
        )
    ),
    "chunk_bwd_kernel_dqkwg": _products(
        lambda shape: (
            4 * prod(shape(0)) * shape(2)[-1]
            + 2 * _chunk(shape(0)[1], shape(5)) * (2 * prod(shape(0)) + prod(shape(2)))
        )
    ),
    "chunk_bwd_kernel_dv": _products(
        lambda shape: (
            2 * prod(shape(0)) * shape(4)[-1]
            + 2 * _chunk(shape(0)[1], shape(6)) * (prod(shape(0)) + prod(shape(4)))
        )
    ),
    # The delta rule also multiplies the states by the keys.
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": _products(
        lambda shape: 4 * prod(shape(0)) * shape(1)[-1]
    ),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": _products(
        lambda shape: 6 * prod(shape(0)) * shape(7)[-1]
    ),
}


def _extension_product(call: Call) -> Work | None:
    """Return the work of a product of grouped_gemm or DeepGEMM; None for unknown shapes.

    a and b are the first operands, d the result: dense [m, k] x [k, n]; rows of a divided among
    groups of b [g, k, n]; or the inner size divided among groups of d [g, m, n]. Layouts differ in
    what is transposed. Each element of a is multiplied by n elements of b. Groups count as equal.
    """
    a, b, d = call.tensor(0), call.tensor(1), call.output()
    if a is None or b is None or d is None or not d.shape or not d.numel:
        return None
    n = d.shape[-1]
    if len(d.shape) == 3:  # the inner size is divided
        groups, m = d.shape[0], d.shape[1]
        k = a.numel // max(1, m * groups)
    else:
        groups = b.shape[0] if len(b.shape) == 3 else 1
        m = -(-d.shape[0] // max(1, groups))
        k = a.numel // d.shape[0]
    kernel = PartKernel.GROUPED if groups > 1 else PartKernel.LIBRARY
    part = ComponentGemm(groups, m, n, k, a.item_bytes, kernel=kernel)
    return matmul_work(call, a, 2 * a.numel * n, parts=(part,))


_DEEP_GEMM = {
    f"deep_gemm::{name}": _extension_product
    for name in (
        *(
            f"{kind}_gemm_{layout}"
            for kind in ("fp8", "fp8_fp4", "bf16", "cublaslt")
            for layout in ("nt", "nn", "tn", "tt")
        ),
        *(
            f"m_grouped_{kind}_gemm_{layout}_contiguous"
            for kind in ("fp8", "fp8_fp4", "bf16")
            for layout in ("nt", "nn")
        ),
        "k_grouped_fp8_gemm_nt_contiguous",
        "k_grouped_fp8_gemm_tn_contiguous",
        "k_grouped_bf16_gemm_tn_contiguous",
    )
}

# Megatron-LM's softmax of unfused attention, in apex and TransformerEngine: the scale is one more
# product. TransformerEngine wraps the functions of its extension in operators (softmax.py).
_SOFTMAX_KINDS = ("scaled_softmax", "scaled_masked_softmax", "scaled_upper_triang_masked_softmax")
_TE_SOFTMAX_KINDS = (*_SOFTMAX_KINDS, "scaled_aligned_causal_masked_softmax")
_SCALED_SOFTMAX = {
    f"{package}::{kind}_{direction}": _per_element(flops + 1)
    for package, forward, backward, kinds in (
        ("te_softmax", "fwd", "bwd", _TE_SOFTMAX_KINDS),
        ("transformer_engine", "forward", "backward", _TE_SOFTMAX_KINDS),
        ("apex", "forward", "backward", (*_SOFTMAX_KINDS, "generic_scaled_masked_softmax")),
    )
    for kind in kinds
    for direction, flops in ((forward, SOFTMAX_FORWARD), (backward, SOFTMAX_BACKWARD))
}


def _product_with_epilogue(call: Call) -> Work | None:
    """Return the work of a product [m, k] x [k, n] of TransformerEngine or apex.

    After the operands come their scales, then what the kernel adds: a bias, GELU's input, the
    result before.
    """
    work = gemm.FORMULAS["_scaled_mm"](call)
    return work and replace(work, bytes_read=call.input_bytes, bytes_written=call.output_bytes)


def _per_result(flops: int) -> Formula:
    """Return the formula of a kernel whose FLOPs are proportional to its first result."""

    def formula(call: Call) -> Work | None:
        result = call.output()
        return result and vector_work(call, flops * result.numel)

    return formula


def _per_first_operand(flops: int) -> Formula:
    """Return the formula of a kernel whose FLOPs are proportional to its first operand.

    The operand may be a list of tensors.
    """

    def formula(call: Call) -> Work:
        return vector_work(call, flops * call.numel(0))

    return formula


# FLOPs per element of activations and of their gradients, as those of torch's operators.
_ACTIVATIONS = {"gelu": (4, 8), "qgelu": (4, 8), "silu": (3, 6), "relu": (1, 1), "srelu": (2, 2)}

# A gate multiplies the activation of the other half; the gradient has two products more, and
# computes the activation again.
_GATES = {"geglu": "gelu", "qgeglu": "qgelu", "swiglu": "silu", "reglu": "relu", "sreglu": "srelu"}

_SUM, _QUANTIZE = 1, 2  # a scale and the largest number

# Fused routers: score function (0 sigmoid, 1 softmax, 2 square root of softplus) -> FLOPs per score
# of the function and of its gradient.
_SCORES = {0: (3, 3), 1: (SOFTMAX_FORWARD, SOFTMAX_BACKWARD), 2: (2, 5)}
# Of the weights' sum and division by it: per chosen expert, and in the gradient.
_NORMALISED, _NORMALISED_BACKWARD = 2, 4


def _fused_router(*, backward: bool) -> Formula:
    """Return the formula of TransformerEngine's router of logits [tokens, experts].

    Arguments: logits or the gradient of the weights, a bias or the choice, experts of a token,
    score function, whether softmax is of all experts, and whether the weights are scaled.
    Choosing counts no FLOPs, as `topk`.
    """

    def formula(call: Call) -> Work | None:
        logits, top_k, function = call.tensor(0), call.value(2), call.value(3)
        if logits is None or not logits.shape or function not in _SCORES or not top_k:
            return None
        chosen = logits.numel // logits.shape[-1] * top_k
        softmax = function == 1
        scored = chosen if softmax and not call.value(4) else logits.numel
        flops = _SCORES[function][backward] * scored
        if not softmax and top_k > 1:
            flops += (_NORMALISED_BACKWARD if backward else _NORMALISED) * chosen
        if not backward and call.tensor(1) is not None:
            flops += logits.numel
        if call.value(5):
            flops += chosen
        return vector_work(call, flops)

    return formula


def _router_scores(*, backward: bool) -> Formula:
    """Return the formula of the scores of all experts, normalised, for an auxiliary loss."""

    def formula(call: Call) -> Work | None:
        function = call.value(1)
        if function not in _SCORES:
            return None
        each = _SCORES[function][backward]
        if function != 1:
            each += _NORMALISED_BACKWARD if backward else _NORMALISED
        return vector_work(call, each * call.numel(0))

    return formula


def _balance_loss(call: Call) -> Work:
    """Return the work of an auxiliary loss: the sum of each expert's scores, times its tokens."""
    return vector_work(call, call.numel(0) + 2 * call.numel(1))


_TE = {
    f"transformer_engine::{name}": formula
    for name, formula in {
        "generic_gemm": _product_with_epilogue,
        "layernorm_fwd": _per_element(NORM_FORWARD),
        "layernorm_bwd": _per_element(NORM_BACKWARD),
        "rmsnorm_fwd": _per_element(NORM_FORWARD),
        "rmsnorm_bwd": _per_element(NORM_BACKWARD),
        "rmsnorm_bwd_add": _per_element(NORM_BACKWARD + 1),
        "quantize": _per_element(_QUANTIZE),
        "dequantize": _per_element(1),
        "compute_amax": _per_element(_QUANTIZE),
        "compute_dbias": _per_element(_SUM),
        "bgrad_quantize": _per_element(_SUM + _QUANTIZE),
        "fp8_transpose": _per_element(0),
        "fused_amax_and_scale_update": _per_element(1),
        **{name: _per_result(forward) for name, (forward, _) in _ACTIVATIONS.items()},
        **{
            f"d{name}": _per_first_operand(backward) for name, (_, backward) in _ACTIVATIONS.items()
        },
        **{
            f"dbias_d{name}": _per_first_operand(backward + _SUM)
            for name, (_, backward) in _ACTIVATIONS.items()
        },
        **{name: _per_result(_ACTIVATIONS[half][0] + 1) for name, half in _GATES.items()},
        **{
            f"d{name}": _per_first_operand(sum(_ACTIVATIONS[half]) + 2)
            for name, half in _GATES.items()
        },
        "fused_rope_forward": _per_result(_ROTARY),
        "fused_rope_backward": _per_result(_ROTARY),
        "fused_topk_with_score_function_fwd": _fused_router(backward=False),
        "fused_topk_with_score_function_bwd": _fused_router(backward=True),
        "fused_score_for_moe_aux_loss_fwd": _router_scores(backward=False),
        "fused_score_for_moe_aux_loss_bwd": _router_scores(backward=True),
        "fused_moe_aux_loss_fwd": _balance_loss,
        "fused_moe_aux_loss_bwd": _per_result(2),
    }.items()
}

# Kernels on lists of tensors; gradients come first. FLOPs as torch's fused optimizers.
_MULTI_TENSOR = {
    f"{package}::multi_tensor_{name}": _per_first_operand(flops)
    for package in ("apex", "transformer_engine")
    for name, flops in (("adam", 14), ("sgd", 6), ("l2norm", 2), ("scale", 1))
}

_APEX = {
    # Functions of the extension, and the operators that apex wraps around them.
    **{
        f"apex::{name.format(kind)}": _per_element(flops)
        for kind in ("layer", "rms")
        for name, flops in (
            ("{}_norm_forward", NORM_FORWARD),
            ("{}_norm_backward", NORM_BACKWARD),
            ("fused_{}_norm_fwd", NORM_FORWARD),
            ("fused_{}_norm_bwd", NORM_BACKWARD),
            ("fused_{}_norm_affine_fwd", NORM_FORWARD),
            ("fused_{}_norm_affine_bwd", NORM_BACKWARD),
        )
    },
    "apex::wgrad_gemm_accum": _product_with_epilogue,
}


# fbgemm_gpu's batched tables, whose backward updates the rows: optimizer -> numbers of its state
# for each row; None: for each element of the row.
_TABLE_STATES: dict[str, int | None] = {
    "sgd": 0,
    "rowwise_adagrad": 1,
    "rowwise_adagrad_with_counter": 3,
    "adam": None,
    "lamb": None,
}

# Positions of arguments, in fbgemm_gpu 1.8. Offsets of columns have one number more than tables.
# Lookup: 1 weights, 6 offsets of columns, 10 indices, 11 offsets of bags. Backward: 0 gradient,
# 2 weights, 7 offsets of columns, 12 indices.

# Radix sort of a looked-up row and its place in the batch: bytes that a pass moves, bits it sorts.
_SORTED_BYTES, _SORTED_BITS = 8 + 4, 8

# A row's gradients are summed, squared, and added to its state and to the row.
_UPDATE = 6


def _table_lookup(call: Call) -> Work | None:
    """Return the work of summing the rows of each bag: a row is read for each index."""
    weights, pooled, tables = call.tensor(1), call.output(0), call.numel(6) - 1
    if weights is None or pooled is None or tables < 1:
        return None
    elements = call.numel(10) * pooled.shape[-1] // tables
    read = elements * weights.item_bytes + call.list_bytes(10, 11)
    return vector_work(call, elements, read, pooled.nbytes)


def _table_update(states: int | None) -> Formula:
    """Return the formula of a table's backward, as if all indices were distinct."""

    def formula(call: Call) -> Work | None:
        gradient, weights, tables = call.tensor(0), call.tensor(2), call.numel(7) - 1
        if gradient is None or weights is None or tables < 1 or not gradient.shape[-1]:
            return None
        rows = call.numel(12)
        elements = rows * gradient.shape[-1] // tables
        bits = (prod(weights.shape) * tables // gradient.shape[-1]).bit_length()
        sorted_bytes = rows * _SORTED_BYTES * -(-bits // _SORTED_BITS)
        state = 4 * (2 * elements if states is None else states * rows)
        changed = elements * weights.item_bytes + state + sorted_bytes
        return vector_work(call, _UPDATE * elements, gradient.nbytes + changed, changed)

    return formula


_TABLES: dict[str, Formula] = (
    {
        # Integers of jagged tensors.
        f"fbgemm::{name}": _per_element(0)
        for name in (
            "permute_2D_sparse_data",
            "asynchronous_complete_cumsum",
            "bounds_check_indices",
        )
    }
    | {
        f"fbgemm::split_embedding_codegen_forward_{kind}_pt2_wrapper": _table_lookup
        for kind in ("weighted", "unweighted")
    }
    | {
        f"fbgemm::split_embedding_backward_codegen_{name}_{kind}_pt2_wrapper": _table_update(states)
        for name, states in _TABLE_STATES.items()
        for kind in ("weighted", "unweighted")
    }
)

# bitsandbytes' optimizers: name of the kind -> FLOPs per parameter, as torch's fused ones.
_UPDATES = {"adam": 14, "momentum": 6}


def _optimizer_update(written: tuple[int, ...], also_read: tuple[int, ...] = ()) -> Formula:
    """Return the formula of an update of one parameter: (kind, gradient, parameter, states, ...).

    Args:
        written: positions of parameter, states and their scales.
        also_read: positions of tables.
    """

    def formula(call: Call) -> Work:
        each = _UPDATES.get(str(call.value(0)))
        flops = UNKNOWN if each is None else each * call.numel(2)
        read = call.list_bytes(1, *written, *also_read)
        return vector_work(call, flops, read, call.list_bytes(*written))

    return formula


_BITSANDBYTES = {
    f"bitsandbytes::{name}": formula
    for name, formula in {
        "int8_vectorwise_quant": _per_element(_QUANTIZE),
        "int8_double_quant": _per_element(2 * _QUANTIZE),
        "int8_vectorwise_dequant": _per_element(1),
        "quantize_4bit": _per_element(_QUANTIZE),
        "quantize_blockwise": _per_element(_QUANTIZE),
        "dequantize_4bit": _per_result(1),
        "dequantize_blockwise": _per_result(1),
        "optimizer_update_32bit": _optimizer_update((2, 3, 4)),
        "optimizer_update_8bit_blockwise": _optimizer_update((2, 3, 4, 14, 15), (12, 13)),
    }.items()
}


# torchao's conversions to numbers with a scale for each 32 of them.
_TORCHAO = {
    f"torchao::{name}": _per_element(_QUANTIZE)
    for name in (
        "triton_to_mxfp8_dim0",
        "triton_to_mxfp8_dim1",
        "mxfp8_quantize",
        "mxfp8_quantize_2d_1x32_cutedsl",
        "mxfp8_quantize_2d_32x1_cutedsl",
        "mxfp8_quantize_3d_cutedsl",
    )
}


def _selective_scan(times: int) -> Formula:
    """Return the formula of Mamba 1's scan of u, delta [b, d, l] with A [d, n] (arXiv:2312.00752).

    For each channel, token and number of the state: exp(delta A), delta B u, the state's update
    and its product with C, 8 FLOPs as in torch's operators (selective_scan_ref). For each channel
    and token: softplus(delta + bias), D u, and the gate with SiLU.

    Args:
        times: 1 for the forward; 3 for the backward, which repeats it and has two gradients of each
            product.
    """

    def formula(call: Call) -> Work | None:
        a = call.tensor(2)
        if a is None:
            return None
        skip, gate, bias = (bool(call.tensor(at)) for at in (5, 6, 7))
        each = 8 * a.shape[-1] + 2 * skip + 4 * gate + 2 * bias
        return vector_work(call, times * each * call.numel(0))

    return formula


def _indexed_dot(call: Call) -> Work:
    """Return the work of the scores of the targets: a row of the vocabulary for each token."""
    rows, table = call.list_bytes(0), call.list_bytes(1)
    return vector_work(call, 2 * call.numel(0), call.input_bytes - table + rows)


_TRITON: dict[str, Formula] = {
    # Norms of Liger, flash_attn and mamba_ssm, fla; the sum with the residual is one more.
    "_rms_norm_forward_kernel": _per_element(NORM_FORWARD),
    "_rms_norm_backward_kernel": _per_element(NORM_BACKWARD),
    "_block_rms_norm_forward_kernel": _per_element(NORM_FORWARD),
    "_block_rms_norm_backward_kernel": _per_element(NORM_BACKWARD),
    "_layer_norm_forward_kernel": _per_element(NORM_FORWARD),
    "_layer_norm_backward_kernel": _per_element(NORM_BACKWARD),
    "_fused_add_rms_norm_forward_kernel": _per_element(NORM_FORWARD + 1),
    "_fused_add_rms_norm_backward_kernel": _per_element(NORM_BACKWARD + 1),
    "_layer_norm_fwd_1pass_kernel": _per_element(NORM_FORWARD),
    "_layer_norm_bwd_kernel": _per_element(NORM_BACKWARD),
    "layer_norm_fwd_kernel": _per_element(NORM_FORWARD),
    "layer_norm_bwd_kernel": _per_element(NORM_BACKWARD),
    # Activations and rotary embeddings of Liger and flash_attn.
    "_swiglu_forward_kernel": _per_element(_SWIGLU),
    "_swiglu_backward_kernel": _per_element(_SWIGLU_BACKWARD),
    "_geglu_tanh_forward_kernel": _per_element(_GEGLU),
    "_geglu_tanh_backward_kernel": _per_element(_GEGLU_BACKWARD),
    "_triton_rope": _rotary_of_both,
    "rotary_kernel": _per_element(_ROTARY),
    # Cross entropy of Liger, which writes the gradient over the logits in the forward, and of
    # flash_attn.
    "liger_cross_entropy_kernel": _per_element(SOFTMAX_FORWARD + SOFTMAX_BACKWARD),
    "element_mul_kernel": _per_element(1),
    "cross_entropy_fwd_kernel": _per_element(SOFTMAX_FORWARD),
    "cross_entropy_bwd_kernel": _per_element(SOFTMAX_BACKWARD),
    # cut_cross_entropy: hidden states [tokens, d] and a vocabulary [v, d]. The backward computes
    # the logits again. It skips blocks of tiny gradients, which depends on values.
    "_cce_lse_forward_kernel": _products(lambda shape: 2 * prod(shape(0)) * shape(1)[0]),
    "_cce_backward_kernel": _products(lambda shape: 6 * prod(shape(0)) * shape(1)[0]),
    "_indexed_neg_dot_forward_kernel": _indexed_dot,
    **_MAMBA,
    **_FLA,
}


def _summed_rows(call: Call) -> Work | None:
    """Return the work of a kernel that sums the rows of a token: those beyond one row each."""
    result = call.output()
    return result and vector_work(call, max(0, call.numel(0) - result.numel))


FORMULAS: dict[str, Formula] = {
    **_TABLES,
    "deep_ep::get_dispatch_layout": _per_element(0),
    "deep_ep::permute_rows": _per_element(0),
    "deep_ep::unpermute_rows": _summed_rows,
    **{f"triton::{name}": formula for name, formula in _TRITON.items()},
    "flash_attn::layer_norm_fwd_impl": _per_element(NORM_FORWARD, (4, 14)),
    "flash_attn::layer_norm_bwd_impl": _per_element(NORM_BACKWARD),
    **{name: attention_formula(layout) for name, layout in LIBRARY_LAYOUTS.items()},
    "grouped_gemm::gmm": _extension_product,
    **_DEEP_GEMM,
    **_TE,
    **_SCALED_SOFTMAX,
    **_APEX,
    **_BITSANDBYTES,
    **_TORCHAO,
    **_MULTI_TENSOR,
    "mamba_ssm::selective_scan_fwd": _selective_scan(1),
    "mamba_ssm::selective_scan_bwd": _selective_scan(3),
    "quack::_rmsnorm_fwd": _per_element(NORM_FORWARD, (2, 4, 5, 7), returns=False),
    "quack::_rmsnorm_bwd": _per_element(NORM_BACKWARD, (4, 5, 6, 8), returns=False),
    "quack::cross_entropy_fwd_out": _per_element(SOFTMAX_FORWARD, (3, 4, 5), returns=False),
    "quack::cross_entropy_bwd_out": _per_element(SOFTMAX_BACKWARD, (4,), returns=False),
    "DaoAILab::_causal_conv1d_fwd_cpp": _causal_convolution(1, (5, 6)),
    "DaoAILab::_causal_conv1d_bwd_cpp": _causal_convolution(3, (7, 8, 9, 10)),
}
"""Full name without overload -> formula."""

NEED_VALUES = frozenset(
    "fwd bwd fused_attn_fwd fused_attn_bwd optimizer_update_32bit optimizer_update_8bit_blockwise "
    "fused_topk_with_score_function_fwd fused_topk_with_score_function_bwd "
    "fused_score_for_moe_aux_loss_fwd fused_score_for_moe_aux_loss_bwd".split()
)
"""Operators, by base name, whose formula reads argument values."""
