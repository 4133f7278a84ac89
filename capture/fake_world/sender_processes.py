"""Run the script as an absent rank, to learn the messages that it sends by value.

A stage of torch.distributed.pipelining learns the shapes of its inputs and gradients from its
neighbours through `send_object_list`. Often the first rank broadcasts what it read from a file.
Other scripts exchange shapes and token ids as tensors (`messages`). Only the sender's code
knows these values. So a child process runs the script as the sending rank, up to the send. If that
rank itself waits for a message, it pauses while another child runs the script as its sender. The
captured rank reports its own messages.

Each missing message costs one run of the script, and no run may start in a timed step. So the
messages of the second step are reused in every later step.
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

from onerank.capture.fake_world.call_log import Address
from onerank.capture.fake_world.message_payloads import LEARNED_STEPS, MessageRequest, RunAsRank
from onerank.capture.isolation import frozen_objects
from onerank.capture.patches import index_bindings
from onerank.ir.errors import CaptureError

_exit = os._exit  # the script may replace os._exit

# `run_as_rank` is a closure over the captured rank's state. It cannot be pickled, so the children
# are forks. CUDA does not survive a fork: the children descend from one process that was forked
# before the script ran, and therefore before CUDA was initialised.
# `isolation.process_events` would not do: it reports in one direction, while this process answers
# requests, and it gives an interrupted child 30 s to clean up, while a sender has nothing to keep.
_FORK = multiprocessing.get_context("fork")

_OUTPUT_TAIL = 1500  # characters of a failed sender's output that its error repeats


@dataclass
class _MessageLog:
    """Pickled messages that are known so far, by (sender, address), in sending order."""

    sent: dict[tuple[int, Address], list[bytes]] = field(default_factory=dict[Any, Any])

    def find(self, request: MessageRequest) -> bytes | None:
        messages = self.sent.get((request.src, request.to), [])
        return messages[request.index] if request.index < len(messages) else None


def _serve_at(server_end: Connection, client_end: Connection, run_as_rank: RunAsRank) -> NoReturn:
    # While this process keeps the client's end open, it gets no end-of-file from the client.
    client_end.close()
    answer_requests(server_end, run_as_rank)


def answer_requests(connection: Connection, run_as_rank: RunAsRank) -> NoReturn:
    """Answer the message requests of the captured rank until it closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    indexed = False
    senders: list[Any] = []

    def leave(*_: object) -> NoReturn:
        for sender in senders:
            sender.kill()
        _exit(0)

    signal.signal(signal.SIGTERM, leave)
    log = _MessageLog()
    # Each sender is a fork of this process.
    with frozen_objects(), contextlib.suppress(EOFError, OSError):
        while True:
            request = connection.recv()
            if not isinstance(request, MessageRequest):
                src, to, message = request
                log.sent.setdefault((src, to), []).append(message)
                continue
            if not indexed:
                # A search in each sender would copy the pages of all modules. Most scripts request
                # no message, and for them the search here would take 0.15 s of CPU for nothing.
                index_bindings()
                indexed = True
            try:
                message = _resolve(
                    request, log, run_as_rank, senders, [], captured=request.receiver
                )
                connection.send(message)
            except CaptureError as error:
                # Text, which the receiver distinguishes from the bytes of a message.
                connection.send(str(error))
    leave()


def _resolve(
    request: MessageRequest,
    log: _MessageLog,
    run_as_rank: RunAsRank,
    senders: list[Any],
    waiting: list[MessageRequest],
    *,
    captured: int,
) -> bytes:
    """Return a message; for an unknown one, run the script as its sender."""
    message = log.find(request)
    if message is not None:
        return message
    if request in waiting or request.src == captured:
        raise CaptureError(
            f"rank {request.receiver} waits for rank {request.src}, which waits for rank "
            f"{request.receiver}",
            code="sender-cycle",
        )

    def resolve(needs: MessageRequest) -> bytes:
        return _resolve(needs, log, run_as_rank, senders, [*waiting, request], captured=captured)

    _run_sender(request, log, run_as_rank, senders, resolve)
    message = log.find(request)
    if message is None:
        raise CaptureError(
            f"rank {request.src} ran to its end without sending them",
            code="sender-sent-nothing",
        )
    return message


