"""Operators of TransformerEngine and apex: norms, products, softmax, routers, optimizers."""

from dataclasses import replace

from onerank.annotate.op_costs import gemm
from onerank.annotate.op_costs.cost_record import Formula, Work, vector_work
from onerank.annotate.op_costs.library_operators.formulas import (
    QUANTIZE,
    ROTARY,
    SUM,
    per_element,
    per_first_operand,
    per_result,
)
from onerank.annotate.op_costs.memory_bound import (
    NORM_BACKWARD,
    NORM_FORWARD,
    SOFTMAX_BACKWARD,
    SOFTMAX_FORWARD,
)
from onerank.annotate.op_costs.operands import Call

# Megatron-LM's softmax of unfused attention, in apex and TransformerEngine: the scale is one more
# product. TransformerEngine wraps the functions of its extension in operators (softmax.py).
_SOFTMAX_KINDS = ("scaled_softmax", "scaled_masked_softmax", "scaled_upper_triang_masked_softmax")
_TE_SOFTMAX_KINDS = (*_SOFTMAX_KINDS, "scaled_aligned_causal_masked_softmax")
SCALED_SOFTMAX = {
    f"{package}::{kind}_{direction}": per_element(flops + 1)
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


# FLOPs per element of activations and of their gradients, as those of torch's operators.
_ACTIVATIONS = {"gelu": (4, 8), "qgelu": (4, 8), "silu": (3, 6), "relu": (1, 1), "srelu": (2, 2)}

# A gate multiplies the activation of the other half; the gradient has two products more, and
# computes the activation again.
_GATES = {"geglu": "gelu", "qgeglu": "qgelu", "swiglu": "silu", "reglu": "relu", "sreglu": "srelu"}

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


TRANSFORMER_ENGINE = {
    f"transformer_engine::{name}": formula
    for name, formula in {
        "generic_gemm": _product_with_epilogue,
        "layernorm_fwd": per_element(NORM_FORWARD),
        "layernorm_bwd": per_element(NORM_BACKWARD),
        "rmsnorm_fwd": per_element(NORM_FORWARD),
        "rmsnorm_bwd": per_element(NORM_BACKWARD),
        "rmsnorm_bwd_add": per_element(NORM_BACKWARD + 1),
        "quantize": per_element(QUANTIZE),
        "dequantize": per_element(1),
        "compute_amax": per_element(QUANTIZE),
        "compute_dbias": per_element(SUM),
        "bgrad_quantize": per_element(SUM + QUANTIZE),
        "fp8_transpose": per_element(0),
        "fused_amax_and_scale_update": per_element(1),
        **{name: per_result(forward) for name, (forward, _) in _ACTIVATIONS.items()},
        **{f"d{name}": per_first_operand(backward) for name, (_, backward) in _ACTIVATIONS.items()},
        **{
            f"dbias_d{name}": per_first_operand(backward + SUM)
            for name, (_, backward) in _ACTIVATIONS.items()
        },
        **{name: per_result(_ACTIVATIONS[half][0] + 1) for name, half in _GATES.items()},
        **{
            f"d{name}": per_first_operand(sum(_ACTIVATIONS[half]) + 2)
            for name, half in _GATES.items()
        },
        "fused_rope_forward": per_result(ROTARY),
        "fused_rope_backward": per_result(ROTARY),
        "fused_topk_with_score_function_fwd": _fused_router(backward=False),
        "fused_topk_with_score_function_bwd": _fused_router(backward=True),
        "fused_score_for_moe_aux_loss_fwd": _router_scores(backward=False),
        "fused_score_for_moe_aux_loss_bwd": _router_scores(backward=True),
        "fused_moe_aux_loss_fwd": _balance_loss,
        "fused_moe_aux_loss_bwd": per_result(2),
    }.items()
}

# Kernels on lists of tensors; gradients come first. FLOPs as torch's fused optimizers.
MULTI_TENSOR = {
    f"{package}::multi_tensor_{name}": per_first_operand(flops)
    for package in ("apex", "transformer_engine")
    for name, flops in (("adam", 14), ("sgd", 6), ("l2norm", 2), ("scale", 1))
}

APEX = {
    # Functions of the extension, and the operators that apex wraps around them.
    **{
        f"apex::{name.format(kind)}": per_element(flops)
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
