"""Verify a capture's numerics against reference runs.

- Instruments: the script runs twice as the same rank with the same seeds, each time in a separate
  process: once through the windows of a capture, once through the same number of plain steps. Loss,
  outputs and gradients of every step must agree.
- Slices: the script's first batch for a Hugging Face model goes through the whole model and through
  all its slices, which run as threads of one process with real communication, in fp32. Loss, logits
  and every gradient must agree.

Both use torch's deterministic kernels; a capture does not.
"""

import contextlib
import os
import random
import warnings
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from onerank.capture.emulate_torchrun import decide_torchrun
from onerank.capture.isolation import run_isolated
from onerank.capture.options import Options
from onerank.capture.patches import patched
from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.window_observations import Window
from onerank.capture.profiling.window_plan import Progress, WindowPlan
from onerank.capture.profiling.windows import Windows
from onerank.capture.run_as_rank import RankRun, run_as_rank, slicing
from onerank.capture.script.runner import CaptureComplete, run_script
from onerank.capture.validate_options import uses_torch_distributed
from onerank.capture.verify.comparison import (
    ABSOLUTE,
    RELATIVE,
    RELATIVE_OTHERS,
    Comparison,
    Difference,
    compare_repeated,
    summarize,
)
from onerank.capture.verify.slice_check import compare_slices, without_replicas
from onerank.capture.verify.step_probe import Probe, Sample, StepRecord, load_steps
from onerank.capture.verify.threaded_world import ThreadedPeers, ThreadedWorld
from onerank.ir.errors import CaptureError, OneRankError
from onerank.ir.output_files import scratch_directory

_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS is not deterministic
    "PYTHONHASHSEED": "0",
}

_EAGER = {"TORCH_COMPILE_DISABLE": "1"}

_NONDETERMINISTIC = "does not have a deterministic implementation"


class Verification(msgspec.Struct, frozen=True):
    """The comparisons of a verification, and the checks that were not made.

    Attributes:
        comparisons: one row for each check and kind of tensor.
        not_checked: checks that were skipped, with the reason.
        notes: conditions of the comparisons, such as tolerances.
    """

    comparisons: list[Comparison]
    not_checked: list[str]
    notes: list[str]

    @property
    def breaches(self) -> int:
        """Tensors that differ by more than the tolerance."""
        return sum(comparison.breaches for comparison in self.comparisons)


def verify(
    script: Path, args: Sequence[str], options: Options, progress: Progress = lambda _: None
) -> Verification:
    """Run both checks on a script.

    Args:
        script: as for `capture`.
        args: as for `capture`.
        options: as for `capture`, except that the window plan is shortened.
        progress: receives one short line per stage.

    Raises:
        CaptureError: the script cannot run with these options, or its two runs differ in inputs.
    """
    options = decide_torchrun(script, args, options, progress)
    rows, notes = _instruments(script, args, options, progress)
    skip_reason = ""
    if uses_torch_distributed(script, options):
        skip_reason = "the script uses torch.distributed, so no model was sliced"
    elif without_replicas(options.world).size == 1:
        skip_reason = f"in a world of {options.world} no model is sliced"
    if not skip_reason:
        slice_rows, skip_reason, slice_notes = run_isolated(
            _slices,
            script,
            list(args),
            options,
            progress=progress,
            environment=_ENVIRONMENT | _EAGER,
        )
        rows += slice_rows
        notes += slice_notes
    not_checked = [f"slices against the whole model: {skip_reason}"] if skip_reason else []
    return Verification(rows, not_checked, notes)


def _instruments(
    script: Path, args: Sequence[str], options: Options, progress: Progress
) -> tuple[list[Comparison], list[str]]:
    options = replace(options, windows=WindowPlan(warm_up=1, pure=1, settle=False), raw_dir=None)
    notes = [
        f"tolerance of repeated steps: torch.allclose with atol {ABSOLUTE:g} and rtol "
        + ", ".join(f"{rtol:g} ({_name(dtype)})" for dtype, rtol in RELATIVE.items())
        + f", {RELATIVE_OTHERS:g} (fp32 and others); of large tensors a checksum of all bits, the "
        "norm and 16,384 elements are compared"
    ]
    with scratch_directory() as directory:
        instrumented, plain = directory / "instrumented", directory / "plain"
        environment = _ENVIRONMENT
        count, kernels = run_isolated(
            _instrumented_run,
            *(script, list(args), options, instrumented),
            progress=progress,
            environment=environment,
        )
        run_isolated(
            _plain_run,
            *(script, list(args), options, (plain, count)),
            progress=progress,
            environment=environment,
        )
        if kernels:
            notes.append("without a deterministic implementation: " + ", ".join(kernels))
        return _compare_steps(load_steps(instrumented), load_steps(plain)), notes


