"""Capture a script eager and compiled, and map each compiled kernel to the operators it replaces.

In the compiled run every outermost module is compiled after its first call, unless the script
compiles by itself. In the eager run torch.compile is disabled. Each run has a process of its own,
so that neither inherits caches, clocks or memory.

The mapping is read where Inductor writes its code: `set_kernel_post_grad_provenance_tracing` sees
every kernel call, generated or from a library, in execution order, with the FX nodes it replaces.
The nodes' metadata names the ATen operator and the module. A module scope with the number of the
compiled graph marks its calls in the profile.
"""

import contextlib
import re
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from onerank.capture.isolation import named_progress, run_isolated
from onerank.capture.options import Options
from onerank.capture.patches import patched, rebound
from onerank.capture.profiling.module_roles import WRAPPED
from onerank.capture.profiling.module_scopes import SCOPE, profiler_on
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.run import Capture, capture
from onerank.ir import COMPILED_GRAPH, GeneratedKernel
from onerank.ir.errors import CaptureError

Mode = Literal["default", "reduce-overhead", "max-autotune"]

_EAGER = {"TORCH_COMPILE_DISABLE": "1"}

_COMPILED = {  # what is taken from a cache is not generated, and so not seen
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}

_VIEWS = frozenset(
    "view _unsafe_view reshape permute transpose t expand unsqueeze squeeze slice select detach "
    "alias as_strided split split_with_sizes unbind".split()
)


@dataclass(frozen=True)
class CompiledCapture:
    """A rank captured twice.

    Attributes:
        eager: without torch.compile.
        compiled: with it; its kernels have the number of their compiled graph as module.
        kernels: what Inductor generated, in the order of its code.
        by_script: whether the script compiles by itself.
        roots: classes of the outermost modules, which nodes outside any inner module belong to.
    """

    eager: Capture
    compiled: Capture
    kernels: list[GeneratedKernel]
    by_script: bool
    roots: tuple[str, ...]


def capture_compiled(
    script: Path,
    args: Sequence[str],
    options: Options,
    mode: Mode,
    progress: Progress = lambda _: None,
) -> CompiledCapture:
    """Capture `script` eager and compiled, one after the other, each in a process of its own.

    Args:
        script: as for `capture`.
        args: as for `capture`.
        options: as for `capture`; raw traces of the eager run go beside those of the compiled.
        mode: of torch.compile, where the script does not compile by itself.
        progress: told in a few words what goes on.

    Raises:
        CaptureError: the script cannot be captured as asked, or nothing was compiled.
    """
    raw = options.raw_dir
    beside = None if raw is None else raw.with_name(f"{raw.name}.eager")
    eager = run_isolated(
        capture,
        *(script, list(args), replace(options, raw_dir=beside)),
        progress=named_progress("eager", progress),
        environment=_EAGER,
    )
    compiled, kernels, by_script, roots = run_isolated(
        _capture_compiled,
        *(script, list(args), options, mode),
        progress=named_progress("compiled", progress),
        environment=_COMPILED,
    )
    if not kernels:
        raise CaptureError(
            f"{script}: under --compile {mode} Inductor generated no kernel: the script calls no "
            "module that can be compiled, or compiles with another backend",
            code="compile-no-kernel",
        )
    return CompiledCapture(eager, compiled, kernels, by_script, roots)


def _capture_compiled(
    script: Path, args: list[str], options: Options, mode: Mode, progress: Progress
) -> tuple[Capture, list[GeneratedKernel], bool, tuple[str, ...]]:
    inductor, compiling = Inductor(), _Compiling(mode)
    with inductor.watched(), compiling.installed():
        captured = capture(script, args, options, progress)
    return captured, inductor.kernels, compiling.by_script, tuple(compiling.roots)


