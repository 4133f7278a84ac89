"""Extrapolate the part of a step outside the layers to another depth.

- Embedding, head and loss exist once at any depth and keep their captured times.
- Operators on all parameters at once (a foreach or fused optimizer, gradient clipping) stay, and
  their tensor lists, bytes, kernels and durations grow. All follow the line through the shallowest
  and the deepest capture. This includes operators within the first or last layer, such as the sum
  of a flat gradient buffer.
- A loop over the parameters gets more iterations.

The nodes of a shallow and of a deep capture are aligned. A surplus of the deep capture must be a
unit that repeats once per added period of layers.
"""

import json
from collections import Counter
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from fractions import Fraction
from itertools import groupby
from typing import Any, cast

from onerank.converters.expand.layers.captured_layers import LayeredGraph
from onerank.ir.errors import DepthError
from onerank.ir.nodes import UNKNOWN
from onerank.ir.python_calls import python_calls_of, python_calls_text

_LIST_TYPE = "GenericList["

OperatorKey = tuple[Any, ...]
"""Key of an operator: name, phase, and further properties that distinguish it."""


@dataclass(frozen=True, slots=True)
class DepthExtrapolation:
    """Linear extrapolation of values from two captured depths to the depth of the model.

    Attributes:
        periods_between: periods of layers between the shallow and the deep capture.
        periods_beyond: periods of layers between the deep capture and the model.
    """

    periods_between: int
    periods_beyond: int

    def value(self, shallow: int, deep: int) -> int:
        """Return the value at the model's depth on the line through both, rounded, 0 at least."""
        return max(
            0,
            deep + round(Fraction((deep - shallow) * self.periods_beyond, self.periods_between)),
        )


@dataclass(frozen=True, slots=True)
class Alignment:
    """Alignment of a shallow and a deep sequence.

    Attributes:
        pairs: (position in the shallow, position in the deep sequence) of the same element.
        units: (start, length) in the deep sequence of the last repetition of every surplus.
    """

    pairs: list[tuple[int, int]]
    units: list[tuple[int, int]]


