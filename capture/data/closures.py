"""The closure that some scripts give an optimizer's step, which computes the gradients."""

import functools
from collections.abc import Callable
from typing import Any


def followed_by(
    then: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return a step's arguments with `then` behind each closure; and whether there is one.

    Args:
        then: what to do once a closure has computed the gradients.
        args: of a step, the optimizer first.
        kwargs: of a step.
    """
    found = [one for one in (*args[1:], *kwargs.values()) if callable(one)]

    def followed(argument: Any) -> Any:
        if not callable(argument):
            return argument

        @functools.wraps(argument)
        def closure() -> Any:
            loss = argument()
            then()
            return loss

        return closure

    given = (*args[:1], *map(followed, args[1:]))
    return given, {key: followed(value) for key, value in kwargs.items()}, bool(found)
