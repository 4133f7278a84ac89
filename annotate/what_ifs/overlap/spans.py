"""Which bytes of which storages a kernel, an operator of a CPU or a call reads and writes."""

from collections.abc import Callable
from typing import NamedTuple

from onerank.annotate.what_ifs.sizes.operands import flat
from onerank.annotate.what_ifs.sizes.places import calls_of, places_of
from onerank.annotate.work.classes import OpClass, op_class
from onerank.annotate.work.shapes import Call, Operand
from onerank.ir import Collective, Graph, Kind

_INTO_ANOTHER = frozenset(
    {
        Collective.ALL_GATHER,
        Collective.GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
    }
)
"""Of these the tensors whose bytes count come first, and then those they fill."""
_OVERWRITES = frozenset({"fill_", "zero_", "copy_"})
"""Operators that do not read what they write to, their first operand."""
_ALSO_WRITES = "batch_norm"
"""In the name of operators that keep statistics in operands of theirs."""


class Span(NamedTuple):
    """Bytes of a storage, as of a tensor that lies there without gaps."""

    storage: int
    begin: int
    end: int

    def meets(self, other: "Span") -> bool:
        """Return whether another span of the same storage shares bytes with it."""
        return self.begin < other.end and other.begin < self.end

    def holds(self, other: "Span") -> bool:
        """Return whether another span of the same storage lies in it."""
        return self.begin <= other.begin and other.end <= self.end


class Touch(NamedTuple):
    """What a node reads and writes.

    Attributes:
        reads: spans it reads.
        writes: spans it writes.
        made: storages that are new with it: its results, in none of its operands' memory.
        filled: storages of which it writes alone, whatever was in them.
    """

    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    made: frozenset[int] = frozenset()
    filled: frozenset[int] = frozenset()


NOTHING = Touch((), ())


def touches_of(graph: Graph) -> Callable[[int], Touch | None]:
    """Return the function from a node to what it touches, None where the graph does not tell."""
    nodes, strings, call_of = graph.nodes, graph.strings, calls_of(graph)
    communicates = graph.communication

    def touch_of(node: int) -> Touch | None:
        op = strings[int(nodes.op[node])]
        on_host = nodes.kind[node] == Kind.HOST_OP
        if on_host and op_class(op) in (OpClass.NOTHING, OpClass.COMMUNICATION):
            return NOTHING
        call = call_of(node)
        if call is None:
            return None
        reads = _spans(call.inputs, strings[int(nodes.input_values[node])])
        writes = _spans(call.outputs, strings[int(nodes.output_values[node])])
        if reads is None or writes is None:
            return None
        if communicates[node]:
            kind, collective = Kind(int(nodes.kind[node])), Collective(int(nodes.collective[node]))
            return _of_call(kind, collective, int(nodes.comm_bytes[node]), reads)
        return _of_operator(op, call, reads, writes)

    return touch_of


def _spans(operands: tuple[Operand, ...], text: str) -> tuple[Span, ...] | None:
    """Return the bytes of each tensor, None where one does not tell where it is."""
    made: list[Span] = []
    for tensor, place in zip(flat(operands), places_of(operands, text), strict=True):
        if not tensor.numel:
            continue
        if place is None:
            if tensor.shape:
                return None
            continue  # a number that became a tensor
        begin = place.offset * tensor.item_bytes
        made.append(Span(place.storage, begin, begin + tensor.nbytes))
    return tuple(made)


def _of_operator(op: str, call: Call, reads: tuple[Span, ...], writes: tuple[Span, ...]) -> Touch:
    """Return what a kernel of an operator touches.

    PyTorch's own operators write their results, those that have none their operands, as those of
    others may; a result in an operand's memory is that operand, any other has memory of its own.
    """
    ours = op.startswith("aten::")
    if ours and call.op in _OVERWRITES and reads[:1] == writes:
        return _filling(reads[1:], writes)
    owned = {span.storage for span in reads}
    pure = ours and bool(call.outputs) and _ALSO_WRITES not in call.op
    made = frozenset(span.storage for span in writes if span.storage not in owned) if ours else ()
    return Touch(reads, writes if pure else (*writes, *reads), frozenset(made))


def _of_call(
    kind: Kind, collective: Collective, nbytes: int, tensors: tuple[Span, ...]
) -> Touch | None:
    """Return what a call touches, whose tensors stand in a row; None where it has none."""
    if not tensors:
        return None
    if kind is Kind.SEND:
        return Touch(tensors, ())
    if kind is Kind.RECV:
        return _filling((), tensors)
    if collective in _INTO_ANOTHER:
        size, count = 0, 0
        while count < len(tensors) and size < nbytes:
            size += tensors[count].end - tensors[count].begin
            count += 1
        if size == nbytes:
            return _filling(tensors[:count], tensors[count:])
    return Touch(tensors, tensors)


def _filling(reads: tuple[Span, ...], writes: tuple[Span, ...]) -> Touch:
    read = {span.storage for span in reads}
    return Touch(reads, writes, filled=frozenset(span.storage for span in writes) - read)
