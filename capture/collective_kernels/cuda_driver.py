"""The CUDA driver API, and GPU memory outside torch's allocator, where NCCL also allocates."""

import ctypes
import functools
import sys
from typing import Any

import torch
from torch import Tensor

from onerank.ir.errors import CaptureError


@functools.cache
def driver() -> Any:
    """Return the CUDA driver library.

    Raises:
        CaptureError: it cannot be loaded.
    """
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise CaptureError(
            f"collective kernels need the CUDA driver: {error}", code="collective-no-driver"
        ) from error
    pointer, count = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[count] * 7, pointer, pointer, pointer]
    return library


def allocate(size: int, purpose: str, remedy: str) -> int:
    """Return the address of `size` bytes on the current GPU, allocated until the process ends.

    Args:
        size: bytes.
        purpose: what the memory is for, for the error.
        remedy: what to do if the memory is not free, for the error.

    Raises:
        CaptureError: the memory is not free.
    """
    pointer = ctypes.c_uint64()
    if driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)):
        free, _ = torch.cuda.mem_get_info()
        raise CaptureError(
            f"{purpose} need {size} bytes, but the GPU has {free} free: {remedy}",
            code="collective-memory",
        )
    return pointer.value


class _DeviceBytes:
    """GPU memory with the interface through which torch accepts foreign memory."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def allocate_outside_torch(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor [elements] that torch's memory statistics exclude.

    On other devices it is an ordinary tensor.

    Raises:
        CaptureError: the memory is not free.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return torch.empty(elements, dtype=dtype, device=device)
    size = elements * dtype.itemsize
    with torch.cuda.device(device):
        purpose = "random values for sums that lack rows of absent ranks"
        address = allocate(size, purpose, "make the job smaller")
        return torch.as_tensor(_DeviceBytes(address, size), device=device).view(dtype)
