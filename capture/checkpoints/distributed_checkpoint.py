"""Saves and loads of torch.distributed.checkpoint in a world without other ranks.

A save gathers what every rank holds, lets one rank plan who writes what, and gathers what was
written. The content of absent ranks is unknown, so a save stops before any file is written:
`async_save` still stages the tensors in host memory.

A load needs no other rank: each rank reads its own shards. Loading a checkpoint whose save was
skipped leaves the tensors unchanged, which is what the save would have written.
"""

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import api
from torch.distributed.checkpoint import api as api_dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata

from onerank.capture.checkpoints.fsdp1_states import (
    Loads,
    emulated_optim_states,
    gathered_loads,
)
from onerank.capture.patches import patched
from onerank.ir.notes import Note

_api: Any = api  # none of these has a public name
_loader: Any = state_dict_loader
_saver: Any = state_dict_saver

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class SkippedCheckpoints:
    """Saves that were skipped, and the loads of their checkpoints.

    Attributes:
        count: number of skipped saves.
        loads: number of skipped loads, each of a checkpoint whose save was skipped.
        places: resolved paths of those checkpoints; None for storages that report no path.
        gathered: sharded tensors that the other loads filled.
    """

    count: int = 0
    loads: int = 0
    places: set[str | None] = field(default_factory=set[str | None])
    gathered: Loads = field(default_factory=Loads)

    def notes(self, steps: int) -> list[Note]:
        """Return the notes for a trace of a script that took `steps` steps."""
        return [note for note in (self._note(steps), self.gathered.note()) if note is not None]

    def _note(self, steps: int) -> Note | None:
        if not self.count:
            return None
        loads = f"; {self.loads} loads of them left the tensors as they were" if self.loads else ""
        return Note(
            f"{self.count} saves of torch.distributed.checkpoint in {steps} steps were skipped, "
            "because the shards of absent ranks are unknown: nothing was written, and no step "
            f"contains the time or the object exchange of a save{loads}",
            code="checkpoints-skipped",
        )


@contextlib.contextmanager
def skip_checkpoints() -> Generator[SkippedCheckpoints]:
    """Skip the exchange and the writes of `save` and `async_save`; let `load` read locally.

    Saves and loads that involve a single rank run unchanged.
    """
    skipped = SkippedCheckpoints()
    save, load = _saver._save_state_dict, _loader._load_state_dict
    save_signature, load_signature = inspect.signature(save), inspect.signature(load)

    def save_state_dict(*args: Any, **kwargs: Any) -> Metadata:
        arguments = _bound(save_signature, args, kwargs)
        if not _has_peers(arguments):
            return save(*args, **kwargs)
        skipped.count += 1
        skipped.places.add(_place(arguments["storage_writer"]))
        # What a save returns; its content is what all ranks wrote, here nothing.
        return Metadata(state_dict_metadata={})

    def load_state_dict(*args: Any, **kwargs: Any) -> None:
        arguments = _bound(load_signature, args, kwargs)
        if _has_peers(arguments) and _place(arguments["storage_reader"]) in skipped.places:
            skipped.loads += 1
        else:
            # Loading changes the planner; FSDP1's gathers read again with its initial state.
            planner = copy.copy(arguments["planner"])
            load(*args, **kwargs)
            if _has_peers(arguments):
                skipped.gathered.add(arguments["state_dict"], arguments["storage_reader"], planner)

    # A saving process would create its own process group and wait for its peers.
    in_thread = _saver._ThreadBasedAsyncCheckpointExecutor
    with (
        local_sharded_tensors(),
        emulated_optim_states(),
        gathered_loads(skipped.gathered),
        patched(
            "torch.distributed.checkpoint.state_dict_saver",
            {
                "_save_state_dict": save_state_dict,
                "_ProcessBasedAsyncCheckpointExecutor": in_thread,
            },
        ),
        patched(
            "torch.distributed.checkpoint.state_dict_loader",
            {"_load_state_dict": load_state_dict, "_DistWrapper": _LocalDistWrapper},
        ),
    ):
        yield skipped


