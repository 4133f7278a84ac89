"""The key-value store of a world whose other ranks do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from onerank.ir.errors import CaptureError

_dist: Any = dist

_Store: Any = _dist.Store  # not exported by name


class FakeStore(_Store):
    """What a script finds under its default store.

    Other ranks are taken to count (`add`) what this rank counts, and before it does: so a barrier
    by counting ends. What only they would set is not there.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank = rank
        self._size = world_size
        self._held: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value."""
        self._held[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        """Return a value.

        Raises:
            CaptureError: this rank has set none.
        """
        self.wait([key])
        return self._held[key]

    def add(self, key: str, amount: int) -> int:
        """Count for all ranks, and return the sum."""
        total = int(self._held.get(key, b"0")) + amount * self._size
        self._held[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set a value where it is `expected`, or nothing is there and nothing was expected."""
        if self._held.get(key, b"") == _bytes(expected):
            self._held[key] = _bytes(value)
        return self._held.get(key, _bytes(expected))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._held[key] = self._held.get(key, b"") + _bytes(value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Keep several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return all(key in self._held for key in keys)

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Return if all keys are present.

        Raises:
            CaptureError: this rank has not set one of them, and no other rank exists to set it.
        """
        missing = [key for key in keys if key not in self._held]
        if missing:
            raise CaptureError(
                f"the script waits for key {missing[0]!r} of torch.distributed's store, which rank "
                f"{self._rank} has not set, and other ranks are not there to set it: let them send "
                "it by broadcast_object_list or send_object_list, for which the script is run as "
                "the rank that sends",
                code="store-key-missing",
            )

    def delete_key(self, key: str) -> bool:
        """Forget a value, and return whether there was one."""
        return self._held.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many values there are."""
        return len(self._held)

    getNumKeys = num_keys  # noqa: N815  as C++ asks, through the prefixes torch puts before keys
    deleteKey = delete_key  # noqa: N815

    def set_timeout(self, timeout: object) -> None:
        """Do nothing: there is no other rank to wait for."""


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
