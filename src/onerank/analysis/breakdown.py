"""Compute of a step by class, phase, module or kernel."""

import re
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate import CLASSES, classify, compute_mask
from onerank.ir import UNKNOWN, Graph, Phase

I64 = npt.NDArray[np.int64]


class Share(msgspec.Struct, frozen=True):
    """Part of a step's compute.

    Attributes:
        name: class, phase, module or kernel.
        count: nodes.
        time_ns: their summed durations.
        flops: their summed FLOPs, those that are known.
        bytes: bytes read and written, those that are known.
        without_flops: nodes whose FLOPs no formula gives.
    """

    name: str
    count: int
    time_ns: int
    flops: int
    bytes: int
    without_flops: int


NOTHING = Share("", 0, 0, 0, 0, 0)
"""What a name without any compute has."""


def share_of_all(graph: Graph) -> Share:
    """Return all compute of a characterised graph, as one share without a name."""
    compute = np.flatnonzero(compute_mask(graph))
    shares = _shares(graph, compute, np.zeros(len(compute), dtype=np.int64), [""])
    return shares[0] if shares else NOTHING


def shares_by_class(graph: Graph) -> list[Share]:
    """Return the compute of a characterised graph by class of work."""
    compute = np.flatnonzero(compute_mask(graph))
    codes = classify(graph, compute).astype(np.int64)
    return _shares(graph, compute, codes, [one.value for one in CLASSES])


def shares_by_module(graph: Graph) -> list[Share]:
    """Return the compute of a characterised graph by module, numbered siblings summed."""
    compute = np.flatnonzero(compute_mask(graph))
    return _by_text(graph, compute, "module", _without_numbers)


def _without_numbers(module: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def shares_by_kernel(graph: Graph) -> list[Share]:
    """Return the compute of a characterised graph by kernel (operator on a CPU) name."""
    return _by_text(graph, np.flatnonzero(compute_mask(graph)), "name", str)


def _by_text(graph: Graph, compute: I64, column: str, key: Callable[[str], str]) -> list[Share]:
    codes: I64 = getattr(graph.nodes, column)[compute].astype(np.int64)
    distinct, inverse = np.unique(codes, return_inverse=True)
    keys = [key(graph.strings[code]) for code in distinct.tolist()]
    names = sorted(set(keys))
    place = {name: position for position, name in enumerate(names)}
    merged = np.array([place[name] for name in keys], dtype=np.int64)
    return _shares(graph, compute, merged[inverse], names)


def shares_by_phase(graph: Graph) -> list[Share]:
    """Return the compute of a characterised graph by phase, in the order of a step."""
    compute = np.flatnonzero(compute_mask(graph))
    names = ["" if phase is Phase.NONE else phase.name.lower() for phase in Phase]
    found = _shares(graph, compute, graph.nodes.phase[compute].astype(np.int64), names)
    return sorted(found, key=lambda share: (not share.name, names.index(share.name)))


def _shares(graph: Graph, index: I64, codes: I64, names: Sequence[str]) -> list[Share]:
    """Sum the nodes at `index` by code; codes that no node has are left out."""
    nodes = graph.nodes

    def total(values: I64) -> list[int]:
        sums = np.zeros(len(names), dtype=np.int64)
        np.add.at(sums, codes, values)
        return sums.tolist()

    known = [np.where(getattr(nodes, c)[index] == UNKNOWN, 0, getattr(nodes, c)[index])
             for c in ("flops", "bytes_read", "bytes_written")]  # fmt: skip
    columns = zip(
        names,
        total(np.ones(len(index), dtype=np.int64)),
        total(nodes.duration_ns[index]),
        total(known[0]),
        total(known[1] + known[2]),
        total((nodes.flops[index] == UNKNOWN).astype(np.int64)),
        strict=True,
    )
    return [share for row in columns if (share := Share(*row)).count]
