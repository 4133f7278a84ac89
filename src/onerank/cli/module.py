"""`-m MODULE`: the file of a script that is named as `python -m` and `torchrun -m` name it."""

import sys
from pathlib import Path

import click


def script_of(module: str) -> tuple[Path, str]:
    """Return the file of a module, and the name to run it by; nothing is imported to find it.

    Raises:
        UsageError: there is none of this name, here or among what is installed.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        places = _places(module)
    finally:
        sys.path.remove(here)
    for place in places:
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py"), module
        if (place / "__main__.py").is_file():
            return place / "__main__.py", f"{module}.__main__"
    raise click.UsageError(
        f"-m {module}: no such module, or package with a __main__.py, in {here} or installed; "
        "expected a name with dots, as in python -m package.train"
    )


def _places(module: str) -> list[Path]:
    """Return where a module could lie, without a suffix."""
    first, *rest = module.split(".")
    specs = (finder.find_spec(first, None) for finder in sys.meta_path)
    spec = next((one for one in specs if one is not None), None)
    if spec is None:
        return []
    if spec.submodule_search_locations is None:  # a file
        return [Path(spec.origin).with_suffix("")] if spec.origin and not rest else []
    return [Path(place, *rest) for place in spec.submodule_search_locations]
