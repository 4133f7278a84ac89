"""Grid, bytes and duration of the kernel that emulates one call."""

from dataclasses import dataclass
from pathlib import Path

from onerank.capture.collective_kernels.network import Network, load_network, uniform
from onerank.converters.nccl import Interconnect, Topology, choose
from onerank.converters.nccl.bus_bandwidth import wire_bytes
from onerank.ir.errors import CaptureError


@dataclass(frozen=True)
class CollectiveEmulation:
    """Whether collectives hold the GPU as on a network, or only leave a mark.

    Attributes:
        network: the network of the job; None leaves a marker of a microsecond for each call.
    """

    network: Network | None = None


def collective_emulation(
    switch: str | None, network: Path | None, busbw_gb_per_s: float | None
) -> CollectiveEmulation:
    """Return how the options emulate collectives.

    Args:
        switch: "on", "off", or None: on where a network is given.
        network: file of the network.
        busbw_gb_per_s: the same bus bandwidth for every group, GB/s.

    Raises:
        CaptureError: both networks are given, or none where one is needed, or it is not usable.
    """
    if network is not None and busbw_gb_per_s is not None:
        raise CaptureError(
            f"--network {network} and --busbw-gb-s {busbw_gb_per_s:g} both describe the network: "
            "give "
            "one of them",
            code="network-given-twice",
        )
    found = load_network(network) if network is not None else None
    found = uniform(busbw_gb_per_s) if busbw_gb_per_s is not None else found
    if switch == "on" and found is None:
        raise CaptureError(
            "--collective-kernels on: how long a collective takes depends on the network: give "
            "--network FILE "
            "or --busbw-gb-s G as well",
            code="network-missing",
        )
    return CollectiveEmulation(None if switch == "off" else found)


@dataclass(frozen=True)
class Traffic:
    """What happens to each byte that a kernel loads. Those from and to peers pass NCCL's buffers.

    Attributes:
        loads_buffer: it is met by one that a peer sent.
        stores: the result is stored.
        stores_buffer: a peer's byte comes in.
    """

    loads_buffer: bool = False
    stores: bool = True
    stores_buffer: bool = True


@dataclass(frozen=True)
class Walk:
    """One pass of a kernel over the call's tensors.

    Attributes:
        peers: traffic of the bytes.
        own: traffic of one part in as many as there are ranks, which begins or ends its way here;
            None: that of the others.
        skips_own: the pass leaves that part out.
    """

    peers: Traffic
    own: Traffic | None = None
    skips_own: bool = False


_PASSES_ON = Traffic()
_RECEIVES = Traffic(loads_buffer=True)
_REDUCES = Traffic(loads_buffer=True, stores=False)
_SENDS = Traffic(stores=False, stores_buffer=False)
_KEEPS = Traffic(stores_buffer=False)

WALKS: dict[str, tuple[Walk, ...]] = {
    "all_reduce": (Walk(_REDUCES, own=_KEEPS), Walk(_PASSES_ON, skips_own=True)),
    "reduce_scatter": (Walk(_RECEIVES, own=_KEEPS),),
    "all_gather": (Walk(_PASSES_ON, own=_KEEPS),),
    "broadcast": (Walk(_PASSES_ON),),
    "reduce": (Walk(_RECEIVES),),
    "all_to_all": (Walk(_RECEIVES, own=_KEEPS),),
    "gather": (Walk(_PASSES_ON),),
    "scatter": (Walk(_PASSES_ON),),
    "send": (Walk(_SENDS),),
    "recv": (Walk(_PASSES_ON),),
    "barrier": (Walk(_PASSES_ON),),
}
"""Passes of each collective over its tensors, after NCCL's ring primitives
(`src/device/all_gather.h`, `reduce_scatter.h`, `all_reduce.h`): a `recvReduceSend` loads its own
element and a peer's, a `recvCopySend` stores what it passes on. Of n parts an all-reduce receives
n - 1 to reduce, the last of which it stores, and n - 1 more to store."""


@dataclass(frozen=True)
class Plan:
    """The kernel that stands in for a call on this GPU.

    Attributes:
        algorithm: "ring", "tree", "nvls", "nvls_tree", "pat", or "p2p" for sends and receives. All
            move their bytes as a ring does: NVLS a tenth more, of an all-reduce among 8.
        protocol: "ll", "ll128" or "simple".
        ranks: of the group.
        channels: blocks, each on a multiprocessor of its own.
        threads: threads of each block.
        bytes_read: bytes it loads from device memory.
        bytes_written: bytes it stores there, those that peers would write included.
        latency_ns: time before the first byte is through.
        transfer_ns: time of the bytes on the wire.
    """

    algorithm: str
    protocol: str
    ranks: int
    channels: int
    threads: int
    bytes_read: int
    bytes_written: int
    latency_ns: int
    transfer_ns: int

    @property
    def duration_ns(self) -> int:
        """Uncontended time on the target network: latency plus transfer."""
        return self.latency_ns + self.transfer_ns


def plan(
    collective: str,
    count_bytes: int,
    group: str,
    ranks: tuple[int, ...],
    *,
    network: Network,
    interconnect: Interconnect,
    scaled: bool = False,
) -> Plan:
    """Return what stands in for a call of a group.

    Args:
        collective: as in `CommCall`.
        count_bytes: as `CommCall.bytes`.
        group: the group's name.
        ranks: its global ranks; rank // node_size is a rank's node.
        network: the network of the job.
        interconnect: what the GPUs are.
        scaled: whether a reduction divides or multiplies as it sums, as AVG does.

    Raises:
        CaptureError: the network has no entry for the group.
    """
    link = network.link(group, len(ranks))
    nodes = len({rank // network.node_size for rank in ranks})
    topology = Topology(len(ranks), nodes, interconnect, network.nvls)
    choice = choose(collective, count_bytes, topology, scaled=scaled)
    latency_ns = 1000 * (choice.latency_us if link.latency_us is None else link.latency_us)
    transfer_ns = wire_bytes(collective, count_bytes, len(ranks)) / link.busbw_gb_per_s
    if collective in link.measured:
        whole_ns = 1000 * link.measured[collective].time_us(count_bytes)
        latency_ns = min(latency_ns, whole_ns)
        transfer_ns = whole_ns - latency_ns
    whole = count_bytes * (len(ranks) if collective == "all_gather" else 1)
    if collective == "scatter":  # this rank's part of it
        whole //= len(ranks)
    kept = len(ranks) if collective == "reduce_scatter" else 1  # a part in so many is stored
    read = written = 0
    for walk in WALKS[collective]:
        own = whole // len(ranks) if walk.own or walk.skips_own else 0
        for part, traffic in ((whole - own, walk.peers), (own, walk.own)):
            if traffic is not None:
                read += part * (1 + traffic.loads_buffer)
                written += part // kept * traffic.stores + part * traffic.stores_buffer
    return Plan(
        algorithm=choice.algorithm,
        protocol=choice.protocol,
        ranks=len(ranks),
        channels=choice.channels,
        threads=choice.threads,
        bytes_read=read,
        bytes_written=written,
        latency_ns=round(latency_ns),
        transfer_ns=round(transfer_ns),
    )
