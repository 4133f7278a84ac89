"""What a script saves and loads in a capture without a device, by torch or by safetensors.

Files with the numbers of a data set are read, since those decide about shapes. Weights become fake
tensors. Their files are mapped into memory, and their numbers are not read. A tensor that no device
computed is saved by its shape, in a file of safetensors as zeros, so that a script can load what it
has saved. A file with numbers is not overwritten by one without.
"""

import contextlib
import io
import os
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_map_only

from onerank.capture.no_device.operators.fake_operators import REAL_ELEMENTS
from onerank.capture.no_device.tensor_values import Known
from onerank.capture.patches import after_import, patched, rebound, resolve
from onerank.ir.errors import CaptureError
from onerank.ir.notes import Note

_modes: Any = _python_dispatch

_FAKE_TENSOR = "torch._subclasses.fake_tensor.FakeTensor"

_SAFETENSORS_TORCH = "safetensors.torch"

_SAFETENSORS = "safetensors"

_STAGER = "torch.distributed.checkpoint._state_dict_stager"

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
    """Return whether `torch.load` leaves a storage on the CPU.

    Args:
        storage: the storage, on the CPU.
        tag: device on which it was saved.
        map_location: argument of `torch.load`.
    """
    if isinstance(map_location, dict):
        places: dict[str, Any] = dict(map_location)
        map_location = places.get(tag, tag)
    if callable(map_location):
        return map_location(storage, tag) is storage
    return torch.device(tag if map_location is None else map_location).type == "cpu"


