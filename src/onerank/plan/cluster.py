"""The job of a plan: a model's training script, a cluster, a batch, and the choices to vary."""

from dataclasses import dataclass
from pathlib import Path

from onerank.analysis.contention import CallShape
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.hosts.host import TYPICAL
from onerank.converters.nccl import Choice, Topology, choose, interconnect_of, wire_bytes
from onerank.ir.errors import TargetError
from onerank.plan.layouts import Choices

CAPTURED_MICRO_BATCHES = 3
"""Micro-batches of a captured step: the first writes gradients, the last synchronises them, and
those between do neither."""


PLACEHOLDERS = ("seq", "micro_batch", "micro_batches", "recompute", "variant")
"""Fields of a layout that any script takes in its arguments."""

TORCHRUN_PLACEHOLDERS = ("tp", "cp", "dp", "ep")
"""Further fields of a layout, for scripts that distribute themselves."""


@dataclass(frozen=True, slots=True)
class TrainingScript:
    """A training script and its arguments.

    Attributes:
        script: the script.
        arguments: its arguments. Names of `PLACEHOLDERS` in braces stand for the values of a
            layout; others are as written.
        digest: of the files that decide a capture of the script.
        torchrun: whether the script distributes itself: torchrun starts it.
    """

    script: Path
    arguments: tuple[str, ...]
    digest: str = ""
    torchrun: bool = False


