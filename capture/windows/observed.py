"""What the windows of a capture see."""

from dataclasses import dataclass, field

from onerank.capture.windows.holdings import Held
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
        held_bytes: what was held as the last began.
        held_pools: the allocator's pools of the same.
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
    held_bytes: Held = field(default_factory=Held)
    held_pools: Held = field(default_factory=Held)
    notes: list[str] = field(default_factory=list[str])
