"""The encoder layer that torch runs as one operator in inference, as the operators inside it.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call it without gradients (their "fast
path"). Its CUDA implementation calls other operators (native/transformers/transformer.cpp and
cuda/attention.cu), which a profile shows.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onerank.capture.no_device.operators.operator_calls import OperatorCall, is_on_gpu

_torch: Any = torch  # operators by name have no types


def parts_of_encoder(call: OperatorCall) -> Callable[..., Any] | None:
    """Return the function that runs an operator's parts on the GPU; None if it has none."""
    parts = _PARTS.get(call.schema.name)
    return parts if parts is not None and is_on_gpu(call.tensors[0]) else None


_OPTIONS = ("mask", "need_weights", "average_attn_weights", "mask_type")


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *operands: Any, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the attention's output, (batch, tokens, width), and its weights if they are wanted.

    A fused kernel runs attention of a sequence to itself without a mask and without its weights.
    """
    width, heads, weight, bias, out_weight, out_bias, *rest = operands
    options = dict(zip(_OPTIONS, rest, strict=False)) | named
    mask, need_weights = options.get("mask"), options.get("need_weights", True)
    itself = query is key and key is value
    if itself:
        projected = [*functional.linear(query, weight, bias).chunk(3, -1)]
    else:
        each = zip((query, key, value), weight.chunk(3), bias.chunk(3), strict=True)
        projected = [functional.linear(*operands) for operands in each]
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in projected)
    weights = None
    if itself and mask is None and not need_weights:
        attended = functional.scaled_dot_product_attention(q, k, v)
    else:
        scores = (q / sqrt(width // heads)) @ k.transpose(-2, -1)
        if mask is not None:
            # A mask of sequences has (batch, keys), one of positions (queries, keys).
            of_sequences = mask.dim() == 2 and mask.shape[0] == query.shape[0]
            hidden = mask[:, None, None] if of_sequences else mask
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = scores.softmax(-1)
        attended = weights @ v
    output = functional.linear(attended.transpose(1, 2).flatten(2), out_weight, out_bias)
    if not need_weights or weights is None:
        return output, None
    average = options.get("average_attn_weights", True)
    return output, weights.mean(1) if average else weights


def _encoder_layer(
    source: Tensor, width: int, heads: int, *parameters: Any, **masks: Any
) -> Tensor:
    """Return the output of a layer, (batch, tokens, width); its norms come first or last."""
    attention, norms = parameters[:4], (parameters[7:9], parameters[9:11])
    gelu, norm_first, epsilon = parameters[4:7]
    up, up_bias, down, down_bias, *mask = parameters[11:]
    given = mask[0] if mask else masks.get("mask")

    def norm(tensor: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.layer_norm(tensor, (width,), weight, bias, epsilon)

    x = norm(source, *norms[0]) if norm_first else source
    attended, _ = _attention(x, x, x, width, heads, *attention, mask=given, need_weights=False)
    attended = attended.add_(source)
    x = attended if norm_first else norm(attended, *norms[0])
    rows = (norm(x, *norms[1]) if norm_first else x).reshape(-1, width)
    activated = _torch._addmm_activation(up_bias, rows, up.t(), use_gelu=gelu)
    result = torch.addmm(down_bias, activated, down.t()).view(source.shape).add_(x)
    return result if norm_first else norm(result, *norms[1])


_PARTS: dict[str, Callable[..., Any]] = {
    "aten::_native_multi_head_attention": _attention,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
}
