"""Grid, bytes and duration of the kernel that emulates one call."""

from dataclasses import dataclass
from pathlib import Path

from onerank.capture.collective_kernels.network import Network, load_network, uniform
from onerank.converters.nccl import Interconnect, Topology, choose, wire_bytes
from onerank.ir.errors import CaptureError


@dataclass(frozen=True)
class CollectiveEmulation:
    """How collectives run on the GPU: paced as on the job's network, or as markers.

    Attributes:
        network: the network of the job; None launches a marker of one microsecond for each call.
    """

    network: Network | None = None


def collective_emulation(
    switch: str | None, network: Path | None, busbw_gb_per_s: float | None
) -> CollectiveEmulation:
    """Return the emulation that the command-line options describe.

    Args:
        switch: "on", "off", or None: on if a network is specified.
        network: network file.
        busbw_gb_per_s: bus bandwidth of every group, GB/s.

    Raises:
        CaptureError: two networks are specified, or none for "on", or the network is invalid.
    """
    if network is not None and busbw_gb_per_s is not None:
        raise CaptureError(
            f"--network {network} and --busbw-gb-s {busbw_gb_per_s:g} both describe the network: "
            "use one of them",
            code="network-given-twice",
        )
    job_network = load_network(network) if network is not None else None
    if busbw_gb_per_s is not None:
        job_network = uniform(busbw_gb_per_s)
    if switch == "on" and job_network is None:
        raise CaptureError(
            "--collective-kernels on needs the network, which determines the duration of "
            "collectives: add --network FILE or --busbw-gb-s G",
            code="network-missing",
        )
    return CollectiveEmulation(None if switch == "off" else job_network)


@dataclass(frozen=True)
class Traffic:
    """Memory accesses for each byte that a kernel loads; NCCL's buffers contain peers' bytes.

    Attributes:
        loads_buffer: it is combined with a byte from the receive buffer.
        stores: the result is stored.
        stores_buffer: a peer writes a byte into the receive buffer.
    """

    loads_buffer: bool = False
    stores: bool = True
    stores_buffer: bool = True


@dataclass(frozen=True)
class TensorPass:
    """One pass of a kernel over the call's tensors, which have one part for each rank.

    Attributes:
        peers: traffic of the other ranks' parts.
        local: traffic of this rank's part, where the ring begins or ends; None: as `peers`.
        skips_local: the pass excludes this rank's part.
    """

    peers: Traffic
    local: Traffic | None = None
    skips_local: bool = False


_FORWARD = Traffic()
_RECEIVE = Traffic(loads_buffer=True)
_REDUCE = Traffic(loads_buffer=True, stores=False)
_SEND = Traffic(stores=False, stores_buffer=False)
_KEEP = Traffic(stores_buffer=False)

# After NCCL's ring primitives (`src/device/all_gather.h`, `reduce_scatter.h`, `all_reduce.h`): a
# `recvReduceSend` loads a local element and a peer's, a `recvCopySend` stores what it forwards. Of
# n parts an all-reduce receives n - 1 to reduce, the last of which it stores, and n - 1 to store.
PASSES: dict[str, tuple[TensorPass, ...]] = {
    "all_reduce": (TensorPass(_REDUCE, local=_KEEP), TensorPass(_FORWARD, skips_local=True)),
    "reduce_scatter": (TensorPass(_RECEIVE, local=_KEEP),),
    "all_gather": (TensorPass(_FORWARD, local=_KEEP),),
    "broadcast": (TensorPass(_FORWARD),),
    "reduce": (TensorPass(_RECEIVE),),
    "all_to_all": (TensorPass(_RECEIVE, local=_KEEP),),
    "gather": (TensorPass(_FORWARD),),
    "scatter": (TensorPass(_FORWARD),),
    "send": (TensorPass(_SEND),),
    "recv": (TensorPass(_FORWARD),),
    "barrier": (TensorPass(_FORWARD),),
}
"""Passes of each collective over its tensors."""


@dataclass(frozen=True)
class LaunchPlan:
    """The kernel that emulates a call on this GPU.

    Attributes:
        algorithm: "ring", "tree", "nvls", "nvls_tree", "pat", or "p2p" for sends and receives. The
            traffic is a ring's for all of them; NVLS would move a tenth more for an all-reduce of
            8 ranks.
        protocol: "ll", "ll128" or "simple".
        ranks: size of the group.
        channels: number of blocks, one per multiprocessor.
        threads: threads of each block that move bytes.
        bytes_read: bytes loaded from device memory.
        bytes_written: bytes stored there, including those that peers would write.
        latency_ns: time until the first byte arrives.
        transfer_ns: time of the bytes on the network.
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


def plan_launch(
    collective: str,
    count_bytes: int,
    group: str,
    ranks: tuple[int, ...],
    *,
    network: Network,
    interconnect: Interconnect,
    scaled: bool = False,
) -> LaunchPlan:
    """Return the grid, traffic and duration of the kernel that emulates a call.

    Args:
        collective: as in `CommCall`.
        count_bytes: as `CommCall.bytes`.
        group: the group's name.
        ranks: its global ranks; rank // node_size is a rank's node.
        network: the network of the job.
        interconnect: the GPU's interconnect, as NCCL's tuning distinguishes them.
        scaled: whether a reduction also scales, as AVG and PREMUL_SUM do.

    Raises:
        CaptureError: the network has no entry for the group.
    """
    link = network.link(group, len(ranks))
    nodes = len({rank // network.node_size for rank in ranks})
    topology = Topology(len(ranks), nodes, interconnect, network.nvls)
    choice = choose(collective, count_bytes, topology, scaled=scaled)
    latency_ns = 1000 * (choice.latency_us if link.latency_us is None else link.latency_us)
    # Bytes over GB/s are nanoseconds.
    transfer_ns = wire_bytes(collective, count_bytes, len(ranks)) / link.busbw_gb_per_s
    if collective in link.measured:
        measured_ns = 1000 * link.measured[collective].time_us(count_bytes)
        # Measured times contain the latency; only their sum is known.
        latency_ns = min(latency_ns, measured_ns)
        transfer_ns = measured_ns - latency_ns
    read, written = _memory_traffic(collective, count_bytes, len(ranks))
    return LaunchPlan(
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


def _memory_traffic(collective: str, count_bytes: int, ranks: int) -> tuple[int, int]:
    """Return the bytes that a collective reads from and writes to this rank's device memory.

    Args:
        collective: as in `CommCall`.
        count_bytes: as `CommCall.bytes`.
        ranks: ranks of the group.
    """
    total = count_bytes * (ranks if collective == "all_gather" else 1)
    # `count_bytes` of a scatter are all ranks' parts, and a rank moves one of them.
    if collective == "scatter":
        total //= ranks
    # A reduce-scatter loads every part and stores only this rank's.
    loads_per_store = ranks if collective == "reduce_scatter" else 1
    read = written = 0
    for tensor_pass in PASSES[collective]:
        separate = tensor_pass.local or tensor_pass.skips_local
        local = total // ranks if separate else 0
        for part, traffic in ((total - local, tensor_pass.peers), (local, tensor_pass.local)):
            if traffic is not None:
                read += part * (1 + traffic.loads_buffer)
                written += part // loads_per_store * traffic.stores + part * traffic.stores_buffer
    return read, written
