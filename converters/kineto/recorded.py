"""Which of the profiler's files one is, by how it begins."""

import gzip
import re
import zlib
from pathlib import Path
from typing import Literal

from onerank.ir.errors import TraceError

_BYTES = 1 << 20
_EVENTS, _SCHEMA, _NODES = (
    re.compile(rb'"%s"\s*:' % key) for key in (b"traceEvents", b"schema", b"nodes")
)


def beginning(path: Path) -> bytes:
    """Return the first bytes of a file, gzip or not; of a directory none.

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
        raise TraceError(f"{path}: the gzip stream is cut or damaged ({error})") from error


def kind_of(head: bytes) -> Literal["kineto", "et"] | None:
    """Return whether a file that begins so is a Kineto trace or an execution trace, if either."""
    if _EVENTS.search(head):
        return "kineto"
    if _SCHEMA.search(head) and _NODES.search(head):
        return "et"
    return None
