"""Operand shapes and dtypes that the profiler records itself (`record_shapes=True`).

Used when there is no execution trace. The profiler records shapes, dtypes and, since torch 2.1,
values of inputs. It omits dtypes of tensors in a list, sizes in lists longer than 30, and results.
Results follow from the inputs of most operators (`results_of`). Dtypes in a list follow from the
kernel's name: PyTorch's list kernels are templates. Concatenation names the element size
(aten/src/ATen/native/cuda/Shape.cu); multi-tensor kernels name the dtype first in their functor's
arguments (MultiTensorApply.cuh).
"""

import ast
import re
from typing import Any

import msgspec
import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import HostTimeline
from onerank.converters.sources.kineto.shape_inference.inputs import UNKNOWN_TYPE, Inputs, Result
from onerank.converters.sources.kineto.shape_inference.operator_rules import results_of

_UNDEFINED = "Tensor(nullptr (uninitialized))"

_NO_SIZES = "Tensor(sizes not recorded)"  # torch < 2.5, or more than 30 tensors in a list

_PLAIN = frozenset({"", "Scalar", "ScalarList"})

_LIST = "TensorList"

_DIGITS_AND_POINT = re.compile(r"^-?\d+(\.\d*)?(e[+-]?\d+)?$")


def use_profiler_shapes(timeline: HostTimeline) -> None:
    """Set `operands` of the host events from the inputs that the profiler recorded."""
    rows, strings = timeline.rows, timeline.strings
    index = np.flatnonzero(rows.operands[:, 1:].all(axis=1))
    keys = np.column_stack([rows.name[index], rows.operands[index]])
    # A step repeats few distinct calls, so each is read once.
    distinct, place = np.unique(keys, axis=0, return_inverse=True)
    codes = np.zeros((len(distinct), 6), dtype=np.int32)
    for number, key in enumerate(distinct.tolist()):
        name, values, shapes, types = (strings[code] for code in key)
        texts = _columns(name, values, shapes, types)
        if texts:
            codes[number] = strings.encode(texts)
    # numpy 2.0 returns the inverse of an axis with two dimensions.
    timeline.operands[:, index] = codes[place.reshape(-1)].T


def _columns(name: str, values: str, shapes: str, types: str) -> tuple[str, ...] | None:
    """Return values, shapes and types of a call's inputs and outputs as texts of columns.

    Outputs are "" if not known. None: the inputs cannot be read.
    """
    try:
        inputs = _inputs(
            msgspec.json.decode(values, type=list[str]) if values else [],
            msgspec.json.decode(shapes, type=list[Any]),
            msgspec.json.decode(types, type=list[str]),
        )
    except (msgspec.DecodeError, ValueError, TypeError):
        return None
    results = results_of(name, inputs)
    outputs = ("", "", "") if results is None else _texts(results)
    return (_json(inputs.values), _json(inputs.shapes), _json(inputs.types), *outputs)


def _texts(results: tuple[Result, ...]) -> tuple[str, str, str]:
    shapes = [[] if result is None else list(result.shape) for result in results]
    types = [_UNDEFINED if result is None else f"Tensor({result.type})" for result in results]
    return _json([None] * len(results)), _json(shapes), _json(types)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _inputs(values: list[str], shapes: list[Any], types: list[str]) -> Inputs:
    if len(shapes) != len(types) or (values and len(values) != len(types)):
        raise ValueError("lists of unequal lengths")
    values = values or [""] * len(types)
    has_sizes = any(shape and kind == _LIST for shape, kind in zip(shapes, types, strict=True))
    rows = [
        _argument(*argument, sizes=has_sizes)
        for argument in zip(values, shapes, types, strict=True)
    ]
    return Inputs(*(tuple(column) for column in zip(*rows, strict=True))) if rows else Inputs()


def _argument(value: str, shape: Any, kind: str, *, sizes: bool) -> tuple[Any, Any, str]:
    """Return value, shape and type of an argument in the form of an execution trace.

    With `sizes` the call's lists record the sizes of their tensors: a list without sizes has no
    tensors.
    """
    if kind == _LIST and not shape:
        return (None, [], "GenericList[]") if sizes else (None, [[]], f"GenericList[{_NO_SIZES}]")
    if kind == _LIST:
        each = [_sizes(sizes_of_tensor) for sizes_of_tensor in shape]
        return None, each, f"GenericList[{','.join([UNKNOWN_TYPE] * len(each))}]"
    if kind not in _PLAIN:
        return None, _sizes(shape), f"Tensor({kind})"
    if kind == "" and not value:
        return None, [], "None"
    read = _value(value)
    return read, [], _type_of(read, kind)


def _sizes(shape: Any) -> list[int]:
    sizes = [int(size) for size in shape]
    if min(sizes, default=0) < 0:
        raise ValueError("a size below 0")
    return sizes


def _value(text: str) -> Any:
    """Return the value of an argument: a number, a boolean or a list of them; None if missing."""
    # Text of the trace is not trusted: `literal_eval` reads literals only, and raises on deep
    # nesting.
    if _DIGITS_AND_POINT.match(text) or text in ("True", "False") or text.startswith("["):
        try:
            read: Any = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        return read
    return None


def _type_of(value: object, kind: str) -> str:
    names = {bool: "Bool", int: "Int", float: "Double", list: "GenericList[]"}
    return next(
        (name for value_type, name in names.items() if type(value) is value_type), kind or "None"
    )
