"""Match the kernels of a compiled step with the operators that they replace.

The name of a generated kernel identifies its call in the compiler's code. Calls of libraries are
matched by their order between two generated kernels. The time of each sub-module is summed, eager
and compiled.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

import msgspec
import numpy as np

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

# In a profile, inductor's C++ kernels have the number of their graph before their name.
_GRAPH_PREFIX = re.compile(r"^graph_\d+_(?=cpp_)")
_IN_LAYER = re.compile(r"^(.+?\.)\d+(\.[^.]+)?")


@dataclass(frozen=True)
class _Match:
    """The kernel calls that a node may be; if there are several, any of them."""

    node: int
    calls: list[GeneratedKernel]


def with_compilation(
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
