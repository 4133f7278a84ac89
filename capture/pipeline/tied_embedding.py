"""An embedding that the first and the last pipeline stage have both.

They sum its gradients before the optimizer steps, as Megatron-LM's embedding group does
(megatron/core/distributed/finalize_model_grads.py).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

TIED = "_onerank_tied_over"
"""The attribute of the parameter that names the group."""


class TiedEmbedding:
    """An embedding whose gradients both stages sum before they are clipped, or stepped by.

    Args:
        holder: the module that has its weight on this stage.
        group: the first and the last stage.
    """

    def __init__(self, holder: Any, group: dist.ProcessGroup) -> None:
        self._holder = holder
        self._group = group
        self._summed = False
        self._mark()
        holder.register_forward_pre_hook(self._mark)
        register_optimizer_step_pre_hook(self._before_step)

    def __deepcopy__(self, _: Any) -> "TiedEmbedding":
        return self  # as functions are, when a model with its hooks is copied

    @property
    def is_copy(self) -> bool:
        """Whether a rank before this one has it too."""
        return self._group.rank() > 0

    @property
    def weight(self) -> Tensor:
        """The weight as it is now: moving a model off the meta device makes new ones."""
        return self._holder.weight

    def sum(self) -> None:
        """Sum the gradients, once after each forward."""
        gradient: Any = self.weight.grad
        if not self._summed and gradient is not None:
            shard = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            dist.all_reduce(shard, group=self._group)
            self._summed = True

    def _mark(self, *_: Any) -> None:
        """Name the group, for an optimizer that takes the gradients away.

        Before each forward, since moving a model off the meta device makes new parameters. What a
        training forward adds to the gradients is not summed yet, also after a step that was
        skipped.
        """
        setattr(self.weight, TIED, self._group)
        if torch.is_grad_enabled():
            self._summed = False

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if any(self.weight is p for one in optimizer.param_groups for p in one["params"]):
            self.sum()
            self._summed = False
