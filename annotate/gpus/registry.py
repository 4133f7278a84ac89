"""GPU descriptions: their figures, the source of every figure, and overrides.

A description is a TOML file. Some ship with this package; a user passes the path of another:

    name = "H100-SXM"
    aliases = ["H100", "NVIDIA H100 80GB HBM3"]    # names that the driver reports
    vendor = "NVIDIA"
    architecture = "hopper"                        # one of spec_schema.ARCHITECTURES
    compute_capability = "9.0"                     # NVIDIA only
    [sources]
    datasheet = "NVIDIA H100 Tensor Core GPU datasheet, 2023"
    [figures]
    tdp_w = { value = 700, source = "datasheet", confidence = "datasheet" }

Figures that only a measurement gives may be absent: `datasheet_estimates` fills them in.
"""

import difflib
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from onerank.annotate.gpus.datasheet_estimates import REFERENCES, with_estimates
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.spec_schema import (
    ARCHITECTURES,
    COMPUTE_CAPABILITY,
    INSTEAD_OF,
    OTHER_ARCHITECTURE,
    RANGES,
    RISES_WITH,
    Figure,
    check_figures,
    measured_of,
    refuse_unknown,
)
from onerank.ir.errors import TargetError, errors_at
from onerank.ir.input_files import load_toml

_SHIPPED = Path(__file__).parent

_WRITTEN = [name for name in Gpu.__struct_fields__ if name != "before"]


def load_gpu(name_or_path: str | Path) -> Gpu:
    """Read a shipped description by its name or an alias, or any description by its path."""
    path = Path(name_or_path)
    if isinstance(name_or_path, Path) or path.suffix == ".toml":
        return _read(path)
    if gpu := find_gpu(name_or_path):
        return gpu
    if path.is_file():
        return _read(path)
    raise TargetError(
        f'unknown GPU "{name_or_path}"{_near_gpus(_key(name_or_path))} `onerank gpus` lists all; '
        "or give the path of a description (a .toml file)",
        code="gpu-unknown",
    )


def gpu_names() -> list[str]:
    """Return the names of the shipped descriptions, in alphabetical order."""
    return sorted({gpu.name for gpu in _by_key().values()})


def find_gpu(device_name: str) -> Gpu | None:
    """Return the shipped description of a device by the driver's or torch's name; None without."""
    return _by_key().get(_key(device_name))


def is_called(gpu: Gpu, device_name: str) -> bool:
    """Return whether a device name, of a driver or a description, is that of `gpu`.

    A description that `onerank bench describe` wrote has the names of its board.
    """
    shipped, key = find_gpu(device_name), _key(device_name)
    same = shipped is not None and shipped.name in (gpu.name, gpu.board)
    return same or key in {_key(name) for name in (gpu.name, gpu.board, *gpu.aliases)}


def _key(name: str) -> str:
    # Drivers write "NVIDIA H100 80GB HBM3" and users "h100-sxm": separators and case distinguish
    # no two GPUs.
    return re.sub(r"[-_\s]", "", name).casefold()


@functools.cache
def _by_key() -> dict[str, Gpu]:
    by_key: dict[str, Gpu] = {}
    for path in sorted(_SHIPPED.glob("*.toml")):
        gpu = _read(path)
        for name in (gpu.name, *gpu.aliases):
            # Two files with one alias would make the answer depend on the order of file names.
            assert by_key.setdefault(_key(name), gpu) is gpu, f"{name} names two shipped GPUs"
    return by_key


def _read(path: Path) -> Gpu:
    data = load_toml(path, error=TargetError)
    with errors_at(path):
        try:
            refuse_unknown(data, _WRITTEN, "field")
            gpu = msgspec.convert({**data, "figures": _figures(data.get("figures", {}))}, Gpu)
            check_gpu(gpu)
            return with_estimates(gpu, _references)
        except msgspec.ValidationError as error:
            raise TargetError(str(error), code="gpu-file-malformed") from None


@functools.cache
def _references() -> tuple[Gpu, ...]:
    """Return the measured GPUs from which figures that a description lacks are estimated."""
    return tuple(_read(_SHIPPED / f"{name}.toml") for name in REFERENCES)


