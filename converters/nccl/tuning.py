"""NCCL's cost model: what a call takes by each algorithm and protocol.

After `src/graph/tuning.cc` of NCCL 2.28.9 (`ncclTopoTuneModel`, `ncclTopoGetAlgoTime`) and its
constants.
"""

import math

from onerank.converters.nccl.topology import Topology, generation

ALGORITHMS = ("tree", "ring")
PROTOCOLS = ("ll", "ll128", "simple")

_BASE_LATENCY_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_NVLINK_LATENCY_US = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
_NET_LATENCY_US = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
_NET_OVERHEAD_US = 1.0
# The model's latency is a whole call's. H200, NCCL 2.28.9: the kernel of a 1 KiB broadcast takes
# 3.5 us for 7.2, of a send 4.2 for 7.2, of an all-reduce among four 7.8 for 10.2.
_LL_LAUNCH_US = 3.0
_LL_MAX_BW_INTEL = (39.0, 39.0, 20.4)  # by nodes: 1, 2, more
_TREE_CORRECTION = {  # by protocol, for 64 B, 128 B ... 256 MiB
    "ll": (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1),
    "ll128": (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1),
    "simple": (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8,
               .9, .9),
}  # fmt: skip


def _steps(collective: str, ranks: int) -> int:
    if collective == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1 if collective in ("reduce_scatter", "all_gather") else ranks


def bandwidth(collective: str, algorithm: str, protocol: str, topology: Topology) -> float:
    """Return the algorithm bandwidth of NCCL's model in GB/s, 0 where it does not apply."""
    if algorithm == "tree" and collective != "all_reduce":
        return 0.0
    made, across = generation(topology.capability), topology.across
    channels, speed = topology.rings
    bus = channels * speed
    ll = made.ll if topology.nodes == 1 else _LL_MAX_BW_INTEL[across]
    if algorithm == "ring":
        if protocol == "ll":
            bus = min(ll, bus * 0.5)
        if protocol == "ll128":
            bus = min(bus * 0.92, channels * made.ring_ll128[across])
        return bus * topology.ranks / _steps(collective, topology.ranks)
    bus = min(bus * 0.92, channels * made.tree[across])
    if protocol == "ll":
        bus = min(bus / 3.8, ll)
    if protocol == "ll128":
        share = 7 / 9 if topology.nodes == 1 else 120 / 128
        bus = min(bus * share, channels * made.tree_ll128[across])
    return bus * 0.5


def _latency_us(collective: str, algorithm: str, protocol: str, topology: Topology) -> float:
    place = PROTOCOLS.index(protocol)
    base = _BASE_LATENCY_US[algorithm][place]
    inside = _NVLINK_LATENCY_US[algorithm][place]
    between = _NET_LATENCY_US["tree" if topology.per_node == 1 else algorithm][place]
    if algorithm == "tree":
        hops = topology.per_node - 1
        return base + 2 * (hops * inside + int(math.log2(topology.nodes)) * between)
    steps = _steps(collective, topology.ranks)
    if collective in ("broadcast", "reduce"):  # all channels alike
        return base + (inside if topology.nodes == 1 else _NET_LATENCY_US["ring"][place])
    crossings = 0
    if topology.nodes > 1:
        inside = max(inside, _NET_OVERHEAD_US * (3 if protocol == "simple" else 1))
        crossings = (topology.nodes - 1) * (2 if collective == "all_reduce" else 1)
    return base + (steps - crossings) * inside + crossings * between


def time_us(
    collective: str, algorithm: str, protocol: str, whole: int, topology: Topology
) -> float | None:
    """Return what a call of `whole` bytes takes, None where the algorithm does not apply."""
    rate = bandwidth(collective, algorithm, protocol, topology)
    if rate == 0:
        return None
    latency = _latency_us(collective, algorithm, protocol, topology)
    size = (whole >> 6).bit_length() - 1
    if algorithm == "tree" and 0 <= size < len(_TREE_CORRECTION[protocol]):
        rate *= _TREE_CORRECTION[protocol][size]
    ring_plateau = (algorithm, protocol, collective) == ("ring", "simple", "all_reduce")
    if ring_plateau and topology.nodes > 1 and whole // (topology.channels * topology.ranks) >= 64:
        latency *= 1.4
    return latency + whole / (1000 * rate)


def lone_latency_us() -> float:
    """Return the latency of a call of a rank that is alone in its group."""
    return _BASE_LATENCY_US["ring"][PROTOCOLS.index("simple")]


def kernel_latency_us(collective: str, algorithm: str, protocol: str, topology: Topology) -> float:
    """Return the latency of a call's kernel."""
    return _latency_us(collective, algorithm, protocol, topology) - _launch_us(protocol)


def point_to_point_latency_us(protocol: str, topology: Topology) -> float:
    """Return the latency of the kernel of a send, a receive, or of several in one."""
    place = PROTOCOLS.index(protocol)
    hop = (_NVLINK_LATENCY_US if topology.nodes == 1 else _NET_LATENCY_US)["ring"][place]
    return _BASE_LATENCY_US["ring"][place] + hop - _launch_us(protocol)


def _launch_us(protocol: str) -> float:
    """Return what the model's latency holds beside the kernel, seen where the kernel is short."""
    return _LL_LAUNCH_US if protocol == "ll" else 0.0
