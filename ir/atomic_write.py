"""Files that appear under their name only when complete."""

import contextlib
import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from onerank.ir.scratch import SUFFIX, scratch_file

if TYPE_CHECKING:
    import polars as pl


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Yield a temporary file that is renamed to `path` on success and removed on an error.

    Creates the directory of `path` if its parent directory exists.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced by a rename
        try:
            with path.open("wb") as device:
                yield device
        except OSError as error:
            error.filename = str(path)
            raise
        return
    # In the same directory, because a rename is atomic only within one file system.
    temporary: Path | None = None
    try:
        path.parent.mkdir(exist_ok=True)
        with scratch_file(path) as temporary:
            with temporary.open("wb") as file:
                yield file
            os.replace(temporary, path)
    except OSError as error:
        name = error.filename and Path(os.fsdecode(error.filename))
        # An error of another file, raised while this one was open, keeps that file's name.
        if name is None or name in (temporary, path.parent) or name.suffix == SUFFIX:
            error.filename, error.filename2 = str(path), None
        raise


@contextmanager
def created(directory: Path) -> Generator[None]:
    """Create a directory and its missing parents; remove them again on an error, if empty.

    Raises:
        OSError: a directory cannot be created.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError):  # absent, or it holds something by now
                path.rmdir()
        raise


def replace_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file that appears under its name only when complete.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    with replacing(path) as file:
        file.write(data)


def write_tables(
    tables: "Mapping[Path, pl.DataFrame]", *, compression_level: int | None = None
) -> None:
    """Write tables as parquet (zstd); no file appears before all are complete.

    Polars encodes into memory: when its own write fails it reports no errno and no path.

    Raises:
        OSError: a file cannot be written; the error names it.
    """
    with contextlib.ExitStack() as stack:
        for path, table in tables.items():
            file = stack.enter_context(replacing(path))
            encoded = io.BytesIO()
            table.write_parquet(encoded, compression="zstd", compression_level=compression_level)
            file.write(encoded.getbuffer())
            file.flush()
