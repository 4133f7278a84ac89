"""Recurrent layers as cuDNN runs them: one operator for all layers and time steps.

torch decides in C++ that it calls cuDNN (`at::lstm` and others in aten/src/ATen/native/RNN.cpp):
a build for the CPU never does, and a build for CUDA then needs a GPU. So the functions that
`torch.nn.LSTM`, `GRU` and `RNN` call are replaced by calls of the operator `_cudnn_rnn`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)

_torch: Any = torch  # operators by name have no types

OWNER = "torch._VF"
"""The module whose functions `torch.nn` calls."""

# `cudnnRNNMode_t`, by the name of torch's function.
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}

_LSTM = _MODES["lstm"]

# Numbers that a layer keeps for the backward in cuDNN's reserve space, per element of its state and
# by mode; the space's fixed bytes; and the bytes of which its dropout masks are a multiple. cuDNN
# does not document them: they are measured on an H100 with torch 2.11
# (benchmarks/results/2026-11-27-no-device-memory-2-h100.txt).
_KEPT = {0: 1, 1: 1, _LSTM: 5, _MODES["gru"]: 6}
_RESERVE_BYTES, _RESERVE_MULTIPLE = 256, 32

# `use_cudnn` in aten/src/ATen/native/RNN.cpp; other types run as GEMMs and elementwise operators.
# bfloat16 needs Ampere and cuDNN 9.13; PyTorch 2.11 comes with 9.19.
_TYPES = (torch.float16, torch.float32, torch.float64)


def recurrent_functions() -> dict[str, Callable[..., Any]]:
    """Return replacements of the functions in `OWNER`, by name."""
    return {name: _layer(getattr(torch._VF, name), mode) for name, mode in _MODES.items()}


def _layer(original: Callable[..., Any], mode: int) -> Callable[..., Any]:
    def run(source: Tensor, second: Any, *rest: Any) -> Any:
        if not isinstance(source, FakeTensor) or not source.is_cuda:
            return original(source, second, *rest)
        if not _runs_with_cudnn(source):
            return original(source, second, *rest)
        return _with_cudnn(source, second, rest, mode)

    return run


def _runs_with_cudnn(source: Tensor) -> bool:
    half = source.dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 0)
    return torch.backends.cudnn.enabled and source.numel() > 0 and (half or source.dtype in _TYPES)


def _with_cudnn(source: Tensor, second: Any, rest: Sequence[Any], mode: int) -> tuple[Tensor, ...]:
    """Call cuDNN's operator with the arguments of torch's function.

    Packed sequences have the sizes of their batches as the second argument, and no `batch_first`.
    """
    packed = isinstance(rest[1], list | tuple)
    sizes: list[int] = second.tolist() if packed else []
    states, weights, biased, layers, dropout, train, bidirectional, *first = (
        rest if packed else (second, *rest)
    )
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        source, states, weights = (_converted(each, dtype) for each in (source, states, weights))
    hidden, cell = states if mode == _LSTM else (states, None)
    size = (hidden if cell is None else cell).shape[2]
    projected = hidden.shape[2] if hidden.shape[2] != size else 0
    # Autocast's own kernel of the operator copies the weights into one buffer, which it addresses.
    with torch.autocast("cuda", enabled=False):
        output, last, last_cell, _, _ = _torch.ops.aten._cudnn_rnn(
            source, [*weights], (4 if biased else 2) + (projected > 0), None, hidden, cell, mode,
            size, projected, layers, bool(first and first[0]), dropout, train, bidirectional,
            sizes, None,
        )  # fmt: skip
    return (output, last, last_cell) if mode == _LSTM else (output, last)


def _converted(tensors: Any, dtype: torch.dtype) -> Any:
    if isinstance(tensors, Tensor):
        return tensors.to(dtype)
    return type(tensors)(tensor.to(dtype) for tensor in tensors)


def results_of_forward(*args: Any) -> tuple[Tensor, ...]:
    """Return output, last states, reserve space and weights of `_cudnn_rnn`.

    torch's fake implementation has an empty reserve space. The weights count as those that
    `flatten_parameters` put into one buffer, so they take no further memory.
    """
    source, _, _, _, hidden, cell, mode, size, projected, layers, *rest = args
    _, dropout, train, both, sizes, _ = rest
    directions = 2 if both else 1
    width = projected or size
    output = source.new_empty((*source.shape[:-1], width * directions))
    batch = sizes[0] if sizes else hidden.shape[1]
    last = hidden.new_empty((layers * directions, batch, width))
    last_cell = source.new_empty(0 if cell is None else (layers * directions, batch, size))
    tokens = source.numel() // source.shape[-1]
    # Each layer but the last also keeps its output. With dropout, each direction of the next layer
    # keeps a mask of one bit per element of that output.
    outputs = tokens * (layers - 1) * directions * size
    masks = -(-outputs * directions // 8 // _RESERVE_MULTIPLE) * _RESERVE_MULTIPLE
    kept = (tokens * layers * directions * size * _KEPT[mode] + outputs) * source.element_size()
    kept += _RESERVE_BYTES + (masks if dropout else 0)
    reserve = source.new_empty(kept if train else 0, dtype=torch.uint8)
    return output, last, last_cell, reserve, source.new_empty(0)


def results_of_backward(*args: Any) -> tuple[Any, ...]:
    """Return the gradients of input, states and weights of `_cudnn_rnn_backward`.

    The gradients of all weights are parts of one buffer there; here each has memory.
    """
    source, weights, _, _, hidden, cell, *_ = args
    of_input, of_hidden, of_cell, of_weights = args[-1]
    return (
        torch.empty_like(source) if of_input else None,
        torch.empty_like(hidden) if of_hidden else None,
        torch.empty_like(cell) if cell is not None and of_cell else None,
        [torch.empty_like(each) if of_weights else None for each in weights],
    )


# Numbers that a fused GRU cell keeps for its backward, per element of its state:
# `GRU_WORKSPACE_MULTIPLIER` in aten/src/ATen/native/cuda/RNN.cu.
_KEPT_BY_GRU_CELL = 5


def results_of_gru_cell(_: Tensor, __: Tensor, hidden: Tensor, *___: Any) -> tuple[Tensor, Tensor]:
    """Return the next state and the workspace of `_thnn_fused_gru_cell`."""
    batch, size = hidden.shape
    return torch.empty_like(hidden), hidden.new_empty((batch, _KEPT_BY_GRU_CELL * size))


def results_of_gru_cell_backward(
    of_state: Tensor, workspace: Tensor, biased: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of both gates, the state and both biases of a fused GRU cell."""
    batch, size = of_state.shape
    gates = [workspace.new_empty((batch, 3 * size)) for _ in range(2)]
    biases = [workspace.new_empty(3 * size) if biased else None for _ in range(2)]
    return *gates, torch.empty_like(of_state), *biases


def packed_sequence(
    source: Tensor, lengths: Tensor, batch_first: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the rows of `_pack_padded_sequence`, and how many sequences have each time step.

    The lengths are on the CPU, in descending order.

    Raises:
        DynamicOutputShapeException: the lengths depend on numbers that are not known.
    """
    del batch_first  # rows are those of all sequences, whatever their layout
    if isinstance(lengths, FakeTensor):
        raise DynamicOutputShapeException(_torch.ops.aten._pack_padded_sequence.default)
    with unset_fake_temporarily():
        known: list[int] = lengths.tolist()
        sizes = [sum(length > step for length in known) for step in range(max(known))]
        counts = torch.tensor(sizes, device="cpu")
    return source.new_empty((sum(known), *source.shape[2:])), counts
