"""What measuring tells: a measured call, and what became of those that were asked for."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from onerank.capture.bench.call import BenchCall
from onerank.capture.bench.launched import Launched
from onerank.capture.bench.timing import Timing

Cache = Literal["cold", "warm"]


@dataclass(frozen=True, slots=True)
class Measured:
    """A call that was measured.

    Attributes:
        call: the call, its layout told.
        launched: its kernels.
        timing: its time.
        l2: whether its operands were in the last-level cache.
        sm_clock_mhz: median as the replays ran where the call was held, else right after them.
        temperature_c: the same.
        power_w: of the board, where the call was held.
        date: UTC.
    """

    call: BenchCall
    launched: Launched
    timing: Timing
    l2: Cache
    sm_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    date: str


@dataclass(slots=True)
class Account:
    """What became of the calls that were asked for.

    Attributes:
        asked: how many calls.
        done: calls measured.
        other_kernels: operators of a trace that launched other kernels here, in every layout ->
            calls.
        failed: why calls could not be measured -> how many.
        inner: operators whose kernels another operator launches, as "outer > inner" -> calls.
        left: calls for which there was no time.
    """

    asked: int
    done: int = 0
    other_kernels: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    inner: Counter[str] = field(default_factory=Counter[str])
    left: int = 0

    def add(self, other: "Account") -> None:
        """Add what another process did, but for what it was asked for and left."""
        self.done += other.done
        self.other_kernels.update(other.other_kernels)
        self.failed.update(other.failed)
        self.inner.update(other.inner)
