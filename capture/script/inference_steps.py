"""Capture a script that only infers: a step is one forward of the model.

The forwards of a generation differ: a prefill, then decodes whose context grows. A measurement
needs many equal steps. So a chosen forward is repeated in place, within the script's call of the
model, until its windows are complete. Everything that it changed is restored before each
repetition, and the script continues as if it had run once.
"""

import builtins
import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from onerank.capture.patches import live, patched, replaced
from onerank.capture.profiling.measurement_windows import Windows
from onerank.capture.profiling.module_scopes import Arguments, Modules
from onerank.capture.profiling.window_plan import StepChoice
from onerank.capture.script.forward_tokens import ForwardTokens, forward_tokens
from onerank.capture.script.optimizer_steps import (
    existing_optimizers,
    is_traced,
    optimizer_exists,
)
from onerank.capture.script.repeatable_call import Growth, RepeatableCall, kept_random_state
from onerank.ir import InferenceKind, InferenceStep
from onerank.ir.errors import OneRankError, ScriptError
from onerank.ir.notes import Note

DEFAULT_STEPS: tuple[StepChoice, ...] = ("prefill", "decode")
"""Steps that are captured if the user names none."""

SPECULATIVE_STEPS: tuple[StepChoice, ...] = ("prefill", "draft", "verify")
"""The default of a script that decodes speculatively: its main model verifies drafted tokens."""


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
        step_of: method whose calls count instead, as CLASS.METHOD; None for the models' forwards.

    Attributes:
        chosen: steps that the user chose.
        is_explicit: whether the user chose steps or the method: then the script may train.
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
        step_of: str | None = None,
    ) -> None:
        self.chosen = tuple(chosen)
        self.is_explicit = bool(chosen) or step_of is not None
        self.measured: list[MeasuredForward] = []
        self.forwards = 0
        self.stopped = not (recognise or self.is_explicit)
        self._method = None if step_of is None else StepMethod(step_of, self._before_method)
        self._modules = modules
        self._raw = raw
        self._make_windows = make_windows
        self._pending = [*(chosen or DEFAULT_STEPS)]
        self._earlier_optimizers = existing_optimizers()
        self._repeating = False
        self._cached = 0  # tokens of each sequence after the last forward
        self._single_tokens = 0  # forwards with one new token and no context
        self._owner_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._encoder = ""  # part of a generating model: the first that ran without tokens
        self._end_forward: Callable[[Windows], None] = lambda _: None
        self._captured: Callable[[], None] = lambda: None
        self._refuse: Callable[[OneRankError], None] = lambda _: None

    @property
    def complete(self) -> bool:
        """Whether all chosen forwards are captured."""
        return bool(self.measured) and not self._pending

    @contextlib.contextmanager
    def watching(
        self,
        end_forward: Callable[[Windows], None],
        captured: Callable[[], None],
        refuse: Callable[[OneRankError], None],
    ) -> Generator[None]:
        """Capture forwards of the script that runs in this context.

        Args:
            end_forward: called with the windows after each repetition, which it ends.
            captured: called once all chosen forwards are captured; ends the script.
            refuse: ends the script with an error.
        """
        self._end_forward, self._captured, self._refuse = end_forward, captured, refuse
        if self._method is not None:
            with self._method.watched():
                yield
            return
        self._modules.on_model_call.append(self._before_model)
        try:
            yield
        finally:
            self._modules.on_model_call.remove(self._before_model)

    def discard(self) -> None:
        """Forget the captured forwards, because the script trains."""
        self.measured.clear()
        self.stopped = True

    def end(self, script: Path) -> bool:
        """Return whether the script showed all that is needed, at its end.

        Raises:
            ScriptError: a chosen step did not occur.
        """
        if self._method is not None and not self.forwards:
            raise ScriptError(self._method.uncalled(script), code="step-of-not-called")
        if self.stopped or not self._pending:
            return self.complete
        if self.chosen:
            missing = ",".join(map(str, self._pending))
            have = f"{self.forwards} forwards" if self.forwards != 1 else "1 forward"
            raise ScriptError(
                f"{script}: --steps {missing} did not occur: the script called its model in "
                f"{have}\n  a decode computes one new token per sequence with a KV cache; choose "
                "prefill, decode, in speculative decoding draft or verify, or the number of a "
                "forward, from 1",
                code="steps-not-reached",
            )
        self._pending.clear()
        if self._encoder and not self.measured:
            raise ScriptError(
                f"{script}: none of {self.forwards} forwards has tokens: the script called "
                f"{self._encoder}\n  name the forward to capture it: --steps 1",
                code="inference-encoder-only",
            )
        if self.measured and self._single_tokens:
            self.measured[-1].windows.observed.notes.append(
                Note(
                    f"{self._single_tokens} of {self.forwards} forwards compute one new token and "
                    "show no KV cache, so none is captured as a decode; --steps N selects one by "
                    "its number",
                    code="inference-no-decode",
                )
            )
        return self.complete

    def _before_model(self, model: nn.Module, arguments: Arguments) -> None:
        step = _Step(type(model).__name__, model, self._modules.call_of(model), arguments)
        self._before_step(step)

    def _before_method(self, owner: Any, method: Callable[..., Any], arguments: Arguments) -> None:
        def called(*args: Any, **kwargs: Any) -> Any:
            with self._modules.scope(owner):
                return method(*args, **kwargs)

        name = f"{type(owner).__name__}.{method.__name__}"
        self._before_step(_Step(name, method, called, arguments))

    def _before_step(self, step: "_Step") -> None:
        if self.stopped or self._repeating:
            return
        self.forwards += 1
        if not self.is_explicit and (torch.is_grad_enabled() or _is_in_constructor()):
            return
        owner = self._generating_owner(step.target)
        tokens = forward_tokens(step.target, step.arguments, by_name_only=bool(owner))
        tokens = self._with_context(tokens)
        kind = _kind_of(tokens)
        if kind in SPECULATIVE_STEPS[1:] and not self.chosen and not self.measured:
            self._pending = [*SPECULATIVE_STEPS]
        self._single_tokens += tokens.kind == "prefill" and tokens.new_tokens == 1
        # The assistant's first forward computes the prompt, so "draft" is a later one.
        drafts = kind != "draft" or tokens.kind == "decode"
        matching = [
            choice
            for choice in self._pending
            if choice == self.forwards or (choice == kind and drafts)
        ]
        if tokens.kind == "forward" and owner:
            self._encoder = self._encoder or f"{step.name}, a part of {owner}"
        elif tokens.kind == "forward" and not self.chosen and not self.measured:
            # A model without tokens has neither a prefill nor a decode: this forward is the step.
            matching = [self.forwards]
            self._pending = [*matching]
        if not matching:
            return
        if not self.is_explicit and optimizer_exists(self._earlier_optimizers):
            self.stopped = True
            return
        self._pending = [choice for choice in self._pending if choice not in matching]
        self._capture(step, str(matching[0]), tokens, kind)
        if not self._pending:
            self.stopped = True
            self._captured()

    def _generating_owner(self, target: Any) -> str:
        """Return the class of the generating model that has `target` as a part; "" if none has.

        transformers encodes images before the prefill, in a call of the vision encoder alone.
        """
        if not isinstance(target, nn.Module):
            return ""
        if target not in self._owner_names:
            holders = (
                type(model).__name__
                for model in live(nn.Module)
                if model is not target
                and callable(can_generate := getattr(model, "can_generate", None))
                and can_generate()
                and any(part is target for part in model.modules())
            )
            self._owner_names[target] = next(holders, "")
        return self._owner_names[target]

    def _with_context(self, tokens: ForwardTokens) -> ForwardTokens:
        """Return the tokens with a context: the new tokens so far, if no argument shows it."""
        context = tokens.context
        if context is None:
            cached = self._cached if tokens.new_tokens == 1 else 0
            context = (cached,) * tokens.batch
        self._cached = max(context, default=0) + tokens.new_tokens
        return replace(tokens, context=context)

    def _capture(
        self, step: "_Step", label: str, tokens: ForwardTokens, kind: InferenceKind
    ) -> None:
        """Repeat a step until its windows are complete; restore the state before it."""
        args, kwargs = step.arguments
        state = RepeatableCall(step.target, step.arguments)
        raw = self._raw / label
        raw.mkdir()
        # By a parameter: a forward that replays a CUDA graph may allocate nothing.
        on_gpu = state.parameter is not None and state.parameter.is_cuda
        windows = self._make_windows(raw, forward=state, on_gpu=on_gpu)
        growth = Growth(on_gpu=on_gpu)
        self._repeating = True
        try:
            with kept_random_state(state.parameter):
                state.run_first(lambda: step.call(*args, **kwargs))
                while True:
                    if bytes_kept := growth.after_repetition():
                        self._refuse(_growing_error(step.name, bytes_kept))
                    self._end_forward(windows)
                    if windows.complete:
                        break
                    step.call(*args, **kwargs)
                state.restore()
        finally:
            self._repeating = False
            windows.close()
        inference = InferenceStep(
            kind=kind,
            number=self.forwards,
            batch=tokens.batch,
            new_tokens=tokens.new_tokens,
            context_lengths=tokens.context or (),
            query_lengths=tokens.query_lengths,
        )
        if not self.is_explicit:
            windows.observed.notes.append(
                Note(
                    f"the script trains nothing: the step is forward {self.forwards} of "
                    f"{step.name}, repeated in place; --steps chooses others",
                    code="inference-recognised",
                )
            )
        # In speculative decoding the kind says which model runs, so no note has to.
        by_word = self._method is None and label in DEFAULT_STEPS and _speculative_role() is None
        if by_word and (note := _note_of_larger_model(step.target)) is not None:
            windows.observed.notes.append(note)
        self.measured.append(MeasuredForward(label, raw, windows, inference))


