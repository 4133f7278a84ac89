"""All ranks of a world as threads of one process, with real collectives.

One rank runs at a time, until a collective makes it wait for the others. So libraries need not be
thread-safe, global state such as torch's default group can follow the running rank, and a run is
reproducible. Reductions add in rank order.

torch has a similar group for its own tests (torch/testing/_internal/distributed/
multi_threaded_pg.py). It has no send and receive, which pipelines need.
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


class _Received(_native.Work):
    """A receive under way."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        self._finish()
        return True


class ThreadedGroup(_native.ProcessGroup):
    """One rank's view of a group; methods as torch.distributed calls them."""

    def __init__(self, name: str, ranks: tuple[int, ...], own: int, world: "ThreadedWorld") -> None:
        super().__init__(ranks.index(own), len(ranks))
        self.own, self.is_world = own, len(ranks) == world.size and name == "world"
        self._ranks, self._exact, self._label = ranks, world, name
        self._calls: dict[tuple[Any, ...], int] = {}
        self._name = f"exact:{name}:{'-'.join(map(str, ranks))}:{own}"
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
        """Return what a batch of sends and receives is asked of: whether it runs as one call."""
        return self

    def _number(self, *kind: Any) -> int:
        self._calls[kind] = self._calls.get(kind, -1) + 1
        return self._calls[kind]

    def _exchange(self, what: str, part: Any, finish: Callable[[list[Any]], None]) -> Any:
        key = (what, self._label, self._ranks, self._number())
        self._exact.exchange(
            self.own, key, part, place=self.rank(), size=self.size(), finish=finish
        )
        return _done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        operation = _operation(opts)

        def finish(parts: list[list[Tensor]]) -> None:
            for same in zip(*parts, strict=True):
                total = _reduced(same, operation)
                for tensor in same:
                    tensor.data.copy_(total)

        return self._exchange("all_reduce", tensors, finish)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        operation, root = _operation(opts), int(opts.rootRank)

        def finish(parts: list[list[Tensor]]) -> None:
            for same in zip(*parts, strict=True):
                same[root].data.copy_(_reduced(same, operation))

        return self._exchange("reduce", tensors, finish)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        root = int(opts.rootRank)

        def finish(parts: list[list[Tensor]]) -> None:
            for same in zip(*parts, strict=True):
                for tensor in same:
                    tensor.data.copy_(same[root].data)

        return self._exchange("broadcast", tensors, finish)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _: Any = None) -> Any:
        def finish(parts: list[Any]) -> None:
            sources = [mine[0].data.clone() for _, mine in parts]
            for theirs, _ in parts:
                for place, source in zip(theirs[0], sources, strict=True):
                    place.data.copy_(source)

        return self._exchange("all_gather", (outputs, inputs), finish)

    def all_gather_single(self, output: Tensor, source: Tensor, _: Any = None) -> Any:
        return self.allgather([_pieces(output, source, self.size())], [source])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], _: Any = None
    ) -> Any:
        for output, source in zip(outputs, sources, strict=True):
            self.all_gather_single(output, source)
        return _done()

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Any:
        operation = _operation(opts)

        def finish(parts: list[Any]) -> None:
            rows = [[t.data for t in mine[0]] for _, mine in parts]
            totals = [_reduced(column, operation) for column in zip(*rows, strict=True)]
            for (theirs, _), total in zip(parts, totals, strict=True):
                theirs[0].data.copy_(total)

        return self._exchange("reduce_scatter", (outputs, inputs), finish)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter([output], [_pieces(source, output, self.size())], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> Any:
        for output, source in zip(outputs, sources, strict=True):
            self.reduce_scatter_single(output, source, opts)
        return _done()

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], _: Any = None) -> Any:
        def finish(parts: list[Any]) -> None:
            sources = [[t.data.clone() for t in mine] for _, mine in parts]
            for receiver, (theirs, _) in enumerate(parts):
                for sender, place in enumerate(theirs):
                    place.data.copy_(sources[sender][receiver])

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
        self._exact.mail[key] = [tensor.data.clone() for tensor in tensors]
        self._exact.tell()
        return _done()

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        path = (self._label, self._ranks, source, self.rank(), tag)
        key = (*path, self._number("recv", source, tag))
        mail = self._exact.mail

        def finish() -> None:
            what = f"recv from rank {self._ranks[source]}"
            self._exact.wait(self.own, lambda: key in mail, what)
            for tensor, sent in zip(tensors, mail.pop(key), strict=True):
                tensor.data.copy_(sent)

        return _Received(finish)

    # torch 2.11 calls the same by these names
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
            f"{name} between slices cannot be verified: the exact world has all_reduce, reduce, "
            "broadcast, all_gather, reduce_scatter, all_to_all, barrier, send and recv",
            code="verify-collective",
        )

    setattr(ThreadedGroup, _name, _refuse)


