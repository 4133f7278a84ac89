"""Run the captures of a plan; those that differ only in their step run in one process."""

import ast
import contextlib
import functools
import importlib
import os
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from onerank.ir.errors import DepthError, OneRankError, SliceError
from onerank.plan.captures import DEPTHS, TRAIN_MODEL, StageCapture, parse_step
from onerank.plan.layouts import PlanError
from onerank.plan.tasks import TaskResult

if TYPE_CHECKING:
    from onerank.capture.capture_script import Capture


class CaptureResult(TaskResult):
    """Captures that differ in their step. It lasts unless a later run should try a capture again.

    Attributes:
        group: `group_key` of the captures.
        layers: layers of the model or of the stage.
        traces: step -> the `.et` file.
        refused: step -> code and message of the error if the model or the script does not allow
            the capture.
    """

    group: str
    layers: int = 0
    traces: dict[str, bytes] = msgspec.field(default_factory=dict[str, bytes])
    refused: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict[str, tuple[str, str]])


# Errors of captures with fewer layers, for models that can be captured whole.
_WITHOUT_LAYERS = ("layers-no-model", "layers-not-repeating")


def layers_of(result: CaptureResult) -> int:
    """Return the layers of the model, by the result of the probe.

    0 if the capture finds no layers that it could leave out: the script builds no transformers
    model, or its layers do not repeat. Such a model is captured whole.

    Raises:
        PlanError: the script cannot be captured.
    """
    if result.refused.get("", ("", ""))[0] in _WITHOUT_LAYERS:
        return 0
    trace_of(result, "")
    return result.layers


def trace_of(result: CaptureResult, step: str) -> bytes:
    """Return the `.et` file of a recorded step.

    Raises:
        PlanError: the model or the script does not allow the capture.
    """
    if step in result.refused:
        code, message = result.refused[step]
        raise PlanError(message, code=code)
    return result.traces[step]


def recorded_step(result: CaptureResult, step: str) -> str:
    """Return the step from which a step is derived, or itself."""
    recorded = {**result.traces, **result.refused}
    if step in recorded:
        return step
    count, _, recompute = parse_step(step)
    same = [each for each in recorded if parse_step(each)[::2] == (count, recompute)]
    return max(same, key=lambda each: parse_step(each)[1])


def capture_stage(
    script: str, gpu: str, captures: Sequence[StageCapture], group: str = ""
) -> CaptureResult:
    """Run captures that differ in their step, in one fork of this process.

    Args:
        script: the script; "" for `TRAIN_MODEL`.
        gpu: the GPU that it sees.
        captures: what to capture.
        group: their `group_key`.
    """
    result = CaptureResult(group=group)
    steps = [capture.step for capture in captures]
    try:
        captured = _captured(script, gpu, captures)
    except OneRankError as error:
        # A refusal is a result, too. Whether a model can be sliced follows from what the key
        # contains; other causes may be gone in a later run, such as a missing file or module.
        if len(captures) == 1:
            result.lasts = isinstance(error, SliceError | DepthError)
            result.refused[steps[0]] = error.code, str(error)
            return result
        # One step may be the cause, such as a recomputation that the model does not support.
        for capture in captures:
            alone = capture_stage(script, gpu, [capture], group)
            result.traces |= alone.traces
            result.refused |= alone.refused
            result.layers = max(result.layers, alone.layers)
            result.lasts &= alone.lasts
        return result
    with tempfile.TemporaryDirectory(prefix="onerank-") as directory:
        trace = Path(directory) / "trace.et"
        for step, each in zip(steps, captured, strict=True):
            each.graph.write(trace)
            result.traces[step] = trace.read_bytes()
            result.layers = each.layers.depth if each.layers else 0
    return result


def _captured(script: str, gpu: str, captures: Sequence[StageCapture]) -> "list[Capture]":
    """Return captures that differ in their step.

    Raises:
        OneRankError: the model or the script does not allow them.
    """
    from onerank.capture.isolated_capture import loading_capture

    with loading_capture():
        from onerank.capture.capture_script import capture_steps
    from onerank.capture.isolation import forked_processes
    from onerank.capture.options import Options
    from onerank.capture.parallelize.fewer_layers import Depth
    from onerank.capture.run_as_rank import unrecorded_steps

    capture = captures[0]
    path = Path(script) if script else TRAIN_MODEL
    _import_libraries(path, capture.arguments)
    _index_once()
    counts = [parse_step(each.step)[0] for each in captures if each.step]
    depth = Depth(capture.layers, tuple(sorted({capture.layers, *DEPTHS})), any_depth=True)
    options = Options(
        device="none",
        like=gpu,
        depth=depth if capture.layers else None,
        # Empty for a user's script: its third step is recorded, as by the commands of a row. With
        # micro-batches, the second step would be recorded. It begins with the work of a script
        # after its first step: a read of the loss made a row 4% too long.
        micro_batches=tuple(counts),
        recorded_steps=len(captures),
        **capture.options(),
    )
    arguments = [*capture.arguments]
    if counts:
        # The first steps only create optimizer states and settle, so they are the cheapest ones.
        unrecorded = unrecorded_steps(options)
        options = replace(options, micro_batches=(*[1] * (unrecorded - 1), *counts))
        arguments += ["--vary", *["1:1:none"] * unrecorded, *(each.step for each in captures)]
    with _quiet(), forked_processes() as run:
        by_step = run(capture_steps, path, arguments, options, progress=lambda _: None)
    return [*by_step.values()]


@functools.cache
def _index_once() -> None:
    """Index the bindings of patched functions before the first fork, for all forks to share."""
    from onerank.capture.patches import index_bindings

    index_bindings()


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Drop what a script and its libraries print, in this process and its forks."""
    # Descriptors and not `sys.stdout`: forks and C++ code write to them.
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in kept:
            os.dup2(null, stream)
        yield
    finally:
        for stream, copy in kept.items():
            os.dup2(copy, stream)
            os.close(copy)
        os.close(null)


def _import_libraries(script: Path, arguments: Sequence[str]) -> None:
    """Import what the script imports from transformers, so that forks need not.

    transformers loads a model's module when its name is first looked up, which takes 3 s.
    """
    import transformers

    tree = ast.parse(script.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "transformers":
            for name in node.names:
                getattr(transformers, name.name, None)
    if script == TRAIN_MODEL:
        # A wrong path or model is an error of the script, which the capture reports.
        with contextlib.suppress(OSError, msgspec.DecodeError, KeyError, ModuleNotFoundError):
            config = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=dict[str, Any])
            kind = config["model_type"]
            importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
