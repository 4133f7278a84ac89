"""Reduce a Hugging Face model to one pipeline stage, with sends and receives at its boundaries.

A stage is a range of the model's layers; the first also holds the embedding, the last also the
final norm, the head and the loss. The script's loop drives the stage. `model(**batch)` receives the
hidden states [batch, sequence, hidden], runs the layers and sends their output. `loss.backward()`
receives the output's gradient, runs the backward and sends the gradient of the received hidden
states. Each call is one micro-batch. A stage other than the last returns a scalar loss of 0.

The first and the last stage hold a tied embedding. They all-reduce its gradients before the
optimizer steps, as in Megatron-LM's embedding group
(megatron/core/distributed/finalize_model_grads.py).
"""

import copy
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onerank.capture.parallelize.experts.aux_loss import adds_balancing_loss
from onerank.capture.parallelize.hugging_face import PreTrainedModel
from onerank.capture.parallelize.model_structure import (
    ModelParts,
    by_name,
    model_parts_of,
    refuse_early_norm,
    split_layers,
    stage_keys,
)
from onerank.capture.parallelize.pipeline.stage_boundary import (
    EmptyEmbedding,
    PassthroughTensor,
    ReceivingEmbedding,
    SendingHead,
    SkippedNorm,
    StageBoundary,
)
from onerank.capture.parallelize.sliced_outputs import unusable, without_logits
from onerank.ir import Pipeline
from onerank.ir.errors import SliceError

TIED = "_onerank_tied_over"
"""Attribute of a tied parameter: the process group that sums its gradients."""


class TiedEmbedding:
    """An embedding whose gradients two stages sum before clipping or the optimizer step.

    Args:
        holder: the module with the weight on this stage.
        group: the ranks of the first and the last stage.
    """

    def __init__(self, holder: Any, group: dist.ProcessGroup) -> None:
        self._holder = holder
        self._group = group
        self._summed = False
        self._mark()
        holder.register_forward_pre_hook(self._mark)
        register_optimizer_step_pre_hook(self._before_step)

    def __deepcopy__(self, _: Any) -> "TiedEmbedding":
        # Hooks of a deep-copied model keep sharing one object, as functions do.
        return self

    @property
    def is_copy(self) -> bool:
        """Whether an earlier rank of the group holds the weight too."""
        return self._group.rank() > 0

    @property
    def weight(self) -> Tensor:
        """The current weight; moving a model off the meta device creates a new parameter."""
        return self._holder.weight

    def sum(self) -> None:
        """Sum the gradients over the group, at most once per training forward."""
        gradient: Any = self.weight.grad
        if not self._summed and gradient is not None:
            shard = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            dist.all_reduce(shard, group=self._group)
            self._summed = True

    def _mark(self, *_: Any) -> None:
        """Mark the weight with its group, for sharded optimizers that take gradients away."""
        # Before each forward: moving a model off the meta device creates new parameters. A training
        # forward adds unsummed gradients, also after a step that a GradScaler skipped.
        setattr(self.weight, TIED, self._group)
        if torch.is_grad_enabled():
            self._summed = False

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        # A script may have an optimizer per part of the model.
        if any(self.weight is p for group in optimizer.param_groups for p in group["params"]):
            self.sum()
            self._summed = False


EMBEDDING_GROUP = "embedding"

NewGroup = Callable[[str, Sequence[int]], dist.ProcessGroup]


