"""Results as tables, for people."""

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from onerank.annotate import Explanation, Gpu, Recosting
from onerank.cli.frame import console
from onerank.converters.astra_sim import Export
from onerank.converters.goal import Export as GoalExport
from onerank.converters.kineto import Conversion
from onerank.converters.onnx import OnnxConversion
from onerank.converters.simai import Export as SimaiExport
from onerank.difference import Change, Difference
from onerank.ir import Depths, Line, Sensors
from onerank.ir.check import Finding
from onerank.replay import Replay
from onerank.summary import Share, StageSummary, Summary

MODULE_ROWS = 14
RANKS = 12
"""Ranks that a line names; --json has all."""
KERNEL_NAME = 120
"""Characters of a kernel's name that a table shows; --json has all."""
_NAMESPACES = re.compile(r"^void |at::native::|\(anonymous namespace\)::|binary_internal::|c10::")


def time(ns: float | None) -> str:
    """Format a duration."""
    if ns is None:
        return "-"
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= scale:
            return f"{ns / scale:.3f} {unit}"
    return f"{ns:.0f} ns"


def size(count: float) -> str:
    """Format bytes, in powers of 1000."""
    return _scaled(count, "B")


def flops(count: float) -> str:
    """Format a number of floating-point operations."""
    return _scaled(count, "FLOP")


