"""Nested tensors of the layout `torch.jagged`, whose values and offsets are fake tensors.

Their ragged size is a nested int, which identifies the offsets and has no value. torch keeps it in
a registry for real offsets, and in the tensor for fake ones, as a symbol of the graph that Dynamo
traces. Outside of a graph it is a plain nested int here, as that of real offsets.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nested._internal import nested_tensor
from torch.nested._internal.nested_int import NestedIntNode

from onerank.capture.patches import untraced

NESTED = "torch.nested._internal.nested_tensor"
"""The module that creates them."""

_torch: Any = torch
_jagged: Any = nested_tensor
_symbolic_nested_int: Callable[..., Any] = FakeTensorMode.create_symbolic_nested_int


def create_nested_int(mode: Any, *, nt_tensor_id: int | None = None) -> Any:
    """Return a nested int that no other offsets have (`create_symbolic_nested_int`)."""
    if mode.shape_env is not None:
        return _symbolic_nested_int(mode, nt_tensor_id=nt_tensor_id)
    # One counter for real and for fake offsets: equal ids would mean equal lengths.
    number = _jagged._tensor_id_counter
    _jagged._tensor_id_counter += 1
    return _torch.SymInt(NestedIntNode(number, 1))


def keeps_ragged_size() -> Callable[..., Any]:
    """Return a replacement of `get_tensor_symint`, which keeps a ragged size in real offsets too.

    When a nested tensor moves to a device where its offsets are fake, torch copies the ragged size
    from `nested_int_memo` of the old offsets, an attribute that only fake offsets have. A batch of
    real numbers that moves to an emulated GPU has real ones.
    """
    ragged_size_of: Callable[..., Any] = _jagged.get_tensor_symint

    def ragged_size(offsets: Any, *, coeff: int = 1) -> Any:
        size = ragged_size_of(offsets, coeff=coeff)
        kind: Any = type(offsets)
        if kind is Tensor and coeff == 1:
            offsets.nested_int_memo = size
        return size

    return untraced(ragged_size)
