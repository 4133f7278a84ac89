"""Data flow between device operations: the tensors that each reads and writes, and who wrote them.

A tensor is identified by its location in a storage, a version of it by the order of writes.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import msgspec
import numpy as np

from onerank.annotate.op_costs.node_costs import compute_mask
from onerank.annotate.op_costs.op_classes import base_name
from onerank.annotate.op_costs.operands import Tensor, flatten
from onerank.annotate.passes.tensor_locations import (
    OVERWRITES,
    TensorLocation,
    call_of_node,
    parse_locations,
)
from onerank.ir import Graph
from onerank.ir.arrays import I64
from onerank.ir.dtypes import TENSOR_TYPES

TEXTS = ("name", "op", "grid", "block", "input_shapes", "input_types", "input_values",
         "output_shapes", "output_types", "output_values")  # fmt: skip
"""Text columns that identify a kernel and its operands."""


def as_text(values: Sequence[object]) -> str:
    """Return values in the JSON form of the columns of shapes, types and values."""
    return msgspec.json.encode(values).decode()


class Access(NamedTuple):
    """Tensors that a kernel reads and writes, each as (tensor, location, type)."""

    reads: tuple[tuple[Tensor, TensorLocation, str], ...]
    writes: tuple[tuple[Tensor, TensorLocation, str], ...]

    @property
    def elements(self) -> int:
        """Elements of its largest tensor, which is the length of its loop."""
        return max((tensor.numel for tensor, _, _ in (*self.reads, *self.writes)), default=0)


def accesses_of(graph: Graph, device: I64, *, scalars: bool = False) -> dict[int, Access]:
    """Return node -> accesses, for each operation whose tensors all have a recorded location.

    Args:
        graph: captured or converted.
        device: operations, int64[d].
        scalars: whether to include tensors without dimensions.
    """
    nodes, strings, call_of = graph.nodes, graph.strings, call_of_node(graph)
    accesses: dict[int, Access] = {}
    for node in device.tolist():
        call = call_of(node)
        if call is None:
            continue
        ins = parse_locations(call.inputs, strings[int(nodes.input_values[node])])
        outs = parse_locations(call.outputs, strings[int(nodes.output_values[node])])
        reads = list(zip(flatten(call.inputs), ins, strict=True))
        writes = list(zip(flatten(call.outputs), outs, strict=True))
        # torch wraps Python numbers in tensors that have no location.
        located = [(t, p) for t, p in reads + writes if t.shape and t.numel > 1]
        if any(place is None for _, place in located):
            continue
        results = {place for _, place in writes}
        # These operators do not read their first operand.
        if call.op in OVERWRITES:
            reads = reads[1:]
        elif len(reads) > 1 and reads[-1][1] in results and not call.op.endswith("_"):
            # The result of an out= variant is listed among its inputs.
            reads = reads[:-1]
        accesses[node] = Access(_typed(reads, scalars), _typed(writes, scalars))
    return accesses


def _typed(
    pairs: list[tuple[Tensor, TensorLocation | None]], scalars: bool
) -> tuple[tuple[Tensor, TensorLocation, str], ...]:
    return tuple(
        (tensor, place, TENSOR_TYPES[tensor.dtype]) for tensor, place in pairs
        if place is not None and (tensor.shape or scalars)
    )  # fmt: skip


BEFORE_STEP = -1
"""Writer of contents that existed before the step."""

# Operators that may return their operand; dropout does so with p = 0 or outside training.
_IDENTITIES = frozenset({"dropout", "dropout_", "alias", "detach"})


class Operand(NamedTuple):
    """A tensor that a call reads or writes.

    Attributes:
        tensor: shape and type.
        place: its location.
        type: entry of the column of types.
        content: index of its content in `Flow.contents`.
    """

    tensor: Tensor
    place: TensorLocation
    type: str
    content: int


class DeviceCall(NamedTuple):
    """The device work of one operator instance.

    Attributes:
        nodes: its operations, in execution order.
        launcher: the host operator that launched them, -1 for none.
        issued_ns: launch time, or start time if no launch is known.
        op: base name.
        reads: operands with known tensors; empty if not recorded.
        writes: results with known tensors.
    """

    nodes: tuple[int, ...]
    launcher: int
    issued_ns: int
    op: str
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]


class TensorVersion(NamedTuple):
    """The content of a storage from one write to the next.

    Attributes:
        storage: its id.
        writer: index of the call that wrote it, `BEFORE_STEP` for none.
        tensor: the tensor that was written, or first read.
        place: location of that tensor.
        underlying: earlier content that remains where the write covered only a part.
    """

    storage: int
    writer: int
    tensor: Tensor
    place: TensorLocation
    underlying: int | None = None


class Flow(NamedTuple):
    """Calls of a step in order, the contents they produce, and their readers.

    Attributes:
        calls: in execution order.
        contents: of all storages.
        readers: per content, indices of calls, ascending.
        remainder_readers: per content, calls that may read the part that a partial write kept.
        identities: (operation, launcher, content) of calls that return their operand unchanged.
    """

    calls: list[DeviceCall]
    contents: list[TensorVersion]
    readers: list[list[int]]
    remainder_readers: list[list[int]]
    identities: list[tuple[int, int, int]]

    @classmethod
    def of(cls, graph: Graph) -> Self:
        """Follow the storages of a step through its calls."""
        flow = cls([], [], [], [], [])
        current = dict[int, int]()
        for nodes, launcher, access in _operator_instances(graph):
            if _is_identity(graph, nodes[0], access):
                # A call that returns its operand writes nothing, so the content keeps its version.
                content = current.get(access.writes[0][1].storage, BEFORE_STEP)
                flow.identities.extend((node, launcher, content) for node in nodes)
                continue
            flow._add(graph, nodes, launcher, access, current)
        return flow

    def _add(
        self, graph: Graph, nodes: list[int], launcher: int, access: Access, current: dict[int, int]
    ) -> None:
        index = len(self.calls)
        op = base_name(graph.strings[int(graph.nodes.op[nodes[0]])])
        reads = list[Operand]()
        for tensor, place, dtype in access.reads:
            version = current.get(place.storage)
            if version is None or self.contents[version].tensor.dtype != tensor.dtype:
                # Memory from before the step, or reused without a recorded write: another dtype
                # at the same storage shows that its content changed.
                current[place.storage] = self._add_version(
                    place.storage, BEFORE_STEP, tensor, place
                )
            content = current[place.storage]
            self._note_reader(content, index, tensor)
            reads.append(Operand(tensor, place, dtype, content))
        writes = list[Operand]()
        for tensor, place, dtype in access.writes:
            # Only an operator in place can write a part of a storage and leave the rest valid.
            underlying = current.get(place.storage) if op.endswith("_") else None
            if underlying is not None and tensor.numel >= self.contents[underlying].tensor.numel:
                underlying = None
            current[place.storage] = self._add_version(
                place.storage, index, tensor, place, underlying
            )
            writes.append(Operand(tensor, place, dtype, current[place.storage]))
        issued_ns = int(graph.nodes.start_ns[launcher if launcher >= 0 else nodes[0]])
        self.calls.append(
            DeviceCall(tuple(nodes), launcher, issued_ns, op, tuple(reads), tuple(writes))
        )

    def _note_reader(self, content: int, reader: int, tensor: Tensor) -> None:
        """Record a reader of a content, and of the earlier content below a partial write."""
        # Readers come in order, so a repeated one is the last.
        if reader not in self.readers[content][-1:]:
            self.readers[content].append(reader)
        version = self.contents[content]
        while version.underlying is not None and (
            version.place.offset or tensor.numel > version.tensor.numel
        ):
            self.remainder_readers[version.underlying].append(reader)
            version = self.contents[version.underlying]

    def _add_version(
        self,
        storage: int,
        writer: int,
        tensor: Tensor,
        place: TensorLocation,
        underlying: int | None = None,
    ) -> int:
        self.contents.append(TensorVersion(storage, writer, tensor, place, underlying))
        self.readers.append([])
        self.remainder_readers.append([])
        return len(self.contents) - 1


def _operator_instances(graph: Graph) -> list[tuple[list[int], int, Access]]:
    """Return (operations, launcher, tensors) of each operator instance, in order."""
    device = np.flatnonzero(compute_mask(graph) | graph.communication)
    device = device[np.argsort(graph.nodes.start_ns[device], kind="stable")]
    access = accesses_of(graph, device, scalars=True)
    launcher = graph.launchers()
    groups = dict[tuple[int, int], list[int]]()
    for node in device.tolist():
        key = (int(launcher[node]), -1) if launcher[node] >= 0 else (-1, node)
        groups.setdefault(key, []).append(node)
    no_access = Access((), ())
    # The operands are the operator's, so each of its operations records the same ones.
    return [(nodes, key[0], access.get(nodes[0], no_access)) for key, nodes in groups.items()]


def _is_identity(graph: Graph, node: int, access: Access) -> bool:
    """Return whether a call returns its operand unchanged, as dropout with p = 0 does."""
    if base_name(graph.strings[int(graph.nodes.op[node])]) not in _IDENTITIES:
        return False
    read = {place for _, place, _ in access.reads}
    return bool(access.writes) and all(place in read for _, place, _ in access.writes)
