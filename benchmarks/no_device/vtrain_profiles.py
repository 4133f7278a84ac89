"""Iterations of vTrain: as captures predict their profiles, and as its simulator computes them."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.no_device.megatron_step import (
    NODE,
    VOCABULARY,
    Job,
)
from onerank.ir import Graph, Kind, Phase, Reason

# Bus bandwidth in GB/s of an all-reduce of 2^0 to 2^10 MiB on 2, 4 and 8 A100s of a node, by
# nccl-tests: trace/a100/AR_GPU*_1M_1024M_LUT of vTrain.
BUSBW_GB_PER_S = {
    2: (23.25, 41.01, 69.61, 96.03, 129.65, 146.52, 166.1, 175.28, 184.57, 189.48, 196.89),
    4: (29.82, 56.23, 83.0, 110.79, 141.56, 178.69, 186.2, 201.19, 208.88, 216.45, 221.37),
    8: (19.91, 39.47, 78.06, 113.07, 127.08, 165.1, 202.61, 201.44, 217.68, 224.36, 229.25),
}

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """An iteration of the data, in ms."""

    job: Job
    gpus: int
    measured_ms: float

    @property
    def model(self) -> tuple[int, int]:
        return self.job.hidden, self.job.layers

    @property
    def layout(self) -> str:
        return f"tp {self.job.tp} dp {self.job.dp} pp {self.job.pp}"


@dataclass(frozen=True)
class Profile:
    """Time in ns of each function of vTrain's profile: forward and backward, and optimizer."""

    layer: tuple[float, float]
    embedding: tuple[float, float]
    head: tuple[float, float]
    loss: float
    layer_update: float
    embedding_update: float


@dataclass(frozen=True)
class Launches:
    """Nodes on the device in their order.

    Attributes:
        duration_ns: duration of each.
        called_ns: call of the host.
        function: function of vTrain's.
        multiplies_zeros: whether it is a product with a layer's weights.
    """

    duration_ns: np.ndarray
    called_ns: np.ndarray
    function: list[str]
    multiplies_zeros: np.ndarray


def rows_of(path: Path) -> list[Row]:
    """Return the rows of the data."""
    with path.open(encoding="utf-8-sig") as file:
        texts = list(csv.DictReader(file))
    rows: list[Row] = []
    for text in texts:
        number = {name: int(value) for name, value in text.items() if name != "iteration_ms"}
        job = Job(
            number["hidden"], number["heads"], number["layers"], number["seq"],
            number["micro_batch"], number["global_batch"], number["tp"], number["dp"], number["pp"],
            recompute="full" if number["gpus"] > NODE else "none",
        )  # fmt: skip
        rows.append(Row(job, number["gpus"], float(text["iteration_ms"])))
    return rows


def launches_of(graph: Graph) -> Launches:
    """Return the launches of a re-costed capture of one layer."""
    nodes = graph.nodes
    device = np.flatnonzero(graph.compute & ~graph.mask(Kind.HOST_OP))
    device = device[np.argsort(nodes.start_ns[device], kind="stable")]
    called = np.zeros(len(graph))
    launch = graph.edges.reason == Reason.LAUNCH
    first_ns = nodes.start_ns.min()
    called[graph.edges.target[launch]] = nodes.start_ns[graph.edges.source[launch]] - first_ns
    modules = [graph.node(int(i)).text("module") for i in device]
    in_layer = [module.startswith("layers.") for module in modules]
    function: list[str] = []
    last_forward = max(
        i for i, j in enumerate(device) if in_layer[i] and nodes.phase[j] == Phase.FORWARD
    )
    for i, module in enumerate(modules):
        phase = Phase(int(nodes.phase[device[i]]))
        if phase == Phase.OPTIMIZER:
            function.append("update")
        elif in_layer[i]:
            function.append(f"layer {phase}")
        elif module == "norm":
            function.append("unused")  # vTrain has no node for the last norm
        elif module == "head":
            function.append(f"head {phase}")
        elif phase == Phase.FORWARD:
            function.append("embedding" if i < last_forward else "loss")
        else:
            function.append("later")
    # Of the backward, what follows the layer is the embedding's; the loss's has no node.
    last = max(i for i, name in enumerate(function) if name == f"layer {Phase.BACKWARD}")
    for i, name in enumerate(function):
        if name == "later":
            function[i] = "embedding backward" if i > last else "unused"
    names = [graph.node(int(i)).text("name") for i in device]
    # Without weights queries, keys and values are zero, too.
    products = [
        inside and name in ("aten::mm", "aten::bmm", "aten::baddbmm")
        for inside, name in zip(in_layer, names, strict=True)
    ]
    durations = nodes.duration_ns[device].astype(float)
    return Launches(durations, called[device], function, np.array(products))


