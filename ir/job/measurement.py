"""The device and software that a graph was measured on, and what was measured."""

from typing import Self

import msgspec

from onerank.ir.allocations import MemoryLog


class Reading(msgspec.Struct, frozen=True):
    """A sensor's values over the steps without a profiler."""

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
        type: "cuda"; "cpu"; "model" (operators of a model that was not run); "" (not known).
        name: the driver's name, or the name of the GPU description.
        memory_bytes: device memory, 0 if not known.
        sm_count: streaming multiprocessors, 0 if not known.
        sensors: clocks, power and temperature of the steps without a profiler; None if not
            sampled.
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
    """Time of a module between CUDA events on its stream: no profiler runs, idle time counts.

    Attributes:
        path: qualified name of the module; "optimizer" for all optimizer steps.
        phase: "forward", "backward" or "optimizer". A checkpoint's recomputation is backward.
        calls: calls per step.
        duration_ns: time of all calls of a step; the median over the steps.
        spread_ns: longest minus shortest such time.
        samples: number of steps.
    """

    path: str
    phase: str
    calls: int
    duration_ns: int
    spread_ns: int
    samples: int


class Line(msgspec.Struct, frozen=True):
    """A quantity measured at several depths, and the line fitted through the values.

    Attributes:
        values: the quantity at each captured depth.
        intercept: value of the line at zero layers.
        slope: increase per layer.
        residual: largest distance of a value from the line, as a share of the value; None for two
            depths, which the line fits exactly.
        at_depth: value of the line at the model's own depth.
    """

    values: tuple[int, ...]
    intercept: float
    slope: float
    residual: float | None
    at_depth: int


class LayerExtrapolation(msgspec.Struct, frozen=True):
    """How a graph was composed from captures of the model with fewer layers.

    Attributes:
        layers: layers of each capture, ascending.
        depth: layers of the full model, and of the graph.
        module: path of the layers ("model.layers").
        first: number of leading layers that differ from the repeated ones.
        period: number of layers after which the kernels repeat.
        copied: number of layers of the graph that are copies.
        compute_ns: summed durations of the compute nodes.
        step_ns: median step without a profiler.
        peak_memory_bytes: allocator's peak.
        comm_bytes: summed per-rank input of the communication calls.
        composed_compute_ns: summed durations of the graph's compute nodes, by repeating layers.
        replayed_peak_bytes: peak of the graph's allocations, replayed in order.
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

    A profiler slows the host and lets the GPU idle before the step. The host then has no lead over
    the GPU, and the GPU's clocks are higher than under continuous load.

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
    """Measurements of the captured steps, and how they were obtained.

    Attributes:
        step_ns: duration of each step without a profiler, in order.
        profiled_step_ns: duration of the profiled step, 0 if not measured. Of several profiled
            steps, the one whose node order the graph has.
        peak_memory_bytes: allocator's peak over the profiled step, 0 if not known.
        start_memory_bytes: allocated bytes when the profiled step began.
        versions: software name -> version.
        notes: statements on the quality of the trace, one sentence each.
        input_spread: root mean square, over the script's steps, of ln(elements of the model inputs
            / elements in the graph's step); 0 if all steps have the same shapes. A prediction's
            interval is wider by it.
        gpu_busy_ns: part of the profiled step during which the GPU ran anything on any stream (the
            median of several steps); 0 if not measured.
        timed_step_ns: duration of each step whose modules were timed by events, in order.
        scopes: time of each module in these steps.
        activation_bytes: bytes that each micro-batch of the profiled step allocated and kept until
            its backward began.
        depths: how the graph was extrapolated; None for a graph captured at its own depth. No step
            of an extrapolated graph was run, so its `step_ns` is empty.
        resident_bytes: class of memory ("parameters", "gradients", "optimizer", "other") -> sizes
            of the tensor storages that were allocated when the profiled step began. "workspace" ->
            sizes of blocks that belong to no Python tensor, if the allocator recorded them. Empty
            if not known.
        resident_pools: the same classes -> the pool of each storage (`Blocks.pool`); empty if all
            are in the default stream's pool, or if pools are not known.
        memory: the step's allocations and frees; None if not known, or no longer valid for this
            graph.
        profiled_steps_ns: duration of each profiled step, in order. A capture keeps all of them, a
            graph only the step that it was built from.
        host_step_ns: host time of each of several steps without a profiler that began with an idle
            GPU, in order.
        profiled_host_ns: host time of each profiled step; a graph has that of one step.
        host_overhead: host overhead of a steady-state step; None if not measured.
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
        """Median step without a profiler; None if none was measured."""
        import statistics

        return round(statistics.median(self.step_ns)) if self.step_ns else None

    def untimed(self, *notes: str) -> Self:
        """Return the measurement without the times of steps and modules, with added notes.

        A graph whose durations were changed was never timed as a whole.
        """
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
