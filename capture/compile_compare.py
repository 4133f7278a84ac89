"""Capture a script eager and compiled, and map each compiled kernel to the operators it replaces.

In the compiled run every outermost module runs compiled from its second call on, unless the script
compiles its model itself. In the eager run torch.compile is disabled. Each run has a separate
process, so that neither inherits caches, clocks or memory.

The mapping is read where Inductor generates code: `set_kernel_post_grad_provenance_tracing` gets
every kernel call, generated or from a library, in execution order, with the FX nodes it replaces.
The nodes' metadata names the ATen operator and the module. A module scope with the number of the
compiled graph marks its calls in the profile. `fuse` matches these calls with the kernels of the
profile, and sums the time of each sub-module, eager and compiled.
"""

import contextlib
import re
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from onerank.capture.capture_script import Capture, capture
from onerank.capture.isolation import named_progress, run_isolated
from onerank.capture.options import CompileMode, Options
from onerank.capture.patches import patched, rebound
from onerank.capture.profiling.module_roles import WRAPPED
from onerank.capture.profiling.module_scopes import SCOPE, profiler_on
from onerank.capture.profiling.window_plan import Progress
from onerank.ir import (
    COMPILED_GRAPH,
    Compilation,
    Fusion,
    GeneratedKernel,
    Graph,
    ModuleTime,
    Phase,
    Reason,
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


# In a profile, inductor's C++ kernels have the number of their graph before their name.
_GRAPH_PREFIX = re.compile(r"^graph_\d+_(?=cpp_)")
_IN_LAYER = re.compile(r"^(.+?\.)\d+(\.[^.]+)?")


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
        *(script, list(args), replace(options, raw_dir=eager_raw)),
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
            f"{script}: Inductor generated no kernel under --compile {mode}\n  call a module that "
            "has parameters in the step, and compile with the backend inductor",
            code="compile-no-kernel",
        )
    mode_name = "the script's own" if by_script else mode
    graph = fuse(eager.graph, compiled.graph, kernels, mode_name, roots)
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
            with record_function(f"{SCOPE}{COMPILED_GRAPH}{number}"):
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


@dataclass(frozen=True)
class _Match:
    """The kernel calls that a node may be; if there are several, any of them."""

    node: int
    calls: list[GeneratedKernel]


def fuse(
    eager: Graph,
    compiled: Graph,
    kernels: Sequence[GeneratedKernel],
    mode: str,
    roots: Sequence[str] = (),
) -> Graph:
    """Return `compiled` with modules for its compiled kernels and a `Compilation` in its job.

    Args:
        eager: the same rank's step without a compiler.
        compiled: a step whose compiled operations have "compiled graph N" as module.
        kernels: generated kernels and calls, in the order of the compiler's code.
        mode: as in `Compilation`.
        roots: classes of the script's outermost modules. Operators outside every inner module (a
            loss) are attributed to the outermost module if there is only one.
    """
    root = roots[0] if len(roots) == 1 else ""
    matches = [
        match
        for number, nodes in _by_graph(compiled).items()
        for match in _match(compiled, nodes, [k for k in kernels if k.graph == number])
    ]
    matched = {match.node: match for match in matches if match.calls}
    modules = compiled.text("module")
    counts = _Modules()
    counts.add_eager(eager)
    for node in np.flatnonzero(compiled.compute).tolist():
        weights = Counter[str]()
        if node in matched:
            call_modules = [module for call in matched[node].calls for module in call.modules]
            call_modules = [module for module in call_modules if module] or [root] * bool(root)
            weights = Counter(sub_module(module) for module in call_modules)
            modules[node] = _most(call_modules)
        counts.add_compiled(compiled, node, weights)
    _launchers_follow(compiled, modules)
    _communication_follows(compiled, kernels, modules, root)
    compilation = Compilation(
        mode=mode,
        graphs=len(_by_graph(compiled)),
        eager_step_ns=eager.job.measurement.median_step_ns,
        compiled_step_ns=compiled.job.measurement.median_step_ns,
        fusions=_fusions(compiled, list(matched.values())),
        modules=counts.rows(),
        shared_ops=sum(len(match.calls) > 1 for match in matches),
        unknown_ops=sum(not match.calls for match in matches),
    )
    graph = compiled.with_columns(module=modules)
    return replace(graph, job=msgspec.structs.replace(graph.job, compilation=compilation))


