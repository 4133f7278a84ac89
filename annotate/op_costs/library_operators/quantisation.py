"""Quantisation and 8-bit optimizers: bitsandbytes and torchao."""

from onerank.annotate.op_costs.cost_record import Formula, Work, vector_work
from onerank.annotate.op_costs.library_operators.formulas import QUANTIZE, per_element, per_result
from onerank.annotate.op_costs.operands import Call
from onerank.ir import UNKNOWN

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