def _scaled(value: float, unit: str) -> str:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    texts: Sequence[int] = (0,),
) -> None:
    """Print a table: the columns `texts` left-aligned and folded, figures right and whole."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not rows:
        lines([], f"{title}: none")
        return
    made = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for position, column in enumerate(columns):
        if position in texts:
            made.add_column(column, justify="left", overflow="fold")
        else:
            made.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    console().print(made)


def counted(count: int, noun: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def short_kernel(name: str) -> str:
    """Return a kernel's name without the namespaces all of PyTorch's have, and its start only."""
    short = _NAMESPACES.sub("", name)
    return short if len(short) <= KERNEL_NAME else f"{short[: KERNEL_NAME - 1]}…"


def lines(pairs: Sequence[tuple[str, str]], title: str = "") -> None:
    """Print labelled values, one per line."""
    out = console()
    if title:
        out.print(title, style="bold", markup=False, soft_wrap=True)
    width = max((len(label) for label, _ in pairs), default=0)
    for label, value in pairs:
        out.print(f"  {label.ljust(width)}  {value}", soft_wrap=True, markup=False)


def render_summary(summary: Summary, title: str) -> None:
    """Print what a trace holds."""
    world = " ".join(f"{axis} {n}" for axis, n in summary.world.items() if n > 1) or "one rank"
    kinds = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in summary.kinds.items())
    kinds = f" ({kinds})" if kinds else ""
    kind = f" ({summary.device_type})" if summary.device_type else ""
    on_cpu = summary.device_type in ("cpu", "model") and not summary.gpu_ops
    pairs = [
        ("device", f"{summary.device or 'not known'}{kind}"),
        ("world", f"{world}; this is rank {summary.rank}"),
        *_classes(summary),
        ("nodes", f"{summary.nodes}{kinds}; {counted(summary.edges, 'edge')}"),
        (
            "compute",
            f"{time(summary.compute_time_ns)} in "
            f"{counted(summary.compute_ops, 'operator' if on_cpu else 'GPU operation')}, "
            f"{flops(summary.flops)}, {size(summary.bytes)} moved",
        ),
        ("step, measured", _step(summary)),
        (
            "peak memory",
            f"{size(summary.peak_memory_bytes)} ({size(summary.start_memory_bytes)} at the start)"
            if summary.peak_memory_bytes
            else "not known",
        ),
        ("durations", _evidence(summary.evidence)),
    ]
    pairs += _measured(summary)
    if summary.annotations:
        pairs.append(("annotated", "; ".join(summary.annotations)))
    pairs += [("note", note) for note in summary.notes]
    lines(pairs, title)
    if summary.depths is not None:
        render_depths(summary.depths)
    _shares("Compute by class", summary.by_class, summary.compute_time_ns)
    _shares("Compute by phase", summary.by_phase, summary.compute_time_ns)
    _shares("Compute by module", summary.by_module[:MODULE_ROWS], summary.compute_time_ns)
    if len(summary.by_module) > MODULE_ROWS:
        rest = summary.by_module[MODULE_ROWS:]
        lines(
            [("", f"and {len(rest)} more, {time(sum(s.time_ns for s in rest))} (--json has all)")]
        )
    render_communication(summary)
    if summary.pipeline:
        _render_pipeline(summary.pipeline)
    if summary.compilation is not None:
        from onerank.cli.compiled import render_compilation

        render_compilation(summary.compilation, summary.device)


def _classes(summary: Summary) -> list[tuple[str, str]]:
    """Return which ranks need a trace of their own, where one does not stand for all."""
    if len(summary.classes) < 2:
        return []
    first = [str(one.representative) for one in summary.classes]
    told = ", ".join(first[:RANKS]) + (", ..." if len(first) > RANKS else "")
    return [("rank classes", f"{len(first)} of equal ranks; one of each: {told}")]


def _render_pipeline(stage: StageSummary) -> None:
    """Print what memory the stage needs under each schedule."""
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


def _evidence(counts: dict[str, int]) -> str:
    words = {"none": "of unknown origin"}
    return ", ".join(f"{n} {words.get(name, name)}" for name, n in counts.items()) or "none"


def _step(summary: Summary) -> str:
    if summary.measured_step_ns is None:
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
    """Return the lines on how the step was measured, those that there are."""
    pairs: list[tuple[str, str]] = []
    if summary.gap_ns is not None and not summary.annotations:
        pairs.append(
            ("GPU busy", f"{time(summary.gpu_busy_ns)} of the step; idle {time(summary.gap_ns)}")
        )
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
            ("modules timed", f"in {len(summary.timed_step_ns)} steps of {time(step)} (--grain)")
        )
    if summary.sensors is not None:
        pairs.append(("sensors", _sensors(summary.sensors)))
    return pairs


def _sensors(sensors: Sensors) -> str:
    given = (
        ("SM ", sensors.sm_clock_mhz, 1, "MHz"),
        ("memory ", sensors.memory_clock_mhz, 1, "MHz"),
        ("", sensors.power_mw, 1000, "W"),
        ("", sensors.temperature_c, 1, "°C"),
    )
    texts = [
        f"{name}{reading.median / scale:.0f} {unit} "
        f"({reading.low / scale:.0f} to {reading.high / scale:.0f})"
        for name, reading, scale, unit in given
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
            time(share.time_ns),
            f"{share.time_ns / total_ns:.1%}" if total_ns else "-",
            flops(share.flops) + (f" (+{share.without_flops} ?)" if share.without_flops else ""),
            size(share.bytes),
        )
        for share in shares
    ]
    table(title, ("", "nodes", "time", "share", "FLOPs", "bytes"), rows)


def render_depths(depths: Depths) -> None:
    """Print the captures at several depths, the lines through them and what bears them out."""
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
        ("beside the layers", *(show(line.intercept) for line, show in figures)),
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
    if depths.unlike is not None:
        pairs.append(("layers unlike", f"{depths.unlike:.2%} of the deepest capture's compute"))
    lines(pairs)


def _residual(line: Line) -> str:
    return "none: two depths" if line.residual is None else f"{line.residual:.2%}"


def render_communication(summary: Summary) -> None:
    """Print the communication calls by group."""
    rows = [
        (
            use.group or "(none)",
            _ranks(use.group_ranks),
            use.type,
            use.phase or "-",
            use.count,
            size(use.bytes),
            size(use.bytes * use.count),
        )
        for use in summary.collectives
    ]
    columns = ("group", "ranks", "call", "phase", "count", "each", "in all")
    table("Communication by group (per-rank input)", columns, rows)


def _ranks(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "?"
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{len(ranks)} ranks"


def render_replay(done: Replay, title: str) -> None:
    """Print where the time of a replayed step goes."""
    total = done.step_time_ns

    def part(ns: int) -> str:
        return f"{time(ns)} ({ns / total:.1%})"

    pairs = [("step, replayed", time(total))]
    if done.measured_ns:
        off = total / done.measured_ns - 1
        pairs.append(
            ("step, profiled", f"{time(done.measured_ns)}; the replay is off by {off:+.2%}")
        )
    pairs += [
        ("compute", part(done.compute_ns)),
        ("exposed comm.", part(done.exposed_communication_ns)),
        ("idle", f"{part(done.idle_ns)}, {time(done.host_bound_ns)} of it waiting for a launch"),
    ]
    lines(pairs, title)
    rows = [
        (share.name or "(none)", share.kind, str(share.nodes), time(share.time_ns),
         f"{share.time_ns / total:.1%}")
        for share in done.critical_path[:MODULE_ROWS]
    ]  # fmt: skip
    table("Critical path", ("", "what", "nodes", "time", "share"), rows, texts=(0, 1))


def render_model(report: OnnxConversion) -> None:
    """Print what an ONNX model became."""
    pairs = [
        ("nodes", f"{report.nodes}: {report.launching} compute, {report.launching_nothing} do not"),
        ("weights", f"{report.weights} elements, {size(report.weight_bytes)}"),
    ]
    if report.sizes:
        pairs.append(("sizes", ", ".join(f"{name} {n}" for name, n in report.sizes.items())))
    for label, counts in (
        ("unknown", report.unknown),
        ("not expanded", report.not_expanded),
        ("no shapes", report.without_shapes),
        ("no backward", report.without_backward),
    ):
        pairs += [(label, f"{n} of {what}") for what, n in counts.items()]
    lines(pairs)


def render_conversion(
    report: Conversion, sliced: Sequence[tuple[str, Any]] = (), title: str = "Linked"
) -> None:
    """Print what a conversion linked and left out."""
    pairs: list[tuple[str, str]] = []
    for model, one in sliced:
        counts = ", ".join(f"{count} {style}" for style, count in one.modules.items())
        pairs.append(
            (
                "sliced",
                f"{model}: {one.elements_before} to {one.elements_after} parameters ({counts})",
            )
        )
    gpu = {**report.gpu_ops_linked, **report.gpu_ops_unlinked}
    count, ns = report.gpu_ops_left_out
    if report.gpu_ops:
        by_rule = ", ".join(f"{n} by {rule}" for rule, n in gpu.items())
        pairs.append(("GPU operations", f"{report.gpu_ops}: {by_rule}"))
        if count:
            pairs.append(
                ("left out", f"{count} GPU operations ({time(ns)}) emulating communication")
            )
    pairs.append(("operators", f"{report.host_ops}, {report.host_ops_kept} of them nodes"))
    pairs += [("left out", f"{n} operators: {why}") for why, n in report.host_ops_left_out.items()]
    if report.host_ops_without_record:
        pairs.append(("no shapes", f"{report.host_ops_without_record} operators without ET record"))
    if report.backward_ops:
        share = f"{report.backward_ops_with_module} of {report.backward_ops} operators"
        pairs.append(("backward", f"{share} attributed to a module"))
    pairs.append(("communication", f"{report.communication} calls"))
    pairs += [
        ("left out", f"{n} synchronisations: {why}") for why, n in report.syncs_left_out.items()
    ]
    pairs.append(
        (
            "memory",
            f"{report.memory_events} events, {report.memory_events_outside} outside operators",
        )
    )
    if report.memory_events_elsewhere:
        count = report.memory_events_elsewhere
        pairs.append(("left out", f"{count} memory events of another kind of device"))
    pairs.append(("times from", report.timing))
    if report.steps > 1:
        least, most = min(report.step_times_ns), max(report.step_times_ns)
        pairs.append(("steps", f"from {time(least)} to {time(most)} of compute each"))
    pairs += [("note", note) for note in report.notes]
    lines(pairs, title)


def render_difference(difference: Difference, before: str, after: str) -> None:
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
                time(change.time_before_ns),
                time(change.time_after_ns),
                _ratio(change),
            )
            for change in changes
        ]
        table(title, ("", "nodes", "after", "time", "after", "ratio"), rows)
    for what, changes in (("modules", difference.by_module), ("kernels", difference.by_kernel)):
        if len(changes) > MODULE_ROWS:
            lines([("", f"and {len(changes) - MODULE_ROWS} more {what} (--json has all)")])


def _pair(change: Change) -> str:
    return (
        f"{time(change.time_before_ns)} in {counted(change.count_before, 'node')} -> "
        f"{time(change.time_after_ns)} in {change.count_after} ({_ratio(change)})"
    )


def _ratio(change: Change) -> str:
    if not change.time_before_ns:
        return "new" if change.time_after_ns else "-"
    return f"x{change.time_after_ns / change.time_before_ns:.3f}"


def render_recosting(recosting: Recosting, notes: Sequence[str], trace: str, output: str) -> None:
    """Print what a re-costing changed; `notes` are those of the graph it made."""
    before, after = recosting.before_ns, recosting.after_ns
    pairs = [
        ("compute", f"{time(before)} on {recosting.source} -> {time(after)} on {recosting.target}"),
        ("model", recosting.model),
        ("evidence", _evidence(recosting.evidence)),
    ]
    if recosting.interval:
        low, high = recosting.interval
        pairs.insert(1, ("80% interval", f"{time(low)} to {time(high)}"))
    pairs += [("rule", f"{counted(n, 'node')}: {rule}") for rule, n in recosting.rules.items()]
    pairs += [("dropped", f"{n} {op}: launches nothing") for op, n in recosting.dropped.items()]
    if recosting.unknown:
        count = sum(kernel.count for kernel in recosting.unknown)
        names = ", ".join(dict.fromkeys(kernel.op or kernel.name for kernel in recosting.unknown))
        spent = time(sum(kernel.after_ns for kernel in recosting.unknown))
        nodes = counted(count, "node")
        pairs.append(("unknown", f"{nodes} without a class or formula ({spent}): {names}"))
    pairs += [("note", note) for note in notes]
    lines(pairs, f"{trace} -> {output}")
    rows = [
        (
            row.op_class.value,
            row.count,
            time(row.before_ns),
            time(row.after_ns),
            f"x{row.after_ns / row.before_ns:.3f}" if row.before_ns else "-",
            flops(row.flops),
            size(row.bytes_read + row.bytes_written),
        )
        for row in recosting.classes
    ]
    columns = ("", "nodes", "before", "after", "ratio", "FLOPs", "bytes")
    table(f"Compute by class, on {recosting.source} and on {recosting.target}", columns, rows)


def render_explanation(explanation: Explanation) -> None:
    """Print how one node's duration was predicted."""
    lines(list(explanation.lines), f"node {explanation.node}: {explanation.name}")


