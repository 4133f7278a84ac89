"""FSDP1's gathers of optimizer states, without other ranks.

With `use_orig_params` each rank's optimizer steps only its own parts of the parameters and holds
states of those parts. `FullyShardedDataParallel.optim_state_dict` therefore asks all ranks which
parameters they have states of, and of what shapes. Absent ranks are assumed to hold as many
elements of each state as of the parameter, like this rank.
"""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import _optim_utils

from onerank.capture.patches import patched
from onerank.ir.errors import CaptureError

_states: Any = _optim_utils  # none of its functions has a public name


@dataclass(frozen=True)
class _Stepped:
    """A parameter that the optimizer steps.

    Attributes:
        unit: what FSDP1 knows of the flat parameter that it is part of.
        group: its place among the optimizer's parameter groups; None where they are not told.
        held: how many elements of it this rank has.
        state: the optimizer's, of those; None where it has none.
    """

    unit: Any
    group: int | None
    held: int
    state: dict[str, Any] | None

    def likest(self, others: list["_Stepped"]) -> "_Stepped":
        """Return the one whose state is like this one's on the ranks that hold it."""
        return max(others, key=lambda one: (one.group == self.group, one.unit is self.unit))


@contextlib.contextmanager
def states_of_others() -> Generator[None]:
    """Let FSDP1 make state dicts of optimizers as with all ranks."""
    map_keys = _states._map_param_key_to_optim_keys
    tell, gather = _states._allgather_state_info, _states._gather_all_orig_param_state
    models: dict[str, _Stepped] = {}  # by the name of a parameter, one with a state
    unit: Any = None

    def map_param_key_to_optim_keys(
        states: dict[str, Any], group: Any, params: dict[Any, Any], *known: Any, merge_keys: bool
    ) -> Any:
        keys, own = map_keys(states, group, params, *known, merge_keys=merge_keys)
        models.clear()
        if merge_keys:
            names, units = known
            managed = {key: tuple(names[one]) for key, one in params.items()}
            managed = {key: fqns for key, fqns in managed.items() if fqns[0] in units}
            stepped = _stepped(states, {key: fqns[0] for key, fqns in managed.items()}, units)
            models.update(_models(stepped))
            absent = {fqns for fqns in managed.values() if fqns[0] in models}
            absent -= {key.unflat_param_names for key in keys}
            keys = sorted([*keys, *(_states._OptimStateKey(fqns, True) for fqns in absent)])
        return keys, own

    def gather_all_orig_param_state(info: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal unit
        unit = info
        return gather(info, *args, **kwargs)

    def allgather_state_info(state: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        states = tell(state, inputs)
        for rank in range(len(states)):
            if rank != state.rank:
                held = _held(unit.handle, rank)
                states[rank] = {
                    name: _info(models[name], held[unit.param_indices[name]]) for name in inputs
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
    """Return the optimizer's parameters that take gradients, by their names."""
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
            held = part.numel_in_shard if part.in_shard else 0
            stepped[name] = _Stepped(unit, groups.get(key), held, states["state"].get(key))
    return stepped


def _models(stepped: dict[str, _Stepped]) -> dict[str, _Stepped]:
    """Return for each parameter that some rank has a state of one that this rank has a state of.

    The parameters of a unit get their gradients together, so that they have states or none has.

    Raises:
        CaptureError: this rank holds no part of any, so that nothing is known of their states.
    """
    with_state = [one for one in stepped.values() if one.state is not None]
    if stepped and not any(one.held or one.state is not None for one in stepped.values()):
        raise CaptureError(
            f"rank {dist.get_rank()} holds no element of the {len(stepped)} parameters whose "
            "states FSDP gathers: what the optimizer keeps of them, only absent ranks would know; "
            "take a rank that holds some, or larger parameters",
            code="fsdp-states-unknown",
        )
    without = {id(one.unit) for one in stepped.values() if one.held and one.state is None}
    return {
        name: one if one.state is not None else one.likest(with_state)
        for name, one in stepped.items()
        if with_state and (one.state is not None or id(one.unit) not in without)
    }


def _held(handle: Any, rank: int) -> list[int]:
    """Return how many elements of each parameter of a unit a rank of its group holds."""
    size = handle.flat_param._sharded_size.numel()
    parts = handle._get_shard_metadata(rank * size, (rank + 1) * size - 1)
    return [part.numel_in_shard if part.in_shard else 0 for part in parts]


def _info(model: _Stepped, held: int) -> Any:
    """Return what a rank that holds so many elements of a parameter tells of its state."""
    info = _states.StateInfo({}, {}, {})
    for name, value in model.state.items() if held and model.state else ():
        if not isinstance(value, torch.Tensor):
            info.non_tensors[name] = value
        elif value.dim() == 0:
            info.scalar_tensors[name] = value.detach().clone().cpu()
        else:
            shape = torch.Size([held]) if value.numel() == model.held else value.shape
            info.tensors[name] = _states._PosDimTensorInfo(shape, value.dtype)
    return info
