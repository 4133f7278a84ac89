"""Packed sequences, each split among the ranks, as in TransformerEngine's `thd` format.

Each sequence is cut into 2 x size equal chunks; rank r holds chunks r and 2 x size - 1 - r
(megatron/core/utils.py, get_batch_on_this_cp_rank; TransformerEngine's
thd_get_partitioned_indices). So the work is balanced however sequences are packed. Each sequence is
causal by itself: kernels get the sequence offsets, and no mask is needed.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onerank.capture.parallelize.context.partial_attention import (
    AttentionMode,
    AttentionOutput,
    attend,
    attend_backward,
)
from onerank.ir.errors import SliceError

_aten: Any = torch.ops.aten

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Lengths:
    """Lengths of concatenated sequences.

    Attributes:
        each: tokens of each sequence.
        starts: first token of each sequence, and the end: [sequences + 1], int32, on the device.
    """

    each: tuple[int, ...]
    starts: Tensor

    @classmethod
    def of(cls, each: Sequence[int], device: torch.device) -> "Lengths":
        ends = [0, *itertools.accumulate(each)]
        return cls(tuple(each), torch.tensor(ends, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class Packing:
    """The packed sequences of a rank's part, with the rows of the batch concatenated.

    Attributes:
        places: index of each token of the part in the flattened batch, [rows x part].
        longest: tokens of the longest sequence over all ranks.
        whole: tokens of each sequence in the part.
        half: half of `whole`, one chunk.
        first: indices of the first chunks in the part.
        second: indices of the second chunks in the part.
    """

    places: Tensor
    longest: int
    whole: Lengths
    half: Lengths
    first: Tensor
    second: Tensor

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's chunks of each sequence of [batch, sequence, ...]."""
        return x.flatten(0, 1)[self.places].unflatten(0, (x.shape[0], -1))


def packing_of(documents: Tensor, rank: int, size: int) -> Packing:
    """Cut packed sequences among ranks.

    Args:
        documents: index of each token's sequence, [batch, sequence].
        rank: rank in the group.
        size: size of the group.

    Raises:
        SliceError: a sequence is not a multiple of 2 x size.
    """
    rows = torch.arange(len(documents), device=documents.device).unsqueeze(1)
    numbered = (documents + rows * documents.shape[1]).flatten()
    lengths: list[int] = torch.unique_consecutive(numbered, return_counts=True)[1].tolist()
    odd = next((length for length in lengths if length % (2 * size)), None)
    if odd is not None:
        raise SliceError(
            f"--cp-comm p2p cuts each packed sequence into 2 x {size} = {2 * size} chunks, and one "
            f"has {odd} tokens ({odd} = {2 * size} x {odd // (2 * size)} + {odd % (2 * size)}): "
            "pad each, as for TransformerEngine's thd format, or use --cp-comm all_gather",
            code="cp-packed-indivisible",
        )
    chunks = [length // (2 * size) for length in lengths]
    starts = itertools.accumulate(lengths, initial=0)
    places, halves = list[int](), (list[int](), list[int]())
    for start, chunk in zip(starts, chunks, strict=False):
        for number, index in enumerate((rank, 2 * size - 1 - rank)):
            halves[number].extend(range(len(places), len(places) + chunk))
            places += range(start + index * chunk, start + (index + 1) * chunk)
    device = documents.device
    indices = [torch.tensor(one, device=device) for one in (places, *halves)]
    whole, half = (Lengths.of([n * chunk for chunk in chunks], device) for n in (2, 1))
    return Packing(indices[0], max(lengths), whole, half, indices[1], indices[2])


def attend_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    how: AttentionMode,
    causal: bool,
    lengths: tuple[Lengths, Lengths],
) -> AttentionOutput:
    """Attend within each packed sequence, as `partial_attention.attend` does for one.

    Args:
        query: [1, heads, all queries, width].
        key: [1, key heads, all keys, width].
        value: in the shape of the keys.
        how: scale and dropout.
        causal: as for `attend`.
        lengths: lengths of the queries and of the keys.

    Raises:
        SliceError: the CUDA kernels do not support the dtype or the widths.
    """
    if query.is_cuda:
        _check(query, value)
        output, sums, seed, offset, _ = _aten._flash_attention_forward(
            *(x[0].transpose(0, 1) for x in (query, key, value)),
            *_kernel_lengths(lengths),
            *(how.dropout, causal, False),
            scale=how.scale,
        )
        return AttentionOutput(output.transpose(0, 1)[None], sums[None], (seed, offset))
    parts = [
        attend(*one, how=how, causal=causal)
        for one in zip(*_each(query, key, value, lengths=lengths), strict=True)
    ]
    return AttentionOutput(
        torch.cat([part.output for part in parts], dim=2),
        torch.cat([part.log_sums for part in parts], dim=2),
        tuple(drawn for part in parts for drawn in part.random),
    )


def attend_each_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of: AttentionOutput,
    *,
    how: AttentionMode,
    causal: bool,
    lengths: tuple[Lengths, Lengths],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from the gradient of the output."""
    if query.is_cuda:
        flash_gradients = _aten._flash_attention_backward(
            *(x[0].transpose(0, 1) for x in (gradient, query, key, value, of.output)),
            *(
                of.log_sums[0].contiguous(),
                *_kernel_lengths(lengths),
                how.dropout,
                causal,
                *of.random,
            ),
            scale=how.scale,
        )
        for_query, for_key, for_value = (one.transpose(0, 1)[None] for one in flash_gradients)
        return for_query, for_key, for_value
    queries = lengths[0]
    drawn = len(of.random) // len(queries.each)
    gradients: list[tuple[Tensor, ...]] = []
    outputs, sums, wanted = (
        x.split(queries.each, dim=2) for x in (of.output, of.log_sums, gradient)
    )
    for at, (own, keys, values) in enumerate(
        zip(*_each(query, key, value, lengths=lengths), strict=True)
    ):
        random = of.random[at * drawn : (at + 1) * drawn]
        of_one = AttentionOutput(outputs[at], sums[at], random)
        gradients.append(
            attend_backward(wanted[at], own, keys, values, of_one, how=how, causal=causal)
        )
    for_query, for_key, for_value = (
        torch.cat(each, dim=2) for each in zip(*gradients, strict=True)
    )
    return for_query, for_key, for_value


def _each(query: Tensor, *keyed: Tensor, lengths: tuple[Lengths, Lengths]) -> list[Any]:
    """Split queries, keys and values into sequences."""
    queries, keys = lengths
    return [query.split(queries.each, dim=2), *(x.split(keys.each, dim=2) for x in keyed)]


def _kernel_lengths(lengths: tuple[Lengths, Lengths]) -> tuple[Any, ...]:
    """Return starts and maximal lengths of queries and keys, in the kernels' order."""
    return (*(one.starts for one in lengths), *(max(one.each) for one in lengths))


def _check(query: Tensor, value: Tensor) -> None:
    if query.dtype not in _HALVES or query.shape[-1] != value.shape[-1]:
        raise SliceError(
            f"--cp-comm p2p: packed sequences on a ring need FlashAttention's kernels, for "
            f"bfloat16 and float16 and values as wide as keys; found {query.dtype}, keys of "
            f"{query.shape[-1]} features and values of {value.shape[-1]}: use --cp-comm all_gather",
            code="cp-ring-packed-kernel",
        )
