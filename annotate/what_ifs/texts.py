"""The text columns of a kernel that a what-if makes."""

from collections.abc import Sequence

import msgspec

TEXTS = ("name", "op", "grid", "block", "input_shapes", "input_types", "input_values",
         "output_shapes", "output_types", "output_values")  # fmt: skip
"""Columns that say which kernel a node is, and on what."""


def as_text(values: Sequence[object]) -> str:
    """Return values as the columns of shapes, types and values hold them."""
    return msgspec.json.encode(values).decode()
