"""The fit of a host: each kept capture's host time, by sort and in sum."""

import gzip
import statistics
from pathlib import Path

import pytest

from onerank import read
from onerank.annotate.hosts.host import load_host
from onerank.ir import Graph
from tools.fit.fit_host import host_times

TRACES = Path(__file__).parents[3] / "traces"

CAPTURES = (
    "h100-llama-8b-4l-tp4/trace",
    "h200-llama-8b-4l-tp2-graphs/1024",
    "h200-llama-8b-4l-tp2-graphs/2048",
    "h200-llama-8b-4l-tp2-real/real.0",
    "h200-llama-8b-4l-tp2-real/slice.0",
)


@pytest.fixture(params=CAPTURES, scope="module")
def capture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    path = tmp_path_factory.mktemp("host") / "trace.et"
    path.write_bytes(gzip.decompress((TRACES / f"{request.param}.et.gz").read_bytes()))
    return read(path)


def test_the_times_by_sort_add_up_to_the_measured_host(capture: Graph):
    calls, means = host_times(capture)
    measurement = capture.job.measurement
    assert measurement.host_overhead is not None
    times = list(means.values())
    total_ns = sum(
        times[sort] * count for sort, count in zip(calls.sort, calls.times, strict=True)
    ) + (means["step"] - measurement.host_overhead.inter_step_host_ns)
    assert total_ns == pytest.approx(statistics.median(measurement.host_step_ns), rel=1e-6)
    assert 577 <= len(calls.first) <= 583
    assert calls.times.sum() - len(calls.first) in (8 * 38, 9 * 38)  # lists of 39 tensors


def test_the_shipped_host_holds_the_hosts_that_it_was_fitted_to(capture: Graph):
    host = load_host("typical")
    assert host is not None
    calls, _ = host_times(capture)
    measured_ns = statistics.median(capture.job.measurement.host_step_ns)
    ratios = [calls.step_ns(host, name) / measured_ns for name in ("p10_ns", "p50_ns", "p90_ns")]
    # Five hosts took 19.4 to 31.6 ms: the fastest and the slowest are just outside of 80%.
    assert 0.63 < ratios[0] < 1.03
    assert 0.75 < ratios[1] < 1.23
    assert 0.97 < ratios[2] < 1.59
