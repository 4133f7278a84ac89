"""Run the script as an absent rank, to learn the messages that it sends by value.

A stage of torch.distributed.pipelining learns the shapes of its inputs and gradients from its
neighbours through `send_object_list`. Often the first rank broadcasts what it read from a file.
Other scripts exchange shapes and token ids as tensors (`messages`). Only the sender's code
knows these values. So a child process runs the script as the sending rank, up to the send. If that
rank itself waits for a message, it pauses while another child runs the script as its sender. The
captured rank reports its own messages.

A child pauses at the send until another message of its rank is missing, so each rank runs once, and
no further than its last message that is needed. No run may go on in a timed step. So the messages
of the second step are reused in every later step.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any, NoReturn

from onerank.capture.fake_world.call_log import Address
from onerank.capture.fake_world.message_payloads import LEARNED_STEPS, MessageRequest, RunAsRank
from onerank.capture.isolation import end_with_parent, frozen_objects
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


def _serve_at(server_end: Connection, client_end: Connection, run_as_rank: RunAsRank) -> NoReturn:
    # While this process keeps the client's end open, it gets no end-of-file from the client.
    client_end.close()
    answer_requests(server_end, run_as_rank)


def answer_requests(connection: Connection, run_as_rank: RunAsRank) -> NoReturn:
    """Answer the message requests of the captured rank until it closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    indexed = False
    senders = _Senders(run_as_rank)

    def leave(*_: object) -> NoReturn:
        senders.kill()
        _exit(0)

    signal.signal(signal.SIGTERM, leave)
    # Each sender is a fork of this process.
    with frozen_objects(), contextlib.suppress(EOFError, OSError):
        while True:
            request = connection.recv()
            if not isinstance(request, MessageRequest):
                src, to, message = request
                senders.log(src, {to: [message]})
                continue
            if not indexed:
                # A search in each sender would copy the pages of all modules. Most scripts request
                # no message, and for them the search here would take 0.15 s of CPU for nothing.
                index_bindings()
                indexed = True
            try:
                connection.send(senders.resolve(request, []))
            except CaptureError as error:
                # Text, which the receiver distinguishes from the bytes of a message.
                connection.send(str(error))
    leave()


@dataclass(frozen=True)
class _Report:
    """What a sender has sent since its last report, and why it stops.

    Attributes:
        sent: messages by address, in sending order.
        needs: message that it waits for; None if it sent the requested one, or ended.
        ended: whether its process ends.
    """

    sent: dict[Address, list[bytes]]
    needs: MessageRequest | None = None
    ended: bool = False


@dataclass(frozen=True)
class _Sender:
    """A child that runs the script as a rank, with its standard output and error in a file."""

    process: Any
    connection: Connection
    output: IO[bytes]

    def close(self) -> None:
        """Wait for the end of the child."""
        self.connection.close()
        self.process.join()
        self.output.close()


class _Senders:
    """The ranks whose messages were requested, each in a child, and the messages known so far.

    Args:
        run_as_rank: runs the script as a rank.
    """

    def __init__(self, run_as_rank: RunAsRank) -> None:
        self._run_as_rank = run_as_rank
        self._sent: dict[tuple[int, Address], list[bytes]] = {}
        self._senders: dict[int, _Sender] = {}
        self._ended: set[int] = set()

    def log(self, src: int, sent: Mapping[Address, list[bytes]]) -> None:
        """Add pickled messages of a rank, in sending order."""
        for to, messages in sent.items():
            self._sent.setdefault((src, to), []).extend(messages)

    def resolve(self, request: MessageRequest, waiting: Sequence[MessageRequest]) -> bytes:
        """Return a message; for an unknown one, run the script as its sender.

        Args:
            request: of the captured rank, or of the last sender of `waiting`.
            waiting: requests to whose senders the message is missing; the first is of the captured
                rank.

        Raises:
            CaptureError: the message is never sent, or its sender fails.
        """
        message = self._find(request)
        if message is not None:
            return message
        captured = (waiting[0] if waiting else request).receiver
        if request.src in (captured, *(each.src for each in waiting)):
            raise CaptureError(
                f"rank {request.receiver} waits for rank {request.src}, which waits for rank "
                f"{request.receiver}",
                code="sender-cycle",
            )
        if request.src not in self._ended:
            self._run(request, waiting)
        message = self._find(request)
        if message is None:
            raise CaptureError(
                f"rank {request.src} ran to its end without sending them",
                code="sender-sent-nothing",
            )
        return message

    def kill(self) -> None:
        """End all children."""
        for sender in self._senders.values():
            sender.process.kill()
        for sender in self._senders.values():
            sender.process.join()

    def _find(self, request: MessageRequest) -> bytes | None:
        messages = self._sent.get((request.src, request.to), [])
        return messages[request.index] if request.index < len(messages) else None

    def _run(self, request: MessageRequest, waiting: Sequence[MessageRequest]) -> None:
        """Run a sender until it has sent a message or has ended; give it what it waits for."""
        sender = self._senders.get(request.src)
        runs = sender is not None
        if sender is None:
            sender = self._senders[request.src] = self._started(request)
        try:
            if runs:
                sender.connection.send(request)
            while True:
                report: _Report = sender.connection.recv()
                self.log(request.src, report.sent)
                if report.needs is None:
                    break
                sender.connection.send(self.resolve(report.needs, [*waiting, request]))
            if report.ended:
                self._ended.add(request.src)
                self._senders.pop(request.src).close()
        except (EOFError, OSError):
            sender.output.seek(0)
            tail = sender.output.read().decode(errors="replace").strip()[-_OUTPUT_TAIL:]
            self._drop(request.src)
            raise CaptureError(
                f"as rank {request.src} it failed:\n{tail}", code="sender-failed"
            ) from None
        except CaptureError:
            sender.process.kill()  # it waits for a message that never arrives
            self._drop(request.src)
            raise

    def _drop(self, src: int) -> None:
        """Forget a failed sender and its messages: its next run sends them again."""
        self._senders.pop(src).close()
        self._sent = {channel: sent for channel, sent in self._sent.items() if channel[0] != src}

    def _started(self, request: MessageRequest) -> _Sender:
        connection, of_child = _FORK.Pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the child runs
        process = _FORK.Process(
            target=_run_as_sender, args=(request, self._run_as_rank, of_child, output.fileno())
        )
        process.start()
        of_child.close()
        return _Sender(process, connection, output)


