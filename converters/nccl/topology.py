"""GPU generations as NCCL knows them, and the channels that it finds between the ranks of a group.

Follows `src/graph/search.cc`, `connect.cc`, `paths.cc` and `transport/nvls.cc` of NCCL 2.28.9.

- Within a node, the channels follow from the links.
- Between nodes, the tables below record the results of NCCL's search for machines with one NIC per
  GPU: 200 Gbit/s for an A100, 400 for newer GPUs.
- GPUs without NVLink have PCIe 4.0 through the host of each pair; Hopper and GPUs newer than an
  RTX 4090 have PCIe 5.0.
- GPUs older than Ampere count as Ampere.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import TypeVar

# Words in the names of PCIe boards of generations that also have NVLink boards. NVL boards count as
# PCIe: bridges join an H100 NVL to at most one other, an H200 NVL to three.
_PCIE_WORDS = frozenset(
    {"PCIE", "NVL", "A30", "A30X", "A100X", "FHHL", "ACTIVE", "TITAN", "QUADRO"}
)


@dataclass(frozen=True)
class Interconnect:
    """The properties of a GPU that NCCL's choice depends on.

    Attributes:
        capability: compute capability, 90 for an H100.
        nvlink: whether NVLink joins it to all other GPUs of its node; else PCIe does.
    """

    capability: int = 90
    nvlink: bool = True


H100 = Interconnect()


def interconnect_of(capability: int, name: str = "") -> Interconnect:
    """Return the interconnect of a GPU by compute capability and name ("NVIDIA A100 80GB PCIe").

    If the name decides nothing, the generation does: Turing, and GeForce, RTX and L cards from
    Ampere on, were never sold with NVLink between all GPUs of a node.
    """
    never_nvlink = capability == 75 or 86 <= capability <= 89 or capability >= 120
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    return Interconnect(capability, nvlink=not (never_nvlink or words & _PCIE_WORDS))


_Entry = TypeVar("_Entry")

# Of a DGX or HGX server, for which NCCL's search was run.
_GPUS_OF_A_NODE = 8


@dataclass(frozen=True)
class Generation:
    """Constants of a GPU generation; bandwidths in GB/s, triples by number of nodes: 1, 2, more.

    Attributes:
        link: bandwidth of one NVLink.
        links: NVLinks of the SXM board; 0 with PCIe only.
        speeds: per-channel bandwidths tried within a node, descending.
        net: bandwidth of the usual NIC.
        ll: limit of the LL protocol within a node.
        ring_ll128: limit of a channel, ring and LL128.
        tree_ll128: limit of a channel, tree and LL128.
        tree: limit of a channel, tree.
        trees_inside: tree channel within a node, by ranks from 2 on; the last entry for more.
        trees_between: tree channel between two nodes, by ranks per node from 1 on; between more
            nodes at most that of a ring.
        balanced: whether trees between nodes may end on two GPUs of a node.
        plain_inside: numbers of ranks within a node for which they may not.
        nvls: fraction of the links that NVLS reaches; 0 without NVLS.
        nvls_inside: NVLS channel within a node, by ranks from 2 on.
        nvls_between: NVLS channel between nodes, by ranks per node from 2 on.
        nvls_tree: limit of a channel, NVLS tree.
        nvls_channels: blocks of an NVLS kernel, within a node and between nodes.
        pcie_inside: (rings, bandwidth) over PCIe within a node, by ranks from 2 on.
        pcie_between: (rings, bandwidth) over PCIe between nodes, by ranks per node from 1 on.
    """

    link: float
    links: int
    speeds: tuple[float, ...]
    net: float
    ll: float
    ring_ll128: tuple[float, float, float]
    tree_ll128: tuple[float, float, float]
    tree: tuple[float, float, float]
    trees_inside: tuple[float, ...]
    trees_between: tuple[float, ...]
    balanced: bool
    plain_inside: tuple[int, ...] = ()
    nvls: float = 0.0
    nvls_inside: tuple[float, ...] = ()
    nvls_between: tuple[float, ...] = ()
    nvls_tree: tuple[float, float, float] = (0.0, 0.0, 0.0)
    nvls_channels: tuple[int, int] = (0, 0)
    pcie_inside: tuple[tuple[int, float], ...] = ()
    pcie_between: tuple[tuple[int, float], ...] = ()


# `link`, `speeds`, `net`, `ll`, the limits of a channel and `nvls` are NCCL's own constants, of
# `topo.h` (SM80_NVLINK_BW and its successors), `search.cc` (the speed arrays) and `tuning.cc`. The
# other fields are results of NCCL's search, see the module's docstring.
_AMPERE = Generation(
    20.0, 12, (40.0, 30.0, 20.0, 18.0, 15.0, 12.0), 24.0, 87.7,
    (20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (24.0, 23.6, 17.8),
    trees_inside=(40.0, 20.0), trees_between=(48.0,) * 7 + (30.0,), balanced=True,
)  # fmt: skip

_HOPPER = Generation(
    20.6, 18, (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0), 48.0, 141.0,
    (36.7, 36.7, 36.7), (36.7, 36.7, 29.0), (38.7, 41.4, 36.0),
    trees_inside=(60.0, 40.0, 30.0), trees_between=(48.0,), balanced=False,
    nvls=0.85, nvls_inside=(60.0,) * 4 + (50.0, 40.0), nvls_between=(48.0,) * 5 + (45.0, 40.0),
    nvls_tree=(0.0, 57.7, 45.5), nvls_channels=(16, 16),
)  # fmt: skip

_BLACKWELL = Generation(
    40.1, 18, (90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 24.0), 48.0, 2 * 141.0,
    (2 * 36.7, 34.6, 2 * 36.7), (55.6, 31.67, 20.0), (70.0, 42.8, 24.0),
    trees_inside=(90.0, 60.0, 50.0, 40.0), trees_between=(48.0,) * 4 + (96.0,), balanced=False,
    plain_inside=(3, 4),
    nvls=0.74, nvls_inside=(90.0,) * 6 + (80.0,), nvls_between=(48.0,),
    nvls_tree=(0.0, 96.0, 43.8), nvls_channels=(24, 32),
)  # fmt: skip

_PCIE_4 = replace(
    _AMPERE, links=0, trees_inside=(20.0,), trees_between=(48.0, 15.0),
    pcie_inside=((2, 12.0), (1, 20.0)), pcie_between=((1, 24.0), (1, 24.0), (1, 20.0)),
)  # fmt: skip

_PCIE_5 = replace(
    _BLACKWELL, links=0, plain_inside=(), nvls=0.0,
    trees_inside=(40.0, 20.0), trees_between=(48.0, 22.0, 20.0),
    pcie_inside=((2, 20.0),) * 6 + ((1, 20.0),), pcie_between=((2, 24.0), (2, 20.0)),
)  # fmt: skip

# Not searched with NCCL: an H100 on PCIe gets the results of an RTX 5090, whose speeds are among
# those that NCCL tries for Hopper.
_HOPPER_PCIE_5 = replace(
    _HOPPER, links=0, nvls=0.0,
    trees_inside=_PCIE_5.trees_inside, trees_between=_PCIE_5.trees_between,
    pcie_inside=_PCIE_5.pcie_inside, pcie_between=_PCIE_5.pcie_between,
)  # fmt: skip


def generation(interconnect: Interconnect) -> Generation:
    """Return the constants of an interconnect's generation, as NCCL maps compute capabilities."""
    if interconnect.capability >= 100:
        return _BLACKWELL if interconnect.nvlink else _PCIE_5
    if interconnect.capability >= 90:
        return _HOPPER if interconnect.nvlink else _HOPPER_PCIE_5
    return _AMPERE if interconnect.nvlink else _PCIE_4


