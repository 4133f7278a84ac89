"""What NCCL would launch for a call: algorithm, protocol, channels, threads, and its latency.

After NCCL 2.28.9: the cost model and its constants from `src/graph/tuning.cc`
(`ncclTopoTuneModel`, `ncclTopoGetAlgoTime`), the choice, channels and threads from
`src/enqueue.cc` (`topoGetAlgoInfo`, `scheduleCollTasksToPlan`, `scheduleP2pTasksToPlan`), the
channels of a topology from `src/graph/search.cc`, `connect.cc` and `paths.cc`.

Held for: GPUs of one kind behind NVSwitch, one NIC per GPU between nodes, the LL limits of an
Intel host, no tuner plugin, no environment overrides. NVLS and CollNet are not modelled: where they
are on, NCCL may take them for large reductions, with fewer channels than are given here. On four
H200 with NCCL 2.28.9 and NVLS off, grid and block of 132 calls of six kinds from 1 KiB to 256 MiB
were those given here.
"""

import math
from dataclasses import dataclass

WARP = 32
MAX_THREADS = 640
MIN_THREADS = 128
SIMPLE_THREADS = 512
LEAST_TRAFFIC_PER_CHANNEL = 16 << 10
POINT_TO_POINT = frozenset({"send", "recv", "all_to_all", "gather", "scatter"})
"""What NCCL does with sends and receives, in one kernel."""

ALGORITHMS = ("tree", "ring")
PROTOCOLS = ("ll", "ll128", "simple")

_BASE_LATENCY_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
_NVLINK_LATENCY_US = {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)}
_NET_LATENCY_US = {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)}
_NET_OVERHEAD_US = 1.0
_LL_THRESHOLD = 16 << 10  # NCCL_P2P_LL_THRESHOLD, bytes of a channel
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


@dataclass(frozen=True)
class Choice:
    """What NCCL launches: a grid of `channels` blocks of `threads`. `latency_us` is its model's."""

    algorithm: str
    protocol: str
    channels: int
    threads: int
    latency_us: float


def choose(collective: str, count_bytes: int, topology: Topology) -> Choice:
    """Return NCCL's choice for one call.

    Args:
        collective: "all_reduce", "all_gather", "send" and so on, as torch names them.
        count_bytes: the input of this rank: an all-gather's own shard, a
            reduce-scatter's whole input.
        topology: where the group's ranks sit.
    """
    if topology.ranks == 1:
        return Choice("ring", "simple", 1, MIN_THREADS, _BASE_LATENCY_US["ring"][2])
    if collective in POINT_TO_POINT:
        return _point_to_point(collective, count_bytes, topology)
    if collective == "barrier":  # an all-reduce of one element
        collective, count_bytes = "all_reduce", 4
    whole = count_bytes * (topology.ranks if collective == "all_gather" else 1)
    times = {
        (algorithm, protocol): time
        for algorithm in ALGORITHMS
        for protocol in PROTOCOLS
        if (time := _time_us(collective, algorithm, protocol, whole, topology)) is not None
    }
    algorithm, protocol = min(times, key=lambda key: times[key])
    channels, threads = _grid(whole, algorithm, protocol, topology)
    used = _channels_used(collective, whole, protocol, channels, topology)
    latency = _latency_us(collective, algorithm, protocol, topology) - _launch_us(protocol)
    return Choice(algorithm, protocol, used, max(threads, MIN_THREADS), latency)


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


def _time_us(
    collective: str, algorithm: str, protocol: str, whole: int, topology: Topology
) -> float | None:
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


def _grid(whole: int, algorithm: str, protocol: str, topology: Topology) -> tuple[int, int]:
    """Return (most channels, threads): fewer where a thread would get too little."""
    channels = topology.channels
    threads = {"ll": 512, "ll128": MAX_THREADS, "simple": SIMPLE_THREADS}[protocol]
    per_thread = {"ll": 8, "ll128": 8, "simple": 64}[protocol]
    if (algorithm, protocol) == ("ring", "ll"):
        per_thread *= topology.ranks
    while whole < channels * threads * per_thread and channels > 1:
        channels -= 1
    while whole < channels * threads * per_thread and threads % 128 == 0:
        threads //= 2
    if algorithm == "tree":
        return channels, MAX_THREADS
    if protocol == "simple":
        threads += WARP  # one more to signal
    return channels, max(threads, 3 * WARP)


def _channels_used(
    collective: str, whole: int, protocol: str, channels: int, topology: Topology
) -> int:
    """Deal the bytes out to the channels in cells; the last channels may get none."""
    count, per_byte = whole, 1
    if collective == "all_reduce":
        per_byte = 2
    elif collective in ("all_gather", "reduce_scatter"):
        count, per_byte = whole // topology.ranks, topology.ranks
    if protocol == "ll":
        per_byte *= 4
    cell = _up(_up(LEAST_TRAFFIC_PER_CHANNEL, per_byte), 16) * 16
    cells = _up(count, cell)
    traffic = max(LEAST_TRAFFIC_PER_CHANNEL, count * per_byte // channels)
    per_channel = max(1, min(cells, _up(traffic, cell * per_byte)))
    return max(1, min(channels, _up(cells, per_channel)))


def _point_to_point(collective: str, count_bytes: int, topology: Topology) -> Choice:
    """Return the grid of a send, a receive, or of all those that make up a collective."""
    channels = _power_of_two(topology.channels)
    most = 2
    if topology.nodes == 1:
        most = min(channels, _power_of_two(2 * generation(topology.capability).links))
    least = most
    while least * topology.ranks > channels and least > 1:
        least //= 2
    size = count_bytes // topology.ranks if collective == "all_to_all" else count_bytes
    protocol = "ll" if size <= most * _LL_THRESHOLD else "simple"
    used = _parts(size, protocol, least, most, topology)
    if collective not in ("send", "recv"):  # one to each peer, and a copy of the own part
        own = _parts(size, "simple", least, most, topology)
        used = min(channels, used * (topology.ranks - 1) + own)
    place = PROTOCOLS.index(protocol)
    hop = (_NVLINK_LATENCY_US if topology.nodes == 1 else _NET_LATENCY_US)["ring"][place]
    latency = _BASE_LATENCY_US["ring"][place] + hop - _launch_us(protocol)
    return Choice("p2p", protocol, used, MAX_THREADS, latency)


def _parts(size: int, protocol: str, least: int, most: int, topology: Topology) -> int:
    """Return the channels that one send or receive is split over."""
    step = 64 << 10 if protocol == "ll" else (512 << 10 if topology.nodes == 1 else 128 << 10)
    smallest, largest = (step // 8, step * 32) if topology.nodes == 1 else (step // 2, step)
    used = max(1, min(least, _up(size, smallest)))
    part = max(smallest, _up(size, used))
    while part > largest and used <= most // 2:
        used *= 2
        part = _up(size, used)
    return used


def _launch_us(protocol: str) -> float:
    """Return what the model's latency holds beside the kernel, seen where the kernel is short."""
    return _LL_LAUNCH_US if protocol == "ll" else 0.0


def _up(amount: int, unit: int) -> int:
    return -(-amount // unit)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
