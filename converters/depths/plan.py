"""Which layers are copied, and what their modules are then called."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
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
    def of(cls, period: int, alike: range, captured: int, depth: int) -> "Plan":
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

    def __init__(self, module: str, plan: Plan) -> None:
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
