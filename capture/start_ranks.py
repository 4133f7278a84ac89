"""Run the captured rank in this process, where a script starts one process per rank.

`torch.multiprocessing.spawn` and `start_processes` call the function as this rank, and so does
`multiprocessing.Process` if its function creates a process group. The other ranks do not run. A
launcher that runs the script again for each rank, such as Lightning's, or that waits for its
processes, such as torch.distributed.elastic, is an error: its processes would wait for each other.
So is torch.distributed.rpc.
"""

import contextlib
import os
import shlex
import subprocess
from collections.abc import Callable, Generator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from onerank.capture.group_creation import creates_group
from onerank.capture.patches import patched
from onerank.ir.errors import CaptureError

_RANKS = ("RANK", "LOCAL_RANK")


class _EndedProcesses:
    """The return value of `spawn(join=False)`: a context of processes that have ended."""

    def join(self, *_: Any, **__: Any) -> bool:
        return True


class _EndedPopen:
    """What a `multiprocessing.Process` knows of its operating-system process, which has ended."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.returncode = 0
        self.sentinel = os.open(os.devnull, os.O_RDONLY)  # readable, as that of an ended process

    def poll(self, *_: Any) -> int:
        return self.returncode

    wait = poll

    def terminate(self) -> None:
        """Do nothing, as for an ended process."""

    kill = terminate

    def close(self) -> None:
        os.close(self.sentinel)


@contextlib.contextmanager
def start_in_process() -> Generator[None]:
    """Replace what starts a script's ranks by a call of this rank (RANK)."""
    names = ("spawn", "start_processes")
    start = _start_in_process(BaseProcess.start)
    with (
        patched("torch.multiprocessing", dict.fromkeys(names, _spawn_in_process)),
        patched("multiprocessing.process.BaseProcess", {"start": start}),
    ):
        yield


@contextlib.contextmanager
def block_launchers() -> Generator[None]:
    """Raise `CaptureError` where a script would wait for another rank outside of collectives.

    That is a subprocess whose environment names another rank, and torch.distributed.rpc.
    """
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

    with (
        patched("subprocess.Popen", {"__init__": start}),
        patched("torch.distributed.rpc", {"init_rpc": _refuse_rpc}),
    ):
        yield


def _refuse_rpc(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "the script calls functions on other ranks by torch.distributed.rpc (init_rpc); a capture "
        "runs one rank, so these calls would wait for ever; capture a script whose ranks "
        "communicate by collectives or by send and recv",
        code="script-rpc",
    )


def _spawn_in_process(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    *_: Any,
    **__: Any,
) -> _EndedProcesses | None:
    """Call `fn` with this rank's index among the `nprocs` processes of its host.

    The parameters are those that torch's `spawn` and `start_processes` share.

    Raises:
        CaptureError: `nprocs` does not divide the world, or `fn` is torch.distributed.elastic's.
    """
    # Elastic wraps the script's function, and waits until another process has read the result.
    if (fn.__module__ or "").startswith("torch.distributed.elastic"):
        raise CaptureError(
            "the script starts its ranks by torch.distributed.elastic; a capture runs one rank: "
            "call the function that trains, and use --torchrun for the environment of a launch",
            code="spawn-launcher",
        )
    # A capture of a world of one rank does not set torchrun's variables.
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if nprocs < 1 or size % nprocs:
        raise CaptureError(
            f"torch.multiprocessing: the script starts {nprocs} processes on each host, which "
            f"do not divide the world of {size} ranks: use --dp {nprocs}, or start {size}",
            code="spawn-rank-count",
        )
    fn(rank % nprocs, *args)
    return None if join else _EndedProcesses()


def _start_in_process(original: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    """Return `BaseProcess.start` for a script that starts its ranks one by one.

    The n-th process that creates a process group is the rank n of this host, as in a loop over
    the ranks. Other processes, such as those that load data, start as usual.
    """
    count = 0

    def start(process: Any) -> None:
        nonlocal count
        if not creates_group(process._target or type(process).run):
            original(process)
            return
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        current, count = count % ranks, count + 1
        if current == rank % ranks:
            process.run()
        process._popen = _EndedPopen()
        process._sentinel = process._popen.sentinel

    return start
