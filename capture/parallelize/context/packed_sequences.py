"""Packed sequences, each split among the ranks, as in TransformerEngine's `thd` format.

Each sequence is cut into 2 x size equal chunks; rank r holds chunks r and 2 x size - 1 - r
(megatron/core/utils.py, get_batch_on_this_cp_rank; TransformerEngine's
thd_get_partitioned_indices). Cutting every sequence balances the work for any packing. Attention is
causal within each sequence: kernels get the sequence offsets and need no mask.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onerank.capture.parallelize.context.partial_attention import (
    HALF_TYPES,
    AttentionCall,
    AttentionOutput,
    attend,
    attend_backward,
)
from onerank.ir.errors import SliceError, division

_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Lengths:
    """Lengths of concatenated sequences.

    Attributes:
        per_sequence: tokens of each sequence.
        starts: first token of each sequence, and the end: [sequences + 1], int32, on the device.
    """

    per_sequence: tuple[int, ...]
    starts: Tensor

    @classmethod
    def of(cls, per_sequence: Sequence[int], device: torch.device) -> "Lengths":
        ends = [0, *itertools.accumulate(per_sequence)]
        return cls(tuple(per_sequence), torch.tensor(ends, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class Packing:
    """The packed sequences of a rank's part, with the rows of the batch concatenated.

    Attributes:
        token_indices: index of each token of the part in the flattened batch, [rows x part].
        longest: tokens of the longest sequence over all ranks.
        whole: tokens of each sequence in the part.
        half: half of `whole`, one chunk.
        first: indices of the first chunks in the part.
        second: indices of the second chunks in the part.
    """

    token_indices: Tensor
    longest: int
    whole: Lengths
    half: Lengths
    first: Tensor
    second: Tensor

    def local_chunks(self, x: Tensor) -> Tensor:
        """Return this rank's chunks of each sequence of [batch, sequence, ...]."""
        return x.flatten(0, 1)[self.token_indices].unflatten(0, (x.shape[0], -1))


