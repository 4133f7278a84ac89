"""FLOPs of operators and Triton kernels of libraries, by their full name.

Their base names are not unique: `_flash_attn_forward` has other arguments in FlashAttention 3 than
in version 2. A Triton kernel is `triton::NAME`; a capture without a device records its arguments
in the order of its signature, without those that it only writes, which are its results.

The formulas count what torch's own operators for the same mathematics count, so that a model has
the same FLOPs with a fused kernel as without (`memory_bound`, `gemm`, `attention`). Two kinds
differ: a kernel that computes less than the masked product, and one that recomputes.
"""

from onerank.annotate.op_costs.attention import LIBRARY_LAYOUTS, attention_formula
from onerank.annotate.op_costs.cost_record import Formula, Work, vector_work
from onerank.annotate.op_costs.library_operators.embedding_tables import EMBEDDING_TABLES
from onerank.annotate.op_costs.library_operators.formulas import per_element
from onerank.annotate.op_costs.library_operators.low_precision import (
    BITSANDBYTES,
    GEMM_LIBRARIES,
    TORCHAO,
)
from onerank.annotate.op_costs.library_operators.sequence_mixing import (
    causal_convolution,
    selective_scan,
)
from onerank.annotate.op_costs.library_operators.transformer_engine import (
    APEX,
    MULTI_TENSOR,
    SCALED_SOFTMAX,
    TRANSFORMER_ENGINE,
)
from onerank.annotate.op_costs.library_operators.triton_kernels import TRITON
from onerank.annotate.op_costs.memory_bound import (
    NORM_BACKWARD,
    NORM_FORWARD,
    SOFTMAX_BACKWARD,
    SOFTMAX_FORWARD,
)
from onerank.annotate.op_costs.operands import Call


def _summed_rows(call: Call) -> Work | None:
    """Return the work of a kernel that sums the rows of a token: those beyond one row each."""
    result = call.output()
    return vector_work(call, max(0, call.numel(0) - result.numel)) if result else None


FORMULAS: dict[str, Formula] = {
    **EMBEDDING_TABLES,
    "deep_ep::get_dispatch_layout": per_element(0),
    "deep_ep::permute_rows": per_element(0),
    "deep_ep::unpermute_rows": _summed_rows,
    **{f"triton::{name}": formula for name, formula in TRITON.items()},
    "flash_attn::layer_norm_fwd_impl": per_element(NORM_FORWARD, (4, 14)),
    "flash_attn::layer_norm_bwd_impl": per_element(NORM_BACKWARD),
    **{name: attention_formula(layout) for name, layout in LIBRARY_LAYOUTS.items()},
    **GEMM_LIBRARIES,
    **TRANSFORMER_ENGINE,
    **SCALED_SOFTMAX,
    **APEX,
    **BITSANDBYTES,
    **TORCHAO,
    **MULTI_TENSOR,
    "mamba_ssm::selective_scan_fwd": selective_scan(1),
    "mamba_ssm::selective_scan_bwd": selective_scan(3),
    "quack::_rmsnorm_fwd": per_element(NORM_FORWARD, (2, 4, 5, 7), returns=False),
    "quack::_rmsnorm_bwd": per_element(NORM_BACKWARD, (4, 5, 6, 8), returns=False),
    "quack::cross_entropy_fwd_out": per_element(SOFTMAX_FORWARD, (3, 4, 5), returns=False),
    "quack::cross_entropy_bwd_out": per_element(SOFTMAX_BACKWARD, (4,), returns=False),
    "DaoAILab::_causal_conv1d_fwd_cpp": causal_convolution(1, (5, 6)),
    "DaoAILab::_causal_conv1d_bwd_cpp": causal_convolution(3, (7, 8, 9, 10)),
}
"""Full name without overload -> formula."""

NEED_VALUES = frozenset(
    f"{library}::{name}"
    for library, names in (
        ("flash_attn_3", "fwd bwd"),
        ("bitsandbytes", "optimizer_update_32bit optimizer_update_8bit_blockwise"),
        (
            "transformer_engine",
            "fused_attn_fwd fused_attn_bwd fused_topk_with_score_function_fwd "
            "fused_topk_with_score_function_bwd fused_score_for_moe_aux_loss_fwd "
            "fused_score_for_moe_aux_loss_bwd",
        ),
    )
    for name in names.split()
)
"""Operators, by full name without overload, whose formula reads argument values."""
