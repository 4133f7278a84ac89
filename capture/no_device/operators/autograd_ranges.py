"""Ranges around an operator: the autograd node with its number, and those that a script opens.

torch's engine opens a range for each node of a backward, and numbers nodes and operators. A mode of
Python sees only the operators, so the ranges and numbers are made here as the engine makes them.
"""

import sys
import threading
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onerank.capture.no_device.event_log import EventLog, RecordedEvent
from onerank.capture.no_device.operators.operator_calls import OperatorCall

_torch: Any = torch

# What autograd writes into a tensor of zeros, or adds to a gradient.
_IN_PLACE = ("add", "index_put", "scatter", "scatter_add", "index_add")

# Above the sequence numbers of autograd: nodes such as AccumulateGrad have the largest integer.
_UNNUMBERED = 1 << 62

# Functions between the caller of an operator and its record.
_PASSES_ON = "__torch_dispatch__"
_BETWEEN = ("onerank.capture.no_device.", "torch._compile", "torch._dynamo.", "torch._ops")

_FSDP = "torch.distributed.fsdp"

# What DDP's reducer runs for each gradient; accumulating itself adds, or clones.
_REDUCER_OPERATORS = frozenset({"aten::mul", "aten::div_", "aten::copy_"})


class AutogradRanges:
    """Records the ranges of autograd nodes and scripts, and numbers operators as autograd does.

    Args:
        log: receives the ranges.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._numbered = threading.local()  # autograd numbers the nodes of each thread from 0
        self._open = threading.local()  # ranges of each thread that are open

    def follow(self) -> Any:
        """Open the range of the autograd node that runs on this thread, as torch's engine does.

        Returns:
            The node; None outside of backward.
        """
        node = _torch._C._current_autograd_node()
        if not self._log.recording or node == self._log.innermost_node():
            return node
        innermost = self._log.innermost()
        if innermost is not None and innermost.node is not None:
            self._log.end(innermost)
        if node is None:
            return None
        if isinstance(node, _torch._C._FunctionBase):
            self._log.call_python("function")  # the backward of a function in Python
        number: int = node._sequence_nr()
        sequence = number if number < _UNNUMBERED else -1
        self._log.begin(
            f"autograd::engine::evaluate_function: {node.name()}",
            sequence=sequence,
            forward_thread=1 if sequence >= 0 else 0,
            of_autograd=True,
            node=node,
        )
        return node

    def annotate(self, operator: str, args: Any) -> Any:
        """Record a `record_function` range that Python opens or closes.

        Args:
            operator: name of the operator that does it, without namespace.
            args: its arguments.
        """
        open_ranges: list[RecordedEvent | None] = self._open.__dict__.setdefault("ranges", [])
        if operator.startswith("_record_function_enter"):
            self.follow()
            open_ranges.append(self._log.begin(args[0], "user_annotation"))
            with unset_fake_temporarily():
                return _torch.ops.profiler._record_function_enter_new(args[0], None)
        # Each access makes a new Python object of the record, so nesting identifies the range.
        if open_ranges:
            self._log.end(open_ranges.pop())
        with unset_fake_temporarily():
            return _torch.ops.profiler._record_function_exit._RecordFunction(args[0])

    def number_of_function(self) -> int:
        """Return the number that the node of an autograd function will get; -1 for no node."""
        if not torch.is_grad_enabled():
            return -1
        self._numbered.last = number = _torch.autograd._get_sequence_nr()
        return number

    def number_of_operator(self) -> int:
        """Return the number of a differentiable operator's node; -1 for no node.

        The node is numbered before the operator runs here; an operator without a node repeats the
        number of the one before.
        """
        if not torch.is_grad_enabled():
            return -1
        latest: int = _torch.autograd._get_sequence_nr() - 1
        if latest == getattr(self._numbered, "last", -1):
            return -1
        self._numbered.last = latest
        return latest

    def is_untracked(self) -> bool:
        """Return whether autograd records no operator here: under `no_grad`, outside of a backward.

        The forward of an autograd function and the copies of FSDP's groups record none either.
        They count as other operators: figures of a host add to those (`tools/fit`).
        """
        if torch.is_grad_enabled() or _torch._C._current_graph_task_id() != -1:
            return False
        return not self._log.in_function() and not _calling_module().startswith(_FSDP)

    def writes_in_place(self, call: OperatorCall) -> bool:
        """Return whether autograd would write an operator's result into its first operand.

        It adds two gradients of one tensor in place if nothing else has the first one's memory
        (`accumulate` in torch/csrc/autograd/input_buffer.cpp), and writes the gradient of an
        indexed tensor into zeros that it creates (`index_backward` and others in
        FunctionsManual.cpp). It never does so for tensors of a subclass, such as fake ones. Python
        code that runs in the backward, as that of DTensors or of an autograd function, has a new
        result.
        """
        if call.schema.base not in _IN_PLACE or not _is_backward() or _is_called_by_python():
            return False
        innermost = self._log.innermost()
        if innermost is not None and innermost.category == "cpu_op" and innermost.node is None:
            return False  # a part of another operator
        first = call.tensors[0]
        if call.schema.base == "add":
            if len(call.tensors) != 2 or len(call.args) != 2 or call.kwargs:
                return False
            second = call.tensors[1]
            if (first.shape, first.dtype) != (second.shape, second.dtype):
                return False
        storage: Any = first.untyped_storage()
        holders = 2  # the tensor, and the Python object of its storage
        return _torch._C._storage_Use_Count(storage._cdata) <= holders


def is_of_reducer(node: Any, name: str) -> bool:
    """Return whether an operator is one of DDP's reducer.

    It moves each gradient into its bucket when it is ready, in a hook of the node that accumulates
    it, and the sums back after the last node.

    Args:
        node: autograd node that runs, or None.
        name: of the operator.
    """
    if not _is_backward():
        return False
    if node is not None and node.name() != "torch::autograd::AccumulateGrad":
        return False
    # FSDP1's hooks of these nodes run the same operators from Python.
    return name in _REDUCER_OPERATORS and not _is_called_by_python()


def _is_called_by_python() -> bool:
    """Return whether Python code called the running operator, not autograd's engine.

    The engine calls operators from a thread without Python frames, or from `torch.autograd.graph`.
    """
    return _calling_module() not in ("", "torch.autograd.graph")


def _calling_module() -> str:
    """Return the name of the module whose code called the running operator; "" without one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name != _PASSES_ON and not module.startswith(_BETWEEN):
            return module
        frame = frame.f_back
    return ""


def _is_backward() -> bool:
    """Return whether autograd runs a backward, without `create_graph`."""
    return _torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
