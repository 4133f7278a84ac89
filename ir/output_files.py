"""Output files: files that appear under their name only when complete, and scratch space.

Scratch files and directories of a killed process are removed by a later run. A process holds a lock
(flock) on each of its entries. The kernel drops the lock when the process ends, however it ends, so
an entry without a lock was left behind by a killed run.
"""

import contextlib
import fcntl
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import polars as pl


PREFIX = "onerank-scratch-"

SUFFIX = ".onerank-tmp"
"""Suffix of a file that is being written next to its final name."""


@contextmanager
def scratch_directory(parent: Path | None = None) -> Generator[Path]:
    """Yield a new directory and remove it at the end, with those that killed runs left there.

    Args:
        parent: contains it, under a hidden name; None is the system's temporary directory.

    Raises:
        OSError: the directory cannot be created.
    """
    place = parent or Path(tempfile.gettempdir())
    prefix = f".{PREFIX}" if parent else PREFIX
    remove_abandoned(place)
    directory, lock = _locked_directory(place, prefix)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


@contextmanager
def scratch_file(target: Path) -> Generator[Path]:
    """Yield a new, empty file in the directory of `target`; remove it if it is still there.

    Raises:
        OSError: the file cannot be created.
    """
    _sweep_once(target.parent)
    path, lock = _locked_file(target)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(lock)


def _locked_directory(place: Path, prefix: str) -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(directory, os.O_RDONLY)
            if _lock(directory, descriptor):
                return directory, descriptor


def _locked_file(target: Path) -> tuple[Path, int]:
    while True:
        # A name has at most 255 bytes on Linux: the output's name, cut to 40 characters, fits.
        path = target.with_name(f".{target.name[:40]}.{os.urandom(4).hex()}{SUFFIX}")
        # O_EXCL, so that two processes never share a name; mode 0666 leaves permissions to the
        # umask, as for any file.
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        if _lock(path, descriptor):
            return path, descriptor


def _lock(path: Path, descriptor: int) -> bool:
    """Lock a new entry; close it and return False if another run's sweep has removed it."""
    # On a file system without locks nothing is swept.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    # A sweep may have removed the entry between its creation and the lock.
    if path.exists():
        return True
    os.close(descriptor)
    return False


@functools.cache
def _sweep_once(directory: Path) -> None:
    """Sweep once per process and directory: an export writes thousands of files to one place."""
    remove_abandoned(directory)


def remove_abandoned(directory: Path) -> None:
    """Remove the scratch files and directories of killed runs of this user from a directory."""
    for path in [
        *directory.glob(f"{PREFIX}*"),
        *directory.glob(f".{PREFIX}*"),
        *directory.glob(f".*{SUFFIX}"),
    ]:
        # An entry may be locked, already gone, or on a file system without locks.
        with contextlib.suppress(OSError):
            # Other users' entries and links may lead anywhere; a shared temporary directory has
            # both.
            if path.lstat().st_uid != os.getuid() or path.is_symlink():
                continue
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """Yield a temporary file that is renamed to `path` on success and removed on an error.

    Creates the directory of `path` if its parent directory exists.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    # A pipe or a device cannot be replaced by a rename.
    if path.exists() and not path.is_file():
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
            with contextlib.suppress(OSError):  # absent, or no longer empty
                path.rmdir()
        raise


@contextmanager
def moving_into(directory: Path) -> Generator[Path]:
    """Yield a temporary directory whose files move to `directory` on success, all or none.

    Creates the directory and its missing parents.

    Raises:
        OSError: a file cannot be written; the error names its path in `directory`.
    """
    # In the same directory, because a file cannot be renamed to another file system.
    place = directory.absolute()
    try:
        with created(place), scratch_directory(place) as scratch:
            yield scratch
            for path in sorted(scratch.iterdir()):
                path.replace(place / path.name)
    except OSError as error:
        name = Path(os.fsdecode(error.filename or directory))
        if name.parent.name.startswith(f".{PREFIX}"):
            error.filename, error.filename2 = str(directory / name.name), None
        elif name.name.startswith(f".{PREFIX}"):
            error.filename = str(directory)
        raise


def is_replaceable(directory: Path, marker: str) -> bool:
    """Return whether a directory is absent, empty, or an earlier output: one with file `marker`."""
    if not directory.exists() or (directory / marker).is_file():
        return True
    return directory.is_dir() and not any(directory.iterdir())


@contextmanager
def replacing_directory(directory: Path) -> Generator[Path]:
    """Yield a new directory that takes the place of `directory` on success.

    Raises:
        OSError: it cannot be written.
    """
    # In the same directory, because a directory cannot be renamed to another file system.
    with scratch_directory(directory.absolute().parent) as scratch:
        whole = scratch / "new"
        whole.mkdir()
        yield whole
        if directory.exists():
            directory.rename(scratch / "replaced")
        whole.rename(directory)


def replace_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file that appears under its name only when complete.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    with replacing(path) as file:
        file.write(data)


def replace_files(files: Mapping[Path, bytes]) -> None:
    """Write files and their missing directories; no file appears before all are complete.

    Raises:
        OSError: a file cannot be written; the error names it.
    """
    with contextlib.ExitStack() as stack:
        for path, data in files.items():
            stack.enter_context(created(path.parent))
            file = stack.enter_context(replacing(path))
            file.write(data)
            file.flush()


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
