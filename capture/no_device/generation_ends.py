"""When transformers' `generate` ends, without a device: at the largest length.

Sequences end at a token, and beams end by their scores; without a device, both are unknown. The
largest number of tokens is known, so generation computes that many.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from onerank.capture.patches import patched, resolve

CRITERIA = "transformers.generation.stopping_criteria"
"""Module of the criteria that sequences end by."""

LOOPS = "transformers.generation.utils"
"""Module of the loops that generate tokens."""

Numbers = Callable[[Tensor], Tensor | None]
"""Returns the numbers of a tensor; None if they are not known."""


def ends_at_length(numbers: Numbers) -> AbstractContextManager[None]:
    """Let sequences end at their largest length where a criterion reads unknown tokens."""
    owner = f"{CRITERIA}.StoppingCriteriaList"
    original = resolve(owner).__call__

    def call(criteria: Any, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done: Tensor = original(criteria, input_ids, scores, **kwargs)
        if numbers(done) is not None:
            return done
        tokens = input_ids.shape[1]
        lengths = [getattr(criterion, "max_length", None) for criterion in criteria]
        at_end = any(length is not None and tokens >= length for length in lengths)
        return torch.full(done.shape, at_end, dtype=torch.bool, device=done.device)

    return patched(owner, {"__call__": call})


# The argument of `_UNFINISHED` that has the results of the criteria.
_HITS = "next_token_hits_stopping_criteria"
_UNFINISHED = "_beam_search_has_unfinished_sequences"


def beams_end_at_length(numbers: Numbers) -> AbstractContextManager[None]:
    """Let beam search go on until the criteria end all beams: scores would end it before."""
    owner = f"{LOOPS}.GenerationMixin"
    original = getattr(resolve(owner), _UNFINISHED)
    parameters = inspect.signature(original)

    def unfinished(*args: Any, **kwargs: Any) -> bool:
        hits: Tensor = parameters.bind(*args, **kwargs).arguments[_HITS]
        known = numbers(hits)
        return known is None or not bool(known.all())

    return patched(owner, {_UNFINISHED: staticmethod(unfinished)})
