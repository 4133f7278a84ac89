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


def _get_nested_int(offsets: Tensor) -> Any:
    return _jagged.get_tensor_symint(offsets)


def _set_nested_int(offsets: Tensor, ragged_size: Any) -> None:
    _jagged._tensor_symint_registry[offsets] = ragged_size


# torch copies this attribute from offsets to those on another device if the latter are fake, and
# expects it of a fake tensor only. A batch of real numbers moves to an emulated GPU so.
nested_int_of_real_offsets = property(_get_nested_int, _set_nested_int)
