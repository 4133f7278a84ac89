"""Readers of damaged files: whatever a file contains, only errors of onerank's own come out.

`benchmarks/speed/fuzz.py` runs the same families by hand, for any time and guided by
coverage.
"""

import pytest
from families import FAMILIES
from mutations import Choices


@pytest.mark.parametrize("name", FAMILIES)
def test_mutants_are_read_or_refused(name: str) -> None:
    """Seeds are fixed, so every run reads the same mutants; `Choices(seed)` makes one again."""
    family = FAMILIES[name]
    if name == "onnx":
        pytest.importorskip("onnx")
    read = 0
    for seed in range(family.examples):
        try:
            read += family.attempt(Choices(seed))[0]
        except Exception as error:
            error.add_note(f"mutant {seed} of the family {name}")
            raise
    # A family whose mutants are all refused, or all read, tests only half of a reader.
    assert 0.05 < read / family.examples < 0.95
