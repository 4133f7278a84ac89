"""Fuse chains of memory-bound kernels, as a compiler does."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

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
from onerank.annotate.passes.dataflow import TEXTS, Access, accesses_of, as_text
from onerank.annotate.passes.swap_kernels import MIN_KERNEL_NS
from onerank.annotate.passes.tensor_locations import TensorLocation
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Kind, Reason
from onerank.ir.arrays import I64, Mask
from onerank.ir.edges import one_per_pair
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note


class OuterTensor(NamedTuple):
    """A tensor that a chain reads from outside or leaves to later kernels.

    Attributes:
        shape: sizes.
        type: entry of the column of types.
        value: entry of the column of values.
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
        reads: tensors read from outside the chain, each once.
        writes: tensors that later nodes read, or that nothing in the step reads.
        bytes_before: bytes that the separate kernels read and write.
    """

    nodes: tuple[int, ...]
    reads: tuple[OuterTensor, ...]
    writes: tuple[OuterTensor, ...]
    bytes_before: int

    @property
    def bytes_read(self) -> int:
        """Bytes of all reads."""
        return sum(tensor.nbytes for tensor in self.reads)

    @property
    def bytes_written(self) -> int:
        """Bytes of all writes."""
        return sum(tensor.nbytes for tensor in self.writes)

    @property
    def bytes_after(self) -> int:
        """Bytes of all reads and writes."""
        return self.bytes_read + self.bytes_written


def chains_of(graph: Graph, classes: Sequence[OpClass]) -> list[Chain]:
    """Return the chains of kernels of these classes, each of two or more.

    The loop over the operations of the GPU is in order, because the content of a storage depends on
    its last writer.
    """
    device = np.flatnonzero(graph.gpu_compute | graph.communication)
    device = device[np.argsort(graph.nodes.start_ns[device], kind="stable")]
    access = accesses_of(graph, device)
    fusible = np.zeros(len(graph), dtype=bool)
    class_codes = [CLASSES.index(class_) for class_ in classes]
    compute = device[graph.gpu_compute[device]]
    fusible[compute] = np.isin(classify(graph, compute), class_codes)
    fusible &= _whole_operators(graph, classes)
    fusible &= (graph.nodes.bytes_read != UNKNOWN) & (graph.nodes.bytes_written != UNKNOWN)
    fusible &= graph.mask(Kind.KERNEL, Kind.MEMSET) | device_copies(graph)
    groups = _runs(graph, device, access, fusible)
    later = _LaterReads(device, access)
    chains = [_chain(graph, group, access, later) for group in groups]
    # A compiler gains by the bytes it saves; a chain that saves none stays as it is.
    return [chain for chain in chains if chain.bytes_after < chain.bytes_before]


def _whole_operators(graph: Graph, classes: Sequence[OpClass]) -> Mask:
    """Return the nodes that do all the work of an operator of these classes.

    Fills and copies that a GEMM or a sort launches are excluded.
    """
    ops = np.unique(graph.nodes.op)
    ops_of_classes = ops[[op_class(graph.strings[int(code)]) in classes for code in ops]]
    launcher = graph.launchers()
    device = graph.gpu_compute & (launcher >= 0)
    count = np.bincount(launcher[device], minlength=len(graph))
    # A node without a launcher is a whole operator, as in a re-costed CPU capture.
    only_kernel = np.where(device, count[launcher] == 1, graph.gpu_compute)
    return np.isin(graph.nodes.op, ops_of_classes) & only_kernel


def _runs(graph: Graph, device: I64, access: dict[int, Access], fusible: Mask) -> list[list[int]]:
    """Return the groups of neighbours on a stream that can become one kernel."""
    nodes = graph.nodes
    enters, leaves = _cross_stream_nodes(graph)
    groups: list[list[int]] = []
    open_groups = dict[int, list[int]]()
    for node in device.tolist():
        stream = int(nodes.stream[node])
        group = open_groups.get(stream)
        can_fuse = bool(fusible[node]) and node in access
        if (
            group
            and can_fuse
            and not enters[node]
            and not leaves[group[-1]]
            and _can_join(graph, group, node, access)
        ):
            group.append(node)
            continue
        # Only neighbours fuse, so any other kernel on the stream ends the group.
        open_groups.pop(stream, None)
        if can_fuse:
            open_groups[stream] = [node]
            groups.append(open_groups[stream])
    return [group for group in groups if len(group) > 1]


def _cross_stream_nodes(graph: Graph) -> tuple[Mask, Mask]:
    """Return the nodes that wait for another stream or the host, and those that these wait for.

    Launches do not count: the fused kernel is launched where the first kernel was.
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


