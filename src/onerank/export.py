"""Workloads for network simulators, and a timeline: the functions behind `onerank export`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from onerank.annotate import Gpu
    from onerank.converters.expand.ranks import RankGraph
    from onerank.converters.nccl import Interconnect
    from onerank.converters.targets.astra_sim.config_files import SimulatedNetwork
    from onerank.converters.targets.astra_sim.exporter import AstraSimExport
    from onerank.converters.targets.goal import GoalExport
    from onerank.converters.targets.simai.exporter import SimaiExport
    from onerank.ir import Graph
    from onerank.ir.notes import Note

    Trace = Graph | str | Path
    Traces = Trace | Iterable[Trace]

__all__ = ["astra_sim", "goal", "perfetto", "simai"]

Granularity = Literal["layer", "submodule", "kernel"]


def astra_sim(
    traces: Traces,
    output: str | Path,
    *,
    dp: int | None = None,
    schedule: str | None = None,
    micro_batches: int | None = None,
    ranks: int | None = None,
    include_host_delays: bool = False,
    bandwidth_gb_s: float | None = None,
    busbw_gb_s: float | None = None,
    latency_ns: float = 500.0,
    name: str = "workload",
    granularity: Granularity = "kernel",
    overwrite: bool = False,
    decode: Traces | None = None,
    kv_bytes: int | None = None,
) -> AstraSimExport:
    """Write an ASTRA-sim workload: every rank's trace, groups, configuration, run.sh.

    Args:
        traces: a graph or file that represents all ranks, or one of each class of equivalent
            ranks; a directory stands for the `.et` files in it.
        output: directory to write; replaces the files of an earlier export.
        dp: number of replicas, in place of the captured number.
        schedule: pipeline schedule: "gpipe", "1f1b", "interleaved:V" or "zbv".
        micro_batches: micro-batches of a pipelined step.
        ranks: number of ranks, for a trace that does not record its world.
        include_host_delays: delay GPU operations as their host did in the capture.
        bandwidth_gb_s: GB/s of each rank in each direction; None: of the trace's GPU, else 450.
        busbw_gb_s: in place of `bandwidth_gb_s`, the measured bus bandwidth of large collectives,
            which includes the time of their reductions.
        latency_ns: latency from rank to rank.
        name: prefix of the trace files.
        granularity: "kernel", or one node per layer or sub-module between communications.
        overwrite: write into a directory that has other files, and keep those.
        decode: with traces of a prefill, those of a decode on other GPUs, which starts when it has
            received the KV cache. GPUs whose links have other rates need a bandwidth.
        kv_bytes: bytes of that KV cache, of all ranks of the prefill.

    Raises:
        ExportError: arguments exclude each other, or the simulator does not support the job.

    Examples:
        >>> onerank.export.astra_sim("trace.et", "workload").ranks
        2
    """
    from onerank.converters.targets.astra_sim.exporter import (
        export_astra_sim,
        export_astra_sim_ranks,
    )

    output = Path(output)
    # An export replaces the directory, and with it a trace that was read from there.
    job = _job_of(_refused_in(output, traces), dp, granularity)
    network = _network(job.graphs[0], bandwidth_gb_s, busbw_gb_s, latency_ns)
    expansion = _Expansion(schedule, micro_batches, ranks, include_host_delays)
    if decode is not None or kv_bytes is not None:
        expands = dp is not None or expansion != _Expansion()
        decode, kv_bytes = _pair_options(decode, kv_bytes, expands=expands)
        decoding = _job_of(_refused_in(output, decode), None, granularity)
        if bandwidth_gb_s is None and busbw_gb_s is None:
            _check_equal_links(job.graphs[0], decoding.graphs[0])
        rank_graphs, network, notes = _pair(job, decoding, kv_bytes, network)
    else:
        # ASTRA-sim runs one compute node and one communication node of a rank at a time.
        rank_graphs, notes = expansion.ranks_of(job, one_at_a_time=True)
    if rank_graphs is not None:
        return export_astra_sim_ranks(
            rank_graphs, output, network=network, name=name, notes=notes, overwrite=overwrite
        )
    return export_astra_sim(
        job.graphs[0],
        output,
        network=network,
        name=name,
        ranks=ranks,
        host_time=include_host_delays,
        notes=notes,
        overwrite=overwrite,
    )


def simai(
    traces: Traces,
    output: str | Path,
    *,
    dp: int | None = None,
    schedule: str | None = None,
    micro_batches: int | None = None,
    granularity: Literal["layer", "submodule"] = "submodule",
) -> SimaiExport:
    """Write a SimAI workload, and report what the format cannot express.

    Args:
        traces: a graph or file that represents all ranks; with `schedule` one of each class of
            equivalent stages, or their directory.
        output: text file to write.
        dp: as for `astra_sim`.
        schedule: as for `astra_sim`.
        micro_batches: micro-batches of a step.
        granularity: scope of a row.

    Raises:
        ExportError: the format does not support the job.

    Examples:
        >>> onerank.export.simai("trace.et", "simai.txt").all_gpus
        2
    """
    from onerank.converters.expand.pipeline import PipelineSchedule
    from onerank.converters.targets.simai.exporter import export_simai

    # Always kernels: the exporter sums them into rows itself.
    job = _job_of(traces, dp, "kernel")
    return export_simai(
        job.graphs,
        Path(output),
        schedule=PipelineSchedule.parse(schedule) if schedule else None,
        micro_batches=micro_batches,
        granularity=granularity,
        notes=job.notes,
    )


def goal(
    traces: Traces,
    output: str | Path,
    *,
    dp: int | None = None,
    schedule: str | None = None,
    micro_batches: int | None = None,
    ranks: int | None = None,
    include_host_delays: bool = False,
    gpus_per_node: int = 8,
    compute_capability: int | None = None,
    granularity: Granularity = "kernel",
) -> GoalExport:
    """Write a GOAL schedule: every rank's operations, collectives as messages.

    Args:
        traces: as for `astra_sim`.
        output: text file to write.
        dp: as for `astra_sim`.
        schedule: as for `astra_sim`.
        micro_batches: as for `astra_sim`.
        ranks: as for `astra_sim`.
        include_host_delays: as for `astra_sim`.
        gpus_per_node: consecutive ranks that share a node.
        compute_capability: NCCL's number for the GPUs, such as 86 for 8.6; None: of the trace's
            GPU, else 90.
        granularity: as for `astra_sim`.

    Raises:
        ExportError: arguments exclude each other, or the format does not support the job.

    Examples:
        >>> onerank.export.goal("trace.et", "job.goal").ranks
        2
    """
    from onerank.converters.targets.goal import export_goal, export_goal_ranks

    job = _job_of(traces, dp, granularity)
    interconnect, assumptions = _interconnect(job.graphs[0], compute_capability)
    expansion = _Expansion(schedule, micro_batches, ranks, include_host_delays)
    # Each stream is a cpu of the GOAL schedule, so streams overlap.
    rank_graphs, notes = expansion.ranks_of(job, one_at_a_time=False)
    common: dict[str, Any] = {
        "notes": [*notes, *assumptions],
        "gpus_per_node": gpus_per_node,
        "interconnect": interconnect,
    }
    if rank_graphs is not None:
        return export_goal_ranks(rank_graphs, Path(output), **common)
    return export_goal(
        job.graphs[0], Path(output), ranks=ranks, host_time=include_host_delays, **common
    )


def perfetto(trace: Trace, output: str | Path, *, title: str | None = None) -> int:
    """Write a timeline for ui.perfetto.dev; return the number of slices.

    Args:
        trace: a graph, or its file.
        output: JSON file to write, with gzip if its name ends in .gz.
        title: name of the timeline; None: the name of the file, or "step".

    Examples:
        >>> onerank.export.perfetto("trace.et", "step.json.gz")
        4240
    """
    from onerank.converters.targets.perfetto import perfetto_events, write_timeline
    from onerank.display import visible_line

    named = title or (Path(trace).name if isinstance(trace, (str, Path)) else "step")
    events = perfetto_events(graph_of(trace), title=visible_line(named))
    write_timeline(events, Path(output))
    return sum(event["ph"] == "X" for event in events)


def graph_of(trace: Trace) -> Graph:
    """Return a graph unchanged, or read it from its file."""
    import onerank

    return onerank.read(trace) if isinstance(trace, (str, Path)) else trace


def trace_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files; a directory stands for the `.et` files in it.

    Raises:
        ExportError: a directory has no `.et` file, or is a bundle.
    """
    from onerank.ir.errors import ExportError

    files: list[Path] = []
    for path in map(Path, paths):
        # Not `serving.bundle.MANIFEST`: its module takes long to load.
        if (path / "bundle.json").is_file():
            raise ExportError(
                f"{path} is a bundle of many steps; name the trace of one, such as "
                f"{path}/traces/1.et",
                code="input-is-bundle",
            )
        in_path = sorted(path.glob("*.et")) if path.is_dir() else [path]
        if not in_path:
            raise ExportError(f"{path} holds no .et file", code="export-no-traces")
        files += in_path
    return files


