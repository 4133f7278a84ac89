"""Context parallelism of a Hugging Face model: hooks of the model, attention and loss of one rank.

Each rank runs the whole model on a part of the sequence. The script passes the whole batch on every
rank of the group. A pre-hook of the model cuts it to the rank's part (`sharded_batch`). Within the
layers, only attention communicates.

The loss of the whole sequence is the all-reduced sum of the ranks' losses, 4 bytes. Its gradient is
scaled by the size of the group, so that the mean over data- and context-parallel ranks is the
gradient of the whole batch. Logits are all-gathered when the script reads them.
"""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.context.packed_sequences import Packing
from onerank.capture.parallelize.context.partial_attention import AttentionMode
from onerank.capture.parallelize.context.sequence_attention import (
    Context,
    ContextComm,
    GatheredLogits,
)
from onerank.capture.parallelize.context.sharded_batch import (
    MASK_INPUTS,
    part_mask,
    shard_batch,
)
from onerank.capture.parallelize.experts.aux_loss import (
    BALANCE,
    Balance,
    adds_balancing_loss,
    share_balancing_loss,
)
from onerank.capture.parallelize.hugging_face import PretrainedConfig, PreTrainedModel
from onerank.capture.parallelize.model_structure import refuse_encoder_decoder
from onerank.capture.parallelize.sliced_outputs import logits_when_read, without_logits
from onerank.ir.errors import SliceError

MASKED = "onerank_context_parallel_masked"

_ATTENTION = "onerank_context_parallel"

_LAYER = "_onerank_context"

_CHUNKED = "chunked_attention"

_KNOWN_LAYERS = ("full_attention", "sliding_attention", _CHUNKED)

# RoBERTa's embeddings: positions follow from the whole sequence's padding, which a part lacks
_COUNTS_POSITIONS = "create_position_ids_from_input_ids"

_LOSSES = ("loss", "aux_loss")

_KNOWN_ATTENTION = ("sdpa", "eager")

_PACKED_LOGITS = (
    "--cp-comm p2p: the script reads logits of packed sequences, but a rank holds only parts\n"
    "  let the model compute the loss (pass labels), or use --cp-comm all_gather"
)

_WITH_SDPA = "build the model with attn_implementation='sdpa' where it has that, or "


@dataclass(frozen=True)
class _Layer:
    """Context-parallel settings that an attention module reads."""

    context: Context
    eager: bool


def apply_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    comm: ContextComm,
    has_loss: bool,
    peers_absent: bool,
) -> None:
    """Make a model run on this rank's part of each sequence.

    Args:
        model: a causal language model; other axes may have sliced it.
        group: the context-parallel group.
        comm: how ranks exchange keys and values.
        has_loss: whether the model computes a loss; False for pipeline stages before the last.
        peers_absent: whether the group's other ranks do not exist to add partial sums.

    Raises:
        SliceError: the model is not supported on parts of a sequence.
    """
    configured = _check(model, group.size())
    layer = _Layer(Context(group, comm), eager=configured._attn_implementation == "eager")
    chunked = _CHUNKED in (getattr(configured, "layer_types", None) or ())
    _register_attention()
    for module in _configure(model, _ATTENTION):
        setattr(module, _LAYER, layer)
    hooks = _ModelHooks(
        layer,
        type(model).__name__,
        chunked=chunked,
        has_loss=has_loss,
        peers_absent=peers_absent,
    )
    # First, so that the hooks of the other axes see this rank's part of the batch.
    model.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
    trunk: Any = model.base_model
    # A script that calls the trunk itself would run it on the whole sequence.
    if trunk is not model:
        trunk.register_forward_pre_hook(hooks.enter_trunk)
    model.register_forward_hook(hooks.leave, always_call=True)


