"""The period after which a model's layers repeat, and which layers are copied."""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from onerank.converters.expand.layers.layer_passes import LayeredGraph
from onerank.ir.errors import DepthError


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What is copied: `period` layers from `start` on become layers up to `depth`.

    Attributes:
        start: first layer of the period that is copied.
        period: layers that are copied together.
        copies: how often.
        alike: captured layers that do the same, period by period, and stand between others.
    """

    start: int
    period: int
    copies: int
    alike: range

    @classmethod
    def of(cls, period: int, alike: range, captured: int, depth: int) -> "LayerPlan":
        """Copy the period in the middle of the `alike` layers."""
        inner = range(max(alike.start, 1), min(alike.stop, captured - 1))
        start = (inner.start + inner.stop - period + 1) // 2
        return cls(start, period, (depth - captured) // period, inner)

    def like(self, layer: int) -> list[int]:
        """Return the captured layers, itself among them, that do what `layer` does."""
        return [other for other in self.alike if (other - layer) % self.period == 0]

    @property
    def added(self) -> int:
        """Layers that are copies."""
        return self.period * self.copies

    def layer(self, captured: int, copy: int) -> int:
        """Return the number that a captured layer, or its copy, has among all."""
        if captured < self.start + self.period:
            return captured + copy * self.period
        return captured + self.added

    def instance(self, layer: int) -> tuple[int, int]:
        """Return (captured layer, copy) that has a number among all."""
        if layer < self.start + self.period:
            return layer, 0
        if layer >= self.start + self.period + self.added:
            return layer - self.added, 0
        copy, ahead = divmod(layer - self.start, self.period)
        return self.start + ahead, copy


class Renaming:
    """Paths of modules, their layers renumbered."""

    def __init__(self, module: str, plan: LayerPlan) -> None:
        self._lead = f"{module}." if module else ""
        self._numbered = re.compile(re.escape(self._lead) + r"(\d+)(?=\.|$)")
        self._plan = plan

    def layer(self, path: str) -> int | None:
        """Return the captured layer that a path lies in, None outside all."""
        found = self._numbered.match(path)
        return int(found[1]) if found else None

    def moved(self, path: str, layer: int) -> str:
        """Return the path of the same module in another layer; as it is outside all."""
        return self._numbered.sub(f"{self._lead}{layer}", path, count=1)

    def instances(self, layer: int) -> list[tuple[int, int]]:
        """Return (copy, number among all) of a captured layer and its copies."""
        plan = self._plan
        inside = plan.start <= layer < plan.start + plan.period
        return [(copy, plan.layer(layer, copy)) for copy in range(plan.copies + 1 if inside else 1)]


_COLUMNS = (
    *("kind", "name", "op", "stream", "grid", "block"),
    *("collective", "comm_bytes", "group", "comm_src", "comm_dst"),
)
"""What makes two nodes the same work, beside the module and the operands."""

_AT_ENDS = 2
"""Layers at either end that may differ from the others."""

Work = tuple[int, str, int]
"""Number of the columns' values, module as seen from the layer, code of the operands' shapes."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Layers of which the first `first` stand alone and the rest repeat every `period` layers."""

    first: int
    period: int

    @classmethod
    def of(cls, kinds: Sequence[Hashable]) -> "Pattern":
        """Return the pattern of least layers in all for layers of these kinds."""
        count = len(kinds)
        found = [
            cls(first, period)
            for period in range(1, count + 1)
            for first in range(count - period + 1)
            if all(kinds[at] == kinds[at + period] for at in range(first, count - period))
        ]
        return min(found, key=lambda one: (one.first + one.period, one.period))

    @property
    def deepest(self) -> int:
        """Least depth at which a whole period lies between other layers."""
        return self.first + self.period + 2

    def fits(self, layers: int, depth: int) -> bool:
        """Whether `layers` hold a whole period, and are whole periods away from `depth`."""
        return layers >= self.first + self.period and (depth - layers) % self.period == 0


