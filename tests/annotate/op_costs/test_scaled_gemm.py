"""FLOPs and bytes of GEMMs in 8 and 4 bits whose operands have scales."""

from onerank.annotate.op_costs.cost_record import GemmShape, Scales
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.operands import Call, Tensor

M, N, K = 512, 1024, 4096
OUT = Tensor((M, N), "bfloat16", 2)


def fp8(*shape: int) -> Tensor:
    return Tensor(shape, "float8_e4m3fn", 1)


def packed(*shape: int) -> Tensor:
    return Tensor(shape, "float4_e2m1fn_x2", 1)


def float32(*shape: int) -> Tensor:
    return Tensor(shape, "float32", 4)


def work(op: str, *inputs: Tensor | None, results: tuple[Tensor, ...] = (OUT,)):
    name = op.split("::")[1]
    operands = tuple(None if tensor is None else (tensor,) for tensor in inputs)
    return work_of_call(op, Call(name, operands, tuple((result,) for result in results)))


def scales(left: Tensor, right: Tensor) -> Scales:
    return work("aten::_scaled_mm", fp8(M, K), fp8(K, N), left, right).scales


def test_what_has_a_scale_follows_from_the_number_of_scales():
    assert scales(float32(), float32()) is Scales.TENSOR
    assert scales(float32(M, 1), float32(1, N)) is Scales.TORCH_ROW
    # DeepSeek's: 1 x 128 of the activations and 128 x 128 of the weights.
    assert scales(float32(M, K // 128), float32(K // 128, N // 128)) is Scales.TORCH_BLOCK


def test_four_bits_are_packed_in_pairs_and_have_a_scale_per_16_elements():
    left_scale, right_scale = fp8(M * K // 16), fp8(N * K // 16)
    cost = work("aten::_scaled_mm", packed(M, K // 2), packed(K // 2, N), left_scale, right_scale)
    assert cost.flops == 2 * M * N * K
    assert cost.bytes_read == (M + N) * K // 2 + (M + N) * K // 16
    assert cost.bytes_written == 2 * M * N
    assert cost.gemm == GemmShape(1, M, N, K, 0.5625, 2)
    assert (cost.dtype, cost.scales) == ("float4_e2m1fn_x2", Scales.TORCH_BLOCK)


def test_mxfp8_has_a_scale_per_32_elements():
    scale = Tensor((M * K // 32,), "float8_e8m0fnu", 1)
    other = Tensor((N * K // 32,), "float8_e8m0fnu", 1)
    cost = work("aten::_scaled_mm", fp8(M, K), fp8(K, N), scale, other)
    assert cost.flops == 2 * M * N * K
    assert cost.bytes_read == (M + N) * (K + K // 32)
    assert cost.scales is Scales.TORCH_BLOCK


def test_the_second_version_of_torchs_operator_takes_lists_of_scales():
    recipe = None
    cost = work(
        "aten::_scaled_mm_v2", fp8(M, K), fp8(K, N), float32(M, 1), recipe, recipe, float32(1, N)
    )
    assert (cost.flops, cost.scales) == (2 * M * N * K, Scales.TORCH_ROW)


def test_serving_frameworks_write_into_an_argument():
    by_row = work(
        "_C::cutlass_scaled_mm", OUT, fp8(M, K), fp8(K, N), float32(M, 1), float32(1, N),
        results=(),
    )  # fmt: skip
    assert by_row.flops == 2 * M * N * K
    assert (by_row.bytes_written, by_row.scales) == (2 * M * N, Scales.ROW)
    bytes_of = Tensor((M, K // 2), "uint8", 1), Tensor((N, K // 2), "uint8", 1)
    four = work(
        "_C::cutlass_scaled_fp4_mm", OUT, *bytes_of, fp8(M, K // 16), fp8(N, K // 16), results=()
    )
    assert (four.flops, four.dtype) == (2 * M * N * K, "float4_e2m1fn_x2")
    assert four.gemm == GemmShape(1, M, N, K, 0.5625, 2)
