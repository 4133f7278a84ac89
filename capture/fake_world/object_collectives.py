"""Collectives of Python objects, such as `all_gather_object`, when peers do not exist.

torch pickles objects into tensors, and uninitialised memory does not unpickle. So these collectives
return this rank's own objects, or the objects that another rank was found to send (`senders`), and
record the messages that torch would send: sizes and pickles.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch.distributed import distributed_c10d

from onerank.capture.collective_record import Group, Payload
from onerank.capture.fake_world.collective_launch import Mark
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    from onerank.capture.fake_world.recorder import Recorder

STEPS = 2
"""Steps whose messages are found; the last one's are repeated."""

Address = int | tuple[int, int]
"""A rank; or for what all ranks of a group get, how many they are and the hash of their tuple."""


def group_address(ranks: tuple[int, ...]) -> Address:
    """Return the address of all ranks of a group, the same in every process."""
    return len(ranks), hash(ranks)


class Messages(Protocol):
    """Python objects that ranks send to one another, and the values of small integer tensors."""

    @property
    def collects_sends(self) -> bool:
        """Whether what this process's rank sends is of use to anyone."""
        ...

    def send(self, to: Address, objects: list[Any]) -> None:
        """Note what this process's rank sends to a rank, or to all of a group."""
        ...

    def receive(self, src: int, to: Address | None = None) -> list[Any]:
        """Return what rank `src` sends next to this process's rank, or to all of a group."""
        ...

    def skip(self, src: int, to: Address) -> None:
        """Take note that what rank `src` sends next to all of a group need not be known."""
        ...

    def next_step(self) -> None:
        """Take note that the script has taken a step."""
        ...


@dataclass(frozen=True)
class MessageRequest:
    """The message number `index` from a rank to an address, and the rank that waits for it."""

    src: int
    to: Address
    index: int
    waiting: int


RunAsRank = Callable[[int, Messages], None]
"""Runs the script as another rank, with messages of its own."""

c10d: Any = distributed_c10d  # much of it has no public names or no types


