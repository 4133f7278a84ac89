"""How many times over the kernels of an operator stream its bytes, each operand and result once.

A norm reads its row for the sums and again for the result; its backward pass reads gradient and
operand once more for the weights' gradients. A batch's and a group's norm do so by kernels of their
own. A softmax keeps a row of up to 1024 elements in registers, and reads a longer one again.
Additions by index in 16 bits are exchanges that fail and are repeated.
"""

from onerank.annotate.work.shapes import Call

_HELD_ROW = 1024  # elements that a softmax keeps in registers
_HELD_ROW_BYTES = 48 * 1024  # what its backward pass keeps in shared memory

_MEASURED = {
    "native_layer_norm": 1.8,
    "_fused_rms_norm": 1.45,
    "native_layer_norm_backward": 2.7,
    "_fused_rms_norm_backward": 2.7,
}
"""By calls of 30 us and more in the shipped H200's database: their time by the bandwidth that the
description holds achievable, over the bytes."""

_COUNTED = {
    "native_batch_norm": 3 / 2,
    "cudnn_batch_norm": 3 / 2,
    "_batch_norm_with_update": 3 / 2,
    "_native_batch_norm_legit": 3 / 2,
    "native_group_norm": 3 / 2,
    "native_batch_norm_backward": 5 / 3,
    "cudnn_batch_norm_backward": 5 / 3,
    "batch_norm_backward": 5 / 3,
    "native_group_norm_backward": 5 / 3,
}
"""By the kernels: sums, then the result; nobody measured them."""

_LONG_SOFTMAX, _LONG_SOFTMAX_BACKWARD = 1.85, 1.4  # measured as the norms are
_ADDED_IN_16_BITS = 5.7  # `index_add_` of rows of 4 and 8 kB there
_ADDS = frozenset(("index_add", "index_add_", "scatter_add", "scatter_add_"))


def passes_of(call: Call) -> float:
    """Return how many times over a call's kernels stream its bytes."""
    name = call.op
    if name in _MEASURED:
        return _MEASURED[name]
    if name in _COUNTED:
        return _COUNTED[name] if _finds_sums(call) else 1.0
    own = call.tensor(0)
    if own is None or not own.shape:
        return 1.0
    if name in ("_softmax", "_log_softmax"):
        return _LONG_SOFTMAX if own.shape[-1] > _HELD_ROW else 1.0
    if name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        held = own.shape[-1] * own.item_bytes <= _HELD_ROW_BYTES
        return 1.0 if held else _LONG_SOFTMAX_BACKWARD
    return _ADDED_IN_16_BITS if name in _ADDS and own.item_bytes == 2 else 1.0


def _finds_sums(call: Call) -> bool:
    """Return whether a norm finds its sums: a batch's forward by running ones saves none."""
    forward_of_batch = "batch_norm" in call.op and "backward" not in call.op
    saved = call.outputs[1:2]
    return not (forward_of_batch and saved and not sum(one.numel for one in saved[0] or ()))
