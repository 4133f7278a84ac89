"""The node attribute of each column, its encoding, and values that Chakra cannot represent."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import I64
from onerank.ir.chakra.et_def_pb2 import (
    COMM_COLL_NODE,
    COMM_RECV_NODE,
    COMM_SEND_NODE,
    COMP_NODE,
    INVALID_NODE,
    MEM_LOAD_NODE,
    MEM_STORE_NODE,
    METADATA_NODE,
    AttributeProto,
)
from onerank.ir.enums import Collective, Evidence, Kind, Phase
from onerank.ir.errors import ChakraError
from onerank.ir.nodes import Nodes, dtype_of


def whole_micros(nodes: Nodes) -> I64:
    """Return `duration_micros`, int64[n], rounded so that the sum of a lane does not drift.

    Within a (stream, thread) lane, in node order, the durations up to each node (inclusive) add up
    to the exact sum rounded to the nearest microsecond (halves up). Whole microseconds stay.
    """
    micros, rest_ns = np.divmod(nodes.duration_ns, 1000)
    if not rest_ns.any():
        return micros
    # Stable, so nodes of a lane stay in order.
    order = np.lexsort((nodes.thread, nodes.stream))
    stream, thread = nodes.stream[order], nodes.thread[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (stream[1:] != stream[:-1]) | (thread[1:] != thread[:-1])
    sum_ns = np.cumsum(rest_ns[order])
    sum_before_ns = sum_ns - rest_ns[order]
    lane_base_ns = sum_before_ns[first][np.cumsum(first) - 1]
    # Differences of rounded running sums: each node is off by less than a microsecond, and the
    # lane's total by half of one at most.
    micros[order] += (sum_ns - lane_base_ns + 500) // 1000 - (
        sum_before_ns - lane_base_ns + 500
    ) // 1000
    return micros


_ENUMS: dict[str, type[IntEnum]] = {
    "kind": Kind,
    "collective": Collective,
    "evidence": Evidence,
    "phase": Phase,
}


def check_values(nodes: Nodes, own_start: npt.NDArray[Any], own_duration: npt.NDArray[Any]) -> None:
    """Refuse values that Chakra cannot represent.

    Args:
        nodes: columns to be written.
        own_start: nodes whose start is written and not kept from another tool's file, bool[n].
        own_duration: likewise for durations.

    Raises:
        ChakraError: a time is negative, or an enum column holds no member's number.
    """
    for column, written in (("start_ns", own_start), ("duration_ns", own_duration)):
        values = getattr(nodes, column)
        bad = (values < 0) & written
        if bad.any():
            index = int(np.argmax(bad))
            raise ChakraError(
                f"node {nodes.id[index]}: {column} is {values[index]}; Chakra's times are"
                " unsigned: shift the times so that none is negative",
                code="chakra-negative-time",
            )
    for column, words in _ENUMS.items():
        values = getattr(nodes, column)
        is_member = np.zeros(1 << 8 * values.itemsize, dtype=bool)
        # A table over all values of the column's type; a negative value indexes from the end.
        is_member[list(words)] = True
        bad = ~is_member[values]
        if bad.any():
            index = int(np.argmax(bad))
            raise ChakraError(
                f"node {nodes.id[index]}: {column} is {values[index]};"
                f" expected one of {members(words)}",
                code="chakra-unknown-enum",
            )


def members(words: type[IntEnum]) -> str:
    """Return an enum's numbers and names."""
    return ", ".join(f"{int(member)} ({member.name})" for member in words)


_INTEGERS = frozenset(
    f"{name}_val"
    for name in (
        *("int32", "int64", "uint32", "uint64", "sint32", "sint64"),
        *("fixed32", "fixed64", "sfixed32", "sfixed64"),
    )
)


@dataclass(frozen=True, slots=True)
class Field:
    """A column that is stored as an attribute, if it differs from its default.

    Attributes:
        column: name in `Nodes`.
        attribute: name in the file.
        variant: type in which it is written; an integer is read from every integer type.
        words: enum whose lower-case member names are the attribute's values, for enum columns.
    """

    column: str
    attribute: str
    variant: str
    words: type[IntEnum] | None = None


# ASTRA-sim reads `comm_*` and `pg_name` and throws on other types than these: a float or a text in
# place of an integer in any version of its feeder, another width of integer in older ones.
FIELDS = (
    Field("op", "op", "string_val"),
    Field("stream", "stream", "int64_val"),
    Field("thread", "thread", "int64_val"),
    Field("start_ns", "start_ns", "int64_val"),
    Field("duration_ns", "duration_ns", "int64_val"),
    Field("samples", "samples", "int32_val"),
    Field("spread_ns", "spread_ns", "int64_val"),
    Field("uncontended_ns", "uncontended_ns", "int64_val"),
    Field("blocked_ns", "blocked_ns", "int64_val"),
    Field("p10_ns", "p10_ns", "int64_val"),
    Field("p90_ns", "p90_ns", "int64_val"),
    Field("evidence", "evidence", "string_val", Evidence),
    Field("module", "module", "string_val"),
    Field("phase", "phase", "string_val", Phase),
    Field("micro_batch", "micro_batch", "int32_val"),
    Field("flops", "flops", "int64_val"),
    Field("bytes_read", "bytes_read", "int64_val"),
    Field("bytes_written", "bytes_written", "int64_val"),
    Field("instructions", "instructions", "int64_val"),
    Field("bytes_allocated", "bytes_allocated", "int64_val"),
    Field("bytes_freed", "bytes_freed", "int64_val"),
    Field("python_calls", "python_calls", "string_val"),
    Field("grid", "grid", "string_val"),
    Field("block", "block", "string_val"),
    Field("input_strides", "input_strides", "string_val"),
    Field("collective", "comm_type", "int64_val"),
    Field("comm_bytes", "comm_size", "int64_val"),
    Field("exchanged_bytes", "exchanged_bytes", "int64_val"),
    Field("group", "pg_name", "string_val"),
    Field("comm_src", "comm_src", "int32_val"),
    Field("comm_dst", "comm_dst", "int32_val"),
    Field("comm_tag", "comm_tag", "int32_val"),
)
"""Columns in writing order, after `is_cpu_op` and `gpu_op` and before `data_dep_reasons`."""

