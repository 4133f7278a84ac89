"""Notes of the measurement windows, each from the least state that causes it."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from notes import codes, note_of

from onerank.capture.fake_world.async_work import WAIT_RANGE, EmulatedCallTimes
from onerank.capture.job_record import job_of
from onerank.capture.options import Options
from onerank.capture.profiling import measurement_windows, step_memory
from onerank.capture.profiling.allocator_snapshots import History
from onerank.capture.profiling.measurement_windows import UnprofiledWindows
from onerank.capture.profiling.profiled_windows import PLAIN_EXECUTION_TRACE, ProfiledWindows
from onerank.capture.profiling.step_memory import StepMemory
from onerank.capture.profiling.step_variance import StepWork, note_of_drift
from onerank.capture.profiling.window_observations import Observations, WindowContext
from onerank.capture.profiling.window_plan import HOST, WindowPlan
from onerank.converters.sources.kineto.capture_directory import STRUCTURE, UNCONTENDED
from onerank.ir import EmulatedCalls


@pytest.fixture
def observed() -> Observations:
    return Observations(profiled_step_ns=[1], peak_memory_bytes=[0], start_memory_bytes=[0])


def context(observed: Observations, directory: Path) -> WindowContext:
    parts: Any = SimpleNamespace(
        by_step=[StepWork(0, 0)], only_models_hooked=contextlib.nullcontext
    )
    plan = WindowPlan(warm_up=4, timed_steps=1)
    return WindowContext(plan, directory, parts, lambda _: None, observed, parts)


def run(window: Any) -> None:
    """Let every step of a window pass; none is skipped."""
    next(window, None)
    while True:
        try:
            window.send(False)
        except StopIteration:
            return


def test_steps_that_do_not_settle(observed, tmp_path, monkeypatch):
    clock = SimpleNamespace(
        mark=lambda **_: None, durations_ns=lambda: (1_000_000, 1_000_000, 1_100_000)
    )
    monkeypatch.setattr(measurement_windows, "StepTimer", lambda **_: clock)
    memory = StepMemory(observed, tmp_path)
    run(UnprofiledWindows(context(observed, tmp_path), memory).warm_up())
    note_of(observed.notes, "warm-up-unsettled", "10.0%")


def test_sensors_that_nothing_reads(observed, tmp_path, monkeypatch):
    sampler = SimpleNamespace(missing="no NVML", result=lambda: None, sample_if_due=lambda: None)
    monkeypatch.setattr(measurement_windows, "SensorSampler", lambda: sampler)
    memory = StepMemory(observed, tmp_path)
    run(UnprofiledWindows(context(observed, tmp_path), memory).timed())
    note_of(observed.notes, "sensors-not-read", "no NVML")


# Slices of TP 4 with --sp on GPU 0 and GPU 3 of one host, in 0.1 ms; only the first had drifted.
DRIFTED = (532, 526, 534, 519, 539, 530, 510, 483, 473, 481, 512, 449, 468, 481, 453, 445, 446, 444)
STEADY = (451, 426, 455, 443, 439, 447, 463, 456, 456, 466, 451, 445, 459, 426, 442, 435, 430, 444)


def test_timed_steps_that_drift():
    note = note_of_drift([100_000 * step for step in DRIFTED])
    assert note is not None
    note_of([note], "timed-steps-drift", "53.100 ms", "44.950 ms", "-20.")
    assert note_of_drift([100_000 * step for step in STEADY]) is None
    assert note_of_drift([*range(40_000_000, 40_000_020)]) is None  # a trend of nothing
    outlier = [1_000_000] * 19 + [9_000_000]
    assert note_of_drift(outlier) is None
    assert note_of_drift([*range(10, 17)]) is None  # too few steps to know


def test_host_time_of_emulated_calls(observed, tmp_path, monkeypatch):
    times = EmulatedCallTimes()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    others: Any = SimpleNamespace(call_times=times)
    window = UnprofiledWindows(context(observed, tmp_path), None, others).host()
    times.add("all_reduce", 99)  # before the window
    next(window)
    for _ in range(HOST):
        for us in (30, 40, 9000):  # the last call waits for the GPU
            times.add("all_reduce", us * 1000, asynchronous=True)
            times.add(WAIT_RANGE, 3000)
        times.add("barrier", 20_000)
        with contextlib.suppress(StopIteration):
            window.send(False)
    assert observed.emulated_calls == EmulatedCalls(
        synchronous=1, asynchronous=3, waits=3, host_ns=3 * 40_000 + 3 * 3000 + 20_000
    )
    assert not times.enabled
    # As NCCL: 20 us, three of 22 and three waits of 2.2; of ours, c10d takes 6 more a call.
    assert observed.emulated_calls.excess_ns == (149_000 + 4 * 6000 - 20_000 - 66_000 - 6600) / 4
    assert EmulatedCalls(2, 0, 0, host_ns=2 * 9_000).excess_ns == 0


@pytest.mark.parametrize(
    ("is_complete", "code"),
    [(False, "memory-history-incomplete"), (True, "memory-linger-unknown")],
)
def test_an_allocator_history_that_lacks_something(
    is_complete, code, observed, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(step_memory, "is_complete", lambda *_: is_complete)
    monkeypatch.setattr(step_memory, "history_of", lambda *_: History(action=(0,)))
    snapshots: Any = SimpleNamespace(before={}, after={})
    StepMemory(observed, tmp_path).keep(snapshots, 2)
    note_of(observed.notes, code, 3)
    assert len(list(tmp_path.iterdir())) == is_complete


def profiled(observed: Observations, directory: Path, **others: Any) -> Any:
    memory: Any = None
    ranks: Any = SimpleNamespace(**others)
    return ProfiledWindows(context(observed, directory), memory, ranks)


def test_a_rank_of_a_real_job_that_others_do_not_wait_for(observed, tmp_path):
    profiled(observed, tmp_path, rendezvous=lambda: True)._wait_for_ranks()
    assert observed.notes == []
    profiled(observed, tmp_path, rendezvous=lambda: False)._wait_for_ranks()
    assert codes(observed.notes) == ["ranks-not-ready"]


def test_an_uncontended_step_of_other_shapes(observed, tmp_path):
    windows = profiled(observed, tmp_path)
    observed.profiled_host_ns.append(1)
    windows._profiles = windows._structures = [StepWork(1, 0, (((2, 8),),))]
    for name in (f"0.{STRUCTURE}", f"0.{PLAIN_EXECUTION_TRACE}", UNCONTENDED):
        (tmp_path / name).touch()
    windows._uncontended = StepWork(1, 0, (((2, 9),),))
    windows.select()
    assert codes(observed.notes) == ["uncontended-step-missing"]
    assert not (tmp_path / UNCONTENDED).exists()


@pytest.fixture
def rank_run() -> Any:
    return SimpleNamespace(
        peers=SimpleNamespace(calls=[], groups={}),
        models=SimpleNamespace(sliced=[]),
        modules=SimpleNamespace(table=tuple),
        script_distributed=False,
    )


def test_a_capture_names_the_device_that_it_lacked(observed, rank_run):
    on_cpu = job_of(rank_run, Options(tp=2, collective_kernels=True, busbw_gb_s=100), observed)
    assert codes(on_cpu.measurement.notes) == ["captured-on-cpu", "collectives-not-emulated"]
    emulated = job_of(rank_run, Options(device="none"), observed)
    note_of(emulated.measurement.notes, "captured-without-device", "H100")


@pytest.mark.parametrize("allowed", [True, False])
def test_a_capture_records_whether_cudnn_may_use_tf32(observed, rank_run, monkeypatch, allowed):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    job = job_of(rank_run, Options(device="none"), observed)
    assert job.measurement.tf32_convolutions is allowed
