"""Hooks that see what a module is given before FSDP2's do.

`fully_shard` puts its hook before those that a module has, and wraps each tensor of the input in an
autograd function of its own: what is no tensor but stands for one must have been replaced by then.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

_AHEAD = "_onerank_ahead"


def register_ahead(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward pre-hook, given keywords too, that stays ahead of FSDP2's."""
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    setattr(module, _AHEAD, [*getattr(module, _AHEAD, []), handle.id])


def put_ahead(module: Any) -> None:
    """Put these hooks first again, in their order: `module` has just been sharded."""
    for number in reversed(getattr(module, _AHEAD, [])):
        module._forward_pre_hooks.move_to_end(number, last=False)