def take_over(rank: int) -> None:
    """Make the running rank's world torch's default group."""
    groups = _c10d._world.pg_names
    own = next(g for g in groups if isinstance(g, ThreadedGroup) and g.is_world and g.own == rank)
    _c10d._update_default_pg(own)


@contextlib.contextmanager
def registries_restored() -> Generator[None]:
    """Take the groups made inside out of torch's registries again."""
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
    """Return the reduction, in the order of ranks."""
    stacked: Any = torch.stack([tensor.data for tensor in tensors])
    reductions = {"SUM": "sum", "AVG": "mean", "MAX": "amax", "MIN": "amin", "PRODUCT": "prod"}
    for name, method in reductions.items():
        if operation == getattr(_ReduceOp, name):
            return getattr(stacked, method)(0).to(stacked.dtype)
    raise CaptureError(
        f"a reduction {operation} between slices cannot be verified", code="verify-reduction"
    )


def _pieces(large: Tensor, small: Tensor, size: int) -> list[Tensor]:
    """Return the memory of `large` as `size` parts shaped like `small`."""
    return [piece.view(small.shape) for piece in large.data.view(-1).chunk(size)]


def _rows(tensor: Tensor, splits: list[int] | None, size: int) -> list[Tensor]:
    rows = splits or [tensor.shape[0] // size] * size
    return list(tensor.data.split(rows))


def _done() -> Any:
    future: Any = torch.futures.Future()
    future.set_result(None)
    return _native._create_work_from_future(future)


_T = TypeVar("_T")

# What a slice replaces while its forward runs (`head`): it follows the rank that runs.
_REPLACED = ((torch.nn.functional, "cross_entropy"),)


class ThreadedWorld:
    """The ranks 0 to `size` - 1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._baton = threading.Condition()
        self._blocked: dict[int, tuple[Callable[[], bool], str]] = {}
        self._alive = size
        self._running = -1
        self._failure: BaseException | None = None
        self._posted: dict[tuple[Any, ...], dict[int, Any]] = {}
        self.mail: dict[tuple[Any, ...], list[Tensor]] = {}

    def run(self, body: Callable[["ExactPeers"], _T]) -> list[_T]:
        """Run `body` once for each rank; return what they return, by rank.

        Raises:
            CaptureError: the ranks wait for each other in vain.
            Exception: what the first rank to fail raised.
        """
        if dist.is_initialized():
            raise CaptureError(
                "a process group exists already, and the ranks of an exact world need groups of "
                "their own: destroy it first",
                code="verify-group-exists",
            )
        results: dict[int, _T] = {}
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        device = torch.cuda.current_device() if on_gpu else None

        untouched = _replaced_now()

        def one_rank(peers: ExactPeers) -> None:
            with self._baton:
                try:
                    _replace(untouched)
                    if device is not None:
                        torch.cuda.set_device(device)
                    self._running = peers.rank
                    peers.start()
                    # else autograd runs the backward of every rank in one thread for the GPU
                    with torch.autograd.set_multithreading_enabled(False):
                        results[peers.rank] = body(peers)
                except BaseException as error:  # noqa: BLE001  raised again below
                    self._fail(error)
                finally:
                    self._alive -= 1
                    self._look_for_deadlock()

        with registries_restored():
            threads = [
                threading.Thread(target=one_rank, args=(ExactPeers(rank, self),), daemon=True)
                for rank in range(self.size)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        _replace(untouched)
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(self.size)]

    def exchange(
        self,
        rank: int,
        key: tuple[Any, ...],
        part: Any,
        *,
        place: int,
        size: int,
        finish: Callable[[list[Any]], None],
    ) -> None:
        """Post a rank's part of a call; the last of `size` to come finishes it for all.

        Args:
            rank: global rank.
            key: what tells the call from others.
            part: what `finish` gets of this rank.
            place: rank within the group.
            size: ranks of the group.
            finish: moves the data, given the parts by place.
        """
        self._check_own(rank)
        posted = self._posted.setdefault(key, {})
        posted[place] = part
        if len(posted) == size:
            finish([posted[number] for number in range(size)])
            del self._posted[key]
            self._baton.notify_all()
        else:
            self.wait(rank, lambda: key not in self._posted, f"{key[0]} of group {key[1]!r}")

    def wait(self, rank: int, done: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `done`."""
        self._check_own(rank)
        if not done():
            own = _replaced_now()
            self._blocked[rank] = (done, what)
            self._look_for_deadlock()
            self._baton.wait_for(lambda: done() or self._failure is not None)
            del self._blocked[rank]
            _replace(own)
        if self._failure is not None:
            raise _AbandonedError
        self._running = rank
        take_over(rank)

    def _check_own(self, rank: int) -> None:
        if rank != self._running:
            raise CaptureError(
                f"the slice of rank {self._running} communicates as rank {rank}: slices share "
                "something global, so that they cannot be verified in one process",
                code="verify-shared-state",
            )

    def tell(self) -> None:
        """Let ranks that wait look again."""
        self._baton.notify_all()

    def _look_for_deadlock(self) -> None:
        if self._failure is not None or not self._blocked or len(self._blocked) < self._alive:
            return
        if not any(done() for done, _ in self._blocked.values()):
            waiting = "; ".join(f"rank {r} in {what}" for r, (_, what) in self._blocked.items())
            self._fail(
                CaptureError(
                    f"the slices wait for each other in vain: {waiting}", code="verify-deadlock"
                )
            )

    def _fail(self, error: BaseException) -> None:
        if self._failure is None and not isinstance(error, _AbandonedError):
            self._failure = error
        self._baton.notify_all()


class _AbandonedError(BaseException):
    """Another rank failed; no `except Exception` of a model may hold it up."""


class ExactPeers:
    """What a rank of an exact world has of the others; see `capture.peers.Peers`."""

    def __init__(self, rank: int, world: ThreadedWorld) -> None:
        self.rank = rank
        self.groups: dict[str, tuple[int, ...]] = {}
        self._world = world
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

    def start(self) -> None:
        """Make this rank's default group."""
        self.new_group("world", range(self._world.size))
        take_over(self.rank)

    def stop(self) -> None:
        """Nothing is left to undo: the groups go with the world."""

    def new_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of `ranks`, this one among them; asked again, the same."""
        members = tuple(ranks)
        self.groups[name] = members
        if (name, members) not in self._made:
            group = ThreadedGroup(name, members, self.rank, self._world)
            self._made[name, members] = cast("dist.ProcessGroup", group)
        return self._made[name, members]


def _replaced_now() -> list[Any]:
    return [getattr(module, name) for module, name in _REPLACED]


def _replace(values: list[Any]) -> None:
    for (module, name), value in zip(_REPLACED, values, strict=True):
        setattr(module, name, value)
