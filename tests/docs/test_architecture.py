"""The architecture page names files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOTS = ("ir", "capture", "converters", "annotate", "src", "tools", "tests", "benchmarks")


def test_every_path_of_the_page_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = [path for path in re.findall(r"`([\w./]+/[\w./]*)`", text) if path.startswith(ROOTS)]
    assert len(paths) > 25
    assert [path for path in paths if not (ROOT / path).exists()] == []
