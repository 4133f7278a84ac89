"""This rank's part of a batch under context parallelism."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onerank.capture.parallelize.context.packed_sequences import Packing, packing_of
from onerank.capture.parallelize.context.sequence_shards import Context
from onerank.capture.parallelize.model_structure import by_name
from onerank.capture.parallelize.tensor.vocab_parallel import IGNORED_LABEL
from onerank.ir.errors import SliceError

_BESIDE_TEXT = ("pixel_values", "pixel_values_videos", "input_features")


@dataclass(frozen=True)
class Batch:
    """A call's arguments, cut to a rank's part of the sequence, and what masks are to know of it.

    Attributes:
        given: arguments by name; without attention_mask.
        rows: place in the sequence of each token of the part, [part].
        sequences: how many.
        length: tokens of the whole sequence.
        seen: which tokens are none of padding, [batch, sequence]; None where nothing is to be
            masked for it.
        counted: the same for statistics of the tokens, such as a balancing loss.
        documents: number of the packed sequence each token is of, [batch, sequence]; None for one.
        packing: the same where each is cut by itself, so that no mask is needed.
    """

    given: dict[str, Any]
    rows: Tensor
    sequences: int
    length: int
    seen: Tensor | None
    counted: Tensor | None
    documents: Tensor | None
    packing: Packing | None

    def unmasked(self) -> Tensor:
        """Return an attention_mask of the whole sequences that hides nothing."""
        return self.rows.new_ones((self.sequences, self.length))


def own_part(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context
) -> Batch:
    """Cut a call's arguments to this rank's part of the sequence.

    Labels are shifted before, so that the last token of a chunk learns from the first of the next;
    without labels the script has a loss of its own, for which it reads the logits.
    Padding behind a sequence that nothing is learnt from hides nothing from causal attention: it is
    computed like any other token, without a mask, as in Megatron-LM.

    Raises:
        SliceError: the call is not one that a part can be cut from.
    """
    given = by_name(model, args, kwargs)
    labels = given.get("labels")
    sequence = next(
        (given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None),
        None,
    )
    if sequence is None:
        raise SliceError(
            f"--cp: {type(model).__name__} was called without input_ids; a rank gets its part of "
            "these: call model(input_ids=..., labels=...)"
        )
    if beside := [name for name in _BESIDE_TEXT if given.get(name) is not None]:
        raise SliceError(
            f"--cp: {type(model).__name__} was called with {', '.join(beside)}, whose features "
            "take the place of tokens anywhere in the sequence; how a rank finds those of its part "
            "is not known: train on text alone, or leave --cp out"
        )
    kept = given.get("logits_to_keep")
    if isinstance(kept, Tensor) or kept:
        raise SliceError(
            f"--cp: {type(model).__name__} was called with logits_to_keep, places in the whole "
            "sequence, of which a rank has a part: leave it out"
        )
    rows = torch.arange(sequence.shape[1], device=sequence.device).unsqueeze(0)
    shifted = given.get("shift_labels")
    if shifted is None and labels is not None:
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]
    counted = _unpadded(given.get("attention_mask"), rows)
    positions, documents = _packed(model, given, rows)
    packing = None
    if documents is not None and context.comm == "p2p":
        packing = packing_of(documents, context.group.rank(), context.group.size())
        positions = positions.expand(len(documents), -1)
    cut = context.own if packing is None else packing.own
    for name in ("input_ids", "inputs_embeds", "labels"):
        if given.get(name) is not None:
            given[name] = cut(given[name])
    own = {**given, "attention_mask": None, "position_ids": cut(positions)}
    if labels is not None and shifted is not None:
        if own.get("num_items_in_batch") is None:
            own["num_items_in_batch"] = (shifted != IGNORED_LABEL).sum()
        own["shift_labels"] = cut(shifted)
    seen = None if counted is None or _is_behind(counted, shifted) else counted
    if seen is not None and (counting := _counting(model)):
        raise SliceError(
            f"--cp: {type(model).__name__} counts its positions from the attention_mask "
            f"({counting}), which leaves out {int((~seen).sum())} of {seen.numel()} tokens: pad "
            "behind the sequences, with labels of -100 there, or fill them"
        )
    count, length = sequence.shape[:2]
    return Batch(own, context.own(rows)[0], count, length, seen, counted, documents, packing)


def _unpadded(mask: Any, rows: Tensor) -> Tensor | None:
    """Return which tokens are none of padding, None where all."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != rows.shape[1]:
        raise SliceError(
            f"--cp: expected an attention_mask [batch, {rows.shape[1]}], or none; found "
            f"{list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
        )
    return None if bool(mask.all()) else mask.to(rows.device, torch.bool)


def _is_behind(seen: Tensor, shifted: Tensor | None) -> bool:
    """Whether all padding is behind its sequence, and known to have no labels to learn from."""
    if shifted is None:
        return False
    ends = bool((seen[:, :-1] >= seen[:, 1:]).all())
    return ends and bool((shifted[~seen] == IGNORED_LABEL).all())


def _counting(model: nn.Module) -> str:
    """Return the class of the embedding that counts positions from a mask, "" if there is none."""
    embeddings = {type(module) for module in model.modules() if isinstance(module, nn.Embedding)}
    kinds = (kind for kind in embeddings if "attention_mask" in _parameters(kind.forward))
    return next((kind.__name__ for kind in kinds), "")


def _parameters(function: Any) -> Any:
    return inspect.signature(function).parameters


def _packed(model: Any, given: dict[str, Any], rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return position ids, and which packed sequence each token is of.

    As transformers has it (masking_utils.find_packed_sequence_indices): sequences are told apart by
    position ids that do not go on, if there is neither a mask nor a cache of keys and values.
    """
    told = given.get("position_ids")
    if told is None:
        return rows, None
    if told.dim() != 2 or told.shape[1] != rows.shape[1]:
        raise SliceError(
            f"--cp: expected position_ids [batch, {rows.shape[1]}], or none; found "
            f"{list(told.shape)}"
        )
    caches = given.get("use_cache")
    caches = model.config.get_text_config().use_cache if caches is None else caches
    if caches and not (model.training and model.is_gradient_checkpointing):
        return told, None
    begins = torch.diff(told, prepend=told[:, :1] - 1, dim=1) != 1
    if given.get("attention_mask") is not None or not bool(begins.any()):
        return told, None
    documents = begins.cumsum(1)
    sequence = given.get("input_ids")
    sequence = given["inputs_embeds"] if sequence is None else sequence
    return told, documents.expand(len(sequence), -1)
