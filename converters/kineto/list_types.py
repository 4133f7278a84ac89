"""Types of the tensors in a list, which the profiler does not record: told by the kernel's name.

PyTorch's kernels on lists of tensors are templates: what concatenates has the bytes of an element
(aten/src/ATen/native/cuda/Shape.cu), what works on many tensors at once (MultiTensorApply.cuh) has
the type that its functor's arguments begin with.
"""

import re

import msgspec
import numpy as np

from onerank.converters.kineto.columns import I32
from onerank.converters.kineto.results.operands import UNTOLD
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
