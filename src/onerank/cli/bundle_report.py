"""The report of bundles: times of steps, throughput, energy and memory by batch and context."""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onerank.cli.bundle_tables import parallel_sizes, show_bundle, tokens_that_fit
from onerank.cli.charts import bundle_charts as charts
from onerank.cli.charts.trace_charts import roofline_chart
from onerank.cli.report_page import Reported, Section
from onerank.display import size
from onerank.serving.bundle import Bundle, read_bundle
from onerank.serving.serving_curves import Curves, ServingFigures, serving_figures


@dataclass(frozen=True)
class _Chart:
    """A chart of curves.

    Attributes:
        title: heading of the section.
        caption: what it shows.
        field: name of the curves in `ServingFigures`.
        x: title of the horizontal axis.
        y: title of the vertical axis.
    """

    title: str
    caption: str
    field: str
    x: str
    y: str


_CHARTS = (
    _Chart(
        "Time to first token (TTFT)",
        "A prefill, the step before the first token, by its new tokens and its context; a longer "
        "prompt takes several. The time of a request also contains its wait.",
        "ttft",
        "new tokens of each prompt",
        "ms",
    ),
    _Chart(
        "Time per output token (TPOT) by batch",
        "A decode, the step between two tokens of a sequence. Bars are 80% intervals.",
        "tpot_by_batch",
        "sequences",
        "ms",
    ),
    _Chart(
        "Time per output token (TPOT) by context",
        "The same decodes by the context of their sequences.",
        "tpot_by_context",
        "context of each sequence (tokens)",
        "ms",
    ),
    _Chart(
        "Tokens per second and GPU",
        "Decodes one after the other; the rate of the group divided by its GPUs.",
        "throughput",
        "sequences",
        "tokens/s per GPU",
    ),
    _Chart(
        "Tokens per joule",
        "Energy of all GPUs of the group, of kernels and of the gaps between them, by the power "
        "model of onerank energy.",
        "per_joule",
        "sequences",
        "tokens/J",
    ),
)


_OF_STAGE = (
    " Times are those of one pipeline stage; a token passes all of them. Rates and energies assume "
    "stages of equal time and a full pipeline."
)


@dataclass(frozen=True)
class _Colours:
    """Colours of curves, the same for both bundles.

    Attributes:
        of: chart -> name of a curve -> colour.
    """

    of: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])

    @classmethod
    def of_all(cls, reported: Sequence[ServingFigures]) -> "_Colours":
        """Return a colour for each name of a curve, in the order of sizes."""
        colours: dict[str, Mapping[str, str]] = {}
        for chart in _CHARTS:
            sizes: dict[str, int] = {}
            for figures in reported:
                curves: Curves = getattr(figures, chart.field)
                sizes |= {curve.name: curve.size for curve in curves.curves}
            colours[chart.field] = charts.curve_colours(sorted(sizes, key=lambda n: sizes[n]))
        return cls(colours)


def reported_bundles(directories: Sequence[Path]) -> list[Reported]:
    """Return what a page shows of bundles, with the same colours and axes for each.

    Raises:
        FormatError: a directory is no bundle.
        AnnotateError: a trace cannot be re-costed.
    """
    bundles = [read_bundle(directory) for directory in directories]
    figures = [serving_figures(bundle) for bundle in bundles]
    colours = _Colours.of_all(figures)
    sections = [
        [*_sections(bundle, each, colours)] for bundle, each in zip(bundles, figures, strict=True)
    ]
    # With equal axes, charts of two bundles can be compared by eye.
    for title in {section.title for group in sections for section in group}:
        same = [section.figure for group in sections for section in group if section.title == title]
        charts.share_ranges(same)
    return [
        Reported(directory.name, _cards(bundle, each), group, _tables(bundle, directory))
        for directory, bundle, each, group in zip(
            directories, bundles, figures, sections, strict=True
        )
    ]


def _sections(bundle: Bundle, figures: ServingFigures, colours: _Colours) -> Iterator[Section]:
    for chart in _CHARTS:
        curves: Curves = getattr(figures, chart.field)
        if not curves.curves:
            continue
        caption = chart.caption
        if bundle.manifest.pipeline is not None:
            caption += _OF_STAGE
        if curves.dropped:
            caption += f" Not drawn: {curves.dropped} steps of other sizes, which the table has."
        chosen = colours.of[chart.field]
        figure = charts.curves_chart(curves.curves, chosen, chart.x, chart.y)
        key = {curve.name: chosen[curve.name] for curve in curves.curves}
        yield Section(chart.title, caption, figure, key)
    if figures.largest is not None:
        caption = (
            "Sequences whose KV cache fits next to weights, workspace, and the activations and "
            "allocator gaps of the largest step."
        )
        figure = charts.batches_chart(figures.largest)
        colours_of = charts.BATCH_COLOURS
        key = {trace["name"]: colours_of[trace["name"]] for trace in figure["data"]}
        yield Section("Largest batch", caption, figure, key)
    if figures.roofline and figures.gpu is not None:
        config = bundle.manifest.config
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        caption = (
            "Decodes: FLOPs over bytes of all kernels, and the rate of their summed time; the line "
            "is the datasheet's roof. The area of a point is in proportion to its time."
        )
        if figures.without_work:
            caption += f" Not drawn: {figures.without_work} decodes with unknown FLOPs or bytes."
        chosen = charts.curve_colours([points.name for points in figures.roofline])
        figure = roofline_chart(figures.roofline, figures.gpu, dtype, chosen)
        yield Section("Roofline of decodes", caption, figure, chosen)


def _cards(bundle: Bundle, figures: ServingFigures) -> dict[str, str]:
    """Return the key figures of a bundle."""
    manifest, memory = bundle.manifest, bundle.manifest.memory
    validation = manifest.cross_validation
    return {
        "device": f"{manifest.device}, times {manifest.source}",
        "model": manifest.model or "not known",
        "parallel sizes": parallel_sizes(manifest),
        "weights": "" if memory.weights_bytes is None else size(memory.weights_bytes),
        "KV cache of a token": (
            "" if memory.kv_bytes_per_token is None else size(memory.kv_bytes_per_token)
        ),
        "tokens that fit": tokens_that_fit(manifest),
        "steps": str(len(bundle.rows)),
        "interpolation": (
            f"median error {validation.median:.1%}, p90 {validation.p90:.1%}" if validation else ""
        ),
        "note": "\n".join(str(note) for note in (*manifest.notes, *figures.notes)),
    }


def _tables(bundle: Bundle, directory: Path) -> str:
    # rich writes to stdout; a page takes the tables as the text of a pipe, 120 columns wide.
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        show_bundle(bundle, directory, as_json=False)
    return text.getvalue()
