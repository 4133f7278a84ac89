"""torch's dispatcher, told to run other kernels for the operators that take a process group."""

import collections
import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from onerank.capture.untraced import untraced
from onerank.ir.errors import CaptureError

_torch: Any = torch  # the dispatcher has no public names and no types in torch
_namedtuple: Any = collections.namedtuple  # of fields that only a schema knows

SPARSE = "the size of a sparse tensor is not known ahead; use dense gradients (sparse=False)"
_UNKNOWN = (
    f"torch {torch.__version__} has this collective and onerank does not know it yet; "
    "use another collective, or torch 2.11 to 2.13"
)

Kernel = Callable[[Any], object]
"""Takes an operator's arguments by the names of its schema, and returns what that promises."""
Refusal = Callable[[str, str], CaptureError]
"""The error for an operator, of (its name, why it is refused)."""


def override(kernels: Mapping[str, Kernel], refusal: Refusal, undo: contextlib.ExitStack) -> None:
    """Override every `c10d` operator that takes a process group.

    Args:
        kernels: an operator's name, without `c10d::` -> what it runs on dense tensors.
        refusal: for operators that are not among them, and for sparse tensors.
        undo: puts torch's own back.
    """
    library: Any = _torch.library.Library("c10d", "IMPL")
    undo.callback(library._destroy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel")
        for name, schema in _group_operators():
            known = kernels.get(name)
            kernel = _by_name(schema, known) if known else _refusing(refusal, name, _UNKNOWN)
            for key in ("CPU", "CUDA", "Meta"):
                library.impl(name, kernel, key, allow_override=True)
            for key in ("SparseCPU", "SparseCUDA"):
                library.impl(name, _refusing(refusal, name, SPARSE), key, allow_override=True)


def _refusing(refusal: Refusal, operator: str, why: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        raise refusal(operator, why)

    return refuse


def _group_operators() -> Iterator[tuple[str, Any]]:
    """Every operator of torch's that takes a process group, known to us or not."""
    for name in _torch._C._dispatch_get_all_op_names():
        if name.startswith("c10d::"):
            schema = _torch._C._get_schema(*name.partition(".")[::2])
            if any("ProcessGroup" in str(argument.type) for argument in schema.arguments):
                yield name.removeprefix("c10d::"), schema


def _by_name(schema: Any, kernel: Kernel) -> Callable[..., object]:
    optional = [a for a in schema.arguments if a.has_default_value()]  # the last ones
    arguments = _namedtuple(
        "Arguments",
        [argument.name for argument in schema.arguments],
        defaults=[argument.default_value for argument in optional],
    )
    return untraced(lambda *args: kernel(arguments(*args)))
