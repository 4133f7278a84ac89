"""Export a graph as a directory that ASTRA-sim runs unchanged."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from onerank.converters.expand.host_delays import NAME, insert_host_delays
from onerank.converters.expand.pipeline import RankGraph
from onerank.converters.expand.preconditions import (
    prefetched_storage,
    require_gpu_work,
    storage_delays,
)
from onerank.converters.expand.ranks import check_all_equal
from onerank.converters.targets.astra_sim import config_files
from onerank.converters.targets.astra_sim.check import Finding, check_workload
from onerank.converters.targets.astra_sim.collective_fallbacks import substitute
from onerank.converters.targets.astra_sim.expand_symmetry import (
    Layout,
    Place,
    layout_of,
    number_groups,
    place,
)
from onerank.converters.targets.astra_sim.limitations import (
    count_left_out,
    note_on_idle_time,
    notes_on,
    timed_compute,
)
from onerank.converters.targets.astra_sim.lower import Step, check_peers, hold_back, lower, tag_of
from onerank.converters.targets.astra_sim.publish import (
    MANIFEST,
    check_target,
    programs,
    published,
)
from onerank.converters.targets.astra_sim.uneven_all_to_all import UNEVEN, levelled
from onerank.converters.targets.astra_sim.write_traces import Workload, write_ranks
from onerank.ir import Graph, Kind
from onerank.ir.atomic_write import replace_file
from onerank.ir.errors import ExportError

_READY = 32
"""Receives up to which all may be ready from the start."""


def lowered(graph: Graph, places: dict[int, Place]) -> Step:
    """Return the nodes that ASTRA-sim runs, in the order in which every rank issues them.

    Args:
        graph: one rank's step.
        places: communication node -> its placement on all ranks; others are dropped.

    Raises:
        ExportError: no node takes GPU time or moves bytes.
    """
    step = lower(graph, _lanes(graph, set(places)))
    if not step.index:
        raise ExportError(
            f"none of the graph's {len(graph)} nodes takes GPU time or moves bytes",
            code="export-empty-graph",
        )
    receives = graph.mask(Kind.RECV)[step.index].nonzero()[0].tolist()
    if len(receives) > _READY:
        hold_back(step, receives)
    return step


def _lanes(graph: Graph, communications: set[int]) -> list[Hashable | None]:
    """Return what each node runs in line with; None for nodes that do not reach ASTRA-sim.

    A rank of ASTRA-sim runs one collective or send at a time. In one fixed order, the same on
    all ranks, they cannot lock each other out. Reads and writes of storage are delays among the
    compute: memory nodes and what is no GPU's cost a run its statistics.
    """
    lanes: list[Hashable | None] = [None] * len(graph)
    for index in timed_compute(graph).nonzero()[0].tolist():
        lanes[index] = ("stream", int(graph.nodes.stream[index]))
    for index in (storage_delays(graph) & ~prefetched_storage(graph)).nonzero()[0].tolist():
        lanes[index] = "storage"
    for index in communications:
        node = graph.node(index)
        if node.kind is Kind.RECV:
            lanes[index] = (node.value("comm_src"), tag_of(node), node.value("comm_bytes"))
        else:
            lanes[index] = "communication"
    return lanes


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of an export, its network, and notes.

    Attributes:
        directory: output directory.
        name: prefix of its traces.
        bandwidth_gb_per_s: 1e9 bytes per second, of each rank in each direction.
        latency_ns: between two ranks.
        memory_gb_per_s: 1e9 bytes per second of a GPU's memory, for reductions; None if the
            bandwidth includes them.
        notes: statements for the reader of the export.
        overwrite: write into a directory that holds other files; they stay.
    """

    directory: Path
    name: str
    bandwidth_gb_per_s: float
    latency_ns: float
    memory_gb_per_s: float | None
    notes: list[str]
    overwrite: bool = False

    def telling(self, notes: Iterable[str]) -> "Target":
        """Return the target with further notes."""
        return replace(self, notes=[*self.notes, *notes])

    def check(self) -> None:
        """Refuse what cannot be exported so.

        Raises:
            ExportError: the name or a figure cannot be, or the directory holds something else.
        """
        _check_arguments(self.name, self.bandwidth_gb_per_s, self.latency_ns, self.memory_gb_per_s)
        check_target(self.directory, overwrite=self.overwrite)


def _check_arguments(
    name: str, bandwidth_gb_per_s: float, latency_ns: float, memory_gb_per_s: float | None
) -> None:
    if not _NAME.fullmatch(name):
        raise ExportError(
            f"the name {name!r} must be letters, digits, '.', '_' and '-'", code="export-bad-name"
        )
    if name.endswith("_roofline"):
        raise ExportError(
            f"the name {name!r} must not end in _roofline, as the exact traces' does: give another",
            code="export-reserved-name",
        )
    if not 0 < bandwidth_gb_per_s < inf or not (
        memory_gb_per_s is None or 0 < memory_gb_per_s < inf
    ):
        raise ExportError(
            f"the bandwidths are {bandwidth_gb_per_s} GB/s between ranks and "
            f"{memory_gb_per_s} GB/s of memory; both must be more than 0",
            code="export-bandwidth",
        )
    if not 0 <= latency_ns < inf:
        raise ExportError(
            f"the latency is {latency_ns} ns; it must be 0 or more", code="export-latency"
        )


