"""Split a captured backward into the gradient of the input and the gradients of the weights.

The first part is every node that the sent gradient depends on, determined by walking the operators
backwards along the tensors that they read and write. All other nodes end in weight gradients.
"""

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple, cast

import msgspec

from onerank.converters.expand.host_delays import host_delay_nodes
from onerank.ir import Graph, Kind, Node
from onerank.ir.errors import ExportError

_EMBEDDING = "aten::embedding_dense_backward"
_FILLS = ("aten::zero_", "aten::fill_")


class RecordedTensor(NamedTuple):
    """A tensor as recorded in the trace; the offset is in elements."""

    tensor: int
    storage: int
    offset: int
    bytes: int


def split_backward(graph: Graph, block: list[int]) -> tuple[list[int], list[int]]:
    """Return the nodes of a backward that the input's gradient needs, and the other nodes.

    Both lists keep the order of `block`. The first stage sends no gradient; there the gradient of
    the embedding's output takes its place.

    Raises:
        ExportError: the trace does not record which node reads which tensor.
    """
    needed: set[int] = set()  # storages
    input_part: set[int] = set()
    decided: dict[Hashable, bool] = {}  # per call of an operator, for all its kernels
    reads_gradient = False
    hosts = graph.mask(Kind.HOST_OP)
    device = [index for index in block if not hosts[index]]
    # The host runs ahead, so the order of its nodes is not the order of the device's reads and
    # writes. Host nodes are walked only if there is no kernel.
    walked = device if graph.gpu_compute[device].any() else block
    for index, reads in reversed([*_reads(graph, walked, _allocated(graph, block))]):
        node, call = graph.node(index), _call(graph, index)
        writes = {operand.storage for operand in _operands(node, "output_values")}
        if call in decided:
            in_input_part = decided[call]
        elif node.kind is Kind.SEND or node.text("op") == _EMBEDDING:
            # The walk starts at what the stage sends, or at the embedding of the first stage.
            needed |= reads
            reads_gradient = reads_gradient or bool(reads)
            in_input_part = node.kind is Kind.SEND
        elif node.kind is Kind.RECV:
            in_input_part = True
            needed -= reads
        elif node.kind is Kind.COLLECTIVE:
            # A collective runs in place, or writes to an output.
            in_input_part = bool(reads & needed) or bool(writes & needed)
            needed |= reads if in_input_part else set()
        else:
            in_input_part = bool(writes & needed)
            needed = (needed - writes) | reads if in_input_part else needed
        decided[call] = in_input_part
        if in_input_part:
            input_part.add(index)
    if walked is device:
        input_part |= {
            index for index in block if hosts[index] and decided.get(_call(graph, index), True)
        }
    input_part |= {
        index for index, target in host_delay_nodes(graph).items() if target in input_part
    }
    if not reads_gradient or not input_part or len(input_part) == len(block):
        raise ExportError(
            f"the backward of rank {graph.job.rank} ({len(block)} nodes) cannot be split: the "
            "trace does not record which node reads the gradient that is sent\n"
            "  zbv needs traces of `capture run --pp`; use another schedule",
            code="backward-not-splittable",
        )
    weight_part = [index for index in block if index not in input_part]
    return [index for index in block if index in input_part], weight_part


def _call(graph: Graph, index: int) -> Hashable:
    """Return a key that all kernels of one operator call share."""
    nodes = graph.nodes
    if graph.node(index).kind.is_communication or not nodes.input_values[index]:
        return index
    columns = (nodes.op, nodes.input_values, nodes.output_values)
    return tuple(int(column[index]) for column in columns)


def _allocated(graph: Graph, block: list[int]) -> set[int]:
    """Return the tensors that `aten::empty*` created, which are no views of others."""
    nodes = (graph.node(index) for index in block)
    allocations = (node for node in nodes if node.text("op").startswith("aten::empty"))
    return {operand.tensor for node in allocations for operand in _operands(node, "output_values")}


def _reads(graph: Graph, order: list[int], allocated: set[int]) -> Iterator[tuple[int, set[int]]]:
    """Yield each node and the storages that it reads.

    In-place operators list their target among their inputs. A fill does not read its target. A
    copy reads it only if it writes a part of a larger tensor, whose other part must survive.
    """
    # Bytes of the latest tensor in each storage. A tensor in `allocated` may lie in memory that
    # had a larger one before, so it never counts as a part.
    extent: dict[int, int] = {}
    for index in order:
        node = graph.node(index)
        inputs, op = _operands(node, "input_values"), node.text("op")
        reads = {operand.storage for operand in inputs}
        part = False
        if inputs and op in (*_FILLS, "aten::copy_"):
            target, *sources = inputs
            larger = target.offset > 0 or extent.get(target.storage, 0) > target.bytes
            part = larger and target.tensor not in allocated
            if op in _FILLS or not part:
                reads = {operand.storage for operand in sources}
        yield index, reads
        for operand in () if part else (*inputs, *_operands(node, "output_values")):
            extent[operand.storage] = operand.bytes


def _operands(node: Node, column: str) -> list[RecordedTensor]:
    """Return a node's tensors, recorded as [tensor, storage, offset, elements, item bytes, device].

    Tensors of a single element are skipped.
    """
    # A temporary scalar often lies where a tensor was before, and the trace gives both storages
    # one number: following scalars would join unrelated nodes.
    text = node.text(column)
    operands: list[RecordedTensor] = []
    pending: list[Any] = [msgspec.json.decode(text)] if text else []
    while pending:
        value = pending.pop(0)
        if not isinstance(value, list):
            continue
        value = cast("list[Any]", value)
        if len(value) == 6 and isinstance(value[5], str) and isinstance(value[1], int):
            if value[3] > 1:
                tensor, storage, offset, elements, size = value[:5]
                operands.append(RecordedTensor(tensor, storage, offset, elements * size))
        else:
            # Not appended: `_reads` takes the first operand as the target.
            pending = value + pending
    return operands
