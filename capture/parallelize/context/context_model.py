"""Context parallelism of a Hugging Face model: each rank runs all of it on a part of the sequence.

The script gives every rank of the group the whole batch, as Megatron-LM's loop does
(get_batch_on_this_cp_rank). As the model is called, token ids, labels
and positions are cut to the rank's part; labels are shifted before, so that the last token of a
chunk learns from the first of the next. Attention is all that communicates in the layers (see
`context`). The loss is the whole sequence's: its parts are all-reduced, 4 bytes. Its gradient is
scaled by the size of the group, so that the mean over data- and context-parallel ranks, which the
data-parallel form takes, is the gradient of the whole batch. A script that reads logits gets those
of the whole sequence, gathered, and every rank computes of them what the script does.
"""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from onerank.capture.parallelize.context.all_gather_attention import GatheredLogits
from onerank.capture.parallelize.context.attention_mask import CURRENT, MASKED, Structure
from onerank.capture.parallelize.context.context_batch import own_part
from onerank.capture.parallelize.context.packed_sequences import Packing
from onerank.capture.parallelize.context.partial_attention import Manner
from onerank.capture.parallelize.context.sequence_shards import Context, ContextComm
from onerank.capture.parallelize.experts.aux_loss import (
    BALANCE,
    Balance,
    adds_balancing_loss,
    share_balancing_loss,
)
from onerank.capture.parallelize.model_structure import refuse_encoder_decoder
from onerank.capture.parallelize.sliced_outputs import logits_when_read, without_logits
from onerank.ir.errors import SliceError

_ATTENTION = "onerank_context_parallel"
_LAYER = "_onerank_context"
_CHUNKED = "chunked_attention"
_KNOWN_LAYERS = ("full_attention", "sliding_attention", _CHUNKED)
_COUNTS_POSITIONS = "create_position_ids_from_input_ids"  # RoBERTa's
_LOSSES = ("loss", "aux_loss")
_KNOWN_ATTENTION = ("sdpa", "eager")
_PACKED_LOGITS = (
    "--cp-comm p2p: the script reads logits of packed sequences, of which a rank has parts of "
    "each: let the model compute the loss (pass labels), or use --cp-comm all_gather"
)
_WITH_SDPA = "build the model with attn_implementation='sdpa' where it has that, or "


@dataclass(frozen=True)
class _Layer:
    """What the attention of a model with parts of sequences has to know."""

    context: Context
    eager: bool


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
    configured = _check(model, group.size())
    context = Context(group, comm)
    layer = _Layer(context, eager=configured._attn_implementation == "eager")
    chunked = _CHUNKED in (getattr(configured, "layer_types", None) or ())
    for module in _configure(model, _ATTENTION):
        setattr(module, _LAYER, layer)

    running = packed = False

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal running, packed
        running = True
        batch = own_part(module, args, kwargs, context)
        packed = batch.packing is not None
        masked = layer.eager or chunked or batch.seen is not None or batch.documents is not None
        if chunked and batch.documents is not None:
            raise SliceError(
                f"--cp: {type(module).__name__} attends within chunks, and sequences are packed; "
                "how parts of those attend is not known: do not pack"
            )
        wanted = MASKED if masked else _ATTENTION
        _configure(module, wanted)
        if masked:
            found = batch.seen, batch.documents, layer.eager, batch.packing
            CURRENT.set(Structure(batch.rows, batch.length, *found))
            # one that hides nothing, so that models do not look for packed sequences themselves
            batch.given["attention_mask"] = batch.unmasked() if batch.seen is None else batch.seen
        if adds_balancing_loss(module, batch.given):
            share_balancing_loss(module)
            own = None if batch.counted is None else context.own(batch.counted)
            BALANCE.set(Balance((group,), alone, own))
        return (), batch.given

    def gather(logits: Tensor) -> Tensor:
        whole: Any = GatheredLogits.apply(logits, group)
        return whole

    def enter_trunk(module: nn.Module, _: Any) -> None:
        if not running:
            raise SliceError(
                f"--cp: {type(module).__name__} is called by itself, with whole sequences, which "
                f"are cut as {type(model).__name__} is called: call that, or leave --cp out"
            )

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal running
        running = False
        CURRENT.set(None)
        BALANCE.set(None)
        if not has_loss or output is None:
            return
        if isinstance(output, tuple):
            raise SliceError("--cp: the model returns a tuple: leave return_dict=False out")
        losses = [key for key in _LOSSES if isinstance(output.get(key), Tensor)]
        if losses:
            parts = [output[key] for key in losses]
            summed: Any = _SumOfParts.apply(
                parts[0] if len(parts) == 1 else torch.stack(parts), group, alone
            )
            for place, key in enumerate(losses):  # views of a split may not be changed in place
                output[key] = summed if len(losses) == 1 else summed[place]
        output.__class__ = (
            without_logits(type(output), _PACKED_LOGITS)
            if packed
            else logits_when_read(type(output), gather)
        )

    model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    trunk: Any = model.base_model
    if trunk is not model:
        trunk.register_forward_pre_hook(enter_trunk)
    model.register_forward_hook(leave, always_call=True)


