"""Read a PyTorch execution trace (ET) into columns, and check its tree of callers."""

from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from onerank.converters.sources.kineto.read.json_stream import ArrayFile, decode_raw
from onerank.converters.sources.kineto.read.schema import (
    FlatFile,
    FlatNode,
    NestedFile,
    NestedNode,
    SchemaFile,
)
from onerank.converters.sources.kineto.read.trace_columns import ExecutionTrace
from onerank.ir import StringTable
from onerank.ir.arrays import I32, I64, unique_values
from onerank.ir.errors import TraceError

_SHAPES, _STRIDES = 1, 6  # rows of `ExecutionTrace.operands`

MAX_MISSING_SHARE = 0.02
"""Missing callers that are accepted, as a share of the nodes."""

# torch's observer removes callers from its stack that it never put there when it records operators
# of nested tensors; below the bottom of the stack that corrupts memory. The capture therefore puts
# placeholders on the stack first.
PLACEHOLDERS = "onerank::placeholders"
"""Names of the nodes around placeholder callers, which are not in the file."""

SMALL_FILE_MISSING, SMALL_FILE_SHARE = 16, 0.1
"""In a small file, up to 16 missing callers are accepted, but at most a tenth of the nodes."""


def without_placeholders(node: I64, caller: I64, marks: I64) -> I64:
    """Return callers with the root in place of placeholder callers.

    Args:
        node: ids, int64[n].
        caller: id of each node's caller, int64[n].
        marks: ids of the nodes called PLACEHOLDERS: alternately one before and one after such
            callers, int64[m].
    """
    # The root replaces a placeholder: conversion takes callers from times, not from this file.
    first, last = marks[: len(marks) // 2 * 2].reshape(-1, 2).T
    if not len(first):
        return caller
    order = np.argsort(first, kind="stable")
    # Ranges of two threads can overlap, so the end is that of any range before.
    end = np.maximum.accumulate(last[order])
    place = np.searchsorted(first[order], caller) - 1  # the last range that begins before
    return np.where((place >= 0) & (caller < end[place]), node.min(), caller)


def check_callers(path: Path, node: I64, caller: I64) -> int:
    """Check ids and callers; the root is its own caller. Return the number of missing callers.

    In real traces a few callers are missing: operators that began before the recording, and
    operators that a checkpoint's recomputation left by an exception. torch's observer never closes
    the latter and records all later operators of the thread as their callees, sometimes a whole
    backward. Nodes without a caller become roots.

    Args:
        path: the file, for messages.
        node: ids, in the file's order, int64[n].
        caller: id of each node's caller, int64[n].

    Raises:
        TraceError: an id occurs twice, more than a few callers are missing, or nodes call each
            other.
    """
    order = np.argsort(node, kind="stable")
    ids = node[order]
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if len(twice):
        first, second = order[twice[0]], order[twice[0] + 1]
        raise TraceError(
            f"{path}: nodes {first} and {second} both have id {ids[twice[0]]}; ids must be "
            "unique: record the trace again",
            code="et-repeated-id",
        )
    if not len(ids):
        return 0
    place = np.minimum(np.searchsorted(ids, caller), len(ids) - 1)
    absent = ids[place] != caller
    missing = np.flatnonzero(absent)
    count = len(ids)
    callers = len(unique_values(caller[missing]))
    if callers > max(MAX_MISSING_SHARE * count, min(SMALL_FILE_MISSING, SMALL_FILE_SHARE * count)):
        raise TraceError(
            f"{path}: node {missing[0]} (id {node[missing[0]]}) is called by node "
            f"{caller[missing[0]]}, which is not in the file ({callers} such callers): the trace "
            "was cut, or its nodes changed",
            code="et-missing-caller",
        )
    # A node without a caller is its own, like the root.
    above = np.where(absent, np.arange(len(ids)), order[place])
    climbed = above
    # Each round climbs twice as far, so log2(n) rounds reach the root of the longest chain.
    for _ in range(len(ids).bit_length()):
        climbed = climbed[climbed]
    circling = np.flatnonzero(above[climbed] != climbed)
    if len(circling):
        raise TraceError(
            f"{path}: node {circling[0]} (id {node[circling[0]]}) is its own indirect caller "
            f"({len(circling)} such nodes); callers must form a tree: record the trace again",
            code="et-caller-cycle",
        )
    return len(missing)


_FLAT_SCHEMAS = ("1.0.1", "1.0.2")

_NESTED_SCHEMAS = ("1.0.3-", "1.1.0-", "1.1.1-")


def load_execution_trace(
    path: Path, strings: StringTable, wanted: I64 | None = None
) -> ExecutionTrace:
    """Read an execution trace, gzip or not.

    Args:
        path: the file.
        strings: table to put its texts into.
        wanted: record function ids of the nodes whose operands to keep; None for all. An observer
            often runs longer than the profiler.

    Raises:
        TraceError: not an execution trace, or of a schema that is not known.
    """
    expected = "a PyTorch execution trace (an object with `schema` and `nodes`)"
    schema = ""
    # The schema selects how nodes are decoded, and may stand before or after them.
    for part in ArrayFile(path, "nodes", SchemaFile, expected):
        schema = part.schema
        if schema:
            break
    if schema.startswith(_FLAT_SCHEMAS):
        kind: Any = FlatFile
    elif schema.startswith(_NESTED_SCHEMAS):
        kind = NestedFile
    else:
        known = ", ".join(f"{prefix}*" for prefix in _FLAT_SCHEMAS + _NESTED_SCHEMAS)
        actual = f"schema {schema!r}" if schema else "no schema"
        raise TraceError(
            f"{path}: found {actual}, expected an execution trace of schema {known}",
            code="et-unknown-schema",
        )
    keep = None if wanted is None else frozenset(wanted.tolist())
    parts: list[ExecutionTrace] = []
    callers: list[I64] = []
    marks: list[int] = []
    for part in ArrayFile(path, "nodes", kind, expected):
        # An empty file has one part, whose columns have the right types.
        if part.nodes or not parts:
            parts.append(_part(path, part, strings, keep))
            callers.append(_callers(path, part.nodes))
            marks += [node.id for node in part.nodes if node.name == PLACEHOLDERS]
    ids, above = np.concatenate(callers, axis=1)
    above = without_placeholders(ids, above, np.array(marks, dtype=np.int64))
    without_caller = check_callers(path, ids, above)
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts], axis=-1)
        for name in ("id", "name", "rf_id", "tid", "operands")
    }
    _drop_contiguous(columns["operands"], strings)
    return ExecutionTrace(path, **columns, without_caller=without_caller, whole=keep is None)


