"""Where an export goes, and what it is for."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from onerank.converters.astra_sim.publish import check_target
from onerank.ir.errors import ExportError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Target:
    """Where an export goes, the network it is for, and what is to be told of it.

    Attributes:
        directory: where it goes.
        name: prefix of its traces.
        bandwidth_gbps: 1e9 bytes per second, of each rank in each direction.
        latency_ns: from one rank to another.
        memory_gbps: 1e9 bytes per second of a GPU's memory, for reductions; None where the
            bandwidth has them in it.
        notes: what is to be told.
    """

    directory: Path
    name: str
    bandwidth_gbps: float
    latency_ns: float
    memory_gbps: float | None
    notes: list[str]

    def telling(self, notes: Iterable[str]) -> "Target":
        """Return the target with more to tell."""
        return replace(self, notes=[*self.notes, *notes])

    def check(self) -> None:
        """Refuse what cannot be exported so.

        Raises:
            ExportError: the name or a figure cannot be, or the directory holds something else.
        """
        _check_arguments(self.name, self.bandwidth_gbps, self.latency_ns, self.memory_gbps)
        check_target(self.directory)


def _check_arguments(
    name: str, bandwidth_gbps: float, latency_ns: float, memory_gbps: float | None
) -> None:
    if not _NAME.fullmatch(name):
        raise ExportError(f"the name {name!r} must be letters, digits, '.', '_' and '-'")
    if name.endswith("_roofline"):
        raise ExportError(
            f"the name {name!r} must not end in _roofline, as the exact traces' does: give another"
        )
    if not 0 < bandwidth_gbps < inf or not (memory_gbps is None or 0 < memory_gbps < inf):
        raise ExportError(
            f"the bandwidths are {bandwidth_gbps} GB/s between ranks and {memory_gbps} GB/s of "
            "memory; both must be more than 0"
        )
    if not 0 <= latency_ns < inf:
        raise ExportError(f"the latency is {latency_ns} ns; it must be 0 or more")
