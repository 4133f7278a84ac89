"""Slice every model of a script before it is moved or used."""

import contextlib
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

from onerank.capture.parallelize.ema_copies import copies_of
from onerank.capture.parallelize.hugging_face import MODELING, PreTrainedModel
from onerank.capture.parallelize.tensor.slicer import Sliced
from onerank.capture.patches import after_import, live, patched
from onerank.ir.errors import SliceError

_SLICED = "_onerank_sliced"


class ModelSlicing:
    """Slices a model when it is first moved, cast or called, whichever comes first.

    At that moment the model is complete, and a model too large for the GPU is sliced before it
    moves there. Parameters keep their identity, so an optimizer created earlier sees the slices.
    Live copies of the model (EMA) are sliced with it, because the script may never call them.

    Args:
        slice_one: slices a model in place.
        kinds: names of the classes to slice; None selects every Hugging Face model.

    Attributes:
        sliced: class name and slice summary of each sliced model.
        slices_of: sliced model -> slice summary, for live models.
        passed_over: the first called model that is not of a class to slice.
    """

    def __init__(
        self, slice_one: Callable[[nn.Module], Sliced], kinds: tuple[str, ...] | None = None
    ) -> None:
        self.sliced: list[tuple[str, Sliced]] = []
        self.slices_of: weakref.WeakKeyDictionary[nn.Module, Sliced] = weakref.WeakKeyDictionary()
        self.passed_over: nn.Module | None = None
        self.slice_one = slice_one
        self._kinds = kinds
        self._done: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # sliced models
        self._loading = 0
        self._failure: SliceError | None = None

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch module calls and moves for the duration of the context."""
        apply, call = nn.Module._apply, nn.Module.__call__  # pyright: ignore[reportPrivateUsage]

        def apply_sliced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._visit_all(module)
            return apply(module, *args, **kwargs)

        # A patch, not a global forward pre-hook: slicing registers hooks on the model, and torch
        # would not run hooks in this call that are registered while its pre-hooks run.
        def call_sliced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._before_forward(module)
            return call(module, *args, **kwargs)

        try:
            with (
                patched("torch.nn.Module", {"_apply": apply_sliced, "__call__": call_sliced}),
                after_import(MODELING, self._loads_whole),
            ):
                yield
        finally:
            # The script may have caught the error that was raised earlier.
            if self._failure is not None:
                raise self._failure

    @contextlib.contextmanager
    def _loads_whole(self) -> Generator[None]:
        """Slice no model while transformers loads its weights."""
        from transformers.modeling_utils import PreTrainedModel

        load = PreTrainedModel.from_pretrained.__func__  # pyright: ignore

        def load_whole(kind: Any, *args: Any, **kwargs: Any) -> Any:
            self._loading += 1
            try:
                return load(kind, *args, **kwargs)
            finally:
                self._loading -= 1

        replacement = {"from_pretrained": classmethod(load_whole)}
        with patched(f"{MODELING}.PreTrainedModel", replacement):
            yield

    def _slice(self, model: nn.Module) -> None:
        parts = [part for part in model.modules() if self.slices(part)]
        try:
            self.slices_of[model] = self.slice_one(model)
        except SliceError as error:
            self._failure = error
            raise
        self.sliced.append((type(model).__name__, self.slices_of[model]))
        for part in parts:
            setattr(part, _SLICED, True)  # an attribute, so that a deep copy has it too

    def _before_forward(self, module: nn.Module) -> None:
        if self._loading or module in self._done:
            return
        if not self._visit_all(module):
            if any(inner in self._inside for inner in module.modules()):
                self._check_unchanged(module)
            self.passed_over = self.passed_over or module
        self._done.update(module.modules())

    def _visit_all(self, module: nn.Module) -> bool:
        """Slice the models inside a module or wrapper; return whether it contains any."""
        inside: list[nn.Module] = [module]
        has_models = False
        for child in inside:  # grows: a model may sit in a wrapper, torch.compile's for one
            if self.slices(child):
                self._visit(child)
                has_models = True
            else:
                inside += child.children()
        return has_models

    def _whole(self, part: nn.Module) -> nn.Module:
        """Return the largest sliceable model that contains `part`.

        A script may call a model's trunk, and then its head on parts of the trunk's output.
        """
        holders = [
            module
            for module in live(nn.Module)
            if self.slices(module) and any(inner is part for inner in module.modules())
        ]
        return max(holders, key=lambda module: sum(1 for _ in module.modules()))

    def slices(self, module: nn.Module) -> bool:
        """Return whether a module is of a class to slice."""
        if self._kinds is None:
            return isinstance(module, PreTrainedModel)
        return any(kind.__name__ in self._kinds for kind in type(module).__mro__)

    def _check_unchanged(self, part: nn.Module) -> None:
        """Refuse parameters that the script added to a model after it was sliced."""
        for name, module in part.named_modules():
            if module not in self._inside and any(True for _ in module.parameters(recurse=False)):
                self._failure = SliceError(
                    f"{name or type(module).__name__} ({type(module).__name__}) was added "
                    f"to {type(part).__name__} after the model was sliced (at its first .to(), "
                    "cast or call)\n  add adapters and replace layers before that",
                    code="slice-replaced-module",
                )
                raise self._failure

    def _visit(self, part: nn.Module) -> None:
        if self._loading:
            return
        if part in self._done:
            if part in self._inside:
                self._check_unchanged(part)
            return
        model = self._whole(part)
        parts = [part for part in model.modules() if self.slices(part)]
        if self._failure is not None:
            raise self._failure
        if not any(hasattr(part, _SLICED) for part in parts):
            copies = [copy for copy in copies_of(model) if not hasattr(copy, _SLICED)]
            for whole in (model, *copies):
                self._slice(whole)
        elif not hasattr(model, _SLICED):
            raise SliceError(
                f"{type(model).__name__} contains a model that was used and sliced earlier\n  call "
                f"the whole {type(model).__name__} first, or move it with .to()",
                code="slice-model-used",
            )
        self._done.update(model.modules())
        self._inside.update(model.modules())