def no_execution_trace() -> ExecutionTrace:
    """Return an execution trace without nodes."""
    empty = np.zeros(0, dtype=np.int64)
    operands = np.zeros((7, 0), dtype=np.int32)
    return ExecutionTrace(Path(), empty, empty.astype(np.int32), empty, empty, operands)


def _drop_contiguous(operands: I32, strings: StringTable) -> None:
    """Set the strides of calls whose inputs are all contiguous to ""."""
    shapes, strides = operands[_SHAPES], operands[_STRIDES]
    rows = np.flatnonzero(strides)
    pairs, place = np.unique(
        # Pairs of 32-bit codes as one number; a trace has few distinct ones.
        shapes[rows].astype(np.int64) << 32 | strides[rows],
        return_inverse=True,
    )
    contiguous = [
        _are_contiguous(*(_decoded(strings[code]) for code in (pair >> 32, pair & 0xFFFFFFFF)))
        for pair in pairs.tolist()
    ]
    # Most inputs are contiguous, and a graph needs strides of the others only.
    strides[rows[np.array(contiguous, dtype=np.bool_)[place]]] = 0


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _are_contiguous(shapes: Any, strides: Any) -> bool:
    """Return whether every tensor among nested shapes is contiguous, or its strides unreadable."""
    if not isinstance(shapes, list) or not isinstance(strides, list):
        return True
    if len(shapes) != len(strides):
        return True
    pairs: list[tuple[Any, Any]] = list(zip(shapes, strides, strict=True))
    if any(isinstance(size, list) for size, _ in pairs):
        return all(_are_contiguous(*pair) for pair in pairs)
    dense = 1
    for size, stride in reversed(pairs):
        # The stride of a single element, and of no elements, is never used.
        if isinstance(size, int) and size > 1 and stride != dense:
            return False
        dense *= size if isinstance(size, int) else 1
    return True


def _callers(path: Path, nodes: list[NestedNode] | list[FlatNode]) -> I64:
    """Return ids and callers of nodes, int64[2, n]."""
    pairs = [node.id for node in nodes], [node.caller for node in nodes]
    try:
        return np.array(pairs, dtype=np.int64)
    except OverflowError as error:
        place = next(n for n, pair in enumerate(zip(*pairs, strict=True)) if max(pair) >= 2**63)
        raise TraceError(
            f"{path}: node {nodes[place].name!r} has id {pairs[0][place]} and caller "
            f"{pairs[1][place]}, expected numbers below 2^63 = {2**63}",
            code="et-number-too-large",
        ) from error


def _part(
    path: Path,
    part: NestedFile | FlatFile,
    strings: StringTable,
    keep: frozenset[int] | None,
) -> ExecutionTrace:
    try:
        pairs = [node.rf_id_and_tid for node in part.nodes]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path}: the attributes of a node are malformed ({error}): record the trace again",
            code="trace-malformed",
        ) from error
    # A node without a record id, such as the root, is no event of the Kineto trace.
    numbered = [rf_id != 0 for rf_id, _ in pairs]
    kept = [rf_id != 0 and (keep is None or rf_id in keep) for rf_id, _ in pairs]
    operands = np.zeros((7, len(kept)), dtype=np.int32)
    operands[:, np.array(kept, dtype=np.bool_)] = [
        strings.encode(decode_raw(path, values)) for values in part.operands(kept)
    ]
    nodes = [*compress(part.nodes, numbered)]
    try:
        rf_id, tid = np.array([*compress(pairs, numbered)], dtype=np.int64).reshape(-1, 2).T
        return ExecutionTrace(
            path=path,
            id=np.array([node.id for node in nodes], dtype=np.int64),
            name=strings.encode([node.name for node in nodes]),
            rf_id=rf_id,
            tid=tid,
            operands=operands[:, numbered],
        )
    except OverflowError as error:
        raise TraceError(
            f"{path}: a node has an id, a thread or a record id of 2^63 or more ({error}); "
            "record the trace again",
            code="et-number-too-large",
        ) from error
