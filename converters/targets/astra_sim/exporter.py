"""Export a graph as a directory that ASTRA-sim runs unchanged."""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from onerank.converters.expand.host_delays import (
    DELAY_NAME,
    insert_host_delays,
    prefetched_storage,
    require_gpu_work,
    storage_delays,
)
from onerank.converters.expand.ranks import RankGraph, check_all_equal
from onerank.converters.targets.astra_sim import config_files
from onerank.converters.targets.astra_sim.check import Finding, check_workload
from onerank.converters.targets.astra_sim.config_files import SimulatedNetwork
from onerank.converters.targets.astra_sim.lower_for_astra_sim import (
    SUPPORTED,
    lower_for_astra_sim,
    substitute,
)
from onerank.converters.targets.astra_sim.publish import MANIFEST, check_target, published
from onerank.converters.targets.astra_sim.write_traces import Workload, rank_programs, write_ranks
from onerank.converters.targets.communication_placement import (
    Placement,
    number_groups,
    place_communications,
    unequal_axis,
    world_of,
)
from onerank.converters.targets.lower_step import (
    check_peers,
    count_dropped,
    equalize_all_to_alls,
    even_all_to_alls,
    idle_time_note,
    timed_compute,
)
from onerank.display import Displayed, time
from onerank.ir import UNKNOWN, Collective, Graph, World
from onerank.ir.arrays import union_duration_ns
from onerank.ir.errors import ExportError
from onerank.ir.notes import Note

# Target ------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class _Target:
    """Directory, simulated network and notes of an export.

    Attributes:
        directory: output directory.
        name: prefix of the traces.
        network: the simulated network.
        notes: caveats for the reader of the simulator's figures.
        overwrite: allow other files in the directory; they stay.
    """

    directory: Path
    name: str
    network: SimulatedNetwork
    notes: list[Note]
    overwrite: bool = False

    def with_notes(self, notes: Iterable[Note]) -> "_Target":
        """Return the target with further notes."""
        return replace(self, notes=[*self.notes, *notes])

    def check(self) -> None:
        """Check the arguments of an export.

        Raises:
            ExportError: the name or a figure is invalid, or the directory has other content.
        """
        if not _NAME.fullmatch(self.name):
            raise ExportError(
                f"the name {self.name!r} must be letters, digits, '.', '_' and '-'",
                code="export-bad-name",
            )
        if self.name.endswith("_roofline"):
            raise ExportError(
                f"the name {self.name!r} must not end in _roofline, the suffix of the exact "
                "traces\n  give another name",
                code="export-reserved-name",
            )
        self.network.check()
        check_target(self.directory, overwrite=self.overwrite)


# Export ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class AstraSimExport(Displayed):
    """Contents and limitations of an exported workload.

    Attributes:
        directory: output directory.
        files: names of its files, sorted.
        ranks: number of ranks.
        nodes: nodes of the rank with most.
        gpu_time_ns: summed GPU compute of the rank with most; includes host delays if the export
            has them.
        groups: number of each process group -> its ranks.
        dropped: nodes of the graph that are not in the workload, by reason.
        notes: caveats for the reader of the simulator's figures.
        peak_memory_bytes: (stages, peak) of each rank of a pipeline, where known.
    """

    directory: Path
    files: list[str]
    ranks: int
    nodes: int
    gpu_time_ns: int
    groups: dict[int, tuple[int, ...]]
    dropped: dict[str, int]
    notes: list[Note]
    peak_memory_bytes: list[tuple[tuple[int, ...], int]] = field(
        default_factory=list[tuple[tuple[int, ...], int]]
    )


_DEFAULT_NETWORK = SimulatedNetwork()