def render_export(done: Export) -> None:
    """Print what an export wrote."""
    groups = "; ".join(f"{number}: {_ranks(ranks)}" for number, ranks in done.groups.items())
    pairs = [
        ("ranks", str(done.ranks)),
        ("nodes per rank", str(done.nodes)),
        ("GPU time per rank", time(done.gpu_time_ns)),
        ("groups", groups),
    ]
    pairs += [
        (f"stage {', '.join(map(str, stages))}", f"{size(peak)} of memory at the peak")
        for stages, peak in done.peak_memory_bytes
    ]
    pairs += [("left out", f"{count}: {what}") for what, count in done.left_out.items()]
    pairs += [("note", note) for note in done.notes]
    pairs.append(("checked", "no findings"))
    pairs.append(
        (
            "run it",
            f"ASTRA_SIM_BIN=.../AstraSim_Analytical_Congestion_Unaware {done.directory}/run.sh",
        )
    )
    lines(pairs, f"{done.directory}: ASTRA-sim workload of {len(done.files)} files")


def render_simai(done: SimaiExport) -> None:
    """Print what a SimAI workload holds and what it does not."""
    batches = f"{done.micro_batches} micro-batch{'' if done.micro_batches == 1 else 'es'}"
    pairs = [
        ("ranks", f"{done.all_gpus}; all replay the step of rank {done.rank}"),
        ("rows", f"{done.rows} for {batches}"),
        ("forward", time(done.forward_ns)),
        ("input grad.", time(done.input_gradient_ns)),
        ("weight grad.", time(done.weight_gradient_ns)),
        ("optimizer", time(done.optimizer_ns)),
    ]
    pairs += [("lost", loss) for loss in done.losses]
    pairs += [("note", note) for note in done.notes]
    lines(pairs, f"{done.path}: SimAI workload")


