"""Install patches of torch and other libraries: one way, for the symbols in the registry.

`patched` replaces a symbol where it is defined, for the duration of a context; `rebound` also where
modules have imported it. They refuse a symbol or a module that `patch_registry` does not list,
and modules that patch one symbol in another order than it says. `replaced` changes an object that
the script defines, `overridden_kernels` kernels of operators, and `after_import` patches a module
once the script imports it.

`live` returns objects that exist already when a patch is installed, and `untraced` keeps Dynamo out
of a replacement.
"""

import contextlib
import gc
import importlib
import itertools
import operator
import sys
import sysconfig
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch

from onerank.capture.patch_registry import PATCHES

_torch: Any = torch  # tables of TorchScript and Dynamo are private


def patched(
    owner: str, replacements: Mapping[str, Any], *, by: str | None = None
) -> AbstractContextManager[None]:
    """Return a context in which attributes of a library's module or class are replaced.

    Args:
        owner: dotted path, as in `PATCHES`.
        replacements: attribute -> what replaces it.
        by: name of the installing module; None is the caller's.
    """
    caller = str(sys._getframe(1).f_globals["__name__"])
    return _patched(owner, replacements, by or caller)


@contextlib.contextmanager
def _patched(owner: str, replacements: Mapping[str, Any], module: str) -> Generator[None]:
    target = resolve(owner)
    with (
        _registered(owner, list(replacements), module, everywhere=False),
        contextlib.ExitStack() as undo,
    ):
        for name, by in replacements.items():
            undo.enter_context(_builtin_of_torchscript(getattr(target, name, None), by))
            undo.enter_context(replaced(target, name, by))
        yield


def rebound(owner: str, replacements: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which functions are replaced wherever a module has imported them."""
    module = str(sys._getframe(1).f_globals["__name__"])
    return _rebound(owner, replacements, module)


@contextlib.contextmanager
def _rebound(owner: str, replacements: Mapping[str, Any], module: str) -> Generator[None]:
    target = resolve(owner)
    original = [getattr(target, name) for name in replacements]
    ours = list(replacements.values())
    with (
        _registered(owner, list(replacements), module, everywhere=True),
        contextlib.ExitStack() as undo,
    ):
        for pair in zip(original, ours, strict=True):
            undo.enter_context(_builtin_of_torchscript(*pair))
        _rebind(original, ours)
        try:
            yield
        finally:
            _rebind(ours, original)


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Any) -> Generator[None]:
    """Replace an attribute of an object that the script defines, while the context lasts."""
    # The raw entry of the class: getattr would return a static or class method unwrapped, and
    # restoring that would turn it into a plain function.
    original = owner.__dict__[name] if isinstance(owner, type) and name in owner.__dict__ else None
    inherited = isinstance(owner, type) and name not in owner.__dict__
    absent = not hasattr(owner, name)
    if original is None and not inherited and not absent:
        original = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        if inherited or absent:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextlib.contextmanager
def overridden_kernels(
    namespace: str, kernels: Iterable[tuple[str, str, Callable[..., Any]]]
) -> Generator[None]:
    """Override kernels of torch's operators while the context lasts.

    Args:
        namespace: of the operators, such as "aten".
        kernels: operator without namespace, dispatch key, and the kernel that replaces torch's.
    """
    library: Any = _torch.library.Library(namespace, "IMPL")
    try:
        with warnings.catch_warnings():
            # torch warns although `allow_override=True` states the intent.
            warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel")
            for name, key, kernel in kernels:
                library.impl(name, kernel, key, allow_override=True)
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def after_import(
    module: str, install: Callable[[], AbstractContextManager[None]]
) -> Generator[None]:
    """Enter a context once a module is imported, at once if it is; leave it with this one.

    Args:
        module: dotted name of a module that the script may import.
        install: returns the context, such as one that patches the module.
    """
    with contextlib.ExitStack() as undo:
        if module in sys.modules:
            undo.enter_context(install())
            yield
            return
        callbacks = _import_hook.callbacks.setdefault(module, [])

        def imported() -> None:
            undo.enter_context(install())

        callbacks.append(imported)
        if _import_hook not in sys.meta_path:
            sys.meta_path.insert(0, _import_hook)
        try:
            yield
        finally:
            callbacks.remove(imported)
            if not any(_import_hook.callbacks.values()):
                sys.meta_path.remove(_import_hook)


class _ImportHook:
    """A finder that calls functions after their module has been imported."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[[], object]]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        callbacks = self.callbacks.get(name)
        if not callbacks:
            return None
        # Without this finder, which would call itself without end.
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def executed(module: Any) -> None:
                # An attribute of the instance, which hid the method.
                del loader.exec_module
                execute(module)
                for callback in list(callbacks):
                    callback()

            loader.exec_module = executed
        return spec


_import_hook = _ImportHook()


def resolve(owner: str) -> Any:
    """Return the module or class of a dotted path.

    Raises:
        ImportError: the library is not installed.
        AttributeError: this version of the library lacks it.
    """
    parts = owner.split(".")
    for end in range(len(parts), 0, -1):
        try:
            target: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            if end == 1:
                raise
            continue
        for name in parts[end:]:
            target = getattr(target, name)
        return target
    raise ImportError(owner)


_PACKAGE = "onerank.capture."

_active: dict[tuple[str, str], list[int]] = {}  # (owner, name) -> positions in `by`, outermost last


@contextlib.contextmanager
def _registered(owner: str, names: list[str], module: str, *, everywhere: bool) -> Generator[None]:
    """Check the registry and the order of installation, and note what is installed."""
    places = {name: _position(owner, name, module, everywhere=everywhere) for name in names}
    for name, place in places.items():
        stack = _active.setdefault((owner, name), [])
        # Each replacement calls the function that it replaces, so the order of installation decides
        # which one runs inside the other.
        assert not stack or stack[-1] <= place, f"{module} patches {owner}.{name} too late"
        stack.append(place)
    try:
        yield
    finally:
        for name in places:
            _active[owner, name].pop()


def _position(owner: str, name: str, module: str, *, everywhere: bool) -> int:
    """Return the place of an installing module in the registry's order."""
    short = module.removeprefix(_PACKAGE)
    for patch in PATCHES:
        if patch.owner == owner and (name in patch.names or not patch.names):
            assert short in patch.by, f"{short} patches {owner}.{name}, which {patch.by} may"
            assert patch.everywhere == everywhere, f"{owner}.{name}: everywhere={everywhere}"
            return patch.by.index(short)
    raise AssertionError(f"{short} patches {owner}.{name}, which is not in PATCHES")


@contextlib.contextmanager
def _builtin_of_torchscript(original: Any, ours: Any) -> Generator[None]:
    """Let TorchScript take a replacement for the operator that it replaces.

    TorchScript knows functions of torch by their identity, and compiles the source of any other.
    """
    builtins = _torch.jit._builtins
    operator = builtins._find_builtin(original)
    table = builtins._get_builtin_table()
    if operator is None or id(ours) in table:
        yield
        return
    table[id(ours)] = operator
    try:
        yield
    finally:
        del table[id(ours)]  # another object may get its identity


_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    # An editable installation of this package is in none of them.
    | {str(Path(__file__).parents[1])}
)

