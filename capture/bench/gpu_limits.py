"""Microbenchmarks of the GPU: sustained rates, launch floor, power."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from statistics import geometric_mean
from typing import Any

from onerank.capture.bench.bench_call import BenchCall, BenchOperand
from onerank.capture.bench.bench_runner import MAX_COPIES, Bench
from onerank.capture.bench.layer_calls import linear, scaled
from onerank.capture.bench.measure_call import Replays
from onerank.capture.bench.random_operands import with_random_operands
from onerank.ir.dtypes import ITEM_BYTES
from onerank.ir.errors import CaptureError, first_line
from onerank.ir.measurement import LARGE_SHAPES, SKINNY_SHAPES, SustainedCall

# Power is read over the second half of a run; the energy counter lags by 0.6 s.
_SUSTAINED_S = 2.0
_REST_S, _IDLE_S = 2.0, 3.0  # seconds before idle power is read, and while it is read
_LARGE_GEMMS = ((8192, 8192, 8192), (4096, 4096, 4096), (16384, 4096, 8192))
# m, n and k of GEMMs from power-limited ones to some that leave most of the GPU idle.
_POWER_GEMMS = ((8192, 8192, 1024), (8192, 8192, 256), (2048, 2048, 8192), (1024, 8192, 8192),
          (256, 16384, 8192), (128, 16384, 8192), (64, 16384, 16384), (16, 16384, 16384),
          (1, 16384, 16384), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (128, 128, 8192),
          (128, 1024, 1024))  # fmt: skip
_COPY_ELEMENTS = 1 << 29  # of bfloat16: 1 GiB, far more than any cache

# Operands of 2 to 16 MiB: which size is fastest depends on the cache, so the fastest counts.
_CACHED_ELEMENTS = (1 << 20, 1 << 21, 1 << 22, 1 << 23)


@dataclass(frozen=True, slots=True)
class Microbenchmarks:
    """The limits of a GPU.

    Attributes:
        sustained: runs of one call for two seconds.
        gemm_tflops: geometric mean over the `LARGE_SHAPES` GEMMs in bf16, 1e12 FLOP per second.
        skinny_gb_per_s: geometric mean over the `SKINNY_SHAPES` GEMMs of the bytes of operands and
            results, 1e9 per second.
        copy_gb_per_s: bytes read and written by a copy of 1 GiB, 1e9 per second.
        cache_gb_per_s: bytes of a sum of tensors in the last-level cache, 1e9 per second; of the
            fastest size.
        floor_ns: median of the shortest GEMMs.
        idle_w: power with a context and no work; None if no source reports it.
        limit_w: the power limit in force; None if no source reports it.
        refused: unit -> why this GPU or torch does not run its GEMMs.
    """

    sustained: tuple[SustainedCall, ...]
    gemm_tflops: float
    skinny_gb_per_s: float
    copy_gb_per_s: float
    cache_gb_per_s: float
    floor_ns: int
    idle_w: float | None
    limit_w: float | None
    refused: dict[str, str]


def microbenchmarks(bench: Bench, advance: Callable[[], Any] = lambda: None) -> Microbenchmarks:
    """Measure the GPU; `advance` is called after each of `COUNT` parts.

    Raises:
        CaptureError: the GPU runs GEMMs neither in bfloat16 nor in float16.
    """
    sustained: list[SustainedCall] = []
    refused: dict[str, str] = {}
    idle = _idle(bench)
    advance()
    for unit, sizes, call in _gemms():
        # A GPU without float8 or TF32 refuses those GEMMs, which is no error of the benchmark.
        try:
            sustained.append(_sustain(bench, unit, sizes, call))
        except (CaptureError, RuntimeError) as error:
            refused.setdefault(unit, first_line(error))
        advance()
    if not any(call.unit in ("bf16", "fp16") for call in sustained):
        raise CaptureError(
            f"this GPU runs no GEMMs in bfloat16 or float16: {refused}",
            code="bench-no-16-bit",
        )
    for call, flops_per_element in _pointwise():
        sustained.append(_sustain(bench, "", (), call, flops_per_element))
        advance()
    copy = BenchOperand((_COPY_ELEMENTS,))
    sustained_copy = _sustain(bench, "", (), BenchCall("aten::copy_", (copy, copy, False)))
    advance()
    large = [2 * m * n * k / _short_ns(bench, m, n, k) for m, n, k in LARGE_SHAPES]
    skinny = [2 * (m * k + k * n + m * n) / _short_ns(bench, m, n, k) for m, n, k in SKINNY_SHAPES]
    advance()
    return Microbenchmarks(
        sustained=(*sustained, sustained_copy),
        gemm_tflops=geometric_mean(large) / 1e3,
        skinny_gb_per_s=geometric_mean(skinny),
        copy_gb_per_s=sustained_copy.nbytes / sustained_copy.median_ns,
        cache_gb_per_s=max(_cached(bench, size) for size in _CACHED_ELEMENTS),
        floor_ns=_floor(bench),
        idle_w=idle,
        limit_w=bench.board.limit_w() if bench.board else None,
        refused=refused,
    )


def _gemms() -> Iterator[tuple[str, tuple[int, int, int], BenchCall]]:
    for m, n, k in (*_LARGE_GEMMS, *_POWER_GEMMS):
        yield "bf16", (m, n, k), _forward(m, n, k, "bfloat16")
    for m, n, k in _LARGE_GEMMS:
        yield "fp16", (m, n, k), _forward(m, n, k, "float16")
        yield "tf32", (m, n, k), replace(_forward(m, n, k, "float32"), tf32=True)
        yield from (("fp8", (m, n, k), call) for call in scaled(m, k, n))
    m, n, k = _LARGE_GEMMS[1]
    yield "fp32", (m, n, k), _forward(m, n, k, "float32")


def _forward(m: int, n: int, k: int, dtype: str) -> BenchCall:
    return next(linear(m, k, n, dtype, backward=False))


def _pointwise() -> Iterator[tuple[BenchCall, int]]:
    """Yield calls without GEMMs, each with its vector operations per element."""
    bf16_operand, fp32_operand = BenchOperand((1 << 28,)), BenchOperand((1 << 28,), "float32")
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 28):
        operand = BenchOperand((size,))
        yield BenchCall("aten::add", (operand, operand, 1)), 1
    yield BenchCall("aten::exp", (fp32_operand,)), 1
    yield BenchCall("aten::silu", (bf16_operand,)), 3
    yield BenchCall("aten::gelu", (bf16_operand, "none")), 4
    yield BenchCall("aten::silu_backward", (bf16_operand, bf16_operand)), 6
    yield BenchCall("aten::_log_softmax", (BenchOperand((4096, 128256), "float32"), 1, False)), 5
    yield BenchCall("aten::copy_", (fp32_operand, bf16_operand, False)), 0


COUNT = 1 + len(list(_gemms())) + len(list(_pointwise())) + 2
"""Parts of the microbenchmarks."""


def _sustain(
    bench: Bench, unit: str, sizes: tuple[int, ...], call: BenchCall, flops_per_element: int = 0
) -> SustainedCall:
    """Run a call for two seconds; its operands overflow the cache unless they are very small.

    Args:
        bench: the runner.
        unit: data type of a GEMM's arithmetic; "" for other calls.
        sizes: m, n and k of a GEMM; () for other calls.
        call: the call.
        flops_per_element: vector operations per element of a call that is no GEMM.
    """
    # As in `Bench`: copies of the operands that together have twice the cache's size.
    copies = -(-2 * bench.cache_bytes // call.nbytes)
    copies = copies if copies <= MAX_COPIES else 1
    calls = [with_random_operands(call, bench.device).function for _ in range(copies)]
    # The driver, not a kernel, copies between equal dtypes; `Replays` queues such calls.
    is_driver_copy = (
        call.op == "aten::copy_" and len({operand.dtype for operand in call.operands()}) == 1
    )
    replays = Replays(calls, on_gpu=bench.on_gpu, queued=is_driver_copy)
    if bench.board is None:
        timing, watts, clock = replays.sustain(_SUSTAINED_S), None, None
    else:
        with bench.board.power() as power:
            timing = replays.sustain(_SUSTAINED_S)
        watts, clock = power.watts, power.sm_clock_mhz
    flops = 2 * prod(sizes) if sizes else flops_per_element * prod(next(call.operands()).shape)
    return SustainedCall(unit, sizes, flops, _moved(call), timing.median_ns, watts, clock)


def _moved(call: BenchCall) -> int:
    """Return the bytes of operands and result; each tensor counts once."""
    operands = [operand for operand in call.operands() if operand.shape]
    first = operands[0]
    if call.op in ("aten::mm", "aten::_scaled_mm"):
        m, n = first.shape[0], operands[1].shape[1]
        item = ITEM_BYTES[first.dtype] if call.op == "aten::mm" else ITEM_BYTES["bfloat16"]
        return call.nbytes + m * n * item
    return call.nbytes if call.op == "aten::copy_" else call.nbytes + first.nbytes


def _cached(bench: Bench, size: int) -> float:
    operand = BenchOperand((size,))
    call = BenchCall("aten::add", (operand, operand, 1))
    replays = Replays([with_random_operands(call, bench.device).function], on_gpu=bench.on_gpu)
    return _moved(call) / replays.timing().median_ns


def _floor(bench: Bench) -> int:
    """Return the launch floor in ns: the median of GEMMs too small to fill the GPU."""
    sizes = product((1, 16, 64), (64, 128), (64, 128))
    ordered = sorted(_short_ns(bench, m, n, k) for m, n, k in sizes)
    return ordered[len(ordered) // 2]


def _short_ns(bench: Bench, m: int, n: int, k: int) -> int:
    """Return the time of a short run of a GEMM in bf16."""
    call = with_random_operands(_forward(m, n, k, "bfloat16"), bench.device).function
    return Replays([call], on_gpu=bench.on_gpu).timing().median_ns


def _idle(bench: Bench) -> float | None:
    """Return the power in W of the GPU with a context and no work; None without a source."""
    if bench.board is None:
        return None
    # Creates the CUDA context: a GPU without one draws less.
    with_random_operands(
        BenchCall("aten::silu", (BenchOperand((1 << 20,)),)), bench.device
    ).function()
    time.sleep(_REST_S)
    with bench.board.power() as power:
        time.sleep(_IDLE_S)
    return power.watts
