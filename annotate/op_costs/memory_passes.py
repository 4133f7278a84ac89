"""Limits of memory-bound kernels other than reading each operand and writing each result once.

Repeated passes over operands: a norm reads its row for the sums and again for the result; its
backward reads gradient and operand again for the weight gradients; batch and group norms do so in
separate kernels. A softmax keeps rows of up to 1024 elements in registers and reads longer ones
twice. Additions by index in 16 bits retry failed compare-and-swap operations.

Work per element: a kernel with broadcast operands or a widening cast computes the address of each
element, and a sum adds elements singly, so an SM handles a few elements per cycle at any size.
"""

from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.op_costs.operands import Call

# Longest row that PyTorch's softmax keeps in registers, in elements; longer ones are read twice.
_REGISTER_ROW = 1024
# Longest row that its backward keeps in shared memory: the 48 KiB of a block without opt-in.
_SHARED_ROW_BYTES = 48 * 1024

PASSES = {
    "native_layer_norm": 1.8,
    "_fused_rms_norm": 1.45,
    "native_layer_norm_backward": 2.7,
    "_fused_rms_norm_backward": 2.7,
}
"""Passes over the bytes: time times achievable bandwidth, over the bytes.

Measured on calls of 30 us and more in the shipped database of the H200.
"""

_COUNTED = {
    "native_batch_norm": 3 / 2,
    "cudnn_batch_norm": 3 / 2,
    "miopen_batch_norm": 3 / 2,
    "_batch_norm_with_update": 3 / 2,
    "_native_batch_norm_legit": 3 / 2,
    "native_group_norm": 3 / 2,
    "native_batch_norm_backward": 5 / 3,
    "cudnn_batch_norm_backward": 5 / 3,
    "miopen_batch_norm_backward": 5 / 3,
    "batch_norm_backward": 5 / 3,
    "native_group_norm_backward": 5 / 3,
}
"""Passes by the kernels' code: one for the sums, one for the result. Not measured."""

_LONG_SOFTMAX, _LONG_SOFTMAX_BACKWARD = 1.85, 1.4  # measured in the same way as `PASSES`
# Measured on `index_add_` of rows of 4 and 8 kB in the same database; in 16 bits the additions
# retry a compare-and-swap.
_ADDED_IN_16_BITS = 5.7
_ADDS = frozenset(("index_add", "index_add_", "scatter_add", "scatter_add_"))


def passes_of(call: Call) -> float:
    """Return the number of times that a call's kernels stream its bytes."""
    name = call.op
    if name in PASSES:
        return PASSES[name]
    if name in _COUNTED:
        return _COUNTED[name] if _finds_sums(call) else 1.0
    tensor = call.tensor(0)
    if tensor is None or not tensor.shape:
        return 1.0
    if name in ("_softmax", "_log_softmax"):
        return _LONG_SOFTMAX if tensor.shape[-1] > _REGISTER_ROW else 1.0
    if name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        fits = tensor.shape[-1] * tensor.item_bytes <= _SHARED_ROW_BYTES
        return 1.0 if fits else _LONG_SOFTMAX_BACKWARD
    return _ADDED_IN_16_BITS if name in _ADDS and tensor.item_bytes == 2 else 1.0


def rereads_of(call: Call) -> float:
    """Return the number of times that memory, not the cache, serves a call's bytes.

    A long softmax rereads its rows from memory. A norm rereads them from the cache: its kernels
    take 1.18 times as long on an H100 as on an H200, whose memory is 1.43 times as fast; those of a
    long softmax take 1.34 times as long (2026-11-23).
    """
    return passes_of(call) if "softmax" in call.op else 1.0


def _finds_sums(call: Call) -> bool:
    """Return whether a norm computes its sums: a batch norm that uses running ones saves none."""
    forward_of_batch = "batch_norm" in call.op and "backward" not in call.op
    saved = call.outputs[1:2]
    return not (forward_of_batch and saved and not sum(result.numel for result in saved[0] or ()))


_PLACED_IN_A_CYCLE, _ADDED_IN_A_CYCLE = 1.34, 2.5
"""Elements per SM and cycle of `max_clock_mhz`: addressed one by one, and summed.

Measured on kernels of 10 us and more in two captured steps on an H200: 1.25 to 1.56 for
`elementwise_kernel` and `unrolled_elementwise_kernel`, in 16 and 32 bits; 2.3 to 3.2 for
`reduce_kernel`.
"""


def cycles_of(call: Call, operator_class: OpClass) -> float:
    """Return the SM cycles of a call's elements; 0 if its bytes determine its time."""
    if operator_class is OpClass.REDUCTION:
        return call.numel(0) / _ADDED_IN_A_CYCLE
    if operator_class is OpClass.ELEMENTWISE or call.op == "copy_":
        elements = max(call.output_numel, call.numel(0))
        operands = (
            operand for operand in (*call.inputs, *call.outputs) if operand and len(operand) == 1
        )
        spread = any(1 < operand[0].numel < elements for operand in operands)
        if spread or (call.op == "copy_" and _widens(call)):
            return elements / _PLACED_IN_A_CYCLE
    return 0.0


def _widens(call: Call) -> bool:
    to, of = call.tensor(0), call.tensor(1)
    return to is not None and of is not None and to.item_bytes > of.item_bytes
