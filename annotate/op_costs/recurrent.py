"""FLOPs of recurrent layers, and the GEMMs inside.

cuDNN batches the input's products over time. The state's products are one per time step, each after
the previous one. The weight gradients are batched over time.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from onerank.annotate.op_costs.cost_record import (
    ComponentGemm,
    Formula,
    PartKernel,
    Work,
    matmul_work,
)
from onerank.annotate.op_costs.operands import Call, Tensor, allowing_tf32

STEP_LAUNCHES = 6
"""Launch floors of a time step in addition to its GEMM.

The gates' kernel, the kernel that sums a split GEMM, and the gaps between the three. From
DeepBench's layers of 25 to 1500 steps on a V100, cuDNN 7.6, 16 bits; see
benchmarks/predictions/deepbench.py.
"""


# cuDNN runs steps of several layers and directions at once where they take longer than their host
# needs to launch them, as in 32 bits with large states: power of the layers by which steps take
# less, and bytes of a step's weights that take as long as its launches. Two layers take an H200
# 1 / 1.3 to 1 / 1.7 of the sum of their kernels, three 1 / 1.9.
_TOGETHER, _LAUNCHED_BYTES, _NARROW_BYTES = 0.62, 13e6, 2


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
        met = sum(matrix.numel for matrix in _matrices(call, weights))
        if x is None or not met:
            return None
        tokens = prod(x.shape[:-1])
        layers = recurrent_layers(call, weights, state)
        parts = _parts(tokens, layers, backward=times == 2) if layers else ()
        return matmul_work(call, allowing_tf32(x), times * 2 * tokens * met, parts=parts)

    return formula


class RecurrentLayers(NamedTuple):
    """What cuDNN steps through.

    Attributes:
        pairs: weights of the input and of the state, for each layer and direction.
        batch: sequences.
        size: numbers of a state.
        steps: steps of a layer.
    """

    pairs: Sequence[tuple[Tensor, Tensor]]
    batch: int
    size: int
    steps: int


def recurrent_layers(call: Call, weights: Sequence[int], state: int) -> RecurrentLayers | None:
    """Return the layers of a call; None if the steps are not known, as with projections.

    Args:
        call: the call.
        weights: see `_recurrent`.
        state: the same.
    """
    x, states = call.tensor(0), call.tensor(state)
    matrices = _matrices(call, weights)
    pairs = list(zip(matrices[::2], matrices[1::2], strict=False))
    size = pairs[0][1].shape[1] if pairs else 0
    odd = len(matrices) % 2 or any(of_state.shape[1] != size for _, of_state in pairs)
    if x is None or states is None or odd or not size or states.numel % (len(pairs) * size):
        return None
    batch = states.numel // (len(pairs) * size)
    # Packed sequences have fewer rows in their last steps; the steps here are those of full
    # batches.
    return RecurrentLayers(pairs, batch, size, -(-prod(x.shape[:-1]) // max(1, batch)))


def _matrices(call: Call, weights: Sequence[int]) -> list[Tensor]:
    """Return the weights of a call without its biases, which have one dimension."""
    given = [tensor for at in weights if at < len(call.inputs) for tensor in call.inputs[at] or ()]
    return [weight for weight in given if len(weight.shape) == 2]


def _parts(tokens: int, layers: RecurrentLayers, *, backward: bool) -> tuple[ComponentGemm, ...]:
    """Return the GEMMs of all layers and directions."""
    pairs, batch, size, steps = layers
    step_kernel = PartKernel.RECURRENT_STEP_GRADIENT if backward else PartKernel.RECURRENT_STEP
    parts: list[ComponentGemm] = []
    for of_input, _ in pairs:
        gates, features = of_input.shape
        item = of_input.item_bytes
        of_step, of_tokens = (
            (width, gates) if backward else (gates, width) for width in (size, features)
        )
        step = ComponentGemm(1, batch, *of_step, item, launches=STEP_LAUNCHES, kernel=step_kernel)
        together = 1.0
        if item > _NARROW_BYTES:
            longer = max(1.0, gates * size * item / _LAUNCHED_BYTES)
            together = min(len(pairs) ** _TOGETHER, longer)
        parts += [step._replace(times=steps / together), ComponentGemm(1, tokens, *of_tokens, item)]
        if backward:
            of_weights = ComponentGemm(1, gates, size, tokens, item)
            of_weights = of_weights._replace(kernel=PartKernel.RECURRENT_WEIGHT_GRADIENT)
            parts += [of_weights, of_weights._replace(n=features)]
    return tuple(parts)


RECURRENT: dict[str, Formula] = {
    "_cudnn_rnn": _recurrent([1], 4, 1),
    "_cudnn_rnn_backward": _recurrent([1], 4, 2),
    "mkldnn_rnn_layer": _recurrent([1, 2], 5, 1),
    "mkldnn_rnn_layer_backward": _recurrent([1, 2], 5, 2),
}
"""Base name -> formula."""
