"""A test that no note has some words checks words that a note can have.

Notes have no codes, so tests find them by words. After a change of the wording, a test that a note
is absent would hold whatever the code does.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("ir", "capture", "converters", "annotate", "src/onerank")


def texts() -> Iterator[str]:
    """Yield every literal text of the package; `{}` stands for the values of f-strings."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.JoinedStr):
                    parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
                    yield "".join(str(part) for part in parts)


def absent() -> Iterator[tuple[str, str]]:
    """Yield the place and the words of every test that no note, or this note, has the words."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            words: list[ast.expr] = []
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                inside = [each for each in ast.walk(node.operand) if isinstance(each, ast.Compare)]
                words = [each.left for each in inside if isinstance(each.ops[0], ast.In)]
                named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                words = words if "note" in named else []
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn):
                (of,) = node.comparators
                words = [node.left] if isinstance(of, ast.Name) and of.id == "note" else []
            for word in words:
                if isinstance(word, ast.Constant) and isinstance(word.value, str):
                    yield f"{path.relative_to(ROOT)}:{word.lineno}", word.value


def test_words_that_no_note_may_have_are_words_of_notes():
    known, wanted = list(texts()), list(absent())
    assert len(wanted) > 20
    assert [
        (place, word) for place, word in wanted if not any(word in text for text in known)
    ] == []