def _can_join(graph: Graph, group: list[int], node: int, access: dict[int, Access]) -> bool:
    """Return whether a kernel can join the loop of a group and shares data with it.

    The kernel must loop over the same number of elements or over a whole fraction of it, such as
    the half of a tensor that a gated activation splits, or one element per row. A fill reads
    nothing and may always join.
    """
    nodes = graph.nodes
    first = group[0]
    # Kernels of the forward and of the backward never fuse: autograd runs them in separate graphs.
    for name in ("phase", "micro_batch"):
        if getattr(nodes, name)[first] != getattr(nodes, name)[node]:
            return False
    if not _is_row_wise(access[node]):
        return False
    loop_length = max(access[member].elements for member in group)
    elements = access[node].elements
    if not elements or not loop_length or max(elements, loop_length) % min(elements, loop_length):
        return False
    storages = {place.storage for member in group for _, place, _ in
               (*access[member].reads, *access[member].writes)}  # fmt: skip
    reads = access[node].reads
    return not reads or any(place.storage in storages for _, place, _ in reads)


def _is_row_wise(access: Access) -> bool:
    """Return whether results have the size of the largest operand, or one element per row of it."""
    largest = max((t for t, _, _ in access.reads), key=lambda t: t.numel, default=None)
    if largest is None:
        return True
    results = [tensor.numel for tensor, _, _ in access.writes]
    return all(
        numel >= largest.numel or numel * largest.shape[-1] == largest.numel for numel in results
    )


class _LaterReads:
    """Finds which storages are read after an operation before another one overwrites them.

    Attributes:
        rank: operation -> position in execution order.
        events: storage -> (position, whether it is a read) of its accesses, ascending.
    """

    def __init__(self, device: I64, access: dict[int, Access]) -> None:
        self.rank = {int(node): rank for rank, node in enumerate(device)}
        self.events = dict[int, list[tuple[int, bool]]]()
        for node in device.tolist():
            if node not in access:
                continue
            read = {place.storage for _, place, _ in access[node].reads}
            for storage in read:
                self.events.setdefault(storage, []).append((self.rank[node], True))
            # An in-place operator reads first, so its access counts as a read.
            for storage in {p.storage for _, p, _ in access[node].writes} - read:
                self.events.setdefault(storage, []).append((self.rank[node], False))

    def is_read(self, storage: int, after: int) -> bool:
        """Return whether the next access to the storage after this operation reads it."""
        events = self.events.get(storage, [])
        return next((read for rank, read in events if rank > self.rank[after]), False)


def _chain(graph: Graph, group: list[int], access: dict[int, Access], later: _LaterReads) -> Chain:
    """Return the chain of a group with the tensors that cross its border."""
    produced, read_inside = dict[int, OuterTensor](), set[int]()
    reads = dict[int, OuterTensor]()
    for node in group:
        for tensor, place, kind in access[node].reads:
            if place.storage in produced:
                read_inside.add(place.storage)
                continue
            # Views of one storage count once, as the largest: the fused kernel loads it only once.
            largest = reads.get(place.storage)
            if largest is None or largest.nbytes < tensor.nbytes:
                reads[place.storage] = _outer_tensor(tensor, place, kind)
        for tensor, place, kind in access[node].writes:
            largest = produced.get(place.storage)
            if largest is None or largest.nbytes < tensor.nbytes:
                produced[place.storage] = _outer_tensor(tensor, place, kind)
    writes = [
        outer
        for storage, outer in produced.items()
        # A tensor that nothing reads was saved for later or is a result, so the fused kernel still
        # writes it.
        if later.is_read(storage, group[-1]) or storage not in read_inside
    ]
    bytes_moved = graph.nodes.bytes_read[group] + graph.nodes.bytes_written[group]
    return Chain(tuple(group), tuple(reads.values()), tuple(writes), int(bytes_moved.sum()))


def _outer_tensor(tensor: Tensor, place: TensorLocation, kind: str) -> OuterTensor:
    value = (place.tensor, place.storage, place.offset, tensor.numel, tensor.item_bytes, "cuda:0")
    return OuterTensor(tensor.shape, kind, value, tensor.nbytes)


_POINTWISE = (OpClass.ELEMENTWISE, OpClass.COPY, OpClass.MEMSET)

CHOICES: dict[str, tuple[OpClass, ...]] = {
    "elementwise": _POINTWISE,
    "norm": (*_POINTWISE, OpClass.REDUCTION, OpClass.NORM, OpClass.SOFTMAX),
}
"""Operator classes to fuse into one kernel; "norm" includes reductions along a row."""

_FUSED = {"elementwise": "onerank::fused_elementwise", "norm": "onerank::fused_reduction"}


