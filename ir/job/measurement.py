"""The device and software that a graph was measured on, and what was measured."""

from typing import Self

import msgspec

from onerank.ir.allocations import MemoryLog


class Reading(msgspec.Struct, frozen=True):
    """A sensor's values over the pure steps."""

    median: int
    low: int
    high: int


class Sensors(msgspec.Struct, frozen=True, omit_defaults=True):
    """NVML readings during the steps without a profiler; None for a value that NVML lacks.

    Attributes:
        samples: number of readings.
        sm_clock_mhz: clock of the streaming multiprocessors.
        memory_clock_mhz: clock of the memory.
        power_mw: board power, averaged by the driver over its own window.
        temperature_c: GPU die.
        throttled: reason for reduced clocks -> number of samples with it.
    """

    samples: int
    sm_clock_mhz: Reading | None = None
    memory_clock_mhz: Reading | None = None
    power_mw: Reading | None = None
    temperature_c: Reading | None = None
    throttled: dict[str, int] = msgspec.field(default_factory=dict[str, int])


class Device(msgspec.Struct, frozen=True, omit_defaults=True):
    """Device a graph was measured on or annotated for.

    Attributes:
        type: "cuda"; "cpu"; "model" (a model's operators, never run); "" (not known).
        name: as the driver names it, or the name of the GPU description.
        memory_bytes: device memory, 0 when not known.
        sm_count: streaming multiprocessors, 0 when not known.
        sensors: clocks, power and temperature of the pure steps; None when not sampled.
    """

    type: str = ""
    name: str = ""
    memory_bytes: int = 0
    sm_count: int = 0
    sensors: Sensors | None = None

    @property
    def runs_operators(self) -> bool:
        """Whether the compute nodes are operators, not kernels."""
        return self.type in ("cpu", "model")


class ScopeTime(msgspec.Struct, frozen=True):
    """Time of a module between events on its stream, without a profiler, idle time included.

    Attributes:
        path: qualified name of the module; "optimizer" for all optimizer steps.
        phase: "forward", "backward" or "optimizer". A checkpoint's recomputation is backward.
        calls: calls per step.
        duration_ns: time per step, all calls together; the median of the steps.
        spread_ns: the longest step's minus the shortest's.
        samples: steps.
    """

    path: str
    phase: str
    calls: int
    duration_ns: int
    spread_ns: int
    samples: int


class Line(msgspec.Struct, frozen=True):
    """A figure measured at several depths, and the straight line through it.

    Attributes:
        values: the figure at each depth captured.
        intercept: of the line, at no layer.
        slope: of the line, per layer.
        residual: largest distance of a value from the line, as a share of the value; None when
            two depths leave no residual.
        at_depth: the line at the model's own depth.
    """

    values: tuple[int, ...]
    intercept: float
    slope: float
    residual: float | None
    at_depth: int


class LayerExtrapolation(msgspec.Struct, frozen=True):
    """How a graph was put together from captures of a model built with fewer layers.

    Attributes:
        layers: layers of each capture, ascending.
        depth: layers of the model itself, and of the graph.
        module: path of the layers ("model.layers").
        first: layers before the repeated ones, which differ from them.
        period: layers after which the kernels repeat.
        copied: layers of the graph that are copies.
        compute_ns: summed durations of the compute nodes.
        step_ns: median step without a profiler.
        peak_memory_bytes: allocator's peak.
        comm_bytes: summed per-rank input of the communication calls.
        composed_compute_ns: summed durations of the graph's compute nodes, by repeating layers.
        replayed_peak_bytes: peak of the graph's own allocations, in order.
        layer_mismatch: error of the shallowest capture's layers plus copies of the deepest
            capture's median layer against the layers of the deepest capture, as a share of its
            compute; None if the deepest capture has no layer between others.
    """

    layers: tuple[int, ...]
    depth: int
    module: str
    first: int
    period: int
    copied: int
    compute_ns: Line
    step_ns: Line
    peak_memory_bytes: Line
    comm_bytes: Line
    composed_compute_ns: int
    replayed_peak_bytes: int
    layer_mismatch: float | None = None


