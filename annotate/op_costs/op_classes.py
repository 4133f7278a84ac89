"""The class of work of an operator or kernel: a fixed vocabulary, and the tables that assign it.

`op_class` returns the class of one node, `classify` those of a graph. The operator's name decides.
The kernel's name is read only if there is no operator, or if no table has it (custom or compiled
operators). Anything else is UNKNOWN, and counted. A class also decides how long the shortest kernel
takes: `floor_share_of`.
"""

import re
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.ir import Graph, Kind
from onerank.ir.arrays import F64, U8, Mask, deduplicate


class OpClass(Enum):
    """Classes of work. Reports show the values."""

    GEMM = "gemm"
    ATTENTION = "attention"
    NORM = "norm"
    SOFTMAX = "softmax"
    LOSS = "loss"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"
    COPY = "copy"
    MEMSET = "memset"
    RANDOM = "random"
    INDEX = "scan/sort/index"
    DECOMPOSITION = "decomposition"
    FFT = "fft"
    COMMUNICATION = "communication"
    NOTHING = "launches nothing"
    """Views, allocation, queries and annotations: no kernel on a GPU."""
    UNKNOWN = "unknown"


CLASSES = tuple(OpClass)
"""Members in the order of the codes that `classify` returns."""

_OPERATORS = {
    OpClass.GEMM: """
        mm addmm bmm baddbmm addbmm matmul linear mv addmv dot vdot inner ger addr einsum tensordot
        _addmm_activation _scaled_mm _scaled_mm_v2 fp8_scaled_mm cutlass_scaled_mm
        cutlass_scaled_fp4_mm _grouped_mm _scaled_grouped_mm _int_mm linear_backward
        inplace_fused_experts outplace_fused_experts fused_moe
        moe_forward moe_forward_shared moe_forward_piecewise_cuda_graph_impl
        mkldnn_linear weight_packed_linear convolution _convolution convolution_backward
        cudnn_convolution
        cudnn_convolution_transpose cudnn_convolution_relu miopen_convolution mkldnn_convolution
        convolution_overrideable convolution_backward_overrideable _slow_conv2d_forward
        slow_conv3d_forward _conv_depthwise2d conv_depthwise3d conv1d conv2d conv3d
        _mixed_dtypes_linear _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int8pack_mm
        gemm_4bit gemv_4bit qbytes_mm int8_linear_matmul int8_scaled_mm int8_mixed_scaled_mm
        mkldnn_rnn_layer
        mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward _trilinear
        thnn_conv2d slow_conv_transpose2d slow_conv_transpose3d slow_conv_dilated2d
        slow_conv_dilated3d _slow_conv2d_backward mkldnn_convolution_backward
        cudnn_convolution_add_relu
        _cce_lse_forward_kernel _cce_backward_kernel
        _bmm_chunk_fwd_kernel _bmm_chunk_bwd_kernel _chunk_state_fwd_kernel
        _chunk_state_bwd_db_kernel _chunk_state_bwd_ddAcs_stable_kernel _chunk_scan_fwd_kernel
        _chunk_scan_bwd_dstates_kernel _chunk_scan_bwd_dc_kernel _chunk_scan_bwd_dcb_kernel
        _chunk_scan_bwd_ddAcs_stable_kernel _chunk_scan_chunk_state_bwd_dx_kernel
        gmm fp8_gemm_nt fp8_gemm_nn fp8_gemm_tn fp8_gemm_tt fp8_fp4_gemm_nt fp8_fp4_gemm_nn
        fp8_fp4_gemm_tn fp8_fp4_gemm_tt bf16_gemm_nt bf16_gemm_nn bf16_gemm_tn bf16_gemm_tt
        cublaslt_gemm_nt cublaslt_gemm_nn cublaslt_gemm_tn cublaslt_gemm_tt
        m_grouped_fp8_gemm_nt_contiguous m_grouped_fp8_gemm_nn_contiguous
        m_grouped_fp8_fp4_gemm_nt_contiguous m_grouped_fp8_fp4_gemm_nn_contiguous
        m_grouped_bf16_gemm_nt_contiguous m_grouped_bf16_gemm_nn_contiguous
        m_grouped_fp8_gemm_nt_masked m_grouped_fp8_fp4_gemm_nt_masked
        m_grouped_bf16_gemm_nt_masked k_grouped_fp8_gemm_nt_contiguous
        k_grouped_fp8_gemm_tn_contiguous k_grouped_bf16_gemm_tn_contiguous
        chunk_fwd_kernel_h chunk_fwd_kernel_o chunk_bwd_kernel_dh chunk_bwd_kernel_dqkwg
        chunk_bwd_kernel_dv chunk_gated_delta_rule_fwd_kernel_h_blockdim64
        chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64 generic_gemm wgrad_gemm_accum
        chunk_gated_delta_rule mamba_chunk_scan lightning_attention index_scores
        linalg_solve_triangular""",
    OpClass.ATTENTION: """
        scaled_dot_product_attention _scaled_dot_product_attention_math
        unified_attention unified_attention_with_output unified_mla_attention
        unified_mla_attention_with_output cpu_attention_with_kv_cache latent_attention
        sparse_latent_attention
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable
        _scaled_dot_product_fused_attention_overrideable_backward
        _flash_attention_forward _flash_attention_backward _efficient_attention_forward
        _efficient_attention_backward _cudnn_attention_forward _cudnn_attention_backward
        _native_multi_head_attention flex_attention flex_attention_backward
        _flash_attn_forward _flash_attn_backward _flash_attn_varlen_forward
        _flash_attn_varlen_backward fused_attn_fwd fused_attn_bwd
        flash_attn_3::fwd flash_attn_3::bwd""",
    OpClass.NORM: """
        layer_norm native_layer_norm native_layer_norm_backward rms_norm _fused_rms_norm
        _fused_rms_norm_backward batch_norm native_batch_norm native_batch_norm_backward
        cudnn_batch_norm cudnn_batch_norm_backward _batch_norm_with_update batch_norm_backward
        miopen_batch_norm miopen_batch_norm_backward
        _native_batch_norm_legit _batch_norm_impl_index group_norm native_group_norm
        native_group_norm_backward instance_norm batch_norm_stats batch_norm_elemt
        batch_norm_gather_stats batch_norm_gather_stats_with_counts
        batch_norm_backward_reduce batch_norm_backward_elemt
        _native_batch_norm_legit_no_training _native_batch_norm_legit_functional
        layer_norm_fwd_impl layer_norm_bwd_impl _rmsnorm_fwd _rmsnorm_bwd
        _rms_norm_forward_kernel _rms_norm_backward_kernel _block_rms_norm_forward_kernel
        _block_rms_norm_backward_kernel _layer_norm_forward_kernel _layer_norm_backward_kernel
        _fused_add_rms_norm_forward_kernel _fused_add_rms_norm_backward_kernel
        _layer_norm_fwd_1pass_kernel _layer_norm_bwd_kernel layer_norm_fwd_kernel
        layer_norm_bwd_kernel layernorm_fwd layernorm_bwd rmsnorm_fwd rmsnorm_bwd rmsnorm_bwd_add
        layer_norm_forward layer_norm_backward rms_norm_forward rms_norm_backward
        fused_layer_norm_fwd fused_layer_norm_bwd fused_rms_norm_fwd fused_rms_norm_bwd
        fused_layer_norm_affine_fwd fused_layer_norm_affine_bwd fused_rms_norm_affine_fwd
        fused_rms_norm_affine_bwd""",
    OpClass.SOFTMAX: """
        softmax log_softmax _softmax _log_softmax _softmax_backward_data
        _log_softmax_backward_data _safe_softmax _masked_softmax _masked_softmax_backward
        scaled_softmax_fwd scaled_softmax_bwd scaled_masked_softmax_fwd scaled_masked_softmax_bwd
        scaled_upper_triang_masked_softmax_fwd scaled_upper_triang_masked_softmax_bwd
        scaled_aligned_causal_masked_softmax_fwd scaled_aligned_causal_masked_softmax_bwd
        scaled_softmax_forward scaled_softmax_backward scaled_masked_softmax_forward
        scaled_masked_softmax_backward scaled_upper_triang_masked_softmax_forward
        scaled_upper_triang_masked_softmax_backward scaled_aligned_causal_masked_softmax_forward
        scaled_aligned_causal_masked_softmax_backward generic_scaled_masked_softmax_forward
        generic_scaled_masked_softmax_backward fused_topk_with_score_function_fwd
        fused_topk_with_score_function_bwd fused_score_for_moe_aux_loss_fwd
        fused_score_for_moe_aux_loss_bwd""",
    OpClass.LOSS: """
        nll_loss nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
        cross_entropy_loss mse_loss mse_loss_backward l1_loss binary_cross_entropy
        binary_cross_entropy_backward binary_cross_entropy_with_logits smooth_l1_loss
        smooth_l1_loss_backward huber_loss huber_loss_backward kl_div _ctc_loss
        _ctc_loss_backward _cudnn_ctc_loss
        multi_margin_loss multi_margin_loss_backward soft_margin_loss soft_margin_loss_backward
        multilabel_margin_loss_forward multilabel_margin_loss_backward
        liger_cross_entropy_kernel cross_entropy_fwd_kernel cross_entropy_bwd_kernel
        cross_entropy_fwd_out cross_entropy_bwd_out _indexed_neg_dot_forward_kernel""",
    OpClass.ELEMENTWISE: """
        fused_elementwise
        add sub rsub mul div true_divide floor_divide remainder fmod neg abs sign reciprocal square
        sqrt rsqrt pow float_power exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan
        atan2 sinh cosh tanh sigmoid logit erf erfc erfinv lgamma digamma ceil floor round trunc
        frac relu relu6 leaky_relu elu celu selu gelu silu mish hardswish hardsigmoid hardtanh
        softplus glu prelu threshold clamp clamp_min clamp_max clip lerp addcmul addcdiv where
        maximum minimum fmax fmin eq ne lt le gt ge logical_and logical_or logical_not logical_xor
        bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift bitwise_right_shift
        __and__ __or__ __xor__ __lshift__ __rshift__ isnan isinf isfinite isin nan_to_num
        masked_fill tril triu hypot copysign xlogy heaviside sgn conj_physical complex polar real
        imag angle cross sinc logaddexp log_sigmoid_forward log_sigmoid_backward
        gelu_backward silu_backward mish_backward glu_backward threshold_backward tanh_backward
        sigmoid_backward logit_backward leaky_relu_backward elu_backward softplus_backward
        hardswish_backward hardtanh_backward hardsigmoid_backward _prelu_kernel
        _prelu_kernel_backward _weight_norm_interface _weight_norm_interface_backward
        _amp_update_scale_ _assert_async
        native_dropout_backward _masked_scale avg_pool2d avg_pool2d_backward
        max_pool2d_with_indices max_pool2d_with_indices_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward
        upsample_bilinear2d upsample_bilinear2d_backward
        upsample_linear1d upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward
        upsample_nearest3d upsample_nearest3d_backward upsample_bicubic2d
        upsample_bicubic2d_backward upsample_trilinear3d
        upsample_trilinear3d_backward _upsample_nearest_exact2d
        _upsample_nearest_exact2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
        _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward grid_sampler_2d
        grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
        avg_pool3d avg_pool3d_backward max_pool3d_with_indices max_pool3d_with_indices_backward
        adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d
        adaptive_max_pool3d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
        _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell
        _thnn_fused_gru_cell_backward isneginf isposinf isclose asinh acosh atanh softshrink
        softshrink_backward hardshrink hardshrink_backward logaddexp2 signbit positive
        roi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align
        _ps_roi_align_backward ps_roi_pool _ps_roi_pool_backward
        _swiglu_forward_kernel _swiglu_backward_kernel _geglu_tanh_forward_kernel
        _geglu_tanh_backward_kernel _triton_rope rotary_kernel element_mul_kernel
        _causal_conv1d_fwd_cpp _causal_conv1d_bwd_cpp selective_scan_fwd selective_scan_bwd
        causal_conv1d causal_conv1d_update recurrent_gated_delta_rule selective_state_update
        selective_scan lightning_attention_update linear_recurrence
        store_index_keys scale_index_queries
        fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
        _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine
        _fake_quantize_learnable_per_tensor_affine_backward
        _fake_quantize_learnable_per_channel_affine_backward
        quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic
        igamma igammac i0 polygamma mvlgamma gcd lcm frexp nextafter ldexp renorm
        special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
        special_ndtri special_xlog1py special_zeta rrelu_with_noise_backward
        max_unpool2d max_unpool3d fractional_max_pool2d fractional_max_pool2d_backward
        fractional_max_pool3d fractional_max_pool3d_backward affine_grid_generator
        cudnn_affine_grid_generator cudnn_affine_grid_generator_backward cudnn_grid_sampler
        cudnn_grid_sampler_backward _cdist_forward _cdist_backward _pdist_forward _pdist_backward
        linalg_cross _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
        _upsample_nearest_exact3d _upsample_nearest_exact3d_backward
        quantize dequantize bgrad_quantize multi_tensor_scale fused_rope_forward
        fused_rope_backward qgelu srelu geglu qgeglu reglu sreglu swiglu clamped_swiglu situglu
        dgelu dqgelu drelu dsrelu dsilu dglu dgeglu dqgeglu dreglu dsreglu dswiglu clamped_dswiglu
        triton_to_mxfp8_dim0 triton_to_mxfp8_dim1 mxfp8_quantize mxfp8_quantize_2d_1x32_cutedsl
        mxfp8_quantize_2d_32x1_cutedsl mxfp8_quantize_3d_cutedsl
        int8_vectorwise_quant int8_double_quant int8_vectorwise_dequant quantize_4bit
        quantize_blockwise dequantize_4bit dequantize_blockwise
        dsituglu dbias_dgelu dbias_dqgelu dbias_drelu dbias_dsrelu dbias_dsilu""",
    OpClass.REDUCTION: """
        fused_reduction
        sum nansum mean prod max min amax amin aminmax argmax argmin norm linalg_vector_norm
        linalg_norm var var_mean std std_mean any all logsumexp count_nonzero median nanmedian
        equal allclose _is_all_true trace
        _is_any_true nanmean _aminmax segment_reduce _segment_reduce_backward
        compute_amax compute_dbias
        multi_tensor_l2norm fused_amax_and_scale_update fused_moe_aux_loss_fwd
        fused_moe_aux_loss_bwd""",
    OpClass.EMBEDDING: """
        embedding embedding_dense_backward embedding_backward embedding_renorm_ _embedding_bag
        _embedding_bag_dense_backward _embedding_bag_backward
        _embedding_bag_per_sample_weights_backward _embedding_bag_forward_only""",
    OpClass.OPTIMIZER: """
        _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_
        _amp_foreach_non_finite_check_and_unscale_ multi_tensor_adam multi_tensor_sgd
        optimizer_update_32bit optimizer_update_8bit_blockwise""",
    OpClass.COPY: """
        copy copy_ _to_copy clone cat concat stack repeat repeat_interleave flip roll
        constant_pad_nd pad replication_pad2d reflection_pad2d _pin_memory _copy_from
        im2col col2im pixel_shuffle select_backward slice_backward unfold_backward
        _pack_padded_sequence _pack_padded_sequence_backward _pad_packed_sequence pad_sequence
        split_with_sizes_copy chunk_cat _chunk_cat _local_scalar_dense slice_scatter
        select_scatter as_strided_scatter diagonal_scatter _reshape_copy view_copy permute_copy
        transpose_copy expand_copy copy_bucket_to_grad flatten_dense_tensors
        unflatten_dense_tensors reshape_and_cache reshape_and_cache_flash concat_and_cache_mla
        replication_pad1d replication_pad3d replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward reflection_pad1d reflection_pad3d
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        pixel_unshuffle native_channel_shuffle channel_shuffle tile fp8_transpose permute_rows
        lu_unpack diag_embed diagonal_copy trace_backward unbind_copy unfold_copy alias_copy
        _jagged_to_padded_dense_forward _padded_dense_to_jagged_forward""",
    OpClass.MEMSET: """
        fill fill_ zero zero_ zeros ones full zeros_like ones_like full_like new_zeros new_ones
        new_full eye
        scalar_tensor""",
    OpClass.RANDOM: """
        normal normal_ uniform uniform_ bernoulli bernoulli_ random random_ rand randn randint
        rand_like randn_like randint_like randperm exponential_ log_normal_ cauchy_ geometric_
        multinomial dropout native_dropout poisson rrelu_with_noise _fused_dropout trunc_normal_
        _standard_gamma _standard_gamma_grad _sample_dirichlet _dirichlet_grad binomial
        philox_rand""",
    OpClass.INDEX: """
        largest_scores
        index index_put _index_put_impl_ _unsafe_index _unsafe_index_put index_select index_add
        index_copy index_fill index_reduce gather scatter scatter_add scatter_reduce masked_select
        masked_scatter take take_along_dim put nonzero nonzero_static argwhere sort argsort topk
        kthvalue mode cumsum cumprod cummax cummin _cummax_helper _cummin_helper logcumsumexp
        _logcumsumexp unique _unique2 unique_consecutive unique_dim searchsorted bucketize
        bincount histc one_hot arange range linspace logspace tril_indices triu_indices meshgrid
        _index_put_impl
        masked_select_backward gather_backward _grouped_mm_offsets
        masked_scatter_backward index_select_backward value_selecting_reduction_backward nms
        get_dispatch_layout unpermute_rows _coalesce
        permute_2D_sparse_data asynchronous_complete_cumsum bounds_check_indices""",
    OpClass.DECOMPOSITION: """
        _linalg_svd _linalg_eigh linalg_qr geqrf linalg_householder_product linalg_cholesky_ex
        cholesky_inverse _cholesky_solve_helper linalg_lu_factor_ex linalg_lu linalg_lu_solve
        _linalg_det _linalg_slogdet linalg_inv_ex _linalg_solve_ex linalg_lstsq linalg_matrix_exp
        linalg_eig _linalg_eigvals linalg_eigvals ormqr linalg_ldl_factor_ex linalg_ldl_solve""",
    OpClass.FFT: "_fft_c2c _fft_r2c _fft_c2r",
    OpClass.NOTHING: """
        view _unsafe_view reshape _reshape_alias view_as resolve_conj resolve_neg alias detach
        detach_ expand expand_as as_strided as_strided_ transpose t permute movedim swapaxes select
        narrow slice split split_with_sizes unsafe_split unsafe_chunk chunk unbind unsqueeze
        squeeze unflatten flatten ravel diagonal unfold numpy_T mT mH adjoint matrix_H
        view_as_real
        view_as_complex _conj _neg_view transpose_ t_ squeeze_ unsqueeze_ empty empty_like
        empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_ set_
        _resize_output_ lift lift_fresh result_type can_cast is_nonzero is_same_size size stride
        numel dim sym_size sym_stride sym_numel _has_compatible_shallow_copy_type
        _debug_has_internal_overlap _version record_stream requires_grad_ retain_grad _fw_primal
        _nested_tensor_size is_floating_point is_complex is_pinned _efficientzerotensor
        _cast_Float _functional_assert_async sym_constrain_range _nnpack_available
        _fused_sdp_choice _async_error _backward _use_cudnn_ctc_loss
        _use_miopen_ctc_loss
        to type_as contiguous item pin_memory set_data output_nr _shape_as_tensor AccumulateGrad
        _linalg_check_errors linalg_pinv
        tensor_split search_unused_parameters _indices _values _sparse_coo_tensor_unsafe
        _sparse_coo_tensor_with_dims_and_tensors _coalesced_""",
}

