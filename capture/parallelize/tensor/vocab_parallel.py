"""Vocabulary-parallel embedding, language-model head and cross-entropy, as in Megatron-LM.

The collectives and kernels are those of megatron/core/tensor_parallel (layers.py,
cross_entropy.py). A rank without peers receives no partial sums for the rows of other shards, and
the speed of a GEMM depends on its data: on an H200, hidden states with three quarters of their rows
equal made the GEMMs 2.4% faster. So these rows get substitute values, without a kernel launch.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.autograd_collectives import gather_from_group, reduce_from_group
from onerank.capture.parallelize.hugging_face import ModelOutput, PreTrainedModel
from onerank.capture.parallelize.sliced_outputs import change_when_read
from onerank.capture.parallelize.tensor.linear import BlockBoundary, column_linear, replace_forward
from onerank.capture.parallelize.tensor.plan_file import whole_plan
from onerank.capture.patches import untraced
from onerank.ir.errors import SliceError

IGNORED_LABEL = -100

# Whether the running backward retains its graph, so that a second one may follow. torch offers no
# public name for it.
_retains_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore


class _ReduceWithAbsentPeers(torch.autograd.Function):
    """All-reduce that returns substitute values instead of the sum.

    The backward is the identity, like that of `ReduceFromGroup`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, substitute: Tensor, group: dist.ProcessGroup) -> Tensor:
        dist.all_reduce(x, group=group)
        # torch.compile does not trace views of weights through an autograd function, but it fuses
        # a copy.
        return substitute.clone() if torch.compiler.is_compiling() else substitute.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class RandomFill:
    """Substitute for the hidden states that an all-reduce with present peers would return.

    Args:
        embedding: the embedding whose sum is substituted.
        seed: seed of the random values.
    """

    def __init__(self, embedding: nn.Embedding, seed: int) -> None:
        self._embedding = embedding
        self._seed = seed
        self._random_values: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def __call__(self, like: Tensor) -> Tensor:
        """Return values with the shape and dtype of `like`, which stays unchanged."""
        weights, size = self._embedding.weight.data, like.numel()
        # Rows of the embedding cost no memory and no kernel, so they come first.
        if weights.numel() >= size and weights.dtype == like.dtype and weights.is_contiguous():
            return weights.view(-1)[:size].view(like.shape)
        key = (like.dtype, like.device)
        if key not in self._random_values or self._random_values[key].numel() < size:
            # Only the first call and a batch larger than all before launch kernels, so measured
            # steps after the warm-up have none.
            generator = torch.Generator(like.device).manual_seed(self._seed)
            values = torch.empty(size, dtype=like.dtype, device=like.device)
            self._random_values[key] = values.normal_(generator=generator).mul_(like.std())
        return self._random_values[key][:size].view(like.shape)


def parallel_embedding(
    embedding: nn.Embedding, group: dist.ProcessGroup, *, peers_absent: bool, reduce: bool = True
) -> None:
    """Make an embedding with sliced rows vocabulary-parallel: ids [...] -> [..., hidden].

    Args:
        embedding: the embedding; its weight already has this rank's rows only.
        group: the tensor-parallel group.
        peers_absent: whether the group's other ranks do not run, so that the all-reduce returns
            substitute values.
        reduce: whether the result is summed over the group, else it is this rank's part.
    """
    # The class's forward, since some embeddings scale the rows they look up.
    look_up = type(embedding).forward
    rows = embedding.weight.shape[0]
    start = group.rank() * rows
    if embedding.padding_idx is not None:
        is_local = start <= embedding.padding_idx < start + rows
        embedding.padding_idx = embedding.padding_idx - start if is_local else None
    fill = RandomFill(embedding, group.rank())

    def forward(self: nn.Embedding, input: Tensor) -> Tensor:  # noqa: A002
        ids = input
        outside_shard = (ids < start) | (ids >= start + rows)
        local = ids - start
        # Any valid row will do: the mask below zeroes its result.
        local[outside_shard] = 0
        embedded = look_up(self, local)
        substitute = (
            fill(embedded.detach()) if peers_absent and reduce and not embedded.is_meta else None
        )
        embedded = embedded.masked_fill(outside_shard.unsqueeze(-1), 0.0)
        if not reduce:
            return embedded
        if substitute is None:
            return reduce_from_group(embedded, group)
        result: Any = _ReduceWithAbsentPeers.apply(embedded, substitute, group)
        # The substitute is a view of weights. The real result would occupy memory too, so
        # the partial sum stays allocated exactly as long as the result.
        result.partial_sum = embedded.detach()
        return result

    replace_forward(embedding, forward)


class VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy per token from logits sharded over the vocabulary.

    Takes logits [tokens, vocabulary / size] in fp32, which it overwrites, and labels [tokens].
    Returns losses [tokens]. As in Megatron-LM, three all-reduces of [tokens]: the maxima, the
    labels' logits and the sums of exponentials. The backward needs no collective.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, peers_absent: bool
    ) -> Tensor:
        width = logits.shape[-1]
        start = group.rank() * width
        max_logits = logits.max(dim=-1)[0]
        dist.all_reduce(max_logits, op=dist.ReduceOp.MAX, group=group)
        logits = logits.sub_(max_logits.unsqueeze(-1))
        outside_shard = (labels < start) | (labels >= start + width)
        local = labels - start
        local[outside_shard] = 0
        rows = torch.arange(logits.shape[0], device=logits.device)
        label_logits = logits[rows, local].masked_fill_(outside_shard, 0.0)
        dist.all_reduce(label_logits, group=group)
        # In place, as in Megatron-LM: no second tensor [tokens, vocabulary / size] is allocated.
        exponentials = torch.exp(logits, out=logits)
        total = exponentials.sum(dim=-1)
        dist.all_reduce(total, group=group)
        losses = torch.log(total) - label_logits
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, outside_shard, local)
        # Without peers the sum of exponentials lacks their parts, so the softmax is about `size`
        # times too large. Scaling the one-hot part by `size` too makes the gradient `size` times
        # the true one; unscaled, the logits would drift until the softmax is all zeros.
        ctx.scale = float(group.size() if peers_absent else 1)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, outside_shard, local = ctx.saved_tensors
        if not torch.compiler.is_compiling() and _retains_graph():
            # Another backward of the same forward reads it.
            softmax = softmax.clone()
        rows = torch.arange(softmax.shape[0], device=softmax.device)
        scaled_one_hot = torch.rsub(outside_shard.float(), ctx.scale, alpha=ctx.scale)
        softmax[rows, local] -= scaled_one_hot
        return softmax.mul_(grads[0].unsqueeze(-1)), None, None, None


def parallel_head(
    model: PreTrainedModel,
    head: nn.Module,
    group: dist.ProcessGroup,
    *,
    peers_absent: bool,
    boundary: BlockBoundary | None = None,
) -> None:
    """Keep the logits sharded from the head to the loss of a causal language model.

    A script that reads the logits gets them gathered; so does every other loss function. Only a
    tuple with a loss (`return_dict=False`) contains the shard.

    Args:
        model: the model.
        head: its head, whose weight already has this rank's rows only.
        group: the tensor-parallel group.
        peers_absent: whether the group's other ranks do not run.
        boundary: the block boundary that precedes the head; None if the head copies its input.

    Raises:
        SliceError: in a forward, if the model computes its loss without its loss function.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        head_linear(head, group, gathers=lambda: True, boundary=boundary)
        return
    running = has_loss = False

    def gather(logits: Tensor) -> Tensor:
        return gather_from_group(logits, group)

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal has_loss
        # The head gathered: this call began before the model was sliced.
        if not running:
            return ForCausalLMLoss(*args, **kwargs)
        has_loss = True
        return causal_loss(group, peers_absent, *args, **kwargs)

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
        # A script may call the head outside the model, or set another loss function later.
        gathers=lambda: not running or model.loss_function is not loss_function,
    )


def head_linear(
    head: nn.Module,
    group: dist.ProcessGroup,
    *,
    gathers: Callable[[], bool],
    boundary: BlockBoundary | None,
) -> None:
    """Make a head column-parallel; without a boundary before it, the head copies its input."""
    multiply = nn.functional.linear if boundary is None else boundary.linear

    def finish(logits: Tensor) -> Tensor:
        return gather_from_group(logits, group) if gathers() else logits

    column_linear(head, group, copy=boundary is None, linear=multiply, finish=finish)


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
    """Return the loss of a causal language model from sharded logits.

    Takes the arguments of transformers' `ForCausalLMLoss` and shifts labels the same way.
    """
    if shift_labels is None:
        labels = nn.functional.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    flat = shift_labels.reshape(-1).to(logits.device)
    # A copy also of logits that are in fp32 already, because the function overwrites its input.
    scores = logits.reshape(flat.shape[0], -1).to(torch.float32, copy=True)
    losses: Tensor = VocabularyParallelCrossEntropy.apply(scores, flat, group, peers_absent)  # pyright: ignore[reportAssignmentType]
    has_label = flat != ignore_index
    total = (losses * has_label).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / (has_label.sum() if num_items_in_batch is None else num_items_in_batch)


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
    """Whether a model's forward calls cross_entropy instead of its `loss_function`."""
    code: Any = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    names: set[str] = set(code.co_names) if code else set()
    return "loss_function" not in names and bool(names & {"CrossEntropyLoss", "cross_entropy"})


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


