"""Modules that stand in for C++ extensions, in a capture without a device.

An extension binds its kernels to Python functions, which read the addresses of tensors. The package
around it is Python: it prepares operands, and holds the autograd functions. So the package runs as
it is, and its extension is a module whose functions allocate their results on fake tensors and
record a launch. The module is importable if the package is, whether or not the extension is built.

A function that has no counterpart here is an error when it is called. Users register counterparts
by `onerank.register_extension_function`.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn, Protocol

from torch import Tensor

from onerank.capture.no_device.operators.operator_calls import tensors_in
from onerank.capture.no_device.operators.router_choices import FusedChoice
from onerank.capture.no_device.operators.triton_kernels import KernelLaunch
from onerank.capture.no_device.tensor_values import UnknownValues
from onerank.ir.errors import CaptureError


class Launch(Protocol):
    """Records a kernel of an extension by its operands."""

    def __call__(
        self,
        name: str,
        reads: Sequence[Any],
        writes: Sequence[Tensor],
        choice: FusedChoice | None = None,
    ) -> None:
        """Record a launch.

        Args:
            name: the kernel's, without namespace.
            reads: what it reads, in the order that its formula expects; no tensors are values.
            writes: the tensors that it writes.
            choice: the experts that it chooses, of a fused router.
        """
        ...


Function = Callable[..., Any]
"""A counterpart of an extension's function; its first argument is a `Launch`."""


@dataclass(frozen=True)
class Extension:
    """An extension that a module stands in for.

    Attributes:
        module: name by which packages import it.
        package: the package that it belongs to; the module is importable if the package is.
        namespace: of its operators in a trace.
        functions: name -> counterpart.
        values: name -> anything else in the module, such as an enumeration.
    """

    module: str
    package: str
    namespace: str
    functions: Mapping[str, Function] = field(default_factory=dict[str, Function])
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class _Registered:
    """A function that a user registered."""

    results: Callable[..., Any]
    writes: tuple[int, ...]


_registered: dict[str, dict[str, _Registered]] = {}  # module -> function -> how it is recorded


def register_extension_function(
    function: str, results: Callable[..., Any], *, writes: Sequence[int] = ()
) -> None:
    """Register a function, for this process; as `onerank.register_extension_function`."""
    module, _, name = function.partition("::")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise CaptureError(
            f"{function!r} is no function of an extension; expected the name by which Python "
            'imports the extension, two colons and the function\n  register it as "my_ext::gemm"',
            code="extension-function-name",
        )
    _registered.setdefault(module, {})[name] = _Registered(results, tuple(writes))


@dataclass(frozen=True)
class EmulatedExtensions:
    """Provides modules in the place of extensions.

    Attributes:
        record: records a launch.
        unknown: knows the line of the script that runs.
        extensions: module -> extension.
    """

    record: Callable[[KernelLaunch], None]
    unknown: UnknownValues
    extensions: Mapping[str, Extension]

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Let imports find the modules inside the context."""
        finder = _Finder(self)
        # A module that was imported before is put back: other code may hold the real one.
        kept = {name: sys.modules.pop(name) for name in self.extensions if name in sys.modules}
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for name, module in list(sys.modules.items()):
                if isinstance(module, _EmulatedModule):
                    del sys.modules[name]
            sys.modules.update(kept)

    def module(self, name: str) -> ModuleType:
        """Return a module in the place of an extension, also of one that nothing here knows."""
        return _EmulatedModule(self.extensions.get(name) or Extension(name, name, name), self)

    def provides(self, name: str) -> bool:
        """Return whether a module of this name stands in for an extension."""
        extension = self.extensions.get(name)
        if extension is None:
            return name in _registered
        if extension.package in sys.modules or PathFinder.find_spec(name) is not None:
            return True
        # If the whole package is emulated, `find_spec` would call this function again.
        return extension.package != name and importlib.util.find_spec(extension.package) is not None

    def bound(self, extension: Extension, function: Function) -> Callable[..., Any]:
        """Return a counterpart with the `Launch` of its extension."""
        launch = launch_in(extension.namespace, self.record)

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(launch, *args, **kwargs)

        return call

    def refuse(self, function: str) -> NoReturn:
        """Refuse the call of a function that has no counterpart.

        Raises:
            CaptureError: always; it names the function and the script's line.
        """
        self.unknown.refuse_extension(function)


def launch_in(namespace: str, record: Callable[[KernelLaunch], None]) -> Launch:
    """Return a `Launch` that names kernels in a namespace of operators."""

    def launch(
        name: str,
        reads: Sequence[Any],
        writes: Sequence[Tensor],
        choice: FusedChoice | None = None,
    ) -> None:
        tensors = [*tensors_in(reads), *writes]
        record(KernelLaunch(f"{namespace}::{name}", reads, writes, tensors, choice))

    return launch


def _as_registered(name: str, registered: _Registered) -> Function:
    def function(launch: Launch, *args: Any, **kwargs: Any) -> Any:
        results = registered.results(*args, **kwargs)
        operands = [*args, *kwargs.values()]
        # A call may leave out a written argument, such as an optional result.
        written = [each for at, each in enumerate(operands) if at in registered.writes]
        reads = [None if at in registered.writes else each for at, each in enumerate(operands)]
        launch(name, reads, [*tensors_in((results,)), *tensors_in(written)])
        return results

    return function


class _EmulatedModule(ModuleType):
    """A module in the place of an extension."""

    def __init__(self, extension: Extension, extensions: EmulatedExtensions) -> None:
        super().__init__(extension.module)
        self._extension, self._extensions = extension, extensions
        for name, function in extension.functions.items():
            setattr(self, name, extensions.bound(extension, function))
        for name, value in extension.values.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _counterpart(self._extension, name, self._extensions)


def _counterpart(extension: Extension, name: str, extensions: EmulatedExtensions) -> Any:
    """Return the registered counterpart of a function or method, else what refuses its call."""
    registered = _registered.get(extension.module, {}).get(name)
    if registered is not None:
        return extensions.bound(extension, _as_registered(name, registered))
    return _absent(extension, name, extensions)


def _absent(extension: Extension, function: str, extensions: EmulatedExtensions) -> Any:
    """Return what stands for a name without a counterpart: an error when it is called.

    It is a class, since packages use classes of extensions in annotations and base classes. A name
    with capitals and no underscore, such as `sLSTMFunc`, is taken for that of a class: scripts may
    create instances of it, and the error is a call of an instance or of its methods.
    """

    def attribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _counterpart(extension, f"{function}.{name}", extensions)

    class Instance:
        def __call__(self, *_: Any, **__: Any) -> Any:
            extensions.refuse(f"{extension.module}::{function}")

        def __getattr__(self, name: str) -> Any:
            return attribute(name)

    class Absent(type):
        def __call__(cls, *_: Any, **__: Any) -> Any:
            # ColossalAI's optimizer always creates a C++ object for parameters on the CPU, which
            # a job on GPUs does not use.
            name = function.rpartition(".")[2]
            if name == name.lower() or "_" in name:
                extensions.refuse(f"{extension.module}::{function}")
            return Instance()

        def __getattr__(cls, name: str) -> Any:
            return attribute(name)

    return Absent(function.rpartition(".")[2], (), {})


@dataclass(frozen=True)
class _Finder(Loader):
    """Finds and loads the modules; one for a capture."""

    extensions: EmulatedExtensions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        if not self.extensions.provides(name):
            return None
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.extensions.module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is complete."""