class SavedTensor(NamedTuple):
    """What a file holds of a fake tensor.

    Attributes:
        numbers: those of a small tensor that are known.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    is_parameter: bool
    numbers: Tensor | None


# Innermost last. A list of the module, because pickle calls `tensor_of_shape` without a context.
_emulations: list["SavedFiles"] = []


def tensor_of_shape(*saved: Any) -> Tensor:
    """Return a fake tensor from the fields of a `SavedTensor`; pickle calls it.

    Raises:
        CaptureError: no capture without a device runs.
    """
    if not _emulations:
        raise CaptureError(
            "this file was saved by a capture without a device: it holds the shapes of tensors, "
            "without their numbers",
            code="no-device-file",
        )
    return _emulations[-1].create(SavedTensor(*saved))


class _OpenFile:
    """An open file of safetensors whose large tensors are fake.

    A conversion of a mapped tensor to another dtype would read the file, and take memory for it.

    Args:
        opened: a `safe_open`, or a slice that it returned.
        shaped: replaces large tensors by fake ones.
    """

    def __init__(self, opened: Any, shaped: Callable[[Any], Any]) -> None:
        self._opened = opened
        self._shaped = shaped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> "_OpenFile":
        self._opened.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._opened.__exit__(*raised)

    def __getitem__(self, at: Any) -> Any:
        return self._shaped(self._opened[at])

    def get_tensor(self, name: str) -> Any:
        return self._shaped(self._opened.get_tensor(name))

    def get_tensors(self) -> Any:
        return self._shaped(self._opened.get_tensors())

    def get_slice(self, name: str) -> "_OpenFile":
        return _OpenFile(self._opened.get_slice(name), self._shaped)


class SavedFiles:
    """The files that a script saves and loads."""

    def __init__(self, mode: FakeTensorMode, known: Known) -> None:
        """Create the record of files.

        Args:
            mode: creates fake tensors.
            known: numbers of small ones.
        """
        self._mode = mode
        self._known = known
        self._location: Any = None  # the `map_location` of the load that runs
        self._shapes = 0  # tensors that were saved without numbers

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Replace `torch.save`, `torch.load` and the pickling of fake tensors."""
        functions = {"save": self._save_function(), "load": self._load_function()}
        with (
            patched("torch", functions),
            patched(_FAKE_TENSOR, {"__reduce_ex__": self._reduce_function()}),
            after_import(_STAGER, _staged),
            after_import(_SAFETENSORS_TORCH, self._safetensors),
            after_import(_SAFETENSORS, self._opened_safetensors),
        ):
            _emulations.append(self)
            try:
                yield
            finally:
                _emulations.pop()

    def notes(self) -> list[Note]:
        """Return a note if a file holds a tensor without its numbers, or was kept for that."""
        if not self._shapes:
            return []
        return [
            Note(
                "saved files have shapes, or zeros in safetensors, instead of numbers that no "
                "device computed; existing files that hold numbers were kept",
                code="no-device-save-skipped",
            )
        ]

    def create(self, saved: SavedTensor) -> Tensor:
        """Return a fake tensor on the device to which the `map_location` of the load sends it."""
        with _modes._disable_current_modes():
            on_cpu = _is_on_cpu(torch.UntypedStorage(0), saved.device, self._location)
            with self._mode:
                tensor: Any = torch.empty_strided(
                    saved.shape,
                    saved.strides,
                    dtype=saved.dtype,
                    device="cpu" if on_cpu else "cuda",
                )
                if saved.is_parameter:
                    return nn.Parameter(tensor, saved.requires_grad)
            self._known.set(tensor, saved.numbers)
        return tensor.requires_grad_(saved.requires_grad)

    def _reduce_function(self) -> Callable[..., Any]:
        """Return the method by which pickle describes a fake tensor."""

        def reduce(tensor: Any, _: object) -> Any:
            self._shapes += 1
            saved = SavedTensor(
                tuple(tensor.shape),
                tensor.stride(),
                tensor.dtype,
                str(tensor.fake_device),
                tensor.requires_grad,
                isinstance(tensor, nn.Parameter),
                self._known.get(tensor),
            )
            return tensor_of_shape, tuple(saved)  # `weights_only` reads no other class

        return reduce

    def _opened_safetensors(self) -> contextlib.AbstractContextManager[None]:
        """Replace the class that opens a file of safetensors, which transformers loads with."""
        opened = resolve(_SAFETENSORS).safe_open

        def open_file(*args: Any, **kwargs: Any) -> Any:
            if "backend" in kwargs:
                kwargs["backend"] = "mmap"  # the other backend reads the numbers
            return _OpenFile(opened(*args, **kwargs), self._without_weights)

        return rebound(_SAFETENSORS, {"safe_open": open_file})

    def _without_weights(self, value: Any) -> Any:
        """Replace large tensors of floating-point numbers, such as weights, by fake ones."""

        def shaped(tensor: Any) -> Any:
            large = type(tensor) is Tensor and tensor.numel() > REAL_ELEMENTS
            if not large or not tensor.is_floating_point():
                return tensor
            with _modes._disable_current_modes():
                return self._mode.from_tensor(tensor)

        return tree_map_only(Tensor, shaped, value)

    def _safetensors(self) -> contextlib.AbstractContextManager[None]:
        """Replace the functions of safetensors, which copy a tensor from or to its address."""
        module = resolve(_SAFETENSORS_TORCH)
        save_file, save, load = module.save_file, module.save, module.load

        def file_of_zeros(
            tensors: dict[str, Tensor], filename: Any, metadata: dict[str, str] | None = None
        ) -> None:
            if not self._counted(tensors):
                save_file(tensors, filename, metadata)
            elif _holds_no_numbers(Path(filename)):
                header, size = _header_of(tensors, metadata)
                with Path(filename).open("wb") as file:
                    file.write(header)
                    # Without blocks on the disk: the zeros of a 70B model take no space.
                    file.truncate(len(header) + size)
                    self._write_numbers(tensors, file)

        def bytes_of_zeros(
            tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
        ) -> bytes:
            if not self._counted(tensors):
                return save(tensors, metadata)
            header, size = _header_of(tensors, metadata)
            file = io.BytesIO(header + bytes(size))
            file.seek(len(header))
            self._write_numbers(tensors, file)
            return file.getvalue()

        def load_shapes(data: bytes) -> dict[str, Tensor]:
            return self._without_weights(load(data))

        functions = {"save_file": file_of_zeros, "save": bytes_of_zeros, "load": load_shapes}
        return rebound(_SAFETENSORS_TORCH, functions)

    def _write_numbers(self, tensors: dict[str, Tensor], file: BinaryIO) -> None:
        """Write the numbers that are known, one tensor after another; pass over the others."""
        for tensor in tensors.values():
            numbers = self._known.get(tensor)
            if numbers is None:
                file.seek(tensor.numel() * tensor.element_size(), os.SEEK_CUR)
                continue
            with _modes._disable_current_modes():
                flat = numbers.detach().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().tobytes())

    def _counted(self, tensors: dict[str, Tensor]) -> int:
        """Return how many of these tensors are fake, and count them for the note.

        Raises:
            RuntimeError, ValueError: safetensors would refuse the tensors.
        """
        fakes = sum(isinstance(tensor, FakeTensor) for tensor in tensors.values())
        if fakes:
            _check_savable(tensors)
        self._shapes += fakes
        return fakes

    def _save_function(self) -> Callable[..., Any]:
        original = torch.save

        def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(file, str | os.PathLike) or _is_replaceable(Path(file)):
                original(value, file, *args, **kwargs)
                return
            saved, before = io.BytesIO(), self._shapes
            original(value, saved, *args, **kwargs)
            if self._shapes == before:
                Path(file).write_bytes(saved.getbuffer())

        return save

    def _load_function(self) -> Callable[..., Any]:
        original = torch.load

        def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            # Under a FakeTensorMode torch.load skips all numbers, also those of a data set, which
            # decide about shapes.
            outer, self._location = self._location, map_location
            try:
                with torch.serialization.safe_globals([tensor_of_shape]):
                    try:
                        return self._load_numbers(original, file, map_location, *args, **kwargs)
                    except _OnlyShapesError:
                        return original(file, map_location, *args, **kwargs)
            finally:
                self._location = outer

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
        return self._without_weights(value)


