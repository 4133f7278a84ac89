"""Lower an ONNX model to the graph of one step: forward, or forward, backward and optimizer.

`StepBuilder` adds nodes, data edges, the bytes of live memory, backward and optimizer.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onerank.converters.sources.onnx.backward import backward_of
from onerank.converters.sources.onnx.model import (
    OnnxModel,
    OnnxTensor,
    SizeError,
    checked_size,
    load,
)
from onerank.converters.sources.onnx.operators import (
    NOT_EXPANDED,
    RECURRENT,
    AtenCall,
    NodeContext,
    aten_calls,
    call,
)
from onerank.converters.sources.onnx.shapes import Shapes
from onerank.ir import Device, Graph, Job, Kind, Measurement, Phase, Reason
from onerank.ir.errors import OnnxError
from onerank.ir.graph import GraphBuilder
from onerank.ir.notes import Note

# Operator -> positions of operands that are statistics, not parameters.
_BUFFERS = {"BatchNormalization": (3, 4)}
_NO_GRADIENT = ("Shape", "Size", "ArgMax", "ArgMin", "NonZero", "Constant", "Range")


class StepBuilder:
    """Builds one step of a model.

    A value is live from its definition to its last use; with `train`, to the backward of the node
    that defines it. Views share the memory of their base.

    Attributes:
        start_bytes: bytes of the weights, and with `train` of AdamW's two moments.
        peak_bytes: most bytes live at once.
        without_backward: operator without a backward rule -> count.
    """

    def __init__(self, model: OnnxModel, shapes: Shapes, *, train: bool) -> None:
        self.without_backward = Counter[str]()
        self._shapes = shapes
        self._train = train
        self._builder = GraphBuilder()
        self._defined_by: dict[str, int] = {}  # value -> graph node that defines it
        self._storage: dict[str, str] = {}  # view -> its base value
        self._differentiable: list[tuple[Any, list[AtenCall], str, list[int]]] = []
        self._views: defaultdict[str, list[str]] = defaultdict(list)
        self._last_place = {
            name: place for place, node in enumerate(model.nodes) for name in node.input if name
        }
        self._outputs = {value.name for value in model.proto.graph.output}
        buffers = {
            node.input[position]
            for node in model.nodes
            for position in _BUFFERS.get(node.op_type, ())
            if position < len(node.input)
        }
        # Exporters store constants such as epsilons as scalar weights.
        trained = {n: t for n, t in model.weights.items() if t.floating and t.numel > 1}
        self._parameters = {n: t for n, t in trained.items() if n not in buffers} if train else {}
        self._needs = set(self._parameters)
        weights = sum(tensor.nbytes for tensor in model.weights.values())
        moments = 2 * sum(tensor.nbytes for tensor in self._parameters.values())
        self.start_bytes = checked_size(weights + moments, "the bytes of all weights and moments")
        self._live = self.peak_bytes = self.start_bytes

    def forward(self, place: int, node: Any, calls: list[AtenCall], module: str) -> None:
        """Add a node's calls, in the model's order."""
        results = [name for name in node.output if name]
        before = {self._defined_by[name] for name in node.input if name in self._defined_by}
        indices = self._add(calls, before, module, Phase.FORWARD)
        for name in results:
            if indices:
                self._defined_by[name] = indices[-1]
            elif node.input and node.input[0]:
                self._storage[name] = root = self._root(node.input[0])
                self._views[root].append(name)
                if node.input[0] in self._defined_by:
                    self._defined_by[name] = self._defined_by[node.input[0]]
        gradient = any(name in self._needs for name in node.input)
        if gradient and node.op_type not in _NO_GRADIENT:
            floating = [n for n in results if (t := self._shapes.tensors.get(n)) and t.floating]
            self._needs.update(floating)
            if floating:
                self._differentiable.append((node, calls, module, indices))
        if indices:
            self._allocate(indices[-1], sum(self._size(name) for name in results))
        for root in sorted({self._root(name) for name in node.input if name}):
            # Autograd saves operands for the backward; without `train` a value is free after its
            # last use.
            saved = self._train and root in self._needs
            if indices and not saved and self._dies(root, place):
                self._free(indices[-1], self._size(root))

    def backward(self) -> None:
        """Add the backward of every node that leads to a parameter, then AdamW."""
        tail = len(self._builder) - 1
        gradients: defaultdict[str, list[int]] = defaultdict(list)
        for node, calls, module, _ in reversed(self._differentiable):
            results = [name for name in node.output if name in self._needs]
            ready = {index for name in results for index in gradients[name]}
            if not ready and not any(name in self._outputs for name in results):
                # No gradient arrives, since nothing uses the results.
                continue
            # An output of the model starts the backward: nothing produces its gradient, so it
            # follows the forward.
            before = ready or {tail}
            for name in results:
                # Autograd adds the gradients of a value that several nodes read, two at a time.
                extra = len(gradients[name]) - 1
                tensor = self._shapes.tensors[name]
                for _ in range(extra):
                    sums = [call("add", [tensor, tensor], tensor)]
                    before = {*self._add(sums, before, module, Phase.BACKWARD)}
            backward_calls = self._backward_calls(node, calls)
            indices = self._add(backward_calls, before, module, Phase.BACKWARD)
            last = indices[-1:] or sorted(before)
            for name in node.input:
                if name in self._needs:
                    fresh = not gradients[name]
                    gradients[name] += last
                    if fresh and indices and name == self._root(name):
                        self._allocate(indices[-1], self._size(name))
            if indices and calls:  # the results and their gradients
                self._free(indices[-1], 2 * sum(self._size(name) for name in results))
        self._optimizer(gradients)

    def graph(self, job: Job) -> Graph:
        """Return the graph."""
        return self._builder.build(job)

    def _backward_calls(self, node: Any, calls: list[AtenCall]) -> list[AtenCall]:
        backward_calls: list[AtenCall] = []
        if not calls and node.op_type in ("Expand", "Slice", "Split"):
            source = self._shapes.tensors[node.input[0]]
            result = self._shapes.tensors[node.output[0]]
            name = {"Expand": "expand", "Slice": "slice"}.get(node.op_type)
            if name and source.numel != result.numel:
                return backward_of(call(name, [source], result), (True,)) or []
            if node.op_type == "Split":
                parts = [self._shapes.tensors[name] for name in node.output if name]
                return [call("cat", [tuple(parts)], source)]
            return []
        for position, forward in reversed([*enumerate(calls)]):
            needs = tuple(name in self._needs for name in node.input if name)
            if forward.op == "aten::addmm" and node.op_type == "Gemm":
                needs = (needs[2], *needs[:2])  # PyTorch's bias comes first
            # A later call of a node takes the result of the previous call as its first operand.
            if position:
                needs = (True, *needs)
            gradient_calls = backward_of(forward, needs)
            if gradient_calls is None:
                self.without_backward[forward.op] += 1
            else:
                backward_calls += gradient_calls
        return backward_calls

    def _optimizer(self, gradients: dict[str, list[int]]) -> None:
        updated = [name for name in self._parameters if gradients.get(name)]
        if not updated:
            return
        lists = tuple(self._parameters[name] for name in updated)
        before = {index for name in updated for index in gradients[name]}
        # Parameters, gradients and the two moments: the four lists of the fused kernel have equal
        # shapes.
        adamw = AtenCall("aten::_fused_adamw_", (lists, lists, lists, lists), ())
        (index,) = self._add([adamw], before, "", Phase.OPTIMIZER)
        self._free(index, sum(self._size(name) for name in updated))

    def _add(self, calls: list[AtenCall], before: set[int], module: str, phase: Phase) -> list[int]:
        indices: list[int] = []
        for each in calls:
            index = self._builder.add(
                name=each.op,
                op=each.op,
                kind=Kind.HOST_OP,
                thread=0,
                start_ns=len(self._builder),
                module=module,
                phase=phase,
                **each.columns(),
            )
            for source in sorted(before):
                self._builder.edge(source, index, Reason.DATA)
            before = {index}
            indices.append(index)
        return indices

    def _allocate(self, index: int, size: int) -> None:
        allocated = self._builder.row(index).get("bytes_allocated", 0)
        self._builder.update(index, bytes_allocated=allocated + size)
        self._live = checked_size(self._live + size, "the bytes of all live tensors")
        self.peak_bytes = max(self.peak_bytes, self._live)

    def _free(self, index: int, size: int) -> None:
        freed = self._builder.row(index).get("bytes_freed", 0)
        self._builder.update(index, bytes_freed=freed + size)
        self._live -= size

    def _size(self, name: str) -> int:
        tensor: OnnxTensor | None = self._shapes.tensors.get(name)
        return tensor.nbytes if tensor is not None and name not in self._storage else 0

    def _root(self, name: str) -> str:
        return self._storage.get(name, name)

    def _dies(self, root: str, place: int) -> bool:
        """Return whether neither `root` nor a view of it is used after `place` or is an output."""
        shared = {root, *self._views[root]}
        used = max(self._last_place.get(name, -1) for name in shared)
        return root in self._defined_by and used <= place and not shared & self._outputs


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
    notes: list[Note] = field(default_factory=list[Note])


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


def _convert(model: OnnxModel, path: Path, *, train: bool) -> tuple[Graph, OnnxConversion]:
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
    notes = [
        Note(
            "not run: the graph has the operators of an ONNX model, in the model's order",
            code="onnx-never-run",
        )
    ]
    if train:
        notes.append(
            Note(
                "backward and AdamW are derived: every floating-point weight of more than one "
                "element is trained, and gradients start at the model's outputs",
                code="onnx-derived-backward",
            )
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

    def __init__(self, model: OnnxModel, shapes: Shapes) -> None:
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
        calls = aten_calls(context)
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


def _versions(model: OnnxModel) -> dict[str, str]:
    opsets = model.proto.opset_import
    versions = {opset.domain or "onnx opset": str(opset.version) for opset in opsets}
    if model.proto.producer_name:
        versions[model.proto.producer_name] = model.proto.producer_version
    return versions
