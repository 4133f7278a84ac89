"""Slice every Hugging Face model of a script before it is moved or used."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from onerank.capture.slicer import Sliced


class ModelSlicing:
    """Slices a model when it is first moved, cast or called, whichever comes first.

    By then it is complete, and a model too large for the GPU is sliced before it gets there.
    Parameters keep their identity, so an optimizer made before sees the slices.
    """

    def __init__(self, slice_one: Callable[[PreTrainedModel], Sliced]) -> None:
        self.sliced: list[tuple[str, Sliced]] = []
        self._slice_one = slice_one
        self._done: set[nn.Module] = set()
        self._loading = 0

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Watch for models while the context lasts."""
        apply, load = PreTrainedModel._apply, PreTrainedModel.from_pretrained.__func__  # pyright: ignore

        def apply_sliced(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            self._visit(model)
            return apply(model, *args, **kwargs)

        def load_whole(kind: Any, *args: Any, **kwargs: Any) -> Any:
            self._loading += 1
            try:
                return load(kind, *args, **kwargs)
            finally:
                self._loading -= 1

        PreTrainedModel._apply = apply_sliced  # pyright: ignore
        PreTrainedModel.from_pretrained = classmethod(load_whole)  # pyright: ignore
        hook = register_module_forward_pre_hook(self._before_forward)
        try:
            yield
        finally:
            PreTrainedModel._apply = apply  # pyright: ignore
            PreTrainedModel.from_pretrained = classmethod(load)  # pyright: ignore
            hook.remove()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        self._visit(module)

    def _visit(self, module: nn.Module) -> None:
        if self._loading or module in self._done or not isinstance(module, PreTrainedModel):
            return
        self._done.update(module.modules())
        self.sliced.append((type(module).__name__, self._slice_one(module)))
