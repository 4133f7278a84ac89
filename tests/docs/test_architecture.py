"""The pages on the code name files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = ("ir", "capture", "converters", "annotate", "src", "tools", "tests", "benchmarks")


@pytest.mark.parametrize("page", ["architecture.md", "code-map.md"])
def test_every_path_of_the_page_exists(page: str):
    text = (ROOT / "docs" / page).read_text()
    paths = [path for path in re.findall(r"`([\w./]+/[\w./]*)`", text) if path.startswith(ROOTS)]
    assert len(paths) > 25
    assert [path for path in paths if not (ROOT / path).exists()] == []
