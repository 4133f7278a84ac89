"""The arguments of a call of a model, by name."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def by_name(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model's forward is given, those it takes as `**kwargs` among the others."""
    bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
    bound.pop(next(iter(bound)))  # self
    return {**bound, **bound.pop("kwargs", {})}
