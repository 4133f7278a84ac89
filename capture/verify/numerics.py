"""Verify a capture's numerics against reference runs.

- Instruments: the script runs twice as the same rank with the same seeds, each time in a separate
  process: once through the windows of a capture, once through the same number of plain steps. Loss,
  outputs and gradients of every step must agree.
- Slices: the script's first batch for a Hugging Face model goes through the whole model and through
  all its slices, which run as threads of one process with real communication, in fp32. Loss, logits
  and every gradient must agree.

Both use torch's deterministic kernels; a capture does not.

`Probe` records the tensors of a step without a profiler, each as a checksum of all its bits, its
norm, and up to 16,384 evenly spaced elements, so that a step of a large model takes megabytes.
"""

import contextlib
import os
import random
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from onerank.capture.emulate_torchrun import decide_torchrun
from onerank.capture.fake_tensors import is_integral
from onerank.capture.isolation import run_isolated
from onerank.capture.options import Options
from onerank.capture.patches import patched
from onerank.capture.profiling.measurement_windows import Windows
from onerank.capture.profiling.module_scopes import Modules, profiler_on
from onerank.capture.profiling.window_observations import Window
from onerank.capture.profiling.window_plan import Progress, WindowPlan
from onerank.capture.run_as_rank import run_as_rank, slicing_to_rank
from onerank.capture.script.runner import CaptureComplete, Script, run_script
from onerank.capture.validate_options import uses_torch_distributed
from onerank.capture.verify.comparison import (
    ABSOLUTE,
    RELATIVE,
    RELATIVE_OTHERS,
    Comparison,
    TensorDifference,
    compare_repeated,
    summarize,
)
from onerank.capture.verify.slice_check import compare_slices, without_replicas
from onerank.capture.verify.threaded_world import ThreadedPeers, ThreadedWorld
from onerank.ir.errors import CaptureError, OneRankError
from onerank.ir.notes import Note
from onerank.ir.output_files import scratch_directory

SAMPLES = 16384
_BLOCK = 1 << 24  # elements per partial checksum, which bounds its temporary memory
_PERIOD = 65521  # weights repeat after so many positions; a swap of elements changes the sum
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Sample:
    """A tensor's shape, checksum of all bits, norm, and up to 16,384 of its elements."""

    shape: tuple[int, ...]
    checksum: int
    norm: float
    values: Tensor


@dataclass
class StepRecord:
    """The inputs, losses, outputs and gradients of one training step.

    Attributes:
        profiled: whether a profiler was on at the optimizer's step.
        inputs: checksums of the positional input tensors of outermost modules.
        losses: tensors whose backward was called, in order.
        outputs: floating-point outputs of outermost modules, in order.
        gradients: by parameter name.
    """

    profiled: bool = False
    inputs: list[int] = field(default_factory=list[int])
    losses: list[Sample] = field(default_factory=list[Sample])
    outputs: list[Sample] = field(default_factory=list[Sample])
    gradients: dict[str, Sample] = field(default_factory=dict[str, Sample])


class Probe:
    """Records loss, outputs and gradients of steps while installed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._step = StepRecord()
        self._depth = 0
        self._names: Any = WeakTensorKeyDictionary()  # parameter -> name
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Observe modules, backward passes and optimizers while the context lasts."""
        backward: Callable[..., None] = torch.autograd.backward

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            # The loss is what backward is called on: scripts compute it in many ways.
            self._step.losses += _samples([tensors])
            backward(tensors, *args, **kwargs)

        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._gradients),
        ]
        try:
            with patched("torch.autograd", {"backward": watched}):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def step(self, number: int) -> None:
        """Write the record since the last call as step `number`."""
        torch.save(self._step, self._directory / f"{number}.pt")
        self._step = StepRecord()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1:
            self._step.inputs += [_checksum(t) for t in tree_leaves(inputs) if _is_recorded(t)]
            if module not in self._seen:
                self._seen.add(module)
                self._names.update((p, name) for name, p in module.named_parameters())

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        if self._depth == 0:
            # Not through the output's methods: a ModelOutput may gather sharded logits on access.
            values = list(dict.values(output)) if isinstance(output, dict) else output
            self._step.outputs += _samples([values])

    def _gradients(self, optimizer: Any, *_: Any) -> None:
        self._step.profiled |= profiler_on()
        for group_number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    unnamed = f"parameter {index} of group {group_number}"
                    name = self._names.get(parameter, unnamed)
                    for sample in _samples([parameter.grad]):
                        self._step.gradients[name] = sample


