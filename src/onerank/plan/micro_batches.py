"""A captured stage with another number of sequences in its micro-batches.

A stage is captured with micro-batches of a prime number of sequences. A size that the prime divides
grows with the micro-batch, and all others are constant. Few constant sizes, such as sums of
parameters, have the prime as a factor by chance. They also are in the step with the smallest
micro-batch, which is captured in the same process.

A micro-batch of 1 is captured itself. Tensors with a dimension of 1 are contiguous in more orders,
so its step has fewer copies.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.memory.allocator import round_size
from onerank.ir import Graph, MemoryLog, StringTable
from onerank.ir.arrays import I64
from onerank.plan.layouts import PlanError
from onerank.plan.shard_memory import NEAR_NODES, kept_activations

LARGEST_KNOWN = 1 << 20
"""Tokens of a micro-batch up to which a capture without a device knows its masks: `KNOWN_ELEMENTS`
of `capture.fake_tensors`, which this process need not import with torch."""

# What cuDNN adds to the workspace of attention's backward, as the allocator rounds it.
_PADDING = 512

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83)

_DECODE = msgspec.json.Decoder(Any)

_NUMBER = re.compile(r"\d+")

_SHAPES = ("input_shapes", "output_shapes", "input_strides")

_VALUES = ("input_values", "output_values")


class MicroBatchError(PlanError):
    """The step of a micro-batch cannot be derived from that of another."""


def captured_sizes(sizes: Iterable[int], seq: int, constants: Iterable[int]) -> dict[int, int]:
    """Return the size that is captured for each micro-batch size: itself, or a prime.

    The smallest size is captured. Two or more others are derived from one capture with a prime.

    Args:
        sizes: sequences of the micro-batches.
        seq: tokens of a sequence.
        constants: sizes of the model, which the prime must not divide.
    """
    smallest, *others = sorted(set(sizes))
    derived = [size for size in others if size > 1]
    constant = {seq, *constants} - {0}
    # A small prime: a batch with more tokens than the vocabulary has words fills a buffer.
    primes = (
        prime
        for prime in _PRIMES
        if prime > max(derived, default=0)
        and prime * seq <= LARGEST_KNOWN
        and all(value % prime for value in constant)
    )
    prime = next(primes, 0)
    if len(derived) < 2 or not prime:
        return {size: size for size in (smallest, *others)}
    return {smallest: smallest} | dict.fromkeys(derived, prime)


def with_micro_batch(graph: Graph, smallest: Graph, captured: int, size: int) -> Graph:
    """Return the step with micro-batches of another size, as a capture would give it.

    Bytes that a node frees stay as captured: a plan reads memory from the allocator's log.

    Args:
        graph: a capture without a device, with micro-batches of a prime number of sequences.
        smallest: a capture of the same stage with a smaller micro-batch.
        captured: that prime number.
        size: the new number of sequences, above 1.

    Raises:
        MicroBatchError: a capture has no log of its memory; its emulated collectives filled a
            buffer that smaller micro-batches do not need; or a size may be constant or grow.
    """
    logs = graph.job.measurement.memory, smallest.job.measurement.memory
    if logs[0] is None or logs[1] is None:
        raise _unknown("the capture has no log of its memory")
    if "aten::normal_" in graph.text("name"):
        raise _unknown("the emulation of a collective filled a buffer")
    growth = _Growth(captured, size, frozenset(_sizes_in(smallest)))
    columns: dict[str, Any] = {}
    for name in (*_SHAPES, *_VALUES):
        strings, columns[name] = growth.text(graph, name)
        graph = replace(graph, strings=strings)
    sizes = *smallest.nodes.comm_bytes.tolist(), *smallest.nodes.exchanged_bytes.tolist()
    growth = replace(growth, constants=frozenset(sizes))
    columns["comm_bytes"] = growth.numbers(graph.nodes.comm_bytes)
    columns["exchanged_bytes"] = growth.numbers(graph.nodes.exchanged_bytes)
    growth = replace(growth, constants=frozenset(logs[1].blocks.bytes))
    return _with_memory(graph, growth, logs[0]).with_columns(**columns)


def _unknown(reason: str) -> MicroBatchError:
    return MicroBatchError(
        f"the micro-batch of a capture cannot be changed: {reason}", code="plan-unknown-micro-batch"
    )


def _sizes_in(graph: Graph) -> set[int]:
    """Return the numbers among shapes, strides and values of a step, without those of tensors."""
    sizes: set[int] = set()
    for name in (*_SHAPES, *_VALUES):
        for code in np.unique(getattr(graph.nodes, name)).tolist():
            text = graph.strings[code]
            pending: list[Any] = [_DECODE.decode(text)] if text else []
            while pending:
                value = pending.pop()
                if isinstance(value, list):
                    parts = cast("list[Any]", value)
                    pending += parts[2:4] if _is_tensor(parts) else parts
                elif isinstance(value, int):
                    sizes.add(value)
    return sizes


@dataclass(frozen=True, slots=True)
class _Growth:
    """The growth of sizes from a captured, prime number of sequences to another.

    Attributes:
        captured: the prime.
        size: the other number.
        constants: numbers of a step with a smaller micro-batch, all constant ones among them.
    """

    captured: int
    size: int
    constants: frozenset[int]

    def number(self, value: int) -> int:
        """Return the new value of a size.

        Raises:
            MicroBatchError: it may be constant, or not.
        """
        part, rest = divmod(value, self.captured)
        if rest or not value:
            return value
        if value in self.constants:
            if part in self.constants:
                raise _unknown(f"{value} may be constant, or {self.captured} times {part}")
            return value
        return part * self.size

    def numbers(self, values: I64) -> I64:
        """Return the new values of sizes."""
        distinct, inverse = np.unique(values, return_inverse=True)
        new = [self.number(value) if value > 0 else value for value in distinct.tolist()]
        return np.array(new, dtype=np.int64)[inverse.reshape(-1)]

    def blocks(self, sizes: I64) -> I64:
        """Return the new sizes of blocks.

        A size that the smaller micro-batch has, too, is constant. Another one that the prime does
        not divide is a workspace that grows, with a constant part.
        """
        new = self.numbers(sizes)
        constant = np.isin(sizes, list(self.constants)) | (sizes % self.captured == 0)
        padded = ~constant & ((sizes - _PADDING) % self.captured == 0)
        new[padded] = self.numbers(sizes[padded] - _PADDING) + _PADDING
        return new

    def text(self, graph: Graph, name: str) -> tuple[StringTable, npt.NDArray[np.int32]]:
        """Return the graph's strings with those of a column's new texts, and the new column."""
        codes, inverse = np.unique(getattr(graph.nodes, name), return_inverse=True)
        strings = graph.strings.copy()
        of = self._in_shapes if name in _SHAPES else self._in_values
        texts = [of(strings[int(code)]) for code in codes]
        return strings, strings.encode(texts)[inverse.reshape(-1)]

    def _in_shapes(self, text: str) -> str:
        return _NUMBER.sub(lambda match: str(self.number(int(match[0]))), text)

    def _in_values(self, text: str) -> str:
        if not text:
            return text
        value = _DECODE.decode(text)
        new = self._value(value)
        return text if new == value else msgspec.json.encode(new).decode()

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            parts = cast("list[Any]", value)
            if not _is_tensor(parts):
                return [self._value(part) for part in parts]
            number, storage, offset, elements, *rest = parts
            return [number, storage, self.number(offset), self.number(elements), *rest]
        if isinstance(value, int) and not isinstance(value, bool):
            return self.number(value)
        return value


def _is_tensor(parts: list[Any]) -> bool:
    """Return whether a value is a tensor: [id, storage, offset, elements, bytes, device]."""
    return len(parts) == 6 and isinstance(parts[5], str)


def _with_memory(graph: Graph, growth: _Growth, log: MemoryLog) -> Graph:
    """Return the graph, whose operands are as captured, with the memory of the new size."""
    measured = graph.job.measurement
    rows = {number: row for row, number in enumerate(graph.nodes.id.tolist())}
    before = np.array(log.blocks.bytes, dtype=np.int64)
    sizes = growth.blocks(before)
    _grow_rounded(graph, growth, log, rows, sizes)
    changed = np.flatnonzero(sizes != before).tolist()
    blocks = msgspec.structs.replace(log.blocks, bytes=tuple(sizes.tolist()))
    # What the allocator reserved is known for the captured sizes only.
    derived = msgspec.structs.replace(log, blocks=blocks, reserved_bytes=0)
    allocated = graph.nodes.bytes_allocated.copy()
    for block in changed:
        if log.blocks.node[block] in rows:
            allocated[rows[log.blocks.node[block]]] += sizes[block] - before[block]
    measured = msgspec.structs.replace(
        measured,
        memory=derived,
        peak_memory_bytes=measured.peak_memory_bytes + derived.most_in_use - log.most_in_use,
        activation_bytes=kept_activations(graph, log, rows, sizes, changed),
    )
    graph = graph.with_columns(bytes_allocated=allocated)
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measured))


def _grow_rounded(
    graph: Graph,
    growth: _Growth,
    log: MemoryLog,
    rows: Mapping[int, int],
    sizes: I64,
) -> None:
    """Set the sizes of blocks that grow, but that the allocator rounded up: labels, for example.

    Args:
        graph: the captured graph.
        growth: the growth of its sizes.
        log: its memory.
        rows: id of a node -> its row.
        sizes: bytes of each block, which are set.
    """
    of_row: dict[int, dict[int, int]] = defaultdict(dict)
    for row, text in enumerate(graph.text("output_values")):
        for elements, item_bytes in _sizes_of(text):
            size = elements * item_bytes
            # Here sums are no concern: the allocator rounds few of them.
            if elements and elements % growth.captured == 0 and round_size(size) != size:
                new = elements // growth.captured * growth.size
                of_row[row][round_size(size)] = round_size(new * item_bytes)
    rounded_sizes = {size for known in of_row.values() for size in known}
    distances = sorted(range(-NEAR_NODES, NEAR_NODES + 1), key=abs)
    for block, (size, node) in enumerate(zip(log.blocks.bytes, log.blocks.node, strict=True)):
        if size in rounded_sizes and node in rows:
            near = (
                of_row[row] for distance in distances if (row := rows[node] + distance) in of_row
            )
            sizes[block] = next((known[size] for known in near if size in known), sizes[block])


def _sizes_of(text: str) -> Iterable[tuple[int, int]]:
    """Yield elements and bytes of an element of each tensor among recorded values."""
    pending: list[Any] = [_DECODE.decode(text)] if text else []
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            parts = cast("list[Any]", value)
            if _is_tensor(parts):
                yield parts[3], parts[4]
            else:
                pending += parts
