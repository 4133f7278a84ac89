"""NCCL's cost model: the time of a call by algorithm and protocol.

Follows `src/graph/tuning.cc` of NCCL 2.28.9 (`ncclTopoTuneModel`, `ncclTopoGetAlgoTime`) and its
constants.
"""

import math

from onerank.converters.nccl.topology import Topology, generation

ALGORITHMS = ("tree", "ring", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")

# `baseLatencies` of tuning.cc, by protocol: the fixed part of a call's latency.
_BASE_LATENCY_US = {
    "tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "pat": (8.0, 8.0, 8.0),
    "nvls": (0, 0, 0), "nvls_tree": (0, 0, 0),
}  # fmt: skip
# `hwLatencies` of tuning.cc: the latency of a step over NVLink, PCIe and the network.
_NVLINK_LATENCY_US = {
    "tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4),
    "nvls": (0, 0, 25.0), "nvls_tree": (0, 0, 25.0),
}  # fmt: skip
_PCIE_LATENCY_US = {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)}
_NET_LATENCY_US = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0), "nvls_tree": (0, 0, 20.9)}
_NET_OVERHEAD_US = 1.0  # `getNetOverhead` of tuning.cc for an Intel host
# The latency of the model is that of a whole call, and the kernel is shorter. Measured on H200 with
# NCCL 2.28.9 (kernel versus model): a 1 KiB broadcast 3.5 versus 7.2 us, a send 4.2 versus 7.2, an
# all-reduce among four GPUs 7.8 versus 10.2.
_LL_LAUNCH_US = 3.0
_IN_PARTS = ("all_reduce", "all_gather", "reduce_scatter")
_LL_MAX_BW_INTEL = (39.0, 39.0, 20.4)  # `llMaxBws` by number of nodes: 1, 2, more
# `treeCorrectionFactor` of tuning.cc by protocol, for 64 B, 128 B ... 256 MiB: NCCL's own static
# correction, since trees do not follow its model at medium sizes.
_TREE_CORRECTION = {
    "ll": (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1),
    "ll128": (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1),
    "simple": (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8,
               .9, .9),
}  # fmt: skip


def _steps(collective: str, ranks: int) -> int:
    """Return the number of steps of a ring, `nsteps` of `ncclTopoTuneModel`."""
    if collective == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1 if collective in ("reduce_scatter", "all_gather") else ranks


def bandwidth(collective: str, algorithm: str, protocol: str, topology: Topology) -> float:
    """Return the algorithm bandwidth of NCCL's model in GB/s, 0 where it does not apply."""
    if protocol == "ll128" and topology.by_pcie:
        # LL128 needs 128-byte writes that arrive in order, which PCIe does not guarantee; NCCL
        # enables it on NVLink only.
        return 0.0
    if algorithm == "ring":
        return _ring_bandwidth(collective, protocol, topology)
    if algorithm == "tree":
        return _tree_bandwidth(protocol, topology) if collective == "all_reduce" else 0.0
    if protocol != "simple" or collective not in _IN_PARTS:
        return 0.0
    if algorithm == "pat":
        # PAT runs with one GPU per node only.
        able = topology.nodes == topology.ranks > 1 and collective != "all_reduce"
        return 0.75 * topology.rings[0] * topology.tree if able else 0.0
    return _nvls_bandwidth(collective, algorithm, topology)


def _ring_bandwidth(collective: str, protocol: str, topology: Topology) -> float:
    constants, index = generation(topology.interconnect), topology.nodes_index
    channels, speed = topology.rings
    bus = channels * speed
    if protocol == "ll":
        bus = min(_ll_limit(topology), bus * 0.5)
    if protocol == "ll128":
        bus = min(bus * 0.92, channels * constants.ring_ll128[index])
    return bus * topology.ranks / _steps(collective, topology.ranks)


def _tree_bandwidth(protocol: str, topology: Topology) -> float:
    constants, index = generation(topology.interconnect), topology.nodes_index
    channels = topology.rings[0]
    bus = min(channels * topology.tree * 0.92, channels * constants.tree[index])
    if protocol == "ll":
        bus = min(bus / 3.8, _ll_limit(topology))
    if protocol == "ll128":
        share = 7 / 9 if topology.nodes == 1 else 120 / 128
        bus = min(bus * share, channels * constants.tree_ll128[index])
    return bus * 0.5 * (1 if topology.balanced else 0.85)


def _ll_limit(topology: Topology) -> float:
    if topology.nodes == 1:
        return generation(topology.interconnect).ll
    return _LL_MAX_BW_INTEL[topology.nodes_index]


