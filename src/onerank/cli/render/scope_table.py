"""Table of layers, sub-modules and kernels."""

from collections.abc import Sequence

from onerank.analysis.scope_breakdown import Grain, Part, merged
from onerank.cli.render.tables import flops, lines, short_kernel, size, table, time

KERNEL_ROWS = 40


def render_parts(found: Sequence[Part], grain: Grain, title: str) -> None:
    """Print a row per layer; per sub-module, those of all layers summed; or per kernel."""
    total = sum(part.time_ns for part in found)
    shown = merged(found) if grain == "submodule" else list(found)
    if grain == "kernel":
        shown = sorted(shown, key=lambda part: (-part.time_ns, part.name))
    left_out = shown[KERNEL_ROWS:] if grain == "kernel" else []
    rows = shown[: len(shown) - len(left_out)]
    _table(f"{title}: {time(total)} of compute by {grain}", grain, rows, _times(rows, total))
    if any(part.timed_forward_ns is not None for part in rows):
        lines([("", "by events: CUDA events (a clock on a CPU), no profiler, gaps included")])
    _table("Work and memory", grain, rows, _work(rows))
    if left_out:
        rest = sum(part.time_ns for part in left_out)
        lines([("", f"and {len(left_out)} more, {time(rest)} (--json has all)")])


_Columns = dict[str, list[str]]
"""Heading -> cells."""


def _table(title: str, grain: Grain, found: Sequence[Part], figures: _Columns) -> None:
    """Print figures next to names and, for modules, their roles and counts."""
    whole: _Columns = {"": [part.name or "(none)" for part in found]}
    if grain == "kernel":
        whole[""] = [short_kernel(name) for name in whole[""]]
    else:
        whole["role"] = [part.role for part in found]
        whole["modules"] = [str(part.instances) for part in found]
    whole |= figures
    texts = (0,) if grain == "kernel" else (0, 1)
    table(title, [*whole], [*zip(*whole.values(), strict=True)], texts=texts)


def _times(found: Sequence[Part], total_ns: int) -> _Columns:
    columns = {
        "nodes": [str(part.nodes) for part in found],
        "forward": [_time(part.forward_ns) for part in found],
        "backward": [_time(part.backward_ns) for part in found],
        "other": [_time(part.other_ns) for part in found],
        "share": [f"{part.time_ns / total_ns:.1%}" if total_ns else "-" for part in found],
    }
    if any(part.timed_forward_ns is not None for part in found):
        columns["by events: fwd"] = [time(part.timed_forward_ns) for part in found]
        columns["bwd"] = [time(part.timed_backward_ns) for part in found]
    return columns


def _work(found: Sequence[Part]) -> _Columns:
    return {
        "FLOPs": [
            flops(part.flops) + (f" (+{part.without_flops} ?)" if part.without_flops else "")
            for part in found
        ],
        "bytes": [size(part.bytes) for part in found],
        "allocated": [size(part.allocated_bytes) for part in found],
        "freed": [size(part.freed_bytes) for part in found],
    }


def _time(ns: int) -> str:
    return time(ns) if ns else "-"
