"""Charts of a trace: the step, its timeline, modules, roofline and memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onerank.analysis.report_data import (
    COMMUNICATION,
    IDLE,
    Lane,
    MemoryChart,
    ModuleCompute,
    RooflinePoints,
    StepPart,
)
from onerank.annotate import CLASSES, Gpu
from onerank.cli.charts.plotly_figure import PALETTE, Figure, escaped, line_across, plotly_figure
from onerank.cli.terminal import short_kernel
from onerank.display import size, time
from onerank.ir import Graph

MOST_SPANS = 20_000
"""Bars of a timeline. Plotly draws each as an SVG element, and more make zooming sluggish."""

# Points of a memory chart; the largest value of each group of events is kept.
_MOST_EVENTS = 4_000

# The whole step has an empty path, and Plotly's treemap refers to parents by id.
_ROOT = "step"

_COLOURS = {
    **{kind.value: PALETTE[place % len(PALETTE)] for place, kind in enumerate(CLASSES)},
    COMMUNICATION: "#d62728",
    IDLE: "#999999",
}


def class_colours(parts: Sequence[StepPart]) -> dict[str, str]:
    """Return the colour of each part of the step, for the key of the page."""
    return {part.name: _COLOURS[part.name] for part in parts}


def memory_colours(memory: MemoryChart) -> dict[str, str]:
    """Return the colour of each class of memory."""
    return {name: PALETTE[row % len(PALETTE)] for row, name in enumerate(memory.names)}


def step_chart(parts: Sequence[StepPart]) -> Figure:
    """Draw the step as a bar of its parts."""
    total = sum(part.time_ns for part in parts) or 1
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [""],
            "x": [part.time_ns / 1e6],
            "name": part.name,
            "marker": {"color": _COLOURS[part.name]},
            "hovertemplate": f"{part.name}<br>{time(part.time_ns)}, "
            f"{part.time_ns / total:.1%}<extra></extra>",
        }
        for part in parts
    ]
    axis = {"title": {"text": "ms"}}
    return plotly_figure(data, 140, barmode="stack", xaxis=axis, yaxis={"fixedrange": True})


def timeline_chart(graph: Graph, lanes: Sequence[Lane]) -> tuple[Figure, int]:
    """Draw the operations of each stream over time.

    Returns:
        The figure, and the number of short spans that are not drawn.
    """
    # Over MOST_SPANS the shortest spans are dropped: less than a pixel until the user zooms far in.
    lengths = [span.duration_ns for lane in lanes for span in lane.spans]
    durations = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
    shortest = 0
    if len(durations) > MOST_SPANS:
        # The +1 drops all spans as short as the limit: ties would exceed MOST_SPANS.
        shortest = int(np.partition(durations, -MOST_SPANS)[-MOST_SPANS]) + 1
    names, modules = graph.text("name"), graph.text("module")
    titles = [lane.title for lane in lanes]
    data: list[Figure] = []
    for lane in lanes:
        for span in lane.spans:
            drawn = span.duration_ns >= shortest
            nodes: list[int] = span.node[drawn].tolist()
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "y": [lane.title] * len(nodes),
                    "base": _milliseconds(span.start_ns[drawn]),
                    "x": _milliseconds(span.duration_ns[drawn]),
                    "width": 0.8,
                    "name": span.name,
                    "marker": {"color": _COLOURS[span.name], "line": {"width": 0}},
                    "customdata": [
                        [escaped(short_kernel(names[node])), escaped(modules[node]), time(ns)]
                        for node, ns in zip(nodes, span.duration_ns[drawn].tolist(), strict=True)
                    ],
                    "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]}, "
                    "at %{base:.3f} ms<extra></extra>",
                }
            )
    figure = plotly_figure(
        data,
        90 + 46 * len(lanes),
        barmode="overlay",
        dragmode="zoom",
        xaxis={"title": {"text": "ms from the start of the step, replayed"}},
        # Plotly puts the first category at the bottom.
        yaxis={"categoryarray": titles[::-1], "categoryorder": "array", "fixedrange": True},
    )
    return figure, int((durations < shortest).sum())


def module_chart(modules: Sequence[ModuleCompute]) -> Figure:
    """Draw compute time by module as a treemap; a click zooms in."""
    ordered = sorted(modules, key=lambda module: module.path.count("."))
    labels = [escaped(module.path.rpartition(".")[2]) or _ROOT for module in ordered]
    total = max((module.time_ns for module in ordered), default=0) or 1
    return plotly_figure(
        [
            {
                "type": "treemap",
                "ids": [escaped(module.path) or _ROOT for module in ordered],
                "parents": [
                    (escaped(module.parent) or _ROOT) if module.path else "" for module in ordered
                ],
                "labels": labels,
                "values": [module.time_ns for module in ordered],
                # The value of a module includes its sub-modules.
                "branchvalues": "total",
                "customdata": [
                    [time(module.time_ns), f"{module.time_ns / total:.1%}", module.nodes]
                    for module in ordered
                ],
                "texttemplate": "%{label}<br>%{customdata[1]}",
                "hovertemplate": "%{id}<br>%{customdata[0]}, %{customdata[1]}<br>"
                "%{customdata[2]} nodes<extra></extra>",
                "marker": {"line": {"width": 1}},
                "tiling": {"pad": 2},
            }
        ],
        460,
        margin={"l": 4, "r": 4, "t": 28, "b": 4},
    )


def roofline_chart(
    points: Sequence[RooflinePoints],
    gpu: Gpu,
    dtype: str,
    colours: Mapping[str, str] = _COLOURS,
) -> Figure:
    """Draw each distinct kernel's rate over its intensity, and the roof of `gpu`.

    Args:
        points: kernels by class.
        gpu: the device on which they ran.
        dtype: torch data type whose matrix peak is drawn.
        colours: colour of each class.
    """
    longest = max(int(kind.time_ns.max()) for kind in points)
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": kind.name,
            # The range of an axis leaves no room for large markers.
            "cliponaxis": False,
            "x": kind.intensity.tolist(),
            "y": (kind.flops_per_s / 1e12).tolist(),
            "marker": {
                "color": colours[kind.name],
                "opacity": 0.65,
                "line": {"width": 0},
                # The area is proportional to the time.
                "size": (5 + 30 * np.sqrt(kind.time_ns / longest)).tolist(),
            },
            "customdata": [
                [escaped(short_kernel(name)), calls, time(ns)]
                for name, calls, ns in zip(
                    kind.kernels, kind.calls.tolist(), kind.time_ns.tolist(), strict=True
                )
            ],
            "hovertemplate": "%{customdata[0]}<br>%{customdata[1]} calls, %{customdata[2]}<br>"
            "%{y:.3g} TFLOP/s at %{x:.3g} FLOP/B<extra></extra>",
        }
        for kind in points
    ]
    lowest = min(float(kind.intensity.min()) for kind in points) / 2
    highest = max(float(kind.intensity.max()) for kind in points) * 2
    powers = {"type": "log", "dtick": 1, "exponentformat": "power"}
    return plotly_figure(
        [*data, _roof(gpu, dtype, lowest, highest)],
        470,
        xaxis={**powers, "title": {"text": "FLOPs per byte of the operands"}},
        # Plotly enlarges the labels of powers after it has reserved room for them.
        yaxis={**powers, "title": {"text": "TFLOP/s", "standoff": 16}},
    )


def _roof(gpu: Gpu, dtype: str, lowest: float, highest: float) -> Figure:
    """Return the line of the GPU's peak rate between two intensities, in FLOPs per byte."""
    peak, bandwidth = gpu.peak_tensor_flops_per_s(dtype), gpu.peak_bandwidth_bytes_per_s
    # Without a peak for the data type the roof is the slope alone.
    ridge = peak / bandwidth if peak else highest
    roof = [lowest, ridge, max(highest, ridge)] if peak else [lowest, ridge]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escaped(f"{gpu.name}, {dtype}" if peak else gpu.name),
        "x": roof,
        "y": [min(x * bandwidth, peak or x * bandwidth) / 1e12 for x in roof],
        "line": {"color": "#888888", "width": 2},
        "hoverinfo": "name",
    }


