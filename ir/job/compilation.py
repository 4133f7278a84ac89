"""Compiler-generated kernels, the operators they replace, and module times compared with eager."""

import msgspec

COMPILED_GRAPH = "compiled graph "
"""Start of the module of operations in a compiled graph; its number follows."""


class GeneratedKernel(msgspec.Struct, frozen=True):
    """A kernel call as the compiler wrote it.

    Attributes:
        graph: number of the compiled graph, in the order of compilation.
        name: kernel's name, or the library call's ("extern_kernels.mm").
        called: whether this is a call, in the order of the code; else only the kernel's definition.
        operators: operators it stands for ("aten.mul"), views left out where there is more.
        modules: module of each of these.
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
        operators: operator -> how many of it the launches stand for.
        modules: sub-modules these come from.
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

    A kernel that stands for operators of several sub-modules counts for each by their number.

    Attributes:
        module: sub-module ("model.layers.*.mlp"), "optimizer", or "" where none is known.
        eager_ops: GPU operations (operators on a CPU).
        compiled_ops: the same; a kernel of several sub-modules in each.
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
        mode: of torch.compile; "the script's own" where the script compiles by itself.
        graphs: compiled graphs that ran in the step.
        eager_step_ns: median pure step; None when not measured.
        compiled_step_ns: the same.
        fusions: generated kernels, most time first.
        modules: most eager time first.
        shared_ops: operations that stand for one of several library calls, which one is not known:
            their time counts for all of these.
        unknown_ops: operations in compiled graphs that match no kernel of the compiler's.
    """

    mode: str
    graphs: int
    eager_step_ns: int | None
    compiled_step_ns: int | None
    fusions: tuple[Fusion, ...]
    modules: tuple[ModuleTime, ...]
    shared_ops: int = 0
    unknown_ops: int = 0