class HostOverhead(msgspec.Struct, frozen=True):
    """How a steady-state step without a profiler differs from the profiled step.

    A profiler slows the host, and lets the GPU rest before the step: its host has no lead then, and
    its clocks are higher than where it works all the time.

    Attributes:
        host_factor: host time without the profiler over host time that the profiler recorded.
        inter_step_host_ns: host time between the last operator of a step and the first operator of
            the next step, without the profiler.
        residual_ns: measured median step minus the replayed step with this host. Causes are slower
            kernels in steady state and a host whose speed varies.
    """

    host_factor: float
    inter_step_host_ns: int
    residual_ns: int


class Measurement(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the graph's figures were obtained.

    Attributes:
        step_ns: duration of each pure step (no profiler), in order.
        profiled_step_ns: duration of the profiled step, 0 when not measured; of several, of the
            one whose order the graph has.
        peak_memory_bytes: allocator's peak over the profiled step, 0 when not known.
        start_memory_bytes: allocated when the profiled step began.
        versions: software name -> version.
        notes: sentences a reader should know, one each.
        input_spread: root mean square, over the script's steps, of ln(elements of the model inputs
            / elements in the graph's step); 0 if all steps have the same shapes. A prediction's
            interval is wider by it.
        gpu_busy_ns: part of the profiled step during which the GPU ran anything, on any stream
            (of several, the median); 0 when not measured.
        timed_step_ns: duration of each step whose modules were timed by events, in order.
        scopes: time of each module in these steps.
        activation_bytes: bytes that each micro-batch of the profiled step added and held until
            its backward began.
        depths: how the graph was extrapolated, None for a graph captured at its own depth; its
            steps were then not taken, and `step_ns` is empty.
        resident_bytes: class of memory ("parameters", "gradients", "optimizer", "other") -> sizes
            of the tensor storages that were allocated when the profiled step began. "workspace" ->
            sizes of blocks that belong to no Python tensor, if the allocator recorded them. Empty
            if not known.
        resident_pools: the same classes -> the pool of each storage (`Blocks.pool`); empty if all
            are in the default stream's pool, or if pools are not known.
        memory: the step's allocations and frees; None when not known, or no longer those of this
            graph.
        profiled_steps_ns: duration of each of several profiled steps, in order, in what a capture
            keeps; a graph keeps that of its own step.
        host_step_ns: how long the host took for each of several steps without a profiler that
            began with an idle GPU, in order.
        profiled_host_ns: likewise for each profiled step; a graph keeps that of its own.
        host_overhead: of a steady-state step; None when it was not measured.
    """

    step_ns: tuple[int, ...] = ()
    profiled_step_ns: int = 0
    peak_memory_bytes: int = 0
    start_memory_bytes: int = 0
    versions: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    gpu_busy_ns: int = 0
    timed_step_ns: tuple[int, ...] = ()
    scopes: tuple[ScopeTime, ...] = ()
    activation_bytes: tuple[int, ...] = ()
    depths: LayerExtrapolation | None = None
    # msgspec copies this default; it would write the result of a factory into every file.
    resident_bytes: dict[str, tuple[int, ...]] = {}
    resident_pools: dict[str, tuple[int, ...]] = {}
    memory: MemoryLog | None = None
    profiled_steps_ns: tuple[int, ...] = ()
    host_step_ns: tuple[int, ...] = ()
    profiled_host_ns: tuple[int, ...] = ()
    host_overhead: HostOverhead | None = None
    input_spread: float = 0.0

    @property
    def median_step_ns(self) -> int | None:
        """Median pure step, or None when none was measured."""
        import statistics

        return round(statistics.median(self.step_ns)) if self.step_ns else None

    def untimed(self, *notes: str) -> Self:
        """Return that of a graph with other durations: no step or module was timed with these."""
        return msgspec.structs.replace(
            self,
            step_ns=(),
            profiled_step_ns=0,
            profiled_steps_ns=(),
            host_step_ns=(),
            profiled_host_ns=(),
            timed_step_ns=(),
            scopes=(),
            gpu_busy_ns=0,
            notes=(*self.notes, *notes),
        )
