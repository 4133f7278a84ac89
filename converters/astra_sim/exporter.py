"""Export a graph as a directory that ASTRA-sim runs as it is."""

import re
from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from pathlib import Path

from onerank.converters.astra_sim import configuration
from onerank.converters.astra_sim.encode import Workload, write_ranks
from onerank.converters.astra_sim.expand import layout_of, number_groups, place
from onerank.converters.astra_sim.lower import lower
from onerank.converters.astra_sim.notes import count_left_out, notes_on, timed_compute
from onerank.converters.astra_sim.peers import check_peers, tag_of
from onerank.converters.astra_sim.publish import check_target, published
from onerank.ir import Graph, Kind
from onerank.ir.errors import ExportError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Export:
    """What was exported.

    Attributes:
        directory: where it lies.
        files: names of its files, sorted.
        ranks: number of ranks.
        nodes: nodes per rank.
        gpu_time_ns: summed GPU compute per rank.
        groups: number of each process group -> its ranks.
        left_out: what of the graph is not in the workload -> how many nodes.
        notes: sentences a reader of the simulator's figures should know.
    """

    directory: Path
    files: list[str]
    ranks: int
    nodes: int
    gpu_time_ns: int
    groups: dict[int, tuple[int, ...]]
    left_out: dict[str, int]
    notes: list[str]


def export(
    graph: Graph,
    directory: str | Path,
    *,
    name: str = "workload",
    ranks: int | None = None,
    bandwidth_gbps: float = configuration.BANDWIDTH_GBPS,
    latency_ns: float = configuration.LATENCY_NS,
    memory_gbps: float = configuration.MEMORY_GBPS,
) -> Export:
    """Write the step that `graph` holds for every rank of its job, ready for ASTRA-sim.

    The directory gets `NAME.R.et` (microseconds) and `NAME_roofline.R.et` (exact) for each rank
    R, the groups, system, network, memory and logging files, and `run.sh`. It appears complete
    and checked, or not at all; an earlier export in its place is replaced.

    Args:
        graph: one rank's step, with GPU compute and communication.
        directory: where to write.
        name: prefix of the traces.
        ranks: number of ranks; needed only for a graph whose job has no world.
        bandwidth_gbps: gigabytes (10**9 bytes) per second, of each rank in each direction.
        latency_ns: from one rank to another.
        memory_gbps: gigabytes per second of a GPU's memory, for the reductions of collectives.

    Raises:
        ExportError: the graph cannot be run on all ranks alike, an argument is wrong, or the
            directory holds something else.
        GraphError: the graph has a cycle.
        OSError: the directory cannot be written.
    """
    directory = Path(directory)
    _check_arguments(name, bandwidth_gbps, latency_ns, memory_gbps)
    check_target(directory)
    _check_kinds(graph)
    layout = layout_of(graph.job, ranks)
    places, dropped = place(graph, layout)
    step = lower(graph, _lanes(graph, set(places)))
    if not step.index:
        raise ExportError(f"none of the graph's {len(graph)} nodes takes GPU time or moves bytes")
    check_peers(graph, step, places, layout)
    groups = number_groups(layout, {placed.axis for placed in places.values()})
    workload = Workload(graph, step, places, layout, groups)
    left_out = count_left_out(graph) | dropped
    with published(directory) as made:
        write_ranks(workload, made / name, roofline=False)
        write_ranks(workload, made / f"{name}_roofline", roofline=True)
        for file, text in {
            configuration.GROUPS: configuration.groups(groups),
            "system.json": configuration.system(memory_gbps, roofline=False),
            "system_roofline.json": configuration.system(memory_gbps, roofline=True),
            "network.yml": configuration.network(layout.ranks, bandwidth_gbps, latency_ns),
            "memory.json": configuration.memory(),
            "logging.toml": configuration.logging(),
            configuration.SCRIPT: configuration.script(name, layout.ranks),
        }.items():
            (made / file).write_text(text, encoding="utf-8")
        (made / configuration.SCRIPT).chmod(0o755)
    return Export(
        directory=directory,
        files=sorted(path.name for path in directory.iterdir()),
        ranks=layout.ranks,
        nodes=len(step),
        gpu_time_ns=int(graph.nodes.duration_ns[timed_compute(graph)].sum()),
        groups=groups,
        left_out={what: count for what, count in left_out.items() if count},
        notes=[
            *notes_on(workload),
            f"Assumed: one switch, {bandwidth_gbps} GB/s and {latency_ns} ns between any two "
            f"ranks, {memory_gbps} GB/s of memory.",
        ],
    )


def _check_arguments(
    name: str, bandwidth_gbps: float, latency_ns: float, memory_gbps: float
) -> None:
    if not _NAME.fullmatch(name):
        raise ExportError(f"the name {name!r} must be letters, digits, '.', '_' and '-'")
    if name.endswith("_roofline"):
        raise ExportError(f"the name {name!r} must not end in _roofline; the exact traces' do")
    if not 0 < bandwidth_gbps < inf or not 0 < memory_gbps < inf:
        raise ExportError(
            f"the bandwidths are {bandwidth_gbps} GB/s between ranks and {memory_gbps} GB/s of "
            "memory; both must be more than 0"
        )
    if not 0 <= latency_ns < inf:
        raise ExportError(f"the latency is {latency_ns} ns; it must be 0 or more")


def _check_kinds(graph: Graph) -> None:
    if graph.mask(Kind.HOST_OP).any() and not graph.gpu_compute.any():
        raise ExportError(
            "the graph holds no GPU time: it has host operations and no GPU node. If it was "
            "captured on a CPU, annotate it for a GPU first: annotate --target H100 ..."
        )
    memory = graph.mask(Kind.MEM_LOAD, Kind.MEM_STORE).nonzero()[0].tolist()
    if memory:
        node = graph.node(memory[0])
        raise ExportError(
            f"node {node.id} ({node.name!r}) is a {node.kind.name} ({len(memory)} in all): with "
            "memory nodes ASTRA-sim loses a run's statistics; leave them out of the graph"
        )


def _lanes(graph: Graph, communications: set[int]) -> list[Hashable | None]:
    """Return what each node runs in line with; None for nodes that do not reach ASTRA-sim.

    A rank of ASTRA-sim runs one collective or send at a time. In one fixed order, the same on
    all ranks, they cannot lock each other out.
    """
    lanes: list[Hashable | None] = [None] * len(graph)
    for index in timed_compute(graph).nonzero()[0].tolist():
        lanes[index] = ("stream", int(graph.nodes.stream[index]))
    for index in communications:
        node = graph.node(index)
        if node.kind is Kind.RECV:
            lanes[index] = (node.value("comm_src"), tag_of(node), node.value("comm_bytes"))
        else:
            lanes[index] = "communication"
    return lanes
