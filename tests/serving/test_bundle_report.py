"""`onerank report` of bundles: the figures of the charts, and the page."""

import json
import re
import shutil
from pathlib import Path

import msgspec
import polars as pl
import pytest

from onerank.annotate import load_gpu
from onerank.cli import annotate
from onerank.cli import onerank as command
from onerank.cli.charts.bundle_charts import share_ranges
from onerank.serving.bundle import Bundle, read_bundle
from onerank.serving.serving_curves import MOST_CURVES, CurvePoint, Curves, serving_figures
from tests.cli.invoke_cli import TRACES, invoke, refused


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return the kept bundle of a Llama of two layers on an H100, in memory: without traces."""
    directory = tmp_path_factory.mktemp("kept") / "bundle"
    shutil.copytree(Path(__file__).parent / "bundle", directory)
    (directory / "tp2").rename(directory / "traces")
    for number in range(1, 9):
        (directory / "traces" / f"{number}.et").touch()
    read = read_bundle(directory)
    return Bundle(read.manifest, read.rows, read.kernel_rows)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle of a recorded engine, predicted for an H100, with its traces."""
    directory = tmp_path_factory.mktemp("recorded")
    recording = TRACES / "cpu-vllm-2l" / "rank0.pt.trace.json.gz"
    invoke(command, "convert", recording, "--engine-steps", "-o", directory / "steps")
    invoke(annotate, "--target", "H100", directory / "steps", "-o", directory / "steps.H100")
    return directory / "steps.H100"


def points(curves: Curves) -> dict[tuple[str, int], CurvePoint]:
    return {(curve.name, point.x): point for curve in curves.curves for point in curve.points}


def test_curves_are_the_rows_of_the_bundle(bundle: Bundle) -> None:
    figures = serving_figures(bundle)
    by_batch, by_context = points(figures.tpot_by_batch), points(figures.tpot_by_context)
    rate, ttft = points(figures.throughput), points(figures.ttft)
    decodes = [row for row in bundle.rows if row.kind == "decode" and row.fits]
    assert len(by_batch) == len(by_context) == len(rate) == len(decodes) > 0
    for row in decodes:
        batch, context = row.composition.decodes, row.composition.decode_context
        point = by_batch[f"context {context:,}", batch]
        assert point.y == by_context[f"batch {batch:,}", context].y == row.graph_ns / 1e6
        assert (point.low, point.high) == (row.graph_low_ns / 1e6, row.graph_high_ns / 1e6)
        tokens = rate[f"context {context:,}", batch]
        assert tokens.y == pytest.approx(batch / (row.graph_ns * 1e-9))
        # The longest time is the least rate.
        assert tokens.low == pytest.approx(batch / (row.graph_high_ns * 1e-9))
    prefills = [row for row in bundle.rows if row.kind == "prefill" and row.fits]
    assert sum(point.y for point in ttft.values()) == pytest.approx(
        sum(row.graph_ns for row in prefills) / 1e6
    )


def test_the_rate_of_a_group_is_divided_by_its_gpus(bundle: Bundle) -> None:
    manifest = msgspec.structs.replace(bundle.manifest, tp=2)
    two = points(serving_figures(Bundle(manifest, bundle.rows, bundle.kernel_rows)).throughput)
    one = points(serving_figures(bundle).throughput)
    assert {key: point.y for key, point in two.items()} == pytest.approx(
        {key: point.y / 2 for key, point in one.items()}
    )


def test_the_largest_batch_fills_the_kv_cache(bundle: Bundle) -> None:
    largest = serving_figures(bundle).largest
    assert largest is not None
    tokens = bundle.manifest.memory.tokens_that_fit
    assert tokens is not None
    for context, batch in zip(largest.contexts, largest.batches, strict=True):
        assert batch * (context + 1) <= tokens < (batch + 1) * (context + 1)
    assert largest.contexts[-1] == (bundle.manifest.longest or 0) - 1
    misfits = [row for row in bundle.rows if row.kind == "decode" and not row.fits]
    assert len(largest.misfits) == len(misfits) == 1


