"""Money for a step: the reckoning on round figures, and price lists that are wrong."""

from pathlib import Path

import pytest
from notes import codes
from raised import raises_code

from onerank.annotate import load_gpu
from onerank.annotate.cost import PricedJob, load_prices, report_cost
from onerank.annotate.energy import StepDurations, report_energy

ROOT = Path(__file__).parents[2]

LIST = """
date = 2026-01-02
currency = "EUR"
[rent.H200]
per_gpu_hour = 3.6
source = "contract 7"
[own.H200]
per_gpu = 35064
years = 4
busy_fraction = 0.5
per_kwh = 0.2
power_usage_effectiveness = 2
host_w = 100
source = "offer 8"
"""


def reckon(
    tmp_path: Path, graph, text: str = LIST, name: str = "H200", tokens: int | None = 2_000_000
):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    gpu = load_gpu(name)
    # a second of 1000 GPUs, 2 million tokens; the one kernel is negligible
    job = PricedJob(1000, 1_000_000_000, "made", tokens, "made")
    durations = StepDurations(1_000_000_000, 0, "made")
    return report_cost(
        gpu, job, load_prices(path), path, lambda: report_energy(graph, gpu, durations)
    )


def test_rent_is_hours_times_gpus_times_price(tmp_path, trace, mm):
    report = reckon(tmp_path, trace(mm(8, 8, 8)))
    assert codes(report.notes) == ["cost-of-this-rank"]
    rent = report.bills[0]
    assert rent.per_step == pytest.approx(3.6 * 1000 / 3600)
    assert rent.per_million_tokens == pytest.approx(0.5)
    assert rent.lines[0].source == "prices.toml, 2026-01-02: contract 7"


def test_without_tokens_there_is_no_price_of_a_million(tmp_path, trace, mm):
    report = reckon(tmp_path, trace(mm(8, 8, 8)), tokens=None)
    assert codes(report.notes) == ["cost-of-this-rank", "cost-tokens-unknown"]
    assert report.bills[0].per_million_tokens is None


def test_owning_is_capital_and_power_each_with_its_source(tmp_path, trace, mm):
    own = reckon(tmp_path, trace(mm(8, 8, 8))).bills[1]
    lines = {line.name: line for line in own.lines}
    assert lines["capital"].value == pytest.approx(35064 / (4 * 8766 * 0.5))  # 2 an hour
    assert lines["GPU power"].value == pytest.approx(124, abs=0.01)  # idle
    assert lines["power"].value == pytest.approx(0.224 * 2 * 0.2, abs=1e-4)
    assert own.per_gpu_hour == pytest.approx(2 + 0.0896, abs=1e-4)
    assert lines["price"].source == "prices.toml, 2026-01-02: offer 8"
    assert "4 years x 8766 h x 0.5 busy" in lines["capital"].source
    assert all(line.source for line in own.lines)


def test_a_gpu_without_a_price_is_an_error_that_names_those_with_one(tmp_path, trace, mm):
    with raises_code("prices-no-gpu", naming=("prices.toml", "B200", "H200")):
        reckon(tmp_path, trace(mm(8, 8, 8)), name="B200")


@pytest.mark.parametrize(
    ("old", "new", "code", "names"),
    [
        ("date = 2026-01-02\n", "", "prices-malformed", ("`date`",)),
        ("3.6", "-1", "prices-out-of-range", ("rent.H200.per_gpu_hour is -1.0", "0 to 10000")),
        ("years = 4", "years = 0", "prices-out-of-range", ("own.H200.years is 0.0", "0.1 to 30")),
        (
            *("busy_fraction = 0.5", "busy_fraction = 50", "prices-out-of-range"),
            ("own.H200.busy_fraction is 50.0", "0.01 to 1"),
        ),
        ("per_kwh = 0.2", "per_kwh = nan", "prices-out-of-range", ("own.H200.per_kwh is nan",)),
        ('"contract 7"', '" "', "prices-no-source", ("rent.H200.source",)),
        ("per_gpu_hour", "per_hour", "prices-malformed", ("`per_hour`", "$.rent")),
        ("2026-01-02", '"soon"', "prices-malformed", ("$.date",)),
        ("=", "", "toml-malformed", ("line 2",)),
    ],
)
def test_a_wrong_price_list_is_an_error(
    tmp_path: Path, old: str, new: str, code: str, names: tuple[str, ...]
):
    path = tmp_path / "prices.toml"
    path.write_text(LIST.replace(old, new))
    with raises_code(code, naming=("prices.toml", *names)):
        load_prices(path)


def test_a_list_without_prices_or_a_missing_one_is_an_error(tmp_path: Path):
    path = tmp_path / "prices.toml"
    path.write_text('date = 2026-01-02\ncurrency = "EUR"\n')
    with raises_code("prices-empty"):
        load_prices(path)
    with raises_code("file-unreadable"):
        load_prices(tmp_path / "none.toml")


def test_the_example_loads():
    assert load_prices(ROOT / "examples" / "prices.toml").rent["H200"].per_gpu_hour == 4
