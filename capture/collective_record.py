"""The record of a collective or point-to-point call: kind, group, bytes, peer."""

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


# The garbage collector does not track them (`gc=False`): a step adds hundreds, and their number
# decides how often it runs. None can be part of a cycle.
class CommCall(msgspec.Struct, frozen=True, gc=False):
    """A collective or point-to-point call as the job issues it.

    Attributes:
        sequence: 0, 1, 2 ... in issue order within this process.
        collective: all_reduce, reduce, all_gather, gather, scatter, broadcast, all_to_all,
            reduce_scatter, barrier, send or recv.
        group: name of the process group: its description, or torch's name if it has none.
        group_ranks: global ranks of the group, in group order.
        bytes: bytes of the per-rank input. All-reduce and reduce-scatter: the full tensor;
            all-to-all: the full local buffer; all-gather and gather: this rank's shard; broadcast,
            reduce, send and recv: the tensor; scatter: the parts of all ranks together, which NCCL
            counts on each rank; barrier: 0.
        dtype: such as "bfloat16"; "uint8" for a barrier, and for a coalesced gather of several
            types.
        elements: number of elements of that dtype.
        peer: global rank: destination of a send, source of a recv (None: any), root of a broadcast,
            reduce, gather or scatter.
        tag: tag of a send or recv.
        asynchronous: whether the caller may continue before the call is done.
        in_split_sizes: rows for each rank, if an all-to-all states them.
        out_split_sizes: rows from each rank, if an all-to-all states them.
        phase: of a send or recv of a pipeline stage: forward for activations, backward for
            gradients; None if unknown.
        micro_batch: micro-batch of the activations or gradients, from 0 in each step.
        reduction: torch's name of a reduction: sum, avg, premul_sum, max ...
        symmetric: whether it is a call of symmetric memory, not of NCCL: an all-to-all in which
            each rank copies from another's memory, by copy engines, or a barrier.
        exchanged_bytes: what the rank sends to the others in an all-to-all, or receives from them
            if that is more; None if the parts are equal.
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
    symmetric: bool = False
    exchanged_bytes: int | None = None


class Group(NamedTuple):
    """A process group from the view of this process.

    Attributes:
        name: as in `CommCall.group`.
        ranks: global ranks, in group order.
        rank: index of this process in the group.
        high_priority: whether NCCL runs the group's collectives on a high-priority stream.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    high_priority: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


class Payload(NamedTuple):
    """The data that a call moves."""

    dtype: str
    elements: int
    bytes: int

    def times(self, count: int) -> "Payload":
        """Return the payload of `count` such tensors."""
        return Payload(self.dtype, self.elements * count, self.bytes * count)


def as_json(call: CommCall) -> str:
    """Return a call as JSON, without the ranks of its group."""
    # The ranks are stored once per group: writing 100,000 of them takes half a millisecond of the
    # host time that is measured.
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
        call.symmetric,
        call.exchanged_bytes,
    )
    return f'{{"sequence":{call.sequence},{rest}'


# Steps repeat their calls except for the sequence number, so most texts come from the cache. The
# time to build them would be host time of the measured step.
@lru_cache(maxsize=4096)
def _rest_as_json(*values: object) -> str:
    """Return the fields of a call except sequence and group ranks, without the opening brace."""
    names = [name for name in CommCall.__struct_fields__ if name not in ("sequence", "group_ranks")]
    return msgspec.json.encode(dict(zip(names, values, strict=True))).decode().removeprefix("{")


def payload_of(collective: str, tensors: Sequence[Tensor]) -> Payload:
    """Return the total payload of tensors.

    Raises:
        CaptureError: a dtype is unknown, or the dtypes differ and the call accepts only one.
    """
    # Most calls have one tensor. The general case below takes three times as long.
    if len(tensors) == 1 and (dtype := _DTYPES.get(tensors[0].dtype)) is not None:
        return Payload(dtype, tensors[0].numel(), tensors[0].nbytes)
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
    # An all-gather only moves bytes, so NCCL accepts mixed dtypes in it.
    if collective == "all_gather":
        return Payload("uint8", size, size)
    raise CaptureError(
        f"a single {collective} of several dtypes ({', '.join(sorted(dtypes))}): issue a call for "
        "each",
        code="collective-mixed-dtypes",
    )
