"""Classify tensor dimensions as sequence, batch or both: all readings, the most plausible first.

A size alone is ambiguous: 4096 may be a sequence or a hidden size, 1 a batch or a broadcast
dimension. Each reading therefore has a cost for its implausible parts. A caller that knows more
about the tensor (how its number of elements grows, what it is multiplied with) takes the cheapest
reading that agrees.
"""

from functools import lru_cache

from onerank.annotate.passes.resize.size_change import (
    BATCH,
    CONSTANT,
    SEQ,
    TOKENS,
    Power,
    Sizing,
    total,
)

Powers = tuple[Power, ...]
Shape = tuple[int, ...]

_MAX_READINGS = 48  # readings considered per tensor
_NO_COST = 0.0
_HIDDEN_AS_SEQUENCE = 1.0  # a constant size that equals the sequence length by chance
_HIDDEN_AS_TOKENS = 1.5  # a constant size that equals the number of tokens by chance
_MULTIPLE = 2.0  # a multiple of the size: heads x batch, or a flattened tensor
_REPEATED = 1.2  # a second sequence dimension, as in attention scores


@lru_cache(maxsize=1 << 16)
def readings(
    shape: Shape, sizing: Sizing, growth: Power | None
) -> tuple[tuple[float, Powers], ...]:
    """Return (cost, powers of each dimension), the cheapest first, then batch and sequence first.

    Args:
        shape: sizes of the tensor.
        sizing: captured and new sizes.
        growth: growth of its number of elements; None if unknown.
    """
    candidates: list[tuple[float, Powers]] = [(0.0, ())]
    for position, size in enumerate(shape):
        options = _options(size, position, len(shape), sizing)
        candidates = [
            (cost + cost_of_size + _order(powers, power), (*powers, power))
            for cost, powers in candidates
            for cost_of_size, power in options
            if growth is None or _within((*powers, power), growth)
        ]
        # Sort only if there are too many: in the unsorted order, equal costs keep the first of two
        # multiples of the micro-batch, which is the one that grows.
        if len(candidates) > 16 * _MAX_READINGS:
            candidates = sorted(candidates, key=lambda candidate: candidate[0])[
                : 16 * _MAX_READINGS
            ]
    if growth is not None:
        candidates = [candidate for candidate in candidates if total(candidate[1]) == growth]
    return tuple(sorted(candidates, key=lambda candidate: candidate[0])[:_MAX_READINGS])


def _options(size: int, position: int, rank: int, sizing: Sizing) -> list[tuple[float, Power]]:
    seq, batch = sizing.lengths, sizing.batch.before
    length = size in seq or sizing.is_shifted_sequence(size)
    tokens = sizing.is_token_count(size)
    options: list[tuple[float, Power]] = []
    if size == batch:
        options.append((_NO_COST, BATCH))
    elif size % batch == 0 and size:
        options.append((_MULTIPLE + 0.5 * (batch == 1) + _MULTIPLE * length, BATCH))
    if length:
        options.append((_NO_COST, SEQ))
    elif size and size % sizing.unit == 0:
        options.append((_MULTIPLE + 1, SEQ))
    merged = 0.3 if position == 0 or rank == 2 else 3.3
    if tokens:
        options.append((merged, TOKENS))
    elif size and size % (batch * sizing.unit) == 0:
        options.append((merged + _MULTIPLE + 1, TOKENS))
    if size and size % (batch * sizing.unit**2) == 0:
        options.append((merged + 2 * _MULTIPLE + 1, (2, 1)))
    if size and size % sizing.unit**2 == 0:  # pairs of positions, for relative position embeddings
        options.append((merged + 2 * _MULTIPLE + 2, (2, 0)))
    # Size 1 is often a broadcast dimension, and a small batch may equal the experts per token.
    by_chance = batch == 1 or size in sizing.routes
    constant = (0.02 if by_chance else 0.5) * (size == batch)
    if length or tokens:
        constant = _HIDDEN_AS_SEQUENCE if length else _HIDDEN_AS_TOKENS
    options.append((constant, CONSTANT))
    return options


def _order(powers: Powers, power: Power) -> float:
    """Return the cost of a dimension after others: a second sequence, or batch after sequence."""
    seq, batch = total(powers)
    cost = 0.0
    if power[0] and seq:
        cost += _REPEATED
    if power[1] and batch:
        cost += 2 * _REPEATED
    if power == BATCH and seq:
        cost += 0.75
    return cost


def _within(powers: Powers, growth: Power) -> bool:
    seq, batch = total(powers)
    return seq <= growth[0] and batch <= growth[1]
