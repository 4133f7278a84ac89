"""Tables of a conversion: linked and dropped records, and the operators of an ONNX model."""

from collections.abc import Sequence
from typing import Any

from onerank.cli.terminal import lines
from onerank.converters.sources.kineto import Conversion
from onerank.converters.sources.onnx import OnnxConversion
from onerank.display import size, time


def render_model(report: OnnxConversion) -> None:
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


def render_conversion(
    report: Conversion, sliced: Sequence[tuple[str, Any]] = (), title: str = "Linked"
) -> None:
    """Print what a conversion linked and dropped."""
    pairs: list[tuple[str, str]] = []
    for model, slicing in sliced:
        counts = ", ".join(f"{count} {style}" for style, count in slicing.modules.items())
        change = f"{model}: {slicing.elements_before} to {slicing.elements_after} parameters"
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
    pairs += [("note", note) for note in report.notes]
    lines(pairs, title)
