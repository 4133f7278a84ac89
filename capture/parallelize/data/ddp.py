"""Wrap a model in DistributedDataParallel."""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed's, typed
from torch.nn.parallel import DistributedDataParallel

from onerank.capture.parallelize.data.data_groups import DataGroups, group_kind_of
from onerank.capture.parallelize.parameter_kinds import DENSE
from onerank.ir.errors import SliceError

_ddp: Any = DistributedDataParallel  # typed as Any: private members are used below

_UNUSED_PARAMETERS = re.compile(
    r"finished reduction in the prior iteration.*?(?:rank \d+: ([\d ]+)|$)", re.S
)


class ReplicatedModel:
    """A model whose gradients are averaged by the reducer of torch's DistributedDataParallel.

    DDP objects hook the model's parameters without wrapping the model, so the script's module tree
    stays unchanged. Experts, which fewer ranks hold, get a separate reducer.
    """

    def __init__(self, module: nn.Module, groups: DataGroups) -> None:
        names: dict[str, set[str]] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                names.setdefault(group_kind_of(parameter), set()).add(name)
        all_names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        self._module = module
        self._reducers: list[Any] = []
        self._groups = groups
        for kind, names_of_kind in names.items():
            if len(names) > 1:
                others = set().union(*(names[other] for other in names if other != kind))
                # The dense reducer also synchronises the buffers, so it ignores only the experts.
                ignored = others if kind == DENSE else all_names - names_of_kind
                _ignore(module, sorted(ignored))
            # It reads the ignored names in its constructor.
            reducer = DistributedDataParallel(module, process_group=groups.of(kind))
            if kind != DENSE:
                reducer.register_comm_hook((groups.of(kind), groups.size), _average_expert_bucket)
            self._reducers.append(reducer)
        if len(names) > 1:
            _ignore(module, [])

    def before_forward(self, args: tuple[Any, ...], *, communicates: bool) -> None:
        """Synchronise buffers and set whether the reducers communicate in this backward."""
        for reducer in self._reducers:
            reducer.require_backward_grad_sync = communicates
            try:
                reducer._pre_forward(*args)
            except RuntimeError as error:
                if match := _UNUSED_PARAMETERS.search(str(error)):
                    raise SliceError(
                        self._unused_message(match[1] or ""), code="ddp-unused-parameter"
                    ) from error
                raise
            # torch.compile splits its graph at the buckets of the active DDP module.
            _ddp._active_ddp_module = reducer

    def prepare_repeated_reduction(self) -> None:
        """Scale experts' averages, to compensate the division in the next reduction."""
        for parameter in self._module.parameters():
            kind = group_kind_of(parameter)
            if kind != DENSE and parameter.grad is not None:
                parameter.grad.mul_(self._groups.size / self._groups.of(kind).size())

    def after_forward(self, output: Any) -> None:
        """Prepare the reducers for the backward."""
        for reducer in self._reducers:
            reducer._post_forward(output)
        _ddp._active_ddp_module = None

    def _unused_message(self, indices: str) -> str:
        trained = [name for name, p in self._module.named_parameters() if p.requires_grad]
        names = [trained[int(index)] for index in indices.split()]
        return (
            f"{type(self._module).__name__}: {', '.join(names) or 'some parameters'} got no "
            "gradient in the last step, which DistributedDataParallel does not allow\n  freeze "
            "them (requires_grad_(False)), or wrap the model in the script with "
            "find_unused_parameters=True"
        )


def _ignore(module: nn.Module, names: list[str]) -> None:
    """Set the parameter names that the next DDP object ignores; [] resets them."""
    _ddp._set_params_and_buffers_to_ignore_for_model(module, names)


def _average_expert_bucket(
    state: tuple[dist.ProcessGroup, int], bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket of expert gradients, divided by the number of data-parallel ranks."""
    group, ranks = state
    # Not divided by the group's size: expert parallelism sends the tokens of all data-parallel
    # ranks to these experts.
    gradients = bucket.buffer().div_(ranks)
    if group.size() == 1:
        completed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        completed.set_result(gradients)
        return completed
    work: Any = dist.all_reduce(gradients, group=group, async_op=True)

    def reduced(future: Any) -> torch.Tensor:
        return future.value()[0]

    return work.get_future().then(reduced)
