"""ShardedTensor without other ranks."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import api

from onerank.capture.patches import replaced

_api: Any = api  # what is replaced in it has no public name
_operators: dict[Any, Callable[..., Any]] = _api._SHARDED_OPS
_DEVICE: Any = torch.Tensor.device
_ASKS = _DEVICE.__get__


@contextlib.contextmanager
def sharded_alone() -> Generator[None]:
    """Let sharded tensors be made of this rank's shard, and be on a device without any.

    Without a shard torch has it on the current GPU unless its group is Gloo's, which none here is.
    """
    device, build = _operators[_ASKS], _api.build_global_metadata

    def device_of(types: Any, args: Any, kwargs: Any, group: Any) -> torch.device:
        if args[0].local_shards() or torch.cuda.is_available():
            return device(types, args, kwargs, group)
        return torch.device("cpu")

    def build_global_metadata(gathered: list[Any], *args: Any, **kwargs: Any) -> Any:
        return build(_of_all(gathered), *args, **kwargs)

    _operators[_ASKS] = device_of
    try:
        with replaced(_api, "build_global_metadata", build_global_metadata):
            yield
    finally:
        _operators[_ASKS] = device


def _of_all(gathered: list[Any]) -> list[Any]:
    """Return what all ranks tell of their shards, of what was gathered: this rank's, of each.

    Shards are taken to be of equal size, the last of what is left, as all that FSDP1 makes are.
    """
    own = gathered[0]
    if own is None or len(own.shards_metadata) != 1 or len(gathered) != dist.get_world_size():
        return gathered
    (shard,) = own.shards_metadata
    cut = [dim for dim, size in enumerate(own.size) if shard.shard_sizes[dim] != size]
    if len(cut) != 1:
        return gathered
    rank, dim = dist.get_rank(), cut[0]
    size = shard.shard_offsets[dim] // rank if rank else shard.shard_sizes[dim]
    told: list[Any] = []
    for other in range(len(gathered)):
        first = other * size
        held = min(size, own.size[dim] - first)
        offsets, sizes = list(shard.shard_offsets), list(shard.shard_sizes)
        offsets[dim], sizes[dim] = first, held
        placement = f"rank:{other}/{shard.placement.device()}"
        part = ShardMetadata(offsets, sizes, placement)
        told.append(
            _api.ShardedTensorMetadata([part], own.size, own.tensor_properties)
            if held > 0
            else None
        )
    return told
