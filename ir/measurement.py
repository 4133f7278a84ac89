"""What was measured: a step (device, sensors, times, memory blocks) and a GPU (sustained calls).

A capture writes these records and the cost models read them, so they stand in `ir`.
"""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, product
from typing import Self

import msgspec

from onerank.ir.enums import Phase
from onerank.ir.notes import Note


class MemoryClass(IntEnum):
    """Purpose of a block of device memory."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    WORKSPACE = 4
    COMMUNICATION = 5
    OTHER = 6
    KV_CACHE = 7

    @property
    def label(self) -> str:
        """Name of the class in reports."""
        if self is MemoryClass.KV_CACHE:
            return "KV cache"
        return "communication buffers" if self is MemoryClass.COMMUNICATION else self.name.lower()


class Blocks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks that the step allocated or freed, one entry each, as columns.

    Attributes:
        bytes: size, as the allocator rounds it.
        memory_class: a `MemoryClass`.
        allocated_at: index of the allocation among all allocations and frees of the step, from 0;
            -1 for a block allocated before the step.
        freed_at: index of the free; -1 for a block that outlives the step.
        node: id of the node whose operator allocated it (if allocated before the step: freed it);
            -1 if no node represents the operator.
        phase: `Phase` of the allocation; NONE for a block allocated before the step.
        pool: number of its allocator pool (of a stream, or of a CUDA graph on it); 0 is the default
            stream's pool. Empty if all blocks are in that pool, or if pools are not known.
        spare_bytes: block size minus requested size; empty if requests are not recorded.
        lingers: number of later allocations and frees during which its memory cannot be reused,
            because another stream uses it (`record_stream`); empty if there is no such block.
    """

    bytes: tuple[int, ...] = ()
    memory_class: tuple[int, ...] = ()
    allocated_at: tuple[int, ...] = ()
    freed_at: tuple[int, ...] = ()
    node: tuple[int, ...] = ()
    phase: tuple[int, ...] = ()
    pool: tuple[int, ...] = ()
    spare_bytes: tuple[int, ...] = ()
    lingers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse columns that describe no blocks, as in a file that was edited.

        Raises:
            ValueError: a column has another length than `bytes`, or a value out of its range.
        """
        count = len(self.bytes)
        for name, (low, high) in _BLOCK_RANGES.items():
            column: tuple[int, ...] = getattr(self, name)
            if len(column) != count and (column or name not in _OPTIONAL_COLUMNS):
                raise ValueError(f"{name} has values of {len(column)} blocks, bytes of {count}")
            if column and not low <= min(column) <= max(column) <= high:
                raise ValueError(
                    f"{name} of a block is outside {low} to {high}: {min(column)} to {max(column)}"
                )

    def __len__(self) -> int:
        return len(self.bytes)

    def __repr__(self) -> str:
        return f"Blocks(<{len(self)} blocks>)"


_LARGEST = (1 << 63) - 1

# Range of a column of `Blocks`, inclusive.
_BLOCK_RANGES = {
    "bytes": (0, _LARGEST),
    "memory_class": (0, len(MemoryClass) - 1),
    "allocated_at": (-1, _LARGEST),
    "freed_at": (-1, _LARGEST),
    "node": (-1, _LARGEST),
    "phase": (0, len(Phase) - 1),
    "pool": (0, _LARGEST),
    "spare_bytes": (0, _LARGEST),
    "lingers": (0, _LARGEST),
}

_OPTIONAL_COLUMNS = frozenset(("pool", "spare_bytes", "lingers"))


class AllocatorSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings of the caching allocator from PYTORCH_ALLOC_CONF, with PyTorch's defaults.

    Attributes:
        expandable_segments: whether a pool is one segment that grows.
        max_split_bytes: size from which a block is not split; 0 for no limit.
        roundup_divisions: parts into which the space between two powers of two is divided to round
            sizes up, for sizes below 2 MiB, 4 MiB and so on; 0 or 1 rounds to 512 bytes.
        large_segment_bytes: segment for a block of 1 to 10 MiB, and growth of an expandable segment
            of blocks above 1 MiB.
        unsplit_excess_bytes: a block that is not split serves a request up to this much smaller.
    """

    expandable_segments: bool = False
    max_split_bytes: int = 0
    roundup_divisions: tuple[int, ...] = ()
    large_segment_bytes: int = 20 << 20
    unsplit_excess_bytes: int = 20 << 20


