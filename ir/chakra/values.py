"""Values that Chakra cannot hold, refused before anything is written."""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.ir.errors import ChakraError
from onerank.ir.kinds import Collective, Evidence, Kind, Phase
from onerank.ir.nodes import Nodes

_ENUMS: dict[str, type[IntEnum]] = {
    "kind": Kind,
    "collective": Collective,
    "evidence": Evidence,
    "phase": Phase,
}


def check_values(nodes: Nodes, own_start: npt.NDArray[Any], own_duration: npt.NDArray[Any]) -> None:
    """Refuse values that Chakra cannot hold.

    Args:
        nodes: columns to be written.
        own_start: which nodes' start is written (not kept from another tool's file), bool[n].
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
                " unsigned: shift the times so that none is negative"
            )
    for column, words in _ENUMS.items():
        values = getattr(nodes, column)
        known = np.zeros(1 << 8 * values.itemsize, dtype=bool)
        known[list(words)] = True  # a negative number at its place from the end
        bad = ~known[values]
        if bad.any():
            index = int(np.argmax(bad))
            raise ChakraError(
                f"node {nodes.id[index]}: {column} is {values[index]};"
                f" expected one of {members(words)}"
            )


def members(words: type[IntEnum]) -> str:
    """Return an enum's numbers and names."""
    return ", ".join(f"{int(member)} ({member.name})" for member in words)
