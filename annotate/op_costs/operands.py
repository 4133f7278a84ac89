"""Operands of an operator, parsed from its shape, dtype and value columns.

Values identify a tensor by its ids, which differ between calls of the same operator, although the
work of a call depends only on whether two arguments are the same tensor. `without_tensors` removes
the ids, which leaves few distinct calls in a large graph.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, Self, cast

import msgspec
import numpy as np
import polars as pl

from onerank.ir import Graph
from onerank.ir.arrays import I32, I64
from onerank.ir.dtypes import DTYPES, operand_list, split_types
from onerank.ir.errors import AnnotateError

# What an execution trace writes for an undefined tensor, such as an absent bias: no operand.
_UNDEFINED = "nullptr (uninitialized)"


DENSE = "dense"
"""In the place of strides: all operands are contiguous."""


class UnknownDtypeError(Exception):
    """A tensor's dtype is unknown; callers count its operator as unknown."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and dtype of a tensor operand.

    Attributes:
        shape: sizes.
        dtype: as torch names it.
        item_bytes: bytes of an element.
        recorded_strides: strides in elements; () if the graph has none.
    """

    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    recorded_strides: tuple[int, ...] = field(default=(), compare=False)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements; those of a contiguous tensor if the graph has none."""
        if self.recorded_strides:
            return self.recorded_strides
        return tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after another in memory, the last axis fastest."""
        dense = replace(self, recorded_strides=()).strides
        of_axes = zip(self.shape, self.strides, dense, strict=True)
        return all(size == 1 or stride == step for size, stride, step in of_axes)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, each once, whatever the strides."""
        return self.numel * self.item_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes in memory: an expanded dimension, whose stride is 0, is stored once."""
        sizes = zip(self.shape, self.strides, strict=True)
        return prod(size for size, step in sizes if step or not size) * self.item_bytes


Operand = tuple[Tensor, ...] | None
"""Tensors of one argument: one for a tensor, several for a list, None for anything else."""


def flatten(operands: Sequence[Operand]) -> list[Tensor]:
    """Return the tensors of all arguments, with lists flattened."""
    return [tensor for operand in operands for tensor in operand or ()]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator, reduced to the arguments that its cost depends on.

    Attributes:
        op: name without namespace and overload.
        inputs: operands by position in the schema.
        outputs: results by position.
        values: input values by position; empty unless requested.
    """

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    values: tuple[Any, ...] = ()

    @classmethod
    def parse(
        cls,
        op: str,
        inputs: tuple[str, str],
        outputs: tuple[str, str],
        values: str = "",
        strides: str = "",
    ) -> Self:
        """Parse the columns' text; `inputs` and `outputs` are (shapes, types).

        Strides are those of the inputs; `DENSE` if all are contiguous. Strides of another form than
        the shapes are ignored.

        Raises:
            UnknownDtypeError: a tensor's dtype is unknown.
            AnnotateError: the text is not lists of shapes and types of equal length.
        """
        try:
            decoded = operand_list(values)
            operands = _operands(*inputs)
            if strides == DENSE:
                operands = tuple(map(_dense, operands))
            elif strides:
                operands = _with_strides(operands, operand_list(strides))
            return cls(op, operands, _operands(*outputs), tuple(decoded))
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise AnnotateError(
                f"{op}: cannot read its operands ({error}); expected JSON lists of shapes and "
                f"types of equal length, got {inputs[0][:_SHOWN]} and {inputs[1][:_SHOWN]}\n"
                "  convert the trace again",
                code="operands-unreadable",
            ) from error

    def tensor(self, position: int) -> Tensor | None:
        """Return the tensor argument at `position`; None if it is absent or not a tensor."""
        operand = self.inputs[position] if position < len(self.inputs) else None
        return operand[0] if operand else None

    def output(self, position: int = 0) -> Tensor | None:
        """Return the result at `position`, or None."""
        result = self.outputs[position] if position < len(self.outputs) else None
        return result[0] if result else None

    def value(self, position: int) -> Any:
        """Return the input value at `position`; None if values are not known."""
        return self.values[position] if position < len(self.values) else None

    def list_bytes(self, *positions: int) -> int:
        """Return the bytes of the input tensors at `positions`."""
        chosen = (self.inputs[p] for p in positions if p < len(self.inputs))
        return sum(tensor.nbytes for operand in chosen for tensor in operand or ())

    def numel(self, position: int) -> int:
        """Return the elements of the input tensors at `position`."""
        operand = self.inputs[position] if position < len(self.inputs) else None
        return sum(tensor.numel for tensor in operand or ())

    @property
    def input_bytes(self) -> int:
        """Bytes of all input tensors, each argument once."""
        return self.list_bytes(*range(len(self.inputs)))

    @property
    def output_bytes(self) -> int:
        """Bytes of all results."""
        return sum(tensor.nbytes for operand in self.outputs for tensor in operand or ())

    @property
    def output_numel(self) -> int:
        """Elements of all results."""
        return sum(tensor.numel for operand in self.outputs for tensor in operand or ())

    @property
    def has_tensors(self) -> bool:
        """Whether any operand is a tensor."""
        return any(operand for operand in (*self.inputs, *self.outputs))


