import numpy as np
import pytest

from onerank.annotate import OpClass, op_class
from onerank.annotate.op_costs.op_classes import CLASSES, classify
from onerank.ir import Kind


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("aten::mm", OpClass.GEMM),
        ("aten::addmm.out", OpClass.GEMM),
        ("aten::convolution_backward", OpClass.GEMM),
        ("aten::_flash_attention_backward", OpClass.ATTENTION),
        ("aten::_fused_rms_norm", OpClass.NORM),
        ("aten::batch_norm_gather_stats_with_counts", OpClass.NORM),
        ("aten::_log_softmax_backward_data", OpClass.SOFTMAX),
        ("aten::nll_loss_forward", OpClass.LOSS),
        ("aten::add_.Tensor", OpClass.ELEMENTWISE),
        ("aten::sum", OpClass.REDUCTION),
        ("aten::embedding_dense_backward", OpClass.EMBEDDING),
        ("aten::_fused_adamw_", OpClass.OPTIMIZER),
        ("aten::_foreach_addcmul_", OpClass.OPTIMIZER),
        ("aten::_foreach_copy_", OpClass.COPY),
        ("aten::cat", OpClass.COPY),
        ("aten::_pad_packed_sequence", OpClass.COPY),
        ("aten::_pack_padded_sequence_backward", OpClass.COPY),
        ("aten::pad_sequence", OpClass.COPY),
        ("aten::zero_", OpClass.MEMSET),
        ("aten::native_dropout", OpClass.RANDOM),
        ("aten::cumsum", OpClass.INDEX),
        ("torchvision::roi_align", OpClass.ELEMENTWISE),
        ("torchvision::_roi_align_backward", OpClass.ELEMENTWISE),
        ("torchvision::nms", OpClass.INDEX),
        ("c10d::allreduce_", OpClass.COMMUNICATION),
        ("mylib::strange", OpClass.UNKNOWN),
    ],
)
def test_the_operator_decides(op: str, expected: OpClass):
    assert op_class(op) is expected
    # A kernel's name does not overrule a known operator.
    if expected is not OpClass.UNKNOWN:
        assert op_class(op, "nvjet_tst_128x256_gemm") is expected


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNN", OpClass.GEMM),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32", OpClass.GEMM),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64> >", OpClass.ATTENTION),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor<int> >", OpClass.MEMSET),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", OpClass.ELEMENTWISE),
        ("triton_red_fused_add_mul_3", OpClass.REDUCTION),
        ("triton_poi_fused_silu_1", OpClass.ELEMENTWISE),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x32x64_MI16x16x1", OpClass.GEMM),
        ("attn_fwd", OpClass.ATTENTION),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", OpClass.COPY),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>", OpClass.ELEMENTWISE),
        (
            "void vision::ops::(anonymous namespace)::roi_align_forward_kernel_impl<float>",
            OpClass.ELEMENTWISE,
        ),
        ("void vision::ops::(anonymous namespace)::nms_kernel_impl<float>", OpClass.INDEX),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<16>", OpClass.COMMUNICATION),
        ("void quantize_with_block_size<2>(flashinfer::QuantizationSFLayout)", OpClass.UNKNOWN),
        ("void moe::dev::finalizeKernel<Params<cutlass::bfloat16_t> >", OpClass.UNKNOWN),
        ("my_secret_kernel", OpClass.UNKNOWN),
    ],
)
def test_the_kernel_decides_without_operator(kernel: str, expected: OpClass):
    assert op_class("", kernel) is expected
    assert op_class("mylib::strange", kernel) is expected


def test_kinds_speak_for_themselves():
    assert op_class("aten::mm", "", Kind.MEMSET) is OpClass.MEMSET
    assert op_class("", "Memcpy DtoD", Kind.MEMCPY) is OpClass.COPY
    assert op_class("", "x", Kind.COLLECTIVE) is OpClass.COMMUNICATION


def test_views_and_annotations_launch_nothing():
    assert op_class("aten::view", "", Kind.HOST_OP) is OpClass.NOTHING
    assert op_class("aten::matrix_H", "", Kind.HOST_OP) is OpClass.NOTHING
    assert op_class("AddBackward0", "", Kind.HOST_OP) is OpClass.NOTHING
    assert op_class("aten::_nnpack_available", "", Kind.HOST_OP) is OpClass.NOTHING
    assert op_class("mylib::strange", "", Kind.HOST_OP) is OpClass.UNKNOWN


def test_classify_matches_op_class(trace, mm, add):
    graph = trace(mm(2, 2, 2), add(8), {"op": "mylib::strange"}, mm(2, 2, 2))
    kernels = np.flatnonzero(graph.gpu_compute)
    found = [CLASSES[code] for code in classify(graph, kernels)]
    assert found == [OpClass.GEMM, OpClass.ELEMENTWISE, OpClass.UNKNOWN, OpClass.GEMM]