def _nvls_bandwidth(collective: str, algorithm: str, topology: Topology) -> float:
    """Return the bandwidth of NVLS within a node, or of trees of NVLS nodes between several."""
    constants, heads = generation(topology.interconnect), topology.heads
    one_node = topology.nodes == 1
    if heads < 2 or one_node != (algorithm == "nvls"):
        return 0.0
    if collective != "all_reduce" and not (one_node and heads == topology.ranks):
        return 0.0
    inside = topology.head * constants.nvls * (heads - 1) / heads
    if collective == "all_reduce":
        inside *= 2
    else:
        inside *= (topology.per_node - 1) / topology.per_node
    between = constants.speeds[0] if one_node else constants.net * (2 if topology.nodes == 2 else 1)
    speed = min(
        inside, between, math.inf if one_node else constants.nvls_tree[topology.nodes_index]
    )
    if collective != "all_reduce":
        return heads * speed
    return heads * speed * topology.ranks / _steps(collective, topology.ranks)


def _latency_us(collective: str, algorithm: str, protocol: str, topology: Topology) -> float:
    place = PROTOCOLS.index(protocol)
    base = _BASE_LATENCY_US[algorithm][place]
    doublings = int(math.log2(topology.nodes))
    # With one rank per node nothing hides the network latency, and NCCL uses the tree's figure.
    one_per_node = topology.per_node == 1
    if algorithm == "pat":
        return base + doublings * _NET_LATENCY_US["tree"][place] / 3.5 + 2.8 * topology.ranks
    inside = (_PCIE_LATENCY_US if topology.by_pcie else _NVLINK_LATENCY_US)[algorithm][place]
    if algorithm == "nvls":
        return base + inside
    between = _NET_LATENCY_US["tree" if one_per_node else algorithm][place]
    if algorithm == "nvls_tree":
        return base + inside + 2 * doublings * between
    if algorithm == "tree":
        return base + 2 * ((topology.ranks // topology.nodes - 1) * inside + doublings * between)
    steps = _steps(collective, topology.ranks)
    if collective in ("broadcast", "reduce"):
        # Between nodes NCCL takes the tree's figure for the simple protocol; the ring's is equal.
        hop = inside if topology.nodes == 1 else _NET_LATENCY_US["ring"][place]
        return base + (1 if topology.equal_rings else steps) * hop
    crossings = 0
    if topology.nodes > 1:
        inside = max(inside, _NET_OVERHEAD_US * (3 if protocol == "simple" else 1))
        crossings = (topology.nodes - 1) * (2 if collective == "all_reduce" else 1)
    return base + (steps - crossings) * inside + crossings * between


def time_us(
    collective: str, algorithm: str, protocol: str, whole: int, topology: Topology
) -> float | None:
    """Return the time of a call of `whole` bytes, None if the algorithm does not apply."""
    rate = bandwidth(collective, algorithm, protocol, topology)
    if rate == 0:
        return None
    latency = _latency_us(collective, algorithm, protocol, topology)
    size = (whole >> 6).bit_length() - 1
    if algorithm == "tree" and 0 <= size < len(_TREE_CORRECTION[protocol]):
        rate *= _TREE_CORRECTION[protocol][size]
    # "Plateau effect of ring" in `ncclTopoGetAlgoTime`: large all-reduces between nodes.
    ring_plateau = (algorithm, protocol, collective) == ("ring", "simple", "all_reduce")
    if ring_plateau and topology.nodes > 1 and whole // (topology.channels * topology.ranks) >= 64:
        latency *= 1.4
    return latency + whole / (1000 * rate)


def lone_latency_us() -> float:
    """Return the latency of a call in a group of one rank."""
    return _BASE_LATENCY_US["ring"][PROTOCOLS.index("simple")]


def kernel_latency_us(collective: str, algorithm: str, protocol: str, topology: Topology) -> float:
    """Return the latency of a call's kernel, without the launch, in us."""
    return _latency_us(collective, algorithm, protocol, topology) - _launch_us(protocol)


def point_to_point_latency_us(protocol: str, topology: Topology) -> float:
    """Return the latency of a kernel of one or several sends and receives."""
    place = PROTOCOLS.index(protocol)
    inside = _PCIE_LATENCY_US if topology.by_pcie else _NVLINK_LATENCY_US
    hop = (inside if topology.nodes == 1 else _NET_LATENCY_US)["ring"][place]
    return _BASE_LATENCY_US["ring"][place] + hop - _launch_us(protocol)


def _launch_us(protocol: str) -> float:
    """Return the part of the model's latency outside the kernel, seen with short kernels."""
    return _LL_LAUNCH_US if protocol == "ll" else 0.0
