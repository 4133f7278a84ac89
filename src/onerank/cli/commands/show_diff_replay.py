"""`onerank show`, `diff` and `replay`: what a trace holds, and where the time of its step goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import (
    GB_PER_S,
    INPUT,
    INPUT_OR_DIRECTORY,
    OUTPUT,
    TRACE,
    UsageError,
    as_json,
    keep_inputs,
    read_trace,
    reports_errors,
)
from onerank.cli.dataclass_to_click import with_options
from onerank.cli.terminal import (
    MODULE_ROWS,
    counted,
    lines,
    print_json,
    ratio,
    say,
    short_kernel,
    table,
)
from onerank.display import flops, size, time
from onerank.export import Granularity
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.analysis.breakdown import BreakdownRow
    from onerank.analysis.step_time import Replay
    from onerank.analysis.trace_diff import NameDiff, TraceDiff
    from onerank.ir import Graph
    from onerank.ir.notes import Note
    from onerank.plan.job_replay import JobReplay

# Kernels that a table lists; --json has all.
_KERNEL_ROWS = 40


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """The tables that `show` prints."""

    text: bool = option("Print every node in place of the summary.", default=False)
    granularity: Granularity | None = option(
        "Print a table of layers, sub-modules or kernels in place of the summary.", default=None
    )


@click.command()
@click.argument("trace", type=TRACE)
@with_options(ShowOptions)
@as_json
@reports_errors
def show(trace: Path, options: ShowOptions, as_json: bool) -> None:
    """Summarise a trace: time, FLOPs, bytes, memory, communication."""
    from onerank.analysis.summary import summarise
    from onerank.cli.summary_tables import render_summary

    if options.text and (options.granularity or as_json):
        other = "--json" if as_json else "--granularity"
        raise UsageError(f"give --text or {other}, not both", code="show-two-forms")

    graph = _read_even_broken(trace)
    if options.text:
        from onerank.ir.text import to_text

        say(to_text(graph), newline=False)
        return
    if options.granularity:
        _show_parts(graph, options.granularity, title=str(trace), as_json=as_json)
        return
    summary = summarise(graph)
    if as_json:
        print_json(summary)
    else:
        render_summary(summary, title=str(trace))


def _read_even_broken(trace: Path) -> "Graph":
    """Read a trace; without its invalid dependencies, and with a note, if it has some."""
    import onerank as package
    from onerank.ir.chakra import read_repaired
    from onerank.ir.errors import GraphError

    try:
        return package.read(trace)
    except GraphError as error:
        if error.code != "graph-dangling-edge":
            raise
    # Only here: every other command would compute figures of a graph that lacks dependencies.
    graph, repairs = read_repaired(trace)
    say(
        f"{trace} is broken: {repairs.note.text}; `onerank convert --repair` writes it so", err=True
    )
    return graph


@click.command()
@click.argument("before", type=TRACE)
@click.argument("after", type=TRACE)
@as_json
@reports_errors
def diff(before: Path, after: Path, as_json: bool) -> None:
    """Compare two traces by class, module and kernel name."""
    import onerank as package

    difference = package.diff(before, after)
    if as_json:
        print_json(difference)
    else:
        render_difference(difference, str(before), str(after))


def _show_parts(graph: "Graph", granularity: Granularity, title: str, *, as_json: bool) -> None:
    """Print the share of the step that each layer, sub-module or kernel takes."""
    from onerank.analysis.breakdown import parts

    shares = parts(graph, granularity)
    if as_json:
        print_json(shares)
    else:
        render_parts(shares, granularity, title=title)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How communication is timed, and the timeline to write."""

    busbw_gb_s: float | None = option(
        "Time communication with this bus bandwidth. Default: the times in the trace.",
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


def render_parts(parts: "Sequence[BreakdownRow]", granularity: Granularity, title: str) -> None:
    """Print a row per layer; per sub-module, summed over layers; or per kernel."""
    from onerank.analysis.breakdown import merged

    total = sum(part.time_ns for part in parts)
    # The sub-modules of all layers are one table row each; layers and kernels are not merged.
    shown = merged(parts) if granularity == "submodule" else list(parts)
    if granularity == "kernel":
        shown = sorted(shown, key=lambda part: (-part.time_ns, part.name))
    left_out = shown[_KERNEL_ROWS:] if granularity == "kernel" else []
    rows = shown[: len(shown) - len(left_out)]
    _table(
        f"{title}: {time(total)} of compute by {granularity}",
        granularity,
        rows,
        _times(rows, total),
    )
    if any(part.timed_forward_ns is not None for part in rows):
        lines([("", "by events: CUDA events (a clock on a CPU), no profiler, gaps included")])
    _table("Work and memory", granularity, rows, _work(rows))
    if left_out:
        further_ns = sum(part.time_ns for part in left_out)
        lines([("", f"and {len(left_out)} more, {time(further_ns)} (--json has all)")])


# Column heading -> cells.
_Columns = dict[str, list[str]]


def _table(
    title: str, granularity: Granularity, parts: "Sequence[BreakdownRow]", figures: _Columns
) -> None:
    """Print figures next to names and, for modules, their roles and counts."""
    columns: _Columns = {"": [part.name or "(none)" for part in parts]}
    if granularity == "kernel":
        columns[""] = [short_kernel(name) for name in columns[""]]
    else:
        columns["role"] = [part.role for part in parts]
        columns["modules"] = [str(part.instances) for part in parts]
    columns |= figures
    texts = (0,) if granularity == "kernel" else (0, 1)
    table(title, [*columns], [*zip(*columns.values(), strict=True)], texts=texts)


def _times(parts: "Sequence[BreakdownRow]", total_ns: int) -> _Columns:
    columns = {
        "nodes": [str(part.nodes) for part in parts],
        "forward": [_time(part.forward_ns) for part in parts],
        "backward": [_time(part.backward_ns) for part in parts],
        "other": [_time(part.other_ns) for part in parts],
        "share": [f"{part.time_ns / total_ns:.1%}" if total_ns else "-" for part in parts],
    }
    if any(part.timed_forward_ns is not None for part in parts):
        columns["by events: fwd"] = [time(part.timed_forward_ns) for part in parts]
        columns["bwd"] = [time(part.timed_backward_ns) for part in parts]
    return columns


def _work(parts: "Sequence[BreakdownRow]") -> _Columns:
    return {
        "FLOPs": [
            flops(part.flops) + (f" (+{part.without_flops} ?)" if part.without_flops else "")
            for part in parts
        ],
        "bytes": [size(part.bytes) for part in parts],
        "allocated": [size(part.allocated_bytes) for part in parts],
        "freed": [size(part.freed_bytes) for part in parts],
    }


def _time(ns: int) -> str:
    return time(ns) if ns else "-"


def render_difference(difference: "TraceDiff", before: str, after: str) -> None:
    """Print how two traces differ."""
    total = difference.total
    verdict = {True: "the same", False: "DIFFERENT"}
    lines(
        [
            ("compute", _pair(total)),
            ("kernels", f"names and counts {verdict[difference.same_kernels]}"),
            ("communication", verdict[difference.same_collectives]),
        ],
        f"{before} -> {after}",
    )
    for title, changes in (
        ("By class", difference.by_class),
        ("By module", difference.by_module[:MODULE_ROWS]),
        ("By kernel, largest change first", difference.by_kernel[:MODULE_ROWS]),
    ):
        rows = [
            (
                short_kernel(change.name) or "(none)",
                change.count_before,
                change.count_after,
                _time(change.time_before_ns),
                _time(change.time_after_ns),
                _ratio(change),
            )
            for change in changes
        ]
        table(title, ("", "nodes", "after", "time", "after", "ratio"), rows)
    for what, changes in (("modules", difference.by_module), ("kernels", difference.by_kernel)):
        if len(changes) > MODULE_ROWS:
            lines([("", f"and {len(changes) - MODULE_ROWS} more {what} (--json has all)")])


def _pair(change: "NameDiff") -> str:
    return (
        f"{_time(change.time_before_ns)} in {counted(change.count_before, 'node')} -> "
        f"{_time(change.time_after_ns)} in {change.count_after} ({_ratio(change)})"
    )


def _ratio(change: "NameDiff") -> str:
    if change.count_after and not change.count_before:
        return "new"
    return ratio(change.time_after_ns, change.time_before_ns)


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