_TABLE = {name: work_class for work_class, names in _OPERATORS.items() for name in names.split()}

_NAMESPACES = {
    "c10d": OpClass.COMMUNICATION,
    "_c10d_functional": OpClass.COMMUNICATION,
    "_c10d_functional_autograd": OpClass.COMMUNICATION,
    "_dtensor": OpClass.COMMUNICATION,
    "nccl": OpClass.COMMUNICATION,
    "symm_mem": OpClass.COMMUNICATION,
    "capture": OpClass.COMMUNICATION,
    "autograd": OpClass.NOTHING,
    "profiler": OpClass.NOTHING,
}

_GENERATED = re.compile(r"(graph_\d+_)?cpp_")

# Class -> pattern of kernel names; the first match wins, so specific patterns come first.
# Inductor's patterns come before all others: a fused kernel's prefix shows its outer loop, and the
# operators in its name are only parts of it.
_KERNELS = (
    (OpClass.ATTENTION, r"^triton_tem_.*attention"),
    (OpClass.GEMM, r"^triton_tem_"),
    (OpClass.REDUCTION, r"^triton_(red|per)_"),
    (OpClass.ELEMENTWISE, r"^triton_poi_"),
    (OpClass.COMMUNICATION, r"nccl|rccl|nvshmem|\bdeep_ep::|\bep::(intra|inter)node"),
    (OpClass.COMMUNICATION, r"multimem|cross_device_reduce|all_?reduce_?(kernel|fusion)"),
    # Before attention: vLLM's `reshape_and_cache_flash` copies keys and values.
    (OpClass.COPY, r"(reshape|concat)_and_cache"),
    (OpClass.ATTENTION, r"flash|fmha|attention|sdpa|attn_(fwd|bwd)|bwd_kernel_d(k_dv|q)|sage_fwd"),
    (OpClass.LOSS, r"nll_loss|cross_entropy"),
    (OpClass.SOFTMAX, r"softmax"),
    (OpClass.NORM, r"layer_?norm|rms_?norm|batch_?norm|bn_(fw|bw)|group_?norm"),
    (OpClass.OPTIMIZER, r"multi_tensor_apply|fused_?adam"),
    # Before embedding: a rotary embedding looks nothing up.
    (OpClass.ELEMENTWISE, r"rotary_embedding|\broi_(align|pool)"),
    (OpClass.EMBEDDING, r"embedding"),
    (OpClass.RANDOM, r"distribution_(elementwise|nullary)|philox|dropout"),
    (OpClass.INDEX, r"sort|scan|topk|index|gather|scatter|cub::|\bnms_kernel"),
    (OpClass.GEMM, r"gemm|gemv|cutlass|cublas|nvjet|xmma|convolve|wgrad|dgrad|_conv_|splitk"),
    # Of Tensile, which AMD's libraries use, and of TensorRT-LLM.
    (OpClass.GEMM, r"^cijk_|^bmm_"),
    (OpClass.MEMSET, r"fillfunctor|memset"),
    (OpClass.COPY, r"catarray|copy|memcpy|transpose"),
    (OpClass.REDUCTION, r"reduce"),
    (OpClass.ELEMENTWISE, r"elementwise"),
)

