"""State dicts of FSDP1 models and their optimizers, which torch gathers from all ranks.

`FullyShardedDataParallel` saves parameters and states by rows but holds them flat, so a rank needs
rows that other ranks have read. Other ranks would have read the same checkpoint, so these rows are
read from it with the script's own planner. If the shards come from elsewhere, for example from a
checkpoint whose save was skipped, the rows of absent ranks are unknown, and a note says so.

With `use_orig_params` each rank's optimizer steps only its own parts of the parameters and holds
states of those parts. `FullyShardedDataParallel.optim_state_dict` therefore gathers from all
ranks which parameters have states, and their shapes. Absent ranks are assumed to hold as many
elements of each state as of the parameter, like this rank.
"""

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import _nested_dict, state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.fsdp import _optim_utils, _state_dict_utils

from onerank.capture.patches import patched
from onerank.ir.errors import CaptureError
from onerank.ir.notes import Note

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
        # A script may point its reader at another checkpoint.
        reader = copy.copy(reader)
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
            # A shard that is the whole tensor lacks nothing.
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

    def note(self) -> Note | None:
        """Return the note on tensors with unknown values; None if there are no such tensors."""
        if not self._unknown:
            return None
        return Note(
            f"{self._unknown} sharded tensors that FSDP1 loaded (parameters or optimizer states) "
            "came from no checkpoint that was read: the shards of absent ranks repeat this rank's "
            "shard, so values may be wrong in its own part too",
            code="fsdp1-shards-unknown",
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
        # torch drops the state of a parameter that is not on this rank, so it need not be read.
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


@dataclass(frozen=True)
class _Stepped:
    """A parameter that the optimizer steps.

    Attributes:
        unit: FSDP1's record of the flat parameter that contains it.
        group: index of its parameter group in the optimizer; None if the state lists no groups.
        local_elements: number of its elements on this rank.
        state: the optimizer's state of those elements; None without one.
    """

    unit: Any
    group: int | None
    local_elements: int
    state: dict[str, Any] | None

    def most_similar(self, others: list["_Stepped"]) -> "_Stepped":
        """Return the parameter whose state resembles this one's on ranks that have elements of it.

        The same parameter group counts first, the same FSDP unit second.
        """
        return max(others, key=lambda other: (other.group == self.group, other.unit is self.unit))


@contextlib.contextmanager
def emulated_optim_states() -> Generator[None]:
    """Complete FSDP1's optimizer state dicts with the states of absent ranks."""
    map_keys = _states._map_param_key_to_optim_keys
    share_info, gather = _states._allgather_state_info, _states._gather_all_orig_param_state
    models: dict[str, _Stepped] = {}  # parameter name -> a parameter whose state resembles its
    unit: Any = None

    def map_param_key_to_optim_keys(
        states: dict[str, Any],
        group: Any,
        params: dict[Any, Any],
        *names_and_units: Any,
        merge_keys: bool,
    ) -> Any:
        keys, local_keys = map_keys(states, group, params, *names_and_units, merge_keys=merge_keys)
        models.clear()
        if merge_keys:
            names, units = names_and_units
            managed = {key: tuple(names[param]) for key, param in params.items()}
            managed = {key: fqns for key, fqns in managed.items() if fqns[0] in units}
            stepped = _stepped(states, {key: fqns[0] for key, fqns in managed.items()}, units)
            models.update(_models(stepped))
            absent = {fqns for fqns in managed.values() if fqns[0] in models}
            absent -= {key.unflat_param_names for key in keys}
            keys = sorted([*keys, *(_states._OptimStateKey(fqns, True) for fqns in absent)])
        return keys, local_keys

    def gather_all_orig_param_state(info: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal unit
        unit = info
        return gather(info, *args, **kwargs)

    def allgather_state_info(state: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        states = share_info(state, inputs)
        for rank in range(len(states)):
            if rank != state.rank:
                # FSDP1 cuts the flat parameter evenly, so the parts of every rank follow from the
                # sizes.
                elements = _shard_elements(unit.handle, rank)
                states[rank] = {
                    name: _state_info(models[name], elements[unit.param_indices[name]])
                    for name in inputs
                }
        return states

    with patched(
        "torch.distributed.fsdp._optim_utils",
        {
            "_map_param_key_to_optim_keys": map_param_key_to_optim_keys,
            "_allgather_state_info": allgather_state_info,
            "_gather_all_orig_param_state": gather_all_orig_param_state,
        },
    ):
        yield


def _stepped(
    states: dict[str, Any], names: dict[Any, str], units: dict[str, Any]
) -> dict[str, _Stepped]:
    """Return the parameters that require gradients or have a state, by name."""
    groups = {
        key: place
        for place, group in enumerate(states.get("param_groups", ()))
        for key in group["params"]
    }
    stepped: dict[str, _Stepped] = {}
    for key, name in names.items():
        unit = units[name]
        place = unit.param_indices[name]
        if unit.param_requires_grad[place] or key in states["state"]:
            part = unit.handle.flat_param._shard_param_infos[place]
            elements = part.numel_in_shard if part.in_shard else 0
            stepped[name] = _Stepped(unit, groups.get(key), elements, states["state"].get(key))
    return stepped


def _models(stepped: dict[str, _Stepped]) -> dict[str, _Stepped]:
    """Map each parameter with a state on some rank to one with a state on this rank.

    Raises:
        CaptureError: this rank has no element of any of the parameters, so their states are
            unknown.
    """
    with_state = [param for param in stepped.values() if param.state is not None]
    if stepped and not any(
        param.local_elements or param.state is not None for param in stepped.values()
    ):
        raise CaptureError(
            f"rank {dist.get_rank()} holds no element of the {len(stepped)} parameters whose "
            "states FSDP gathers, so their optimizer states are unknown: capture a rank that holds "
            "some (--rank), or use larger parameters",
            code="fsdp-states-unknown",
        )
    # The parameters of a unit get their gradients together: either all have states or none has.
    without = {
        id(param.unit) for param in stepped.values() if param.local_elements and param.state is None
    }
    return {
        name: param if param.state is not None else param.most_similar(with_state)
        for name, param in stepped.items()
        if with_state and (param.state is not None or id(param.unit) not in without)
    }


def _shard_elements(handle: Any, rank: int) -> list[int]:
    """Return the number of elements of each parameter of a unit in a rank's shard."""
    size = handle.flat_param._sharded_size.numel()
    parts = handle._get_shard_metadata(rank * size, (rank + 1) * size - 1)
    return [part.numel_in_shard if part.in_shard else 0 for part in parts]


def _state_info(model: _Stepped, elements: int) -> Any:
    """Return the StateInfo of a rank that has `elements` elements of a parameter.

    Names, dtypes and scalar values are those of `model`.
    """
    info = _states.StateInfo({}, {}, {})
    for name, value in model.state.items() if elements and model.state else ():
        if not isinstance(value, torch.Tensor):
            info.non_tensors[name] = value
        elif value.dim() == 0:
            info.scalar_tensors[name] = value.detach().clone().cpu()
        else:
            sharded = value.numel() == model.local_elements
            shape = torch.Size([elements]) if sharded else value.shape
            info.tensors[name] = _states._PosDimTensorInfo(shape, value.dtype)
    return info
