"""Modules compiled in place (`module.compile()`), watched from outside of the compiled code.

Their hooks are compiled with them, and those registered later are not seen. What `torch.compile`
returns for a module is another module, whose hooks run as usual.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from onerank.capture.replaced import replaced

Arguments = tuple[Any, dict[str, Any]]
Before = Callable[[nn.Module, Any, dict[str, Any]], Arguments | None]
"""Called with a module and its arguments; may return others."""
After = Callable[[nn.Module, Any, dict[str, Any], Any], None]
"""Called with a module, its arguments and its output, None where it raised."""


class CompiledCall:
    """Calls a compiled module between hooks that are not compiled."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module = module
        self._call = call
        self._hooks: OrderedDict[int, tuple[Before, After]] = OrderedDict()

    def register(self, before: Before, after: After) -> RemovableHandle:
        """Add hooks, inside of those added before."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = before, after
        return handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = [*self._hooks.values()]
        for before, _ in hooks:
            args, kwargs = before(self._module, args, kwargs) or (args, kwargs)
        output = None
        try:
            output = self._call(*args, **kwargs)
            return output
        finally:
            for _, after in reversed(hooks):
                after(self._module, args, kwargs, output)


def compiled_call(module: Any) -> CompiledCall | None:
    """Return what calls a module that was compiled in place while `compiled_between` lasted."""
    call = module._compiled_call_impl
    return call if isinstance(call, CompiledCall) else None


@contextlib.contextmanager
def compiled_between(before: Before, after: After) -> Generator[None]:
    """Let the calls of modules that are compiled while the context lasts be between these."""
    compile_in_place: Callable[..., None] = nn.Module.compile

    def compile_watched(module: Any, *args: Any, **kwargs: Any) -> None:
        compile_in_place(module, *args, **kwargs)
        module._compiled_call_impl = CompiledCall(module, module._compiled_call_impl)
        module._compiled_call_impl.register(before, after)

    with replaced(nn.Module, "compile", compile_watched):
        yield
