"""Every error, warning and note has a stable code: commands print it, tests assert it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from onerank.cli.charts import plotly_figure
from onerank.ir import errors
from onerank.ir.chakra import framing
from onerank.ir.errors import CaptureError, OneRankError
from onerank.plan import layouts, shard_memory

ROOT = Path(__file__).parents[1]
PACKAGES = ("ir", "capture", "converters", "annotate", "src/onerank")

CLASSES = {
    name
    for module in (errors, framing, plotly_figure, layouts, shard_memory)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, OneRankError)
}


_WORDS = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)+")

CLASSES |= {"CaptureWarning", "UsageError", "InvalidValue", "Note"}


@cache
def nodes() -> list[tuple[str, ast.Call | ast.Constant]]:
    """Return the place and the syntax node of every call and string in the package."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for folder in PACKAGES
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]


@cache
def calls() -> list[tuple[str, ast.Call]]:
    """Return the place and the node of every call in the package."""
    return [(place, node) for place, node in nodes() if isinstance(node, ast.Call)]


@cache
def raised() -> list[tuple[str, ast.Call]]:
    """Return the place and the call of every construction of an error, a warning or a note."""
    return [
        (place, node)
        for place, node in calls()
        if isinstance(node.func, ast.Name) and node.func.id in CLASSES
    ]


@cache
def codes(*classes: str) -> list[tuple[str, str]]:
    """Return the place and the literal code of every error, warning and note of the classes."""
    return [
        (place, str(keyword.value.value))
        for place, call in raised()
        for keyword in call.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
        if ast.unparse(call.func) in (classes or CLASSES)
    ]


def constants() -> set[str]:
    """Return every string constant of the package: some codes come from tables."""
    return {node.value for _, node in nodes() if isinstance(node, ast.Constant)}


def test_every_error_has_a_code():
    without = [place for place, call in raised() if not any(k.arg == "code" for k in call.keywords)]
    assert without == []


def test_errors_of_click_are_raised_with_a_code():
    """Ours, `UsageError` and `InvalidValue`, have a code; click's own classes have none."""
    refusals = ("click.UsageError", "click.BadParameter", "click.ClickException", "self.fail")
    assert [
        place
        for place, node in calls()
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in refusals
    ] == []


def test_codes_are_words_joined_by_hyphens():
    found = dict(codes())
    assert len(found) > 400
    assert [
        code for code in found.values() if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", code)
    ] == []


def test_an_error_and_a_note_share_no_code():
    notes = {code for _, code in codes("Note")}
    assert len(notes) > 100
    assert notes & {code for _, code in codes(*(CLASSES - {"Note"}))} == set()


def test_notes_that_tests_look_for_exist():
    """A test that a note is absent would otherwise hold for a misspelt code, whatever happens."""
    wanted = [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node.args[1].value)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "from notes import" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id in ("has_note", "note_of")
        if isinstance(node.args[1], ast.Constant)
    ]
    assert len(wanted) > 100
    known = constants()
    assert [(place, code) for place, code in wanted if code not in known] == []


# Codes that no user sees.
INTERNAL = {"payload-too-large"}  # its text becomes part of the warning `tensors-unknown`


def test_every_code_has_a_test():
    named = {
        word
        for path in (ROOT / "tests").rglob("*.py")
        if path != Path(__file__)
        for word in _WORDS.findall(path.read_text())
    }
    # Bad descriptions of GPUs name the code that they cause in their first line.
    for path in (ROOT / "tests").rglob("bad_gpus/*.toml"):
        named.update(_WORDS.findall(path.read_text().partition("\n")[0]))
    assert {code for _, code in codes()} - named == INTERNAL


def test_a_code_survives_another_process():
    import pickle

    error = pickle.loads(pickle.dumps(CaptureError("rank 3 is missing", code="rank-missing")))
    assert (str(error), error.code) == ("rank 3 is missing", "rank-missing")
    with pytest.raises(CaptureError):
        raise error