@dataclass(frozen=True)
class Topology:
    """Placement of the ranks of a group.

    Attributes:
        ranks: number of ranks.
        nodes: number of nodes, with the ranks spread evenly.
        interconnect: what joins their GPUs.
        nvls: whether NVSwitches reduce and copy (NVLS), which takes Hopper GPUs or newer.
    """

    ranks: int
    nodes: int = 1
    interconnect: Interconnect = H100
    nvls: bool = False

    @property
    def per_node(self) -> float:
        """Ranks per node."""
        return self.ranks / self.nodes

    @property
    def nodes_index(self) -> int:
        """Index into a triple by number of nodes: 1, 2, more."""
        return min(self.nodes, 3) - 1

    @property
    def _ranks_of_node(self) -> int:
        """Ranks of the largest node, at most its number of NICs."""
        return min(_GPUS_OF_A_NODE, math.ceil(self.per_node))

    @property
    def rings(self) -> tuple[int, float]:
        """Channels that the topology search finds, and the bandwidth of each in GB/s."""
        constants = generation(self.interconnect)
        if not constants.links and self.nodes > 1:
            return _at(constants.pcie_between, self._ranks_of_node - 1)
        if not constants.links:
            return _at(constants.pcie_inside, self.ranks - 2)
        if self.nodes > 1:
            channels, speed = self._ranks_of_node, constants.net
        else:
            total = constants.link * constants.links
            speed = max(constants.speeds, key=lambda speed: (int(total / speed) * speed, speed))
            channels = int(total / speed)
        # NCCL duplicates the channels of fast links and halves their bandwidth
        # (`ncclTopoDupChannels`), unless Hopper or a newer GPU already has more than four.
        if speed < 25.0 or (self.interconnect.capability > 80 and speed < 50.0 and channels > 4):
            return channels, speed
        return 2 * channels, speed / 2

    @property
    def tree(self) -> float:
        """Bandwidth of a tree channel, GB/s; there are as many channels as rings."""
        constants = generation(self.interconnect)
        if self.nodes == 1:
            return _at(constants.trees_inside, math.ceil(self.per_node) - 2)
        inside = _at(constants.trees_between, self._ranks_of_node - 1)
        return inside if self.nodes == 2 else min(inside, self.rings[1])

    @property
    def balanced(self) -> bool:
        """Whether a tree channel ends on two GPUs of a node, so that neither is a bottleneck."""
        constants = generation(self.interconnect)
        if self.nodes > 1:
            return constants.balanced and self._ranks_of_node > 1
        return self.ranks not in constants.plain_inside

    @property
    def heads(self) -> int:
        """NVLS channels that the search finds, one per GPU of a node; 0 without NVLS."""
        supported = self.nvls and generation(self.interconnect).nvls > 0 and self.per_node > 1
        return self._ranks_of_node if supported else 0

    @property
    def head(self) -> float:
        """Bandwidth of an NVLS channel, GB/s."""
        constants = generation(self.interconnect)
        by_ranks = constants.nvls_inside if self.nodes == 1 else constants.nvls_between
        return _at(by_ranks, self.heads - 2)

    @property
    def equal_rings(self) -> bool:
        """Whether all rings take the same path; a broadcast's latency is then that of one hop."""
        return self.nodes == 1 or self.per_node == 1 or not generation(self.interconnect).links

    @property
    def by_pcie(self) -> bool:
        """Whether ranks of a node reach each other over PCIe."""
        return self.per_node > 1 and not generation(self.interconnect).links

    @property
    def channels(self) -> int:
        """Channels of a communicator: NCCL uses each ring that it finds twice."""
        rings, speed = self.rings
        channels = 2 * rings
        # With few ranks per node, fast NICs get twice the channels (`ncclTopoPostset`).
        if self.nodes > 1 and self.interconnect.capability >= 90 and speed > 45.0 and channels < 16:
            channels *= 2
        return channels

    @property
    def nvls_channels(self) -> int:
        """Blocks of an NVLS kernel."""
        return generation(self.interconnect).nvls_channels[self.nodes > 1]


def _at(by_ranks: tuple[_Entry, ...], place: int) -> _Entry:
    """Return the entry at `place`; the last one beyond the end."""
    return by_ranks[max(0, min(place, len(by_ranks) - 1))]