# Template arguments with a library's name, which does not show what the kernel does.
_IGNORED_ARGUMENTS = re.compile(r"flashinfer::quantization\w+|cutlass::\w+_t\b")


def base_name(op: str) -> str:
    """Return an operator's name without namespace and overload: `aten::add_.Tensor` -> `add_`."""
    return op.rsplit("::", 1)[-1].split(".", 1)[0]


def is_generated(op: str) -> bool:
    """Return whether an operator is a kernel that Inductor generated for a GPU."""
    return op.startswith("triton_")


@cache
def op_class(op: str, kernel_name: str = "", kind: Kind = Kind.KERNEL) -> OpClass:
    """Return the class of work of a node.

    Args:
        op: operator, with or without namespace; "" if no operator is known.
        kernel_name: name of the kernel, read only if the operator does not decide.
        kind: kind of the node; it decides for communication, memcpy and memset.
    """
    if kind.is_communication:
        return OpClass.COMMUNICATION
    if kind == Kind.MEMCPY:
        return OpClass.COPY
    if kind == Kind.MEMSET:
        return OpClass.MEMSET
    known = _of_operator(op)
    # A view launches nothing, so a kernel under one was launched by something that the trace does
    # not name; the kernel's name says more.
    if kind == Kind.KERNEL and known in (OpClass.UNKNOWN, OpClass.NOTHING):
        return _of_kernel(kernel_name)
    if known is OpClass.UNKNOWN and "::" not in op:
        # Inductor's kernels have such names; everything else without a namespace is an annotation
        # or a node of autograd. A capture without a device has those for a GPU as operators.
        known = OpClass.ELEMENTWISE if _GENERATED.match(op) else OpClass.NOTHING
        return _of_kernel(op) if is_generated(op) else known
    return known


