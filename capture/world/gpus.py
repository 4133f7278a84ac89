"""The GPUs of a node, for scripts that count them: those of the job's node, though here is one.

Scripts compare the count with the world's size, exit where it is below two, or take a rank's place
among them as its GPU. torch's own code counts what is there: it goes on to ask each of them.
"""

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch

from onerank.capture.replaced import rebind, replaced
from onerank.capture.world.devices import Here, devices_here

_torch: Any = torch  # what turns devices into indices has no public name
_COUNT_THOSE_THERE = ("torch", "onerank")


class GpusOfANode(int):
    """How many GPUs a node of the job has.

    `rank % gpus` is which of them a rank has: 0, as LOCAL_RANK is, as there is one GPU here.
    """

    def __rmod__(self, _: int) -> int:
        """Return the place of a rank's GPU."""
        return 0

    def __rdivmod__(self, rank: int) -> tuple[int, int]:
        """Return a rank's node, and the place of its GPU there."""
        return rank // int(self), 0


@contextlib.contextmanager
def gpus_of_a_node(ranks: int, own: int = 0) -> Generator[None]:
    """Let a script that has a GPU find as many as its node has ranks, all of them the one here.

    Args:
        ranks: of a node.
        own: this one's place among them; a script may take the GPU of that number.
    """
    there = torch.cuda.device_count
    indices = [_torch._utils._get_device_index, _torch.cuda._utils._get_device_index,
               _torch.accelerator._utils._get_device_index]  # fmt: skip

    def counted(original: Callable[[], int]) -> Callable[[], int]:
        def device_count() -> int:
            # the caller's frame, and in no variable: one that held its own would keep all that
            # the callers hold, tensors too, until the garbage collector runs
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))  # pyright: ignore
            found = original()
            if found == 0 or caller.partition(".")[0] in _COUNT_THOSE_THERE:
                return found
            return GpusOfANode(ranks)

        return device_count

    def in_place(index: Callable[..., int]) -> Callable[..., int]:
        def index_here(*args: Any, **named: Any) -> int:
            asked = index(*args, **named)
            return 0 if 0 < asked < ranks and 0 < there() <= asked else asked

        return index_here

    indices_here = [in_place(index) for index in indices]
    elsewhere = 0 < there() <= own
    with (
        replaced(torch.cuda, "device_count", counted(there)),
        replaced(torch.accelerator, "device_count", counted(torch.accelerator.device_count)),
        devices_here(Here(there(), ranks)) if elsewhere else contextlib.nullcontext(),
    ):
        rebind(indices, indices_here)
        try:
            yield
        finally:
            rebind(indices_here, indices)
