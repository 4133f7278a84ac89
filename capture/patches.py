"""Patch functions of torch and other libraries.

Keeps torch.compile from tracing the recorder, where a compiled module's hooks communicate.

`torch.compiler.disable` does so too, but imports all of dynamo, which takes seconds, and takes the
host some time in each call.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Generator, Sequence
from types import CodeType
from typing import Any, TypeVar

import torch


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Any) -> Generator[None]:
    """Put `by` in the place of an attribute of a module or a class while the context lasts."""
    original = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, original)


def rebind(old: Sequence[object], new: Sequence[object]) -> None:
    """Swap module attributes everywhere: `from torch.distributed import ...` made copies."""
    swaps = {id(before): after for before, after in zip(old, new, strict=True)}
    for module in list(sys.modules.values()):
        names: dict[str, object] = getattr(module, "__dict__", {})
        if swaps.keys().isdisjoint(map(id, list(names.values()))):
            continue
        for name, value in list(names.items()):
            if id(value) in swaps:
                setattr(module, name, swaps[id(value)])


_Called = TypeVar("_Called", bound=Callable[..., Any])

_torch: Any = torch  # what follows has no types and no public name

_frames = _torch._C._dynamo.eval_frame

_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def untraced(function: _Called) -> _Called:
    """Return the function, written in Python: dynamo traces neither it nor what it calls."""
    code: CodeType = function.__code__
    _frames.set_code_exec_strategy(code, _SKIPPED)
    return function


T = TypeVar("T")


def live(kind: type[T]) -> list[T]:
    """Return those of a class and of classes made from it, as far as Python tracks them.

    Each class is asked once: a process holds hundreds of thousands of objects.
    """
    objects: list[Any] = gc.get_objects()
    kinds = {one for one in set(map(type, objects)) if issubclass(one, kind)}
    return [one for one in objects if type(one) in kinds]