@dataclass(frozen=True, slots=True)
class FuseChains:
    """Fuse neighbouring memory-bound kernels.

    Neighbours on a stream become one kernel if each shares a tensor with another one of the same
    number of elements, only the first waits for other streams, and other streams wait only for the
    last. The fused kernel reads each outside tensor once and writes the tensors that later kernels
    read. Tensors that only the chain uses stay in registers.

    Attributes:
        what: one of `CHOICES`.
    """

    what: str

    def apply(self, graph: Graph, target: Gpu | None = None) -> Graph:
        """Return the graph with the fused kernels in the place of the first of each chain.

        A fused kernel streams its bytes at the rate of the kernels that it replaces. Host operators
        keep their times, although a compiled step has fewer.

        Args:
            graph: captured or re-costed, with GPU kernels.
            target: unused, since times are those of the graph.

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
                f"no two neighbouring kernels can be fused by {self.what}: expected kernels of one "
                "stream that share recorded tensors\n"
                "  use an execution trace, or a CPU capture re-costed for a GPU",
                code="fusion-nothing-to-fuse",
            )
        fused = _write_fused(graph, chains, _FUSED[self.what])
        fused = _drop_fused(fused, chains)
        removed = sum(len(chain.nodes) - 1 for chain in chains)
        before = sum(int(graph.nodes.duration_ns[list(chain.nodes)].sum()) for chain in chains)
        # By id, since removing nodes has moved the indices.
        heads = np.isin(fused.nodes.id, graph.nodes.id[[chain.nodes[0] for chain in chains]])
        after = int(fused.nodes.duration_ns[heads].sum())
        saved_bytes = sum(chain.bytes_before - chain.bytes_after for chain in chains)
        note = Note(
            f"What if fused ({self.what}): {removed + len(chains)} kernels ({before / 1e6:.3f} ms) "
            f"become {len(chains)} ({after / 1e6:.3f} ms), which move {saved_bytes / 1e9:.3f} GB "
            "less. Tensors saved for backward are still written; host operators and memory are as "
            "captured.",
            code="what-if-fused",
        )
        measurement = fused.job.measurement.untimed(note)
        return replace(fused, job=msgspec.structs.replace(fused.job, measurement=measurement))


def _write_fused(graph: Graph, chains: list[Chain], op: str) -> Graph:
    """Return the graph with the first of each chain turned into the fused kernel."""
    nodes = graph.nodes
    names = ("duration_ns", "spread_ns", "p10_ns", "p90_ns", "uncontended_ns", "evidence", "flops",
             "instructions", "bytes_read", "bytes_written", "kind")  # fmt: skip
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
            # Only the part above the floor streams bytes, and the fused kernel has one floor.
            floor = np.minimum(values, MIN_KERNEL_NS)
            columns[name][head] = round(float(floor.max() + (values - floor).sum() * streamed))
        for name in ("flops", "instructions"):
            counts = getattr(nodes, name)[members]
            columns[name][head] = UNKNOWN if (counts == UNKNOWN).any() else counts.sum()
        columns["bytes_read"][head] = chain.bytes_read
        columns["bytes_written"][head] = chain.bytes_written
        # Neither the spread nor the time without contention of a fused kernel follows from its
        # parts.
        columns["spread_ns"][head], columns["uncontended_ns"][head] = 0, UNKNOWN
        columns["kind"][head] = Kind.KERNEL
        weakest = int(nodes.evidence[members].min())
        # Nothing measured the fused kernel, even if all of its parts are measured.
        columns["evidence"][head] = min(weakest, int(Evidence.EXTRAPOLATED))
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


def _drop_fused(graph: Graph, chains: list[Chain]) -> Graph:
    """Return the graph with only the first node of each chain, which inherits all edges."""
    head = np.arange(len(graph), dtype=np.int64)
    for chain in chains:
        head[list(chain.nodes)] = chain.nodes[0]
    edges = graph.edges
    removed = head != np.arange(len(graph))
    source, waiter, reason = head[edges.source], head[edges.target], edges.reason
    # The first kernel keeps its launch. The host operators that launched the others stay, as in
    # `FuseChains`, and the fused kernel must not wait for them.
    kept_edges = (source != waiter) & ~(removed[edges.target] & _from_host(graph, edges))
    source, waiter, reason = one_per_pair(
        source[kept_edges], waiter[kept_edges], reason[kept_edges]
    )
    kept = np.flatnonzero(~removed)
    new_index = np.cumsum(~removed) - 1
    new_edges = Edges.from_pairs(len(kept), new_index[source], new_index[waiter], reason)
    return replace(graph, nodes=graph.nodes.take(kept), edges=new_edges)


def _from_host(graph: Graph, edges: Edges) -> Mask:
    """Return which edges start at host operators, such as launches, bool[edges]."""
    return graph.nodes.kind[edges.source] == Kind.HOST_OP
