"""Compute of a step by class, phase, module or kernel, and a step by layer or sub-module."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from onerank.annotate import CLASSES, characterise, classify
from onerank.ir import UNKNOWN, Graph, Phase
from onerank.ir.arrays import I64, Mask
from onerank.ir.coarsen import Scope, scopes_of


class Share(msgspec.Struct, frozen=True):
    """A part of a step's compute.

    Attributes:
        name: class, phase, module or kernel.
        count: number of nodes.
        time_ns: summed durations.
        flops: summed FLOPs of the nodes for which they are known.
        bytes: summed bytes read and written, where known.
        without_flops: number of nodes whose FLOPs are not known.
    """

    name: str
    count: int
    time_ns: int
    flops: int
    bytes: int
    without_flops: int


NOTHING = Share("", 0, 0, 0, 0, 0)
"""The share of a name without any compute."""


def share_of_all(graph: Graph) -> Share:
    """Return all compute of a characterised graph as a single share without a name."""
    compute = np.flatnonzero(graph.compute)
    shares = _shares(graph, compute, np.zeros(len(compute), dtype=np.int64), [""])
    return shares[0] if shares else NOTHING


def shares_by_class(graph: Graph) -> list[Share]:
    """Return the compute of a characterised graph by class of work."""
    compute = np.flatnonzero(graph.compute)
    codes = classify(graph, compute).astype(np.int64)
    return _shares(graph, compute, codes, [op_class.value for op_class in CLASSES])


def shares_by_module(graph: Graph) -> list[Share]:
    """Return the compute of a characterised graph by module, numbered siblings summed."""
    compute = np.flatnonzero(graph.compute)
    return _by_text(graph, compute, "module", _without_numbers)


def _without_numbers(module: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def shares_by_kernel(graph: Graph) -> list[Share]:
    """Return the compute of a characterised graph by kernel (operator on a CPU) name."""
    return _by_text(graph, np.flatnonzero(graph.compute), "name", str)


def _by_text(graph: Graph, compute: I64, column: str, key: Callable[[str], str]) -> list[Share]:
    codes: I64 = getattr(graph.nodes, column)[compute].astype(np.int64)
    # A million nodes have some hundred names: `key` is called once per name.
    distinct, inverse = np.unique(codes, return_inverse=True)
    keys = [key(graph.strings[code]) for code in distinct.tolist()]
    names = sorted(set(keys))
    place = {name: position for position, name in enumerate(names)}
    merged = np.array([place[name] for name in keys], dtype=np.int64)
    return _shares(graph, compute, merged[inverse], names)


def shares_by_phase(graph: Graph) -> list[Share]:
    """Return the compute of a characterised graph by phase, in the order of a step."""
    compute = np.flatnonzero(graph.compute)
    names: list[str] = ["" if phase is Phase.NONE else phase.name.lower() for phase in Phase]
    shares = _shares(graph, compute, graph.nodes.phase[compute].astype(np.int64), names)
    # Work outside all phases comes last, although its code is the lowest.
    return sorted(shares, key=lambda share: (not share.name, names.index(share.name)))


def _shares(graph: Graph, index: I64, codes: I64, names: Sequence[str]) -> list[Share]:
    """Sum the nodes at `index` by code; codes without nodes are omitted."""
    nodes = graph.nodes

    def total(values: I64) -> list[int]:
        # `np.bincount` with weights sums in float64, which loses units of FLOPs above 2**53.
        sums = np.zeros(len(names), dtype=np.int64)
        np.add.at(sums, codes, values)
        return sums.tolist()

    counted = [np.where(getattr(nodes, c)[index] == UNKNOWN, 0, getattr(nodes, c)[index])
             for c in ("flops", "bytes_read", "bytes_written")]  # fmt: skip
    columns = zip(
        names,
        total(np.ones(len(index), dtype=np.int64)),
        total(nodes.duration_ns[index]),
        total(counted[0]),
        total(counted[1] + counted[2]),
        total((nodes.flops[index] == UNKNOWN).astype(np.int64)),
        strict=True,
    )
    return [share for row in columns if (share := Share(*row)).count]


Granularity = Literal["layer", "submodule", "kernel"]


class BreakdownRow(msgspec.Struct, frozen=True):
    """Time, work and memory of one layer, sub-module or kernel in a step, all calls summed.

    With the granularity "submodule", the role "layer" stands for a layer's operators outside its
    sub-modules.

    Attributes:
        name: path of the module, "" for nodes outside all modules; or name of the kernel.
        role: role of the sub-module; "layer"; "" for a kernel.
        instances: number of summed modules; 1 unless siblings are merged.
        nodes: number of compute nodes (GPU operations; on a CPU, operators).
        forward_ns: summed durations of the nodes in forward.
        backward_ns: the same in backward.
        other_ns: the same in the optimizer and outside all phases.
        spread_ns: summed spreads over the profiled steps, an upper bound of the sum's spread.
        flops: known FLOPs.
        bytes: known bytes read and written.
        without_flops: number of nodes whose FLOPs are not known.
        allocated_bytes: bytes allocated by these nodes and their host operators.
        freed_bytes: bytes freed by them.
        timed_forward_ns: forward between events (on a CPU: clock readings), idle time included;
            None if not timed.
        timed_backward_ns: the same for backward.
    """

    name: str
    role: str
    instances: int
    nodes: int
    forward_ns: int
    backward_ns: int
    other_ns: int
    spread_ns: int
    flops: int
    bytes: int
    without_flops: int
    allocated_bytes: int
    freed_bytes: int
    timed_forward_ns: int | None = None
    timed_backward_ns: int | None = None

    @property
    def time_ns(self) -> int:
        """Summed durations of all phases."""
        return self.forward_ns + self.backward_ns + self.other_ns


def parts(graph: Graph, granularity: Granularity) -> list[BreakdownRow]:
    """Return the time of each layer, sub-module or kernel, in the order of their first nodes.

    Raises:
        GraphError: the graph has no module table, and the granularity is not "kernel".
        AnnotateError: the operands of a node cannot be read.
    """
    graph = characterise(graph)
    if granularity == "kernel":
        names, scope_index = np.unique(graph.nodes.name, return_inverse=True)
        scopes = [Scope(graph.strings[code], "") for code in names.tolist()]
    else:
        scoping = scopes_of(graph, granularity)
        scopes, scope_index = scoping.scopes, scoping.of
    summed = _sums(graph, scopes, scope_index.astype(np.int64))
    timed = {(time.path, time.phase): time.duration_ns for time in graph.job.measurement.scopes}
    return [
        part
        # Events time whole layers, while this part has only the operators outside sub-modules.
        if granularity == "submodule" and part.role == "layer"
        else msgspec.structs.replace(
            part,
            timed_forward_ns=timed.get((part.name, "forward")),
            timed_backward_ns=timed.get((part.name, "backward")),
        )
        for part in summed
    ]


def merged(parts: Sequence[BreakdownRow]) -> list[BreakdownRow]:
    """Return the parts with numbered siblings (`layers.0.mlp`, `layers.1.mlp`) summed."""
    groups: dict[tuple[str, str], list[BreakdownRow]] = {}
    for part in parts:
        name = re.sub(r"\.\d+(?=\.|$)", ".*", part.name)
        groups.setdefault((name, part.role), []).append(part)
    return [_sum(name, role, members) for (name, role), members in groups.items()]


def _sum(name: str, role: str, members: list[BreakdownRow]) -> BreakdownRow:
    summed: dict[str, Any] = {"name": name, "role": role}
    for field in BreakdownRow.__struct_fields__[2:]:
        values = [value for part in members if (value := getattr(part, field)) is not None]
        # None and not 0 if no member was timed: `show` then has no column of timed modules.
        summed[field] = sum(values) if values else None
    return BreakdownRow(**summed)


def _sums(graph: Graph, scopes: Sequence[Scope], scope_index: I64) -> list[BreakdownRow]:
    nodes = graph.nodes
    compute = graph.compute
    forward, backward = (nodes.phase == phase for phase in (Phase.FORWARD, Phase.BACKWARD))

    def total(values: I64, mask: Mask) -> list[int]:
        sums = np.zeros(len(scopes), dtype=np.int64)
        np.add.at(sums, scope_index[mask], values[mask])
        return sums.tolist()

    everything, ones = np.ones(len(graph), dtype=bool), np.ones(len(graph), dtype=np.int64)
    moved = [np.where(c == UNKNOWN, 0, c) for c in (nodes.bytes_read, nodes.bytes_written)]
    columns = zip(
        scopes,
        total(ones, compute),
        total(nodes.duration_ns, compute & forward),
        total(nodes.duration_ns, compute & backward),
        total(nodes.duration_ns, compute & ~forward & ~backward),
        total(nodes.spread_ns, compute),
        total(np.where(nodes.flops == UNKNOWN, 0, nodes.flops), compute),
        total(moved[0] + moved[1], compute),
        total(ones, compute & (nodes.flops == UNKNOWN)),
        total(nodes.bytes_allocated, everything),
        total(nodes.bytes_freed, everything),
        strict=True,
    )
    # Memory counts all nodes of the scope, because host operators allocate, not kernels.
    summed = [BreakdownRow(scope.path, scope.role, 1, *row) for scope, *row in columns]
    return [part for part in summed if part.nodes or part.allocated_bytes or part.freed_bytes]
