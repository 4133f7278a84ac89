"""Conversion of a real H200 capture with emulated collectives, repeated steps and module times."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from onerank.analysis.step_time import replay
from onerank.analysis.summary import summarise
from onerank.converters.sources.kineto import Conversion, convert_directory
from onerank.ir import Collective, Evidence, Graph

RAW = Path(__file__).parents[4] / "traces" / "h200-llama-8b-4l-tp4-standin"
PROFILES = ("profile", "profile.1", "profile.2")
TOKEN_BYTES = 4096 * 4096 * 2  # of 4096 tokens in bf16


@pytest.fixture(scope="module")
def converted() -> tuple[Graph, Conversion]:
    return convert_directory(RAW)


@pytest.fixture(scope="module")
def graph(converted: tuple[Graph, Conversion]) -> Graph:
    return converted[0]


def kernels(name: str) -> list[float]:
    """Return durations of a step's GPU operations without emulated collectives, in us, by start."""
    events = json.loads(gzip.decompress((RAW / f"{name}.json.gz").read_bytes()))["traceEvents"]
    gpu = [
        event
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and "onerank" not in event["name"]
    ]
    return [event["dur"] for event in sorted(gpu, key=lambda event: event["ts"])]


def test_each_kernel_has_the_median_of_the_three_steps(graph: Graph):
    steps = np.array([kernels(name) for name in PROFILES])
    assert steps.shape == (3, 850)
    gpu = np.flatnonzero(graph.gpu_compute)
    order = gpu[np.argsort(graph.nodes.start_ns[gpu], kind="stable")]
    assert (
        graph.nodes.duration_ns[order].tolist()
        == np.rint(np.median(steps, axis=0) * 1000).astype(int).tolist()
    )
    assert set(graph.nodes.samples[gpu].tolist()) == {3}
    spread = (steps.max(axis=0) - steps.min(axis=0)) * 1000
    assert graph.nodes.spread_ns[order] == pytest.approx(spread, abs=1)


def test_each_kernel_has_its_uncontended_time(graph: Graph):
    """Tensor parallelism waits for each collective, so no kernel overlaps one."""
    gpu = graph.gpu_compute
    uncontended, contended = graph.nodes.uncontended_ns[gpu], graph.nodes.duration_ns[gpu]
    assert sum(kernels("uncontended")) * 1000 == pytest.approx(uncontended.sum(), abs=850)
    assert contended.sum() == pytest.approx(uncontended.sum(), rel=0.001)


def test_collectives_take_the_time_of_their_network(graph: Graph):
    """Two per layer and pass, and two outside: 2 (n - 1) / n of the bytes at 310 GB/s, at least.

    The loss adds three with a few bytes per token.
    """
    communication = np.flatnonzero(graph.communication)
    large = communication[graph.nodes.comm_bytes[communication] == TOKEN_BYTES]
    assert (len(communication), len(large)) == (21, 18)
    assert set(graph.nodes.collective[large].tolist()) == {int(Collective.ALL_REDUCE)}
    least = 2 * 3 / 4 * TOKEN_BYTES / 310
    assert graph.nodes.duration_ns[large].min() > least
    assert graph.nodes.duration_ns[large].max() < 1.3 * least


def test_the_replay_is_near_the_step_that_gives_the_order(graph: Graph):
    """The host was slow: the steps took 44.2, 49.2 and 45.5 ms, of which 30 were compute."""
    done = replay(graph)
    assert done.measured_ns == 44_248_833
    assert done.step_time_ns == pytest.approx(done.measured_ns, rel=0.01)
    assert done.host_bound_ns > 9_000_000


@pytest.mark.parametrize("grain", ["layer", "submodule"])
def test_coarser_grains_keep_compute_and_are_held_against_no_step(graph: Graph, grain: str):
    coarse = graph.coarsen(grain)
    total = graph.nodes.duration_ns[graph.gpu_compute].sum()
    assert coarse.nodes.duration_ns[coarse.gpu_compute].sum() == total
    assert replay(coarse).measured_ns is None  # the host's work is left out


def test_modules_have_their_own_times(graph: Graph):
    """By CUDA events, without the profiler: a layer takes what is in it, and the gaps."""
    times = {(one.path, one.phase): one.duration_ns for one in graph.job.measurement.scopes}
    for layer in range(4):
        for phase in ("forward", "backward"):
            path = f"model.layers.{layer}"
            inside = sum(times.get((f"{path}.{part}", phase), 0) for part in ("self_attn", "mlp"))
            assert 0 < inside < times[path, phase] < 2.5 * inside


def test_the_job_waits_for_the_slowest_of_its_ranks(graph: Graph) -> None:
    measured = graph.job.measurement
    steps = msgspec.structs.replace(measured, step_ns=tuple(range(1000, 1020)))
    timed = replace(graph, job=msgspec.structs.replace(graph.job, measurement=steps))
    summary = summarise(timed)
    assert summary.measured_step_ns == 1010
    assert summary.job_step_ns == round(1000 + 0.5**0.25 * 19)
    real = timed.with_columns(
        evidence=np.where(graph.communication, Evidence.MEASURED, graph.nodes.evidence)
    )
    assert summarise(real).job_step_ns is None
