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
from onerank.converters.expand.ranks import RankGraph, check_all_equal
from onerank.converters.nccl import H100, Interconnect
from onerank.converters.targets.expand_symmetry import unequal_axis, world_of
from onerank.converters.targets.goal.collective_algorithms import CollectiveCall
from onerank.converters.targets.goal.emit_rank import (
    LoweredRank,
    Machine,
    RankBlock,
    TagAllocator,
    lower_rank,
    positions_by_node,
)
from onerank.converters.targets.lower import NO_IDLE_TIME, check_peers
from onerank.converters.targets.uneven_all_to_all import UNEVEN, equalize_all_to_alls
from onerank.display import Displayed
from onerank.ir import Graph, Kind
from onerank.ir.errors import ExportError
from onerank.ir.output_files import replacing

GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, repr=False)
class GoalExport(Displayed):
    """Contents and limitations of an exported schedule.

    Attributes:
        path: the file.
        ranks: number of ranks.
        operations: number of `calc`, `send` and `recv` operations of all ranks.
        gpu_time_ns: summed GPU compute of the rank with most; includes host delays if the export
            has them.
        cpus: number of cpus of the rank with most: streams and communication lanes.
        algorithms: number of calls by collective and algorithm, the maximum over the ranks.
        dropped: nodes of the graph that are not in the schedule, by reason.
        notes: caveats for the reader of the simulator's figures, one sentence each.
    """

    path: Path
    ranks: int
    operations: int
    gpu_time_ns: int
    cpus: int
    algorithms: dict[str, int]
    dropped: dict[str, int]
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
) -> GoalExport:
    """Write the step of one rank as the step of every rank of its job.

    Args:
        graph: one rank's step, with GPU compute and communication.
        path: output file; it appears complete, or not at all.
        ranks: number of ranks; needed only for a graph whose job has no world.
        gpus_per_node: number of consecutive ranks that share a node.
        interconnect: links between the GPUs, by which NCCL chooses algorithms.
        host_time: insert host delays, see `insert_host_delays`; the host is a cpu.
        notes: caveats on how the graph was made.

    Raises:
        ExportError: the graph cannot represent all ranks.
        GraphError: the graph has a cycle.
        OSError: the file cannot be written.
    """
    check_all_equal(graph.job)
    world = world_of(graph.job, ranks)
    idle = f"{NO_IDLE_TIME}."
    if host_time:
        graph, idle = insert_host_delays(graph)
    lowered = lower_rank(graph, world, range(world.size))
    check_peers(graph, lowered.step, lowered.placements, world)
    return _write([lowered], Path(path), Machine(gpus_per_node, interconnect), [*notes, idle])


def export_ranks(
    rank_graphs: Sequence[RankGraph],
    path: str | Path,
    *,
    gpus_per_node: int = GPUS_PER_NODE,
    interconnect: Interconnect = H100,
    notes: Sequence[str] = (),
) -> GoalExport:
    """Write the steps of unequal ranks, each for the ranks that it represents.

    Args:
        rank_graphs: graphs that together represent every rank of one world.
        path: as for `export`.
        gpus_per_node: as for `export`.
        interconnect: as for `export`.
        notes: as for `export`.

    Raises:
        ExportError: a step cannot run on its ranks, or the ranks' communication does not match.
        GraphError: a graph has a cycle.
        OSError: the file cannot be written.
    """
    for entry in rank_graphs:
        world_of(entry.graph.job, None)
    world = rank_graphs[0].graph.job.world
    axis = unequal_axis(world)
    equalized, changed = equalize_all_to_alls(rank_graphs, world, unequal_along=axis)
    lowered = [
        lower_rank(entry.graph, world, entry.ranks, unequal_along=axis) for entry in equalized
    ]
    has_delays = any(NAME in entry.graph.strings.values for entry in equalized)
    idle = [] if has_delays else [f"{NO_IDLE_TIME}."]
    notes = [*notes, *([UNEVEN] if changed else []), *idle]
    return _write(lowered, Path(path), Machine(gpus_per_node, interconnect), notes)


def _write(
    lowered_ranks: Sequence[LoweredRank], path: Path, machine: Machine, notes: Sequence[str]
) -> GoalExport:
    if machine.gpus_per_node < 1:
        raise ExportError(
            f"{machine.gpus_per_node} GPUs per node: expected 1 or more", code="goal-gpus-per-node"
        )
    by_rank = {rank: lowered for lowered in lowered_ranks for rank in lowered.ranks}
    tags = TagAllocator()
    operations = 0
    with replacing(path) as file:
        file.write(f"num_ranks {len(by_rank)}\n".encode())
        for rank in sorted(by_rank):
            block = RankBlock(by_rank[rank], rank, tags, machine)
            block.write()
            operations += block.operations
            _write_block(file, rank, block.lines)
        tags.check()
    dropped = sum((lowered.dropped for lowered in lowered_ranks), Counter[str]())
    return GoalExport(
        path=path,
        ranks=len(by_rank),
        operations=operations,
        gpu_time_ns=max(
            int(lowered.graph.nodes.duration_ns[lowered.graph.gpu_compute].sum())
            for lowered in lowered_ranks
        ),
        cpus=max(len(set(lowered.cpus.values())) for lowered in lowered_ranks),
        algorithms=_algorithms(lowered_ranks, machine),
        dropped={reason: count for reason, count in dropped.items() if count},
        notes=[
            *notes,
            "Messages are payload only: reductions and launches take no time, except for the "
            "simulator's o and g.",
            f"Every {machine.gpus_per_node} consecutive ranks share a node, which determines "
            "NCCL's algorithms. Every rank has one interface, nic 0, for all its messages.",
        ],
    )


def _write_block(file: BinaryIO, rank: int, lines: Sequence[str]) -> None:
    file.write(("\n".join([f"rank {rank} {{", *lines, "}"]) + "\n").encode())


def _algorithms(lowered_ranks: Sequence[LoweredRank], machine: Machine) -> dict[str, int]:
    """Return the number of calls by collective and algorithm, the maximum over the ranks."""
    maximum: Counter[str] = Counter()
    for lowered in lowered_ranks:
        counts: Counter[str] = Counter()
        for index, placement in lowered.placements.items():
            node = lowered.graph.node(index)
            if node.kind is not Kind.COLLECTIVE:
                counts["point to point"] += 1
                continue
            members = placement.group_ranks(lowered.world, lowered.ranks[0])
            call = CollectiveCall(
                node.collective,
                node.value("comm_bytes"),
                positions_by_node(members, machine.gpus_per_node),
                interconnect=machine.interconnect,
            )
            counts[f"{node.collective.name.lower()} by {call.choice.algorithm}"] += 1
        maximum |= counts
    return dict(maximum)