def _of_operator(op: str) -> OpClass:
    namespace = op.split("::", 1)[0] if "::" in op else ""
    if namespace in _NAMESPACES:
        return _NAMESPACES[namespace]
    name = base_name(op)
    # Only optimizers and gradient clipping call these.
    if name.startswith("_foreach_"):
        return OpClass.COPY if name.startswith("_foreach_copy") else OpClass.OPTIMIZER
    # fbgemm_gpu has operators for each optimizer.
    if name.startswith("split_embedding_"):
        return OpClass.EMBEDDING
    # The exact name first: `fill_` and `copy_` have entries, and only others fall back to the form
    # that is not in place.
    full_name = op.split(".", 1)[0]
    entries = (_TABLE.get(each) for each in (full_name, name, name.removesuffix("_")))
    return next(filter(None, entries), OpClass.UNKNOWN)


def _of_kernel(name: str) -> OpClass:
    lowered = _IGNORED_ARGUMENTS.sub("", name.lower())
    matches = (work_class for work_class, pattern in _KERNELS if re.search(pattern, lowered))
    return next(matches, OpClass.UNKNOWN)


def classify(graph: Graph, index: npt.NDArray[Any]) -> U8:
    """Return the class of each node at `index`, as positions in `CLASSES`."""
    nodes, strings = graph.nodes, graph.strings
    columns = [column[index] for column in (nodes.op, nodes.name, nodes.kind)]
    first, inverse = deduplicate(columns)
    codes = [
        CLASSES.index(op_class(strings[int(op)], strings[int(name)], Kind(int(kind))))
        for op, name, kind in zip(*(column[first] for column in columns), strict=True)
    ]
    return np.array(codes, dtype=np.uint8)[inverse]


