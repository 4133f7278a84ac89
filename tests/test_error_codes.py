"""Every error that a user can cause has a stable code: commands print it, tests assert it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from onerank.ir import errors
from onerank.ir.chakra import framing
from onerank.ir.errors import CaptureError, OneRankError

ROOT = Path(__file__).parents[1]
PACKAGES = ("ir", "capture", "converters", "annotate", "src/onerank")

CLASSES = {
    name
    for module in (errors, framing)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, OneRankError)
}


CLASSES |= {"CaptureWarning", "UsageError", "InvalidValue"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield the place and the node of every call in the package."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def raised() -> Iterator[tuple[str, ast.Call]]:
    """Yield the place and the call of every construction of an error in the package."""
    for place, node in calls():
        if isinstance(node.func, ast.Name) and node.func.id in CLASSES:
            yield place, node


def codes() -> Iterator[tuple[str, str]]:
    """Yield the place and the literal code of every error that names one."""
    for place, call in raised():
        for keyword in call.keywords:
            if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                yield place, str(keyword.value.value)


def test_every_error_has_a_code():
    without = [place for place, call in raised() if not any(k.arg == "code" for k in call.keywords)]
    assert without == []


def test_errors_of_click_are_raised_with_a_code():
    """Ours, `UsageError` and `InvalidValue`, have a code; click's own classes have none."""
    refusals = ("click.UsageError", "click.BadParameter", "click.ClickException", "self.fail")
    assert [place for place, node in calls() if ast.unparse(node.func) in refusals] == []


def test_codes_are_words_joined_by_hyphens():
    found = dict(codes())
    assert len(found) > 400
    assert [
        code for code in found.values() if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", code)
    ] == []


def test_a_code_survives_another_process():
    import pickle

    error = pickle.loads(pickle.dumps(CaptureError("rank 3 is missing", code="rank-missing")))
    assert (str(error), error.code) == ("rank 3 is missing", "rank-missing")
    with pytest.raises(CaptureError):
        raise error
