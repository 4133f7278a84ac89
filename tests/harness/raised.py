"""Assert an error by its class and its stable code, never by the wording of its message."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from onerank.ir.errors import OneRankError


@contextmanager
def raises_code(code: str, error: type[OneRankError] = OneRankError) -> Generator[Any]:
    """Expect an error with this code; yield pytest's record of it, for numbers in its message."""
    with pytest.raises(error) as info:
        yield info
    assert info.value.code == code, f"{info.value.code}: {info.value}"