def _run_sender(
    request: MessageRequest,
    log: _MessageLog,
    run_as_rank: RunAsRank,
    senders: list[Any],
    resolve: Callable[[MessageRequest], bytes],
) -> None:
    """Run the script as the sender in a child, and log what it sends.

    The child waits for the messages that it lacks. So each stage of a pipeline runs once, however
    many stages there are before it.
    """
    connection, of_child = _FORK.Pipe()
    with tempfile.TemporaryFile() as output:
        child = _FORK.Process(
            target=_run_as_sender, args=(request, log, run_as_rank, of_child, output.fileno())
        )
        child.start()
        senders.append(child)
        of_child.close()
        try:
            needs = _log_report(connection, request.src, log)
            while needs is not None:
                connection.send(resolve(needs))
                needs = _log_report(connection, request.src, log)
        except EOFError:
            output.seek(0)
            tail = output.read().decode(errors="replace").strip()[-_OUTPUT_TAIL:]
            raise CaptureError(
                f"as rank {request.src} it failed:\n{tail}", code="sender-failed"
            ) from None
        except CaptureError:
            child.kill()  # it waits for a message that never arrives
            raise
        finally:
            connection.close()
            child.join()
            senders.remove(child)


def _log_report(connection: Connection, src: int, log: _MessageLog) -> MessageRequest | None:
    """Log the messages that a sender reports; return the one it waits for."""
    sent, needs = connection.recv()
    for to, messages in sent.items():
        # Each run repeats the messages of earlier runs, so the longest list has them all.
        log.sent[src, to] = max(log.sent.get((src, to), []), messages, key=len)
    return needs