def test_decodes_are_below_the_roof(bundle: Bundle) -> None:
    figures = serving_figures(bundle)
    gpu = load_gpu("H100")
    assert figures.gpu is not None
    assert (figures.gpu.name, figures.without_work) == (gpu.name, 0)
    kernels = bundle.kernels.group_by("row").agg(pl.col("flops", "bytes").sum())
    work = {row["row"]: (row["flops"], row["bytes"]) for row in kernels.to_dicts()}
    intensities = sorted(
        work[number][0] / work[number][1]
        for number, row in enumerate(bundle.rows, start=1)
        if row.kind == "decode" and row.fits
    )
    drawn = [value for kind in figures.roofline for value in kind.intensity.tolist()]
    assert sorted(drawn) == pytest.approx(intensities)
    for kind in figures.roofline:
        assert (kind.flops_per_s < gpu.peak_tensor_flops_per_s("bfloat16")).all()


@pytest.mark.parametrize(("scale", "has_fractions"), [(1, False), (1.0, True)])
def test_an_axis_of_counts_has_whole_ticks(scale: float, has_fractions: bool) -> None:
    values = [scale * count for count in (2, 4, 6)]
    layout = {axis: {"type": "log"} for axis in ("xaxis", "yaxis")}
    figure = {"layout": layout, "data": [{"x": values, "y": values}]}
    share_ranges([figure])
    ticks = layout["yaxis"]["tickvals"]
    assert len(ticks) >= 3
    assert (not all(tick.is_integer() for tick in ticks)) is has_fractions


def test_curves_beyond_the_most_are_counted(bundle: Bundle) -> None:
    (row,) = [r for r in bundle.rows if r.kind == "decode" and r.fits][:1]
    rows = tuple(
        msgspec.structs.replace(row, decode_context=100 * n) for n in range(1, MOST_CURVES + 4)
    )
    curves = serving_figures(Bundle(bundle.manifest, rows, ())).tpot_by_batch
    assert (len(curves.curves), curves.dropped) == (MOST_CURVES, 3)


def test_the_power_of_decodes_is_below_that_of_an_h100(predicted: Path) -> None:
    read = read_bundle(predicted)
    figures = serving_figures(read)
    rate, per_joule = points(figures.throughput), points(figures.per_joule)
    gpu = load_gpu("H100")
    assert rate.keys() == per_joule.keys()
    for key, point in per_joule.items():
        assert gpu.idle_w <= rate[key].y / point.y < gpu.tdp_w
    # A recording has no memory, and its contexts are those of its requests.
    assert figures.largest is None
    assert {curve.name for curve in figures.tpot_by_batch.curves} == {
        *("context 16 to 31", "context 32 to 63")
    }


def test_the_page_of_two_bundles(predicted: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = invoke(command, "report", predicted, predicted.with_name("steps"), "-o", page)
    text = page.read_text()
    charts = json.loads(re.findall(r"const figures = (\{.*\});", text)[-1])
    assert f"{len(charts)} charts" in result.stdout
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Time to first token (TTFT)",
        "Time per output token (TPOT) by batch",
        "Time per output token (TPOT) by context",
        "Tokens per second and GPU",
        "Tokens per joule",
        "Tables",
    ]
    # The CPU of the recording has no description, so no power.
    assert sorted(charts) == [f"figure-0-{n}" for n in range(5)] + [
        f"figure-1-{n}" for n in range(4)
    ]
    for n in range(4):
        ranges = [charts[f"figure-{side}-{n}"]["layout"]["yaxis"]["range"] for side in (0, 1)]
        assert ranges[0] == ranges[1]
    assert text.count("recording-profiled") == 4


def test_inputs_of_a_report(predicted: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    trace = predicted / "traces" / "1.et"
    mixed = ("report", predicted, trace, "-o", page)
    refused(command, *mixed, error="report-mixed-kinds", naming=(str(predicted), str(trace)))
    three = ("report", predicted, predicted, predicted, "-o", page)
    refused(command, *three, error="report-trace-count", naming="3")
    refused(command, "report", tmp_path, "-o", page, error="bundle-missing")
    refused(command, "report", predicted, "-o", predicted, error="usage-invalid-value")
    assert not page.exists()
