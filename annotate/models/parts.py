"""Calls that are made of several products, as the models see them."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from onerank.annotate.work.record import Work

F64 = npt.NDArray[np.float64]


class Parts(NamedTuple):
    """The products of calls that are made of several, see `record.Part`.

    Attributes:
        call: of which call each is part, ascending, int64[p].
        times: how often each is done, float64[p].
        launches: launch floors beside it, each time, float64[p].
        shapes: as `tiles.gemm_ns` takes them, float64[p, 7].
    """

    call: npt.NDArray[np.int64]
    times: F64
    launches: F64
    shapes: F64

    @classmethod
    def of(cls, works: Sequence[Work]) -> Self:
        """Collect those of distinct calls."""
        call = [at for at, work in enumerate(works) for _ in work.parts]
        parts = [part for work in works for part in work.parts]
        shapes = [(p.batch, p.m, p.n, p.k, p.item_bytes, p.item_bytes, p.reuse) for p in parts]
        return cls(
            np.array(call, dtype=np.int64),
            np.array([p.times for p in parts], dtype=np.float64),
            np.array([p.launches for p in parts], dtype=np.float64),
            np.array(shapes, dtype=np.float64).reshape(-1, 7),
        )

    def of_calls(self, calls: npt.NDArray[np.int64]) -> tuple[Self, npt.NDArray[np.int64]]:
        """Return the products of some calls, and to which of `calls` each belongs."""
        first, last = (np.searchsorted(self.call, calls, side) for side in ("left", "right"))
        count = last - first
        owner = np.repeat(np.arange(len(calls)), count)
        rows = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        rows += np.repeat(first, count)
        made = type(self)(self.call[rows], self.times[rows], self.launches[rows], self.shapes[rows])
        return made, owner

    @property
    def calls_in_steps(self) -> npt.NDArray[np.int64]:
        """Calls whose products take launches of their own, as a recurrent layer's steps do."""
        return np.unique(self.call[self.launches > 0])

    @property
    def flops(self) -> F64:
        """FLOPs of each, done once."""
        batch, m, n, k = self.shapes.T[:4]
        return 2 * batch * m * n * k

    @property
    def bytes(self) -> F64:
        """Bytes that each reads and writes, done once."""
        batch, m, n, k, item, result, reuse = self.shapes.T
        return batch * (item * (m * k / reuse + k * n) + result * m * n)
