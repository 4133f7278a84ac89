"""Infer the shapes of all values of a model whose input sizes are bound, node by node.

If a shape depends on data (the target of a Reshape), ONNX's reference implementation computes the
small integer tensors that lead to it.
"""

from typing import Any

import numpy as np

from onerank.converters.sources.onnx.control_flow import data_of
from onerank.converters.sources.onnx.model import OnnxModel, OnnxTensor, shape_of

FOLDABLE = 4096
"""Elements of the largest tensor whose data are computed."""

MOST_EVALUATED = 1 << 20
"""Elements of the largest result that the reference implementation may compute."""

# Largest axis, or number of results, that is passed on to ONNX's shape inference.
_MOST_AXES = 1 << 16

# Operator -> position of the operand whose elements are the axes of the result.
_TARGET_SHAPE = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1}

# Operators whose result may be larger than their operands.
_GROWS = frozenset("ConstantOfShape EyeLike Expand OneHot Pad Range Resize Tile Upsample".split())

_WITH_SUBGRAPH = ("If", "Loop", "Scan")
_FROM_SHAPE = ("Shape", "Size")


class Shapes:
    """Shapes by value name; `known` holds the data of small constants.

    Attributes:
        tensors: name -> shape and type, of every value whose shape is known.
        known: name -> data.
        problems: node index -> why the shapes of its results are unknown.
    """

    def __init__(self, model: OnnxModel) -> None:
        import onnx

        self.tensors: dict[str, OnnxTensor] = {**model.inputs, **model.weights}
        self.known: dict[str, Any] = {}
        self.problems: dict[int, str] = {}
        self._model = model
        self._opsets = list(model.proto.opset_import)
        self._versions = {opset.domain: opset.version for opset in self._opsets}
        self._stated = {value.name: value for value in model.proto.graph.value_info}
        self._stated |= {value.name: value for value in model.proto.graph.output}
        for tensor in model.proto.graph.initializer:
            # External weights need not be there: only their shapes count.
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            if not external and np.prod(tensor.dims) <= FOLDABLE:
                self.known[tensor.name] = data_of(model.path, tensor)
        for place, node in enumerate(model.nodes):
            self._visit(place, node)

    def _visit(self, place: int, node: Any) -> None:
        if self._fold(node):
            return
        try:
            inferred = self._infer(node)
        except Exception as error:  # noqa: BLE001 - the message of any checker error is the reason
            self.problems[place] = _reason(node, error)
            inferred = {}
        for name in node.output:
            tensor = shape_of(inferred[name], {}) if name in inferred else None
            # Inference fails for operators of other domains; exporters often state their shapes.
            if tensor is None and name in self._stated:
                tensor = shape_of(self._stated[name], self._model.bound)
            if tensor is not None:
                self.tensors[name] = tensor
            elif name:
                reason = f"{node.op_type}: the shape of its result cannot be inferred"
                self.problems.setdefault(place, reason)

    def _infer(self, node: Any) -> dict[str, Any]:
        """Return a ValueInfoProto for each result, by name."""
        import onnx
        from onnx import defs, helper, shape_inference

        self._check_axes(node)
        domain = "" if node.domain == "ai.onnx" else node.domain
        schema = defs.get_schema(node.op_type, self._versions.get(domain, 1), domain)
        types = {name: self._type(name) for name in node.input if name in self.tensors}
        data = {
            name: onnx.numpy_helper.from_array(self.known[name], name)
            for name in node.input
            if name in self.known
        }
        result_types = shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=self._opsets
        )
        return {name: helper.make_value_info(name, kind) for name, kind in result_types.items()}

    def _check_axes(self, node: Any) -> None:
        """Refuse a number of axes that no tensor has.

        ONNX's shape inference lists the axes of a result before it compares them with anything: a
        Reshape whose target shape has 2^32 elements took it 20 seconds and gigabytes (onnx 1.18).
        """
        counts = [
            (attribute.name, abs(number))
            for attribute in node.attribute
            if attribute.name in ("axis", "axes", "num_outputs", "batch_dims")
            for number in (attribute.i, *attribute.ints)
        ]
        position = _TARGET_SHAPE.get(node.op_type, len(node.input))
        if position < len(node.input) and (target := self.tensors.get(node.input[position])):
            counts.append(("number of axes", target.numel))
        for name, count in counts:
            if count > _MOST_AXES:
                raise ValueError(f"{node.op_type}: the {name} is {count}")

    def _type(self, name: str) -> Any:
        import onnx

        tensor = self.tensors[name]
        return onnx.helper.make_tensor_type_proto(
            onnx.TensorProto.DataType.Value(tensor.dtype), tensor.shape
        )

    def _fold(self, node: Any) -> bool:
        """Compute a node whose operands are small and known; return whether that succeeded."""
        if node.op_type in _FROM_SHAPE and node.input[0] in self.tensors:
            self._set(node.output[0], _shape_data(node, self.tensors[node.input[0]]))
            return True
        known = all(name in self.known for name in node.input if name)
        # A node without inputs other than a Constant draws random numbers: its values must not
        # become constants of the graph.
        random = not node.input and node.op_type != "Constant"
        if node.op_type in _WITH_SUBGRAPH or random or not known:
            return False
        if not self._is_small(node):
            return False
        try:
            values = self._evaluate(node)
        except Exception:  # noqa: BLE001 - the reference lacks some operators; infer shapes only
            return False
        small = all(value.size <= FOLDABLE for value in values)
        for name, value in zip(node.output, values, strict=False):
            self._set(name, value, keep=small)
        return True

    def _is_small(self, node: Any) -> bool:
        """Return whether the results of a node fit into memory, by their inferred shapes.

        A small operand can demand a large result: ConstantOfShape of [2**20, 2**20] is 4 TiB. The
        reference implementation would allocate it before its size is known.
        """
        try:
            shapes = [shape_of(value, {}) for value in self._infer(node).values()]
        except Exception:  # noqa: BLE001 - any error of the checker means that nothing is known
            shapes = [None]
        if any(shape is None for shape in shapes):
            return node.op_type not in _GROWS
        return all(shape.numel <= MOST_EVALUATED for shape in shapes if shape is not None)

    def _evaluate(self, node: Any) -> list[Any]:
        import onnx
        from onnx.reference import ReferenceEvaluator

        graph = onnx.helper.make_graph(
            [node],
            "constant",
            [onnx.helper.make_empty_tensor_value_info(name) for name in node.input if name],
            [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name],
        )
        model = onnx.helper.make_model(graph, opset_imports=self._opsets)
        inputs = {name: self.known[name] for name in node.input if name}
        evaluator: Any = ReferenceEvaluator(model)
        values = evaluator.run(None, inputs)
        return [np.asarray(value) for value in values]

    def _set(self, name: str, value: Any, *, keep: bool = True) -> None:
        import onnx

        dtype = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        self.tensors[name] = OnnxTensor(value.shape, onnx.TensorProto.DataType.Name(dtype))
        if keep:
            self.known[name] = value


def _reason(node: Any, error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{node.op_type}: an operand's shape is not known"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _shape_data(node: Any, source: OnnxTensor) -> Any:
    if node.op_type == "Size":
        return np.array(source.numel, dtype=np.int64)
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    return np.array(
        source.shape[attributes.get("start", 0) : attributes.get("end")], dtype=np.int64
    )
