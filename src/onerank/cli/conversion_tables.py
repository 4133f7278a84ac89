"""Tables of what a conversion linked and dropped: of profiled steps, recordings, ONNX models."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onerank.cli.terminal import counted, lines, say, short_kernel, table
from onerank.display import size, time

if TYPE_CHECKING:
    from onerank.converters.sources.kineto import Conversion
    from onerank.converters.sources.onnx import OnnxConversion
    from onerank.serving.bundle import Bundle
    from onerank.serving.recordings.recording import Recording


def render_conversion(
    report: "Conversion", sliced: Sequence[tuple[str, Any]] = (), title: str = "Linked"
) -> None:
    """Print what a conversion linked and dropped."""
    pairs: list[tuple[str, str]] = []
    for model, slicing in sliced:
        counts = ", ".join(f"{count} {style}" for style, count in slicing.modules.items())
        change = f"{model}: {slicing.elements_before:,} to {slicing.elements_after:,} parameters"
        pairs.append(("sliced", f"{change} ({counts})" if counts else f"{change}, none cut"))
    gpu = {**report.gpu_ops_linked, **report.gpu_ops_unlinked}
    count, ns = report.gpu_ops_dropped
    if report.gpu_ops:
        by_rule = ", ".join(f"{n} by {rule}" for rule, n in gpu.items())
        pairs.append(("GPU operations", f"{report.gpu_ops}: {by_rule}"))
        if count:
            pairs.append(
                ("dropped", f"{count} GPU operations ({time(ns)}) emulating communication")
            )
    pairs.append(("operators", f"{report.host_ops}, {report.host_ops_kept} of them nodes"))
    pairs += [("dropped", f"{n} operators: {why}") for why, n in report.host_ops_dropped.items()]
    if report.host_ops_without_record:
        pairs.append(
            ("no shapes", f"{report.host_ops_without_record} operators without recorded operands")
        )
    if report.backward_ops:
        share = f"{report.backward_ops_with_module} of {report.backward_ops} operators"
        pairs.append(("backward", f"{share} attributed to a module"))
    pairs.append(("communication", f"{report.communication} calls"))
    pairs += [
        ("dropped", f"{n} synchronisations: {why}") for why, n in report.syncs_dropped.items()
    ]
    pairs.append(
        (
            "memory",
            f"{report.memory_events} events, {report.memory_events_outside} outside operators",
        )
    )
    if report.memory_events_elsewhere:
        count = report.memory_events_elsewhere
        pairs.append(("dropped", f"{count} memory events of another device type"))
    pairs.append(("times from", report.timing))
    if report.steps > 1:
        least, most = min(report.step_times_ns), max(report.step_times_ns)
        pairs.append(("steps", f"from {time(least)} to {time(most)} of compute each"))
    pairs += [("note", str(note)) for note in report.notes]
    lines(pairs, title)


def render_model(report: "OnnxConversion") -> None:
    """Print the result of converting an ONNX model."""
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


# Printed compositions and kernel names; the tables have all.
_COMPOSITIONS, _NAMES = 20, 8

_LINKED = {
    "operator": "linked to operators",
    "CUDA graph": "in CUDA graphs",
    "launch call": "launched outside of operators",
    "no launch": "without a recorded launch",
}


def render_recording(recording: "Recording", directory: Path, bundle: "Bundle") -> None:
    """Print the files and steps of a recording, and kernels that are not linked to an operator."""
    manifest = recording.manifest
    for file in manifest.files:
        rank = f", rank {file.rank} of {file.ranks}" if (file.ranks or 1) > 1 else ""
        operations = sum(file.operations.values())
        links = ", ".join(f"{count} {_LINKED[link]}" for link, count in file.operations.items())
        engine = f"{file.engine} {file.version}".rstrip()
        what = "operators" if file.device_type == "cpu" else "GPU operations"
        lines(
            [
                ("engine", f"{engine} on {file.device_text}{rank}"),
                ("steps", ", ".join(f"{count} {kind}" for kind, count in file.steps.items())),
                (what, f"{operations}, {time(file.time_ns)}: {links}"),
                ("outside", f"{file.outside} outside of all steps, {time(file.outside_ns)}"),
            ],
            file.file,
        )
    if bundle.manifest.notes:
        lines([("note", str(note)) for note in bundle.manifest.notes])
    compositions = recording.composition_rows
    rows = [
        (
            row.kind or "-",
            *(_number(n) for n in (row.prefills, row.decodes, row.new_tokens)),
            _number(row.context_low)
            + (f" to {row.context_high:,}" if row.context_high != row.context_low else ""),
            row.steps,
            *(
                "-" if ns is None else time(ns)
                for ns in (row.step_ns, row.host_ns, row.gpu_ns, row.gpu_span_ns)
            ),
        )
        for row in compositions[:_COMPOSITIONS]
    ]
    count = len(compositions)
    shown = "" if count <= _COMPOSITIONS else f", {_COMPOSITIONS} of {count} compositions"
    columns = ("kind", "prefills", "decodes", "new tokens", "context", "steps")
    times = ("to next", "host", "kernels", "GPU span")
    table(f"Engine steps, medians{shown}", (*columns, *times), rows)
    if manifest.unlinked:
        names = [
            (short_kernel(kernel.name), kernel.link, kernel.count, time(kernel.time_ns))
            for kernel in manifest.unlinked[:_NAMES]
        ]
        shown = f", {len(names)} of {len(manifest.unlinked)} names"
        table(
            f"Not linked to an operator{shown}",
            ("kernel", "by", "count", "time"),
            names,
            texts=(0, 1),
        )
    steps, rows = counted(len(recording.step_rows), "step"), counted(len(bundle.rows), "row")
    say(f"{directory}: {steps}, a bundle of {rows}")


def _number(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
