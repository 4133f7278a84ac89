"""Low precision: GEMMs of DeepGEMM, quantisation and 8-bit optimizers of bitsandbytes and torchao.

grouped_gemm's GEMMs in 16 bits have the formula of DeepGEMM's.
"""

from onerank.annotate.op_costs.cost_record import (
    ComponentGemm,
    Formula,
    PartKernel,
    Work,
    matmul_work,
    vector_work,
)
from onerank.annotate.op_costs.library_operators.formulas import QUANTIZE, per_element, per_result
from onerank.annotate.op_costs.operands import Call
from onerank.ir import UNKNOWN


def _product(call: Call) -> Work | None:
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


GEMM_LIBRARIES = {
    "grouped_gemm::gmm": _product,
    **{
        f"deep_gemm::{name}": _product
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
    },
}


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


BITSANDBYTES = {
    f"bitsandbytes::{name}": formula
    for name, formula in {
        "int8_vectorwise_quant": per_element(QUANTIZE),
        "int8_double_quant": per_element(2 * QUANTIZE),
        "int8_vectorwise_dequant": per_element(1),
        "quantize_4bit": per_element(QUANTIZE),
        "quantize_blockwise": per_element(QUANTIZE),
        "dequantize_4bit": per_result(1),
        "dequantize_blockwise": per_result(1),
        "optimizer_update_32bit": _optimizer_update((2, 3, 4)),
        "optimizer_update_8bit_blockwise": _optimizer_update((2, 3, 4, 14, 15), (12, 13)),
    }.items()
}


# torchao's conversions to numbers with a scale for each 32 of them.
TORCHAO = {
    f"torchao::{name}": per_element(QUANTIZE)
    for name in (
        "triton_to_mxfp8_dim0",
        "triton_to_mxfp8_dim1",
        "mxfp8_quantize",
        "mxfp8_quantize_2d_1x32_cutedsl",
        "mxfp8_quantize_2d_32x1_cutedsl",
        "mxfp8_quantize_3d_cutedsl",
    )
}