def profile_of(
    launches: Launches,
    *,
    host: float,
    kernels: float = 1.0,
    launch_ns: float = 0.0,
    zeros: float = 1.0,
) -> Profile:
    """Return the functions of a step in which each launch waits for the kernel before it.

    Args:
        launches: the step.
        host: factor on the host; 0: kernels only.
        kernels: factor on the kernels.
        launch_ns: time of each launch that nothing hides.
        zeros: factor on products of zeros.
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    updates: list[float] = []
    calls_ns = np.diff(launches.called_ns, prepend=0.0) * host
    start_ns = before_ns = 0.0
    durations_ns = launches.duration_ns * kernels * np.where(launches.multiplies_zeros, zeros, 1.0)
    for duration_ns, call_ns, name in zip(durations_ns, calls_ns, launches.function, strict=True):
        start_ns += max(before_ns, call_ns) + launch_ns
        before_ns = duration_ns
        first.setdefault(name, start_ns)
        last[name] = start_ns + duration_ns
        if name == "update":
            updates.append(duration_ns)
    took = defaultdict(float, {name: last[name] - first[name] for name in first})
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    return Profile(
        (took[f"layer {forward}"], took[f"layer {backward}"]),
        (took["embedding"], took["embedding backward"]),
        (took[f"head {forward}"], took[f"head {backward}"]),
        took["loss"], updates[0], updates[1],
    )  # fmt: skip


def vtrain_ns(job: Job, profile: Profile) -> float:
    """Return the iteration as src/predictor.py of vTrain composes it, without recomputation.

    All-reduces overlap with nothing. A send takes twice the activation at a quarter of 800 Gb/s.
    """
    sent = 2 * job.micro_batch * job.sequence * job.hidden
    reduces = 2 * all_reduce_ns(sent, job.tp)
    layers = job.layers // job.pp
    stages = range(job.pp)
    passes = [
        [
            layers * (profile.layer[way] + reduces)
            + (s == 0) * profile.embedding[way]
            + (s == job.pp - 1) * (profile.head[way] + (way == 0) * profile.loss)
            for s in stages
        ]
        for way in (0, 1)
    ]
    done = one_forward_one_backward(
        job.micro_batches, *passes, send_ns=2 * sent / (800 * 2**30 / 8 / 4) * 1e9
    )
    last_of_first = done[0]
    for s in stages:
        size = 2 * (layers * job.layer_parameters + _ends(job, s))
        done[s] = max(done[s], last_of_first) + all_reduce_ns(size, job.dp)
    updates = [layers * profile.layer_update + (s == 0) * profile.embedding_update for s in stages]
    return max(done) + max(updates)


def _ends(job: Job, stage: int) -> float:
    """Return the parameters of the embeddings and of the head on a stage, without padding."""
    words = VOCABULARY // job.tp * job.hidden
    first = words + job.sequence * job.hidden
    return (stage == 0) * first + (stage == job.pp - 1) * words


def one_forward_one_backward(
    micro_batches: int, forward_ns: Sequence[float], backward_ns: Sequence[float], *, send_ns: float
) -> list[float]:
    """Return when each stage has done its last backward."""
    stages = len(forward_ns)
    order = []
    for s in range(stages):
        ahead = min(stages - 1 - s, micro_batches)
        steady = [
            step for i in range(micro_batches) for step in ((0, i + ahead), (1, i))
            if step[1] < micro_batches
        ]  # fmt: skip
        order.append([(0, i) for i in range(ahead)] + steady)
    done: dict[tuple[int, int, int], float] = {}
    free, place = [0.0] * stages, [0] * stages
    while any(place[s] < len(order[s]) for s in range(stages)):
        for s in range(stages):
            while place[s] < len(order[s]):
                way, i = order[s][place[s]]
                before = (way, i, s - 1 if way == 0 else s + 1)
                if way == 1 and s == stages - 1:
                    before = (0, i, s)
                if before[2] >= 0 and before not in done:
                    break
                ready = done.get(before, 0.0)
                took = forward_ns[s] if way == 0 else backward_ns[s]
                sends = s < stages - 1 if way == 0 else s > 0
                free[s] = max(free[s], ready) + took + sends * send_ns
                done[way, i, s] = free[s]
                place[s] += 1
    return free


def all_reduce_ns(size_bytes: float, ranks: int) -> float:
    """Return the time of an all-reduce on one node, by vTrain's table; 0 for one rank.

    Beyond the table, at 1 GiB, vTrain divides bytes by bus bandwidth, without the ring's factor.
    """
    if ranks == 1:
        return 0.0
    table = BUSBW_GB_PER_S[ranks]
    if size_bytes > 1024 * MIB:
        return size_bytes / MIB / (table[-1] * 1024) * 1e9
    times = [2 * (ranks - 1) / ranks * MIB * 2**i / rate for i, rate in enumerate(table)]
    return float(np.interp(size_bytes / MIB, [2.0**i for i in range(len(times))], times))
