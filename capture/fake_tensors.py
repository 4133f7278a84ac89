"""Tensors with a shape and no numbers: what differs from real ones in Python."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.nn import parameter
from torch.utils import _python_dispatch

_modes: Any = _python_dispatch
_parameters: Any = parameter
_torch: Any = torch  # private names have no types


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape but no numbers."""
    return isinstance(tensor, FakeTensor)


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor has memory on a GPU; a fake one has none."""
    return tensor.is_cuda and not isinstance(tensor, FakeTensor)


def is_integral(dtype: torch.dtype) -> bool:
    """Return whether a dtype holds integers or bools."""
    return not dtype.is_floating_point and not dtype.is_complex


KNOWN_ELEMENTS = 1 << 20
"""Largest tensor of integers or bools on the GPU whose numbers are kept: token ids and masks. With
65,536 the mask of 16 sequences of 8,192 tokens was unknown, and the model built one of all pairs of
tokens."""

_KNOWN_FLOATS = 1 << 16  # largest such tensor of floats, unless it is computed

_COMPUTED_FLOATS = 1 << 22
"""Largest tensor of floats that is computed from known numbers. A detector matches 160,000 anchors
with the boxes of an image, up to 20, and the result decides about shapes."""

MOST_KNOWN_BOOLS = 1 << 22
"""Largest tensor of bools whose numbers are kept. Routers mark the experts of each token: 16,384
tokens and 256 experts."""


def is_small(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor may be kept."""
    return tensor.numel() <= most_known(tensor.dtype)


def most_known(dtype: torch.dtype) -> int:
    """Return the elements of the largest tensor of a dtype whose numbers may be kept."""
    if dtype.is_floating_point:
        return _KNOWN_FLOATS
    return MOST_KNOWN_BOOLS if dtype == torch.bool else KNOWN_ELEMENTS


def is_computable(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor may be computed from known ones.

    Constants have a lower limit, `is_small`: zeros are mostly states of optimizers.
    """
    if tensor.dtype.is_floating_point:
        return tensor.numel() <= _COMPUTED_FLOATS
    return is_small(tensor)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse tensor, without recording the two calls."""
    with _modes._disable_current_modes():
        return tensor._indices(), tensor._values()


def sparse_tensor(indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the sparse tensor of these indices and values, without recording its creation."""
    with _modes._disable_current_modes():
        return torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=False)


_ZERO = "_onerank_zero"


def mark_written(tensor: Tensor, *, zero: bool) -> None:
    """Note that a fake tensor was written, and whether with zeros."""
    if zero:
        setattr(tensor, _ZERO, True)
    elif hasattr(tensor, _ZERO):
        delattr(tensor, _ZERO)


def is_zero(tensor: Tensor) -> bool:
    """Return whether all numbers are zero; of a fake tensor, whether zeros were written last."""
    return hasattr(tensor, _ZERO) if isinstance(tensor, FakeTensor) else not tensor.any()


_subclass_of: Any = _torch._C.TensorBase._make_subclass


def fake_on(plain: Tensor, device: torch.device, state: Mapping[str, Any]) -> Tensor:
    """Return a fake tensor with the memory of a meta tensor; `FakeTensor` takes four times as long.

    Args:
        plain: on the meta device.
        device: that of the fake tensor.
        state: attributes of a fake tensor on this device that torch created.
    """
    fake = _subclass_of(
        FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
    )
    if state["fake_mode"]._allow_unsafe_data_ptr_access:
        _torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        _torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(state)
    return fake


# Not at import: the creation of a fake tensor queries the GPUs, and CUDA then works in no fork of
# this process, such as the senders of `fake_world/sender_processes.py`.
@functools.cache
def _internals() -> frozenset[str]:
    with FakeTensorMode():
        return frozenset(vars(torch.empty(0)))


def script_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that Python code has set on a tensor, without those of fake tensors."""
    if not isinstance(tensor, FakeTensor):
        return dict(vars(tensor))
    # A fake tensor keeps its state in the dictionary that holds a script's attributes, too.
    return {name: value for name, value in vars(tensor).items() if name not in _internals()}


_COMBINED: dict[type[Tensor], type[Tensor]] = {}

# A lazy module's parameter refuses its shape and most functions, which a fake mode reads and calls.
_OF_UNINITIALIZED: dict[str, Any] = {
    "shape": property(lambda tensor: tensor.size()),
    "__torch_function__": _torch._C._disabled_torch_function_impl,
}


def as_subclass(tensor: Tensor, kind: type[Tensor]) -> Tensor:
    """Return a tensor as an instance of a subclass, with the same memory and autograd history.

    A fake tensor becomes an instance of both classes.

    Args:
        tensor: a plain or fake tensor, or an instance of a subclass that this function made.
        kind: a subclass that adds no memory; `Tensor` itself undoes the call.
    """
    if not isinstance(tensor, FakeTensor):
        return tensor.as_subclass(kind)
    disabled: Any = torch._C.DisableTorchFunctionSubclass
    # A subclass must not see this view in its `__torch_function__`.
    with disabled():
        alias: Any = tensor.view_as(tensor)
    if kind is Tensor:
        alias.__class__ = FakeTensor
        return alias
    if kind not in _COMBINED:
        bases: Any = (kind, FakeTensor)
        added = _OF_UNINITIALIZED if issubclass(kind, _parameters.UninitializedTensorMixin) else {}
        _COMBINED[kind] = _equal_to(kind)(kind.__name__, bases, added)
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return _created(_COMBINED[kind], alias)
    alias.__class__ = _COMBINED[kind]
    return alias


def _created(cls: Any, alias: FakeTensor) -> Tensor:
    """Return a new instance of a class on the memory of a fake tensor, without its history.

    For classes with slots, such as torchrec's slices of a table: Python refuses to assign one to
    the `__class__` of an existing instance.
    """
    with in_kernel_invocation_manager(alias.fake_mode):
        plain = torch.empty_strided((0,), (1,), dtype=alias.dtype, device="meta")
        place = alias.storage_offset(), alias.shape, alias.stride()
        plain.set_(alias.untyped_storage(), *place)
    created: Tensor = FakeTensor.__new__(cls, alias.fake_mode, plain, alias.fake_device)
    return created.requires_grad_(alias.requires_grad)


def _equal_to(kind: type[Tensor]) -> Any:
    """Return a metaclass whose classes are equal to a subclass of tensors, such as for a dict."""
    # nanotron asserts `type(parameter) == NanotronParameter`; others choose a handler by a class.

    def equals(cls: type, other: object) -> bool:
        return other is cls or other is kind

    def hash_of_kind(_: type) -> int:
        return hash(kind)

    return type("Meta", (type(kind),), {"__eq__": equals, "__hash__": hash_of_kind})


def is_combined(tensor: object) -> bool:
    """Return whether `as_subclass` made a fake tensor an instance of another class too."""
    return isinstance(tensor, FakeTensor) and type(tensor) in _COMBINED.values()
