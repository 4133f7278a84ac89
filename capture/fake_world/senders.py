"""Run the script as an absent rank, to learn the messages that it sends by value.

A stage of torch.distributed.pipelining learns the shapes of its inputs and gradients from its
neighbours through `send_object_list`. Often the first rank broadcasts what it read from a file.
Other scripts exchange shapes and token ids as tensors (`integer_payloads`). Only the sender's code
knows these values. So a child process runs the script as the sending rank, up to the send. Messages
which that rank needs are found in the same way, one process at a time; messages of the captured
rank are known.

Each message costs a run, and no run may start in a timed step. So the messages of the second step
are reused in every later step. The child processes descend from one that was forked before the
script ran, and therefore before CUDA was initialised.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from onerank.capture.fake_world.object_collectives import STEPS, Address, MessageRequest, RunAsRank
from onerank.ir.errors import CaptureError

_exit = os._exit  # the script may see another

# The script is run by a closure over the captured rank's state, which only a fork has.
_FORK = multiprocessing.get_context("fork")

_TOLD = 1500  # characters of a child's last words


@dataclass
class _Log:
    """Messages so far, pickled."""

    sent: dict[tuple[int, Address], list[bytes]] = field(default_factory=dict[Any, Any])

    def find(self, request: MessageRequest) -> bytes | None:
        messages = self.sent.get((request.src, request.to), [])
        return messages[request.index] if request.index < len(messages) else None


def _serve_at(stage: Connection, other_end: Connection, run_as_rank: RunAsRank) -> NoReturn:
    other_end.close()  # else this process would not see the captured rank hang up
    serve(stage, run_as_rank)


def serve(stage: Connection, run_as_rank: RunAsRank) -> NoReturn:
    """Answer the captured rank until it hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    actors: list[Any] = []

    def leave(*_: object) -> NoReturn:
        for actor in actors:
            actor.kill()
        _exit(0)

    signal.signal(signal.SIGTERM, leave)
    log = _Log()
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = stage.recv()
            if not isinstance(request, MessageRequest):
                src, to, message = request
                log.sent.setdefault((src, to), []).append(message)
                continue
            try:
                stage.send(_find(request, log, run_as_rank, actors, [], captured=request.waiting))
            except CaptureError as error:
                stage.send(str(error))
    leave()


def _find(
    request: MessageRequest,
    log: _Log,
    run_as_rank: RunAsRank,
    actors: list[Any],
    waiting: list[MessageRequest],
    *,
    captured: int,
) -> bytes:
    """Run the script as the sender, and as those whom it waits for, until the message is there."""
    while (message := log.find(request)) is None:
        if request in waiting or request.src == captured:
            raise CaptureError(
                f"rank {request.waiting} waits for rank {request.src}, and that for rank "
                f"{request.waiting}",
                code="sender-cycle",
            )
        sent, needs = _run_sender(request, log, run_as_rank, actors)
        for to, messages in sent.items():
            log.sent[request.src, to] = max(log.sent.get((request.src, to), []), messages, key=len)
        if log.find(request) is not None:
            continue
        if needs is not None:
            _find(needs, log, run_as_rank, actors, [*waiting, request], captured=captured)
        else:
            raise CaptureError(
                f"rank {request.src} ran to its end without sending them",
                code="sender-sent-nothing",
            )
    return message


def _run_sender(
    request: MessageRequest, log: _Log, run_as_rank: RunAsRank, actors: list[Any]
) -> tuple[dict[Address, list[bytes]], MessageRequest | None]:
    """Run the script as the sender in a child; return what it sent and what it waits for."""
    theirs, ours = _FORK.Pipe(duplex=False)
    with tempfile.TemporaryFile() as said:
        child = _FORK.Process(target=_play, args=(request, log, run_as_rank, ours, said.fileno()))
        child.start()
        actors.append(child)
        ours.close()
        try:
            return theirs.recv()
        except EOFError:
            said.seek(0)
            words = said.read().decode(errors="replace").strip()[-_TOLD:]
            raise CaptureError(
                f"as rank {request.src} it failed:\n{words}", code="sender-failed"
            ) from None
        finally:
            theirs.close()
            child.join()
            actors.clear()


