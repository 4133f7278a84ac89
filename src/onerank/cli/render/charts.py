"""Charts of the report as SVG."""

import io
from collections.abc import Sequence
from typing import Any

from onerank.analysis.report_data import (
    COMMUNICATION,
    IDLE,
    Lane,
    MemoryCourse,
    Part,
    RooflinePoints,
)
from onerank.annotate import CLASSES, Gpu
from onerank.cli.terminal import visible_line
from onerank.ir.errors import OneRankError

_WIDTH_INCHES = 11.0

_MANY = 4000
"""More shapes than this become pixels within the SVG, which a browser shows faster."""

_OWN = {COMMUNICATION: "#d62728", IDLE: "#dddddd"}

_PLACES = {one.value: place for place, one in enumerate(CLASSES)}


class PicturesError(OneRankError):
    """Pictures need matplotlib, which is not installed."""


def draw_parts(parts: Sequence[Part]) -> str:
    """Draw the step as one bar."""
    figure, axes = _figure(1.9)
    start = 0.0
    for part in parts:
        width = part.time_ns / 1e6
        axes.barh(0, width, left=start, color=_colour(part.name), label=part.name)
        start += width
    axes.set_yticks([])
    axes.set_xlim(0, start)
    axes.set_xlabel("ms of the replayed step")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=8, fontsize=8, frameon=False)
    return _svg(figure)


def draw_lanes(lanes: Sequence[Lane]) -> str:
    """Draw when what ran on each stream."""
    figure, axes = _figure(0.9 + 0.4 * len(lanes))
    pixels = sum(len(span.start_ns) for lane in lanes for span in lane.spans) > _MANY
    for row, lane in enumerate(lanes):
        for span in lane.spans:
            bars = zip((span.start_ns / 1e6).tolist(), (span.duration_ns / 1e6).tolist(),
                       strict=True)  # fmt: skip
            axes.broken_barh(
                list(bars), (row - 0.4, 0.8), facecolors=_colour(span.name), rasterized=pixels,
                linewidth=0,
            )  # fmt: skip
    axes.set_yticks(range(len(lanes)), [lane.title for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms from the step's start, as replayed")
    return _svg(figure)


def draw_roofline(kernels: Sequence[RooflinePoints], gpu: Gpu, dtype: str) -> str:
    """Draw each distinct kernel's rate over its intensity, below what `gpu` can do.

    Args:
        kernels: by class.
        gpu: the device they ran on.
        dtype: torch data type whose matrix peak is drawn.
    """
    figure, axes = _figure(4.2)
    longest = max(int(kernel.time_ns.max()) for kernel in kernels)
    for kernel in kernels:
        axes.scatter(
            kernel.intensity, kernel.flops_per_s / 1e12,
            s=(6 + 240 * kernel.time_ns / longest).tolist(), color=_colour(kernel.name), alpha=0.6,
            label=kernel.name, linewidths=0, rasterized=len(kernel.time_ns) > _MANY,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_xlim()
    bottom = axes.get_ylim()[0]
    peak, bandwidth = gpu.peak_tensor_flops_per_s(dtype), gpu.peak_bandwidth_bytes_per_s
    ridge = peak / bandwidth if peak else high
    axes.plot([low, ridge], [low * bandwidth / 1e12, ridge * bandwidth / 1e12], "k-", lw=1)
    if peak:
        axes.plot([ridge, max(high, ridge)], [peak / 1e12, peak / 1e12], "k-", lw=1,
                  label=f"{gpu.name}, {dtype}")  # fmt: skip
    axes.set_ylim(bottom=bottom)
    axes.set_xlabel("FLOPs per byte of the operands (area: time)")
    axes.set_ylabel("TFLOP/s")
    _legend(axes)
    return _svg(figure)


def draw_memory(course: MemoryCourse, capacity_bytes: int) -> str:
    """Draw memory by class over the step's allocations and frees, below what the device has."""
    figure, axes = _figure(3.4)
    events = range(course.bytes.shape[1])
    colours = [f"C{place}" for place in range(len(course.names))]
    axes.stackplot(
        events, course.bytes / 1e9, labels=course.names, colors=colours, step="post",
        rasterized=len(events) > _MANY, linewidth=0,
    )  # fmt: skip
    top = float(course.bytes.sum(axis=0).max()) / 1e9
    if capacity_bytes and capacity_bytes / 1e9 < 2 * top:
        axes.axhline(capacity_bytes / 1e9, color="k", lw=1, label="the device's memory")
    for name, first in course.phases.items():
        axes.axvline(first, color="0.4", lw=0.7, ls=":")
        axes.annotate(name, (first, 1.01), xycoords=("data", "axes fraction"), fontsize=8)
    axes.set_xlim(0, max(1, len(events) - 1))
    axes.set_xlabel("allocations and frees, in order")
    axes.set_ylabel("GB in use")
    _legend(axes)
    return _svg(figure)


def _figure(height_inches: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PicturesError(
            "pictures need matplotlib: pip install 'onerank[report]'", code="report-not-installed"
        ) from error
    figure: Any = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    return figure, figure.subplots()


def _colour(name: str) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if name in _OWN:
        return _OWN[name]
    # The strong half first; red is communication's, grey is nobody's.
    shades = [*range(0, 20, 2), *range(1, 20, 2)]
    free = [shade for shade in shades if shade not in {6, 7, 14, 15}]
    return to_hex(colormaps["tab20"](free[_PLACES[name] % len(free)]))


def _legend(axes: Any) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def _svg(figure: Any) -> str:
    """Return the picture without its XML head, to stand within a page; the same each time."""
    import matplotlib as mpl
    from matplotlib.text import Text

    package: Any = mpl
    made = io.StringIO()
    for text in figure.findobj(Text):
        # Group and GPU names come from files: "$" is no formula, and SVG has no control characters.
        text.set_parse_math(False)
        text.set_text(visible_line(text.get_text()))
    with package.rc_context({"svg.hashsalt": "onerank", "svg.fonttype": "none"}):
        figure.savefig(made, format="svg", metadata={"Date": None}, dpi=150)
    text = made.getvalue()
    return text[text.index("<svg") :]
