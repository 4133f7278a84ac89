"""`onerank replay`: where the time of a step goes, of one rank or of a whole job."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import (
    GB_PER_S,
    INPUT,
    INPUT_OR_DIRECTORY,
    OUTPUT,
    UsageError,
    as_json,
    keep_inputs,
    read_trace,
    reports_errors,
)
from onerank.cli.dataclass_to_click import with_options
from onerank.cli.terminal import MODULE_ROWS, lines, print_json, table
from onerank.display import size, time
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.analysis.step_time import Replay
    from onerank.ir.notes import Note
    from onerank.plan.job_replay import JobReplay


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How communication is timed, and the timeline to write."""

    busbw_gb_s: float | None = option(
        "Time communication with this bus bandwidth.  [default: the times in the trace]",
        default=None,
        type=GB_PER_S,
        metavar="GB/S",
    )
    perfetto: Path | None = option(
        "Timeline to write: the measured step, and the replayed step below.",
        default=None,
        type=OUTPUT,
    )
    cluster: Path | None = option(
        "Replay a whole job on this cluster: TRACE is a rank, or a directory with a trace of each "
        "class of equivalent ranks, which wait for each other. A configuration of `onerank plan`, "
        "whose [cluster] is read.",
        default=None,
        type=INPUT,
    )
    schedule: str | None = option(
        "With --cluster: order of the pipeline: gpipe, 1f1b, interleaved:V or zbv. A script that "
        "runs its own pipeline keeps its order.  [default: 1f1b]",
        default=None,
    )
    micro_batches: int | None = option(
        "With --cluster: micro-batches of a step. Refused for a script that runs its own "
        "pipeline.  [default: those of the trace]",
        default=None,
        type=click.IntRange(1),
    )


@click.command()
@click.argument("trace", type=INPUT_OR_DIRECTORY)
@with_options(ReplayOptions)
@as_json
@reports_errors
def replay(trace: Path, options: ReplayOptions, as_json: bool) -> None:
    """Schedule TRACE with its own durations and edges.

    Prints step time, compute, exposed communication, idle and host-bound time, and the critical
    path. A replay that differs from the measured step has wrong or missing edges.
    """
    if options.cluster is not None:
        _replay_job(trace, options.cluster, options, as_json=as_json)
        return
    if options.schedule is not None or options.micro_batches is not None:
        raise UsageError(
            "--schedule and --micro-batches need --cluster", code="replay-needs-cluster"
        )
    if trace.is_dir():
        raise UsageError(
            f"{trace} is a directory; with --cluster its traces are one job",
            code="replay-directory",
        )
    import onerank as package
    from onerank.analysis.step_time import with_communication
    from onerank.ir.replay import schedule

    if options.perfetto is not None:
        keep_inputs(options.perfetto, trace)
    graph = read_trace(trace)
    bandwidth = options.busbw_gb_s
    done = package.replay(graph, busbw_gb_s=bandwidth)
    if options.perfetto is not None:
        from onerank.converters.targets.perfetto import perfetto_events, write_timeline

        # The upper process has the captured times, the lower one the same nodes as replayed.
        timed = graph if bandwidth is None else with_communication(graph, bandwidth)
        replayed = perfetto_events(timed, schedule(timed).start_ns, process=1, title="replayed")
        write_timeline([*perfetto_events(graph), *replayed], options.perfetto)
    if as_json:
        print_json(done)
    else:
        render_replay(done, title=str(trace))


def _replay_job(trace: Path, cluster: Path, options: ReplayOptions, *, as_json: bool) -> None:
    """Replay the stages of a job on a cluster."""
    from onerank import export
    from onerank.annotate import load_gpu
    from onerank.converters.expand.pipeline import PipelineSchedule
    from onerank.plan.cluster import network_of
    from onerank.plan.config import read_cluster
    from onerank.plan.job_replay import replay_job

    if options.busbw_gb_s is not None or options.perfetto is not None:
        raise UsageError(
            "with --cluster leave out --busbw-gb-s and --perfetto", code="replay-cluster-alone"
        )
    described = read_cluster(cluster)
    network = network_of(described, load_gpu(described.gpu))
    seen: set[Note] = set()
    graphs = [read_trace(file, seen=seen) for file in export.trace_files((trace,))]
    ranks = graphs[0].job.world.size
    if ranks > described.gpus:
        raise UsageError(
            f"{cluster}: the cluster has {described.gpus} GPUs ({described.nodes} nodes of "
            f"{described.gpus_per_node}), and the job has {ranks} ranks",
            code="replay-cluster-too-small",
        )
    done = replay_job(
        graphs, network, PipelineSchedule.parse(options.schedule or "1f1b"), options.micro_batches
    )
    if as_json:
        print_json(done)
    else:
        render_job(done, title=str(trace))


def render_job(done: "JobReplay", title: str) -> None:
    """Print where the time of a job's step goes."""

    def part(ns: int) -> str:
        return f"{time(ns)} ({ns / done.step_ns:.1%})"

    lines(
        [
            ("step, replayed", time(done.step_ns)),
            ("compute", part(done.compute_ns)),
            ("exposed comm.", part(done.exposed_communication_ns)),
            ("bubble", part(done.bubble_ns)),
            ("idle", part(done.idle_ns)),
            ("peak memory", size(done.peak_bytes)),
            ("ranks", str(done.ranks)),
        ],
        title,
    )


def render_replay(done: "Replay", title: str) -> None:
    """Print where the time of a replayed step goes."""
    from onerank.cli.summary_tables import job_step_row

    total = done.step_time_ns

    def part(ns: int, of_ns: int = total) -> str:
        return f"{time(ns)} ({ns / of_ns:.1%})"

    pairs = [("step, replayed", time(total))]
    if done.measured_ns:
        off = total / done.measured_ns - 1
        pairs.append(
            ("step, profiled", f"{time(done.measured_ns)}; the replay is off by {off:+.2%}")
        )
    if done.steady_state is not None:
        steady, origin = (
            done.steady_state,
            "measured" if done.steady_state_measured_ns else "predicted",
        )
        text = (
            f"{time(steady.step_ns)}, {origin}: without the profiler, the host ahead of the GPU; "
        )
        idle = f"{part(steady.idle_ns, steady.step_ns)} of it idle"
        text += f"{idle}, {time(steady.host_bound_ns)} waiting for a launch"
        pairs.append(("steady-state step", text))
    pairs += job_step_row(done.job_step_ns)
    pairs += [
        ("compute", part(done.compute_ns)),
        ("exposed comm.", part(done.exposed_communication_ns)),
        ("idle", f"{part(done.idle_ns)}, {time(done.host_bound_ns)} of it waiting for a launch"),
    ]
    if done.data_loading_ns:
        pairs.append(("data loading", f"{part(done.data_loading_ns)}, of the idle time"))
    if done.unexplained_ns:
        text = f"{part(done.unexplained_ns)}, of the idle time: gaps that no recorded wait explains"
        pairs.append(("unexplained", text))
    lines(pairs, title)
    rows = [
        (share.name or "(none)", share.kind, str(share.nodes), time(share.time_ns),
         f"{share.time_ns / total:.1%}")
        for share in done.critical_path[:MODULE_ROWS]
    ]  # fmt: skip
    table("Critical path", ("module", "what", "nodes", "time", "share"), rows, texts=(0, 1))
