"""What FSDP1 gathers of a checkpoint that was loaded in shards, in a world without other ranks.

`FullyShardedDataParallel` saves each parameter and state in rows, and holds them flat: another part
of them. So what `torch.distributed.checkpoint.load` has read is gathered from all ranks as it is
put into the model and its optimizer. Other ranks would have read what is in the checkpoint, so it
is read from there.
"""

import contextlib
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import _nested_dict, state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.fsdp import _optim_utils, _state_dict_utils

from onerank.capture.replaced import replaced

_nested: Any = _nested_dict  # none of these has a public name
_loader: Any = state_dict_loader
_states: Any = _optim_utils
_weights: Any = _state_dict_utils
_WRAPPED = "_fsdp_wrapped_module."


@dataclass(frozen=True)
class _Source:
    """Where a sharded tensor was read: the storage and the name there."""

    reader: Any
    name: str

    def whole(self, like: Tensor) -> Tensor:
        """Return all of it, as `like` is."""
        read = torch.empty(like.shape, dtype=like.dtype)
        _loader._load_state_dict({self.name: read}, self.reader, no_dist=True)
        return read.to(like.device)


@dataclass
class Loads:
    """Sharded tensors that a checkpoint was read into."""

    _sources: dict[int, tuple[weakref.ref[Any], _Source]] = field(
        default_factory=dict[int, tuple[weakref.ref[Any], _Source]]
    )

    def note(self, state_dict: dict[str, Any], reader: Any, planner: Any) -> None:
        """Remember what was read, and from where. A planner of other names is the script's own."""
        if planner is not None and not isinstance(planner, DefaultLoadPlanner):
            return
        if getattr(planner, "flatten_state_dict", True):
            state_dict, _ = _nested.flatten_state_dict(state_dict)
        for name, value in state_dict.items():
            if hasattr(value, "local_shards") or hasattr(value, "placements"):
                source = (weakref.ref(value), _Source(reader, name))
                self._sources[id(value)] = source

    def of(self, value: object) -> _Source | None:
        """Return where a tensor was read, None where it was not."""
        held, source = self._sources.get(id(value), (None, None))
        return source if held is not None and held() is value else None

    def completed(self, gathered: dict[str, Any], sharded: Mapping[str, Any]) -> None:
        """Let what was gathered of sharded tensors be what the checkpoint holds."""
        for name, value in sharded.items():
            source, whole = self.of(value), gathered.get(name)
            if source is not None and isinstance(whole, Tensor) and whole is not value:
                gathered[name] = source.whole(whole)


@contextlib.contextmanager
def gathered_loads() -> Generator[Loads]:
    """Let FSDP1 put loaded checkpoints into models and optimizers as with all ranks."""
    loads = Loads()
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
        replaced(_weights, "_sharded_pre_load_state_dict_hook", sharded_pre_load_state_dict_hook),
        replaced(_states, "_gather_state_dict", gather_state_dict),
        replaced(_states, "_shard_orig_param_state", shard_orig_param_state),
    ):
        yield loads


def _in_shard(state: Any) -> list[str]:
    """Return the names of an FSDP unit's parameters that this rank holds any part of."""
    if state._handle is None:
        return []
    flat = state._handle.flat_param
    pairs = zip(flat._fqns, flat._shard_param_infos, strict=True)
    return [name for name, held in pairs if held.in_shard]
