"""The language model of a script, taken from the script at its first call of the model.

The script runs unchanged until it calls a model of transformers that generates text, directly or
through `generate`. Then the script ends, and the model computes the steps of an engine. Its device,
its dtype and replaced layers are those that the script chose.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from onerank.capture.fake_world.c10d_patches import hidden_group
from onerank.capture.options import Options
from onerank.capture.parallelize.hugging_face import PreTrainedModel
from onerank.capture.parallelize.model_structure import is_encoder_decoder
from onerank.capture.parallelize.shard_model import ModelSlicing
from onerank.capture.profiling.measurement_windows import Windows
from onerank.capture.profiling.module_scopes import Arguments, Modules
from onerank.capture.script.inference_steps import MeasuredForward
from onerank.capture.script.runner import Script, run_script
from onerank.capture.start_ranks import block_launchers
from onerank.capture.validate_options import names_torch_distributed
from onerank.ir.errors import CaptureError, OneRankError, ScriptError


def model_of_script(
    script: Script, options: Options, windows: Windows, models: ModelSlicing | None
) -> Any:
    """Run a script until it calls its language model, and return the model.

    Args:
        script: a script that builds a model and calls it.
        options: the job.
        windows: windows that see no step, since the script ends before.
        models: slices the script's models; None leaves them whole.

    Raises:
        ScriptError: the script raised, or ended without a call of a language model.
        CaptureError: the script distributes itself, or its model cannot compute an engine's steps.
        SliceError: the model does not support the sizes.
    """
    if names_torch_distributed(script.path, options):
        raise CaptureError(
            f"{script.path} uses torch.distributed: `capture serve` slices the model itself\n"
            "  build the whole model in the script, and name the sizes: --tp 8. Scripts that "
            "distribute themselves: capture run",
            code="serve-script-distributed",
        )
    first_call = FirstCall()
    with contextlib.ExitStack() as stack:
        stack.enter_context(block_launchers())
        stack.enter_context(hidden_group())
        stack.enter_context(first_call.modules.installed())
        if models is not None:
            stack.enter_context(models.installed())
        try:
            run_script(script, windows, lambda _: None, inference=first_call)
        except ScriptError as error:
            if error.code not in ("script-no-step", "script-too-few-steps"):
                raise
            raise _without_model(script.path, first_call.others) from error
    model = first_call.model
    assert model is not None, "run_script raises if no model was called"
    return model


@dataclass
class FirstCall:
    """Ends a script at its first call of a language model; takes the place of `InferenceSteps`.

    Attributes:
        modules: reports the calls of the script's models.
        model: the model; None before the call.
        others: classes of models that were called before it.
    """

    modules: Modules = field(default_factory=Modules)
    model: Any = None
    others: list[str] = field(default_factory=list[str])

    # The script may train before: its optimizer steps do not count.
    is_explicit = True
    measured: Sequence[MeasuredForward] = ()

    def __post_init__(self) -> None:
        self._called: Callable[[], None] = lambda: None
        self._refuse: Callable[[OneRankError], None] = lambda _: None

    @property
    def complete(self) -> bool:
        """Whether the model was called."""
        return self.model is not None

    def discard(self) -> None:
        """Do nothing: steps of an optimizer do not matter."""

    @contextlib.contextmanager
    def watching(
        self,
        end_forward: Callable[[Windows], None],
        captured: Callable[[], None],
        refuse: Callable[[OneRankError], None],
    ) -> Generator[None]:
        """Watch the script that runs in this context.

        Args:
            end_forward: not called.
            captured: called at the first call of the language model; ends the script.
            refuse: ends the script with an error.
        """
        self._called, self._refuse = captured, refuse
        self.modules.on_model_call.append(self._before_model)
        try:
            yield
        finally:
            self.modules.on_model_call.remove(self._before_model)

    def end(self, script: Path) -> bool:
        """Return whether the model was called, at the script's end."""
        return self.complete

    def _before_model(self, outer: nn.Module, _: Arguments) -> None:
        # A script may catch its end, and call the model again.
        if self.model is None:
            inner = next((part for part in outer.modules() if _generates(part)), None)
            if inner is None:
                self.others.append(type(outer).__name__)
                return
            try:
                _check(outer, inner, compiled=self.modules.call_of(outer) is not outer)
            except CaptureError as error:
                self._refuse(error)
            self.model = inner
        self._called()


def _without_model(script: Path, others: Sequence[str]) -> ScriptError:
    return ScriptError(
        f"{script} ended without a call of a language model of transformers (models that it "
        f"called: {', '.join(others) or 'none'})\n  call the model, or its generate, in the "
        "script; `capture run` captures other models",
        code="serve-no-model",
    )


def _generates(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers that generates text."""
    return isinstance(module, PreTrainedModel) and module.can_generate()


def _check(outer: nn.Module, model: Any, *, compiled: bool) -> None:
    """Refuse a model that a script calls in a way that the steps of an engine would not follow.

    Args:
        outer: the module that the script calls.
        model: the language model in it.
        compiled: whether the call is that of torch.compile.
    """
    name = type(model).__name__
    if is_encoder_decoder(model):
        raise CaptureError(
            f"{name} is an encoder-decoder model, and `capture serve` composes the steps of "
            "decoders\n  capture single steps: capture run",
            code="encoder-decoder-unsupported",
        )
    if compiled or any("forward" in vars(part) or _is_compiled(part) for part in (outer, model)):
        raise CaptureError(
            f"the script compiles {name} or replaces its forward, and the steps of `capture serve` "
            "call the model itself\n  leave that out of the script: on a GPU, each step is also "
            "measured as a CUDA graph",
            code="serve-compiled",
        )
    inside = {id(parameter) for parameter in model.parameters()}
    added = [key for key, value in outer.named_parameters() if id(value) not in inside]
    if added:
        raise CaptureError(
            f"the script calls a {type(outer).__name__} with parameters outside of {name} "
            f"({added[0]}{', ...' if added[1:] else ''}), which an engine's steps would not use\n"
            f"  call a {name} without them",
            code="serve-wrapped-model",
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise CaptureError(
            f"the weights of {name} are on {', '.join(devices)}: a rank has one device\n"
            "  put the whole model on it; `--tp` and `--pp` make it smaller",
            code="serve-model-devices",
        )


def _is_compiled(module: nn.Module) -> bool:
    # The class of torch.compile's result, or a module after `compile()`.
    return hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None