_originals: dict[int, object] = {}  # functions of libraries that `rebound` replaces, by identity

_rebindable: set[int] = set()  # identities of these functions and of what replaces them now

_indexed: dict[str, tuple[int, int, list[str]]] = {}
"""Module of a library -> identity and size of its namespace, names bound to such functions."""


def index_bindings() -> None:
    """Find the names in imported modules that are bound to functions that `rebound` replaces.

    A process that forks calls this first. The search changes the reference count of every object in
    a module, so in each fork it would copy the memory of all modules: 0.1 s of CPU.
    """
    _indexed.clear()
    for patch in PATCHES:
        owner = sys.modules.get(patch.owner)
        for name in patch.names if patch.everywhere and owner is not None else ():
            function = getattr(owner, name, None)
            if id(function) not in _rebindable:
                _originals[id(function)] = function
                _rebindable.add(id(function))
    _modules.search()


def _bound_names(module_name: str, module: Any) -> list[str]:
    """Return the names of a module that may be bound to functions that `rebound` replaces."""
    before = _indexed.pop(module_name, None)
    namespace: dict[str, object] | None = getattr(module, "__dict__", None)
    if namespace is None:  # a script sets a module to None to prevent its import
        return []
    state = id(namespace), len(namespace)
    if before is not None and before[:2] == state:
        _indexed[module_name] = before
        return before[2]
    names = [name for name, value in list(namespace.items()) if id(value) in _rebindable]
    # A library binds what it imports once: its namespace grows, or stays as it is. A module of the
    # user may bind an existing name anew, so it is searched each time.
    is_initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    if is_library(module_name) and not is_initializing:
        _indexed[module_name] = (*state, names)
    return names


def is_library(module_name: str) -> bool:
    """Return whether a module is Python's or a package's, also one made by an extension."""
    if module_name in sys.builtin_module_names:
        return True
    for name in (module_name, module_name.partition(".")[0]):
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str):
            return is_library_file(file)
    return False