_READ_BACK = 400_000
"""Nodes of all ranks up to which every file is read back."""


@dataclass(frozen=True, slots=True)
class Export:
    """What was exported.

    Attributes:
        directory: where it lies.
        files: names of its files, sorted.
        ranks: number of ranks.
        nodes: nodes per rank, of the rank with most.
        gpu_time_ns: summed GPU compute per rank, of the rank with most; with host time its waits
            for the host too.
        groups: number of each process group -> its ranks.
        left_out: what of the graph is not in the workload -> how many nodes.
        notes: sentences a reader of the simulator's figures should know.
        peak_memory_bytes: for each rank of a pipeline its stages and its peak, where known.
    """

    directory: Path
    files: list[str]
    ranks: int
    nodes: int
    gpu_time_ns: int
    groups: dict[int, tuple[int, ...]]
    left_out: dict[str, int]
    notes: list[str]
    peak_memory_bytes: list[tuple[tuple[int, ...], int]] = field(
        default_factory=list[tuple[tuple[int, ...], int]]
    )


def export(
    graph: Graph,
    directory: str | Path,
    *,
    name: str = "workload",
    ranks: int | None = None,
    bandwidth_gb_per_s: float = config_files.BANDWIDTH_GB_PER_S,
    latency_ns: float = config_files.LATENCY_NS,
    memory_gb_per_s: float | None = config_files.MEMORY_GB_PER_S,
    host_time: bool = False,
    notes: Sequence[str] = (),
    overwrite: bool = False,
) -> Export:
    """Write the step that `graph` holds for every rank of its job, ready for ASTRA-sim.

    The directory gets `NAME.R.et` (microseconds) and `NAME_roofline.R.et` (exact) for each rank R,
    the groups, system, network, memory and logging files, and `run.sh`. It appears complete and
    checked, or not at all. `export.json` lists its files; a later export replaces those.

    Args:
        graph: one rank's step, with GPU compute and communication.
        directory: where to write.
        name: prefix of the traces.
        ranks: number of ranks; needed only for a graph whose job has no world.
        bandwidth_gb_per_s: gigabytes (10**9 bytes) per second, of each rank in each direction.
        latency_ns: between two ranks.
        memory_gb_per_s: gigabytes per second of a GPU's memory, for the reductions of collectives;
            None if `bandwidth_gb_per_s` is a measured bus bandwidth, which includes them.
        host_time: let the GPU wait for its host as it did, see `insert_host_delays`.
        notes: statements on how the graph was made.
        overwrite: write into a directory that holds files which no export wrote; they stay, except
            those of the names above.

    Raises:
        ExportError: the graph cannot represent all ranks, an argument is wrong, or the directory
            holds something else.
        GraphError: the graph has a cycle.
        OSError: the directory cannot be written.
    """
    network = bandwidth_gb_per_s, latency_ns, memory_gb_per_s
    target = Target(Path(directory), name, *network, notes=[*notes], overwrite=overwrite)
    target.check()
    _check_kinds(graph)
    check_all_equal(graph.job)
    layout = layout_of(graph.job, ranks)
    if host_time:
        graph, told = insert_host_delays(graph, one_at_a_time=True)
        target = target.telling([told])
    graph, substituted = substitute(graph, layout.ranks)
    places, dropped = place(graph, layout)
    step = lowered(graph, places)
    check_peers(graph, step, places, layout)
    everyone = range(layout.ranks)
    groups = number_groups(layout, [(placed, everyone) for placed in set(places.values())])
    numbers = {members: number for number, members in groups.items()}
    workload = Workload(graph, step, places, layout, everyone, numbers)
    left_out = count_left_out(graph) | dropped
    return _write(target.telling(substituted), [workload], groups, left_out, {})


