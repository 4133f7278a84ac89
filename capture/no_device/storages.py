"""Storages of fake tensors: their numbers, and the memory that they would take on the device."""

import itertools
import threading
import weakref
from typing import Any

from torch import Tensor

from onerank.capture.no_device.event_log import EventLog

# Distance of two made-up addresses: above the size of any storage.
_APART = 1 << 40


class Storages:
    """Numbers the storages of tensors, and records allocations and frees on the device."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._numbers = itertools.count(1)
        self._live: dict[int, tuple[int, int, weakref.ref[Any]]] = {}

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, which no other live storage has."""
        storage: Any = tensor.untyped_storage()
        key: int = storage._cdata
        known = self._live.get(key)
        if known is not None:
            return known[0]
        number = next(self._numbers)
        taken = self._log.allocate(number, storage.nbytes()) if tensor.is_cuda else 0
        self._live[key] = number, taken, weakref.ref(storage, lambda _: self._freed(key))
        return number

    def address(self, tensor: Tensor) -> int:
        """Return an address for a tensor's storage: scripts and torch compare addresses."""
        return self.number(tensor) * _APART

    def address_of_storage(self, storage: Any) -> int:
        """Return the address of a storage that tensors were seen with, else 0."""
        known = self._live.get(storage._cdata)
        return known[0] * _APART if known is not None and storage.nbytes() else 0

    def resize(self, storage: Any, size: int) -> None:
        """Record that a storage is resized, as FSDP frees and allocates gathered parameters."""
        key: int = storage._cdata
        if key not in self._live:
            return
        number, taken, reference = self._live[key]
        if taken:
            self._log.free(number, taken)
        taken = self._log.allocate(number, size) if size else 0
        self._live[key] = number, taken, reference

    def _freed(self, key: int) -> None:
        number, taken, _ = self._live.pop(key)
        if taken:
            self._log.free(number, taken)


class Workspaces:
    """Memory that cuBLAS keeps: one block per thread that runs matrix products.

    torch has a cuBLAS handle per thread and stream, and allocates the workspace of each from its
    own caching allocator (`cublasWorkspaceConfig` in aten/src/ATen/cuda/CublasHandlePool.cpp).
    """

    def __init__(self, log: EventLog, bytes_each: int) -> None:
        self._log = log
        self._bytes_each = bytes_each
        self._threads: set[int] = set()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each block."""
        return (self._bytes_each,) * len(self._threads)

    def use(self) -> None:
        """Allocate the block of this thread at its first product."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads.add(thread)
            # Negative numbers, which no storage of a tensor has.
            self._log.allocate(-len(self._threads), self._bytes_each)