def _configure(model: Any, attention: str) -> list[nn.Module]:
    """Let a model run its attention as `attention`; return what was configured otherwise."""
    if model.config.get_text_config()._attn_implementation == attention:
        return []
    found = [m for m in model.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)]
    for module in found:
        module.config._attn_implementation = attention
    return found


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


def _check(model: nn.Module, size: int) -> Any:
    """Return the configuration of a model that is known to compute the same on parts."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise SliceError(
            f"--cp {size} cuts the sequence of Hugging Face causal language models, and {kind} is "
            "none (transformers.PreTrainedModel with a head): leave --cp out"
        )
    refuse_encoder_decoder(model, "--cp")
    config: Any = model.config.get_text_config()
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - {*_KNOWN_LAYERS})
    if strange:
        raise SliceError(
            f"--cp {size}: {kind} has layers of {', '.join(strange)}; parts of a sequence are "
            f"known to attend to the whole in {', '.join(_KNOWN_LAYERS)}: leave --cp out"
        )
    of_interface = type(model)._can_set_attn_implementation()  # pyright: ignore[reportPrivateUsage]
    if config._attn_implementation not in _KNOWN_ATTENTION or not of_interface:
        raise SliceError(
            f"--cp {size}: {kind} runs its attention as {config._attn_implementation!r}"
            f"{'' if of_interface else ', in code of its own'}, and how "
            "parts of a sequence attend to the whole is known for 'sdpa' and 'eager' of "
            "transformers' attention interface: "
            f"{_WITH_SDPA if of_interface else ''}leave --cp out"
        )
    if any(hasattr(module, _COUNTS_POSITIONS) for module in model.modules()):
        raise SliceError(
            f"--cp {size}: {kind} counts positions from the tokens that are not padding, from its "
            "padding token's number on, and not from 0; parts of a sequence are given positions "
            "from 0: leave --cp out"
        )
    parameters = inspect.signature(type(model).forward).parameters
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if "position_ids" not in parameters or not open_ended:
        raise SliceError(
            f"--cp {size}: {kind}'s forward takes no position_ids, or hands no shift_labels to its "
            "loss, so that it cannot be given a part of a sequence: leave --cp out"
        )
    return config


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Packing | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Run a layer's attention, in the place of the one the model was configured with."""
    kind = type(module).__name__
    layer: _Layer = getattr(module, _LAYER)
    if layer.eager:
        own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if own is None or attention_mask is None:
            raise SliceError(
                f"--cp: {kind} runs its attention as 'eager', and has no function "
                "eager_attention_forward that takes a mask: leave --cp out"
            )
        keys, values = layer.context.gathered(key, value)
        return own(module, query, keys, values, attention_mask, **options)
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    added = [options.get(name) for name in ("position_bias", "softcap", "s_aux")]
    if any(one is not None for one in added) or not causal:
        raise SliceError(
            f"--cp: {kind} attends with a bias or a cap of its own, or not causally; how parts of "
            "a sequence do so is known for 'eager' alone: build the model with "
            "attn_implementation='eager' where it has that, or leave --cp out"
        )
    keys = query.shape[2] * layer.context.group.size()
    if isinstance(attention_mask, Packing):
        keys = attention_mask.longest
    elif attention_mask is not None and attention_mask.shape[-1] != keys:
        raise SliceError(
            f"--cp: {kind} attends under a mask of its own, for {attention_mask.shape[-1]} keys of "
            f"the sequence's {keys}; how parts of a sequence do so is not known: leave --cp out"
        )
    window = options.get("sliding_window")
    if isinstance(attention_mask, Tensor) or (window is not None and window >= keys):
        window = None  # a mask has it already
    if torch.is_autocast_enabled(query.device.type):
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    scale = options.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    mask = attention_mask
    mask = mask.to(query.dtype) if isinstance(mask, Tensor) else mask
    how = Manner(scale, window, options.get("dropout", 0.0))
    return layer.context.attend(query, key, value, how, mask), None


# without a mask function of the same name, models make no masks
ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
ALL_ATTENTION_FUNCTIONS.register(MASKED, _attention)