@dataclass(frozen=True, slots=True)
class ClusterLink:
    """Link between GPUs of a cluster.

    Attributes:
        busbw_gb_per_s: bus bandwidth of a large collective, GB/s, as nccl-tests prints it.
        latency_us: time of an empty collective; None: by NCCL's model.
    """

    busbw_gb_per_s: float
    latency_us: float | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs and the links between them.

    Attributes:
        gpu: a name of `onerank gpus`, or a description's path.
        nodes: number of nodes.
        gpus_per_node: GPUs of a node.
        intra_node: link of GPUs of one node.
        inter_node: link of two GPUs of different nodes: one network interface of one GPU.
        memory_bytes: memory of a GPU: of the configuration, or of the GPU's description.
        price_per_gpu_hour: price of a GPU for an hour; None: not known.
        host: a shipped description of a host, or a description's path.
    """

    gpu: str
    nodes: int
    gpus_per_node: int
    intra_node: ClusterLink
    inter_node: ClusterLink
    memory_bytes: int
    price_per_gpu_hour: float | None = None
    host: str = TYPICAL

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """The input of a plan.

    Attributes:
        model: what is trained.
        cluster: where.
        global_batch: sequences of a step.
        choices: what may vary.
    """

    model: TrainingScript
    cluster: Cluster
    global_batch: int
    choices: Choices


# Copies by the copy engine. Four H100s that copy 48 and 96 MiB from each other at once take 138.6
# and 272.7 us: 4.5 us and 375 GB/s. NCCL's all-gather of 512 MiB, whose rate is that of a link,
# reaches 332 GB/s there (2026-11-27-rings-async-tp-4xh100).
_COPY_LATENCY_NS = 4_500.0
_COPY_OVER_NCCL = 375 / 332

# A barrier of symmetric memory among four H100s, one after another: 6.8 us (the same file). Its
# kernel and the gap before the next one do not depend on the link's rate. Four to eight ranks are
# assumed to take the same: a thread for each other rank signals and waits.
_SYMMETRIC_BARRIER_NS = 6_800.0


@dataclass(frozen=True, slots=True)
class ClusterNetwork:
    """Times of communication among ranks of a cluster, which fill its nodes in order.

    A group within a node has the rate of the node's link. A group across nodes is as fast as NCCL's
    hierarchical rings: each of its GPUs of a node uses its own network interface, up to the rate
    within the node.

    Attributes:
        gpus_per_node: ranks of a node.
        intra_node: link within a node.
        inter_node: link of a GPU to other nodes.
        capability: compute capability of the GPUs, for NCCL's latency; None: links have latencies.
        gpu: their name.
    """

    gpus_per_node: int
    intra_node: ClusterLink
    inter_node: ClusterLink
    capability: int | None = None
    gpu: str = ""

    def time_ns(self, collective: str, size_bytes: int, ranks: tuple[int, ...]) -> float:
        """Return the time of a call.

        Args:
            collective: name in lower case; "send" and "recv" for messages.
            size_bytes: input of one rank.
            ranks: global ranks of the group; of a message, both ends.

        Raises:
            TargetError: the link has no latency, and NCCL's needs a compute capability.
        """
        if len(ranks) < 2:
            return 0.0
        link, rate = self._link(ranks)
        latency_us = link.latency_us
        if latency_us is None:
            if self.capability is None:
                raise TargetError(
                    f"{self.gpu or 'the GPU'}: the latency of collectives is unknown: NCCL's "
                    "follows from a compute capability, and the description has none\n"
                    "  set latency_us of the cluster's links, or compute_capability",
                    code="cluster-latency-unknown",
                )
            latency_us = self._launch(self.capability, collective, size_bytes, ranks).latency_us
        # Bytes over GB/s are nanoseconds.
        return latency_us * 1e3 + wire_bytes(collective, size_bytes, len(ranks)) / rate

    def copy_ns(self, size_bytes: int, ranks: tuple[int, ...]) -> float:
        """Return the time in which each rank of a group copies `size_bytes` from another one."""
        # Bytes over GB/s are nanoseconds. No rank keeps a part, unlike in an all-to-all.
        return _COPY_LATENCY_NS + size_bytes / (_COPY_OVER_NCCL * self._link(ranks)[1])

    def symmetric_barrier_ns(self, ranks: tuple[int, ...]) -> float:
        """Return the time of a barrier of symmetric memory for which no rank is late."""
        return _SYMMETRIC_BARRIER_NS if len(ranks) > 1 else 0.0

    def call_shape(
        self, collective: str, size_bytes: int, ranks: tuple[int, ...]
    ) -> CallShape | None:
        """Return how a call occupies its GPU; None for one rank, or without compute capability.

        Args:
            collective: as for `time_ns`.
            size_bytes: input of one rank.
            ranks: global ranks of the group.
        """
        if len(ranks) < 2 or self.capability is None:
            return None
        launch = self._launch(self.capability, collective, size_bytes, ranks)
        return CallShape(launch.channels, self.intra_node.busbw_gb_per_s / self._link(ranks)[1])

    @property
    def has_persistent_products(self) -> bool:
        """Whether cuBLAS's products on the GPUs are persistent kernels, as measured on Hopper's."""
        return self.capability is not None and 90 <= self.capability < 100

    def _link(self, ranks: tuple[int, ...]) -> tuple[ClusterLink, float]:
        """Return the link that limits a group, and its bus bandwidth in GB/s."""
        nodes = self._nodes(ranks)
        link, rate = self.intra_node, self.intra_node.busbw_gb_per_s
        if nodes > 1:
            link = self.inter_node
            interfaces = max(1, len(ranks) // nodes)
            rate = min(rate, interfaces * link.busbw_gb_per_s)
        return link, rate

    def _launch(
        self, capability: int, collective: str, size_bytes: int, ranks: tuple[int, ...]
    ) -> Choice:
        joined = interconnect_of(capability, self.gpu)
        return choose(collective, size_bytes, Topology(len(ranks), self._nodes(ranks), joined))

    def _nodes(self, ranks: tuple[int, ...]) -> int:
        return len({rank // self.gpus_per_node for rank in ranks})


def network_of(cluster: Cluster, gpu: Gpu) -> ClusterNetwork:
    """Return the network of a cluster of a GPU.

    Raises:
        TargetError: a link that groups use has no latency, and NCCL's needs a compute capability.
    """
    network = ClusterNetwork(
        cluster.gpus_per_node,
        cluster.intra_node,
        cluster.inter_node,
        gpu.capability,
        gpu.name,
    )
    # An unknown latency is an error when the network is described, not at its first collective.
    for ranks in {min(cluster.gpus, cluster.gpus_per_node), cluster.gpus}:
        network.time_ns("all_reduce", 0, tuple(range(ranks)))
    return network
