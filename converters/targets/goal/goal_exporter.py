"""Export graphs as the text of a GOAL schedule: a block of operations for each rank.

`calc` occupies a cpu for nanoseconds, `send` and `recv` move bytes; `requires` waits for the end of
another operation, `irequires` for its start (Hoefler, Siebert, Lumsdaine 2009; the dialect that
`txt2bin` of LogGOPSim and ATLAHS reads). Each stream is a cpu, and communication has separate cpus.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from onerank.converters.expand.host_delays import NAME, insert_host_delays
from onerank.converters.expand.pipeline import RankGraph
from onerank.converters.expand.ranks import check_all_equal
from onerank.converters.nccl import H100, Interconnect
from onerank.converters.targets.expand_symmetry import layout_of
from onerank.converters.targets.goal.collective_algorithms import Call
from onerank.converters.targets.goal.emit_rank import Part, RankBlock, Tags, nodes_of, part_of
from onerank.converters.targets.lower import NO_IDLE_TIME, check_peers
from onerank.converters.targets.uneven_all_to_all import UNEVEN, levelled
from onerank.ir import Graph, Kind
from onerank.ir.atomic_write import replacing
from onerank.ir.errors import ExportError

GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Export:
    """What was exported.

    Attributes:
        path: the file.
        ranks: number of ranks.
        operations: lines that calculate, send or receive, of all ranks.
        gpu_time_ns: summed GPU compute per rank, of the rank with most; with host time its waits
            for the host too.
        cpus: streams and lanes of communication, of the rank with most.
        algorithms: collective and algorithm -> calls of the rank with most.
        left_out: what of the graph is not in the schedule -> how many nodes.
        notes: sentences a reader of the simulator's figures should know.
    """

    path: Path
    ranks: int
    operations: int
    gpu_time_ns: int
    cpus: int
    algorithms: dict[str, int]
    left_out: dict[str, int]
    notes: list[str]


def export(
    graph: Graph,
    path: str | Path,
    *,
    ranks: int | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
    interconnect: Interconnect = H100,
    host_time: bool = False,
    notes: Sequence[str] = (),
) -> Export:
    """Write the step that `graph` holds for every rank of its job.

    Args:
        graph: one rank's step, with GPU compute and communication.
        path: file to write; it appears complete, or not at all.
        ranks: number of ranks; needed only for a graph whose job has no world.
        gpus_per_node: consecutive ranks that share a node.
        interconnect: the GPUs as NCCL sees them; its choices depend on them.
        host_time: let the GPU wait for its host as it did, see `insert_host_delays`; the host is a
            cpu.
        notes: further notes of the export.

    Raises:
        ExportError: the graph cannot represent all ranks.
        GraphError: the graph has a cycle.
        OSError: the file cannot be written.
    """
    check_all_equal(graph.job)
    layout = layout_of(graph.job, ranks)
    idle = f"{NO_IDLE_TIME}."
    if host_time:
        graph, idle = insert_host_delays(graph)
    part = part_of(graph, layout, range(layout.ranks))
    check_peers(graph, part.step, part.places, layout)
    return _write([part], Path(path), gpus_per_node, interconnect, [*notes, idle])


def export_ranks(
    made: Sequence[RankGraph],
    path: str | Path,
    *,
    gpus_per_node: int = GPUS_PER_NODE,
    interconnect: Interconnect = H100,
    notes: Sequence[str] = (),
) -> Export:
    """Write the steps of a pipeline's ranks, each for the ranks it holds for; else as `export`.

    Args:
        made: graphs that together hold for every rank of one world.
        path: as for `export`.
        gpus_per_node: as for `export`.
        interconnect: as for `export`.
        notes: as for `export`.

    Raises:
        ExportError: as for `export`.
        OSError: the file cannot be written.
    """
    given = [(one.graph, layout_of(one.graph.job, None), one.ranks) for one in made]
    graphs, changed = levelled(given, along=given[0][1].apart)
    parts = [
        part_of(graph, layout, ranks, along=layout.apart)
        for graph, (_, layout, ranks) in zip(graphs, given, strict=True)
    ]
    waiting = any(NAME in graph.strings.values for graph in graphs)
    idle = [] if waiting else [f"{NO_IDLE_TIME}."]
    told = [*notes, *([UNEVEN] if changed else []), *idle]
    return _write(parts, Path(path), gpus_per_node, interconnect, told)


def _write(
    parts: Sequence[Part],
    path: Path,
    gpus_per_node: int,
    interconnect: Interconnect,
    told: Sequence[str],
) -> Export:
    if gpus_per_node < 1:
        raise ExportError(
            f"{gpus_per_node} GPUs per node: expected 1 or more", code="goal-gpus-per-node"
        )
    of = {rank: part for part in parts for rank in part.ranks}
    tags = Tags()
    operations = 0
    with replacing(path) as file:
        file.write(f"num_ranks {len(of)}\n".encode())
        for rank in sorted(of):
            block = RankBlock(of[rank], rank, tags, gpus_per_node, interconnect)
            block.write()
            operations += block.operations
            _write_block(file, rank, block.lines)
        tags.check()
    left_out = sum((part.left_out for part in parts), Counter[str]())
    return Export(
        path=path,
        ranks=len(of),
        operations=operations,
        gpu_time_ns=max(
            int(part.graph.nodes.duration_ns[part.graph.gpu_compute].sum()) for part in parts
        ),
        cpus=max(len(set(part.cpu.values())) for part in parts),
        algorithms=_algorithms(parts, gpus_per_node, interconnect),
        left_out={what: count for what, count in left_out.items() if count},
        notes=[
            *told,
            "Messages are payload alone: reductions take no time, and neither does starting one "
            "but for the simulator's own o and g.",
            f"Ranks {gpus_per_node} by {gpus_per_node} share a node: that chooses NCCL's "
            "algorithms. Every rank has one interface, nic 0, for all its messages.",
        ],
    )


def _write_block(file: BinaryIO, rank: int, lines: Sequence[str]) -> None:
    file.write(("\n".join([f"rank {rank} {{", *lines, "}"]) + "\n").encode())


def _algorithms(
    parts: Sequence[Part], gpus_per_node: int, interconnect: Interconnect
) -> dict[str, int]:
    """Return the number of calls of each kind on the rank with most calls."""
    most: Counter[str] = Counter()
    for part in parts:
        found: Counter[str] = Counter()
        for index, placed in part.places.items():
            node = part.graph.node(index)
            if node.kind is not Kind.COLLECTIVE:
                found["point to point"] += 1
                continue
            members = placed.group(part.layout, part.ranks[0])
            nodes = nodes_of(members, gpus_per_node)
            call = Call(node.collective, node.value("comm_bytes"), nodes, interconnect=interconnect)
            found[f"{node.collective.name.lower()} by {call.choice.algorithm}"] += 1
        most |= found
    return dict(most)
