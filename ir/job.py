"""What a graph knows beside its nodes: the world, its groups, the device, how it was measured."""

from typing import Any

import msgspec


class ProcessGroup(msgspec.Struct, frozen=True):
    """Ranks that communicate.

    Attributes:
        name: name the nodes refer to.
        ranks: global ranks in group order.
        axis: axis of the world this is a line of ("tp"), "world", or "".
    """

    name: str
    ranks: tuple[int, ...]
    axis: str = ""


class World(msgspec.Struct, frozen=True):
    """Sizes of the parallel axes of the job, outermost last: rank = tp + TP * (cp + CP * ...).

    Attributes:
        sizes: axis name -> size; absent axes are 1.
    """

    sizes: dict[str, int] = msgspec.field(default_factory=dict[str, int])

    @property
    def size(self) -> int:
        """Number of ranks."""
        total = 1
        for size in self.sizes.values():
            total *= size
        return total


class Device(msgspec.Struct, frozen=True):
    """Device a graph was measured on or annotated for.

    Attributes:
        type: "cuda", "cpu" or "" (not known).
        name: as the driver names it, or the name of the GPU description.
        memory_bytes: device memory, 0 when not known.
        sm_count: streaming multiprocessors, 0 when not known.
    """

    type: str = ""
    name: str = ""
    memory_bytes: int = 0
    sm_count: int = 0


class Measurement(msgspec.Struct, frozen=True):
    """How the graph's figures were obtained.

    Attributes:
        step_ns: duration of each pure step (no profiler), in order.
        profiled_step_ns: duration of the profiled step, 0 when not measured.
        peak_memory_bytes: allocator's peak over the profiled step, 0 when not known.
        start_memory_bytes: allocated when the profiled step began.
        versions: software name -> version.
        notes: sentences a reader should know, one each.
    """

    step_ns: tuple[int, ...] = ()
    profiled_step_ns: int = 0
    peak_memory_bytes: int = 0
    start_memory_bytes: int = 0
    versions: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()

    @property
    def median_step_ns(self) -> int | None:
        """Median pure step, or None when none was measured."""
        import statistics

        return round(statistics.median(self.step_ns)) if self.step_ns else None


class Annotation(msgspec.Struct, frozen=True):
    """A re-costing that was applied.

    Attributes:
        target: name of the GPU description.
        model: cost model.
        source: device the durations were measured on before.
        details: figures of the re-costing worth keeping (counts by evidence, rules).
    """

    target: str
    model: str
    source: str
    details: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class Job(msgspec.Struct, frozen=True):
    """The job a graph is one rank of.

    Attributes:
        world: sizes of the parallel axes.
        rank: global rank of this graph.
        groups: process groups this rank belongs to.
        device: what the durations hold for.
        measurement: how the figures were obtained.
        annotations: re-costings applied, in order.
    """

    world: World = msgspec.field(default_factory=World)
    rank: int = 0
    groups: tuple[ProcessGroup, ...] = ()
    device: Device = msgspec.field(default_factory=Device)
    measurement: Measurement = msgspec.field(default_factory=Measurement)
    annotations: tuple[Annotation, ...] = ()

    def group(self, name: str) -> ProcessGroup | None:
        """Return the group called `name`, or None."""
        return next((group for group in self.groups if group.name == name), None)