def _run_as_sender(
    request: MessageRequest, run_as_rank: RunAsRank, reports: Connection, output: int
) -> NoReturn:
    """Run the script as a rank with its output in file descriptor `output`, report, and exit."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The parent's replacements of the streams, inherited by the fork, do not work in this process.
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    messages = _SenderMessages(request, reports)
    try:
        # One that lived on would keep its copy of the captured rank's connection open.
        end_with_parent()
        run_as_rank(request.src, messages)
        messages.leave()
    except BaseException:  # noqa: BLE001  its traceback becomes the parent's error message
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
    _exit(1)


class _SenderMessages:
    """Messages of an absent rank, which runs until it sends the requested one."""

    collects_sends = True

    def __init__(self, request: MessageRequest, reports: Connection) -> None:
        self._request = request
        self._reports = reports
        self._sent: dict[Address, list[bytes]] = {}  # since the last report
        self._sent_counts: Counter[Address] = Counter()
        self._received: Counter[tuple[int, Address]] = Counter()

    def next_step(self) -> None:
        """Do nothing: a step of an absent rank ends like any other code."""

    def send(self, to: Address, objects: list[Any]) -> None:
        """Log a message; after the requested one, wait for the next request."""
        self._sent.setdefault(to, []).append(pickle.dumps(objects))
        self._sent_counts[to] += 1
        if self._sent_counts[self._request.to] > self._request.index:
            self._report()
            self._request = self._reports.recv()

    def receive(self, src: int, to: Address | None = None) -> list[Any]:
        """Return a message, for which this process may have to wait."""
        rank = self._request.src
        channel = src, rank if to is None else to
        self._report(MessageRequest(*channel, self._received[channel], rank))
        self._received[channel] += 1
        return pickle.loads(self._reports.recv())

    def skip(self, src: int, to: Address) -> None:
        """Count a message whose content is not needed."""
        self._received[src, to] += 1

    def leave(self) -> NoReturn:
        """Report the sent messages, and end this process."""
        self._report(ended=True)
        self._reports.close()
        _exit(0)

    def _report(self, needs: MessageRequest | None = None, *, ended: bool = False) -> None:
        self._reports.send(_Report(self._sent, needs, ended))
        self._sent = {}


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
        # Where the messages of the step begin, until the last learned step.
        self._step_begins: dict[tuple[int, Address], int] = {}
        # Messages that a later step has repeated.
        self._repeated_counts: Counter[tuple[int, Address]] = Counter()

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
            self._step_begins = {channel: len(known) for channel, known in self._received.items()}
        elif self._steps == LEARNED_STEPS:
            for channel, start in self._step_begins.items():
                del self._received[channel][:start]
            self._connection.close()  # no message is requested from here on: the senders end
        self._repeated_counts.clear()

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
            self._repeated_counts[channel] += 1
        else:
            self._received.setdefault(channel, []).append(None)

    def _repeated(self, channel: tuple[int, Address]) -> list[Any]:
        index = self._repeated_counts[channel]
        self._repeated_counts[channel] += 1
        learned = self._received.get(channel, [])
        message = learned[index] if index < len(learned) else None
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
        try:
            self._connection.send(MessageRequest(src, to, index, self._rank))
            answer = self._connection.recv()
        except (EOFError, OSError):
            answer = "the process that runs the senders has ended"
        if isinstance(answer, str):
            self._failed[src, to] = CaptureError(
                f"rank {self._rank} waits for objects from rank {src}, and running the script as "
                f"their sender failed: {answer}",
                code="sender-failed",
            )
            raise self._failed[src, to]
        return answer
