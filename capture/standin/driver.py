"""The CUDA driver, and memory of the GPU beside torch's allocator, as NCCL's is."""

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
        CaptureError: there is none.
    """
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise CaptureError(f"stand-in kernels need the CUDA driver: {error}") from error
    pointer, count = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[count] * 7, pointer, pointer, pointer]
    return library


def allocate(size: int, purpose: str) -> int:
    """Return the address of `size` bytes on the current GPU, which stay until the process ends.

    Raises:
        CaptureError: they are not free; says what they are for.
    """
    pointer = ctypes.c_uint64()
    if driver().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)):
        free, _ = torch.cuda.mem_get_info()
        raise CaptureError(
            f"the stand-in kernels need {size} bytes for {purpose}, as NCCL does, and the GPU has "
            f"{free} free: make the job smaller, or give --standin off"
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


def beside_allocator(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor [elements], not initialised, that no memory statistics of torch count.

    Off CUDA it is an ordinary one.

    Raises:
        CaptureError: the memory is not free.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return torch.empty(elements, dtype=dtype, device=device)
    size = elements * dtype.itemsize
    with torch.cuda.device(device):
        address = allocate(size, "what absent peers add")
        return torch.as_tensor(_Bytes(address, size), device=device).view(dtype)
