"""Steps with nested tensors, under torch's observer of the execution trace.

The observer keeps a stack of callers for each thread
(torch/csrc/profiler/standalone/execution_trace_observer.cpp). An operator whose operands it cannot
read, a nested tensor's sizes among them, it does not put there as the operator begins, but takes
something off as it ends: in the backward of attention over jagged tensors so often that it goes
below the bottom, which ends the process. So the stack gets as many placeholders first as the step
has operators. What stands in their place as a caller is then wrong, and not read: callers are known
from times.
"""

import re
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.profiler import profile

from onerank.converters.sources.kineto.read.execution_trace import PLACEHOLDERS

_torch: Any = torch  # the observer has no public name
_NESTED = re.compile("nested|to_padded_tensor", re.IGNORECASE)


def operators_beside_nested(profiler: profile) -> int:
    """Return how many events were profiled; 0 where no operator of nested tensors is among them."""
    inner: Any = profiler.profiler
    events = inner.kineto_results.events()
    return len(events) if any(_NESTED.search(event.name()) for event in events) else 0


def deepen(count: int, *, on_gpu: bool) -> None:
    """Put `count` placeholders on the stacks of a registered observer that is not running.

    Args:
        count: for each thread that runs operators of the step.
        on_gpu: whether backward runs in a thread of the GPU's.
    """
    _deepen(count)
    if on_gpu:
        with torch.enable_grad():
            _Deepened.apply(torch.zeros((), device="cuda", requires_grad=True), count).backward()  # pyright: ignore


class _Deepened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _deepen(ctx.count)
        return grads[0], None


def _deepen(count: int) -> None:
    """Begin ranges while the observer runs, and end them while it does not: they stay."""
    ranges = [record_function(PLACEHOLDERS) for _ in range(count)]
    _torch._C._profiler._enable_execution_trace_observer()
    with record_function(PLACEHOLDERS):  # written, as those between are not
        pass
    for one in ranges:
        one.__enter__()
    with record_function(PLACEHOLDERS):
        pass
    _torch._C._profiler._disable_execution_trace_observer()
    for one in reversed(ranges):
        one.__exit__(None, None, None)
