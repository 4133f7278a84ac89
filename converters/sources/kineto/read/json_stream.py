"""Read the one long array of a JSON file piece by piece, gzip-compressed or not.

A piece may end wherever the text so far, closed with brackets, is valid JSON: JSON is parsed from
the left, so such a text ends after an element. Nothing is assumed about the file's layout.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Generic, Literal, TypeVar

import msgspec

from onerank.ir.errors import TraceError

PIECE_BYTES = 1 << 20

# A file without the array must not be read into memory whole.
_LONGEST_HEAD = 64 << 20

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Occurrences of the array's name to try: each one parses the file up to there.
_MAX_HEADS = 32

_TRIES = 8  # candidate ends of a piece before a longer piece is read

_OBJECT = re.compile(rb'\s*\{\s*"[^"\\]*"')

_T = TypeVar("_T")


class ArrayFile(Generic[_T]):
    """A JSON object with one field that is a long array of objects.

    Args:
        path: the file.
        key: name of the field.
        kind: type of the object; `key` is one of its fields, others may be absent.
        expected: what the file should be, for messages.
        instead: returns a replacement for an element of another type, both as JSON; None: such
            elements are errors. Numbers may be texts.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        kind: type[_T],
        expected: str,
        *,
        instead: Callable[[bytes], bytes | None] | None = None,
    ) -> None:
        self._path = path
        self._expected = expected
        # Not strict: ROCm writes some numbers as text.
        self._decoder = msgspec.json.Decoder(kind, strict=False)
        self._replacement = instead
        self._key = key
        self._opening = re.compile(rb'"%s"\s*:\s*\[' % key.encode())
        self._prefix = b'{"%s":[' % key.encode()
        self._offset = 0  # bytes decoded

    def __iter__(self) -> Iterator[_T]:
        """Yield the object in parts: the fields before the array first, the fields after it last.

        Raises:
            TraceError: the file cannot be read, or is not of the expected kind.
        """
        try:
            with self._open() as file:
                yield from self._parts(file)
        except FileNotFoundError as error:
            raise TraceError(f"{self._path}: no such file", code="trace-missing") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(
                f"{self._path}: the gzip stream is cut or damaged ({error})",
                code="trace-damaged-gzip",
            ) from error
        except OSError as error:
            raise TraceError(
                f"{self._path}: cannot be read ({error.strerror})", code="trace-unreadable"
            ) from error

    def _open(self) -> BinaryIO:
        with self._path.open("rb") as file:
            # By its first bytes, since a compressed trace may be called .json.
            zipped = file.read(2) == b"\x1f\x8b"
        return gzip.open(self._path) if zipped else self._path.open("rb")  # type: ignore[return-value]

    def _parts(self, file: BinaryIO) -> Iterator[_T]:
        head, text = self._head(file)
        yield head
        if text is None:
            return
        wanted = PIECE_BYTES
        while True:
            more = file.read(max(wanted - len(text), PIECE_BYTES))
            text += more
            if not more:
                yield self._decode(self._prefix, text, b"")
                return
            part, end = self._piece(text)
            if part is None:
                # Gigabytes of garbage behind a valid beginning must be refused before they are in
                # memory.
                if len(text) > _LONGEST_HEAD:
                    raise self._malformed(f"no element ends within {len(text)} bytes")
                # Doubled, so that a long element is parsed a few times and not once per piece.
                wanted = 2 * len(text)
                continue
            yield part
            self._offset += end
            text = text[end:]
            wanted = PIECE_BYTES

    def _head(self, file: BinaryIO) -> tuple[_T, bytes | None]:
        """Return the fields before the array and the text after its bracket, None without array."""
        text = b""
        seen = 0  # end of the last occurrence of the name that was tried
        tries = _MAX_HEADS
        while True:
            more = file.read(PIECE_BYTES)
            text = (text + more).removeprefix(_BYTE_ORDER_MARK)
            for match in islice(self._opening.finditer(text, seen), tries):
                seen, tries = match.end(), tries - 1
                try:
                    head = self._decoder.decode(text[: match.end()] + b"]}")
                except msgspec.ValidationError as error:
                    raise self._malformed(error) from error
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue  # the name occurs inside another value
                self._offset = match.end()
                return head, text[match.end() :]
            if not more or len(text) > _LONGEST_HEAD or text.lstrip()[:1] != b"{":
                break
        if more:
            raise self._malformed(f"no array {self._key!r} in its first {len(text)} bytes")
        return self._decode(b"", text, b""), None

    def _piece(self, text: bytes) -> tuple[_T | None, int]:
        """Decode the complete elements of `text`; return them and where the next one begins.

        An element begins as the first one does, with the same key: other objects seldom do.
        """
        begins = _OBJECT.match(text)
        # The first element's beginning seldom occurs inside another one; any brace is the second
        # choice.
        for opening in (begins.group().strip(), b"{") if begins else (b"{",):
            end = len(text)
            for _ in range(_TRIES):
                end = self._boundary(text, opening, end)
                if end < 0:
                    break
                element_end = text.rindex(b"}", 0, end) + 1
                try:
                    return self._valid(self._close_array(text, element_end)), end
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue
        return None, 0

    @staticmethod
    def _boundary(text: bytes, opening: bytes, before: int) -> int:
        """Return the last place before `before` where `opening` follows `},`; -1 for none."""
        place = text.rfind(opening, 0, before)
        while place > 0:
            preceding = text[max(place - 64, 0) : place].rstrip()
            if preceding.endswith(b",") and preceding[:-1].rstrip().endswith(b"}"):
                return place
            place = text.rfind(opening, 0, place)
        return -1

    def _close_array(self, text: bytes, end: int) -> bytes:
        return b"".join((self._prefix, memoryview(text)[:end], b"]}"))

    def _valid(self, text: bytes) -> _T:
        """Decode JSON; elements of another type are replaced where they can be."""
        try:
            return self._decoder.decode(text)
        except msgspec.ValidationError as error:
            malformed = self._malformed(error)
            if self._replacement is None:
                raise malformed from error
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        if self._key not in fields:
            raise malformed
        elements = msgspec.json.decode(fields[self._key], type=list[msgspec.Raw])
        array = b",".join(self._replace_invalid(bytes(element), malformed) for element in elements)
        fields[self._key] = msgspec.Raw(b"".join((b"[", array, b"]")))
        try:
            return self._decoder.decode(msgspec.json.encode(fields))
        except msgspec.ValidationError as error:  # of another field
            raise self._malformed(error) from error

    def _replace_invalid(self, element: bytes, malformed: TraceError) -> bytes:
        """Return an element, or the replacement of an element of another type."""
        try:
            self._decoder.decode(b"".join((self._prefix, element, b"]}")))
        except msgspec.ValidationError as error:
            other = self._replacement(element) if self._replacement else None
            if other is None:
                raise malformed from error
            return other
        return element

    def _decode(self, prefix: bytes, text: bytes, suffix: bytes) -> _T:
        try:
            return self._valid(b"".join((prefix, text, suffix)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._malformed(error) from error

    def _malformed(self, error: object) -> TraceError:
        return TraceError(
            f"{self._path}: expected {self._expected}, found: {error}; reading the piece that "
            f"begins at byte {self._offset}",
            code="trace-malformed",
        )


def decode_raw(path: Path, values: Iterable[msgspec.Raw]) -> list[str]:
    """Return JSON values as text.

    Raises:
        TraceError: a value is not UTF-8. msgspec does not check a value that it leaves undecoded.
    """
    try:
        return [str(value, "utf-8") for value in values]
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path}: an operand is not UTF-8 ({error}): the file is damaged",
            code="trace-not-utf8",
        ) from error


_BYTES = 1 << 20

_EVENTS, _SCHEMA, _NODES = (
    re.compile(rb'"%s"\s*:' % key) for key in (b"traceEvents", b"schema", b"nodes")
)


def beginning(path: Path) -> bytes:
    """Return the first bytes of a file, gzip or not; b"" for a directory.

    Raises:
        TraceError: the gzip stream is damaged before as many are read.
    """
    if path.is_dir():
        return b""
    try:
        with path.open("rb") as file:
            start = file.read(_BYTES)
        if start[:2] != b"\x1f\x8b":
            return start
        with gzip.open(path) as file:
            return file.read(_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(
            f"{path}: the gzip stream is cut or damaged ({error})", code="trace-damaged-gzip"
        ) from error


def kind_of(head: bytes) -> Literal["kineto", "et"] | None:
    """Return the kind of trace that begins with these bytes, None for any other file."""
    if _EVENTS.search(head):
        return "kineto"
    if _SCHEMA.search(head) and _NODES.search(head):
        return "et"
    return None
