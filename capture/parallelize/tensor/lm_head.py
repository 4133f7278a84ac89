"""The language-model head of a sliced model, whose logits stay sharded up to the loss.

A model of transformers calls its `loss_function` (`parallel_head`); other models call cross_entropy
in their forward (`cross_entropy_head`). Both get the vocabulary-parallel loss.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.autograd_collectives import gather_from_group
from onerank.capture.parallelize.hugging_face import ModelOutput, PreTrainedModel
from onerank.capture.parallelize.sliced_outputs import change_when_read
from onerank.capture.parallelize.tensor.linear import BlockBoundary, column_linear
from onerank.capture.parallelize.tensor.plan_file import whole_plan
from onerank.capture.parallelize.tensor.vocab_parallel import IGNORED_LABEL, causal_loss
from onerank.capture.patches import untraced
from onerank.ir.errors import SliceError


@dataclass(frozen=True)
class HeadSharding:
    """How a head is sharded over the vocabulary.

    Attributes:
        group: the tensor-parallel group.
        peers_absent: whether the group's other ranks do not run.
        boundary: the block boundary that precedes the head; None if the head copies its input.
    """

    group: dist.ProcessGroup
    peers_absent: bool
    boundary: BlockBoundary | None = None

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary."""
        return gather_from_group(logits, self.group)

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss from sharded logits; takes the further arguments of `causal_loss`."""
        return causal_loss(self.group, self.peers_absent, *args, **kwargs)


def parallel_head(model: PreTrainedModel, head: nn.Module, sharding: HeadSharding) -> None:
    """Keep the logits sharded from the head to the loss of a causal language model.

    A script that reads the logits gets them gathered; so does every other loss function. Only a
    tuple with a loss (`return_dict=False`) contains the shard.

    Args:
        model: the model.
        head: its head, whose weight already has this rank's rows only.
        sharding: how it is sharded.

    Raises:
        SliceError: in a forward, if the model computes its loss without its loss function.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        head_linear(head, sharding, gathers=lambda: True)
        return
    running = has_loss = False

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal has_loss
        # The head gathered: this call began before the model was sliced.
        if not running:
            return ForCausalLMLoss(*args, **kwargs)
        has_loss = True
        return sharding.loss(*args, **kwargs)

    def before(*_: Any) -> None:
        nonlocal running, has_loss
        running, has_loss = True, False

    def after(module: PreTrainedModel, _: Any, output: Any) -> None:
        nonlocal running
        if not running:
            return
        running = False
        logits = getattr(output, "logits", None)
        if module.loss_function is not loss_function or not isinstance(logits, Tensor):
            return
        if not has_loss and getattr(output, "loss", None) is not None:
            raise SliceError(
                f"{type(module).__name__} computes its loss from the logits without its "
                "loss_function, but --tp-style megatron keeps the logits sharded\n"
                "  use --tp-style hf",
                code="tp-loss-from-logits",
            )
        if not has_loss or not torch.is_grad_enabled():
            output.logits = sharding.gather(logits)
        else:
            change_when_read(output, sharding.gather)

    model.loss_function = loss_function
    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)
    # A script may call the head outside the model, or set another loss function later.
    head_linear(
        head, sharding, gathers=lambda: not running or model.loss_function is not loss_function
    )


def head_linear(head: nn.Module, sharding: HeadSharding, *, gathers: Callable[[], bool]) -> None:
    """Make a head column-parallel, which returns all logits whenever `gathers` is true."""
    boundary = sharding.boundary
    multiply = nn.functional.linear if boundary is None else boundary.linear

    def finish(logits: Tensor) -> Tensor:
        return sharding.gather(logits) if gathers() else logits

    column_linear(head, sharding.group, copy=boundary is None, linear=multiply, finish=finish)


