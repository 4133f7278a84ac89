"""Read an ONNX model: nodes in order, weights, and the open sizes of its inputs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from onerank.converters.sources.onnx.control_flow import inline_control_flow
from onerank.ir.errors import OnnxError

ELEMENT_TYPES = {
    "FLOAT": ("float", 4),
    "DOUBLE": ("double", 8),
    "FLOAT16": ("c10::Half", 2),
    "BFLOAT16": ("c10::BFloat16", 2),
    "FLOAT8E4M3FN": ("c10::Float8_e4m3fn", 1),
    "FLOAT8E4M3FNUZ": ("c10::Float8_e4m3fnuz", 1),
    "FLOAT8E5M2": ("c10::Float8_e5m2", 1),
    "FLOAT8E5M2FNUZ": ("c10::Float8_e5m2fnuz", 1),
    "COMPLEX64": ("c10::complex<float>", 8),
    "COMPLEX128": ("c10::complex<double>", 16),
    "INT64": ("long int", 8),
    "INT32": ("int", 4),
    "INT16": ("short int", 2),
    "INT8": ("signed char", 1),
    "UINT8": ("unsigned char", 1),
    "UINT16": ("uint16_t", 2),
    "UINT32": ("uint32_t", 4),
    "UINT64": ("uint64_t", 8),
    "BOOL": ("bool", 1),
}
"""ONNX element type -> (PyTorch's C++ name for it, bytes). Strings and 4-bit types have none."""

# protobuf cannot parse a message of 2 GiB or more.
_MAX_FILE_BYTES = (1 << 31) - 1
# Largest number that a column of a graph and an int64 attribute of Chakra hold.
_MAX_INT64 = (1 << 63) - 1
# Largest number of nodes that inlining a model's functions may give.
_MAX_NODES = 1_000_000
_FLOATING = ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "FLOAT8")


class SizeError(ValueError):
    """A size is negative or exceeds 64 bits."""


def checked_size(size: int, what: str) -> int:
    """Return a size, a number of elements or of bytes.

    Sizes are Python integers of any length until they reach a column of 64 bits.

    Raises:
        SizeError: it is negative, or 2^63 or more.
    """
    if not 0 <= size <= _MAX_INT64:
        raise SizeError(f"{what} is {size}; expected 0 to 2^63 - 1 = {_MAX_INT64}")
    return size


