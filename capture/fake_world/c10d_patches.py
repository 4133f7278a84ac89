"""Patches of torch.distributed and the dispatcher that route calls to the recorder."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from onerank.capture.fake_world.fake_store import FakeStore
from onerank.capture.fake_world.object_collectives import ObjectCollectives
from onerank.capture.patches import rebound, untraced
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    from onerank.capture.fake_world.recorder import Recorder

_torch: Any = torch  # the dispatcher has no public names and no types in torch

_namedtuple: Any = collections.namedtuple  # of fields that only a schema knows

SPARSE = "the size of a sparse tensor is not known ahead; use dense gradients (sparse=False)"

_UNKNOWN = (
    f"torch {torch.__version__} has this collective and onerank does not know it yet; "
    "use another collective, or torch 2.11 to 2.13"
)

Kernel = Callable[[Any], object]
"""Takes an operator's arguments by the names of its schema, and returns what that promises."""

Refusal = Callable[[str, str], CaptureError]
"""The error for an operator, of (its name, why it is refused)."""


def override(kernels: Mapping[str, Kernel], refusal: Refusal, undo: contextlib.ExitStack) -> None:
    """Override every `c10d` operator that takes a process group.

    Args:
        kernels: an operator's name, without `c10d::` -> what it runs on dense tensors.
        refusal: for operators that are not among them, and for sparse tensors.
        undo: puts torch's own back.
    """
    library: Any = _torch.library.Library("c10d", "IMPL")
    undo.callback(library._destroy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel")
        for name, schema in _group_operators():
            known = kernels.get(name)
            kernel = _by_name(schema, known) if known else _refusing(refusal, name, _UNKNOWN)
            for key in ("CPU", "CUDA", "Meta"):
                library.impl(name, kernel, key, allow_override=True)
            for key in ("SparseCPU", "SparseCUDA"):
                library.impl(name, _refusing(refusal, name, SPARSE), key, allow_override=True)


def _refusing(refusal: Refusal, operator: str, why: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        raise refusal(operator, why)

    return refuse


def _group_operators() -> Iterator[tuple[str, Any]]:
    """Every operator of torch's that takes a process group, known to us or not."""
    for name in _torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::"):
            schema = _torch._C._get_schema(*name.partition(".")[::2])
            if any("ProcessGroup" in str(argument.type) for argument in schema.arguments):
                yield name.removeprefix("c10d::"), schema


def _by_name(schema: Any, kernel: Kernel) -> Callable[..., object]:
    optional = [a for a in schema.arguments if a.has_default_value()]  # the last ones
    arguments = _namedtuple(
        "Arguments",
        [argument.name for argument in schema.arguments],
        defaults=[argument.default_value for argument in optional],
    )
    return untraced(lambda *args: kernel(arguments(*args)))


# Debug levels and much of c10d have no public names or no types.
c10d: Any = distributed_c10d

debug: Any = dist


class C10dPatches:
    """Replacements of torch's functions.

    Each replacement takes its arguments by the names in the signature of torch's own.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._torch_init = c10d.init_process_group
        self._torch_helper = c10d._new_process_group_helper
        self._torch_recv = c10d.recv
        self._torch_batch = c10d.batch_isend_irecv
        self._torch_barrier = c10d.barrier
        self._store: FakeStore | None = None

    def install(self, undo: contextlib.ExitStack) -> None:
        """Replace the functions, and let `undo` put them back."""
        replacements: dict[str, Callable[[Any], object]] = {
            "init_process_group": self._init_process_group,
            "_new_process_group_helper": self._new_process_group_helper,
            "_store_based_barrier": self._store_based_barrier,
            "split_group": self._split_group,
            "recv": self._recv,
            "barrier": self._barrier,
            "batch_isend_irecv": self._batch_isend_irecv,
            **ObjectCollectives(self._recorder).replacements,
        }
        if (level := debug.get_debug_level()) == debug.DebugLevel.DETAIL:
            # torch would wrap each group in a gloo group that rendezvouses with the peers.
            debug.set_debug_level(debug.DebugLevel.INFO)
            undo.callback(debug.set_debug_level, level)
        old = [getattr(c10d, name) for name in replacements]
        new = [_by_name_facade(*pair) for pair in zip(old, replacements.values(), strict=True)]
        by = dict(zip(replacements, new, strict=True))
        undo.enter_context(rebound("torch.distributed.distributed_c10d", by))

    def create_world(self) -> None:
        """Initialise the default group."""
        rank, size = self._recorder.rank, self._recorder.world_size
        self._store = FakeStore(rank, size)  # C++ keeps no hold of what Python defines
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
        # From any source: torch would ask the finished work for its source.
        group = self._recorder.group_if_member(args.group)
        if group is None:
            return -1
        process_group: Any = args.group or c10d._get_default_group()
        process_group.recv_anysource([args.tensor], args.tag).wait()
        return next((rank for rank in group.ranks if rank != self._recorder.rank), group.ranks[0])

    def _barrier(self, args: Any) -> object:
        if args.device_ids is not None:  # GPUs of the node: that of this rank is the one here
            args.device_ids = [0 for _ in args.device_ids]
        return self._torch_barrier(**vars(args))

    def _batch_isend_irecv(self, args: Any) -> list[Any]:
        # Nothing of a batch waits for the rest of it. Recorded one by one, receives go last: two
        # ranks that both receive first would wait for each other.
        asked = args.p2p_op_list
        c10d._check_p2p_op_list(asked)
        order = sorted(range(len(asked)), key=lambda place: asked[place].op is not c10d.isend)
        works = self._torch_batch([asked[place] for place in order])
        if len(works) != len(asked):  # one handle of the whole batch
            return works
        return [work for _, work in sorted(zip(order, works, strict=True), key=lambda one: one[0])]


def _by_name_facade(original: Callable[..., object], replacement: Callable[[Any], object]) -> Any:
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
