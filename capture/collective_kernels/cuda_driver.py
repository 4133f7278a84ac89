"""The CUDA driver API, and GPU memory outside torch's allocator, as NCCL's is."""

import ctypes
import functools
import sys
from typing import Any

import torch
from torch import Tensor

from onerank.ir.errors import CaptureError


@functools.cache
def driver() -> Any:
    """Return the driver's functions.

    Raises:
        CaptureError: there is no driver.
    """
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise CaptureError(
            f"stand-in kernels need the CUDA driver: {error}", code="collective-no-driver"
        ) from error
    pointer, count = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[count] * 7, pointer, pointer, pointer]
    return library


def allocate(size: int, needs: str, way_out: str) -> int:
    """Return the address of `size` bytes on the current GPU, which stay until the process ends.

    Args:
        size: bytes.
        needs: what needs them, for the error.
        way_out: what to do where they are not free.

    Raises:
        CaptureError: they are not.
    """
    pointer = ctypes.c_uint64()
    if driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)):
        free, _ = torch.cuda.mem_get_info()
        raise CaptureError(
            f"{needs}: {size} bytes, and the GPU has {free} free: {way_out}",
            code="collective-memory",
        )
    return pointer.value


class _Bytes:
    """Memory of the GPU as torch takes it from others."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def allocate_outside_torch(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor [elements], not initialised, that no memory statistics of torch count.

    Off CUDA it is an ordinary one.

    Raises:
        CaptureError: the memory is not free.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return torch.empty(elements, dtype=dtype, device=device)
    size = elements * dtype.itemsize
    with torch.cuda.device(device):
        needs = "what absent ranks add to sums needs memory"
        address = allocate(size, needs, "make the job smaller")
        return torch.as_tensor(_Bytes(address, size), device=device).view(dtype)
