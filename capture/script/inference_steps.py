"""Capture a script that only infers: a step is one forward of the model.

The forwards of a generation differ: a prefill, then decodes whose context grows. A measurement
needs many equal steps. So a chosen forward is repeated in place, within the script's call of the
model, until its windows are complete. Everything that it changed is restored before each
repetition, and the script continues as if it had run once.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from onerank.capture.profiling.measurement_windows import Windows
from onerank.capture.profiling.module_scopes import Arguments, Modules
from onerank.capture.profiling.window_plan import StepChoice
from onerank.capture.script.forward_tokens import ForwardTokens, forward_tokens
from onerank.capture.script.optimizer_steps import existing_optimizers, optimizer_exists
from onerank.capture.script.repeatable_call import RepeatableCall, kept_random_state
from onerank.ir import InferenceStep
from onerank.ir.errors import ScriptError
from onerank.ir.notes import Note

DEFAULT_STEPS: tuple[StepChoice, ...] = ("prefill", "decode")
"""Steps that are captured if the user names none."""


@dataclass(frozen=True)
class MeasuredForward:
    """A forward whose windows are complete.

    Attributes:
        label: "prefill", "decode" or its number: the choice that selected it.
        raw: directory with the traces of its windows.
        windows: its windows and their observations.
        step: its tokens.
    """

    label: str
    raw: Path
    windows: Windows
    step: InferenceStep


class WindowsOfForward(Protocol):
    """Creates the windows of a forward."""

    def __call__(self, directory: Path, *, forward: RepeatableCall, on_gpu: bool) -> Windows:
        """Return the windows whose traces go to `directory`; arguments as for `Windows`."""
        ...


class InferenceSteps:
    """Captures chosen forwards of a script by repeating each within the script's call.

    A script counts as one that only infers if it calls a model with gradients disabled, no
    optimizer exists, and its text does not train. If the user chooses steps, every forward counts.

    Args:
        modules: reports the calls of the script's models.
        chosen: steps to capture; () for a prefill and a decode, as far as there are any.
        raw: directory that receives a directory of traces per forward.
        make_windows: creates the windows of a forward.
        recognise: whether forwards count although the user chose no steps.

    Attributes:
        chosen: steps that the user chose.
        measured: the captured forwards.
        forwards: number of forwards so far, with gradients or without.
        stopped: whether no more forwards are captured: all choices are, or the script trains.
    """

    def __init__(
        self,
        modules: Modules,
        chosen: Sequence[StepChoice],
        raw: Path,
        make_windows: WindowsOfForward,
        *,
        recognise: bool,
    ) -> None:
        self.chosen = tuple(chosen)
        self.measured: list[MeasuredForward] = []
        self.forwards = 0
        self.stopped = not (recognise or chosen)
        self._modules = modules
        self._raw = raw
        self._make_windows = make_windows
        self._pending = [*(chosen or DEFAULT_STEPS)]
        self._earlier_optimizers = existing_optimizers()
        self._repeating = False
        self._cached = 0  # tokens of each sequence after the last forward
        self._end_forward: Callable[[Windows], None] = lambda _: None
        self._captured: Callable[[], None] = lambda: None

    @property
    def complete(self) -> bool:
        """Whether all chosen forwards are captured."""
        return bool(self.measured) and not self._pending

    @contextlib.contextmanager
    def watching(
        self, end_forward: Callable[[Windows], None], captured: Callable[[], None]
    ) -> Generator[None]:
        """Capture forwards of the script that runs in this context.

        Args:
            end_forward: called with the windows after each repetition, which it ends.
            captured: called once all chosen forwards are captured; ends the script.
        """
        self._end_forward, self._captured = end_forward, captured
        self._modules.on_model_call.append(self._before_forward)
        try:
            yield
        finally:
            self._modules.on_model_call.remove(self._before_forward)

    def discard(self) -> None:
        """Forget the captured forwards, because the script trains."""
        self.measured.clear()
        self.stopped = True

    def end(self, script: Path) -> bool:
        """Return whether the script showed all that is needed, at its end.

        Raises:
            ScriptError: a chosen step did not occur.
        """
        if self.stopped or not self._pending:
            return self.complete
        if self.chosen:
            missing = ",".join(map(str, self._pending))
            have = f"{self.forwards} forwards" if self.forwards != 1 else "1 forward"
            raise ScriptError(
                f"{script}: --steps {missing} did not occur: the script called its model in "
                f"{have}\n  a decode computes one new token per sequence with a KV cache; choose "
                "prefill, decode or the number of a forward, from 1",
                code="steps-not-reached",
            )
        self._pending.clear()
        return self.complete

    def _before_forward(self, model: nn.Module, arguments: Arguments) -> None:
        if self.stopped or self._repeating:
            return
        self.forwards += 1
        if not self.chosen and torch.is_grad_enabled():
            return
        tokens = self._with_context(forward_tokens(model, arguments))
        matching = [choice for choice in self._pending if choice in (tokens.kind, self.forwards)]
        if tokens.kind == "forward" and not self.chosen and not self.measured:
            # A model without tokens has neither a prefill nor a decode: this forward is the step.
            matching = [self.forwards]
            self._pending = [*matching]
        if not matching:
            return
        if not self.chosen and optimizer_exists(self._earlier_optimizers):
            self.stopped = True
            return
        self._pending = [choice for choice in self._pending if choice not in matching]
        self._capture(model, arguments, str(matching[0]), tokens)
        if not self._pending:
            self.stopped = True
            self._captured()

    def _with_context(self, tokens: ForwardTokens) -> ForwardTokens:
        """Return the tokens with a context: the new tokens so far, if no argument shows it."""
        context = tokens.context
        if context is None:
            cached = self._cached if tokens.new_tokens == 1 else 0
            context = (cached,) * tokens.batch
        self._cached = max(context, default=0) + tokens.new_tokens
        return ForwardTokens(tokens.batch, tokens.new_tokens, context)

    def _capture(
        self, model: nn.Module, arguments: Arguments, label: str, tokens: ForwardTokens
    ) -> None:
        """Repeat a forward until its windows are complete; restore the state before it."""
        args, kwargs = arguments
        state = RepeatableCall(model, arguments)
        raw = self._raw / label
        raw.mkdir()
        # By the parameters: a forward that replays a CUDA graph may allocate nothing.
        on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        windows = self._make_windows(raw, forward=state, on_gpu=on_gpu)
        call: Callable[..., Any] = self._modules.call_of(model)
        self._repeating = True
        try:
            with kept_random_state(model):
                while not windows.complete:
                    call(*args, **kwargs)
                    if not windows.steps:
                        state.after_first_call()
                    self._end_forward(windows)
                state.restore()
        finally:
            self._repeating = False
            windows.close()
        step = InferenceStep(
            kind=tokens.kind,
            number=self.forwards,
            batch=tokens.batch,
            new_tokens=tokens.new_tokens,
            context_lengths=tokens.context or (),
        )
        if not self.chosen:
            windows.observed.notes.append(
                Note(
                    f"the script trains nothing: the step is forward {self.forwards} of "
                    f"{type(model).__name__}, repeated in place; --steps chooses others",
                    code="inference-recognised",
                )
            )
        self.measured.append(MeasuredForward(label, raw, windows, step))
