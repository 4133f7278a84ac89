"""torch.multiprocessing.spawn in a world of one process: a call, of this rank's share."""

import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch.multiprocessing

from onerank.capture.replaced import replaced
from onerank.ir.errors import CaptureError


class _Ended:
    """What `spawn(join=False)` returns: processes that have ended."""

    def join(self, *_: Any, **__: Any) -> bool:
        return True


@contextlib.contextmanager
def spawning_nobody() -> Generator[None]:
    """Let a script that starts its ranks itself run as the one that the environment names."""
    with replaced(torch.multiprocessing, "spawn", _call):
        yield


def _call(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    *_: Any,
    **__: Any,
) -> _Ended | None:
    """Run `fn` as one of `nprocs` processes of a host, as torch.multiprocessing.spawn does."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if nprocs < 1 or size % nprocs:
        raise CaptureError(
            f"torch.multiprocessing.spawn: the script starts {nprocs} processes, and the world has "
            f"{size} ranks; expected as many, or a part of them for each of several hosts: ask for "
            f"{nprocs} ranks (--dp {nprocs}), or let the script start {size}"
        )
    fn(rank % nprocs, *args)
    return None if join else _Ended()
