"""Find the passes over a graph's layers, and the nodes of each layer in each pass.

A thread runs a step layer by layer. A layer begins with its first operator and ends where the next
layer begins. The module alone does not decide: autograd's sums and accumulations have none. A GPU
operation belongs to the layer of the operator that launched it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.ir import UNKNOWN, Graph, Job, Phase, Reason
from onerank.ir.errors import DepthError
from onerank.ir.graph import Mask

I64 = npt.NDArray[np.int64]
Lane = tuple[str, int]
"""Kind and number of a sequence of nodes: ("thread", thread), ("stream", stream), or
("concurrent", group) for CPU collectives that run concurrently with their thread."""

_NUMBER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.|$)")


@dataclass(slots=True)
class Pass:
    """One pass over all layers: forward, or backward in descending order.

    Attributes:
        thread: the thread that runs it.
        label: name for messages.
        ascending: whether layer 0 comes first.
        blocks: layer -> its nodes: each host node, followed by the GPU operations that it launched.
    """

    thread: int
    label: str
    ascending: bool
    blocks: dict[int, list[int]] = field(default_factory=dict[int, list[int]])


@dataclass(slots=True)
class LayeredGraph:
    """A graph with the positions of its layers.

    Attributes:
        graph: the graph.
        module: path of the layers ("model.layers").
        layers: number of layers.
        lanes: nodes of each lane, in order.
        issued_ns: per node, the host time at which it was issued.
        launched: host node -> the GPU operations it launched.
        passes: in order of their start within each thread.
        place: per node, (pass, layer, position in the layer's block); None outside all layers.
    """

    graph: Graph
    module: str
    layers: int
    lanes: dict[Lane, list[int]]
    issued_ns: I64
    launched: dict[int, list[int]]
    passes: list[Pass]
    place: list[tuple[int, int, int] | None]

    def nonlayer_hosts(self, thread: int) -> list[int]:
        """Return the host nodes of a thread that are in no layer, in order."""
        return [node for node in self.lanes["thread", thread] if self.place[node] is None]

    def hosted(self, block: list[int]) -> Iterator[int]:
        """Yield the host nodes of a layer's block, in order."""
        at = 0
        while at < len(block):
            yield block[at]
            at += 1 + len(self.launched.get(block[at], ()))


def first_layer(job: Job) -> int:
    """Return the number of the first layer: a pipeline stage counts those of earlier stages."""
    return 0 if job.pipeline is None else sum(job.pipeline.layers[: job.pipeline.stage])


def renumber_layers(graph: Graph, module: str, shift: int) -> Graph:
    """Return the graph with `shift` added to the layer number in every module path.

    Args:
        graph: a graph of a model or of a pipeline stage.
        module: path of the layers.
        shift: difference of the numbers.
    """
    if shift == 0:
        return graph
    numbered = re.compile(_numbered_path(module))

    def renumbered(path: str) -> str:
        return numbered.sub(lambda match: f"{match[1]}{int(match[2]) + shift}", path, count=1)

    job = graph.job
    modules = tuple(
        msgspec.structs.replace(
            entry,
            path=renumbered(entry.path),
            layer=renumbered(entry.layer),
            scope=renumbered(entry.scope),
        )
        for entry in job.modules
    )
    scopes = tuple(
        msgspec.structs.replace(scope, path=renumbered(scope.path))
        for scope in job.measurement.scopes
    )
    measured = msgspec.structs.replace(job.measurement, scopes=scopes)
    graph = graph.with_columns(module=[renumbered(path) for path in graph.text("module")])
    return replace(graph, job=msgspec.structs.replace(job, modules=modules, measurement=measured))


def _numbered_path(module: str) -> str:
    """Return a pattern for the start of a layer's path: its lead, then its number."""
    return "^(" + re.escape(f"{module}." if module else "") + r")(\d+)(?=\.|$)"


def layers_module(graphs: dict[int, Graph], first: int) -> str:
    """Return the path under which each graph has as many numbered modules as its depth.

    Args:
        graphs: number of layers -> capture.
        first: number of the first layer.

    Raises:
        DepthError: no path does.
    """
    numbers = {depth: _numbered(graph.strings.decode(np.unique(graph.nodes.module)))
             for depth, graph in graphs.items()}  # fmt: skip
    deepest = max(graphs)
    fit = [
        path
        for path in numbers[deepest]
        if all(numbers[depth].get(path) == set(range(first, first + depth)) for depth in graphs)
    ]
    if len(fit) == 1:
        return fit[0]
    listed = ", ".join(f"{path}.{min(n)}-{max(n)}" for path, n in sorted(numbers[deepest].items()))
    raise DepthError(
        f"at {deepest} layers the trace has the numbered modules {listed or 'none'}; expected one "
        f"list with as many members as layers, found {len(fit)}\n"
        "  capture the model uncompiled: torch.compile of the whole model hides its modules",
        code="depth-no-layer-list",
    )


def _numbered(modules: Iterable[str]) -> dict[str, set[int]]:
    """Return path -> numbers of its direct child modules."""
    paths: dict[str, set[int]] = defaultdict(set)
    for module in modules:
        for number in _NUMBER.finditer(module):
            paths[module[: number.start()].removesuffix(".")].add(int(number[1]))
    return dict(paths)


def find_layers(graph: Graph, module: str, layers: int) -> LayeredGraph:
    """Find the layers of a graph.

    Raises:
        DepthError: the graph does not run layer by layer.
    """
    position = np.empty(len(graph), dtype=np.int64)
    position[graph.topological_order()] = np.arange(len(graph))
    lanes: dict[Lane, list[int]] = defaultdict(list)
    nodes = graph.nodes
    concurrent = _concurrent_calls(graph)
    for node in np.argsort(position).tolist():
        if concurrent[node]:
            lane = "concurrent", int(nodes.group[node])
        elif nodes.stream[node] != UNKNOWN:
            lane = "stream", int(nodes.stream[node])
        else:
            lane = "thread", int(nodes.thread[node])
        lanes[lane].append(node)
    launcher = _launchers(graph, lanes, concurrent)
    launched: dict[int, list[int]] = defaultdict(list)
    for lane, members in lanes.items():
        if lane[0] != "thread":
            for node in members:
                launched[int(launcher[node])].append(node)
    for members in launched.values():
        members.sort(key=lambda node: int(position[node]))
    layered = LayeredGraph(
        graph=graph,
        module=module,
        layers=layers,
        lanes=dict(lanes),
        issued_ns=nodes.start_ns[launcher],
        launched=dict(launched),
        passes=[],
        place=[None] * len(graph),
    )
    layer_of = _layer_of(graph, module)
    for (kind, number), members in lanes.items():
        if kind == "thread":
            _add_passes(layered, number, members, layer_of)
    if not layered.passes:
        raise DepthError(
            f"no operator runs in {module}.0 to {module}.{layers - 1}", code="depth-no-layer-nodes"
        )
    return layered


def _concurrent_calls(graph: Graph) -> Mask:
    """Return which CPU collectives run concurrently: their thread's next operator does not wait."""
    edges, nodes = graph.edges, graph.nodes
    followed = np.zeros(len(graph), dtype=bool)
    followed[edges.source[edges.reason == Reason.PROGRAM_ORDER]] = True
    return graph.communication & (nodes.stream == UNKNOWN) & ~followed


def _launchers(graph: Graph, lanes: dict[Lane, list[int]], concurrent: Mask) -> I64:
    """Return per node the host node that issued it.

    A host node is its own issuer. A node without a launch edge has the issuer of the previous node
    in its lane.
    """
    launcher = np.full(len(graph), -1, dtype=np.int64)
    reason, target = graph.edges.reason, graph.edges.target
    launches = reason == Reason.LAUNCH
    launches |= concurrent[target] & (reason == Reason.PROGRAM_ORDER)
    launcher[graph.edges.target[launches]] = graph.edges.source[launches]
    first = min(
        (members[0] for (kind, _), members in lanes.items() if kind == "thread"),
        key=lambda node: int(graph.nodes.start_ns[node]),
    )
    for (kind, _), members in lanes.items():
        previous = first
        for node in members:
            if kind == "thread":
                launcher[node] = node
            elif launcher[node] < 0:
                launcher[node] = previous
            previous = int(launcher[node])
    return launcher


def _layer_of(graph: Graph, module: str) -> I64:
    """Return per node the layer that its module is in, -1 for none."""
    inside = re.compile(re.escape(module + "." if module else "") + r"(\d+)(?:\.|$)")
    codes, inverse = np.unique(graph.nodes.module, return_inverse=True)
    numbers = [
        int(match[1]) if (match := inside.match(text)) else -1
        for text in graph.strings.decode(codes)
    ]
    return np.array(numbers, dtype=np.int64)[inverse]


def _add_passes(layered: LayeredGraph, thread: int, lane: list[int], layer_of: I64) -> None:
    """Split a thread's nodes into passes, and each pass into layers."""
    nodes = layered.graph.nodes
    walks: list[list[tuple[int, int]]] = []  # per pass, (position in the lane, layer) in order
    key: tuple[int, int] | None = None
    for at, node in enumerate(lane):
        layer = int(layer_of[node])
        if layer < 0:
            continue
        walk = walks[-1] if walks else []
        node_key = (int(nodes.phase[node]), int(nodes.micro_batch[node]))
        # A phase of a micro-batch may walk all layers more than once.
        if node_key != key or (layer != walk[-1][1] and _complete(walk, layered.layers)):
            walks.append([])
        walks[-1].append((at, layer))
        key = node_key
    for walk in walks:
        phase = Phase(int(nodes.phase[lane[walk[0][0]]]))
        number = int(nodes.micro_batch[lane[walk[0][0]]])
        label = (
            f"{phase.name.lower()} of micro-batch {number}" if number > 0 else phase.name.lower()
        )
        _add_pass(layered, Pass(thread, label, _ascends(walk, phase)), lane, walk)


def _complete(walk: list[tuple[int, int]], layers: int) -> bool:
    return len({layer for _, layer in walk}) == layers


def _ascends(walk: list[tuple[int, int]], phase: Phase) -> bool:
    first, last = walk[0][1], walk[-1][1]
    return first < last if first != last else phase is not Phase.BACKWARD


def _add_pass(
    layered: LayeredGraph, layer_pass: Pass, lane: list[int], walk: list[tuple[int, int]]
) -> None:
    """Split the nodes of a pass into layers and add it; check that it visits each layer once."""
    starts: list[tuple[int, int]] = []
    for at, layer in walk:
        if not starts or layer != starts[-1][1]:
            starts.append((at, layer))
    layers = range(layered.layers)
    order = list(layers) if layer_pass.ascending else list(reversed(layers))
    if [layer for _, layer in starts] != order:
        visited = ", ".join(str(layer) for _, layer in starts[:12])
        visited += ", ..." if len(starts) > 12 else ""
        raise DepthError(
            f"the {layer_pass.label} pass visits the layers {visited}; expected each of the "
            f"{layered.layers} layers of {layered.module} once, in order. Interleaved layers "
            "(shared ones, checkpoints over several) cannot be repeated\n"
            "  capture the model at its own depth",
            code="depth-interleaved-layers",
        )
    ends = [at for at, _ in starts[1:]] + [walk[-1][0] + 1]
    number = len(layered.passes)
    for (start, layer), end in zip(starts, ends, strict=True):
        block: list[int] = []
        for node in lane[start:end]:
            block += [node, *layered.launched.get(node, ())]
        for position, node in enumerate(block):
            layered.place[node] = (number, layer, position)
        layer_pass.blocks[layer] = block
    layered.passes.append(layer_pass)
