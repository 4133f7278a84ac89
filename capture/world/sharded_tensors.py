"""Sharded tensors of which this rank has no shard, where there is no GPU.

torch says they are on the current GPU unless their group is Gloo's, which no group here is.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import api

_api: Any = api  # what is replaced in it has no public name
_operators: dict[Any, Callable[..., Any]] = _api._SHARDED_OPS
_DEVICE: Any = torch.Tensor.device
_ASKS = _DEVICE.__get__


@contextlib.contextmanager
def devices_of_no_shards() -> Generator[None]:
    """Let a sharded tensor without a shard be on the CPU where there is no GPU."""
    device = _operators[_ASKS]

    def device_of(types: Any, args: Any, kwargs: Any, group: Any) -> torch.device:
        if args[0].local_shards() or torch.cuda.is_available():
            return device(types, args, kwargs, group)
        return torch.device("cpu")

    _operators[_ASKS] = device_of
    try:
        yield
    finally:
        _operators[_ASKS] = device
