"""Charts of the report as Plotly figures: dictionaries with `data` and `layout`.

Plotly reads some HTML in names and hover texts, so every name that comes from a trace is escaped.
"""

import html
import importlib
import math
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
from onerank.cli.terminal import short_kernel, visible_line
from onerank.display import size, time
from onerank.ir import Graph
from onerank.ir.errors import OneRankError
from onerank.plan.layouts import PredictedRange
from onerank.serving.serving_curves import Curve, LargestBatches

Figure = dict[str, Any]

MOST_SPANS = 20_000
"""Bars of a timeline. Plotly draws each as an SVG element, and more make zooming sluggish."""

# Points of a memory chart; the largest value of each group of events is kept.
_MOST_EVENTS = 4_000

# The whole step has an empty path, and Plotly's treemap refers to parents by id.
_ROOT = "step"

# Tableau's 20 colours without its two reds and two greys: red is communication's, grey idle time's.
_PALETTE = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf",
    "#aec7e8", "#ffbb78", "#98df8a", "#c5b0d5", "#c49c94", "#f7b6d2", "#dbdb8d", "#9edae5",
)  # fmt: skip

# Modules are not classes of work, so their colours are others.
_LIMIT = "#d62728"
"""Colour of limits, and of what exceeds them."""

_MODULE_PALETTE = ("#4c78a8", "#5d8a86", "#6b7f52", "#7a6a8f", "#8a6d5b")

_COLOURS = {
    **{kind.value: _PALETTE[place % len(_PALETTE)] for place, kind in enumerate(CLASSES)},
    COMMUNICATION: "#d62728",
    IDLE: "#999999",
}


class ReportError(OneRankError):
    """The report needs Plotly, which is not installed."""


def plotly_js() -> str:
    """Return Plotly's JavaScript library.

    Raises:
        ReportError: plotly is not installed.
    """
    try:
        # By name, because plotly has no type stubs.
        offline: Any = importlib.import_module("plotly.offline")
    except ImportError as error:
        raise ReportError(
            "a report needs plotly: pip install 'onerank[report]'", code="report-not-installed"
        ) from error
    return offline.get_plotlyjs()


def class_colours(parts: Sequence[StepPart]) -> dict[str, str]:
    """Return the colour of each part of the step, for the key of the page."""
    return {part.name: _COLOURS[part.name] for part in parts}


