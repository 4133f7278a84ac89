"""A vocabulary-parallel head for models that compute their loss in forward."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput

from onerank.capture.parallelize.autograd_collectives import gather_from_group
from onerank.capture.parallelize.sliced_outputs import change_when_read
from onerank.capture.parallelize.tensor.block_boundaries import Border
from onerank.capture.parallelize.tensor.plan_file import whole_plan
from onerank.capture.parallelize.tensor.vocab_parallel import (
    IGNORED_LABEL,
    causal_loss,
    head_linear,
)
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
                "whole by a plan file (--sharding-plan FILE), which goes beside the model's own "
                "plan:\n\n"
                f"{whole_plan(model, whole)}"
            )

    model.register_forward_pre_hook(before)
    head.register_forward_pre_hook(note)
    model.register_forward_hook(after)


def loses_by_itself(model: PreTrainedModel) -> bool:
    """Whether a model's forward calls cross_entropy, and not the loss function of its class."""
    code: Any = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    names: set[str] = set(code.co_names) if code else set()
    return "loss_function" not in names and bool(names & {"CrossEntropyLoss", "cross_entropy"})


def cross_entropy_head(
    model: nn.Module,
    head: nn.Module,
    group: dist.ProcessGroup,
    *,
    alone: bool,
    border: Border | None = None,
) -> None:
    """Leave the logits sharded up to torch.nn.functional.cross_entropy in the model's forward.

    A forward that computes no such loss returns its logits gathered; one that does returns them
    as a shard, or in transformers' outputs gathered as they are read. A head called outside the
    forward gathers. While the logits are sharded, the configuration counts the vocabulary of the
    shard (Whisper shapes them by it), and a bias of all logits is that of the shard (BART).

    torch.compile traces all of it: `nn.functional.cross_entropy` is read where a model calls it,
    after `before` changed it. Of the class CrossEntropyLoss it makes a call of torch's own function
    instead (`UserDefinedClassVariable`, by identity), so that the class has a substitute too.
    """
    _call_by_attribute(type(model).forward)
    width = head.get_parameter("weight").shape[0]
    running: Any = None
    lossy = False
    sharded: list[Tensor] = []
    makers = _loss_makers(model)
    swaps = _Swaps()

    def gather(logits: Tensor) -> Tensor:
        return gather_from_group(logits, group)

    def cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        nonlocal lossy
        if not sharded or input.shape[-1] != width:
            return _WHOLE_LOSS(input, target, *args, **kwargs)
        lossy = True
        options = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        ignored = options.pop("ignore_index", IGNORED_LABEL)
        changed = {key: value for key, value in options.items() if value != _DEFAULTS[key]}
        if changed or input.dim() != 2 or target.dim() != 1:
            raise SliceError(
                f"{type(model).__name__} calls cross_entropy with {', '.join(changed) or 'classes'}"
                f" on input {tuple(input.shape)} and target {tuple(target.shape)}; sharded over "
                "the vocabulary it is known for [tokens, vocabulary] and [tokens], and a mean: "
                "plan the head as colwise_gather_output"
            )
        return causal_loss(
            group, alone, input, target, width, ignore_index=ignored, shift_labels=target
        )

    def before(module: nn.Module, _: Any) -> None:
        nonlocal running, lossy
        running, lossy = module, False
        swaps.put(nn.functional, "cross_entropy", cross_entropy)
        if torch.compiler.is_compiling():
            for owner, name in makers:
                swaps.put(owner, name, _cross_entropy_loss)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        nonlocal running
        swaps.undo()
        running = None
        logits, lost = list(sharded), lossy
        sharded.clear()
        if isinstance(output, ModelOutput) and logits:
            if lost and torch.is_grad_enabled():
                change_when_read(output, gather)
            elif output["logits"].shape[-1] == width:  # perhaps biased, or scaled, behind the head
                output["logits"] = gather(output["logits"])
            return output
        return output if lost or not logits else _replaced(output, logits, group)

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        if running is not None:
            if not sharded:
                _count_shard(running, group, width, swaps)
            sharded.append(output)

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)
    head.register_forward_hook(keep)
    head_linear(head, group, gathers=lambda: running is None, border=border)


class _Swaps:
    """Attributes that have another value for a while; torch.compile traces it."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give an attribute another value."""
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Give each its own back."""
        for owner, name, value in reversed(self._before):
            setattr(owner, name, value)
        self._before.clear()


def _call_by_attribute(forward: Any) -> None:
    """Let a forward look cross_entropy up in its module; a name of its own may stand for it."""
    names: dict[str, Any] = inspect.unwrap(forward).__globals__
    names |= {key: _cross_entropy for key, value in names.items() if value is _WHOLE_LOSS}


def _loss_makers(model: nn.Module) -> list[tuple[Any, str]]:
    """Return where a model's forward finds the class CrossEntropyLoss: modules and names."""
    home: Any = sys.modules.get(inspect.unwrap(type(model).forward).__module__)
    names = [name for name, value in vars(home).items() if value is nn.CrossEntropyLoss]
    return [(nn, "CrossEntropyLoss"), *((home, name) for name in names)]


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    return nn.functional.cross_entropy(*args, **kwargs)


def _cross_entropy_loss(*args: Any, **kwargs: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Stand for the class CrossEntropyLoss, of which torch.compile makes calls of its own."""
    return lambda input, target: nn.functional.cross_entropy(input, target, *args, **kwargs)  # noqa: A006


def _count_shard(model: Any, group: dist.ProcessGroup, width: int, swaps: _Swaps) -> None:
    """Let what a model keeps for its whole vocabulary be a shard's."""
    whole = width * group.size()
    for name, buffer in list(model.named_buffers(recurse=False)):
        if buffer.dim() > 0 and buffer.shape[-1] == whole:
            swaps.put(model, name, buffer.narrow(-1, group.rank() * width, width))
    config: Any = getattr(model, "config", None)
    for key in _COUNTS:
        if getattr(config, key, None) == whole:
            swaps.put(config, key, width)


_WHOLE_LOSS = nn.functional.cross_entropy

_COUNTS = ("vocab_size", "decoder_vocab_size")

_ARGUMENTS = (
    *("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
)

_DEFAULTS: dict[str, object] = {
    "weight": None,
    "size_average": None,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


def _replaced(output: Any, logits: list[Tensor], group: dist.ProcessGroup) -> Any:
    """Gather the head's logits wherever an output holds them."""
    if isinstance(output, Tensor):
        mine = any(output is one for one in logits)
        return gather_from_group(output, group) if mine else output
    if isinstance(output, dict):
        changed = {key: _replaced(value, logits, group) for key, value in output.items()}
        return type(output)(**changed)
    if isinstance(output, tuple | list):
        parts = [_replaced(value, logits, group) for value in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output
