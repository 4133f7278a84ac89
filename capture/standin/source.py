"""The kernels' CUDA source, compiled at run time by NVRTC, and the layout of their argument."""

import ctypes
from pathlib import Path

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