def sub_module(module: str) -> str:
    """Return the sub-module that a module belongs to, layers merged: `model.layers.*.mlp`."""
    match = _IN_LAYER.match(module)
    if match is None:
        return module
    return f"{match[1]}*{match[2] or ''}"


def _by_graph(graph: Graph) -> dict[int, list[int]]:
    """Return the compute nodes of each compiled graph, in order."""
    modules = graph.text("module")
    nodes_of: dict[int, list[int]] = {}
    for node in np.flatnonzero(graph.compute).tolist():
        if modules[node].startswith(COMPILED_GRAPH):
            number = int(modules[node].removeprefix(COMPILED_GRAPH))
            nodes_of.setdefault(number, []).append(node)
    return nodes_of


def _match(graph: Graph, nodes: list[int], kernels: list[GeneratedKernel]) -> list[_Match]:
    """Match nodes, in their order, with kernel calls, in the order of the code.

    The name identifies a generated kernel. Library calls are matched between two generated
    kernels. The code may run several times in a step.
    """
    code = [kernel for kernel in kernels if kernel.called]
    defined = {kernel.name: kernel for kernel in kernels if kernel.name.isidentifier()}
    matches: list[_Match] = []
    pending: list[int] = []
    position = 0
    for node in nodes:
        name = _GRAPH_PREFIX.sub("", graph.node(node).name)
        if name not in defined:
            pending.append(node)
            continue
        place = _find(code, name, position)
        if place is None:  # the code starts again
            matches += _match_calls(graph, pending, code[position:])
            position, pending = 0, []
            place = _find(code, name, 0)
        if place is None:
            matches.append(_Match(node, [defined[name]]))
            continue
        matches += _match_calls(graph, pending, code[position:place])
        matches.append(_Match(node, [code[place]]))
        position, pending = place + 1, []
    return matches + _match_calls(graph, pending, code[position:])


def _find(code: list[GeneratedKernel], name: str, start: int) -> int | None:
    return next((i for i in range(start, len(code)) if code[i].name == name), None)


def _match_calls(graph: Graph, nodes: list[int], code: list[GeneratedKernel]) -> list[_Match]:
    """Match nodes with the library calls in a section of the code."""
    calls = [
        kernel for kernel in code if not kernel.name.isidentifier() and not _communicates(kernel)
    ]
    groups = _by_launcher(graph, nodes)
    launched = [graph.node(group[0]).text("op") for group in groups]
    called = [_operator_of(call.name) for call in calls]
    matches: list[_Match] = []
    # With `autojunk`, difflib ignores elements that occur often in more than 200, and a model
    # consists of equal layers.
    aligned = SequenceMatcher(None, launched, called, autojunk=False).get_opcodes()
    for _, first, last, start, stop in aligned:
        same_length = last - first == stop - start
        for offset, group in enumerate(groups[first:last]):
            candidates = (
                calls[start + offset : start + offset + 1] if same_length else calls[start:stop]
            )
            matches += [_Match(node, candidates) for node in group]
    return matches


def _communicates(kernel: GeneratedKernel) -> bool:
    return "c10d_functional." in kernel.name


def _communication_follows(
    graph: Graph, kernels: Sequence[GeneratedKernel], modules: list[str], root: str
) -> None:
    """Set the module of each communication call of a compiled graph by its position in the code.

    If the numbers of calls differ, the calls belong to the outermost module.
    """
    code: dict[int, list[GeneratedKernel]] = {}
    for kernel in kernels:
        if kernel.called and _communicates(kernel) and "wait_tensor" not in kernel.name:
            code.setdefault(kernel.graph, []).append(kernel)
    calls: dict[int, list[int]] = {}
    for node in np.flatnonzero(graph.communication).tolist():
        if modules[node].startswith(COMPILED_GRAPH):
            number = int(modules[node].removeprefix(COMPILED_GRAPH))
            calls.setdefault(number, []).append(node)
    for number, nodes in calls.items():
        written = code.get(number, [])
        # The code may run several times in a step.
        matches = bool(written) and len(nodes) % len(written) == 0
        for place, node in enumerate(nodes):
            modules[node] = (
                _most(written[place % len(written)].modules) if matches else ""
            ) or root


