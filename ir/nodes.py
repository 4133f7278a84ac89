"""Columns of the nodes, their interned strings, and a light view of a single node."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from itertools import count, islice
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import I8, I32, I64, U8, U64
from onerank.ir.enums import Collective, Evidence, Kind, Phase

Codes = I32


class StringTable:
    """Append-only table of distinct strings; code 0 is the empty string."""

    __slots__ = ("_codes", "_values")

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values: list[str] = [""]
        self._codes = defaultdict[str, int]()
        """Codes of the strings indexed so far; `_index` adds the rest on first use."""
        for value in values:
            self.intern(value)

    def intern(self, value: str) -> int:
        """Return the code of `value`, adding it when it is new."""
        codes = self._index()
        code = codes.get(value)
        if code is None:
            code = len(self._values)
            self._values.append(value)
            codes[value] = code
        return code

    def __getitem__(self, code: int) -> str:
        return self._values[code]

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> tuple[str, ...]:
        """All strings, in the order of their codes."""
        return tuple(self._values)

    def copy(self) -> Self:
        """Return an independent table with the same codes."""
        table = type(self)()
        # Codes are not copied: they are built again on first use, and most copies only decode.
        table._values = self._values.copy()
        return table

    def add_new(self, values: Iterable[str]) -> None:
        """Append strings that are known to be distinct and not in the table."""
        self._values.extend(values)

    def encode(self, values: Iterable[str]) -> Codes:
        """Intern every value; return their codes, int32[n]."""
        codes = self._index()
        known = len(codes)
        # A missing key then gets the next code in C, without a Python call per new string.
        codes.default_factory = count(known).__next__
        try:
            assigned = [codes[value] for value in values]
        finally:  # `values` may be an iterator that fails
            codes.default_factory = None
            newest_first = islice(reversed(codes), len(codes) - known)
            self._values.extend(reversed(list(newest_first)))
        return np.fromiter(assigned, np.int32, len(assigned))

    def decode(self, codes: Codes) -> list[str]:
        """Return the strings of `codes`, in order."""
        values = self._values
        return [values[code] for code in codes.tolist()]

    def _index(self) -> defaultdict[str, int]:
        """Return the codes of all strings; built on the first use."""
        codes = self._codes
        known = len(codes)
        if known < len(self._values):
            codes.update(zip(self._values[known:], range(known, len(self._values)), strict=True))
        return codes


Objects = npt.NDArray[np.object_]

UNKNOWN = -1
"""A count that is not known, or a stream, thread, peer or tag that a node does not have."""

SYMMETRIC_COPY = "symm_mem::copy"
"""`op` of an all-to-all in which each rank copies from one other rank's symmetric memory. Copy
engines run it, so it occupies no multiprocessors."""

SYMMETRIC_BARRIER = "symm_mem::barrier"
"""`op` of a barrier of ranks by signals in symmetric memory: a kernel of one block that writes a
signal to each other rank and waits for theirs."""


class GeneratedWork(NamedTuple):
    """What a kernel that Inductor generated does; UNKNOWN if its source does not show it.

    Attributes:
        flops: its FLOPs.
        instructions: its instructions, summed over its threads.
    """

    flops: int = UNKNOWN
    instructions: int = UNKNOWN


ROOT_COLUMNS = {
    Collective.BROADCAST: "comm_src",
    Collective.SCATTER: "comm_src",
    Collective.REDUCE: "comm_dst",
    Collective.GATHER: "comm_dst",
}
"""Collective -> column of its root: the source of a broadcast or scatter, else the destination."""


# The defaults stand in the metadata, because the length of a column is known only in `Nodes.of`.
def _column(dtype: type[np.generic], default: object) -> Any:
    return field(metadata={"dtype": dtype, "default": default, "text": False})


def _text() -> Any:
    return field(metadata={"dtype": np.int32, "default": 0, "text": True})


@dataclass(frozen=True, slots=True, repr=False)
class Nodes:
    """All nodes of a graph as columns of equal length n.

    Text columns contain codes into the graph's `StringTable`. Times are integer nanoseconds,
    sizes integer bytes. `comm_bytes` is the per-rank input of a collective (all-gather: this
    rank's shard), or the payload of a send or receive. `duration_ns` of a host op is its self
    time, which excludes the operators it calls.
    """

    id: U64 = _column(np.uint64, 0)
    name: Codes = _text()
    kind: U8 = _column(np.uint8, int(Kind.INVALID))
    op: Codes = _text()
    """Operator that launched a GPU node (`aten::mm`), or the name of the host op."""
    stream: I64 = _column(np.int64, UNKNOWN)
    """Stream of a GPU op."""
    thread: I64 = _column(np.int64, UNKNOWN)
    """Thread of a host op."""
    start_ns: I64 = _column(np.int64, 0)
    duration_ns: I64 = _column(np.int64, 0)
    """Of a host op its self time, without the operators that it calls."""
    samples: I32 = _column(np.int32, 0)
    """Number of profiled steps whose median is `duration_ns`; 0 for one step or none."""
    spread_ns: I64 = _column(np.int64, 0)
    """Longest minus shortest duration over the profiled steps."""
    uncontended_ns: I64 = _column(np.int64, UNKNOWN)
    """Uncontended duration, if `duration_ns` was measured while an emulated collective ran;
    UNKNOWN otherwise."""
    blocked_ns: I64 = _column(np.int64, 0)
    """Host op: how long the GPU blocked its thread before it, within earlier operators or between
    them; no duration includes this time. GPU op: how long it waited for a cause that the trace does
    not record; a negative value is its overlap with the previous GPU op."""
    p10_ns: I64 = _column(np.int64, UNKNOWN)
    p90_ns: I64 = _column(np.int64, UNKNOWN)
    """80% interval of a predicted duration; UNKNOWN for a measured one."""
    evidence: U8 = _column(np.uint8, int(Evidence.NONE))
    """Source of `duration_ns`."""
    module: Codes = _text()
    """Path of the module that the operator belongs to, `model.layers.0.mlp`."""
    phase: U8 = _column(np.uint8, int(Phase.NONE))
    micro_batch: I32 = _column(np.int32, UNKNOWN)
    """Number of the micro-batch, from 0."""
    input_values: Codes = _text()
    input_shapes: Codes = _text()
    input_types: Codes = _text()
    input_strides: Codes = _text()
    """Strides of the operands, nested as `input_shapes`; empty if all are contiguous, or if the
    trace records none."""
    output_values: Codes = _text()
    output_shapes: Codes = _text()
    output_types: Codes = _text()
    flops: I64 = _column(np.int64, UNKNOWN)
    bytes_read: I64 = _column(np.int64, UNKNOWN)
    bytes_written: I64 = _column(np.int64, UNKNOWN)
    instructions: I64 = _column(np.int64, UNKNOWN)
    """Instructions that a kernel executes, summed over its threads (not its warps); UNKNOWN
    except for kernels that Inductor generated in a capture without a device."""
    bytes_allocated: I64 = _column(np.int64, 0)
    """Device memory that the operator allocated."""
    bytes_freed: I64 = _column(np.int64, 0)
    """Device memory that was freed with the operator."""
    python_calls: Codes = _text()
    """Counts of the Python calls of the host since the node before, by kind (`python_calls.py`), in
    a capture without a device; empty for none."""
    grid: Codes = _text()
    """Blocks of a kernel's launch along each axis."""
    block: Codes = _text()
    """Threads of a block along each axis."""
    collective: I8 = _column(np.int8, int(Collective.NONE))
    comm_bytes: I64 = _column(np.int64, UNKNOWN)
    """Per-rank input of a collective, or the payload of a send or receive."""
    exchanged_bytes: I64 = _column(np.int64, UNKNOWN)
    """What the rank sends to the others in an all-to-all whose parts differ, or receives from them
    if that is more; UNKNOWN for other calls, and if the sizes of the parts are not recorded. What
    the rank keeps does not count."""
    group: Codes = _text()
    """Name of the process group."""
    comm_src: I32 = _column(np.int32, UNKNOWN)
    comm_dst: I32 = _column(np.int32, UNKNOWN)
    comm_tag: I32 = _column(np.int32, UNKNOWN)
    foreign: Objects = _column(np.object_, None)
    """Content of another tool's file that has no column; None for onerank's nodes."""

    def __len__(self) -> int:
        return len(self.id)

    def __repr__(self) -> str:
        return f"Nodes(<{len(self)} nodes>)"

    def take(self, index: npt.NDArray[Any]) -> Self:
        """Return the nodes at `index` (integers or a mask), in that order."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the nodes of all parts, one after another."""
        names = [spec.name for spec in fields(cls)]
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})

    @classmethod
    def of(cls, count: int, **columns: npt.NDArray[Any]) -> Self:
        """Return `count` nodes with the given columns; the other columns have their defaults."""
        filled: dict[str, npt.NDArray[Any]] = {}
        for spec in fields(cls):
            values = columns.pop(spec.name, None)
            if values is None:
                filled[spec.name] = np.full(count, default_of(spec), dtype=dtype_of(spec))
            else:
                filled[spec.name] = np.asarray(values, dtype=dtype_of(spec))
                assert len(values) == count, (
                    f"column {spec.name}: {len(values)} values, not {count}"
                )
        assert not columns, f"no such columns: {sorted(columns)}"
        return cls(**filled)


