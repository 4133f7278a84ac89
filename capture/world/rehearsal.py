"""What absent ranks send by value, found by running the script as them, up to there.

A stage of torch.distributed.pipelining learns the shapes of its inputs and gradients from its
neighbours, through send_object_list; the first rank often tells all others what it read from a
file, through broadcast_object_list; others exchange shapes and token ids as tensors
(`onerank.capture.world.values`). No other code than the sender's knows them. So when the script
asks for one, a child process runs it as the rank that sends it. What that rank needs of others to
get there is found the same way, one process at a time; what the captured rank itself has sent is
known.

Each message costs a run up to it, and none may be begun in a step that is timed. So the messages of
the script's second step are taken for those of every later one.

The children descend from a process that is forked before the script runs, and so before CUDA.
"""

import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Callable, Generator
from multiprocessing import Pipe
from typing import Any

from onerank.capture.world.messages import STEPS, Act, Address, Wanted
from onerank.capture.world.senders import serve
from onerank.ir.errors import CaptureError


class Rehearsal:
    """The messages of the rank that is captured.

    Args:
        rank: the rank that is captured.
        act: runs the script as another rank, with messages of its own, in a child process.
        progress: told in a few words what goes on.
    """

    def __init__(self, rank: int, act: Act, progress: Callable[[str], None]) -> None:
        self._rank = rank
        self._act = act
        self._progress = progress
        self._steps = 0
        self._received: dict[tuple[int, Address], list[bytes | None]] = {}
        self._failed: dict[tuple[int, Address], CaptureError] = {}
        self._asked: set[int] = set()
        self._in_step: dict[tuple[int, Address], int] = {}

    @contextlib.contextmanager
    def ready(self) -> Generator["Rehearsal"]:
        """Keep the process that children descend from while the context lasts."""
        self._stage, offstage = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._prompter = os.fork()
        if self._prompter == 0:
            self._stage.close()
            serve(offstage, self._act)
        offstage.close()
        try:
            yield self
        finally:
            self._stage.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._prompter, signal.SIGTERM)
            os.waitpid(self._prompter, 0)

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
    def heard(self) -> bool:
        """Whether messages are still sought."""
        return self._steps < STEPS

    def send(self, to: Address, objects: list[Any]) -> None:
        """Note what the captured rank sends."""
        if self.heard:
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
                "second step stands for, and later steps are taken to repeat it"
            )
        return pickle.loads(message)

    def _found(self, src: int, to: Address, index: int) -> bytes:
        if error := self._failed.get((src, to)):
            raise error
        if src not in self._asked:
            self._asked.add(src)
            self._progress(f"running as rank {src}, to learn what it sends")
        self._stage.send(Wanted(src, to, index, self._rank))
        try:
            answer = self._stage.recv()
        except EOFError:
            answer = "the process that was to run it has ended"
        if isinstance(answer, str):
            self._failed[src, to] = CaptureError(
                f"rank {self._rank} waits for objects that rank {src} sends, and the script run as "
                f"other ranks did not get there: {answer}"
            )
            raise self._failed[src, to]
        return answer
