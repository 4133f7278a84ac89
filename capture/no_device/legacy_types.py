"""`torch.cuda.FloatTensor` and the other legacy types, which only a CUDA build of torch has."""

from collections.abc import Callable
from typing import Any

import torch

_torch: Any = torch

_PREFIX = "torch.cuda."

_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class _LegacyType(type):
    """Type of the legacy types: each creates tensors of its data type on the GPU."""

    def __instancecheck__(cls, instance: object) -> bool:
        is_tensor = isinstance(instance, torch.Tensor)
        return is_tensor and instance.is_cuda and instance.dtype == _dtype(cls.__name__)

    def __call__(cls, *given: Any, device: Any = "cuda") -> Any:
        """Return a tensor of given numbers, a view of a tensor, or one of a size, not filled."""
        if len(given) == 1 and isinstance(given[0], torch.Tensor):
            if not cls.__instancecheck__(given[0]):
                raise TypeError(f"expected {cls.__name__} (got {given[0].type()})")
            return given[0].detach()
        dtype = _dtype(cls.__name__)
        if len(given) == 1 and not isinstance(given[0], int | torch.Size):
            return torch.tensor(given[0], dtype=dtype, device=device)
        return torch.empty(*(given or (0,)), dtype=dtype, device=device)


def legacy_types() -> dict[str, type]:
    """Return the types by their names in `torch.cuda`."""
    return {name: _LegacyType(_PREFIX + name, (), {}) for name in _DTYPES}


def _dtype(name: str) -> torch.dtype:
    """Return the data type of a legacy type of the GPU, by its full name.

    Raises:
        ValueError: there is no such type, as torch says.
    """
    dtype = _DTYPES.get(name.removeprefix(_PREFIX))
    if dtype is None:
        raise ValueError(f"invalid type: '{name}'")
    return dtype


def _of_gpu(kind: object) -> str | None:
    """Return the name of a legacy type of the GPU, given as a type or a name; else None."""
    name = kind.__name__ if isinstance(kind, _LegacyType) else kind
    return name if isinstance(name, str) and name.startswith(_PREFIX) else None


def tensor_type() -> Callable[..., Any]:
    """Return a replacement of `Tensor.type`, which needs a driver for a type of the GPU."""
    original: Any = torch.Tensor.type

    # The argument's name is that of torch.
    def type_of(tensor: Any, dtype: Any = None, non_blocking: bool = False, **named: Any) -> Any:
        name = _of_gpu(dtype)
        if name is None:
            return original(tensor, dtype, non_blocking, **named)
        device = tensor.device if tensor.is_cuda else "cuda"
        return tensor.to(device=device, dtype=_dtype(name), non_blocking=non_blocking)

    return type_of


def default_tensor_type() -> Callable[[Any], None]:
    """Return a replacement of `torch.set_default_tensor_type`."""
    original = torch.set_default_tensor_type
    changed = False

    def set_default_tensor_type(t: Any, /) -> None:
        nonlocal changed
        name = _of_gpu(t)
        if changed:
            _torch.set_default_device(None)
            # `torch.Tensor` inherits it again.
            del _torch.Tensor.__new__
        changed = name is not None
        if name is None:
            original(t)
            return
        torch.set_default_dtype(_dtype(name))
        _torch.set_default_device("cuda")
        # `torch.Tensor(...)` is a constructor of the default type, which no default device changes.
        _torch.Tensor.__new__ = staticmethod(_constructor(name))

    return set_default_tensor_type


def _constructor(name: str) -> Callable[..., Any]:
    """Return `torch.Tensor.__new__` for a default type, by its full name."""
    original: Any = torch.Tensor.__new__
    default = getattr(torch.cuda, name.removeprefix(_PREFIX))

    def new(cls: Any, *given: Any, **named: Any) -> Any:
        return default(*given, **named) if cls is torch.Tensor else original(cls, *given, **named)

    return new
