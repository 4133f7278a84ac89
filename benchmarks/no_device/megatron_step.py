"""A training step of Megatron-LM, from captures of one and of two layers on no device.

One micro-batch takes the time of the layers of a stage, which is the difference of the replayed
captures, and on the last stage that of final norm, head and loss. The schedule adds them up:

    stage    = layers / stages * layer
    1F1B     = micro-batches * (stage + head) + (stages - 1) / chunks * stage
    sends    = (micro-batches * chunks + stages - 1) * 2 sends, each exposed
    step     = 1F1B + sends + gradients between replicas, and of the shared embedding + optimizer

A product during a collective of the backward loses a part of the collective's time (`SLOWED`).
Megatron waits for each send and receive (`torch.cuda.synchronize` in p2p_communication.py), so none
overlaps. Chunks are those of its interleaved schedule.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

import onerank
from onerank.ir import Graph, Phase

GPU = "A100"
SCRIPT = Path(__file__).parents[1] / "jobs" / "megatron_gpt.py"
VOCABULARY = 50257
NODE = 8  # GPUs

# Time that products lose to a collective that overlaps them, as a share of the time that the
# collective takes without products. On H200s, a product of 4096 x 14336 x 4096 takes 690 us, and
# 850 to 920 us during collectives of 512 MiB, which take 1.55 to 1.8 times as long during products
# (collectives_under_load.py, 2026-11-22). So products lose 0.32 to 0.44 of the collective's time,
# in six lines of two hosts.
SLOWED = 0.38


@dataclass(frozen=True)
class Job:
    """Sizes of a model, its batches and its layout."""

    hidden: int
    heads: int
    layers: int
    sequence: int
    micro_batch: int
    global_batch: int
    tp: int
    dp: int = 1
    pp: int = 1
    chunks: int = 1
    recompute: Literal["none", "selective", "full"] = "full"
    sequence_parallel: bool = False

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer on one rank."""
        return 12 * self.hidden**2 / self.tp

    @property
    def vocabulary_parameters(self) -> float:
        """Parameters of the embedding on one rank, padded as Megatron pads them."""
        return -(-VOCABULARY // (128 * self.tp)) * 128 * self.hidden


@dataclass(frozen=True)
class Network:
    """Bandwidth and latency of a cluster's links.

    Ranks are placed as Megatron places them: tensor parallelism within a node, then replicas.

    Attributes:
        node_gb_per_s: bus bandwidth of a collective within a node.
        nic_gb_per_s: bandwidth between nodes for each GPU.
        send_ns: latency of a send between nodes.
    """

    node_gb_per_s: float
    nic_gb_per_s: float
    send_ns: float = 20_000

    def busbw_gb_per_s(self, ranks: int, groups: int = 1) -> float:
        """Return the bus bandwidth of a collective of adjacent ranks.

        A ring between nodes enters each node once, through the adapters of all its GPUs, which as
        many groups share as each node has.
        """
        if ranks * groups <= NODE:
            return self.node_gb_per_s
        return min(self.node_gb_per_s, self.nic_gb_per_s * max(1, NODE // groups))


@dataclass(frozen=True)
class Parts:
    """Times in ns of a micro-batch, forward and backward, and of the optimizer."""

    layer_ns: float
    head_ns: float
    embedding_ns: float
    optimizer_ns_per_parameter: float
    low: float  # factors on the step at the ends of its 80% interval
    high: float


def captured(job: Job, folder: Path, *, layers: int, extra: Sequence[str] = ()) -> Graph:
    """Return the capture of a number of layers of a job; `folder` keeps it for later calls."""
    sp = "-sp" * job.sequence_parallel
    name = f"{job.hidden}-{job.heads}-{job.sequence}-{job.micro_batch}-{job.tp}"
    path = folder / f"{name}-{job.recompute}{sp}-{layers}{''.join(extra)}.et"
    if not path.is_file():
        shape = {"hidden": job.hidden, "heads": job.heads, "sequence": job.sequence,
                 "micro-batch": job.micro_batch, "tp": job.tp, "layers": layers,
                 "recompute": job.recompute}  # fmt: skip
        words = [word for key, value in shape.items() for word in (f"--{key}", str(value))]
        words += ["--sequence-parallel"] * job.sequence_parallel
        distributed = () if extra or job.tp == 1 else ("--torchrun", "--tp", str(job.tp))
        command = ("capture", "run", str(SCRIPT), *distributed, "--device", "none", "--like", GPU)
        result = subprocess.run(
            [sys.executable, "-m", "onerank", *command, "-o", str(path), "--", *words, *extra],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        if result.returncode:
            raise SystemExit(f"onerank {' '.join(command)}\n{result.stderr}")
    return onerank.read(path)


def parts_of(job: Job, folder: Path, network: Network, host: str = "typical") -> Parts:
    """Return the parts of a job's micro-batch from captures of one and of two layers."""
    busbw_gb_s = network.busbw_gb_per_s(job.tp)
    captures = [captured(job, folder, layers=layers) for layers in (1, 2)]
    graphs = [onerank.recost(capture, GPU, host=host) for capture in captures]
    optimizer = [_optimizer_ns(graph) for graph in graphs]
    without = [
        _replayed_ns(graph, busbw_gb_s) - optimizer_ns
        for graph, optimizer_ns in zip(graphs, optimizer, strict=True)
    ]
    layer_ns = without[1] - without[0]
    if job.tp > 1:
        serial_ns = [
            _replayed_ns(onerank.recost(capture, GPU, host=host, overlap="off"), busbw_gb_s)
            - optimizer_ns
            for capture, optimizer_ns in zip(captures, optimizer, strict=True)
        ]
        layer_ns += SLOWED * max(0.0, serial_ns[1] - serial_ns[0] - layer_ns)
    head_ns = _head_ns(graphs[0])
    details = graphs[1].job.annotations[-1].details
    compute = float(graphs[1].nodes.duration_ns[graphs[1].compute].sum())
    low, high = (end / compute for end in details["interval"])
    return Parts(
        layer_ns, head_ns, max(0.0, without[0] - layer_ns - head_ns),
        (optimizer[1] - optimizer[0]) / job.layer_parameters, low, high,
    )  # fmt: skip


def _replayed_ns(graph: Graph, busbw_gb_s: float) -> float:
    step = onerank.replay(graph, busbw_gb_s=busbw_gb_s)
    return step.steady_state.step_ns if step.steady_state else step.step_time_ns


def _optimizer_ns(graph: Graph) -> float:
    nodes = graph.nodes
    return float(nodes.duration_ns[graph.compute & (nodes.phase == Phase.OPTIMIZER)].sum())


def _head_ns(graph: Graph) -> float:
    """Return the time of the kernels between the layers' forward and their backward."""
    nodes = graph.nodes
    in_layer = np.array(
        [graph.node(i).text("module").startswith("layers.") for i in range(len(graph))]
    )
    ends = [
        nodes.start_ns[in_layer & graph.compute & (nodes.phase == phase)]
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    between = graph.compute & (nodes.start_ns > ends[0].max()) & (nodes.start_ns < ends[1].min())
    return float(nodes.duration_ns[between].sum())


def step_ns(job: Job, parts: Parts, network: Network) -> float:
    """Return the step of a job in ns."""
    layers = job.layers / job.pp
    stage = layers * parts.layer_ns
    micro_batches = job.micro_batches
    total = micro_batches * (stage + parts.head_ns) + (job.pp - 1) / job.chunks * stage
    parameters = layers * job.layer_parameters + job.vocabulary_parameters
    total += parts.optimizer_ns_per_parameter * parameters
    if job.pp == 1:
        total += micro_batches * parts.embedding_ns
    else:
        # Each tensor-parallel rank sends its part of an activation.
        sent = 2 * job.micro_batch * job.sequence * job.hidden / job.tp
        nodes = job.tp * job.dp * job.pp > NODE
        send = network.send_ns + sent / (network.nic_gb_per_s if nodes else network.node_gb_per_s)
        total += (micro_batches * job.chunks + job.pp - 1) * 2 * send
        # First and last stage hold the embedding and add up its gradients, in 32 bits.
        rate = network.nic_gb_per_s if nodes else network.node_gb_per_s
        total += 4 * job.vocabulary_parameters / rate
    return total + _replicas_ns(job, parameters, network)


def _replicas_ns(job: Job, parameters: float, network: Network) -> float:
    """Return the time to add up fp16 gradients between replicas, after the last backward."""
    if job.dp == 1:
        return 0.0
    wire = 2 * (job.dp - 1) / job.dp * 2 * parameters
    return wire / network.busbw_gb_per_s(job.dp, groups=job.tp)
