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
        OSError: nothing can be written there; it names `path`.
    """
    if path.exists() and not path.is_file():  # a pipe or a device: there is nothing to replace
        try:
            with path.open("wb") as device:
                yield device
        except OSError as error:
            error.filename = str(path)
            raise
        return
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with beside.open("wb") as file:
            yield file
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # report the first error, not this one
            beside.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that appears under its name only when complete, whatever interrupts.

    Raises:
        OSError: nothing can be written there; it names `path`.
    """
    with replacing(path) as file:
        file.write(data)
