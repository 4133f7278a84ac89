"""The storages of fake tensors, whose sizes are the memory, and the tensors' known numbers."""

import itertools
import sys
import sysconfig
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onerank.capture.fake_tensors import is_computable, is_integral
from onerank.capture.no_device.endless_loops import endless_loop
from onerank.capture.no_device.event_log import EventLog
from onerank.capture.no_device.package_files import ONERANK, TORCH, is_package_file
from onerank.capture.no_device.passing_checks import passing_value
from onerank.ir.errors import CaptureError
from onerank.ir.notes import Note

CHOSEN = "_onerank_chosen"
"""Attribute of a fake tensor of indices that a model chose: a function to call at their use."""

# Largest array that a script gets in place of unknown numbers: a grid of images, predictions.
_MOST_CONVERTED_BYTES = 1 << 29

# Distance of two made-up addresses: above the size of any storage.
_APART = 1 << 40


class Storages:
    """Numbers the storages of tensors, and records allocations and frees on the device."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._numbers = itertools.count(1)
        self._live: dict[int, tuple[int, int, weakref.ref[Any]]] = {}

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, which no other live storage has."""
        storage: Any = tensor.untyped_storage()
        key: int = storage._cdata
        known = self._live.get(key)
        if known is not None:
            return known[0]
        number = next(self._numbers)
        taken = self._log.allocate(number, storage.nbytes()) if tensor.is_cuda else 0
        self._live[key] = number, taken, weakref.ref(storage, lambda _: self._freed(key))
        return number

    def address(self, tensor: Tensor) -> int:
        """Return an address for a tensor's storage: scripts and torch compare addresses."""
        return self.number(tensor) * _APART

    def address_of_storage(self, storage: Any) -> int:
        """Return the address of a storage that tensors were seen with, else 0."""
        known = self._live.get(storage._cdata)
        return known[0] * _APART if known is not None and storage.nbytes() else 0

    def device_of(self, storage: Any) -> torch.device:
        """Return the device of a storage: the GPU if it takes memory there."""
        known = self._live.get(storage._cdata)
        if known is None or not known[1]:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def resize(self, storage: Any, size: int) -> None:
        """Record that a storage is resized, as FSDP frees and allocates gathered parameters."""
        key: int = storage._cdata
        if key not in self._live:
            return
        number, taken, reference = self._live[key]
        if taken:
            self._log.free(number, taken)
        taken = self._log.allocate(number, size) if size else 0
        self._live[key] = number, taken, reference

    def _freed(self, key: int) -> None:
        number, taken, _ = self._live.pop(key)
        if taken:
            self._log.free(number, taken)


