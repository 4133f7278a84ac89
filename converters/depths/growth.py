"""What grows with the number of layers outside of them: loops over parameters, lists of tensors.

Two sequences, of a shallow and of a deep capture, are matched; where the deep one has more, the
surplus must be a unit repeated once per layer (or period of layers) that was added.
"""

import json
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass
from difflib import SequenceMatcher
from fractions import Fraction
from typing import Any, cast

_LIST_TYPE = "GenericList["

Named = tuple[Any, ...]
"""Key of an operator: name, phase, and what else tells it from others."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """How far beyond the deep capture to go.

    Attributes:
        between: periods of layers between the shallow and the deep capture.
        beyond: periods between the deep capture and the model's own depth.
    """

    between: int
    beyond: int

    def number(self, shallow: int, deep: int) -> int:
        """Return a figure on the line through two, rounded, 0 at least."""
        return max(0, deep + round(Fraction((deep - shallow) * self.beyond, self.between)))


@dataclass(frozen=True, slots=True)
class Alignment:
    """Two sequences matched.

    Attributes:
        pairs: (position in the shallow one, position in the deep one) of the same element.
        units: (start, length) in the deep one, of the last repetition of every surplus.
    """

    pairs: list[tuple[int, int]]
    units: list[tuple[int, int]]


def align(
    shallow: Sequence[Hashable],
    deep: Sequence[Hashable],
    between: int,
    alike: Sequence[Sequence[Hashable]] = ((), ()),
) -> Alignment | None:
    """Match two sequences; None when the surplus of `deep` is no repetition.

    Args:
        shallow: elements of the shallow capture.
        deep: elements of the deep one.
        between: how often the unit of a surplus must be repeated in it.
        alike: of both, weaker keys by which elements may pair up where nothing else fits.
    """
    stack: list[tuple[int, int, Any]] = [(0, 0, None)]
    seen: set[tuple[int, int]] = set()
    while stack:
        i, j, trail = stack.pop()
        start = i
        while i < len(shallow) and j < len(deep) and shallow[i] == deep[j]:
            i, j = i + 1, j + 1
        trail = ("same", start, j - (i - start), i - start, trail)
        if i == len(shallow) and j == len(deep):
            return _retrace(trail)
        if (i, j) in seen:
            continue
        seen.add((i, j))
        surplus = (len(deep) - j) - (len(shallow) - i)
        if alike[0] and i < len(shallow) and j < len(deep) and alike[0][i] == alike[1][j]:
            stack.append((i + 1, j + 1, ("same", i, j, 1, trail)))
        for unit in range(surplus // between, 0, -1):  # the shortest is tried first
            after = j + unit * between
            goes_on = _goes_on(shallow, i, deep, after) or (
                bool(alike[0]) and _goes_on(alike[0], i, alike[1], after)
            )
            if _repeats(deep, j, unit, between) and goes_on:
                grown = ("grown", j + unit * (between - 1), unit, 0, trail)
                stack.append((i, j + unit * between, grown))
    return None


def align_without(
    aside: Set[str], shallow: Sequence[Named], deep: Sequence[Named], between: int
) -> tuple[Alignment | None, list[int], list[int]]:
    """Match two captures, elements of some names left out of both.

    An element is its name, its phase and what else tells it from others; where nothing fits,
    elements of the same name and phase pair up.

    Returns:
        The match, or None; the positions left out in the shallow and in the deep one.
    """
    few = [at for at, key in enumerate(shallow) if key[0] not in aside]
    many = [at for at, key in enumerate(deep) if key[0] not in aside]
    a, b = [shallow[at] for at in few], [deep[at] for at in many]
    found = align(a, b, between, ([key[:2] for key in a], [key[:2] for key in b]))
    if found is None:
        return None, [], []
    pairs = [(few[i], many[j]) for i, j in found.pairs]
    ends = [(many[start], many[start + length - 1] + 1) for start, length in found.units]
    units = [(start, end - start) for start, end in ends]
    left, right = (
        [at for at, key in enumerate(keys) if key[0] in aside] for keys in (shallow, deep)
    )
    return Alignment(pairs, units), left, right


def align_loosely(
    shallow: Sequence[Hashable], deep: Sequence[Hashable], between: int
) -> tuple[Alignment, list[int], list[int]]:
    """Match two captures that differ in more than their depth (one step logs its loss, say).

    Returns:
        What matches; the positions in the shallow and in the deep one that have no counterpart.
    """
    found = Alignment([], [])
    left: list[int] = []
    right: list[int] = []
    codes = SequenceMatcher(None, shallow, deep, autojunk=False).get_opcodes()
    for code, i, i_end, j, j_end in codes:
        if code == "equal":
            found.pairs.extend(zip(range(i, i_end), range(j, j_end), strict=True))
            continue
        units = range((j_end - j) // between, 0, -1)
        unit = next((u for u in units if _repeats(deep, j - u, u, between + 1)), 0)
        if unit:
            found.units.append((j + unit * (between - 1), unit))
        left += range(i, i_end)
        right += range(j + unit * between, j_end)
    return found, left, right


def _repeats(deep: Sequence[Hashable], start: int, unit: int, times: int) -> bool:
    """Whether `times` units begin at `start`; a single one must repeat the unit before it."""
    first = start - unit if times == 1 else start
    if first < 0 or start + unit * times > len(deep):
        return False
    return all(deep[at] == deep[at + unit] for at in range(first, start + unit * (times - 1)))


def _goes_on(shallow: Sequence[Hashable], i: int, deep: Sequence[Hashable], j: int) -> bool:
    if i == len(shallow) or j == len(deep):
        return i == len(shallow) and j == len(deep)
    return shallow[i] == deep[j]


def _retrace(trail: Any) -> Alignment:
    pairs: list[tuple[int, int]] = []
    units: list[tuple[int, int]] = []
    while trail is not None:
        sort, first, second, length, trail = trail
        if sort == "grown":
            units.append((first, second))
        else:
            pairs += [(first + k, second + k) for k in reversed(range(length))]
    return Alignment(pairs[::-1], units[::-1])


def stretched(deep: Sequence[Any], units: Sequence[tuple[int, int]], beyond: int) -> list[Any]:
    """Return a sequence with each unit repeated `beyond` times more, after its last."""
    made: list[Any] = []
    done = 0
    for start, length in units:
        made += deep[done : start + length]
        made += list(deep[start : start + length]) * beyond
        done = start + length
    return [*made, *deep[done:]]


def operand_key(shapes: str) -> str:
    """Return operand shapes with every list of tensors as one word: those may grow."""
    operands = json.loads(shapes or "[]")
    return json.dumps(["tensors" if _is_tensors(one) else one for one in operands])


def stretch_shapes(shallow: str, deep: str, stretch: Stretch) -> str | None:
    """Return operand shapes at the model's own depth; None when they follow no rule.

    Args:
        shallow: JSON of the shallow capture, one entry per operand.
        deep: that of the deep one.
        stretch: how far to go.
    """
    if shallow == deep:
        return deep
    made = _shape(json.loads(shallow or "[]"), json.loads(deep or "[]"), stretch)
    return None if made is None else json.dumps(made, separators=(",", ":"))


def stretch_types(shallow: str, deep: str, stretch: Stretch) -> str | None:
    """Return operand types at the model's own depth; None when they follow no rule."""
    if shallow == deep:
        return deep
    first, second = json.loads(shallow or "[]"), json.loads(deep or "[]")
    if len(first) != len(second):
        return None
    made = [_type(a, b, stretch) for a, b in zip(first, second, strict=True)]
    return None if None in made else json.dumps(made, separators=(",", ":"))


