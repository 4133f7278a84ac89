"""What absent ranks send as Python objects, found by running the script as them, up to there.

A stage of torch.distributed.pipelining learns the shapes of its inputs and gradients from its
neighbours, through send_object_list. No other code than the neighbours' knows them. So when the
script asks for an object, a child process runs it as the rank that sends it. What that rank needs
of others to get there is found the same way, one process at a time; what the captured rank itself
has sent is known.

The children descend from a process that is forked before the script runs, and so before CUDA.
"""

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

from onerank.ir.errors import CaptureError

_exit = os._exit  # the script may see another
_TOLD = 1500  # characters of a child's last words


class Messages(Protocol):
    """Python objects that ranks send to one another."""

    def send(self, dst: int, objects: list[Any]) -> None:
        """Note what this process's rank sends to rank `dst`."""
        ...

    def receive(self, src: int) -> list[Any]:
        """Return what rank `src` sends next to this process's rank."""
        ...


@dataclass(frozen=True)
class _Wanted:
    """The message number `index` from one rank to another."""

    src: int
    dst: int
    index: int


@dataclass
class _Log:
    """Messages so far, pickled."""

    sent: dict[tuple[int, int], list[bytes]] = field(default_factory=dict[Any, Any])

    def find(self, wanted: _Wanted) -> bytes | None:
        messages = self.sent.get((wanted.src, wanted.dst), [])
        return messages[wanted.index] if wanted.index < len(messages) else None


class Rehearsal:
    """The messages of the rank that is captured.

    Args:
        rank: the rank that is captured.
        act: runs the script as another rank, with messages of its own, in a child process.
        progress: told in a few words what goes on.
    """

    def __init__(
        self, rank: int, act: Callable[[int, Messages], None], progress: Callable[[str], None]
    ) -> None:
        self._rank = rank
        self._act = act
        self._progress = progress
        self._received: dict[int, int] = {}

    @contextlib.contextmanager
    def ready(self) -> Generator[None]:
        """Keep the process that children descend from while the context lasts."""
        self._stage, offstage = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._prompter = os.fork()
        if self._prompter == 0:
            self._stage.close()
            _serve(offstage, self._act)
        offstage.close()
        try:
            yield
        finally:
            self._stage.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._prompter, signal.SIGTERM)
            os.waitpid(self._prompter, 0)

    def send(self, dst: int, objects: list[Any]) -> None:
        """Note what the captured rank sends to rank `dst`."""
        self._stage.send((self._rank, dst, pickle.dumps(objects)))

    def receive(self, src: int) -> list[Any]:
        """Return what rank `src` sends next to the captured rank.

        Raises:
            CaptureError: the script, run as another rank, does not get to send it.
        """
        self._progress(f"running as rank {src}, to learn what it sends")
        index = self._received.get(src, 0)
        self._received[src] = index + 1
        self._stage.send(_Wanted(src, self._rank, index))
        try:
            answer = self._stage.recv()
        except EOFError:
            answer = "the process that was to run it has ended"
        if isinstance(answer, str):
            raise CaptureError(
                f"rank {self._rank} waits for objects that rank {src} sends, and the script run as "
                f"other ranks did not get there: {answer}"
            )
        return pickle.loads(answer)


def _serve(stage: Connection, act: Callable[[int, Messages], None]) -> NoReturn:
    """Answer the captured rank until it hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    actor: list[int] = []

    def leave(*_: object) -> NoReturn:
        for pid in actor:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _exit(0)

    signal.signal(signal.SIGTERM, leave)
    log = _Log()
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = stage.recv()
            if not isinstance(request, _Wanted):
                src, dst, message = request
                log.sent.setdefault((src, dst), []).append(message)
                continue
            try:
                stage.send(_find(request, log, act, actor, [], captured=request.dst))
            except CaptureError as error:
                stage.send(str(error))
    leave()


def _find(
    wanted: _Wanted,
    log: _Log,
    act: Callable[[int, Messages], None],
    actor: list[int],
    waiting: list[_Wanted],
    *,
    captured: int,
) -> bytes:
    """Run the script as the sender, and as those whom it waits for, until the message is there."""
    while (message := log.find(wanted)) is None:
        if wanted in waiting or wanted.src == captured:
            raise CaptureError(
                f"rank {wanted.dst} waits for rank {wanted.src}, and that for rank {wanted.dst}"
            )
        sent, needs = _act_out(wanted, log, act, actor)
        for dst, messages in sent.items():
            log.sent[wanted.src, dst] = messages
        if needs is not None:
            _find(needs, log, act, actor, [*waiting, wanted], captured=captured)
        elif log.find(wanted) is None:
            raise CaptureError(f"rank {wanted.src} ran to its end without sending them")
    return message


def _act_out(
    wanted: _Wanted, log: _Log, act: Callable[[int, Messages], None], actor: list[int]
) -> tuple[dict[int, list[bytes]], _Wanted | None]:
    """Run the script as the sender in a child; return what it sent and what it waits for."""
    theirs, ours = Pipe(duplex=False)
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            theirs.close()
            _play(wanted, log, act, ours, said.fileno())
        actor.append(child)
        ours.close()
        try:
            return theirs.recv()
        except EOFError:
            said.seek(0)
            words = said.read().decode(errors="replace").strip()[-_TOLD:]
            raise CaptureError(f"as rank {wanted.src} it failed:\n{words}") from None
        finally:
            theirs.close()
            os.waitpid(child, 0)
            actor.clear()


def _play(
    wanted: _Wanted,
    log: _Log,
    act: Callable[[int, Messages], None],
    report: Connection,
    said: int,
) -> NoReturn:
    """Run the script as a rank, report, and end this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    part = _Part(wanted, log, report)
    try:
        act(wanted.src, part)
        part.leave(None)
    except BaseException:  # noqa: BLE001  its own words are the report
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
    _exit(1)


class _Part:
    """The messages of a rank that is played up to one that it sends, or lacks."""

    def __init__(self, wanted: _Wanted, log: _Log, report: Connection) -> None:
        self._wanted = wanted
        self._log = log
        self._report = report
        self._sent: dict[int, list[bytes]] = {}
        self._received: dict[int, int] = {}

    def send(self, dst: int, objects: list[Any]) -> None:
        """Note a message; leave when it is the one that is wanted."""
        messages = self._sent.setdefault(dst, [])
        messages.append(pickle.dumps(objects))
        if dst == self._wanted.dst and len(messages) > self._wanted.index:
            self.leave(None)

    def receive(self, src: int) -> list[Any]:
        """Return a message, or leave to have it found."""
        needs = _Wanted(src, self._wanted.src, self._received.get(src, 0))
        self._received[src] = needs.index + 1
        message = self._log.find(needs)
        if message is None:
            self.leave(needs)
        return pickle.loads(message)

    def leave(self, needs: _Wanted | None) -> NoReturn:
        """Report what was sent and what is needed, and end this process."""
        self._report.send((self._sent, needs))
        self._report.close()
        _exit(0)
