"""The features of a kernel that cost models use: duration, work, component GEMMs, GPU rates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.op_costs.op_classes import CLASSES, OpClass, device_copies
from onerank.ir import Graph, Kind

_LAUNCHES = {
    OpClass.MEMSET: 0.27,
    OpClass.INDEX: 0.33,
    OpClass.ELEMENTWISE: 0.35,
    OpClass.EMBEDDING: 0.38,
    OpClass.COPY: 0.45,
    OpClass.SOFTMAX: 0.47,
    OpClass.RANDOM: 0.54,
    OpClass.REDUCTION: 0.77,
}

"""Shortest kernels of a class relative to GEMMs, which scale a description's launch floor.

1 for classes that are absent. Measured on an H200 (2640 ns for a GEMM): medians of calls of up to
300 kB in the shipped kernel database; copies and embeddings in captured steps.

For NVIDIA GPUs only. On an MI300X no class is shorter than the others: in public Kineto traces
(AMD-AGI/TraceLens, kernels of up to 200 kB) the median trace has elementwise kernels of 4.3 us,
copies of 4.5, fills of 4.6, reductions of 5.5, GEMMs of 2.2 and 6.1.
"""


def launches_of(sort: OpClass) -> float:
    """Return the part of a description's launch floor that the shortest kernels of a class take."""
    return _LAUNCHES.get(sort, 1.0)


F64 = npt.NDArray[np.float64]


class Parts(NamedTuple):
    """GEMMs of calls that are made of several, see `record.Part`.

    Attributes:
        call: the call that each belongs to, ascending, int64[p].
        times: repetitions of each, float64[p].
        launches: additional launch floors per repetition, float64[p].
        shapes: as `tiles.gemm_ns` takes them, float64[p, 7].
    """

    call: npt.NDArray[np.int64]
    times: F64
    launches: F64
    shapes: F64

    @classmethod
    def of(cls, works: Sequence[Work]) -> Self:
        """Collect those of distinct calls."""
        call = [at for at, work in enumerate(works) for _ in work.parts]
        parts = [part for work in works for part in work.parts]
        shapes = [(p.batch, p.m, p.n, p.k, p.item_bytes, p.item_bytes, p.reuse) for p in parts]
        return cls(
            np.array(call, dtype=np.int64),
            np.array([p.times for p in parts], dtype=np.float64),
            np.array([p.launches for p in parts], dtype=np.float64),
            np.array(shapes, dtype=np.float64).reshape(-1, 7),
        )

    def of_calls(self, calls: npt.NDArray[np.int64]) -> tuple[Self, npt.NDArray[np.int64]]:
        """Return the products of some calls, and to which of `calls` each belongs."""
        first, last = (np.searchsorted(self.call, calls, side) for side in ("left", "right"))
        count = last - first
        owner = np.repeat(np.arange(len(calls)), count)
        rows = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        rows += np.repeat(first, count)
        made = type(self)(self.call[rows], self.times[rows], self.launches[rows], self.shapes[rows])
        return made, owner

    @property
    def calls_in_steps(self) -> npt.NDArray[np.int64]:
        """Calls whose products take launches of their own, as a recurrent layer's steps do."""
        return np.unique(self.call[self.launches > 0])

    @property
    def flops(self) -> F64:
        """FLOPs of each, done once."""
        batch, m, n, k = self.shapes.T[:4]
        return 2 * batch * m * n * k

    @property
    def bytes(self) -> F64:
        """Bytes that each reads and writes, done once."""
        batch, m, n, k, item, result, reuse = self.shapes.T
        return batch * (item * (m * k / reuse + k * n) + result * m * n)


U8 = npt.NDArray[np.uint8]

Mask = npt.NDArray[np.bool_]

_BLOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Operations per second for the class of work of each node; nan if there is no rate.

    Attributes:
        peak: datasheet peak, float64[n]; for vector units the sustained rate, which no power cap
            limits.
        sustained: rate of long kernels under the power cap, float64[n].
        wider: whether both are rates of a wider dtype, because the GPU has no units for the node's,
            bool[n].
    """

    peak: F64
    sustained: F64
    wider: Mask


@dataclass(frozen=True, slots=True)
class KernelFeatures:
    """Nodes to re-cost; every array has one entry per node.

    Attributes:
        duration_ns: measured durations, 0 if the trace has none, float64[n].
        flops: FLOPs, nan if not known, float64[n].
        bytes: bytes read and written, nan if not known, float64[n].
        matmul: whether the FLOPs are matrix products, bool[n].
        matmul_class: whether the class is GEMM or attention, with or without known FLOPs, bool[n].
        over_link: whether it is a copy over the host link or to another GPU, or communication
            without a recorded group, bool[n].
        transfer: whether it is a copy or fill by a copy engine, bool[n].
        dtype: positions in `dtypes`, int64[n].
        dtypes: dtypes of GEMM operands; "" for none.
        call: positions in `gemm` and `attention`, int64[n].
        gemm: shapes of the distinct calls as `tiles.gemm_ns` takes them, or zeros, float64[d, 6].
        attention: the same for `attention_tiles.attention_ns`, float64[d, 9].
        parts: GEMMs of calls that are made of several, in the order of their calls.
        operator_ns: time of all kernels of the operator instance, float64[n].
        launches: shortest kernel of its class as a share of the description's launch floor,
            float64[n].
        passes: how often the operator's kernels stream the bytes, float64[n].
        rereads: how often memory, not the cache, serves them, float64[n].
        cycles: SM cycles that its elements take at least, float64[n].
    """

    duration_ns: F64
    flops: F64
    bytes: F64
    matmul: Mask
    matmul_class: Mask
    over_link: Mask
    transfer: Mask
    dtype: npt.NDArray[np.int64]
    dtypes: tuple[str, ...]
    call: npt.NDArray[np.int64]
    gemm: F64
    attention: F64
    operator_ns: F64
    launches: F64
    passes: F64
    rereads: F64
    cycles: F64
    parts: Parts = field(default_factory=lambda: Parts.of([]))

    @classmethod
    def of(cls, graph: Graph, found: OpCosts) -> "KernelFeatures":
        """Collect what `found` says of the compute nodes of `graph`."""
        nodes, index = graph.nodes, found.index
        copies = nodes.kind[index] == Kind.MEMCPY
        known = (found.bytes_read >= 0) & (found.bytes_written >= 0)
        moved = found.bytes_read.astype(np.float64) + found.bytes_written
        return cls(
            duration_ns=nodes.duration_ns[index].astype(np.float64),
            flops=np.where(found.flops >= 0, found.flops, np.nan),
            bytes=np.where(known, moved, np.nan),
            matmul=found.matmul,
            matmul_class=found.is_class(OpClass.GEMM, OpClass.ATTENTION),
            over_link=(copies & ~device_copies(graph)[index])
            | found.is_class(OpClass.COMMUNICATION),
            transfer=copies | (nodes.kind[index] == Kind.MEMSET),
            dtype=found.dtype,
            dtypes=found.dtypes,
            call=found.call,
            gemm=_padded([work.gemm for work in found.works], 6),
            attention=_padded([work.attention for work in found.works], 9),
            operator_ns=found.operator_ns,
            launches=np.array([launches_of(sort) for sort in CLASSES])[found.op_class],
            passes=np.array([work.passes for work in found.works])[found.call],
            rereads=np.array([work.rereads for work in found.works])[found.call],
            cycles=np.array([work.cycles for work in found.works])[found.call],
            parts=Parts.of(found.works),
        )

    def only(self, rows: slice | npt.NDArray[np.int64]) -> "KernelFeatures":
        """Return the nodes at `rows` by themselves."""
        kept = ("dtypes", "gemm", "attention", "parts")
        some = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name not in kept}
        return replace(self, **some)

    def blocks(self) -> Iterator[tuple[slice, "KernelFeatures"]]:
        """Yield (rows, nodes) of all nodes in turn, as many as a processor's cache holds well."""
        for start in range(0, len(self.call), _BLOCK):
            rows = slice(start, start + _BLOCK)
            yield rows, self.only(rows)

    @property
    def part_of_operator(self) -> F64:
        """Share of its operator instance's time that each node takes; 1 if not measured."""
        measured = self.operator_ns > 0
        alone = np.ones(len(self.operator_ns))
        return np.divide(self.duration_ns, self.operator_ns, out=alone, where=measured)

    def floor_ns(self, gpu: Gpu) -> F64:
        """Return the time of the shortest kernels of each one's class on `gpu`."""
        return self.launches_on(gpu) * gpu.launch_floor_ns

    def launches_on(self, gpu: Gpu) -> F64:
        """Return the part of the launch floor of `gpu` that each one's class takes at least."""
        return self.launches if gpu.is_nvidia else np.maximum(self.launches, 1)

    def floor_ratio(self, source: Gpu, target: Gpu) -> F64:
        """Return by how much longer the shortest of each one's class are on `target`."""
        whole = target.launch_floor_ns / source.launch_floor_ns
        return whole * (self.launches_on(target) / self.launches_on(source))

    def runs_as(self, gpu: Gpu) -> list[str]:
        """Return in which type `gpu` multiplies operands of each of `dtypes`."""
        return [_runs_as(dtype, gpu) for dtype in self.dtypes]

    def rates(self, gpu: Gpu) -> KernelRates:
        """Return the rates of `gpu` for each node's work."""
        ran = self.runs_as(gpu)
        peak = _rates(ran, gpu.peak_tensor_flops_per_s)[self.dtype]
        sustained = _rates(ran, gpu.tensor_flops_per_s)[self.dtype]
        vector = gpu.vector_flops_per_s or np.nan
        wider = np.array([a != b for a, b in zip(ran, self.dtypes, strict=True)], dtype=bool)
        return KernelRates(
            np.where(self.matmul, peak, vector),
            np.where(self.matmul, sustained, vector),
            wider[self.dtype] & self.matmul,
        )


