"""Select the algorithm, protocol and grid that NCCL launches for a call, by NCCL's cost model.

Follows NCCL 2.28.9 and its constants: the time of a call by algorithm and protocol
`src/graph/tuning.cc` (`ncclTopoTuneModel`, `ncclTopoGetAlgoTime`), the choice and the grid
`src/enqueue.cc` (`topoGetAlgoInfo`, `scheduleCollTasksToPlan`, `scheduleP2pTasksToPlan`).
"""

import math
from dataclasses import dataclass

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


def single_rank_latency_us() -> float:
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


# Constants of NCCL 2.28.9, which a newer NCCL may change.
_WARP = 32
_MAX_THREADS = 640  # NCCL_MAX_NTHREADS
_MIN_THREADS = 128
_SIMPLE_THREADS = 512  # NCCL_SIMPLE_MAX_NTHREADS
_LEAST_TRAFFIC_PER_CHANNEL = 16 << 10  # of `scheduleCollTasksToPlan`
# Calls that NCCL builds from sends and receives in one kernel.
_POINT_TO_POINT = frozenset({"send", "recv", "all_to_all", "gather", "scatter"})
_NVLS = frozenset({"nvls", "nvls_tree"})
# Algorithms without AVG and PREMUL_SUM: NVSwitches sum without scaling, and so does PAT.
_UNSCALED = _NVLS | {"pat"}
_LL_THRESHOLD = 16 << 10  # NCCL_P2P_LL_THRESHOLD, bytes of a channel


@dataclass(frozen=True)
class Choice:
    """A launch of NCCL: `channels` blocks of `threads`; `latency_us` is from its cost model."""

    algorithm: str
    protocol: str
    channels: int
    threads: int
    latency_us: float


def choose(
    collective: str, count_bytes: int, topology: Topology, *, scaled: bool = False
) -> Choice:
    """Return NCCL's choice for one call.

    Args:
        collective: "all_reduce", "all_gather", "send" and so on, as torch names them.
        count_bytes: input of this rank: one shard of an all-gather, the whole input of a
            reduce-scatter.
        topology: placement of the group's ranks.
        scaled: whether a reduction divides or multiplies as it sums (AVG, PREMUL_SUM). Neither
            NVSwitches nor the trees of a reduce-scatter (PAT) support that.
    """
    # Chakra has two names of this collective.
    collective = "reduce_scatter" if collective == "reduce_scatter_block" else collective
    if topology.ranks == 1:
        return Choice("ring", "simple", 1, _MIN_THREADS, single_rank_latency_us())
    if collective in _POINT_TO_POINT:
        return _point_to_point(collective, count_bytes, topology)
    if collective == "barrier":  # an all-reduce of one element
        collective, count_bytes = "all_reduce", 4
    whole = count_bytes * (topology.ranks if collective == "all_gather" else 1)
    times = {
        (algorithm, protocol): time
        for algorithm in ALGORITHMS
        for protocol in PROTOCOLS
        if not (scaled and algorithm in _UNSCALED)
        and (time := time_us(collective, algorithm, protocol, whole, topology)) is not None
    }
    algorithm, protocol = min(times, key=lambda key: times[key])
    channels, threads = _grid(whole, algorithm, protocol, topology)
    used = _channels_used(collective, whole, protocol, channels, topology)
    latency = kernel_latency_us(collective, algorithm, protocol, topology)
    return Choice(algorithm, protocol, used, max(threads, _MIN_THREADS), latency)


def _grid(whole: int, algorithm: str, protocol: str, topology: Topology) -> tuple[int, int]:
    """Return (maximum channels, threads), as `topoGetAlgoInfo` sets them.

    Both shrink while a thread has too few bytes: first channels, then threads.
    """
    if algorithm in _NVLS:
        return topology.nvls_channels, _MAX_THREADS
    channels = topology.channels
    if algorithm == "pat":
        return channels, _MAX_THREADS
    threads = {"ll": 512, "ll128": _MAX_THREADS, "simple": _SIMPLE_THREADS}[protocol]
    # NCCL_{LL,LL128,SIMPLE}_THREAD_THRESHOLD; a ring with LL sends a share to each rank.
    per_thread = {"ll": 8, "ll128": 8, "simple": 64}[protocol]
    if (algorithm, protocol) == ("ring", "ll"):
        per_thread *= topology.ranks
    while whole < channels * threads * per_thread and channels > 1:
        channels -= 1
    while whole < channels * threads * per_thread and threads % 128 == 0:
        threads //= 2
    if algorithm == "tree":
        return channels, _MAX_THREADS
    if protocol == "simple":
        # The simple protocol has one more warp, which signals.
        threads += _WARP
    return channels, max(threads, 3 * _WARP)


