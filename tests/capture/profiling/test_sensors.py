"""Sensors of the GPU: a library without a driver, and a library whose readings are known."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from onerank.capture.profiling import nvml
from onerank.capture.profiling.nvml import Board, SensorSampler


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and a driver")
def test_without_a_driver_or_its_library_a_sentence_says_so():
    sampler = SensorSampler()
    ran = False
    with sampler.connected():
        ran = True
    assert ran
    assert sampler.result() is None
    assert sampler.missing.startswith("clocks, power and temperature are not known: ")
    assert Board().missing == sampler.missing


class FakeNvml(SimpleNamespace):
    """pynvml with constant readings; its energy counter grows by 2 J in each reading."""

    class NVMLError(Exception):
        """As of pynvml."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksThrottleReasonSwPowerCap = 4  # noqa: N815

    def __init__(self) -> None:
        super().__init__(
            energy_mj=0,
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetClockInfo=lambda _, kind: {1: 1500, 2: 2600}[kind],
            nvmlDeviceGetPowerUsage=lambda _: 400_000,
            nvmlDeviceGetTemperature=lambda *_: 50,
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 4,
            nvmlDeviceGetEnforcedPowerLimit=lambda _: 700_000,
        )

    def nvmlDeviceGetTotalEnergyConsumption(self, _: object) -> int:  # noqa: N802
        self.energy_mj += 2000
        return self.energy_mj


@pytest.fixture
def fake_nvml(monkeypatch):
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(nvml, "_current_device", lambda _: "device")
    return module


def test_sensors_are_summarised_over_the_samples(fake_nvml):
    sampler = SensorSampler()
    with sampler.connected():
        assert sampler.sample_if_due()
        assert not sampler.sample_if_due()  # it was read just now
        time.sleep(nvml.INTERVAL_S)
        assert sampler.sample_if_due()
    assert not sampler.sample_if_due()
    sensors = sampler.result()
    assert sampler.missing == ""
    assert sensors is not None
    assert sensors.samples == 2
    assert sensors.power_mw is not None
    assert sensors.power_mw.median == 400_000
    assert sensors.throttled == {"power cap": sensors.samples}


def test_a_sensor_that_is_not_reported_is_named_and_the_others_are_read(fake_nvml):
    def unsupported(_: object) -> int:
        raise fake_nvml.NVMLError("Not Supported")

    fake_nvml.nvmlDeviceGetPowerUsage = unsupported
    sampler = SensorSampler()
    with sampler.connected():
        sampler.sample_if_due()
    sensors = sampler.result()
    assert sampler.missing == "power_mw is not known: NVML says Not Supported"
    assert sensors is not None
    assert sensors.power_mw is None
    assert sensors.sm_clock_mhz is not None
    assert sensors.sm_clock_mhz.median == 1500


def test_a_board_reads_clock_limit_and_the_power_of_an_interval(fake_nvml):
    board = Board()
    assert board.missing == ""
    assert (board.reading().sm_clock_mhz, board.reading().temperature_c) == (1500, 50)
    assert board.limit_w() == 700
    with board.power() as power:
        time.sleep(0.1)
    joules = (power.updates[-1][1] - power.updates[0][1]) / 1e3
    assert joules == 2 * (len(power.updates) - 1)
    assert power.watts is not None
    assert power.watts > 0
    assert power.sm_clock_mhz == 1500