def cross_entropy_head(
    model: nn.Module,
    head: nn.Module,
    group: dist.ProcessGroup,
    *,
    peers_absent: bool,
    boundary: BlockBoundary | None = None,
) -> None:
    """Keep the logits sharded up to torch.nn.functional.cross_entropy in the model's forward.

    A forward without such a loss returns gathered logits. A forward with one returns the shard; a
    transformers output gathers it when read. A head called outside the forward gathers.

    Args:
        model: the model.
        head: its head, whose weight already has this rank's rows only.
        group: the tensor-parallel group.
        peers_absent: whether the group's other ranks do not run.
        boundary: the block boundary that precedes the head; None if the head copies its input.
    """
    _call_by_attribute(type(model).forward)
    width = head.get_parameter("weight").shape[0]
    running: Any = None
    has_loss = False
    sharded: list[Tensor] = []
    loss_classes = _loss_class_attributes(model)
    patches = _AttributePatches()

    def gather(logits: Tensor) -> Tensor:
        return gather_from_group(logits, group)

    def cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        nonlocal has_loss
        if not sharded or input.shape[-1] != width:
            return _TORCH_CROSS_ENTROPY(input, target, *args, **kwargs)
        has_loss = True
        options = dict(zip(_CROSS_ENTROPY_ARGUMENTS, args, strict=False)) | kwargs
        ignored = options.pop("ignore_index", IGNORED_LABEL)
        unsupported = {
            key: value for key, value in options.items() if value != _CROSS_ENTROPY_DEFAULTS[key]
        }
        if unsupported or input.dim() != 2 or target.dim() != 1:
            _refuse_cross_entropy(type(model).__name__, list(unsupported), input, target)
        return causal_loss(
            group, peers_absent, input, target, width, ignore_index=ignored, shift_labels=target
        )

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
        if isinstance(output, ModelOutput) and logits:
            if has_loss and torch.is_grad_enabled():
                change_when_read(output, gather)
            elif output["logits"].shape[-1] == width:  # the model may bias or scale them
                output["logits"] = gather(output["logits"])
            return output
        return output if has_loss or not logits else _gather_logits(output, logits, group)

    def record_logits(_: nn.Module, __: Any, output: Tensor) -> None:
        if running is not None:
            # once per forward: a model may call its head several times
            if not sharded:
                _set_shard_vocabulary(running, group, width, patches)
            sharded.append(output)

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)
    head.register_forward_hook(record_logits)
    head_linear(head, group, gathers=lambda: running is None, boundary=boundary)


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


def _gather_logits(output: Any, logits: list[Tensor], group: dist.ProcessGroup) -> Any:
    """Return an output with the head's logits gathered wherever they occur in it."""
    if isinstance(output, Tensor):
        is_shard = any(output is logit for logit in logits)
        return gather_from_group(output, group) if is_shard else output
    if isinstance(output, dict):
        gathered = {key: _gather_logits(value, logits, group) for key, value in output.items()}
        return type(output)(**gathered)
    if isinstance(output, tuple | list):
        parts = [_gather_logits(value, logits, group) for value in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    return output
