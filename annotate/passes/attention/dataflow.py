"""Data flow through storages: which node reads what another node wrote."""

from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from onerank.annotate.op_costs.node_costs import compute_mask
from onerank.annotate.op_costs.op_classes import base_name
from onerank.annotate.op_costs.operands import Tensor
from onerank.annotate.passes.resize.tensor_locations import Place, launchers
from onerank.annotate.passes.tensor_access import Access, accesses_of
from onerank.ir import Graph

I64 = npt.NDArray[np.int64]

OUTSIDE = -1
"""Who made what was there before the step."""

_IDENTITIES = frozenset({"dropout", "dropout_", "alias", "detach"})


class Operand(NamedTuple):
    """A tensor that a call reads or writes.

    Attributes:
        tensor: shape and type.
        place: where it is.
        type: as in the column of types.
        content: what is there, a position in `Flow.contents`.
    """

    tensor: Tensor
    place: Place
    type: str
    content: int


class Call(NamedTuple):
    """The device work of one operator instance.

    Attributes:
        nodes: its operations, in execution order.
        launcher: the host operator that launched them, -1 for none.
        begun_ns: launch time, or start time if no launch is known.
        op: base name.
        reads: operands with known tensors; empty if not recorded.
        writes: the same of results.
    """

    nodes: tuple[int, ...]
    launcher: int
    begun_ns: int
    op: str
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]


class TensorVersion(NamedTuple):
    """The content of a storage from one write to the next.

    Attributes:
        storage: its id.
        maker: index of the call that wrote it, `OUTSIDE` for none.
        tensor: as it was written, or first read.
        place: the same.
        behind: earlier content that may remain, if only a part was overwritten.
    """

    storage: int
    maker: int
    tensor: Tensor
    place: Place
    behind: int | None = None


class Flow(NamedTuple):
    """Calls of a step in order, the contents they produce, and their readers.

    Attributes:
        calls: in execution order.
        contents: of all storages.
        readers: of each content, indices of calls.
        beside: of each content, calls that may read the remainder of a partly overwritten one.
        passing: (operation, launcher, content) of calls that return their operand unchanged.
    """

    calls: list[Call]
    contents: list[TensorVersion]
    readers: list[list[int]]
    beside: list[list[int]]
    passing: list[tuple[int, int, int]]

    @classmethod
    def of(cls, graph: Graph) -> Self:
        """Follow the storages of a step through its calls."""
        made = cls([], [], [], [], [])
        held = dict[int, int]()
        for nodes, launcher, access in _groups(graph):
            if _is_identity(graph, nodes[0], access):
                content = held.get(access.writes[0][1].storage, OUTSIDE)
                made.passing.extend((node, launcher, content) for node in nodes)
                continue
            made._add(graph, nodes, launcher, access, held)
        return made

    def _add(
        self, graph: Graph, nodes: list[int], launcher: int, access: Access, held: dict[int, int]
    ) -> None:
        at = len(self.calls)
        op = base_name(graph.strings[int(graph.nodes.op[nodes[0]])])
        reads = list[Operand]()
        for tensor, place, kind in access.reads:
            known = held.get(place.storage)
            if known is None or self.contents[known].tensor.dtype != tensor.dtype:
                # from before the step, or memory used again by what no operator wrote
                held[place.storage] = self._content(place.storage, OUTSIDE, tensor, place)
            content = held[place.storage]
            self._is_read(content, at, tensor)
            reads.append(Operand(tensor, place, kind, content))
        writes = list[Operand]()
        for tensor, place, kind in access.writes:
            behind = held.get(place.storage) if op.endswith("_") else None
            if behind is not None and tensor.numel >= self.contents[behind].tensor.numel:
                behind = None
            held[place.storage] = self._content(place.storage, at, tensor, place, behind)
            writes.append(Operand(tensor, place, kind, held[place.storage]))
        begun = int(graph.nodes.start_ns[launcher if launcher >= 0 else nodes[0]])
        self.calls.append(Call(tuple(nodes), launcher, begun, op, tuple(reads), tuple(writes)))

    def _is_read(self, content: int, reader: int, tensor: Tensor) -> None:
        """Take note of a reader, of what a smaller write left in place as well."""
        if reader not in self.readers[content][-1:]:
            self.readers[content].append(reader)
        one = self.contents[content]
        while one.behind is not None and (one.place.offset or tensor.numel > one.tensor.numel):
            self.beside[one.behind].append(reader)
            one = self.contents[one.behind]

    def _content(
        self, storage: int, maker: int, tensor: Tensor, place: Place, behind: int | None = None
    ) -> int:
        self.contents.append(TensorVersion(storage, maker, tensor, place, behind))
        self.readers.append([])
        self.beside.append([])
        return len(self.contents) - 1


def _groups(graph: Graph) -> list[tuple[list[int], int, Access]]:
    """Return (operations, launcher, tensors) of each operator instance, in order."""
    device = np.flatnonzero(compute_mask(graph) | graph.communication)
    device = device[np.argsort(graph.nodes.start_ns[device], kind="stable")]
    access = accesses_of(graph, device, scalars=True)
    by = launchers(graph)
    groups = dict[tuple[int, int], list[int]]()
    for node in device.tolist():
        key = (int(by[node]), -1) if by[node] >= 0 else (-1, node)
        groups.setdefault(key, []).append(node)
    nothing = Access((), ())
    return [(nodes, key[0], access.get(nodes[0], nothing)) for key, nodes in groups.items()]


def _is_identity(graph: Graph, node: int, access: Access) -> bool:
    """Return whether a call passes its operand on as it is, as dropout of nothing does."""
    if base_name(graph.strings[int(graph.nodes.op[node])]) not in _IDENTITIES:
        return False
    read = {place for _, place, _ in access.reads}
    return bool(access.writes) and all(place in read for _, place, _ in access.writes)
