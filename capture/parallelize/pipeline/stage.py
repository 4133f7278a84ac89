"""Reduce a Hugging Face model to one pipeline stage, with sends and receives at its boundaries.

A stage is a range of the model's layers; the first also holds the embedding, the last also the
final norm, the head and the loss. The script's loop drives it: `model(**batch)` receives the hidden
states [batch, sequence, hidden], runs the layers and sends the result; `loss.backward()` receives
the gradient of what was sent, runs the layers backward and sends the gradient of what was received.
Each call is one micro-batch. A stage other than the last returns a loss of 0, one element.

A tied embedding lies on the first and the last stage. They sum its gradients before the optimizer
steps, as Megatron-LM's embedding group does (megatron/core/distributed/finalize_model_grads.py).
"""

import copy
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.modeling_utils import PreTrainedModel

from onerank.capture.parallelize.experts.aux_loss import adds_balancing_loss
from onerank.capture.parallelize.fsdp_hook_order import register_ahead
from onerank.capture.parallelize.model_structure import (
    Anatomy,
    anatomy_of,
    by_name,
    refuse_early_norm,
    sorts_of,
)
from onerank.capture.parallelize.pipeline.stage_boundary import (
    NoEmbedding,
    NoNorm,
    Passing,
    ReceivingEmbedding,
    SendingHead,
    StageBorder,
)
from onerank.capture.parallelize.sliced_outputs import unusable, without_logits
from onerank.ir import Pipeline
from onerank.ir.errors import SliceError

TIED = "_onerank_tied_over"
"""The attribute of the parameter that names the group."""


class TiedEmbedding:
    """An embedding whose gradients both stages sum before they are clipped, or stepped by.

    Args:
        holder: the module that has its weight on this stage.
        group: the first and the last stage.
    """

    def __init__(self, holder: Any, group: dist.ProcessGroup) -> None:
        self._holder = holder
        self._group = group
        self._summed = False
        self._mark()
        holder.register_forward_pre_hook(self._mark)
        register_optimizer_step_pre_hook(self._before_step)

    def __deepcopy__(self, _: Any) -> "TiedEmbedding":
        return self  # as functions are, when a model with its hooks is copied

    @property
    def is_copy(self) -> bool:
        """Whether a rank before this one has it too."""
        return self._group.rank() > 0

    @property
    def weight(self) -> Tensor:
        """The weight as it is now: moving a model off the meta device makes new ones."""
        return self._holder.weight

    def sum(self) -> None:
        """Sum the gradients, once after each forward."""
        gradient: Any = self.weight.grad
        if not self._summed and gradient is not None:
            shard = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            dist.all_reduce(shard, group=self._group)
            self._summed = True

    def _mark(self, *_: Any) -> None:
        """Name the group, for an optimizer that takes the gradients away.

        Before each forward, since moving a model off the meta device makes new parameters. What a
        training forward adds to the gradients is not summed yet, also after a step that was
        skipped.
        """
        setattr(self.weight, TIED, self._group)
        if torch.is_grad_enabled():
            self._summed = False

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if any(self.weight is p for one in optimizer.param_groups for p in one["params"]):
            self.sum()
            self._summed = False


EMBEDDING_GROUP = "embedding"

NewGroup = Callable[[str, Sequence[int]], dist.ProcessGroup]