def export_astra_sim(
    graph: Graph,
    directory: str | Path,
    *,
    name: str = "workload",
    ranks: int | None = None,
    network: SimulatedNetwork = _DEFAULT_NETWORK,
    host_time: bool = False,
    notes: Sequence[Note] = (),
    overwrite: bool = False,
) -> AstraSimExport:
    """Write the step of one rank as the step of every rank of its job.

    The directory gets `NAME.R.et` (microseconds) and `NAME_roofline.R.et` (exact) for each rank R,
    the group, system, network, memory and logging files, and `run.sh`. It appears complete and
    checked, or not at all. `export.json` lists its files; a later export replaces these.

    Args:
        graph: one rank's step, with GPU compute and communication.
        directory: output directory.
        name: prefix of the traces.
        ranks: number of ranks; needed only for a graph whose job has no world.
        network: the network to simulate.
        host_time: insert host delays, see `insert_host_delays`.
        notes: caveats on how the graph was made.
        overwrite: allow files in the directory that no export wrote. They stay, unless the export
            writes a file of their name.

    Raises:
        ExportError: the graph cannot represent all ranks, an argument is invalid, or the directory
            has other content.
        GraphError: the graph has a cycle.
        OSError: the directory cannot be written.
    """
    target = _Target(Path(directory), name, network, notes=[*notes], overwrite=overwrite)
    target.check()
    _check_nodes(graph)
    check_all_equal(graph.job)
    world = world_of(graph.job, ranks)
    if host_time:
        graph, delay_notes = insert_host_delays(graph, one_at_a_time=True, ranks=world.size)
        target = target.with_notes(delay_notes)
    # Placements are by node index, so host delays and substitutes come before them.
    graph, even_notes = even_all_to_alls(graph, world)
    graph, substitutions = substitute(graph, world.size)
    placements, dropped = place_communications(graph, world, SUPPORTED)
    step = lower_for_astra_sim(graph, placements)
    check_peers(graph, step, placements, world)
    all_ranks = range(world.size)
    groups = number_groups(
        world, [(placement, all_ranks) for placement in set(placements.values())]
    )
    numbers = {members: number for number, members in groups.items()}
    workload = Workload(graph, step, placements, world, all_ranks, numbers)
    dropped = count_dropped(graph) | dropped
    target = target.with_notes([*even_notes, *substitutions])
    return _write(target, [workload], groups, dropped, {})


def export_astra_sim_ranks(
    rank_graphs: Sequence[RankGraph],
    directory: str | Path,
    *,
    name: str = "workload",
    network: SimulatedNetwork = _DEFAULT_NETWORK,
    notes: Sequence[Note] = (),
    overwrite: bool = False,
) -> AstraSimExport:
    """Write the steps of unequal ranks, each for the ranks that it represents.

    The output is that of `export_astra_sim`.

    Args:
        rank_graphs: graphs that together represent every rank of one world.
        directory: output directory.
        name: prefix of the traces.
        network: as for `export_astra_sim`.
        notes: as for `export_astra_sim`.
        overwrite: as for `export_astra_sim`.

    Raises:
        ExportError: as for `export_astra_sim`.
        GraphError: a graph has a cycle.
        OSError: the directory cannot be written.
    """
    target = _Target(Path(directory), name, network, notes=[*notes], overwrite=overwrite)
    target.check()
    supported, substitutions = _supported(rank_graphs)
    world = rank_graphs[0].graph.job.world
    axis = unequal_axis(rank_graphs)
    equalized, even_notes = equalize_all_to_alls(supported, world, unequal_along=axis)
    all_dropped: Counter[str] = Counter()
    placed: list[tuple[RankGraph, dict[int, Placement]]] = []
    for entry in equalized:
        placements, dropped = place_communications(
            entry.graph, world, SUPPORTED, unequal_along=axis
        )
        all_dropped.update(count_dropped(entry.graph) | dropped)
        placed.append((entry, placements))
    workloads, groups = _workloads(placed, world)
    peaks = {
        entry.stages: entry.peak_memory_bytes for entry in rank_graphs if entry.peak_memory_bytes
    }
    target = target.with_notes([*substitutions, *even_notes])
    return _write(target, workloads, groups, dict(all_dropped), peaks)


def _workloads(
    placed: Sequence[tuple[RankGraph, dict[int, Placement]]], world: World
) -> tuple[list[Workload], dict[int, tuple[int, ...]]]:
    """Return the workloads of graphs with placed communication, and the ranks of each group."""
    groups = number_groups(
        world,
        [
            (place, entry.ranks)
            for entry, placements in placed
            for place in set(placements.values())
        ],
    )
    numbers = {members: number for number, members in groups.items()}
    workloads = [
        Workload(
            entry.graph,
            lower_for_astra_sim(entry.graph, placements),
            placements,
            world,
            entry.ranks,
            numbers,
        )
        for entry, placements in placed
    ]
    return workloads, groups


