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
