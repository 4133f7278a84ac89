"""Forward hooks that run before those of FSDP2.

`fully_shard` puts its pre-forward hook first and wraps every input tensor in an autograd function.
Placeholder inputs that are not tensors must be replaced before that.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

_AHEAD = "_onerank_ahead"


def register_ahead(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward pre-hook with keyword arguments that runs before FSDP2's hook."""
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    setattr(module, _AHEAD, [*getattr(module, _AHEAD, []), handle.id])


def put_ahead(module: Any) -> None:
    """Move these hooks to the front again, in order, after `fully_shard(module)`."""
    for number in reversed(getattr(module, _AHEAD, [])):
        module._forward_pre_hooks.move_to_end(number, last=False)
