"""Lower an ONNX model to the graph of one step: forward, or forward, backward and optimizer."""

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onerank.converters.sources.onnx.model import Model, SizeError, checked_size, load
from onerank.converters.sources.onnx.node_context import AtenCall, NodeContext
from onerank.converters.sources.onnx.operators import NOT_EXPANDED, RECURRENT, calls_of
from onerank.converters.sources.onnx.shapes import Shapes
from onerank.converters.sources.onnx.step_graph import StepBuilder
from onerank.ir import Device, Graph, Job, Measurement
from onerank.ir.errors import OnnxError

NAMESPACE = "onnx::"


@dataclass(frozen=True, slots=True)
class OnnxConversion:
    """Report on a conversion.

    Attributes:
        nodes: nodes of the model with its local functions inlined.
        launching: nodes of the model that became nodes of the graph.
        launching_nothing: views, shapes and constants.
        unknown: operator without a rule, kept with its bytes only -> count.
        not_expanded: control flow, or an LSTM over too many time steps, kept as one node without
            costs -> count.
        without_shapes: reason -> count of nodes whose result shapes are unknown.
        without_backward: operator without a backward rule, omitted from the backward -> count.
        weights: elements of the floating-point weights.
        weight_bytes: bytes of the floating-point weights.
        sizes: open size -> its value.
        notes: limitations to print.
    """

    nodes: int
    launching: int
    launching_nothing: int
    unknown: dict[str, int]
    not_expanded: dict[str, int]
    without_shapes: dict[str, int]
    without_backward: dict[str, int]
    weights: int
    weight_bytes: int
    sizes: dict[str, int]
    notes: list[str] = field(default_factory=list[str])


def convert_onnx(
    path: Path,
    *,
    sizes: Mapping[str, int] | None = None,
    batch: int | None = None,
    seq: int | None = None,
    train: bool = False,
) -> tuple[Graph, OnnxConversion]:
    """Lower a model to a graph of operators with shapes and no times.

    Every operator becomes the equivalent PyTorch operator, so `annotate` costs a model like a
    captured script. Edges are the data dependencies of the model.

    Args:
        path: `.onnx` file; external weights need not be there.
        sizes: open size of an input -> its value.
        batch: value for the open sizes in axis 0 of the inputs.
        seq: value for the open sizes in axis 1 of the inputs with two axes.
        train: whether to add the backward of every operator and an AdamW builder.

    Raises:
        OnnxError: the model cannot be read, or a size is open.
        OSError: the file cannot be opened.
    """
    try:
        return _convert(load(path, sizes or {}, batch, seq), path, train=train)
    except SizeError as error:
        raise OnnxError(
            f"{path}: {error}\n  use smaller sizes, or export the model again",
            code="onnx-size-too-large",
        ) from error


def _convert(model: Model, path: Path, *, train: bool) -> tuple[Graph, OnnxConversion]:
    shapes = Shapes(model)
    builder = StepBuilder(model, shapes, train=train)
    lowering = _Lowering(model, shapes)
    launching = 0
    for place, node in enumerate(model.nodes):
        calls = lowering.calls(place, node)
        launching += bool(calls)
        builder.forward(place, node, calls, _module(node))
    if train:
        builder.backward()
    parameters = [tensor for tensor in model.weights.values() if tensor.floating]
    unknown_shapes = Counter(shapes.problems.values())
    notes = ["never run: the operators of an ONNX model, in the model's order"]
    if train:
        notes.append(
            "backward and AdamW are derived: every floating-point weight of more than one element "
            "is trained, and gradients start at the model's outputs"
        )
    report = OnnxConversion(
        nodes=len(model.nodes),
        launching=launching,
        launching_nothing=len(model.nodes) - launching,
        unknown=dict(lowering.unknown),
        not_expanded=dict(lowering.not_expanded),
        without_shapes=dict(unknown_shapes),
        without_backward=dict(builder.without_backward),
        weights=checked_size(sum(tensor.numel for tensor in parameters), "the number of weights"),
        weight_bytes=sum(tensor.nbytes for tensor in parameters),
        sizes=model.bound,
        notes=notes,
    )
    measurement = Measurement(
        peak_memory_bytes=builder.peak_bytes,
        start_memory_bytes=builder.start_bytes,
        versions=_versions(model),
        notes=tuple(notes),
    )
    job = Job(device=Device("model", path.name), measurement=measurement)
    return builder.graph(job), report


class _Lowering:
    """Lowers nodes to calls, and counts the nodes without a rule."""

    def __init__(self, model: Model, shapes: Shapes) -> None:
        self.unknown = Counter[str]()
        self.not_expanded = Counter[str]()
        self._model = model
        self._shapes = shapes

    def calls(self, place: int, node: Any) -> list[AtenCall]:
        """Return the calls of a node; one without a rule becomes a call of its ONNX name."""
        shapes = self._shapes
        results = [name for name in node.output if name]
        if all(name in shapes.known for name in results):
            return []  # constant-folded before the model runs
        inputs = tuple(shapes.tensors.get(name) for name in node.input)
        outputs = tuple(shapes.tensors[name] for name in results if name in shapes.tensors)
        opaque = AtenCall(
            NAMESPACE + node.op_type, tuple(x for x in inputs if x is not None), outputs
        )
        if node.op_type in NOT_EXPANDED:
            self.not_expanded[node.op_type] += 1
            return [opaque]
        named = [name for name in (*node.input, *node.output) if name]
        if place in shapes.problems or any(name not in shapes.tensors for name in named):
            reason = f"{node.op_type}: an operand's shape is not known"
            shapes.problems.setdefault(place, reason)
            return [opaque]
        context = NodeContext(
            op=node.op_type,
            domain="" if node.domain == "ai.onnx" else node.domain,
            inputs=inputs,
            outputs=outputs,
            # A reference to an attribute that the caller of a function did not give: no attribute.
            attributes={
                attribute.name: _attribute(attribute)
                for attribute in node.attribute
                if not attribute.ref_attr_name
            },
            data=tuple(shapes.known.get(name) for name in node.input),
            weights=tuple(name in self._model.weights for name in node.input),
        )
        calls = calls_of(context)
        if calls is None and context.op in RECURRENT:
            self.not_expanded[node.op_type] += 1
            return [opaque]
        if calls is None:
            self.unknown[f"{context.domain}::{context.op}" if context.domain else context.op] += 1
            return [opaque]
        return calls


def _attribute(attribute: Any) -> Any:
    import onnx

    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


def _module(node: Any) -> str:
    """Return the module path that PyTorch's exporters record, else ""."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            try:
                scopes = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError):
                continue
            return str(scopes[-2]) if len(scopes) > 1 else ""
    # The older exporter puts the path into the name: /model/layers.0/mlp/MatMul.
    if node.name.startswith("/"):
        return node.name.strip("/").rpartition("/")[0].replace("/", ".")
    return ""


def _versions(model: Model) -> dict[str, str]:
    opsets = model.proto.opset_import
    versions = {opset.domain or "onnx opset": str(opset.version) for opset in opsets}
    if model.proto.producer_name:
        versions[model.proto.producer_name] = model.proto.producer_version
    return versions