def _run_as_sender(
    request: MessageRequest,
    log: _MessageLog,
    run_as_rank: RunAsRank,
    report: Connection,
    output: int,
) -> NoReturn:
    """Run the script as a rank with its output in file descriptor `output`, report, and exit."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The parent's replacements of the streams, inherited by the fork, do not work in this process.
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    messages = _SenderMessages(request, log, report)
    try:
        run_as_rank(request.src, messages)
        messages.leave()
    except BaseException:  # noqa: BLE001  its traceback becomes the parent's error message
        if messages.reached:
            messages.leave()
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
    _exit(1)


class _SenderMessages:
    """Messages of an absent rank, which runs until it sends the requested one.

    A run goes on until the channel has twice as many messages as were known before it, so that the
    number of runs grows with the logarithm of the number of messages. It ends after the last step
    that is learned.
    """

    collects_sends = True

    def __init__(self, request: MessageRequest, log: _MessageLog, report: Connection) -> None:
        self._request = request
        self._log = log
        self._report = report
        self._sent: dict[Address, list[bytes]] = {}
        self._received: dict[tuple[int, Address], int] = {}  # messages so far
        self._steps = 0

    @property
    def reached(self) -> bool:
        """Whether the requested message has been sent."""
        return len(self._sent.get(self._request.to, [])) > self._request.index

    def next_step(self) -> None:
        """Count a step; end the process after the last step that is learned."""
        self._steps += 1
        if self._steps >= LEARNED_STEPS and self.reached:
            self.leave()

    def send(self, to: Address, objects: list[Any]) -> None:
        """Log a message; end the process once the channel has twice the known messages."""
        messages = self._sent.setdefault(to, [])
        messages.append(pickle.dumps(objects))
        if to == self._request.to and len(messages) > 2 * self._request.index:
            self.leave()

    def receive(self, src: int, to: Address | None = None) -> list[Any]:
        """Return a message; wait for an unknown one, or end if the requested one has been sent."""
        rank = self._request.src
        channel = src, rank if to is None else to
        needs = MessageRequest(*channel, self._received.get(channel, 0), rank)
        self._received[channel] = needs.index + 1
        message = self._log.find(needs)
        if message is None:
            if self.reached:
                self.leave()
            self._report.send((self._sent, needs))
            message = self._report.recv()
        return pickle.loads(message)

    def skip(self, src: int, to: Address) -> None:
        """Count a message whose content is not needed."""
        self._received[src, to] = self._received.get((src, to), 0) + 1

    def leave(self) -> NoReturn:
        """Report the sent messages, and end this process."""
        self._report.send((self._sent, None))
        self._report.close()
        _exit(0)


class SenderProcesses:
    """The messages of the captured rank, learned from runs of the script as their senders.

    Args:
        rank: global rank that is captured.
        run_as_rank: runs the script as another rank, with that rank's messages, in a child process.
        progress: receives one short line per rank that is run.
    """

    def __init__(self, rank: int, run_as_rank: RunAsRank, progress: Callable[[str], None]) -> None:
        self._rank = rank
        self._run_as_rank = run_as_rank
        self._progress = progress
        self._steps = 0
        # Until the last learned step: messages of all steps. From then on: those of that step.
        self._received: dict[tuple[int, Address], list[bytes | None]] = {}
        self._failed: dict[tuple[int, Address], CaptureError] = {}
        self._announced: set[int] = set()  # ranks whose run was reported as progress
        self._in_step: dict[tuple[int, Address], int] = {}

    @contextlib.contextmanager
    def ready(self) -> Generator["SenderProcesses"]:
        """Keep the server process, from which the senders are forked, while the context lasts."""
        self._connection, server_end = _FORK.Pipe()
        server = _FORK.Process(
            target=_serve_at, args=(server_end, self._connection, self._run_as_rank)
        )
        server.start()
        server_end.close()
        try:
            yield self
        finally:
            self._connection.close()
            server.terminate()
            server.join()

    def next_step(self) -> None:
        """Count a step of the script; after the last learned step, keep only its messages."""
        self._steps += 1
        if self._steps < LEARNED_STEPS:
            self._in_step = {channel: len(known) for channel, known in self._received.items()}
        elif self._steps == LEARNED_STEPS:
            for channel, start in self._in_step.items():
                del self._received[channel][:start]
        if self._steps >= LEARNED_STEPS:
            self._in_step = {}

    @property
    def collects_sends(self) -> bool:
        """Whether messages are still being learned."""
        return self._steps < LEARNED_STEPS

    def send(self, to: Address, objects: list[Any]) -> None:
        """Report a message of the captured rank to the server process."""
        if self.collects_sends:
            self._connection.send((self._rank, to, pickle.dumps(objects)))

    def receive(self, src: int, to: Address | None = None) -> list[Any]:
        """Return the next message from rank `src` to the captured rank, or to a whole group.

        Raises:
            CaptureError: the script, run as another rank, does not reach the send; or the last
                learned step had no such message on this channel.
        """
        channel = src, self._rank if to is None else to
        if self._steps >= LEARNED_STEPS:
            return self._repeated(channel)
        messages = self._received.setdefault(channel, [])
        message = self._request(*channel, len(messages))
        messages.append(message)
        return pickle.loads(message)

    def skip(self, src: int, to: Address) -> None:
        """Count a message from rank `src` to a whole group whose content is not needed."""
        channel = src, to
        if self._steps >= LEARNED_STEPS:
            self._in_step[channel] = self._in_step.get(channel, 0) + 1
        else:
            self._received.setdefault(channel, []).append(None)

    def _repeated(self, channel: tuple[int, Address]) -> list[Any]:
        index = self._in_step.get(channel, 0)
        self._in_step[channel] = index + 1
        message = next(iter(self._received.get(channel, [])[index:]), None)
        if message is None:
            raise CaptureError(
                f"rank {self._rank} receives more objects from rank {channel[0]} in this step "
                f"than in step {LEARNED_STEPS}, whose messages every later step repeats",
                code="sender-not-repeated",
            )
        return pickle.loads(message)

    def _request(self, src: int, to: Address, index: int) -> bytes:
        if error := self._failed.get((src, to)):
            raise error
        if src not in self._announced:
            self._announced.add(src)
            self._progress(f"running as rank {src}, to learn what it sends")
        self._connection.send(MessageRequest(src, to, index, self._rank))
        try:
            answer = self._connection.recv()
        except EOFError:
            answer = "the process that runs the senders has ended"
        if isinstance(answer, str):
            self._failed[src, to] = CaptureError(
                f"rank {self._rank} waits for objects from rank {src}, and running the script as "
                f"their sender failed: {answer}",
                code="sender-failed",
            )
            raise self._failed[src, to]
        return answer
