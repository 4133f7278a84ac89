"""Scripts that start their own ranks, in a world of one process.

torch.multiprocessing.spawn becomes a call of this rank's function. A launcher that runs the script
again for each rank, such as Lightning's, is an error: its processes would wait for each other.
"""

import contextlib
import os
import shlex
import subprocess
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from onerank.capture.patches import patched
from onerank.ir.errors import CaptureError

_RANKS = ("RANK", "LOCAL_RANK")


class _Ended:
    """What `spawn(join=False)` returns: processes that have ended."""

    def join(self, *_: Any, **__: Any) -> bool:
        return True


@contextlib.contextmanager
def spawn_in_process() -> Generator[None]:
    """Let a script that starts its ranks itself run as the one that the environment names."""
    with patched("torch.multiprocessing", {"spawn": _call}):
        yield


@contextlib.contextmanager
def block_launchers() -> Generator[None]:
    """Refuse processes that the script starts as other ranks."""
    original = subprocess.Popen.__init__

    def start(self: Any, args: Any, *more: Any, **named: Any) -> None:
        given: Mapping[str, str] = named.get("env") or {}
        for name in _RANKS:
            if name in given and given[name] != os.environ.get(name):
                command = args if isinstance(args, str) else shlex.join(str(arg) for arg in args)
                raise CaptureError(
                    f"the script starts a process as {name} {given[name]} ({command}), and a "
                    "capture "
                    "runs one rank alone: give --torchrun, which tells it that all are started",
                    code="spawn-launcher",
                )
        original(self, args, *more, **named)

    with patched("subprocess.Popen", {"__init__": start}):
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
    # A world of one rank has no environment of torchrun.
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if nprocs < 1 or size % nprocs:
        raise CaptureError(
            f"torch.multiprocessing.spawn: the script starts {nprocs} processes, and the world has "
            f"{size} ranks; expected as many, or a part of them for each of several hosts: ask for "
            f"{nprocs} ranks (--dp {nprocs}), or let the script start {size}",
            code="spawn-rank-count",
        )
    fn(rank % nprocs, *args)
    return None if join else _Ended()
