"""Log the calls of Python that take the host's time besides operators.

Autograd functions, ranges of the profiler, redistributions of DTensors, groups of FSDP, and those
of weights in a split backward.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from onerank.capture.no_device.event_log import EventLog
from onerank.capture.no_device.operators.fake_operators import FakeOperators
from onerank.capture.patches import after_import, patched, rebound, resolve, untraced

_REDISTRIBUTE = "torch.distributed.tensor._redistribute"

_FSDP_GROUPS = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

_FSDP_COLLECTIVES = ("foreach_all_gather", "foreach_reduce")

_FSDP1_HANDLES = "torch.distributed.fsdp._flat_param"

_FSDP1_REDUCTIONS = "torch.distributed.fsdp._runtime_utils"

_SPLIT_BACKWARD = "torch.distributed.pipelining._backward"


@contextlib.contextmanager
def logged_python_calls(operators: FakeOperators, log: EventLog) -> Generator[None]:
    """Log the calls inside the context.

    Args:
        operators: the dispatch mode, which describes operands.
        log: receives the calls.
    """
    with (
        _ranges(operators, log),
        _autograd_functions(operators, log),
        after_import(_REDISTRIBUTE, lambda: _redistributions(log)),
        after_import(_FSDP_GROUPS, lambda: _fsdp_groups(log)),
        after_import(_FSDP1_HANDLES, lambda: _fsdp1_gathers(log)),
        after_import(_FSDP1_REDUCTIONS, lambda: _fsdp1_reductions(log)),
        after_import(_SPLIT_BACKWARD, lambda: _split_backwards(log)),
    ):
        yield


@contextlib.contextmanager
def _ranges(operators: FakeOperators, log: EventLog) -> Generator[None]:
    """Record the ranges that hold a communication call or a wait."""

    def enter(name: str, *operands: Any) -> Any:
        return log.begin(
            name,
            "user_annotation",
            inputs=operators.describe(operands) if log.recording else None,
        )

    def leave(event: Any) -> None:
        log.end(event)

    names = {
        "_record_function_with_args_enter": enter,
        "_record_function_with_args_exit": leave,
        "_profiler_enabled": lambda: True,
    }
    with patched("torch.autograd", names):
        yield


@contextlib.contextmanager
def _autograd_functions(operators: FakeOperators, log: EventLog) -> Generator[None]:
    """Record the forward of each autograd function, whose node has no operator."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        event = operators.begin_function(cls.__name__)
        try:
            return original.__func__(cls, *args, **kwargs)
        finally:
            log.end(event)

    # Dynamo traces autograd functions itself. After a graph break it would compile `apply`.
    untraced(apply)
    with patched("torch.autograd.Function", {"apply": classmethod(apply)}):
        yield


def _redistributions(log: EventLog) -> contextlib.AbstractContextManager[None]:
    """Count DTensors that change their placement."""
    redistribute = resolve(_REDISTRIBUTE).redistribute_local_tensor

    def counted(local: Tensor, current: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if current.placements != target.placements:
            log.call_python("redistribute")
        return redistribute(local, current, target, *args, **kwargs)

    return rebound(_REDISTRIBUTE, {"redistribute_local_tensor": counted})


def _fsdp_groups(log: EventLog) -> contextlib.AbstractContextManager[None]:
    """Count gathers and reductions of FSDP2, and their parameters."""

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(resolve(_FSDP_GROUPS), name)

        def counted(parameters: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            log.call_python("fsdp_group")
            log.call_python("fsdp_parameter", len(parameters))
            return original(parameters, *args, **kwargs)

        return counted

    return patched(_FSDP_GROUPS, {name: counting(name) for name in _FSDP_COLLECTIVES})


def _fsdp1_gathers(log: EventLog) -> contextlib.AbstractContextManager[None]:
    """Count gathers of FSDP1, whose groups are the handles of flat parameters."""
    owner, name = f"{_FSDP1_HANDLES}.FlatParamHandle", "_all_gather_flat_param"
    gather = getattr(resolve(owner), name)

    def counted(handle: Any, *args: Any) -> Any:
        _count_flat_parameter(log, handle)
        return gather(handle, *args)

    return patched(owner, {name: counted})


def _fsdp1_reductions(log: EventLog) -> contextlib.AbstractContextManager[None]:
    """Count reductions of FSDP1's gradients."""

    def counting(name: str) -> Callable[..., Any]:
        reduce = getattr(resolve(_FSDP1_REDUCTIONS), name)

        def counted(state: Any, handle: Any) -> None:
            _count_flat_parameter(log, handle)
            reduce(state, handle)

        return counted

    names = ("_reduce_grad", "_reduce_grad_no_shard")
    return patched(_FSDP1_REDUCTIONS, {name: counting(name) for name in names})


def _count_flat_parameter(log: EventLog, handle: Any) -> None:
    log.call_python("fsdp_group")
    log.call_python("fsdp_parameter", handle.flat_param._num_params)


def _split_backwards(log: EventLog) -> contextlib.AbstractContextManager[None]:
    """Count the groups of weights of split backwards.

    `stage_backward_input` searches the autograd graph in Python for each group, and
    `stage_backward_weight` calls autograd for each.
    """
    backward = resolve(_SPLIT_BACKWARD).stage_backward_weight

    def counted(weights: Any, param_groups: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        log.call_python("split_group", len(param_groups))
        return backward(weights, param_groups, *args, **kwargs)

    return rebound(_SPLIT_BACKWARD, {"stage_backward_weight": counted})
