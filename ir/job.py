"""What a graph knows beside its nodes: the world, its groups, the device, how it was measured."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod
from typing import Any, Self

import msgspec

from onerank.ir.compilation import Compilation
from onerank.ir.errors import JobError
from onerank.ir.memory import MemoryLog


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


class World(msgspec.Struct, frozen=True, omit_defaults=True):
    """The ranks of a job as points of a grid of parallel axes.

    Expert parallelism has no axis of its own: as in Megatron-LM and DeepSpeed the `ep` ranks that
    share out the experts are consecutive ranks of the plane of all axes but tp and pp.

    Attributes:
        sizes: axis -> size, innermost first: rank = tp + TP * (cp + CP * (dp + DP * pp)). Absent
            axes are 1.
        ep: ranks that share out the experts.
    """

    sizes: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    ep: int = 1

    @classmethod
    def of(cls, *, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1, ep: int = 1) -> Self:
        """Return the world with Megatron-LM's order of ranks: tp, cp, dp, pp.

        Raises:
            JobError: a size is below 1, or `ep` does not divide cp * dp.
        """
        sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        for axis, size in {**sizes, "ep": ep}.items():
            if size < 1:
                raise JobError(f"--{axis} {size}: expected 1 or more")
        if cp * dp % ep:
            raise JobError(
                f"--ep {ep} must divide cp * dp, whose ranks share out the experts "
                f"({cp} * {dp} = {ep} x {cp * dp // ep} + {cp * dp % ep})"
            )
        return cls({axis: size for axis, size in sizes.items() if size > 1}, ep)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    def point(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank`, by axis."""
        point: dict[str, int] = {}
        for axis, size in self.sizes.items():
            rank, point[axis] = divmod(rank, size)
        return point

    def at(self, point: Mapping[str, int]) -> int:
        """Return the rank at `point`; axes it leaves out are 0."""
        rank = 0
        for axis, size in reversed(self.sizes.items()):
            rank = rank * size + point.get(axis, 0)
        return rank

    def line(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axis` alone, ascending.

        Args:
            axis: an axis of `sizes`; several joined by "+", for the plane they span; "ep", the
                ranks that share out the experts; or "edp", those that hold the same experts. Of
                an axis of size 1 the rank itself.
            rank: any rank of the line.
        """
        if axis in ("ep", "edp"):
            plane = self.line(self._plane, rank)
            place = plane.index(rank)
            if axis == "edp":
                return plane[place % self.ep :: self.ep]
            first = place - place % self.ep
            return plane[first : first + self.ep]
        free = axis.split("+")
        own = self.point(rank)
        spans = [range(n) if a in free else (own[a],) for a, n in reversed(self.sizes.items())]
        names = [*reversed(self.sizes)]
        return tuple(self.at(dict(zip(names, point, strict=True))) for point in product(*spans))

    def place(self, axis: str, rank: int) -> int:
        """Return where `rank` is in its line along `axis`, which is as for `line`."""
        if axis == "ep":
            return self.place(self._plane, rank) % self.ep
        if axis == "edp":
            return self.place(self._plane, rank) // self.ep
        free, own, place = axis.split("+"), self.point(rank), 0
        for name, size in reversed(self.sizes.items()):
            if name in free:
                place = place * size + own[name]
        return place

    def first(self, where: Mapping[str, int]) -> int:
        """Return the lowest rank that is at these places.

        Args:
            where: axis, or "ep" -> place in its line; axes it leaves out are 0.
        """
        point, place = {**where}, where.get("ep", 0)
        for axis in self._plane.split("+") if "ep" in where else ():
            place, point[axis] = divmod(place, self.sizes[axis])
        return self.at(point)

    @property
    def _plane(self) -> str:
        return "+".join(axis for axis in self.sizes if axis not in ("tp", "pp"))

    def __str__(self) -> str:
        terms = " * ".join(f"{axis} {size}" for axis, size in self.sizes.items())
        return f"{terms or '1'} = {self.size} ranks" if self.size > 1 else "1 rank"


def axis_of(ranks: Sequence[int], world: World, rank: int, name: str = "") -> str:
    """Return the axis of `world` whose line through `rank` has just these ranks.

    Args:
        ranks: global ranks of a group, in any order.
        world: the world they belong to.
        rank: one of them.
        name: what the group is called; an axis of that name comes before others with its ranks.

    Returns:
        "tp", "cp", "dp", "pp", several of them joined ("cp+dp"), "ep" or "edp"; "world" for all
        ranks of several axes; "" where no line fits, and for a group of one.
    """
    members = tuple(sorted(ranks))
    if len(members) == 1:
        return ""
    axes = [*world.sizes]
    known = ["+".join(some) for n in range(1, len(axes)) for some in combinations(axes, n)]
    known += ["ep", "edp"] if world.ep > 1 else []
    if name in known and world.line(name, rank) == members:
        return name
    if members == tuple(range(world.size)):
        return axes[0] if len(axes) == 1 else "world"
    return next((axis for axis in known if world.line(axis, rank) == members), "")


class Pipeline(msgspec.Struct, frozen=True):
    """The pipeline stage a graph is of.

    Attributes:
        stage: place of the stage, 0 for the first.
        layers: layers of each stage of the pipeline.
    """

    stage: int
    layers: tuple[int, ...]


class RankClass(msgspec.Struct, frozen=True):
    """Ranks that do the same work, so that the graph of one stands for all.

    Attributes:
        representative: the rank to capture.
        where: axis, or "ep" -> places of the class in its line; what it leaves out does not
            matter.
    """

    representative: int
    where: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict[str, tuple[int, ...]])

    def holds(self, rank: int, world: World) -> bool:
        """Return whether a rank of `world` is of this class."""
        return all(world.place(axis, rank) in places for axis, places in self.where.items())

    def members(self, world: World) -> tuple[int, ...]:
        """Return the ranks of `world` that are of this class, ascending."""
        return tuple(rank for rank in range(world.size) if self.holds(rank, world))


class Reading(msgspec.Struct, frozen=True):
    """A sensor's values over the pure steps."""

    median: int
    low: int
    high: int


class Sensors(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the GPU's driver (NVML) told while the pure steps ran; None: it does not tell.

    Attributes:
        samples: how often it was asked.
        sm_clock_mhz: clock of the streaming multiprocessors.
        memory_clock_mhz: clock of the memory.
        power_mw: draw of the board, averaged by the driver over its own window.
        temperature_c: of the GPU die.
        throttled: reason the clocks were held down -> number of samples that gave it.
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


class Depths(msgspec.Struct, frozen=True):
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
        unlike: how far the layers of the shallowest capture and copies of the deepest's median
            layer add up to something else than the layers of the deepest, as a share of its
            compute; None where the deepest has no layer between others.
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
    unlike: float | None = None


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
        gpu_busy_ns: part of the profiled step during which the GPU ran anything, on any stream
            (of several, the median); 0 when not measured.
        timed_step_ns: duration of each step whose modules were timed by events, in order.
        scopes: what these steps told of each module.
        activation_bytes: bytes that each micro-batch of the profiled step added and held until
            its backward began.
        depths: how the graph was extrapolated, None for a graph captured at its own depth; its
            steps were then not taken, and `step_ns` is empty.
        held_bytes: class of memory ("parameters", "gradients", "optimizer", "other") -> sizes of
            the tensors' storages held when the profiled step began, and "workspace" -> those of
            blocks that no tensor of Python's explains, where the allocator told of them; empty when
            not known.
        held_pools: the same classes -> the pool of each (`Blocks.pool`); empty where all are of the
            default stream's, or where nobody tells.
        memory: the step's allocations and frees; None when not known, or no longer those of this
            graph.
        profiled_steps_ns: duration of each of several profiled steps, in order, in what a capture
            keeps; a graph keeps that of its own step.
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
    depths: Depths | None = None
    held_bytes: dict[str, tuple[int, ...]] = {}  # msgspec copies it; a factory would be written out
    held_pools: dict[str, tuple[int, ...]] = {}
    memory: MemoryLog | None = None
    profiled_steps_ns: tuple[int, ...] = ()

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
            timed_step_ns=(),
            scopes=(),
            gpu_busy_ns=0,
            notes=(*self.notes, *notes),
        )


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


class Module(msgspec.Struct, frozen=True, omit_defaults=True):
    """A module of the captured model, and the coarser scopes it lies in.

    Attributes:
        path: qualified name, as in the nodes' column `module`.
        type: name of its class.
        role: "attention", "mlp", "norm", "embedding", "head", "loss", "router" or "experts"; else
            "layer" for a layer's own operators and "other" for what no rule explains.
        layer: path of the repeated block that it is or lies in; "" outside of any.
        scope: path of the outermost module of this role around it; "" where that is itself.
    """

    path: str
    type: str = ""
    role: str = "other"
    layer: str = ""
    scope: str = ""


class Job(msgspec.Struct, frozen=True):
    """The job a graph is one rank of.

    Attributes:
        world: sizes of the parallel axes.
        rank: global rank of this graph.
        groups: process groups this rank belongs to.
        device: what the durations hold for.
        measurement: how the figures were obtained.
        annotations: re-costings applied, in order.
        modules: modules of the captured model; empty where the capture did not see them.
        pipeline: the pipeline stage this rank is; None where there is no pipeline, or where the
            script runs its own.
        classes: classes of equal ranks, which share out the world; () when nobody has said.
        compilation: the compiled step beside the eager one; None where it was not captured so.
        host_factor: what a host takes for its own work, over what the measured one took; start
            times stay the measured host's.
    """

    world: World = msgspec.field(default_factory=World)
    rank: int = 0
    groups: tuple[ProcessGroup, ...] = ()
    device: Device = msgspec.field(default_factory=Device)
    measurement: Measurement = msgspec.field(default_factory=Measurement)
    annotations: tuple[Annotation, ...] = ()
    modules: tuple[Module, ...] = ()
    pipeline: Pipeline | None = None
    classes: tuple[RankClass, ...] = ()
    compilation: Compilation | None = None
    host_factor: float = 1.0

    @property
    def rank_class(self) -> RankClass | None:
        """The class of this rank; None when nobody has said."""
        return next((one for one in self.classes if one.holds(self.rank, self.world)), None)

    def group(self, name: str) -> ProcessGroup | None:
        """Return the group called `name`, or None."""
        return next((group for group in self.groups if group.name == name), None)