@dataclass(frozen=True)
class PipelineStage:
    """One pipeline stage of a model, with its parameter counts before and after slicing.

    Attributes:
        pipeline: the index of the stage, and the layers of every stage.
        work_keys: a key per stage, equal for stages that do the same work.
        list: qualified name of the list of layers.
        elements_before: parameter elements of the model.
        elements_after: parameter elements of the stage.
        tied: weights that this stage shares with others: embeddings, relative position biases.
    """

    pipeline: Pipeline
    work_keys: tuple[Hashable, ...]
    list: str
    elements_before: int
    elements_after: int
    tied: tuple[TiedEmbedding, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tied": ()}  # process groups cannot be pickled

    def of(self, name: str) -> int:
        """Return the stage that contains the module `name` of one of the layers."""
        layer = int(name.removeprefix(f"{self.list}.").split(".")[0])
        ends = itertools.accumulate(self.pipeline.layers)
        return next(stage for stage, end in enumerate(ends) if layer < end)


def stage_model(
    model: nn.Module,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    new_group: NewGroup,
    requested: Sequence[int] = (),
    *,
    shards: int = 1,
    depth: int | None = None,
) -> PipelineStage:
    """Reduce a model to this rank's pipeline stage and insert sends and receives.

    Args:
        model: a causal language model with all its layers, on any device; layers may be sliced.
        group: the pipeline group; this rank's index in it is the stage.
        ranks: global ranks of the group, in the order of the stages.
        new_group: creates the group of first and last stage, for tied embeddings.
        requested: layers of each stage; () splits evenly.
        shards: shards of the sequence between blocks (sequence parallelism); stages exchange one
            shard.
        depth: layers of the stage to keep, from its first; None keeps all.

    Raises:
        SliceError: the model is not one list of layers between an embedding and a head.
    """
    if not isinstance(model, PreTrainedModel):
        raise SliceError(
            f"--pp supports Hugging Face models (transformers.PreTrainedModel); "
            f"{type(model).__name__} is not one: leave --pp out",
            code="pp-not-transformers",
        )
    stage, stages = group.rank(), group.size()
    model.register_forward_pre_hook(_refuse_balancing, with_kwargs=True)
    parts = model_parts_of(model)
    counts = split_layers(len(parts.layers), stages, requested)
    first = sum(counts[:stage])
    kept = slice(first, first + (depth or counts[stage]))
    before = sum(p.numel() for p in model.parameters())
    work_keys = stage_keys(parts, counts)
    list_name = next(name for name, module in model.named_modules() if module is parts.layers)
    # Of the whole model, for stages that keep no floating-point parameter.
    dtype = next(parts.layers.parameters()).dtype
    current_dtype = functools.partial(dtype_of, parts.layers, dtype)
    boundary = StageBoundary(group, parts.hidden, current_dtype, shards)
    dropped = [*parts.layers[: kept.start], *parts.layers[kept.stop :]]
    _keep_layers(model, parts, kept)
    if stage > 0:
        dropped += _replace_embeddings(model, parts, boundary)
    if stage < stages - 1:
        dropped += _replace_head(model, parts, boundary)
    norms = [getattr(parts.trunk, name) for name in parts.norms]
    refuse_early_norm(model, parts.layers, norms, "--pp")
    holders: dict[str, dict[int, Any]] = {}
    if parts.tied:
        holders[EMBEDDING_GROUP] = {0: model.get_input_embeddings(), stages - 1: parts.head}
    tied = share_weights(holders, stage, ranks, new_group)
    free_parameters(dropped, model)
    after = sum(p.numel() for p in model.parameters())
    return PipelineStage(Pipeline(stage, counts), work_keys, list_name, before, after, tied)


def share_weights(
    holders: Mapping[str, Mapping[int, Any]],
    stage: int,
    ranks: Sequence[int],
    new_group: NewGroup,
) -> tuple[TiedEmbedding, ...]:
    """Create a group for each shared weight; return the weights of this stage.

    Args:
        holders: name of the group -> stage -> the module that has the weight there.
        stage: this rank's stage.
        ranks: as for `stage_model`.
        new_group: as for `stage_model`.
    """
    tied: list[TiedEmbedding] = []
    for name, by_stage in holders.items():
        members = [ranks[at] for at in by_stage] if stage in by_stage else [ranks[stage]]
        # Every stage creates a group, because torch numbers groups per process.
        group = new_group(name, members)
        if stage in by_stage:
            tied.append(TiedEmbedding(by_stage[stage], group))
    return tuple(tied)


def _note_inference(
    boundary: StageBoundary, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    labels = by_name(module, args, kwargs).get("labels")
    boundary.infers = not torch.is_grad_enabled() and labels is None


def _refuse_balancing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if adds_balancing_loss(module, by_name(module, args, kwargs)):
        raise SliceError(
            f"--pp: {type(module).__name__} adds a load-balancing loss over the routers of all "
            "layers, which a stage cannot compute\n  configure output_router_logits=False, or "
            "leave --pp out",
            code="pp-balancing-loss",
        )


def _keep_layers(model: PreTrainedModel, parts: ModelParts, kept: slice) -> None:
    """Drop other stages' layers; the others keep their names in the whole model."""
    layers = list(parts.layers.named_children())
    for name, _ in [*layers[: kept.start], *layers[kept.stop :]]:
        delattr(parts.layers, name)
    # Key-value caches have a layer for each index, and show their length by the first.
    for module in parts.layers.modules():
        if isinstance(layer_index := getattr(module, "layer_idx", None), int):
            module.layer_idx = layer_index - kept.start
    if parts.types is not None:
        # Forwards index layer_types by the position in the list of layers, which now starts with
        # this stage's first layer. Rotating keeps the length at num_hidden_layers.
        trunk, shared = parts.trunk, parts.trunk.config
        # Other modules share the configuration.
        trunk.config = copy.copy(shared)
        rotated = parts.types[kept.start :] + parts.types[: kept.start]
        try:
            trunk.config.layer_types = rotated
        except AttributeError as error:  # layer_types is a property
            raise SliceError(
                f"--pp: {type(trunk.config).__name__} computes layer_types in a property, which a "
                "stage cannot adapt to its layer indices: leave --pp out",
                code="pp-layer-types",
            ) from error
        if model.config is shared:
            model.config = trunk.config  # a generation makes its KV cache of this one


def _replace_embeddings(
    model: PreTrainedModel, parts: ModelParts, boundary: StageBoundary
) -> list[nn.Module]:
    tokens = model.get_input_embeddings()
    for name, embedding in parts.embeddings.items():
        replacement = (
            ReceivingEmbedding(boundary, parts.layers) if embedding is tokens else EmptyEmbedding()
        )
        setattr(parts.trunk, name, replacement)
    feed_received_states(boundary, next(iter(parts.layers)))
    return [*parts.embeddings.values()]


def feed_received_states(boundary: StageBoundary, first: nn.Module) -> None:
    """Feed the received hidden states to the first layer of a stage."""
    register_before_fsdp(first, functools.partial(_unwrap_received, boundary))


def _unwrap_received(
    boundary: StageBoundary, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Unwrap placeholders; check that the first layer gets the received tensor unchanged."""
    args = tuple(PassthroughTensor.plain(value) for value in args)
    kwargs = {name: PassthroughTensor.plain(value) for name, value in kwargs.items()}
    inputs = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    if not any(x.data_ptr() == boundary.received_address for x in inputs):
        raise SliceError(
            f"{type(layer).__name__}, the stage's first layer, does not get the received "
            "tensor: the model changes hidden states between embedding and layers, and the change "
            "cannot be left to the first stage\n  leave --pp out",
            code="pp-work-before-layer",
        )
    return args, kwargs


def _replace_head(
    model: PreTrainedModel, parts: ModelParts, boundary: StageBoundary
) -> list[nn.Module]:
    for name in parts.norms:
        setattr(parts.trunk, name, SkippedNorm(boundary))
    last_layer = [*parts.layers][-1]
    last_layer.register_forward_hook(boundary.record_output)
    name = next(name for name, module in model.named_modules() if module is parts.head)
    parent, _, leaf = name.rpartition(".")
    vocabulary: Any = parts.head.weight
    setattr(model.get_submodule(parent), leaf, SendingHead(boundary, vocabulary.shape[0]))
    model.register_forward_pre_hook(functools.partial(_note_inference, boundary), with_kwargs=True)

    # SendingHead returns the zero loss in place of logits.
    def loss_function(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        return PassthroughTensor.plain(logits)

    model.loss_function = loss_function
    refuse_absent_outputs(model, boundary)
    return [*parts.norms.values(), parts.head]


def refuse_absent_outputs(
    model: nn.Module, boundary: StageBoundary, names: Sequence[str] = ()
) -> None:
    """Make logits, and the outputs named in `names`, raise an error when used on this stage."""
    stage, last = boundary.stage, boundary.group.size() - 1

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, tuple):
            return
        if boundary.infers:
            output.logits = PassthroughTensor.plain(output.logits)
            return
        output.__class__ = without_logits(type(output), _absent_output("logits", stage, last))
        for name in names:
            setattr(output, name, unusable(_absent_output(name, stage, last)))

    model.register_forward_hook(after)


def _absent_output(what: str, stage: int, last: int) -> str:
    return (
        f"the script reads {what}, which stage {last} computes, on stage {stage}\n"
        "  let the model compute its loss (pass labels) and use output.loss"
    )


def free_parameters(dropped: list[nn.Module], model: PreTrainedModel) -> None:
    """Free the memory of dropped modules' parameters.

    An optimizer that the script created before slicing may still list them: they become empty and
    require no gradient.
    """
    kept = {id(parameter) for parameter in model.parameters()}
    for module in dropped:
        for parameter in module.parameters():
            if id(parameter) not in kept:
                parameter.data = parameter.data.new_empty(0)
                parameter.requires_grad = False


def dtype_of(layers: nn.ModuleList, default: torch.dtype) -> torch.dtype:
    """Return the current dtype of the layers' parameters; a script may cast them later."""
    return next((p.dtype for p in layers.parameters() if p.is_floating_point()), default)


_BEFORE_FSDP = "_onerank_before_fsdp"


def register_before_fsdp(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward pre-hook with keyword arguments that runs before FSDP2's hook."""
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    setattr(module, _BEFORE_FSDP, [*getattr(module, _BEFORE_FSDP, []), handle.id])


def move_before_fsdp(module: Any) -> None:
    """Move these hooks to the front again, in order, after `fully_shard(module)`."""
    # fully_shard puts its pre-forward hook first and wraps every input tensor in an autograd
    # function. Placeholder inputs that are not tensors must be replaced before that.
    for handle_id in reversed(getattr(module, _BEFORE_FSDP, [])):
        module._forward_pre_hooks.move_to_end(handle_id, last=False)
