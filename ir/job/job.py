"""The job of a graph: its world, process groups, device, software and measurements."""

from typing import Any

import msgspec

from onerank.ir.job.compilation import Compilation
from onerank.ir.job.measurement import Device, Measurement
from onerank.ir.job.world import Pipeline, ProcessGroup, RankClass, World


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
    """A module of the captured model, and its enclosing scopes.

    Attributes:
        path: qualified name, as in the nodes' column `module`.
        type: class name.
        role: "attention", "mlp", "norm", "embedding", "head", "loss", "router" or "experts";
            "layer" for a layer's own operators; "other" if no rule applies.
        layer: path of the repeated block that it is or belongs to; "" outside of any.
        scope: path of the outermost enclosing module of this role; "" if that is the module itself.
    """

    path: str
    type: str = ""
    role: str = "other"
    layer: str = ""
    scope: str = ""


class Job(msgspec.Struct, frozen=True):
    """The distributed job, of which a graph shows one rank.

    Attributes:
        world: sizes of the parallel axes.
        rank: global rank of this graph.
        groups: process groups this rank belongs to.
        device: GPU and software that the durations are valid for.
        measurement: how the figures were obtained.
        annotations: annotators applied, in order.
        modules: modules of the captured model; empty if the capture did not record them.
        pipeline: pipeline stage of this rank; None without a pipeline, or if the script
            implements one itself.
        classes: classes of equivalent ranks, which partition the world; () if not known.
        compilation: comparison of the compiled step with the eager one; None if not captured.
        host_factor: host time over that of the measured host; start times stay those of the
            measured host.
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
        """The class of this rank; None if the classes are not known."""
        return next(
            (rank_class for rank_class in self.classes if rank_class.holds(self.rank, self.world)),
            None,
        )

    def group(self, name: str) -> ProcessGroup | None:
        """Return the group called `name`, or None."""
        return next((group for group in self.groups if group.name == name), None)