@dataclass
class _ModelHooks:
    """Hooks of a context-parallel model: they cut each call's batch, and sum its losses.

    Attributes:
        layer: settings of the attention modules.
        model_class: name of the model's class, for errors.
        chunked: whether some layers use chunked attention.
        has_loss: whether the model computes a loss.
        peers_absent: whether the group's other ranks do not exist to add partial sums.
        running: whether a call of the model is in progress.
        packed: whether its sequences are cut one by one, so that logits are not gathered.
    """

    layer: _Layer
    model_class: str
    chunked: bool
    has_loss: bool
    peers_absent: bool
    running: bool = False
    packed: bool = False

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the arguments of a call by this rank's part; set the inputs of its masks."""
        self.running = True
        context = self.layer.context
        batch = shard_batch(module, args, kwargs, context, eager=self.layer.eager)
        self.packed = batch.masks.packing is not None
        if self.chunked and batch.masks.documents is not None:
            raise SliceError(
                f"--cp: {type(module).__name__} uses chunked attention, which --cp does not "
                "support with packed sequences: do not pack",
                code="cp-chunked-packed",
            )
        masked = self.layer.eager or self.chunked or batch.masks.hides_tokens
        _configure(module, MASKED if masked else _ATTENTION)
        if masked:
            MASK_INPUTS.set(batch.masks)
            # A mask of ones if nothing is padded: without a mask, transformers looks for packed
            # sequences in position ids, and those of the part jump between its two chunks.
            batch.arguments["attention_mask"] = batch.attention_mask()
        if adds_balancing_loss(module, batch.arguments):
            share_balancing_loss(module)
            counted = None if batch.counted is None else context.local_chunks(batch.counted)
            BALANCE.set(Balance((context.group,), self.peers_absent, counted))
        return (), batch.arguments

    def enter_trunk(self, module: nn.Module, _: Any) -> None:
        """Refuse a call of the trunk that does not come from the model."""
        if not self.running:
            raise SliceError(
                f"--cp: {type(module).__name__} was called directly with whole sequences, but "
                f"--cp cuts them when {self.model_class} is called\n"
                "  call that, or leave --cp out",
                code="cp-called-directly",
            )

    def leave(self, _: nn.Module, __: Any, output: Any) -> None:
        """Sum the losses of the ranks; gather the logits when the script reads them."""
        self.running = False
        MASK_INPUTS.set(None)
        BALANCE.set(None)
        if not self.has_loss or output is None:
            return
        if isinstance(output, tuple):
            raise SliceError(
                "--cp: the model returns a tuple: leave return_dict=False out",
                code="cp-returns-tuple",
            )
        losses = [key for key in _LOSSES if isinstance(output.get(key), Tensor)]
        if losses:
            parts = [output[key] for key in losses]
            summed: Any = _SumOfParts.apply(
                parts[0] if len(parts) == 1 else torch.stack(parts),
                self.layer.context.group,
                self.peers_absent,
            )
            # indexed, not split: autograd forbids in-place changes of views of a split
            for place, key in enumerate(losses):
                output[key] = summed if len(losses) == 1 else summed[place]
        output.__class__ = (
            without_logits(type(output), _PACKED_LOGITS)
            if self.packed
            else logits_when_read(type(output), self._gathered)
        )

    def _gathered(self, logits: Tensor) -> Tensor:
        whole: Any = GatheredLogits.apply(logits, self.layer.context.group)
        return whole


def _configure(model: Any, attention: str) -> list[nn.Module]:
    """Select an attention implementation; return the modules that were reconfigured."""
    if model.config.get_text_config()._attn_implementation == attention:
        return []
    configured = [
        m for m in model.modules() if isinstance(getattr(m, "config", None), PretrainedConfig)
    ]
    for module in configured:
        module.config._attn_implementation = attention
    return configured