def device_copies(graph: Graph) -> Mask:
    """Return which nodes are copies within a GPU's memory, bool[n]."""
    copies = graph.mask(Kind.MEMCPY)
    names = np.unique(graph.nodes.name[copies])
    inside = [int(n) for n in names if "dtod" in graph.strings[int(n)].lower().replace(" ", "")]
    return copies & np.isin(graph.nodes.name, inside)


# Launch floors ------------------------------------------------------------------------------------

# Time of a class's shortest kernels over that of the shortest GEMMs, which is `launch_floor_ns` in
# the description of a GPU. Absent classes have 1. Measured on an H200 (2640 ns for a GEMM): medians
# of calls of up to 300 kB in the shipped kernel database; embeddings in captured steps. Copies and
# reductions: decodes on an H100, divided by 1.3, the ratio of its shortest elementwise kernels to
# those of an H200.
# With one floor for all, the datasheet model was 85% off for elementwise kernels under 10 us there,
# and 156% for fills. Other kernels of a class take longer: see `kernel_overheads.floor_factor_of`.
#
# For NVIDIA GPUs only. On an MI300X no class is shorter than the others: in public Kineto traces
# (AMD-AGI/TraceLens, kernels of up to 200 kB) the median trace has elementwise kernels of 4.3 us,
# copies of 4.5, fills of 4.6, reductions of 5.5, GEMMs of 2.2 and 6.1.
_FLOOR_SHARES = {
    OpClass.MEMSET: 0.27,
    OpClass.INDEX: 0.33,
    OpClass.ELEMENTWISE: 0.35,
    OpClass.COPY: 0.37,
    OpClass.EMBEDDING: 0.38,
    OpClass.SOFTMAX: 0.47,
    OpClass.RANDOM: 0.54,
    OpClass.REDUCTION: 0.60,
}


