"""Types of results: how PyTorch promotes those of the operands (torch.result_type)."""

from onerank.converters.kineto.results.operands import Inputs, Tensor
from onerank.ir.dtypes import DTYPES, TENSOR_TYPES

BY_CODE = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    8: "complex32",
    9: "complex64",
    10: "complex128",
    11: "bool",
    15: "bfloat16",
    23: "float8_e5m2",
    24: "float8_e4m3fn",
    25: "float8_e5m2fnuz",
    26: "float8_e4m3fnuz",
}
"""Number of a ScalarType, as c10/core/ScalarType.h counts them -> dtype."""

_RANKS = ("bool", "int", "float", "complex")


def named(dtype: str) -> str:
    """Return the C++ name of a dtype."""
    return TENSOR_TYPES[dtype][len("Tensor(") : -1]


def asked(given: Inputs, position: int, otherwise: str) -> str:
    """Return the type that the number at `position` asks for."""
    code = given.value(position)
    return named(BY_CODE[code]) if type(code) is int and code in BY_CODE else otherwise


def kind(name: str) -> int:
    """Return the place of a type among bool, integers, floating point and complex."""
    dtype = DTYPES[name][0] if name in DTYPES else name
    sort = "int" if dtype.startswith("uint") else dtype.rstrip("0123456789")
    return _RANKS.index(sort) if sort in _RANKS else _RANKS.index("float")


def promoted(tensors: list[Tensor], numbers: list[object] | None = None) -> str:
    """Return the type of an operation on tensors and Python numbers.

    Tensors without dimensions and numbers count only where they are of a higher kind.
    """
    whole = [one.type for one in tensors if one.shape]
    single = [one.type for one in tensors if not one.shape]
    best = _widest(whole or single)
    least = kind(best)
    if whole and single and kind(_widest(single)) > least:
        best = _widest(single)
        best = "float" if best == "double" else best  # a Python number's, most often
        least = kind(best)
    for number in numbers or ():
        if isinstance(number, float) and least < _RANKS.index("float"):
            return "float"
        if type(number) is int and least < _RANKS.index("int"):
            best, least = named("int64"), _RANKS.index("int")
    return best


def _widest(names: list[str]) -> str:
    kinds = [kind(name) for name in names]
    highest = [name for name, one in zip(names, kinds, strict=True) if one == max(kinds)]
    sizes = [DTYPES[name][1] if name in DTYPES else 0 for name in highest]
    widest = [name for name, size in zip(highest, sizes, strict=True) if size == max(sizes)]
    halves = {"c10::Half", "c10::BFloat16"}
    return "float" if halves <= set(widest) else widest[0]