# Several graphs of a capture have the same operands: at other depths, or with other replicas.
@functools.lru_cache(maxsize=1 << 14)
def _operands(shapes: str, types: str) -> tuple[Operand, ...]:
    pairs = zip(operand_list(shapes), operand_list(types), strict=True)
    return tuple(_tensors(kind, shape) for shape, kind in pairs)


def _dense(operand: Operand) -> Operand:
    """Return an operand whose tensors are contiguous."""
    return operand and tuple(replace(each, recorded_strides=each.strides) for each in operand)


def _with_strides(operands: tuple[Operand, ...], strides: list[Any]) -> tuple[Operand, ...]:
    """Return the operands with the strides of their tensors."""
    if len(strides) != len(operands):
        return operands
    return tuple(map(_strided, operands, strides))


def _strided(operand: Operand, given: Any) -> Operand:
    """Return an operand with its strides: a list of them, or of lists for a list of tensors."""
    if not operand:
        return operand
    if len(operand) == 1 and _are_strides(given, operand[0]):
        return (replace(operand[0], recorded_strides=tuple(given)),)
    if not isinstance(given, list) or len(given) != len(operand):
        return operand
    of_each = zip(operand, cast("list[Any]", given), strict=True)
    return tuple(
        replace(tensor, recorded_strides=tuple(listed)) if _are_strides(listed, tensor) else tensor
        for tensor, listed in of_each
    )


def _are_strides(given: Any, tensor: Tensor) -> bool:
    """Return whether a value is a stride for each dimension of a tensor."""
    if not isinstance(given, list) or len(given) != len(tensor.shape):
        return False
    return all(isinstance(stride, int) and stride >= 0 for stride in given)


# Characters of a column that an error shows; a list of 300 tensors has 20,000.
_SHOWN = 60


def _tensors(kind: Any, shape: Any) -> Operand:
    """Parse one argument of type `Tensor(float)`, `GenericList[Tensor(float),None]` or `Int`."""
    if not isinstance(kind, str):
        raise TypeError(f"the type {kind} is not text")
    if kind.startswith("GenericList["):
        inner = split_types(kind[len("GenericList[") : -1])
        if "Tensor(" not in kind:
            return None
        parts = [
            _tensors(element_type, part) for element_type, part in zip(inner, shape, strict=True)
        ]
        return tuple(tensor for part in parts for tensor in part or ())
    if not kind.startswith("Tensor(") or kind == f"Tensor({_UNDEFINED})":
        return None
    name = kind[len("Tensor(") : -1]
    if name not in DTYPES:
        raise UnknownDtypeError(name)
    sizes = tuple(int(size) for size in shape)
    if min(sizes, default=0) < 0:
        raise ValueError(f"a size of {min(sizes)}")
    return (Tensor(sizes, *DTYPES[name]),)


