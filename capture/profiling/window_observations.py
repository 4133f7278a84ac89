"""Observations of a capture's windows, and the state that the windows share."""

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from onerank.capture.profiling.allocator_snapshots import ByMemoryClass
from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.step_variance import StepWork, WorkOfSteps
from onerank.capture.profiling.window_plan import Progress, WindowPlan
from onerank.ir import EmulatedCalls, GeneratedWork, ScopeTime, Sensors
from onerank.ir.notes import Note

Window = Generator[None, bool, None]
"""Yields once per step of the script; receives whether a loss scaler skipped the step."""


@dataclass
class Observations:
    """Observations of the windows that are not in their traces.

    Attributes:
        on_gpu: whether the script's first step allocated GPU memory.
        step_ns: duration of each timed step.
        step_work: work of each timed step.
        host_step_ns: host time of each step that began with an idle GPU.
        host_step_work: work of each of these steps.
        emulated_calls: host time of their emulated communication calls; None without such calls.
        timed_step_ns: duration of each step whose modules were timed.
        scopes: times of layers and sub-modules.
        sensors: GPU sensors during the timed steps; None if none could be read.
        profiled_step_ns: duration of each profiled step.
        profiled_host_ns: host time of each profiled step.
        start_memory_bytes: memory allocated at the start of each profiled step.
        peak_memory_bytes: peak memory of each profiled step; 0 on a CPU.
        resident_bytes: storages resident at the start of the last profiled step, by class.
        resident_pools: allocator pool of each of these storages.
        input_spread: spread of the input sizes of the steps, as in `ir.Measurement`.
        notes: notes to store with the trace.
        generated_work: of a capture without a device, the work of each kernel that Inductor
            generated, in order.
    """

    on_gpu: bool = False
    step_ns: tuple[int, ...] = ()
    step_work: list[StepWork] = field(default_factory=list[StepWork])
    host_step_ns: list[int] = field(default_factory=list[int])
    host_step_work: list[StepWork] = field(default_factory=list[StepWork])
    emulated_calls: EmulatedCalls | None = None
    timed_step_ns: tuple[int, ...] = ()
    scopes: tuple[ScopeTime, ...] = ()
    sensors: Sensors | None = None
    profiled_step_ns: list[int] = field(default_factory=list[int])
    profiled_host_ns: list[int] = field(default_factory=list[int])
    start_memory_bytes: list[int] = field(default_factory=list[int])
    peak_memory_bytes: list[int] = field(default_factory=list[int])
    resident_bytes: ByMemoryClass = field(default_factory=ByMemoryClass)
    resident_pools: ByMemoryClass = field(default_factory=ByMemoryClass)
    input_spread: float = 0.0
    notes: list[Note] = field(default_factory=list[Note])
    generated_work: tuple[GeneratedWork, ...] = ()


class CallTimes(Protocol):
    """Keeps the host time of emulated calls while `enabled`."""

    enabled: bool

    def per_step(self, steps: int) -> EmulatedCalls | None:
        """Return the calls of each of `steps` steps; None if they had none."""
        ...


class OtherRanks(Protocol):
    """The other ranks of the job: emulated, or real processes."""

    @property
    def paced(self) -> bool:
        """Whether emulated collectives occupy the GPU for a network's time."""
        ...

    @paced.setter
    def paced(self, on: bool) -> None: ...

    @property
    def communicated(self) -> int:
        """Number of communication calls so far; 0 if they are not counted."""
        ...

    @property
    def call_times(self) -> CallTimes | None:
        """Host time of emulated calls; None if none is emulated."""
        ...

    def rendezvous(self) -> bool:
        """Wait until every real rank has called this; return whether all did."""
        ...


class RepeatedForward(Protocol):
    """The forward of a script that infers, which is each step of the windows."""

    def restore(self) -> None:
        """Restore what the forward changed, before its next repetition."""
        ...

    def cache_tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of its KV cache."""
        ...


@dataclass(frozen=True)
class WindowContext:
    """The shared state of one capture's windows.

    Attributes:
        plan: number of steps of each window.
        directory: receives their traces.
        modules: modules of the script.
        progress: called with a short description of each step.
        observed: receives their observations.
        steps: counts the work of each step.
        forward: restored before a step of any window begins, outside of what is measured; None for
            the steps of a training script.
    """

    plan: WindowPlan
    directory: Path
    modules: Modules
    progress: Progress
    observed: Observations
    steps: WorkOfSteps
    forward: RepeatedForward | None = None