def export_ranks(
    made: Sequence[RankGraph],
    directory: str | Path,
    *,
    name: str = "workload",
    bandwidth_gb_per_s: float = config_files.BANDWIDTH_GB_PER_S,
    latency_ns: float = config_files.LATENCY_NS,
    memory_gb_per_s: float | None = config_files.MEMORY_GB_PER_S,
    notes: Sequence[str] = (),
    overwrite: bool = False,
) -> Export:
    """Write the steps of unequal ranks, each for the ranks it represents; as `export`.

    Args:
        made: graphs that together represent every rank of one world.
        directory: where to write.
        name: prefix of the traces.
        bandwidth_gb_per_s: as for `export`.
        latency_ns: as for `export`.
        memory_gb_per_s: as for `export`.
        notes: as for `export`.
        overwrite: as for `export`.

    Raises:
        ExportError: as for `export`.
        OSError: the directory cannot be written.
    """
    network = bandwidth_gb_per_s, latency_ns, memory_gb_per_s
    target = Target(Path(directory), name, *network, notes=[*notes], overwrite=overwrite)
    target.check()
    layouts: list[Layout] = []
    substituted: dict[str, None] = {}
    given: list[tuple[Graph, Layout, tuple[int, ...]]] = []
    for one in made:
        _check_kinds(one.graph)
        layout = layout_of(one.graph.job, None)
        graph, said = substitute(one.graph, layout.ranks)
        substituted |= dict.fromkeys(said)
        layouts.append(layout)
        given.append((graph, layout, one.ranks))
    graphs, changed = levelled(given, along=layouts[0].apart)
    left_out: Counter[str] = Counter()
    all_places: list[dict[int, Place]] = []
    for graph, layout in zip(graphs, layouts, strict=True):
        places, dropped = place(graph, layout, along=layout.apart)
        left_out.update(count_left_out(graph) | dropped)
        all_places.append(places)
    placed = [
        (at, one.ranks)
        for one, places in zip(made, all_places, strict=True)
        for at in set(places.values())
    ]
    groups = number_groups(layouts[0], placed)
    numbers = {members: number for number, members in groups.items()}
    workloads = [
        Workload(graph, lowered(graph, places), places, layout, one.ranks, numbers)
        for one, graph, places, layout in zip(made, graphs, all_places, layouts, strict=True)
    ]
    peaks = {one.stages: one.peak_memory_bytes for one in made if one.peak_memory_bytes}
    target = target.telling([*substituted, *([UNEVEN] if changed else [])])
    return _write(target, workloads, groups, dict(left_out), peaks)


def _write(
    target: Target,
    workloads: Sequence[Workload],
    groups: dict[int, tuple[int, ...]],
    left_out: dict[str, int],
    peaks: dict[tuple[int, ...], int],
) -> Export:
    directory, name = target.directory, target.name
    ranks = workloads[0].layout.ranks
    read = _ranks_to_read(workloads)

    def check(made: Path) -> list[Finding]:
        if len(read) == ranks:
            return check_workload(made)
        by_rank = dict(pair for one in workloads for pair in programs(one, name).items())
        return check_workload(made, read=read, programs=[by_rank[rank] for rank in range(ranks)])

    if len(read) < ranks:
        target = target.telling([_told_of_check(read, ranks)])
    with published(directory, check) as made:
        for workload in workloads:
            write_ranks(workload, made / name, roofline=False)
            write_ranks(workload, made / f"{name}_roofline", roofline=True)
        for file, text in {
            config_files.GROUPS: config_files.groups(groups),
            "system.json": config_files.system(target.memory_gb_per_s, roofline=False),
            "system_roofline.json": config_files.system(target.memory_gb_per_s, roofline=True),
            "network.yml": config_files.network(
                ranks, target.bandwidth_gb_per_s, target.latency_ns
            ),
            "memory.json": config_files.memory(),
            "logging.toml": config_files.logging(),
            config_files.SCRIPT: config_files.script(name, ranks),
        }.items():
            replace_file(made / file, text.encode())
        (made / config_files.SCRIPT).chmod(0o755)
        files = sorted([*(path.name for path in made.iterdir()), MANIFEST])
    return Export(
        directory=directory,
        files=files,
        ranks=ranks,
        nodes=max(len(workload.step) for workload in workloads),
        gpu_time_ns=max(_gpu_time_ns(workload.graph) for workload in workloads),
        groups=groups,
        left_out={what: count for what, count in left_out.items() if count},
        notes=[*_notes(workloads), *target.notes, _assumed(target)],
        peak_memory_bytes=[*peaks.items()],
    )


def _ranks_to_read(workloads: Sequence[Workload]) -> set[int]:
    """Return whose files are read back: all, or of many ranks the first and last of each step."""
    everyone = {rank for workload in workloads for rank in workload.ranks}
    nodes = sum(len(workload.step) * len(workload.ranks) for workload in workloads)
    if nodes <= _READ_BACK:
        return everyone
    return {rank for workload in workloads for rank in (min(workload.ranks), max(workload.ranks))}


def _told_of_check(read: set[int], ranks: int) -> str:
    return (
        f"Of {ranks} ranks the files of {', '.join(map(str, sorted(read)))} were read back and "
        "checked; the others hold the same step, and their communication was matched."
    )


def _notes(workloads: Sequence[Workload]) -> list[str]:
    """Return the notes on all ranks' steps, each once; none on idle time where it is exported."""
    graphs = [workload.graph for workload in workloads]
    waiting = any(NAME in graph.strings.values for graph in graphs)
    idle = [] if waiting else [note_on_idle_time(graphs)]
    return [*idle, *dict.fromkeys(note for one in workloads for note in notes_on(one))]


def _assumed(target: Target) -> str:
    memory = f"{target.memory_gb_per_s} GB/s of memory"
    if target.memory_gb_per_s is None:
        memory = "reductions included"
    return (
        f"Assumed: one switch, {target.bandwidth_gb_per_s} GB/s and {target.latency_ns} ns between "
        f"any two ranks, {memory}."
    )


def _gpu_time_ns(graph: Graph) -> int:
    return int(graph.nodes.duration_ns[timed_compute(graph)].sum())


def _check_kinds(graph: Graph) -> None:
    require_gpu_work(graph)
    storage_delays(graph)
