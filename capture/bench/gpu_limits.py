"""Microbenchmarks of the GPU: sustained rates, launch floor, power."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from statistics import geometric_mean
from typing import Any

from onerank.capture.bench.bench_runner import MAX_COPIES, Bench
from onerank.capture.bench.layer_calls import linear, scaled
from onerank.capture.bench.measured_call import BenchCall, Operand
from onerank.capture.bench.random_operands import make
from onerank.capture.bench.timing import Replays
from onerank.ir.dtypes import ITEM_BYTES
from onerank.ir.errors import CaptureError, first_line
from onerank.ir.job.microbenchmarks import LARGE, SKINNY, SustainedCall

_HOLD_S = 2.0
_REST_S, _IDLE_S = 2.0, 3.0
_HELD = ((8192, 8192, 8192), (4096, 4096, 4096), (16384, 4096, 8192))
_POWER = ((8192, 8192, 1024), (8192, 8192, 256), (2048, 2048, 8192), (1024, 8192, 8192),
          (256, 16384, 8192), (128, 16384, 8192), (64, 16384, 16384), (16, 16384, 16384),
          (1, 16384, 16384), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (128, 128, 8192),
          (128, 1024, 1024))  # fmt: skip
"""From products at the limit to those that leave most of the GPU idle."""
_COPY = 1 << 29
_CACHED = (1 << 20, 1 << 21, 1 << 22, 1 << 23)


@dataclass(frozen=True, slots=True)
class Microbenchmarks:
    """What was measured.

    Attributes:
        sustained: calls that were held.
        gemm_tflops: what `LARGE` products in bf16 reach in the geometric mean, 1e12 per second.
        skinny_gb_per_s: the same of `SKINNY` ones: operands and results, in 1e9 bytes per second.
        copy_gb_per_s: bytes read and written by a copy of 1 GiB, in 1e9 per second.
        cache_gb_per_s: the same of a sum of tensors in the last-level cache; the best size.
        floor_ns: median of the shortest products.
        idle_w: of a GPU that waits with a context; None where nothing tells.
        limit_w: the power limit in force; None where nothing tells.
        refused: units whose products this GPU or torch does not take, and why.
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
    """Measure the GPU; `told` is called after each of `COUNT` parts.

    Raises:
        CaptureError: it does not even take products in bfloat16 or float16.
    """
    sustained: list[SustainedCall] = []
    refused: dict[str, str] = {}
    idle = _idle(bench)
    advance()
    for unit, sizes, call in _products():
        try:
            sustained.append(_hold(bench, unit, sizes, call))
        except (CaptureError, RuntimeError) as error:
            refused.setdefault(unit, first_line(error))
        advance()
    if not any(one.unit in ("bf16", "fp16") for one in sustained):
        raise CaptureError(
            f"this GPU runs no matrix products in bfloat16 or float16: {refused}",
            code="bench-no-16-bit",
        )
    for call, flops_per_element in _moves():
        sustained.append(_hold(bench, "", (), call, flops_per_element))
        advance()
    copy = Operand((_COPY,))
    sustained_copy = _hold(bench, "", (), BenchCall("aten::copy_", (copy, copy, False)))
    advance()
    large = [2 * m * n * k / _short_ns(bench, m, n, k) for m, n, k in LARGE]
    skinny = [2 * (m * k + k * n + m * n) / _short_ns(bench, m, n, k) for m, n, k in SKINNY]
    advance()
    return Microbenchmarks(
        sustained=(*sustained, sustained_copy),
        gemm_tflops=geometric_mean(large) / 1e3,
        skinny_gb_per_s=geometric_mean(skinny),
        copy_gb_per_s=sustained_copy.nbytes / sustained_copy.median_ns,
        cache_gb_per_s=max(_cached(bench, size) for size in _CACHED),
        floor_ns=_floor(bench),
        idle_w=idle,
        limit_w=bench.board.limit_w() if bench.board else None,
        refused=refused,
    )


