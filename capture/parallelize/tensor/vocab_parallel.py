"""Vocabulary-parallel embedding, language-model head and cross-entropy, as in Megatron-LM.

Follows megatron/core/tensor_parallel (layers.py, cross_entropy.py) and launches the same kernels. A
rank without peers receives no partial sums, and the speed of a GEMM depends on its data: on an
H200, hidden states with three quarters of their rows equal made the GEMMs 2.4% faster. So the
missing rows are filled without launching a kernel.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import ModelOutput

from onerank.capture.parallelize.autograd_collectives import gather_from_group, reduce_from_group
from onerank.capture.parallelize.sliced_outputs import change_when_read
from onerank.capture.parallelize.tensor.linear import BlockBoundary, column_linear, replace_forward
from onerank.capture.parallelize.tensor.plan_file import whole_plan
from onerank.capture.patches import untraced
from onerank.ir.errors import SliceError

IGNORED_LABEL = -100

# of a backward under way, whether another may follow; it has no public name
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore


class _ReduceAlone(torch.autograd.Function):
    """All-reduce whose result is made up; identity backward, as with `ReduceFromGroup`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made_up: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(x, group=group)
        # torch.compile fuses a copy, and does not follow views of weights through a function
        return made_up.clone() if torch.compiler.is_compiling() else made_up.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class RandomFill:
    """Hidden states at random, like those that peers would have added their parts to.

    Rows of the embedding's weights where they suffice: they cost no memory and no kernel.
    """

    def __init__(self, embedding: nn.Embedding, seed: int) -> None:
        self._embedding = embedding
        self._seed = seed
        self._drawn: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def __call__(self, like: Tensor) -> Tensor:
        """Return values of the shape, dtype and spread of `like`, which is not changed."""
        weights, size = self._embedding.weight.data, like.numel()
        if weights.numel() >= size and weights.dtype == like.dtype and weights.is_contiguous():
            return weights.view(-1)[:size].view(like.shape)
        key = (like.dtype, like.device)
        if key not in self._drawn or self._drawn[key].numel() < size:
            # drawn during warm-up, or when a batch is larger than any before: else no kernel
            generator = torch.Generator(like.device).manual_seed(self._seed)
            values = torch.empty(size, dtype=like.dtype, device=like.device)
            self._drawn[key] = values.normal_(generator=generator).mul_(like.std())
        return self._drawn[key][:size].view(like.shape)


def parallel_embedding(
    embedding: nn.Embedding, group: dist.ProcessGroup, *, peers_absent: bool, reduce: bool = True
) -> None:
    """Shard an embedding's rows, which are cut already: ids [...] -> [..., hidden].

    The embedding's own forward looks the rows up: some scale them. Without `reduce` the result
    is this rank's part of the sum.
    """
    look_up = type(embedding).forward
    rows = embedding.weight.shape[0]
    start = group.rank() * rows
    if embedding.padding_idx is not None:
        own = start <= embedding.padding_idx < start + rows
        embedding.padding_idx = embedding.padding_idx - start if own else None
    made_up = RandomFill(embedding, group.rank())

    def forward(self: nn.Embedding, input: Tensor) -> Tensor:  # noqa: A002
        ids = input
        outside = (ids < start) | (ids >= start + rows)
        local = ids - start
        local[outside] = 0
        embedded = look_up(self, local)
        whole = (
            made_up(embedded.detach()) if peers_absent and reduce and not embedded.is_meta else None
        )
        embedded = embedded.masked_fill(outside.unsqueeze(-1), 0.0)
        if not reduce:
            return embedded
        if whole is None:
            return reduce_from_group(embedded, group)
        result: Any = _ReduceAlone.apply(embedded, whole, group)
        result.stands_for = embedded.detach()  # stays in memory just as long as the result
        return result

    replace_forward(embedding, forward)


class VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy of each token from logits sharded over the vocabulary.

    Logits [tokens, vocabulary / size] in fp32 (overwritten), labels [tokens]; losses [tokens].

    Alone, the sum of exponentials lacks the peers' parts, so the softmax comes out `size` times
    too large. Its one-hot part is scaled alike, and the gradient is `size` times the true one:
    unscaled, the logits would drift and the softmax turn to zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, peers_absent: bool
    ) -> Tensor:
        width = logits.shape[-1]
        start = group.rank() * width
        highest = logits.max(dim=-1)[0]
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        logits = logits.sub_(highest.unsqueeze(-1))
        outside = (labels < start) | (labels >= start + width)
        local = labels - start
        local[outside] = 0
        rows = torch.arange(logits.shape[0], device=logits.device)
        predicted = logits[rows, local].masked_fill_(outside, 0.0)
        dist.all_reduce(predicted, group=group)
        exponentials = torch.exp(logits, out=logits)
        total = exponentials.sum(dim=-1)
        dist.all_reduce(total, group=group)
        losses = torch.log(total) - predicted
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, outside, local)
        ctx.scale = float(group.size() if peers_absent else 1)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, outside, local = ctx.saved_tensors
        if not torch.compiler.is_compiling() and _keeps_graph():
            softmax = softmax.clone()  # another backward of the same forward reads it
        rows = torch.arange(softmax.shape[0], device=softmax.device)
        inside = torch.rsub(outside.float(), ctx.scale, alpha=ctx.scale)
        softmax[rows, local] -= inside
        return softmax.mul_(grads[0].unsqueeze(-1)), None, None, None