def _by_launcher(graph: Graph, nodes: list[int]) -> list[list[int]]:
    """Group consecutive nodes with the same launching operator.

    A CUDA graph launches all its kernels at once, so each of them is a group.
    """
    groups: list[list[int]] = []
    last = -1
    for node in nodes:
        launcher = _launcher(graph, node)
        replayed = launcher >= 0 and "::" not in graph.node(launcher).name
        if launcher >= 0 and launcher == last and not replayed:
            groups[-1].append(node)
        else:
            groups.append([node])
        last = launcher
    return groups


def _launcher(graph: Graph, node: int) -> int:
    return next((s for s, reason in graph.edges.of(node) if reason == Reason.LAUNCH), -1)


def _operator_of(call: str) -> str:
    """Return the operator that a library call runs: "aten::mm" for "extern_kernels.mm"."""
    parts = call.split(".")
    if parts[:2] == ["torch", "ops"] and len(parts) >= 4:
        return f"{parts[2]}::{parts[3]}"
    return f"aten::{parts[-1]}"


def _launchers_follow(graph: Graph, modules: list[str]) -> None:
    """Give each operator in a compiled graph the module of the first kernel that it launches."""
    # From the last kernel to the first, so that the first kernel of an operator decides.
    for node in reversed(np.flatnonzero(graph.gpu_compute).tolist()):
        launcher = _launcher(graph, node)
        if launcher >= 0 and modules[launcher].startswith(COMPILED_GRAPH):
            modules[launcher] = modules[node]


def _most(names: Sequence[str]) -> str:
    return Counter(names).most_common(1)[0][0] if names else ""


def _fusions(graph: Graph, matches: list[_Match]) -> tuple[Fusion, ...]:
    fusions: dict[tuple[str, int, str], Fusion] = {}
    for match in matches:
        node, call = graph.node(match.node), match.calls[0]
        if not call.name.isidentifier():
            continue
        phase = "" if node.phase is Phase.NONE else node.phase.name.lower()
        key = (call.name, call.graph, phase)
        inner = [sub_module(module) for module in call.modules if module]
        previous = fusions.get(key, Fusion(*key, {}, (), 0, 0))
        fusions[key] = Fusion(
            *key,
            operators=dict(Counter(previous.operators) + Counter(call.operators)),
            modules=tuple(dict.fromkeys([*previous.modules, *inner])),
            launches=previous.launches + 1,
            time_ns=previous.time_ns + node.duration_ns,
        )
    return tuple(sorted(fusions.values(), key=lambda fusion: (-fusion.time_ns, fusion.kernel)))


class _Modules:
    """Sums time by sub-module, eager and compiled."""

    def __init__(self) -> None:
        self._ops: list[Counter[str]] = [Counter(), Counter()]
        self._time: list[Counter[str]] = [Counter(), Counter()]

    def add_eager(self, graph: Graph) -> None:
        """Add all compute of an eager step."""
        for node in np.flatnonzero(graph.compute).tolist():
            self._add(0, graph, node, Counter())

    def add_compiled(self, graph: Graph, node: int, weights: Counter[str]) -> None:
        """Add a node of a compiled step, divided among modules by `weights` if not empty."""
        self._add(1, graph, node, weights)

    def _add(self, side: int, graph: Graph, node: int, weights: Counter[str]) -> None:
        viewed = graph.node(node)
        if not weights:
            optimizer = viewed.phase is Phase.OPTIMIZER
            module_name = "optimizer" if optimizer else sub_module(viewed.text("module"))
            weights = Counter([module_name])
        remaining_ns, total = viewed.duration_ns, weights.total()
        for module, weight in weights.items():
            share = viewed.duration_ns * weight // total
            self._ops[side][module] += 1
            self._time[side][module] += share
            remaining_ns -= share
        # Integer division leaves a remainder.
        self._time[side][next(iter(weights))] += remaining_ns

    def rows(self) -> tuple[ModuleTime, ...]:
        """Return a row per sub-module, most eager time first."""
        names = sorted({*self._time[0], *self._time[1]})
        rows = [
            ModuleTime(
                name,
                self._ops[0][name],
                self._ops[1][name],
                self._time[0][name],
                self._time[1][name],
            )
            for name in names
        ]
        return tuple(sorted(rows, key=lambda row: (-row.eager_ns, -row.compiled_ns, row.module)))
