"""`onerank plan`: its table, its files, and its errors. The predictions are written by hand."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from onerank.cli import onerank
from onerank.cli.common import interrupted
from onerank.ir.errors import OneRankError
from onerank.ir.notes import Note
from onerank.plan import make_plan
from onerank.plan.config import PlanConfig
from onerank.plan.layouts import Layout, Outcome, PredictedRange, enumerate_layouts
from onerank.plan.make_plan import Plan, check_fits, pareto_front
from onerank.plan.tasks import Executor, Store

pytest.importorskip("plotly")

CONFIG = """\
[model]
script = "train.py"
[cluster]
gpu = "H100"
nodes = 1
gpus_per_node = 8
price_per_gpu_hour = 3.6
intra_node = { busbw_gb_per_s = 370 }
[job]
global_batch = 16
seq = 1000
[vary]
tp = [1, 2, 3, 4, 8]
"""

GB = 10**9


def outcome(layout: Layout) -> Outcome:
    """Return a step of 2 s and 16 GB for each tp; from tp 4 on it does not fit into 80 GB."""
    step = PredictedRange(2e9, 1.9e9, 2.2e9) * layout.tp
    peak = PredictedRange(30e9, 29e9, 31e9) * layout.tp
    over = max(0, round(peak.value - 80 * GB))
    return Outcome(
        layout=layout,
        gpus=layout.gpus,
        step_ns=step,
        tokens_per_s_per_gpu=step.per(layout.tokens_per_step / layout.gpus * 1e9),
        mfu=step.per(0.8e9),
        peak_bytes=peak,
        fits=over == 0,
        over_bytes=over,
        energy_j=PredictedRange(8000.0, 7000.0, 9000.0),
        money=step * (3.6 * layout.gpus / 3.6e12),
        compute_ns=1.0,
        exposed_communication_ns=1.0,
        bubble_ns=0.0,
        commands=("capture run train.py", "onerank replay row --cluster CONFIG --schedule 1f1b"),
        notes=(Note("the host is slow", code="plan-host-bound"),) if layout.tp == 2 else (),
    )


Predict = Callable[[Layout], Outcome]


def planned(predict: Predict) -> Callable[..., Plan]:
    """Return a `make_plan` that predicts by a function."""

    def plan(config: PlanConfig, store: Store, executor: Executor, progress: object) -> Plan:
        job = config.job
        layouts, dropped = enumerate_layouts(
            job.choices, gpus=job.cluster.gpus, global_batch=job.global_batch
        )
        result = make_plan.sorted_plan(config, 4, [predict(each) for each in layouts], dropped)
        check_fits(result)
        return result

    return plan


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs the command on a configuration."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)

    def run(*options: str, config: str = CONFIG, predict: Predict = outcome) -> Result:
        monkeypatch.setattr(make_plan, "make_plan", planned(predict))
        Path("plan.toml").write_text(config)
        return CliRunner().invoke(onerank, ["plan", "plan.toml", "-o", "out", *options])

    return run


def test_the_table_has_each_row_with_its_interval(plan: Callable[..., Result]):
    done = plan()
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(" 1"))
    # 16,000 tokens in 2 s on 8 GPUs are 1,000 tokens/s for each. 2 s at 3.6 per GPU-hour are 0.016,
    # which is 1.00 per million tokens.
    assert lines[first].split() == "1 tp 1 dp 8 2.00 s 1,000 40.0 % 30.0 GB 8.00 kJ 1.00".split()
    assert lines[first + 1].split("of 1")[1].split() == (
        "1.90 to 2.20 909 to 1,053 36.4 to 42.1 29.0 to 31.0 7.00 to 9.00 0.95 to 1.10".split()
    )
    assert lines[first + 2].split()[:5] == ["2", "tp", "2", "dp", "4"]
    # The nearest that does not fit lacks 120 - 80 GB.
    nearest = next(line for line in lines if line.lstrip().startswith("40.000 GB"))
    assert nearest.split()[2:4] == ["tp", "4,"]
    assert "tp 3" in done.output  # 3 does not divide 8
    assert "row 2: the host is slow" in done.output


def test_the_files_hold_every_row(plan: Callable[..., Result]):
    assert plan("--rows", "1").exit_code == 0
    with Path("out/plan.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["tp"], row["fits"], row["over_bytes"]) for row in rows] == [
        ("1", "True", "0"),
        ("2", "True", "0"),
        ("4", "False", str(40 * GB)),
        ("8", "False", str(160 * GB)),
    ]
    assert float(rows[1]["step_ns_low"]) == 3.8e9
    record = json.loads(Path("out/plan.json").read_text())
    assert [row["layout"]["tp"] for row in record["fitting"]] == [1, 2]
    assert [row["code"] for row in record["dropped"]] == ["plan-indivisible-gpus"]
    assert [path.name for path in Path("out/commands").iterdir()] == ["1.sh"]
    script = Path("out/commands/1.sh").read_text()
    assert "onerank replay row --cluster plan.toml --schedule 1f1b" in script
    page = Path("out/pareto.html").read_text()
    assert page.count('<div id="figure-') == 2
    # A line at the memory of an H100, in the chart of memory and in no other.
    assert page.count('"y0":84.94,"y1":84.94') == 1
    assert "https://" not in page.split("</script>")[1]


def test_a_failed_run_leaves_no_table_of_an_earlier_one(plan: Callable[..., Result]):
    assert plan().exit_code == 0

    def fail(layout: Layout) -> Outcome:
        raise OneRankError("no", code="no-such-luck")

    done = plan(predict=fail)
    assert done.exit_code == 2
    assert "error[no-such-luck]" in done.output
    assert [path.name for path in Path("out").iterdir() if path.is_file()] == []


def test_a_model_that_fits_nowhere_names_the_nearest(plan: Callable[..., Result]):
    done = plan(config=CONFIG.replace("[1, 2, 3, 4, 8]", "[4, 8]"))
    assert done.exit_code == 2
    assert "error[plan-nothing-fits]" in done.output
    assert "120.000 GB, 40.000 GB more" in done.output


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("nodes = 1\n", "", "plan-missing-field"),
        ("nodes = 1\n", "nodes = 1e9\n", "plan-wrong-type"),
        ("[1, 2, 3, 4, 8]", "[3]", "plan-no-layout"),
        ("train.py", "absent.py", "plan-no-file"),
        ("H100", "H101", "gpu-unknown"),
    ],
)
def test_a_bad_configuration_exits_with_2(
    plan: Callable[..., Result], before: str, after: str, code: str
):
    done = plan(config=CONFIG.replace(before, after))
    assert (done.exit_code, f"error[{code}]" in done.output) == (2, True), done.output
    assert not Path("out").exists()


def test_ray_decides_on_its_workers(plan: Callable[..., Result]):
    done = plan("--ray", "--workers", "2")
    assert (done.exit_code, "error[plan-workers-ray]" in done.output) == (2, True), done.output
    assert not Path("out/plan.csv").exists()


def test_the_front_has_what_no_other_point_beats():
    assert pareto_front([(3, 1), (1, 5), (2, 5), (2, 2), (4, 1)]) == [1, 3, 0]


def test_an_interrupt_names_stored_results_only_if_there_are_some(tmp_path):
    store = tmp_path / "store"
    assert not str(interrupted(store))
    store.mkdir()
    assert not str(interrupted(store))
    (store / "result").touch()
    assert str(interrupted(store))
