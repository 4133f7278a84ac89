"""Context parallelism of a Hugging Face model: batch, masks, attention and loss of one rank.

Each rank runs the whole model on a part of the sequence. The script passes the whole batch on every
rank of the group. A pre-hook of the model cuts token ids, labels and positions to the rank's part,
as Megatron-LM's get_batch_on_this_cp_rank does in its training loop. Within the layers, only
attention communicates.

The loss of the whole sequence is the all-reduced sum of the ranks' losses, 4 bytes. Its gradient is
scaled by the size of the group, so that the mean over data- and context-parallel ranks is the
gradient of the whole batch. Logits are all-gathered when the script reads them.

Padding, packed sequences, chunked attention and eager attention need masks. Transformers builds a
mask for each kind of layer from functions of query and key positions
(transformers/masking_utils.py). These functions are evaluated for the positions of the rank's
queries and of all keys; padding and other packed sequences are then masked out.
"""

import contextvars
import inspect
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.context.packed_sequences import Packing, packing_of
from onerank.capture.parallelize.context.partial_attention import AttentionMode
from onerank.capture.parallelize.context.sequence_attention import (
    Context,
    ContextComm,
    GatheredLogits,
)
from onerank.capture.parallelize.experts.aux_loss import (
    BALANCE,
    Balance,
    adds_balancing_loss,
    share_balancing_loss,
)
from onerank.capture.parallelize.hugging_face import PretrainedConfig, PreTrainedModel
from onerank.capture.parallelize.model_structure import by_name, refuse_encoder_decoder
from onerank.capture.parallelize.sliced_outputs import logits_when_read, without_logits
from onerank.capture.parallelize.tensor.vocab_parallel import IGNORED_LABEL
from onerank.ir.errors import SliceError

MASKED = "onerank_context_parallel_masked"

# Stride of a mask's rows, in elements, that the memory-efficient kernel needs. A mask built with
# this stride is not copied again in every layer (`partial_attention._bias`).
_ALIGNED = 16


@dataclass(frozen=True)
class MaskInputs:
    """Positions, padding and packing of a call's sequences, from which layers build masks.

    Attributes:
        query_positions: position in the sequence of each token of this rank's part, [part].
        length: tokens of a sequence.
        token_mask: mask of tokens that are not padding, [batch, sequence]; None for all.
        documents: index of each token's packed sequence, [batch, sequence]; None for one.
        eager: whether the model's eager attention uses the mask (lowest finite number, not -inf).
        packing: packed sequences that are cut one by one; replaces masks.
    """

    query_positions: Tensor
    length: int
    token_mask: Tensor | None = None
    documents: Tensor | None = None
    eager: bool = False
    packing: Packing | None = None


CURRENT: contextvars.ContextVar[MaskInputs | None] = contextvars.ContextVar(
    "onerank_context_structure", default=None
)
"""Mask inputs of the current call. Per thread, because `verify` runs one slice per thread."""