def align(
    shallow: Sequence[Hashable],
    deep: Sequence[Hashable],
    between: int,
    weak_keys: Sequence[Sequence[Hashable]] = ((), ()),
) -> Alignment | None:
    """Align two sequences; return None if the surplus of `deep` is no repetition.

    Args:
        shallow: elements of the shallow capture.
        deep: elements of the deep capture.
        between: number of repetitions that a surplus must consist of.
        weak_keys: weaker keys of both, by which elements may pair if no full key fits.
    """
    # Depth-first search; the shortest unit is tried first, since it is pushed last.
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
        # What follows depends on the place alone, so a place that failed once fails on every path.
        if (i, j) in seen:
            continue
        seen.add((i, j))
        surplus = (len(deep) - j) - (len(shallow) - i)
        if (
            weak_keys[0]
            and i < len(shallow)
            and j < len(deep)
            and weak_keys[0][i] == weak_keys[1][j]
        ):
            stack.append((i + 1, j + 1, ("same", i, j, 1, trail)))
        for unit in range(surplus // between, 0, -1):
            after = j + unit * between
            continues = _continues(shallow, i, deep, after) or (
                bool(weak_keys[0]) and _continues(weak_keys[0], i, weak_keys[1], after)
            )
            if _repeats(deep, j, unit, between) and continues:
                grown = ("grown", j + unit * (between - 1), unit, 0, trail)
                stack.append((i, j + unit * between, grown))
    return None


def align_without(
    excluded: Set[str], shallow: Sequence[OperatorKey], deep: Sequence[OperatorKey], between: int
) -> tuple[Alignment | None, list[int], list[int]]:
    """Align two captures, ignoring elements with `excluded` names in both.

    Elements of the same name and phase may pair if no full key fits.

    Returns:
        The alignment, or None; the ignored positions in the shallow and in the deep capture.
    """
    shallow_at = [at for at, key in enumerate(shallow) if key[0] not in excluded]
    deep_at = [at for at, key in enumerate(deep) if key[0] not in excluded]
    a, b = [shallow[at] for at in shallow_at], [deep[at] for at in deep_at]
    alignment = align(a, b, between, ([key[:2] for key in a], [key[:2] for key in b]))
    if alignment is None:
        return None, [], []
    pairs = [(shallow_at[i], deep_at[j]) for i, j in alignment.pairs]
    ends = [(deep_at[start], deep_at[start + n - 1] + 1) for start, n in alignment.units]
    units = [(start, end - start) for start, end in ends]
    only_shallow, only_deep = (
        [at for at, key in enumerate(keys) if key[0] in excluded] for keys in (shallow, deep)
    )
    return Alignment(pairs, units), only_shallow, only_deep


def align_loosely(
    shallow: Sequence[OperatorKey], deep: Sequence[OperatorKey], between: int
) -> tuple[Alignment, list[int], list[int]]:
    """Align two captures that differ in more than their depth, such as a step that logs its loss.

    Where the captures differ, elements of the same name and phase at either end of the difference
    are pairs: the flat buffer that ZeRO fills grows, and the parameters in a rank's shard of it
    need not repeat with the layers.

    Returns:
        The alignment; the positions in the shallow and in the deep capture without a counterpart.
    """
    alignment = Alignment([], [])
    only_shallow: list[int] = []
    only_deep: list[int] = []
    # autojunk ignores frequent elements, and a loop over parameters repeats a few operators.
    codes = SequenceMatcher(None, shallow, deep, autojunk=False).get_opcodes()
    for code, i, i_end, j, j_end in codes:
        if code == "equal":
            alignment.pairs.extend(zip(range(i, i_end), range(j, j_end), strict=True))
            continue
        after = _same_names(shallow[i:i_end][::-1], deep[j:j_end][::-1])
        units = range((j_end - after - j) // between, 0, -1)
        # One more than the surplus: the last repetition that both captures have must be equal too.
        unit = next((u for u in units if _repeats(deep, j - u, u, between + 1)), 0)
        if unit:
            alignment.units.append((j + unit * (between - 1), unit))
        start = j + unit * between
        before = _same_names(shallow[i : i_end - after], deep[start : j_end - after])
        alignment.pairs.extend(zip(range(i, i + before), range(start, start + before), strict=True))
        alignment.pairs.extend(
            zip(range(i_end - after, i_end), range(j_end - after, j_end), strict=True)
        )
        only_shallow += range(i + before, i_end - after)
        only_deep += range(start + before, j_end - after)
    return alignment, only_shallow, only_deep


def _same_names(shallow: Sequence[OperatorKey], deep: Sequence[OperatorKey]) -> int:
    """Return how many leading elements of both have the same name and phase."""
    pairs = enumerate(zip(shallow, deep, strict=False))
    differing = (at for at, (few, many) in pairs if few[:2] != many[:2])
    return next(differing, min(len(shallow), len(deep)))


def _repeats(deep: Sequence[Hashable], start: int, unit: int, times: int) -> bool:
    """Return whether `times` equal units begin at `start`; a single one repeats the previous."""
    first = start - unit if times == 1 else start
    if first < 0 or start + unit * times > len(deep):
        return False
    return all(deep[at] == deep[at + unit] for at in range(first, start + unit * (times - 1)))


def _continues(shallow: Sequence[Hashable], i: int, deep: Sequence[Hashable], j: int) -> bool:
    if i == len(shallow) or j == len(deep):
        return i == len(shallow) and j == len(deep)
    return shallow[i] == deep[j]


def _retrace(trail: Any) -> Alignment:
    pairs: list[tuple[int, int]] = []
    units: list[tuple[int, int]] = []
    while trail is not None:
        kind, first, second, length, trail = trail
        if kind == "grown":
            units.append((first, second))
        else:
            pairs += [(first + k, second + k) for k in reversed(range(length))]
    return Alignment(pairs[::-1], units[::-1])


def repeat_units(deep: Sequence[Any], units: Sequence[tuple[int, int]], beyond: int) -> list[Any]:
    """Return the sequence with `beyond` more repetitions of each unit after its last."""
    repeated: list[Any] = []
    copied = 0
    for start, length in units:
        repeated += deep[copied : start + length]
        repeated += list(deep[start : start + length]) * beyond
        copied = start + length
    return [*repeated, *deep[copied:]]


def operand_key(shapes: str) -> str:
    """Return operand shapes with every list of tensors as one word, since such lists may grow."""
    operands = json.loads(shapes or "[]")
    return json.dumps(["tensors" if _is_tensors(operand) else operand for operand in operands])


def extrapolate_shapes(shallow: str, deep: str, extrapolation: DepthExtrapolation) -> str | None:
    """Return operand shapes at the model's depth; None if they follow no rule.

    Args:
        shallow: JSON of the shallow capture, one entry per operand.
        deep: JSON of the deep capture.
        extrapolation: the captured depths and the depth of the model.
    """
    if shallow == deep:
        return deep
    shapes = _shape(json.loads(shallow or "[]"), json.loads(deep or "[]"), extrapolation)
    return None if shapes is None else json.dumps(shapes, separators=(",", ":"))


def extrapolate_types(shallow: str, deep: str, extrapolation: DepthExtrapolation) -> str | None:
    """Return operand types at the model's depth; None if they follow no rule."""
    if shallow == deep:
        return deep
    first, second = json.loads(shallow or "[]"), json.loads(deep or "[]")
    if len(first) != len(second):
        return None
    types = [_type(a, b, extrapolation) for a, b in zip(first, second, strict=True)]
    return None if None in types else json.dumps(types, separators=(",", ":"))


def extrapolate_python_calls(shallow: str, deep: str, extrapolation: DepthExtrapolation) -> str:
    """Return the counts of calls of Python at the model's depth, as `python_calls_text`."""
    few, many = python_calls_of(shallow), python_calls_of(deep)
    counts = {kind: extrapolation.value(few[kind], many[kind]) for kind in few | many}
    return python_calls_text({kind: count for kind, count in counts.items() if count})


def _is_tensors(operand: Any) -> bool:
    return isinstance(operand, list) and operand != [] and not _integers(cast("list[Any]", operand))


def _integers(values: list[Any]) -> bool:
    return any(isinstance(value, int) for value in values)


def _shape(shallow: Any, deep: Any, extrapolation: DepthExtrapolation) -> Any:
    if isinstance(shallow, int) and isinstance(deep, int):
        return extrapolation.value(shallow, deep)
    if not isinstance(shallow, list) or not isinstance(deep, list):
        return deep if shallow == deep else None
    a, b = cast("list[Any]", shallow), cast("list[Any]", deep)
    if len(a) == len(b):
        shapes = [_shape(shape, other, extrapolation) for shape, other in zip(a, b, strict=True)]
        return None if None in shapes else shapes
    return _grown(
        [json.dumps(shape) for shape in a], [json.dumps(shape) for shape in b], b, extrapolation
    )


def _type(shallow: str, deep: str, extrapolation: DepthExtrapolation) -> str | None:
    if shallow == deep:
        return deep
    if not (shallow.startswith(_LIST_TYPE) and deep.startswith(_LIST_TYPE)):
        return None
    a, b = (text[len(_LIST_TYPE) : -1].split(",") for text in (shallow, deep))
    types = _grown(a, b, b, extrapolation)
    return None if types is None else f"{_LIST_TYPE}{','.join(types)}]"


def _grown(
    a: Sequence[str], b: Sequence[str], elements: Sequence[Any], extrapolation: DepthExtrapolation
) -> list[Any] | None:
    alignment = align(a, b, extrapolation.periods_between)
    if alignment is None:
        return None
    return repeat_units(elements, alignment.units, extrapolation.periods_beyond)


_AMOUNTS = (
    "bytes_allocated",
    "bytes_freed",
    "flops",
    "bytes_read",
    "bytes_written",
    "instructions",
    "comm_bytes",
)

_TEXTS = (
    ("input_shapes", extrapolate_shapes),
    ("input_types", extrapolate_types),
    ("output_shapes", extrapolate_shapes),
    ("output_types", extrapolate_types),
)


@dataclass(slots=True)
class NonlayerChanges:
    """Changes to the deep capture's nodes outside the layers.

    Attributes:
        extrapolation: the captured depths and the depth of the model.
        columns: node -> columns that differ at the model's depth.
        units: (nodes, further repetitions); each unit is a run of host nodes with the GPU
            operations they launched, or a single GPU operation.
        pairs: corresponding host nodes of the shallow and the deep capture.
        before: host node of a unit -> its counterpart in the previous repetition.
        unmatched: host nodes that only one of the captures has, counted by name.
        unruled: host nodes whose operands follow no rule, counted by name.
    """

    extrapolation: DepthExtrapolation
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
    shallow: LayeredGraph,
    deep: LayeredGraph,
    extrapolation: DepthExtrapolation,
    equal_layers: range,
) -> NonlayerChanges:
    """Match two captures outside their layers; return the changes at the model's depth.

    Args:
        shallow: the capture with the fewest layers.
        deep: the capture with the most layers.
        extrapolation: the captured depths and the depth of the model.
        equal_layers: layers of `deep` that repeat. The layers before and after them are compared
            with those of `shallow`, since they may do work for all parameters.

    Raises:
        DepthError: the captures have different numbers of threads.
    """
    work = _Matching(shallow, deep, extrapolation, NonlayerChanges(extrapolation))
    for few, many in _threads(shallow, deep):
        alignment = work.match(few, many)
        for i, j in alignment.pairs:
            work.changes.pairs.append((few[i], many[j]))
            work.extrapolate_operator(few[i], many[j])
        for start, length in alignment.units:
            work.changes.before |= zip(
                many[start : start + length], many[max(start - length, 0) : start], strict=False
            )
            unit: list[int] = []
            for node in many[start : start + length]:
                unit += [node, *deep.launched.get(node, ())]
            work.changes.units.append((unit, extrapolation.periods_beyond))
    for few_pass, many_pass in zip(shallow.passes, deep.passes, strict=False):
        for layer in range(deep.layers):
            if layer not in equal_layers:
                work.extrapolate_end_layer(
                    few_pass.blocks, many_pass.blocks, layer, layer < equal_layers.start
                )
    return work.changes


def _threads(shallow: LayeredGraph, deep: LayeredGraph) -> list[tuple[list[int], list[int]]]:
    """Pair the threads of two captures by the passes that they run, else by number."""

    def ordered(capture: LayeredGraph) -> list[int]:
        passes = {t: {(p.ascending, p.label) for p in capture.passes if p.thread == t}
                  for kind, t in capture.lanes if kind == "thread"}  # fmt: skip
        return sorted(passes, key=lambda thread: (sorted(passes[thread]), thread))

    few, many = ordered(shallow), ordered(deep)
    if len(few) != len(many):
        raise DepthError(
            f"the captures ran operators in {len(few)} and {len(many)} threads; expected the same "
            "number\n  capture again",
            code="depth-different-threads",
        )
    return [
        (shallow.nonlayer_hosts(a), deep.nonlayer_hosts(b)) for a, b in zip(few, many, strict=True)
    ]


@dataclass(slots=True)
class _Matching:
    """Matches two captures. In each method `few` are shallow nodes and `many` deep nodes."""

    shallow: LayeredGraph
    deep: LayeredGraph
    extrapolation: DepthExtrapolation
    changes: NonlayerChanges

    def match(self, few: list[int], many: list[int]) -> Alignment:
        """Align the host nodes of a thread, and find repeated units."""
        a, b = _keys(self.shallow, few), _keys(self.deep, many)
        names, others = {key[0] for key in a}, {key[0] for key in b}
        # Operators that only one capture has are ignored if needed, those of the shallow one
        # first: DTensor infers shapes once per process, and the later capture may find them in
        # its cache.
        for excluded in (set[str](), names - others, names ^ others):
            alignment, only_few, only_many = align_without(
                excluded, a, b, self.extrapolation.periods_between
            )
            if alignment is not None:
                break
        else:
            alignment, only_few, only_many = align_loosely(a, b, self.extrapolation.periods_between)
        self.changes.unmatched.update(self.shallow.graph.node(few[i]).name for i in only_few)
        self.changes.unmatched.update(self.deep.graph.node(many[j]).name for j in only_many)
        return alignment

    def extrapolate_operator(self, few: int, many: int) -> None:
        """Extrapolate a host node and the GPU operations it launched."""
        nodes = self.deep.graph.nodes
        texts, grows = self._texts(few, many)
        few_gpu = self.shallow.launched.get(few, [])
        many_gpu = self.deep.launched.get(many, [])
        grows = grows or len(few_gpu) != len(many_gpu)
        self.changes.change(many, **texts, **self._amounts(few, many))
        for kernel in many_gpu:
            # A GPU node that records the operands of its operator gets the new ones too.
            carried = {c: t for c, t in texts.items()
                       if getattr(nodes, c)[kernel] == getattr(nodes, c)[many]}  # fmt: skip
            self.changes.change(kernel, **carried)
        if grows:
            self._time([few], [many], 1)
        runs, others = _runs(self.shallow, few_gpu), _runs(self.deep, many_gpu)
        # Longer tensor lists may select other kernels. Then only the total time can follow the
        # line.
        if [name for name, _ in runs] != [name for name, _ in others]:
            self._time(few_gpu, many_gpu, len(many_gpu))
            return
        for (_, a), (_, b) in zip(runs, others, strict=True):
            count = max(len(b), self.extrapolation.value(len(a), len(b)))
            if count > len(b):
                self.changes.units.append(([b[_repeated_launch(b)]], count - len(b)))
            if grows:
                self._time(a, b, count)
            if len(a) == len(b):
                for node, other in zip(a, b, strict=True):
                    self.changes.change(other, **self._amounts(node, other))
                    if self.deep.graph.communication[other]:
                        self.changes.change(other, **self._texts(node, other)[0])

    def extrapolate_end_layer(
        self, few: dict[int, list[int]], many: dict[int, list[int]], layer: int, first: bool
    ) -> None:
        """Extrapolate what grows in a first or last layer that both captures have."""
        counterpart = layer if first else layer - self.deep.layers + self.shallow.layers
        a, b = (
            list(capture.hosted(blocks.get(at, [])))
            for blocks, at, capture in ((few, counterpart, self.shallow), (many, layer, self.deep))
        )
        names = [[capture.graph.node(n).name for n in block]
                 for capture, block in ((self.shallow, a), (self.deep, b))]  # fmt: skip
        if names[0] == names[1]:
            self.changes.pairs += zip(a, b, strict=True)
            for i, j in zip(a, b, strict=True):
                if self._texts(i, j)[0]:
                    self.extrapolate_operator(i, j)

    def _texts(self, few: int, many: int) -> tuple[dict[str, Any], bool]:
        """Return the operand columns to change, and whether the operands grow with depth."""
        first, second = self.shallow.graph.node(few), self.deep.graph.node(many)
        columns: dict[str, Any] = {}
        grows = False
        for column, rule in _TEXTS:
            before, after = first.text(column), second.text(column)
            if before == after:
                continue
            grows = True
            text = rule(before, after, self.extrapolation)
            if text is None:
                # The operands stay as captured, and a note counts them: nothing is dropped in
                # silence.
                self.changes.unruled[second.name] += 1
            elif text != after:
                columns[column] = text
        return columns, grows

    def _amounts(self, few: int, many: int) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        for column in _AMOUNTS:
            before = int(getattr(self.shallow.graph.nodes, column)[few])
            after = int(getattr(self.deep.graph.nodes, column)[many])
            # UNKNOWN is -1: a line through it would give an amount.
            if before != after and UNKNOWN not in (before, after):
                changed[column] = self.extrapolation.value(before, after)
        shallow = self.shallow.graph.node(few).text("python_calls")
        deep = self.deep.graph.node(many).text("python_calls")
        if shallow != deep:
            changed["python_calls"] = extrapolate_python_calls(shallow, deep, self.extrapolation)
        return changed

    def _time(self, few: list[int], many: list[int], count: int) -> None:
        """Set durations so that `count` launches take the extrapolated time in total.

        There are `len(many)` of them in the deep capture; the others are copies of one.
        """
        if not many:
            return
        durations = {node: int(self.deep.graph.nodes.duration_ns[node]) for node in many}
        before = int(self.shallow.graph.nodes.duration_ns[few].sum())
        after = sum(durations.values())
        # The copies added by `units` repeat one launch, so that launch counts once per copy.
        total = after + (count - len(many)) * durations[many[_repeated_launch(many)]]
        target = self.extrapolation.value(before, after)
        for node, duration in durations.items():
            self.changes.change(node, duration_ns=round(duration * target / total) if total else 0)


def _keys(capture: LayeredGraph, members: list[int]) -> list[tuple[Any, ...]]:
    """Return the alignment key of each node."""
    nodes, strings = capture.graph.nodes, capture.graph.strings
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


def _runs(capture: LayeredGraph, members: list[int]) -> list[tuple[str, list[int]]]:
    """Group consecutive GPU operations of the same name."""
    names = groupby(members, lambda node: capture.graph.node(node).name)
    return [(name, list(run)) for name, run in names]


def _repeated_launch(run: list[int]) -> int:
    """Return the position of the launch to repeat in a run of launches."""
    # The last launch of a foreach operator covers the remaining tensors only.
    return len(run) - 2 if len(run) > 1 else 0
