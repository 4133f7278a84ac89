"""The summary of a trace, which `capture run`, `convert`, `coarsen`, `show` and `report` print."""

import statistics
from collections.abc import Callable, Sequence

from onerank.analysis.breakdown import Share
from onerank.analysis.summary import StageSummary, Summary
from onerank.cli.terminal import (
    MODULE_ROWS,
    RANKS,
    counted,
    counts_of_evidence,
    lines,
    rank_list,
    table,
)
from onerank.display import flops, size, time
from onerank.ir import Compilation, LayerExtrapolation, Line, Sensors

# Generated kernels that the table lists; --json has all.
_FUSION_ROWS = 12

# Operators that a table cell names; --json has all.
_OPERATORS = 8


def render_compilation(done: Compilation, device: str) -> None:
    """Print the gain of each sub-module and the operators that each generated kernel replaces."""
    pairs = [
        ("torch.compile", f"mode {done.mode}; {done.graphs} compiled graphs in the step"),
        (
            "step, measured",
            f"{time(done.eager_step_ns)} eager, {time(done.compiled_step_ns)} compiled"
            f" ({_gain(done.eager_step_ns, done.compiled_step_ns)})",
        ),
    ]
    if done.shared_ops:
        text = f"{done.shared_ops} operations are one of several library calls; which is not known"
        pairs.append(("shared", text))
    if done.unknown_ops:
        text = f"{done.unknown_ops} operations in compiled graphs match no generated kernel"
        pairs.append(("unknown", text))
    lines(pairs)
    rows = [
        (
            row.module or "(none)",
            row.eager_ops,
            row.compiled_ops,
            time(row.eager_ns),
            time(row.compiled_ns),
            _gain(row.eager_ns, row.compiled_ns),
        )
        for row in done.modules
    ]
    columns = ("", "ops, eager", "compiled", "time, eager", "compiled", "speed-up")
    table(f"Compute by sub-module, eager and compiled, on {device or 'this device'}", columns, rows)
    fusion_rows = [
        (
            fusion.kernel,
            fusion.phase or "-",
            fusion.launches,
            time(fusion.time_ns),
            _operators(fusion.operators),
            ", ".join(fusion.modules),
        )
        for fusion in done.fusions[:_FUSION_ROWS]
    ]
    columns = ("kernel", "phase", "launches", "time", "replaces", "of")
    table("Generated kernels", columns, fusion_rows, texts=(0, 1, 4, 5))
    if len(done.fusions) > _FUSION_ROWS:
        lines([("", f"and {len(done.fusions) - _FUSION_ROWS} more (--json has all)")])


def _operators(counts: dict[str, int]) -> str:
    texts = [f"{n} {name.removeprefix('aten.')}" for name, n in counts.items()]
    more = f", {len(texts) - _OPERATORS} more" if len(texts) > _OPERATORS else ""
    return ", ".join(texts[:_OPERATORS]) + more


def _gain(before: int | None, after: int | None) -> str:
    return f"x{before / after:.2f}" if before and after else "-"


def render_summary(summary: Summary, title: str) -> None:
    """Print the summary of a trace."""
    world = " ".join(f"{axis} {n}" for axis, n in summary.world.items() if n > 1) or "one rank"
    kinds = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in summary.kinds.items())
    kinds = f" ({kinds})" if kinds else ""
    kind = f" ({summary.device_type})" if summary.device_type else ""
    # "model" is an ONNX model, whose nodes are operators that ran nowhere.
    on_cpu = summary.device_type in ("cpu", "model") and not summary.gpu_ops
    ops = counted(summary.compute_ops, "operator" if on_cpu else "GPU operation")
    # A capture without a device has no times: 0 ns would look like one.
    timed = summary.compute_time_ns > 0
    if timed:
        ops = f"{time(summary.compute_time_ns)} in {ops}"
    pairs = [
        ("device", f"{summary.device or 'not known'}{kind}"),
        ("world", f"{world}; this is rank {summary.rank}"),
        *_classes(summary),
        *_inference(summary),
        ("nodes", f"{summary.nodes}{kinds}; {counted(summary.edges, 'edge')}"),
        ("compute", f"{ops}, {flops(summary.flops)}, {size(summary.bytes)} moved"),
        *_without_flops(summary),
        ("step" if summary.measured_step_ns is None else "step, measured", _step(summary)),
        *job_step_row(summary.job_step_ns),
        (
            "peak memory",
            f"{size(summary.peak_memory_bytes)} ({size(summary.start_memory_bytes)} at the start)"
            if summary.peak_memory_bytes
            else "not known",
        ),
        ("durations", counts_of_evidence(summary.evidence) if timed else "none"),
    ]
    pairs += _measured(summary)
    if summary.annotations:
        pairs.append(("annotated", "; ".join(summary.annotations)))
    pairs += [("note", str(note)) for note in summary.notes]
    lines(pairs, title)
    if summary.depths is not None:
        render_depths(summary.depths)
    _shares("Compute by class", summary.by_class, summary.compute_time_ns)
    _shares("Compute by phase", summary.by_phase, summary.compute_time_ns)
    _shares("Compute by module", summary.by_module[:MODULE_ROWS], summary.compute_time_ns)
    if len(summary.by_module) > MODULE_ROWS:
        further = summary.by_module[MODULE_ROWS:]
        further_ns = sum(share.time_ns for share in further)
        spent = f", {time(further_ns)}" if further_ns else ""
        lines([("", f"and {len(further)} more{spent} (--json has all)")])
    render_communication(summary)
    if summary.pipeline:
        _render_pipeline(summary.pipeline)
    if summary.compilation is not None:
        render_compilation(summary.compilation, summary.device)


