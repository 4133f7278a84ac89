"""Verify a capture's numerics against reference runs.

- Instruments: the script runs twice as the same rank with the same seeds, each time in a process of
  its own, once through the windows of a capture and once through the same number of plain steps.
  Loss, outputs and gradients of every step must agree.
- Slices: the script's first batch for a Hugging Face model goes through the whole model and through
  all its slices, which run as threads of one process and really communicate, in fp32. Loss, logits
  and every gradient must agree.

Both use torch's deterministic kernels, which a capture does not.
"""

import contextlib
import os
import random
import tempfile
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
from onerank.capture.profiling.window_plan import Progress, Window, WindowPlan
from onerank.capture.profiling.window_runner import Windows
from onerank.capture.run_as_rank import RankRun, run_as_rank, slicing
from onerank.capture.script.runner import CaptureComplete, run_script
from onerank.capture.validate import uses_torch_distributed
from onerank.capture.verify.comparison import (
    ABSOLUTE,
    RELATIVE,
    RELATIVE_OTHERS,
    Comparison,
    Difference,
    repeated,
    summed_up,
)
from onerank.capture.verify.slice_check import compare_slices, without_copies
from onerank.capture.verify.step_probe import Probe, Sample, Step, load_steps
from onerank.capture.verify.threaded_world import ExactPeers, ThreadedWorld
from onerank.ir.errors import CaptureError, OneRankError

_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else cuBLAS is not deterministic
    "PYTHONHASHSEED": "0",
}

_EAGER = {"TORCH_COMPILE_DISABLE": "1"}

_NONDETERMINISTIC = "does not have a deterministic implementation"


class Verification(msgspec.Struct, frozen=True):
    """What was compared, and what was not.

    Attributes:
        comparisons: one row for each check and sort of tensor.
        not_checked: sentences on what was left out, and why.
        notes: sentences on how it was compared.
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
        options: as for `capture`; the windows' plan is shortened.
        progress: told in a few words what goes on.

    Raises:
        CaptureError: the script cannot be run as asked, or does not repeat.
    """
    options = decide_torchrun(script, args, options, progress)
    rows, notes = _instruments(script, args, options, progress)
    why_not = ""
    if uses_torch_distributed(script, options):
        why_not = "the script uses torch.distributed, so that no model was sliced"
    elif without_copies(options.world).size == 1:
        why_not = f"in a world of {options.world} no model is sliced"
    if not why_not:
        found, why_not, more = run_isolated(
            _slices,
            script,
            list(args),
            options,
            progress=progress,
            environment=_ENVIRONMENT | _EAGER,
        )
        rows += found
        notes += more
    not_checked = [f"slices against the whole model: {why_not}"] if why_not else []
    return Verification(rows, not_checked, notes)