def refuse_unused_head(model: nn.Module, head: nn.Module, name: str) -> None:
    """Make a training forward that does not call the sliced head raise an error.

    Such a forward multiplies by the head's weight directly. The weight is a shard, so the logits
    are a shard too, and no collective combines them.
    """
    called = False
    weight = head.get_parameter("weight")
    tied_names = [
        tied_name
        for tied_name, module in model.named_modules()
        if any(parameter is weight for parameter in module.parameters(recurse=False))
    ]

    def before(*_: Any) -> None:
        nonlocal called
        called = False

    def record_call(*_: Any) -> None:
        nonlocal called
        called = True

    def after(*_: Any) -> None:
        if called or not torch.is_grad_enabled():
            return
        # A pipeline stage may have replaced it.
        if model.get_submodule(name) is head:
            raise SliceError(
                f"--tp: the forward of {type(model).__name__} did not call {name}; it probably "
                "multiplies by its weight (fused loss of TRL or Liger), which is a shard\n"
                "  call the head, or keep it whole with --sharding-plan FILE, which adds to the "
                "model's plan:\n\n"
                f"{whole_plan(model, tied_names)}",
                code="head-weight-read",
            )

    model.register_forward_pre_hook(before)
    head.register_forward_pre_hook(record_call)
    model.register_forward_hook(after)


def computes_loss_in_forward(model: PreTrainedModel) -> bool:
    """Return whether a model's forward calls cross_entropy instead of its `loss_function`."""
    code: Any = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    names: set[str] = set(code.co_names) if code else set()
    return "loss_function" not in names and bool(names & {"CrossEntropyLoss", "cross_entropy"})


def cross_entropy_head(model: nn.Module, head: nn.Module, sharding: HeadSharding) -> None:
    """Keep the logits sharded up to torch.nn.functional.cross_entropy in the model's forward.

    A forward without such a loss returns gathered logits. A forward with one returns the shard; a
    transformers output gathers it when read. A head called outside the forward gathers.

    Args:
        model: the model.
        head: its head, whose weight already has this rank's rows only.
        sharding: how it is sharded.
    """
    _call_by_attribute(type(model).forward)
    width = head.get_parameter("weight").shape[0]
    running: Any = None
    has_loss = False
    sharded: list[Tensor] = []
    loss_classes = _loss_class_attributes(model)
    patches = _AttributePatches()

    def cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        nonlocal has_loss
        if not sharded or input.shape[-1] != width:
            return _TORCH_CROSS_ENTROPY(input, target, *args, **kwargs)
        has_loss = True
        options = dict(zip(_CROSS_ENTROPY_ARGUMENTS, args, strict=False)) | kwargs
        ignored = _ignored_label(type(model).__name__, input, target, options)
        return sharding.loss(input, target, width, ignore_index=ignored, shift_labels=target)

    def before(module: nn.Module, _: Any) -> None:
        nonlocal running, has_loss
        running, has_loss = module, False
        # torch.compile reads `nn.functional.cross_entropy` at the call, so it traces this patch.
        # It replaces the class CrossEntropyLoss, recognized by identity
        # (`UserDefinedClassVariable`), by torch's function, so the class needs a patch as well.
        patches.set(nn.functional, "cross_entropy", cross_entropy)
        if torch.compiler.is_compiling():
            for owner, name in loss_classes:
                patches.set(owner, name, _cross_entropy_loss)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        nonlocal running
        patches.undo()
        running = None
        logits = list(sharded)
        sharded.clear()
        return _output_for_script(output, logits, sharding.gather, width, has_loss=has_loss)

    def record_logits(_: nn.Module, __: Any, output: Tensor) -> None:
        if running is not None:
            # once per forward: a model may call its head several times
            if not sharded:
                _set_shard_vocabulary(running, sharding.group, width, patches)
            sharded.append(output)

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)
    head.register_forward_hook(record_logits)
    head_linear(head, sharding, gathers=lambda: running is None)


def _ignored_label(model: str, logits: Tensor, target: Tensor, options: dict[str, Any]) -> int:
    """Return the label that a call of cross_entropy over sharded logits leaves out.

    Raises:
        SliceError: the call is not a mean over tokens.
    """
    ignored: int = options.pop("ignore_index", IGNORED_LABEL)
    unsupported = [
        name for name, value in options.items() if value != _CROSS_ENTROPY_DEFAULTS[name]
    ]
    if unsupported or logits.dim() != 2 or target.dim() != 1:
        _refuse_cross_entropy(model, unsupported, logits, target)
    return ignored


