"""FSDP1's gathers of a checkpoint that was loaded in shards, without other ranks.

`FullyShardedDataParallel` saves parameters and states by rows but holds them flat, so a rank needs
rows that other ranks have read. Other ranks would have read the same checkpoint, so these rows are
read from it with the script's own planner. If the shards come from elsewhere, for example from a
checkpoint whose save was skipped, the rows of absent ranks are unknown, and a note says so.
"""

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import _nested_dict, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.fsdp import _optim_utils, _state_dict_utils

from onerank.capture.patches import patched
from onerank.ir.errors import CaptureError

_nested: Any = _nested_dict  # none of these has a public name
_loader: Any = state_dict_loader
_states: Any = _optim_utils
_weights: Any = _state_dict_utils
_WRAPPED = "_fsdp_wrapped_module."


@dataclass(frozen=True)
class _Source:
    """The checkpoint that a sharded tensor was read from.

    Attributes:
        reader: the storage.
        planner: copy of the script's load planner before the load; None for torch's default.
        path: keys that lead to the tensor in the loaded state dict.
    """

    reader: Any
    planner: Any
    path: tuple[Any, ...]

    def whole(self, like: Tensor) -> Tensor | None:
        """Return the whole tensor, with the shape, dtype and device of `like`.

        Returns None if the planner reads only part of it.

        Raises:
            CaptureError: the planner cannot read this tensor by itself or unsharded.
        """
        read = torch.empty(like.shape, dtype=like.dtype)
        state_dict = _nested.unflatten_state_dict({"": read}, {"": self.path})
        planner = DefaultLoadPlanner() if self.planner is None else copy.copy(self.planner)
        plan, elements = planner.create_local_plan, 0

        def create_local_plan() -> Any:
            nonlocal elements
            planned = plan()
            elements += sum(math.prod(item.lengths) for item in planned.items)
            return planned

        planner.create_local_plan = create_local_plan
        try:
            _loader._load_state_dict(state_dict, self.reader, no_dist=True, planner=planner)
        except CheckpointException as error:
            raise CaptureError(
                f"FSDP gathers {'.'.join(map(str, self.path))!r}, which was loaded in shards, and "
                "absent ranks' are read from the checkpoint: the script's load planner "
                f"{type(planner).__name__} must read it by itself, and as a whole tensor: {error}",
                code="fsdp-load-unknown",
            ) from error
        return read.to(like.device) if elements >= read.numel() else None


@dataclass
class Loads:
    """Sharded tensors that were read from checkpoints, by their identity."""

    _sources: dict[int, tuple[weakref.ref[Any], _Source]] = field(
        default_factory=dict[int, tuple[weakref.ref[Any], _Source]]
    )
    _unknown: int = 0

    def add(self, state_dict: dict[str, Any], reader: Any, planner: Any) -> None:
        """Record the sharded tensors of a load.

        Args:
            state_dict: the loaded state dict.
            reader: its storage reader.
            planner: copy of its planner before the load.
        """
        reader = copy.copy(reader)  # a script may point its reader at another checkpoint
        flat, paths = _nested.flatten_state_dict(state_dict)
        for name, value in flat.items():
            if _local_elements(value) is not None:
                source = (weakref.ref(value), _Source(reader, planner, paths[name]))
                self._sources[id(value)] = source

    def completed(self, gathered: dict[str, Any], sharded: Mapping[str, Any]) -> None:
        """Replace gathered tensors by their content in the checkpoint.

        Args:
            gathered: name -> whole tensor, changed in place.
            sharded: name -> the sharded tensor that it was gathered from.
        """
        for name, value in sharded.items():
            elements, whole = _local_elements(value), gathered.get(name)
            if elements is None or not isinstance(whole, Tensor) or elements == whole.numel():
                continue
            source = self._source_of(value)
            read = source.whole(whole) if source is not None else None
            if read is None:
                self._unknown += 1
            else:
                gathered[name] = read

    def _source_of(self, value: object) -> _Source | None:
        # ids are reused once an object is freed: the weak reference confirms the identity
        reference, source = self._sources.get(id(value), (None, None))
        return source if reference is not None and reference() is value else None

    def note(self) -> str | None:
        """Return the note on tensors with unknown values; None if there are no such tensors."""
        if not self._unknown:
            return None
        return (
            f"{self._unknown} sharded tensors that FSDP1 loaded (parameters or optimizer states) "
            "came from no checkpoint that was read: the shards of absent ranks repeat this rank's "
            "shard, so values may be wrong in its own part too"
        )


def _local_elements(value: Any) -> int | None:
    """Return the number of local elements of a sharded tensor; None for any other value."""
    if hasattr(value, "local_shards"):
        return sum(shard.tensor.numel() for shard in value.local_shards())
    return value.to_local().numel() if hasattr(value, "placements") else None


@contextlib.contextmanager
def gathered_loads(loads: Loads) -> Generator[None]:
    """Complete FSDP1's gathers of loaded checkpoints with the rows of absent ranks."""
    put_weights: Callable[..., None] = _weights._sharded_pre_load_state_dict_hook
    gather, shard = _states._gather_state_dict, _states._shard_orig_param_state
    reads = True

    def sharded_pre_load_state_dict_hook(
        module: Any, state: Any, state_dict: dict[str, Any], prefix: str
    ) -> None:
        wanted = {
            f"{prefix}{_WRAPPED}{name}": value
            for name in _in_shard(state)
            if (value := state_dict.get(f"{prefix}{name}")) is not None
        }
        put_weights(module, state, state_dict, prefix)
        loads.completed(state_dict, wanted)

    def gather_state_dict(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        gathered = gather(state_dict, *args, **kwargs)
        if reads:
            loads.completed(gathered, state_dict)
        return gathered

    def shard_orig_param_state(info: Any, name: str, optim_state: dict[str, Any]) -> Any:
        nonlocal reads
        reads = info.handle.flat_param._shard_param_infos[info.param_indices[name]].in_shard
        try:
            return shard(info, name, optim_state)
        finally:
            reads = True

    with (
        patched(
            "torch.distributed.fsdp._state_dict_utils",
            {"_sharded_pre_load_state_dict_hook": sharded_pre_load_state_dict_hook},
        ),
        patched(
            "torch.distributed.fsdp._optim_utils",
            {
                "_gather_state_dict": gather_state_dict,
                "_shard_orig_param_state": shard_orig_param_state,
            },
        ),
    ):
        yield


def _in_shard(state: Any) -> list[str]:
    """Return the names of an FSDP unit's parameters with elements on this rank."""
    if state._handle is None:
        return []
    flat = state._handle.flat_param
    pairs = zip(flat._fqns, flat._shard_param_infos, strict=True)
    return [name for name, info in pairs if info.in_shard]
