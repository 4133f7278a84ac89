"""Find the layers of a captured graph: the passes over them, and the period of their repetition.

A thread runs a step layer by layer. A layer begins with its first operator and ends where the next
layer begins. The module alone does not decide: autograd's sums and accumulations have none. A GPU
operation belongs to the layer of the operator that launched it.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import msgspec
import numpy as np

from onerank.ir import UNKNOWN, Graph, Job, Phase, Reason
from onerank.ir.arrays import I64, Mask
from onerank.ir.errors import DepthError

Lane = tuple[str, int]
"""Kind and number of a sequence of nodes: ("thread", thread), ("stream", stream), or
("concurrent", group) for CPU collectives that run concurrently with their thread."""

_NUMBER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.|$)")


@dataclass(slots=True)
class LayerPass:
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
    passes: list[LayerPass]
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
    numbered = _numbered_path(module)

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


def _numbered_path(module: str) -> re.Pattern[str]:
    """Return the expression for the start of a layer's path: its lead, then its number.

    Anchored, so that `sub` leaves equal parts in the middle of other paths.
    """
    return re.compile("^(" + re.escape(f"{module}." if module else "") + r")(\d+)(?=\.|$)")


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
    # A model may have several numbered lists (an encoder's and a decoder's layers, experts).
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
    # Gradient reductions overlap the operators of their thread; in its lane they would delay them.
    concurrent = _concurrent_calls(graph)
    # Without a device operators are on streams and nothing launches them: threads order them.
    launched_from_host = bool((nodes.stream == UNKNOWN).any())
    for node in np.argsort(position).tolist():
        if concurrent[node]:
            lane = "concurrent", int(nodes.group[node])
        elif launched_from_host and nodes.stream[node] != UNKNOWN:
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
        # An operator may launch on several streams, and lanes were visited one by one.
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
    # On a CPU a concurrent collective has no launch; the operator before it on its thread issued
    # it.
    launches |= concurrent[target] & (reason == Reason.PROGRAM_ORDER)
    launcher[graph.edges.target[launches]] = graph.edges.source[launches]
    # GPU work before the first launch has no operator; the first thread's first node stands for it.
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
    numbered = _numbered_path(module)
    codes, inverse = np.unique(graph.nodes.module, return_inverse=True)
    numbers = [
        int(match[2]) if (match := numbered.match(text)) else -1
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
        _add_pass(layered, LayerPass(thread, label, _ascends(walk, phase)), lane, walk)


def _complete(walk: list[tuple[int, int]], layers: int) -> bool:
    return len({layer for _, layer in walk}) == layers


def _ascends(walk: list[tuple[int, int]], phase: Phase) -> bool:
    first, last = walk[0][1], walk[-1][1]
    # A pass over a single layer shows no direction.
    return first < last if first != last else phase is not Phase.BACKWARD


def _add_pass(
    layered: LayeredGraph, layer_pass: LayerPass, lane: list[int], walk: list[tuple[int, int]]
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
    # The last layer ends with its last node that names it; what follows belongs to the norm or the
    # head.
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


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The captured layers to copy: `copies` copies of `period` layers from `start` on.

    Attributes:
        start: first layer of the copied period.
        period: number of layers that are copied together.
        copies: number of copies.
        equal_layers: inner captured layers that repeat period by period.
    """

    start: int
    period: int
    copies: int
    equal_layers: range

    @classmethod
    def of(cls, period: int, equal_layers: range, captured: int, depth: int) -> "LayerPlan":
        """Choose the period in the middle of the equal layers, away from the first and last."""
        inner = range(max(equal_layers.start, 1), min(equal_layers.stop, captured - 1))
        # FSDP's first and last layers also fetch or release states for their neighbours.
        start = (inner.start + inner.stop - period + 1) // 2
        return cls(start, period, (depth - captured) // period, inner)

    def equivalents(self, layer: int) -> list[int]:
        """Return the captured layers that do the same work as `layer`, including `layer`."""
        return [other for other in self.equal_layers if (other - layer) % self.period == 0]

    @property
    def added(self) -> int:
        """Number of layers that are copies."""
        return self.period * self.copies

    def layer(self, captured: int, copy: int) -> int:
        """Return the number of a captured layer, or of its copy, in the whole model."""
        if captured < self.start + self.period:
            return captured + copy * self.period
        return captured + self.added

    def layers(self, captured: I64, copy: I64) -> I64:
        """Return `layer` of each element, int64[n]."""
        first = captured < self.start + self.period
        return captured + np.where(first, copy * self.period, self.added)

    def instances(self, layer: I64) -> tuple[I64, I64]:
        """Return `instance` of each element, as two int64[n]."""
        ahead = layer - self.start
        copied = (ahead >= 0) & (ahead < self.period + self.added)
        after = np.where(ahead < 0, layer, layer - self.added)
        captured = np.where(copied, self.start + ahead % self.period, after)
        return captured, np.where(copied, ahead // self.period, 0)

    def instance(self, layer: int) -> tuple[int, int]:
        """Return (captured layer, copy) of a layer of the whole model."""
        if layer < self.start + self.period:
            return layer, 0
        if layer >= self.start + self.period + self.added:
            return layer - self.added, 0
        copy, ahead = divmod(layer - self.start, self.period)
        return self.start + ahead, copy


class Renaming:
    """Renumbers the layers in module paths."""

    def __init__(self, module: str, plan: LayerPlan) -> None:
        self._numbered = _numbered_path(module)
        self._plan = plan

    def layer(self, path: str) -> int | None:
        """Return the captured layer of a path, None outside the layers."""
        match = self._numbered.match(path)
        return int(match[2]) if match else None

    def moved(self, path: str, layer: int) -> str:
        """Return the path of the same module in another layer; unchanged outside the layers."""
        return self._numbered.sub(lambda match: f"{match[1]}{layer}", path, count=1)

    def instances(self, layer: int) -> list[tuple[int, int]]:
        """Return (copy, number in the whole model) of a captured layer and its copies."""
        plan = self._plan
        inside = plan.start <= layer < plan.start + plan.period
        return [(copy, plan.layer(layer, copy)) for copy in range(plan.copies + 1 if inside else 1)]


# Columns that must agree for two nodes to do the same work, in addition to module and operands.
_COLUMNS = (
    *("kind", "name", "op", "stream", "grid", "block"),
    *("collective", "comm_bytes", "group", "comm_src", "comm_dst"),
)

# Layers at either end that may differ from the others. FSDP fetches states two layers ahead, so the
# last two layers of a backward pass differ.
_AT_ENDS = 2

Signature = tuple[int, str, int]
"""Number of the column values, module relative to the layer, code of the operand shapes."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A model whose first `first` layers are unique and whose others repeat every `period`."""

    first: int
    period: int

    @classmethod
    def of(cls, kinds: Sequence[Hashable]) -> "Pattern":
        """Return the shortest pattern (first plus period) for layers of these kinds."""
        count = len(kinds)
        patterns = [
            cls(first, period)
            for period in range(1, count + 1)
            for first in range(count - period + 1)
            if all(kinds[at] == kinds[at + period] for at in range(first, count - period))
        ]
        return min(patterns, key=lambda pattern: (pattern.first + pattern.period, pattern.period))

    @property
    def deepest(self) -> int:
        """Smallest depth at which a whole period has layers on both sides."""
        return self.first + self.period + 2

    def fits(self, layers: int, depth: int) -> bool:
        """Return whether `layers` contain a period and differ from `depth` by whole periods."""
        return layers >= self.first + self.period and (depth - layers) % self.period == 0


def layer_signatures(layered: LayeredGraph) -> list[Signature]:
    """Return a signature per node that is equal for the same work in another layer."""
    nodes = layered.graph.nodes
    stacked = np.stack([getattr(nodes, column).astype(np.int64) for column in _COLUMNS])
    _, inverse = np.unique(stacked, axis=1, return_inverse=True)
    modules = layered.graph.text("module")
    lead = len(layered.module) + 1 if layered.module else 0
    signatures: list[Signature] = []
    numbers = zip(inverse.ravel().tolist(), nodes.input_shapes.tolist(), strict=True)
    for (columns, shapes), module, place in zip(numbers, modules, layered.place, strict=True):
        if place is not None and module.startswith(layered.module) and module != layered.module:
            # Relative to the layer that runs the node: FSDP fetches the states of the next layer.
            number, _, inner = module[lead:].partition(".")
            ahead = int(number) - place[1] if number.isdigit() else 0
            module = f"{ahead:+d}.{inner}" if number.isdigit() else module  # noqa: PLW2901
        signatures.append((columns, module, shapes))
    return signatures


def find_pattern(layered: LayeredGraph) -> Pattern:
    """Return the shortest pattern (first layers plus period) that the nodes confirm.

    Raises:
        DepthError: no period appears twice; the message says which layers differ and where.
    """
    signatures, count = layer_signatures(layered), layered.layers
    patterns = [Pattern(first, period) for period in range(1, count - 1)
             for first in range(count - period - 1)]  # fmt: skip
    # Shortest first: a multiple of a period repeats as well, but fits fewer depths.
    for pattern in sorted(
        patterns, key=lambda candidate: (candidate.first + candidate.period, candidate.period)
    ):
        if _equal_layers(layered, signatures, pattern):
            return pattern
    raise DepthError(
        f"no layer of {layered.module} repeats among the {count} captured: "
        f"{_differences(layered, signatures)}\n"
        "  capture at least two layers more than a period; layers without a period cannot be "
        "extrapolated",
        code="depth-no-period",
    )


def equal_layers_of(layered: LayeredGraph, pattern: Pattern) -> range:
    """Return the layers that follow the pattern, without first and last layers that differ.

    The first and last layers may differ in work for their neighbours: sharded states are fetched
    for the next layer and released for the previous one.

    Raises:
        DepthError: the layers between do not repeat; the message says where they differ.
    """
    signatures = layer_signatures(layered)
    if equal_layers := _equal_layers(layered, signatures, pattern):
        return equal_layers
    raise DepthError(
        f"the layers of {layered.module} should repeat every {pattern.period}, but "
        f"{_differences(layered, signatures, pattern.period)}\n"
        "  capture deeper if only the first and last layers differ, else capture the whole model: "
        "gradient buckets over several layers and random token routing cannot be repeated",
        code="depth-layers-differ",
    )


def _equal_layers(layered: LayeredGraph, signatures: list[Signature], pattern: Pattern) -> range:
    """Return the layers that repeat, an empty range if they do not."""
    period, count = pattern.period, layered.layers
    same = [not _difference(layered, signatures, at, at + period) for at in range(count - period)]
    inner = range(max(pattern.first, 1), count - period)
    runs = [[at for at, _ in run] for kept, run in
            groupby(enumerate(same[pattern.first :], pattern.first), lambda item: item[1])
            if kept]  # fmt: skip
    if not runs:
        return range(0)
    # Inner pairs count, since layers at the ends may differ for their neighbours' sake.
    run = max(runs, key=lambda members: sum(at in inner for at in members))
    repeating = range(run[0], run[-1] + period + 1)
    at_ends = max(repeating[0] - pattern.first, count - 1 - repeating[-1])
    confirmed = any(at in inner for at in run) or not inner
    return repeating if confirmed and at_ends <= max(_AT_ENDS, period) else range(0)


def _do_same_work(a: Signature, b: Signature) -> bool:
    """Return whether two nodes do the same work; unrecorded operand shapes (code 0) match any."""
    return a[:2] == b[:2] and (a[2] == b[2] or not a[2] or not b[2])


def _has_last_layer(layered: LayeredGraph, ascending: bool, a: int, b: int) -> bool:
    """Return whether `a` or `b` is the last layer of a pass, whose end no next layer marks."""
    return (layered.layers - 1 if ascending else 0) in (a, b)


def _differences(layered: LayeredGraph, signatures: list[Signature], period: int = 1) -> str:
    inner = range(1, layered.layers - 1 - period)
    differences = [
        f"layers {at} and {at + period} differ, {difference}"
        for at in inner
        if (difference := _difference(layered, signatures, at, at + period))
    ]
    return "; ".join(differences[:3]) or "too few of them have layers on both sides"


def _difference(layered: LayeredGraph, signatures: list[Signature], a: int, b: int) -> str:
    """Return the first pass and node in which two layers differ, "" for equal layers."""
    names = layered.graph.text("name")
    for layer_pass in layered.passes:
        first, second = layer_pass.blocks[a], layer_pass.blocks[b]
        # No next layer marks the end of the last layer, so it is compared as far as the other goes.
        for node, other in zip(first, second, strict=False):
            if not _do_same_work(signatures[node], signatures[other]):
                return f"{names[node]} versus {names[other]} in the {layer_pass.label} pass"
        if len(first) != len(second) and not _has_last_layer(layered, layer_pass.ascending, a, b):
            return f"{len(first)} versus {len(second)} nodes in the {layer_pass.label} pass"
    return ""
