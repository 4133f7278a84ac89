"""What another rounding of a model's weights changes in a step: the noise of its sums in fp32."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from onerank.capture.verify.fp32_step import Result, run_step


def rounding_of(model: nn.Module, batch: Any, named: Any, expected: Result) -> Result:
    """Run a step with each weight moved to the fp32 number beside it, up or down at random.

    Args:
        model: in fp32; it is left as it is.
        batch: positional arguments of its call.
        named: keyword arguments of its call.
        expected: what it makes of them as it is.

    Returns:
        The largest changes, a scalar each: of the loss, the logits and each gradient.
    """
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in moved.parameters():
            up = torch.rand(weight.shape, generator=generator).to(weight.device) < 0.5
            far = torch.where(up, torch.inf, -torch.inf).to(weight.dtype)
            weight.copy_(torch.nextafter(weight, far))
    found = run_step(moved, batch, named)
    logits = None
    if found.logits is not None and expected.logits is not None:
        logits = _change(found.logits, expected.logits)
    gradients = {
        name: _change(found.gradients[name], gradient)
        for name, gradient in expected.gradients.items()
        if name in found.gradients
    }
    return Result(_change(found.loss, expected.loss), logits, gradients)


def _change(found: Tensor, expected: Tensor) -> Tensor:
    if not expected.numel():
        return torch.zeros(())
    change = (found.double() - expected.double()).abs().max()
    return change.nan_to_num(0.0, 0.0, 0.0)  # it excuses nothing
