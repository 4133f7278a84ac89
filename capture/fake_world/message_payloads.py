"""Messages whose content matters: Python objects, and integers sent as tensors.

torch pickles objects into tensors, and uninitialised memory does not unpickle. So collectives of
objects return what a run of the script as the sending rank produced (`sender_processes`), or this
rank's objects where there is no such run. They record the messages that torch would send: sizes and
pickles.

A script that exchanges shapes as tensors, or whose first rank loads the batch for a group, depends
on the values of integers: shapes, token ids, masks. They are learned in the same way. From the
second step on, the same run also provides tensors of other dtypes that such a sender broadcasts.
torch's own integer messages (DDP's bucket sizes, DTensor's generator states) are equal on all
ranks, so they need no run.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from onerank.capture.collective_record import Group, Payload
from onerank.capture.fake_tensors import is_integral
from onerank.capture.fake_world.call_log import Address, CallLog, Messages
from onerank.capture.fake_world.collective_launch import CallRange, raw
from onerank.ir.errors import CaptureError, CaptureWarning

LEARNED_STEPS = 2
"""Steps whose messages are learned from runs of their senders; later steps repeat the last one."""


def group_address(ranks: tuple[int, ...]) -> Address:
    """Return the address of all ranks of a group, the same in every process."""
    # Hashes of integers, unlike those of texts, are the same in every process.
    return len(ranks), hash(ranks)


@dataclass(frozen=True)
class MessageRequest:
    """A request of rank `receiver` for message number `index` from rank `src` to an address."""

    src: int
    to: Address
    index: int
    receiver: int


RunAsRank = Callable[[int, Messages], None]
"""Runs the script as another rank, with that rank's messages."""

c10d: Any = distributed_c10d  # much of it has no public names or no types


class ObjectCollectives:
    """Replacements of torch's collectives of objects.

    Each replacement takes its arguments by the names in the signature of torch's own.
    """

    def __init__(self, call_log: CallLog) -> None:
        self._call_log = call_log

    @property
    def replacements(self) -> dict[str, Callable[[Any], object]]:
        """Name of torch's function -> its replacement."""
        return {
            "all_gather_object": self._all_gather,
            "gather_object": self._gather,
            "broadcast_object_list": self._broadcast,
            "scatter_object_list": self._scatter,
            "send_object_list": self._send,
            "recv_object_list": self._recv,
        }

    def _all_gather(self, args: Any) -> None:
        if group := self._call_log.group_if_member(args.group):
            self._sizes("all_gather", group, 1)
            pickled = self._pickles("all_gather", group, [args.obj])
            _fill(args.object_list, pickled[0], group)

    def _gather(self, args: Any) -> None:
        if group := self._call_log.group_if_member(args.group):
            root = _root(group, args.dst, args.group_dst)
            c10d._validate_output_list_for_rank(group.rank, root, args.object_gather_list)
            self._sizes("all_gather", group, 1)
            pickled = self._pickles("gather", group, [args.obj], root)
            if group.rank == root:
                _fill(args.object_gather_list, pickled[0], group)

    def _broadcast(self, args: Any) -> None:
        if group := self._call_log.group_if_member(args.group):
            root = _root(group, args.src, args.group_src)
            objects = self._root_objects("broadcast_object_list", group, root, args.object_list)
            # Else the sender passed another number, on which torch would fail in the real job.
            if len(objects) == len(args.object_list):
                args.object_list[:] = objects
            self._sizes("broadcast", group, len(args.object_list), root)
            self._pickles("broadcast", group, args.object_list, root)

    def _scatter(self, args: Any) -> None:
        if group := self._call_log.group_if_member(args.group):
            root = _root(group, args.src, args.group_src)
            inputs, out = args.scatter_object_input_list, args.scatter_object_output_list
            if group.rank == root and inputs is None:  # torch's own message
                raise ValueError("source rank must provide non-None scatter_object_input_list")
            objects = self._root_objects("scatter_object_list", group, root, inputs or out[:1])
            if len(objects) == group.size:
                out[0] = objects[group.rank]
            self._sizes("broadcast", group, 1, root)
            # torch pads every pickle to the size of the largest.
            self._pickles("scatter", group, [max(objects, key=_pickled_size)], root)
            self._sizes("scatter", group, 1, root)

    def _send(self, args: Any) -> None:
        if group := self._call_log.group_if_member(args.group):
            peer = _peer(group, args.dst, args.group_dst)
            self._sizes("send", group, len(args.object_list), peer)
            self._pickles("send", group, args.object_list, peer)
            if self._call_log.messages is not None:
                self._call_log.messages.send(group.ranks[peer], args.object_list)

    def _recv(self, args: Any) -> int:
        group = self._call_log.group_if_member(args.group)
        if group is None:
            return -1
        peer = _peer(group, args.src, args.group_src)
        if self._call_log.messages is None:
            _warn_unknown("recv_object_list", group, peer)
        else:
            args.object_list[:] = self._call_log.messages.receive(group.ranks[peer])
        self._sizes("recv", group, len(args.object_list), peer)
        self._pickles("recv", group, args.object_list, peer)
        return group.ranks[peer]

    def _root_objects(self, function: str, group: Group, root: int, local: list[Any]) -> list[Any]:
        """Return the root's objects; `local`, this rank's, if they are complete or unknown.

        A script that filled the list on every rank passes objects that are complete already: no
        run of the sender is made for them.
        """
        messages, to = self._call_log.messages, group_address(group.ranks)
        if group.rank == root:
            if messages is not None:
                messages.send(to, local)
            return local
        if messages is None:
            _warn_unknown(function, group, root)
            return local
        if not any(map(_is_placeholder, local)):
            messages.skip(group.ranks[root], to)
            return local
        try:
            return messages.receive(group.ranks[root], to)
        except CaptureError as error:
            _warn_unknown(function, group, root, f" ({error})")
            return local

    def _sizes(self, collective: str, group: Group, count: int, peer: int | None = None) -> None:
        self._record(collective, group, Payload("int64", count, 8 * count), peer)

    def _pickles(
        self, collective: str, group: Group, objects: list[Any], peer: int | None = None
    ) -> list[bytes]:
        # torch pickles with the same default protocol, so the sizes are those of the job.
        pickled = [pickle.dumps(item) for item in objects]
        size = sum(len(item) for item in pickled)
        self._record(collective, group, Payload("uint8", size, size), peer)
        return pickled

    def _record(self, collective: str, group: Group, payload: Payload, peer: int | None) -> None:
        point_to_point = collective in ("send", "recv")
        tag = 0 if point_to_point else None
        call = self._call_log.record(
            collective, group, payload, peer=peer, tag=tag, asynchronous=point_to_point
        )
        with CallRange(call):
            pass


