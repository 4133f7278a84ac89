"""Mitigations that make a step fit: recomputation, smaller micro-batches, sharding."""

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.ir import MemoryClass
from onerank.ir.arrays import I64

MOST_RANKS = 1024

MOST_PARTS = 64


STEP_ROW = len(MemoryClass)
"""Row of `Need.levels` for the workspace of the optimizer's step, which is sharded with its state.
"""

WHOLE_ROW = STEP_ROW + 1
"""Row of `Need.levels` for gradients that the backward frees once they are summed or reduced.

Each rank needs them whole, whatever is sharded.
"""

_STATE = (MemoryClass.OPTIMIZER, STEP_ROW)

_STAGES = (
    ("optimizer state (ZeRO-1)", _STATE),
    ("gradients and optimizer state (ZeRO-2)", (MemoryClass.GRADIENTS, *_STATE)),
    (
        "parameters, gradients and optimizer state (ZeRO-3, FSDP)",
        (MemoryClass.PARAMETERS, MemoryClass.GRADIENTS, *_STATE),
    ),
)


class Need(NamedTuple):
    """A step that does not fit.

    Attributes:
        levels: bytes in use by class at every moment of the step, int64[10, moments]: a row per
            `MemoryClass`, then `STEP_ROW` and `WHOLE_ROW`.
        capacity_bytes: of the device, minus memory outside the allocator.
        reserved_per_allocated: reserved bytes per byte in use.
        recomputed_bytes: activations that full recomputation does not keep; 0 without layers.
        layers: layers that hold activations at the peak.
        micro_batch: sequences in a captured micro-batch; None: not known.
    """

    levels: I64
    capacity_bytes: int
    reserved_per_allocated: float
    recomputed_bytes: int
    layers: int
    micro_batch: int | None = None

    @property
    def budget(self) -> int:
        """Bytes in use that fit the device, with the capture's ratio of reserved memory."""
        return round(self.capacity_bytes / self.reserved_per_allocated)


class Mitigation(msgspec.Struct, frozen=True):
    """A change, whether it suffices, the peak after it, and the arithmetic."""

    change: str
    suffices: bool
    peak_bytes: int
    arithmetic: str


def mitigations(need: Need) -> tuple[Mitigation, ...]:
    """Return the effect of each change, and of the two largest together if no single one suffices.

    Each is evaluated at every moment of the step, not only at the old peak: with fewer activations
    the optimizer's step may become the peak.
    """
    recomputed = _recomputed(need)
    changes = _micro_batch(need)
    if need.recomputed_bytes:
        moment, left = _highest(recomputed)
        cap = int(recomputed[MemoryClass.ACTIVATIONS].max())
        rest = left - int(recomputed[MemoryClass.ACTIVATIONS, moment])
        changes.append(
            _mitigation(
                need,
                f"recompute {need.layers} layers",
                left,
                f"{_gb(rest)} of other memory + {_gb(left - rest)} of activations, at most "
                f"{_gb(cap)} (the layers' inputs and one whole layer)",
            )
        )
    for what, rows in _STAGES:
        changes += _sharded(need, what, rows, need.levels)
    if not any(change.suffices for change in changes) and need.recomputed_bytes:
        what, rows = _STAGES[-1]
        changes += _sharded(need, what, rows, recomputed, f"recompute {need.layers} layers and ")
    return tuple(changes)


def _recomputed(need: Need) -> I64:
    """Return the levels with activations limited to those that full recomputation keeps."""
    levels = need.levels.copy()
    row = levels[MemoryClass.ACTIVATIONS]
    # A cap, not a difference: at other moments of the step fewer
    # activations are alive, and recomputing frees none of those.
    np.minimum(row, row.max() - need.recomputed_bytes, out=row)
    return levels


def _micro_batch(need: Need) -> list[Mitigation]:
    """Return the effect of fewer sequences, or of shorter ones for a micro-batch of one."""
    row = need.levels[MemoryClass.ACTIVATIONS]
    if not row.max():
        return []
    fixed = need.levels.sum(axis=0) - row
    whole = need.micro_batch if need.micro_batch and need.micro_batch > 1 else None
    # (part, of), the least change first: a batch of one is cut into equal parts.
    change_of: Callable[[int], tuple[int, int]] = (
        (lambda removed: (whole - removed, whole)) if whole else (lambda removed: (1, removed + 1))
    )
    changes = range(1, whole or MOST_PARTS)

    def fits(number: int) -> bool:
        part, of = change_of(number)
        return bool((fixed + row * part // of).max() <= need.budget)

    # The least change that fits, else the largest. A larger one takes less memory, so halving finds
    # it among the millions of a large batch.
    part, of = change_of(changes[min(bisect_left(changes, True, key=fits), len(changes) - 1)])
    moment = int((fixed + row * part // of).argmax())
    stays, shrinks = int(fixed[moment]), int(row[moment])
    if whole:
        change, share = f"micro-batch {part} instead of {of}", f"x {part} / {of}"
    elif need.micro_batch:
        change = f"sequences of {_part(of)} the length: the captured micro-batch is one sequence"
        share = f"/ {of}"
    else:
        change, share = f"{_part(of)} of the captured micro-batch", f"/ {of}"
    return [
        _mitigation(
            need,
            change,
            stays + shrinks * part // of,
            f"{_gb(stays)} + {_gb(shrinks)} of activations {share}",
        )
    ]


def _sharded(
    need: Need, what: str, rows: tuple[int, ...], levels: I64, also: str = ""
) -> list[Mitigation]:
    shared = levels[list(rows)].sum(axis=0)
    if not shared.max():
        return []
    fixed = levels.sum(axis=0) - shared
    ranks = 2
    while ranks < MOST_RANKS and (fixed + shared // ranks).max() > need.budget:
        ranks *= 2
    moment = int((fixed + shared // ranks).argmax())
    stays, shrinks = int(fixed[moment]), int(shared[moment])
    return [
        _mitigation(
            need,
            f"{also}shard {what} over {ranks} data-parallel ranks",
            stays + shrinks // ranks,
            f"{_gb(stays)} + {_gb(shrinks)} / {ranks}",
        )
    ]


def _highest(levels: I64) -> tuple[int, int]:
    total = levels.sum(axis=0)
    moment = int(total.argmax())
    return moment, int(total[moment])


def _mitigation(need: Need, change: str, left: int, sum_of: str) -> Mitigation:
    suffices = left <= need.budget
    verdict = "fits" if suffices else "exceeds"
    arithmetic = f"{sum_of} = {_gb(left)}; {verdict} the budget of {_gb(need.budget)}"
    ratio = need.reserved_per_allocated
    return Mitigation(
        change,
        suffices,
        left,
        f"{arithmetic} = {_gb(need.capacity_bytes)} / {ratio:.3f} reserved bytes per byte in use",
    )


def _part(parts: int) -> str:
    return {2: "half", 3: "a third", 4: "a quarter"}.get(parts, f"1/{parts}")


def _gb(size: int) -> str:
    return f"{size / 1e9:.3f} GB"