_COLUMNS = [field.column for field in FIELDS]

_FIRST, _LAST = _COLUMNS.index("start_ns"), _COLUMNS.index("p90_ns")

FRONT, NUMBERS, BACK = FIELDS[:_FIRST], FIELDS[_FIRST : _LAST + 1], FIELDS[_LAST + 1 :]
"""`NUMBERS` mostly differ between nodes; `FRONT` is written before them, `BACK` after them."""

IO_COLUMNS = {
    "inputs": ("input_values", "input_shapes", "input_types"),
    "outputs": ("output_values", "output_shapes", "output_types"),
}
"""IOInfo of a node -> columns of its `values`, `shapes` and `types`."""

ATTRIBUTES_OF = {field.column: (field.attribute,) for field in FIELDS} | {
    "kind": ("is_cpu_op", "gpu_op"),
    "dependencies": ("data_dep_reasons",),
}
"""Column, or "dependencies" -> the attributes that hold its value."""

NODE_TYPES: dict[Kind, int] = {
    Kind.HOST_OP: COMP_NODE,
    Kind.KERNEL: COMP_NODE,
    Kind.MEMCPY: COMP_NODE,
    Kind.MEMSET: COMP_NODE,
    Kind.COLLECTIVE: COMM_COLL_NODE,
    Kind.SEND: COMM_SEND_NODE,
    Kind.RECV: COMM_RECV_NODE,
    Kind.MEM_LOAD: MEM_LOAD_NODE,
    Kind.MEM_STORE: MEM_STORE_NODE,
    Kind.METADATA: METADATA_NODE,
    Kind.INVALID: INVALID_NODE,
}

GPU_OPS = {"memcpy": Kind.MEMCPY, "memset": Kind.MEMSET}
"""Values of `gpu_op`."""

SPECS = {spec.name: spec for spec in fields(Nodes)}


def variant_of(attribute: AttributeProto) -> str:
    """Return which member of the oneof `value` is set ("int64_val"), "" for none."""
    return attribute.WhichOneof("value") or ""


def encode_attribute(name: str, variant: str, value: object) -> bytes:
    """Return the bytes of an attribute.

    Raises:
        ValueError: the text has no UTF-8 form.
    """
    value_field: dict[str, Any] = {variant: value}
    return AttributeProto(name=name, **value_field).SerializeToString()


Reader = Callable[[str, Any], Any]
"""(variant, value) of an attribute -> value of its column; None if it does not fit the column."""


def readers(intern: Callable[[str], int]) -> dict[str, tuple[str, Reader]]:
    """Return attribute name -> (column, reader) for all attributes that are read.

    `is_cpu_op`, `gpu_op` and `data_dep_reasons` use their attribute names as column names.
    """
    reader_of: dict[str, tuple[str, Reader]] = {
        "is_cpu_op": ("is_cpu_op", _flag),
        "gpu_op": ("gpu_op", _text),
        "data_dep_reasons": ("data_dep_reasons", _octets),
    }
    for field in FIELDS:
        if field.words is not None:
            reader = _word_reader(field.words)
        elif field.variant == "string_val":
            reader = _text_reader(intern)
        else:
            reader = _integer_reader(field.column)
        reader_of[field.attribute] = (field.column, reader)
    return reader_of


def _flag(variant: str, value: Any) -> Any:
    return bool(value) if variant == "bool_val" or variant in _INTEGERS else None


def _text(variant: str, value: Any) -> Any:
    return value if variant == "string_val" else None


def _octets(variant: str, value: Any) -> Any:
    return value if variant == "bytes_val" else None


def _text_reader(intern: Callable[[str], int]) -> Reader:
    return lambda variant, value: intern(value) if variant == "string_val" else None


def _word_reader(words: type[IntEnum]) -> Reader:
    numbers = {member.name.lower(): int(member) for member in words}
    return lambda variant, value: numbers.get(value) if variant == "string_val" else None


def _integer_reader(column: str) -> Reader:
    if column == "collective":
        low, high = min(Collective), max(Collective)
    else:
        largest = 1 << (8 * np.dtype(dtype_of(SPECS[column])).itemsize - 1)
        low, high = -largest, largest - 1

    def read(variant: str, value: Any) -> Any:
        # Other tools write other widths of integers; a value beyond the column is kept as a foreign
        # attribute.
        return value if variant in _INTEGERS and low <= value <= high else None

    return read