def packing_of(documents: Tensor, rank: int, size: int) -> Packing:
    """Cut packed sequences among ranks.

    Args:
        documents: index of each token's sequence, [batch, sequence].
        rank: rank in the group.
        size: size of the group.

    Raises:
        SliceError: a sequence is not a multiple of 2 x size.
    """
    row_indices = torch.arange(len(documents), device=documents.device).unsqueeze(1)
    # Indices restart in each row, so two rows' sequences would merge where the rows meet.
    sequence_ids = (documents + row_indices * documents.shape[1]).flatten()
    lengths: list[int] = torch.unique_consecutive(sequence_ids, return_counts=True)[1].tolist()
    odd = next((length for length in lengths if length % (2 * size)), None)
    if odd is not None:
        raise SliceError(
            f"--cp-comm p2p cuts each packed sequence into 2 x {size} = {2 * size} chunks, and one "
            f"has {odd} tokens ({division(odd, 2 * size)}): "
            "pad each, as for TransformerEngine's thd format, or use --cp-comm all_gather",
            code="cp-packed-indivisible",
        )
    chunks = [length // (2 * size) for length in lengths]
    starts = itertools.accumulate(lengths, initial=0)
    token_indices, halves = list[int](), (list[int](), list[int]())
    for start, chunk in zip(starts, chunks, strict=False):
        for number, index in enumerate((rank, 2 * size - 1 - rank)):
            halves[number].extend(range(len(token_indices), len(token_indices) + chunk))
            token_indices += range(start + index * chunk, start + (index + 1) * chunk)
    # Built on the host as lists and copied once, since each small tensor operation would be a
    # kernel.
    device = documents.device
    indices = [torch.tensor(positions, device=device) for positions in (token_indices, *halves)]
    whole, half = (Lengths.of([n * chunk for chunk in chunks], device) for n in (2, 1))
    return Packing(indices[0], max(lengths), whole, half, indices[1], indices[2])


def attend_packed(call: AttentionCall, lengths: tuple[Lengths, Lengths]) -> AttentionOutput:
    """Attend within each packed sequence, as `partial_attention.attend` does for one.

    Args:
        call: queries [1, heads, all queries, width] and keys [1, key heads, all keys, width]; a
            window or a mask is not supported.
        lengths: lengths of the queries and of the keys.

    Raises:
        SliceError: the CUDA kernels do not support the dtype or the widths.
    """
    if call.query.is_cuda:
        # The kernel behind torch's varlen attention; scaled_dot_product_attention has no offsets.
        _check_flash(call.query, call.value)
        output, sums, seed, offset, _ = _aten._flash_attention_forward(
            *(x[0].transpose(0, 1) for x in call.operands),
            *_kernel_lengths(lengths),
            call.mode.dropout,
            call.causal,
            False,
            scale=call.mode.scale,
        )
        return AttentionOutput(output.transpose(0, 1)[None], sums[None], (seed, offset))
    parts = [attend(sequence) for sequence in _sequences(call, lengths)]
    return AttentionOutput(
        torch.cat([part.output for part in parts], dim=2),
        torch.cat([part.logsumexp for part in parts], dim=2),
        tuple(state for part in parts for state in part.dropout_state),
    )


def attend_packed_backward(
    call: AttentionCall,
    lengths: tuple[Lengths, Lengths],
    forward: AttentionOutput,
    grad_output: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value within each packed sequence.

    Args:
        call: as for `attend_packed`.
        lengths: as for `attend_packed`.
        forward: the output of `attend_packed`, or of a merge over several parts of the keys.
        grad_output: gradient of the output, [1, heads, all queries, value width].
    """
    if call.query.is_cuda:
        flash_gradients = _aten._flash_attention_backward(
            *(x[0].transpose(0, 1) for x in (grad_output, *call.operands, forward.output)),
            forward.logsumexp[0].contiguous(),
            *_kernel_lengths(lengths),
            call.mode.dropout,
            call.causal,
            *forward.dropout_state,
            scale=call.mode.scale,
        )
        grad_query, grad_key, grad_value = (grad.transpose(0, 1)[None] for grad in flash_gradients)
        return grad_query, grad_key, grad_value
    queries = lengths[0].per_sequence
    states_per_sequence = len(forward.dropout_state) // len(queries)
    gradients: list[tuple[Tensor, ...]] = []
    outputs, sums, grad_outputs = (
        x.split(queries, dim=2) for x in (forward.output, forward.logsumexp, grad_output)
    )
    for index, sequence in enumerate(_sequences(call, lengths)):
        dropout_state = forward.dropout_state[
            index * states_per_sequence : (index + 1) * states_per_sequence
        ]
        sequence_forward = AttentionOutput(outputs[index], sums[index], dropout_state)
        gradients.append(attend_backward(sequence, sequence_forward, grad_outputs[index]))
    grad_query, grad_key, grad_value = (
        torch.cat(parts, dim=2) for parts in zip(*gradients, strict=True)
    )
    return grad_query, grad_key, grad_value


def _sequences(call: AttentionCall, lengths: tuple[Lengths, Lengths]) -> list[AttentionCall]:
    """Return the call of each sequence of a packed one."""
    queries, keys = lengths
    split = (
        call.query.split(queries.per_sequence, dim=2),
        *(x.split(keys.per_sequence, dim=2) for x in (call.key, call.value)),
    )
    return [
        replace(call, query=query, key=key, value=value)
        for query, key, value in zip(*split, strict=True)
    ]


def _kernel_lengths(lengths: tuple[Lengths, Lengths]) -> tuple[Any, ...]:
    """Return starts and maximal lengths of queries and keys, in the kernels' order."""
    return (*(side.starts for side in lengths), *(max(side.per_sequence) for side in lengths))


def _check_flash(query: Tensor, value: Tensor) -> None:
    """Raise SliceError for dtypes and widths that torch's FlashAttention does not support."""
    # FlashAttention has 16-bit kernels with one width only.
    if query.dtype not in HALF_TYPES or query.shape[-1] != value.shape[-1]:
        raise SliceError(
            f"--cp-comm p2p: packed sequences on a ring need FlashAttention's kernels, for "
            f"bfloat16 and float16 and values as wide as keys; found {query.dtype}, keys of "
            f"{query.shape[-1]} features and values of {value.shape[-1]}: use --cp-comm all_gather",
            code="cp-ring-packed-kernel",
        )
