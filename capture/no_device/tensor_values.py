"""Numbers of fake tensors: those that are known, and stand-ins for those that are not."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onerank.capture.no_device.storages import Storages
from onerank.ir.errors import CaptureError
from onerank.ir.notes import Note

KNOWN_ELEMENTS = 1 << 16
"""Largest tensor on the GPU whose numbers are kept: token ids and masks of a sequence."""


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
            and isinstance(value, Tensor)
            and value.numel() <= KNOWN_ELEMENTS
            and value.shape == tensor.shape
        ):
            setattr(tensor, self.ATTRIBUTE, value)

    def spoil(self, tensor: Tensor) -> None:
        """Forget the numbers of a tensor that is written with unknown ones, and of its views."""
        if hasattr(tensor, self.ATTRIBUTE):
            # By storage, since views of the tensor have numbers of their own.
            self._spoiled.add(self._storages.number(tensor))


class UnknownValues:
    """Stands in for scalars that depend on parameters, and refuses what needs more.

    A bool is False: scripts ask whether a loss is infinite. An integer or a float is 1: scripts log
    a loss or divide by a norm.
    """

    def __init__(self, script: Path) -> None:
        self._script = str(script)
        self._reads: Counter[tuple[str, str]] = Counter()

    def scalar(self, tensor: Tensor) -> bool | int | float:
        """Return the stand-in for the number in a tensor of one element."""
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            value: bool | int | float = 1.0
        elif str(tensor.dtype) == "torch.bool":
            value = False
        else:
            value = 1
        self._reads[self.place(), str(value)] += 1
        return value

    def numbers(self, tensor: Tensor) -> Tensor:
        """Return the stand-in for the numbers of a tensor that the script converts to NumPy.

        Raises:
            CaptureError: the tensor has several elements.
        """
        if tensor.numel() != 1:
            self.refuse("Tensor.numpy()")
        return torch.full(tensor.shape, self.scalar(tensor), dtype=tensor.dtype)

    def answer(self) -> bool:
        """Return the stand-in for the answer to a question about numbers, such as torch.equal."""
        self._reads[self.place(), "False"] += 1
        return False

    def refuse(self, operator: str) -> NoReturn:
        """Refuse an operator whose result has a size that depends on numbers.

        Raises:
            CaptureError: always; it names the script's line.
        """
        raise CaptureError(
            f"{self.place()}: {operator} needs numbers that no device computed\n"
            "  avoid the call in the script, or capture on a GPU or a CPU",
            code="no-device-value",
        )

    def refuse_operator(self, operator: str) -> NoReturn:
        """Refuse an operator that does not say which shapes its results have.

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
            f"{self.place()}: {operator} has no fake implementation, which would give the shapes "
            f"of its results\n  {remedy}",
            code="no-device-operator",
        )

    def notes(self) -> list[Note]:
        """Return a note on the numbers that the script read, if any."""
        if not self._reads:
            return []
        places = ", ".join(f"{place} read {value}" for place, value in sorted(self._reads))
        return [
            Note(
                f"no device computed these numbers, so the script got stand-ins: {places}",
                code="no-device-stand-ins",
            )
        ]

    def place(self) -> str:
        """Return the innermost line of the script that runs, else the script's name."""
        frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame.f_code.co_filename == self._script:
                return f"{Path(self._script).name}:{frame.f_lineno}"
            frame = frame.f_back
        return Path(self._script).name