@dataclass(frozen=True)
class Staged:
    """What was kept: the stage, what the stages hold, and elements before and after.

    Attributes:
        pipeline: the stage and how many layers each has.
        alike: per stage, a key that is equal for stages that do the same work.
        list: qualified name of the list of layers.
        elements_before: parameters of the model.
        elements_after: parameters of the stage.
        tied: what this stage and others have both: an embedding; a bias of relative positions.
    """

    pipeline: Pipeline
    alike: tuple[Hashable, ...]
    list: str
    elements_before: int
    elements_after: int
    tied: tuple[TiedEmbedding, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tied": ()}  # of the process in which the model is

    def of(self, name: str) -> int:
        """Return the stage that has the module `name`, which is part of one of the layers."""
        layer = int(name.removeprefix(f"{self.list}.").split(".")[0])
        ends = itertools.accumulate(self.pipeline.layers)
        return next(stage for stage, end in enumerate(ends) if layer < end)


def split_layers(total: int, stages: int, asked: Sequence[int] = ()) -> tuple[int, ...]:
    """Return how many layers each stage has: as `asked`, else even, the first ones one more.

    Raises:
        SliceError: there are fewer layers than stages, or `asked` does not add up.
    """
    if asked:
        if len(asked) != stages or sum(asked) != total or min(asked) < 1:
            terms = " + ".join(map(str, asked))
            raise SliceError(
                f"--pp-layers {','.join(map(str, asked))}: expected {stages} numbers (--pp "
                f"{stages}), each at least 1, that add up to the model's {total} layers; found "
                f"{len(asked)}, {terms} = {sum(asked)}",
                code="pp-layers-malformed",
            )
        return tuple(asked)
    if total < stages:
        raise SliceError(
            f"--pp {stages}: the model has {total} layers, so that {stages - total} stages would "
            f"have none; use at most --pp {total}",
            code="pp-too-many-stages",
        )
    return tuple(total // stages + (stage < total % stages) for stage in range(stages))


def stage_model(
    model: nn.Module,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    new_group: NewGroup,
    asked: Sequence[int] = (),
    *,
    shards: int = 1,
) -> Staged:
    """Keep the layers of this rank's stage, and place the borders.

    Args:
        model: a causal language model with all its layers, on any device; each may be a slice.
        group: the pipeline's group; the stage is this rank's place in it.
        ranks: its global ranks, in the order of the stages.
        new_group: makes the group of the first and the last stage, for tied embeddings.
        asked: layers of each stage; () splits evenly.
        shards: into how many the sequence is cut between the blocks (sequence parallelism); what
            passes between stages is one.

    Raises:
        SliceError: the model is not one list of layers between an embedding and a head.
    """
    if not isinstance(model, PreTrainedModel):
        raise SliceError(
            f"--pp cuts Hugging Face models into stages, and {type(model).__name__} is none "
            "(transformers.PreTrainedModel): leave --pp out",
            code="pp-not-transformers",
        )
    stage, stages = group.rank(), group.size()
    model.register_forward_pre_hook(_refuse_balancing, with_kwargs=True)
    anatomy = anatomy_of(model)
    counts = split_layers(len(anatomy.layers), stages, asked)
    first = sum(counts[:stage])
    own = slice(first, first + counts[stage])
    before = sum(p.numel() for p in model.parameters())
    alike = sorts_of(anatomy, counts)
    listed = next(name for name, module in model.named_modules() if module is anatomy.layers)
    dtype = next(anatomy.layers.parameters()).dtype
    find_dtype = functools.partial(dtype_of, anatomy.layers, dtype)
    border = StageBorder(group, anatomy.hidden, find_dtype, shards)
    dropped = [child for at, child in enumerate(anatomy.layers) if not own.start <= at < own.stop]
    _keep_layers(anatomy, own)
    if stage > 0:
        dropped += _without_embedding(model, anatomy, border)
    if stage < stages - 1:
        dropped += _without_head(model, anatomy, border)
    tied: tuple[TiedEmbedding, ...] = ()
    norms = [getattr(anatomy.trunk, name) for name in anatomy.norms]
    refuse_early_norm(model, anatomy.layers, norms, "--pp")
    if anatomy.tied:
        holders = {0: model.get_input_embeddings(), stages - 1: anatomy.head}
        members = (ranks[0], ranks[-1]) if stage in holders else (ranks[stage],)
        ends = new_group(EMBEDDING_GROUP, members)  # on all stages: peers count their groups
        if stage in holders:
            tied = (TiedEmbedding(holders[stage], ends),)
    release(dropped, model)
    after = sum(p.numel() for p in model.parameters())
    return Staged(Pipeline(stage, counts), alike, listed, before, after, tied)


def _refuse_balancing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if adds_balancing_loss(module, by_name(module, args, kwargs)):
        raise SliceError(
            f"--pp: {type(module).__name__} adds a balancing loss of its routers, which multiplies "
            "what all layers route, those of other stages too: configure "
            "output_router_logits=False, or leave --pp out",
            code="pp-balancing-loss",
        )


def _keep_layers(anatomy: Anatomy, own: slice) -> None:
    """Keep the stage's layers under their names in the whole model."""
    layers = list(anatomy.layers.named_children())
    for name, _ in [*layers[: own.start], *layers[own.stop :]]:
        delattr(anatomy.layers, name)
    if anatomy.types is not None:  # forwards look types up by the place in the list
        trunk = anatomy.trunk
        trunk.config = copy.copy(trunk.config)
        turned = anatomy.types[own.start :] + anatomy.types[: own.start]
        try:
            trunk.config.layer_types = turned
        except AttributeError as error:  # a property
            raise SliceError(
                f"--pp: {type(trunk.config).__name__} computes the types of its layers by itself, "
                "and forwards look them up by the place in the model, which a stage does not "
                "keep: leave --pp out",
                code="pp-layer-types",
            ) from error
        for module in anatomy.layers.modules():  # caches of keys and values go by the same places
            if isinstance(place := getattr(module, "layer_idx", None), int):
                module.layer_idx = place - own.start


def _without_embedding(
    model: PreTrainedModel, anatomy: Anatomy, border: StageBorder
) -> list[nn.Module]:
    tokens = model.get_input_embeddings()
    for name, embedding in anatomy.embeddings.items():
        stand_in = (
            ReceivingEmbedding(border, anatomy.layers) if embedding is tokens else NoEmbedding()
        )
        setattr(anatomy.trunk, name, stand_in)
    receive_first(border, next(iter(anatomy.layers)))
    return [*anatomy.embeddings.values()]


def receive_first(border: StageBorder, first: nn.Module) -> None:
    """Give the first layer of a stage what was received."""
    register_ahead(first, functools.partial(_unwrap, border))


def _unwrap(
    border: StageBorder, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give the first layer what was received, and see that nothing was computed from it before."""
    args = tuple(Passing.plain(value) for value in args)
    kwargs = {name: Passing.plain(value) for name, value in kwargs.items()}
    given = (*args, *kwargs.values())
    if not any(isinstance(it, Tensor) and it.data_ptr() == border.address for it in given):
        raise SliceError(
            f"{type(layer).__name__}, the stage's first layer, is not given what the stage "
            "received: the model computes on hidden states between its embedding and its layers, "
            "in a way that cannot be left to the first stage",
            code="pp-work-before-layer",
        )
    return args, kwargs


def _without_head(model: PreTrainedModel, anatomy: Anatomy, border: StageBorder) -> list[nn.Module]:
    for name in anatomy.norms:
        setattr(anatomy.trunk, name, NoNorm(border))
    last_layer = [*anatomy.layers][-1]
    last_layer.register_forward_hook(border.left)
    name = next(name for name, module in model.named_modules() if module is anatomy.head)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, SendingHead(border))

    def loss_function(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        return Passing.plain(logits)

    model.loss_function = loss_function
    without_outputs(model, border)
    return [*anatomy.norms.values(), anatomy.head]


def without_outputs(model: nn.Module, border: StageBorder, others: Sequence[str] = ()) -> None:
    """Let logits, and other outputs by name, refuse to be used on a stage that has them not."""
    stage, last = border.stage, border.group.size() - 1

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, tuple):
            return
        output.__class__ = without_logits(type(output), _why_not("logits", stage, last))
        for name in others:
            setattr(output, name, unusable(_why_not(name, stage, last)))

    model.register_forward_hook(after)


def _why_not(what: str, stage: int, last: int) -> str:
    return (
        f"the script reads {what}, which stage {last} has and stage {stage} has not: let the model "
        "compute its loss (pass labels) and use output.loss"
    )


def release(dropped: list[nn.Module], model: PreTrainedModel) -> None:
    """Free what the stage has not, even where an optimizer made before still lists it."""
    kept = {id(parameter) for parameter in model.parameters()}
    for module in dropped:
        for parameter in module.parameters():
            if id(parameter) not in kept:
                parameter.data = parameter.data.new_empty(0)
                parameter.requires_grad = False


def dtype_of(layers: nn.ModuleList, default: torch.dtype) -> torch.dtype:
    """Return the type that the layers' parameters have now; a script may cast them later."""
    return next((p.dtype for p in layers.parameters() if p.is_floating_point()), default)
