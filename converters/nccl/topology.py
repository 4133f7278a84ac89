"""GPU generations as NCCL knows them, and the channels it finds between the ranks of a group.

GPU generations as NCCL knows them, and the channels that it finds between the ranks of a group.

After `src/graph/search.cc`, `connect.cc`, `paths.cc` and `transport/nvls.cc` of NCCL 2.28.9. What
its search finds within a node follows from the links; what it finds between nodes is kept as it
answers for machines of one NIC per GPU, 200 Gbit/s beside an A100, 400 beside a newer one; GPUs
without NVLink have PCIe 4.0, a Hopper and those newer than an RTX 4090 5.0, through the host of
each pair. Of an H100 on PCIe NCCL was not asked: it has what an RTX 5090 gets, as its speeds are
among those that NCCL tries for a Hopper. Older GPUs than Ampere's are taken for Ampere's.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import TypeVar

_BY_PCIE = frozenset({"PCIE", "NVL", "A30", "A30X", "A100X", "FHHL", "ACTIVE", "TITAN", "QUADRO"})
"""Words in names of boards whose generation has others with NVLink. Bridges join an H100 NVL to
one other at most, an H200 NVL to three."""


@dataclass(frozen=True)
class Interconnect:
    """A GPU as NCCL's choice goes by it.

    Attributes:
        capability: its compute capability, 90 for an H100.
        nvlink: whether NVLink joins it to all others of its node; else PCIe does.
    """

    capability: int = 90
    nvlink: bool = True


H100 = Interconnect()


def interconnect_of(capability: int, name: str = "") -> Interconnect:
    """Return the board of a compute capability and a name, as "NVIDIA A100 80GB PCIe".

    A name that is not known leaves the generation to tell: one that was never sold with NVLink
    between all GPUs of a node has none (Turing; GeForce, RTX and L cards from Ampere on).
    """
    without = capability == 75 or 86 <= capability <= 89 or capability >= 120
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    return Interconnect(capability, nvlink=not (without or words & _BY_PCIE))


_Figure = TypeVar("_Figure")

_GPUS_OF_A_NODE = 8


@dataclass(frozen=True)
class Generation:
    """Constants of a GPU generation; bandwidths in GB/s, triples by nodes: 1, 2, more.

    Attributes:
        link: one NVLink.
        links: NVLinks of the SXM part; 0 where there is PCIe alone.
        speeds: per-channel bandwidths tried within a node, descending.
        net: the NIC usual beside it.
        ll: most that the LL protocol reaches within a node.
        ring_ll128: most that a channel reaches, ring and LL128.
        tree_ll128: likewise, tree and LL128.
        tree: likewise, tree.
        trees_inside: a channel of a tree within a node, by its ranks from 2 on; of more, the last.
        trees_between: likewise of one of two nodes, by its ranks from 1; of more nodes at most a
            ring's.
        balanced: whether trees between nodes may end on two GPUs of a node.
        plain_inside: ranks of a node within which they may not.
        nvls: part of the links that NVLS reaches; 0 without it.
        nvls_inside: a channel of NVLS within a node, by its ranks from 2 on.
        nvls_between: likewise of a node of several.
        nvls_tree: most that a channel reaches, NVLS in a tree.
        nvls_channels: blocks of an NVLS kernel, within a node and between several.
        roads_inside: rings over PCIe and their bandwidth within a node, by its ranks from 2 on.
        roads_between: likewise of a node of several, by its ranks from 1.
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
    roads_inside: tuple[tuple[int, float], ...] = ()
    roads_between: tuple[tuple[int, float], ...] = ()


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
    roads_inside=((2, 12.0), (1, 20.0)), roads_between=((1, 24.0), (1, 24.0), (1, 20.0)),
)  # fmt: skip

_PCIE_5 = replace(
    _BLACKWELL, links=0, plain_inside=(), nvls=0.0,
    trees_inside=(40.0, 20.0), trees_between=(48.0, 22.0, 20.0),
    roads_inside=((2, 20.0),) * 6 + ((1, 20.0),), roads_between=((2, 24.0), (2, 20.0)),
)  # fmt: skip

_HOPPER_PCIE_5 = replace(
    _HOPPER, links=0, nvls=0.0,
    trees_inside=_PCIE_5.trees_inside, trees_between=_PCIE_5.trees_between,
    roads_inside=_PCIE_5.roads_inside, roads_between=_PCIE_5.roads_between,
)  # fmt: skip


