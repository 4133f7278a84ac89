"""Select the algorithm, protocol and grid that NCCL launches for a call.

Follows `src/enqueue.cc` of NCCL 2.28.9 (`topoGetAlgoInfo`, `scheduleCollTasksToPlan`,
`scheduleP2pTasksToPlan`).
"""

from dataclasses import dataclass

from onerank.converters.nccl.topology import Topology, generation
from onerank.converters.nccl.tuning import (
    ALGORITHMS,
    PROTOCOLS,
    kernel_latency_us,
    lone_latency_us,
    point_to_point_latency_us,
    time_us,
)

# Constants of NCCL 2.28.9, which a newer NCCL may change.
_WARP = 32
_MAX_THREADS = 640  # NCCL_MAX_NTHREADS
_MIN_THREADS = 128
_SIMPLE_THREADS = 512  # NCCL_SIMPLE_MAX_NTHREADS
_LEAST_TRAFFIC_PER_CHANNEL = 16 << 10  # of `scheduleCollTasksToPlan`
_POINT_TO_POINT = frozenset({"send", "recv", "all_to_all", "gather", "scatter"})
"""Calls that NCCL builds from sends and receives in one kernel."""
_NVLS = frozenset({"nvls", "nvls_tree"})
_UNSCALED = _NVLS | {"pat"}
"""Algorithms without AVG and PREMUL_SUM: NVSwitches sum without scaling, and so does PAT."""
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
    if topology.ranks == 1:
        return Choice("ring", "simple", 1, _MIN_THREADS, lone_latency_us())
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
        threads += _WARP  # the simple protocol has one more warp, which signals
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
