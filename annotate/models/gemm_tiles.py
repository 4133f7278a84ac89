"""The time of a GEMM from its shape: tiles, waves, caches, memory, alignment.

The result of [m, k] x [k, n] is cut into tiles, one SM per tile; the inner loop of a tile may be
split among SMs (split-K). For each of sixty tilings:

    waves   = ceil(tiles / SMs)
    chain   = steps of 64 along the inner size * latency of one + epilogue
    tiles   = waves * FLOPs of a tile / SM rate + prologues + chain
    compute = (tiles^6 + (FLOPs / rate under the power cap)^6)^(1/6)
    cache   = operands of all tiles / bandwidth between the last-level cache and the SMs
    read    = operands that miss the cache / memory bandwidth, and a ramp
    write   = results that miss the cache / memory bandwidth
    body    = (compute^p + cache^p + read^p)^(1/p)
    time    = launch floor + (body^q + write^q)^(1/q)

Other tiles hide the latency of a tile (its chain of steps and its stores), but nothing hides that
of the last one, so the chain counts once. Operands load during earlier multiplications, while
results are written only when a tile is done: writing overlaps less, and q is smaller than p. The
power cap limits the work of all SMs together, not SMs that wait for a last wave. Single tiles
therefore run between the sustained and the peak rate, and the whole GEMM at the sustained rate.
Short kernels finish before the cap takes effect.

Libraries choose a good tiling, not always the best: the time is the mean over tilings, weighted by
exp(-ln(time / best) / choice). Results may stay in the cache.

The time is that of a kernel in a step, where a weight comes from memory: since its last use the
step has read all others. The measurements of the fit are times per call of a replayed CUDA graph,
`per_call`. They contain the gap to the next kernel, and six copies of the operands take turns, so
small ones stay in the cache.

cuBLAS multiplies 8 bits with one scale for a tensor by the same tiles. With scales of rows or
blocks, and in 4 bits, other libraries' kernels run (see `tile_kernels`). A step costs them more or
less than cuBLAS. They never divide the inner size, and no other tile hides part of a tile's
epilogue:

    tiles + epilogue's share * waves * epilogue

The grouped GEMMs of experts in inference engines do not hide it either. Rows of different experts
share no tile, so a tile of an expert with few tokens is mostly empty. torch's grouped GEMMs hide
it, and have times of the start and of each wave instead (`ExposedTimes`).
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.spec_schema import ASYNCHRONOUS, SYNCHRONOUS
from onerank.annotate.models.coefficients import GemmCoefficients
from onerank.annotate.models.prediction_terms import (
    Term,
    TermRecord,
    factor,
    norm,
    product,
    quantity,
    total,
)
from onerank.annotate.models.tile_kernels import TILINGS, TileKernel
from onerank.ir.arrays import F64

# GEMMs per block of the arithmetic, which bounds its temporaries to [512, 60] elements.
_CHUNK = 512

# Constants of the model's form: `tools.fit` keeps them fixed while it fits the coefficients.

# Elements in 16 bits of the inner size that a tile loads at once, 128 bytes of a row.
_STEP = 64

# Copies of the operands that take turns in the measurements of the fit; all must fit into the cache
# to be read from it. In a step, the same holds for activations, which are read soon after they are
# written.
_COLD_COPIES = 6

_MISSES = 8  # exponent: how sharply misses set in as the working set fills the cache

_WRITE_MISSES = 4  # the same for results, which a cache begins to write back before it is full

# Share of the cache, filled by a product's operands and results, at which half of the results are
# written back. An L40S writes results of 0.7 to 1.0 of its 101 MB at 660 GB/s, as memory does, and
# smaller ones at 1200. Chosen on the L40S, because no other measured GPU determines it: over its
# products whose results fill 0.2 to 1.5 of the cache, the mean error in ln is 0.087; at a share of
# 1.0 it is 0.115, and without writing back 0.165.
_WRITE_BACK_SHARE = 0.57

_CAP = 6  # exponent: how well idle SMs of a last wave hide behind the power cap

_BURST_NS = 1.2e6  # the power cap takes effect in kernels longer than this

_REREAD = 1.5  # rereads of operands from memory, over those of a square block of tiles in flight

# Exponent: how sharply the limit of SMs with rows replaces that of memory. Chosen on 598 grouped
# GEMMs of an H100 and an H200 (2026-11-28-grouped-gemms-h200).
_STREAM = 8

_RAMP_BYTES = 8e6  # traffic with which memory reaches its full bandwidth

_FILL = 0.2  # share of the SMs whose requests saturate the memory bandwidth


class Rates(NamedTuple):
    """FLOP/s of GEMMs: sustained by long kernels, and the datasheet's peak, float64[d] each."""

    sustained: F64
    peak: F64


