"""Functions of torch and of others, replaced for as long as a context lasts."""

import contextlib
from collections.abc import Generator
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
