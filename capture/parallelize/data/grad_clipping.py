"""Clip the gradients of a sliced model by their norm over all slices.

As in Megatron-LM (megatron/core/optimizer/clip_grads.py), each rank adds up the gradients that only
it holds; the first of several ranks counts what they share (norms, routers, tied embeddings). The
sum, 4 bytes, is all-reduced over the ranks of --tp and --pp. Sharded experts are first summed over
the ranks of --ep, where Megatron-LM sums over --tp, --pp and --ep at once. Gradients of a sharded
optimizer (--zero 1, 2) are summed over all ranks, like Megatron-LM's distributed optimizer; FSDP's
norms are first summed over FSDP's ranks, as in torch.

Whether a GradScaler found non-finite gradients is all-reduced over the same ranks: in `unscale_`,
or in the step of a fused optimizer that unscales in its kernel. A rank without peers gets the
norm of its part.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.data.data_groups import DENSE, group_kind_of
from onerank.capture.parallelize.data.fsdp import by_mesh, current, norm_on_mesh
from onerank.capture.parallelize.data.optimizers import after_checks
from onerank.capture.parallelize.data.zero import ShardedOptimizers
from onerank.capture.parallelize.tensor.slicer import Sliced
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
            if self._shards is not None or self._counted_elsewhere(stepped):
                for flag in flags:
                    self._reduce_flag(flag)

        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            elsewhere = self._counted_elsewhere(listed)
            if not elsewhere:
                return original(listed, *args, **kwargs)
            return self._clip(listed, elsewhere, *args, **kwargs)

        patch = patched("torch.nn.utils", {"clip_grad_norm_": clip_grad_norm_})
        with patch, after_checks(reduce_flags):
            yield

    def _reduce_flag(self, flag: Tensor) -> None:
        """Make all ranks skip a step if one of them found non-finite gradients."""
        axes = ["tp+pp"] if self._world.ep == 1 or self._shards is not None else ["ep", "tp+pp"]
        for axis in axes:
            self._summed(axis, flag, _INFINITE)  # in place

    def _counted_elsewhere(self, parameters: Sequence[Tensor]) -> dict[int, bool]:
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
        elsewhere: Mapping[int, bool],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        kind = float(norm_type)
        if self._shards is None:
            for sliced in self._models.values():
                for tied in sliced.stage.tied if sliced.stage is not None else ():
                    tied.sum()
            clipped = list(current(parameters))
            parts = [(p, p.grad) for p in clipped if p.grad is not None]
        else:
            clipped, parts = self._shards.parts_of(parameters)
        counted = [(p, grad) for p, grad in parts if not elsewhere.get(id(p), False)]
        device = parts[0][1].device if parts else torch.device("cpu")
        total = torch.zeros((), device=device)
        for expert in (False, True):
            gradients = [grad for p, grad in counted if (group_kind_of(p) != DENSE) == expert]
            power = _power(gradients, kind, foreach)
            if expert and self._world.ep > 1 and self._shards is None and _any_expert(parts):
                power = self._summed(
                    "ep", torch.zeros_like(total) if power is None else power, kind
                )
            if power is not None:
                total = torch.maximum(total, power) if kind == _INFINITE else total + power
        total = self._summed("tp+pp" if self._shards is None else "world", total, kind)
        total = total if kind == _INFINITE else total.pow(1.0 / kind)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped"
            )
        utils: Any = nn.utils
        for on_mesh in by_mesh(clipped):
            utils.clip_grads_with_norm_(on_mesh, max_norm, total, foreach)
        return total

    def _summed(self, axis: str, power: Tensor, kind: float) -> Tensor:
        """Sum powers of norms over the ranks of an axis; take the maximum for the infinity norm."""
        sizes = self._world.sizes
        if axis == "tp+pp":
            axis = "+".join(name for name in ("tp", "pp") if name in sizes)
        if not axis:
            return power
        if axis not in self._groups:
            everyone = tuple(range(self._world.size))
            ranks = everyone if axis == "world" else self._world.line(axis, self._rank)
            self._groups[axis] = self._new_group(axis, ranks)
        power = power.reshape(1)
        operation = dist.ReduceOp.MAX if kind == _INFINITE else dist.ReduceOp.SUM
        dist.all_reduce(power, op=operation, group=self._groups[axis])
        return power.reshape(())


def _any_expert(parts: Sequence[tuple[Tensor, Tensor]]) -> bool:
    return any(group_kind_of(parameter) != DENSE for parameter, _ in parts)


def _power(gradients: list[Tensor], kind: float, foreach: bool | None) -> Tensor | None:
    """Return a norm to the power of its order (infinity: the maximum), over FSDP's ranks too."""
    if not gradients:
        return None
    norm = norm_on_mesh(gradients, kind, foreach).float()
    return norm if kind == _INFINITE else norm.pow(kind)
