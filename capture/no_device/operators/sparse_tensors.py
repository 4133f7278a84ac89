"""Sparse tensors (COO): how many elements they have, and which operators of CUDA run on them.

torch's fake implementations for sparse tensors give shapes, not the number of elements.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from onerank.capture.fake_tensors import sparse_parts, sparse_tensor
from onerank.capture.no_device.operators.operator_calls import OperatorCall, tensors_in
from onerank.capture.no_device.operators.triton_kernels import KernelLaunch
from onerank.capture.no_device.tensor_values import Known, UnknownValues

# torch's dispatcher and autograd's nodes have no public names and no types.
_modes: Any = _python_dispatch
_torch: Any = torch

# An attribute of a sparse tensor: the known numbers of its indices. Each access of the indices
# creates a new tensor, which could not keep them.
_INDICES = "_onerank_indices"

COALESCE = "aten::_coalesce"

# Operators that create a sparse tensor -> the place of its indices among their operands. The
# gradient of a table has an element for each looked-up row, in their order.
_CREATES = {
    "_sparse_coo_tensor_with_dims_and_tensors": 3,
    "_embedding_bag_backward": 1,
    "embedding_sparse_backward": 1,
}


class SparseTensors:
    """Runs operators of sparse tensors."""

    def __init__(
        self,
        mode: TorchDispatchMode,
        launch: Callable[[KernelLaunch], None],
        known: Known,
        unknown: UnknownValues,
    ) -> None:
        """Create it.

        Args:
            mode: records the operators that an operator consists of.
            launch: records a kernel that belongs to no other operator.
            known: numbers of small tensors.
            unknown: refuses what depends on unknown numbers.
        """
        self._mode = mode
        self._launch = launch
        self._known = known
        self._unknown = unknown

    def parts_of(self, base: str, args: Sequence[Any]) -> Callable[..., Tensor] | None:
        """Return what runs an operator by the operators of its parts; None: it is one operator.

        Args:
            base: its name without `aten::`.
            args: its positional arguments.
        """
        if not any(isinstance(each, FakeTensor) for each in args[:2]):
            return None  # a real tensor on the CPU, which is computed
        if base == "sparse_mask" and len(args) == 2 and not are_sparse(args[:1]):
            return self._taken if args[1].sparse_dim() == 1 else None
        if base not in ("_coalesce", "add_", "clone") or not are_sparse(args[:2]):
            return None
        return {"_coalesce": self._coalesced, "add_": self._add, "clone": self._clone}[base]

    def follow(self, call: OperatorCall, result: Any) -> None:
        """Keep the numbers of indices that a new sparse tensor takes or that an operator reads."""
        base = call.schema.base
        if base in _CREATES and are_sparse([result]):
            numbers = self._known.get(call.operands[_CREATES[base]])
            if numbers is not None:
                with unset_fake_temporarily():
                    # A padding index has no element.
                    same = numbers.numel() == result._nnz() * result.sparse_dim()
                    numbers = numbers.reshape(result.sparse_dim(), -1) if same else None
            _keep(result, numbers)
        elif base in ("_indices", "indices") and isinstance(result, FakeTensor):
            self._known.set(result, getattr(call.args[0], _INDICES, None))

    def _coalesced(self, tensor: Tensor) -> Tensor:
        """Return a sparse tensor with one element for each distinct index.

        As in `_coalesce_sparse_cuda` of SparseCUDATensor.cu, the indices are sorted, and a kernel
        sums the elements that have the same one.

        Raises:
            CaptureError: the indices are unknown, and so is how many are distinct.
        """
        indices, values = sparse_parts(tensor)
        numbers: Tensor | None = getattr(tensor, _INDICES, None)
        if numbers is None:
            self._unknown.refuse(COALESCE)
        with unset_fake_temporarily():
            distinct = torch.unique(numbers, dim=1)
        with self._mode:
            places = indices[0].clone()
            for size, axis in zip(tensor.shape[1:], indices[1:], strict=False):
                places = places * size + axis
            places, order = torch.sort(places)
            summed = values.new_empty((distinct.shape[1], *values.shape[1:]))
            unique = indices.new_empty(distinct.shape)
        self._launch(KernelLaunch(COALESCE, (places, order, values), (summed,), (summed,)))
        return self._created(unique, summed, tensor.shape, distinct)

    def _taken(self, source: Tensor, mask: Tensor) -> Tensor:
        """Return the rows of a tensor at the places of a mask, as `sparse_mask` does.

        It multiplies by a mask of ones (SparseTensor.cpp).
        """
        indices, values = sparse_parts(mask)
        with self._mode:
            ones = values.new_ones(1).expand_as(values)
            rows = source.index_select(0, indices[0]) * ones
        return self._created(indices, rows, source.shape, getattr(mask, _INDICES, None))

    def _created(
        self, indices: Tensor, values: Tensor, shape: Sequence[int], numbers: Tensor | None
    ) -> Tensor:
        """Return a sparse tensor whose indices are distinct."""
        result: Any = sparse_tensor(indices, values, shape)
        with _modes._disable_current_modes():
            result._coalesced_(True)
        _keep(result, numbers)
        return result

    def _clone(self, tensor: Tensor, **_: Any) -> Tensor:
        """Return a clone of a sparse tensor, whose fake clone of torch has no elements."""
        # On a GPU `AccumulateGrad` keeps a gradient to which nothing else refers, without a clone.
        # Python refers to every fake tensor.
        if _torch._C._current_autograd_node() is not None and not torch.is_grad_enabled():
            return tensor
        with self._mode:
            indices, values = (part.clone() for part in sparse_parts(tensor))
        result = sparse_tensor(indices, values, tensor.shape)
        _keep(result, getattr(tensor, _INDICES, None))
        return result

    def _add(self, target: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
        """Add to a sparse tensor in place; torch's fake `add_` keeps the number of elements.

        As in `add_out_sparse_cuda` of SparseCUDATensorMath.cu, the result has the elements of both
        operands: a step that accumulates gradients of a table appends those of each backward.
        """
        numbers: list[Any] = [getattr(each, _INDICES, None) for each in (target, other)]
        with self._mode:
            indices, values = sparse_parts(other)
            added = values if alpha == 1 else values * alpha
            own_indices, own_values = sparse_parts(target)
            indices = torch.cat([own_indices, indices], 1)
            values = torch.cat([own_values, added])
        with _modes._disable_current_modes():
            target.data = sparse_tensor(indices, values, target.shape)
        with unset_fake_temporarily():
            known = all(each is not None for each in numbers)
            _keep(target, torch.cat(numbers, 1) if known else None)
        return target


def are_sparse(operands: Sequence[Any]) -> bool:
    """Return whether all operands are sparse tensors."""
    return all(isinstance(each, Tensor) and each.layout == torch.sparse_coo for each in operands)


def loses_elements(call: OperatorCall, result: Any) -> bool:
    """Return whether a fake result is sparse and empty, although an operand has elements."""
    operands = [each for each in call.tensors if each.layout == torch.sparse_coo]
    if not any(each._nnz() for each in operands):
        return False
    return any(are_sparse([each]) and not each._nnz() for each in tensors_in((result,)))


def _keep(tensor: Any, numbers: Tensor | None) -> None:
    if numbers is not None:
        setattr(tensor, _INDICES, numbers)
    elif hasattr(tensor, _INDICES):
        delattr(tensor, _INDICES)
