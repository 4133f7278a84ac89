"""`run`: capture a script in a separate process, for Python programs and notebooks."""

import contextlib
import gc
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, overload

from onerank.capture.isolation import forked_processes, frozen_objects, run_isolated
from onerank.capture.options import CompileMode, Options, SeveralCaptures
from onerank.capture.profiling.window_plan import Progress, StepChoice, WindowPlan
from onerank.capture.validate_options import check_in_turn, validate_early
from onerank.ir import Graph
from onerank.ir.errors import CaptureError


def _to_stderr(message: str) -> None:
    sys.stderr.write(f"· {message}\n")


@overload
def run(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    ranks: None = None,
    steps: None = None,
    capture_layers: Sequence[int] | None = None,
    compile: CompileMode | None = None,
    progress: Progress = _to_stderr,
    **options: Any,
) -> Graph: ...


@overload
def run(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    ranks: None = None,
    steps: Sequence[StepChoice],
    capture_layers: None = None,
    compile: None = None,
    progress: Progress = _to_stderr,
    **options: Any,
) -> dict[str, Graph]: ...


@overload
def run(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    ranks: Literal["distinct"] | Sequence[int],
    steps: Sequence[StepChoice] | None = None,
    capture_layers: Sequence[int] | None = None,
    compile: CompileMode | None = None,
    progress: Progress = _to_stderr,
    **options: Any,
) -> dict[int, Graph]: ...


def run(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    ranks: Literal["distinct"] | Sequence[int] | None = None,
    steps: Sequence[StepChoice] | None = None,
    capture_layers: Sequence[int] | None = None,
    compile: CompileMode | None = None,  # noqa: A002  the option's name
    progress: Progress = _to_stderr,
    **options: Any,
) -> Graph | dict[int, Graph] | dict[str, Graph]:
    """Run a script as one rank of a job, measure one step, and return its graph.

    `run("train.py", args=["--lr", "1"], tp=4)` does what `capture run train.py --tp 4 -- --lr 1`
    does. The script runs in a separate process, so this process does not import torch, and its
    memory and random state do not change.

    Args:
        script: a script that trains or infers.
        args: arguments of the script.
        ranks: capture these ranks in turn, or "distinct": one rank of each class of equivalent
            ranks. The result is then a dictionary from rank to graph, by ascending rank.
        steps: of a script that infers, "prefill", "decode", "draft", "verify" or numbers of
            forwards. The result is then a dictionary from step, as text, to graph. In the captures
            of `ranks`, `capture_layers` and `compile`, one step, and the result is theirs.
        capture_layers: build a Hugging Face model with each of these numbers of layers in turn,
            and extrapolate to its full depth; None captures the whole model.
        compile: capture the step eager, then under torch.compile in this mode. The result is the
            compiled step; `graph.job.compilation` compares it with the eager step.
        progress: receives a short description of each phase; the default writes it to stderr.
        options: the fields of `Options` and `WindowPlan`, which are the options of `capture run`
            with underscores: `tp=4`, `fsdp=True`, `warm_up=1`.

    Raises:
        CaptureError: the script cannot be captured with these options, or torch is missing.
        TypeError: there is no option of this name.
    """
    in_turn = _in_turn(ranks, capture_layers, compile)
    if steps is not None:
        options["steps"] = tuple(steps)
    requested = _options(options)
    path = Path(script)
    check_in_turn(requested, in_turn, names_rank="rank" in options)
    validate_early(path, requested, in_turn)
    return run_isolated(_capture, path, tuple(args), requested, in_turn, progress=progress)


def _in_turn(
    ranks: Literal["distinct"] | Sequence[int] | None,
    layers: Sequence[int] | None,
    mode: CompileMode | None,
) -> SeveralCaptures:
    """Return the ranks, steps or depths to capture in turn, checked as on the command line.

    Raises:
        CaptureError: an option does not accept its value.
    """
    if isinstance(ranks, str) and ranks != "distinct":
        raise CaptureError(
            f"ranks={ranks!r}: expected 'distinct' or a sequence of ranks",
            code="option-not-a-choice",
        )
    (compile_field,) = [field for field in fields(SeveralCaptures) if field.name == "compile"]
    return SeveralCaptures(
        ranks=ranks if ranks is None or isinstance(ranks, str) else tuple(ranks),
        capture_layers=None if layers is None else tuple(layers),
        compile=_checked(compile_field, mode),
    )


def _capture(
    script: Path,
    args: Sequence[str],
    options: Options,
    in_turn: SeveralCaptures,
    progress: Progress,
) -> Graph | dict[int, Graph] | dict[str, Graph]:
    """Capture in the process that runs the script, and return the graph, or the graph by rank."""
    # Not the `Capture`: its slices refer to torch, and the caller's process must not import torch.
    with loading_capture():
        from onerank.capture.capture_script import (
            capture,
            capture_at_depths,
            capture_ranks,
            capture_steps,
        )
        from onerank.capture.compile_compare import capture_compiled

    layers = in_turn.capture_layers
    # This process has imported torch and done nothing else, so its forks need not import it again.
    with frozen_objects(), forked_processes() as run_process:
        if in_turn.ranks is not None:
            several = capture_ranks(
                script,
                args,
                options,
                in_turn.named_ranks,
                layers=layers,
                progress=progress,
                run=run_process,
            )
            return {rank: captured.graph for rank, captured in several.captures.items()}
        if layers is not None:
            return capture_at_depths(
                script, args, options, layers, progress=progress, run=run_process
            ).graph
    if in_turn.compile is not None:
        return capture_compiled(script, args, options, in_turn.compile, progress).compiled.graph
    if options.steps is not None:
        done = capture_steps(script, args, options, progress)
        return {step: captured.graph for step, captured in done.items()}
    return capture(script, args, options, progress).graph


@contextlib.contextmanager
def loading_capture() -> Generator[None]:
    """Silence torch's log, and collect no garbage, while the context imports `onerank.capture`.

    Raises:
        CaptureError: torch, or another library of the capture extra, is missing.
    """
    # torch reads these variables on import. Otherwise the log of torch and of its profiler would
    # mix with the script's output.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Imports create many objects and no garbage: collections would take a fifth of their time.
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "safetensors"):
            raise
        raise CaptureError(
            f"capturing needs {error.name}: pip install 'onerank[capture]'",
            code="capture-not-installed",
        ) from error
    finally:
        if collects:
            gc.enable()


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
    # True is an int in Python.
    return isinstance(value, int) and not isinstance(value, bool)


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal[...]` or a `Literal[...] | None`; () for another type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = get_args(annotation)
    literals = [member for member in members if get_origin(member) is Literal]
    none = (None,) if type(None) in members else ()
    return (*get_args(literals[0]), *none) if literals else ()
