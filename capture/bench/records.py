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


NO_TIME = "no time was left"


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
        untried: why calls were not tried, or not to their end -> how many.
    """

    asked: int = 0
    done: int = 0
    other_kernels: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    inner: Counter[str] = field(default_factory=Counter[str])
    untried: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: "Account") -> None:
        """Add what became of the calls that another account tells the end of."""
        self.done += other.done
        self.other_kernels.update(other.other_kernels)
        self.failed.update(other.failed)
        self.inner.update(other.inner)
