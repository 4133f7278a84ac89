"""`capture serve --error`: the order of the measurement, and where it stops."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onerank.capture.options import Options
from onerank.capture.serving.compositions import Composition, default_grid, parse_grid
from onerank.cli import onerank as onerank_command
from onerank.plan.tasks import Store
from onerank.serving import build_bundle
from onerank.serving.adaptive_grid import BATCH, WantedError, measurement_order
from onerank.serving.build_bundle import measure_bundle
from onerank.serving.latency_interpolation import Interpolation
from onerank.serving.part_sizes import AttentionForm, AttentionWaves
from onerank.serving.points import Point, PointMemory, misfit
from onerank.serving.tables import CrossValidation
from tests.cli.invoke_cli import refused
from tests.serving.test_latency_interpolation import parts_in_waves, rows_of

WAVES = AttentionWaves.of(sms=132, kv_heads=8)


def test_the_first_points_cover_the_grid():
    grid = default_grid(32768)
    order = measurement_order(grid)
    assert sorted(order) == sorted(grid)
    tokens = [c.new_tokens for c in grid]
    assert [c.new_tokens for c in order[:2]] == [min(tokens), max(tokens)]
    # A dozen points have both ends of the sizes of each part, or are close to them.
    first = order[:12]
    assert {c.kind for c in first} == {"prefill", "decode", "mixed"}
    assert {1, 256} <= {c.decodes for c in first}
    contexts = [c.decode_context for c in first if c.decodes]
    assert (min(contexts), max(contexts)) == (128, 16384)
    assert {64, 8192} <= {c.prefill_tokens for c in first}
    # The order does not depend on that of the grid.
    assert measurement_order(grid[::-1]) == order


@pytest.mark.parametrize("count", [12, 20])
def test_the_first_points_interpolate_the_others(count: int):
    order = measurement_order(default_grid(32768))
    interpolation = Interpolation.of(*rows_of(order[:count], parts_in_waves), AttentionForm(WAVES))
    errors: list[float] = []
    for c in order[count:]:
        measured = 1.02 * sum(parts_in_waves(c).values())
        errors.append(abs((interpolation.step(c).graph_ns or 0) / measured - 1))
    assert np.median(errors) < 0.02
    assert np.quantile(errors, 0.9) < 0.06


@pytest.mark.parametrize(
    ("validation", "reached"),
    [
        (None, False),
        (CrossValidation(20, 0.03, 0.2), True),
        (CrossValidation(20, 0.031, 0.05), False),
        # The median of a few steps is small by chance.
        (CrossValidation(9, 0.01, 0.02), False),
    ],
)
def test_when_the_error_is_reached(validation: CrossValidation | None, reached: bool):
    assert (WantedError(0.03).shortfall(validation) is None) == reached


class _KilledError(Exception):
    """Ends a run."""


class _Engine:
    """Steps with times of a known function, in place of a rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.measured: list[Composition] = []
        self.details: list[str] = []
        self.most, self.misfits = 1000, 0
        self.config = tmp_path / "config.json"
        self.config.write_text('{"num_key_value_heads": 8}')
        self.store = Store(tmp_path / "store")
        monkeypatch.setattr(build_bundle, "_server", self._server)
        monkeypatch.setattr(build_bundle, "_measure", self._measure)

    @contextlib.contextmanager
    def _server(self, *_: object) -> Generator[Any]:
        served = SimpleNamespace(
            name="LlamaForCausalLM", layers=1, longest=32768, weights_bytes=1, memory_bytes=1 << 40,
            kv_bytes_per_token=1, pipeline=None, latent_bytes_per_token=None,
            kv_windows=(), state_bytes_per_sequence=0, whole_state_layers=0, attended_tokens=None,
            moe_routing=None, padded_vocabulary=None,
        )  # fmt: skip
        yield SimpleNamespace(served=served)

    def _measure(self, _: object, composition: Composition, number: int, *__: object) -> Point:
        if len(self.measured) == self.most:
            raise _KilledError
        self.measured.append(composition)
        assert number == len(self.measured)
        if number <= self.misfits:
            return misfit(composition, 1 << 41, "predicted")
        rows, kernels = rows_of((composition,), parts_in_waves)
        return Point(
            rows[0], tuple(kernels), PointMemory(0, 0, 0), trace=b"x", device="H100-SXM",
            device_type="model", attention=("flash2",),
        )  # fmt: skip

    def run(self, error: float | None, grid: tuple[Composition, ...] | None = None) -> Any:
        def progress(name: str, complete: int, whole: int, *, detail: str = "") -> None:
            self.details.append(detail)

        wanted = None if error is None else WantedError(error)
        options = Options(device="none", like="H100")
        return measure_bundle(
            self.config, options, grid, self.store, wanted=wanted, progress=progress
        )[0]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Engine:
    """Return an engine whose runs share a store."""
    return _Engine(monkeypatch, tmp_path)


