"""Operand shapes and dtypes that the profiler itself records.

Types of the tensors in a list, which the profiler does not record: told by the kernel's name.

PyTorch's kernels on lists of tensors are templates: what concatenates has the bytes of an element
(aten/src/ATen/native/cuda/Shape.cu), what works on many tensors at once (MultiTensorApply.cuh) has
the type that its functor's arguments begin with.

Operands as the profiler records them itself (`record_shapes=True`), without an execution trace.

It writes shapes, types and, since torch 2.1, values of the inputs. What it leaves out: the types of
tensors in a list (see list_types.py), sizes of those in a list of more than 30, and the results,
whose shapes follow from the inputs of most operators.
"""

import ast
import re
from typing import Any

import msgspec
import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import HostTimeline
from onerank.converters.sources.kineto.read.trace_columns import I32
from onerank.converters.sources.kineto.shape_inference import results_of
from onerank.converters.sources.kineto.shape_inference.inputs import UNTOLD, Inputs, Result
from onerank.ir import StringTable
from onerank.ir.dtypes import DTYPES, TENSOR_TYPES, split_types

_BYTES = re.compile(r"CatArrayBatchedCopy\w*<[^<]*OpaqueType<(\d+)")

_OF_BYTES = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}

_MANY = re.compile(r"multi_tensor_apply_kernel<.*?Metadata<(\d+)>.*?(\w+)Functor<(.*)")

_STEPS = TENSOR_TYPES["float32"]  # counts of steps, which fused optimizers take along


def types_by_kernels(names: I32, types: list[I32], strings: StringTable) -> list[I32]:
    """Return types in which those of tensors in lists are filled in where the kernel tells them.

    A concatenation copies bytes, whatever they mean: its tensors are told as unsigned integers.

    Args:
        names: codes of the kernels' names, int32[n].
        types: codes of the JSON texts of the types of inputs, then of outputs, each int32[n].
        strings: the texts.
    """
    told = [UNTOLD in text for text in strings.values]
    rows = np.flatnonzero(np.array(told, dtype=np.bool_)[types[0]])
    if not len(rows):
        return types
    keys = np.column_stack([names[rows], *(column[rows] for column in types)])
    distinct, place = np.unique(keys, axis=0, return_inverse=True)
    made = distinct[:, 1:].astype(np.int32)
    for number, key in enumerate(distinct.tolist()):
        name, *texts = (strings[code] for code in key)
        if kinds := _kinds(name):
            made[number] = strings.encode([_filled(text, kinds) for text in texts])
    filled = [column.copy() for column in types]
    for at, column in enumerate(filled):
        column[rows] = made[place.reshape(-1), at]
    return filled


def _kinds(kernel: str) -> tuple[str, ...]:
    """Return the type of the tensors of each list, the last standing for more; () if untold."""
    if found := _BYTES.search(kernel):
        dtype = _OF_BYTES.get(int(found[1]))
        return (TENSOR_TYPES[dtype],) if dtype else ()
    found = _MANY.search(kernel)
    if found is None:
        return ()
    arguments = [_type(text) for text in split_types(found[3])[:2]]
    if not arguments[0]:
        return ()
    if found[2] == "Copy":  # of another type than it copies from
        return tuple(arguments) if all(arguments) else ()
    lists = int(found[1])
    return (arguments[0],) * lists + ((_STEPS,) if found[2].startswith("Fused") else ())


def _type(argument: str) -> str:
    name = argument.strip()
    return TENSOR_TYPES[DTYPES[name][0]] if name in DTYPES else ""


def _filled(text: str, kinds: tuple[str, ...]) -> str:
    """Return a JSON list of types with those of the tensors in lists, and of results."""
    if not text:
        return text
    made, number = list[str](), 0
    for kind in msgspec.json.decode(text, type=list[str]):
        made.append(kind.replace(UNTOLD, kinds[min(number, len(kinds) - 1)]))
        number += kind.startswith("GenericList[") and UNTOLD in kind
    return msgspec.json.encode(made).decode()


_UNDEFINED = "Tensor(nullptr (uninitialized))"

_NO_SIZES = "Tensor(sizes not recorded)"  # torch < 2.5, or more than 30 tensors in a list

_PLAIN = frozenset({"", "Scalar", "ScalarList"})

_LIST = "TensorList"

_DIGITS_AND_POINT = re.compile(r"^-?\d+\.?\d*(e[+-]?\d+)?$")


def use_profiler_shapes(timeline: HostTimeline) -> None:
    """Set `operands` of the host events from what the profiler recorded of their inputs."""
    rows, strings = timeline.rows, timeline.strings
    index = np.flatnonzero(rows.operands[:, 1:].all(axis=1))
    keys = np.column_stack([rows.name[index], rows.operands[index]])
    distinct, place = np.unique(keys, axis=0, return_inverse=True)
    codes = np.zeros((len(distinct), 6), dtype=np.int32)
    for number, key in enumerate(distinct.tolist()):
        name, values, shapes, types = (strings[code] for code in key)
        texts = _columns(name, values, shapes, types)
        if texts:
            codes[number] = strings.encode(texts)
    timeline.operands[:, index] = codes[place.reshape(-1)].T


def _columns(name: str, values: str, shapes: str, types: str) -> tuple[str, ...] | None:
    """Return values, shapes and types of a call's inputs and of its outputs as columns' texts.

    Outputs are "" where nothing tells them. None: the inputs cannot be read.
    """
    try:
        given = _inputs(
            msgspec.json.decode(values, type=list[str]) if values else [],
            msgspec.json.decode(shapes, type=list[Any]),
            msgspec.json.decode(types, type=list[str]),
        )
    except (msgspec.DecodeError, ValueError, TypeError):
        return None
    results = results_of(name, given)
    made = ("", "", "") if results is None else _texts(results)
    return (_json(given.values), _json(given.shapes), _json(given.types), *made)


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
    told = any(shape and kind == _LIST for shape, kind in zip(shapes, types, strict=True))
    rows = [_argument(*one, sizes=told) for one in zip(values, shapes, types, strict=True)]
    return Inputs(*(tuple(column) for column in zip(*rows, strict=True))) if rows else Inputs()


def _argument(value: str, shape: Any, kind: str, *, sizes: bool) -> tuple[Any, Any, str]:
    """Return value, shape and type of an argument as an execution trace would have them.

    With `sizes` the call's lists tell the sizes of their tensors: one without has no tensors.
    """
    if kind == _LIST and not shape:
        return (None, [], "GenericList[]") if sizes else (None, [[]], f"GenericList[{_NO_SIZES}]")
    if kind == _LIST:
        each = [_sizes(one) for one in shape]
        return None, each, f"GenericList[{','.join([UNTOLD] * len(each))}]"
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
    """Return the value of an argument: a number, a truth value, or a list of them; None: untold."""
    if _DIGITS_AND_POINT.match(text) or text in ("True", "False") or text.startswith("["):
        try:
            read: Any = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        return read
    return None


def _type_of(value: object, kind: str) -> str:
    names = {bool: "Bool", int: "Int", float: "Double", list: "GenericList[]"}
    return next((name for one, name in names.items() if type(value) is one), kind or "None")
