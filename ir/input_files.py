"""Files that users write by hand: GPU descriptions, prices, plans, networks, routing, groups.

Every such file is read here, so that each has the same limits and the same errors. The limits are
far above what a hand-written file needs, and far below what makes a parser slow or crash.
"""

import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from onerank.ir.errors import FormatError, OneRankError, first_line

T = TypeVar("T")

MOST_BYTES = 1 << 26
"""Largest file, 64 MiB: tokens for each of 1,000 experts in each of 1,000 layers take 10 MB."""

DEEPEST = 32
"""Deepest nesting of tables and lists; onerank's own files have four levels."""

# First integer that is too large: TOML's integers, and the columns of a graph, have 64 bits.
_BEYOND = 1 << 63

# tomllib takes time quadratic in the parts of a dotted key: 0.8 s for 8,000 of them (Python 3.11).
_KEY_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
_LONG_KEY = rf"(?:^|[\[{{,])[ \t]*+(?:{_KEY_PART}\.[ \t]*+){{{DEEPEST}}}"


def load_toml(path: Path, *, error: type[OneRankError] = FormatError) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: the file.
        error: class of the error to raise.

    Raises:
        OneRankError: the file cannot be read, is not TOML, is nested deeper than `DEEPEST`, or
            holds a number of more than 64 bits.
    """
    import tomllib  # not at the top: most commands read no TOML

    text = _read_text(path, error)
    # Before parsing: tomllib would already have spent its quadratic time.
    if re.search(_LONG_KEY, text, re.MULTILINE):
        raise _too_deep(path, error)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as caught:
        raise error(
            f"{path}: not valid TOML: {first_line(caught)}", code="toml-malformed"
        ) from None
    except RecursionError:
        raise _too_deep(path, error) from None
    except ValueError:  # Python converts at most 4,300 digits to an integer
        raise _number_too_large(path, error) from None
    _check_values(path, content, error)
    return content


def load_json(
    path: Path, kind: type[T], expected: str, *, error: type[OneRankError] = FormatError
) -> T:
    """Read a JSON file as `kind`.

    Args:
        path: the file.
        kind: type of the content, as msgspec converts it.
        expected: what the file should hold, for the message.
        error: class of the error to raise.

    Raises:
        OneRankError: the file cannot be read, is not JSON, or is not of this type.
    """
    text = _read_text(path, error)
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as caught:
        raise error(
            f"{path}: {first_line(caught)}; expected {expected}", code="json-malformed"
        ) from None
    except RecursionError:
        raise _too_deep(path, error) from None


def load_csv(path: Path, *, error: type[OneRankError] = FormatError) -> list[tuple[float, ...]]:
    """Read a CSV file of numbers without a header; blank lines are skipped.

    Raises:
        OneRankError: the file cannot be read, or a line holds anything but numbers.
    """
    import csv

    lines: list[tuple[float, ...]] = []
    reader = csv.reader(io.StringIO(_read_text(path, error), newline=""))
    try:
        for row in reader:
            if row:
                lines.append(tuple(float(cell) for cell in row))
    except (csv.Error, ValueError) as caught:
        raise error(
            f"{path}: line {reader.line_num}: {first_line(caught)}; expected numbers separated "
            "by commas, without a header",
            code="csv-malformed",
        ) from None
    return lines


def _read_text(path: Path, error: type[OneRankError]) -> str:
    """Return the text of a UTF-8 file, without a byte order mark."""
    check_regular(path, error=error)
    try:
        with path.open("rb") as file:
            # One byte more than allowed, so that a growing file is refused without reading all of
            # it.
            octets = file.read(MOST_BYTES + 1)
    except OSError as caught:
        raise error(f"{path}: cannot be read: {caught.strerror}", code="file-unreadable") from None
    if len(octets) > MOST_BYTES:
        raise error(
            f"{path}: larger than {MOST_BYTES >> 20} MiB, the limit for files written by hand",
            code="file-too-large",
        )
    try:
        # Editors on Windows begin UTF-8 files with a byte order mark.
        return octets.decode("utf-8-sig")
    except UnicodeDecodeError as caught:
        raise error(
            f"{path}: byte {caught.start} is not UTF-8; save the file as UTF-8 text",
            code="file-not-utf8",
        ) from None


def check_regular(path: Path, *, error: type[OneRankError] = FormatError) -> None:
    """Refuse a pipe, a device or a directory in the place of a file: opening a pipe can block.

    A file that does not exist is left to the caller's `open`.

    Raises:
        OneRankError: the path exists, and is no regular file.
    """
    try:
        accepted = path.is_file() or not path.exists()
    except OSError as caught:  # a name that is too long
        raise error(f"{path}: cannot be read: {caught.strerror}", code="file-unreadable") from None
    if not accepted:
        raise error(
            f"{path}: not a regular file (a directory, a pipe or a device); write what it "
            "yields to a file first",
            code="file-not-regular",
        )


def _check_values(path: Path, content: object, error: type[OneRankError]) -> None:
    """Check depth and numbers without recursion."""
    level: list[object] = [content]
    for _ in range(DEEPEST):
        inner: list[object] = []
        for value in level:
            if isinstance(value, dict):
                inner += cast("dict[str, object]", value).values()
            elif isinstance(value, list):
                inner += cast("Iterable[object]", value)
            elif isinstance(value, int) and not -_BEYOND <= value < _BEYOND:
                raise _number_too_large(path, error)
        level = inner
    if level:
        raise _too_deep(path, error)


def _too_deep(path: Path, error: type[OneRankError]) -> OneRankError:
    return error(
        f"{path}: tables or lists are nested more than {DEEPEST} levels deep",
        code="file-nested-too-deep",
    )


def _number_too_large(path: Path, error: type[OneRankError]) -> OneRankError:
    return error(f"{path}: a number does not fit into 64 bits", code="file-number-too-large")