def _each(traces: Traces) -> Iterator[Trace]:
    from onerank.ir import Graph

    for trace in [traces] if isinstance(traces, (str, Path, Graph)) else traces:
        if isinstance(trace, (str, Path)):
            yield from trace_files([trace])
        else:
            yield trace


def _refused_in(directory: Path, traces: Traces) -> Iterator[Trace]:
    """Yield the traces; refuse a file in the output directory, where the export might replace it.

    Raises:
        ExportError: a trace is in the directory.
    """
    for trace in _each(traces):
        if isinstance(trace, (str, Path)):
            refuse_input_in(directory, Path(trace))
        yield trace


def refuse_input_in(directory: Path, trace: Path) -> None:
    """Refuse a trace in the output directory, where the export might replace it.

    Raises:
        ExportError: the trace is in the directory.
    """
    from onerank.ir.errors import ExportError

    if trace.resolve().parent == directory.resolve():
        raise ExportError(
            f"the trace {trace} is in {directory}, the directory to export to; name another",
            code="export-input-in-output",
        )


def at_granularity(graph: Graph, granularity: Granularity) -> Graph:
    """Return `graph` itself for "kernel", else coarsened; its FLOPs are kept."""
    from onerank.annotate import characterise

    if granularity == "kernel":
        return graph
    # A coarse node has no shapes, so FLOPs and bytes are derived before.
    return characterise(graph).coarsen(granularity)


