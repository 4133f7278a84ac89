"""cuDNN's attention, as TransformerEngine's extension calls it.

Signatures are those of version 2.20 (pytorch/csrc/extensions/attention.cpp). FLOPs:
`annotate/op_costs/library_operators/`.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from onerank.capture.no_device.event_log import Shaped
from onerank.capture.no_device.extensions.emulated_modules import Launch
from onerank.capture.no_device.extensions.transformer_engine_tensors import (
    AttentionBackend,
    DType,
    allocate,
    arguments_by_name,
    data_and_scale,
    parts_of,
)

# Type of mask -> that of torch's attention: 1 causal, 2 causal and aligned with the last key.
_CAUSAL = {2: 1, 3: 1, 4: 2, 5: 2}


def get_fused_attn_backend(_: Launch, *args: Any) -> Any:
    """Return cuDNN's kernels, for 8 bits if queries are in 8 bits.

    They refuse cases such as wide heads, which is not modelled here. Since version 2.20 the only
    argument is a record, and the reason of a refusal is a second result.
    """
    dtype = args[0].qkv_dtype if len(args) == 1 else args[1]
    eight = int(dtype) in (DType.kFloat8E4M3, DType.kFloat8E5M2)
    backend = AttentionBackend.NVTE_FP8 if eight else AttentionBackend.NVTE_F16_arbitrary_seqlen
    return (backend, "") if len(args) == 1 else backend


def _format(layout: Any, *, of_keys: bool) -> str:
    """Return the order of dimensions of queries or keys: "SBHD", "BSHD", "THD" or "BHSD"."""
    name = layout.name.removeprefix("NVTE_").removeprefix("Paged_KV_")
    parts = [part.replace("2", "").replace("3", "") for part in name.split("_")]
    return parts[-1] if of_keys else parts[0]


def _by_sequence(tensor: Any, order: str) -> Any:
    """Return (batch, sequence, heads, width) of an operand; packed ones stay."""
    data, dtype, _ = data_and_scale(tensor, by_columns=False)
    sizes = dict(zip(order, tensor.size(), strict=True))
    if "T" in sizes:
        return Shaped(data, dtype, [sizes[axis] for axis in "THD"])
    return Shaped(data, dtype, [sizes[axis] for axis in "BSHD"])


def _queries_and_keys(given: SimpleNamespace) -> list[Any]:
    """Return queries, keys and values, the mask, and what gives the lengths of packed sequences.

    These are the boundaries of queries, the longest queries and keys, and the boundaries of keys.
    """
    order = _format(given.qkv_layout, of_keys=False)
    key_order = _format(given.qkv_layout, of_keys=True)
    operands = zip((given.q, given.k, given.v), (order, key_order, key_order), strict=True)
    longest = (given.max_seqlen_q, given.max_seqlen_kv)
    return [
        *(_by_sequence(*each) for each in operands),
        _CAUSAL.get(int(given.attn_mask_type), 0),
        *(
            [given.cu_seqlens_q, *longest, given.cu_seqlens_kv]
            if "T" in order
            else [None, 0, 0, None]
        ),
    ]


_FORWARD = (
    "max_seqlen_q max_seqlen_kv is_training attn_scale p_dropout set_zero qkv_layout o_format "
    "qkv_scale_inv_format bias_type attn_mask_type softmax_type window_size bottom_right_diagonal "
    "cu_seqlens_q cu_seqlens_kv q k v fake_dtype cu_seqlens_q_padded cu_seqlens_kv_padded "
    "page_table_k page_table_v s_quantizer o_quantizer bias softmax_offset rng_gen "
    "rng_elts_per_thread return_max_logit cuda_graph"
).split()


def fused_attn_fwd(launch: Launch, *args: Any) -> list[Any]:
    """Return the result of cuDNN's attention, statistics of its softmax and the random state."""
    given = arguments_by_name(_FORWARD, args, {})
    order = _format(given.qkv_layout, of_keys=False)
    sizes = dict(zip(order, given.q.size(), strict=True)) | {"D": given.v.size()[-1]}
    result_order = given.o_format.name.removeprefix("NVTE_").rpartition("2")[2]
    shape = [sizes[axis] for axis in result_order]
    out = allocate(launch, given.o_quantizer, shape, given.fake_dtype)
    heads, batch = sizes["H"], given.cu_seqlens_q.numel() - 1
    shape = (sizes["T"], heads, 1) if "T" in sizes else (batch, heads, given.max_seqlen_q, 1)
    statistics = [
        torch.empty(shape, dtype=torch.float32, device="cuda")
        for _ in range(2 if given.return_max_logit else 1)
    ]
    random = torch.empty(2, dtype=torch.int64, device="cuda")
    added = [each for each in (given.bias, given.softmax_offset) if each is not None]
    reads = [*_queries_and_keys(given), *added]
    launch("fused_attn_fwd", reads, [*parts_of(out)[:1], *statistics])
    return [out, *statistics, random, *added]


_BACKWARD = (
    "max_seqlen_q max_seqlen_kv attn_scale p_dropout set_zero qkv_layout o_format do_format "
    "dqkv_layout qkv_scale_inv_format do_scale_inv_format bias_type attn_mask_type softmax_type "
    "window_size bottom_right_diagonal deterministic cu_seqlens_q cu_seqlens_kv q k v o d_o "
    "fake_dtype aux_ctx_tensors cu_seqlens_q_padded cu_seqlens_kv_padded s_quantizer dp_quantizer "
    "dqkv_quantizer cuda_graph"
).split()

_WITH_BIAS = (1, 2)  # before or after the scale


def fused_attn_bwd(launch: Launch, *args: Any) -> list[Any]:
    """Return the gradients of queries, keys, values, bias and the offset of the softmax."""
    given = arguments_by_name(_BACKWARD, args, {})
    shapes = [tuple(each.size()) for each in (given.q, given.k, given.v)]
    gradients = _interleaved(given.dqkv_layout, shapes, given.fake_dtype)
    bias = None
    if int(given.bias_type) in _WITH_BIAS:
        bias = torch.empty_like(given.aux_ctx_tensors[-1])
    outputs = [data_and_scale(each, by_columns=False)[0] for each in (given.o, given.d_o)]
    saved = [each for each in given.aux_ctx_tensors if each.is_floating_point()]
    reads = [*_queries_and_keys(given), *outputs, *saved]
    launch("fused_attn_bwd", reads, [*gradients, *([bias] if bias is not None else [])])
    return [*gradients, bias, None]


def _interleaved(
    layout: Any, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> list[Tensor]:
    """Allocate gradients of queries, keys and values, in one tensor where a layout has one."""
    parts = layout.name.removeprefix("NVTE_").removeprefix("Paged_KV_").split("_")
    results: list[Tensor] = []
    for part in parts:
        shape = shapes[len(results)]
        count = next((int(digit) for digit in "23" if digit in part), 1)
        if count == 1:
            results.append(torch.empty(shape, dtype=dtype, device="cuda"))
            continue
        # "SB3HD": before the heads; "SBH3D": before a head's numbers.
        axis = len(shape) - (2 if part.endswith("HD") and part[-3].isdigit() else 1)
        whole = torch.empty((*shape[:axis], count, *shape[axis:]), dtype=dtype, device="cuda")
        results.extend(whole.select(axis, at) for at in range(count))
    return results