def _issue_on(gpu: Gpu, coefficients: GemmCoefficients) -> float:
    """Return the rate of tiles for a GPU's generation; the geometric mean for an unknown one."""
    if gpu.architecture in SYNCHRONOUS:
        return coefficients.synchronous
    if gpu.architecture in ASYNCHRONOUS:
        return coefficients.asynchronous
    return (coefficients.synchronous * coefficients.asynchronous) ** 0.5


class GemmTarget(NamedTuple):
    """The GPU on which GEMMs run, and its rates for the dtype of each.

    Attributes:
        gpu: the GPU.
        rates: of each GEMM's dtype.
        vector: whether they run on the vector units.
        per_call: whether their times are those of calls in a benchmark; see the module's docstring.
    """

    gpu: Gpu
    rates: Rates
    vector: bool = False
    per_call: bool = False

    @property
    def cycle_ns(self) -> float:
        """Time of a clock cycle."""
        return 1e9 / self.gpu.clock_hz

    def part(self, where: slice) -> "GemmTarget":
        """Return the target of the GEMMs at `where`."""
        return self._replace(rates=Rates(self.rates.sustained[where], self.rates.peak[where]))

    def with_rate(self, rate: float) -> "GemmTarget":
        """Return the target with a factor on the sustained rates, up to the peak."""
        sustained = np.minimum(self.rates.peak, self.rates.sustained * rate)
        return self._replace(rates=Rates(sustained, self.rates.peak))

    def issue(self, coefficients: GemmCoefficients) -> float:
        """Return the rate of tiles over the geometric mean of sustained and peak rate."""
        # On an H100, cuBLAS multiplies float32 with Ampere's kernels ("ampere_sgemm_128x64_tn"):
        # a copy engine feeds tensor cores only. With the pipeline of its tensor cores 1,040 linear
        # layers of NeuSight's set were 1.22 times off there, in the median.
        return coefficients.synchronous if self.vector else _issue_on(self.gpu, coefficients)


