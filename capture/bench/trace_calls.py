"""The distinct calls of a trace, longest first."""

from dataclasses import dataclass

import numpy as np

from onerank.capture.bench.measured_call import BenchCall
from onerank.capture.bench.random_operands import layouts
from onerank.ir import Graph
from onerank.ir.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Wanted:
    """A call to measure.

    Attributes:
        layouts: the call with each layout to try; one where the layout is known.
        kernels: what it launched in a trace; empty where any kernel will do.
        held: whether to hold it for long enough to read the power.
    """

    layouts: tuple[BenchCall, ...]
    kernels: frozenset[str] = frozenset()
    held: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, in order, and what of a trace cannot be: reason -> kernels."""

    wanted: tuple[Wanted, ...]
    dropped: dict[str, int]


_COLUMNS = ("op", "input_shapes", "input_types", "input_values")


def plan_of(graph: Graph) -> Plan:
    """Return the distinct calls of a graph's GPU operations, by their total time.

    Communication is excluded: its time belongs to the network.
    """
    nodes, strings = graph.nodes, graph.strings
    index = np.flatnonzero(graph.gpu_compute)
    rows = np.stack([getattr(nodes, name)[index] for name in (*_COLUMNS, "name")], axis=1)
    time: dict[BenchCall, int] = {}
    kernels: dict[BenchCall, set[str]] = {}
    dropped: dict[str, int] = {}
    parsed: dict[tuple[int, ...], BenchCall | str] = {}
    for row, spent in zip(rows.tolist(), nodes.duration_ns[index].tolist(), strict=True):
        key = tuple(row[:-1])
        if key not in parsed:
            parsed[key] = _parsed(*(strings[code] for code in key))
        call = parsed[key]
        if isinstance(call, str):
            dropped[call] = dropped.get(call, 0) + 1
            continue
        time[call] = time.get(call, 0) + spent
        kernels.setdefault(call, set()).add(strings[row[-1]])
    ordered = sorted(time, key=lambda call: -time[call])
    wanted = tuple(Wanted(tuple(layouts(one)), frozenset(kernels[one])) for one in ordered)
    return Plan(wanted, dropped)


def _parsed(op: str, shapes: str, types: str, values: str) -> BenchCall | str:
    """Return the call, or why it cannot be made."""
    if not op.startswith("aten::"):
        return f"{op or 'kernels without an operator'}: only operators of aten are measured"
    try:
        return BenchCall.parse(op, shapes, types, values)
    except CaptureError as error:
        return str(error)