def _instruments(
    script: Path, args: Sequence[str], options: Options, progress: Progress
) -> tuple[list[Comparison], list[str]]:
    options = replace(options, windows=WindowPlan(warm_up=1, pure=1, settle=False), raw_dir=None)
    notes = [
        f"allowed of repeated steps: torch.allclose with atol {ABSOLUTE:g} and rtol "
        + ", ".join(f"{rtol:g} ({_name(dtype)})" for dtype, rtol in RELATIVE.items())
        + f", {RELATIVE_OTHERS:g} (fp32 and others); of large tensors a checksum of all bits, the "
        "norm and 16,384 elements are held against each other"
    ]
    with tempfile.TemporaryDirectory(prefix="onerank-") as directory:
        watched, plain = Path(directory, "watched"), Path(directory, "plain")
        environment = _ENVIRONMENT
        count, kernels = run_isolated(
            _instrumented_run,
            *(script, list(args), options, watched),
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
        return _compare_steps(load_steps(watched), load_steps(plain)), notes


def _compare_steps(watched: list[Step], plain: list[Step]) -> list[Comparison]:
    tolerance = "torch.allclose"
    differences: dict[str, list[Difference]] = {"plain": [], "profiled": []}
    for number, (found, expected) in enumerate(zip(watched, plain, strict=True)):
        if found.inputs != expected.inputs:
            raise CaptureError(
                f"step {number} got other inputs in one run of the script than in the other, so "
                "that nothing can be compared: seed every source of its data (torch, numpy and "
                "random are seeded before it starts), and shuffle with a seed",
                code="verify-inputs-differ",
            )
        rows = differences["profiled" if found.profiled else "plain"]
        for what, mine, theirs in (
            ("loss", found.losses, expected.losses),
            ("outputs", found.outputs, expected.outputs),
        ):
            pairs = zip(mine, theirs, strict=True)
            rows += [_compared(what, f"step {number}", *pair) for pair in pairs]
        rows += [
            _compared("gradients", f"{name}, step {number}", sample, expected.gradients[name])
            for name, sample in found.gradients.items()
        ]
    return [
        row
        for check, members in differences.items()
        for row in summed_up(check, tolerance, members)
    ]


def _compared(what: str, name: str, found: Sample, expected: Sample) -> Difference:
    equal = found.shape == expected.shape and found.checksum == expected.checksum
    difference = repeated(what, name, found.values, expected.values, equal=equal)
    norms = torch.tensor([found.norm]), torch.tensor([expected.norm])
    relative = RELATIVE.get(found.values.dtype, RELATIVE_OTHERS)
    near = torch.allclose(*norms, rtol=relative, atol=ABSOLUTE, equal_nan=True)
    return replace(difference, breach=difference.breach or not (equal or near))


class _Watched(Windows):
    """A capture's windows, with a probe that sees every step."""

    probe: Probe | None = None

    def boundary(self, *, skipped: bool = False) -> None:
        if self.probe is not None:
            self.probe.step(self.steps)
        super().boundary(skipped=skipped)


class _Plain(_Watched):
    """As many steps, and no instrument."""

    count: int = 1

    def _windows(self) -> Window:
        for number in range(1, self.count):
            self._progress(f"plain, step {number + 1} of {self.count}")
            yield


def _instrumented_run(
    script: Path, args: list[str], options: Options, directory: Path, progress: Progress
) -> tuple[int, list[str]]:
    """Run the script through a capture's windows; return its steps and kernels that vary."""

    def watch(*given: Any) -> Windows:
        windows = _Watched(*given)
        windows.probe = probe
        return windows

    directory.mkdir()
    probe = Probe(directory)
    with warnings.catch_warnings(record=True) as caught, _repeatable():
        warnings.simplefilter("always")
        with probe.installed(), run_as_rank(script, args, options, progress, watch) as played:
            count = _steps(played)
    texts = [str(one.message) for one in caught if _NONDETERMINISTIC in str(one.message)]
    return count, sorted({text.split(_NONDETERMINISTIC)[0].strip() for text in texts})


def _plain_run(
    script: Path, args: list[str], options: Options, to: tuple[Path, int], progress: Progress
) -> None:
    """Run the script without an instrument; `to` says where to keep what, and of how many steps."""
    directory, count = to

    def watch(*given: Any) -> Windows:
        windows = _Plain(*given)
        windows.probe, windows.count = probe, count
        return windows

    directory.mkdir()
    probe = Probe(directory)
    with _repeatable(), probe.installed(), run_as_rank(script, args, options, progress, watch):
        pass


def _steps(played: RankRun) -> int:
    return played.windows.steps


@contextlib.contextmanager
def _repeatable() -> Generator[None]:
    """Seed all generators a script may use, and ask for deterministic kernels."""
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
    """Run the script up to its first batch and put that through whole model and slices.

    Returns:
        The comparisons, why there are none, and notes.
    """
    found: list[tuple[list[Comparison], str, list[str]]] = []
    failures: list[OneRankError] = []

    def called(model: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled() or not models.slices(model):
            return original(model, *inputs, **keywords)
        nn.Module.__call__ = original  # what it compares calls modules too
        windows.complete = True
        try:
            found.append(compare_slices(model, inputs, keywords, options, progress))
        except OneRankError as error:
            failures.append(error)  # the script may catch what passes through it
        raise CaptureComplete

    models = slicing(ExactPeers(options.rank, ThreadedWorld(options.world.size)), options)
    original = nn.Module.__call__
    windows = _Plain(options.windows, Path(os.devnull), Modules(), progress)
    # module hooks for all models do not get keywords
    with patched("torch.nn.Module", {"__call__": called}), _repeatable():
        run_script(script, args, windows, lambda: None, module=options.module)
    if failures:
        raise failures[0]
    if found:
        return found[0]
    return [], "the first step called no model to slice with gradients", []


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
