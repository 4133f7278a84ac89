"""Run the Python wrappers that Inductor generates, on fake tensors.

A wrapper allocates the buffers of a graph, launches its kernels and calls libraries.
"""

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from onerank.capture.no_device.graph_numbers import NUMBERS, GraphNumbers


def load_wrapper(key: str, path: str, numbers: GraphNumbers) -> ModuleType:
    """Run a wrapper's source, with fake tensors in the place of the device's."""
    wrapper = ModuleType(f"onerank_inductor_{key}")
    wrapper.__file__ = path
    with open(path, encoding="utf-8") as file:
        source = file.read()
    # Only a CUDA build of torch has this function.
    raw_stream = "from torch._C import _cuda_getCurrentRawStream as get_raw_stream"
    source = source.replace(raw_stream, "get_raw_stream = None")
    if numbers.decides:
        source = numbers.extended(source)
    # The wrapper imports triton, and does not use it.
    with mock.patch.dict(sys.modules, triton_modules()):
        exec(compile(source, path, "exec"), vars(wrapper))
    vars(wrapper).update(
        get_raw_stream=first_stream,
        empty_strided_cuda=_empty,
        reinterpret_tensor=_reinterpret,
        # Addresses of fake tensors are made up, so their alignment means nothing.
        copy_if_misaligned=_same,
        assert_size_stride=nothing,
        assert_alignment=nothing,
    )
    if numbers.decides:
        call = vars(wrapper)["call"]
        vars(wrapper).update(
            {"call": functools.partial(numbers.run, call), NUMBERS: numbers.report}
        )
    return wrapper


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, int(tensor.storage_offset()) + offset)


def _same(tensor: Any) -> Any:
    return tensor


def triton_modules() -> dict[str, ModuleType]:
    """Return modules for imports of Triton, whose data types know their size; {} if it is there."""
    if "triton" in sys.modules:
        return {}
    language: Any = ModuleType("triton.language")
    for kind, sizes in (("float", (16, 32, 64)), ("int", (8, 16, 32, 64)), ("uint", (32, 64))):
        for bits in sizes:
            setattr(language, f"{kind}{bits}", SimpleNamespace(primitive_bitwidth=bits))
    triton: Any = ModuleType("triton")
    triton.language = language
    return {"triton": triton, "triton.language": language}


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def first_stream(_: int) -> int:
    return 0