class Known:
    """Numbers of small fake tensors, computed on the CPU."""

    # An attribute of the tensor: a weak reference to it would forbid torch to move a parameter.
    ATTRIBUTE = "_onerank_numbers"

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._spoiled: set[int] = set()

    def get(self, tensor: Tensor) -> Tensor | None:
        """Return the numbers of a tensor; None if they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        numbers: Tensor | None = getattr(tensor, self.ATTRIBUTE, None)
        if numbers is None or self._storages.number(tensor) in self._spoiled:
            return None
        return numbers

    def set(self, tensor: Any, value: Any) -> None:
        """Keep the numbers of a fake tensor, or of each of several."""
        if isinstance(tensor, list | tuple):
            for item, number in zip(tensor, value, strict=True):
                self.set(item, number)
        elif (
            isinstance(tensor, FakeTensor)
            and tensor.layout == torch.strided
            and isinstance(value, Tensor)
            and is_computable(value)
            and value.shape == tensor.shape
        ):
            setattr(tensor, self.ATTRIBUTE, value)

    def overwrite(self, tensor: Any, value: Tensor | None) -> None:
        """Keep the numbers of a fake tensor that was written whole; None: they are unknown."""
        vars(tensor).pop(self.ATTRIBUTE, None)
        if value is not None:
            self._spoiled.discard(self._storages.number(tensor))
            self.set(tensor, value)

    def spoil(self, tensor: Tensor) -> None:
        """Forget the numbers of a tensor that is written with unknown ones, and of its views."""
        if hasattr(tensor, self.ATTRIBUTE):
            # By storage, since views of the tensor have numbers of their own.
            self._spoiled.add(self._storages.number(tensor))


class UnknownValues:
    """Stands in for scalars that depend on parameters, and refuses what needs more.

    A bool is False, since scripts check whether a loss is infinite; a check that would raise gets
    the value with which it passes. An integer or a float is 1, since scripts log a loss or divide
    by a norm.
    """

    def __init__(self, script: Path) -> None:
        self._script = str(script)
        self._reads: Counter[tuple[str, str]] = Counter()
        # File and line of the last read, and what it got.
        self._last: tuple[str, int, bool | int | float] | None = None

    def scalar(self, tensor: Tensor) -> bool | int | float:
        """Return the placeholder for the number in a tensor of one element.

        Raises:
            CaptureError: a loop reads it again and again, so it would never end.
        """
        if not is_integral(tensor.dtype):
            value: bool | int | float = 1.0
        elif str(tensor.dtype) == "torch.bool":
            value = _passing_value()
        else:
            value = 1
        self._add_read(value)
        return value

    def numbers(self, tensor: Tensor) -> Tensor:
        """Return the placeholder for the numbers of a tensor that the script converts to NumPy.

        Raises:
            CaptureError: the tensor has many elements, or several integers of more than 8 bits
                that are no choices of a model.
        """
        # Metrics and matchings take arrays of predictions, environments take actions, and a saved
        # image consists of bytes. Other integers are counts, which decide about shapes.
        convertible = tensor.dtype.is_floating_point or tensor.dtype == torch.uint8
        convertible = convertible or hasattr(tensor, CHOSEN)
        convertible = convertible and tensor.nbytes <= _MOST_CONVERTED_BYTES
        if tensor.numel() != 1 and not convertible:
            self.refuse("Tensor.numpy()")
        value = self.scalar(tensor)
        return torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")

    def answer(self) -> bool:
        """Return the placeholder for an answer about numbers, such as that of torch.equal.

        Raises:
            CaptureError: a loop asks again and again, so it would never end.
        """
        value = _passing_value()
        self._add_read(value)
        return value

    def _add_read(self, value: bool | int | float) -> None:
        place = self.place()
        self._reads[place, str(value)] += 1
        self._last = (*_innermost_line(), value)
        loop = endless_loop()
        if loop is None:
            return
        path = _path_in_library(loop.file) or Path(loop.file).name
        raise CaptureError(
            f"{place}: the loop at {path}:{loop.line} read a placeholder {loop.reads} times and "
            "does not end: it waits for a number that no device computed\n"
            "  give it a number of iterations, such as a solver's fixed steps, or capture on a GPU "
            "or a CPU",
            code="no-device-endless-loop",
        )

    def refuse(self, operator: str) -> NoReturn:
        """Refuse an operator whose result has a size that depends on numbers.

        Raises:
            CaptureError: always; it names the script's line.
        """
        raise CaptureError(
            f"{self._places()}: {operator} needs numbers that no device computed\n"
            "  avoid the call in the script, or capture on a GPU or a CPU",
            code="no-device-value",
        )

    def refuse_operator(self, operator: str, reason: str = "") -> NoReturn:
        """Refuse an operator that does not say which shapes its results have.

        Args:
            operator: its name.
            reason: why it does not run on the CPU either.

        Raises:
            CaptureError: always; it names the operator and the script's line.
        """
        remedy = "capture on a GPU or a CPU"
        if not operator.startswith("aten::"):
            remedy = (
                f'register one by torch.library.register_fake("{operator}"), and its FLOPs by '
                "onerank.register_operator_cost"
            )
        raise CaptureError(
            f"{self._places()}: {operator} has no fake implementation, which would "
            f"give the shapes of its results{reason}\n  {remedy}",
            code="no-device-operator",
        )

    def refuse_nested(self, operator: str) -> NoReturn:
        """Refuse an operator on nested tensors of the layout `torch.strided`.

        Raises:
            CaptureError: always; it names the script's line.
        """
        raise CaptureError(
            f"{self._places()}: {operator} takes or returns a nested tensor of the strided layout, "
            "which has no shape without its numbers\n"
            "  pass layout=torch.jagged, or enable_nested_tensor=False to nn.TransformerEncoder; "
            "or capture on a GPU or a CPU",
            code="no-device-nested",
        )

    def refuse_gpu(self, device: torch.device) -> NoReturn:
        """Refuse a tensor on a GPU that the rank does not have.

        Raises:
            CaptureError: always; it names the GPU and the script's line.
        """
        raise CaptureError(
            f"{self._places()}: {device} does not exist, since a rank has one GPU, cuda:0\n"
            "  keep the model on one GPU, and split it by --tp, --pp or torch.distributed",
            code="no-device-second-gpu",
        )

    def refuse_extension(self, function: str) -> NoReturn:
        """Refuse a function of a C++ extension of which nothing says what it computes.

        Raises:
            CaptureError: always; it names the function and the script's line.
        """
        module, _, name = function.partition("::")
        raise CaptureError(
            f"{self._places()}: {name} of the extension {module} runs on a GPU only\n"
            f'  register its results by onerank.register_extension_function("{function}", ...), '
            "and its FLOPs by onerank.register_operator_cost",
            code="no-device-extension",
        )

    def refuse_library(self, name: str) -> NoReturn:
        """Refuse to compile a C++ library that registers operators of torch.

        Raises:
            CaptureError: always; it names the library and the script's line.
        """
        raise CaptureError(
            f"{self._places()}: {name} registers operators by C++ code, which is not compiled\n"
            "  define them by torch.library, with register_fake, and their FLOPs by "
            "onerank.register_operator_cost",
            code="no-device-extension",
        )

    def hint(self) -> str:
        """Return what a script that failed read last; "" if all its numbers were known."""
        if self._last is None:
            return ""
        file, line, value = self._last
        path = _path_in_library(file) or Path(file).name
        return (
            f"perhaps because of a number that no device computed: {path}:{line} read {value} last"
        )

    def notes(self) -> list[Note]:
        """Return a note on the numbers that the script read, if any."""
        if not self._reads:
            return []
        places = ", ".join(f"{place} read {value}" for place, value in sorted(self._reads))
        return [
            Note(
                f"no device computed these numbers, so the script got placeholders: {places}",
                code="no-device-stand-ins",
            )
        ]

    def _places(self) -> str:
        """Return the script's line, and the innermost line of a library that it calls.

        A script that calls a trainer has one line for all that the trainer does.
        """
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._script:
            if path := _path_in_library(frame.f_code.co_filename):
                return f"{self.place()} ({path}:{frame.f_lineno})"
            frame = frame.f_back
        return self.place()

    def place(self) -> str:
        """Return the innermost line of the script that runs, else the script's name."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self._script:
                return f"{Path(self._script).name}:{frame.f_lineno}"
            frame = frame.f_back
        return Path(self._script).name