def test_the_measurement_stops_at_the_error_and_goes_on_after_a_kill(engine: _Engine):
    engine.most = 10
    with pytest.raises(_KilledError):
        engine.run(0.03)
    engine.most = 1000
    bundle = engine.run(0.03)
    extent, validation = bundle.manifest.adaptive_grid, bundle.manifest.cross_validation
    assert extent.reached
    assert validation.median <= extent.wanted_error == 0.03
    assert validation.points >= 10
    assert extent.offered == len(default_grid(32768))
    # Less than the grid, in whole batches, each measured once and in the order of the rows.
    assert extent.measured == len(bundle.rows) == len(engine.measured) < extent.offered // 2
    assert extent.measured % BATCH == 0
    assert [row.composition for row in bundle.rows] == engine.measured
    assert engine.details[-1] == f"median error {validation.median:.1%}"
    # A smaller error takes the points that are known.
    smaller = engine.run(0.015)
    assert smaller.manifest.adaptive_grid.reached
    assert len(smaller.rows) == len(engine.measured) > len(bundle.rows)
    assert smaller.rows[: len(bundle.rows)] == bundle.rows
    # Stored points alone suffice for the larger error.
    assert engine.run(0.03) == bundle


def test_a_grid_without_the_error_is_measured_whole_and_noted(engine: _Engine):
    grid = parse_grid("decode: batch=1,3,9 context=200,5000; prefill: tokens=70,900 context=0")
    bundle = engine.run(0.0001, grid)
    extent = bundle.manifest.adaptive_grid
    assert (extent.reached, extent.measured, extent.offered) == (False, 8, 8)
    assert "serve-error-not-reached" in [note.code for note in bundle.manifest.notes]
    # Without a wanted error, the rows have the order of the grid.
    whole = engine.run(None, grid)
    assert whole.manifest.adaptive_grid is None
    assert [row.composition for row in whole.rows] == [*grid]


def test_a_median_of_few_steps_is_not_named_as_too_large(engine: _Engine):
    grid = parse_grid("decode: batch=1,3,9,20 context=200,5000")
    manifest = engine.run(0.5, grid).manifest
    assert manifest.cross_validation.points < 10
    assert manifest.cross_validation.median < 0.5
    assert not manifest.adaptive_grid.reached
    notes = {note.code: note.text for note in manifest.notes}
    assert "median error is" not in notes["serve-error-not-reached"]


def test_the_first_steps_do_not_fit_into_memory(engine: _Engine):
    engine.misfits = BATCH
    bundle = engine.run(0.03)
    assert [row.fits for row in bundle.rows[: BATCH + 1]] == [False] * BATCH + [True]
    assert bundle.manifest.adaptive_grid.reached


@pytest.mark.parametrize("error", ["0", "3", "100%", "-3%", "x", "nan", ""])
def test_a_share_that_is_none(tmp_path: Path, error: str):
    config = tmp_path / "config.json"
    config.write_text("{}")
    refused(onerank_command, "capture", "serve", config, "--error", error, "-o", tmp_path / "b",
            error="option-not-fraction")  # fmt: skip
    assert [*tmp_path.iterdir()] == [config]
