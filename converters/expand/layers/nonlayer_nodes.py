"""Work outside the layers at another depth: loops over parameters and tensor lists grow with it.

What grows with the number of layers outside of them: loops over parameters, lists of tensors.

Two sequences, of a shallow and of a deep capture, are matched; where the deep one has more, the
surplus must be a unit repeated once per layer (or period of layers) that was added.

The part of a step outside the layers, at a depth that was not captured.

Embedding, head and loss are there once at any depth and keep what was measured. Of what works on
all parameters at once (a foreach or fused optimizer, the clipping of gradients) the operators are
the same and their tensor lists, bytes, kernels and durations grow: all on the line through the
shallowest and the deepest capture. Of a loop over the parameters the repeated unit is found. What
works on all of them within the first or last layer (a flat buffer, summed with the last of its
gradients) grows likewise.
"""

import json
from collections import Counter
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from fractions import Fraction
from itertools import groupby
from typing import Any, cast

from onerank.converters.expand.layers.layer_passes import LayeredGraph
from onerank.ir.errors import DepthError
from onerank.ir.nodes import UNKNOWN

_LIST_TYPE = "GenericList["

Named = tuple[Any, ...]
"""Key of an operator: name, phase, and what else tells it from others."""


@dataclass(frozen=True, slots=True)
class DepthExtrapolation:
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


def stretch_shapes(shallow: str, deep: str, stretch: DepthExtrapolation) -> str | None:
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


def stretch_types(shallow: str, deep: str, stretch: DepthExtrapolation) -> str | None:
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


def _shape(shallow: Any, deep: Any, stretch: DepthExtrapolation) -> Any:
    if isinstance(shallow, int) and isinstance(deep, int):
        return stretch.number(shallow, deep)
    if not isinstance(shallow, list) or not isinstance(deep, list):
        return deep if shallow == deep else None
    a, b = cast("list[Any]", shallow), cast("list[Any]", deep)
    if len(a) == len(b):
        made = [_shape(one, other, stretch) for one, other in zip(a, b, strict=True)]
        return None if None in made else made
    return _grown([json.dumps(one) for one in a], [json.dumps(one) for one in b], b, stretch)


def _type(shallow: str, deep: str, stretch: DepthExtrapolation) -> str | None:
    if shallow == deep:
        return deep
    if not (shallow.startswith(_LIST_TYPE) and deep.startswith(_LIST_TYPE)):
        return None
    a, b = (text[len(_LIST_TYPE) : -1].split(",") for text in (shallow, deep))
    made = _grown(a, b, b, stretch)
    return None if made is None else f"{_LIST_TYPE}{','.join(made)}]"


def _grown(
    a: Sequence[str], b: Sequence[str], elements: Sequence[Any], stretch: DepthExtrapolation
) -> list[Any] | None:
    found = align(a, b, stretch.between)
    return None if found is None else stretched(elements, found.units, stretch.beyond)


_AMOUNTS = ("bytes_allocated", "bytes_freed", "flops", "bytes_read", "bytes_written", "comm_bytes")

_TEXTS = (
    ("input_shapes", stretch_shapes),
    ("input_types", stretch_types),
    ("output_shapes", stretch_shapes),
    ("output_types", stretch_types),
)


@dataclass(slots=True)
class NonlayerChanges:
    """Changes to the deep capture's nodes outside the layers.

    Attributes:
        stretch: how far beyond the deep capture to go.
        columns: node -> columns that differ at the model's own depth.
        units: nodes that appear again, and how often more; each unit is one run of host nodes
            with what they launched, or a single GPU operation.
        pairs: host nodes of the shallow and of the deep capture that are the same.
        before: host node of a unit -> the same in the repetition before it.
        unmatched: host nodes that only one of the captures has, by name.
        unruled: host nodes whose operands follow no rule, by name.
    """

    stretch: DepthExtrapolation
    columns: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    units: list[tuple[list[int], int]] = field(default_factory=list[tuple[list[int], int]])
    pairs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    before: dict[int, int] = field(default_factory=dict[int, int])
    unmatched: Counter[str] = field(default_factory=Counter[str])
    unruled: Counter[str] = field(default_factory=Counter[str])

    def change(self, node: int, **columns: Any) -> None:
        """Set columns of a node."""
        if columns:
            self.columns.setdefault(node, {}).update(columns)


