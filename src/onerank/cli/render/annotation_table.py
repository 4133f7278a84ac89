"""Tables of a re-costing and of GPU descriptions."""

from collections.abc import Sequence

from onerank.analysis.predict_ops import OpPrediction
from onerank.analysis.step_time import Parts, StepChange
from onerank.annotate import Explanation, Gpu, Recosting
from onerank.cli.terminal import counted, counts_of_evidence, evidence, lines, parts, table
from onerank.display import flops, size, time

_MOST_NAMES = 12
"""Names of unknown kernels that are listed."""


def render_recosting(
    recosting: Recosting, step: StepChange, notes: Sequence[str], title: str
) -> None:
    """Print what a re-costing changed; `notes` are those of the graph it made."""
    before, after = recosting.before_ns, recosting.after_ns
    pairs = [
        *_step(recosting, step),
        ("compute", f"{time(before)} on {recosting.source} -> {time(after)} on {recosting.target}"),
        *_interval(recosting.interval),
        ("model", recosting.model),
        ("evidence", counts_of_evidence(recosting.evidence, recosting.evidence_ns)),
    ]
    pairs += [("rule", f"{counted(n, 'node')}: {rule}") for rule, n in recosting.rules.items()]
    pairs += [("dropped", f"{n} {op}: launches nothing") for op, n in recosting.dropped.items()]
    if recosting.unknown:
        count = sum(kernel.count for kernel in recosting.unknown)
        names = [*dict.fromkeys(kernel.op or kernel.name for kernel in recosting.unknown)]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        names = ", ".join(names[:_MOST_NAMES]) + more
        spent = time(sum(kernel.after_ns for kernel in recosting.unknown))
        nodes = counted(count, "node")
        pairs.append(("unknown", f"{nodes} without a class or formula ({spent}): {names}"))
    pairs += [("note", note) for note in notes]
    lines(pairs, title)
    _where(recosting, step)
    rows = [
        (
            row.op_class.value,
            row.count,
            time(row.before_ns),
            time(row.after_ns),
            f"x{row.after_ns / row.before_ns:.3f}" if row.before_ns else "-",
            flops(row.flops),
            size(row.bytes_read + row.bytes_written),
            _shares(row.evidence_ns),
        )
        for row in recosting.classes
    ]
    columns = ("", "nodes", "before", "after", "ratio", "FLOPs", "bytes", "evidence by time")
    title = f"Compute by class, on {recosting.source} and on {recosting.target}"
    table(title, columns, rows, texts=(0, len(columns) - 1))


def _step(recosting: Recosting, step: StepChange) -> list[tuple[str, str]]:
    """Say how long the step takes before and after."""
    if step.after is None:
        return []
    how = "steady state" if step.source == "steady_state" else "replayed"
    text = f"{time(step.after.step_ns)} on {recosting.target}"
    if step.before is not None:
        another = step.measured_ns not in {None, step.before.step_ns}
        measured = f" ({time(step.measured_ns)} without the profiler)" if another else ""
        text = f"{time(step.before.step_ns)} on {recosting.source}{measured} -> {text}"
    ends = () if step.p10_ns is None else (step.p10_ns, step.p90_ns)
    return [(f"step, {how}", text), *_interval(ends)]


def _interval(ends: Sequence[int | None]) -> list[tuple[str, str]]:
    return [("80% interval", " to ".join(time(end) for end in ends))] if ends else []


def _where(recosting: Recosting, step: StepChange) -> None:
    """Show where the time of the step goes, before and after."""
    if step.before is None or step.after is None:
        return
    untimed = f", {step.untimed} calls not timed" if step.untimed else ""
    labels = ("compute", f"exposed communication{untimed}", "idle", "  waiting for a launch", "all")
    figures = [
        [f"{time(ns)} {ns / one.step_ns:6.1%}" for ns in _times(one)]
        for one in (step.before, step.after)
    ]
    rows = list(zip(labels, *figures, strict=True))
    host = "steady state" if step.source == "steady_state" else "replayed with its host as profiled"
    table(f"The step, {host}", ("", recosting.source, recosting.target), rows)


def _times(parts: Parts) -> tuple[int, ...]:
    return (
        parts.compute_ns,
        parts.exposed_communication_ns,
        parts.idle_ns,
        parts.host_bound_ns,
        parts.step_ns,
    )


def _shares(times_ns: dict[str, int]) -> str:
    """Say what part of a class's time has which evidence, the largest first."""
    shares = parts(times_ns)
    if len(shares) < 2:
        return "".join(evidence(name) for name in shares)
    ordered = sorted(times_ns, key=lambda name: -times_ns[name])
    return ", ".join(f"{shares[name]} {evidence(name)}" for name in ordered)


def render_explanation(explanation: Explanation) -> None:
    """Print how one node's duration was predicted."""
    lines(list(explanation.lines), f"node {explanation.node}: {explanation.name}")


def render_predictions(predictions: Sequence[OpPrediction]) -> None:
    """Print predicted operators."""
    rows = [
        (
            f"{p.call.op} {p.call.sizes}",
            p.call.dtype,
            time(p.duration_ns),
            "-" if p.p10_ns is None else f"{time(p.p10_ns)} to {time(p.p90_ns)}",
            p.bound,
            evidence(p.evidence),
        )
        for p in predictions
    ]
    columns = ("", "dtype", "time", "80% interval", "bound by", "evidence")
    target = predictions[0].target if predictions else "no operator"
    table(f"On {target}", columns, rows, texts=(0, 1, 4, 5))


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
