"""Detect steps that do different work, or compute non-finite numbers.

A rank without peers trains on other gradients than the real job and may diverge when the job would
not. The duration of kernels depends on their data.

A step lasts from one step() of the script's first optimizer to the next. If the script does not
repeat that (critics and generators, rollouts and updates, an optimizer that updates some parameters
in every second step), the number of module calls or communication calls per step varies.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onerank.capture.profiling.module_scopes import Arguments, Modules
from onerank.ir.notes import Note

_torch: Any = torch  # foreach functions have no public names

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def note_of_overflow(modules: Modules) -> Note | None:
    """Return the note on parameters that are not finite; None if all are finite."""
    parameter_by_id = {
        id(parameter): parameter
        for module, _ in modules
        for parameter in module.parameters(recurse=False)
    }
    shards: list[Any] = [getattr(p, "_local_tensor", p) for p in parameter_by_id.values()]
    local_shards = [shard for shard in shards if _has_values(shard)]
    largest = _torch._foreach_norm(local_shards, ord=float("inf")) if local_shards else []
    infinite = sum(not bool(norm.isfinite()) for norm in largest)
    if not infinite:
        return None
    return Note(
        f"{infinite} of {len(local_shards)} parameters are not finite after the last step, so "
        "kernel times may differ from the job's. Without real peers a rank trains on other "
        "gradients and can diverge: capture with a smaller learning rate",
        code="parameters-not-finite",
    )


def _has_values(shard: Any) -> bool:
    """Return whether a parameter has data on this rank, in a dtype that has infinity."""
    is_float_tensor = type(shard) in (Tensor, nn.Parameter) and shard.dtype in _DTYPES
    return (
        is_float_tensor
        and not shard.is_meta
        and shard.numel() > 0
        and shard.untyped_storage().nbytes() > 0
    )


Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the tensors among a model call's arguments, in order."""


class StepWork(NamedTuple):
    """Work of one step.

    Attributes:
        models: calls of models.
        messages: communication calls; 0 where they are not counted.
        inputs: shapes of the inputs of each model call, in order.
    """

    models: int
    messages: int
    inputs: tuple[Shapes, ...] = ()

    def has_inputs_of(self, other: "StepWork") -> bool:
        """Return whether both steps give their models inputs of the same shapes."""
        # Steps with more calls of one shape are equal here: `note_of` reports their number.
        if self.models == other.models:
            return self.inputs == other.inputs
        return set(self.inputs) == set(other.inputs)

    @property
    def elements(self) -> int:
        """Number of elements of all model inputs."""
        return sum(math.prod(shape) for shapes in self.inputs for shape in shapes)


def argument_shapes(arguments: Any) -> Shapes:
    """Return the shapes of all tensors in nested containers of arguments.

    A nested tensor counts by its number of dimensions.
    """
    shapes: list[tuple[int, ...]] = []
    pending = [arguments]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            # The ragged dimension of a nested tensor is a new symbol for each tensor, so the shapes
            # of no two steps would be equal.
            nested = value.is_nested
            shapes.append((value.dim(),) if nested else tuple(map(int, value.shape)))
        elif isinstance(value, Mapping):
            # Reversed, because the stack returns the last first.
            pending += reversed([*value.values()])
        elif isinstance(value, list | tuple):
            pending += reversed(value)
    return tuple(shapes)


class WorkOfSteps:
    """Counts model and communication calls of the script's steps.

    Args:
        modules: counts calls of models.
        messages: returns the number of communication calls so far.

    Attributes:
        by_step: work of each step except the first, which includes setup.
    """

    def __init__(self, modules: Modules, messages: Callable[[], int]) -> None:
        self.by_step: list[StepWork] = []
        self._modules = modules
        self._messages = messages
        self._before: tuple[int, int] | None = None
        self._inputs: list[Shapes] = []
        modules.on_model_call.append(self._before_forward)

    def close(self) -> None:
        """Count no further calls."""
        if self._before_forward in self._modules.on_model_call:
            self._modules.on_model_call.remove(self._before_forward)

    def _before_forward(self, _: nn.Module, arguments: Arguments) -> None:
        self._inputs.append(argument_shapes(arguments))

    def end_step(self) -> None:
        """Store the work of the step that ends."""
        now = self._modules.calls, self._messages()
        if self._before is not None:
            models, messages = (end - begin for begin, end in zip(self._before, now, strict=True))
            self.by_step.append(StepWork(models, messages, tuple(self._inputs)))
        self._before = now
        self._inputs.clear()


