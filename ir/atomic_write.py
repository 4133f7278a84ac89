"""Files that appear under their name only when complete."""

import contextlib
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with temporary.open("wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # report the first error, not the cleanup's
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that appears under its name only when complete.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    with replacing(path) as file:
        file.write(data)