def _is_in_constructor() -> bool:
    """Return whether a module is being created: detectors find their strides by a forward."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            created = frame.f_locals.get("self")
            if isinstance(created, nn.Module):
                return True
        frame = frame.f_back
    return False


def _kind_of(tokens: ForwardTokens) -> InferenceKind:
    """Return the kind of the forward that the caller is about to run."""
    role = _speculative_role()
    if role == "draft":
        return role
    # The main model's first forward computes the prompt; without candidates it decodes.
    if role == "verify" and tokens.kind == "prefill" and any(tokens.context or ()):
        return role
    return tokens.kind


# Functions of `transformers.generation` in whose call a model drafts, or verifies drafted tokens.
_SPECULATIVE: dict[str, Literal["draft", "verify"]] = {
    "get_candidates": "draft",
    "_assisted_decoding": "verify",
}


def _speculative_role() -> Literal["draft", "verify"] | None:
    """Return the role of the model that is called, in speculative decoding of transformers.

    The stack shows it: models and arguments are the same in any other generation.
    """
    frame = sys._getframe(1)
    while frame is not None:
        role = _SPECULATIVE.get(frame.f_code.co_name)
        if role and frame.f_globals.get("__name__", "").startswith("transformers.generation"):
            return role
        frame = frame.f_back
    return None


@dataclass(frozen=True)
class _Step:
    """A call that is a step.

    Attributes:
        name: name of the model or method.
        target: the model, or the method bound to its object.
        call: what is called to repeat the step.
        arguments: arguments of the call.
    """

    name: str
    target: Callable[..., Any]
    call: Callable[..., Any]
    arguments: Arguments


class StepMethod:
    """Watches the calls of a method of a class, which may be defined at any time.

    Args:
        path: the method, as CLASS.METHOD; the class may have the names of its modules before it.
        before: called before each call with the object, the bound method and its arguments.
    """

    def __init__(self, path: str, before: Callable[[Any, Any, Arguments], None]) -> None:
        self._path = path
        self._class_path, _, self._name = path.rpartition(".")
        self._before = before
        self._classes: list[type] = []
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """Watch the method while the context lasts."""
        build_class: Callable[..., Any] = builtins.__build_class__

        def build_watched(*args: Any, **kwargs: Any) -> Any:
            kind = build_class(*args, **kwargs)
            self._watch(kind)
            return kind

        with self._undo, patched("builtins", {"__build_class__": build_watched}):
            for kind in _classes():
                self._watch(kind)
            yield

    def uncalled(self, script: Path) -> str:
        """Return the message of an error: the script never called the method."""
        if any(callable(getattr(kind, self._name, None)) for kind in self._classes):
            called = f"{script} ended without a call of --step-of {self._path}"
            return f"{called}\n  name a method that it calls"
        what = f"class {self._class_path}"
        if self._classes:
            what = f"method {self._name} in class {self._class_path}"
        return (
            f"{script}: --step-of {self._path}: the script defined and imported no {what}\n"
            "  expected CLASS.METHOD, such as ModelRunner.execute"
        )

    def _watch(self, kind: Any) -> None:
        if not isinstance(kind, type):  # a metaclass may return anything
            return
        full = f"{kind.__module__}.{kind.__qualname__}"
        if not f".{full}".endswith(f".{self._class_path}"):
            return
        self._classes.append(kind)
        method = getattr(kind, self._name, None)
        if not callable(method):
            return

        @functools.wraps(method)
        def watched(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_traced() and not torch.compiler.is_compiling():
                self._before(owner, MethodType(method, owner), (args, kwargs))
            return method(owner, *args, **kwargs)

        self._undo.enter_context(replaced(kind, self._name, watched))


# Py_TPFLAGS_IMMUTABLETYPE: classes of C code, whose attributes cannot be set.
_IMMUTABLE = 1 << 8


def _classes() -> list[type]:
    """Return all classes whose attributes can be set."""
    # Not by `live`: in a forked process, `isolation` freezes the classes of imported libraries, and
    # the garbage collector does not list frozen objects.
    classes: dict[type, None] = {object: None}
    pending: list[type] = [object]
    while pending:
        derived = [kind for kind in type.__subclasses__(pending.pop()) if kind not in classes]
        classes |= dict.fromkeys(derived)
        pending += derived
    return [kind for kind in classes if not kind.__flags__ & _IMMUTABLE]


def _note_of_larger_model(model: Any) -> Note | None:
    """Return a note if the script has a larger model, which the captured one may only assist.

    In speculative decoding the first prefill is that of the assistant model.
    """
    sizes = {
        other: _size(other)
        for other in live(nn.Module)
        # A holder of the model, such as torch.compile's wrapper, is no other model.
        if all(part is not model for part in other.modules())
    }
    size = _size(model)
    larger = max(sizes, key=sizes.__getitem__, default=None)
    if larger is None or sizes[larger] <= size:
        return None
    return Note(
        f"the step is a forward of {type(model).__name__} with {size:,} parameters, and the script "
        f"has a larger model: {type(larger).__name__} with {sizes[larger]:,}. If the smaller one "
        "is an assistant model, --steps N selects a forward of the larger one by its number",
        code="inference-larger-model",
    )


def _size(model: nn.Module) -> int:
    # A lazy parameter, which no forward has initialised yet, raises an error for its size.
    return sum(p.numel() for p in model.parameters() if not is_lazy(p))


def _growing_error(name: str, bytes_kept: int) -> ScriptError:
    return ScriptError(
        f"each repetition of {name} keeps {bytes_kept} bytes more: state "
        "that cannot be restored grows, so no two steps are equal\n  keep the KV cache in an "
        "argument, an attribute of the model or a global variable, not in a generator or a library",
        code="step-state-grows",
    )