def memory_chart(memory: MemoryChart, capacity_bytes: int) -> Figure:
    """Draw memory by class over the allocations and frees of the step, and the peak."""
    total = memory.bytes.sum(axis=0)
    events = _kept_events(total)
    colours = memory_colours(memory)
    data: list[Figure] = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "memory",
            "name": name,
            "x": events.tolist(),
            "y": (memory.bytes[row][events] / 1e9).tolist(),
            # Memory does not change between two events.
            "line": {"width": 0, "shape": "hv"},
            "fillcolor": colours[name],
            "hovertemplate": "%{y:.3f} GB",
        }
        for row, name in enumerate(memory.names)
    ]
    peak = int(total[memory.peak_event])
    marks: list[Figure] = [
        {
            "x": memory.peak_event,
            "y": peak / 1e9,
            "text": f"peak {size(peak)}",
            "showarrow": True,
            "arrowhead": 2,
            "ay": -28,
        }
    ]
    marks += [
        # "paper" is the height of the plot, from 0 to 1, whatever the memory is.
        {"x": event, "y": 1, "yref": "paper", "yanchor": "bottom", "text": name, "showarrow": False}
        for name, event in memory.phases.items()
    ]
    lines: list[Figure] = [
        {"type": "line", "x0": event, "x1": event, "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": "#888888", "width": 1, "dash": "dot"}}
        for event in memory.phases.values()
    ]  # fmt: skip
    # A capacity far above the peak would flatten the chart.
    if capacity_bytes and capacity_bytes < 2 * peak:
        lines.append(line_across(capacity_bytes / 1e9))
    return plotly_figure(
        data,
        400,
        annotations=marks,
        shapes=lines,
        hovermode="x unified",
        xaxis={"title": {"text": "allocations and frees, in order"}},
        yaxis={"title": {"text": "GB in use"}, "rangemode": "tozero"},
    )


def peak_chart(memory: MemoryChart) -> Figure:
    """Draw the blocks that the step allocated and that are in use at the peak, by module."""
    # Reversed, because Plotly draws the first bar at the bottom.
    rows = memory.at_peak[:16][::-1]
    labels = [f"{escaped(row.module) or '(none)'} · {row.memory_class}" for row in rows]
    return plotly_figure(
        [
            {
                "type": "bar",
                "orientation": "h",
                "y": labels,
                "x": [row.bytes / 1e9 for row in rows],
                "customdata": [[size(row.bytes), row.blocks] for row in rows],
                "hovertemplate": "%{y}<br>%{customdata[0]} in %{customdata[1]} blocks"
                "<extra></extra>",
                "marker": {"color": PALETTE[0]},
            }
        ],
        90 + 24 * len(rows),
        xaxis={"title": {"text": "GB at the peak"}},
        yaxis={"automargin": True, "tickfont": {"size": 11}},
    )


def _kept_events(total: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return which events to draw: all, or the one with the most bytes of each group of events.

    The groups are equally long, so the peak is always drawn.
    """
    if len(total) <= _MOST_EVENTS:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), _MOST_EVENTS + 1).astype(np.int64)
    groups = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return np.array([start + int(total[start:end].argmax()) for start, end in groups])


def _milliseconds(ns: "np.ndarray[Any, Any]") -> list[float]:
    return np.round(ns / 1e6, 6).tolist()
