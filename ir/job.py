"""The job of a graph: rank, modules, annotations, and compiled kernels compared with eager ones."""

from typing import Any, Literal

import msgspec

from onerank.ir.measurement import Device, Measurement, short_repr
from onerank.ir.world import Pipeline, ProcessGroup, RankClass, World

COMPILED_GRAPH = "compiled graph "
"""Start of the module of operations in a compiled graph; its number follows."""


class GeneratedKernel(msgspec.Struct, frozen=True):
    """A kernel call, or the definition of a kernel, in the compiler's generated code.

    Attributes:
        graph: number of the compiled graph, in the order of compilation.
        name: the kernel's name, or the library call's ("extern_kernels.mm").
        called: True for a call, in the order of the code; False for the kernel's definition.
        operators: operators that it replaces ("aten.mul"), without views if there are others.
        modules: module of each operator.
    """

    graph: int
    name: str
    called: bool
    operators: tuple[str, ...]
    modules: tuple[str, ...]


class Fusion(msgspec.Struct, frozen=True):
    """Launches of one generated kernel in a step.

    Attributes:
        kernel: its name.
        graph: number of the compiled graph.
        phase: "forward", "backward", "optimizer" or "".
        operators: operator -> number of its calls that the launches replace.
        modules: sub-modules of these operators.
        launches: in the profiled step.
        time_ns: their summed durations.
    """

    kernel: str
    graph: int
    phase: str
    operators: dict[str, int]
    modules: tuple[str, ...]
    launches: int
    time_ns: int


class ModuleTime(msgspec.Struct, frozen=True):
    """A sub-module's compute in a step, forward and backward, eager and compiled.

    A kernel that replaces operators of several sub-modules is divided by their number of operators.

    Attributes:
        module: sub-module ("model.layers.*.mlp"), "optimizer", or "" if not known.
        eager_ops: GPU operations (operators on a CPU).
        compiled_ops: the same; a kernel of several sub-modules counts in each.
        eager_ns: their summed durations.
        compiled_ns: the same.
    """

    module: str
    eager_ops: int
    compiled_ops: int
    eager_ns: int
    compiled_ns: int


class Compilation(msgspec.Struct, frozen=True):
    """Comparison of a compiled step with the eager one, on the graph's device.

    Attributes:
        mode: mode of torch.compile; "the script's own" if the script compiles by itself.
        graphs: compiled graphs that ran in the step.
        eager_step_ns: median step without a profiler; None if not measured.
        compiled_step_ns: the same.
        fusions: generated kernels, longest total time first.
        modules: longest eager time first.
        shared_ops: operations that may be one of several library calls; their time counts for all.
        unknown_ops: operations in compiled graphs that match no kernel of the compiler.
    """

    mode: str
    graphs: int
    eager_step_ns: int | None
    compiled_step_ns: int | None
    fusions: tuple[Fusion, ...]
    modules: tuple[ModuleTime, ...]
    shared_ops: int = 0
    unknown_ops: int = 0


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


InferenceKind = Literal["prefill", "decode", "mixed", "draft", "verify", "forward"]
"""Kind of a forward, as `InferenceStep.kind` describes it."""


class InferenceStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """The forward in the graph of a script that only infers.

    Attributes:
        kind: "prefill", "decode" (one new token per sequence and a KV cache that is not empty),
            "mixed" (prefills and decodes in one step of an engine), "draft" (of the assistant model
            in speculative decoding), "verify" (the main model computes drafted tokens with a KV
            cache that is not empty), or "forward" of a model without tokens.
        number: of the forward in the script, from 1.
        batch: sequences.
        new_tokens: tokens of each sequence that the step computes, padding included; the largest
            number if they differ.
        context_lengths: tokens of each sequence in the KV cache before the step, without padding
            that an attention mask marks.
        query_lengths: tokens of each sequence that the step computes, if sequences are packed and
            differ; () if a recording has only their sum.
        attention_keys: of a recorded engine: tokens in the KV cache after the step, of all
            sequences; None if not recorded.
        attention_pairs: of a recorded engine: pairs of a new token and a token that it attends to;
            None if not recorded.
    """

    kind: InferenceKind
    number: int
    batch: int = 0
    new_tokens: int = 0
    context_lengths: tuple[int, ...] = ()
    query_lengths: tuple[int, ...] = ()
    attention_keys: int | None = None
    attention_pairs: int | None = None


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
        inference: the forward that the graph shows; None for a step of training.
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
    inference: InferenceStep | None = None
    host_factor: float = 1.0

    def __repr__(self) -> str:
        return short_repr(self)

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
