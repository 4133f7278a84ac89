"""Compiler-generated kernels, the operators they replace, and module times compared with eager."""

import msgspec

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
