"""Chart of a plan: its layouts by step time and another figure, and the Pareto front."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onerank.cli.charts.plotly_figure import (
    LIMIT,
    PALETTE,
    Figure,
    escaped,
    line_across,
    plotly_figure,
)
from onerank.plan.layouts import PredictedRange


@dataclass(frozen=True, slots=True)
class LayoutPoints:
    """Layouts by step time and another figure; those that fit into memory come first.

    Attributes:
        steps_s: step time of each layout, in s.
        values: the figure of each layout.
        names: the layouts.
        fitting: how many fit into memory.
        front: indices of those that no other beats in both figures, by step time.
    """

    steps_s: Sequence[PredictedRange]
    values: Sequence[PredictedRange]
    names: Sequence[str]
    fitting: int
    front: Sequence[int]

    def drawn(self, indices: Sequence[int], **style: Any) -> Figure:
        """Return the points of some layouts."""
        return {
            "type": "scatter",
            "x": [self.steps_s[i].value for i in indices],
            "y": [self.values[i].value for i in indices],
            "text": [escaped(self.names[i]) for i in indices],
            "hovertemplate": "%{text}<br>%{x:.4g} s, %{y:.4g}<extra></extra>",
            **style,
        }

    def front_intervals(self, ranges: Sequence[PredictedRange]) -> Figure:
        """Return the intervals of the front in one direction."""
        return {
            "type": "data",
            "symmetric": False,
            "array": [ranges[i].high - ranges[i].value for i in self.front],
            "arrayminus": [ranges[i].value - ranges[i].low for i in self.front],
            "thickness": 1,
            "width": 3,
        }


def pareto_chart(
    title: str, layouts: LayoutPoints, limit: tuple[float, str] | None = None
) -> Figure:
    """Draw layouts by step time and another figure, and the front of the best ones.

    Layouts that do not fit are crosses.

    Args:
        title: name and unit of the figure.
        layouts: the layouts.
        limit: largest value of the figure with which a layout fits, and its name; a line if it is
            less than twice the largest value.
    """
    behind = [i for i in range(layouts.fitting) if i not in layouts.front]
    cross = {"color": LIMIT, "symbol": "x", "size": 7}
    misfits = range(layouts.fitting, len(layouts.names))
    data = [
        layouts.drawn(misfits, mode="markers", marker=cross),
        layouts.drawn(behind, mode="markers", marker={"color": PALETTE[8], "size": 7}),
        # Intervals of all points would hide them.
        layouts.drawn(
            layouts.front,
            mode="lines+markers",
            marker={"color": PALETTE[0], "size": 10},
            # A staircase: every point above it is beaten by a point of the front.
            line={"shape": "hv", "width": 1},
            error_x=layouts.front_intervals(layouts.steps_s),
            error_y=layouts.front_intervals(layouts.values),
        ),
    ]
    lines, marks = list[Figure](), list[Figure]()
    # As in `memory_chart`, a limit far above all points would flatten the chart.
    if limit is not None and limit[0] < 2 * max(each.value for each in layouts.values):
        value, name = limit
        lines.append(line_across(value))
        marks.append(
            {"x": 1, "xref": "paper", "xanchor": "right", "y": value, "yanchor": "bottom",
             "text": escaped(name), "showarrow": False, "font": {"color": LIMIT}}
        )  # fmt: skip
    return plotly_figure(
        data,
        420,
        annotations=marks,
        shapes=lines,
        xaxis={"title": {"text": "step (s)"}},
        yaxis={"title": {"text": title}},
    )