def _figures(data: dict[str, Any]) -> dict[str, Figure]:
    refuse_unknown(data, RANGES, "figure")
    figures: dict[str, Figure] = {}
    for name, figure in data.items():
        try:
            figures[name] = msgspec.convert(figure, Figure)
        except msgspec.ValidationError as error:
            form = f'{name} = {{ value = 1.0, source = "datasheet" }}'
            raise TargetError(
                f"{name}: {error}; the form is {form}", code="gpu-override-malformed"
            ) from None
    return figures


def check_gpu(gpu: Gpu) -> None:
    """Validate a description.

    Raises:
        TargetError: the name or a datasheet figure is missing, a figure is out of range, the
            architecture is unknown, or the compute capability is malformed.
    """
    if not gpu.name.strip():
        raise TargetError(
            'name is empty; expected a name such as name = "H100-SXM"',
            code="gpu-name-empty",
        )
    given = gpu.compute_capability
    if given and not re.fullmatch(COMPUTE_CAPABILITY, given):
        raise TargetError(
            f'compute_capability is "{given}"; expected major.minor, such as "8.6", or no entry',
            code="gpu-compute-capability",
        )
    if gpu.architecture not in ARCHITECTURES:
        near = difflib.get_close_matches(gpu.architecture, ARCHITECTURES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TargetError(
            f'unknown architecture "{gpu.architecture}"{hint}\n'
            f"  known are {', '.join(ARCHITECTURES[:-1])}; for a new architecture write "
            f'"{OTHER_ARCHITECTURE}": its intervals are wider',
            code="gpu-architecture-unknown",
        )
    check_figures(gpu.figures, gpu.sources)


def _near_gpus(key: str) -> str:
    keys = difflib.get_close_matches(key, _by_key(), n=20, cutoff=0.6)
    keys.sort(key=lambda near: (near[:3] == key[:3], near[0] == key[0]), reverse=True)
    names = list(dict.fromkeys(_by_key()[near].name for near in keys))[:3]
    return f"; did you mean {', '.join(names)}?" if names else ";"


def with_figures(gpu: Gpu, values: Mapping[str, float]) -> Gpu:
    """Return a GPU with overridden figures, which its name lists.

    Measured rates keep their share of an overridden peak. An overridden fraction takes precedence
    over measurements. Figures overridden with their present values change nothing.

    Raises:
        TargetError: there is no such figure, or its value is out of range.
    """
    refuse_unknown(dict(values), RANGES, "figure")
    # An override without effect must leave the GPU equal to its description, so that times measured
    # on it stay as measured.
    if not any(_differs(gpu, name, value) for name, value in values.items()):
        return gpu
    changed = {n: Figure(float(value), "set", "estimated") for n, value in values.items()}
    overrides = ", ".join(f"{name}={value:g}" for name, value in values.items())
    kept = {
        name: figure
        for name, figure in gpu.figures.items()
        if not changed.keys() & INSTEAD_OF.get(name, ())
    }
    for measured, peak in (*measured_of(gpu.figures), *RISES_WITH.items()):
        if peak in changed and peak in kept and measured in kept:
            factor = changed[peak].value / kept[peak].value
            changed.setdefault(measured, Figure(kept[measured].value * factor, "set", "estimated"))
    overridden = msgspec.structs.replace(
        gpu,
        name=f"{gpu.name} ({overrides})",
        aliases=(),
        sources={**gpu.sources, "set": "set by the user: what if"},
        figures={**kept, **changed},
        # The original description, so that overrides of overrides compare with the board as sold.
        before=gpu.as_described,
    )
    check_gpu(overridden)
    return with_estimates(overridden, _references)


def _differs(gpu: Gpu, name: str, value: float) -> bool:
    """Return whether an override changes a GPU: its value differs, or replaces a measurement."""
    measured = any(name in INSTEAD_OF.get(figure, ()) for figure in gpu.figures)
    return measured or name not in gpu.figures or gpu.figures[name].value != value
