"""`run`: capture a script in a separate process, for Python programs and notebooks."""

import contextlib
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from onerank.capture.isolation import run_isolated
from onerank.capture.options import Options
from onerank.capture.profiling.window_plan import Progress, WindowPlan
from onerank.capture.validate_options import validate_early
from onerank.ir import Graph
from onerank.ir.errors import CaptureError


def _to_stderr(message: str) -> None:
    sys.stderr.write(f"· {message}\n")


def run(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    capture_layers: Sequence[int] | None = None,
    progress: Progress = _to_stderr,
    **options: Any,
) -> Graph:
    """Run a script as one rank of a job, measure one step, and return its graph.

    `run("train.py", args=["--lr", "1"], tp=4)` does what `capture run train.py --tp 4 -- --lr 1`
    does. The script runs in a separate process, so this process does not import torch, and its
    memory and random state do not change.

    Args:
        script: a training script that steps an optimizer.
        args: arguments of the script.
        capture_layers: build a Hugging Face model with each of these numbers of layers in turn,
            and extrapolate to its full depth; None captures the whole model.
        progress: receives a short description of each phase; the default writes it to stderr.
        options: the fields of `Options` and `WindowPlan`, which are the options of `capture run`
            with underscores: `tp=4`, `fsdp=True`, `warm_up=1`.

    Raises:
        CaptureError: the script cannot be captured with these options, or torch is missing.
        TypeError: there is no option of this name.
    """
    requested = _options(options)
    layers = None if capture_layers is None else tuple(capture_layers)
    path = Path(script)
    validate_early(path, requested, layers=layers)
    return run_isolated(_capture, path, tuple(args), requested, layers, progress=progress)


def _capture(
    script: Path,
    args: Sequence[str],
    options: Options,
    layers: Sequence[int] | None,
    progress: Progress,
) -> Graph:
    """Capture in the process that runs the script, and return the graph."""
    # Not the `Capture`: its slices refer to torch, and the caller's process must not import torch.
    with loading_capture():
        from onerank.capture.capture_script import capture, capture_at_depths

    if layers is None:
        return capture(script, args, options, progress).graph
    return capture_at_depths(script, args, options, layers, progress=progress).graph


@contextlib.contextmanager
def loading_capture() -> Generator[None]:
    """Silence torch's log in a context that imports `onerank.capture`.

    Raises:
        CaptureError: torch, or another library of the capture extra, is missing.
    """
    # torch reads these variables on import. Otherwise the log of torch and of its profiler would
    # mix with the script's output.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "safetensors"):
            raise
        raise CaptureError(
            f"capturing needs {error.name}: pip install 'onerank[capture]'",
            code="capture-not-installed",
        ) from error


def _options(values: Mapping[str, Any]) -> Options:
    """Return the options for keyword arguments, checked as on the command line.

    Raises:
        CaptureError: an option does not accept its value.
        TypeError: there is no such option.
    """
    # Only fields with help are options: the command line has no others either.
    of_job = {field.name: field for field in fields(Options) if "help" in field.metadata}
    of_windows = {field.name: field for field in fields(WindowPlan) if "help" in field.metadata}
    job: dict[str, Any] = {}
    windows: dict[str, Any] = {}
    for name, value in values.items():
        field = of_job.get(name) or of_windows.get(name)
        if field is None:
            known = ", ".join(sorted({*of_job, *of_windows}))
            raise TypeError(f"capture.run has no option {name!r}; its options: {known}")
        (job if name in of_job else windows)[name] = _checked(field, value)
    return Options(**job, windows=WindowPlan(**windows))


def _checked(field: "Field[Any]", value: Any) -> Any:
    """Return the value of an option; a path may be given as a string.

    Raises:
        CaptureError: the value is below the option's minimum, or not one of its choices.
    """
    choices = _choices(field.type)
    if choices and value not in choices:
        raise CaptureError(
            f"{field.name}={value!r}: expected one of {', '.join(map(repr, choices))}",
            code="option-not-a-choice",
        )
    minimum = field.metadata.get("minimum")
    if minimum is not None and value is not None and not (_is_integer(value) and value >= minimum):
        raise CaptureError(
            f"{field.name}={value!r}: expected an integer of at least {minimum}",
            code="option-out-of-range",
        )
    # Only fields of files have Path in their type. The type of sharding_plan is a string, because
    # the module imports ShardingPlan for type checkers only.
    return Path(value) if isinstance(value, str) and "Path" in str(field.type) else value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # True is an int in Python


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal[...]` or a `Literal[...] | None`; () for another type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = get_args(annotation)
    literals = [member for member in members if get_origin(member) is Literal]
    none = (None,) if type(None) in members else ()
    return (*get_args(literals[0]), *none) if literals else ()
