"""Build the graph of one step: nodes, data edges, live memory, backward, optimizer."""

from collections import Counter, defaultdict
from typing import Any

from onerank.converters.sources.onnx.backward import backward_of
from onerank.converters.sources.onnx.model import Model, Tensor, checked_size
from onerank.converters.sources.onnx.node_context import AtenCall, call
from onerank.converters.sources.onnx.shapes import Shapes
from onerank.ir import Graph, Job, Kind, Phase, Reason
from onerank.ir.graph import GraphBuilder

_BUFFERS = {"BatchNormalization": (3, 4)}
"""Operator -> positions of operands that are statistics, not parameters."""
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

    def __init__(self, model: Model, shapes: Shapes, *, train: bool) -> None:
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
                continue  # no gradient arrives, since nothing uses the results
            before = ready or {tail}
            for name in results:
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
        tensor: Tensor | None = self._shapes.tensors.get(name)
        return tensor.nbytes if tensor is not None and name not in self._storage else 0

    def _root(self, name: str) -> str:
        return self._storage.get(name, name)

    def _dies(self, root: str, place: int) -> bool:
        """Whether neither `root` nor a view of it is used after `place` or is an output."""
        shared = {root, *self._views[root]}
        used = max(self._last_place.get(name, -1) for name in shared)
        return root in self._defined_by and used <= place and not shared & self._outputs
