"""The record of a collective or point-to-point call: request, group, bytes."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from onerank.ir.errors import CaptureError

_DTYPES = {
    getattr(torch, name): name
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
}


WorkPhase = Literal["forward", "backward"]


class CommCall(msgspec.Struct, frozen=True):
    """One collective or point-to-point call, as asked for.

    Attributes:
        sequence: 0, 1, 2 ... in issue order within this process.
        collective: all_reduce, reduce, all_gather, gather, scatter, broadcast, all_to_all,
            reduce_scatter, barrier, send or recv.
        group: name of the process group: what its creator called it, else torch's name for it.
        group_ranks: global ranks of the group, in group order.
        bytes: bytes of the per-rank input. All-reduce and reduce-scatter: the full tensor;
            all-to-all: the full local buffer; all-gather and gather: the own shard; broadcast,
            reduce, send and recv: the tensor; scatter: the parts of all ranks together, as NCCL
            counts it on each of them; barrier: 0.
        dtype: "bfloat16". "uint8" for a barrier, and for a coalesced gather of several types.
        elements: how many of that dtype.
        peer: global rank: destination of a send, source of a recv (None: any), root of a broadcast,
            reduce, gather or scatter.
        tag: tag of a send or recv.
        asynchronous: whether the caller may go on before the call is done.
        in_split_sizes: rows for each rank, where an all-to-all states them.
        out_split_sizes: rows from each rank, where an all-to-all states them.
        phase: forward for activations, backward for gradients that a stage of a pipeline sends or
            receives; None where that is not known.
        micro_batch: which they are of, from 0 in each step.
        reduction: of a reduction, torch's name for what it does: sum, avg, premul_sum, max ...
    """

    sequence: int
    collective: str
    group: str
    group_ranks: tuple[int, ...]
    bytes: int
    dtype: str
    elements: int
    peer: int | None
    tag: int | None
    asynchronous: bool
    in_split_sizes: tuple[int, ...]
    out_split_sizes: tuple[int, ...]
    phase: WorkPhase | None = None
    micro_batch: int | None = None
    reduction: str | None = None


class Group(NamedTuple):
    """A process group as this process sees it."""

    name: str
    ranks: tuple[int, ...]
    rank: int  # this process's place among them
    high_priority: bool = False  # whether its own stream goes before others

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)


class Payload(NamedTuple):
    """What a call moves."""

    dtype: str
    elements: int
    bytes: int

    def times(self, count: int) -> "Payload":
        """Return as many of it."""
        return Payload(self.dtype, self.elements * count, self.bytes * count)


def as_json(call: CommCall) -> str:
    """Write a call without its group's ranks: 100,000 of them would cost half a millisecond."""
    rest = _rest_as_json(
        call.collective,
        call.group,
        call.bytes,
        call.dtype,
        call.elements,
        call.peer,
        call.tag,
        call.asynchronous,
        call.in_split_sizes,
        call.out_split_sizes,
        call.phase,
        call.micro_batch,
        call.reduction,
    )
    return f'{{"sequence":{call.sequence},{rest}'


@lru_cache(maxsize=4096)
def _rest_as_json(*values: object) -> str:
    """Write what a call shares with that of the step before: the host has little time for it."""
    names = [name for name in CommCall.__struct_fields__ if name not in ("sequence", "group_ranks")]
    return msgspec.json.encode(dict(zip(names, values, strict=True))).decode().removeprefix("{")


def payload_of(collective: str, tensors: Sequence[Tensor]) -> Payload:
    """Add up what tensors hold.

    Raises:
        CaptureError: a type is not known, or they are of several and the call takes one.
    """
    elements, size, dtypes = 0, 0, set[str]()
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise CaptureError(
                f"{collective} of dtype {tensor.dtype}: the recorder knows "
                f"{', '.join(_DTYPES.values())}; view the tensor as one of them (uint8 always "
                "fits)",
                code="collective-unknown-dtype",
            )
        dtypes.add(_DTYPES[tensor.dtype])
        elements += tensor.numel()
        size += tensor.numel() * tensor.element_size()
    if not dtypes:  # a barrier
        return Payload("uint8", 0, 0)
    if len(dtypes) == 1:
        return Payload(dtypes.pop(), elements, size)
    if collective == "all_gather":  # it only moves bytes, and NCCL takes mixed types there
        return Payload("uint8", size, size)
    raise CaptureError(
        f"one {collective} of several dtypes ({', '.join(sorted(dtypes))}): issue one call for "
        "each",
        code="collective-mixed-dtypes",
    )
