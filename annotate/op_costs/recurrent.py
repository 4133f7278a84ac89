"""Recurrent layers: FLOPs from shapes, and the GEMMs that cuDNN turns them into.

The input's products are batched over time. The state's products are one per time step, each after
the previous one. The weight gradients are batched over time.
"""

from collections.abc import Sequence
from math import prod

from onerank.annotate.op_costs.convolutions import allowing_tf32
from onerank.annotate.op_costs.cost_record import Formula, Part, Work, product
from onerank.annotate.op_costs.operands import Call, Tensor

STEP_LAUNCHES = 6
"""Launch floors of a time step in addition to its GEMM.

The gates' kernel, the kernel that sums a split GEMM, and the gaps between the three. From
DeepBench's layers of 25 to 1500 steps on a V100, cuDNN 7.6, 16 bits; see benchmarks/deepbench.py.
"""


def _recurrent(weights: Sequence[int], state: int, times: int) -> Formula:
    """Return the formula of an LSTM, a GRU or a plain recurrent layer.

    In the forward each token of the input [..., features] is multiplied by every weight matrix; in
    the backward (`times` 2) each of these GEMMs has two gradients. Packed sequences are
    [tokens, features].

    Args:
        weights: positions of the weights, alternating between those of the input and the state.
        state: position of the initial state, [..., batch, size].
        times: GEMMs per weight.
    """

    def formula(call: Call) -> Work | None:
        x = call.tensor(0)
        given = [one for at in weights if at < len(call.inputs) for one in call.inputs[at] or ()]
        matrices = [weight for weight in given if len(weight.shape) == 2]
        met = sum(matrix.numel for matrix in matrices)
        if x is None or not met:
            return None
        tokens = prod(x.shape[:-1])
        parts = _parts(tokens, matrices, call.tensor(state), backward=times == 2)
        return product(call, allowing_tf32(x), times * 2 * tokens * met, parts=parts)

    return formula


def _parts(
    tokens: int, matrices: Sequence[Tensor], state: Tensor | None, *, backward: bool
) -> tuple[Part, ...]:
    """Return the GEMMs of all layers and directions; none if the steps are not known."""
    pairs = list(zip(matrices[::2], matrices[1::2], strict=False))
    size = pairs[0][1].shape[1] if pairs else 0
    odd = len(matrices) % 2 or any(of_state.shape[1] != size for _, of_state in pairs)
    if state is None or odd or state.numel % (len(pairs) * size):
        return ()  # a layer with projections, or shapes that are not recorded
    batch = state.numel // (len(pairs) * size)
    steps = -(-tokens // max(1, batch))
    parts: list[Part] = []
    for of_input, _ in pairs:
        gates, features = of_input.shape
        item = of_input.item_bytes
        of_step, of_tokens = (
            (width, gates) if backward else (gates, width) for width in (size, features)
        )
        parts += [
            Part(1, batch, *of_step, item, times=steps, launches=STEP_LAUNCHES),
            Part(1, tokens, *of_tokens, item),
        ]
        if backward:
            parts += [Part(1, gates, rows, tokens, item) for rows in (size, features)]
    return tuple(parts)


FORMULAS: dict[str, Formula] = {
    "_cudnn_rnn": _recurrent([1], 4, 1),
    "_cudnn_rnn_backward": _recurrent([1], 4, 2),
    "mkldnn_rnn_layer": _recurrent([1, 2], 5, 1),
    "mkldnn_rnn_layer_backward": _recurrent([1, 2], 5, 2),
}
