"""Measure as many points of a grid as the wanted error of interpolation needs.

The points are ordered so that the first n of them cover the grid for every n. After each batch, the
points measured so far are cross-validated; once their error is small enough, the rest is left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onerank.capture.serving.compositions import Composition
from onerank.ir.arrays import F64
from onerank.serving.part_sizes import BLOCK
from onerank.serving.tables import CrossValidation

BATCH = 4
"""Points that are measured between two cross-validations."""

# Steps that a cross-validation needs before its median decides. With 8 or 9 steps the error is that
# of a grid with large gaps, and its median depends on single steps.
_LEAST_STEPS = 10


@dataclass(frozen=True)
class WantedError:
    """When a grid has enough points.

    Attributes:
        median: median relative error of the cross-validation that is wanted, such as 0.03.
    """

    median: float

    def shortfall(self, validation: CrossValidation | None) -> str | None:
        """Return why the points of a cross-validation do not suffice; None if they do.

        Args:
            validation: errors of the points; None if these are too few for a cross-validation.
        """
        if validation is None:
            return "too few steps for a cross-validation fit into memory"
        if validation.points < _LEAST_STEPS:
            return (
                f"the cross-validation left out {validation.points} steps in turn, and its median "
                f"needs {_LEAST_STEPS}"
            )
        if validation.median > self.median:
            return f"the median error is {validation.median:.2%}"
        return None


def measurement_order(grid: Sequence[Composition]) -> tuple[Composition, ...]:
    """Return the compositions of a grid, ordered so that any number of the first cover it.

    The steps with the fewest and the most new tokens come first: the fit would extrapolate beyond
    them. The next one is always the step that is farthest from those before it, with the distances
    of its parts added. The sizes of a part are its coordinates, as powers of two. So mixed steps
    come early, which show the time of both kinds of attention.
    """
    # Of steps at equal distances the first is taken, so the order of the grid must not matter.
    grid = sorted(grid)
    sizes = [_sizes(c) for c in grid]
    # Farther than any two sizes of a grid: the first step of a part comes before the second of
    # another one.
    far = 4 * math.log2(2 + max((c.cached_tokens for c in grid), default=0))
    nearest = [dict.fromkeys(parts, far) for parts in sizes]
    remaining, order = [*range(len(grid))], list[int]()

    def extent(i: int) -> tuple[int, int]:
        return grid[i].new_tokens, grid[i].cached_tokens

    while remaining:
        if len(order) < 2:
            taken = (max if order else min)(remaining, key=extent)
        else:
            taken = max(remaining, key=lambda i: sum(nearest[i].values()))
        remaining.remove(taken)
        order.append(taken)
        for i in remaining:
            for part in sizes[i].keys() & sizes[taken].keys():
                distance = float(np.linalg.norm(sizes[i][part] - sizes[taken][part]))
                nearest[i][part] = min(nearest[i][part], distance)
    return tuple(grid[i] for i in order)


def _sizes(c: Composition) -> dict[str, F64]:
    """Return the sizes of the parts of a step, as powers of two."""
    sizes: dict[str, list[float]] = {"tokens": [c.new_tokens]}
    if c.decodes:
        sizes["decode attention"] = [c.decodes, c.decode_context + 1]
    if c.prefills:
        keys = c.prefill_context + c.prefill_tokens
        # FlashAttention 2 has another kernel for sequences of whole blocks.
        parted = c.prefill_tokens % BLOCK > 0 or keys % BLOCK > 0
        tokens = c.prefills * c.prefill_tokens
        sizes["prefill attention"] = [tokens, c.prefill_tokens, keys, 2.0**parted]
    return {part: np.log2(values) for part, values in sizes.items()}