def match_nonlayer_nodes(
    shallow: LayeredGraph, deep: LayeredGraph, stretch: DepthExtrapolation, alike: range
) -> NonlayerChanges:
    """Match the two captures outside of their layers and say what changes with depth.

    Args:
        shallow: the capture of least layers.
        deep: that of most.
        stretch: how far beyond it to go.
        alike: its layers that do the same; those before and after them are held against those of
            the shallow one.

    Raises:
        DepthError: the captures do not have the same threads.
    """
    work = _Matching(shallow, deep, stretch, NonlayerChanges(stretch))
    for few, many in _threads(shallow, deep):
        found = work.match(few, many)
        for i, j in found.pairs:
            work.made.pairs.append((few[i], many[j]))
            work.operator(few[i], many[j])
        for start, length in found.units:
            work.made.before |= zip(
                many[start : start + length], many[max(start - length, 0) : start], strict=False
            )
            unit: list[int] = []
            for node in many[start : start + length]:
                unit += [node, *deep.launched.get(node, ())]
            work.made.units.append((unit, stretch.beyond))
    for one, other in zip(shallow.passes, deep.passes, strict=False):
        for layer in range(deep.layers):
            if layer not in alike:
                work.end(one.blocks, other.blocks, layer, layer < alike.start)
    return work.made


def _threads(shallow: LayeredGraph, deep: LayeredGraph) -> list[tuple[list[int], list[int]]]:
    """Pair up the threads of two captures, by the passes that they run, else by number."""

    def ordered(one: LayeredGraph) -> list[int]:
        runs = {t: {(p.ascending, p.label) for p in one.passes if p.thread == t}
                for sort, t in one.lanes if sort == "thread"}  # fmt: skip
        return sorted(runs, key=lambda thread: (sorted(runs[thread]), thread))

    few, many = ordered(shallow), ordered(deep)
    if len(few) != len(many):
        raise DepthError(
            f"the captures ran operators in {len(few)} and {len(many)} threads: expected the same "
            "number; capture again"
        )
    return [(shallow.outside(a), deep.outside(b)) for a, b in zip(few, many, strict=True)]


