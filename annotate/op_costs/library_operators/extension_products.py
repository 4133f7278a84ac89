"""Products of DeepGEMM and grouped_gemm."""

from onerank.annotate.op_costs.cost_record import ComponentGemm, PartKernel, Work, matmul_work
from onerank.annotate.op_costs.operands import Call


def extension_product(call: Call) -> Work | None:
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


DEEP_GEMM = {
    f"deep_gemm::{name}": extension_product
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
