"""All ranks of a world as threads of one process, with real collectives.

One rank runs at a time, until a collective makes it wait for the others. So libraries need not be
thread-safe, global state such as torch's default group can follow the running rank, and a run is
reproducible. Reductions add in rank order.

torch has a similar group for its tests (torch/testing/_internal/distributed/multi_threaded_pg.py),
but without send and receive, which pipelines need.
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as distributed_c10d
from torch.distributed import distributed_c10d as public_c10d

from onerank.ir.errors import CaptureError

# Group bookkeeping and work objects have no public names and no types in torch.
_c10d: Any = public_c10d

_native: Any = distributed_c10d

_ReduceOp: Any = dist.ReduceOp

_REGISTRIES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config")


class _PendingReceive(_native.Work):
    """The work handle of a receive; `wait` waits for the message and copies it."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        self._finish()
        return True


class ThreadedGroup(_native.ProcessGroup):
    """One rank's view of a process group, with the methods that torch.distributed calls."""

    def __init__(
        self, name: str, ranks: tuple[int, ...], rank: int, world: "ThreadedWorld"
    ) -> None:
        super().__init__(ranks.index(rank), len(ranks))
        self.global_rank, self.is_world = rank, len(ranks) == world.size and name == "world"
        self._ranks, self._world, self._label = ranks, world, name
        self._calls: dict[tuple[Any, ...], int] = {}
        # Functional collectives find a group by its name, so each rank's view has a separate name.
        self._name = f"exact:{name}:{'-'.join(map(str, ranks))}:{rank}"
        # torch looks up backend, name and ranks of a group in these registries.
        entries = ("fake", None), self._name, {r: i for i, r in enumerate(ranks)}, "fake"
        for registry, entry in zip(_REGISTRIES, entries, strict=True):
            getattr(_c10d._world, registry)[self] = entry
        _native._register_process_group(self._name, self)

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._label

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "exact"

    def _get_backend(self, device: torch.device) -> "ThreadedGroup":
        """Return the object from which torch reads whether a batch of messages is one call."""
        return self

    def _number(self, *kind: Any) -> int:
        self._calls[kind] = self._calls.get(kind, -1) + 1
        return self._calls[kind]

    def _exchange(self, collective: str, part: Any, finish: Callable[[list[Any]], None]) -> Any:
        # Every rank issues the calls of a group in the same order, so the number identifies a call.
        key = (collective, self._label, self._ranks, self._number())
        self._world.exchange(
            self.global_rank, key, part, index=self.rank(), size=self.size(), finish=finish
        )
        return _completed_work()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        operation = _operation(opts)

        # Here and below through `.data`: autograd must not see writes to tensors that it tracks.
        def finish(parts: list[list[Tensor]]) -> None:
            for tensors_of_ranks in zip(*parts, strict=True):
                # One sum for all ranks, so that rounding cannot differ between them.
                total = _reduced(tensors_of_ranks, operation)
                for tensor in tensors_of_ranks:
                    tensor.data.copy_(total)

        return self._exchange("all_reduce", tensors, finish)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        operation, root = _operation(opts), int(opts.rootRank)

        def finish(parts: list[list[Tensor]]) -> None:
            for tensors_of_ranks in zip(*parts, strict=True):
                tensors_of_ranks[root].data.copy_(_reduced(tensors_of_ranks, operation))

        return self._exchange("reduce", tensors, finish)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        root = int(opts.rootRank)

        def finish(parts: list[list[Tensor]]) -> None:
            for tensors_of_ranks in zip(*parts, strict=True):
                for tensor in tensors_of_ranks:
                    tensor.data.copy_(tensors_of_ranks[root].data)

        return self._exchange("broadcast", tensors, finish)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _: Any = None) -> Any:
        def finish(parts: list[Any]) -> None:
            sources = [shards[0].data.clone() for _, shards in parts]
            for gathered, _ in parts:
                for target, source in zip(gathered[0], sources, strict=True):
                    target.data.copy_(source)

        return self._exchange("all_gather", (outputs, inputs), finish)

    def all_gather_single(self, output: Tensor, source: Tensor, _: Any = None) -> Any:
        return self.allgather([_pieces(output, source, self.size())], [source])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], _: Any = None
    ) -> Any:
        for output, source in zip(outputs, sources, strict=True):
            self.all_gather_single(output, source)
        return _completed_work()

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Any:
        operation = _operation(opts)

        def finish(parts: list[Any]) -> None:
            rows = [[tensor.data for tensor in pieces[0]] for _, pieces in parts]
            totals = [_reduced(column, operation) for column in zip(*rows, strict=True)]
            for (shards, _), total in zip(parts, totals, strict=True):
                shards[0].data.copy_(total)

        return self._exchange("reduce_scatter", (outputs, inputs), finish)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter([output], [_pieces(source, output, self.size())], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> Any:
        for output, source in zip(outputs, sources, strict=True):
            self.reduce_scatter_single(output, source, opts)
        return _completed_work()

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], _: Any = None) -> Any:
        def finish(parts: list[Any]) -> None:
            # Clones: a rank may receive into its inputs, which others have still to read.
            sources = [[tensor.data.clone() for tensor in pieces] for _, pieces in parts]
            for receiver, (targets, _) in enumerate(parts):
                for sender, target in enumerate(targets):
                    target.data.copy_(sources[sender][receiver])

        return self._exchange("all_to_all", (outputs, inputs), finish)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
        _: Any = None,
    ) -> Any:
        return self.alltoall(
            _rows(output, output_splits, self.size()), _rows(source, input_splits, self.size())
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._exchange("barrier", None, lambda _: None)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        path = (self._label, self._ranks, self.rank(), to, tag)
        key = (*path, self._number("send", to, tag))
        # Clones: the sender may overwrite its buffer before the receiver reads it.
        self._world.mail[key] = [tensor.data.clone() for tensor in tensors]
        self._world.notify()
        return _completed_work()

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        path = (self._label, self._ranks, source, self.rank(), tag)
        key = (*path, self._number("recv", source, tag))
        mail = self._world.mail

        def finish() -> None:
            call = f"recv from rank {self._ranks[source]}"
            self._world.wait(self.global_rank, lambda: key in mail, call)
            for tensor, sent in zip(tensors, mail.pop(key), strict=True):
                tensor.data.copy_(sent)

        # Not finished here: a pipeline posts receives before the sends that they match.
        return _PendingReceive(finish)

    # The names that torch 2.11 calls.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


for _name in (
    *("allgather_coalesced", "gather", "gather_single", "scatter"),
    *("recv_anysource", "monitored_barrier"),
):

    def _refuse(*_: Any, name: str = _name, **__: Any) -> NoReturn:
        raise CaptureError(
            f"{name} between slices cannot be verified: supported are all_reduce, reduce, "
            "broadcast, all_gather, reduce_scatter, all_to_all, barrier, send and recv",
            code="verify-collective",
        )

    setattr(ThreadedGroup, _name, _refuse)


def set_default_group(rank: int) -> None:
    """Make the world group of rank `rank` torch's default group."""
    groups = _c10d._world.pg_names
    threaded = [group for group in groups if isinstance(group, ThreadedGroup)]
    world = next(group for group in threaded if group.is_world and group.global_rank == rank)
    _c10d._update_default_pg(world)


@contextlib.contextmanager
def registries_restored() -> Generator[None]:
    """Remove the groups that were created in the context from torch's registries."""
    world = _c10d._world
    before = {name: dict(getattr(world, name)) for name in _REGISTRIES}
    try:
        yield
    finally:
        for group in [g for g in world.pg_names if isinstance(g, ThreadedGroup)]:
            _native._unregister_process_group(group.group_name)
        for name, entries in before.items():
            registry = getattr(world, name)
            registry.clear()
            registry.update(entries)
        _c10d._update_default_pg(None)


def _operation(opts: Any) -> Any:
    return _ReduceOp.SUM if opts is None else opts.reduceOp


def _reduced(tensors: Sequence[Tensor], operation: Any) -> Tensor:
    """Return the reduction of the ranks' tensors, in rank order."""
    stacked: Any = torch.stack([tensor.data for tensor in tensors])
    reductions = {"SUM": "sum", "AVG": "mean", "MAX": "amax", "MIN": "amin", "PRODUCT": "prod"}
    for name, method in reductions.items():
        if operation == getattr(_ReduceOp, name):
            # Sums of integers would become int64.
            return getattr(stacked, method)(0).to(stacked.dtype)
    raise CaptureError(
        f"reduction {operation} between slices cannot be verified: supported are "
        f"{', '.join(reductions)}",
        code="verify-reduction",
    )


def _pieces(large: Tensor, small: Tensor, size: int) -> list[Tensor]:
    """Return views of `size` equal parts of `large`, each with the shape of `small`."""
    return [piece.view(small.shape) for piece in large.data.view(-1).chunk(size)]


def _rows(tensor: Tensor, splits: list[int] | None, size: int) -> list[Tensor]:
    rows = splits or [tensor.shape[0] // size] * size
    return list(tensor.data.split(rows))


def _completed_work() -> Any:
    future: Any = torch.futures.Future()
    future.set_result(None)
    return _native._create_work_from_future(future)


_T = TypeVar("_T")

# Functions that a slice replaces during its forward (`lm_head`): each rank has a separate version.
_PATCHED = ((torch.nn.functional, "cross_entropy"),)


class ThreadedWorld:
    """The ranks 0 to `size` - 1, each in a thread; one of them runs at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._baton = threading.Condition()  # the running rank's thread holds its lock
        self._blocked: dict[int, tuple[Callable[[], bool], str]] = {}  # condition, call by rank
        self._alive = size
        self._running = -1
        self._failure: BaseException | None = None
        self._posted: dict[tuple[Any, ...], dict[int, Any]] = {}
        self.mail: dict[tuple[Any, ...], list[Tensor]] = {}

    def run(self, body: Callable[["ThreadedPeers"], _T]) -> list[_T]:
        """Run `body` once for each rank; return what they return, by rank.

        Raises:
            CaptureError: the ranks are in a deadlock, or a process group exists already.
            Exception: the exception of the first rank that failed.
        """
        if dist.is_initialized():
            raise CaptureError(
                "a default process group exists already, and each rank of a threaded world creates "
                "its default group: call destroy_process_group first",
                code="verify-group-exists",
            )
        results: dict[int, _T] = {}
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        device = torch.cuda.current_device() if on_gpu else None

        originals = _current_functions()

        def run_rank(peers: ThreadedPeers) -> None:
            with self._baton:
                try:
                    _install(originals)
                    if device is not None:
                        torch.cuda.set_device(device)
                    self._running = peers.rank
                    peers.start()
                    # Otherwise autograd runs the GPU backward of all ranks in one thread.
                    with torch.autograd.set_multithreading_enabled(False):
                        results[peers.rank] = body(peers)
                except BaseException as error:  # noqa: BLE001  raised again below
                    self._fail(error)
                finally:
                    self._alive -= 1
                    self._check_deadlock()

        with registries_restored():
            threads = [
                threading.Thread(target=run_rank, args=(ThreadedPeers(rank, self),), daemon=True)
                for rank in range(self.size)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        _install(originals)
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(self.size)]

    def exchange(
        self,
        rank: int,
        key: tuple[Any, ...],
        part: Any,
        *,
        index: int,
        size: int,
        finish: Callable[[list[Any]], None],
    ) -> None:
        """Post a rank's part of a call; the last of `size` ranks to arrive finishes it for all.

        Args:
            rank: global rank.
            key: identifies the call on every rank: collective, group, ranks, number.
            part: this rank's tensors.
            index: rank within the group.
            size: size of the group.
            finish: moves the data, given the parts of all ranks in group order.
        """
        self._check_running(rank)
        posted = self._posted.setdefault(key, {})
        posted[index] = part
        if len(posted) == size:
            finish([posted[number] for number in range(size)])
            del self._posted[key]
            self._baton.notify_all()
        else:
            self.wait(rank, lambda: key not in self._posted, f"{key[0]} of group {key[1]!r}")

    def wait(self, rank: int, done: Callable[[], bool], call: str) -> None:
        """Let other ranks run until `done`; `call` describes the wait in a deadlock's error."""
        self._check_running(rank)
        if not done():
            # While other ranks run, they install their versions of the patched functions.
            patches = _current_functions()
            self._blocked[rank] = (done, call)
            self._check_deadlock()
            # It releases the lock, which lets another rank run.
            self._baton.wait_for(lambda: done() or self._failure is not None)
            del self._blocked[rank]
            _install(patches)
        if self._failure is not None:
            raise _AbandonedError
        self._running = rank
        set_default_group(rank)

    def _check_running(self, rank: int) -> None:
        if rank != self._running:
            raise CaptureError(
                f"the slice of rank {self._running} communicates as rank {rank}: slices that share "
                "global state cannot be verified in one process",
                code="verify-shared-state",
            )

    def notify(self) -> None:
        """Make waiting ranks evaluate their conditions again."""
        self._baton.notify_all()

    def _check_deadlock(self) -> None:
        if self._failure is not None or not self._blocked or len(self._blocked) < self._alive:
            return
        if not any(done() for done, _ in self._blocked.values()):
            waiting = "; ".join(f"rank {r} in {call}" for r, (_, call) in self._blocked.items())
            self._fail(
                CaptureError(f"deadlock between the slices: {waiting}", code="verify-deadlock")
            )

    def _fail(self, error: BaseException) -> None:
        if self._failure is None and not isinstance(error, _AbandonedError):
            self._failure = error
        self._baton.notify_all()


class _AbandonedError(BaseException):
    """Another rank failed. A BaseException, so that no `except Exception` of a model stops it."""


class ThreadedPeers:
    """The other ranks, as a rank of a threaded world sees them (`fake_world.recorder.Peers`)."""

    def __init__(self, rank: int, world: ThreadedWorld) -> None:
        self.rank = rank
        self.groups: dict[str, tuple[int, ...]] = {}
        self._world = world
        self._process_groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

    def start(self) -> None:
        """Create this rank's default group."""
        self.new_group("world", range(self._world.size))
        set_default_group(self.rank)

    def stop(self) -> None:
        """Do nothing: `ThreadedWorld.run` removes the groups."""

    def new_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of `ranks`, which include this one; create it on the first call."""
        members = tuple(ranks)
        self.groups[name] = members
        if (name, members) not in self._process_groups:
            group = ThreadedGroup(name, members, self.rank, self._world)
            self._process_groups[name, members] = cast("dist.ProcessGroup", group)
        return self._process_groups[name, members]


def _current_functions() -> list[Any]:
    return [getattr(module, name) for module, name in _PATCHED]


def _install(functions: list[Any]) -> None:
    for (module, name), value in zip(_PATCHED, functions, strict=True):
        setattr(module, name, value)