class _Compiling:
    """Compiles each outermost module that has parameters, after its first call."""

    def __init__(self, mode: Mode) -> None:
        self.by_script = False
        self.roots: dict[str, None] = {}
        self._mode = None if mode == "default" else mode
        self._ours: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Watch for outermost modules while the context lasts."""
        inside = 0

        def before(module: nn.Module, _: Any) -> None:
            nonlocal inside
            if torch.compiler.is_compiling():
                return
            inside += 1
            if inside == 1 and torch.is_grad_enabled():
                self._compile(module)

        def after(*_: Any) -> None:
            nonlocal inside
            if not torch.compiler.is_compiling():
                inside -= 1

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
        parts: list[Any] = list(module.modules())
        if not any(True for _ in module.parameters()):
            return
        self.roots[type(getattr(module, "_orig_mod", module)).__name__] = None
        if any(part in self._ours for part in parts):
            return
        if any(_is_compiled(part) for part in parts):
            self.by_script = True
        elif not self.by_script:
            module.compile(mode=self._mode)
            self._ours.add(module)


def _is_compiled(module: Any) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


class Inductor:
    """Notes the kernels that Inductor generates while watched."""

    def __init__(self) -> None:
        self.kernels: list[GeneratedKernel] = []
        self._graphs: dict[int, Any] = {}  # id -> graph, kept so that no id comes twice

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Stand between Inductor and its code generation while the context lasts."""
        # each has a name for what is replaced here
        from torch._inductor import config, debug
        from torch._inductor.codegen import triton
        from torch._inductor.output_code import CompiledFxGraph

        library: Any = debug
        compiled: Any = CompiledFxGraph
        scheduling: Any = triton.TritonScheduling
        trace, define = library.set_kernel_post_grad_provenance_tracing, scheduling.define_kernel
        init, call = compiled.__init__, compiled.__call__

        def traced(schedule: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            self._note(name, schedule, called=True)
            return trace(schedule, name, *args, **kwargs)

        def defined(scheduler: Any, source: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
            name = define(scheduler, source, schedule, *args, **kwargs)
            self._note(name, schedule, called=False)
            return name

        def made(code: Any, current: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
            init(code, current, graph, *args, **kwargs)
            code._onerank_graph = self._number(graph)

        def called(code: Any, inputs: Any) -> Any:
            number = getattr(code, "_onerank_graph", None)
            if number is None or not profiler_on():
                return call(code, inputs)
            with record_function(f"{SCOPE}{COMPILED_GRAPH}{number}"):
                return call(code, inputs)

        with (
            rebound("torch._inductor.debug", {"set_kernel_post_grad_provenance_tracing": traced}),
            patched("torch._inductor.codegen.triton.TritonScheduling", {"define_kernel": defined}),
            patched(
                "torch._inductor.output_code.CompiledFxGraph",
                {"__init__": made, "__call__": called},
            ),
            # Without it kernels in C++ leave no event in a profile.
            config.patch({"cpp.enable_kernel_profile": True}),
        ):
            yield

    def _number(self, graph: Any) -> int:
        self._graphs.setdefault(id(graph), graph)
        return list(self._graphs).index(id(graph))

    def _note(self, name: str, schedule: Any, *, called: bool) -> None:
        from torch._inductor.virtualized import V

        nodes = [node for node in _origins(schedule) if node.op == "call_function"]
        # one operator may have been decomposed into several nodes
        distinct = {_identity(node): node for node in nodes}.values()
        named = [(_operator(node), _module(node.meta)) for node in distinct]
        working = [pair for pair in named if pair[0].split(".")[1] not in _VIEWS]
        self.kernels.append(
            GeneratedKernel(
                graph=self._number(V.graph),
                name=name,
                called=called,
                operators=tuple(operator for operator, _ in working or named),
                modules=tuple(module for _, module in working or named),
            )
        )


def _origins(schedule: Any) -> list[Any]:
    """Return the nodes of the graph that a kernel call stands for, each once."""
    if not isinstance(schedule, list | tuple):  # a call into a library
        exact = getattr(schedule, "origin_node", None)
        return [exact] if exact is not None else list(schedule.origins)
    parts: list[Any] = []
    for scheduled in schedule:
        # of a combination of kernels the parts have the nodes
        inner = scheduled.get_nodes() if hasattr(scheduled, "get_nodes") else [scheduled]
        parts += [part.node for part in inner if getattr(part, "node", None) is not None]
    return list(dict.fromkeys(node for part in parts for node in part.origins))


def _identity(node: Any) -> Any:
    """Return what the nodes of one decomposed operator have in common, and no other node."""
    original = node.meta.get("original_aten")
    whole = original is None or getattr(node.target, "overloadpacket", None) is getattr(
        original, "overloadpacket", original
    )
    return node.name if whole else (str(original), node.meta.get("seq_nr"))


def _operator(node: Any) -> str:
    """Return "aten.mul", with the namespace and without the overload."""
    original = node.meta.get("original_aten") or node.target
    packet = getattr(original, "overloadpacket", None)
    if packet is not None:
        return str(packet)
    return f"{type(node.target).__module__.split('.')[0]}.{getattr(original, '__name__', original)}"


def _module(meta: dict[str, Any]) -> str:
    """Return the qualified name of the innermost module; of the outermost one, its class."""
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)  # L['self'].layers[0] -> L.self.layers.0
    for name in ("_modules", *WRAPPED):
        path = path.replace(f".{name}", "")
    path = re.sub(r"^[LG]\.\w+\.?", "", path)  # the variable that holds the outermost module
    return path or getattr(kind, "__name__", str(kind).rpartition(".")[2])
