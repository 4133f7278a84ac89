"""The CUDA device to measure: driver versions, clock, temperature, power."""

import contextlib
import importlib
import statistics
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onerank.capture.profiling.nvml_sampler import handle_of_current
from onerank.ir.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device: as torch takes it, and its name as CUDA reports it."""

    torch: torch.device
    name: str


@contextlib.contextmanager
def on_device(index: int) -> Generator[Device]:
    """Make a CUDA device the current one; TF32 is as it was when the context ends.

    Raises:
        CaptureError: there is no such device.
    """
    count = torch.cuda.device_count()
    if not count:
        raise CaptureError(
            f"torch {torch.__version__} finds no CUDA device; run this on a machine with a GPU "
            "and a build of torch for CUDA",
            code="bench-no-gpu",
        )
    if index >= count:
        raise CaptureError(
            f"no GPU {index}: this machine has GPUs 0 to {count - 1}", code="bench-unknown-gpu"
        )
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.cuda.set_device(index)
    try:
        yield Device(torch.device("cuda", index), torch.cuda.get_device_name(index))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


_POLL_S = 0.004
"""Interval between readings of the energy counter, below the 10 ms between its updates."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Clock of the SMs in MHz and temperature in degrees Celsius; None if not reported."""

    sm_clock_mhz: int | None = None
    temperature_c: int | None = None


class Power:
    """Mean power over the second half of a measured interval.

    The board updates its energy counter every ten milliseconds or so. The counter lags: on an H200
    it still showed the previous work after 0.6 s. So the power is the slope between the first
    update in the second half and the last update.

    Attributes:
        steps: updates of the energy counter: time in seconds, energy in mJ.
        clocks: readings of the SM clock: time in seconds, clock in MHz.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.clocks: list[tuple[float, int]] = []

    @property
    def watts(self) -> float | None:
        """Mean power in W; None with fewer than three updates of the counter."""
        if len(self.steps) < 3:
            return None
        begin, end = self.steps[0][0], self.steps[-1][0]
        settled = [step for step in self.steps[1:] if step[0] >= (begin + end) / 2]
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
    """The current CUDA device through NVML.

    Attributes:
        missing: why nothing is read; "" when something is.
    """

    def __init__(self) -> None:
        self.missing = ""
        self._nvml: Any = None
        self._handle: Any = None
        try:
            nvml: Any = importlib.import_module("pynvml")  # it has no types
        except ModuleNotFoundError:
            self.missing = "clocks, power and temperature are not known: pip install nvidia-ml-py"
            return
        try:
            nvml.nvmlInit()
            self._handle = handle_of_current(nvml)
            self._nvml = nvml
        except nvml.NVMLError as error:
            self.missing = f"clocks, power and temperature are not known: NVML says {error}"

    def reading(self) -> Reading:
        """Read the current clock and temperature."""
        nvml = self._nvml
        if nvml is None:
            return Reading()
        heat = self._value(
            lambda: nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)
        )
        return Reading(self._clock() or None, heat or None)

    def limit_w(self) -> float | None:
        """Return the power limit in force."""
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
            target=self._follow, args=(power, stop), name="onerank-power", daemon=True
        )
        thread.start()
        try:
            yield power
        finally:
            stop.set()
            thread.join()

    def _follow(self, power: Power, stop: threading.Event) -> None:
        nvml = self._nvml
        if nvml is None:
            return
        last = None
        while not stop.wait(_POLL_S):
            energy = self._value(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
            if energy is None:
                return
            if energy != last:
                now = time.monotonic()
                power.steps.append((now, energy))
                last = energy
                if clock := self._clock():
                    power.clocks.append((now, clock))

    def _clock(self) -> int | None:
        nvml = self._nvml
        return self._value(lambda: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))

    def _value(self, source: Any) -> int | None:
        try:
            return int(source())
        except self._nvml.NVMLError:
            return None


def versions(driver: str) -> dict[str, str]:
    """Return the versions of the libraries that choose kernels; "" for an absent library."""
    triton = ""
    with contextlib.suppress(ImportError):
        triton = str(importlib.import_module("triton").__version__)
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or torch.version.hip or ""),
        "cudnn": str(cudnn or ""),
        "driver": driver,
        "triton": triton,
    }