def render_goal(done: GoalExport) -> None:
    """Print what a GOAL schedule holds."""
    name = done.path.stem
    pairs = [
        ("ranks", str(done.ranks)),
        ("operations", str(done.operations)),
        ("GPU time per rank", time(done.gpu_time_ns)),
        ("cpus", str(done.cpus)),
    ]
    pairs += [("communication", f"{count}: {what}") for what, count in done.algorithms.items()]
    pairs += [("left out", f"{count}: {what}") for what, count in done.left_out.items()]
    pairs += [("note", note) for note in done.notes]
    pairs.append(("compile it", f"txt2bin -i {done.path} -o {name}.bin"))
    pairs.append(("run it", f"LogGOPSim -f {name}.bin -L 500 -o 0 -g 0 -G 0.0022 -S {2**31 - 1}"))
    lines(pairs, f"{done.path}: GOAL schedule")


def render_findings(findings: Sequence[Finding], path: str, *, alone: bool) -> None:
    """Print the findings of a check; `alone`: of one file, so of its structure only."""
    if not findings:
        rest = " in its structure; give the directory to check a workload" if alone else ""
        lines([("checked", f"no findings{rest}")], path)
        return
    rows = [
        (found.rule, found.file, "" if found.node is None else found.node, found.message)
        for found in findings
    ]
    columns = ("rule", "file", "node", "message")
    table(f"{path}: {counted(len(findings), 'finding')}", columns, rows, texts=(0, 1, 3))


def render_gpus(gpus: Sequence[Gpu]) -> None:
    """Print GPU descriptions."""
    rows = [
        (
            gpu.name,
            gpu.architecture,
            gpu.sm_count,
            f"{gpu.memory_bytes / 1e9:.0f}",
            f"{gpu.peak_bandwidth_bytes_per_s / 1e9:.0f}",
            *(_tera(gpu.peak_tensor_flops_per_s(dtype)) for dtype in ("bfloat16", "float16")),
            ", ".join(gpu.aliases),
        )
        for gpu in gpus
    ]
    columns = ("name", "family", "SMs", "GB", "GB/s", "bf16", "fp16", "also known as")
    table("GPU descriptions; bf16 and fp16 in dense TFLOP/s", columns, rows, texts=(0, 1, 7))


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e12:.0f}"