def _supported(rank_graphs: Sequence[RankGraph]) -> tuple[list[RankGraph], list[Note]]:
    """Return the graphs with substitutes for what ASTRA-sim cannot run, and a note on each kind."""
    notes: dict[Note, None] = {}
    supported: list[RankGraph] = []
    for entry in rank_graphs:
        _check_nodes(entry.graph)
        graph, graph_notes = substitute(entry.graph, world_of(entry.graph.job, None).size)
        notes |= dict.fromkeys(graph_notes)
        supported.append(replace(entry, graph=graph))
    return supported, [*notes]


def _check_nodes(graph: Graph) -> None:
    require_gpu_work(graph)
    storage_delays(graph)


# Files of one step differ only in groups and peers, which `rank_programs` gives without the files.
# Nodes of all ranks together up to which every written file is read back and checked.
_MOST_NODES_READ_BACK = 400_000


def _write(
    target: _Target,
    workloads: Sequence[Workload],
    groups: dict[int, tuple[int, ...]],
    dropped: dict[str, int],
    peaks: dict[tuple[int, ...], int],
) -> AstraSimExport:
    directory, name = target.directory, target.name
    memory_gb_per_s = target.network.memory_gb_per_s
    ranks = workloads[0].world.size
    read_back = _ranks_to_read_back(workloads)

    def check(written: Path) -> list[Finding]:
        if len(read_back) == ranks:
            return check_workload(written)
        by_rank = dict(
            pair for workload in workloads for pair in rank_programs(workload, name).items()
        )
        programs = [by_rank[rank] for rank in range(ranks)]
        return check_workload(written, read=read_back, programs=programs)

    if len(read_back) < ranks:
        target = target.with_notes([_note_on_check(read_back, ranks)])
    system_json = functools.partial(config_files.system_json, memory_gb_per_s)
    with published(directory, check) as scratch:
        # Whole microseconds run with any system file. Exact nanoseconds need the roofline with
        # peak-perf 1, which takes times from operations.
        for workload in workloads:
            write_ranks(workload, scratch / name, roofline=False)
            write_ranks(workload, scratch / f"{name}_roofline", roofline=True)
        for file, text in {
            config_files.GROUPS_FILE: config_files.groups_json(groups),
            config_files.SYSTEM_FILE: system_json(roofline=False),
            config_files.ROOFLINE_SYSTEM_FILE: system_json(roofline=True),
            config_files.NETWORK_FILE: config_files.network_yml(ranks, target.network),
            config_files.MEMORY_FILE: config_files.memory_json(),
            config_files.LOGGING_FILE: config_files.logging_toml(),
            config_files.SCRIPT_FILE: config_files.run_script(name, ranks),
        }.items():
            (scratch / file).write_bytes(text.encode())
        (scratch / config_files.SCRIPT_FILE).chmod(0o755)
        files = sorted([*(path.name for path in scratch.iterdir()), MANIFEST])
    return AstraSimExport(
        directory=directory,
        files=files,
        ranks=ranks,
        nodes=max(len(workload.step) for workload in workloads),
        gpu_time_ns=max(_gpu_time_ns(workload.graph) for workload in workloads),
        groups=groups,
        dropped={reason: count for reason, count in dropped.items() if count},
        notes=[*_notes(workloads), *target.notes, target.network.assumptions],
        peak_memory_bytes=[*peaks.items()],
    )


def _ranks_to_read_back(workloads: Sequence[Workload]) -> set[int]:
    """Return the ranks whose files are read back: all, or the first and last of each large step."""
    all_ranks = {rank for workload in workloads for rank in workload.ranks}
    nodes = sum(len(workload.step) * len(workload.ranks) for workload in workloads)
    if nodes <= _MOST_NODES_READ_BACK:
        return all_ranks
    return {rank for workload in workloads for rank in (min(workload.ranks), max(workload.ranks))}


def _gpu_time_ns(graph: Graph) -> int:
    return int(graph.nodes.duration_ns[timed_compute(graph)].sum())


# Notes -------------------------------------------------------------------------------------------


def _notes(workloads: Sequence[Workload]) -> list[Note]:
    """Return the limitations of all steps, each once."""
    graphs = [workload.graph for workload in workloads]
    has_delays = any(DELAY_NAME in graph.strings.values for graph in graphs)
    idle = [] if has_delays else [_note_on_idle_time(graphs)]
    limitations = (
        note
        for workload in workloads
        for note in (
            *_notes_on_streams(workload.graph),
            *_notes_on_storage(workload.graph),
            *_notes_on_communication(workload),
        )
    )
    return [*idle, *dict.fromkeys(limitations)]