def _path_in_library(file: str) -> str:
    """Return a file of a library or of a checkout, as Python imports it; "" for other files."""
    root = next((each for each in _import_roots() if file.startswith(each)), None)
    if root is None or root == _STANDARD_LIBRARY:
        return ""
    return "" if is_package_file(file) else file.removeprefix(root)


def _innermost_line() -> tuple[str, int]:
    """Return the file and the line that run, of the script or of a library that it calls."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and is_package_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + "/"


def _import_roots() -> list[str]:
    """Return the directories from which modules are imported, a nested one before its parent."""
    return sorted((f"{each.rstrip('/')}/" for each in sys.path if each), key=len, reverse=True)


# Modules between an operator and the line that reads its result, which check only arguments.
_DISPATCH = (
    ONERANK,
    *(f"{TORCH}{name}" for name in ("_subclasses/", "utils/", "_ops.py", "_tensor.py")),
)


def _passing_value() -> bool:
    """Return the value of a bool with which the check that reads it passes; else False.

    Checks are those of the innermost line outside torch, as DETR's on its boxes, and of torch's
    modules that it calls, as `torch.distributions` checks parameters.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_DISPATCH):
            value = passing_value(frame)
            if value is not None or not is_package_file(path):
                return bool(value)
        frame = frame.f_back
    return False
