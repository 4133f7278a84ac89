"""The key-value store of a world whose other ranks are absent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from onerank.ir.errors import CaptureError

_dist: Any = dist

_Store: Any = _dist.Store  # not exported by name


class FakeStore(_Store):
    """The default store of torch.distributed.

    Each `add` counts for all ranks, so that a barrier by counting ends. A key that only another
    rank would set is missing.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank = rank
        self._size = world_size
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        """Return a value.

        Raises:
            CaptureError: this rank has not set it.
        """
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` once for each rank, and return the sum."""
        total = int(self._values.get(key, b"0")) + amount * self._size
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set a value if it equals `expected`, or is missing and `expected` is empty; return it."""
        if self._values.get(key, b"") == _bytes(expected):
            self._values[key] = _bytes(value)
        return self._values.get(key, _bytes(expected))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._values[key] = self._values.get(key, b"") + _bytes(value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are present."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Return if all keys are present.

        Raises:
            CaptureError: this rank has not set one of them, and no other rank exists to set it.
        """
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise CaptureError(
                f"the script waits for key {missing[0]!r} of torch.distributed's store: rank "
                f"{self._rank} has not set it, and other ranks are absent. Send the value by "
                "broadcast_object_list or send_object_list, which onerank emulates",
                code="store-key-missing",
            )

    def delete_key(self, key: str) -> bool:
        """Remove a value, and return whether the key was present."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    getNumKeys = num_keys  # noqa: N815  the names that C++ calls through a PrefixStore
    deleteKey = delete_key  # noqa: N815

    def set_timeout(self, timeout: object) -> None:
        """Do nothing: there is no other rank to wait for."""


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
