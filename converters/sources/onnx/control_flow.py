"""Inline control flow that the model itself decides.

Control flow written out where the model itself tells how it goes.

An `If` becomes its branch where the condition is a constant, a `Loop` its body as often as it runs
where the trip count is one and the body never ends it early, a `Scan` its body once per slice where
its inputs' lengths are known. All others stay, to be reported.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onerank.ir.errors import OnnxError


def data_of(path: Path, tensor: Any) -> Any:
    """Return a weight's data as an array of its shape.

    Raises:
        OnnxError: it holds other data than its shape and type say.
    """
    import onnx

    try:
        return onnx.numpy_helper.to_array(tensor)
    except (TypeError, ValueError) as error:
        raise OnnxError(
            f"{path}: the weight {tensor.name!r} of shape {list(tensor.dims)} holds other "
            f"data ({error}); the file is damaged",
            code="onnx-damaged-weight",
        ) from error


MOST_NODES = 100_000
"""Nodes that one loop becomes at most; a longer one stays."""

Length = Callable[[str, int], int | None]
"""Size of a value along an axis, None where it is not known."""

Rule = Callable[[Any, dict[str, Any]], list[Any] | None]


def inline_control_flow(path: Path, proto: Any, length: Length) -> None:
    """Replace control flow in a model by the nodes that run; weights within it become its own.

    Args:
        path: where the model lies.
        proto: the model, changed.
        length: sizes of its inputs, weights, and values that it states the shape of.

    Raises:
        OnnxError: a scalar weight holds other data than its type says.
    """
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
    writer = _Writer(path, length, opset)
    writer.know(proto.graph.initializer)
    nodes = list(writer.written(proto.graph.node))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(writer.weights)


@dataclass(slots=True)
class _Writer:
    path: Path
    length: Length
    opset: int
    weights: list[Any] = field(default_factory=list[Any])
    constants: dict[str, Any] = field(default_factory=dict[str, Any])
    """Name -> value, of the scalars that are known."""
    copies: int = 0

    def know(self, tensors: Any) -> None:
        """Take the scalars among some weights for constants."""
        import onnx

        for tensor in tensors:
            inside = tensor.data_location != onnx.TensorProto.EXTERNAL
            if inside and list(tensor.dims) in ([], [1]):
                self.constants[tensor.name] = data_of(self.path, tensor).reshape(())[()]

    def written(self, nodes: Any) -> Iterator[Any]:
        """Yield nodes, control flow written out."""
        rules = {"If": self._if, "Loop": self._loop, "Scan": self._scan}
        for node in nodes:
            attributes = {attribute.name: attribute for attribute in node.attribute}
            rule = rules.get(node.op_type) if node.domain in ("", "ai.onnx") else None
            made = self._tried(rule, node, attributes) if rule else None
            if made is not None:
                yield from made
                continue
            if node.op_type == "Constant" and "value" in attributes:
                tensor = type(attributes["value"].t)()
                tensor.CopyFrom(attributes["value"].t)
                tensor.name = node.output[0]
                self.know([tensor])
            elif node.op_type == "Constant" and "value_int" in attributes:
                self.constants[node.output[0]] = attributes["value_int"].i
            elif node.op_type == "Identity" and node.input[0] in self.constants:
                self.constants[node.output[0]] = self.constants[node.input[0]]
            yield node

    def _tried(self, rule: Rule, node: Any, attributes: dict[str, Any]) -> list[Any] | None:
        """Return what a rule makes of a node, None where it stays: so does a malformed one."""
        weights = len(self.weights)
        try:
            made = rule(node, attributes) if self.copies < MOST_NODES else None
        except (LookupError, ValueError, TypeError, ArithmeticError):
            made = None
        if made is None:
            del self.weights[weights:]
        return made

    def _if(self, node: Any, attributes: dict[str, Any]) -> list[Any] | None:
        condition = self.constants.get(node.input[0])
        if condition is None:
            return None
        branch = attributes["then_branch" if condition else "else_branch"].g
        nodes, results = self._copy(branch, self._kept_weights(branch), [])
        return [*nodes, *_same(results, node.output)]

    def _loop(self, node: Any, attributes: dict[str, Any]) -> list[Any] | None:
        body = attributes["body"].g
        count = self.constants.get(node.input[0])
        given = node.input[1] if len(node.input) > 1 else ""
        begins = True if not given else self.constants.get(given)
        if count is None or not begins or int(count) * len(body.node) > MOST_NODES:
            return None
        weights = self._kept_weights(body)
        carried, stacked, made = list(node.input[2:]), list[list[str]](), list[Any]()
        for turn in range(int(count)):
            number, goes_on = self._constant(turn), self._constant(value=True)
            inputs = [number.output[0], goes_on.output[0], *carried]
            nodes, results = self._copy(body, weights, inputs)
            if not self.constants.get(results[0], False):
                return None  # the body may end the loop
            made += [number, goes_on, *nodes]
            carried = results[1 : 1 + len(carried)]
            stacked.append(results[1 + len(carried) :])
        final = node.output[: len(carried)]
        made += _same(carried, final)
        if not stacked and len(node.output) > len(final):
            return None  # nothing tells the shape of an empty result
        return made + self._stack(stacked, node.output[len(final) :], [])

    def _scan(self, node: Any, attributes: dict[str, Any]) -> list[Any] | None:
        body, count = attributes["body"].g, attributes["num_scan_inputs"].i
        if self.opset < 9:
            return None  # has an axis of batches
        states = len(node.input) - count
        axes = _listed(attributes, "scan_input_axes", count)
        back = _listed(attributes, "scan_input_directions", count)
        lengths = {
            self.length(name, axis) for name, axis in zip(node.input[states:], axes, strict=True)
        }
        turns = lengths.pop() if len(lengths) == 1 else None
        if not turns or turns * len(body.node) > MOST_NODES:
            return None
        weights = self._kept_weights(body)
        carried, stacked, made = list(node.input[:states]), list[list[str]](), list[Any]()
        for turn in range(turns):
            slices: list[str] = []
            for name, axis, reverse in zip(node.input[states:], axes, back, strict=True):
                place = self._constant(turns - 1 - turn if reverse else turn)
                made += [place, self._node("Gather", [name, place.output[0]], axis=axis)]
                slices.append(made[-1].output[0])
            nodes, results = self._copy(body, weights, [*carried, *slices])
            made += nodes
            carried = results[:states]
            stacked.append(results[states:])
        outputs = node.output[states:]
        axes = _listed(attributes, "scan_output_axes", len(outputs))
        if any(_listed(attributes, "scan_output_directions", len(outputs))):
            return None
        return made + _same(carried, node.output[:states]) + self._stack(stacked, outputs, axes)

    def _copy(
        self, graph: Any, weights: dict[str, str], inputs: list[str]
    ) -> tuple[list[Any], list[str]]:
        """Return the nodes of a graph run on some inputs, and its results, all names its own."""
        self.copies += 1
        names = dict(weights)
        names |= zip([value.name for value in graph.input], inputs, strict=True)
        for node in graph.node:
            names |= {name: f"{name}@{self.copies}" for name in node.output if name}
        nodes = [_renamed(node, names) for node in graph.node]
        given: list[str] = [value.name for value in graph.output]
        results = [names.get(name, name) for name in given]
        return list(self.written(nodes)), results

    def _kept_weights(self, graph: Any) -> dict[str, str]:
        """Make the weights of a graph the model's own; return their new names."""
        self.copies += 1
        names: dict[str, str] = {}
        for tensor in graph.initializer:
            kept = type(tensor)()
            kept.CopyFrom(tensor)
            kept.name = names[tensor.name] = f"{tensor.name}@{self.copies}"
            self.weights.append(kept)
            self.know([kept])
        return names

    def _constant(self, value: int) -> Any:
        """Return a node that makes a scalar, of int64 or bool, which is known from now on."""
        import numpy as np
        import onnx

        data = np.array(value, dtype=np.bool_ if isinstance(value, bool) else np.int64)
        made = self._node("Constant", [], value=onnx.numpy_helper.from_array(data))
        self.constants[made.output[0]] = value
        return made

    def _node(self, operator: str, inputs: list[str], **attributes: Any) -> Any:
        import onnx

        self.copies += 1
        name = f"{operator}@{self.copies}"
        return onnx.helper.make_node(operator, inputs, [name], **attributes)

    def _stack(self, turns: list[list[str]], outputs: Any, axes: list[int]) -> list[Any]:
        """Return the nodes that put the results of all turns one behind another."""
        import numpy as np
        import onnx

        made: list[Any] = []
        for place, output in enumerate(outputs):
            axis = axes[place] if axes else 0
            data = onnx.numpy_helper.from_array(np.array([axis], dtype=np.int64))
            at = self._node("Constant", [], value=data)
            parts = [
                self._node("Unsqueeze", [results[place], at.output[0]])
                if self.opset >= 13
                else self._node("Unsqueeze", [results[place]], axes=[axis])
                for results in turns
            ]
            names = [part.output[0] for part in parts]
            made += [at, *parts, onnx.helper.make_node("Concat", names, [output], axis=axis)]
        return made


def _same(names: list[str], outputs: Any) -> list[Any]:
    """Return nodes that give values further names."""
    import onnx

    return [
        onnx.helper.make_node("Identity", [name], [output])
        for name, output in zip(names, outputs, strict=False)
        if output
    ]


def _renamed(node: Any, names: dict[str, str]) -> Any:
    """Return a copy of a node with other names of values, those that its own graphs read too."""
    made = type(node)()
    made.CopyFrom(node)
    made.input[:] = [names.get(name, name) for name in node.input]
    made.output[:] = [names.get(name, name) for name in node.output]
    for attribute in made.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            nodes = [_renamed(inner, names) for inner in graph.node]
            del graph.node[:]
            graph.node.extend(nodes)
            for value in graph.output:
                value.name = names.get(value.name, value.name)
    return made


def _listed(attributes: dict[str, Any], name: str, count: int) -> list[int]:
    """Return a list of integers, zeros where it is not given."""
    return list(attributes[name].ints) if name in attributes else [0] * count