def _classes(summary: Summary) -> list[tuple[str, str]]:
    """Return the representatives of the rank classes, if there is more than one class."""
    if len(summary.classes) < 2:
        return []
    first = [str(rank_class.representative) for rank_class in summary.classes]
    representatives = ", ".join(first[:RANKS]) + (", ..." if len(first) > RANKS else "")
    return [("rank classes", f"{len(first)}; one rank of each: {representatives}")]


def _inference(summary: Summary) -> list[tuple[str, str]]:
    """Return the line on the captured forward of a script that only infers."""
    step = summary.inference
    if step is None:
        return []
    if not step.batch:
        return [("forward", f"number {step.number} of the script")]
    tokens = sum(step.query_lengths) or step.new_tokens
    # Recordings of an engine may have only the sums of sequences that differ.
    new = counted(tokens, "new token") if tokens else "new tokens not known"
    text = f"number {step.number}, batch {step.batch}, {new}"
    text += " in all" if step.query_lengths else ""
    return [(step.kind, f"{text}, context {context_text(step.context_lengths)}")]


def context_text(lengths: Sequence[int]) -> str:
    """Return the context lengths of a batch as text: one length, or a range."""
    if not lengths:
        return "-"
    low, high = min(lengths), max(lengths)
    return str(low) if low == high else f"{low} to {high}"


def _render_pipeline(stage: StageSummary) -> None:
    """Print the stage's peak memory under each schedule."""
    layers = "+".join(map(str, stage.layers))
    lines(
        [
            ("stage", f"{stage.stage} of {len(stage.layers)} ({layers} layers)"),
            ("activations", f"{size(stage.activation_bytes)} per micro-batch in flight"),
        ],
        "Pipeline",
    )
    rows = [
        (peak.schedule, peak.micro_batches, peak.in_flight, size(peak.bytes) if peak.bytes else "-")
        for peak in stage.peaks
    ]
    table("Peak memory by schedule", ("", "micro-batches", "in flight", "peak"), rows)


def _without_flops(summary: Summary) -> list[tuple[str, str]]:
    if not summary.without_flops:
        return []
    of = "time" if summary.compute_time_ns else "bytes"
    share = f"{summary.without_flops_share:.1%} of the {of}"
    operations = f"{summary.without_flops} of {summary.compute_ops} operations"
    return [("not counted", f"FLOPs of {operations}, {share}")]


def job_step_row(job_step_ns: int | None) -> list[tuple[str, str]]:
    """Return the row of the job's step; none if it is not known."""
    if job_step_ns is None:
        return []
    return [("step of the job", f"{time(job_step_ns)}, as its ranks wait for the slowest")]


def _step(summary: Summary) -> str:
    if summary.measured_step_ns is None:
        # No step ran at this depth, but the captures with fewer layers measured theirs.
        line = summary.depths.step_ns if summary.depths is not None else None
        return f"not measured; {time(line.at_depth)} extrapolated" if line else "not measured"
    spread = f"{time(min(summary.step_ns))} to {time(max(summary.step_ns))}"
    text = f"{time(summary.measured_step_ns)} (median of {len(summary.step_ns)}, {spread})"
    if summary.profiled_step_ns:
        text += f"; {time(summary.profiled_step_ns)} under the profiler"
    if summary.profiler_overhead is not None:
        text += f" ({summary.profiler_overhead:+.1%})"
    return text