def _is_tensors(operand: Any) -> bool:
    return isinstance(operand, list) and operand != [] and not _integers(cast("list[Any]", operand))


def _integers(values: list[Any]) -> bool:
    return any(isinstance(value, int) for value in values)


def _shape(shallow: Any, deep: Any, stretch: Stretch) -> Any:
    if isinstance(shallow, int) and isinstance(deep, int):
        return stretch.number(shallow, deep)
    if not isinstance(shallow, list) or not isinstance(deep, list):
        return deep if shallow == deep else None
    a, b = cast("list[Any]", shallow), cast("list[Any]", deep)
    if len(a) == len(b):
        made = [_shape(one, other, stretch) for one, other in zip(a, b, strict=True)]
        return None if None in made else made
    return _grown([json.dumps(one) for one in a], [json.dumps(one) for one in b], b, stretch)


def _type(shallow: str, deep: str, stretch: Stretch) -> str | None:
    if shallow == deep:
        return deep
    if not (shallow.startswith(_LIST_TYPE) and deep.startswith(_LIST_TYPE)):
        return None
    a, b = (text[len(_LIST_TYPE) : -1].split(",") for text in (shallow, deep))
    made = _grown(a, b, b, stretch)
    return None if made is None else f"{_LIST_TYPE}{','.join(made)}]"


def _grown(
    a: Sequence[str], b: Sequence[str], elements: Sequence[Any], stretch: Stretch
) -> list[Any] | None:
    found = align(a, b, stretch.between)
    return None if found is None else stretched(elements, found.units, stretch.beyond)