# In the metadata of a file of safetensors that has zeros for numbers.
_ZEROS = "onerank-without-numbers"


def _check_savable(tensors: dict[str, Tensor]) -> None:
    """Raise the errors of safetensors for tensors that it does not save.

    Its own checks run on the way to the numbers, under names that differ between versions.

    Raises:
        RuntimeError: tensors share memory, as tied weights do.
        ValueError: a tensor is sparse, or not contiguous.
    """
    sparse = [name for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if sparse:
        raise ValueError(f"safetensors saves no sparse tensors: {sparse}")
    for tensor in tensors.values():
        tensor.data_ptr()  # numbers its storage: one without a number has the address 0
    groups: list[set[str]] = resolve(_SAFETENSORS_TORCH)._find_shared_tensors(tensors)
    shared = [sorted(names) for names in groups if len(names) > 1]
    if shared:
        raise RuntimeError(f"Some tensors share memory: {shared}; save_model saves each once")
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"safetensors saves no tensor that is not contiguous: `{name}`")


def _header_of(tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> tuple[bytes, int]:
    """Return the first bytes of a file of safetensors, and how many bytes of numbers follow.

    The format: the header's length in 8 bytes, the header as JSON, the tensors one after another.
    """
    types = {dtype: name for name, dtype in resolve(_SAFETENSORS_TORCH)._TYPES.items()}
    header: dict[str, Any] = {"__metadata__": {**(metadata or {}), _ZEROS: "true"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": types[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)  # safetensors aligns the numbers
    return len(text).to_bytes(8, "little") + text, end


def _holds_no_numbers(path: Path) -> bool:
    """Return whether a file of zeros may replace what a path holds: nothing, or a file of zeros."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return _ZEROS.encode() in file.read(min(length, _READ_BYTES))


def _is_replaceable(path: Path) -> bool:
    """Return whether a file of shapes may replace a path: nothing, or a file of shapes."""
    if not path.exists():
        return True
    if not path.is_file():
        return False  # a device
    if not path.stat().st_size:
        return True
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
        return any(tensor_of_shape.__name__.encode() in archive.read(name) for name in pickles)


def _staged() -> contextlib.AbstractContextManager[None]:
    """Let an asynchronous save copy fake tensors to the host as tensors: they have no memory."""
    owner = f"{_STAGER}.StateDictStager"
    original = resolve(owner)._offload_tensor

    def offload(stager: Any, tensor: Any, memo: Any, non_blocking: bool = False) -> Any:
        if not isinstance(tensor, FakeTensor):
            return original(stager, tensor, memo, non_blocking)
        copied = tensor.detach().to("cpu", non_blocking=non_blocking, copy=True)
        memo[id(tensor)] = copied
        return copied

    return patched(owner, {"_offload_tensor": offload})