def with_shapes(shapes: str, types: str, new: Sequence[tuple[int, ...]]) -> str:
    """Return a shape column's text with new shapes of its tensors; `new` is flat over lists."""
    shape_list, type_list = operand_list(shapes), operand_list(types)
    remaining = iter(new)
    replaced = [
        _replaced(*argument, remaining) for argument in zip(type_list, shape_list, strict=True)
    ]
    return msgspec.json.encode(replaced).decode() if shapes else ""


def _replaced(kind: str, shape: Any, new: Iterator[tuple[int, ...]]) -> Any:
    if kind.startswith("GenericList[") and "Tensor(" in kind:
        inner = split_types(kind[len("GenericList[") : -1])
        return [
            _replaced(element_type, part, new)
            for element_type, part in zip(inner, shape, strict=True)
        ]
    if not kind.startswith("Tensor(") or kind == f"Tensor({_UNDEFINED})":
        return shape
    return next(new)


class Piece(NamedTuple):
    """Elements of one tensor of an operator's lists of tensors.

    Attributes:
        tensor: position in the lists.
        begin: first element.
        end: element after the last.
    """

    tensor: int
    begin: int
    end: int


def tensor_lists(inputs: Sequence[Operand]) -> list[tuple[Tensor, ...]]:
    """Return the lists of tensors that a kernel for lists addresses, the in-place ones first."""
    lists = [operand for operand in inputs if operand and len(operand) > 1]
    if not lists:
        lists = [operand for operand in inputs if operand][:1]
    first = [tensor.shape for tensor in lists[0]] if lists else []
    # The step counts of fused optimizers are a list of scalars, passed in another way.
    return [operand for operand in lists if [tensor.shape for tensor in operand] == first]


def operands_of_launches(
    texts: Mapping[str, str], launches: Sequence[Sequence[Piece]], *, in_lists: bool
) -> dict[str, list[str]]:
    """Return the operand columns of launches that each take pieces of an operator's lists.

    Every list as long as the operator's first list of tensors is divided. A part of a tensor is a
    flat view at its offset. A step count or a number belongs to each launch that takes a part of
    its tensor. Other arguments are the operator's, and so is a column that cannot be read.

    Args:
        texts: the operator's operand columns by their names in `Nodes`.
        launches: the pieces of each launch.
        in_lists: whether a launch takes lists; otherwise it takes the tensors of its one piece.

    Returns:
        The texts of all launches for each divided column.
    """
    first, *_ = tensor_lists(_operands(texts["input_shapes"], texts["input_types"]))
    columns: dict[str, list[str]] = {}
    for side in ("input", "output"):
        types = operand_list(texts[f"{side}_types"])
        shapes = operand_list(texts[f"{side}_shapes"])
        listed = [_listed_types(kind) for kind in types]
        divided = [len(kinds) == len(first) for kinds in listed]
        for column in ("shapes", "types", "values", "strides"):
            text = texts.get(f"{side}_{column}", "")
            arguments = _arguments(text, len(types))
            if not arguments:
                continue
            for place in np.flatnonzero(divided).tolist():
                items = listed[place] if column == "types" else arguments[place]
                if isinstance(items, list) and len(cast("list[Any]", items)) == len(first):
                    arguments[place] = _List(column, cast("list[Any]", items), shapes[place])
            columns[f"{side}_{column}"] = [
                _of_pieces(arguments, first, pieces, in_lists) for pieces in launches
            ]
    return columns


