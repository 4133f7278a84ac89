"""Hide the emulated process group from a script whose models onerank distributes.

torch and onerank communicate over the group; the script did not create it. A script that asks
whether a group exists would otherwise wrap its model in DistributedDataParallel a second time.
"""

import contextlib
import functools
import sys
from collections.abc import Generator

import torch.distributed as dist

from onerank.capture.patches import rebound

_SEE_THE_GROUP = ("torch", "onerank")


@contextlib.contextmanager
def hidden_group() -> Generator[None]:
    """Let `dist.is_initialized` return False to callers other than torch and onerank."""
    original = dist.is_initialized

    @functools.wraps(original)
    def is_initialized() -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))  # pyright: ignore
        return original() and caller.partition(".")[0] in _SEE_THE_GROUP

    with rebound("torch.distributed.distributed_c10d", {"is_initialized": is_initialized}):
        yield
