"""Assert an error or a warning by its stable code, never by the wording of its message."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from onerank.ir.errors import CaptureWarning, OneRankError


@contextmanager
def raises_code(
    code: str, error: type[OneRankError] = OneRankError, *, naming: str | Sequence[str] = ()
) -> Generator[Any]:
    """Expect an error with this code; yield pytest's record of it.

    Args:
        code: the code.
        error: the class.
        naming: what the message must name: files, lines, fields, options, numbers. Not its words.
    """
    with pytest.raises(error) as info:
        yield info
    assert info.value.code == code, f"{info.value.code}: {info.value}"
    names = (naming,) if isinstance(naming, str) else naming
    missing = [name for name in names if name not in str(info.value)]
    assert not missing, f"{missing} not in: {info.value}"


@contextmanager
def warns_code(code: str, *, naming: str | Sequence[str] = ()) -> Generator[Any]:
    """Expect a warning with this code whose message names `naming`; yield the recorded warnings."""
    with pytest.warns(CaptureWarning) as record:
        yield record
    messages = [
        str(warning.message)
        for warning in record
        if isinstance(warning.message, CaptureWarning) and warning.message.code == code
    ]
    names = (naming,) if isinstance(naming, str) else naming
    assert any(all(name in message for name in names) for message in messages), messages
