"""Compile the kernels that emulate collectives, and launch them on the streams that NCCL would use.

The kernel is a marker, or paced: it lasts as long as the collective would. Streams follow
ProcessGroupNCCL since torch 2.8. A call with `async_op=False` runs on the caller's stream. Any
other call runs on its group's stream, or outside a batch on the stream of its pair of ranks; that
stream first waits for the caller's stream.

NVRTC compiles the kernels and the CUDA driver launches them. Memory comes from the driver too, as
NCCL's does, so that torch's allocator, whose history and peak belong to the job, does not see it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onerank.capture.collective_kernels.launch_plan import (
    PASSES,
    CollectiveEmulation,
    LaunchPlan,
    Traffic,
    plan_launch,
)
from onerank.converters.nccl import interconnect_of
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    from onerank.capture.collective_record import CommCall
    from onerank.converters.nccl import Interconnect


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
    # Without them ctypes would pass an address as a 32-bit int.
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


MARKER = "onerank_standin_marker"

PACED = "onerank_standin_paced"

SEGMENTS = 24

# A channel's receive buffer: NCCL's default for the Simple protocol (`NCCL_BUFFSIZE`).
BUFFER_BYTES = 4 << 20

# Shared memory of a block of every NCCL kernel on an H200 (NCCL 2.28.9, from the profiler): 20
# warps of (8 * 32 + 1) * 16 bytes (`src/include/device.h`, `ncclShmemDynamicSize`) and the state
# of the block. Next to such a block no block of a matrix product fits on the multiprocessor.
SHARED_BYTES = 103_808

# NCCL_MAX_NTHREADS, and the launch bound of the paced kernel in kernels.cu.
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


class PacedWork(ctypes.Structure):
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


class DeviceRange(NamedTuple):
    """A contiguous range of device memory: address and size."""

    start: int
    bytes: int


Move = tuple[DeviceRange, DeviceRange | None]
"""(source, target): a shorter source repeats; without a target the source is only read."""


def device_range(tensor: Tensor) -> DeviceRange:
    """Return the memory of a contiguous tensor."""
    return DeviceRange(tensor.data_ptr(), tensor.nbytes)


MAX_CHANNELS = 32

# Time before a kernel's first and after its last instruction, which its timer does not include:
# on an H200 a kernel paced for 7.7 us lasted 9.6 us.
LAUNCH_OVERHEAD_NS = 2000.0

_MAX_PREPARED = 4096  # cached launches, of a kilobyte each

_torch: Any = torch

_CUDA: Any = torch.cuda

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

_NUM_REGS = 4  # CU_FUNC_ATTRIBUTE_NUM_REGS

_Key = tuple[str, int, tuple[Move, ...]]
"""Collective, identity of the plan, memory: hashing the fields of a plan takes a microsecond."""


def _flags(traffic: Traffic) -> int:
    return (
        LOADS_BUFFER * traffic.loads_buffer
        | STORES * traffic.stores
        | STORES_BUFFER * traffic.stores_buffer
    )


# The fields `peers` and `own` of `PacedWork` for each collective.
_FLAGS = {
    collective: (
        tuple(_flags(step.peers) for step in passes),
        tuple(SKIPS if step.skips_local else _flags(step.local or step.peers) for step in passes),
    )
    for collective, passes in PASSES.items()
}


class _Launch:
    """A prepared launch: the arguments of `cuLaunchKernel` before and after the stream."""

    def __init__(
        self,
        function: Any,
        blocks: int,
        threads: int,
        shared: int = 0,
        work: PacedWork | None = None,
    ) -> None:
        self._work = work  # `after` points into it: keep it alive
        self.before = (function, *(blocks, 1, 1), *(threads, 1, 1), shared)
        self.after = work and (ctypes.c_void_p * 1)(ctypes.addressof(work)), None


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
        # The plan is kept, since another one at its address would have its identity.
        self._prepared: dict[_Key, tuple[list[_Launch], LaunchPlan]] = {}
        self._current_stream: Any = _torch._C._cuda_getCurrentRawStream
        with torch.cuda.device(device):
            self._marker = _Launch(_compile(MARKER), 1, 32)
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
                # A kernel may use more than 48 KB of dynamic shared memory only if it opts in.
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
        self._launch(self._marker)

    def pace(self, collective: str, plan: LaunchPlan, moves: Sequence[Move]) -> None:
        """Launch the kernel that emulates a call on the current stream.

        Args:
            collective: as in `CommCall`.
            plan: the kernel's grid, traffic and duration.
            moves: memory that it reads and writes; source and target may be equal.
        """
        assert self._paced is not None, "only the marker is compiled"
        key = (collective, id(plan), tuple(moves))
        # A step reuses the addresses of the step before, so a cached launch saves host time.
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) == _MAX_PREPARED:
                self._prepared.clear()
            prepared = self._prepared[key] = self._prepare(collective, plan, moves), plan
        for launch in prepared[0]:
            self._launch(launch)

    def _prepare(self, collective: str, plan: LaunchPlan, moves: Sequence[Move]) -> list[_Launch]:
        segments = [segment for move in moves for segment in _segments(*move)]
        total_bytes = sum(segment.bytes for segment in segments)
        channels = min(plan.channels, MAX_CHANNELS)
        launches: list[_Launch] = []
        # The argument has room for 24 segments; like NCCL, further ones take another launch.
        for first in range(0, max(1, len(segments)), SEGMENTS):
            work = PacedWork()
            batch = segments[first : first + SEGMENTS]
            for index, segment in enumerate(batch):
                work.segments[index] = segment
            work.segment_count = len(batch)
            work.peers, work.own = _FLAGS[collective]
            work.pass_count, work.ranks = len(PASSES[collective]), plan.ranks
            work.buffer, work.buffer_bytes = self._buffer, BUFFER_BYTES
            # The call's latency counts once, however many launches it takes.
            work.latency_ns = max(0.0, plan.latency_ns - LAUNCH_OVERHEAD_NS) if first == 0 else 0.0
            if total_bytes:
                # Of one channel: each moves its share of the bytes while the others move theirs.
                work.ns_per_byte = plan.transfer_ns * channels / (total_bytes * work.pass_count)
            work.movers = plan.threads
            threads = min(plan.threads + LINK_THREADS, MAX_THREADS)
            launches.append(_Launch(self._paced, channels, threads, SHARED_BYTES, work))
        return launches

    def _launch(self, launch: _Launch) -> None:
        stream = self._current_stream(self._index)
        result = self._driver.cuLaunchKernel(*launch.before, stream, *launch.after)
        if result:
            self._check(result)

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


def _segments(source: DeviceRange, target: DeviceRange | None) -> list[Segment]:
    """Split a move so that the kernel can move most of it 16 bytes at a time."""
    start, period = source
    end, stored = target or (0, 0)
    size = stored if end else period
    if size == 0 or period == 0:
        return []
    whole = size // 16 * 16
    # A repeated source would change its alignment from one repetition to the next.
    if size > period or (start | end) % 16 or whole in (0, size):
        return [Segment(start, end, size, period)]
    tail = end + whole if end else 0
    return [
        Segment(start, end, whole, whole),
        Segment(start + whole, tail, size - whole, size - whole),
    ]


class Streams:
    """One stream per key and device, created on first use."""

    def __init__(self) -> None:
        self._streams: dict[tuple[Hashable, torch.device], torch.cuda.Stream] = {}
        # The last work of the caller before each stream's call, as ProcessGroupNCCL keeps it: a new
        # event for each call would cost the host more time.
        self._issued: dict[tuple[Hashable, torch.device], torch.cuda.Event] = {}
        # Backward issues calls from autograd's threads, which may share a stream.
        self._lock = threading.Lock()

    def enter(
        self, key: Hashable, device: torch.device, *, high_priority: bool
    ) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Make the key's stream current; it waits for the current stream's work so far.

        Returns:
            The previous stream, and the key's stream.
        """
        stream_key = (key, device)
        if stream_key not in self._streams:
            high = high_priority or os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "0") == "1"
            self._streams[stream_key] = torch.cuda.Stream(device, priority=-1 if high else 0)
            self._issued[stream_key] = torch.cuda.Event()
        side, issued = self._streams[stream_key], self._issued[stream_key]
        # By index, which is faster than by device.
        previous = torch.cuda.current_stream(device.index)
        # As ProcessGroupNCCL does: the call reads what the caller's stream has computed so far.
        with self._lock:
            issued.record(previous)
            issued.wait(side)
        torch.cuda.set_stream(side)
        return previous, side