class MemoryLog(msgspec.Struct, frozen=True, omit_defaults=True):
    """The allocations and frees of one profiled step.

    Attributes:
        blocks: the blocks that were allocated or freed.
        events: number of allocations and frees, which `blocks` indexes.
        reserved_bytes: peak that the caching allocator reserved, from steps without a profiler if
            the capture recorded them; 0 if not known.
        settings: allocator configuration; None if it is the default or not known.
    """

    blocks: Blocks
    events: int
    reserved_bytes: int = 0
    settings: AllocatorSettings | None = None

    def __post_init__(self) -> None:
        """Refuse blocks at events that the step does not have, and events of no block.

        Raises:
            ValueError: there is such a block or event.
        """
        if not 0 <= self.events <= 2 * len(self.blocks):
            raise ValueError(f"{len(self.blocks)} blocks cannot have {self.events} events")
        last = max((*self.blocks.allocated_at, *self.blocks.freed_at), default=-1)
        if last >= self.events:
            raise ValueError(
                f"a block is allocated or freed at event {last}; the step has {self.events} events"
            )

    @property
    def most_in_use(self) -> int:
        """Maximum bytes of the step's blocks in use, in addition to earlier memory."""
        changes = [0] * self.events
        blocks = self.blocks
        for places, sign in ((blocks.allocated_at, 1), (blocks.freed_at, -1)):
            for at, size in zip(places, blocks.bytes, strict=True):
                if at >= 0:
                    changes[at] += sign * size
        return max(accumulate(changes, initial=0))

    @property
    def is_rounded(self) -> bool:
        """Whether blocks have the sizes of the CUDA caching allocator, multiples of 512 bytes.

        Blocks of a CPU capture have the bytes of their tensors, also after it is re-costed.
        """
        return all(size % 512 == 0 for size in self.blocks.bytes)

    def renumbered(self, ids: Sequence[int]) -> "MemoryLog":
        """Return the log for a graph whose nodes have other ids.

        Args:
            ids: new id by old id; -1 for a removed node.
        """
        node = tuple(int(ids[old]) if old >= 0 else old for old in self.blocks.node)
        return msgspec.structs.replace(self, blocks=msgspec.structs.replace(self.blocks, node=node))


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
    """Composition of a graph from captures of the model with fewer layers.

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
    """Differences between a steady-state step without a profiler and the profiled step.

    A profiler slows the host and lets the GPU idle before the step. The host then has no lead over
    the GPU, and the GPU's clocks are higher than under continuous load.

    Attributes:
        host_factor: host time without the profiler over host time that the profiler recorded.
        inter_step_host_ns: host time between the last operator of a step and the first operator of
            the next step, without the profiler.
        residual_ns: measured median step minus the replayed step with this host. Causes are slower
            kernels in steady state and a host whose speed varies.
        kernel_factor: time of kernels in steady state over their time in the profiled step. 1 where
            the host may be the cause of the residual.
    """

    host_factor: float
    inter_step_host_ns: int
    residual_ns: int
    kernel_factor: float = 1.0


NCCL_SYNCHRONOUS_NS, NCCL_ASYNCHRONOUS_NS, NCCL_WAIT_NS = 20_000, 22_000, 2_200
"""Host time of a call of NCCL through c10d, and of the wait for its handle, without a profiler.

Medians of two hosts with H200s, within 2 us for all-gather, reduce-scatter and all-reduce:
benchmarks/results/2026-11-22-collective-host-overhead-2xh200.txt.
"""

C10D_NS = 6_000
"""Part of a call before the code of the recorder: c10d's Python, its dispatcher, a Python kernel.

