"""Whether NVLink joins the GPUs of a node, by what the driver calls them."""

import re
from dataclasses import dataclass

_BY_PCIE = frozenset({"PCIE", "NVL", "A30", "A30X", "A100X", "FHHL", "ACTIVE", "TITAN", "QUADRO"})
"""Words in names of boards whose generation has others with NVLink. Bridges join an H100 NVL to
one other at most, an H200 NVL to three."""


@dataclass(frozen=True)
class Board:
    """A GPU as NCCL's choice goes by it.

    Attributes:
        capability: its compute capability, 90 for an H100.
        nvlink: whether NVLink joins it to all others of its node; else PCIe does.
    """

    capability: int = 90
    nvlink: bool = True


H100 = Board()


def board(capability: int, name: str = "") -> Board:
    """Return the board of a compute capability and a name, as "NVIDIA A100 80GB PCIe".

    A name that is not known leaves the generation to tell: one that was never sold with NVLink
    between all GPUs of a node has none (Turing; GeForce, RTX and L cards from Ampere on).
    """
    without = capability == 75 or 86 <= capability <= 89 or capability >= 120
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    return Board(capability, nvlink=not (without or words & _BY_PCIE))