def _measured(summary: Summary) -> list[tuple[str, str]]:
    """Return the lines on how the step was measured; measurements that are missing have none."""
    pairs: list[tuple[str, str]] = []
    # After re-costing, the busy time is still that of the GPU that was measured.
    if summary.gap_ns is not None and not summary.annotations:
        pairs.append(
            ("GPU busy", f"{time(summary.gpu_busy_ns)} of the step; idle {time(summary.gap_ns)}")
        )
    if summary.host_step_ns:
        host_ns = statistics.median(summary.host_step_ns)
        lowest, highest = min(summary.host_step_ns), max(summary.host_step_ns)
        text = f"{time(host_ns)} ({time(lowest)} to {time(highest)}) of a step that begins with an "
        text += f"idle GPU; {time(summary.profiled_host_ns)} under the profiler"
        pairs.append(("host", text))
    if summary.data_loading_ns:
        pairs.append(("data loading", f"{time(summary.data_loading_ns)} of waiting for batches"))
    if summary.samples:
        pairs.append(
            (
                "repeated",
                f"each duration is the median of {summary.samples} profiled steps; longest less "
                f"shortest, {time(summary.spread_ns)} over all",
            )
        )
    if summary.timed_step_ns:
        step = statistics.median(summary.timed_step_ns)
        pairs.append(
            (
                "modules timed",
                f"in {len(summary.timed_step_ns)} steps of {time(step)} (--granularity)",
            )
        )
    if summary.sensors is not None:
        pairs.append(("sensors", _sensors(summary.sensors)))
    return pairs


def _sensors(sensors: Sensors) -> str:
    readings = (
        ("SM ", sensors.sm_clock_mhz, 1, "MHz"),
        ("memory ", sensors.memory_clock_mhz, 1, "MHz"),
        ("", sensors.power_mw, 1000, "W"),
        ("", sensors.temperature_c, 1, "°C"),
    )
    texts = [
        f"{name}{reading.median / scale:.0f} {unit} "
        f"({reading.low / scale:.0f} to {reading.high / scale:.0f})"
        for name, reading, scale, unit in readings
        if reading is not None
    ]
    texts += [
        f"{reason} in {count} of {sensors.samples} samples"
        for reason, count in sensors.throttled.items()
    ]
    return ", ".join(texts) or "none could be read"


def _shares(title: str, shares: list[Share], total_ns: int) -> None:
    rows = [
        (
            share.name or "(none)",
            share.count,
            time(share.time_ns) if total_ns else "-",
            f"{share.time_ns / total_ns:.1%}" if total_ns else "-",
            # "+3 ?": three nodes whose FLOPs are not known.
            flops(share.flops) + (f" (+{share.without_flops} ?)" if share.without_flops else ""),
            size(share.bytes),
        )
        for share in shares
    ]
    table(title, ("", "nodes", "time", "share", "FLOPs", "bytes"), rows)


def render_depths(depths: LayerExtrapolation) -> None:
    """Print the captures at several depths, the lines fitted through them, and their residuals."""
    figures: list[tuple[Line, Callable[[float], str]]] = [
        (depths.compute_ns, time),
        (depths.step_ns, time),
        (depths.peak_memory_bytes, size),
        (depths.comm_bytes, size),
    ]
    rows = [
        (str(count), *(show(line.values[place]) for line, show in figures))
        for place, count in enumerate(depths.layers)
    ]
    rows += [
        ("per layer", *(show(line.slope) for line, show in figures)),
        ("outside the layers", *(show(line.intercept) for line, show in figures)),
        (f"line at {depths.depth}", *(show(line.at_depth) for line, show in figures)),
        ("largest residual", *(_residual(line) for line, _ in figures)),
    ]
    columns = ("layers", "compute", "step", "peak memory", "communication")
    table(f"Depths captured of {depths.module}, and the lines through them", columns, rows)
    composed = depths.composed_compute_ns
    apart = composed / depths.compute_ns.at_depth - 1 if depths.compute_ns.at_depth else 0.0
    repeat = "every layer" if depths.period == 1 else f"every {depths.period} layers"
    pairs = [("layers repeat", repeat + (f", from {depths.first} on" if depths.first else ""))]
    if depths.copied:
        pairs += [
            ("copied", f"{depths.copied} of {depths.depth} layers"),
            ("compute, layers repeated", f"{time(composed)} ({apart:+.2%} against the line)"),
            ("peak, replayed", size(depths.replayed_peak_bytes)),
        ]
    if depths.layer_mismatch is not None:
        pairs.append(
            ("layer mismatch", f"{depths.layer_mismatch:.2%} of the deepest capture's compute")
        )
    lines(pairs)


def _residual(line: Line) -> str:
    return "none: two depths" if line.residual is None else f"{line.residual:.2%}"


def render_communication(summary: Summary) -> None:
    """Print the communication calls by group."""
    rows = [
        (
            use.group or "(none)",
            rank_list(use.group_ranks),
            use.type,
            use.phase or "-",
            use.count,
            size(use.bytes) if use.bytes >= 0 else "?",
            size(use.bytes * use.count) if use.bytes >= 0 else "?",
        )
        for use in summary.collectives
    ]
    columns = ("group", "ranks", "call", "phase", "count", "each", "in all")
    table("Communication by group (per-rank input)", columns, rows)