def dtype_of(spec: Field[Any]) -> type[np.generic]:
    """Return the numpy type of a column."""
    return spec.metadata["dtype"]


def largest_of(spec: Field[Any]) -> int:
    """Return the largest number that a column of integers can store."""
    dtype: Any = dtype_of(spec)
    return int(np.iinfo(dtype).max)


def default_of(spec: Field[Any]) -> Any:
    """Return the value of a column where nothing is known (for text: code 0, "")."""
    return spec.metadata["default"]


def is_text(spec: Field[Any]) -> bool:
    """Return whether a column contains codes of interned strings."""
    return spec.metadata["text"]


TEXT_COLUMNS = tuple(spec.name for spec in fields(Nodes) if is_text(spec))


@dataclass(frozen=True, slots=True, repr=False)
class Node:
    """One node, read from the columns; read-only."""

    columns: Nodes
    strings: StringTable
    index: int

    def __repr__(self) -> str:
        return f"Node(id={self.id}, kind={self.kind.name}, name={self.name!r})"

    @property
    def kind(self) -> Kind:
        """Kind of the node."""
        return Kind(int(self.columns.kind[self.index]))

    @property
    def phase(self) -> Phase:
        """Part of the step the node belongs to."""
        return Phase(int(self.columns.phase[self.index]))

    @property
    def collective(self) -> Collective:
        """Collective of a COLLECTIVE node, else NONE."""
        return Collective(int(self.columns.collective[self.index]))

    @property
    def root(self) -> int:
        """Global rank of a collective's root; UNKNOWN if it has none or none is recorded."""
        column = ROOT_COLUMNS.get(self.collective)
        return UNKNOWN if column is None else self.value(column)

    @property
    def evidence(self) -> Evidence:
        """Where the node's duration comes from."""
        return Evidence(int(self.columns.evidence[self.index]))

    @property
    def id(self) -> int:
        """Id of the node, unique in its graph."""
        return int(self.columns.id[self.index])

    @property
    def name(self) -> str:
        """Kernel, operator or collective name."""
        return self.text("name")

    @property
    def duration_ns(self) -> int:
        """Duration in nanoseconds."""
        return int(self.columns.duration_ns[self.index])

    def text(self, column: str) -> str:
        """Return the string in a text column."""
        return self.strings[int(getattr(self.columns, column)[self.index])]

    def value(self, column: str) -> int:
        """Return the integer in a numeric column."""
        return int(getattr(self.columns, column)[self.index])