class _List(NamedTuple):
    """An argument to be divided: one column's items, and the shapes of its tensors."""

    column: str
    items: list[Any]
    shapes: list[Any]

    def item(self, piece: Piece, of: Tensor) -> Any:
        """Return the item of a piece of `of`, a tensor of the operator's first list."""
        item: Any = self.items[piece.tensor]
        is_whole = piece.end - piece.begin == of.numel
        if is_whole or tuple(self.shapes[piece.tensor]) != of.shape:
            return item
        if self.column == "shapes":
            return [piece.end - piece.begin]
        if self.column == "strides":
            return [1]
        if self.column != "values" or not _is_record(item):
            return item
        tensor, storage, offset, _, *rest = item
        return [tensor, storage, offset + piece.begin, piece.end - piece.begin, *rest]


def _is_record(item: Any) -> bool:
    """Return whether a value is a recorded tensor."""
    return isinstance(item, list) and len(cast("list[Any]", item)) == _RECORD


# Fields of a recorded tensor, `[id, storage, offset, elements, bytes, device]`.
_RECORD = 6


def _of_pieces(
    arguments: Sequence[Any], first: Sequence[Tensor], pieces: Sequence[Piece], in_lists: bool
) -> str:
    """Return a column's text for a launch."""
    chosen: list[Any] = []
    for argument in arguments:
        if not isinstance(argument, _List):
            chosen.append(argument)
            continue
        items = [argument.item(piece, first[piece.tensor]) for piece in pieces]
        if not in_lists:
            chosen.append(items[0])
        elif argument.column == "types":
            chosen.append(f"GenericList[{','.join(items)}]")
        else:
            chosen.append(items)
    return msgspec.json.encode(chosen).decode()


def _listed_types(kind: str) -> list[str]:
    """Return the types in a list; [] for another argument."""
    is_list = kind.startswith("GenericList[")
    return split_types(kind[len("GenericList[") : -1]) if is_list else []


def _arguments(text: str, count: int) -> list[Any] | None:
    """Return a column's arguments; None if it is unreadable or of another number of arguments."""
    try:
        arguments = operand_list(text)
    except ValueError:
        # Only columns that the operator's cost does not depend on get here unread.
        return None
    return arguments if len(arguments) == count else None


def numbers_of(value: Any) -> list[int | float]:
    """Return a value that is a list of numbers; [] for any other."""
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return items if all(isinstance(item, int | float) for item in items) else []


# Ids and offsets of tensors differ between calls of equal cost. Without tensors, their values are
# equal, and the cost is computed once.
_TENSOR = r'\[\d+,\d+,\d+,\d+,\d+,"[^"]*"\]'


def without_tensors(graph: Graph, codes: I32) -> tuple[I64, list[str]]:
    """Return (positions in texts, texts) of input values with null for every tensor.

    Values that contain a tensor twice are unchanged, since an operand passed twice is read once.

    Args:
        graph: graph whose strings the codes index.
        codes: of input values, int32[n]. The first of the texts is "" and unused.
    """
    distinct, place = np.unique(codes, return_inverse=True)
    table = pl.DataFrame({"values": graph.strings.decode(distinct)}, schema={"values": pl.String})
    tensors = pl.col("values").str.extract_all(_TENSOR)
    once = tensors.list.n_unique() == tensors.list.len()
    table = table.select(
        text=pl.when(once)
        .then(pl.col("values").str.replace_all(_TENSOR, "null"))
        .otherwise("values")
    )
    texts = table.unique(maintain_order=True).with_row_index("code", offset=1)
    # By default a polars join may reorder rows, and `place` indexes these rows.
    codes_of = table.join(texts, on="text", how="left", maintain_order="left")["code"]
    return codes_of.to_numpy().astype(np.int64)[place], ["", *texts["text"].to_list()]


def allowing_tf32(x: Tensor) -> Tensor:
    """Return the operand with the dtype that cuDNN multiplies in."""
    # PyTorch allows TF32 for cuDNN by default (`torch.backends.cudnn.allow_tf32`), not for cuBLAS.
    return Tensor(x.shape, "tfloat32", x.item_bytes) if x.dtype == "float32" else x