class Engine:
    """Launches the collective kernels of one process, on all its GPUs."""

    def __init__(self, emulation: CollectiveEmulation) -> None:
        self._emulation = emulation
        self._paced = emulation.network is not None
        self._kernels: dict[torch.device, CollectiveKernels] = {}
        self._plans: dict[tuple[str, int, str, str | None], LaunchPlan] = {}
        self._streams = Streams()

    @property
    def paced(self) -> bool:
        """Whether calls last as long as on the network; always False without a network."""
        return self._paced

    @paced.setter
    def paced(self, on: bool) -> None:
        self._paced = on and self._emulation.network is not None

    def enter(
        self, key: Hashable, device: torch.device, *, high_priority: bool
    ) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Make the stream current that NCCL would use for an asynchronous call."""
        return self._streams.enter(key, device, high_priority=high_priority)

    def mark(self, device: torch.device) -> None:
        """Launch a marker on the current stream."""
        self._on(device).mark()

    def pace(self, call: CommCall, device: torch.device, moves: Sequence[Move]) -> None:
        """Move the call's bytes on the current stream, in the time of the network.

        Raises:
            CaptureError: the network has no entry for the group.
        """
        kernels = self._on(device)
        # Planning each call again would take the host longer than NCCL's own launch.
        key = (call.collective, call.bytes, call.group, call.reduction)
        if key not in self._plans:
            self._plans[key] = self._plan(call, kernels.interconnect)
        kernels.pace(call.collective, self._plans[key], moves)

    def _plan(self, call: CommCall, interconnect: Interconnect) -> LaunchPlan:
        network = self._emulation.network
        assert network is not None, "no network to pace for"
        return plan_launch(
            call.collective,
            call.bytes,
            call.group,
            call.group_ranks,
            network=network,
            interconnect=interconnect,
            scaled=call.reduction in ("avg", "premul_sum"),
        )

    def _on(self, device: torch.device) -> CollectiveKernels:
        if device not in self._kernels:
            self._kernels[device] = CollectiveKernels(
                device, paced=self._emulation.network is not None
            )
        return self._kernels[device]
