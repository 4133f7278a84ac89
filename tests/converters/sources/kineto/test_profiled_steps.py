"""Several profiled steps: the kept H200 window, and copies of it with known differences."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from notes import note_of

from onerank.converters.sources.kineto import Sources, convert
from onerank.ir import Job, Kind, Measurement

H200 = Path(__file__).parents[4] / "traces" / "h200-llama-8b-4l-tp4"
GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def copy(directory: Path, name: str, change: Callable[[list[dict]], list[dict]]) -> Path:
    trace = json.loads(gzip.decompress((H200 / "profile.json.gz").read_bytes()))
    trace["traceEvents"] = change(trace["traceEvents"])
    path = directory / f"{name}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
    return path


def longer(by_ns: int) -> Callable[[list[dict]], list[dict]]:
    def change(events: list[dict]) -> list[dict]:
        for event in events:
            if event.get("cat") in GPU:
                event["dur"] += by_ns / 1000
        return events

    return change


def without_last_kernel(events: list[dict]) -> list[dict]:
    last = max((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    return [event for event in events if event is not last]


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list[Path]:
    directory = tmp_path_factory.mktemp("steps")
    return [
        H200 / "profile.json.gz",
        copy(directory, "slower", longer(300)),
        copy(directory, "other", without_last_kernel),
        copy(directory, "slow", longer(100)),
    ]


def lower(*profiles: Path):
    return convert(Sources(H200 / "structure.json.gz", H200 / "et.json.gz", profiles))


def test_each_kernel_has_the_median_the_spread_and_the_number_of_its_durations(steps):
    single, _ = lower(steps[0])
    graph, report = lower(*steps)
    gpu = graph.gpu_compute
    assert gpu.sum() == 850
    assert (report.steps, report.steps_dropped) == (3, 1)
    assert report.step_times_ns == (29_865_307, 29_865_307 + 850 * 300, 29_865_307 + 850 * 100)
    assert graph.nodes.duration_ns[gpu].sum() == 29_865_307 + 850 * 100
    assert set((graph.nodes.duration_ns[gpu] - single.nodes.duration_ns[gpu]).tolist()) == {100}
    assert set(graph.nodes.spread_ns[gpu].tolist()) == {300}
    assert set(graph.nodes.samples.tolist()) == {3}
    assert "medians of 3 profiled steps" in report.timing
    note_of(report.notes, "profiled-steps-differ", "1 of 4")
    assert graph.job.measurement.gpu_busy_ns == 29_865_307 + 850 * 100  # none overlap


def test_host_operators_get_medians_of_the_steps_whose_thread_agrees(steps, tmp_path):
    def logs(events: list[dict]) -> list[dict]:
        first = next(e for e in events if e.get("cat") == "cpu_op" and e["name"] == "aten::empty")
        return [*events, {**first, "name": "aten::log", "ts": first["ts"] - 1, "dur": 0.5}]

    graph, report = lower(steps[0], copy(tmp_path, "logs", logs), steps[3])
    host = graph.mask(Kind.HOST_OP)
    assert report.steps == 3
    assert set(graph.nodes.samples[graph.gpu_compute].tolist()) == {3}
    assert set(np.unique(graph.nodes.samples[host]).tolist()) == {2, 3}
    note_of(report.notes, "step-sequences-differ", 1)


def test_one_step_has_no_samples(steps):
    graph, report = lower(steps[0])
    assert not graph.nodes.samples.any()
    assert not graph.nodes.spread_ns.any()
    assert (report.steps, report.timing) == (1, "profile.json.gz")


def test_the_profiled_step_time_is_that_of_the_step_that_gives_the_order(steps):
    job = Job(measurement=Measurement(profiled_step_ns=20, profiled_steps_ns=(10, 20, 30, 40)))
    sources = Sources(H200 / "structure.json.gz", H200 / "et.json.gz", tuple(steps))
    graph, _ = convert(sources, job)
    assert graph.job.measurement.profiled_step_ns == 40  # the median of those that ran the same
    assert graph.job.measurement.profiled_steps_ns == ()