def _play(
    request: MessageRequest,
    log: _Log,
    run_as_rank: RunAsRank,
    report: Connection,
    said: int,
) -> NoReturn:
    """Run the script as a rank, report, and end this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)  # whoever stood in for them is away
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    part = _Part(request, log, report)
    try:
        run_as_rank(request.src, part)
        part.leave(None)
    except BaseException:  # noqa: BLE001  its own words are the report
        if part.reached:
            part.leave(None)
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
    _exit(1)


class _Part:
    """The messages of a rank that is played up to one that it sends, or lacks.

    Where earlier messages were asked for, it goes on until there are twice as many: those to come
    then cost few runs. No further than the steps whose messages are sought.
    """

    collects_sends = True

    def __init__(self, request: MessageRequest, log: _Log, report: Connection) -> None:
        self._request = request
        self._log = log
        self._report = report
        self._sent: dict[Address, list[bytes]] = {}
        self._received: dict[tuple[int, Address], int] = {}
        self._steps = 0

    @property
    def reached(self) -> bool:
        """Whether the requested message has been sent."""
        return len(self._sent.get(self._request.to, [])) > self._request.index

    def next_step(self) -> None:
        """Take note of a step; leave behind the last whose messages are sought."""
        self._steps += 1
        if self._steps >= STEPS and self.reached:
            self.leave(None)

    def send(self, to: Address, objects: list[Any]) -> None:
        """Note a message; leave when there are as many as make the run worth it."""
        messages = self._sent.setdefault(to, [])
        messages.append(pickle.dumps(objects))
        if to == self._request.to and len(messages) > 2 * self._request.index:
            self.leave(None)

    def receive(self, src: int, to: Address | None = None) -> list[Any]:
        """Return a message, or leave to have it found."""
        me = self._request.src
        channel = src, me if to is None else to
        needs = MessageRequest(*channel, self._received.get(channel, 0), me)
        self._received[channel] = needs.index + 1
        message = self._log.find(needs)
        if message is None:
            self.leave(needs)
        return pickle.loads(message)

    def skip(self, src: int, to: Address) -> None:
        """Count a message that need not be known."""
        self._received[src, to] = self._received.get((src, to), 0) + 1

    def leave(self, needs: MessageRequest | None) -> NoReturn:
        """Report what was sent and what is needed, and end this process."""
        self._report.send((self._sent, needs))
        self._report.close()
        _exit(0)


class SenderProcesses:
    """The messages of the rank that is captured.

    Args:
        rank: the rank that is captured.
        run_as_rank: runs the script as another rank, with messages of its own, in a child process.
        progress: told in a few words what goes on.
    """

    def __init__(self, rank: int, run_as_rank: RunAsRank, progress: Callable[[str], None]) -> None:
        self._rank = rank
        self._run_as_rank = run_as_rank
        self._progress = progress
        self._steps = 0
        self._received: dict[tuple[int, Address], list[bytes | None]] = {}
        self._failed: dict[tuple[int, Address], CaptureError] = {}
        self._asked: set[int] = set()
        self._in_step: dict[tuple[int, Address], int] = {}

    @contextlib.contextmanager
    def ready(self) -> Generator["SenderProcesses"]:
        """Keep the process that children descend from while the context lasts."""
        self._stage, offstage = _FORK.Pipe()
        prompter = _FORK.Process(target=_serve_at, args=(offstage, self._stage, self._run_as_rank))
        prompter.start()
        offstage.close()
        try:
            yield self
        finally:
            self._stage.close()
            prompter.terminate()
            prompter.join()

    def next_step(self) -> None:
        """Take note that the script has taken a step."""
        self._steps += 1
        if self._steps < STEPS:
            self._in_step = {channel: len(all_) for channel, all_ in self._received.items()}
        elif self._steps == STEPS:
            for channel, begun in self._in_step.items():
                del self._received[channel][:begun]
        if self._steps >= STEPS:
            self._in_step = {}

    @property
    def collects_sends(self) -> bool:
        """Whether messages are still sought."""
        return self._steps < STEPS

    def send(self, to: Address, objects: list[Any]) -> None:
        """Note what the captured rank sends."""
        if self.collects_sends:
            self._stage.send((self._rank, to, pickle.dumps(objects)))

    def receive(self, src: int, to: Address | None = None) -> list[Any]:
        """Return what rank `src` sends next to the captured rank, or to all of a group.

        Raises:
            CaptureError: the script, run as another rank, does not get to send it; or no message
                came this way in the step whose messages are repeated.
        """
        channel = src, self._rank if to is None else to
        if self._steps >= STEPS:
            return self._repeated(channel)
        messages = self._received.setdefault(channel, [])
        message = self._found(*channel, len(messages))
        messages.append(message)
        return pickle.loads(message)

    def skip(self, src: int, to: Address) -> None:
        """Take note that what rank `src` sends next to all of a group need not be known."""
        channel = src, to
        if self._steps >= STEPS:
            self._in_step[channel] = self._in_step.get(channel, 0) + 1
        else:
            self._received.setdefault(channel, []).append(None)

    def _repeated(self, channel: tuple[int, Address]) -> list[Any]:
        place = self._in_step.get(channel, 0)
        self._in_step[channel] = place + 1
        message = next(iter(self._received.get(channel, [])[place:]), None)
        if message is None:
            raise CaptureError(
                f"rank {self._rank} waits for objects of rank {channel[0]} that no message of the "
                "second step stands for, and later steps are taken to repeat it",
                code="sender-not-repeated",
            )
        return pickle.loads(message)

    def _found(self, src: int, to: Address, index: int) -> bytes:
        if error := self._failed.get((src, to)):
            raise error
        if src not in self._asked:
            self._asked.add(src)
            self._progress(f"running as rank {src}, to learn what it sends")
        self._stage.send(MessageRequest(src, to, index, self._rank))
        try:
            answer = self._stage.recv()
        except EOFError:
            answer = "the process that was to run it has ended"
        if isinstance(answer, str):
            self._failed[src, to] = CaptureError(
                f"rank {self._rank} waits for objects that rank {src} sends, and the script run as "
                f"other ranks did not get there: {answer}",
                code="sender-failed",
            )
            raise self._failed[src, to]
        return answer
