"""Memory that an operator's kernels take beyond its results: workspaces of libraries, buffers."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onerank.capture.no_device.event_log import EventLog
from onerank.capture.no_device.operators.operator_calls import OperatorCall
from onerank.capture.no_device.operators.reduction_buffers import (
    REDUCTIONS,
    buffer_bytes,
    reduced_dims,
)
from onerank.capture.no_device.operators.workspace_sizes import workspace_bytes

# Operators that run in cuBLAS, which keeps a workspace.
_PRODUCTS = frozenset("mm addmm bmm baddbmm addmv mv dot _scaled_mm".split())

# First numbers of blocks that a library keeps, and of those that an operator takes while it runs:
# larger than the number of any storage.
_KEPT, _TAKEN = 1 << 61, 1 << 62

# The workspace of cuBLASLt, which adds the bias of a product (`parseCUDABlasLtWorkspaceSize`).
_LT_BYTES = 1 << 20

# cuDNN's random numbers of dropout, bytes per multiprocessor: 1,024 states of 48 bytes, as measured
# on an H100 with torch 2.11 (benchmarks/results/2026-11-27-allocator-recordings-h100.txt).
_DROPOUT_STATE_BYTES = 1024 * 48


class Workspaces:
    """Memory that libraries keep, and what an operator takes while it runs.

    torch has a cuBLAS handle per thread and stream, and allocates the workspace of each from its
    own caching allocator, and another one for cuBLASLt (aten/src/ATen/cuda/CublasHandlePool.cpp).
    cuDNN's dropout in recurrent layers has one state per process.
    """

    def __init__(self, log: EventLog, cublas_bytes: int, sm_count: int) -> None:
        self._log = log
        self._cublas_bytes = cublas_bytes
        self._dropout_bytes = sm_count * _DROPOUT_STATE_BYTES
        self._kept: dict[tuple[str, int], int] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each kept block, the largest first."""
        return tuple(sorted(self._kept.values(), reverse=True))

    def use(self, call: OperatorCall, results: Sequence[Tensor]) -> None:
        """Allocate what the kernels of an operator take beyond its results."""
        base, args = call.schema.base, call.args
        if base in _PRODUCTS:
            self._keep("cublas", self._cublas_bytes, threading.get_ident())
            # cuBLASLt adds a bias of one dimension (`addmm_out_cuda_impl`).
            if base == "_scaled_mm" or (base == "addmm" and args[0].dim() == 1):
                self._keep("cublaslt", _LT_BYTES, threading.get_ident())
        elif base in REDUCTIONS and call.tensors[0].layout == torch.strided:
            gpu: Any = torch.cuda.get_device_properties(call.tensors[0].device)
            threads, sm_count = gpu.max_threads_per_multi_processor, gpu.multi_processor_count
            reduced = reduced_dims(base, args, call.kwargs)
            sizes = buffer_bytes(call.tensors[0], reduced, threads, sm_count)
            self._take(*filter(None, sizes))
        if base == "_cudnn_rnn" and args[11] and args[12]:  # dropout in training
            self._keep("dropout", self._dropout_bytes, 0)
        self._take(*workspace_bytes(base, args, results))

    def _take(self, *sizes: int) -> None:
        """Allocate blocks, and free them in the reverse order."""
        numbers = [_TAKEN + place for place in range(len(sizes))]
        taken = [*map(self._log.allocate, numbers, sizes)]
        for number, size in reversed([*zip(numbers, taken, strict=True)]):
            if size:
                self._log.free(number, size)

    def _keep(self, library: str, size: int, thread: int) -> None:
        if (library, thread) not in self._kept:
            self._kept[library, thread] = size
            self._log.allocate(_KEPT + len(self._kept), size)
