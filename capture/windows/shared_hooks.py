"""Hooks that many modules share, under one number, so that torch.compile has one code for all.

Dynamo guards on the numbers of a module's hooks and on what they are. Registered one by one, they
would give each layer of a model code of its own, and from the ninth on (`recompile_limit`) none.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


@contextlib.contextmanager
def hooked(
    modules: Sequence[nn.Module], before: Callable[..., Any], after: Callable[..., Any]
) -> Generator[None]:
    """Hook the modules while the context lasts, behind the hooks that they have.

    Args:
        modules: each once.
        before: a forward pre-hook, given keywords too.
        after: a forward hook, given keywords too; called where the forward raises as well.
    """
    number = RemovableHandle(OrderedDict()).id  # that no other hook has
    try:
        for module in modules:
            for hooks, value in _places(module, before, after):
                hooks[number] = value
        yield
    finally:
        for module in modules:
            for hooks, _ in _places(module, before, after):
                hooks.pop(number, None)


def _places(module: Any, before: Any, after: Any) -> tuple[tuple[dict[int, Any], Any], ...]:
    """Return where nn.Module keeps a hook and what it knows of it, each with its value."""
    return (
        (module._forward_pre_hooks, before),
        (module._forward_pre_hooks_with_kwargs, True),
        (module._forward_hooks, after),
        (module._forward_hooks_with_kwargs, True),
        (module._forward_hooks_always_called, True),
    )
