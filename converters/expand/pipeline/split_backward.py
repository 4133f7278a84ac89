"""Split a captured backward into the part for the input's gradient and the part for the weights'.

What the gradient that is sent on depends on, by the tensors that operators read and write, is the
first part; all else ends in gradients of weights.
"""

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple, cast

import msgspec

from onerank.converters.expand.host_delays import host_delay_nodes
from onerank.ir import Graph, Kind, Node
from onerank.ir.errors import ExportError

_EMBEDDING = "aten::embedding_dense_backward"
_FILLS = ("aten::zero_", "aten::fill_")


class Operand(NamedTuple):
    """A tensor as the trace gives it; offset in elements."""

    tensor: int
    storage: int
    offset: int
    bytes: int


def split_backward(graph: Graph, block: list[int]) -> tuple[list[int], list[int]]:
    """Return the nodes of a backward that the input's gradient needs, and the others.

    Both keep the order of `block`. On the first stage, which sends none, the input's gradient is
    the embedding's.

    Raises:
        ExportError: the trace does not tell which node reads what.
    """
    needed: set[int] = set()
    first: set[int] = set()
    decided: dict[Hashable, bool] = {}  # per call of an operator, for all its kernels
    rooted = False
    hosts = graph.mask(Kind.HOST_OP)
    device = [index for index in block if not hosts[index]]
    # where there are kernels, the host's order is ahead of what the device reads and writes
    walked = device if graph.gpu_compute[device].any() else block
    for index, reads in reversed([*_reads(graph, walked, _allocated(graph, block))]):
        node, call = graph.node(index), _call(graph, index)
        writes = {operand.storage for operand in _operands(node, "output_values")}
        if call in decided:
            own = decided[call]
        elif node.kind is Kind.SEND or node.text("op") == _EMBEDDING:
            needed |= reads
            rooted = rooted or bool(reads)
            own = node.kind is Kind.SEND
        elif node.kind is Kind.RECV:
            own = True
            needed -= reads
        elif node.kind is Kind.COLLECTIVE:
            own = bool(reads & needed) or bool(writes & needed)  # in place, or into an output
            needed |= reads if own else set()
        else:
            own = bool(writes & needed)
            needed = (needed - writes) | reads if own else needed
        decided[call] = own
        if own:
            first.add(index)
    if walked is device:
        first |= {
            index for index in block if hosts[index] and decided.get(_call(graph, index), True)
        }
    first |= {index for index, held_back in host_delay_nodes(graph).items() if held_back in first}
    if not rooted or not first or len(first) == len(block):
        raise ExportError(
            f"the backward of rank {graph.job.rank} ({len(block)} nodes) cannot be split into the "
            "input's and the weights' gradients: the trace does not tell which node reads the "
            "gradient that is sent on. zbv needs traces of `capture run --pp`; use another schedule"
        )
    return [i for i in block if i in first], [i for i in block if i not in first]


def _call(graph: Graph, index: int) -> Hashable:
    """Return what the kernels of one operator's call have in common."""
    nodes = graph.nodes
    if graph.node(index).kind.is_communication or not nodes.input_values[index]:
        return index
    columns = (nodes.op, nodes.input_values, nodes.output_values)
    return tuple(int(column[index]) for column in columns)


def _allocated(graph: Graph, block: list[int]) -> set[int]:
    """Return the tensors that were allocated as they are."""
    nodes = (graph.node(index) for index in block)
    made = (node for node in nodes if node.text("op").startswith("aten::empty"))
    return {operand.tensor for node in made for operand in _operands(node, "output_values")}


def _reads(graph: Graph, order: list[int], allocated: set[int]) -> Iterator[tuple[int, set[int]]]:
    """Yield each node and the storages that it reads.

    In-place operators name what they write among their inputs. A fill does not read it; nor does
    a copy, unless it writes a part of a larger tensor: not one just `allocated`, in memory that
    may have held a larger one before.
    """
    extent: dict[int, int] = {}  # bytes of the tensor that a storage held last
    for index in order:
        node = graph.node(index)
        inputs, op = _operands(node, "input_values"), node.text("op")
        reads = {operand.storage for operand in inputs}
        part = False
        if inputs and op in (*_FILLS, "aten::copy_"):
            target, *rest = inputs
            larger = target.offset > 0 or extent.get(target.storage, 0) > target.bytes
            part = larger and target.tensor not in allocated
            if op in _FILLS or not part:
                reads = {operand.storage for operand in rest}
        yield index, reads
        for operand in () if part else (*inputs, *_operands(node, "output_values")):
            extent[operand.storage] = operand.bytes


def _operands(node: Node, column: str) -> list[Operand]:
    """Return a node's operands, [tensor, storage, offset, elements, bytes of one, device] each.

    Single numbers are left out: one made in passing often lies where a tensor was before, and
    the trace gives both storages one number.
    """
    text = node.text(column)
    found: list[Operand] = []
    pending: list[Any] = [msgspec.json.decode(text)] if text else []
    while pending:
        value = pending.pop(0)
        if not isinstance(value, list):
            continue
        value = cast("list[Any]", value)
        if len(value) == 6 and isinstance(value[5], str) and isinstance(value[1], int):
            if value[3] > 1:
                tensor, storage, offset, elements, size = value[:5]
                found.append(Operand(tensor, storage, offset, elements * size))
        else:
            pending = value + pending
    return found
