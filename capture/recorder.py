"""Make one process believe that it is rank R of a world of W, and record what it asks of its peers.

The process gets torch's `fake` process group, real group objects included, and every `c10d::*`
operator is overridden in the dispatcher (`emulate`): that is the one place which DDP's C++ reducer,
FSDP2, functional collectives and compiled code all pass. Each call is kept as a `CommCall` and
marked in the profiler's streams by a range named `onerank::comm`. The execution trace keeps the
call's JSON (but for the group's ranks, which `Recorder.groups` has once), Kineto only the name;
`rf_id` joins the two. What runs inside the range is emulation,
not the job's own work.
"""

import contextlib
import functools
import inspect
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from onerank.capture import emulate
from onerank.capture.rehearsal import Messages
from onerank.capture.standin import StandIn
from onerank.capture.standin.engine import Engine
from onerank.capture.work import Pending
from onerank.ir.errors import CaptureError

# The group registry, debug levels and the profiler's ranges have no public names or no types.
c10d: Any = distributed_c10d
debug: Any = dist
profiling: Any = torch.autograd

# Not `record_param_comms`: the observers parse ranges of that name and crash on one of ours.
MARK = "onerank::comm"
WORLD = "world"

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)


@dataclass(frozen=True)
class CommCall:
    """One collective or point-to-point call, as asked for.

    Attributes:
        sequence: 0, 1, 2 ... in issue order within this process.
        collective: all_reduce, reduce, all_gather, gather, scatter, broadcast, all_to_all,
            reduce_scatter, barrier, send or recv.
        group: Name of the process group: what its creator called it, else torch's name for it.
        group_ranks: Global ranks of the group, in group order.
        bytes: Bytes of the per-rank input. All-reduce and reduce-scatter: the full tensor;
            all-to-all: the full local buffer; all-gather and gather: the own shard; broadcast,
            reduce, send and recv: the tensor; scatter: the own output; barrier: 0.
        dtype: "bfloat16". "uint8" for a barrier, and for a coalesced gather of several types.
        elements: How many of that dtype.
        peer: Global rank: destination of a send, source of a recv (None: any), root of a broadcast,
            reduce, gather or scatter.
        tag: Tag of a send or recv.
        asynchronous: Whether the caller may go on before the call is done.
        in_split_sizes: Rows for each rank, where an all-to-all states them.
        out_split_sizes: Rows from each rank, where an all-to-all states them.
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


class Recorder:
    """Stands for rank `rank` of `world_size` while started.

    Attributes:
        messages: What other ranks send as Python objects, if it can be known.
        calls: Every call so far, in issue order.
        groups: Global ranks of each group that this rank belongs to, by name.
        refused: The last call that could not be recorded, None if all could.
        engine: What takes the collectives' place on CUDA.
        pending: Handles of asynchronous calls that nobody has waited for.
    """

    calls: list[CommCall]
    groups: dict[str, tuple[int, ...]]

    @property
    def paced(self) -> bool:
        """Whether collectives on CUDA take their time on the network, or leave a marker alone."""
        return self.engine.paced

    @paced.setter
    def paced(self, on: bool) -> None:
        self.engine.paced = on

    def __init__(
        self,
        rank: int,
        world_size: int,
        messages: Messages | None = None,
        standin: StandIn | None = None,
    ) -> None:
        """Prepare to stand for a rank.

        Args:
            rank: Global rank.
            world_size: Ranks of the job.
            messages: What other ranks send as Python objects, if it can be known.
            standin: What takes a collective's place on CUDA; None leaves markers.
        """
        if not 0 <= rank < world_size:
            raise CaptureError(
                f"rank {rank} of a world of {world_size}: ranks are 0 to {world_size - 1}"
            )
        self.rank = rank
        self.world_size = world_size
        self.messages = messages
        self.refused: CaptureError | None = None
        self.calls = []
        self.groups = {}
        self.engine = Engine(standin or StandIn())
        self.pending = Pending()
        self._known: dict[dist.ProcessGroup, Group] = {}
        self._lock = threading.Lock()  # backward issues calls from autograd's threads
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        """Create the world and stand between the script and torch.distributed."""
        if dist.is_initialized():
            raise CaptureError(
                "a default process group exists already, and the recorder needs to create it: "
                "start before init_process_group, and stop a recorder that is still running"
            )
        with contextlib.ExitStack() as undo:
            undo.callback(self._leave)
            facade = _Facade(self)
            facade.install(undo)
            facade.create_world()
            emulate.Kernels(self).install(undo)
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Undo all that `start` did; the calls stay."""
        self._undo.close()

    def _leave(self) -> None:
        if dist.is_initialized():  # a script may have destroyed it itself
            dist.destroy_process_group()
        self._known.clear()

    def new_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Create a process group whose calls are recorded under `name`.

        Args:
            name: A name not in use for other ranks.
            ranks: Global ranks of its members, this one among them.
        """
        members = tuple(sorted(ranks))
        if self.rank not in members:
            raise CaptureError(
                f"group {name!r} has ranks {members} without rank {self.rank}, which this process "
                "stands for: create only the groups that it belongs to"
            )
        if self.groups.get(name, members) != members:
            raise CaptureError(
                f"group {name!r} exists with ranks {self.groups[name]}: "
                f"choose another name for ranks {members}"
            )
        return c10d.new_group(list(members), group_desc=name)

    def register(
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], *, high_priority: bool = False
    ) -> None:
        """Give a group its name: what its creator called it, made unique by torch's own name."""
        name = group.group_desc
        if name == "default_pg":
            name = WORLD
        elif name in ("", "undefined"):
            name = group.group_name
        if self.groups.setdefault(name, ranks) != ranks:
            name = f"{name}/{group.group_name}"
            self.groups[name] = ranks
        self._known[group] = Group(name, ranks, ranks.index(self.rank), high_priority)

    def group_of(self, group: dist.ProcessGroup | None) -> Group:
        """Look a group up; None is the world."""
        found: dist.ProcessGroup = group or c10d._get_default_group()
        if found not in self._known:
            raise CaptureError(
                f"process group {found.group_name!r} ({found.group_desc!r}) was not created "
                "through torch.distributed while the recorder was on: use dist.new_group"
            )
        return self._known[found]

    @contextlib.contextmanager
    def call(
        self,
        collective: str,
        group: Group,
        counted: Payload | Sequence[Tensor],
        touched: Sequence[Tensor] = (),
        *,
        peer: int | None = None,
        tag: int | None = None,
        asynchronous: bool = False,
        in_split_sizes: Sequence[int] = (),
        out_split_sizes: Sequence[int] = (),
    ) -> Generator[CommCall]:
        """Record a call; the body, its emulation, runs inside the profiler's mark.

        Args:
            collective: As in `CommCall`.
            group: The group asked.
            counted: The tensors whose bytes count, or their sum.
            touched: Further tensors that the call reads or writes, for the profiler.
            peer: Rank of the peer or root within the group.
            tag: As in `CommCall`.
            asynchronous: As in `CommCall`.
            in_split_sizes: As in `CommCall`.
            out_split_sizes: As in `CommCall`.
        """
        tensors = [] if isinstance(counted, Payload) else [*counted, *touched]
        payload = counted if isinstance(counted, Payload) else _payload(collective, counted)
        with self._lock:
            call = CommCall(
                sequence=len(self.calls),
                collective=collective,
                group=group.name,
                group_ranks=group.ranks,
                bytes=payload.bytes,
                dtype=payload.dtype,
                elements=payload.elements,
                peer=None if peer is None else group.ranks[peer],
                tag=tag,
                asynchronous=asynchronous,
                in_split_sizes=tuple(in_split_sizes),
                out_split_sizes=tuple(out_split_sizes),
            )
            self.calls.append(call)
        mark = profiling._record_function_with_args_enter(MARK, *tensors, _as_json(call))
        try:
            yield call
        finally:
            profiling._record_function_with_args_exit(mark)


