"""The page of a report: key figures, sections of charts, and tables, in one HTML file."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import Any

from onerank.cli.charts.plotly_figure import plotly_js
from onerank.cli.terminal import visible_line


@dataclass(frozen=True)
class Section:
    """A section of one input's report.

    Attributes:
        title: heading; the sections of two inputs with one title stand side by side.
        caption: what the figure shows.
        figure: a Plotly figure.
        key: name -> colour, for a key above the figure.
        wide: whether the figures of two inputs stand one above the other.
    """

    title: str
    caption: str
    figure: dict[str, Any]
    key: dict[str, str] = field(default_factory=dict[str, str])
    wide: bool = False


@dataclass(frozen=True)
class Reported:
    """What a page shows of one input.

    Attributes:
        name: name of the input.
        cards: label -> key figure, of one line or several; empty figures are left out.
        sections: its charts.
        tables: the tables as text.
    """

    name: str
    cards: Mapping[str, str]
    sections: Sequence[Section]
    tables: str


def page_of(inputs: Sequence[Reported]) -> tuple[bytes, int]:
    """Return the page of one or two inputs, and the number of its charts.

    Raises:
        ReportError: plotly is not installed.
    """
    figures: dict[str, Any] = {}
    sections: dict[str, list[str]] = {}
    wide: set[str] = set()
    captions: dict[str, list[str]] = {}
    keys: dict[str, dict[str, str]] = {}
    for number, reported in enumerate(inputs):
        for place, section in enumerate(reported.sections):
            identifier = f"figure-{number}-{place}"
            figures[identifier] = section.figure
            sections.setdefault(section.title, []).append(f'<div id="{identifier}"></div>')
            captions.setdefault(section.title, []).append(section.caption)
            keys.setdefault(section.title, {}).update(section.key)
            if section.wide:
                wide.add(section.title)
    parts = [f'<div class="row">{"".join(map(_cards, inputs))}</div>']
    for title, charts in sections.items():
        caption = html.escape(" ".join(dict.fromkeys(captions[title])))
        layout = "stack" if title in wide else "row"
        key = "".join(
            f'<li><i style="background:{colour}"></i>{html.escape(name)}</li>'
            for name, colour in keys[title].items()
        )
        heading = f"<h2>{html.escape(title)}</h2><p>{caption}</p><ul>{key}</ul>"
        parts.append(f'{heading}<div class="{layout}">{"".join(charts)}</div>')
    parts.append("<h2>Tables</h2>" + "".join(map(_tables, inputs)))
    # "</" in a name of the input would end the script element.
    data = json.dumps(figures, separators=(",", ":")).replace("</", "<\\/")
    title = html.escape(" and ".join(visible_line(reported.name) for reported in inputs))
    template = files("onerank.cli").joinpath("report_page.html").read_text("utf-8")
    # Not `str.format`: the page's CSS and JavaScript are full of braces.
    page = Template(template).substitute(
        title=title, library=plotly_js(), body="\n".join(parts), figures=data
    )
    return page.encode(), len(figures)


def _cards(reported: Reported) -> str:
    items = "".join(
        f"<div><dt>{label}</dt><dd>{_escaped_lines(value)}</dd></div>"
        for label, value in reported.cards.items()
        if value
    )
    name = html.escape(visible_line(reported.name))
    return f"<section><h1>{name}</h1><dl>{items}</dl></section>"


def _escaped_lines(text: str) -> str:
    return "<br>".join(html.escape(visible_line(line)) for line in text.split("\n"))


def _tables(reported: Reported) -> str:
    return (
        f"<details><summary>{html.escape(visible_line(reported.name))}</summary>"
        f"<pre>{html.escape(reported.tables)}</pre></details>"
    )