def memory_colours(memory: MemoryChart) -> dict[str, str]:
    """Return the colour of each class of memory."""
    return {name: _PALETTE[row % len(_PALETTE)] for row, name in enumerate(memory.names)}


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
    return _figure(data, 140, barmode="stack", xaxis=axis, yaxis={"fixedrange": True})


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
                        [_escaped(short_kernel(names[node])), _escaped(modules[node]), time(ns)]
                        for node, ns in zip(nodes, span.duration_ns[drawn].tolist(), strict=True)
                    ],
                    "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]}, "
                    "at %{base:.3f} ms<extra></extra>",
                }
            )
    figure = _figure(
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
    labels = [_escaped(module.path.rpartition(".")[2]) or _ROOT for module in ordered]
    total = max((module.time_ns for module in ordered), default=0) or 1
    return _figure(
        [
            {
                "type": "treemap",
                "ids": [_escaped(module.path) or _ROOT for module in ordered],
                "parents": [
                    (_escaped(module.parent) or _ROOT) if module.path else "" for module in ordered
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
                [_escaped(short_kernel(name)), calls, time(ns)]
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
    return _figure(
        [*data, _roof(gpu, dtype, lowest, highest)],
        470,
        xaxis={**powers, "title": {"text": "FLOPs per byte of the operands"}},
        yaxis={**powers, "title": {"text": "TFLOP/s"}},
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
        "name": _escaped(f"{gpu.name}, {dtype}" if peak else gpu.name),
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
        lines.append(_line_across(capacity_bytes / 1e9))
    return _figure(
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
    labels = [f"{_escaped(row.module) or '(none)'} · {row.memory_class}" for row in rows]
    return _figure(
        [
            {
                "type": "bar",
                "orientation": "h",
                "y": labels,
                "x": [row.bytes / 1e9 for row in rows],
                "customdata": [[size(row.bytes), row.blocks] for row in rows],
                "hovertemplate": "%{y}<br>%{customdata[0]} in %{customdata[1]} blocks"
                "<extra></extra>",
                "marker": {"color": _PALETTE[0]},
            }
        ],
        90 + 24 * len(rows),
        xaxis={"title": {"text": "GB at the peak"}},
        yaxis={"automargin": True, "tickfont": {"size": 11}},
    )


def curve_colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each curve."""
    return {name: _PALETTE[place % len(_PALETTE)] for place, name in enumerate(names)}


def curves_chart(curves: Sequence[Curve], colours: Mapping[str, str], x: str, y: str) -> Figure:
    """Draw curves with the 80% intervals of their points, on logarithmic axes.

    Args:
        curves: the curves.
        colours: colour of each.
        x: title of the horizontal axis.
        y: title of the vertical axis.
    """
    data: list[Figure] = []
    for curve in curves:
        points = curve.points
        known = [point.low is not None and point.high is not None for point in points]
        pairs = [*zip(points, known, strict=True)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": _escaped(curve.name),
                "x": [point.x for point in points],
                "y": [point.y for point in points],
                "text": [_escaped(point.label) for point in points],
                "line": {"color": colours[curve.name], "width": 1.5},
                "marker": {"color": colours[curve.name], "size": 6},
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [(p.high or 0) - p.y if has else 0 for p, has in pairs],
                    "arrayminus": [p.y - (p.low or 0) if has else 0 for p, has in pairs],
                    "thickness": 1,
                    "width": 2,
                },
                "hovertemplate": f"%{{text}}<br>%{{y:.4g}} {y}<extra></extra>",
            }
        )
    return _figure(data, 400, xaxis=_log_axis(x), yaxis=_log_axis(y))


def _log_axis(title: str) -> Figure:
    return {"type": "log", "exponentformat": "none", "title": {"text": title}}


BATCH_COLOURS = {
    "the largest that fits": _PALETTE[0],
    "of the grid, fits": _PALETTE[2],
    "of the grid, does not fit": "#d62728",
}
"""Colours of the chart of batches, for the key of the page."""


def batches_chart(largest: LargestBatches) -> Figure:
    """Draw the largest batch of decodes by context, and the decodes of the grid."""

    def points(pairs: Sequence[tuple[int, int]], name: str, **style: Any) -> Figure:
        return {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            # A logarithmic axis has no 0.
            "x": [max(1, context) for context, _ in pairs],
            "y": [batch for _, batch in pairs],
            "marker": style,
            "hovertemplate": f"batch %{{y:,}} at context %{{x:,}}: {name}<extra></extra>",
        }

    shown = [
        (context, batch)
        for context, batch in zip(largest.contexts, largest.batches, strict=True)
        if batch
    ]
    name = "the largest that fits"
    line = points(shown, name, color=BATCH_COLOURS[name], size=6)
    line |= {"mode": "lines+markers", "line": {"color": BATCH_COLOURS[name], "width": 1.5}}
    data = [line]
    for pairs, name, symbol in (
        (largest.fitting, "of the grid, fits", "circle"),
        (largest.misfits, "of the grid, does not fit", "x"),
    ):
        if pairs:
            colour = BATCH_COLOURS[name]
            data.append(points(pairs, name, color=colour, symbol=symbol, size=7))
    return _figure(
        data,
        400,
        xaxis=_log_axis("context of each sequence (tokens)"),
        yaxis=_log_axis("sequences"),
    )


def share_ranges(figures: Sequence[Figure]) -> None:
    """Give the logarithmic axes of several figures the range of all their points."""
    for axis, values in (("xaxis", "x"), ("yaxis", "y")):
        if any(figure["layout"].get(axis, {}).get("type") != "log" for figure in figures):
            continue
        drawn = [
            value
            for figure in figures
            for trace in figure["data"]
            for value in _ends(trace, values)
            if value > 0
        ]
        if drawn:
            low, high = math.log10(min(drawn)), math.log10(max(drawn))
            margin = 0.03 * (high - low) + 0.03
            for figure in figures:
                layout = figure["layout"][axis]
                layout["range"] = [low - margin, high + margin]
                layout |= _ticks(10 ** (low - margin), 10 ** (high + margin))


# Below these ratios of an axis' ends, it has ticks at these multiples of powers of ten: those at
# powers of ten alone would be one or two.
_MULTIPLES = ((4, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)), (150, (1, 2, 5)))


_FEWEST_TICKS = 3


def _ticks(low: float, high: float) -> Figure:
    """Return the ticks of a logarithmic axis."""
    multiples = next((values for ratio, values in _MULTIPLES if high / low < ratio), None)
    if multiples is None:
        return {"dtick": 1}
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    ticks = [multiple * 10.0**power for power in powers for multiple in multiples]
    shown = [tick for tick in ticks if low <= tick <= high]
    if len(shown) < _FEWEST_TICKS:
        # A range of a few percent holds one of the multiples, or none: equal steps read better.
        step = 10.0 ** math.floor(math.log10((high - low) / 2))
        step *= next(k for k in (5, 2, 1) if (high - low) / (k * step) >= _FEWEST_TICKS or k == 1)
        first, last = math.ceil(low / step), math.floor(high / step)
        shown = [step * k for k in range(first, last + 1)]
    return {"tickvals": shown, "ticktext": [f"{tick:,.10g}" for tick in shown]}


def _ends(trace: Figure, values: str) -> list[float]:
    """Return the values of a trace, and the ends of their intervals."""
    given: list[float] = trace[values]
    interval = trace.get(f"error_{values}")
    if interval is None:
        return given
    above, below = interval["array"], interval["arrayminus"]
    ends = [(v + a, v - b) for v, a, b in zip(given, above, below, strict=True)]
    return [*given, *(end for pair in ends for end in pair)]


def pareto_chart(
    title: str,
    steps_s: Sequence[PredictedRange],
    values: Sequence[PredictedRange],
    names: Sequence[str],
    fitting: int,
    front: Sequence[int],
    limit: tuple[float, str] | None = None,
) -> Figure:
    """Draw layouts by step time and another figure, and the front of the best ones.

    Args:
        title: name and unit of the figure.
        steps_s: step time of each layout, in s.
        values: the figure of each layout.
        names: the layouts.
        fitting: how many fit into memory; they are the first. The others are crosses.
        front: those that no other beats in both figures, by step time.
        limit: largest value of the figure with which a layout fits, and its name; a line if it is
            less than twice the largest value.
    """

    def points(indices: Sequence[int], **style: Any) -> Figure:
        return {
            "type": "scatter",
            "x": [steps_s[i].value for i in indices],
            "y": [values[i].value for i in indices],
            "text": [_escaped(names[i]) for i in indices],
            "hovertemplate": "%{text}<br>%{x:.4g} s, %{y:.4g}<extra></extra>",
            **style,
        }

    def interval(ranges: Sequence[PredictedRange]) -> Figure:
        return {
            "type": "data",
            "symmetric": False,
            "array": [ranges[i].high - ranges[i].value for i in front],
            "arrayminus": [ranges[i].value - ranges[i].low for i in front],
            "thickness": 1,
            "width": 3,
        }

    behind = [i for i in range(fitting) if i not in front]
    cross = {"color": _LIMIT, "symbol": "x", "size": 7}
    data = [
        points(range(fitting, len(names)), mode="markers", marker=cross),
        points(behind, mode="markers", marker={"color": _PALETTE[8], "size": 7}),
        # Intervals of all points would hide them.
        points(
            front,
            mode="lines+markers",
            marker={"color": _PALETTE[0], "size": 10},
            # A staircase: every point above it is beaten by a point of the front.
            line={"shape": "hv", "width": 1},
            error_x=interval(steps_s),
            error_y=interval(values),
        ),
    ]
    lines, marks = list[Figure](), list[Figure]()
    # As in `memory_chart`, a limit far above all points would flatten the chart.
    if limit is not None and limit[0] < 2 * max(each.value for each in values):
        value, name = limit
        lines.append(_line_across(value))
        marks.append(
            {"x": 1, "xref": "paper", "xanchor": "right", "y": value, "yanchor": "bottom",
             "text": _escaped(name), "showarrow": False, "font": {"color": _LIMIT}}
        )  # fmt: skip
    return _figure(
        data,
        420,
        annotations=marks,
        shapes=lines,
        xaxis={"title": {"text": "step (s)"}},
        yaxis={"title": {"text": title}},
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


def _line_across(value: float) -> Figure:
    """Return a horizontal line over the whole width of a plot: a limit."""
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value,
            "line": {"color": _LIMIT, "width": 1}}  # fmt: skip


def _milliseconds(ns: "np.ndarray[Any, Any]") -> list[float]:
    return np.round(ns / 1e6, 6).tolist()


def _escaped(text: str) -> str:
    return html.escape(visible_line(text), quote=False)


def _figure(data: list[Figure], height: int, **layout: Any) -> Figure:
    if "yaxis" in layout:
        # Otherwise the axis' title covers tick labels of more than four characters.
        layout["yaxis"] = {"automargin": True, **layout["yaxis"]}
    return {
        "data": data,
        "layout": {
            "height": height,
            "margin": {"l": 60, "r": 12, "t": 24, "b": 48},
            # The page has a key above the figures, shared by two traces.
            "showlegend": False,
            "treemapcolorway": list(_MODULE_PALETTE),
            "modebar": {"bgcolor": "rgba(0,0,0,0)"},
            **layout,
        },
    }