def _is_placeholder(item: object) -> bool:
    """Return whether an object only reserves a place: None or empty, as torch passes {}."""
    return item is None or (isinstance(item, (dict, list, tuple, set, str, bytes)) and not item)


def _fill(objects: list[Any], pickled: bytes, group: Group) -> None:
    # One copy for each rank, as torch unpickles one for each.
    for index in range(group.size):
        objects[index] = pickle.loads(pickled)


def _pickled_size(item: object) -> int:
    return len(pickle.dumps(item))


def _root(group: Group, rank: int | None, group_rank: int | None) -> int:
    """Return the root's rank within the group; as in torch, the default is global rank 0."""
    return _group_rank(group, 0 if rank is None and group_rank is None else rank, group_rank)


def _peer(group: Group, rank: int | None, group_rank: int | None) -> int:
    """Return the peer's rank within the group.

    Raises:
        ValueError: not exactly one rank was passed, or it is this rank; torch raises the same.
        CaptureError: the group has no such rank.
    """
    peer = _group_rank(group, rank, group_rank)
    if peer == group.rank:
        raise ValueError(f"rank {group.ranks[peer]} cannot send to itself or receive from itself")
    return peer


def _group_rank(group: Group, rank: int | None, group_rank: int | None) -> int:
    if (rank is None) == (group_rank is None):
        raise ValueError(
            f"got global rank {rank} and rank {group_rank} of group {group.name!r}: pass exactly "
            "one of them"
        )
    if rank is None:
        return cast("int", group_rank)
    if rank not in group.ranks:
        raise CaptureError(
            f"rank {rank} is not in group {group.name!r}, which has ranks {group.ranks}",
            code="group-rank-not-member",
        )
    return group.ranks.index(rank)


def _warn_unknown(function: str, group: Group, root: int, reason: str = "") -> None:
    if group.rank != root:
        warnings.warn(
            CaptureWarning(
                f"{function}: the objects of rank {group.ranks[root]}, an absent rank, are "
                f"unknown; rank {group.ranks[group.rank]} keeps its own objects{reason}",
                code="objects-unknown",
            ),
            # The frames between this call and the script's: the warning names the script's line.
            stacklevel=4 if function.startswith("recv") else 5,
        )


LARGEST_BYTES = 2**20
"""Largest payload whose values are learned; a batch of token ids fits."""

# Modules whose frames lie between the caller of a collective and its emulation.
_FRAMES_BELOW_THE_SCRIPT = (
    *("onerank.capture", "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"),
    *("torch.distributed._functional_collectives", "torch.utils._contextlib", "torch._ops"),
    # Without a device a dispatch mode receives the call, and torch wraps its methods.
    *("torch._compile", "torch._dynamo.eval_frame"),
)


