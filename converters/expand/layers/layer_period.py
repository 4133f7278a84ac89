"""Find the period after which a model's layers repeat, and choose the layers to copy."""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from onerank.converters.expand.layers.layer_passes import LayeredGraph
from onerank.ir.errors import DepthError


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The captured layers to copy: `copies` copies of `period` layers from `start` on.

    Attributes:
        start: first layer of the copied period.
        period: number of layers that are copied together.
        copies: number of copies.
        equal_layers: inner captured layers that repeat period by period.
    """

    start: int
    period: int
    copies: int
    equal_layers: range

    @classmethod
    def of(cls, period: int, equal_layers: range, captured: int, depth: int) -> "LayerPlan":
        """Choose the period in the middle of the equal layers, away from the first and last."""
        inner = range(max(equal_layers.start, 1), min(equal_layers.stop, captured - 1))
        start = (inner.start + inner.stop - period + 1) // 2
        return cls(start, period, (depth - captured) // period, inner)

    def equivalents(self, layer: int) -> list[int]:
        """Return the captured layers that do the same work as `layer`, including `layer`."""
        return [other for other in self.equal_layers if (other - layer) % self.period == 0]

    @property
    def added(self) -> int:
        """Number of layers that are copies."""
        return self.period * self.copies

    def layer(self, captured: int, copy: int) -> int:
        """Return the number of a captured layer, or of its copy, in the whole model."""
        if captured < self.start + self.period:
            return captured + copy * self.period
        return captured + self.added

    def instance(self, layer: int) -> tuple[int, int]:
        """Return (captured layer, copy) of a layer of the whole model."""
        if layer < self.start + self.period:
            return layer, 0
        if layer >= self.start + self.period + self.added:
            return layer - self.added, 0
        copy, ahead = divmod(layer - self.start, self.period)
        return self.start + ahead, copy


class Renaming:
    """Renumbers the layers in module paths."""

    def __init__(self, module: str, plan: LayerPlan) -> None:
        self._lead = f"{module}." if module else ""
        self._numbered = re.compile(re.escape(self._lead) + r"(\d+)(?=\.|$)")
        self._plan = plan

    def layer(self, path: str) -> int | None:
        """Return the captured layer of a path, None outside the layers."""
        match = self._numbered.match(path)
        return int(match[1]) if match else None

    def moved(self, path: str, layer: int) -> str:
        """Return the path of the same module in another layer; unchanged outside the layers."""
        return self._numbered.sub(f"{self._lead}{layer}", path, count=1)

    def instances(self, layer: int) -> list[tuple[int, int]]:
        """Return (copy, number in the whole model) of a captured layer and its copies."""
        plan = self._plan
        inside = plan.start <= layer < plan.start + plan.period
        return [(copy, plan.layer(layer, copy)) for copy in range(plan.copies + 1 if inside else 1)]


_COLUMNS = (
    *("kind", "name", "op", "stream", "grid", "block"),
    *("collective", "comm_bytes", "group", "comm_src", "comm_dst"),
)
"""Columns that must agree for two nodes to do the same work, in addition to module and operands."""

_AT_ENDS = 2
"""Layers at either end that may differ from the others.

FSDP fetches states two layers ahead, so the last two layers of a backward pass differ.
"""

Signature = tuple[int, str, int]
"""Number of the column values, module relative to the layer, code of the operand shapes."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A model whose first `first` layers are unique and whose others repeat every `period`."""

    first: int
    period: int

    @classmethod
    def of(cls, kinds: Sequence[Hashable]) -> "Pattern":
        """Return the shortest pattern (first plus period) for layers of these kinds."""
        count = len(kinds)
        patterns = [
            cls(first, period)
            for period in range(1, count + 1)
            for first in range(count - period + 1)
            if all(kinds[at] == kinds[at + period] for at in range(first, count - period))
        ]
        return min(patterns, key=lambda pattern: (pattern.first + pattern.period, pattern.period))

    @property
    def deepest(self) -> int:
        """Smallest depth at which a whole period has layers on both sides."""
        return self.first + self.period + 2

    def fits(self, layers: int, depth: int) -> bool:
        """Return whether `layers` contain a period and differ from `depth` by whole periods."""
        return layers >= self.first + self.period and (depth - layers) % self.period == 0


def layer_signatures(layered: LayeredGraph) -> list[Signature]:
    """Return a signature per node that is equal for the same work in another layer."""
    nodes = layered.graph.nodes
    stacked = np.stack([getattr(nodes, column).astype(np.int64) for column in _COLUMNS])
    _, inverse = np.unique(stacked, axis=1, return_inverse=True)
    modules = layered.graph.text("module")
    lead = len(layered.module) + 1 if layered.module else 0
    signatures: list[Signature] = []
    numbers = zip(inverse.ravel().tolist(), nodes.input_shapes.tolist(), strict=True)
    for (columns, shapes), module, place in zip(numbers, modules, layered.place, strict=True):
        if place is not None and module.startswith(layered.module) and module != layered.module:
            number, _, inner = module[lead:].partition(".")
            ahead = int(number) - place[1] if number.isdigit() else 0
            module = f"{ahead:+d}.{inner}" if number.isdigit() else module  # noqa: PLW2901
        signatures.append((columns, module, shapes))
    return signatures


