"""Whether a function creates a process group, by what its code names.

`multiprocessing.Process` starts ranks and other workers alike. A function that names
`init_process_group`, or calls one of the script that does, is a rank's. Modules that a function
imports while it runs are read, not imported: as the function, they may depend on variables that it
sets first.
"""

import dis
from collections.abc import Generator
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from onerank.capture.patches import is_library, is_library_file

_CREATES = "init_process_group"


class _Definition(NamedTuple):
    """A function or class in the source of a module.

    Attributes:
        code: its code.
        module: the code of the module.
        package: the package of the module.
    """

    code: CodeType
    module: CodeType
    package: str


def creates_group(function: Any) -> bool:
    """Return whether a function names `init_process_group`, or one of the script that it names."""
    pending, seen = [function], set[int]()
    while pending:
        value: Any = pending.pop()
        value = getattr(value, "func", value)  # of a partial
        value = getattr(value, "__func__", value)
        code: CodeType | None = getattr(value, "__code__", None)
        if isinstance(value, _Definition):
            code = value.code
        elif is_library(getattr(value, "__module__", None) or ""):
            continue
        if id(code or value) in seen:
            continue
        seen.add(id(code or value))
        if isinstance(value, type):
            pending += vars(value).values()
        elif code is not None:
            names = set(_names(code))
            if _CREATES in names:
                return True
            pending += _named(value, names)
    return False


def _named(value: Any, names: set[str]) -> Generator[Any]:
    """Yield what the names in a function's code refer to."""
    if isinstance(value, _Definition):
        yield from _defined(value.module, value.package, names)
        yield from _imported(value.code, value.package, names)
    elif isinstance(value, FunctionType):
        named = [value.__globals__[name] for name in names if name in value.__globals__]
        yield from named
        for module in named:
            if isinstance(module, ModuleType):
                yield from (vars(module)[name] for name in names & vars(module).keys())
        package = value.__globals__.get("__package__") or ""
        yield from _imported(value.__code__, package, names)


def _imported(code: CodeType, package: str, names: set[str]) -> Generator[_Definition]:
    """Yield definitions with these names in the modules that a code imports."""
    for part in _parts(code):
        for name in _module_names(part, package):
            if (module := _module(name)) is not None:
                yield from _defined(*module, names)


def _defined(module: CodeType, package: str, names: set[str]) -> Generator[_Definition]:
    """Yield the functions and classes with these names of a module, and of those it imports."""
    for part in module.co_consts:
        if isinstance(part, CodeType) and part.co_name in names:
            yield _Definition(part, module, package)
    for name in _module_names(module, package):
        if (imported := _module(name)) is not None:
            for part in imported[0].co_consts:
                if isinstance(part, CodeType) and part.co_name in names:
                    yield _Definition(part, *imported)


def _module_names(code: CodeType, package: str) -> Generator[str]:
    """Yield the full names of the modules that a code imports, not those that parts of it do."""
    level, wanted = 0, None
    constants: list[Any] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_CONST") or instruction.opname == "LOAD_SMALL_INT":
            constants.append(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            level, wanted = constants[-2:]
            name: str = instruction.argval
            try:
                name = resolve_name("." * level + name, package) if level else name
            except ImportError:
                continue
            yield name
            # `from package import module` may import a module.
            yield from (f"{name}.{item}" for item in wanted or () if item != "*")


@cache
def _module(name: str) -> tuple[CodeType, str] | None:
    """Return the code of a module of the script and its package; None of others."""
    spec, path = None, None
    package = ""
    # Not `importlib.util.find_spec`, which imports the packages that a module lies in.
    for part in name.split("."):
        if spec is not None and path is None:
            return None
        spec = PathFinder.find_spec(f"{package}.{part}" if package else part, path)
        if spec is None:
            return None
        package, path = spec.name, spec.submodule_search_locations
    origin = spec.origin if spec is not None and spec.has_location else None
    if spec is None or origin is None or is_library_file(origin):
        return None
    try:
        code = compile(Path(origin).read_bytes(), origin, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return None
    return code, spec.parent or ""


def _parts(code: CodeType) -> Generator[CodeType]:
    """Yield a code, and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def _names(code: CodeType) -> Generator[str]:
    """Yield the global names and attributes in a function's code and in that of nested ones."""
    for part in _parts(code):
        yield from part.co_names
