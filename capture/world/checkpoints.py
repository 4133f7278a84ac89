"""torch.distributed.checkpoint in a world whose other ranks are not there: saves are left out.

A save gathers what every rank holds, lets the first one plan who writes what, and gathers what was
written. What absent ranks would put into it is not known, nor what they would write, so of a save
only what comes before is done: `async_save` stages the tensors in the host's memory.
"""

import contextlib
import inspect
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata

from onerank.capture.replaced import replaced

_saver: Any = state_dict_saver


@dataclass
class Unsaved:
    """How many checkpoints were left out."""

    count: int = 0

    def note(self, steps: int) -> str | None:
        """Tell whoever reads the trace of a script that has taken so many steps."""
        if not self.count:
            return None
        return (
            f"{self.count} checkpoints of torch.distributed.checkpoint, in {steps} steps, were "
            "left out, since other ranks are not there to say what they hold: nothing was written, "
            "and the time that it takes and the objects that ranks exchange are in no step"
        )


@contextlib.contextmanager
def unsaved() -> Generator[Unsaved]:
    """Leave out what `save` and `async_save` would exchange with other ranks and write."""
    left = Unsaved()
    original = _saver._save_state_dict

    signature = inspect.signature(original)

    def save_state_dict(*args: Any, **kwargs: Any) -> Metadata:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        alone = asked["no_dist"] or not dist.is_initialized()
        if alone or dist.get_world_size(asked["process_group"]) < 2:
            return original(*args, **kwargs)
        left.count += 1
        return Metadata(state_dict_metadata={})

    in_thread = _saver._ThreadBasedAsyncCheckpointExecutor  # a process would look for the others
    with (
        replaced(_saver, "_save_state_dict", save_state_dict),
        replaced(_saver, "_ProcessBasedAsyncCheckpointExecutor", in_thread),
    ):
        yield left