@dataclass(frozen=True)
class _CapturedJob:
    """The graphs to export, with the requested replicas, and notes on them."""

    graphs: list[Graph]
    notes: list[Note]


def _job_of(traces: Traces, dp: int | None, granularity: Granularity) -> _CapturedJob:
    """Read the traces at a granularity, and give their job `dp` replicas.

    Kernels take their time in steady state, for every simulator.
    """
    from onerank.converters.expand.data_parallel import replica_notes, with_replicas
    from onerank.ir.steady_state import with_steady_state_kernels

    captured = [graph_of(trace) for trace in _each(traces)]
    notes = _notes_on_kernels(captured)
    graphs = [at_granularity(with_steady_state_kernels(graph), granularity) for graph in captured]
    if dp is None:
        return _CapturedJob(graphs, notes)
    notes += replica_notes(graphs, dp)
    return _CapturedJob([with_replicas(graph, dp) for graph in graphs], notes)


def _notes_on_kernels(graphs: Sequence[Graph]) -> list[Note]:
    """Return a note on each graph whose kernels take longer in steady state than profiled."""
    from onerank.ir.notes import Note

    notes: list[Note] = []
    for graph in graphs:
        overhead = graph.job.measurement.host_overhead
        if overhead is None or overhead.kernel_factor == 1:
            continue
        notes.append(
            Note(
                f"Kernels of rank {graph.job.rank} take {overhead.kernel_factor:g} times their "
                "profiled time (kernel_factor), as in the timed steps: their GPU never waits for "
                "the host, and lowers its clock.",
                code="steady-state-kernels",
            )
        )
    return notes


