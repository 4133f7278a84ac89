"""The plan of a capture's windows, and the observations of each window."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.resident_tensors import Held
from onerank.ir import ScopeTime, Sensors


@dataclass
class Observed:
    """What the windows saw, beside the traces that they wrote.

    Attributes:
        on_gpu: whether the script's first step asked for memory of a GPU.
        step_ns: of each pure step.
        host_step_ns: what the host took for each step that began with an idle GPU.
        timed_step_ns: of each step whose modules were timed.
        scopes: times of layers and sub-modules.
        sensors: the GPU's during the pure steps; None without any.
        profiled_step_ns: of each profiled step.
        profiled_host_ns: what the host took for each of these.
        start_memory_bytes: held as each profiled step began.
        peak_memory_bytes: the most held in each; 0 on a CPU.
        resident_bytes: what was held as the last began.
        resident_pools: the allocator's pools of the same.
        notes: sentences for whoever reads the trace.
    """

    on_gpu: bool = False
    step_ns: tuple[int, ...] = ()
    host_step_ns: list[int] = field(default_factory=list[int])
    timed_step_ns: tuple[int, ...] = ()
    scopes: tuple[ScopeTime, ...] = ()
    sensors: Sensors | None = None
    profiled_step_ns: list[int] = field(default_factory=list[int])
    profiled_host_ns: list[int] = field(default_factory=list[int])
    start_memory_bytes: list[int] = field(default_factory=list[int])
    peak_memory_bytes: list[int] = field(default_factory=list[int])
    resident_bytes: Held = field(default_factory=Held)
    resident_pools: Held = field(default_factory=Held)
    notes: list[str] = field(default_factory=list[str])


TIMED = HOST = 3

"""Steps whose modules, or whose host, are timed: the least whose median is not an extreme."""

Progress = Callable[[str], None]

Window = Generator[None, bool, None]

"""Yields once per step of the script; is sent whether the step was skipped."""


class Others(Protocol):
    """The other ranks: absent, or really there."""

    @property
    def paced(self) -> bool:
        """Whether absent ones' collectives take the time of a network, or leave a marker."""
        ...

    @paced.setter
    def paced(self, on: bool) -> None: ...

    @property
    def communicated(self) -> int:
        """Communication calls so far; 0 if they are not counted."""
        ...

    def rendezvous(self) -> bool:
        """Wait until those that are there have called this, too; return whether they did."""
        ...


@dataclass(frozen=True)
class WindowPlan:
    """How many steps each window takes.

    Attributes:
        warm_up: steps before anything is kept; on a GPU at most four times as many, until the
            last three differ by under 2%.
        pure: steps timed without a profiler.
        repeat: profiled steps.
        optimizer_steps: steps of the script's first optimizer that make one step here.
        settle: whether to go on until the steps are even, or like another; ranks that communicate
            must not, since each would stop at a step of its own.
    """

    warm_up: int = 3
    pure: int = 5
    repeat: int = 1
    optimizer_steps: int = 1
    settle: bool = True

    @property
    def least_steps(self) -> int:
        """Steps the windows need: their own, and one that warms the profiler up."""
        return self.warm_up + self.pure + TIMED + 1 + self.repeat + 1


@dataclass(frozen=True)
class Watch:
    """What the windows of one capture have in common.

    Attributes:
        plan: how many steps each takes.
        directory: where they write their traces.
        modules: what the script calls.
        progress: told in a few words what goes on.
        observed: what they see.
    """

    plan: WindowPlan
    directory: Path
    modules: Modules
    progress: Progress
    observed: Observed
