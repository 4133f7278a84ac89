"""Context parallelism of a Hugging Face model: each rank runs all of it on a part of the sequence.

The script gives every rank of the group the whole batch, as Megatron-LM's loop does
(get_batch_on_this_cp_rank). As the model is called, token ids, labels
and positions are cut to the rank's part; labels are shifted before, so that the last token of a
chunk learns from the first of the next. Attention is all that communicates in the layers (see
`context`). The loss is the whole sequence's: its parts are all-reduced, 4 bytes. Its gradient is
scaled by the size of the group, so that the mean over data- and context-parallel ranks, which the
data-parallel form takes, is the gradient of the whole batch.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from onerank.capture.context import Context, ContextComm
from onerank.capture.outputs import without_logits
from onerank.capture.vocabulary import IGNORED_LABEL
from onerank.ir.errors import SliceError

_ATTENTION = "onerank_context_parallel"
_CONTEXT = "_onerank_context"
_KNOWN_LAYERS = ("full_attention", "sliding_attention")


def share_context(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    comm: ContextComm,
    has_loss: bool,
    alone: bool,
) -> None:
    """Let a model run on this rank's part of each sequence it is given.

    Args:
        model: a causal language model, which may be sliced otherwise already.
        group: the context-parallel group.
        comm: how keys and values travel.
        has_loss: whether the model's loss is one; not so for pipeline stages before the last.
        alone: whether the group's other ranks are not there to add their parts.

    Raises:
        SliceError: the model is not known to compute the same on parts of a sequence.
    """
    _check(model, group.size())
    context = Context(group, comm)
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            config: Any = module.config
            config._attn_implementation = _ATTENTION
            setattr(module, _CONTEXT, context)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (), _own_part(module, args, kwargs, context)

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        if not has_loss:
            return
        if isinstance(output, tuple):
            raise SliceError("--cp: the model returns a tuple: leave return_dict=False out")
        output.loss = _SumOfParts.apply(output.loss, group, alone)
        output.__class__ = without_logits(
            type(output),
            f"the script reads logits, and rank {group.rank()} of the {group.size()} of --cp has "
            "those of its part of the sequence: let the model compute its loss (pass labels) and "
            "use output.loss",
        )

    model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    model.register_forward_hook(leave)


class _SumOfParts(torch.autograd.Function):
    """All-reduce of a loss's parts; the gradient times the size, for the mean over the ranks."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup, alone: bool) -> Tensor:
        ctx.size = group.size()
        total = loss * (ctx.size if alone else 1)  # absent ranks are taken to lose as much
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.size, None, None


def _check(model: nn.Module, size: int) -> None:
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise SliceError(
            f"--cp {size} cuts the sequence of Hugging Face causal language models, and {kind} is "
            "none (transformers.PreTrainedModel with a head): leave --cp out"
        )
    config: Any = model.config.get_text_config()
    if config._attn_implementation != "sdpa":
        raise SliceError(
            f"--cp {size}: {kind} runs its attention as {config._attn_implementation!r}, and how "
            "parts of a sequence attend to the whole is known for 'sdpa': build the model with "
            "attn_implementation='sdpa' where it has that, or leave --cp out"
        )
    parameters = inspect.signature(type(model).forward).parameters
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if "position_ids" not in parameters or not open_ended:
        raise SliceError(
            f"--cp {size}: {kind}'s forward takes no position_ids, or hands no shift_labels to its "
            "loss, so that it cannot be given a part of a sequence: leave --cp out"
        )
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - {*_KNOWN_LAYERS})
    if strange:
        raise SliceError(
            f"--cp {size}: {kind} has layers of {', '.join(strange)}; parts of a sequence are "
            "known to attend to the whole in full_attention and sliding_attention: leave --cp out"
        )
    if getattr(config, "output_router_logits", False):
        raise SliceError(
            f"--cp {size}: {kind} adds a balancing loss of its routers, which is no sum over the "
            "parts of a sequence: configure output_router_logits=False"
        )


def _own_part(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context
) -> dict[str, Any]:
    """Return a call's arguments by name, cut to this rank's part of the sequence."""
    bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
    bound.pop(next(iter(bound)))  # self
    given = {**bound, **bound.pop("kwargs", {})}
    labels = given.get("labels")
    sequence = next(
        (given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None),
        None,
    )
    if sequence is None or labels is None:
        raise SliceError(
            f"--cp: {type(model).__name__} was called without "
            f"{'input_ids' if sequence is None else 'labels'}; a rank that has a part of the "
            "sequence needs labels for its loss: pass both"
        )
    positions = torch.arange(sequence.shape[1], device=sequence.device).unsqueeze(0)
    _refuse_structure(given, positions)
    shifted = given.get("shift_labels")
    if shifted is None:
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
    counted = given.get("num_items_in_batch")
    if counted is None:
        counted = (shifted != IGNORED_LABEL).sum()
    for name in ("input_ids", "inputs_embeds", "labels"):
        if given.get(name) is not None:
            given[name] = context.own(given[name])
    return {
        **given,
        "attention_mask": None,
        "position_ids": context.own(positions),
        "shift_labels": context.own(shifted),
        "num_items_in_batch": counted,
    }


def _refuse_structure(given: dict[str, Any], positions: Tensor) -> None:
    """Refuse padded and packed sequences, which attention to all before would mix."""
    mask = given.get("attention_mask")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise SliceError("--cp: expected an attention_mask [batch, sequence], or none")
        if not bool(mask.all()):
            raise SliceError(
                f"--cp: the attention_mask leaves out {int((mask == 0).sum())} of {mask.numel()} "
                "tokens; attention to a sequence in parts is known without padding: fill the "
                "sequences"
            )
    told = given.get("position_ids")
    if told is not None and not bool((told == positions).all()):
        raise SliceError(
            "--cp: position_ids are not 0, 1, 2, ...; attention to a sequence in parts is known "
            "for one sequence a row: do not pack"
        )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run a layer's attention, in the place of transformers' sdpa_attention_forward."""
    kind = type(module).__name__
    context: Context = getattr(module, _CONTEXT)
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    added = [attention_mask, *(options.get(name) for name in ("position_bias", "softcap", "s_aux"))]
    if any(one is not None for one in added) or not causal:
        raise SliceError(
            f"--cp: {kind} attends with a mask, a bias or a cap of its own, or not causally; how "
            "parts of a sequence do so is not known: leave --cp out"
        )
    if dropout := options.get("dropout", 0.0):
        raise SliceError(
            f"--cp: {kind} drops out {dropout:g} of its attention, which the slices cannot do as "
            "the whole would: configure the attention's dropout as 0"
        )
    length, window = query.shape[2] * context.group.size(), options.get("sliding_window")
    if window is not None and window >= length:
        window = None
    if torch.is_autocast_enabled(query.device.type):
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    scale = options.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return context.attend(query, key, value, scale, window), None


# without a mask function of the same name, models make no masks
ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
