"""Fuse chains of memory-bound kernels, as a compiler does."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.op_costs.node_costs import characterise
from onerank.annotate.op_costs.op_classes import (
    CLASSES,
    OpClass,
    base_name,
    classify,
    device_copies,
    op_class,
)
from onerank.annotate.op_costs.operands import Tensor
from onerank.annotate.passes.remove_nodes import one_per_pair
from onerank.annotate.passes.resize.tensor_locations import Place, launchers
from onerank.annotate.passes.swap_kernels import MIN_KERNEL_NS
from onerank.annotate.passes.tensor_access import TEXTS, Access, accesses_of, as_text
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Kind, Reason
from onerank.ir.errors import AnnotateError

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
    """Kernels to fuse into one.

    Attributes:
        nodes: indices, in stream order.
        reads: tensors read from outside the group, each once.
        writes: tensors that later nodes read, or that nothing in the step reads.
        bytes_before: bytes that the separate kernels read and write.
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
    """Return the nodes that do all the work of an operator of these classes.

    Fills and copies that a GEMM or a sort launches do not count.
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


_POINTWISE = (OpClass.ELEMENTWISE, OpClass.COPY, OpClass.MEMSET)

CHOICES: dict[str, tuple[OpClass, ...]] = {
    "elementwise": _POINTWISE,
    "norm": (*_POINTWISE, OpClass.REDUCTION, OpClass.NORM, OpClass.SOFTMAX),
}
"""Classes of work to fuse into one kernel; "norm" includes reductions along a row."""

_FUSED = {"elementwise": "onerank::fused_elementwise", "norm": "onerank::fused_reduction"}


@dataclass(frozen=True, slots=True)
class Fuse:
    """Fuse neighbouring memory-bound kernels.

    Neighbours on a stream become one kernel if each reads or writes a tensor of another one with
    the same number of elements, nothing else waits for any of them but the last, and only the first
    waits for anything else. The fused kernel reads outside tensors once and writes tensors that are
    read later; tensors passed only inside stay in registers.

    Attributes:
        what: one of `CHOICES`.
    """

    what: str

    def apply(self, graph: Graph, target: Gpu | None = None) -> Graph:
        """Return the graph with the fused kernels in the place of the first of each chain.

        A fused kernel streams its bytes at the rate of those that it is made of. Host operators
        stay, as long as they were: a compiled step has fewer.

        Args:
            graph: captured or re-costed, with GPU kernels.
            target: not looked at, for the times are those of the graph.

        Raises:
            AnnotateError: `what` is unknown, or nothing can be fused.
        """
        del target
        if self.what not in CHOICES:
            raise AnnotateError(
                f'unknown fusion "{self.what}"; known are {", ".join(CHOICES)}',
                code="fusion-unknown",
            )
        graph = characterise(graph)
        chains = chains_of(graph, CHOICES[self.what])
        if not chains:
            raise AnnotateError(
                f"no two neighbouring kernels can be fused by {self.what}: that takes kernels of "
                "one stream that pass data on, with operands that the trace tells apart (an "
                "execution trace, or a CPU capture re-costed for a GPU)",
                code="fusion-nothing-to-fuse",
            )
        made = _with_columns(graph, chains, _FUSED[self.what])
        made = _without(made, chains)
        gone = sum(len(chain.nodes) - 1 for chain in chains)
        before = sum(int(graph.nodes.duration_ns[list(chain.nodes)].sum()) for chain in chains)
        heads = np.isin(made.nodes.id, graph.nodes.id[[chain.nodes[0] for chain in chains]])
        after = int(made.nodes.duration_ns[heads].sum())
        saved = sum(chain.bytes_before - chain.bytes_after for chain in chains)
        note = (
            f"What if fused ({self.what}): {gone + len(chains)} kernels become {len(chains)}, "
            f"{saved} bytes less are moved, {before} ns become {after} ns. What forward keeps for "
            "backward is still written; host operators and memory are as captured."
        )
        told = made.job.measurement.untimed(note)
        return replace(made, job=msgspec.structs.replace(made.job, measurement=told))


def _with_columns(graph: Graph, chains: list[Chain], op: str) -> Graph:
    """Return the graph with the first of each chain turned into the fused kernel."""
    nodes = graph.nodes
    names = ("duration_ns", "spread_ns", "p10_ns", "p90_ns", "uncontended_ns", "evidence", "flops",
             "bytes_read", "bytes_written", "kind")  # fmt: skip
    columns = {name: getattr(nodes, name).copy() for name in names}
    texts = {name: graph.text(name) for name in TEXTS}
    for chain in chains:
        members, head = list(chain.nodes), chain.nodes[0]
        streamed = chain.bytes_after / chain.bytes_before
        for name in ("duration_ns", "p10_ns", "p90_ns"):
            values = getattr(nodes, name)[members]
            if name != "duration_ns" and (values == UNKNOWN).any():
                columns[name][head] = UNKNOWN
                continue
            rest = np.minimum(values, MIN_KERNEL_NS)
            columns[name][head] = round(float(rest.max() + (values - rest).sum() * streamed))
        flops = nodes.flops[members]
        columns["flops"][head] = UNKNOWN if (flops == UNKNOWN).any() else flops.sum()
        columns["bytes_read"][head] = chain.bytes_read
        columns["bytes_written"][head] = chain.bytes_written
        columns["spread_ns"][head], columns["uncontended_ns"][head] = 0, UNKNOWN
        columns["kind"][head] = Kind.KERNEL
        least = int(nodes.evidence[members].min())
        columns["evidence"][head] = min(least, int(Evidence.EXTRAPOLATED))
        parts = Counter(base_name(graph.strings[int(code)]) for code in nodes.op[members])
        texts["name"][head] = "fused: " + " ".join(
            f"{part} x{count}" if count > 1 else part for part, count in parts.items()
        )
        texts["op"][head] = op
        for name in ("grid", "block"):
            texts[name][head] = ""
        for side, tensors in (("input", chain.reads), ("output", chain.writes)):
            texts[f"{side}_shapes"][head] = as_text([list(t.shape) for t in tensors])
            texts[f"{side}_types"][head] = as_text([t.type for t in tensors])
            texts[f"{side}_values"][head] = as_text([list(t.value) for t in tensors])
    return graph.with_columns(**columns, **texts)


def _without(graph: Graph, chains: list[Chain]) -> Graph:
    """Take out all but the first of each chain; who waited for one of them waits for it."""
    head = np.arange(len(graph), dtype=np.int64)
    for chain in chains:
        head[list(chain.nodes)] = chain.nodes[0]
    edges = graph.edges
    gone = head != np.arange(len(graph))
    source, waiter, reason = head[edges.source], head[edges.target], edges.reason
    stays = (source != waiter) & ~(gone[edges.target] & _from_host(graph, edges))
    source, waiter, reason = one_per_pair(source[stays], waiter[stays], reason[stays])
    kept = np.flatnonzero(~gone)
    place = np.cumsum(~gone) - 1
    joined = Edges.from_pairs(len(kept), place[source], place[waiter], reason)
    return replace(graph, nodes=graph.nodes.take(kept), edges=joined)


def _from_host(graph: Graph, edges: Edges) -> npt.NDArray[np.bool_]:
    """Return which edges come from a host operator: the launches of kernels that are no more."""
    return graph.nodes.kind[edges.source] == Kind.HOST_OP
