"""Clocks, power and temperature of the current GPU, read through NVML.

`SensorSampler` reads all sensors between steps. `Board` reads single values, and measures the
power of a sustained run from the board's energy counter.
"""

import contextlib
import importlib
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onerank.ir import Reading, Sensors

INTERVAL_S = 0.02
"""Least time between two samples of the sensors, in seconds."""

# NVML's constant -> the word that a trace stores. Idle and none are no reasons.
_THROTTLES = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSyncBoost": "sync boost",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksThrottleReasonDisplayClockSetting": "display clock setting",
    "nvmlClocksThrottleReasonApplicationsClocksSetting": "applications clocks setting",
    "nvmlClocksThrottleReasonBoardLimit": "board limit",
    "nvmlClocksThrottleReasonReliability": "reliability",
}


@dataclass(frozen=True, slots=True)
class _Connection:
    """NVML and its handle of the current CUDA device.

    Attributes:
        nvml: the module; None without a connection.
        handle: the device.
        missing: why there is no connection; "" with one.
    """

    nvml: Any = None
    handle: Any = None
    missing: str = ""


def _connect() -> _Connection:
    try:
        nvml: Any = importlib.import_module("pynvml")  # it has no types
    except ModuleNotFoundError:
        unknown = "clocks, power and temperature are not known: pip install nvidia-ml-py"
        return _Connection(missing=unknown)
    try:
        nvml.nvmlInit()
        return _Connection(nvml, _current_device(nvml))
    except nvml.NVMLError as error:
        unknown = f"clocks, power and temperature are not known: NVML says {error}"
        return _Connection(missing=unknown)


def _current_device(nvml: Any) -> Any:
    """Return NVML's handle of the current CUDA device."""
    # NVML numbers all devices of the machine, CUDA those in CUDA_VISIBLE_DEVICES. The UUID is the
    # same for both.
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    except nvml.NVMLError:  # a slice of a GPU has another UUID than its GPU
        place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        return nvml.nvmlDeviceGetHandleByPciBusId("{:08x}:{:02x}:{:02x}.0".format(*place))


class SensorSampler:
    """Reads the sensors of the current CUDA device between steps.

    Attributes:
        missing: why a sensor, or every sensor, was not read; "" if all were read.
    """

    # A thread that reads them while steps run competes with the script for the interpreter. It
    # took 1.2 ms of a decode of 10.4 ms that waits for its host (one H100, every 20 ms).

    def __init__(self) -> None:
        self.missing = ""
        self._sources: dict[str, Callable[[], int]] = {}
        self._values: dict[str, list[int]] = {}
        self._throttled: Counter[str] = Counter()
        self._samples = 0
        self._next_s = 0.0  # time of the next sample
        self._nvml: Any = None

    @contextlib.contextmanager
    def connected(self) -> Generator[None]:
        """Connect to NVML while the context lasts; without NVML, only set `missing`."""
        connection = _connect()
        if connection.nvml is None:
            self.missing = connection.missing
            yield
            return
        self._nvml = connection.nvml
        self._sources = _sources(connection.nvml, connection.handle)
        try:
            yield
        finally:
            self._sources = {}
            connection.nvml.nvmlShutdown()

    def sample_if_due(self) -> bool:
        """Read every sensor, if the last reading began 20 ms ago or earlier.

        Returns:
            Whether sensors were read.
        """
        now = time.monotonic()
        if not self._sources or now < self._next_s:
            return False
        self._next_s = now + INTERVAL_S
        for name, source in [*self._sources.items()]:
            try:
                value = source()
            except self._nvml.NVMLError as error:
                # A GPU that does not report a sensor once never reports it.
                del self._sources[name]
                self.missing = f"{name} is not known: NVML says {error}"
                continue
            if name == "throttled":
                self._throttled.update(
                    word for constant, word in _THROTTLES.items()
                    if value & getattr(self._nvml, constant, 0)
                )  # fmt: skip
            else:
                self._values.setdefault(name, []).append(int(value))
        self._samples += 1
        return True

    def result(self) -> Sensors | None:
        """Return the summary of the samples; None without any."""
        if not self._samples:
            return None
        readings = {
            name: Reading(round(statistics.median(values)), min(values), max(values))
            for name, values in self._values.items()
        }
        return Sensors(samples=self._samples, throttled=dict(self._throttled), **readings)


