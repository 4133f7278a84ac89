"""The objects that the process holds."""

import gc
from typing import Any, TypeVar

T = TypeVar("T")


def live(kind: type[T]) -> list[T]:
    """Return those of a class and of classes made from it, as far as Python tracks them.

    Each class is asked once: a process holds hundreds of thousands of objects.
    """
    objects: list[Any] = gc.get_objects()
    kinds = {one for one in set(map(type, objects)) if issubclass(one, kind)}
    return [one for one in objects if type(one) in kinds]