@dataclass(frozen=True, slots=True)
class OnnxTensor:
    """Shape and ONNX element type of a value.

    Raises:
        SizeError: an axis, the number of elements or of bytes does not fit into 64 bits.
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        for axis, size in enumerate(self.shape):
            checked_size(size, f"axis {axis} of a tensor of shape {list(self.shape)}")
        # An axis of 0 hides the product of the others, which rules fold into one axis.
        axes = prod(size or 1 for size in self.shape)
        checked_size(axes, f"the product of the axes of a tensor of shape {list(self.shape)}")
        checked_size(self.nbytes, f"the bytes of a {self.dtype} tensor of {list(self.shape)}")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; 0 for a type without a fixed size."""
        return self.numel * ELEMENT_TYPES.get(self.dtype, ("", 0))[1]

    @property
    def floating(self) -> bool:
        """Whether gradients flow through it."""
        return self.dtype.startswith(_FLOATING)

    def like(self, *shape: int) -> "OnnxTensor":
        """Return a tensor of another shape and the same type."""
        return OnnxTensor(shape, self.dtype)


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A model whose input sizes are all bound.

    Attributes:
        path: file it was read from.
        proto: the model with local functions and constant control flow inlined.
        nodes: its nodes, each after those it depends on.
        inputs: name -> shape and type of the inputs that are not weights.
        weights: name -> shape and type of the initializers.
        bound: symbol -> size.
    """

    path: Path
    proto: Any
    nodes: tuple[Any, ...]
    inputs: dict[str, OnnxTensor]
    weights: dict[str, OnnxTensor]
    bound: dict[str, int]


def load(path: Path, sizes: Mapping[str, int], batch: int | None, seq: int | None) -> OnnxModel:
    """Read a model and bind the open sizes of its inputs.

    Args:
        path: `.onnx` file; weights in external files need not be there.
        sizes: symbol -> size; an unnamed open size is called `INPUT.AXIS`.
        batch: size for the symbols in axis 0 of the inputs.
        seq: size for the symbols in axis 1 of the inputs with two axes, and for those with
            `seq` in their name.

    Raises:
        OnnxError: the file is no readable model, a size is open or below 1, the model lacks a
            given symbol, or its nodes are out of order.
    """
    proto = _read(path)
    weights = _weights(path, proto)
    model_inputs = [value for value in proto.graph.input if value.name not in weights]
    bound = _bind(path, model_inputs, sizes, batch, seq)
    inputs = {value.name: tensor for value in model_inputs if (tensor := shape_of(value, bound))}
    stated = {value.name: shape_of(value, bound) for value in proto.graph.value_info}
    inline_control_flow(
        path, proto, lambda name, axis: _length((inputs | weights | stated).get(name), axis)
    )
    weights = _weights(path, proto)
    # Inlined bodies have added nodes and weights.
    nodes = tuple(proto.graph.node)
    # Shape inference and the lowering visit nodes once, in this order.
    _check_order(path, nodes, {value.name for value in model_inputs} | set(weights))
    return OnnxModel(path, proto, nodes, inputs, weights, bound)


def _weights(path: Path, proto: Any) -> dict[str, OnnxTensor]:
    weights = {tensor.name: _of_initializer(tensor) for tensor in proto.graph.initializer}
    for sparse in proto.graph.sparse_initializer:
        values = sparse.values
        _check_type(path, values.name, tuple(sparse.dims), values.data_type)
        weights[values.name] = OnnxTensor(tuple(sparse.dims), _type_name(values.data_type))
    return weights


def _length(tensor: OnnxTensor | None, axis: int) -> int | None:
    return tensor.shape[axis] if tensor is not None else None


def _read(path: Path) -> Any:
    try:
        from onnx import load_model_from_string
        from onnx.inliner import inline_local_functions
    except ModuleNotFoundError as error:
        raise OnnxError(
            f"reading {path} needs onnx\n  pip install 'onerank[onnx]'", code="onnx-not-installed"
        ) from error
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise OnnxError(
            f"{path}: {size} bytes exceed protobuf's limit of {_MAX_FILE_BYTES}\n"
            "  save the model with its weights in external files",
            code="onnx-file-too-large",
        )
    data = path.read_bytes()
    try:
        proto = load_model_from_string(data)
    except Exception as error:
        raise OnnxError(
            f"{path}: no ONNX model ({error}); expected the binary form that exporters write",
            code="onnx-unreadable",
        ) from error
    if not proto.graph.node and not proto.graph.output:
        raise OnnxError(
            f"{path}: the graph is empty; expected an ONNX model with nodes", code="onnx-no-graph"
        )
    if not proto.opset_import:
        raise OnnxError(
            f"{path}: names no operator set, so its operators are undefined", code="onnx-no-opset"
        )
    _check_names(path, proto)
    if proto.functions:
        _check_expansion(path, proto)
        # After the check: the inliner itself has no limit.
        proto = inline_local_functions(proto)
    return proto


def _check_expansion(path: Path, proto: Any) -> None:
    """Check that inlining the functions ends, and with how many nodes.

    A function may call others: a file of a kilobyte can describe 2^40 nodes.
    """
    functions = {(function.domain, function.name): function for function in proto.functions}
    counts: dict[tuple[str, str], int] = {}

    def count(nodes: Any, callers: tuple[tuple[str, str], ...]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key in callers:
                raise OnnxError(
                    f"{path}: the function {node.op_type!r} calls itself; ONNX has no recursion",
                    code="onnx-recursive-function",
                )
            if key in functions and key not in counts:
                counts[key] = count(functions[key].node, (*callers, key))
            total += counts.get(key, 1)
            for attribute in node.attribute:
                for graph in (attribute.g, *attribute.graphs):
                    total += count(graph.node, callers)
        return total

    try:
        total = count(proto.graph.node, ())
    except RecursionError as error:
        raise OnnxError(
            f"{path}: its functions call each other {len(functions)} levels deep",
            code="onnx-too-many-nodes",
        ) from error
    if total > _MAX_NODES:
        raise OnnxError(
            f"{path}: its functions stand for {total} nodes; expected at most {_MAX_NODES}",
            code="onnx-too-many-nodes",
        )


def _check_names(path: Path, proto: Any) -> None:
    """Check that names are text and types are known."""
    # protobuf returns a string field as bytes if it is not UTF-8.
    graph = proto.graph
    nodes = [*graph.node, *(node for function in proto.functions for node in function.node)]
    for place, node in enumerate(nodes):
        names = (node.op_type, node.domain, node.name, *node.input, *node.output)
        _check_text(f"{path}: node {place}", *names, *(each.name for each in node.attribute))
    for value in (*graph.input, *graph.output, *graph.value_info):
        sizes = value.type.tensor_type.shape.dim
        _check_text(f"{path}: a value", value.name, *(size.dim_param for size in sizes))
        sized = tuple(size.dim_value for size in sizes)
        _check_type(path, value.name, sized, value.type.tensor_type.elem_type)
    for tensor in graph.initializer:
        _check_text(f"{path}: a weight", tensor.name)
        _check_type(path, tensor.name, tuple(tensor.dims), tensor.data_type)
    for opset in proto.opset_import:
        _check_text(f"{path}: an operator set", opset.domain)
    _check_text(f"{path}: the producer", proto.producer_name, proto.producer_version)


def _check_text(place: str, *names: Any) -> None:
    for name in names:
        if not isinstance(name, str):
            raise OnnxError(
                f"{place} has a name that is not UTF-8 ({name!r})\n  export the model again",
                code="onnx-name-not-utf8",
            )


def _check_type(path: Path, name: str, shape: tuple[int, ...], data_type: int) -> None:
    import onnx

    if data_type not in onnx.TensorProto.DataType.values():
        raise OnnxError(
            f"{path}: {name!r} has element type {data_type}, which ONNX does not define",
            code="onnx-unknown-type",
        )
    if any(size < 0 for size in shape):
        raise OnnxError(
            f"{path}: {name!r} has a negative size in its shape {list(shape)}",
            code="onnx-negative-size",
        )


def _type_name(data_type: int) -> str:
    import onnx

    return onnx.TensorProto.DataType.Name(data_type)


def _of_initializer(tensor: Any) -> OnnxTensor:
    return OnnxTensor(tuple(tensor.dims), _type_name(tensor.data_type))


def shape_of(value: Any, bound: Mapping[str, int]) -> OnnxTensor | None:
    """Return the shape and type that a ValueInfoProto states, or None if part of it is open."""
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        return None
    shape: list[int] = []
    for axis, size in enumerate(kind.shape.dim):
        known = size.dim_value if size.HasField("dim_value") else None
        if known is None:
            # An unnamed open size is known by input and axis, as `_symbols` names it.
            known = bound.get(size.dim_param or f"{value.name}.{axis}")
        if known is None:
            return None
        shape.append(known)
    return OnnxTensor(tuple(shape), _type_name(kind.elem_type))


def _bind(
    path: Path, inputs: list[Any], sizes: Mapping[str, int], batch: int | None, seq: int | None
) -> dict[str, int]:
    """Return the size of every symbol of the inputs."""
    symbols = _symbols(path, inputs)
    bound: dict[str, int] = {}
    for symbol, places in symbols.items():
        if symbol in sizes:
            bound[symbol] = sizes[symbol]
        # A symbol on several axes has one size: the first option that fits any of its places sets
        # it.
        elif batch is not None and any(axis == 0 for axis, _ in places):
            bound[symbol] = batch
        elif seq is not None and ((1, 2) in places or re.search("seq", symbol, re.IGNORECASE)):
            bound[symbol] = seq
    if unknown := sorted(set(sizes) - set(symbols)):
        listed = ", ".join(sorted(symbols)) or "none"
        raise OnnxError(
            f"{path}: no input has the open size {', '.join(unknown)}; the model's are: {listed}",
            code="onnx-unknown-size",
        )
    if missing := [symbol for symbol in symbols if symbol not in bound]:
        shapes = "; ".join(f"{value.name} {_shape_text(value)}" for value in inputs)
        raise OnnxError(
            f"{path}: the size of {', '.join(missing)} is open (inputs: {shapes})\n"
            f"  give --batch, --seq or --size {missing[0]}=N",
            code="onnx-open-size",
        )
    for symbol, size in bound.items():
        if size < 1:
            raise OnnxError(
                f"{path}: {symbol} = {size}; expected a size of 1 or more",
                code="onnx-size-too-small",
            )
    return bound


def _symbols(path: Path, inputs: list[Any]) -> dict[str, list[tuple[int, int]]]:
    """Return open size -> its places: (axis, number of axes of the input)."""
    symbols: dict[str, list[tuple[int, int]]] = {}
    for value in inputs:
        if not value.type.HasField("tensor_type"):
            continue
        if not value.type.tensor_type.HasField("shape"):
            raise OnnxError(
                f"{path}: input {value.name!r} has no shape\n"
                "  export the model with the number of axes of its inputs",
                code="onnx-input-no-shape",
            )
        dims = value.type.tensor_type.shape.dim
        for axis, size in enumerate(dims):
            if not size.HasField("dim_value"):
                symbol = size.dim_param or f"{value.name}.{axis}"
                symbols.setdefault(symbol, []).append((axis, len(dims)))
    return symbols


def _shape_text(value: Any) -> str:
    """Return the shape of an input as text, open sizes by name."""
    dims = value.type.tensor_type.shape.dim
    named = (
        str(d.dim_value) if d.HasField("dim_value") else d.dim_param or f"{value.name}.{axis}"
        for axis, d in enumerate(dims)
    )
    return f"[{', '.join(named)}]"


def _check_order(path: Path, nodes: tuple[Any, ...], known: set[str]) -> None:
    """Check that every value is defined before use, as ONNX demands; this excludes cycles."""
    defined = {"", *known}
    for place, node in enumerate(nodes):
        for name in node.input:
            if name not in defined:
                raise OnnxError(
                    f"{path}: node {place} ({node.name or node.op_type}) reads {name!r}, which no "
                    "input, weight or earlier node defines; expected nodes in order",
                    code="onnx-undefined-value",
                )
        defined.update(node.output)
