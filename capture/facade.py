"""What a script sees of torch.distributed where Python, not the dispatcher, decides."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from onerank.capture.calls import Group, Payload
from onerank.capture.messages import group_address
from onerank.capture.store import LoneStore
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    from onerank.capture.recorder import Recorder

# Debug levels and much of c10d have no public names or no types.
c10d: Any = distributed_c10d
debug: Any = dist


class Facade:
    """Replacements of torch's functions.

    Each replacement takes its arguments by the names in the signature of torch's own.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._torch_init = c10d.init_process_group
        self._torch_helper = c10d._new_process_group_helper
        self._torch_recv = c10d.recv
        self._store: LoneStore | None = None

    def install(self, undo: contextlib.ExitStack) -> None:
        """Replace the functions, and let `undo` put them back."""
        replacements: dict[str, Callable[[Any], object]] = {
            "init_process_group": self._init_process_group,
            "_new_process_group_helper": self._new_process_group_helper,
            "_store_based_barrier": self._store_based_barrier,
            "split_group": self._split_group,
            "recv": self._recv,
            "all_gather_object": self._all_gather_object,
            "gather_object": self._gather_object,
            "broadcast_object_list": self._broadcast_object_list,
            "scatter_object_list": self._scatter_object_list,
            "send_object_list": self._send_object_list,
            "recv_object_list": self._recv_object_list,
        }
        if (level := debug.get_debug_level()) == debug.DebugLevel.DETAIL:
            # torch would wrap each group in a gloo group that rendezvouses with the peers.
            debug.set_debug_level(debug.DebugLevel.INFO)
            undo.callback(debug.set_debug_level, level)
        old = [getattr(c10d, name) for name in replacements]
        new = [_by_name(*pair) for pair in zip(old, replacements.values(), strict=True)]
        rebind(old, new)
        undo.callback(rebind, new, old)

    def create_world(self) -> None:
        """Initialise the default group."""
        rank, size = self._recorder.rank, self._recorder.world_size
        self._store = LoneStore(rank, size)  # C++ keeps no hold of what Python defines
        self._torch_init("fake", store=self._store, rank=rank, world_size=size)

    def _init_process_group(self, args: Any) -> None:
        rank, size = self._recorder.rank, self._recorder.world_size
        if args.rank not in (-1, rank) or args.world_size not in (-1, size):
            warnings.warn(
                f"init_process_group(rank={args.rank}, world_size={args.world_size}): this process "
                f"stands for rank {rank} of {size}, and goes on so",
                stacklevel=3,
            )
        if not dist.is_initialized():
            self.create_world()
        world = c10d._get_default_group()
        self._recorder.register(world, tuple(range(size)), high_priority=_high(args.pg_options))
        self._report(world, args.backend or "undefined")

    def _new_process_group_helper(self, args: Any) -> object:
        asked = args.backend
        high = _high(args.backend_options)
        # The options are the asked backend's, and a bound device would make torch call NCCL.
        args.backend, args.backend_options, args.device_id = "fake", None, None
        group, store = self._torch_helper(**vars(args))
        if isinstance(group, dist.ProcessGroup):  # else this rank is no member
            ranks = args.global_ranks_in_group or range(args.group_size)
            self._recorder.register(group, tuple(ranks), high_priority=high)
            self._report(group, asked)
        return group, store

    @staticmethod
    def _store_based_barrier(_: Any) -> None:
        """Return: it waits, in a group's store, for the group's ranks (TORCH_DIST_INIT_BARRIER)."""

    @staticmethod
    def _report(group: dist.ProcessGroup, backend: str) -> None:
        # torch and scripts choose collectives by the backend's name: keep the one asked for.
        name = c10d.Backend(backend)
        c10d._world.pg_map[group] = (name, c10d._world.pg_map[group][1])
        c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(name))

    def _split_group(self, args: Any) -> object:
        if not args.split_ranks:
            raise ValueError("split_ranks cannot be None or empty")  # as torch says it
        process_group = args.parent_pg or c10d._get_default_group()
        parent = self._recorder.group_of(process_group)
        for members in args.split_ranks:
            if parent.rank in members:
                return c10d.new_group(
                    [parent.ranks[member] for member in members],
                    backend=getattr(args, "backend", None) or c10d._world.pg_map[process_group][0],
                    # a part takes after the whole
                    pg_options=args.pg_options or _Options(parent.high_priority),
                    group_desc=args.group_desc,
                    use_local_synchronization=True,  # named by its ranks, not by a local count
                )
        return None

    def _recv(self, args: Any) -> int:
        if args.src is not None or args.group_src is not None:
            return self._torch_recv(**vars(args))
        # From any source: torch would ask the finished work who it was.
        group = self._member(args.group)
        if group is None:
            return -1
        process_group: Any = args.group or c10d._get_default_group()
        process_group.recv_anysource([args.tensor], args.tag).wait()
        return next((rank for rank in group.ranks if rank != self._recorder.rank), group.ranks[0])

    # Object collectives pickle through tensors, and garbage does not unpickle: they answer with
    # this rank's own objects, and record what torch would send, sizes and pickles.

    def _all_gather_object(self, args: Any) -> None:
        if group := self._member(args.group):
            self._sizes("all_gather", group, 1)
            pickled = self._pickles("all_gather", group, [args.obj])
            _fill(args.object_list, pickled[0], group)

    def _gather_object(self, args: Any) -> None:
        if group := self._member(args.group):
            root = _root(group, args.dst, args.group_dst)
            c10d._validate_output_list_for_rank(group.rank, root, args.object_gather_list)
            self._sizes("all_gather", group, 1)
            pickled = self._pickles("gather", group, [args.obj], root)
            if group.rank == root:
                _fill(args.object_gather_list, pickled[0], group)

    def _broadcast_object_list(self, args: Any) -> None:
        if group := self._member(args.group):
            root = _root(group, args.src, args.group_src)
            told = self._told("broadcast_object_list", group, root, args.object_list)
            if len(told) == len(args.object_list):
                args.object_list[:] = told
            self._sizes("broadcast", group, len(args.object_list), root)
            self._pickles("broadcast", group, args.object_list, root)

    def _scatter_object_list(self, args: Any) -> None:
        if group := self._member(args.group):
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

    def _send_object_list(self, args: Any) -> None:
        if group := self._member(args.group):
            peer = _peer(group, args.dst, args.group_dst)
            self._sizes("send", group, len(args.object_list), peer)
            self._pickles("send", group, args.object_list, peer)
            if self._recorder.messages is not None:
                self._recorder.messages.send(group.ranks[peer], args.object_list)

    def _recv_object_list(self, args: Any) -> int:
        group = self._member(args.group)
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
        if all(one is not None for one in own):  # an array has no one answer to ==
            messages.skip(group.ranks[root], to)
            return own
        try:
            return messages.receive(group.ranks[root], to)
        except CaptureError as error:
            _warn_unknown(function, group, root, f" ({error})")
            return own

    def _member(self, group: Any) -> Group | None:
        return None if c10d._rank_not_in_group(group) else self._recorder.group_of(group)

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
        with self._recorder.call(
            collective, group, payload, peer=peer, tag=tag, asynchronous=paired
        ):
            pass