def _channels_used(
    collective: str, whole: int, protocol: str, channels: int, topology: Topology
) -> int:
    """Return the number of channels with work.

    `scheduleCollTasksToPlan` distributes bytes in cells of at least 16 KiB, so a small call leaves
    channels empty.
    """
    count, per_byte = whole, 1
    if collective == "all_reduce":
        per_byte = 2
    elif collective in ("all_gather", "reduce_scatter"):
        count, per_byte = whole // topology.ranks, topology.ranks
    if protocol == "ll":
        per_byte *= 4
    cell = _up(_up(_LEAST_TRAFFIC_PER_CHANNEL, per_byte), 16) * 16
    cells = _up(count, cell)
    traffic = max(_LEAST_TRAFFIC_PER_CHANNEL, count * per_byte // channels)
    per_channel = max(1, min(cells, _up(traffic, cell * per_byte)))
    return max(1, min(channels, _up(cells, per_channel)))


def _point_to_point(collective: str, count_bytes: int, topology: Topology) -> Choice:
    """Return the grid of a send, a receive, or a collective built from them.

    Follows `scheduleP2pTasksToPlan`.
    """
    channels = _power_of_two(topology.channels)
    max_parts = 2
    if topology.nodes == 1 and not topology.by_pcie:
        max_parts = min(channels, _power_of_two(2 * generation(topology.interconnect).links))
    min_parts = max_parts
    while min_parts * topology.ranks > channels and min_parts > 1:
        min_parts //= 2
    divided = collective in ("all_to_all", "scatter")
    size = count_bytes // topology.ranks if divided else count_bytes
    protocol = "ll" if size <= max_parts * _LL_THRESHOLD else "simple"
    used = _parts(size, protocol, min_parts, max_parts, topology)
    if collective not in ("send", "recv"):
        # One message to each peer, and a local copy, which always uses the simple protocol.
        local = _parts(size, "simple", min_parts, max_parts, topology)
        used = min(channels, used * (topology.ranks - 1) + local)
    latency = point_to_point_latency_us(protocol, topology)
    return Choice("p2p", protocol, used, _MAX_THREADS, latency)


def _parts(size: int, protocol: str, min_parts: int, max_parts: int, topology: Topology) -> int:
    """Return the number of channels over which one send or receive is split."""
    step = 64 << 10 if protocol == "ll" else (512 << 10 if topology.nodes == 1 else 128 << 10)
    smallest, largest = (step // 8, step * 32) if topology.nodes == 1 else (step // 2, step)
    used = max(1, min(min_parts, _up(size, smallest)))
    part = max(smallest, _up(size, used))
    while part > largest and used <= max_parts // 2:
        used *= 2
        part = _up(size, used)
    return used


def _up(amount: int, unit: int) -> int:
    return -(-amount // unit)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def wire_bytes(collective: str, count_bytes: int, ranks: int) -> float:
    """Return the bytes that the bus bandwidth of nccl-tests counts.

    Factors are from doc/PERFORMANCE.md; those of gather, scatter and all-to-all from `GetBw` in
    their sources. gather.cu counts count * nranks bytes at a factor of (nranks - 1) / nranks, where
    count is the input of one rank.

    Args:
        collective: name in lower case; for names not listed below ("broadcast", "reduce",
            messages) all bytes count.
        count_bytes: input of one rank; for a scatter, of the root.
        ranks: size of the group.
    """
    others = ranks - 1
    factor = {
        "all_reduce": 2 * others / ranks,
        "reduce_scatter": others / ranks,
        "reduce_scatter_block": others / ranks,
        "all_gather": others,  # count_bytes is one shard
        "all_to_all": others / ranks,
        "gather": others,
        "scatter": others / ranks,
        "barrier": 0,
    }
    return count_bytes * factor.get(collective, 1)