class _SumOfParts(torch.autograd.Function):
    """All-reduce of partial losses; the gradient is multiplied by the size, for the mean."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: dist.ProcessGroup, peers_absent: bool) -> Tensor:
        ctx.size = group.size()
        # absent ranks are assumed to have equal losses
        total = loss * (ctx.size if peers_absent else 1)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.size, None, None


def _check(model: nn.Module, size: int) -> Any:
    """Return the configuration of a supported model; raise SliceError for any other."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise SliceError(
            f"--cp {size} cuts the sequence of Hugging Face causal language models, and {kind} is "
            "none (transformers.PreTrainedModel with a head): leave --cp out",
            code="cp-not-causal-lm",
        )
    refuse_encoder_decoder(model, "--cp")
    config: Any = model.config.get_text_config()
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - {*_KNOWN_LAYERS})
    if unknown:
        raise SliceError(
            f"--cp {size}: {kind} has layers of {', '.join(unknown)}; --cp supports "
            f"{', '.join(_KNOWN_LAYERS)}: leave --cp out",
            code="cp-layer-type",
        )
    of_interface = type(model)._can_set_attn_implementation()
    if config._attn_implementation not in _KNOWN_ATTENTION or not of_interface:
        raise SliceError(
            f"--cp {size}: {kind} runs its attention as {config._attn_implementation!r}"
            f"{'' if of_interface else ', outside the interface'}; "
            "--cp supports 'sdpa' and 'eager' of transformers' attention "
            "interface\n  "
            f"{_WITH_SDPA if of_interface else ''}leave --cp out",
            code="cp-attention-implementation",
        )
    if any(hasattr(module, _COUNTS_POSITIONS) for module in model.modules()):
        raise SliceError(
            f"--cp {size}: {kind} counts positions from the tokens that are not padding, starting "
            "after its padding token's id; --cp passes positions that start at 0: leave --cp out",
            code="cp-padding-positions",
        )
    parameters = inspect.signature(type(model).forward).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "position_ids" not in parameters or not open_ended:
        raise SliceError(
            f"--cp {size}: {kind}'s forward takes no position_ids, or passes no shift_labels to "
            "its loss, which --cp needs for a part of a sequence: leave --cp out",
            code="cp-forward-signature",
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
    """Run a layer's context-parallel attention instead of the configured implementation."""
    kind = type(module).__name__
    layer: _Layer = getattr(module, _LAYER)
    if layer.eager:
        eager_attention: Any = getattr(
            sys.modules[type(module).__module__], "eager_attention_forward", None
        )
        if eager_attention is None or attention_mask is None:
            raise SliceError(
                f"--cp: {kind} runs its attention as 'eager', and has no function "
                "eager_attention_forward that takes a mask: leave --cp out",
                code="cp-eager-function",
            )
        keys, values = layer.context.gather_keys_and_values(key, value)
        return eager_attention(module, query, keys, values, attention_mask, **options)
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    unsupported = [options.get(name) for name in ("position_bias", "softcap", "s_aux")]
    if any(option is not None for option in unsupported) or not causal:
        raise SliceError(
            f"--cp: {kind} attends with a bias, a cap or without causality, which --cp supports "
            "only for 'eager'\n  build the model with attn_implementation='eager' if available, or "
            "leave --cp out",
            code="cp-attention-bias",
        )
    keys = query.shape[2] * layer.context.group.size()
    if isinstance(attention_mask, Packing):
        keys = attention_mask.longest
    elif attention_mask is not None and attention_mask.shape[-1] != keys:
        raise SliceError(
            f"--cp: {kind} builds a mask outside transformers' mask functions, for "
            f"{attention_mask.shape[-1]} keys of the sequence's {keys}: leave --cp out",
            code="cp-own-mask",
        )
    window = options.get("sliding_window")
    if isinstance(attention_mask, Tensor) or (window is not None and window >= keys):
        window = None  # the mask already contains the window
    if torch.is_autocast_enabled(query.device.type):
        lower = torch.get_autocast_dtype(query.device.type)
        # The kernels are called below autocast, which would have cast their operands.
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    scale = options.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    mask = attention_mask
    mask = mask.to(query.dtype) if isinstance(mask, Tensor) else mask
    mode = AttentionMode(scale, window, options.get("dropout", 0.0))
    return layer.context.attend(query, key, value, mode, mask), None


def _register_attention() -> None:
    """Make the attention of this module known to transformers, which the script has imported."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # transformers builds no masks for an implementation without a mask function of the same name
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
    ALL_ATTENTION_FUNCTIONS.register(MASKED, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(MASKED, part_mask)