@dataclass(slots=True)
class _Matching:
    """The two captures; in each method the first node is the shallow one's."""

    shallow: LayeredGraph
    deep: LayeredGraph
    stretch: DepthExtrapolation
    made: NonlayerChanges

    def match(self, few: list[int], many: list[int]) -> Alignment:
        """Pair up the host nodes of a thread; find those that are repeated.

        Operators whose name only one of the captures has are set aside, the shallow one's first:
        what DTensor works out once per process, the later capture may have found in its cache.
        """
        a, b = _keys(self.shallow, few), _keys(self.deep, many)
        names, others = {key[0] for key in a}, {key[0] for key in b}
        for aside in (set[str](), names - others, names ^ others):
            found, left, right = align_without(aside, a, b, self.stretch.between)
            if found is not None:
                break
        else:
            found, left, right = align_loosely(a, b, self.stretch.between)
        self.made.unmatched.update(self.shallow.graph.node(few[i]).name for i in left)
        self.made.unmatched.update(self.deep.graph.node(many[j]).name for j in right)
        return found

    def operator(self, few: int, many: int) -> None:
        """Extrapolate a host node and the GPU operations it launched."""
        nodes = self.deep.graph.nodes
        texts, grows = self._texts(few, many)
        some, more = self.shallow.launched.get(few, []), self.deep.launched.get(many, [])
        grows = grows or len(some) != len(more)
        self.made.change(many, **texts, **self._amounts(few, many))
        for kernel in more:  # those that carry the operator's operands
            carried = {c: t for c, t in texts.items()
                       if getattr(nodes, c)[kernel] == getattr(nodes, c)[many]}  # fmt: skip
            self.made.change(kernel, **carried)
        if grows:
            self._time([few], [many], 1)
        runs, others = _runs(self.shallow, some), _runs(self.deep, more)
        if [name for name, _ in runs] != [name for name, _ in others]:
            self._time(some, more, len(more))
            return
        for (_, a), (_, b) in zip(runs, others, strict=True):
            count = max(len(b), self.stretch.number(len(a), len(b)))
            if count > len(b):
                self.made.units.append(([b[_full(b)]], count - len(b)))
            if grows:
                self._time(a, b, count)
            if len(a) == len(b):
                for one, other in zip(a, b, strict=True):
                    self.made.change(other, **self._amounts(one, other))
                    if self.deep.graph.communication[other]:
                        self.made.change(other, **self._texts(one, other)[0])

    def end(
        self, few: dict[int, list[int]], many: dict[int, list[int]], layer: int, first: bool
    ) -> None:
        """Extrapolate what grows in a first or last layer that both captures have."""
        same = layer if first else layer - self.deep.layers + self.shallow.layers
        a, b = (
            list(one.hosted(blocks.get(at, [])))
            for blocks, at, one in ((few, same, self.shallow), (many, layer, self.deep))
        )
        names = [[one.graph.node(n).name for n in block]
                 for one, block in ((self.shallow, a), (self.deep, b))]  # fmt: skip
        if names[0] == names[1]:
            self.made.pairs += zip(a, b, strict=True)
            for i, j in zip(a, b, strict=True):
                if self._texts(i, j)[0]:
                    self.operator(i, j)

    def _texts(self, few: int, many: int) -> tuple[dict[str, Any], bool]:
        """Return the operand columns that change, and whether the operands do."""
        first, second = self.shallow.graph.node(few), self.deep.graph.node(many)
        columns: dict[str, Any] = {}
        grows = False
        for column, rule in _TEXTS:
            before, after = first.text(column), second.text(column)
            if before == after:
                continue
            grows = True
            text = rule(before, after, self.stretch)
            if text is None:
                self.made.unruled[second.name] += 1
            elif text != after:
                columns[column] = text
        return columns, grows

    def _amounts(self, few: int, many: int) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for column in _AMOUNTS:
            before = int(getattr(self.shallow.graph.nodes, column)[few])
            after = int(getattr(self.deep.graph.nodes, column)[many])
            if before != after and UNKNOWN not in (before, after):
                changed[column] = self.stretch.number(before, after)
        return changed

    def _time(self, few: list[int], many: list[int], count: int) -> None:
        """Let `many` nodes, and copies of one up to `count`, take the time on the line in all."""
        if not many:
            return
        durations = {node: int(self.deep.graph.nodes.duration_ns[node]) for node in many}
        before = int(self.shallow.graph.nodes.duration_ns[few].sum())
        after = sum(durations.values())
        total = after + (count - len(many)) * durations[many[_full(many)]]
        wanted = self.stretch.number(before, after)
        for node, duration in durations.items():
            self.made.change(node, duration_ns=round(duration * wanted / total) if total else 0)


def _keys(one: LayeredGraph, members: list[int]) -> list[tuple[Any, ...]]:
    nodes, strings = one.graph.nodes, one.graph.strings
    return [
        (
            strings[int(nodes.name[node])],
            int(nodes.phase[node]),
            int(nodes.micro_batch[node]),
            strings[int(nodes.module[node])],
            operand_key(strings[int(nodes.input_shapes[node])]),
        )
        for node in members
    ]


def _runs(one: LayeredGraph, members: list[int]) -> list[tuple[str, list[int]]]:
    """Group the GPU operations of one operator by name, neighbours of one name together."""
    return [(name, list(run)) for name, run in groupby(members, lambda n: one.graph.node(n).name)]


def _full(run: list[int]) -> int:
    """Return the place in a run of launches to repeat: the last one is not full."""
    return len(run) - 2 if len(run) > 1 else 0
