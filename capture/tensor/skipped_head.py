"""A sliced head whose weight is read instead of its being called, as by fused losses."""

from typing import Any

import torch
from torch import nn

from onerank.capture.tensor.planfile import whole_plan
from onerank.ir.errors import SliceError


def refuse_skipped(model: nn.Module, head: nn.Module, name: str) -> None:
    """Refuse a training forward of the model that does not call its sliced head.

    The logits of whoever multiplies with its weight, a shard, are a shard too, and nothing is
    communicated.
    """
    called = False
    weight = head.get_parameter("weight")
    whole = [
        one
        for one, module in model.named_modules()
        if any(parameter is weight for parameter in module.parameters(recurse=False))
    ]

    def before(*_: Any) -> None:
        nonlocal called
        called = False

    def note(*_: Any) -> None:
        nonlocal called
        called = True

    def after(*_: Any) -> None:
        if called or not torch.is_grad_enabled():
            return
        if model.get_submodule(name) is head:  # a stage may have another in its place
            raise SliceError(
                f"--tp: {type(model).__name__} did not call {name} in its forward, which must "
                "then read its weight (a fused loss, as TRL's trainers and Liger have): of a "
                "slice that is a shard, for which nobody communicates. Call the head, or keep it "
                "whole by a plan file (--plan FILE), which goes beside the model's own plan:\n\n"
                f"{whole_plan(model, whole)}"
            )

    model.register_forward_pre_hook(before)
    head.register_forward_pre_hook(note)
    model.register_forward_hook(after)
