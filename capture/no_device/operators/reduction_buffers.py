"""Memory that a reduction takes while it runs, to add what its thread blocks reduced.

Where few outputs have many inputs each, such as in the gradient of a bias, several thread blocks
share an output. They write their results to a buffer of the caching allocator, which takes 64 MiB
on an H100 for a bias of 2,048 elements and 4,096 tokens. The rules are those of `setReduceConfig`
and `ReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh; sizes on an H100 with torch 2.11 are in
benchmarks/results/2026-11-27-allocator-recordings-h100.txt.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REDUCTIONS = frozenset(("sum", "mean", "prod", "amax", "amin", "linalg_vector_norm"))
"""Operators that `gpu_reduce_kernel` runs with numbers of the accumulation type."""

# Names as in Reduce.cuh.
_MAX_THREADS = 512  # MAX_REDUCE_THREADS
_WARP = 32
_VECTOR = 4  # vt0, also the widest vector of outputs
_MIN_VALUES, _MAX_VALUES = 16, 256  # values per thread
_SEMAPHORE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ReducedShape:
    """Sizes of a reduction.

    Attributes:
        outputs: number of outputs.
        inputs: inputs of each output.
        is_fastest: whether the inputs of an output are adjacent in memory.
        vector: outputs or inputs that a thread loads at once.
    """

    outputs: int
    inputs: int
    is_fastest: bool
    vector: int


def buffer_bytes(
    source: Tensor, reduced: Collection[int], threads: int, sm_count: int
) -> tuple[int, int]:
    """Return the bytes of a reduction's buffer and of its semaphores; zeros without a buffer.

    Args:
        source: what is reduced.
        reduced: its dimensions that are reduced, from 0.
        threads: threads that a multiprocessor runs at once.
        sm_count: multiprocessors of the GPU.
    """
    shape = _sizes(source, reduced)
    if shape is None:
        return 0, 0
    along_outputs = 1 if shape.is_fastest else shape.vector
    first, second = shape.outputs // along_outputs, shape.inputs
    if shape.is_fastest:
        first, second = shape.inputs // shape.vector, shape.outputs
    most = _MAX_THREADS // along_outputs
    by_first, by_second = (min(_last_power(size), most) for size in (first, second))
    width = min(by_first, _WARP)
    height = min(by_second, most // width)
    width = min(by_first, most // height)
    step = width if shape.is_fastest else 1
    values = -(-shape.inputs // step)
    # Below this, the warps of a block take separate outputs, and no output has several blocks.
    if values < min(height * _MIN_VALUES, _MAX_VALUES):
        return 0, 0
    values = -(-shape.inputs // (step * height))
    grid = -(-(shape.outputs // along_outputs) // (1 if shape.is_fastest else width))
    target = sm_count * (threads // (width * height))
    if values < _MAX_VALUES or grid > target:
        return 0, 0
    blocks = max(min(-(-target // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    if blocks <= 1:
        return 0, 0
    each = _accumulated_bytes(source.dtype) * shape.outputs * blocks
    return each * (1 if shape.is_fastest else width * along_outputs), _SEMAPHORE_BYTES * grid


def reduced_dims(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Return the dimensions that a call of one of `REDUCTIONS` reduces: all if it names none."""
    place = 2 if name == "linalg_vector_norm" else 1
    dims = kwargs.get("dim", args[place] if len(args) > place else None)
    rank = args[0].dim()
    if dims is None or dims == []:
        return set(range(rank))
    return {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)} if rank else set()


def _sizes(source: Tensor, reduced: Collection[int]) -> ReducedShape | None:
    """Return the sizes of a reduction; None if nothing is reduced."""
    dims = [dim for dim, size in enumerate(source.shape) if size != 1]
    inputs = math.prod(source.shape[dim] for dim in dims if dim in reduced)
    outputs = math.prod(source.shape[dim] for dim in dims if dim not in reduced)
    if inputs <= 1 or not outputs:
        return None
    kept = sorted((source.stride(dim), dim) for dim in dims if dim not in reduced)
    fastest_reduced = min(source.stride(dim) for dim in dims if dim in reduced)
    is_fastest = not kept or fastest_reduced < kept[0][0]
    vector = 1
    if is_fastest:
        # Only one contiguous run of inputs is loaded in vectors.
        if not kept and fastest_reduced == 1 and inputs > _WARP * _VECTOR:
            vector = _VECTOR
    elif kept[0][0] == 1:
        fastest = kept[0][1]
        others = (source.stride(dim) for dim in dims if dim != fastest)
        size = source.shape[fastest]
        vector = math.gcd(_VECTOR, size, int(source.storage_offset()), *others)
    return ReducedShape(outputs, inputs, is_fastest, vector)


def _last_power(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def _accumulated_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of a number that sums are accumulated in (`acc_type`)."""
    return max(4, dtype.itemsize) if dtype.is_floating_point or dtype.is_complex else 8
