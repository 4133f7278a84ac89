"""Mark every module's forward in the profiler's stream, under its qualified name."""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

SCOPE = "onerank::module::"


class ModuleScopes:
    """Opens a scope around each forward while `active`; names come from the outermost module."""

    def __init__(self) -> None:
        self.active = False
        self._names: dict[nn.Module, str] = {}
        self._open: list[Any] = []

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Hook every module's forward while the context lasts."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not self.active or torch.compiler.is_compiling():
            return
        if module not in self._names:
            root = type(module).__name__
            self._names.update((child, name or root) for name, child in module.named_modules())
        scope = record_function(SCOPE + self._names[module])
        scope.__enter__()
        self._open.append(scope)

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._open and not torch.compiler.is_compiling():
            self._open.pop().__exit__(None, None, None)
