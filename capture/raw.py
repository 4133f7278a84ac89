"""The raw traces of a capture."""

import gzip
import os
import shutil
from pathlib import Path

from onerank.ir.errors import CaptureError


def compress(source: Path, target: Path) -> None:
    """Put a file, gzipped, in the place of another."""
    with source.open("rb") as plain, gzip.open(target, "wb") as packed:
        shutil.copyfileobj(plain, packed)
    source.unlink()


def refuse_filled(directory: Path) -> None:
    """Check that a directory for raw traces is empty.

    Raises:
        CaptureError: it is not.
    """
    if any(directory.iterdir()):
        raise CaptureError(f"--keep-raw {directory}: the directory is not empty: name another")


def keep(raw: Path, directory: Path) -> None:
    """Copy the traces beside their destination, then rename: never a half-filled directory."""
    beside = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        shutil.copytree(raw, beside)
        if directory.exists():
            directory.rmdir()
        beside.rename(directory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