class ObjectCollectives:
    """Replacements of torch's collectives of objects.

    Each replacement takes its arguments by the names in the signature of torch's own.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def replacements(self) -> dict[str, Callable[[Any], object]]:
        """Name of torch's function -> what takes its place."""
        return {
            "all_gather_object": self._all_gather,
            "gather_object": self._gather,
            "broadcast_object_list": self._broadcast,
            "scatter_object_list": self._scatter,
            "send_object_list": self._send,
            "recv_object_list": self._recv,
        }

    def _all_gather(self, args: Any) -> None:
        if group := self._recorder.group_if_member(args.group):
            self._sizes("all_gather", group, 1)
            pickled = self._pickles("all_gather", group, [args.obj])
            _fill(args.object_list, pickled[0], group)

    def _gather(self, args: Any) -> None:
        if group := self._recorder.group_if_member(args.group):
            root = _root(group, args.dst, args.group_dst)
            c10d._validate_output_list_for_rank(group.rank, root, args.object_gather_list)
            self._sizes("all_gather", group, 1)
            pickled = self._pickles("gather", group, [args.obj], root)
            if group.rank == root:
                _fill(args.object_gather_list, pickled[0], group)

    def _broadcast(self, args: Any) -> None:
        if group := self._recorder.group_if_member(args.group):
            root = _root(group, args.src, args.group_src)
            told = self._told("broadcast_object_list", group, root, args.object_list)
            if len(told) == len(args.object_list):
                args.object_list[:] = told
            self._sizes("broadcast", group, len(args.object_list), root)
            self._pickles("broadcast", group, args.object_list, root)

    def _scatter(self, args: Any) -> None:
        if group := self._recorder.group_if_member(args.group):
            root = _root(group, args.src, args.group_src)
            given, out = args.scatter_object_input_list, args.scatter_object_output_list
            if group.rank == root and given is None:  # as torch says it
                raise ValueError("source rank must provide non-None scatter_object_input_list")
            given = self._told("scatter_object_list", group, root, given or out[:1])
            if len(given) == group.size:
                out[0] = given[group.rank]
            self._sizes("broadcast", group, 1, root)
            # each gets as much as the largest takes
            self._pickles("scatter", group, [max(given, key=_pickled_size)], root)
            self._sizes("scatter", group, 1, root)

    def _send(self, args: Any) -> None:
        if group := self._recorder.group_if_member(args.group):
            peer = _peer(group, args.dst, args.group_dst)
            self._sizes("send", group, len(args.object_list), peer)
            self._pickles("send", group, args.object_list, peer)
            if self._recorder.messages is not None:
                self._recorder.messages.send(group.ranks[peer], args.object_list)

    def _recv(self, args: Any) -> int:
        group = self._recorder.group_if_member(args.group)
        if group is None:
            return -1
        peer = _peer(group, args.src, args.group_src)
        if self._recorder.messages is None:
            _warn_unknown("recv_object_list", group, peer)
        else:
            args.object_list[:] = self._recorder.messages.receive(group.ranks[peer])
        self._sizes("recv", group, len(args.object_list), peer)
        self._pickles("recv", group, args.object_list, peer)
        return group.ranks[peer]

    def _told(self, function: str, group: Group, root: int, own: list[Any]) -> list[Any]:
        """Return the root's objects: this rank's own where it has some, or nobody can tell."""
        messages, to = self._recorder.messages, group_address(group.ranks)
        if group.rank == root:
            if messages is not None:
                messages.send(to, own)
            return own
        if messages is None:
            _warn_unknown(function, group, root)
            return own
        if not any(map(_awaits, own)):
            messages.skip(group.ranks[root], to)
            return own
        try:
            return messages.receive(group.ranks[root], to)
        except CaptureError as error:
            _warn_unknown(function, group, root, f" ({error})")
            return own

    def _sizes(self, collective: str, group: Group, count: int, peer: int | None = None) -> None:
        self._note(collective, group, Payload("int64", count, 8 * count), peer)

    def _pickles(
        self, collective: str, group: Group, objects: list[Any], peer: int | None = None
    ) -> list[bytes]:
        pickled = [pickle.dumps(item) for item in objects]
        size = sum(len(item) for item in pickled)
        self._note(collective, group, Payload("uint8", size, size), peer)
        return pickled

    def _note(self, collective: str, group: Group, payload: Payload, peer: int | None) -> None:
        paired = collective in ("send", "recv")
        tag = 0 if paired else None
        call = self._recorder.record(
            collective, group, payload, peer=peer, tag=tag, asynchronous=paired
        )
        with Mark(call):
            pass


def _awaits(one: object) -> bool:
    """Whether an object holds the place of what is to come: None or, as torch itself has it, {}."""
    return one is None or (isinstance(one, (dict, list, tuple, set, str, bytes)) and not one)


def _fill(objects: list[Any], pickled: bytes, group: Group) -> None:
    for place in range(group.size):
        objects[place] = pickle.loads(pickled)


def _pickled_size(item: object) -> int:
    return len(pickle.dumps(item))


def _root(group: Group, rank: int | None, group_rank: int | None) -> int:
    """Return the root within the group; without one torch takes global rank 0."""
    return _group_rank(group, 0 if rank is None and group_rank is None else rank, group_rank)


def _peer(group: Group, rank: int | None, group_rank: int | None) -> int:
    """Return the peer within the group.

    Raises:
        ValueError: there is no such peer, or it is this rank; torch raises the same.
    """
    peer = _group_rank(group, rank, group_rank)
    if peer == group.rank:
        raise ValueError(f"rank {group.ranks[peer]} cannot send to itself or receive from itself")
    return peer


def _group_rank(group: Group, rank: int | None, group_rank: int | None) -> int:
    if (rank is None) == (group_rank is None):
        raise ValueError(
            f"a rank was given as {rank} in the world and {group_rank} in group {group.name!r}: "
            "give one of both"
        )
    if rank is None:
        return cast("int", group_rank)
    if rank not in group.ranks:
        raise CaptureError(
            f"rank {rank} is not in group {group.name!r}: ranks {group.ranks}",
            code="group-rank-not-member",
        )
    return group.ranks.index(rank)


def _warn_unknown(function: str, group: Group, root: int, why: str = "") -> None:
    if group.rank != root:
        warnings.warn(
            f"{function}: rank {group.ranks[root]} is not there to send its objects; "
            f"rank {group.ranks[group.rank]} keeps its own{why}",
            stacklevel=4 if function.startswith("recv") else 5,
        )