def _sources(nvml: Any, handle: Any) -> dict[str, Callable[[], int]]:
    """Return the functions that read the sensors of a device."""
    return {
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_mw": lambda: nvml.nvmlDeviceGetPowerUsage(handle),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "throttled": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }


# Interval between readings of the energy counter, below the 10 ms between its updates.
_POLL_S = 0.004


@dataclass(frozen=True, slots=True)
class BoardReading:
    """Clock of the SMs in MHz and temperature in degrees Celsius; None if not reported."""

    sm_clock_mhz: int | None = None
    temperature_c: int | None = None


class Power:
    """Mean power over the second half of a measured interval.

    Attributes:
        updates: times in seconds at which the energy counter changed, and its value in mJ.
        clocks: readings of the SM clock: time in seconds, clock in MHz.
    """

    # The board updates its energy counter about every 10 ms, and the counter lags: on an H200 it
    # still showed the previous work after 0.6 s. So the power is the slope between the first update
    # in the second half and the last update.

    def __init__(self) -> None:
        self.updates: list[tuple[float, int]] = []
        self.clocks: list[tuple[float, int]] = []

    @property
    def watts(self) -> float | None:
        """Mean power in W; None with fewer than three updates of the counter."""
        if len(self.updates) < 3:
            return None
        begin, end = self.updates[0][0], self.updates[-1][0]
        settled = [update for update in self.updates[1:] if update[0] >= (begin + end) / 2]
        if len(settled) < 2 or settled[-1][0] <= settled[0][0]:
            return None
        return (settled[-1][1] - settled[0][1]) / 1e3 / (settled[-1][0] - settled[0][0])

    @property
    def sm_clock_mhz(self) -> int | None:
        """Median clock over the second half, in MHz; None if no source reports it."""
        if not self.clocks:
            return None
        begin, end = self.clocks[0][0], self.clocks[-1][0]
        return round(statistics.median(mhz for when, mhz in self.clocks
                                       if when >= (begin + end) / 2))  # fmt: skip


class Board:
    """Single readings of the current CUDA device.

    Attributes:
        missing: why NVML is not available; "" if it is.
    """

    def __init__(self) -> None:
        connection = _connect()
        self.missing = connection.missing
        self._nvml, self._handle = connection.nvml, connection.handle

    def reading(self) -> BoardReading:
        """Read the current clock and temperature."""
        nvml = self._nvml
        if nvml is None:
            return BoardReading()
        temperature_c = self._value(
            lambda: nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)
        )
        return BoardReading(self._clock() or None, temperature_c or None)

    def limit_w(self) -> float | None:
        """Return the power limit in force, in W; None if not reported."""
        nvml = self._nvml
        if nvml is None:
            return None
        limit = self._value(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle))
        return limit / 1e3 if limit else None

    def driver(self) -> str:
        """Return the driver's version; "" if no source reports it."""
        if self._nvml is not None:
            version = self._nvml.nvmlSystemGetDriverVersion()
            return version.decode() if isinstance(version, bytes) else str(version)
        module = Path("/sys/module/nvidia/version")
        return module.read_text().strip() if module.is_file() else ""

    @contextlib.contextmanager
    def power(self) -> Generator[Power]:
        """Sample the board's energy counter and clock while the context lasts."""
        power, stop = Power(), threading.Event()
        thread = threading.Thread(
            target=self._sample_energy, args=(power, stop), name="onerank-power", daemon=True
        )
        thread.start()
        try:
            yield power
        finally:
            stop.set()
            thread.join()

    def _sample_energy(self, power: Power, stop: threading.Event) -> None:
        nvml = self._nvml
        if nvml is None:
            return
        last = None
        while not stop.wait(_POLL_S):
            energy = self._value(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
            if energy is None:
                return
            # Only a changed value marks a time: between updates the counter stands still.
            if energy != last:
                now = time.monotonic()
                power.updates.append((now, energy))
                last = energy
                if clock := self._clock():
                    power.clocks.append((now, clock))

    def _clock(self) -> int | None:
        nvml = self._nvml
        return self._value(lambda: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))

    def _value(self, source: Callable[[], Any]) -> int | None:
        """Return what NVML reports; None if the GPU does not report it."""
        try:
            return int(source())
        except self._nvml.NVMLError:
            return None
