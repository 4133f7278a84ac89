"""The raw trace files of a capture."""

import gzip
import shutil
from pathlib import Path

from onerank.ir.errors import CaptureError
from onerank.ir.scratch import scratch_directory

_LEVEL = 6
"""A trace is 6% larger than at 9, in half the time."""


def compress(source: Path, target: Path) -> None:
    """Put a file, gzipped, in the place of another."""
    with source.open("rb") as plain, gzip.open(target, "wb", compresslevel=_LEVEL) as packed:
        shutil.copyfileobj(plain, packed)
    source.unlink()


def check_raw_dir(directory: Path | None) -> None:
    """Check that raw traces can take the place of a directory; None is no place.

    Raises:
        CaptureError: it is not empty, or where the process works.
    """
    if directory is None or not directory.exists():
        return
    if any(directory.iterdir()):
        raise CaptureError(
            f"--raw-dir {directory}: the directory is not empty: name another",
            code="raw-directory-not-empty",
        )
    if directory.samefile(Path.cwd()):
        raise CaptureError(
            f"--raw-dir {directory}: the working directory; name one in it",
            code="raw-directory-is-cwd",
        )


def keep(raw: Path, directory: Path) -> None:
    """Copy the traces to `directory`, which appears only when complete."""
    with scratch_directory(directory.absolute().parent) as scratch:
        copy = shutil.copytree(raw, scratch / "raw")
        if directory.exists():
            directory.rmdir()
        copy.rename(directory)
