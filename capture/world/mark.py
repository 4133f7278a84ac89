"""A range in the profiler's streams, around what stands for a call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onerank.capture.calls import CommCall, as_json

_profiling: Any = torch.autograd  # its ranges have no public names and no types in torch

# Not `record_param_comms`: the observers parse ranges of that name and crash on one of ours.
MARK = "onerank::comm"


class Mark:
    """The range of one call."""

    # No generator of `contextmanager`: the host has little time here. So it is with `Issue`.
    __slots__ = ("_range", "_tensors", "_text")

    def __init__(self, call: CommCall, tensors: Sequence[Tensor] = ()) -> None:
        """Prepare the range of a call that reads or writes these tensors."""
        self._text, self._tensors = as_json(call), tensors

    def __enter__(self) -> None:
        """Begin it."""
        self._range = _profiling._record_function_with_args_enter(MARK, *self._tensors, self._text)

    def __exit__(self, *_: object) -> None:
        """End it."""
        _profiling._record_function_with_args_exit(self._range)
