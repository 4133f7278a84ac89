"""Compile the collective kernels with NVRTC and launch them on the current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onerank.capture.collective_kernels.cuda_driver import allocate, driver
from onerank.capture.collective_kernels.launch_plan import PASSES, LaunchPlan, Traffic
from onerank.converters.nccl import interconnect_of
from onerank.ir.errors import CaptureError

MARKER = "onerank_standin_marker"

PACED = "onerank_standin_paced"

SEGMENTS = 24

# A channel's receive buffer: NCCL's default for the Simple protocol (`NCCL_BUFFSIZE`).
BUFFER_BYTES = 4 << 20

# Shared memory of a block of every NCCL kernel on an H200 (NCCL 2.28.9, from the profiler): 20
# warps of (8 * 32 + 1) * 16 bytes (`src/include/device.h`, `ncclShmemDynamicSize`) and the state
# of the block. Next to such a block no block of a matrix product fits on the multiprocessor.
SHARED_BYTES = 103_808

MAX_THREADS = 640
"""Most threads of a block."""

# Threads of a block that draw the power of the link: three warps, each on its own tensor core.
LINK_THREADS = 96

LOADS_BUFFER, STORES, STORES_BUFFER, SKIPS = 1, 2, 4, 8


class Segment(ctypes.Structure):
    """`bytes` bytes: read from `source + i % period`, stored to `target + i` unless it is 0."""

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


class Work(ctypes.Structure):
    """The argument of the paced kernel, as `struct Work` in kernels.cu.

    Traffic flags of each pass: `own` for this rank's part, one in `ranks`; `peers` for the others.
    Threads after the first `movers` draw the power of the link.
    """

    _fields_ = (
        ("segments", Segment * SEGMENTS),
        ("buffer", ctypes.c_uint64),
        ("buffer_bytes", ctypes.c_uint64),
        ("latency_ns", ctypes.c_double),
        ("ns_per_byte", ctypes.c_double),
        ("peers", ctypes.c_int * 2),
        ("own", ctypes.c_int * 2),
        ("ranks", ctypes.c_int),
        ("pass_count", ctypes.c_int),
        ("segment_count", ctypes.c_int),
        ("movers", ctypes.c_int),
    )


SOURCE = Path(__file__).with_name("kernels.cu").read_text()


class Memory(NamedTuple):
    """A contiguous range of device memory: address and size."""

    start: int
    bytes: int


Move = tuple[Memory, Memory | None]
"""(source, target): a shorter source repeats; without a target the source is only read."""


def memory(tensor: Tensor) -> Memory:
    """Return the memory of a contiguous tensor."""
    return Memory(tensor.data_ptr(), tensor.nbytes)


MAX_CHANNELS = 32

# Time before a kernel's first and after its last instruction, which its timer does not include:
# on an H200 a kernel paced for 7.7 us lasted 9.6 us.
LAUNCH_OVERHEAD_NS = 2000.0

_MAX_PREPARED = 4096  # cached launches, of a kilobyte each

_torch: Any = torch

_CUDA: Any = torch.cuda

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

_NUM_REGS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS

_Key = tuple[str, LaunchPlan, tuple[Move, ...]]


def _flags(traffic: Traffic) -> int:
    return (
        LOADS_BUFFER * traffic.loads_buffer
        | STORES * traffic.stores
        | STORES_BUFFER * traffic.stores_buffer
    )


_FLAGS = {
    collective: (
        tuple(_flags(step.peers) for step in passes),
        tuple(SKIPS if step.skips_local else _flags(step.local or step.peers) for step in passes),
    )
    for collective, passes in PASSES.items()
}
"""The fields `peers` and `own` of `Work` for each collective."""


class _Launch:
    """A prepared launch: kernel, blocks, threads, shared bytes and argument."""

    def __init__(
        self, function: Any, blocks: int, threads: int, shared: int = 0, work: Work | None = None
    ) -> None:
        self.function, self.blocks, self.threads, self.shared = function, blocks, threads, shared
        self._work = work  # `arguments` points into it: keep it alive
        self.arguments = work and (ctypes.c_void_p * 1)(ctypes.addressof(work))


class CollectiveKernels:
    """The collective kernels on one GPU, compiled by NVRTC, which torch includes.

    Attributes:
        interconnect: the GPU's interconnect, as NCCL's tuning distinguishes them.

    Raises:
        CaptureError: torch cannot compile them, or the channels' buffers do not fit.
    """

    def __init__(self, device: torch.device, *, paced: bool) -> None:
        self._driver = driver()
        major, minor = torch.cuda.get_device_capability(device)
        self.interconnect = interconnect_of(10 * major + minor, torch.cuda.get_device_name(device))
        self._index = device.index
        self._prepared: dict[_Key, list[_Launch]] = {}
        with torch.cuda.device(device):
            self._marker = _compile(MARKER)
            self._paced = _compile(PACED) if paced else None
            self._buffer = 0
            if paced:  # outside torch's allocator, as NCCL's buffers are
                self._buffer = allocate(
                    MAX_CHANNELS * BUFFER_BYTES,
                    "channel buffers of the collective kernels, as NCCL has them,",
                    "make the job smaller, or use --collective-kernels off",
                )
        if self._paced is not None:
            self._check(
                self._driver.cuFuncSetAttribute(
                    self._paced, _MAX_DYNAMIC_SHARED, ctypes.c_int(SHARED_BYTES)
                )
            )

    @property
    def registers(self) -> int:
        """Registers per thread of the paced kernel."""
        count = ctypes.c_int()
        self._check(self._driver.cuFuncGetAttribute(ctypes.byref(count), _NUM_REGS, self._paced))
        return count.value

    def mark(self) -> None:
        """Launch the marker, a kernel of one microsecond, on the current stream."""
        self._launch(_Launch(self._marker, 1, 32))

    def pace(self, collective: str, plan: LaunchPlan, moves: Sequence[Move]) -> None:
        """Launch the kernel that emulates a call on the current stream.

        Args:
            collective: as in `CommCall`.
            plan: the kernel's grid, traffic and duration.
            moves: memory that it reads and writes; source and target may be equal.
        """
        assert self._paced is not None, "only the marker is compiled"
        key = (collective, plan, tuple(moves))
        # A step reuses the addresses of the step before, so a cached launch saves host time.
        if key not in self._prepared:
            if len(self._prepared) == _MAX_PREPARED:
                self._prepared.clear()
            self._prepared[key] = self._prepare(*key)
        for launch in self._prepared[key]:
            self._launch(launch)

    def _prepare(self, collective: str, plan: LaunchPlan, moves: Sequence[Move]) -> list[_Launch]:
        segments = [segment for move in moves for segment in _segments(*move)]
        total_bytes = sum(segment.bytes for segment in segments)
        channels = min(plan.channels, MAX_CHANNELS)
        launches: list[_Launch] = []
        # The argument has room for 24 segments; like NCCL, further ones take another launch.
        for first in range(0, max(1, len(segments)), SEGMENTS):
            work = Work()
            batch = segments[first : first + SEGMENTS]
            for index, segment in enumerate(batch):
                work.segments[index] = segment
            work.segment_count = len(batch)
            work.peers, work.own = _FLAGS[collective]
            work.pass_count, work.ranks = len(PASSES[collective]), plan.ranks
            work.buffer, work.buffer_bytes = self._buffer, BUFFER_BYTES
            work.latency_ns = max(0.0, plan.latency_ns - LAUNCH_OVERHEAD_NS) if first == 0 else 0.0
            if total_bytes:
                work.ns_per_byte = plan.transfer_ns * channels / (total_bytes * work.pass_count)
            work.movers = plan.threads
            threads = min(plan.threads + LINK_THREADS, MAX_THREADS)
            launches.append(_Launch(self._paced, channels, threads, SHARED_BYTES, work))
        return launches

    def _launch(self, launch: _Launch) -> None:
        self._check(
            self._driver.cuLaunchKernel(
                launch.function,
                *(launch.blocks, 1, 1),
                *(launch.threads, 1, 1),
                launch.shared,
                _torch._C._cuda_getCurrentRawStream(self._index),
                launch.arguments,
                None,
            )
        )

    def _check(self, result: int) -> None:
        if result:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(result, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise CaptureError(
                f"a collective kernel could not be launched: {reason}",
                code="collective-launch-failed",
            )


def _compile(name: str) -> Any:
    compiler = getattr(_CUDA, "_compile_kernel", None)
    if compiler is None:
        raise CaptureError(
            f"torch {torch.__version__} cannot compile a kernel at run time; collectives on CUDA "
            "need torch 2.9 or newer",
            code="collective-old-torch",
        )
    try:
        return compiler(SOURCE, name).func
    except (RuntimeError, OSError) as error:
        raise CaptureError(
            f"the kernel {name} could not be compiled: {error}", code="collective-compile-failed"
        ) from error


def _segments(source: Memory, target: Memory | None) -> list[Segment]:
    """Split a move so that the kernel can move most of it 16 bytes at a time."""
    start, period = source
    end, stored = target or (0, 0)
    size = stored if end else period
    if size == 0 or period == 0:
        return []
    whole = size // 16 * 16
    if size > period or (start | end) % 16 or whole in (0, size):
        return [Segment(start, end, size, period)]
    tail = end + whole if end else 0
    return [
        Segment(start, end, whole, whole),
        Segment(start + whole, tail, size - whole, size - whole),
    ]
