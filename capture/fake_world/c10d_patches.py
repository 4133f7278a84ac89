"""Patches of torch.distributed and the dispatcher that route calls to the recorder.

The default group's key-value store and the visibility of the group to scripts are here too.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from onerank.capture.fake_world.message_payloads import ObjectCollectives
from onerank.capture.patches import overridden_kernels, patched, rebound, untraced
from onerank.ir.errors import CaptureError, CaptureWarning

if TYPE_CHECKING:
    from onerank.capture.fake_world.call_log import CallLog


_dist: Any = dist

_Store: Any = _dist.Store  # not exported by name


class FakeStore(_Store):
    """The default store of torch.distributed.

    Each `add` counts for all ranks, so that a barrier by counting ends. A key that only another
    rank would set is missing.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank = rank
        self._size = world_size
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        """Return a value.

        Raises:
            CaptureError: this rank has not set it.
        """
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` once for each rank, and return the sum."""
        total = int(self._values.get(key, b"0")) + amount * self._size
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set a value if it equals `expected`, or is missing and `expected` is empty; return it."""
        if self._values.get(key, b"") == _bytes(expected):
            self._values[key] = _bytes(value)
        return self._values.get(key, _bytes(expected))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._values[key] = self._values.get(key, b"") + _bytes(value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are present."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Return if all keys are present.

        Raises:
            CaptureError: this rank has not set one of them, and no other rank exists to set it.
        """
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise CaptureError(
                f"the script waits for key {missing[0]!r} of torch.distributed's store: rank "
                f"{self._rank} has not set it, and other ranks are absent. Send the value by "
                "broadcast_object_list or send_object_list, which onerank emulates",
                code="store-key-missing",
            )

    def delete_key(self, key: str) -> bool:
        """Remove a value, and return whether the key was present."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    getNumKeys = num_keys  # noqa: N815  the names that C++ calls through a PrefixStore
    deleteKey = delete_key  # noqa: N815

    def set_timeout(self, timeout: object) -> None:
        """Do nothing: there is no other rank to wait for."""


def _store_class(name: str, rank: int, size: int) -> type[FakeStore]:
    """Return a class for stores that the script creates; torch's would wait for absent ranks."""

    def create(self: Any, host_name: str = "", port: int = 0, *_: Any, **__: Any) -> None:
        FakeStore.__init__(self, rank, size)
        self.host, self.port = host_name, port

    return type(name, (FakeStore,), {"__init__": create})


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


# torch's dispatcher has no public names and no types.
_torch: Any = torch

SPARSE = "the size of a sparse tensor depends on its data; use dense gradients (sparse=False)"

_UNKNOWN = (
    f"onerank does not support this collective of torch {torch.__version__}; "
    "use another collective, or torch 2.11 to 2.13"
)

Kernel = Callable[[Any], object]
"""Takes an operator's arguments as attributes named by its schema; returns the schema's types."""

Refusal = Callable[[str, str], CaptureError]
"""(operator name, reason) -> the error for an unsupported operator."""


def override(
    kernels: Mapping[str, Kernel], refusal: Refusal, undo: contextlib.ExitStack
) -> dict[str, Callable[..., Any]]:
    """Override every `c10d` operator that takes a process group; return the functions by name.

    Args:
        kernels: operator name without `c10d::` -> its kernel for dense tensors.
        refusal: makes the error for all other operators, and for sparse tensors.
        undo: restores torch's kernels.
    """
    functions: dict[str, Callable[..., Any]] = {}
    overrides: list[tuple[str, str, Callable[..., Any]]] = []
    for name, arguments in group_operators():
        emulated = kernels.get(name)
        if emulated is None:
            kernel = _refusing(refusal, name, _UNKNOWN)
        else:
            kernel = _with_schema_names(arguments, emulated)
        functions[name] = kernel
        overrides += [(name, key, kernel) for key in ("CPU", "CUDA", "Meta")]
        refused = _refusing(refusal, name, SPARSE)
        overrides += [(name, key, refused) for key in ("SparseCPU", "SparseCUDA")]
    undo.enter_context(overridden_kernels("c10d", overrides))
    return functions


def _refusing(refusal: Refusal, operator: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        raise refusal(operator, reason)

    return refuse


def group_operators() -> list[tuple[str, Callable[..., Any]]]:
    """Return the name, and the class of arguments, of each c10d operator that takes a group."""
    names = [n for n in _torch._C._dispatch_get_all_op_names() if n.startswith("c10d::")]
    classes = ((name.removeprefix("c10d::"), _class_of_arguments(name)) for name in names)
    return [(name, arguments) for name, arguments in classes if arguments is not None]


@functools.cache
def _class_of_arguments(name: str) -> Callable[..., Any] | None:
    """Return a class with the arguments of an operator by name; None if none is a group."""
    schema = _torch._C._get_schema(*name.partition(".")[::2])
    if not any("ProcessGroup" in str(argument.type) for argument in schema.arguments):
        return None
    # Arguments with defaults are always the last ones.
    optional = [a for a in schema.arguments if a.has_default_value()]
    names = [argument.name for argument in schema.arguments]
    defaults = [argument.default_value for argument in optional]
    return collections.namedtuple("arguments", names, defaults=defaults)  # pyrefly: ignore


def _with_schema_names(arguments: Callable[..., Any], kernel: Kernel) -> Callable[..., object]:
    return untraced(lambda *args: kernel(arguments(*args)))


# Debug levels and much of c10d have no public names or no types.
c10d: Any = distributed_c10d

debug: Any = dist


class C10dPatches:
    """Replacements of torch.distributed's Python functions for a world without peers.

    Each replacement takes the arguments as attributes, named as in the signature of torch's
    function.
    """

    def __init__(self, call_log: CallLog) -> None:
        self._call_log = call_log
        self._torch_init = c10d.init_process_group
        self._torch_helper = c10d._new_process_group_helper
        self._torch_recv = c10d.recv
        self._torch_batch = c10d.batch_isend_irecv
        self._torch_barrier = c10d.barrier
        self._store: FakeStore | None = None

    def install(self, undo: contextlib.ExitStack) -> None:
        """Replace the functions; `undo` restores torch's."""
        replacements: dict[str, Callable[[Any], object]] = {
            "init_process_group": self._init_process_group,
            "_new_process_group_helper": self._new_process_group_helper,
            # torch calls it at the end of every group's creation, for all backends but MPI.
            "_store_based_barrier": self._store_based_barrier,
            "split_group": self._split_group,
            "recv": self._recv,
            "barrier": self._barrier,
            "batch_isend_irecv": self._batch_isend_irecv,
            **ObjectCollectives(self._call_log).replacements,
        }
        if (level := debug.get_debug_level()) == debug.DebugLevel.DETAIL:
            # torch would wrap each group in a gloo group that rendezvouses with the peers.
            debug.set_debug_level(debug.DebugLevel.INFO)
            undo.callback(debug.set_debug_level, level)
        functions = {
            name: _with_signature(getattr(c10d, name), replacement)
            for name, replacement in replacements.items()
        }
        undo.enter_context(rebound("torch.distributed.distributed_c10d", functions))
        rank, size = self._call_log.rank, self._call_log.world_size
        stores = {name: _store_class(name, rank, size) for name in ("TCPStore", "FileStore")}
        undo.enter_context(patched("torch.distributed", stores))

    def create_world(self) -> None:
        """Initialise the default group."""
        rank, size = self._call_log.rank, self._call_log.world_size
        # C++ does not keep the Python object alive.
        self._store = FakeStore(rank, size)
        self._torch_init("fake", store=self._store, rank=rank, world_size=size)

    def _init_process_group(self, args: Any) -> None:
        rank, size = self._call_log.rank, self._call_log.world_size
        if args.world_size not in (-1, size):
            # The script divided its work by this size, so its graph would be that of no job.
            raise CaptureError(
                f"init_process_group(world_size={args.world_size}): the script creates a world of "
                f"{args.world_size} ranks, and the capture is of a job of {size}: use "
                f"--dp {args.world_size} or other options with this product, or let the script "
                "read WORLD_SIZE",
                code="script-world-size",
            )
        if args.rank not in (-1, rank):
            warnings.warn(
                CaptureWarning(
                    f"init_process_group(rank={args.rank}): ignored; this process is captured as "
                    f"rank {rank} of {size}",
                    code="rank-ignored",
                ),
                stacklevel=3,
            )
        # A script under torchrun calls it although the world exists since the start.
        if not dist.is_initialized():
            self.create_world()
        world = c10d._get_default_group()
        self._call_log.register(
            world, tuple(range(size)), high_priority=_is_high_priority(args.pg_options)
        )
        self._show_backend(world, args.backend or "undefined")

    def _new_process_group_helper(self, args: Any) -> object:
        backend = args.backend
        high_priority = _is_high_priority(args.backend_options)
        # The fake backend rejects another backend's options, and a bound device would make torch
        # call NCCL.
        args.backend, args.backend_options, args.device_id = "fake", None, None
        group, store = self._torch_helper(**vars(args))
        # Anything else stands for a group that this rank is not in.
        if isinstance(group, dist.ProcessGroup):
            ranks = args.global_ranks_in_group or range(args.group_size)
            self._call_log.register(group, tuple(ranks), high_priority=high_priority)
            self._show_backend(group, backend)
        return group, store

    @staticmethod
    def _store_based_barrier(_: Any) -> None:
        """Return at once: torch's waits for the group's ranks in its store."""

    @staticmethod
    def _show_backend(group: dist.ProcessGroup, backend: str) -> None:
        # torch and scripts choose collectives by the backend's name: show the requested one.
        name = c10d.Backend(backend)
        c10d._world.pg_map[group] = (name, c10d._world.pg_map[group][1])
        c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(name))

    def _split_group(self, args: Any) -> object:
        if not args.split_ranks:
            raise ValueError("split_ranks cannot be None or empty")  # torch's own message
        process_group = args.parent_pg or c10d._get_default_group()
        parent = self._call_log.group_of(process_group)
        for members in args.split_ranks:
            if parent.rank in members:
                return c10d.new_group(
                    [parent.ranks[member] for member in members],
                    backend=getattr(args, "backend", None) or c10d._world.pg_map[process_group][0],
                    # As in torch, a part inherits the options of its parent group.
                    pg_options=args.pg_options or _PriorityOptions(parent.high_priority),
                    group_desc=args.group_desc,
                    # The group's name is then from its ranks, not from a counter.
                    use_local_synchronization=True,
                )
        return None

    def _recv(self, args: Any) -> int:
        if args.src is not None or args.group_src is not None:
            return self._torch_recv(**vars(args))
        # From any source: torch would read the source rank from the finished work.
        group = self._call_log.group_if_member(args.group)
        if group is None:
            return -1
        process_group: Any = args.group or c10d._get_default_group()
        process_group.recv_anysource([args.tensor], args.tag).wait()
        # Any rank would do; the call returns the sender, and the script may answer it.
        return next((rank for rank in group.ranks if rank != self._call_log.rank), group.ranks[0])

    def _barrier(self, args: Any) -> object:
        # Scripts pass their local rank's GPU; a capture has one GPU, with index 0. torch ignores
        # what is no list, such as the local rank itself.
        if isinstance(args.device_ids, list):
            args.device_ids = [0 for _ in args.device_ids]
        return self._torch_barrier(**vars(args))

    def _batch_isend_irecv(self, args: Any) -> list[Any]:
        # In a batch no operation waits for another one. The records are a sequence, in which two
        # ranks that both receive first would wait for each other: so receives are recorded last.
        ops = args.p2p_op_list
        c10d._check_p2p_op_list(ops)
        order = sorted(range(len(ops)), key=lambda index: ops[index].op is not c10d.isend)
        works = self._torch_batch([ops[index] for index in order])
        if len(works) != len(ops):  # one handle of the whole batch
            return works
        handles = dict(zip(order, works, strict=True))
        return [handles[index] for index in range(len(ops))]


def _with_signature(original: Callable[..., object], replacement: Callable[[Any], object]) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def run(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return replacement(SimpleNamespace(**bound.arguments))

    return run


class _PriorityOptions:
    """The one option of a process group that the recorder reads."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream


def _is_high_priority(options: object) -> bool:
    return bool(getattr(options, "is_high_priority_stream", False))


_SEE_THE_GROUP = ("torch", "onerank")

# This module of torch calls `init_process_group` if a script creates a mesh without a group.
_CREATES_GROUP = "torch.distributed.device_mesh"


@contextlib.contextmanager
def hidden_group() -> Generator[None]:
    """Let `dist.is_initialized` return False to callers other than torch and onerank."""
    original = dist.is_initialized

    @functools.wraps(original)
    def is_initialized() -> bool:
        return original() and _caller().partition(".")[0] in _SEE_THE_GROUP

    with rebound("torch.distributed.distributed_c10d", {"is_initialized": is_initialized}):
        yield


@contextlib.contextmanager
def group_from_init() -> Generator[None]:
    """Let `dist.is_initialized` return False to a script until it calls `init_process_group`.

    The recorder creates the default group before the script starts. Under torchrun the script
    creates it, and some scripts refuse an existing group of another backend.
    """
    original, create, called = dist.is_initialized, c10d.init_process_group, False

    @functools.wraps(original)
    def is_initialized() -> bool:
        caller = _caller()
        early = caller.partition(".")[0] in _SEE_THE_GROUP and caller != _CREATES_GROUP
        return original() and (called or early)

    @functools.wraps(create)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        called = True
        return create(*args, **kwargs)

    functions = {"is_initialized": is_initialized, "init_process_group": init_process_group}
    with rebound("torch.distributed.distributed_c10d", functions):
        yield


def _caller() -> str:
    """Return the name of the module that called the caller of this function."""
    frame = sys._getframe(2)
    return str(frame.f_globals.get("__name__", ""))