Measured with a Python kernel that returns at once (torch 2.13, one CPU, 2026-11-26).
"""


class EmulatedCalls(msgspec.Struct, frozen=True):
    """Host time of the emulated communication calls of a step, without a profiler.

    Attributes:
        synchronous: number of calls with `async_op=False`.
        asynchronous: number of other calls.
        waits: number of waits for their handles.
        host_ns: host time of all of them: of each kind of call, the median times the number.
    """

    synchronous: int
    asynchronous: int
    waits: int
    host_ns: int

    @property
    def excess_ns(self) -> float:
        """Host time of a call beyond that of a real one, its wait included; 0 for a faster one."""
        calls = self.synchronous + self.asynchronous
        real_ns = (
            self.synchronous * NCCL_SYNCHRONOUS_NS
            + self.asynchronous * NCCL_ASYNCHRONOUS_NS
            + self.waits * NCCL_WAIT_NS
        )
        return max(self.host_ns + calls * C10D_NS - real_ns, 0) / calls if calls else 0.0


def _slowest(values: Sequence[int], ranks: int) -> int | None:
    """Return the quantile 0.5 ** (1 / ranks); None if only the largest value is above it."""
    ordered = sorted(values)
    place = 0.5 ** (1 / ranks) * (len(ordered) - 1)
    # The slowest measured step alone may have been disturbed.
    if len(ordered) < 2 or place > len(ordered) - 2:
        return None
    lower = int(place)
    return round(ordered[lower] + (place - lower) * (ordered[lower + 1] - ordered[lower]))


_SHORT = reprlib.Repr()
_SHORT.maxtuple, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 4, 8, 200, 1000


def short_repr(struct: msgspec.Struct) -> str:
    """Return a representation with the first elements of long collections.

    A measurement holds thousands of times and sizes, which would fill pages of a notebook.
    """
    fields = (f"{name}={_SHORT.repr(getattr(struct, name))}" for name in struct.__struct_fields__)
    return f"{type(struct).__name__}({', '.join(fields)})"


class Measurement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Measurements of the captured steps, and how they were obtained.

    Attributes:
        step_ns: duration of each step without a profiler, in order.
        profiled_step_ns: duration of the profiled step, 0 if not measured. Of several profiled
            steps, the one whose node order the graph has.
        peak_memory_bytes: allocator's peak over the profiled step, 0 if not known.
        start_memory_bytes: allocated bytes when the profiled step began.
        versions: software name -> version.
        notes: statements on the quality of the trace.
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
        emulated_calls: host time of the step's emulated communication calls; None if not measured.
        step_deviations_ns: of a graph whose kernels were slowed a little since it was timed, each
            step minus the median step; empty for a timed graph.
        tf32_gemms: whether the script allowed TF32 in GEMMs of float32, by
            `torch.set_float32_matmul_precision` or `torch.backends.cuda.matmul`.
        tf32_convolutions: whether cuDNN may multiply float32 in TF32, in convolutions and recurrent
            layers. It may by default; `torch.backends.cudnn.allow_tf32` forbids it.
    """

    step_ns: tuple[int, ...] = ()
    profiled_step_ns: int = 0
    peak_memory_bytes: int = 0
    start_memory_bytes: int = 0
    versions: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    notes: tuple[Note, ...] = ()
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
    emulated_calls: EmulatedCalls | None = None
    step_deviations_ns: tuple[int, ...] = ()
    input_spread: float = 0.0
    tf32_gemms: bool = False
    tf32_convolutions: bool = True

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def median_step_ns(self) -> int | None:
        """Median step without a profiler; None if none was measured."""
        import statistics

        return round(statistics.median(self.step_ns)) if self.step_ns else None

    def slowest_step_ns(self, ranks: int) -> int | None:
        """Return the expected step of equal ranks that wait for each other, without a profiler.

        It is the median of the slowest of `ranks` steps, each drawn from the measured ones: their
        quantile 0.5 ** (1 / ranks). On four H200s this is within 3.0% of eleven real jobs (median
        0.9%), the median of the steps within 6.9% (2.1%):
        benchmarks/results/2026-11-26-slices-vs-real-4xh200.txt. It was chosen on these jobs. Of
        five jobs measured later on four H100s it is within 2.0% of four, and 25% above one whose
        slice had a host that slowed down (2026-11-26-slices-vs-real-4xh100.txt).

        Args:
            ranks: number of ranks.

        Returns:
            The step; None if too few steps were measured to know this quantile from an outlier.
        """
        return _slowest(self.step_ns, ranks)

    def slowest_excess_ns(self, ranks: int) -> int | None:
        """Return by how much `slowest_step_ns` exceeds the median step; None likewise.

        It is also known after a small change of the kernels, since the spread is that of the host.
        """
        median_ns = self.median_step_ns
        if median_ns is None:
            return _slowest(self.step_deviations_ns, ranks)
        slowest_ns = self.slowest_step_ns(ranks)
        return None if slowest_ns is None else slowest_ns - median_ns

    def slowed(self, *notes: Note) -> Self:
        """Return `untimed`, with the deviations of the steps from their median."""
        median_ns = self.median_step_ns
        deviations = () if median_ns is None else tuple(step - median_ns for step in self.step_ns)
        return msgspec.structs.replace(self.untimed(*notes), step_deviations_ns=deviations)

    def untimed(self, *notes: Note) -> Self:
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


@dataclass(frozen=True, slots=True)
class SustainedCall:
    """A call that ran without a pause for two seconds.

    Attributes:
        unit: arithmetic of a GEMM: "bf16", "fp16", "tf32", "fp8" or "fp32"; "" for other calls.
        sizes: m, n and k of a GEMM.
        flops: FLOPs of one call; for other calls than GEMMs, its vector operations.
        nbytes: bytes of the operands and the result of one call, each counted once.
        median_ns: median time of one call.
        power_w: board power; None if not measured.
        sm_clock_mhz: median over the second half; None if not measured.
    """

    unit: str
    sizes: tuple[int, ...]
    flops: int
    nbytes: int
    median_ns: int
    power_w: float | None
    sm_clock_mhz: int | None = None


# One GEMM predicts others to within some 10%, because libraries have better kernels for some sizes.
# The mean over several shapes predicts all of them better.
_SIZES = 4096, 8192, 16384

LARGE_SHAPES = tuple(product(_SIZES, _SIZES, _SIZES))
"""m, n and k of GEMMs whose rate is that of the tensor cores under the power limit."""

SKINNY_SHAPES = tuple(product((16, 64), (8192, 16384), (8192, 16384)))
"""m, n and k of GEMMs whose rate is that of the memory: their weights exceed every cache."""
