"""Inline control flow that the model determines.

- An `If` with a constant condition becomes its branch.
- A `Loop` with a constant trip count, whose body never ends it early, becomes its iterations.
- A `Scan` over inputs of known length becomes one copy of its body per slice.

All other control flow stays, and is reported.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onerank.ir.errors import OnnxError


def data_of(path: Path, tensor: Any) -> Any:
    """Return a weight's data as an array of its shape.

    Raises:
        OnnxError: its data do not match its shape and type.
    """
    import onnx

    try:
        return onnx.numpy_helper.to_array(tensor)
    except (TypeError, ValueError) as error:
        raise OnnxError(
            f"{path}: the weight {tensor.name!r} of shape {list(tensor.dims)} has data that "
            f"do not fit ({error}); the file is damaged",
            code="onnx-damaged-weight",
        ) from error


MOST_NODES = 100_000
"""Largest number of nodes to inline for one loop; a longer loop stays."""

Length = Callable[[str, int], int | None]
"""(value, axis) -> size, None if unknown."""

Rule = Callable[[Any, dict[str, Any]], list[Any] | None]


def inline_control_flow(path: Path, proto: Any, length: Length) -> None:
    """Replace control flow in a model by the nodes that run.

    Weights of inlined bodies become weights of the model.

    Args:
        path: file of the model, for messages.
        proto: the model; it is modified.
        length: sizes of inputs, weights, and values with a stated shape.

    Raises:
        OnnxError: the data of a scalar weight do not match its type.
    """
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
    inliner = _Inliner(path, length, opset)
    inliner.add_constants(proto.graph.initializer)
    nodes = list(inliner.inlined(proto.graph.node))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(inliner.weights)


@dataclass(slots=True)
class _Inliner:
    """Inlines control flow; names of copied values get a unique suffix."""

    path: Path
    length: Length
    opset: int
    weights: list[Any] = field(default_factory=list[Any])
    constants: dict[str, Any] = field(default_factory=dict[str, Any])
    """Name -> value of a known scalar."""
    copies: int = 0

    def add_constants(self, tensors: Any) -> None:
        """Record the scalars among weights as constants."""
        import onnx

        for tensor in tensors:
            # The file of an external weight need not be there.
            inside = tensor.data_location != onnx.TensorProto.EXTERNAL
            if inside and list(tensor.dims) in ([], [1]):
                self.constants[tensor.name] = data_of(self.path, tensor).reshape(())[()]

    def inlined(self, nodes: Any) -> Iterator[Any]:
        """Yield nodes with control flow inlined."""
        rules = {"If": self._if, "Loop": self._loop, "Scan": self._scan}
        for node in nodes:
            attributes = {attribute.name: attribute for attribute in node.attribute}
            rule = rules.get(node.op_type) if node.domain in ("", "ai.onnx") else None
            replacement = self._apply(rule, node, attributes) if rule else None
            if replacement is not None:
                yield from replacement
                continue
            if node.op_type == "Constant" and "value" in attributes:
                tensor = type(attributes["value"].t)()
                tensor.CopyFrom(attributes["value"].t)
                tensor.name = node.output[0]
                self.add_constants([tensor])
            elif node.op_type == "Constant" and "value_int" in attributes:
                self.constants[node.output[0]] = attributes["value_int"].i
            elif node.op_type == "Identity" and node.input[0] in self.constants:
                self.constants[node.output[0]] = self.constants[node.input[0]]
            yield node

    def _apply(self, rule: Rule, node: Any, attributes: dict[str, Any]) -> list[Any] | None:
        """Return the replacement of a node, None if it stays; a malformed node stays too."""
        weights = len(self.weights)
        try:
            # Nested loops multiply: each loop alone may be within the limit.
            replacement = rule(node, attributes) if self.copies < MOST_NODES else None
        except (LookupError, ValueError, TypeError, ArithmeticError):
            replacement = None
        if replacement is None:
            # A rule may have adopted weights of the body before it gave up.
            del self.weights[weights:]
        return replacement

    def _if(self, node: Any, attributes: dict[str, Any]) -> list[Any] | None:
        condition = self.constants.get(node.input[0])
        if condition is None:
            return None
        branch = attributes["then_branch" if condition else "else_branch"].g
        nodes, results = self._copy(branch, self._adopted_weights(branch), [])
        return [*nodes, *_aliases(results, node.output)]

    def _loop(self, node: Any, attributes: dict[str, Any]) -> list[Any] | None:
        body = attributes["body"].g
        count = self.constants.get(node.input[0])
        condition = node.input[1] if len(node.input) > 1 else ""
        runs = True if not condition else self.constants.get(condition)
        if count is None or not runs or int(count) * len(body.node) > MOST_NODES:
            return None
        weights = self._adopted_weights(body)
        carried, stacked, inlined = list(node.input[2:]), list[list[str]](), list[Any]()
        for iteration in range(int(count)):
            number, condition_node = self._constant(iteration), self._constant(value=True)
            # A body reads the iteration number, the condition and the carried values, in this order
            # (ONNX's operator Loop).
            inputs = [number.output[0], condition_node.output[0], *carried]
            nodes, results = self._copy(body, weights, inputs)
            if not self.constants.get(results[0], False):
                return None  # the body may end the loop early
            inlined += [number, condition_node, *nodes]
            carried = results[1 : 1 + len(carried)]
            stacked.append(results[1 + len(carried) :])
        final = node.output[: len(carried)]
        inlined += _aliases(carried, final)
        if not stacked and len(node.output) > len(final):
            return None  # the shape of an empty result is unknown
        return inlined + self._stack(stacked, node.output[len(final) :], [])

    def _scan(self, node: Any, attributes: dict[str, Any]) -> list[Any] | None:
        body, count = attributes["body"].g, attributes["num_scan_inputs"].i
        if self.opset < 9:
            return None  # Scan had a batch axis before opset 9
        states = len(node.input) - count
        axes = _int_list(attributes, "scan_input_axes", count)
        back = _int_list(attributes, "scan_input_directions", count)
        lengths = {
            self.length(name, axis) for name, axis in zip(node.input[states:], axes, strict=True)
        }
        iterations = lengths.pop() if len(lengths) == 1 else None
        if not iterations or iterations * len(body.node) > MOST_NODES:
            return None
        weights = self._adopted_weights(body)
        carried, stacked, inlined = list(node.input[:states]), list[list[str]](), list[Any]()
        for iteration in range(iterations):
            slices: list[str] = []
            for name, axis, reverse in zip(node.input[states:], axes, back, strict=True):
                place = self._constant(iterations - 1 - iteration if reverse else iteration)
                inlined += [place, self._node("Gather", [name, place.output[0]], axis=axis)]
                slices.append(inlined[-1].output[0])
            nodes, results = self._copy(body, weights, [*carried, *slices])
            inlined += nodes
            carried = results[:states]
            stacked.append(results[states:])
        outputs = node.output[states:]
        axes = _int_list(attributes, "scan_output_axes", len(outputs))
        if any(_int_list(attributes, "scan_output_directions", len(outputs))):
            return None
        return (
            inlined + _aliases(carried, node.output[:states]) + self._stack(stacked, outputs, axes)
        )

    def _copy(
        self, graph: Any, weights: dict[str, str], inputs: list[str]
    ) -> tuple[list[Any], list[str]]:
        """Return uniquely named copies of a graph's nodes applied to `inputs`, and its results."""
        self.copies += 1
        names = dict(weights)
        names |= zip([value.name for value in graph.input], inputs, strict=True)
        for node in graph.node:
            names |= {name: f"{name}@{self.copies}" for name in node.output if name}
        nodes = [_renamed(node, names) for node in graph.node]
        outputs: list[str] = [value.name for value in graph.output]
        results = [names.get(name, name) for name in outputs]
        return list(self.inlined(nodes)), results

    def _adopted_weights(self, graph: Any) -> dict[str, str]:
        """Copy the weights of a body to the model; return old name -> new name."""
        self.copies += 1
        names: dict[str, str] = {}
        for tensor in graph.initializer:
            weight = type(tensor)()
            weight.CopyFrom(tensor)
            weight.name = names[tensor.name] = f"{tensor.name}@{self.copies}"
            self.weights.append(weight)
            self.add_constants([weight])
        return names

    def _constant(self, value: int) -> Any:
        """Return a node for an int64 or bool scalar, and record the scalar as a constant."""
        import numpy as np
        import onnx

        data = np.array(value, dtype=np.bool_ if isinstance(value, bool) else np.int64)
        constant = self._node("Constant", [], value=onnx.numpy_helper.from_array(data))
        self.constants[constant.output[0]] = value
        return constant

    def _node(self, operator: str, inputs: list[str], **attributes: Any) -> Any:
        import onnx

        self.copies += 1
        name = f"{operator}@{self.copies}"
        return onnx.helper.make_node(operator, inputs, [name], **attributes)

    def _stack(self, iterations: list[list[str]], outputs: Any, axes: list[int]) -> list[Any]:
        """Return the nodes that concatenate the results of all iterations."""
        import numpy as np
        import onnx

        nodes: list[Any] = []
        for place, output in enumerate(outputs):
            axis = axes[place] if axes else 0
            data = onnx.numpy_helper.from_array(np.array([axis], dtype=np.int64))
            at = self._node("Constant", [], value=data)
            parts = [
                # Since opset 13 the axes are an operand, before an attribute.
                self._node("Unsqueeze", [results[place], at.output[0]])
                if self.opset >= 13
                else self._node("Unsqueeze", [results[place]], axes=[axis])
                for results in iterations
            ]
            names = [part.output[0] for part in parts]
            nodes += [at, *parts, onnx.helper.make_node("Concat", names, [output], axis=axis)]
        return nodes


def _aliases(names: list[str], outputs: Any) -> list[Any]:
    """Return nodes that give values additional names."""
    import onnx

    return [
        onnx.helper.make_node("Identity", [name], [output])
        for name, output in zip(names, outputs, strict=False)
        if output
    ]


def _renamed(node: Any, names: dict[str, str]) -> Any:
    """Return a copy of a node with renamed values, also within its bodies."""
    renamed = type(node)()
    renamed.CopyFrom(node)
    renamed.input[:] = [names.get(name, name) for name in node.input]
    renamed.output[:] = [names.get(name, name) for name in node.output]
    for attribute in renamed.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            nodes = [_renamed(inner, names) for inner in graph.node]
            del graph.node[:]
            graph.node.extend(nodes)
            for value in graph.output:
                value.name = names.get(value.name, value.name)
    return renamed


def _int_list(attributes: dict[str, Any], name: str, count: int) -> list[int]:
    """Return a list attribute, zeros if it is absent."""
    return list(attributes[name].ints) if name in attributes else [0] * count