def _by_name(original: Callable[..., object], replacement: Callable[[Any], object]) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def run(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return replacement(SimpleNamespace(**bound.arguments))

    return run


class _Options:
    """Options of a process group, as far as anything here asks for them."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream


def _high(options: object) -> bool:
    return bool(getattr(options, "is_high_priority_stream", False))


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
        ValueError: there is none, or it is this rank; so it is in torch.
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
        raise CaptureError(f"rank {rank} is not in group {group.name!r}: ranks {group.ranks}")
    return group.ranks.index(rank)


def _warn_unknown(function: str, group: Group, root: int, why: str = "") -> None:
    if group.rank != root:
        warnings.warn(
            f"{function}: rank {group.ranks[root]} is not there to send its objects; "
            f"rank {group.ranks[group.rank]} keeps its own{why}",
            stacklevel=4 if function.startswith("recv") else 5,
        )


def rebind(old: Sequence[object], new: Sequence[object]) -> None:
    """Swap module attributes everywhere: `from torch.distributed import ...` made copies."""
    swaps = {id(before): after for before, after in zip(old, new, strict=True)}
    for module in list(sys.modules.values()):
        names: dict[str, object] = getattr(module, "__dict__", {})
        for name, value in list(names.items()):
            if id(value) in swaps:
                setattr(module, name, swaps[id(value)])
