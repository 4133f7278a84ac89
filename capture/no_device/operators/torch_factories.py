"""Functions of torch that create tensors, as they are before a script replaces them."""

import contextlib
import operator
from typing import Any, ClassVar

import torch

from onerank.capture.patches import replaced


class TorchFactories:
    """Functions of torch that create tensors, some of which the script may have replaced.

    nanotron replaces `torch.empty` while it builds a model. On a GPU operators do not notice that,
    but here torch runs their implementations in Python, which call these functions too.
    """

    _NAMES = ("empty", "empty_like", "empty_strided", "zeros", "ones", "full", "arange")
    _TORCH: ClassVar = {name: getattr(torch, name) for name in _NAMES}
    _current = staticmethod(operator.attrgetter(*_NAMES))

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._replaced: tuple[str, ...] = ()

    def of_torch(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the functions are torch's."""
        current = self._current(torch)
        if current != self._seen:
            self._seen = current
            pairs = zip(self._NAMES, current, strict=True)
            self._replaced = tuple(name for name, function in pairs if _is_of_script(function))
        if not self._replaced:
            return _UNCHANGED
        stack = contextlib.ExitStack()
        for name in self._replaced:
            stack.enter_context(replaced(torch, name, self._TORCH[name]))
        return stack


_UNCHANGED = contextlib.nullcontext()


def _is_of_script(function: Any) -> bool:
    """Return whether a function is neither torch's nor a replacement by this package."""
    module = getattr(function, "__globals__", {}).get("__name__", "torch")
    return module.partition(".")[0] not in ("torch", "onerank")