def _padded(rows: list[tuple[int, ...]], width: int) -> F64:
    """Return one row for each call, zeros for a call without shape, float64[d, width]."""
    filled = [row or (0,) * width for row in rows]
    return np.array(filled, dtype=np.float64).reshape(-1, width)


def kernels_of(works: Sequence[Work], duration_ns: F64) -> KernelFeatures:
    """Return calls that stand in no graph, each one kernel, with their durations, float64[d]."""
    count = len(works)
    dtypes = tuple(dict.fromkeys(work.dtype for work in works))
    flops = np.array([work.flops for work in works], dtype=np.float64)
    moved = [work.bytes_read + max(work.bytes_written, _result_bytes(work)) for work in works]
    matmul, none = np.array([w.matmul for w in works], dtype=bool), np.zeros(count, dtype=bool)
    return KernelFeatures(
        duration_ns=duration_ns,
        flops=flops,
        bytes=np.array(moved, dtype=np.float64),
        matmul=matmul,
        matmul_class=matmul,
        over_link=none,
        transfer=none,
        dtype=np.array([dtypes.index(work.dtype) for work in works], dtype=np.int64),
        dtypes=dtypes,
        call=np.arange(count),
        gemm=_padded([work.gemm for work in works], 6),
        attention=_padded([work.attention for work in works], 9),
        operator_ns=duration_ns,
        launches=np.array([work.launches for work in works]),
        passes=np.array([work.passes for work in works]),
        rereads=np.array([work.rereads for work in works]),
        cycles=np.array([work.cycles for work in works]),
        parts=Parts.of(works),
    )


def _result_bytes(work: Work) -> int:
    if not work.gemm:
        return 0
    batch, rows, columns, _, _, item = work.gemm
    return batch * rows * columns * item


_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")

_WIDER = {
    "bfloat16": ("float32",),
    "float16": ("float32",),
    "tfloat32": ("float32",),
    **dict.fromkeys(_FP8, ("bfloat16", "float16")),
    "float4_e2m1fn_x2": ("float8_e4m3fn", "bfloat16", "float16"),
}

"""Types that hold every value of a type, the narrowest first (float16 holds float8 but for range).

What libraries do where the units are missing: cuBLAS multiplies bfloat16 on a V100 in float32, and
quantised weights are widened before the product. No integer type is widened.
"""


def _runs_as(dtype: str, gpu: Gpu) -> str:
    """Return the type in which `gpu` multiplies operands of `dtype`; itself where none serves."""
    serve = (one for one in (dtype, *_WIDER.get(dtype, ())) if gpu.tensor_flops_per_s(one))
    return next(serve, dtype)


def _rates(dtypes: list[str], rate: Callable[[str], float | None]) -> F64:
    return np.array([rate(dtype) or np.nan for dtype in dtypes], dtype=np.float64)


def matmul_ratio(source: Gpu, target: Gpu, *, sustained: bool) -> float | None:
    """Return the source's rate of 16-bit GEMMs over the target's; None if one has no such rate.

    For GEMMs whose operands were not recorded; bfloat16, or float16 if bfloat16 is missing.
    """
    for dtype in ("bfloat16", "float16"):
        rates = [
            gpu.tensor_flops_per_s(dtype) if sustained else gpu.peak_tensor_flops_per_s(dtype)
            for gpu in (source, target)
        ]
        if rates[0] and rates[1]:
            return rates[0] / rates[1]
    return None
