"""Settings of the caching allocator, from the text of `PYTORCH_ALLOC_CONF`."""

import os
import re

import msgspec

from onerank.ir import AllocatorSettings
from onerank.ir.errors import CaptureError

_MIB = 1 << 20

# Sizes for which `roundup_power2_divisions` has an entry: 1 MiB, 2 MiB, ... (kRoundUpPowerOfTwo).
_ROUNDED_SIZES = 16

# `large_segment_size_mb` has to exceed it (kMinLargeAlloc).
_MIN_LARGE_MB = 10

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def settings_text() -> str:
    """Return the text that configures the allocator of this process, "" for none."""
    return next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")


def settings_in(text: str) -> AllocatorSettings:
    """Return the settings of the caching allocator in the value of `PYTORCH_ALLOC_CONF`.

    Other settings are ignored; see `DeviceMemory.notes` for those that change reserved memory.

    Raises:
        CaptureError: a setting that is simulated is malformed.
    """
    settings = AllocatorSettings()
    for setting in split_settings(text):
        name, _, value = setting.partition(":")
        try:
            settings = _with_setting(settings, name, value)
        except ValueError as error:
            raise _malformed(setting, error) from error
    return settings


def fraction_in(text: str, name: str, default: float) -> float:
    """Return the value of a setting that is a number from 0 to 1, or its default.

    Raises:
        CaptureError: the value is malformed, or outside this range, as torch refuses it.
    """
    value = default
    for setting in split_settings(text):
        key, _, digits = setting.partition(":")
        if key == name:
            try:
                value = float(digits)
                if not 0 <= value <= 1:
                    raise ValueError("expected a number from 0 to 1")
            except ValueError as error:
                raise _malformed(setting, error) from error
    return value


def _malformed(setting: str, error: ValueError) -> CaptureError:
    return CaptureError(
        f"{' or '.join(_VARIABLES)}: {setting}: {error}\n"
        "  PyTorch's notes on memory management of CUDA list the settings",
        code="alloc-conf-malformed",
    )


def split_settings(text: str) -> list[str]:
    """Return the settings, each as name:value."""
    # A comma within brackets separates divisions.
    return [setting for setting in re.split(r",(?![^\[]*\])", text.replace(" ", "")) if setting]


def _with_setting(settings: AllocatorSettings, name: str, value: str) -> AllocatorSettings:
    match name:
        case "expandable_segments":
            if value not in ("True", "False"):
                raise ValueError("expected True or False")
            changed = {"expandable_segments": value == "True"}
        case "max_split_size_mb":
            changed = {"max_split_bytes": int(value) * _MIB}
        case "max_non_split_rounding_mb":
            changed = {"unsplit_excess_bytes": int(value) * _MIB}
        case "large_segment_size_mb":
            if int(value) <= _MIN_LARGE_MB:
                raise ValueError(f"expected more than {_MIN_LARGE_MB}")
            changed = {"large_segment_bytes": int(value) * _MIB}
        case "roundup_power2_divisions":
            changed = {"roundup_divisions": _divisions(value)}
        case _:
            return settings
    return msgspec.structs.replace(settings, **changed)


def _divisions(value: str) -> tuple[int, ...]:
    """Return the parts of each power of two (`parseRoundUpPower2Divisions`)."""
    if not value.startswith("["):
        return (_power_of_two(value),) * _ROUNDED_SIZES
    parts = [0] * _ROUNDED_SIZES
    last = -1
    for entry in value.strip("[]").split(","):
        size, _, text = entry.partition(":")
        count = _power_of_two(text)
        if size == ">":
            parts[last + 1 :] = [count] * (_ROUNDED_SIZES - last - 1)
            continue
        place = min(_power_of_two(size).bit_length() - 1, _ROUNDED_SIZES - 1)
        # The first entry holds for smaller sizes, too.
        begin = 0 if last < 0 else place
        parts[begin : place + 1] = [count] * (place + 1 - begin)
        last = place
    return tuple(parts)


def _power_of_two(text: str) -> int:
    number = int(text)
    if number < 1 or number & (number - 1):
        raise ValueError(f"{number} is no power of two")
    return number
