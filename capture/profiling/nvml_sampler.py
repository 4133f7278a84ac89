"""Sample the GPU's clocks, power and temperature through NVML while steps run."""

import contextlib
import importlib
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import torch

from onerank.ir import Reading, Sensors

INTERVAL_S = 0.02

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
"""Constant of NVML -> its word. Idle and none are no reasons."""


class SensorSampler:
    """Reads the sensors of the current CUDA device from a separate thread.

    Attributes:
        missing: why nothing, or not everything, was read; "" when all was.
    """

    def __init__(self) -> None:
        self.missing = ""
        self._values: dict[str, list[int]] = {}
        self._throttled: Counter[str] = Counter()
        self._samples = 0

    @contextlib.contextmanager
    def sampling(self) -> Generator[None]:
        """Sample while the context lasts; without NVML nothing is done but `missing` set."""
        try:
            pynvml: Any = importlib.import_module("pynvml")  # it has no types
        except ModuleNotFoundError:
            self.missing = "clocks, power and temperature are not known: pip install nvidia-ml-py"
            yield
            return
        try:
            pynvml.nvmlInit()
            handle = handle_of_current(pynvml)
        except pynvml.NVMLError as error:
            self.missing = f"clocks, power and temperature are not known: NVML says {error}"
            yield
            return
        stop = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(pynvml, handle, stop), name="onerank-sensors", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            pynvml.nvmlShutdown()

    def result(self) -> Sensors | None:
        """Return the readings, None when there are none."""
        if not self._samples:
            return None
        readings = {
            name: Reading(round(statistics.median(values)), min(values), max(values))
            for name, values in self._values.items()
        }
        return Sensors(samples=self._samples, throttled=dict(self._throttled), **readings)

    def _run(self, nvml: Any, handle: Any, stop: threading.Event) -> None:
        sources: dict[str, Callable[[], int]] = {
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_mw": lambda: nvml.nvmlDeviceGetPowerUsage(handle),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "throttled": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
        while True:
            for name, source in list(sources.items()):
                try:
                    value = source()
                except nvml.NVMLError as error:
                    del sources[name]
                    self.missing = f"{name} is not known: NVML says {error}"
                    continue
                if name == "throttled":
                    self._throttled.update(
                        word for constant, word in _THROTTLES.items()
                        if value & getattr(nvml, constant, 0)
                    )  # fmt: skip
                else:
                    self._values.setdefault(name, []).append(int(value))
            self._samples += 1
            if not sources or stop.wait(INTERVAL_S):
                return


def handle_of_current(nvml: Any) -> Any:
    """Return NVML's handle of the current CUDA device.

    NVML counts the machine's devices, CUDA those it was left to see: the UUID is one for both.
    """
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    except nvml.NVMLError:  # a slice of a GPU has another UUID than its GPU
        place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        return nvml.nvmlDeviceGetHandleByPciBusId("{:08x}:{:02x}:{:02x}.0".format(*place))
