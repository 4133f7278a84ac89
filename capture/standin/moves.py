"""What a stand-in kernel reads and writes, as memory of the GPU."""

from typing import NamedTuple

from torch import Tensor


class Memory(NamedTuple):
    """Bytes in a row from an address on."""

    start: int
    bytes: int


Move = tuple[Memory, Memory | None]
"""(source, target): a shorter source repeats, without a target it is only read."""


def memory(tensor: Tensor) -> Memory:
    """Return the memory of a contiguous tensor."""
    return Memory(tensor.data_ptr(), tensor.nbytes)
