"""The lengths of packed sequences that an operator of attention computes.

Their boundaries are numbers on the GPU, which no profile shows. Where they are known, the recorded
operator gets their lengths as an additional operand.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onerank.annotate.op_costs.attention import boundaries_of
from onerank.annotate.op_costs.packed_lengths import PackedLengths

# Most sequences whose lengths are recorded: those of 10,000 add 50 kB to each call.
_MOST_SEQUENCES = 10_000


def with_lengths(
    operator: str, operands: Sequence[Any], numbers_of: Callable[[Tensor], Tensor | None]
) -> Sequence[Any]:
    """Return an operator's operands, with the text of known lengths added.

    Args:
        operator: its name, with its namespace.
        operands: its arguments, in the schema's order.
        numbers_of: returns the numbers of a tensor; None if they are not known.
    """
    places = boundaries_of(operator)
    if places is None:
        return operands
    lengths = [_lengths_of(operands, place, numbers_of) for place in places]
    queries, keys = lengths
    if not queries or not keys or len(queries) != len(keys) or len(queries) > _MOST_SEQUENCES:
        return operands
    return [*operands, str(PackedLengths(tuple(queries), tuple(keys)))]


def _lengths_of(
    operands: Sequence[Any], place: int, numbers_of: Callable[[Tensor], Tensor | None]
) -> list[int]:
    """Return the lengths between the boundaries in an operand; [] if they are not known."""
    boundaries = operands[place] if place < len(operands) else None
    numbers = numbers_of(boundaries) if isinstance(boundaries, Tensor) else None
    if numbers is None or numbers.dim() != 1:
        return []
    with unset_fake_temporarily():
        ends: list[int] = numbers.tolist()
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    return lengths if min(lengths, default=-1) >= 0 else []
