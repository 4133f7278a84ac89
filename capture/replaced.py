"""Functions of torch and of others, replaced."""

import contextlib
import sys
from collections.abc import Generator, Sequence
from typing import Any


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
