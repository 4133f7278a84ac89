"""Bytes of the workspaces that cuDNN and kernels of attention take while an operator runs.

cuDNN does not document them. The rules follow the caching allocator's events of single operators on
an H200 with torch 2.11 and cuDNN 9.19 (benchmarks/results, 2026-11-28-convolutions-h200.txt), where
`torch.backends.cudnn.benchmark` is off, so that cuDNN's heuristics choose.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

_FLOAT_BYTES = 4
_MIB = 1 << 20


def workspace_bytes(operator: str, args: Sequence[Any], results: Sequence[Tensor]) -> Sequence[int]:
    """Return the bytes of each block that an operator takes while it runs; none without a rule.

    Args:
        operator: its name, without its namespace.
        args: its arguments, in the schema's order.
        results: tensors that it returns.
    """
    rule = _RULES.get(operator)
    return [size for size in rule(args, results) if size] if rule is not None else ()


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# Attention ----------------------------------------------------------------------------------------


def _cudnn_attention_backward(args: Sequence[Any], _: Sequence[Tensor]) -> Sequence[int]:
    """A float32 gradient of the query [batch, heads, rows, d], and a sum for each row.

    If query heads share keys, the gradients of key and value of each query head, too. 70 of 70
    measured calls have exactly these bytes.
    """
    query, key, value = args[1:4]
    batch, heads, rows, width = query.shape
    of_query = _FLOAT_BYTES * batch * heads * rows * (width + 1)
    shared = heads != key.shape[1]
    of_heads = batch * heads * key.shape[2] * (width + value.shape[3]) if shared else 0
    return (of_query + of_heads * query.element_size() + 256,)


# Rows of a block, and the widths of a head up to and above which its padding differs.
_FLASH_ROWS, _NARROW_HEAD, _FLASH_PADDING = 128, 128, (32, 64)


def _flash_of_heads(args: Sequence[Any], results: Sequence[Tensor]) -> Sequence[int]:
    """The same as `_flash_attention_backward` for operands [batch, heads, rows, d]."""
    turned = (each.transpose(1, 2) for each in args[:3])
    return _flash_attention_backward([*turned, *args[3:]], results)


def _flash_attention_backward(args: Sequence[Any], _: Sequence[Tensor]) -> Sequence[int]:
    """The sum for each row, a float32 gradient of the query, and those of key and value per head.

    Source: `mha_bwd` and `mha_varlen_bwd` in csrc/flash_attn/flash_api.cpp of FlashAttention 2.
    Operands are [batch, rows, heads, d], or [tokens, heads, d] for packed sequences.
    """
    query, key = args[1:3]
    boundaries, longest = args[6], args[8]
    heads, width = query.shape[-2:]
    padded = _rounded_up(width, _FLASH_PADDING[width > _NARROW_HEAD])
    if boundaries is None:
        rows = of_sums = query.shape[0] * _rounded_up(query.shape[1], _FLASH_ROWS)
    else:
        batch = boundaries.shape[0] - 1
        rows = query.shape[0] + _FLASH_ROWS * batch
        of_sums = batch * _rounded_up(int(longest), _FLASH_ROWS)
    sizes = [_FLOAT_BYTES * heads * of_sums, _FLOAT_BYTES * rows * heads * padded]
    if heads != key.shape[-2]:
        of_heads = key.numel() // key.shape[-2] * heads * key.element_size()
        sizes += [of_heads, of_heads]
    return sizes


# Widths of heads, and rows of a block, of memory-efficient attention in 16 bits. Wider heads were
# not measured.
_EFFICIENT_WIDTHS, _BLOCK_BYTES = (64, 128), 16


def _efficient_of_heads(args: Sequence[Any], _: Sequence[Tensor]) -> Sequence[int]:
    """The sum for each row, and a float32 gradient of the query in blocks with a counter each."""
    batch, heads, rows, width = args[1].shape
    padded = next((most for most in _EFFICIENT_WIDTHS if width <= most), None)
    if padded is None or args[1].element_size() != 2:
        return ()
    blocks = batch * heads * -(-rows // padded)
    sums = _FLOAT_BYTES * batch * heads * rows
    return sums, blocks * (padded * padded * _FLOAT_BYTES + _BLOCK_BYTES)


# Recurrent layers ---------------------------------------------------------------------------------

_LSTM = 2  # `cudnnRNNMode_t`
_LAYER_BYTES = 8 * _MIB

# Numbers of each time step and sequence: states and inputs of a layer alone, and of several; and
# states of each layer and sequence. By whether it is an LSTM and has two directions. 264 calls of
# one to four layers, and 19 whose inputs have other sizes than their states. Persistent kernels of
# small layers, up to 128 numbers in 32 bits, take up to three times as much.
_STATE_NUMBERS = {
    (True, False): ((5, 1), (5, 1), 10),
    (True, True): ((14, 1), (14, 1), 24),
    (False, False): ((4, 2), (4, 1), 13),
    (False, True): ((12, 1), (13, 1), 14),
}


def _recurrent(args: Sequence[Any], _: Sequence[Tensor], *, mode_at: int) -> Sequence[int]:
    """The weights, 8 MiB for each layer and direction, and gates and states of all steps.

    Args:
        args: the input [steps, batch, features], the weights, and the state [layers and directions,
            batch, size] are the first, the second and the fifth.
        mode_at: place of the layer's kind; whether it has two directions is seven places later.
    """
    source, weights, hidden = args[0], args[1], args[4]
    layers, batch, size = hidden.shape
    both = bool(args[mode_at + 7])
    item = source.element_size()
    matrices = sum(weight.numel() for weight in weights if weight.dim() > 1)
    tokens = source.numel() // source.shape[-1]
    alone, among, of_layer = _STATE_NUMBERS[args[mode_at] == _LSTM, both]
    states, inputs = among if layers > 1 + both else alone
    numbers = tokens * (states * size + inputs * source.shape[-1])
    numbers += of_layer * size * batch * layers // (1 + both)
    return (item * (matrices + numbers) + layers * _LAYER_BYTES,)


# Convolutions -------------------------------------------------------------------------------------

# cuDNN's kernels for tensor cores take images with the channels last, and in 16 bits a multiple of
# eight channels. The workspace holds copies of operands and results that are laid out otherwise,
# and float32 sums of the parts among which the gradient of a filter is divided. 339 convolutions:
# copies are exact in the median; the sums are the mean of up to 15 MB.
_CHANNELS, _WIDE_BYTES = 8, 4
_SUMS_BYTES = {2: _MIB, 4: 8 * _MIB}


class _Convolution(NamedTuple):
    """A convolution between two images [batch, channels, ...], whose result may be either."""

    image: Tensor
    weight: Tensor
    result: Tensor
    stride: Sequence[int]
    groups: int

    @property
    def is_depthwise(self) -> bool:
        """Whether it runs kernels without a workspace."""
        return self.groups > 1 and self.weight.shape[1] == 1

    @property
    def is_pointwise(self) -> bool:
        """Whether each point is multiplied by one matrix."""
        return prod(self.weight.shape[2:]) == 1 and {*self.stride} <= {1}

    @property
    def copied_bytes(self) -> int:
        """Bytes of the operands and results that cuDNN copies."""
        if self.is_depthwise:
            return 0
        images = (self.image, self.result)
        padded = [image for image in images if self._padded(image.shape[1]) != image.shape[1]]
        last, has_window = self._is_channels_last, prod(self.weight.shape[2:]) > 1
        copied = padded if last or (self.is_pointwise and not padded) else images
        of_filter = self._filter_bytes if padded or (has_window and not last) else 0
        return sum(map(self._image_bytes, copied)) + of_filter

    @property
    def gradient_bytes(self) -> int:
        """Bytes of copies and sums for the gradient of the filter."""
        if self.is_depthwise:
            return 0
        if self.is_pointwise and not self._is_channels_last and not self.copied_bytes:
            # A product for each image, unless copies take less.
            products = self.image.shape[0] * self.weight.numel() * _FLOAT_BYTES
            return min(products, self.image.nbytes + self.result.nbytes)
        return self.copied_bytes + _SUMS_BYTES[min(self.image.element_size(), _WIDE_BYTES)]

    @property
    def _is_channels_last(self) -> bool:
        formats = (suggest_memory_format(each) for each in (self.image, self.weight))
        return any(each is not torch.contiguous_format for each in formats)

    def _padded(self, channels: int) -> int:
        return _rounded_up(channels, _CHANNELS if self.image.element_size() < _WIDE_BYTES else 1)

    def _image_bytes(self, image: Tensor) -> int:
        channels = image.shape[1]
        return image.nbytes // channels * self._padded(channels)

    @property
    def _filter_bytes(self) -> int:
        few, channels = self._padded(self.weight.shape[0]), self._padded(self.weight.shape[1])
        return few * channels * prod(self.weight.shape[2:]) * self.weight.element_size()


def _convolution(args: Sequence[Any], results: Sequence[Tensor]) -> Sequence[int]:
    image, weight, _, stride, *_, groups = args[:9]
    if image.dim() != weight.dim():
        return ()
    return (_Convolution(image, weight, results[0], stride, groups).copied_bytes,)


def _convolution_backward(args: Sequence[Any], _: Sequence[Tensor]) -> Sequence[int]:
    gradient, image, weight, _, stride, *_, groups, (of_image, of_filter, _) = args
    convolution = _Convolution(image, weight, gradient, stride, groups)
    sizes = (
        convolution.copied_bytes if of_image else 0,
        convolution.gradient_bytes if of_filter else 0,
    )
    return (max(sizes),)


_RULES: dict[str, Callable[[Sequence[Any], Sequence[Tensor]], Sequence[int]]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_cudnn_rnn": partial(_recurrent, mode_at=6),
    "_cudnn_rnn_backward": partial(_recurrent, mode_at=10),
    "_cudnn_attention_backward": _cudnn_attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_of_heads,
    "_scaled_dot_product_efficient_attention_backward": _efficient_of_heads,
}