def gemm_ns(
    run: GemmTarget,
    shapes: F64,
    coefficients: GemmCoefficients,
    described: GemmTarget | None = None,
    *,
    kernel: TileKernel | None = None,
    record: TermRecord | None = None,
) -> F64:
    """Return the time of GEMMs in ns, float64[d].

    Args:
        run: where they run.
        shapes: batch, m, n, k, bytes of an operand's and of a result's element and, as an optional
            seventh column, elements of [m, k] per element in memory, float64[d, 6 or 7].
        coefficients: fitted coefficients.
        described: `run` on the GPU without overrides of its figures; None: no overrides.
        kernel: the one that runs all of them; None: cuBLAS chooses.
        record: takes the terms of GEMMs, as positions among the d.
    """
    predicted_ns = np.empty(len(shapes))
    gap_ns = coefficients.call_gap * run.gpu.launch_floor_ns
    floor_ns = coefficients.floor * run.gpu.launch_floor_ns + gap_ns
    if kernel is not None:
        coefficients = kernel.coefficients
        floor_ns = floor_ns if kernel.floor_ns is None else kernel.floor_ns
        run = run.with_rate(kernel.rate)
        described = described and described.with_rate(kernel.rate)
    if not run.per_call:
        floor_ns = max(0.0, floor_ns - gap_ns)
    for start in range(0, len(shapes), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        tilings = _tiling_times(run.part(chunk), shapes[chunk], coefficients, kernel)
        if described is None:
            body = _mean_of_best_tilings(tilings.body, coefficients)
        else:
            # The weighted mean can grow when a worse tiling gets faster: with a larger L2 single
            # GEMMs got up to 2.7% slower. The power mean cannot, so overrides go through its ratio.
            before = _tiling_times(described.part(chunk), shapes[chunk], coefficients, kernel).body
            body = _mean_of_best_tilings(before, coefficients)
            body *= _power_mean(tilings.body, coefficients) / _power_mean(before, coefficients)
        predicted_ns[chunk] = floor_ns + body
        if record is not None:
            terms = _GemmTerms(run.gpu.name, floor_ns, tilings, body, coefficients)
            record.update(chunk, terms.term)
    return predicted_ns


def _mean_of_best_tilings(tiling_ns: F64, c: GemmCoefficients) -> F64:
    """Return the mean over the tilings that a library picks, float64[d] from [d, tilings]."""
    weight = np.exp(-np.log(tiling_ns / tiling_ns.min(axis=1, keepdims=True)) / c.choice)
    return (weight * tiling_ns).sum(axis=1) / weight.sum(axis=1)


def _power_mean(tiling_ns: F64, c: GemmCoefficients) -> F64:
    """Return a mean near the best tiling that grows with each of them, float64[d]."""
    best = tiling_ns.min(axis=1)
    return best * ((tiling_ns / best[:, None]) ** (-1 / c.choice)).mean(axis=1) ** -c.choice


class _TilingTimes(NamedTuple):
    """Times of each tiling of each of d GEMMs, in ns, float64[d, tilings].

    Attributes:
        body: above the launch floor.
        compute: waves of tiles, or the power cap.
        cache: operands of all tiles from the last-level cache.
        read: operands from memory.
        write: results to memory.
        split: dividing the inner size among SMs.
        exposed: what no tile hides.
    """

    body: F64
    compute: F64
    cache: F64
    read: F64
    write: F64
    split: F64
    exposed: F64


class _GemmTerms(NamedTuple):
    """Times of d GEMMs on one GPU.

    Attributes:
        gpu: its name.
        floor_ns: launch floor.
        tilings: times by tiling.
        body_ns: time above the floor over the tilings that a library picks, float64[d].
        c: coefficients.
    """

    gpu: str
    floor_ns: float
    tilings: _TilingTimes
    body_ns: F64
    c: GemmCoefficients

    def term(self, i: int, _: Term | None = None) -> Term:
        """Return the time of GEMM `i` as a term: its fastest tiling, times the mean over that."""
        on, fastest = f"on {self.gpu}", int(self.tilings.body[i].argmin())
        times = self.tilings._asdict()
        compute, cache, read, write, split, exposed = (
            float(np.broadcast_to(times[name], self.tilings.body.shape)[i, fastest])
            for name in ("compute", "cache", "read", "write", "split", "exposed")
        )
        body = norm(
            self.c.write_overlap,
            norm(
                self.c.overlap,
                quantity("compute", compute, note=f"waves of tiles, or the power cap {on}"),
                quantity("cache", cache, note=f"operands of tiles from the last-level cache {on}"),
                quantity("read", read, note=f"operands from memory {on}"),
            ),
            quantity("write", write, note=f"results to memory {on}"),
        )
        if split:
            note = f"dividing the inner size among SMs {on}"
            body = total(body, quantity("split", split, note=note))
        if exposed:
            note = f"before the first and each wave of tiles {on}"
            body = total(body, quantity("exposed", exposed, note=note))
        note = f"of the tilings that libraries pick over the fastest {on}"
        tilings = factor(float(self.body_ns[i]) / body.value, "tilings", note)
        floor = quantity("floor", self.floor_ns, note=f"launch floor {on}")
        value = self.floor_ns + float(self.body_ns[i])
        return total(floor, product(body, tilings), name="by tiles", value=value, note=on)


@dataclass(frozen=True, slots=True)
class _TiledGemms:
    """The tiles of d GEMMs under each tiling; columns broadcast to float64[d, tilings].

    Attributes:
        batch: GEMMs in a batch, float64[d, 1].
        m: rows of the result, float64[d, 1].
        n: columns of the result, float64[d, 1].
        k: inner size, float64[d, 1].
        item: bytes of an operand's element, float64[d, 1].
        result: bytes of a result's element, float64[d, 1].
        reuse: elements of [m, k] per element in memory, float64[d, 1], or 1.
        rows: rows of a tile, float64[1, tilings].
        columns: columns of a tile, float64[1, tilings].
        split: SMs among which the inner loop of a tile is split, float64[1, tilings].
        steps: steps along the inner size of a tile.
        inner: inner size of a tile in whole steps.
        tiles: number of tiles.
        exposed_epilogue: share of an epilogue that no other tile hides.
        fills_tiles: as in `TileKernel`.
    """

    batch: F64
    m: F64
    n: F64
    k: F64
    item: F64
    result: F64
    reuse: F64 | float
    rows: F64
    columns: F64
    split: F64
    steps: F64
    inner: F64
    tiles: F64
    exposed_epilogue: float
    fills_tiles: bool

    @classmethod
    def of(cls, shapes: F64, kernel: TileKernel | None) -> Self:
        """Divide GEMMs of the shapes of `gemm_ns` into the tiles of a kernel; None: cuBLAS's."""
        batch, m, n, k, item, result, *more = shapes.T[:, :, None]
        tilings, epilogue, cluster = TILINGS, 0.0, 1
        if kernel is not None:
            tilings, epilogue, cluster = kernel.tilings, kernel.epilogue, kernel.cluster
        rows, columns, split = tilings[:, None, :]
        step = _STEP * np.where(item < 1, 4, np.where(item < 2, 2, 1))
        steps = np.ceil(k / split / step)
        return cls(
            batch,
            m,
            n,
            k,
            item,
            result,
            reuse=more[0] if more else 1.0,
            rows=rows,
            columns=columns,
            split=split,
            steps=steps,
            inner=steps * step,
            tiles=batch * np.ceil(m / rows / cluster) * cluster * np.ceil(n / columns) * split,
            exposed_epilogue=epilogue,
            fills_tiles=kernel is not None and kernel.fills_tiles,
        )

    @property
    def flops(self) -> F64:
        """FLOPs of the products, or of all tiles if those that they lack count, float64[d, 1]."""
        if self.fills_tiles:
            return 2 * self.tiles * self.rows * self.columns * self.k / self.split
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def operand_bytes(self) -> tuple[F64, F64]:
        """Bytes of [m, k] and of [k, n] in memory, float64[d, 1] each."""
        left = self.item * self.batch * self.m * self.k / self.reuse
        return left, self.item * self.batch * self.k * self.n

    @property
    def result_bytes(self) -> F64:
        """Bytes of the result, float64[d, 1]."""
        return self.result * self.batch * self.m * self.n


def _tiling_times(
    run: GemmTarget, shapes: F64, c: GemmCoefficients, kernel: TileKernel | None
) -> _TilingTimes:
    """Return the times of each tiling of each GEMM; the module's docstring has the formulas."""
    gemms = _TiledGemms.of(shapes, kernel)
    compute = _compute_ns(gemms, run, c)
    cache = _cache_ns(gemms, run, c)
    read, write = _memory_ns(gemms, run, c)
    if kernel is not None and kernel.stream is not None:
        read = p_norm(_STREAM, read, _streamed_ns(gemms, run, kernel.cluster, kernel.stream))
    body = p_norm(c.overlap, compute, cache, read)
    split_ns = np.where(gemms.split > 1, c.split_ns, 0.0)
    exposed_ns = _exposed_ns(gemms, run.gpu, kernel)
    body = p_norm(c.write_overlap, body, write) + split_ns + exposed_ns
    return _TilingTimes(body, compute, cache, read, write, split_ns, exposed_ns)


def _exposed_ns(gemms: _TiledGemms, gpu: Gpu, kernel: TileKernel | None) -> F64:
    """Return the time that no tile hides."""
    if kernel is None or kernel.exposed is None:
        return np.zeros_like(gemms.tiles)
    times, waves = kernel.exposed, np.ceil(gemms.tiles / gpu.sm_count)
    return times.start + times.wave * waves


def _compute_ns(gemms: _TiledGemms, run: GemmTarget, c: GemmCoefficients) -> F64:
    """Return the time of the waves of tiles, or of all work under the power cap."""
    rows, columns, tiles = gemms.rows, gemms.columns, gemms.tiles
    sm, cycle = run.gpu.sm_count, run.cycle_ns
    sustained, peak = run.rates.sustained[:, None], run.rates.peak[:, None]
    # The factor 1e9 makes FLOPs over FLOP/s a time in ns.
    work = 1e9 * gemms.flops
    short = 1 / (1 + (work / sustained / _BURST_NS) ** 2)
    capped = sustained * (peak / sustained) ** (c.burst * short)
    # Relative to a tile of 256 x 128: smaller ones load more operand bytes per FLOP.
    feeding = (1 + c.tile * (1 / 256 + 1 / 128) / 2) / (1 + c.tile * (1 / rows + 1 / columns) / 2)
    rate = run.issue(c) * (sustained * peak) ** 0.5 * feeding / sm
    # Smaller tiles share an SM, up to four, so their prologues overlap.
    resident = np.clip(np.floor(128 * 128 / (rows * columns)), 1, 4)
    # A coefficient for the idle part of the last wave, once fitted, made a few tiles in a second
    # wave cost up to four waves, and predicted left-out families no better (8.2 and 8.3% off).
    waves = np.ceil(tiles / sm)
    compute = waves * 2e9 * rows * columns * gemms.inner / rate
    compute += np.ceil(tiles / (sm * resident)) * c.prologue_cycles * cycle
    # Once, not per wave: other tiles on the SM hide this latency for all but the last tile.
    compute += (gemms.steps * c.step_cycles + c.epilogue_cycles * rows * columns / 128**2) * cycle
    compute = p_norm(_CAP, compute, np.broadcast_to(work / capped, compute.shape))
    # Tiles that are stored draw little power, so the power cap does not hide this time.
    exposed = gemms.exposed_epilogue * waves
    return compute + exposed * c.epilogue_cycles * rows * columns / 128**2 * cycle


def _cache_ns(gemms: _TiledGemms, run: GemmTarget, c: GemmCoefficients) -> F64:
    """Return the time of the operands of all tiles from the last-level cache."""
    tile_bytes = gemms.tiles * (gemms.rows + gemms.columns) * gemms.inner * gemms.item
    staged_bytes = tile_bytes + gemms.result_bytes * gemms.split
    bytes_per_cycle = c.l2_bytes_per_cycle * np.minimum(gemms.tiles, run.gpu.sm_count)
    return staged_bytes * run.cycle_ns / bytes_per_cycle


def _memory_ns(gemms: _TiledGemms, run: GemmTarget, c: GemmCoefficients) -> tuple[F64, F64]:
    """Return the time of the operands from memory, and of the results to memory."""
    gpu, sm = run.gpu, run.gpu.sm_count
    batch, m, n, split = gemms.batch, gemms.m, gemms.n, gemms.split
    (left, right), out = gemms.operand_bytes, gemms.result_bytes
    # Partial sums of split-K are float32, whatever the dtype of the result.
    partial = np.where(split > 1, 4 * batch * m * n * split, 0.0)
    size = (gpu.l2_bytes or 1) / gpu.l2_partitions
    occupancy = (left + right + out) / size
    cold = _miss((_COLD_COPIES * (left + right) + out) / size)
    # A batch multiplies two activations, not an activation and a weight.
    weights_cold = cold if run.per_call else np.where(batch == 1, 1.0, cold)
    missed = left * cold + right * weights_cold
    filled_by_results = (left + right + out + partial) / size / _WRITE_BACK_SHARE
    written = (out + partial) * _miss(filled_by_results, _WRITE_MISSES)
    # Tiles in flight form a square block of sm^0.5 tiles per edge, which shares
    # its operands. The first read of each operand already counts in `missed`.
    tile_bytes = gemms.item * batch * m * n * gemms.k * (1 / gemms.rows + 1 / gemms.columns)
    reread_bytes = tile_bytes / sm**0.5 - left * gemms.reuse - right
    requesting = np.minimum(1, gemms.tiles / (_FILL * sm))
    bandwidth = gpu.bandwidth_bytes_per_s / 1e9 * requesting
    reread = _REREAD * np.maximum(reread_bytes, 0) * occupancy / (1 + occupancy)
    read = (missed + reread) / bandwidth
    read += c.ramp_cycles * run.cycle_ns * np.minimum(1, (missed + written) / _RAMP_BYTES)
    return read, written / bandwidth


# Rows of a tile, and how fast an SM takes [k, n] with them, if the other tiles of its cluster are
# empty. With the same rate for all, one row of each of some experts is 3.4% short in the mean on an
# H100 and 3.2% on an H200, of all experts 2.6 and 7.4%, and 64 rows are 1.7 and 6.4% long
# (2026-11-28-grouped-gemms-h100, 2026-11-28-grouped-gemms-h200).
_FILLED_ROWS, _FILLED_RATES = (1.0, 2.0, 64.0), (0.92, 1.0, 1.1)


def _streamed_ns(gemms: _TiledGemms, run: GemmTarget, cluster: int, bytes_per_cycle: float) -> F64:
    """Return the time in which the SMs whose tiles have rows take [k, n] from memory.

    Each cluster takes the columns of one tile at a time. In the last wave the clusters without a
    tile are idle.

    Args:
        gemms: the GEMMs.
        run: where they run.
        cluster: tiles along the rows that run together, on an SM each, also where one is empty.
        bytes_per_cycle: of each SM with rows.
    """
    waves = np.ceil(gemms.tiles / run.gpu.sm_count)
    with_rows = np.minimum(cluster, np.ceil(gemms.m / gemms.rows))
    filled = np.where(with_rows > 1, 1.0, np.interp(gemms.m, _FILLED_ROWS, _FILLED_RATES))
    of_tile = gemms.item * gemms.inner * gemms.columns
    return waves * of_tile * run.cycle_ns / (with_rows * bytes_per_cycle * filled)


def cache_misses(gpu: Gpu, used: F64) -> F64:
    """Return the share of accesses that miss the last-level cache, for `used` bytes in use."""
    return _miss(used * gpu.l2_partitions / (gpu.l2_bytes or 1))


def _miss(share: F64, exponent: int = _MISSES) -> F64:
    """Return the share of accesses that miss a cache of which the data fill `share`."""
    # The least share keeps 0 ** -8 from dividing by zero; it already gives a miss rate of 1e-24.
    return 1 / (1 + np.maximum(share, 1e-3) ** -float(exponent))


def p_norm(power: float, *terms: F64) -> F64:
    """Return (sum of terms^power)^(1/power), elementwise."""
    # Relative to the longest term, since powers of nanoseconds overflow.
    longest = np.maximum.reduce(terms)
    parts = [(term / longest) ** power for term in terms]
    return longest * np.add.reduce(parts) ** (1 / power)