class _LocalDistWrapper(_loader._DistWrapper):
    """Run the collective parts of a load on this rank only.

    It keeps its rank, because storage readers select files by it.
    """

    def reduce_scatter(
        self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], list[R]]
    ) -> R:
        """Reduce a list of this rank's object, and return its part of the result."""
        return self._wrap_errors(step, lambda: reduce_fun([map_fun()])[0])

    def all_gather(self, step: str, map_fun: Callable[[], T]) -> list[T]:
        """Return a list that contains only this rank's object."""
        return [self._wrap_errors(step, map_fun)]

    def barrier(self) -> None:
        """Return at once; there is no rank to wait for."""

    def _wrap_errors(self, step: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except BaseException as error:  # torch wraps every error of a step in this exception
            raise api_dcp.CheckpointException(
                step,
                {self.rank: api_dcp._wrap_exception(error)},
            ) from error


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _has_peers(arguments: dict[str, Any]) -> bool:
    """Return whether a save or load with these arguments involves several ranks."""
    local = arguments["no_dist"] or not dist.is_initialized()
    return not local and dist.get_world_size(arguments["process_group"]) > 1


def _place(storage: Any) -> str | None:
    """Return where a checkpoint is written or read; None if the storage does not report it."""
    place = getattr(storage, "checkpoint_id", None)
    return None if place is None else os.path.realpath(place)


_operators: dict[Any, Callable[..., Any]] = _api._SHARDED_OPS
_DEVICE: Any = torch.Tensor.device
_DEVICE_GETTER = _DEVICE.__get__


@contextlib.contextmanager
def local_sharded_tensors() -> Generator[None]:
    """Build ShardedTensors from this rank's shard only, while the context lasts."""
    device, build = _operators[_DEVICE_GETTER], _api.build_global_metadata

    # torch places a ShardedTensor without a local shard on the current GPU, which a host without
    # one lacks: the `fake` backend is not Gloo, the only one for which torch takes the CPU.
    def device_of(types: Any, args: Any, kwargs: Any, group: Any) -> torch.device:
        if args[0].local_shards() or torch.cuda.is_available():
            return device(types, args, kwargs, group)
        return torch.device("cpu")

    def build_global_metadata(gathered: list[Any], *args: Any, **kwargs: Any) -> Any:
        return build(_all_shards(gathered), *args, **kwargs)

    _operators[_DEVICE_GETTER] = device_of
    try:
        with patched(
            "torch.distributed._shard.sharded_tensor.api",
            {"build_global_metadata": build_global_metadata},
        ):
            yield
    finally:
        _operators[_DEVICE_GETTER] = device


def _all_shards(gathered: list[Any]) -> list[Any]:
    """Return each rank's shard metadata, derived from this rank's.

    Shards have equal size except the last, as FSDP1 creates them. The list is returned unchanged
    if it does not span the world or if this rank has no shard, several, or the whole tensor.

    Args:
        gathered: metadata per rank; every entry is this rank's.
    """
    local = gathered[0]
    if local is None or len(local.shards_metadata) != 1 or len(gathered) != dist.get_world_size():
        return gathered
    (shard,) = local.shards_metadata
    cut = [dim for dim, size in enumerate(local.size) if shard.shard_sizes[dim] != size]
    if len(cut) != 1:
        return gathered
    rank, dim = dist.get_rank(), cut[0]
    # The last rank's shard may be smaller, but its offset is still `rank` full shards.
    size = shard.shard_offsets[dim] // rank if rank else shard.shard_sizes[dim]
    all_shards: list[Any] = []
    for other_rank in range(len(gathered)):
        start = other_rank * size
        length = min(size, local.size[dim] - start)
        offsets, sizes = list(shard.shard_offsets), list(shard.shard_sizes)
        offsets[dim], sizes[dim] = start, length
        placement = f"rank:{other_rank}/{shard.placement.device()}"
        part = ShardMetadata(offsets, sizes, placement)
        all_shards.append(
            _api.ShardedTensorMetadata([part], local.size, local.tensor_properties)
            if length > 0
            else None
        )
    return all_shards
