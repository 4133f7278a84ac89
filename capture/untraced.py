"""Keeps torch.compile from tracing the recorder, where a compiled module's hooks communicate.

`torch.compiler.disable` does so too, but imports all of dynamo, which takes seconds, and takes the
host some time in each call.
"""

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch

_Called = TypeVar("_Called", bound=Callable[..., Any])

_torch: Any = torch  # what follows has no types and no public name
_frames = _torch._C._dynamo.eval_frame
_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def untraced(function: _Called) -> _Called:
    """Return the function, written in Python: dynamo traces neither it nor what it calls."""
    code: CodeType = function.__code__
    _frames.set_code_exec_strategy(code, _SKIPPED)
    return function
