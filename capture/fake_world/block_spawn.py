"""Scripts that start one process per rank themselves.

A capture runs one rank, so torch.multiprocessing.spawn calls the function in this process, as this
rank. A launcher that runs the script again for each rank, such as Lightning's, is an error: its
processes would wait for each other.
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


class _EndedProcesses:
    """The return value of `spawn(join=False)`: a context of processes that have ended."""

    def join(self, *_: Any, **__: Any) -> bool:
        return True


@contextlib.contextmanager
def spawn_in_process() -> Generator[None]:
    """Replace torch.multiprocessing.spawn by a call of this process's rank (RANK)."""
    with patched("torch.multiprocessing", {"spawn": _spawn_in_process}):
        yield


@contextlib.contextmanager
def block_launchers() -> Generator[None]:
    """Raise `CaptureError` for a subprocess whose environment names another rank."""
    original = subprocess.Popen.__init__

    def start(self: Any, args: Any, *more: Any, **named: Any) -> None:
        environment: Mapping[str, str] = named.get("env") or {}
        for name in _RANKS:
            if name in environment and environment[name] != os.environ.get(name):
                command = args if isinstance(args, str) else shlex.join(str(arg) for arg in args)
                raise CaptureError(
                    f"the script starts a process with {name}={environment[name]} ({command}); a "
                    "capture runs one rank: use --torchrun, so that the script finds the "
                    "environment of a launch and starts no ranks",
                    code="spawn-launcher",
                )
        original(self, args, *more, **named)

    with patched("subprocess.Popen", {"__init__": start}):
        yield


def _spawn_in_process(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    *_: Any,
    **__: Any,
) -> _EndedProcesses | None:
    """Call `fn` with this rank's index among the `nprocs` processes of its host."""
    # A capture of a world of one rank does not set torchrun's variables.
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if nprocs < 1 or size % nprocs:
        raise CaptureError(
            f"torch.multiprocessing.spawn: the script starts {nprocs} processes on each host, "
            f"which do not divide the world of {size} ranks: use --dp {nprocs}, or start {size}",
            code="spawn-rank-count",
        )
    fn(rank % nprocs, *args)
    return None if join else _EndedProcesses()
