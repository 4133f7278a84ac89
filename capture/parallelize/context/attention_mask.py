"""Which keys of the whole sequence the queries of a part see, where a flag cannot say it.

Padding, packed sequences, chunks of attention and a model's own ("eager") attention need a mask.
Transformers makes one for each kind of layer and call, from functions of the places of query and
key (transformers/masking_utils.py). Here these are asked for the places of the rank's part and of
all keys, and what is padded or packed otherwise is taken out.
"""

import contextvars
import inspect
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from onerank.capture.parallelize.context.packed_sequences import Packing
from onerank.ir.errors import SliceError

MASKED = "onerank_context_parallel_masked"
_ALIGNED = 16  # elements from one row of a mask to the next, as torch pads masks for the kernels


@dataclass(frozen=True)
class Structure:
    """What a call's sequences are, as the masks of its layers need it.

    Attributes:
        rows: place in the sequence of each token of the part, [part].
        length: tokens of a sequence.
        seen: which tokens are none of padding, [batch, sequence]; None where all.
        documents: number of the packed sequence each token is of, [batch, sequence]; None for one.
        eager: whether masks are for a model's own attention, which adds the lowest finite number.
        packing: packed sequences that are each cut by itself; stands in the place of masks.
    """

    rows: Tensor
    length: int
    seen: Tensor | None = None
    documents: Tensor | None = None
    eager: bool = False
    packing: Packing | None = None


CURRENT: contextvars.ContextVar[Structure | None] = contextvars.ContextVar(
    "onerank_context_structure", default=None
)
"""The structure of the call under way: a thread, and so a slice under `verify`, has its own."""


def _mask(
    *, mask_function: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> Tensor | Packing:
    """Return what is added to scores, [batch or 1, 1, part, sequence], as transformers asks it."""
    structure = CURRENT.get()
    if structure is None or options.get("use_vmap"):
        raise SliceError(
            "--cp: the model makes an attention mask of its own kind, and how parts of a sequence "
            "attend with it is not known: leave --cp out"
        )
    if structure.packing is not None:
        if not _knows_positions(inspect.currentframe()):
            raise SliceError(
                "--cp-comm p2p: sequences are packed, and the model lets all of a row attend to "
                "each other, as it tells its masks no position_ids: use --cp-comm all_gather"
            )
        return structure.packing
    rows, seen = structure.rows, structure.seen
    documents = structure.documents if _knows_positions(inspect.currentframe()) else None
    columns = torch.arange(structure.length, device=rows.device)
    batch = 1 if seen is None and documents is None else len(_either(seen, documents))
    at = torch.arange(batch, device=rows.device)
    allowed: Tensor = mask_function(
        *(at[:, None, None, None], at[None, :1, None, None]),
        *(rows[None, None, :, None], columns[None, None, None, :]),
    )
    if seen is not None:
        allowed = allowed & seen[:, None, None, :]
    if documents is not None:
        allowed = allowed & (documents[:, rows][:, None, :, None] == documents[:, None, None, :])
    padded = structure.length + -structure.length % _ALIGNED
    scores = torch.zeros((*allowed.shape[:-1], padded), dtype=dtype, device=rows.device)
    lowest = torch.finfo(dtype).min if structure.eager else float("-inf")
    return scores[..., : structure.length].masked_fill_(~allowed, lowest)


def _knows_positions(frame: FrameType | None) -> bool:
    """Whether the model tells position ids to the function of transformers' that asks for a mask.

    GPT-OSS and others do not, so that packed sequences attend to each other there.
    """
    asking = frame.f_back if frame is not None else None
    return asking is not None and asking.f_locals.get("position_ids") is not None


def _either(one: Tensor | None, other: Tensor | None) -> Tensor:
    return one if one is not None else other  # pyright: ignore[reportReturnType]


ALL_MASK_ATTENTION_FUNCTIONS.register(MASKED, _mask)
