"""Results of operators on fake tensors, by torch's fake implementations or other rules."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._pytree import tree_map_only

from onerank.capture.no_device.operators.detections import Detections
from onerank.capture.no_device.operators.fake_kernels import (
    CPU_OPERAND_BYTES,
    RepeatedCalls,
    lacks_fake,
    shapes_by_cpu,
    shapes_of,
)
from onerank.capture.no_device.operators.known_results import KnownResults
from onerank.capture.no_device.operators.operator_calls import OperatorCall, is_on_gpu
from onerank.capture.no_device.operators.sparse_tensors import loses_elements
from onerank.capture.no_device.tensor_values import UnknownValues

# Operators of nested tensors of the strided layout, which C++ implements.
_NESTED = "_nested_tensor"


class FakeResults:
    """Gives the results of calls, as fake tensors.

    A result is, in this order: a tensor that the call is given to write; what the operator's fake
    implementation returns, or a rule of ours; and where its shape depends on numbers, what known
    numbers, masks or the limits of a detector determine. Anything else is refused.
    """

    def __init__(self, unknown: UnknownValues, known: KnownResults, detections: Detections) -> None:
        """Create it.

        Args:
            unknown: refuses calls whose results have unknown shapes.
            known: selections by known masks.
            detections: sizes of a detector's selections.
        """
        self._unknown = unknown
        self._known = known
        self._detections = detections
        self._repeated = RepeatedCalls()
        self._unimplemented: set[Any] = set()  # out-variants without a fake implementation

    def of_factory(self, call: OperatorCall) -> Any:
        """Return the result of a call without tensors among its operands."""
        return self._repeated.run(call.func, call.func, (), call.args, call.kwargs)

    def of(self, call: OperatorCall, numbers: Any) -> Any:
        """Return the results of a call with fake operands.

        Args:
            call: the call.
            numbers: the results as real tensors, if they are known; else None.

        Raises:
            CaptureError: the shapes of the results are not known; it names the script's line.
        """
        if (result := self._given(call)) is not None:
            return result
        name = call.schema.name
        shapes = shapes_of(name.removeprefix("aten::"), call.args)
        try:
            run = shapes or call.func
            result = self._repeated.run(run, call.func, call.tensors, call.args, call.kwargs)
            return self._unknown.refuse_operator(name) if loses_elements(call, result) else result
        except DynamicOutputShapeException:
            if numbers is not None:
                return tree_map_only(Tensor, _like, numbers)
            selected = self._known.selected_by_masks(call)
            if selected is None:
                selected = self._detections.selected(call)
            return self._unknown.refuse(name) if selected is None else selected
        except DataDependentOutputException:
            return self._unknown.answer() if numbers is None else numbers
        except RuntimeError as error:
            nested = any(each.is_nested and each.layout == torch.strided for each in call.tensors)
            if nested or call.schema.base.startswith(_NESTED):
                self._unknown.refuse_nested(name)
            # Few operators have a fake implementation for sparse tensors, and none for CSR.
            layouts = {each.layout for each in call.tensors} - {torch.strided, torch.jagged}
            untyped = layouts and (
                isinstance(error, NotImplementedError) or layouts != {torch.sparse_coo}
            )
            if lacks_fake(call.func) or untyped:
                return self._without_fake(call)
            raise

    def _without_fake(self, call: OperatorCall) -> Any:
        """Return the results of an operator of which torch has no fake implementation."""
        # Inductor calls `_scaled_mm.out`.
        given = call.given_results()
        if not given:
            run = shapes_by_cpu(call.func)
            size = sum(t.nbytes for t in call.tensors if t.layout == torch.strided)
            if run is not None and size > CPU_OPERAND_BYTES:
                reason = f", and {size / 1e9:.1f} GB of operands are too many to run it on the CPU"
                self._unknown.refuse_operator(call.schema.name, reason)
            operands = call.tensors, call.args, call.kwargs
            results = self._repeated.run(run, call.func, *operands) if run is not None else None
            return self._unknown.refuse_operator(call.schema.name) if results is None else results
        # Each attempt of torch takes some milliseconds.
        if call.schema.namespace == "aten" and is_on_gpu(given[0]):
            self._unimplemented.add(call.func)
        return given[0] if len(given) == 1 else given

    def _given(self, call: OperatorCall) -> Any:
        """Return the results that an operator is given to write; None if torch has to infer any."""
        first = call.args[0] if call.args else None
        if call.schema.writes_first and isinstance(first, FakeTensor):
            # Its shape stays, and its numbers have no meaning. torch checks other operands.
            alone = len(call.tensors) == 1 and first.constant is None
            return first if alone or is_on_gpu(first) else None
        given = call.given_results() if call.func in self._unimplemented else ()
        if not given or not is_on_gpu(given[0]):
            return None
        return given[0] if len(given) == 1 else given


def _like(numbers: Tensor) -> Tensor:
    """Return a fake tensor on the device with the shape of known numbers."""
    return torch.empty(numbers.shape, dtype=numbers.dtype, device="cuda")
