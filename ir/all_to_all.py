"""Sizes of all-to-alls whose parts differ."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from onerank.ir.dtypes import operand_list
from onerank.ir.enums import Collective
from onerank.ir.errors import GraphError
from onerank.ir.nodes import Node


class AllToAllBuffer(NamedTuple):
    """The input or the output of an all-to-all on one rank.

    Attributes:
        size_bytes: size of the buffer, the rank's own part included.
        rows: rows for (from) each rank of the group, in group order; () for equal parts.
    """

    size_bytes: int
    rows: Sequence[int] = ()

    def exchanged(self, rank: int, ranks: int) -> int:
        """Return the bytes for (from) the other ranks.

        Args:
            rank: index of this rank in the group.
            ranks: ranks of the group.
        """
        if not self.rows:
            return self.size_bytes * (ranks - 1) // ranks
        total = sum(self.rows)
        return self.size_bytes // total * (total - self.rows[rank]) if total else 0


def exchanged_bytes(
    sent: AllToAllBuffer, received: AllToAllBuffer, rank: int, ranks: int
) -> int | None:
    """Return what a rank sends to the others, or receives from them if that is more.

    None if it sends and receives equal parts of one size.

    Args:
        sent: the input.
        received: the output.
        rank: index of the rank in the group.
        ranks: ranks of the group.
    """
    equal = len({*sent.rows}) <= 1 and len({*received.rows}) <= 1
    if equal and sent.size_bytes == received.size_bytes:
        return None
    return max(sent.exchanged(rank, ranks), received.exchanged(rank, ranks))


def even_bytes(node: Node, ranks: int) -> int:
    """Return the per-rank input of a call of equal parts that takes the rank as long as this one.

    An all-to-all ends on a rank when the rank has sent and received all of its parts, so an even
    one that moves as many bytes between this rank and the others takes as long. What a rank keeps
    is a copy in its own memory, which NCCL does not send, and does not count. If the parts are not
    recorded, the result is the larger of the input and the recorded output. For other communication
    it is `comm_bytes`.

    Args:
        node: the communication.
        ranks: ranks of its group.

    Raises:
        GraphError: the recorded operands of an all-to-all are no list.
    """
    input_bytes = node.value("comm_bytes")
    if node.collective is not Collective.ALL_TO_ALL or ranks < 2 or input_bytes < 0:
        return input_bytes
    exchanged = node.value("exchanged_bytes")
    if exchanged >= 0:
        return -(-exchanged * ranks // (ranks - 1))
    return max(input_bytes, _output_bytes(node))


def _output_bytes(node: Node) -> int:
    """Return the size of the output if the operands are an input and an output tensor, else 0."""
    try:
        operands = operand_list(node.text("input_values"))
    except ValueError as error:
        raise GraphError(
            f"node {node.id} ({node.name!r}): cannot read the values of its inputs: {error}\n"
            "  convert the trace again",
            code="graph-bad-operands",
        ) from None
    sizes = [_tensor_bytes(operand) for operand in operands]
    # The list form of all-to-all records lists of tensors, whose sizes are not compared.
    return 0 if len(sizes) != 2 or None in sizes else max(filter(None, sizes), default=0)


def _tensor_bytes(value: Any) -> int | None:
    """Return the size of a tensor by its recorded value; None for another operand."""
    match value:
        case [_, _, _, int(elements), int(item_bytes), *_]:
            return elements * item_bytes
        case _:
            return None
