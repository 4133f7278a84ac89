"""GPU generations as NCCL knows them, and the channels that it finds between the ranks of a group.

After `src/graph/search.cc`, `connect.cc` and `paths.cc` of NCCL 2.28.9.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """Constants of a GPU generation; bandwidths in GB/s, triples by nodes: 1, 2, more.

    Attributes:
        link: one NVLink.
        links: NVLinks of the SXM part.
        speeds: per-channel bandwidths tried within a node, descending.
        net: per-channel bandwidth of a ring that leaves the node, for the NIC usual beside it.
        ll: most that the LL protocol reaches within a node.
        ring_ll128: most that a channel reaches, ring and LL128.
        tree_ll128: likewise, tree and LL128.
        tree: likewise, tree.
    """

    link: float
    links: int
    speeds: tuple[float, ...]
    net: float
    ll: float
    ring_ll128: tuple[float, float, float]
    tree_ll128: tuple[float, float, float]
    tree: tuple[float, float, float]


_AMPERE = Generation(
    20.0, 12, (40.0, 30.0, 20.0, 18.0, 15.0, 12.0), 24.0, 87.7,
    (20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (24.0, 23.6, 17.8),
)  # fmt: skip
_HOPPER = Generation(
    20.6, 18, (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0), 48.0, 141.0,
    (36.7, 36.7, 36.7), (36.7, 36.7, 29.0), (38.7, 41.4, 36.0),
)  # fmt: skip
_BLACKWELL = Generation(
    40.1, 18, (90.0, 80.0, 70.0, 60.0, 50.0, 40.0, 30.0, 24.0), 48.0, 2 * 141.0,
    (2 * 36.7, 34.6, 2 * 36.7), (55.6, 31.67, 20.0), (70.0, 42.8, 24.0),
)  # fmt: skip


def generation(capability: int) -> Generation:
    """Return the constants for a compute capability (90 for an H100), as NCCL maps them."""
    if capability >= 100:
        return _BLACKWELL
    return _HOPPER if capability >= 90 else _AMPERE


@dataclass(frozen=True)
class Topology:
    """Where the ranks of a group sit.

    Attributes:
        ranks: how many there are.
        nodes: how many nodes they are spread over, evenly.
        capability: compute capability of their GPUs, 90 for an H100.
    """

    ranks: int
    nodes: int = 1
    capability: int = 90

    @property
    def per_node(self) -> float:
        """Ranks of one node."""
        return self.ranks / self.nodes

    @property
    def across(self) -> int:
        """Index into a triple by nodes: 1, 2, more."""
        return min(self.nodes, 3) - 1

    @property
    def rings(self) -> tuple[int, float]:
        """Channels that the topology search finds, and the bandwidth of each in GB/s."""
        made = generation(self.capability)
        if self.nodes > 1:
            return min(8, math.ceil(self.per_node)), made.net
        total = made.link * made.links
        speed = max(made.speeds, key=lambda speed: (int(total / speed) * speed, speed))
        found = int(total / speed)
        if speed < 25.0 or (self.capability > 80 and speed < 50.0 and found > 4):
            return found, speed
        return 2 * found, speed / 2

    @property
    def channels(self) -> int:
        """Channels of a communicator: each one found is used twice."""
        found, speed = self.rings
        channels = 2 * found
        if self.nodes > 1 and self.capability >= 90 and speed > 45.0 and channels < 16:
            channels *= 2  # few ranks per node
        return channels
