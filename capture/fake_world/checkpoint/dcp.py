"""torch.distributed.checkpoint and ShardedTensor in a world without other ranks.

A save gathers what every rank holds, lets one rank plan who writes what, and gathers what was
written. The content of absent ranks is unknown, so a save stops before any file is written:
`async_save` still stages the tensors in host memory.

A load needs no other rank: each rank reads its own shards, and so do the gathers that FSDP1 makes
of them (`fsdp1_load`). Loading a checkpoint whose save was skipped leaves the tensors unchanged,
which is what the save would have written.
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

from onerank.capture.fake_world.checkpoint.fsdp1_load import Loads, gathered_loads
from onerank.capture.fake_world.checkpoint.fsdp1_optim_state import states_of_others
from onerank.capture.patches import patched

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
        with patched(
            "torch.distributed._shard.sharded_tensor.api",
            {"build_global_metadata": build_global_metadata},
        ):
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


_saver: Any = state_dict_saver  # what is replaced in them has no public name

_loader: Any = state_dict_loader

T = TypeVar("T")

R = TypeVar("R")


@dataclass
class SkippedCheckpoints:
    """How many saves were left out, of which checkpoints, and how many loads of those.

    Attributes:
        gathered: what FSDP1 gathers of the loads.
    """

    count: int = 0
    loads: int = 0
    places: set[str | None] = field(default_factory=set[str | None])
    gathered: Loads = field(default_factory=Loads)

    def notes(self, steps: int) -> list[str]:
        """Tell whoever reads the trace of a script that has taken so many steps."""
        return [note for note in (self._note(steps), self.gathered.note()) if note is not None]

    def _note(self, steps: int) -> str | None:
        if not self.count:
            return None
        loads = f"; {self.loads} loads of them left the tensors as they were" if self.loads else ""
        return (
            f"{self.count} checkpoints of torch.distributed.checkpoint, in {steps} steps, were "
            "left out, since other ranks are not there to say what they hold: nothing was written, "
            f"and the time that it takes and the objects that ranks exchange are in no step{loads}"
        )


@contextlib.contextmanager
def checkpoints_alone() -> Generator[SkippedCheckpoints]:
    """Skip what `save` and `async_save` would exchange and write; let `load` read locally."""
    left = SkippedCheckpoints()
    save, load = _saver._save_state_dict, _loader._load_state_dict
    of_save, of_load = inspect.signature(save), inspect.signature(load)

    def save_state_dict(*args: Any, **kwargs: Any) -> Metadata:
        asked = _given(of_save, args, kwargs)
        if not _with_others(asked):
            return save(*args, **kwargs)
        left.count += 1
        left.places.add(_place(asked["storage_writer"]))
        return Metadata(state_dict_metadata={})

    def load_state_dict(*args: Any, **kwargs: Any) -> None:
        asked = _given(of_load, args, kwargs)
        if _with_others(asked) and _place(asked["storage_reader"]) in left.places:
            left.loads += 1
        else:
            planner = copy.copy(asked["planner"])
            load(*args, **kwargs)
            if _with_others(asked):
                left.gathered.add(asked["state_dict"], asked["storage_reader"], planner)

    in_thread = _saver._ThreadBasedAsyncCheckpointExecutor  # a process would look for the others
    with (
        sharded_alone(),
        states_of_others(),
        gathered_loads(left.gathered),
        patched(
            "torch.distributed.checkpoint.state_dict_saver",
            {
                "_save_state_dict": save_state_dict,
                "_ProcessBasedAsyncCheckpointExecutor": in_thread,
            },
        ),
        patched(
            "torch.distributed.checkpoint.state_dict_loader",
            {"_load_state_dict": load_state_dict, "_DistWrapper": _Alone},
        ),
    ):
        yield left


class _Alone(_loader._DistWrapper):
    """What a load asks of all ranks, of this one. It keeps its rank, by which storages go."""

    def reduce_scatter(
        self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], list[R]]
    ) -> R:
        """Return this rank's part of what is made of what all have."""
        return self._tried(step, lambda: reduce_fun([map_fun()])[0])

    def all_gather(self, step: str, map_fun: Callable[[], T]) -> list[T]:
        """Return what all have."""
        return [self._tried(step, map_fun)]

    def barrier(self) -> None:
        """Return at once; there is no rank to wait for."""

    def _tried(self, step: str, function: Callable[[], T]) -> T:
        try:
            return function()
        except BaseException as error:  # torch raises them so, whatever they are
            raise api_dcp.CheckpointException(
                step,
                {self.rank: api_dcp._wrap_exception(error)},  # pyright: ignore
            ) from error


def _given(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    given = signature.bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def _with_others(asked: dict[str, Any]) -> bool:
    alone = asked["no_dist"] or not dist.is_initialized()
    return not alone and dist.get_world_size(asked["process_group"]) > 1


def _place(storage: Any) -> str | None:
    """Return where a checkpoint is written or read; None if the storage does not report it."""
    place = getattr(storage, "checkpoint_id", None)
    return None if place is None else os.path.realpath(place)
