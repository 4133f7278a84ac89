"""Neighbouring kernels that could be one: who passes data to whom, and what leaves the chain."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onerank.annotate.what_ifs.sizes.places import Place, launchers
from onerank.annotate.what_ifs.touched import Access, accesses_of
from onerank.annotate.work.classes import (
    CLASSES,
    OpClass,
    classify,
    device_copies,
    op_class,
)
from onerank.annotate.work.shapes import Tensor
from onerank.ir import UNKNOWN, Graph, Kind, Reason

I64 = npt.NDArray[np.int64]


class Outer(NamedTuple):
    """A tensor that a chain reads from elsewhere or leaves to others.

    Attributes:
        shape: sizes.
        type: as in the column of types.
        value: as in the column of values.
        nbytes: bytes of all elements.
    """

    shape: tuple[int, ...]
    type: str
    value: tuple[Any, ...]
    nbytes: int


class Chain(NamedTuple):
    """Kernels that become one.

    Attributes:
        nodes: indices, in the order of the stream.
        reads: tensors read from elsewhere, each once.
        writes: tensors that others read, or nobody in this step.
        bytes_before: bytes that the kernels read and write one by one.
    """

    nodes: tuple[int, ...]
    reads: tuple[Outer, ...]
    writes: tuple[Outer, ...]
    bytes_before: int

    @property
    def bytes_read(self) -> int:
        """Bytes of all reads."""
        return sum(one.nbytes for one in self.reads)

    @property
    def bytes_written(self) -> int:
        """Bytes of all writes."""
        return sum(one.nbytes for one in self.writes)

    @property
    def bytes_after(self) -> int:
        """Bytes of all reads and writes."""
        return self.bytes_read + self.bytes_written


def chains_of(graph: Graph, classes: Sequence[OpClass]) -> list[Chain]:
    """Return the chains of kernels of these classes, each of two or more.

    It is a loop over the GPU's operations: what a storage holds depends on who wrote to it last.
    """
    device = np.flatnonzero(graph.gpu_compute | graph.communication)
    device = device[np.argsort(graph.nodes.start_ns[device], kind="stable")]
    access = accesses_of(graph, device)
    fusible = np.zeros(len(graph), dtype=bool)
    chosen = [CLASSES.index(one) for one in classes]
    compute = device[graph.gpu_compute[device]]
    fusible[compute] = np.isin(classify(graph, compute), chosen)
    fusible &= _whole_operators(graph, classes)
    fusible &= (graph.nodes.bytes_read != UNKNOWN) & (graph.nodes.bytes_written != UNKNOWN)
    fusible &= graph.mask(Kind.KERNEL, Kind.MEMSET) | device_copies(graph)
    runs = _runs(graph, device, access, fusible)
    later = _Later(device, access)
    chains = [_chain(graph, run, access, later) for run in runs]
    return [one for one in chains if one.bytes_after < one.bytes_before]


def _whole_operators(graph: Graph, classes: Sequence[OpClass]) -> npt.NDArray[np.bool_]:
    """Return which nodes do all the work of an operator of these classes, not a share of it.

    Fills and copies that a product or a sort launches are its own business.
    """
    ops = np.unique(graph.nodes.op)
    able = ops[[op_class(graph.strings[int(one)]) in classes for one in ops]]
    by = launchers(graph)
    device = graph.gpu_compute & (by >= 0)
    count = np.bincount(by[device], minlength=len(graph))
    alone = np.where(device, count[by] == 1, graph.gpu_compute)
    return np.isin(graph.nodes.op, able) & alone


def _runs(
    graph: Graph, device: I64, access: dict[int, Access], fusible: npt.NDArray[np.bool_]
) -> list[list[int]]:
    """Return the runs of neighbours on a stream that can be one kernel."""
    nodes = graph.nodes
    enters, leaves = _bound(graph)
    runs: list[list[int]] = []
    open_runs = dict[int, list[int]]()
    for node in device.tolist():
        stream = int(nodes.stream[node])
        run = open_runs.get(stream)
        able = bool(fusible[node]) and node in access
        if (
            run
            and able
            and not enters[node]
            and not leaves[run[-1]]
            and _joins(graph, run, node, access)
        ):
            run.append(node)
            continue
        open_runs.pop(stream, None)
        if able:
            open_runs[stream] = [node]
            runs.append(open_runs[stream])
    return [run for run in runs if len(run) > 1]


def _bound(graph: Graph) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return (who waits for another stream or the host, for whom another stream or the host does).

    Launches do not count: the fused kernel is launched where the first was.
    """
    edges, nodes = graph.edges, graph.nodes
    source, target = edges.source, edges.target
    across = nodes.stream[source] != nodes.stream[target]
    across |= graph.communication[source] | graph.communication[target]
    launch = edges.reason == Reason.LAUNCH
    enters, leaves = np.zeros(len(graph), dtype=bool), np.zeros(len(graph), dtype=bool)
    enters[target[across & ~launch]] = True
    leaves[source[across & ~launch]] = True
    return enters, leaves