def _as_json(call: CommCall) -> str:
    """Write a call without its group's ranks: 100,000 of them would cost half a millisecond."""
    fields = {name: value for name, value in vars(call).items() if name != "group_ranks"}
    return msgspec.json.encode(fields).decode()


def _payload(collective: str, tensors: Sequence[Tensor]) -> Payload:
    for tensor in tensors:
        if _name(tensor.dtype) not in _DTYPES:
            raise CaptureError(
                f"{collective} of dtype {tensor.dtype}: the recorder knows {', '.join(_DTYPES)}; "
                "view the tensor as one of them (uint8 always fits)"
            )
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    dtypes = sorted({_name(tensor.dtype) for tensor in tensors})
    if not dtypes:  # a barrier
        return Payload("uint8", 0, 0)
    if len(dtypes) == 1:
        return Payload(dtypes[0], sum(tensor.numel() for tensor in tensors), size)
    if collective == "all_gather":  # it only moves bytes, and NCCL takes mixed types there
        return Payload("uint8", size, size)
    raise CaptureError(
        f"one {collective} of several dtypes ({', '.join(dtypes)}): issue one call for each"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Facade:
    """What the script sees of torch.distributed where Python, not the dispatcher, decides.

    Each replacement takes its arguments by the names in the signature of torch's own.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._torch_init = c10d.init_process_group
        self._torch_helper = c10d._new_process_group_helper
        self._torch_recv = c10d.recv

    def install(self, undo: contextlib.ExitStack) -> None:
        """Replace the functions, and let `undo` put them back."""
        replacements: dict[str, Callable[[Any], object]] = {
            "init_process_group": self._init_process_group,
            "_new_process_group_helper": self._new_process_group_helper,
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
        self._torch_init("fake", store=FakeStore(), rank=rank, world_size=size)

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
        self._report(c10d._get_default_group(), args.backend or "undefined")

    def _new_process_group_helper(self, args: Any) -> object:
        asked = args.backend
        high = bool(getattr(args.backend_options, "is_high_priority_stream", False))
        # The options are the asked backend's, and a bound device would make torch call NCCL.
        args.backend, args.backend_options, args.device_id = "fake", None, None
        group, store = self._torch_helper(**vars(args))
        if isinstance(group, dist.ProcessGroup):  # else this rank is no member
            ranks = args.global_ranks_in_group or range(args.group_size)
            self._recorder.register(group, tuple(ranks), high_priority=high)
            self._report(group, asked)
        return group, store

    @staticmethod
    def _report(group: dist.ProcessGroup, backend: str) -> None:
        # torch and scripts choose collectives by the backend's name: keep the one asked for.
        name = c10d.Backend(backend)
        c10d._world.pg_map[group] = (name, c10d._world.pg_map[group][1])
        c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(name))

    def _split_group(self, args: Any) -> object:
        parent = self._recorder.group_of(args.parent_pg)
        for members in args.split_ranks:
            if parent.rank in members:
                return c10d.new_group(
                    [parent.ranks[member] for member in members],
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
            args.object_list[: group.size] = [pickle.loads(pickled[0]) for _ in group.ranks]

    def _gather_object(self, args: Any) -> None:
        if group := self._member(args.group):
            root = _group_rank(group, args.dst, args.group_dst)
            self._sizes("all_gather", group, 1)
            pickled = self._pickles("gather", group, [args.obj], root)
            if group.rank == root:
                copies = [pickle.loads(pickled[0]) for _ in group.ranks]
                args.object_gather_list[: group.size] = copies

    def _broadcast_object_list(self, args: Any) -> None:
        if group := self._member(args.group):
            root = _group_rank(group, args.src, args.group_src)
            self._sizes("broadcast", group, len(args.object_list), root)
            self._pickles("broadcast", group, args.object_list, root)
            _warn_unknown("broadcast_object_list", group, root)

    def _scatter_object_list(self, args: Any) -> None:
        if group := self._member(args.group):
            root = _group_rank(group, args.src, args.group_src)
            if args.scatter_object_input_list:
                own = args.scatter_object_input_list[group.rank]
                args.scatter_object_output_list[0] = own
            self._sizes("broadcast", group, 1, root)
            self._pickles("scatter", group, args.scatter_object_output_list[:1], root)
            self._sizes("scatter", group, 1, root)
            _warn_unknown("scatter_object_list", group, root)

    def _send_object_list(self, args: Any) -> None:
        if group := self._member(args.group):
            peer = _group_rank(group, args.dst, args.group_dst)
            self._sizes("send", group, len(args.object_list), peer)
            self._pickles("send", group, args.object_list, peer)
            if self._recorder.messages is not None:
                self._recorder.messages.send(group.ranks[peer], args.object_list)

    def _recv_object_list(self, args: Any) -> int:
        group = self._member(args.group)
        if group is None:
            return -1
        peer = _group_rank(group, args.src, args.group_src)
        if self._recorder.messages is None:
            _warn_unknown("recv_object_list", group, peer)
        else:
            args.object_list[:] = self._recorder.messages.receive(group.ranks[peer])
        self._sizes("recv", group, len(args.object_list), peer)
        self._pickles("recv", group, args.object_list, peer)
        return group.ranks[peer]

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


def _group_rank(group: Group, rank: int | None, group_rank: int | None) -> int:
    if group_rank is not None:
        return group_rank
    rank = 0 if rank is None else rank
    if rank not in group.ranks:
        raise CaptureError(f"rank {rank} is not in group {group.name!r}: ranks {group.ranks}")
    return group.ranks.index(rank)


def _warn_unknown(function: str, group: Group, root: int) -> None:
    if group.rank != root:
        warnings.warn(
            f"{function}: rank {group.ranks[root]} is not there to send its objects; "
            f"rank {group.ranks[group.rank]} keeps its own",
            stacklevel=4,
        )


def rebind(old: Sequence[object], new: Sequence[object]) -> None:
    """Swap module attributes everywhere: `from torch.distributed import ...` made copies."""
    swaps = {id(before): after for before, after in zip(old, new, strict=True)}
    for module in list(sys.modules.values()):
        names: dict[str, object] = getattr(module, "__dict__", {})
        for name, value in list(names.items()):
            if id(value) in swaps:
                setattr(module, name, swaps[id(value)])
