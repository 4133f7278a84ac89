"""`torch.save` and `torch.load` in a capture without a device.

Files with the numbers of a data set are read, since those decide about shapes. Weights become fake
tensors, and nothing is saved of what no device computed.
"""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_flatten, tree_map_only

from onerank.capture.no_device.operators.fake_operators import REAL_ELEMENTS
from onerank.ir.notes import Note

_modes: Any = _python_dispatch

_READ_BYTES = 1 << 28
"""Largest file that is read whole; a larger one is mapped into memory if its format allows it."""


class _OnlyShapesError(Exception):
    """A file of which only the shapes are loaded."""


def _size_of(file: Any) -> int:
    """Return the bytes of a path, or those after the position of an open file."""
    if isinstance(file, str | os.PathLike):
        return os.stat(file).st_size if os.path.isfile(file) else 0  # type: ignore[arg-type]
    position = file.tell()
    try:
        return file.seek(0, os.SEEK_END) - position
    finally:
        file.seek(position)


def _is_on_cpu(storage: Any, tag: str, map_location: Any) -> bool:
    """Whether `torch.load` leaves a storage on the CPU.

    Args:
        storage: the storage, on the CPU.
        tag: device on which it was saved.
        map_location: argument of `torch.load`.
    """
    if isinstance(map_location, dict):
        places: dict[str, Any] = dict(map_location)  # pyright: ignore[reportUnknownArgumentType]
        map_location = places.get(tag, tag)
    if callable(map_location):
        return map_location(storage, tag) is storage
    return torch.device(tag if map_location is None else map_location).type == "cpu"


class SavedFiles:
    """The files that a script saves and loads.

    Args:
        fake: returns a fake tensor like a real one.
    """

    def __init__(self, fake: Callable[[Tensor], Tensor]) -> None:
        self._fake = fake
        self._saves_nothing = False

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the replacements of `torch.save` and `torch.load`."""
        return {"save": self._save_function(), "load": self._load_function()}

    def notes(self) -> list[Note]:
        """Return a note if a file was not written."""
        if not self._saves_nothing:
            return []
        return [
            Note(
                "torch.save wrote nothing, since no device computed the values",
                code="no-device-save-skipped",
            )
        ]

    def _save_function(self) -> Callable[..., Any]:
        original = torch.save

        def save(value: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = tree_flatten(value)[0]
            if any(isinstance(getattr(t, "_local_tensor", t), FakeTensor) for t in tensors):
                self._saves_nothing = True
                # Scripts rename a checkpoint that they have written, or link to it.
                if args and isinstance(args[0], str | os.PathLike):
                    Path(args[0]).touch()
                return None
            return original(value, *args, **kwargs)

        return save

    def _load_function(self) -> Callable[..., Any]:
        original = torch.load

        def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            # Under a FakeTensorMode torch.load skips all numbers, also those of a data set, which
            # decide about shapes.
            try:
                return self._load_numbers(original, file, map_location, *args, **kwargs)
            except _OnlyShapesError:
                return original(file, map_location, *args, **kwargs)

        return load

    def _load_numbers(
        self, load: Callable[..., Any], file: Any, map_location: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Load a file; large tensors of floating-point numbers, such as weights, become fake.

        Raises:
            _OnlyShapesError: the file holds tensors of the GPU, or is large and cannot be mapped.
        """
        opened: Any = None if isinstance(file, str | os.PathLike) else file
        if opened is None and zipfile.is_zipfile(file):
            kwargs.setdefault("mmap", True)
        elif _size_of(file) > _READ_BYTES:
            raise _OnlyShapesError
        start = opened.tell() if opened is not None else 0

        def place(storage: Any, tag: str) -> Any:
            if not _is_on_cpu(storage, tag, map_location):
                raise _OnlyShapesError
            return storage

        try:
            with _modes._disable_current_modes():
                value = load(file, place, *args, **kwargs)
        except _OnlyShapesError:
            if opened is not None:
                opened.seek(start)
            raise

        def shaped(tensor: Any) -> Any:
            large = type(tensor) is Tensor and tensor.numel() > REAL_ELEMENTS
            return self._fake(tensor) if large and tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, shaped, value)