@dataclass(frozen=True)
class _Expansion:
    """How captured ranks expand to all; the fields are arguments of `astra_sim`."""

    schedule: str | None = None
    micro_batches: int | None = None
    ranks: int | None = None
    include_host_delays: bool = False

    def ranks_of(
        self, job: _CapturedJob, *, one_at_a_time: bool
    ) -> tuple[list[RankGraph] | None, list[Note]]:
        """Return the graphs of all ranks and notes; None if one graph represents all.

        Host delays are inserted into these graphs. The export of a single graph inserts its own.

        Args:
            job: the graphs to expand.
            one_at_a_time: whether the simulator runs one node of a rank at a time.

        Raises:
            ExportError: options do not go together, or the graphs are not of one job.
        """
        from onerank.converters.expand.host_delays import insert_host_delays_by_rank
        from onerank.converters.expand.pipeline import PipelineSchedule, expand
        from onerank.converters.expand.ranks import expand_ranks
        from onerank.ir.errors import ExportError

        graphs, notes = job.graphs, job.notes
        # Before the expansion: delays are measured on captured ranks, and copied with their nodes.
        if self.include_host_delays and (self.schedule is not None or len(graphs) > 1):
            graphs, delay_notes = insert_host_delays_by_rank(graphs, one_at_a_time=one_at_a_time)
            notes = [*notes, *delay_notes]
        if self.schedule is not None:
            if self.micro_batches is None or self.ranks is not None:
                raise ExportError(
                    "--schedule needs --micro-batches, and no --ranks",
                    code="export-schedule-micro-batches",
                )
            return expand(graphs, PipelineSchedule.parse(self.schedule), self.micro_batches), notes
        if self.micro_batches is not None:
            raise ExportError(
                "--micro-batches needs --schedule", code="export-micro-batches-schedule"
            )
        if len(graphs) == 1:
            return None, notes
        if self.ranks is not None:
            raise ExportError(
                "--ranks is for a single trace; several record their world",
                code="export-ranks-several-traces",
            )
        return expand_ranks(graphs), notes


def _network(
    graph: Graph, bandwidth_gb_s: float | None, busbw_gb_s: float | None, latency_ns: float
) -> SimulatedNetwork:
    """Return the network to simulate: of the given rates, else of those of the graph's GPU.

    Raises:
        ExportError: both rates of links are given.
    """
    from onerank.converters.targets.astra_sim.config_files import SimulatedNetwork
    from onerank.ir.errors import ExportError

    if bandwidth_gb_s is not None and busbw_gb_s is not None:
        raise ExportError(
            "give --bandwidth-gb-s or --busbw-gb-s, not both", code="export-two-bandwidths"
        )
    default = SimulatedNetwork()
    rates = _rates_of(graph)
    # A measured bus bandwidth includes reductions, so ASTRA-sim must not add memory time.
    memory = None if busbw_gb_s is not None else rates.memory or default.memory_gb_per_s
    given = bandwidth_gb_s if busbw_gb_s is None else busbw_gb_s
    link = rates.link or default.bandwidth_gb_per_s
    return SimulatedNetwork(link if given is None else given, latency_ns, memory)


@dataclass(frozen=True)
class _Rates:
    """Rates of a GPU's links and memory in 1e9 bytes per second; None where they are not known."""

    link: float | None = None
    memory: float | None = None


def _rates_of(graph: Graph) -> _Rates:
    """Return the rates of the graph's GPU."""
    gpu = _described(graph)
    if gpu is None:
        return _Rates()
    link = gpu.figures.get("link_bandwidth_gb_per_s")
    return _Rates(link.value if link else None, gpu.peak_bandwidth_bytes_per_s / 1e9)


def _shared_network(
    network: SimulatedNetwork, prefill: Graph, decode: Graph
) -> tuple[SimulatedNetwork, list[Note]]:
    """Return the network of a prefill's and a decode's GPUs, with a note if their memories differ.

    ASTRA-sim has one system file with one rate of all memories.

    Args:
        network: that of the prefill's GPU.
        prefill: a graph of the prefill.
        decode: a graph of the decode.
    """
    from onerank.ir.notes import Note

    names = _device_names(prefill, decode)
    memories = [_rates_of(graph).memory for graph in (prefill, decode)]
    known = [(memory, name) for memory, name in zip(memories, names, strict=True) if memory]
    if network.memory_gb_per_s is None or memories[0] == memories[1] or not known:
        return network, []
    lowest, slower = min(known)
    note = Note(
        f"ASTRA-sim has one memory rate for all GPUs, so reductions on {names[0]} and {names[1]} "
        f"have {lowest:g} GB/s, the rate of {slower}",
        code="disaggregated-memory-rates",
    )
    return replace(network, memory_gb_per_s=lowest), [note]


