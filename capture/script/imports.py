"""Which modules of its own a script imports, as far as its text tells."""

import ast
from pathlib import Path


def own_modules(script: Path, root: Path) -> list[Path]:
    """Return the files below `root` that a script imports, and that these import, and so on."""
    found: list[Path] = [script]
    for path in found:  # grows
        for names, level in _imports(path):
            place = path.resolve().parents[level - 1] if level else root
            for end in range(1, len(names) + 1):
                stem = place.joinpath(*names[:end])
                for file in (stem.with_suffix(".py"), stem / "__init__.py"):
                    if file.is_file() and file not in found and file != script.resolve():
                        found.append(file)
    return found[1:]


def _imports(path: Path) -> list[tuple[list[str], int]]:
    """Return the dotted names that a file imports, and how many dots stand before each."""
    try:
        tree = ast.parse(path.read_text(errors="replace"))
    except (SyntaxError, ValueError):  # told when it is run
        return []
    named: list[tuple[list[str], int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named += [(alias.name.split("."), 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = node.module.split(".") if node.module else []
            named += [([*start, alias.name], node.level) for alias in node.names]
    return named