# Dynamo of torch 2.11 traces no exception with keyword arguments, so this runs outside its graphs.
@untraced
def _refuse_cross_entropy(
    model: str, unsupported: list[str], logits: Tensor, target: Tensor
) -> NoReturn:
    """Refuse a loss over sharded logits that is not a mean over tokens.

    Raises:
        SliceError: always.
    """
    raise SliceError(
        f"{model} calls cross_entropy with {', '.join(unsupported) or 'classes'} on input "
        f"{tuple(logits.shape)} and target {tuple(target.shape)}; sharded logits support only the "
        "mean loss of input [tokens, vocabulary] and target [tokens]\n"
        '  give the head style = "colwise_gather_output" in a plan file (--sharding-plan)',
        code="tp-cross-entropy-arguments",
    )


class _AttributePatches:
    """Temporary attribute values, set and undone in a way that torch.compile can trace."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute's value until `undo`."""
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all original values, the last replaced first."""
        for owner, name, value in reversed(self._originals):
            setattr(owner, name, value)
        self._originals.clear()


def _call_by_attribute(forward: Any) -> None:
    """Redirect `cross_entropy` imported by name to `nn.functional`, where a patch takes effect."""
    names: dict[str, Any] = inspect.unwrap(forward).__globals__
    names |= {key: _cross_entropy for key, value in names.items() if value is _TORCH_CROSS_ENTROPY}


def _loss_class_attributes(model: nn.Module) -> list[tuple[Any, str]]:
    """Return the modules and names from which a model's forward may read CrossEntropyLoss."""
    module: Any = sys.modules.get(inspect.unwrap(type(model).forward).__module__)
    names = [name for name, value in vars(module).items() if value is nn.CrossEntropyLoss]
    return [(nn, "CrossEntropyLoss"), *((module, name) for name in names)]


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    return nn.functional.cross_entropy(*args, **kwargs)


def _cross_entropy_loss(*args: Any, **kwargs: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Replace the class CrossEntropyLoss, whose calls torch.compile rewrites by identity."""
    return lambda input, target: nn.functional.cross_entropy(input, target, *args, **kwargs)  # noqa: A006


def _set_shard_vocabulary(
    model: Any, group: dist.ProcessGroup, width: int, patches: _AttributePatches
) -> None:
    """Reduce a model's vocabulary-sized buffers and configured vocabulary size to the shard's."""
    vocabulary = width * group.size()
    # BART adds a buffer to all logits as their bias.
    for name, buffer in list(model.named_buffers(recurse=False)):
        if buffer.dim() > 0 and buffer.shape[-1] == vocabulary:
            patches.set(model, name, buffer.narrow(-1, group.rank() * width, width))
    # Whisper reshapes logits by the configured vocabulary size.
    config: Any = getattr(model, "config", None)
    for key in _VOCABULARY_KEYS:
        if getattr(config, key, None) == vocabulary:
            patches.set(config, key, width)


_TORCH_CROSS_ENTROPY = nn.functional.cross_entropy

_VOCABULARY_KEYS = ("vocab_size", "decoder_vocab_size")

_CROSS_ENTROPY_ARGUMENTS = (
    *("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
)

_CROSS_ENTROPY_DEFAULTS: dict[str, object] = {
    "weight": None,
    "size_average": None,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


def _output_for_script(
    output: Any,
    logits: list[Tensor],
    gather: Callable[[Tensor], Tensor],
    width: int,
    *,
    has_loss: bool,
) -> Any:
    """Return a forward's output; its logits stay shards of `width` if only the loss reads them."""
    if isinstance(output, ModelOutput) and logits:
        if has_loss and torch.is_grad_enabled():
            change_when_read(output, gather)
        elif output["logits"].shape[-1] == width:  # the model may bias or scale them
            output["logits"] = gather(output["logits"])
        return output
    return output if has_loss or not logits else _gather_logits(output, logits, gather)


def _gather_logits(output: Any, logits: list[Tensor], gather: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with the head's logits gathered wherever they occur in it."""
    if isinstance(output, Tensor):
        return gather(output) if any(output is logit for logit in logits) else output
    if isinstance(output, dict):
        gathered = {key: _gather_logits(value, logits, gather) for key, value in output.items()}
        return type(output)(**gathered)
    if isinstance(output, tuple | list):
        parts = [_gather_logits(value, logits, gather) for value in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output