def _mask(
    *, mask_function: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> Tensor | Packing:
    """Return the additive mask [batch or 1, 1, part, sequence], through transformers' interface."""
    inputs = CURRENT.get()
    if inputs is None or options.get("use_vmap"):
        raise SliceError(
            "--cp: the model builds a custom attention mask, which cannot be evaluated for a part "
            "of the sequence: leave --cp out",
            code="cp-unknown-mask",
        )
    if inputs.packing is not None:
        if not _knows_positions(inspect.currentframe()):
            raise SliceError(
                "--cp-comm p2p: sequences are packed, but the model passes no position_ids to its "
                "masks, so they attend to each other: use --cp-comm all_gather",
                code="cp-ring-packed-rows",
            )
        return inputs.packing
    query_positions, token_mask = inputs.query_positions, inputs.token_mask
    documents = inputs.documents if _knows_positions(inspect.currentframe()) else None
    key_positions = torch.arange(inputs.length, device=query_positions.device)
    batch = next((len(x) for x in (token_mask, documents) if x is not None), 1)
    batch_indices = torch.arange(batch, device=query_positions.device)
    allowed: Tensor = mask_function(
        *(batch_indices[:, None, None, None], batch_indices[None, :1, None, None]),
        *(query_positions[None, None, :, None], key_positions[None, None, None, :]),
    )
    if token_mask is not None:
        allowed = allowed & token_mask[:, None, None, :]
    if documents is not None:
        allowed = allowed & (
            documents[:, query_positions][:, None, :, None] == documents[:, None, None, :]
        )
    # Only the stride is padded: the slice at the end has the sequence's length.
    padded = inputs.length + -inputs.length % _ALIGNED
    scores = torch.zeros((*allowed.shape[:-1], padded), dtype=dtype, device=query_positions.device)
    # Eager attention adds the mask before a softmax over rows that may be masked throughout; with
    # -inf such a row would be NaN. Transformers' eager masks hold the lowest finite number too.
    lowest = torch.finfo(dtype).min if inputs.eager else float("-inf")
    return scores[..., : inputs.length].masked_fill_(~allowed, lowest)


def _knows_positions(frame: FrameType | None) -> bool:
    """Return whether the model passes position ids to transformers' mask function.

    GPT-OSS and others do not, so packed sequences attend to each other there.
    """
    # transformers does not hand position_ids on to mask functions: read them from its frame
    caller = frame.f_back if frame is not None else None
    return caller is not None and caller.f_locals.get("position_ids") is not None


_NON_TEXT_INPUTS = ("pixel_values", "pixel_values_videos", "input_features")


@dataclass(frozen=True)
class Batch:
    """A call's arguments, cut to a rank's part of the sequence, and the inputs of its masks.

    Attributes:
        arguments: arguments by name, without attention_mask.
        query_positions: position in the sequence of each token of this rank's part, [part].
        sequences: number of sequences.
        length: tokens of a whole sequence.
        token_mask: mask of tokens that are not padding, [batch, sequence]; None if padding needs no
            mask.
        counted: the same mask for token statistics, such as a balancing loss.
        documents: index of each token's packed sequence, [batch, sequence]; None for one.
        packing: packed sequences that are cut one by one, so that no mask is needed.
    """

    arguments: dict[str, Any]
    query_positions: Tensor
    sequences: int
    length: int
    token_mask: Tensor | None
    counted: Tensor | None
    documents: Tensor | None
    packing: Packing | None

    def unmasked(self) -> Tensor:
        """Return an attention_mask of the whole sequences that hides nothing."""
        return self.query_positions.new_ones((self.sequences, self.length))


def shard_batch(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context
) -> Batch:
    """Cut a call's arguments to this rank's part of the sequence.

    Without labels the script computes the loss from the logits. Trailing padding without labels
    needs no mask under causal attention; it is computed like any token, as in Megatron-LM.

    Args:
        model: the model that the script calls.
        args: positional arguments of the call; input_ids, labels and masks are [batch, sequence].
        kwargs: keyword arguments of the call.
        context: the split of the sequence.

    Raises:
        SliceError: the arguments cannot be cut.
    """
    arguments = by_name(model, args, kwargs)
    labels = arguments.get("labels")
    sequence = next(
        (
            arguments[name]
            for name in ("input_ids", "inputs_embeds")
            if arguments.get(name) is not None
        ),
        None,
    )
    if sequence is None:
        raise SliceError(
            f"--cp: {type(model).__name__} was called without input_ids, which --cp cuts\n"
            "  call model(input_ids=..., labels=...)",
            code="cp-no-input-ids",
        )
    if non_text := [name for name in _NON_TEXT_INPUTS if arguments.get(name) is not None]:
        raise SliceError(
            f"--cp: {type(model).__name__} was called with {', '.join(non_text)}, whose features "
            "replace tokens anywhere in the sequence, which --cp cannot cut\n"
            "  train on text only, or leave --cp out",
            code="cp-other-inputs",
        )
    logits_to_keep = arguments.get("logits_to_keep")
    if isinstance(logits_to_keep, Tensor) or logits_to_keep:
        raise SliceError(
            f"--cp: {type(model).__name__} was called with logits_to_keep, positions in the whole "
            "sequence, but a rank holds only a part: leave it out",
            code="cp-logits-to-keep",
        )
    all_positions = torch.arange(sequence.shape[1], device=sequence.device).unsqueeze(0)
    shifted = arguments.get("shift_labels")
    if shifted is None and labels is not None:
        # The shift comes before the cut: a chunk's last token learns from the next chunk's first.
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
    counted = _unpadded(arguments.get("attention_mask"), all_positions)
    positions, documents = _packed(model, arguments, all_positions)
    packing = None
    if documents is not None and context.comm == "p2p":
        packing = packing_of(documents, context.group.rank(), context.group.size())
        positions = positions.expand(len(documents), -1)
    cut = context.local_chunks if packing is None else packing.local_chunks
    for name in ("input_ids", "inputs_embeds", "labels"):
        if arguments.get(name) is not None:
            arguments[name] = cut(arguments[name])
    # Each part needs its positions: without them a model counts from 0.
    local = {**arguments, "attention_mask": None, "position_ids": cut(positions)}
    if labels is not None and shifted is not None:
        if local.get("num_items_in_batch") is None:
            # By default the loss function divides by the part's labels, and parts have unequal
            # numbers of them; divided by the whole sequence's number, the parts sum to its loss.
            local["num_items_in_batch"] = (shifted != IGNORED_LABEL).sum()
        local["shift_labels"] = cut(shifted)
    token_mask = None if counted is None or _is_trailing(counted, shifted) else counted
    if token_mask is not None and (embedding_class := _position_counting_embedding(model)):
        raise SliceError(
            f"--cp: {type(model).__name__} counts its positions from the attention_mask "
            f"({embedding_class}), which excludes {int((~token_mask).sum())} of "
            f"{token_mask.numel()} tokens\n  pad at the end, with labels of -100, or fill the "
            "sequences",
            code="cp-positions-from-mask",
        )
    count, length = sequence.shape[:2]
    return Batch(
        local,
        context.local_chunks(all_positions)[0],
        count,
        length,
        token_mask,
        counted,
        documents,
        packing,
    )


def _unpadded(mask: Any, all_positions: Tensor) -> Tensor | None:
    """Return the mask of tokens that are not padding; None if all tokens count."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != all_positions.shape[1]:
        raise SliceError(
            f"--cp: expected an attention_mask [batch, {all_positions.shape[1]}], or none; found "
            f"{list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}",
            code="cp-mask-shape",
        )
    return None if bool(mask.all()) else mask.to(all_positions.device, torch.bool)


def _is_trailing(token_mask: Tensor, shifted: Tensor | None) -> bool:
    """Return whether all padding is trailing and has no labels."""
    if shifted is None:
        return False
    trailing = bool((token_mask[:, :-1] >= token_mask[:, 1:]).all())
    return trailing and bool((shifted[~token_mask] == IGNORED_LABEL).all())


def _position_counting_embedding(model: nn.Module) -> str:
    """Return the class of an embedding that counts positions from a mask; "" without one."""
    embeddings = {type(module) for module in model.modules() if isinstance(module, nn.Embedding)}
    classes = (kind for kind in embeddings if "attention_mask" in _parameters(kind.forward))
    return next((kind.__name__ for kind in classes), "")


def _parameters(function: Any) -> Any:
    return inspect.signature(function).parameters


def _packed(
    model: Any, arguments: dict[str, Any], all_positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return position ids and the index of each token's packed sequence.

    As in transformers (masking_utils.find_packed_sequence_indices), a position id that does not
    continue the previous one starts a sequence, if there is no mask and no key-value cache.
    """
    positions = arguments.get("position_ids")
    if positions is None:
        return all_positions, None
    if positions.dim() != 2 or positions.shape[1] != all_positions.shape[1]:
        raise SliceError(
            f"--cp: expected position_ids [batch, {all_positions.shape[1]}], or none; found "
            f"{list(positions.shape)}",
            code="cp-positions-shape",
        )
    caches = arguments.get("use_cache")
    caches = model.config.get_text_config().use_cache if caches is None else caches
    # Transformers detects packed sequences only without a cache, and turns the cache off when it
    # checkpoints activations.
    if caches and not (model.training and model.is_gradient_checkpointing):
        return positions, None
    # The first position continues what stands before it, so a row's first token starts no new
    # sequence.
    starts = torch.diff(positions, prepend=positions[:, :1] - 1, dim=1) != 1
    if arguments.get("attention_mask") is not None or not bool(starts.any()):
        return positions, None
    documents = starts.cumsum(1)
    sequence = arguments.get("input_ids")
    sequence = arguments["inputs_embeds"] if sequence is None else sequence
    return positions, documents.expand(len(sequence), -1)


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
    context = Context(group, comm)
    layer = _Layer(context, eager=configured._attn_implementation == "eager")
    chunked = _CHUNKED in (getattr(configured, "layer_types", None) or ())
    _register_attention()
    for module in _configure(model, _ATTENTION):
        setattr(module, _LAYER, layer)

    running = packed = False

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal running, packed
        running = True
        batch = shard_batch(module, args, kwargs, context)
        packed = batch.packing is not None
        masked = (
            layer.eager or chunked or batch.token_mask is not None or batch.documents is not None
        )
        if chunked and batch.documents is not None:
            raise SliceError(
                f"--cp: {type(module).__name__} uses chunked attention, which --cp does not "
                "support with packed sequences: do not pack",
                code="cp-chunked-packed",
            )
        implementation = MASKED if masked else _ATTENTION
        _configure(module, implementation)
        if masked:
            masking = batch.token_mask, batch.documents, layer.eager, batch.packing
            CURRENT.set(MaskInputs(batch.query_positions, batch.length, *masking))
            # A mask of ones if nothing is padded: without a mask, transformers looks for packed
            # sequences in position ids, and those of the part jump between its two chunks.
            batch.arguments["attention_mask"] = (
                batch.unmasked() if batch.token_mask is None else batch.token_mask
            )
        if adds_balancing_loss(module, batch.arguments):
            share_balancing_loss(module)
            counted = None if batch.counted is None else context.local_chunks(batch.counted)
            BALANCE.set(Balance((group,), peers_absent, counted))
        return (), batch.arguments

    def gather(logits: Tensor) -> Tensor:
        whole: Any = GatheredLogits.apply(logits, group)
        return whole

    def enter_trunk(module: nn.Module, _: Any) -> None:
        if not running:
            raise SliceError(
                f"--cp: {type(module).__name__} was called directly with whole sequences, but "
                f"--cp cuts them when {type(model).__name__} is called\n"
                "  call that, or leave --cp out",
                code="cp-called-directly",
            )

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal running
        running = False
        CURRENT.set(None)
        BALANCE.set(None)
        if not has_loss or output is None:
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
                parts[0] if len(parts) == 1 else torch.stack(parts), group, peers_absent
            )
            # indexed, not split: autograd forbids in-place changes of views of a split
            for place, key in enumerate(losses):
                output[key] = summed if len(losses) == 1 else summed[place]
        output.__class__ = (
            without_logits(type(output), _PACKED_LOGITS)
            if packed
            else logits_when_read(type(output), gather)
        )

    # First, so that the hooks of the other axes see this rank's part of the batch.
    model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    trunk: Any = model.base_model
    # A script that calls the trunk itself would run it on the whole sequence.
    if trunk is not model:
        trunk.register_forward_pre_hook(enter_trunk)
    model.register_forward_hook(leave, always_call=True)


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
    of_interface = type(model)._can_set_attn_implementation()  # pyright: ignore[reportPrivateUsage]
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
    ALL_MASK_ATTENTION_FUNCTIONS.register(MASKED, _mask)
