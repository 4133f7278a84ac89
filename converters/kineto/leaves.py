"""Which operators of a CPU trace are its compute nodes.

On a CPU there are no kernels: the leaf operator is the unit of work. Some operators do their
work themselves but call helpers first (`aten::addmm` copies its bias), so a plain leaf rule
would keep the helper and lose the product: these count as leaves and absorb what they call.
Views and allocations do no work and are no nodes.
"""

from onerank.converters.kineto.host import HostTimeline

_WHOLE = frozenset(
    "mm addmm bmm baddbmm _addmm_activation addbmm addmv mv dot _grouped_mm _scaled_mm "
    "convolution_overrideable mkldnn_convolution _slow_conv2d_forward _slow_conv2d_backward "
    "thnn_conv2d convolution_backward mkldnn_convolution_backward "
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward "
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data "
    "embedding_dense_backward nll_loss_forward nll_loss_backward cat index index_put_ "
    "_fused_adamw_ _fused_adam_ _fused_sgd_".split()
)
_FREE = frozenset(
    "view _unsafe_view _reshape_alias reshape expand expand_as as_strided as_strided_ alias t "
    "transpose permute swapaxes movedim squeeze squeeze_ unsqueeze unsqueeze_ select slice narrow "
    "split split_with_sizes chunk unbind unflatten flatten detach detach_ view_as unfold diagonal "
    "empty empty_like empty_strided new_empty new_empty_strided resize_ resize_as_ set_ lift_fresh "
    "result_type is_nonzero _local_scalar_dense item to contiguous requires_grad_ _to_copy "
    "_version data record_stream is_same_size broadcast_tensors numpy_T mT lift conj resolve_conj "
    "resolve_neg view_as_real view_as_complex real imag chunk_cat "
    "_has_compatible_shallow_copy_type "
    "output_nr can_cast promote_types size stride".split()
)
_NOT_WORK = ("autograd::", "torch::", "c10d::", "profiler::", "onerank::")


def leaves(timeline: HostTimeline) -> list[int]:
    """Return the indices of the compute operators, in call order per thread."""
    found: list[int] = []
    below: list[bool] = [False] * len(timeline)  # whether a callee is a compute operator
    absorbed: list[bool] = [False] * len(timeline)
    for op in timeline:  # parents come before callees
        parent = op.parent
        whole = parent >= 0 and _base_name(timeline.ops[parent].name) in _WHOLE
        absorbed[op.index] = parent >= 0 and (absorbed[parent] or whole)
    for op in reversed(timeline.ops):
        works = op.is_operator and "::" in op.name and not op.name.startswith(_NOT_WORK)
        base = _base_name(op.name)
        is_leaf = works and (base in _WHOLE or (base not in _FREE and not below[op.index]))
        if is_leaf and not absorbed[op.index] and op.in_mark < 0:
            found.append(op.index)
        if op.parent >= 0 and (is_leaf or below[op.index]):
            below[op.parent] = True
    return found[::-1]


def _base_name(name: str) -> str:
    return name.removeprefix("aten::")