def generation(interconnect: Interconnect) -> Generation:
    """Return the constants for a board's compute capability, as NCCL maps them."""
    if interconnect.capability >= 100:
        return _BLACKWELL if interconnect.nvlink else _PCIE_5
    if interconnect.capability >= 90:
        return _HOPPER if interconnect.nvlink else _HOPPER_PCIE_5
    return _AMPERE if interconnect.nvlink else _PCIE_4


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a group sit.

    Attributes:
        ranks: how many there are.
        nodes: how many nodes they are spread over, evenly.
        interconnect: what their GPUs are.
        nvls: whether NVSwitches reduce and copy for them, where the GPUs are a Hopper or newer.
    """

    ranks: int
    nodes: int = 1
    interconnect: Interconnect = H100
    nvls: bool = False

    @property
    def per_node(self) -> float:
        """Ranks of one node."""
        return self.ranks / self.nodes

    @property
    def across(self) -> int:
        """Index into a triple by nodes: 1, 2, more."""
        return min(self.nodes, 3) - 1

    @property
    def _of_a_node(self) -> int:
        """Ranks of the largest node, as far as its GPUs have a NIC each."""
        return min(_GPUS_OF_A_NODE, math.ceil(self.per_node))

    @property
    def rings(self) -> tuple[int, float]:
        """Channels that the topology search finds, and the bandwidth of each in GB/s."""
        made = generation(self.interconnect)
        if not made.links and self.nodes > 1:
            return _at(made.roads_between, self._of_a_node - 1)
        if not made.links:
            return _at(made.roads_inside, self.ranks - 2)
        if self.nodes > 1:
            found, speed = self._of_a_node, made.net
        else:
            total = made.link * made.links
            speed = max(made.speeds, key=lambda speed: (int(total / speed) * speed, speed))
            found = int(total / speed)
        if speed < 25.0 or (self.interconnect.capability > 80 and speed < 50.0 and found > 4):
            return found, speed
        return 2 * found, speed / 2

    @property
    def tree(self) -> float:
        """Bandwidth of a channel of a tree, GB/s; there are as many as rings."""
        made = generation(self.interconnect)
        if self.nodes == 1:
            return _at(made.trees_inside, math.ceil(self.per_node) - 2)
        inside = _at(made.trees_between, self._of_a_node - 1)
        return inside if self.nodes == 2 else min(inside, self.rings[1])

    @property
    def balanced(self) -> bool:
        """Whether a tree's channel ends on two GPUs of a node, so that none is a bottleneck."""
        made = generation(self.interconnect)
        if self.nodes > 1:
            return made.balanced and self._of_a_node > 1
        return self.ranks not in made.plain_inside

    @property
    def heads(self) -> int:
        """Channels of NVLS that the search finds, one for each GPU of a node; 0 without NVLS."""
        able = self.nvls and generation(self.interconnect).nvls > 0 and self.per_node > 1
        return self._of_a_node if able else 0

    @property
    def head(self) -> float:
        """Bandwidth of one of them, GB/s."""
        made = generation(self.interconnect)
        by_ranks = made.nvls_inside if self.nodes == 1 else made.nvls_between
        return _at(by_ranks, self.heads - 2)

    @property
    def alike(self) -> bool:
        """Whether all rings take the same way, so that a broadcast's latency is one hop's."""
        return self.nodes == 1 or self.per_node == 1 or not generation(self.interconnect).links

    @property
    def by_pcie(self) -> bool:
        """Whether ranks of a node reach each other over PCIe."""
        return self.per_node > 1 and not generation(self.interconnect).links

    @property
    def channels(self) -> int:
        """Channels of a communicator: each one found is used twice."""
        found, speed = self.rings
        channels = 2 * found
        if self.nodes > 1 and self.interconnect.capability >= 90 and speed > 45.0 and channels < 16:
            channels *= 2  # few ranks per node
        return channels

    @property
    def nvls_channels(self) -> int:
        """Blocks of an NVLS kernel."""
        return generation(self.interconnect).nvls_channels[self.nodes > 1]


def _at(by_ranks: tuple[_Figure, ...], place: int) -> _Figure:
    """Return the figure of a number of ranks; of more than are listed, the last."""
    return by_ranks[max(0, min(place, len(by_ranks) - 1))]
