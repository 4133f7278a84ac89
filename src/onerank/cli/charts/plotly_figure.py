"""What the charts share: colours, escaped names, and the layout of a Plotly figure."""

import html
import importlib
from typing import Any

from onerank.cli.terminal import visible_line
from onerank.ir.errors import OneRankError

Figure = dict[str, Any]
"""A Plotly figure: `data` and `layout`."""

# Tableau's 20 colours without its two reds and two greys: red is communication's, grey idle time's.
PALETTE = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf",
    "#aec7e8", "#ffbb78", "#98df8a", "#c5b0d5", "#c49c94", "#f7b6d2", "#dbdb8d", "#9edae5",
)  # fmt: skip

LIMIT = "#d62728"
"""Colour of limits, and of what exceeds them."""

# Modules are not classes of work, so their colours are others.
_MODULE_PALETTE = ("#4c78a8", "#5d8a86", "#6b7f52", "#7a6a8f", "#8a6d5b")


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


def plotly_figure(data: list[Figure], height: int, **layout: Any) -> Figure:
    """Return a figure `height` pixels high; `layout` has the further fields of its layout."""
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


def escaped(text: str) -> str:
    """Return a name of a trace as Plotly shows it; Plotly reads some HTML in names."""
    return html.escape(visible_line(text), quote=False)


def line_across(value: float) -> Figure:
    """Return a horizontal line over the whole width of a plot: a limit."""
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value,
            "line": {"color": LIMIT, "width": 1}}  # fmt: skip