def floor_share_of(work_class: OpClass) -> float:
    """Return the time of a class's shortest kernels as a share of the launch floor."""
    return _FLOOR_SHARES.get(work_class, 1.0)


# Architecture -> factor on the shares below 1, which are an H200's. The shortest elementwise
# kernels take 0.92 us there, 1.6 on an A100 and 1.9 on a V100 (fifth percentile of public Kineto
# traces, facebookresearch/HolisticTraceAnalysis). Of the engines' kernels that quantise up to 4 MB,
# replayed in a graph, a B200 takes 0.95 to 1.5 times as long as an H200, whose shortest GEMMs take
# 1.4 times as long as a B200's (aiconfigurator). Turing is assumed to be like Volta.
_BY_ARCHITECTURE = {"volta": 1.35, "turing": 1.35, "ampere": 1.35, "blackwell": 1.8}


# Shortest kernels of an H100 over the shares. Those of an H200 are 0.1 to 0.26 us shorter, whatever
# they compute: in decodes of OLMo-Hybrid and Falcon-H1 vectorised ones take 1.32 to 1.50 and 1.13
# to 1.28 us, those that compute addresses 1.76 to 2.52 and 1.55 to 2.34, casts 2.47 to 3.16 and
# 2.27 to 2.98 (2026-11-28-serving-blind-5-h200).
_H100_SHORTEST = 1.296


def shares_on(shares: F64, gpu: Gpu) -> F64:
    """Return shares of the launch floor, of an H200, on another NVIDIA GPU.

    Shares below 1 become 1 at most; shares above 1 stay.
    """
    if gpu.elementwise_floor_ns is not None:
        shortest = _H100_SHORTEST * _FLOOR_SHARES[OpClass.ELEMENTWISE]
        scaled = shares * _H100_SHORTEST + gpu.elementwise_floor_ns / gpu.launch_floor_ns - shortest
    else:
        scaled = shares * _BY_ARCHITECTURE.get(gpu.architecture, 1.0)
    return np.maximum(shares, np.minimum(scaled, 1))
