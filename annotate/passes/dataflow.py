"""The tensors that device operations read and write, and their locations in storages."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.op_costs.operands import Tensor
from onerank.annotate.passes.resize.operand_growth import flatten
from onerank.annotate.passes.resize.tensor_locations import (
    OVERWRITES,
    TensorLocation,
    calls_of,
    parse_locations,
)
from onerank.ir import Graph
from onerank.ir.dtypes import TENSOR_TYPES

I64 = npt.NDArray[np.int64]

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
    nodes, strings, call_of = graph.nodes, graph.strings, calls_of(graph)
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
        if call.op in OVERWRITES:  # the operator does not read its first operand
            reads = reads[1:]
        elif len(reads) > 1 and reads[-1][1] in results and not call.op.endswith("_"):
            reads = reads[:-1]  # the result of an out= variant is listed among its inputs
        accesses[node] = Access(_typed(reads, scalars), _typed(writes, scalars))
    return accesses


def _typed(
    pairs: list[tuple[Tensor, TensorLocation | None]], scalars: bool
) -> tuple[tuple[Tensor, TensorLocation, str], ...]:
    return tuple(
        (tensor, place, TENSOR_TYPES[tensor.dtype]) for tensor, place in pairs
        if place is not None and (tensor.shape or scalars)
    )  # fmt: skip