def load_steps(directory: Path) -> list[StepRecord]:
    """Read the records that a probe wrote, in the order of steps."""
    files = sorted(directory.glob("*.pt"), key=lambda path: int(path.stem))
    # Weights only would refuse `StepRecord`; the files are from our own process.
    return [torch.load(path, weights_only=False) for path in files]


def _is_recorded(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


@torch.no_grad()
def _samples(values: Iterable[Any]) -> list[Sample]:
    samples: list[Sample] = []
    for value in tree_leaves(list(values)):
        if not _is_recorded(value) or is_integral(value.dtype):
            continue
        local, flat = _flat(value)
        positions = torch.linspace(0, max(flat.numel() - 1, 0), min(flat.numel(), SAMPLES)).long()
        samples.append(
            Sample(
                shape=tuple(local.shape),
                checksum=_checksum(value),
                norm=float(torch.linalg.vector_norm(flat.float())),
                values=flat[positions.to(flat.device)].cpu(),
            )
        )
    return samples


def _flat(tensor: Any) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a tensor, and its values flattened."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach()
    return local, (local.coalesce().values() if local.is_sparse else local).reshape(-1)


@torch.no_grad()
def _checksum(tensor: Any) -> int:
    """Return the sum of the elements' bits, weighted by position, modulo 2 ** 64."""
    flat = _flat(tensor)[1]
    # The bits of a complex128 have no integer type.
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(torch.uint8 if flat.dtype == torch.bool else _BITS[flat.element_size()])
    total = 0
    for block in bits.split(_BLOCK):
        weights = torch.arange(1, block.numel() + 1, device=block.device).remainder_(_PERIOD)
        # Weights begin again in each block, so the factor keeps a swap of blocks visible.
        total = total * 31 + int((block.long() * weights).sum())
    return total % (1 << 64)


_ENVIRONMENT = {
    # Without it cuBLAS is not deterministic.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONHASHSEED": "0",
}

# torch.compile fuses operators, and rounds in other places than the eager slices.
_EAGER = {"TORCH_COMPILE_DISABLE": "1"}

_NONDETERMINISTIC = "does not have a deterministic implementation"


class Verification(msgspec.Struct, frozen=True):
    """The comparisons of a verification, and the skipped checks.

    Attributes:
        comparisons: one row for each check and kind of tensor.
        not_checked: checks that were skipped, with the reason.
        notes: conditions of the comparisons, such as tolerances.
    """

    comparisons: list[Comparison]
    not_checked: list[str]
    notes: list[Note]

    @property
    def breaches(self) -> int:
        """Tensors that differ by more than the tolerance."""
        return sum(comparison.breaches for comparison in self.comparisons)


def verify_script(
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
    called = Script(script, list(args), options.module)
    options = decide_torchrun(called, options, progress)
    rows, notes = _instruments(called, options, progress)
    skip_reason = ""
    if uses_torch_distributed(script, options):
        skip_reason = "the script uses torch.distributed, so no model was sliced"
    elif without_replicas(options.world).size == 1:
        skip_reason = f"in a world of {options.world} no model is sliced"
    if not skip_reason:
        slice_rows, skip_reason, slice_notes = run_isolated(
            _slices,
            called,
            options,
            progress=progress,
            environment=_ENVIRONMENT | _EAGER,
        )
        rows += slice_rows
        notes += slice_notes
    not_checked = [f"slices against the whole model: {skip_reason}"] if skip_reason else []
    return Verification(rows, not_checked, notes)


def _instruments(
    script: Script, options: Options, progress: Progress
) -> tuple[list[Comparison], list[Note]]:
    # The shortest plan: both runs write the tensors of every step to disk.
    options = replace(
        options, windows=WindowPlan(warm_up=1, timed_steps=1, settle=False), raw_dir=None
    )
    notes = [
        Note(
            f"tolerance of repeated steps: torch.allclose with atol {ABSOLUTE:g} and rtol "
            + ", ".join(f"{rtol:g} ({_name(dtype)})" for dtype, rtol in RELATIVE.items())
            + f", {RELATIVE_OTHERS:g} (fp32 and others); of large tensors a checksum of all bits, "
            "the norm and 16,384 elements are compared",
            code="verify-tolerance",
        )
    ]
    with scratch_directory() as directory:
        instrumented, plain = directory / "instrumented", directory / "plain"
        count, kernels = run_isolated(
            _instrumented_run,
            script,
            options,
            instrumented,
            progress=progress,
            environment=_ENVIRONMENT,
        )
        run_isolated(
            _plain_run,
            script,
            options,
            plain,
            count,
            progress=progress,
            environment=_ENVIRONMENT,
        )
        if kernels:
            notes.append(
                Note(
                    "without a deterministic implementation: " + ", ".join(kernels),
                    code="verify-nondeterministic",
                )
            )
        return _compare_steps(load_steps(instrumented), load_steps(plain)), notes


def _compare_steps(instrumented: list[StepRecord], plain: list[StepRecord]) -> list[Comparison]:
    tolerance = "torch.allclose"
    differences: dict[str, list[TensorDifference]] = {"plain": [], "profiled": []}
    for number, (actual, expected) in enumerate(zip(instrumented, plain, strict=True)):
        # Different inputs, such as random batches, would show as different numerics.
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


def _compare_samples(what: str, name: str, actual: Sample, expected: Sample) -> TensorDifference:
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
    script: Script, options: Options, directory: Path, progress: Progress
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
            run_as_rank(script, options, progress, make_windows) as rank_run,
        ):
            count = rank_run.windows.steps
    messages = [str(warning.message) for warning in caught]
    texts = [message for message in messages if _NONDETERMINISTIC in message]
    return count, sorted({text.split(_NONDETERMINISTIC)[0].strip() for text in texts})


def _plain_run(
    script: Script, options: Options, directory: Path, count: int, progress: Progress
) -> None:
    """Record `count` steps of the script in a directory, without profilers."""

    def make_windows(*arguments: Any) -> Windows:
        windows = _PlainSteps(*arguments)
        windows.probe, windows.count = probe, count
        return windows

    directory.mkdir()
    probe = Probe(directory)
    with (
        _repeatable(),
        probe.installed(),
        run_as_rank(script, options, progress, make_windows),
    ):
        pass


@contextlib.contextmanager
def _repeatable() -> Generator[None]:
    """Seed the generators of random, numpy and torch, and use deterministic kernels."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Operators without a deterministic kernel still run; the report names them.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _slices(
    script: Script, options: Options, progress: Progress
) -> tuple[list[Comparison], str, list[Note]]:
    """Run the script up to its first batch, and run that through the whole model and its slices.

    Returns:
        The comparisons; the reason if there are none, otherwise ""; and notes.
    """
    results: list[tuple[list[Comparison], str, list[Note]]] = []
    failures: list[OneRankError] = []

    def compare_first_call(model: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled() or not models.slices(model):
            return original(model, *inputs, **keywords)
        nn.Module.__call__ = original  # the comparison itself calls modules
        # So that `run_script` takes the exception for the end of a complete capture.
        windows.complete = True
        try:
            results.append(compare_slices(model, inputs, keywords, options, progress))
        except OneRankError as error:
            # The script may catch an exception that passes through it.
            failures.append(error)
        raise CaptureComplete

    models = slicing_to_rank(
        ThreadedPeers(options.rank, ThreadedWorld(options.world.size)), options
    )
    original = nn.Module.__call__
    windows = _PlainSteps(options.windows, Path(os.devnull), Modules(), progress)
    # Not a global forward hook: those get no keyword arguments.
    with patched("torch.nn.Module", {"__call__": compare_first_call}), _repeatable():
        run_script(script, windows, lambda _: None)
    if failures:
        raise failures[0]
    if results:
        return results[0]
    return [], "the first step called no sliceable model with gradients enabled", []


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