def is_library_file(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package."""
    return file.startswith(_LIBRARIES)


class _ModuleIndex:
    """The imported modules as last searched, and which bind functions that `rebound` replaces.

    A capture rebinds dozens of times among thousands of modules. Modules that have changed are
    found by comparisons of whole tables, which run in C, and only those are searched: a loop in
    Python took a third of the CPU time of a small capture.
    """

    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}  # a copy of `sys.modules`
        self._libraries: list[str] = []  # modules in `_indexed`
        self._namespaces: list[dict[str, object]] = []  # of the libraries
        self._sizes: list[int] = []  # of these namespaces
        self._others: list[str] = []  # the user's, and those being imported: searched each time
        self._binding: dict[str, tuple[Any, list[str]]] = {}  # libraries that bind a function

    def binding(self) -> list[tuple[Any, list[str]]]:
        """Return the modules, each with the names that may be bound to such a function."""
        # A copy, since other threads may import.
        modules, sizes = sys.modules.copy(), [*map(len, self._namespaces)]
        if sizes != self._sizes:
            # Patches add names too, so this occurs in each capture.
            changed = map(operator.ne, sizes, self._sizes)
            grown = [*itertools.compress(self._libraries, changed)]
            for name in grown:
                self._search_module(name, self._modules[name])
            self._sizes = sizes
            # A library that is imported again is searched each time until its import ends.
            if any(name not in _indexed for name in grown):
                self._list_libraries()
        if not _hold_the_same(modules, self._modules):
            self._search_changed(modules)
        others = {name: (modules[name], _bound_names(name, modules[name])) for name in self._others}
        binding = [*self._binding.values(), *others.values()]
        imported = {name: found for name, found in others.items() if name in _indexed}
        if imported:
            self._binding.update(imported)
            self._list_libraries()
        return binding

    def search(self) -> None:
        """Search all modules, for functions that became rebindable."""
        self._modules = {}
        self._search_changed(sys.modules.copy())

    def _search_changed(self, modules: dict[str, Any]) -> None:
        """Search the modules that are new, replaced or gone."""
        before, self._modules = self._modules, modules
        for name in before.keys() - modules.keys():
            self._binding.pop(name, None)
            _indexed.pop(name, None)
        for name, module in modules.items():
            if name not in before or before[name] is not module:
                self._search_module(name, module)
        self._list_libraries()

    def _search_module(self, name: str, module: Any) -> None:
        names = _bound_names(name, module)
        self._binding.pop(name, None)
        if names and name in _indexed:
            self._binding[name] = module, names

    def _list_libraries(self) -> None:
        self._libraries = [name for name in self._modules if name in _indexed]
        self._others = [name for name in self._modules if name not in _indexed]
        self._namespaces = [self._modules[name].__dict__ for name in self._libraries]
        self._sizes = [*map(len, self._namespaces)]


def _hold_the_same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Return whether two tables have the same entries in order; `==` would call methods."""
    same = all(map(operator.is_, left.values(), right.values()))
    return same and list(left) == list(right)


_modules = _ModuleIndex()


def _rebind(old: list[Any], new: list[Any]) -> None:
    """Swap values of module attributes everywhere: `from torch.distributed import ...` copies."""
    swaps = {id(before): after for before, after in zip(old, new, strict=True)}
    unknown = swaps.keys() - _rebindable
    if unknown:
        _originals.update((id(before), before) for before in old if id(before) in unknown)
        _rebindable.update(unknown)
        index_bindings()
    replacements = set(map(id, new)) - _rebindable
    _rebindable.update(replacements)
    for module, names in _modules.binding():
        for name in names:
            value = module.__dict__.get(name)
            if id(value) in swaps:
                setattr(module, name, swaps[id(value)])
    # A replacement that is gone may be freed, and its identity given to another object.
    _rebindable.difference_update(swaps.keys() - _originals.keys())


_Called = TypeVar("_Called", bound=Callable[..., Any])

_frames = _torch._C._dynamo.eval_frame

_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def untraced(function: _Called) -> _Called:
    """Return the Python function, which dynamo then traces neither into nor through.

    Hooks of a compiled module communicate, and torch.compile must not trace the recorder.
    """
    # torch.compiler.disable does so too, but it imports all of dynamo, which takes seconds, and
    # it costs the host some time in every call.
    code: CodeType = function.__code__
    _frames.set_code_exec_strategy(code, _SKIPPED)
    return function


T = TypeVar("T")


def live(kind: type[T]) -> list[T]:
    """Return all objects of a class and its subclasses that the garbage collector tracks."""
    return live_where(lambda candidate: issubclass(candidate, kind))


def live_where(wanted: Callable[[type], bool]) -> list[Any]:
    """Return all objects that the garbage collector tracks whose class is wanted."""
    objects: list[Any] = gc.get_objects()
    # A process holds hundreds of thousands of objects: check each class once, and compare classes
    # in C.
    kinds = [*map(type, objects)]
    chosen = {kind for kind in set(kinds) if wanted(kind)}
    if not chosen:
        return []
    return [*itertools.compress(objects, map(chosen.__contains__, kinds))]
