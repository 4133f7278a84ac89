"""Known numbers inside a graph that Inductor compiled.

A router inside a compiled graph decides about sizes: the graph reads how many tokens each expert
gets, and splits or exchanges the tokens by these counts. Generated kernels compute the counts, and
no device runs them. So this module extends the source of a graph's wrapper: after each launch it
computes on the CPU what the kernel writes. It evaluates the FX graph that Inductor lowered, on the
numbers of the graph's inputs and of the results of libraries.
"""

import ast
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from onerank.capture.fake_tensors import is_integral, is_small
from onerank.capture.no_device.operators.fake_operators import FakeOperators
from onerank.capture.no_device.operators.operator_calls import tensors_in
from onerank.capture.no_device.operators.router_choices import CHOICES
from onerank.capture.patches import untraced

_torch: Any = torch

NUMBERS = "onerank_numbers"
"""Name of the function that the extended source of a wrapper calls."""

_WAIT = "wait_tensor"  # returns its operand

_UNKNOWN = object()


class GraphNumbers:
    """Computes the numbers of a compiled graph that follow from known ones.

    Attributes:
        computed: buffers that generated kernels write -> their node of the FX graph; None if their
            numbers stay unknown.
        returned: buffers that libraries return -> their node.
    """

    def __init__(self, graph: Any, operators: FakeOperators) -> None:
        """Read a graph that Inductor has scheduled.

        Args:
            graph: Inductor's `GraphLowering`.
            operators: the emulation of operators, which holds the known numbers of tensors.
        """
        self._operators = operators
        self._module = graph.module
        nodes = list(graph.module.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        (outputs,) = next(node for node in nodes if node.op == "output").args
        self._outputs: Sequence[Any] = outputs if isinstance(outputs, list | tuple) else [outputs]
        self._scalars = {
            str(symbol): node.args[0]
            for node in nodes
            for symbol in node.meta.get("unbacked_bindings") or ()
            if _name(node.target) == "_local_scalar_dense"
        }
        self.computed: dict[str, Any] = {}
        self.returned: dict[str, Any] = {}
        for buffer in graph.buffers:
            node = getattr(buffer, "origin_node", None) or getattr(buffer, "fx_node", None)
            if type(buffer).__name__ == "ComputedBuffer":
                # Shapes follow from indices, counts and masks, not from floating-point numbers.
                decides = is_integral(buffer.get_dtype())
                self.computed[buffer.get_name()] = node if decides else None
            elif node is not None:
                self.returned[buffer.get_name()] = node
        self._calls = threading.local()

    @property
    def decides(self) -> bool:
        """Whether numbers of the graph may decide about shapes, inside of it or after it."""
        outputs = (node.meta.get("val") for node in self._outputs if node is not None)
        integers = any(isinstance(value, Tensor) and is_integral(value.dtype) for value in outputs)
        return integers or bool(self._scalars)

    def extended(self, source: str) -> str:
        """Return a wrapper's source in which each statement on a buffer reports its numbers."""
        tree = _Extension(self).visit(ast.parse(source))
        return ast.unparse(ast.fix_missing_locations(tree))

    def report(self, launched: bool, symbol: str, buffers: Mapping[str, Any]) -> None:
        """Note the numbers of buffers after a statement; the extended source calls it.

        Args:
            launched: whether the statement launched a generated kernel.
            symbol: the size that is read from the one buffer next, else "".
            buffers: name -> tensor, or what a library returned.
        """
        values = self._calls.values
        for name, value in buffers.items():
            if symbol:
                read = self._value(self._scalars.get(symbol))
                if read is not _UNKNOWN:
                    self._set(value, read)
            elif launched:
                self._set(value, self._value(self.computed[name]))
            elif value is not None:
                values[self.returned[name]] = tree_map(self._known, value)

    def run(self, call: Any, args: list[Any]) -> Any:
        """Call a wrapper, and give its results their numbers."""
        outer = getattr(self._calls, "values", None)
        self._calls.values = {
            node: self._known(arg) for node, arg in zip(self._inputs, args, strict=True)
        }
        try:
            results = call(args)
            for node, result in zip(self._outputs, results, strict=True):
                if isinstance(result, FakeTensor) and is_integral(result.dtype):
                    self._set(result, self._value(node))
            return results
        finally:
            self._calls.values = outer

    def _known(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        numbers = self._operators.known.get(value)
        return _UNKNOWN if numbers is None else numbers

    def _set(self, tensor: Any, value: Any) -> None:
        """Set the numbers of a tensor that was written."""
        if not isinstance(tensor, FakeTensor):
            return
        numbers = None
        if isinstance(value, Tensor) and value.numel() == tensor.numel():
            with unset_fake_temporarily():
                # Views of the tensor are taken by its strides.
                numbers = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                ).copy_(value.reshape(tensor.shape))
        self._operators.known.overwrite(tensor, numbers)

    def _value(self, root: Any) -> Any:
        """Return the value of a node, `_UNKNOWN` if it does not follow from known ones."""
        values = self._calls.values
        if root is None:
            return _UNKNOWN
        pending = [root]
        while pending:
            node = pending[-1]
            missing = [each for each in node.all_input_nodes if each not in values]
            if node in values or node.op != "call_function" or not missing:
                if node not in values:
                    values[node] = self._computed(node)
                pending.pop()
            else:
                pending += missing
        return values[root]

    def _computed(self, node: Any) -> Any:
        """Return the value of a node whose inputs have theirs."""
        if node.op == "get_attr":
            return self._known(getattr(self._module, node.target))
        if node.op != "call_function" or not _is_computable(node):
            return _UNKNOWN
        values = self._calls.values
        name = _name(node.target)
        if name in CHOICES and values[node.args[0]] is _UNKNOWN:
            return self._chosen(node, name)
        if any(values[each] is _UNKNOWN for each in node.all_input_nodes):
            return _UNKNOWN
        args = map_arg(node.args, values.__getitem__)
        kwargs: Any = dict(map_arg(node.kwargs, values.__getitem__))
        return args[0] if name == _WAIT else _run_on_cpu(node.target, args, kwargs)

    def _chosen(self, node: Any, name: str) -> Any:
        """Return the choices of a router that a generated kernel computes."""
        arguments = node.target._schema.arguments
        given = {**dict(zip((a.name for a in arguments), node.args, strict=False)), **node.kwargs}
        operands = [given.get(a.name, a.default_value) for a in arguments]
        operands[0] = operands[0].meta["val"]
        results = None
        if _has_known_sizes(operands[0]):
            results = self._operators.routers.results(name, operands)
        use = self._operators.routers.take_use()
        if results is None:
            return _UNKNOWN
        if use is not None:
            use()
        if isinstance(results, Tensor):
            return results
        return tuple(_UNKNOWN if result is None else result for result in results)


# Dynamo must not trace the recording of a step.
untraced(GraphNumbers.run)
untraced(GraphNumbers.report)


def _run_on_cpu(target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of a function on numbers; `_UNKNOWN` if it is large or fails on the CPU.

    It fails, among others, where an operator has kernels for GPUs only. A script that reads a
    number that stays unknown gets a note or an error, as outside of compiled graphs.
    """
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    with unset_fake_temporarily():
        try:
            result = target(*args, **kwargs)
        except RuntimeError:
            return _UNKNOWN
    return result if all(map(is_small, tensors_in((result,)))) else _UNKNOWN


def _name(target: Any) -> str:
    """Return the name of an operator without namespace and overload; "" for other functions."""
    return getattr(target, "_opname", "")


def _is_computable(node: Any) -> bool:
    """Return whether the CPU can compute a node, whose result is small."""
    target = node.target
    if isinstance(target, OpOverload):
        if _torch.Tag.nondeterministic_seeded in target.tags:
            return False
        if target.namespace not in ("aten", "prims") and _name(target) != _WAIT:
            return False
    elif getattr(target, "__module__", "") not in ("_operator", "math", "torch"):
        return False
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or not _has_known_sizes(value) or is_small(value)


def _has_known_sizes(tensor: Any) -> bool:
    """Return whether each size of a tensor is a number, and none a symbol."""
    return all(isinstance(size, int) for size in tensor.shape)


class _Extension(ast.NodeTransformer):
    """Adds a call of `NUMBERS` after each statement of a wrapper that names a buffer."""

    def __init__(self, numbers: GraphNumbers) -> None:
        self._numbers = numbers

    def visit_Expr(self, node: ast.Expr) -> Any:
        """Extend a launch, or a call of a library that writes given buffers."""
        if not isinstance(node.value, ast.Call):
            return node
        function = node.value.func
        launched = isinstance(function, ast.Attribute) and function.attr == "run"
        buffers = self._numbers.computed if launched else self._numbers.returned
        return self._reported(node, launched, {name for name in _names(node) if name in buffers})

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Extend a call of a library that returns a buffer, or the read of a size."""
        target, value = node.targets[0], node.value
        if not isinstance(target, ast.Name):
            return node
        called = value.func if isinstance(value, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "item":
            read = ast.Name(f"{target.id}_read", ast.Store())
            return [
                ast.Assign([read], called.value),
                _report(False, target.id, [read.id]),
                *ast.parse(f"{target.id} = {read.id}.item(); del {read.id}").body,
            ]
        is_returned = target.id in self._numbers.returned
        return self._reported(node, False, {target.id} if is_returned else set())

    @staticmethod
    def _reported(node: ast.stmt, launched: bool, names: set[str]) -> Any:
        return [node, _report(launched, "", sorted(names))] if names else node


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _report(launched: bool, symbol: str, names: Sequence[str]) -> ast.stmt:
    buffers = ", ".join(f"{name!r}: {name}" for name in names)
    return ast.parse(f"{NUMBERS}({launched}, {symbol!r}, {{{buffers}}})").body[0]