def _compare_steps(instrumented: list[StepRecord], plain: list[StepRecord]) -> list[Comparison]:
    tolerance = "torch.allclose"
    differences: dict[str, list[Difference]] = {"plain": [], "profiled": []}
    for number, (actual, expected) in enumerate(zip(instrumented, plain, strict=True)):
        if actual.inputs != expected.inputs:
            raise CaptureError(
                f"the inputs of step {number} differ between two runs of the script, so that its "
                "results cannot be compared: seed every source of data (torch, numpy and random "
                "are seeded before the script starts), and shuffle with a seed",
                code="verify-inputs-differ",
            )
        rows = differences["profiled" if actual.profiled else "plain"]
        for what, actual_samples, expected_samples in (
            ("loss", actual.losses, expected.losses),
            ("outputs", actual.outputs, expected.outputs),
        ):
            pairs = zip(actual_samples, expected_samples, strict=True)
            rows += [_compare_samples(what, f"step {number}", *pair) for pair in pairs]
        rows += [
            _compare_samples(
                "gradients", f"{name}, step {number}", sample, expected.gradients[name]
            )
            for name, sample in actual.gradients.items()
        ]
    return [
        row
        for check, members in differences.items()
        for row in summarize(check, tolerance, members)
    ]


def _compare_samples(what: str, name: str, actual: Sample, expected: Sample) -> Difference:
    equal = actual.shape == expected.shape and actual.checksum == expected.checksum
    difference = compare_repeated(what, name, actual.values, expected.values, equal=equal)
    # The norm covers the elements that are not among the samples.
    norms = torch.tensor([actual.norm]), torch.tensor([expected.norm])
    relative = RELATIVE.get(actual.values.dtype, RELATIVE_OTHERS)
    near = torch.allclose(*norms, rtol=relative, atol=ABSOLUTE, equal_nan=True)
    return replace(difference, breach=difference.breach or not (equal or near))


class _ProbedWindows(Windows):
    """A capture's windows, with a probe that records every step."""

    probe: Probe | None = None

    def boundary(self, *, skipped: bool = False) -> None:
        if self.probe is not None:
            self.probe.step(self.steps)
        super().boundary(skipped=skipped)


class _PlainSteps(_ProbedWindows):
    """`count` steps without profilers, recorded by the probe."""

    count: int = 1

    def _windows(self) -> Window:
        for number in range(1, self.count):
            self._progress(f"plain, step {number + 1} of {self.count}")
            yield


def _instrumented_run(
    script: Path, args: list[str], options: Options, directory: Path, progress: Progress
) -> tuple[int, list[str]]:
    """Run the script through a capture's windows; return (steps, nondeterministic operators)."""

    def make_windows(*arguments: Any) -> Windows:
        windows = _ProbedWindows(*arguments)
        windows.probe = probe
        return windows

    directory.mkdir()
    probe = Probe(directory)
    with warnings.catch_warnings(record=True) as caught, _repeatable():
        warnings.simplefilter("always")
        with (
            probe.installed(),
            run_as_rank(script, args, options, progress, make_windows) as rank_run,
        ):
            count = _steps(rank_run)
    messages = [str(warning.message) for warning in caught]
    texts = [message for message in messages if _NONDETERMINISTIC in message]
    return count, sorted({text.split(_NONDETERMINISTIC)[0].strip() for text in texts})


def _plain_run(
    script: Path, args: list[str], options: Options, to: tuple[Path, int], progress: Progress
) -> None:
    """Run the script without profilers; `to` is (directory of the records, number of steps)."""
    directory, count = to

    def make_windows(*arguments: Any) -> Windows:
        windows = _PlainSteps(*arguments)
        windows.probe, windows.count = probe, count
        return windows

    directory.mkdir()
    probe = Probe(directory)
    with (
        _repeatable(),
        probe.installed(),
        run_as_rank(script, args, options, progress, make_windows),
    ):
        pass


def _steps(rank_run: RankRun) -> int:
    return rank_run.windows.steps


@contextlib.contextmanager
def _repeatable() -> Generator[None]:
    """Seed the generators of random, numpy and torch, and use deterministic kernels."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _slices(
    script: Path, args: list[str], options: Options, progress: Progress
) -> tuple[list[Comparison], str, list[str]]:
    """Run the script up to its first batch, and run that through the whole model and its slices.

    Returns:
        The comparisons; the reason if there are none, otherwise ""; and notes.
    """
    results: list[tuple[list[Comparison], str, list[str]]] = []
    failures: list[OneRankError] = []

    def compare_first_call(model: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled() or not models.slices(model):
            return original(model, *inputs, **keywords)
        nn.Module.__call__ = original  # the comparison itself calls modules
        windows.complete = True
        try:
            results.append(compare_slices(model, inputs, keywords, options, progress))
        except OneRankError as error:
            failures.append(error)  # the script may catch an exception that passes through it
        raise CaptureComplete

    models = slicing(ThreadedPeers(options.rank, ThreadedWorld(options.world.size)), options)
    original = nn.Module.__call__
    windows = _PlainSteps(options.windows, Path(os.devnull), Modules(), progress)
    # Not a global forward hook: those get no keyword arguments.
    with patched("torch.nn.Module", {"__call__": compare_first_call}), _repeatable():
        run_script(script, args, windows, lambda: None, module=options.module)
    if failures:
        raise failures[0]
    if results:
        return results[0]
    return [], "the first step called no sliceable model with gradients enabled", []


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
