"""Clip the gradients of a sliced model by their norm over all slices.

As in Megatron-LM (megatron/core/optimizer/clip_grads.py), each rank computes the norm of the
gradients that no other rank holds; replicated parameters (norms, routers, tied embeddings) count
on the first rank that holds them. The powers of the norms, 4 bytes, are all-reduced over the ranks
of --tp and --pp. Those of sharded experts are first summed over the ranks of --ep, where
Megatron-LM sums over --tp, --pp and --ep at once. Gradients of a sharded optimizer (--zero 1, 2)
are summed over all ranks, as in Megatron-LM's distributed optimizer; FSDP's norms are first summed
over FSDP's ranks, as in torch.

A GradScaler's flag for non-finite gradients is all-reduced over the same ranks: in `unscale_`, or
in the step of a fused optimizer that unscales in its kernel. A rank without peers gets the norm of
its part.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.data.data_groups import group_kind_of
from onerank.capture.parallelize.data.fsdp import by_mesh, current, norm_on_mesh
from onerank.capture.parallelize.data.optimizers import after_checks
from onerank.capture.parallelize.data.zero import ShardedOptimizers
from onerank.capture.parallelize.parameter_kinds import DENSE
from onerank.capture.parallelize.tensor.apply_tensor_parallel import Sliced
from onerank.capture.patches import patched
from onerank.ir import World

_INFINITE = float("inf")


class Clipping:
    """Replaces `torch.nn.utils.clip_grad_norm_` and a GradScaler's checks for sliced models.

    Args:
        models: sliced model -> summary of its slice.
        world: sizes of the parallel axes.
        rank: the rank of the slices.
        new_group: creates the process group of an axis from its name and ranks.
        shards: optimizers that step on shards (ZeRO); None without any.
    """

    def __init__(
        self,
        models: Mapping[nn.Module, Sliced],
        world: World,
        rank: int,
        new_group: Callable[[str, Sequence[int]], dist.ProcessGroup],
        shards: ShardedOptimizers | None,
    ) -> None:
        self._models = models
        self._world = world
        self._rank = rank
        self._new_group = new_group
        self._shards = shards
        self._groups: dict[str, dist.ProcessGroup] = {}

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch clipping and the checks for the duration of the context."""
        original: Any = nn.utils.clip_grad_norm_

        def reduce_flags(flags: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            if self._shards is not None or self._counts_elsewhere(stepped):
                for flag in flags:
                    self._reduce_flag(flag)

        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            counted_elsewhere = self._counts_elsewhere(listed)
            if not counted_elsewhere:
                return original(listed, *args, **kwargs)
            return self._clip(listed, counted_elsewhere, *args, **kwargs)

        patch = patched("torch.nn.utils", {"clip_grad_norm_": clip_grad_norm_})
        with patch, after_checks(reduce_flags):
            yield

    def _reduce_flag(self, flag: Tensor) -> None:
        """Make all ranks skip a step if any of them has non-finite gradients."""
        axes = ["tp+pp"] if self._world.ep == 1 or self._shards is not None else ["ep", "tp+pp"]
        for axis in axes:
            self._all_reduce(axis, flag, _INFINITE)  # in place

    def _counts_elsewhere(self, parameters: Sequence[Tensor]) -> dict[int, bool]:
        """Return id of each sliced parameter -> whether another rank counts its gradient."""
        known = {
            id(parameter): name in sliced.duplicates
            for model, sliced in self._models.items()
            for name, parameter in model.named_parameters()
        }
        return {id(p): known[id(p)] for p in current(parameters) if id(p) in known}

    def _clip(  # noqa: PLR0917, torch's signature
        self,
        parameters: list[Tensor],
        counted_elsewhere: Mapping[int, bool],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        order = float(norm_type)
        if self._shards is None:
            for sliced in self._models.values():
                for tied in sliced.stage.tied if sliced.stage is not None else ():
                    # The norm needs the whole gradient of an embedding that two stages share, so it
                    # is summed here and not in the step.
                    tied.sum()
            clipped = list(current(parameters))
            gradients_by_parameter = [(p, p.grad) for p in clipped if p.grad is not None]
        else:
            clipped, gradients_by_parameter = self._shards.parts_of(parameters)
        counted = [
            (p, grad)
            for p, grad in gradients_by_parameter
            if not counted_elsewhere.get(id(p), False)
        ]
        device = (
            gradients_by_parameter[0][1].device if gradients_by_parameter else torch.device("cpu")
        )
        total = torch.zeros((), device=device)
        # Dense parameters, then experts, whose power is first summed over --ep.
        for expert in (False, True):
            gradients = [grad for p, grad in counted if (group_kind_of(p) != DENSE) == expert]
            power = _power(gradients, order, foreach)
            if (
                expert
                and self._world.ep > 1
                and self._shards is None
                and _has_experts(gradients_by_parameter)
            ):
                # A rank whose experts got no gradient adds 0, because its peers wait for it in the
                # collective.
                power = self._all_reduce(
                    "ep", torch.zeros_like(total) if power is None else power, order
                )
            if power is not None:
                total = torch.maximum(total, power) if order == _INFINITE else total + power
        total = self._all_reduce("tp+pp" if self._shards is None else "world", total, order)
        total = total if order == _INFINITE else total.pow(1.0 / order)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped"
            )
        utils: Any = nn.utils
        for mesh_parameters in by_mesh(clipped):
            utils.clip_grads_with_norm_(mesh_parameters, max_norm, total, foreach)
        return total

    def _all_reduce(self, axis: str, power: Tensor, order: float) -> Tensor:
        """Sum powers of norms over the ranks of an axis; take the maximum for the infinity norm."""
        sizes = self._world.sizes
        if axis == "tp+pp":
            axis = "+".join(name for name in ("tp", "pp") if name in sizes)
        if not axis:
            return power
        if axis not in self._groups:
            all_ranks = tuple(range(self._world.size))
            ranks = all_ranks if axis == "world" else self._world.line(axis, self._rank)
            self._groups[axis] = self._new_group(axis, ranks)
        power = power.reshape(1)
        operation = dist.ReduceOp.MAX if order == _INFINITE else dist.ReduceOp.SUM
        dist.all_reduce(power, op=operation, group=self._groups[axis])
        return power.reshape(())


def _has_experts(gradients_by_parameter: Sequence[tuple[Tensor, Tensor]]) -> bool:
    return any(group_kind_of(parameter) != DENSE for parameter, _ in gradients_by_parameter)


def _power(gradients: list[Tensor], order: float, foreach: bool | None) -> Tensor | None:
    """Return a norm to the power of its order (infinity: the maximum), over FSDP's ranks too."""
    if not gradients:
        return None
    norm = norm_on_mesh(gradients, order, foreach).float()
    return norm if order == _INFINITE else norm.pow(order)
