"""Where a graph's layers are: the passes over them, and the nodes of each layer in each pass.

A layer's nodes are not known by their module alone: autograd's sums and accumulations belong to
none. Within a thread the step runs layer by layer, so a layer begins with the first operator of
its own and ends where the next one begins. A GPU operation is where the operator that launched it
is.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from onerank.ir import UNKNOWN, Graph, Phase, Reason
from onerank.ir.errors import DepthError

I64 = npt.NDArray[np.int64]
Lane = tuple[str, int]
"""Nodes that run one after another: of a thread, of a stream, or the calls of a group ("beside")
that run beside the thread that asked for them."""

_NUMBER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.|$)")


@dataclass(slots=True)
class Pass:
    """One walk over all layers, forward or (descending) backward.

    Attributes:
        thread: the thread that walks.
        label: what to call it in a message.
        ascending: whether layer 0 comes first.
        blocks: layer -> its nodes: each host node, followed by the GPU operations it launched.
    """

    thread: int
    label: str
    ascending: bool
    blocks: dict[int, list[int]] = field(default_factory=dict[int, list[int]])


@dataclass(slots=True)
class LayeredGraph:
    """A graph with its layers found.

    Attributes:
        graph: the graph.
        module: path of the layers ("model.layers").
        layers: how many there are.
        lanes: nodes of each thread and stream, in order.
        asked_ns: per node, the host time at which it was asked for.
        launched: host node -> the GPU operations it launched.
        passes: in the order of their start, threads one after another.
        place: per node, (pass, layer, position in the layer's block); None outside all layers.
    """

    graph: Graph
    module: str
    layers: int
    lanes: dict[Lane, list[int]]
    asked_ns: I64
    launched: dict[int, list[int]]
    passes: list[Pass]
    place: list[tuple[int, int, int] | None]

    def outside(self, thread: int) -> list[int]:
        """Return the host nodes of a thread that are in no layer, in order."""
        return [node for node in self.lanes["thread", thread] if self.place[node] is None]

    def hosted(self, block: list[int]) -> Iterator[int]:
        """Yield the host nodes of a layer's block, in order."""
        at = 0
        while at < len(block):
            yield block[at]
            at += 1 + len(self.launched.get(block[at], ()))


def layers_module(graphs: dict[int, Graph]) -> str:
    """Return the path under which each graph has as many numbered modules as its depth.

    Raises:
        DepthError: no path does.
    """
    found = {depth: _numbered(graph.strings.decode(np.unique(graph.nodes.module)))
             for depth, graph in graphs.items()}  # fmt: skip
    deepest = max(graphs)
    fit = [
        path
        for path in found[deepest]
        if all(found[depth].get(path) == set(range(depth)) for depth in graphs)
    ]
    if len(fit) == 1:
        return fit[0]
    seen = ", ".join(f"{path}.0-{max(n)}" for path, n in sorted(found[deepest].items())) or "none"
    raise DepthError(
        f"at {deepest} layers the trace has numbered modules {seen}: expected one list of modules "
        f"with as many members as layers were built, found {len(fit)}. A model that torch.compile "
        "takes as a whole shows no modules: capture it uncompiled"
    )


def _numbered(modules: Iterable[str]) -> dict[str, set[int]]:
    """Return path -> the numbers of the modules right under it."""
    paths: dict[str, set[int]] = defaultdict(set)
    for module in modules:
        for number in _NUMBER.finditer(module):
            paths[module[: number.start()].removesuffix(".")].add(int(number[1]))
    return dict(paths)


def find_layers(graph: Graph, module: str, layers: int) -> LayeredGraph:
    """Find the layers of a graph.

    Raises:
        DepthError: the graph does not walk from layer to layer.
    """
    position = np.empty(len(graph), dtype=np.int64)
    position[graph.topological_order()] = np.arange(len(graph))
    lanes: dict[Lane, list[int]] = defaultdict(list)
    nodes = graph.nodes
    beside = _beside(graph)
    for node in np.argsort(position).tolist():
        if beside[node]:
            lane = "beside", int(nodes.group[node])
        elif nodes.stream[node] != UNKNOWN:
            lane = "stream", int(nodes.stream[node])
        else:
            lane = "thread", int(nodes.thread[node])
        lanes[lane].append(node)
    launcher = _launchers(graph, lanes, beside)
    launched: dict[int, list[int]] = defaultdict(list)
    for lane, members in lanes.items():
        if lane[0] != "thread":
            for node in members:
                launched[int(launcher[node])].append(node)
    for members in launched.values():
        members.sort(key=lambda node: int(position[node]))
    made = LayeredGraph(
        graph=graph,
        module=module,
        layers=layers,
        lanes=dict(lanes),
        asked_ns=nodes.start_ns[launcher],
        launched=dict(launched),
        passes=[],
        place=[None] * len(graph),
    )
    layer_of = _layer_of(graph, module)
    for (sort, number), members in lanes.items():
        if sort == "thread":
            _add_passes(made, number, members, layer_of)
    if not made.passes:
        raise DepthError(f"no operator runs in {module}.0 to {module}.{layers - 1}")
    return made


def _beside(graph: Graph) -> npt.NDArray[np.bool_]:
    """Return which calls of a CPU run beside their thread: its next operator does not wait."""
    edges, nodes = graph.edges, graph.nodes
    followed = np.zeros(len(graph), dtype=bool)
    followed[edges.source[edges.reason == Reason.PROGRAM_ORDER]] = True
    return graph.communication & (nodes.stream == UNKNOWN) & ~followed


def _launchers(graph: Graph, lanes: dict[Lane, list[int]], beside: npt.NDArray[np.bool_]) -> I64:
    """Return per node the host node that asked for it: itself, its launcher, else as before it."""
    launcher = np.full(len(graph), -1, dtype=np.int64)
    reason, target = graph.edges.reason, graph.edges.target
    launches = reason == Reason.LAUNCH
    launches |= beside[target] & (reason == Reason.PROGRAM_ORDER)
    launcher[graph.edges.target[launches]] = graph.edges.source[launches]
    first = min(
        (members[0] for (sort, _), members in lanes.items() if sort == "thread"),
        key=lambda node: int(graph.nodes.start_ns[node]),
    )
    for (sort, _), members in lanes.items():
        before = first
        for node in members:
            if sort == "thread":
                launcher[node] = node
            elif launcher[node] < 0:
                launcher[node] = before
            before = int(launcher[node])
    return launcher


def _layer_of(graph: Graph, module: str) -> I64:
    """Return per node the layer that its module is in, -1 for none."""
    inside = re.compile(re.escape(module + "." if module else "") + r"(\d+)(?:\.|$)")
    codes, inverse = np.unique(graph.nodes.module, return_inverse=True)
    numbers = [
        int(found[1]) if (found := inside.match(text)) else -1
        for text in graph.strings.decode(codes)
    ]
    return np.array(numbers, dtype=np.int64)[inverse]


def _add_passes(made: LayeredGraph, thread: int, lane: list[int], layer_of: I64) -> None:
    """Split a thread's nodes into passes, and each pass into layers."""
    nodes = made.graph.nodes
    walks: list[list[tuple[int, int]]] = []  # of each pass, (position in the lane, layer) in order
    key: tuple[int, int] | None = None
    for at, node in enumerate(lane):
        layer = int(layer_of[node])
        if layer < 0:
            continue
        walk = walks[-1] if walks else []
        now = (int(nodes.phase[node]), int(nodes.micro_batch[node]))
        if now != key or (layer != walk[-1][1] and _complete(walk, made.layers)):
            walks.append([])
        walks[-1].append((at, layer))
        key = now
    for walk in walks:
        phase = Phase(int(nodes.phase[lane[walk[0][0]]]))
        number = int(nodes.micro_batch[lane[walk[0][0]]])
        label = (
            f"{phase.name.lower()} of micro-batch {number}" if number > 0 else phase.name.lower()
        )
        _add_pass(made, Pass(thread, label, _ascends(walk, phase)), lane, walk)


def _complete(walk: list[tuple[int, int]], layers: int) -> bool:
    return len({layer for _, layer in walk}) == layers


def _ascends(walk: list[tuple[int, int]], phase: Phase) -> bool:
    first, last = walk[0][1], walk[-1][1]
    return first < last if first != last else phase is not Phase.BACKWARD


def _add_pass(made: LayeredGraph, one: Pass, lane: list[int], walk: list[tuple[int, int]]) -> None:
    starts: list[tuple[int, int]] = []
    for at, layer in walk:
        if not starts or layer != starts[-1][1]:
            starts.append((at, layer))
    order = list(range(made.layers)) if one.ascending else list(reversed(range(made.layers)))
    if [layer for _, layer in starts] != order:
        walked = ", ".join(str(layer) for _, layer in starts[:12])
        raise DepthError(
            f"the {one.label} pass walks the layers {walked}{', ...' if len(starts) > 12 else ''}: "
            f"expected each of the {made.layers} layers of {made.module} once, one after another. "
            "Layers that interleave (shared ones, checkpoints that span several) cannot be "
            "repeated; capture the model at its own depth"
        )
    ends = [at for at, _ in starts[1:]] + [walk[-1][0] + 1]
    number = len(made.passes)
    for (start, layer), end in zip(starts, ends, strict=True):
        block: list[int] = []
        for node in lane[start:end]:
            block += [node, *made.launched.get(node, ())]
        for position, node in enumerate(block):
            made.place[node] = (number, layer, position)
        one.blocks[layer] = block
    made.passes.append(one)