def _joins(graph: Graph, run: list[int], node: int, access: dict[int, Access]) -> bool:
    """Return whether a kernel can be in the loop of a run, and shares data with it.

    It loops over as many elements, over a part (a half that is joined again), or one for each row;
    a fill has no data of others.
    """
    nodes = graph.nodes
    first = run[0]
    for name in ("phase", "micro_batch"):
        if getattr(nodes, name)[first] != getattr(nodes, name)[node]:
            return False
    if not _by_rows(access[node]):
        return False
    elements, own = max(access[one].elements for one in run), access[node].elements
    if not own or not elements or max(own, elements) % min(own, elements):
        return False
    touched = {place.storage for one in run for _, place, _ in
               (*access[one].reads, *access[one].writes)}  # fmt: skip
    reads = access[node].reads
    return not reads or any(place.storage in touched for _, place, _ in reads)


def _by_rows(access: Access) -> bool:
    """Return whether a kernel's results are as its largest operand, or one for each row of it."""
    largest = max((t for t, _, _ in access.reads), key=lambda t: t.numel, default=None)
    if largest is None:
        return True
    results = [tensor.numel for tensor, _, _ in access.writes]
    return all(one >= largest.numel or one * largest.shape[-1] == largest.numel for one in results)


class _Later:
    """Who reads a storage after a given operation, before another writes it whole."""

    def __init__(self, device: I64, access: dict[int, Access]) -> None:
        self.rank = {int(node): rank for rank, node in enumerate(device)}
        self.events = dict[int, list[tuple[int, bool]]]()
        for node in device.tolist():
            if node not in access:
                continue
            read = {place.storage for _, place, _ in access[node].reads}
            for storage in read:
                self.events.setdefault(storage, []).append((self.rank[node], True))
            for storage in {p.storage for _, p, _ in access[node].writes} - read:
                self.events.setdefault(storage, []).append((self.rank[node], False))

    def is_read(self, storage: int, after: int) -> bool:
        """Return whether the next who touches the storage after this operation reads it."""
        events = self.events.get(storage, [])
        return next((read for rank, read in events if rank > self.rank[after]), False)


def _chain(graph: Graph, run: list[int], access: dict[int, Access], later: _Later) -> Chain:
    made_here, read_here = dict[int, Outer](), set[int]()
    reads = dict[int, Outer]()
    for node in run:
        for tensor, place, kind in access[node].reads:
            if place.storage in made_here:
                read_here.add(place.storage)
                continue
            known = reads.get(place.storage)
            if known is None or known.nbytes < tensor.nbytes:
                reads[place.storage] = _outer(tensor, place, kind)
        for tensor, place, kind in access[node].writes:
            known = made_here.get(place.storage)
            if known is None or known.nbytes < tensor.nbytes:
                made_here[place.storage] = _outer(tensor, place, kind)
    writes = [
        outer
        for storage, outer in made_here.items()
        if later.is_read(storage, run[-1]) or storage not in read_here
    ]
    moved = graph.nodes.bytes_read[run] + graph.nodes.bytes_written[run]
    return Chain(tuple(run), tuple(reads.values()), tuple(writes), int(moved.sum()))


def _outer(tensor: Tensor, place: Place, kind: str) -> Outer:
    value = (place.tensor, place.storage, place.offset, tensor.numel, tensor.item_bytes, "cuda:0")
    return Outer(tensor.shape, kind, value, tensor.nbytes)
