"""State space models, linear attention and causal convolutions: mamba_ssm, fla, causal_conv1d."""

from math import prod

from onerank.annotate.op_costs.cost_record import Formula, Work, vector_work
from onerank.annotate.op_costs.library_operators.formulas import matrix_products
from onerank.annotate.op_costs.operands import Call


def causal_convolution(times: int, written: tuple[int, ...]) -> Formula:
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


def selective_scan(times: int) -> Formula:
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


def _chunk(sequence: int, states: tuple[int, ...]) -> int:
    """Return the tokens of a chunk, given its states [b, chunks, ...]."""
    return -(-sequence // states[1])


# Mamba 2 (arXiv:2405.21060): x [b, l, h, p], B and C [b, l, groups, n], states [b, chunks, h, p, n]
# and products of C and B [b, chunks, groups, c, c], of which x meets the lower half.
MAMBA = {
    "_bmm_chunk_fwd_kernel": matrix_products(lambda shape: 2 * prod(shape(-1)) * shape(0)[-1]),
    "_bmm_chunk_bwd_kernel": matrix_products(lambda shape: 2 * prod(shape(1)) * shape(0)[-1]),
    "_chunk_state_fwd_kernel": matrix_products(lambda shape: 2 * prod(shape(0)) * shape(1)[-1]),
    # Of the states, and of the tokens of the chunk before each token.
    "_chunk_scan_fwd_kernel": matrix_products(
        lambda shape: prod(shape(1)) * (2 * shape(8)[-1] + shape(0)[-1]), operand=1
    ),
    "_chunk_scan_chunk_state_bwd_dx_kernel": matrix_products(
        lambda shape: prod(shape(0)) * (2 * shape(7)[-1] + shape(1)[-1])
    ),
    "_chunk_scan_bwd_dstates_kernel": matrix_products(
        lambda shape: 2 * prod(shape(0)) * shape(1)[-1]
    ),
    "_chunk_scan_bwd_dc_kernel": matrix_products(lambda shape: 2 * prod(shape(0)) * shape(1)[-1]),
    "_chunk_state_bwd_db_kernel": matrix_products(lambda shape: 2 * prod(shape(0)) * shape(1)[-1]),
    "_chunk_scan_bwd_dcb_kernel": matrix_products(lambda shape: prod(shape(0)) * shape(-1)[-1]),
    # They multiply once more for the gradient of the decay.
    "_chunk_scan_bwd_ddAcs_stable_kernel": matrix_products(
        lambda shape: prod(shape(0)) * shape(4)[-1]
    ),
    "_chunk_state_bwd_ddAcs_stable_kernel": matrix_products(
        lambda shape: 2 * prod(shape(0)) * shape(1)[-1]
    ),
}

# Linear attention of fla: q and k [b, t, h, K], v and o [b, t, h, V], states [b, chunks, h, K, V].
# A chunk's scores are computed whole, then masked.
FLA = {
    "chunk_fwd_kernel_h": matrix_products(lambda shape: 2 * prod(shape(0)) * shape(1)[-1]),
    "chunk_bwd_kernel_dh": matrix_products(lambda shape: 2 * prod(shape(0)) * shape(5)[-1]),
    "chunk_fwd_kernel_o": matrix_products(
        lambda shape: (
            2 * prod(shape(0)) * shape(2)[-1]
            + 2 * _chunk(shape(0)[1], shape(3)) * (prod(shape(0)) + prod(shape(2)))
        )
    ),
    "chunk_bwd_kernel_dqkwg": matrix_products(
        lambda shape: (
            4 * prod(shape(0)) * shape(2)[-1]
            + 2 * _chunk(shape(0)[1], shape(5)) * (2 * prod(shape(0)) + prod(shape(2)))
        )
    ),
    "chunk_bwd_kernel_dv": matrix_products(
        lambda shape: (
            2 * prod(shape(0)) * shape(4)[-1]
            + 2 * _chunk(shape(0)[1], shape(6)) * (prod(shape(0)) + prod(shape(4)))
        )
    ),
    # The delta rule also multiplies the states by the keys.
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": matrix_products(
        lambda shape: 4 * prod(shape(0)) * shape(1)[-1]
    ),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": matrix_products(
        lambda shape: 6 * prod(shape(0)) * shape(7)[-1]
    ),
}