def _pair(
    prefill: _CapturedJob, decode: _CapturedJob, kv_bytes: int, network: SimulatedNetwork
) -> tuple[list[RankGraph], SimulatedNetwork, list[Note]]:
    """Return the ranks of a prefill and of the decode that follows it, their network, and notes."""
    from onerank.converters.targets.disaggregated_pair import disaggregated_pair

    network, notes = _shared_network(network, prefill.graphs[0], decode.graphs[0])
    rank_graphs = disaggregated_pair(prefill.graphs, decode.graphs, kv_bytes)
    return rank_graphs, network, [*prefill.notes, *notes]


def _pair_options(
    decode: Traces | None, kv_bytes: int | None, *, expands: bool
) -> tuple[Traces, int]:
    """Return the traces of the decode and the bytes of the KV cache.

    Raises:
        ExportError: one of the pair's options is missing, or others expand the prefill.
    """
    from onerank.ir.errors import ExportError

    if decode is None or kv_bytes is None:
        raise ExportError(
            "give --decode and --kv-bytes together, or neither", code="disaggregated-kv-bytes"
        )
    if expands:
        raise ExportError(
            "--decode excludes --dp, --schedule, --micro-batches, --ranks and "
            "--include-host-delays",
            code="disaggregated-options",
        )
    return decode, kv_bytes


def _check_equal_links(prefill: Graph, decode: Graph) -> None:
    """Check that the links of two sides have one rate, as ASTRA-sim's network file does.

    Raises:
        ExportError: the rates of the GPUs' links differ.
    """
    from onerank.ir.errors import ExportError

    links = [_rates_of(graph).link for graph in (prefill, decode)]
    if links[0] == links[1]:
        return
    names = _device_names(prefill, decode)
    rates = [f"{link:g} GB/s" if link else "a rate that is not known" for link in links]
    raise ExportError(
        f"the links of the prefill's {names[0]} have {rates[0]}, those of the decode's "
        f"{names[1]} {rates[1]}, and ASTRA-sim has one rate for all\n"
        "  give it: --bandwidth-gb-s, or --busbw-gb-s as measured",
        code="disaggregated-link-rates",
    )


def _device_names(*graphs: Graph) -> list[str]:
    return [graph.job.device.name or "an unnamed GPU" for graph in graphs]


def _interconnect(graph: Graph, requested: int | None) -> tuple[Interconnect, list[Note]]:
    """Return the interconnect that NCCL sees, and a note if the capability is an assumption.

    Args:
        graph: its device names the GPU.
        requested: compute capability that the user gave; it must not contradict the GPU's.
    """
    from onerank.converters.nccl import H100, interconnect_of
    from onerank.ir.notes import Note

    gpu = _described(graph)
    known = None if gpu is None else gpu.capability
    capability = known if requested is None else requested
    name = graph.job.device.name
    if capability is not None:
        # The name distinguishes NVLink from PCIe only for the GPU that has this capability.
        return interconnect_of(capability, name if known in (None, capability) else ""), []
    interconnect = interconnect_of(H100.capability, name)
    device = name or "the trace's GPU"
    return interconnect, [
        Note(
            f"the compute capability of {device} is not known: NCCL's algorithms are chosen as "
            f"for an H100{'' if interconnect.nvlink else ' on PCIe'}; give --compute-capability",
            code="compute-capability-assumed",
        )
    ]


def _described(graph: Graph) -> Gpu | None:
    """Return the description of the graph's GPU; overridden figures do not count."""
    from onerank.annotate import find_gpu

    name = graph.job.device.name
    # A re-costed graph can name "H100-SXM (tdp_w=500)".
    return find_gpu(name) or find_gpu(name.split(" (", 1)[0])
