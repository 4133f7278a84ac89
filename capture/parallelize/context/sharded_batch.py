"""A rank's part of a batch in context parallelism: its arguments, and its attention masks.

The arguments are cut as Megatron-LM's get_batch_on_this_cp_rank cuts a batch in its training loop.

Padding, packed sequences, chunked attention and eager attention need masks. Transformers builds a
mask for each kind of layer from functions of query and key positions
(transformers/masking_utils.py). These functions are evaluated for the positions of the rank's
queries and of all keys; padding and other packed sequences are then masked out.
"""

import contextvars
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from onerank.capture.parallelize.context.packed_sequences import Packing, packing_of
from onerank.capture.parallelize.context.partial_attention import MASK_ROW_MULTIPLE
from onerank.capture.parallelize.context.sequence_attention import Context
from onerank.capture.parallelize.model_structure import by_name
from onerank.capture.parallelize.tensor.vocab_parallel import IGNORED_LABEL
from onerank.ir.errors import SliceError

_NON_TEXT_INPUTS = ("pixel_values", "pixel_values_videos", "input_features")


@dataclass(frozen=True)
class MaskInputs:
    """Positions, padding and packing of a call's sequences, from which layers build masks.

    Attributes:
        query_positions: position in the sequence of each token of this rank's part, [part].
        length: tokens of a whole sequence.
        token_mask: mask of tokens that are not padding, [batch, sequence]; None if padding needs no
            mask.
        documents: index of each token's packed sequence, [batch, sequence]; None for one.
        packing: packed sequences that are cut one by one, which replaces masks.
        eager: whether the model's eager attention uses the mask (lowest finite number, not -inf).
    """

    query_positions: Tensor
    length: int
    token_mask: Tensor | None
    documents: Tensor | None
    packing: Packing | None
    eager: bool

    @property
    def hides_tokens(self) -> bool:
        """Whether tokens attend to fewer than all earlier ones."""
        return self.token_mask is not None or self.documents is not None


@dataclass(frozen=True)
class Batch:
    """A call's arguments, cut to a rank's part of the sequence, and the inputs of its masks.

    Attributes:
        arguments: arguments by name, without attention_mask.
        sequences: number of sequences.
        counted: mask of tokens that are not padding, for token statistics such as a balancing loss,
            [batch, sequence]; None if all count.
        masks: inputs of the attention masks.
    """

    arguments: dict[str, Any]
    sequences: int
    counted: Tensor | None
    masks: MaskInputs

    def attention_mask(self) -> Tensor:
        """Return an attention_mask of the whole sequences: of ones if nothing is padded."""
        if self.masks.token_mask is not None:
            return self.masks.token_mask
        return self.masks.query_positions.new_ones((self.sequences, self.masks.length))


def shard_batch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: Context,
    *,
    eager: bool = False,
) -> Batch:
    """Cut a call's arguments to this rank's part of the sequence.

    Without labels the script computes the loss from the logits. Trailing padding without labels
    needs no mask under causal attention; it is computed like any token, as in Megatron-LM.

    Args:
        model: the model that the script calls.
        args: positional arguments of the call; input_ids, labels and masks are [batch, sequence].
        kwargs: keyword arguments of the call.
        context: the split of the sequence.
        eager: as of `MaskInputs`.

    Raises:
        SliceError: the arguments cannot be cut.
    """
    arguments = by_name(model, args, kwargs)
    sequence = _sequence_to_cut(model, arguments)
    all_positions = torch.arange(sequence.shape[1], device=sequence.device).unsqueeze(0)
    counted = _unpadded(arguments.get("attention_mask"), all_positions)
    shifted = _shifted_labels(arguments)
    positions, documents = _packed(model, arguments, all_positions)
    token_mask = None if counted is None or _is_trailing(counted, shifted) else counted
    if token_mask is not None:
        _check_positions(model, token_mask)
    packing = None
    if documents is not None and context.comm == "p2p":
        packing = packing_of(documents, context.group.rank(), context.group.size())
        positions = positions.expand(len(documents), -1)
    cut = context.local_chunks if packing is None else packing.local_chunks
    return Batch(
        arguments=_cut_arguments(arguments, positions, shifted, cut),
        sequences=sequence.shape[0],
        counted=counted,
        masks=MaskInputs(
            query_positions=context.local_chunks(all_positions)[0],
            length=sequence.shape[1],
            token_mask=token_mask,
            documents=documents,
            packing=packing,
            eager=eager,
        ),
    )


