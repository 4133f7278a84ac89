"""Classify tensor dimensions as sequence, batch or both: all readings, the most plausible first.

A size alone says little: 4096 may be a sequence or a hidden size, 1 a batch or nothing. So each
reading has a cost for its implausible parts. A caller that knows more about the tensor (how its
number of elements grows, what it is multiplied with) takes the cheapest reading that agrees.
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

_MOST = 48  # readings of one tensor that are looked at
_FREE = 0.0
_HIDDEN_AS_SEQUENCE = 1.0  # a size that is the sequence's, and is not
_HIDDEN_AS_TOKENS = 1.5
_TIMES = 2.0  # a multiple: heads x batch, elements of a flat tensor
_TWICE = 1.2  # scores have two dimensions of the sequence


@lru_cache(maxsize=1 << 16)
def readings(shape: Shape, sizing: Sizing, grows: Power | None) -> tuple[tuple[float, Powers], ...]:
    """Return (cost, powers of each dimension), the cheapest first, then batch and sequence first.

    Args:
        shape: sizes of the tensor.
        sizing: captured and new sizes.
        grows: how its number of elements grows; None: not known.
    """
    found: list[tuple[float, Powers]] = [(0.0, ())]
    for place, size in enumerate(shape):
        options = _options(size, place, len(shape), sizing)
        found = [
            (cost + own + _order(powers, power), (*powers, power))
            for cost, powers in found
            for own, power in options
            if grows is None or _within((*powers, power), grows)
        ]
        if len(found) > 16 * _MOST:
            found = sorted(found, key=lambda one: one[0])[: 16 * _MOST]
    if grows is not None:
        found = [one for one in found if total(one[1]) == grows]
    return tuple(sorted(found, key=lambda one: one[0])[:_MOST])


def _options(size: int, place: int, rank: int, sizing: Sizing) -> list[tuple[float, Power]]:
    seq, batch = sizing.lengths, sizing.batch.before
    length = size in seq or sizing.near(size)
    tokens = sizing.of_tokens(size)
    options: list[tuple[float, Power]] = []
    if size == batch:
        options.append((_FREE, BATCH))
    elif size % batch == 0 and size:
        options.append((_TIMES + 0.5 * (batch == 1) + _TIMES * length, BATCH))
    if length:
        options.append((_FREE, SEQ))
    elif size and size % sizing.unit == 0:
        options.append((_TIMES + 1, SEQ))
    merged = 0.3 if place == 0 or rank == 2 else 3.3
    if tokens:
        options.append((merged, TOKENS))
    elif size and size % (batch * sizing.unit) == 0:
        options.append((merged + _TIMES + 1, TOKENS))
    if size and size % (batch * sizing.unit**2) == 0:
        options.append((merged + 2 * _TIMES + 1, (2, 1)))
    if size and size % sizing.unit**2 == 0:  # pairs of positions, as relative ones are looked up
        options.append((merged + 2 * _TIMES + 2, (2, 0)))
    by_chance = batch == 1 or size in sizing.routes
    constant = (0.02 if by_chance else 0.5) * (size == batch)
    if length or tokens:
        constant = _HIDDEN_AS_SEQUENCE if length else _HIDDEN_AS_TOKENS
    options.append((constant, CONSTANT))
    return options


def _order(powers: Powers, power: Power) -> float:
    """Return what it costs to come after these: a second sequence, a batch after a sequence."""
    seq, batch = total(powers)
    cost = 0.0
    if power[0] and seq:
        cost += _TWICE
    if power[1] and batch:
        cost += 2 * _TWICE
    if power == BATCH and seq:
        cost += 0.75
    return cost


def _within(powers: Powers, grows: Power) -> bool:
    seq, batch = total(powers)
    return seq <= grows[0] and batch <= grows[1]