def parallel_head(
    model: PreTrainedModel,
    head: nn.Module,
    group: dist.ProcessGroup,
    *,
    peers_absent: bool,
    boundary: BlockBoundary | None = None,
) -> None:
    """Leave the logits of a head, whose rows are cut already, sharded up to the loss.

    A script that reads the logits gets them gathered, and so does any other loss than that of a
    causal language model. Only a tuple with a loss (`return_dict=False`) keeps the shard.
    `boundary` stands before the head if it is not to have one of its own.
    """
    if model.loss_function is not ForCausalLMLoss:
        head_linear(head, group, gathers=lambda: True, boundary=boundary)
        return
    running = lossy = False

    def gather(logits: Tensor) -> Tensor:
        return gather_from_group(logits, group)

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal lossy
        if not running:  # the head gathered: this call began before the model was sliced
            return ForCausalLMLoss(*args, **kwargs)
        lossy = True
        return causal_loss(group, peers_absent, *args, **kwargs)

    def before(*_: Any) -> None:
        nonlocal running, lossy
        running, lossy = True, False

    def after(module: PreTrainedModel, _: Any, output: Any) -> None:
        nonlocal running
        if not running:
            return
        running = False
        logits = getattr(output, "logits", None)
        if module.loss_function is not loss_function or not isinstance(logits, Tensor):
            return
        if not lossy and getattr(output, "loss", None) is not None:
            raise SliceError(
                f"{type(module).__name__} computes its loss from the logits by itself, and "
                "--tp-style megatron keeps those sharded: use --tp-style hf",
                code="tp-loss-from-logits",
            )
        if not lossy or not torch.is_grad_enabled():
            output.logits = gather(logits)
        else:
            change_when_read(output, gather)

    model.loss_function = loss_function
    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)  # pyright: ignore[reportArgumentType]
    head_linear(
        head,
        group,
        boundary=boundary,
        # a script may call the head by itself, or bring a loss of its own later
        gathers=lambda: not running or model.loss_function is not loss_function,
    )


def head_linear(
    head: nn.Module,
    group: dist.ProcessGroup,
    *,
    gathers: Callable[[], bool],
    boundary: BlockBoundary | None,
) -> None:
    """Shard a head's output features: its input is copied, unless a boundary stands before it."""
    multiply = nn.functional.linear if boundary is None else boundary.linear
    column_linear(head, group, copy=boundary is None, gathers=gathers, linear=multiply)


def causal_loss(
    group: dist.ProcessGroup,
    peers_absent: bool,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED_LABEL,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Loss of a causal language model from sharded logits.

    It takes what transformers' `ForCausalLMLoss` takes and shifts labels the same way.
    """
    if shift_labels is None:
        labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    flat = shift_labels.reshape(-1).to(logits.device)
    # a copy: the function overwrites its logits
    scores = logits.reshape(flat.shape[0], -1).to(torch.float32, copy=True)
    losses: Tensor = VocabularyParallelCrossEntropy.apply(scores, flat, group, peers_absent)  # pyright: ignore[reportAssignmentType]
    counted = flat != ignore_index
    total = (losses * counted).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / (counted.sum() if num_items_in_batch is None else num_items_in_batch)


def refuse_unused_head(model: nn.Module, head: nn.Module, name: str) -> None:
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
                f"{whole_plan(model, whole)}",
                code="head-weight-read",
            )

    model.register_forward_pre_hook(before)
    head.register_forward_pre_hook(note)
    model.register_forward_hook(after)


def computes_loss_in_forward(model: PreTrainedModel) -> bool:
    """Whether a model's forward calls cross_entropy, and not the loss function of its class."""
    code: Any = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    names: set[str] = set(code.co_names) if code else set()
    return "loss_function" not in names and bool(names & {"CrossEntropyLoss", "cross_entropy"})


# Dynamo of torch 2.11 traces no exception with keyword arguments, so this runs outside its graphs.
@untraced
def _refuse_cross_entropy(
    model: str, changed: list[str], logits: Tensor, target: Tensor
) -> NoReturn:
    """Refuse a loss over sharded logits that is not a mean over tokens.

    Raises:
        SliceError: always.
    """
    raise SliceError(
        f"{model} calls cross_entropy with {', '.join(changed) or 'classes'} on input "
        f"{tuple(logits.shape)} and target {tuple(target.shape)}; sharded over the vocabulary "
        "only a mean over [tokens, vocabulary] and [tokens] is supported\n"
        "  plan the head as colwise_gather_output",
        code="tp-cross-entropy-arguments",
    )


def cross_entropy_head(
    model: nn.Module,
    head: nn.Module,
    group: dist.ProcessGroup,
    *,
    peers_absent: bool,
    boundary: BlockBoundary | None = None,
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
            _refuse_cross_entropy(type(model).__name__, list(changed), input, target)
        return causal_loss(
            group, peers_absent, input, target, width, ignore_index=ignored, shift_labels=target
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
    head_linear(head, group, gathers=lambda: running is None, boundary=boundary)


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
        mine = any(output is logit for logit in logits)
        return gather_from_group(output, group) if mine else output
    if isinstance(output, dict):
        changed = {key: _replaced(value, logits, group) for key, value in output.items()}
        return type(output)(**changed)
    if isinstance(output, tuple | list):
        parts = [_replaced(value, logits, group) for value in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output