def _cut_arguments(
    arguments: dict[str, Any],
    positions: Tensor,
    shifted: Tensor | None,
    cut: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    """Return the arguments of a call on this rank's part of the sequence.

    Args:
        arguments: of the call on the whole sequence, by name.
        positions: position of each token.
        shifted: the label that each token predicts; None without labels.
        cut: cuts a tensor [batch, sequence, ...] to this rank's part.
    """
    names = ("input_ids", "inputs_embeds", "labels")
    parts = {name: cut(arguments[name]) for name in names if arguments.get(name) is not None}
    # Each part needs its positions: without them a model counts from 0.
    local = {**arguments, **parts, "attention_mask": None, "position_ids": cut(positions)}
    if local.get("labels") is not None and shifted is not None:
        if local.get("num_items_in_batch") is None:
            # By default the loss function divides by the part's labels, and parts have unequal
            # numbers of them; divided by the whole sequence's number, the parts sum to its loss.
            local["num_items_in_batch"] = (shifted != IGNORED_LABEL).sum()
        local["shift_labels"] = cut(shifted)
    return local


def _sequence_to_cut(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """Return the tokens or embeddings of a call, [batch, sequence, ...].

    Raises:
        SliceError: there are none, or other arguments depend on positions in the whole sequence.
    """
    names = ("input_ids", "inputs_embeds")
    given = [arguments[name] for name in names if arguments.get(name) is not None]
    if not given:
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
    return given[0]


def _shifted_labels(arguments: dict[str, Any]) -> Tensor | None:
    """Return the label that each token predicts, [batch, sequence]; None without labels."""
    shifted, labels = arguments.get("shift_labels"), arguments.get("labels")
    if shifted is None and labels is not None:
        # The shift comes before the cut: a chunk's last token learns from the next chunk's first.
        return nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
    return shifted


def _check_positions(model: nn.Module, token_mask: Tensor) -> None:
    """Refuse a model that counts positions from a mask, which the rank's part does not have."""
    if embedding_class := _position_counting_embedding(model):
        raise SliceError(
            f"--cp: {type(model).__name__} counts its positions from the attention_mask "
            f"({embedding_class}), which excludes {int((~token_mask).sum())} of "
            f"{token_mask.numel()} tokens\n  pad at the end, with labels of -100, or fill the "
            "sequences",
            code="cp-positions-from-mask",
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


# Attention masks ---------------------------------------------------------------------------------


MASK_INPUTS: contextvars.ContextVar[MaskInputs | None] = contextvars.ContextVar(
    "onerank_mask_inputs", default=None
)
"""Mask inputs of the current call. Per thread, because `verify` runs one slice per thread."""


def part_mask(
    *, mask_function: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> Tensor | Packing:
    """Return the additive mask of this rank's queries, [batch or 1, 1, part, sequence].

    Transformers calls it as a mask function of its interface. Packed sequences that are cut one by
    one need no mask: their `Packing` takes its place.
    """
    inputs = MASK_INPUTS.get()
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
        batch_indices[:, None, None, None],
        batch_indices[None, :1, None, None],
        query_positions[None, None, :, None],
        key_positions[None, None, None, :],
    )
    if token_mask is not None:
        allowed = allowed & token_mask[:, None, None, :]
    if documents is not None:
        allowed = allowed & (
            documents[:, query_positions][:, None, :, None] == documents[:, None, None, :]
        )
    # Only the stride is padded: the slice at the end has the sequence's length.
    # A mask with aligned rows is not copied again in every layer (`partial_attention._bias`).
    padded = inputs.length + -inputs.length % MASK_ROW_MULTIPLE
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
