"""All ranks of a world as threads of one process, with collectives that really exchange.

One rank runs at a time, until a collective makes it wait for the others. So no library needs to
be safe against threads, global state such as torch's default group can follow the rank that
runs, and a run repeats exactly.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from onerank.capture.verify.exact_group import ExactGroup, registries_restored, take_over
from onerank.ir.errors import CaptureError

_T = TypeVar("_T")

# What a slice replaces while its forward runs (`head`): it follows the rank that runs.
_REPLACED = ((torch.nn.functional, "cross_entropy"),)


class ExactWorld:
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
                "their own: destroy it first"
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
                "something global, so that they cannot be verified in one process"
            )

    def tell(self) -> None:
        """Let ranks that wait look again."""
        self._baton.notify_all()

    def _look_for_deadlock(self) -> None:
        if self._failure is not None or not self._blocked or len(self._blocked) < self._alive:
            return
        if not any(done() for done, _ in self._blocked.values()):
            waiting = "; ".join(f"rank {r} in {what}" for r, (_, what) in self._blocked.items())
            self._fail(CaptureError(f"the slices wait for each other in vain: {waiting}"))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None and not isinstance(error, _AbandonedError):
            self._failure = error
        self._baton.notify_all()


class _AbandonedError(BaseException):
    """Another rank failed; no `except Exception` of a model may hold it up."""


class ExactPeers:
    """What a rank of an exact world has of the others; see `capture.peers.Peers`."""

    def __init__(self, rank: int, world: ExactWorld) -> None:
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
            group = ExactGroup(name, members, self.rank, self._world)
            self._made[name, members] = cast("dist.ProcessGroup", group)
        return self._made[name, members]


def _replaced_now() -> list[Any]:
    return [getattr(module, name) for module, name in _REPLACED]


def _replace(values: list[Any]) -> None:
    for (module, name), value in zip(_REPLACED, values, strict=True):
        setattr(module, name, value)
