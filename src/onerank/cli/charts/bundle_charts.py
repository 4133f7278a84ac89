"""Charts of a serving bundle: curves by batch and context, and the largest batches that fit."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from onerank.cli.charts.plotly_figure import LIMIT, PALETTE, Figure, escaped, plotly_figure
from onerank.serving.serving_curves import Curve, LargestBatches


def curve_colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each curve."""
    return {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(names)}


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
                "name": escaped(curve.name),
                "x": [point.x for point in points],
                "y": [point.y for point in points],
                "text": [escaped(point.label) for point in points],
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
    return plotly_figure(data, 400, xaxis=_log_axis(x), yaxis=_log_axis(y))


def _log_axis(title: str) -> Figure:
    return {"type": "log", "exponentformat": "none", "title": {"text": title}}


BATCH_COLOURS = {
    "the largest that fits": PALETTE[0],
    "of the grid, fits": PALETTE[2],
    "of the grid, does not fit": LIMIT,
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
    return plotly_figure(
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
            # Sequences and tokens are counted: an axis of them has no tick at 2.5.
            whole = all(isinstance(value, int) for value in drawn)
            low, high = math.log10(min(drawn)), math.log10(max(drawn))
            margin = 0.03 * (high - low) + 0.03
            for figure in figures:
                layout = figure["layout"][axis]
                layout["range"] = [low - margin, high + margin]
                layout |= _ticks(10 ** (low - margin), 10 ** (high + margin), whole=whole)


# Below these ratios of an axis' ends, it has ticks at these multiples of powers of ten: those at
# powers of ten alone would be one or two.
_MULTIPLES = ((4, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)), (150, (1, 2, 5)))


_FEWEST_TICKS = 3


def _ticks(low: float, high: float, *, whole: bool) -> Figure:
    """Return the ticks of a logarithmic axis; `whole` leaves only whole numbers."""
    # Not Plotly's own ticks, which are "1000" and "10,000" on one axis.
    multiples = next((values for ratio, values in _MULTIPLES if high / low < ratio), (1,))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    ticks = [multiple * 10.0**power for power in powers for multiple in multiples]
    shown = [tick for tick in ticks if low <= tick <= high]
    if len(shown) < _FEWEST_TICKS:
        # A range of a few percent holds one of the multiples, or none: equal steps read better.
        step = 10.0 ** math.floor(math.log10((high - low) / 2))
        step *= next(k for k in (5, 2, 1) if (high - low) / (k * step) >= _FEWEST_TICKS or k == 1)
        first, last = math.ceil(low / step), math.floor(high / step)
        shown = [step * k for k in range(first, last + 1)]
    if whole:
        shown = [tick for tick in shown if tick.is_integer()]
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