def period_of(calls: Sequence[int]) -> int | None:
    """Return the period, in steps, of the counts in `calls`; None if they do not repeat."""
    for period in range(1, len(calls) // 2 + 1):
        if all(count == later for count, later in zip(calls, calls[period:], strict=False)):
            return period
    return None


def note_of(
    work: Sequence[StepWork], profiled: StepWork, optimizer_steps: int, warm_up: int
) -> Note | None:
    """Return a note if the steps do different work; None if all do the same.

    Args:
        work: work of each step.
        profiled: work of the step in the graph.
        optimizer_steps: optimizer steps per captured step.
        warm_up: steps to ignore in the communication counts: DDP rebuilds its buckets in them.
    """
    models = [step.models for step in work]
    messages = [step.messages for step in work[warm_up:]]
    if len(set(models)) > 1:
        counts, profiled_count, verb = models, profiled.models, "call models"
    elif len(set(messages)) > 1:
        counts, profiled_count, verb = messages, profiled.messages, "communicate"
    else:
        return None
    period = period_of(counts)
    span_text = "one step" if optimizer_steps == 1 else f"{optimizer_steps} steps"
    advice = (
        f"they repeat every {period}: --optimizer-steps {optimizer_steps * period} captures "
        "those as one"
        if period
        else "--optimizer-steps N captures N optimizer steps as one"
    )
    return Note(
        f"steps do different work: they {verb} {min(counts)} to {max(counts)} times, the one in "
        f"this graph {profiled_count}. A step is {span_text} of the script's first optimizer; "
        f"{advice}",
        code="steps-differ",
    )


def input_spread(work: Sequence[StepWork], captured: StepWork) -> float:
    """Return how far the input sizes of the steps lie from the captured step's.

    The root mean square of ln(elements / elements of the captured step). The time of a step grows
    in proportion to its elements where kernels fill the GPU: attention grows faster, launches
    slower.
    """
    if not captured.elements or all(step.has_inputs_of(captured) for step in work):
        return 0.0
    # Relative differences, so that a step twice as large weighs as much as one half as large.
    logs = [math.log(step.elements / captured.elements) for step in work if step.elements]
    return math.sqrt(sum(value**2 for value in logs) / len(logs))


def note_of_inputs(
    work: Sequence[StepWork], captured: StepWork, timed: Sequence[StepWork]
) -> Note | None:
    """Return a note if model inputs differ in shape between steps; None if all are equal.

    Args:
        work: work of each step.
        captured: work of the step in the graph.
        timed: work of the steps that were timed without a profiler.
    """
    if all(step.has_inputs_of(captured) for step in work):
        return None
    sizes = [step.elements for step in work]
    equal = sum(step.has_inputs_of(captured) for step in timed)
    of = f"{equal} of {len(timed)} timed steps have" if equal else "no timed step has"
    return Note(
        f"the shapes of model inputs differ between steps, from {min(sizes)} to {max(sizes)} "
        f"elements; this graph's step has {captured.elements}, and {of} its shapes",
        code="input-shapes-vary",
    )


_LEAST_STEPS_OF_A_TREND = 8

DRIFT_SHARE = 0.05
"""Trend of the timed steps, as a share of their median, that a note reports."""

_TREND_Z = 2.33
"""Score of a trend that one in fifty random orders of steps exceeds.

With both limits, 6 of 172 real ranks and slices on H100s and H200s get the note. Their steps moved
by 6 to 27%: benchmarks/results/2026-11-26-step-drift.txt.
"""


def note_of_drift(steps_ns: Sequence[int]) -> Note | None:
    """Return a note if consecutive steps become longer or shorter; None if they do not.

    The trend is the Theil-Sen slope, its score that of Mann and Kendall. Single outliers change
    neither by much.
    """
    count = len(steps_ns)
    if count < _LEAST_STEPS_OF_A_TREND:
        return None
    pairs = [*combinations(range(count), 2)]
    slopes = [(steps_ns[later] - steps_ns[earlier]) / (later - earlier) for earlier, later in pairs]
    drift = statistics.median(slopes) * (count - 1) / statistics.median(steps_ns)
    longer = sum((slope > 0) - (slope < 0) for slope in slopes)
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    if abs(drift) <= DRIFT_SHARE or (abs(longer) - 1) / deviation <= _TREND_Z:
        return None
    third = count // 3
    first_ms, last_ms = (
        statistics.median(part) / 1e6 for part in (steps_ns[:third], steps_ns[-third:])
    )
    return Note(
        f"the {count} timed steps have not settled: the first third takes {first_ms:.3f} ms and "
        f"the last {last_ms:.3f} ms (medians), a trend of {drift:+.1%} over all. The step and the "
        "host delays follow the median of all: capture again without other work on the CPU, with "
        "a larger --warm-up and --timed-steps",
        code="timed-steps-drift",
    )
