"""One step of a model on one batch, in fp32: loss, logits and gradients."""

import contextlib
import importlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from onerank.capture.tensor.gradients import partial_gradients, sum_put_off


@dataclass
class Result:
    """What a model, or its slice, made of a batch: detached, on the model's device."""

    loss: Tensor
    logits: Tensor | None
    gradients: dict[str, Tensor]


def run_step(model: nn.Module, batch: Any, named: Any, *, what: str = "logits") -> Result:
    """Run one step up to the optimizer's; a stage that gives nothing has a loss of 0."""
    partials = partial_gradients(model)
    for _, partial in partials:
        partial.put_off = True
    with torch.autocast(next(model.parameters()).device.type, enabled=False):
        output = model(*batch, **named)
        loss, logits = _loss_and_logits(output) if what == "logits" else (output.loss, None)
        if loss is None and logits is None:
            logits = output.logits
        if loss is None:
            loss = _projected(logits)
        loss.backward()
    sum_put_off(partials)
    _before_optimizer_step(model)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return Result(loss.detach(), None if logits is None else logits.detach(), gradients)


def _loss_and_logits(output: Any) -> tuple[Any, Any]:
    """Return what a model made of a batch: by name, or by shape where it returns a tuple."""
    if hasattr(output, "loss") or hasattr(output, "logits"):
        return getattr(output, "loss", None), getattr(output, "logits", None)
    values = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    floating = [value for value in values if value.is_floating_point()]
    loss = next((value for value in floating if value.dim() == 0), None)
    return loss, next((value for value in floating if value.dim() > 0), None)


def _before_optimizer_step(model: nn.Module) -> None:
    """Let slices finish what they leave to that moment: the sum of a tied weight's gradients."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    registered: Any = importlib.import_module("torch.optim.optimizer")
    for hook in list(registered._global_optimizer_pre_hooks.values()):
        hook(optimizer, (), {})


def _projected(output: Any) -> Tensor:
    """Return a loss for a model that a script gives no labels: a fixed mean of the outputs."""
    generator = torch.Generator(output.device).manual_seed(0)
    weights = torch.randn(output.shape, generator=generator, device=output.device)
    return (output * weights).mean()


def as_fp32(value: Any) -> Any:
    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().clone()
            return leaf.float() if leaf.is_floating_point() else leaf
        return leaf

    return tree_map(cast, value)


@contextlib.contextmanager
def computed_in_fp32() -> Generator[None]:
    """Let fp32 products be computed in fp32, not in TF32."""
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn
