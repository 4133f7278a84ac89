"""Capture a script eager and compiled, and map each compiled kernel to the operators it replaces.

In the compiled run every outermost module runs compiled from its second call on, unless the script
compiles its model itself. In the eager run torch.compile is disabled. Each run has a separate
process, so that neither inherits caches, clocks or memory.

The mapping is read where Inductor generates code: `set_kernel_post_grad_provenance_tracing` gets
every kernel call, generated or from a library, in execution order, with the FX nodes it replaces.
The nodes' metadata names the ATen operator and the module. A module scope with the number of the
compiled graph marks its calls in the profile. `compiled_kernels` matches these calls with the
kernels of the profile.
"""

import contextlib
import re
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from onerank.capture.capture_script import Capture, capture
from onerank.capture.compiled_kernels import with_compilation
from onerank.capture.isolation import named_progress, run_isolated
from onerank.capture.options import CompileMode, Options
from onerank.capture.patches import patched, rebound
from onerank.capture.profiling.module_roles import WRAPPED
from onerank.capture.profiling.module_scopes import SCOPE_PREFIX, profiler_on
from onerank.capture.profiling.window_plan import Progress
from onerank.ir import (
    COMPILED_GRAPH,
    GeneratedKernel,
)
from onerank.ir.errors import CaptureError

_EAGER = {"TORCH_COMPILE_DISABLE": "1"}

# Inductor generates no code for a graph from a cache, so the mapping would be empty.
_COMPILED = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}

_VIEWS = frozenset(
    "view _unsafe_view reshape permute transpose t expand unsqueeze squeeze slice select detach "
    "alias as_strided split split_with_sizes unbind".split()
)


@dataclass(frozen=True)
class CompiledCapture:
    """A rank captured eager and compiled.

    Attributes:
        eager: without torch.compile.
        compiled: with torch.compile; its job has the `Compilation`, which compares both.
    """

    eager: Capture
    compiled: Capture


def capture_compiled(
    script: Path,
    args: Sequence[str],
    options: Options,
    mode: CompileMode,
    progress: Progress = lambda _: None,
) -> CompiledCapture:
    """Capture `script` eager, then compiled, each in a separate process.

    Args:
        script: as for `capture`.
        args: as for `capture`.
        options: as for `capture`; raw traces of the eager run go to a sibling directory with the
            suffix ".eager".
        mode: mode of torch.compile; unused if the script compiles its model itself.
        progress: receives a short description of each phase.

    Raises:
        CaptureError: the script cannot be captured with these options, or Inductor generated no
            kernel.
    """
    raw = options.raw_dir
    eager_raw = None if raw is None else raw.with_name(f"{raw.name}.eager")
    eager = run_isolated(
        capture,
        script,
        list(args),
        replace(options, raw_dir=eager_raw),
        progress=named_progress("eager", progress),
        environment=_EAGER,
    )
    compiled, kernels, by_script, roots = run_isolated(
        _capture_compiled,
        script,
        list(args),
        options,
        mode,
        progress=named_progress("compiled", progress),
        environment=_COMPILED,
    )
    if not kernels:
        raise CaptureError(
            f"{script}: Inductor generated no kernel under --compile {mode}\n  call a module that "
            "has parameters in the step, and compile with the backend inductor",
            code="compile-no-kernel",
        )
    mode_name = "the script's own" if by_script else mode
    graph = with_compilation(eager.graph, compiled.graph, kernels, mode_name, roots)
    return CompiledCapture(eager, replace(compiled, graph=graph))


def _capture_compiled(
    script: Path, args: list[str], options: Options, mode: CompileMode, progress: Progress
) -> tuple[Capture, list[GeneratedKernel], bool, tuple[str, ...]]:
    """Return the capture, Inductor's kernels, whether the script compiles, and its root modules."""
    inductor, compiler = InductorObserver(), _ModuleCompiler(mode)
    with inductor.installed(), compiler.installed():
        captured = capture(script, args, options, progress)
    return captured, inductor.kernels, compiler.by_script, tuple(compiler.roots)


class _ModuleCompiler:
    """Compiles each outermost module that has parameters, when it is first called.

    Attributes:
        by_script: whether the script compiled a module itself; then nothing else is compiled.
        roots: class names of the outermost modules, as keys in the order of their first call.
    """

    def __init__(self, mode: CompileMode) -> None:
        self.by_script = False
        self.roots: dict[str, None] = {}
        self._mode = None if mode == "default" else mode
        self._compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Compile outermost modules while the context lasts."""
        call_depth = 0

        def before(module: nn.Module, _: Any) -> None:
            nonlocal call_depth
            # Dynamo traces these hooks with the module; only real calls count.
            if torch.compiler.is_compiling():
                return
            call_depth += 1
            if call_depth == 1 and torch.is_grad_enabled():
                self._compile(module)

        def after(*_: Any) -> None:
            nonlocal call_depth
            if not torch.compiler.is_compiling():
                call_depth -= 1

        hooks = [
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _compile(self, module: nn.Module) -> None:
        submodules: list[Any] = list(module.modules())
        if not any(True for _ in module.parameters()):
            return
        self.roots[type(getattr(module, "_orig_mod", module)).__name__] = None
        if any(submodule in self._compiled for submodule in submodules):
            return
        if any(_is_compiled(submodule) for submodule in submodules):
            self.by_script = True
        elif not self.by_script:
            # This call stays eager: `Module.__call__` has already chosen its implementation.
            if type(module).__module__.startswith("torch.nn."):
                # Dynamo skips frames of torch's files, so `Module.compile` of an `nn.Sequential`
                # compiles nothing (torch 2.13). A frame of this file around it counts.
                container: Any = module
                container._compiled_call_impl = torch.compile(_calling(module), mode=self._mode)
            else:
                module.compile(mode=self._mode)
            self._compiled.add(module)


def _calling(module: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


def _is_compiled(module: Any) -> bool:
    # `torch.compile(module)` wraps the module, and `module.compile()` sets the attribute.
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


class InductorObserver:
    """Records the kernels that Inductor generates.

    Attributes:
        kernels: kernels and library calls, in the order in which Inductor generates them.
    """

    def __init__(self) -> None:
        self.kernels: list[GeneratedKernel] = []
        # id -> graph. The reference keeps the graph alive, so that Python does not reuse its id.
        self._graphs: dict[int, Any] = {}

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch Inductor's code generation while the context lasts."""
        # Only a compiled capture needs Inductor, so only it pays for the import.
        from torch._inductor import config, debug
        from torch._inductor.codegen import triton
        from torch._inductor.output_code import CompiledFxGraph

        library: Any = debug
        compiled: Any = CompiledFxGraph
        scheduling: Any = triton.TritonScheduling
        trace, define = library.set_kernel_post_grad_provenance_tracing, scheduling.define_kernel
        init, call = compiled.__init__, compiled.__call__

        def traced(schedule: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            self._record(name, schedule, called=True)
            return trace(schedule, name, *args, **kwargs)

        def defined(scheduler: Any, source: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
            name = define(scheduler, source, schedule, *args, **kwargs)
            self._record(name, schedule, called=False)
            return name

        def constructed(code: Any, current: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
            init(code, current, graph, *args, **kwargs)
            code._onerank_graph = self._number(graph)

        def called(code: Any, inputs: Any) -> Any:
            number = getattr(code, "_onerank_graph", None)
            if number is None or not profiler_on():
                return call(code, inputs)
            with record_function(f"{SCOPE_PREFIX}{COMPILED_GRAPH}{number}"):
                return call(code, inputs)

        with (
            rebound("torch._inductor.debug", {"set_kernel_post_grad_provenance_tracing": traced}),
            patched("torch._inductor.codegen.triton.TritonScheduling", {"define_kernel": defined}),
            patched(
                "torch._inductor.output_code.CompiledFxGraph",
                {"__init__": constructed, "__call__": called},
            ),
            # Without this option C++ kernels leave no event in a profile.
            config.patch({"cpp.enable_kernel_profile": True}),
        ):
            yield

    def _number(self, graph: Any) -> int:
        self._graphs.setdefault(id(graph), graph)
        return list(self._graphs).index(id(graph))

    def _record(self, name: str, schedule: Any, *, called: bool) -> None:
        from torch._inductor.virtualized import V

        nodes = [node for node in _origins(schedule) if node.op == "call_function"]
        # Inductor decomposes one operator into several nodes, which count once.
        distinct = {_identity(node): node for node in nodes}.values()
        origins = [(_operator(node), _module(node.meta)) for node in distinct]
        # Views do no work; a kernel of views only (a copy) keeps them, or it would have no origin.
        non_views = [pair for pair in origins if pair[0].split(".")[1] not in _VIEWS]
        self.kernels.append(
            GeneratedKernel(
                graph=self._number(V.graph),
                name=name,
                called=called,
                operators=tuple(operator for operator, _ in non_views or origins),
                modules=tuple(module for _, module in non_views or origins),
            )
        )


def _origins(schedule: Any) -> list[Any]:
    """Return the FX nodes that a kernel call replaces, each once."""
    if not isinstance(schedule, list | tuple):  # a library call
        origin = getattr(schedule, "origin_node", None)
        return [origin] if origin is not None else list(schedule.origins)
    buffers: list[Any] = []
    for scheduled in schedule:
        # A combination of kernels has no IR node; the scheduler nodes that it combines have.
        leaves = scheduled.get_nodes() if hasattr(scheduled, "get_nodes") else [scheduled]
        buffers += [leaf.node for leaf in leaves if getattr(leaf, "node", None) is not None]
    return list(dict.fromkeys(node for buffer in buffers for node in buffer.origins))


def _identity(node: Any) -> Any:
    """Return a key that exactly the nodes of one operator share, also after its decomposition."""
    original = node.meta.get("original_aten")
    is_whole = original is None or getattr(node.target, "overloadpacket", None) is getattr(
        original, "overloadpacket", original
    )
    return node.name if is_whole else (str(original), node.meta.get("seq_nr"))


def _operator(node: Any) -> str:
    """Return "aten.mul", with the namespace and without the overload."""
    original = node.meta.get("original_aten") or node.target
    packet = getattr(original, "overloadpacket", None)
    if packet is not None:
        return str(packet)
    return f"{type(node.target).__module__.split('.')[0]}.{getattr(original, '__name__', original)}"


def _module(meta: dict[str, Any]) -> str:
    """Return the qualified name of the innermost module; the class for the outermost module."""
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)  # L['self'].layers[0] -> L.self.layers.0
    for name in ("_modules", *WRAPPED):
        path = path.replace(f".{name}", "")
    path = re.sub(r"^[LG]\.\w+\.?", "", path)  # the variable that holds the outermost module
    return path or getattr(kind, "__name__", str(kind).rpartition(".")[2])