def _products() -> Iterator[tuple[str, tuple[int, int, int], BenchCall]]:
    for m, n, k in (*_HELD, *_POWER):
        yield "bf16", (m, n, k), _forward(m, n, k, "bfloat16")
    for m, n, k in _HELD:
        yield "fp16", (m, n, k), _forward(m, n, k, "float16")
        yield "tf32", (m, n, k), replace(_forward(m, n, k, "float32"), tf32=True)
        yield from (("fp8", (m, n, k), call) for call in scaled(m, k, n))
    m, n, k = _HELD[1]
    yield "fp32", (m, n, k), _forward(m, n, k, "float32")


def _forward(m: int, n: int, k: int, dtype: str) -> BenchCall:
    return next(linear(m, k, n, dtype, backward=False))


def _moves() -> Iterator[tuple[BenchCall, int]]:
    """Yield calls without products, and vector operations for each element."""
    bf16_operand, fp32_operand = Operand((1 << 28,)), Operand((1 << 28,), "float32")
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 28):
        operand = Operand((size,))
        yield BenchCall("aten::add", (operand, operand, 1)), 1
    yield BenchCall("aten::exp", (fp32_operand,)), 1
    yield BenchCall("aten::silu", (bf16_operand,)), 3
    yield BenchCall("aten::gelu", (bf16_operand, "none")), 4
    yield BenchCall("aten::silu_backward", (bf16_operand, bf16_operand)), 6
    yield BenchCall("aten::_log_softmax", (Operand((4096, 128256), "float32"), 1, False)), 5
    yield BenchCall("aten::copy_", (fp32_operand, bf16_operand, False)), 0


COUNT = 1 + len(list(_products())) + len(list(_moves())) + 2
"""Parts of the microbenchmarks."""


def _hold(
    bench: Bench, unit: str, sizes: tuple[int, ...], call: BenchCall, each: int = 0
) -> SustainedCall:
    """Run a call for two seconds; its operands overflow the cache unless they are very small."""
    copies = -(-2 * bench.cache_bytes // call.nbytes)
    copies = copies if copies <= MAX_COPIES else 1
    calls = [make(call, bench.device).function for _ in range(copies)]
    is_driver_copy = (
        call.op == "aten::copy_" and len({operand.dtype for operand in call.operands()}) == 1
    )
    replays = Replays(calls, on_gpu=bench.on_gpu, queued=is_driver_copy)
    if bench.board is None:
        timing, watts, clock = replays.hold(_HOLD_S), None, None
    else:
        with bench.board.power() as power:
            timing = replays.hold(_HOLD_S)
        watts, clock = power.watts, power.sm_clock_mhz
    flops = 2 * prod(sizes) if sizes else each * prod(next(call.operands()).shape)
    return SustainedCall(unit, sizes, flops, _moved(call), timing.median_ns, watts, clock)


def _moved(call: BenchCall) -> int:
    """Return the bytes of operands and result, each once."""
    operands = [operand for operand in call.operands() if operand.shape]
    first = operands[0]
    if call.op in ("aten::mm", "aten::_scaled_mm"):
        m, n = first.shape[0], operands[1].shape[1]
        item = ITEM_BYTES[first.dtype] if call.op == "aten::mm" else ITEM_BYTES["bfloat16"]
        return call.nbytes + m * n * item
    return call.nbytes if call.op == "aten::copy_" else call.nbytes + first.nbytes


def _cached(bench: Bench, size: int) -> float:
    operand = Operand((size,))
    call = BenchCall("aten::add", (operand, operand, 1))
    replays = Replays([make(call, bench.device).function], on_gpu=bench.on_gpu)
    return _moved(call) / replays.timing().median_ns


def _floor(bench: Bench) -> int:
    sizes = product((1, 16, 64), (64, 128), (64, 128))
    ordered = sorted(_short_ns(bench, m, n, k) for m, n, k in sizes)
    return ordered[len(ordered) // 2]


def _short_ns(bench: Bench, m: int, n: int, k: int) -> int:
    """Return the time of a product in bf16 that is not held."""
    call = make(_forward(m, n, k, "bfloat16"), bench.device).function
    return Replays([call], on_gpu=bench.on_gpu).timing().median_ns


def _idle(bench: Bench) -> float | None:
    """Return what a GPU draws that has a context and nothing to do."""
    if bench.board is None:
        return None
    make(BenchCall("aten::silu", (Operand((1 << 20,)),)), bench.device).function()
    time.sleep(_REST_S)
    with bench.board.power() as power:
        time.sleep(_IDLE_S)
    return power.watts
