"""Compile the collective kernels with NVRTC and launch them on the current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onerank.capture.collective_kernels.cuda_driver import allocate, driver
from onerank.capture.collective_kernels.launch_plan import WALKS, Plan, Traffic
from onerank.converters.nccl import interconnect_of
from onerank.ir.errors import CaptureError

MARKER = "onerank_standin_marker"

PACED = "onerank_standin_paced"

SEGMENTS = 24

BUFFER_BYTES = 4 << 20
"""A channel's receive buffer, NCCL's default for the Simple protocol (`NCCL_BUFFSIZE`)."""

SHARED_BYTES = 103_808
"""Shared memory of a block of every NCCL kernel on an H200 (NCCL 2.28.9, as the profiler tells):
20 warps of (8 * 32 + 1) * 16 bytes (`src/include/device.h`, `ncclShmemDynamicSize`) and the state
of the block. With it no block of a matrix product fits beside."""

MOST_THREADS = 640
"""Threads of a block."""

LINK_THREADS = 96
"""Those that draw the power of the link: three warps on tensor cores of their own."""

LOADS_BUFFER, STORES, STORES_BUFFER, SKIPS = 1, 2, 4, 8


class Segment(ctypes.Structure):
    """`bytes` bytes walked over: read at `source + i % period`, stored at `target + i` unless 0."""

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


class Work(ctypes.Structure):
    """The argument of the paced kernel.

    Its traffic is flags of each pass: `own` of one part in `ranks`, `peers` of the rest. Threads
    after the first `movers` draw the power of the link.
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
    """Contiguous bytes from an address on."""

    start: int
    bytes: int


Move = tuple[Memory, Memory | None]
"""(source, target): a shorter source repeats, without a target it is only read."""


def memory(tensor: Tensor) -> Memory:
    """Return the memory of a contiguous tensor."""
    return Memory(tensor.data_ptr(), tensor.nbytes)


MOST_CHANNELS = 32

EDGES_NS = 2000.0
"""Time of a kernel that its own timer does not see, before its first and after its last
instruction; on an H200 a kernel paced for 7.7 us lasted 9.6."""

_MOST_READY = 4096
"""Launches kept, of a kilobyte each."""

_torch: Any = torch

_CUDA: Any = torch.cuda

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

_NUM_REGS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS

_Key = tuple[str, Plan, tuple[Move, ...]]


def _flags(traffic: Traffic) -> int:
    return (
        LOADS_BUFFER * traffic.loads_buffer
        | STORES * traffic.stores
        | STORES_BUFFER * traffic.stores_buffer
    )


_FLAGS = {
    collective: (
        tuple(_flags(walk.peers) for walk in walks),
        tuple(SKIPS if walk.skips_own else _flags(walk.own or walk.peers) for walk in walks),
    )
    for collective, walks in WALKS.items()
}
"""Of each collective the fields `peers` and `own` of `Work`."""


class _Launch:
    """What a launch on some stream takes: grid, block, shared bytes and argument."""

    def __init__(
        self, function: Any, blocks: int, threads: int, shared: int = 0, work: Work | None = None
    ) -> None:
        self.function, self.blocks, self.threads, self.shared = function, blocks, threads, shared
        self._work = work  # which `arguments` points at
        self.arguments = work and (ctypes.c_void_p * 1)(ctypes.addressof(work))


class CollectiveKernels:
    """The kernels on one GPU. They need no compiler but NVRTC, which torch brings along.

    Attributes:
        interconnect: what the GPU is, to NCCL.

    Raises:
        CaptureError: torch cannot compile them, or the channels' buffers do not fit.
    """

    def __init__(self, device: torch.device, *, paced: bool) -> None:
        self._driver = driver()
        major, minor = torch.cuda.get_device_capability(device)
        self.interconnect = interconnect_of(10 * major + minor, torch.cuda.get_device_name(device))
        self._index = device.index
        self._ready: dict[_Key, list[_Launch]] = {}
        with torch.cuda.device(device):
            self._marker = _compile(MARKER)
            self._paced = _compile(PACED) if paced else None
            self._buffer = 0
            if paced:  # where NCCL's are
                self._buffer = allocate(
                    MOST_CHANNELS * BUFFER_BYTES,
                    "the stand-in kernels need memory for their channels' buffers, as NCCL does",
                    "make the job smaller, or give --collective-kernels off",
                )
        if self._paced is not None:
            self._check(
                self._driver.cuFuncSetAttribute(
                    self._paced, _MAX_DYNAMIC_SHARED, ctypes.c_int(SHARED_BYTES)
                )
            )

    @property
    def registers(self) -> int:
        """Registers of a thread of the paced kernel."""
        count = ctypes.c_int()
        self._check(self._driver.cuFuncGetAttribute(ctypes.byref(count), _NUM_REGS, self._paced))
        return count.value

    def mark(self) -> None:
        """Leave a kernel of a microsecond on the current stream."""
        self._launch(_Launch(self._marker, 1, 32))

    def pace(self, collective: str, plan: Plan, moves: Sequence[Move]) -> None:
        """Launch what stands in for a call on the current stream.

        Args:
            collective: as in `CommCall`.
            plan: its grid, bytes and time.
            moves: what it reads and writes; the target of equal bytes may be the source itself.
        """
        assert self._paced is not None, "compiled for marks alone"
        key = (collective, plan, tuple(moves))
        if key not in self._ready:  # memory comes back in each step: the host has little time here
            if len(self._ready) == _MOST_READY:
                self._ready.clear()
            self._ready[key] = self._prepare(*key)
        for launch in self._ready[key]:
            self._launch(launch)

    def _prepare(self, collective: str, plan: Plan, moves: Sequence[Move]) -> list[_Launch]:
        segments = [segment for move in moves for segment in _segments(*move)]
        walked = sum(segment.bytes for segment in segments)
        channels = min(plan.channels, MOST_CHANNELS)
        made: list[_Launch] = []
        for first in range(0, max(1, len(segments)), SEGMENTS):
            work = Work()  # NCCL, too, launches anew where its argument is full
            part = segments[first : first + SEGMENTS]
            for place, segment in enumerate(part):
                work.segments[place] = segment
            work.segment_count = len(part)
            work.peers, work.own = _FLAGS[collective]
            work.pass_count, work.ranks = len(WALKS[collective]), plan.ranks
            work.buffer, work.buffer_bytes = self._buffer, BUFFER_BYTES
            work.latency_ns = max(0.0, plan.latency_ns - EDGES_NS) if first == 0 else 0.0
            if walked:
                work.ns_per_byte = plan.transfer_ns * channels / (walked * work.pass_count)
            work.movers = plan.threads
            threads = min(plan.threads + LINK_THREADS, MOST_THREADS)
            made.append(_Launch(self._paced, channels, threads, SHARED_BYTES, work))
        return made

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
                f"a stand-in kernel could not be launched: {reason}",
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
    """Split a move so that most of it goes 16 bytes at a time."""
    start, period = source
    end, stored = target or (0, 0)
    size = stored if end else period
    if size == 0 or period == 0:
        return []
    whole = size // 16 * 16
    if size > period or (start | end) % 16 or whole in (0, size):
        return [Segment(start, end, size, period)]
    rest = end + whole if end else 0
    return [
        Segment(start, end, whole, whole),
        Segment(start + whole, rest, size - whole, size - whole),
    ]