class IntegerPayloads:
    """Values of small integer tensors in collectives that the script itself calls."""

    def __init__(self, call_log: CallLog) -> None:
        self._call_log = call_log
        # (sender, group) pairs that broadcast integers: such a sender loads the group's batch.
        self._loading: set[tuple[int, Address]] = set()

    def broadcast(self, group: Group, root: int, tensors: Sequence[Tensor]) -> None:
        """Fill tensors with the root's values; if these are unknown, warn and keep the tensors'."""
        to, source = group_address(group.ranks), group.ranks[root]
        integers = _are_integers(tensors)
        # A loss mask filled with zeros would zero all gradients, so the tensors of other dtypes in
        # a batch are learned too. Not in the first step, where parameters are broadcast.
        loaded = (source, to) in self._loading and _have_values(tensors)
        any_dtype = self._call_log.steps > 0 and loaded
        if group.rank == root:
            self.send(to, tensors, any_dtype=any_dtype)
        else:
            self.receive("broadcast", source, to, tensors, any_dtype=any_dtype)
        if integers and _are_small(tensors) and _script_depth():
            self._loading.add((source, to))

    def scatter(
        self, group: Group, root: int, outputs: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]
    ) -> bool:
        """Fill outputs with the root's values for this rank; return whether they are known."""
        to = group_address(group.ranks)
        if group.rank == root:
            self.send(to, [tensor for row in rows for tensor in row])
            return True
        source = group.ranks[root]
        return self.receive("scatter", source, to, outputs, part=(group.rank, group.size))

    def send(self, to: Address, tensors: Sequence[Tensor], *, any_dtype: bool = False) -> None:
        """Record the integers, or with `any_dtype` any values, that a receiver may request."""
        messages = self._call_log.messages
        if (
            messages is None
            or not messages.collects_sends
            or not (any_dtype or _are_integers(tensors))
        ):
            return
        if not _are_small(tensors) or not _script_depth():
            return
        try:
            payloads = [_bytes(tensor) for tensor in tensors]
        except CaptureError:
            # Without a device, numbers may be unknown. The receiver counts messages, so an empty
            # one keeps their order; it warns that the values are unknown.
            payloads = []
        messages.send(to, payloads)

    def receive(
        self,
        function: str,
        source: int,
        to: Address | None,
        tensors: Sequence[Tensor],
        part: tuple[int, int] = (0, 1),
        *,
        any_dtype: bool = False,
    ) -> bool:
        """Fill tensors with the values that rank `source` sends; return whether they are known.

        Args:
            function: name of the collective, for the warning.
            source: global rank of the sender.
            to: address of the message; None is this process's rank.
            tensors: the tensors to fill.
            part: (index, count): take every count-th tensor of the message, from the index on.
            any_dtype: whether to fill tensors of every dtype; otherwise only integers.
        """
        messages = self._call_log.messages
        index, parts = part
        if messages is None or not (any_dtype or _are_integers(tensors)):
            return False
        if not (depth := _script_depth()):
            return False
        try:
            if not _are_small(tensors, parts):
                raise CaptureError(
                    f"values are learned for calls of up to {LARGEST_BYTES} bytes",
                    code="payload-too-large",
                )
            payloads = messages.receive(source, to)[index::parts]
            _check(source, payloads, tensors)
        except CaptureError as error:
            consequence = "keeps its own values" if function == "broadcast" else "receives zeros"
            warnings.warn(
                CaptureWarning(
                    f"{function}: the tensors of rank {source}, an absent rank, are unknown; rank "
                    f"{self._call_log.rank} {consequence} ({error})",
                    code="tensors-unknown",
                ),
                stacklevel=depth,
            )
            return False
        for tensor, data in zip(tensors, payloads, strict=True):
            values = _tensor(data, tensor.dtype, pinned=tensor.is_cuda)
            # Not blocking, because a receive of NCCL does not block the host either.
            raw(tensor).copy_(values.view(tensor.shape), non_blocking=True)
        return True


def _are_integers(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors have elements, and all are integers or flags."""
    return _have_values(tensors) and all(is_integral(tensor.dtype) for tensor in tensors)


def _have_values(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors have elements, and none is a meta tensor."""
    return not any(t.is_meta for t in tensors) and any(tensor.numel() for tensor in tensors)


def _are_small(tensors: Sequence[Tensor], parts: int = 1) -> bool:
    """Return whether `parts` times the tensors' bytes are at most `LARGEST_BYTES`."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return parts * size <= LARGEST_BYTES


def _script_depth() -> int:
    """Return how many frames above the caller the script or one of its libraries made the call.

    Returns 0 if torch made the call for itself, or from an autograd thread.
    """
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(_FRAMES_BELOW_THE_SCRIPT):
            return 0 if module.startswith("torch.") else depth
        frame, depth = frame.f_back, depth + 1
    return 0


def _bytes(tensor: Tensor) -> bytes:
    flat = raw(tensor).reshape(-1).cpu()
    # Not uint8: a capture without a device takes unknown uint8 numbers for pixels, and returns
    # placeholders instead of an error.
    return flat.view(torch.int8).numpy().tobytes()


@lru_cache(maxsize=64)
def _tensor(data: bytes, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Return values on the host."""
    # A bytearray, because torch warns of buffers that cannot be written.
    values = torch.frombuffer(bytearray(data), dtype=dtype)
    # From pageable memory the copy to the GPU would block the host, and delay launches.
    return values.pin_memory() if pinned else values


def _check(source: int, payloads: Sequence[object], tensors: Sequence[Tensor]) -> None:
    sizes = [len(data) if isinstance(data, bytes) else type(data).__name__ for data in payloads]
    expected = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if sizes != expected:
        raise CaptureError(
            f"rank {source} sends tensors of {sizes} bytes, but the receiver expects {expected}",
            code="payload-size",
        )
