"""Tensor data types and the text of operands.

A type has PyTorch's C++ name, the dtype and the size of an element. Columns of shapes, types,
values and strides are lists as text.
"""

import ast
from typing import Any, cast

import msgspec

from onerank.ir.errors import first_line

DTYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "c10::Half": ("float16", 2),
    "c10::BFloat16": ("bfloat16", 2),
    "c10::Float8_e4m3fn": ("float8_e4m3fn", 1),
    "c10::Float8_e5m2": ("float8_e5m2", 1),
    "c10::Float8_e4m3fnuz": ("float8_e4m3fnuz", 1),
    "c10::Float8_e5m2fnuz": ("float8_e5m2fnuz", 1),
    "c10::Float8_e8m0fnu": ("float8_e8m0fnu", 1),
    "c10::Float4_e2m1fn_x2": ("float4_e2m1fn_x2", 1),
    "c10::complex<c10::Half>": ("complex32", 4),
    "c10::complex<float>": ("complex64", 8),
    "c10::complex<double>": ("complex128", 16),
    "long int": ("int64", 8),
    "long": ("int64", 8),
    "int": ("int32", 4),
    "short int": ("int16", 2),
    "short": ("int16", 2),
    "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1),
    "uint16_t": ("uint16", 2),
    "uint32_t": ("uint32", 4),
    "uint64_t": ("uint64", 8),
    "unsigned short": ("uint16", 2),
    "unsigned int": ("uint32", 4),
    "unsigned long": ("uint64", 8),
    "short unsigned int": ("uint16", 2),  # GCC's demangled names on Linux
    "long unsigned int": ("uint64", 8),
    "bool": ("bool", 1),
}
"""C++ name, as an execution trace writes it -> (dtype without `torch.`, bytes of an element)."""

ITEM_BYTES = dict(DTYPES.values())
"""dtype -> bytes of an element."""

TENSOR_TYPES = {dtype: f"Tensor({name})" for name, (dtype, _) in reversed(DTYPES.items())}
"""dtype -> type of a tensor with it, as an execution trace writes it."""


def split_types(text: str) -> list[str]:
    """Split a list of types at the commas that are inside no bracket."""
    # An optimizer's list of 300 tensors is nearly all of the text that is split, and its types have
    # no commas. The loop over characters takes a tenth of the time of re-costing a small step.
    if not any(bracket in text for bracket in "[]<>"):
        pieces = text.split(",")
        if all(piece.count("(") == piece.count(")") for piece in pieces):
            return pieces if text else []
    parts, depth, start = list[str](), 0, 0
    for index, char in enumerate(text):
        if char in "[(<":
            depth += 1
        elif char in "])>":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]] if text else []


# `msgspec.json.decode` with a type reads the type anew in each call, a decoder once; a step of a
# few layers has some 500 distinct lists.
_LIST = msgspec.json.Decoder(list[Any])


def operand_list(text: str) -> list[Any]:
    """Parse a column's list of shapes, types, values or strides; empty text has none.

    Raises:
        ValueError: it is neither a JSON nor a Python list.
    """
    if not text:
        return []
    try:
        return _LIST.decode(text)
    except (msgspec.DecodeError, RecursionError):
        # Chakra's PyTorch converter writes Python's form of the lists, with single quotes.
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise ValueError(f"neither JSON nor a Python list: {first_line(error)}") from None
        if not isinstance(value, list):
            raise ValueError(f"not a list but {type(value).__name__}") from None
        return cast("list[Any]", value)
