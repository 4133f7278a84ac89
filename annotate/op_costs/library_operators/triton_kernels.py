"""Triton kernels of Liger, flash_attn, mamba_ssm, fla and cut_cross_entropy, by name."""

from dataclasses import replace
from math import prod

from onerank.annotate.op_costs.cost_record import (
    ComponentGemm,
    Formula,
    Work,
    matmul_work,
    vector_work,
)
from onerank.annotate.op_costs.library_operators.formulas import (
    ROTARY,
    matrix_products,
    per_element,
)
from onerank.annotate.op_costs.library_operators.sequence_mixing import FLA, MAMBA
from onerank.annotate.op_costs.memory_bound import (
    NORM_BACKWARD,
    NORM_FORWARD,
    SOFTMAX_BACKWARD,
    SOFTMAX_FORWARD,
)
from onerank.annotate.op_costs.operands import Call

# Per element: a*sigmoid(a)*b, and its three gradients with the product recomputed. GELU the same.
_SWIGLU, _SWIGLU_BACKWARD = 3 + 1, 3 + 2 + 6
_GEGLU, _GEGLU_BACKWARD = 4 + 1, 4 + 2 + 8


def _rotary_of_both(call: Call) -> Work | None:
    """Return the work of Liger's rotary embedding, which changes queries and keys in place."""
    return vector_work(call, ROTARY * (call.numel(0) + call.numel(2)))


# SM cycles of a row and of each of its elements: a block reads a row twice and writes it, and an SM
# has two. Six sizes on an H200 are 1 to 8% off (2026-11-28-hopper-kernels-h200).
_LIGER_ROW, _LIGER_ELEMENT = 2475.0, 0.381


def _liger_cross_entropy(call: Call) -> Work | None:
    """Return the work of Liger's cross entropy, which writes the gradient over the logits."""
    logits = call.tensor(0)
    if logits is None or not logits.shape or not logits.shape[-1]:
        return None
    work = per_element(SOFTMAX_FORWARD + SOFTMAX_BACKWARD)(call)
    rows = logits.numel // logits.shape[-1]
    cycles = rows * _LIGER_ROW + logits.numel * _LIGER_ELEMENT
    return replace(work, cycles=cycles) if work else None


# Time of cut_cross_entropy's forward over that of a product of its sizes, for short and long hidden
# states: each logit also has an exponential. Three sizes on an H200, 1 to 5% off
# (2026-11-28-hopper-kernels-h200).
_CUT_SLOWER, _CUT_EXPONENTIAL = 1.09, 340


def _cut_cross_entropy(call: Call) -> Work | None:
    """Return the work of the logits [tokens, v] of hidden states [tokens, d], which it sums."""
    hidden, vocabulary = call.tensor(0), call.tensor(1)
    if hidden is None or vocabulary is None or len(hidden.shape) != 2 or not hidden.shape[1]:
        return None
    tokens, d = hidden.shape
    v = vocabulary.shape[0]
    slower = _CUT_SLOWER + _CUT_EXPONENTIAL / d
    part = ComponentGemm(1, tokens, v, d, hidden.item_bytes, times=slower)
    return matmul_work(call, hidden, 2 * tokens * v * d, parts=(part,))


def _indexed_dot(call: Call) -> Work:
    """Return the work of the scores of the targets: a row of the vocabulary for each token."""
    rows, table = call.list_bytes(0), call.list_bytes(1)
    return vector_work(call, 2 * call.numel(0), call.input_bytes - table + rows)


TRITON: dict[str, Formula] = {
    # Norms of Liger, flash_attn and mamba_ssm, fla; the sum with the residual is one more.
    "_rms_norm_forward_kernel": per_element(NORM_FORWARD),
    "_rms_norm_backward_kernel": per_element(NORM_BACKWARD),
    "_block_rms_norm_forward_kernel": per_element(NORM_FORWARD),
    "_block_rms_norm_backward_kernel": per_element(NORM_BACKWARD),
    "_layer_norm_forward_kernel": per_element(NORM_FORWARD),
    "_layer_norm_backward_kernel": per_element(NORM_BACKWARD),
    "_fused_add_rms_norm_forward_kernel": per_element(NORM_FORWARD + 1),
    "_fused_add_rms_norm_backward_kernel": per_element(NORM_BACKWARD + 1),
    "_layer_norm_fwd_1pass_kernel": per_element(NORM_FORWARD),
    "_layer_norm_bwd_kernel": per_element(NORM_BACKWARD),
    "layer_norm_fwd_kernel": per_element(NORM_FORWARD),
    "layer_norm_bwd_kernel": per_element(NORM_BACKWARD),
    # Activations and rotary embeddings of Liger and flash_attn.
    "_swiglu_forward_kernel": per_element(_SWIGLU),
    "_swiglu_backward_kernel": per_element(_SWIGLU_BACKWARD),
    "_geglu_tanh_forward_kernel": per_element(_GEGLU),
    "_geglu_tanh_backward_kernel": per_element(_GEGLU_BACKWARD),
    "_triton_rope": _rotary_of_both,
    "rotary_kernel": per_element(ROTARY),
    # Cross entropy of Liger, which writes the gradient over the logits in the forward, and of
    # flash_attn.
    "liger_cross_entropy_kernel": _liger_cross_entropy,
    "element_mul_kernel": per_element(1),
    "cross_entropy_fwd_kernel": per_element(SOFTMAX_FORWARD),
    "cross_entropy_bwd_kernel": per_element(SOFTMAX_BACKWARD),
    # cut_cross_entropy: hidden states [tokens, d] and a vocabulary [v, d]. The backward computes
    # the logits again. It skips blocks of tiny gradients, which depends on values.
    "_cce_lse_forward_kernel": _cut_cross_entropy,
    "_cce_backward_kernel": matrix_products(lambda shape: 6 * prod(shape(0)) * shape(1)[0]),
    "_indexed_neg_dot_forward_kernel": _indexed_dot,
    **MAMBA,
    **FLA,
}