def layer_signatures(outline: LayeredGraph) -> list[Work]:
    """Return per node what it does, the same for the same work at another layer."""
    nodes = outline.graph.nodes
    stacked = np.stack([getattr(nodes, column).astype(np.int64) for column in _COLUMNS])
    _, inverse = np.unique(stacked, axis=1, return_inverse=True)
    modules = outline.graph.text("module")
    lead = len(outline.module) + 1 if outline.module else 0
    found: list[Work] = []
    numbers = zip(inverse.ravel().tolist(), nodes.input_shapes.tolist(), strict=True)
    for (work, shapes), module, place in zip(numbers, modules, outline.place, strict=True):
        if place is not None and module.startswith(outline.module) and module != outline.module:
            number, _, rest = module[lead:].partition(".")
            ahead = int(number) - place[1] if number.isdigit() else 0
            module = f"{ahead:+d}.{rest}" if number.isdigit() else module  # noqa: PLW2901
        found.append((work, module, shapes))
    return found


def find_pattern(outline: LayeredGraph) -> Pattern:
    """Return the pattern of least layers in all, first ones and a period, that the nodes bear out.

    Raises:
        DepthError: no period shows twice; the message says which layers differ and where.
    """
    own, count = layer_signatures(outline), outline.layers
    found = [Pattern(first, period) for period in range(1, count - 1)
             for first in range(count - period - 1)]  # fmt: skip
    for pattern in sorted(found, key=lambda one: (one.first + one.period, one.period)):
        if _alike(outline, own, pattern):
            return pattern
    raise DepthError(
        f"no layer of {outline.module} repeats among the {count} captured: "
        f"{_differences(outline, own)}. Layers that take turns need a deepest capture of their "
        "period and two more; layers without a period cannot be extrapolated"
    )


def alike_layers(outline: LayeredGraph, pattern: Pattern) -> range:
    """Return the layers that repeat as they are said to, without those that differ at the ends.

    The first and last layers may differ in what is done for their neighbours: sharded states are
    fetched for the next layer and handed on for the one before.

    Raises:
        DepthError: the layers between do not repeat; the message says where they differ.
    """
    own = layer_signatures(outline)
    if found := _alike(outline, own, pattern):
        return found
    raise DepthError(
        f"the layers of {outline.module} should repeat every {pattern.period}, and those captured "
        f"do not: {_differences(outline, own, pattern.period)}. What is not done layer by layer "
        "(buckets of gradients that span layers, tokens routed by chance) cannot be repeated; if "
        "only the first and last layers differ, capture deeper; else capture the model whole"
    )


def _alike(outline: LayeredGraph, own: list[Work], pattern: Pattern) -> range:
    """Return the layers that repeat, an empty range if they do not."""
    period, count = pattern.period, outline.layers
    same = [not _difference(outline, own, at, at + period) for at in range(count - period)]
    inner = range(max(pattern.first, 1), count - period)
    runs = [[at for at, _ in run] for kept, run in
            groupby(enumerate(same[pattern.first :], pattern.first), lambda one: one[1])
            if kept]  # fmt: skip
    if not runs:
        return range(0)
    run = max(runs, key=lambda members: sum(at in inner for at in members))
    found = range(run[0], run[-1] + period + 1)
    at_ends = max(found[0] - pattern.first, count - 1 - found[-1])
    borne_out = any(at in inner for at in run) or not inner
    return found if borne_out and at_ends <= max(_AT_ENDS, period) else range(0)


def _same(a: Work, b: Work) -> bool:
    """Whether two nodes do the same; operands that the trace does not tell may be any."""
    return a[:2] == b[:2] and (a[2] == b[2] or not a[2] or not b[2])


def _at_end(outline: LayeredGraph, ascending: bool, a: int, b: int) -> bool:
    """Whether one is the layer that a pass ends with, of which nothing tells the end."""
    return (outline.layers - 1 if ascending else 0) in (a, b)


def _differences(outline: LayeredGraph, own: list[Work], period: int = 1) -> str:
    inner = range(1, outline.layers - 1 - period)
    found = [
        f"layers {at} and {at + period} differ, {difference}"
        for at in inner
        if (difference := _difference(outline, own, at, at + period))
    ]
    return "; ".join(found[:3]) or "too few of them stand between others"


def _difference(outline: LayeredGraph, own: list[Work], a: int, b: int) -> str:
    """Say in which pass and node two layers differ first, "" for layers that do the same."""
    names = outline.graph.text("name")
    for one in outline.passes:
        first, second = one.blocks[a], one.blocks[b]
        for mine, other in zip(first, second, strict=False):
            if not _same(own[mine], own[other]):
                return f"in the {one.label} pass {names[mine]} stands against {names[other]}"
        if len(first) != len(second) and not _at_end(outline, one.ascending, a, b):
            return f"in the {one.label} pass {len(first)} nodes stand against {len(second)}"
    return ""