def _note_on_check(read_back: set[int], ranks: int) -> Note:
    return Note(
        f"Of {ranks} ranks the files of {', '.join(map(str, sorted(read_back)))} were read back "
        "and checked; the other files repeat these steps, and their communication was matched.",
        code="files-checked-in-part",
    )


def _note_on_idle_time(graphs: Sequence[Graph]) -> Note:
    """Return the note that idle time is dropped; for a single graph, with its share of the step."""
    if len(graphs) > 1:
        return idle_time_note(graphs)
    (graph,) = graphs
    compute_ns = _gpu_time_ns(graph)
    measurement = graph.job.measurement
    if graph.job.annotations:
        # The capture's step is that of another GPU, so only the predicted compute is stated.
        target = graph.job.annotations[-1].target
        return idle_time_note(graphs, f", only GPU compute, {time(compute_ns)} on {target}")
    step_ns, source = measurement.median_step_ns, "the median step without the profiler"
    if step_ns is None and measurement.profiled_step_ns:
        step_ns, source = measurement.profiled_step_ns, "the profiled step"
    # Starts that are all 0 mean that the graph has none.
    if step_ns is None and graph.nodes.start_ns.any():
        ends = graph.nodes.start_ns + graph.nodes.duration_ns
        step_ns, source = int(ends.max() - graph.nodes.start_ns.min()), "the span of the trace"
    if step_ns is None:
        compute = f", only GPU compute, {time(compute_ns)}; the duration of the step is not known"
        return idle_time_note(graphs, compute)
    idle_ns = step_ns - compute_ns
    difference = (
        f"the difference {time(idle_ns)}" if idle_ns >= 0 else "which is more, as streams overlap"
    )
    return idle_time_note(
        graphs,
        f": {source} is {time(step_ns)}, GPU compute {time(compute_ns)}, {difference}",
    )


def _notes_on_streams(graph: Graph) -> list[Note]:
    compute = timed_compute(graph)
    streams = np.unique(graph.nodes.stream[compute])
    notes: list[Note] = []
    if len(streams) > 1:
        text = f"GPU compute is on {len(streams)} streams; ASTRA-sim runs one node at a time"
        # With host delays, their note reports the overlap.
        has_delays = DELAY_NAME in graph.strings.values
        if graph.nodes.start_ns.any() and not graph.job.annotations and not has_delays:
            start, duration = graph.nodes.start_ns[compute], graph.nodes.duration_ns[compute]
            overlap_ns = int(duration.sum()) - union_duration_ns(start, start + duration)
            text += f", and in the trace they overlap for {time(overlap_ns)}"
        notes.append(Note(f"{text}.", code="compute-on-several-streams"))
    without_stream = int((compute & (graph.nodes.stream == UNKNOWN)).sum())
    if without_stream:
        notes.append(
            Note(
                f"{without_stream} GPU nodes have no stream; they run one after another.",
                code="nodes-without-stream",
            )
        )
    return notes


def _notes_on_storage(graph: Graph) -> list[Note]:
    prefetch_ns = graph.nodes.duration_ns[prefetched_storage(graph)]
    if not len(prefetch_ns):
        return []
    return [
        Note(
            f"Storage reads for the next step ({time(int(prefetch_ns.max()))}) are not in the "
            "workload, since ASTRA-sim overlaps no storage with compute. No step is shorter than "
            "that.",
            code="storage-prefetch-not-exported",
        )
    ]


def _notes_on_communication(workload: Workload) -> list[Note]:
    graph, ranks = workload.graph, workload.world.size
    if not workload.placements:
        return [
            Note("The ranks do not communicate; they run independently.", code="ranks-independent")
        ]
    notes: list[Note] = []
    if len(set(workload.placements.values())) > 1:
        notes.append(
            Note(
                "A rank's communications run one at a time, in the order of the trace.",
                code="communication-in-order",
            )
        )
    small = sum(
        not placement.shift
        and int(graph.nodes.comm_bytes[index]) < ranks
        and graph.node(index).collective is not Collective.ALL_GATHER
        for index, placement in workload.placements.items()
    )
    if small:
        notes.append(
            Note(
                f"ASTRA-sim rounds {small} collectives of under {ranks} bytes up to {ranks}.",
                code="small-collectives-rounded",
            )
        )
    return notes