def find_pattern(layered: LayeredGraph) -> Pattern:
    """Return the shortest pattern (first layers plus period) that the nodes confirm.

    Raises:
        DepthError: no period appears twice; the message says which layers differ and where.
    """
    signatures, count = layer_signatures(layered), layered.layers
    patterns = [Pattern(first, period) for period in range(1, count - 1)
             for first in range(count - period - 1)]  # fmt: skip
    for pattern in sorted(
        patterns, key=lambda candidate: (candidate.first + candidate.period, candidate.period)
    ):
        if _equal_layers(layered, signatures, pattern):
            return pattern
    raise DepthError(
        f"no layer of {layered.module} repeats among the {count} captured: "
        f"{_differences(layered, signatures)}\n"
        "  capture at least two layers more than a period; layers without a period cannot be "
        "extrapolated",
        code="depth-no-period",
    )


def equal_layers_of(layered: LayeredGraph, pattern: Pattern) -> range:
    """Return the layers that follow the pattern, without first and last layers that differ.

    The first and last layers may differ in work for their neighbours: sharded states are fetched
    for the next layer and released for the previous one.

    Raises:
        DepthError: the layers between do not repeat; the message says where they differ.
    """
    signatures = layer_signatures(layered)
    if equal_layers := _equal_layers(layered, signatures, pattern):
        return equal_layers
    raise DepthError(
        f"the layers of {layered.module} should repeat every {pattern.period}, but "
        f"{_differences(layered, signatures, pattern.period)}\n"
        "  capture deeper if only the first and last layers differ, else capture the whole model: "
        "gradient buckets over several layers and random token routing cannot be repeated",
        code="depth-layers-differ",
    )


def _equal_layers(layered: LayeredGraph, signatures: list[Signature], pattern: Pattern) -> range:
    """Return the layers that repeat, an empty range if they do not."""
    period, count = pattern.period, layered.layers
    same = [not _difference(layered, signatures, at, at + period) for at in range(count - period)]
    inner = range(max(pattern.first, 1), count - period)
    runs = [[at for at, _ in run] for kept, run in
            groupby(enumerate(same[pattern.first :], pattern.first), lambda item: item[1])
            if kept]  # fmt: skip
    if not runs:
        return range(0)
    run = max(runs, key=lambda members: sum(at in inner for at in members))
    repeating = range(run[0], run[-1] + period + 1)
    at_ends = max(repeating[0] - pattern.first, count - 1 - repeating[-1])
    confirmed = any(at in inner for at in run) or not inner
    return repeating if confirmed and at_ends <= max(_AT_ENDS, period) else range(0)


def _do_same_work(a: Signature, b: Signature) -> bool:
    """Return whether two nodes do the same work; unrecorded operand shapes (code 0) match any."""
    return a[:2] == b[:2] and (a[2] == b[2] or not a[2] or not b[2])


def _has_last_layer(layered: LayeredGraph, ascending: bool, a: int, b: int) -> bool:
    """Return whether `a` or `b` is the last layer of a pass, whose end no next layer marks."""
    return (layered.layers - 1 if ascending else 0) in (a, b)


def _differences(layered: LayeredGraph, signatures: list[Signature], period: int = 1) -> str:
    inner = range(1, layered.layers - 1 - period)
    differences = [
        f"layers {at} and {at + period} differ, {difference}"
        for at in inner
        if (difference := _difference(layered, signatures, at, at + period))
    ]
    return "; ".join(differences[:3]) or "too few of them have layers on both sides"


def _difference(layered: LayeredGraph, signatures: list[Signature], a: int, b: int) -> str:
    """Return the first pass and node in which two layers differ, "" for equal layers."""
    names = layered.graph.text("name")
    for layer_pass in layered.passes:
        first, second = layer_pass.blocks[a], layer_pass.blocks[b]
        # No next layer marks the end of the last layer, so it is compared as far as the other goes.
        for node, other in zip(first, second, strict=False):
            if not _do_same_work(signatures[node], signatures[other]):
                return f"{names[node]} versus {names[other]} in the {layer_pass.label} pass"
        if len(first) != len(second) and not _has_last_layer(layered, layer_pass.ascending, a, b):
            return f"{len(first)} versus {len(second)} nodes in the {layer_pass.label} pass"
    return ""
