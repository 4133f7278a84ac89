"""Device memory that a script holds between two steps, by purpose."""

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onerank.capture.patches import live

Held = dict[str, tuple[int, ...]]
"""Class of memory -> a figure of each storage (its bytes, or its pool), the largest first."""


class Storage(NamedTuple):
    """Memory that tensors share: bytes and address."""

    bytes: int
    address: int


def sizes_of(storages: Mapping[str, Iterable[Storage]]) -> Held:
    """Return the bytes of each storage."""
    return {name: tuple(one.bytes for one in found) for name, found in storages.items()}


def holdings(device_type: str) -> dict[str, tuple[Storage, ...]]:
    """Return the storages of all live tensors on a kind of device.

    Classes are "parameters", "gradients", "optimizer" (its state) and "other" (buffers, data, what
    a script keeps); a storage counts once, for the first that holds it, the largest first. What
    libraries hold without a tensor (cuBLAS workspaces, the buckets of DistributedDataParallel) is
    not among them.
    """
    with _unrecorded():
        tensors, optimizers = live(torch.Tensor), live(torch.optim.Optimizer)
        parameters = [tensor for tensor in tensors if issubclass(type(tensor), nn.Parameter)]
        for optimizer in optimizers:
            parameters += [one for group in optimizer.param_groups for one in group["params"]]
        states = (value for optimizer in optimizers for value in _values(optimizer.state))
        grads = (_gradient(one) for one in [*parameters, *tensors])
        seen: set[int] = set()
        return {
            name: tuple(sorted(_storages(found, device_type, seen), key=lambda one: -one.bytes))
            for name, found in (
                ("parameters", parameters),
                ("gradients", (grad for grad in grads if grad is not None)),
                ("optimizer", states),
                ("other", tensors),
            )
        }


@contextlib.contextmanager
def _unrecorded() -> Generator[None]:
    """Keep operators out of the profile: the parts of a sparse tensor are read by operators."""
    autograd: Any = torch.autograd
    autograd._enable_record_function(False)
    try:
        yield
    finally:
        autograd._enable_record_function(True)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    if isinstance(tensor, FakeTensor):
        return None
    with contextlib.suppress(RuntimeError):  # torch.compile leaves tensors without a storage
        return tensor.grad if tensor.is_leaf else None
    return None


def _values(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an optimizer's state, however deep."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():  # pyright: ignore[reportUnknownVariableType]
            yield from _values(value)
    elif isinstance(state, list | tuple):
        for value in state:  # pyright: ignore[reportUnknownVariableType]
            yield from _values(value)


def _storages(tensors: Iterable[torch.Tensor], device_type: str, seen: set[int]) -> list[Storage]:
    storages: list[Storage] = []
    for tensor in tensors:
        for dense in _inside(tensor):
            with contextlib.suppress(RuntimeError):
                if dense.device.type != device_type:
                    continue
                storage = dense.untyped_storage()
                address = storage.data_ptr()
                if address not in seen and storage.nbytes():
                    seen.add(address)
                    storages.append(Storage(storage.nbytes(), address))
    return storages


_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _COLUMNS),
}
"""Methods that give the dense tensors which a sparse one is made of, by its layout."""


def _inside(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor is made of (a DTensor's local one, a sparse one's)."""
    if isinstance(tensor, FakeTensor | ShardedTensor):  # the shards are tensors of their own
        return
    if tensor.layout in _PARTS:
        for part in _PARTS[tensor.layout]:
            yield getattr(tensor, part)().detach()
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):  # a DTensor names its mesh as well
            yield from _inside(inner)
