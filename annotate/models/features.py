"""The features of a kernel that cost models use: duration, work, component GEMMs, GPU rates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import NamedTuple, Self

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.operand_reuse import OperandReuse
from onerank.annotate.op_costs.cost_record import (
    EXPERT_KERNELS,
    AttentionShape,
    GemmShape,
    PartKernel,
    Work,
)
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.op_costs.op_classes import (
    CLASSES,
    OpClass,
    device_copies,
    floor_share_of,
    shares_on,
)
from onerank.annotate.op_costs.state_operators import MEASURED
from onerank.ir import Graph, Kind
from onerank.ir.arrays import F64, I64, U8, Mask


class Timing(Enum):
    """What predicted times are of.

    STEP: kernels of one step, as a profiler records them. Operands that the step read long ago come
        from memory.
    KERNEL: the same of calls that belong to no step.
    CALL: calls of a benchmark that replays them in a CUDA graph, from the start of one to the start
        of the next: the kernels and the gap after them. Six copies of a GEMM's operands take turns,
        so that small ones stay in the cache.
    """

    STEP = "step"
    KERNEL = "kernel"
    CALL = "call"


class ComponentGemms(NamedTuple):
    """Component GEMMs of composite calls, see `cost_record.ComponentGemm`.

    Attributes:
        call: call of each, ascending, int64[p].
        times: repetitions of each, float64[p].
        launches: additional launch floors per repetition, float64[p].
        shapes: as `gemm_tiles.gemm_ns` takes them, float64[p, 7].
        kernels: a `PartKernel` for each, uint8[p].
        also_moved: bytes that other kernels of the call move per repetition, float64[p].
    """

    call: I64
    times: F64
    launches: F64
    shapes: F64
    kernels: U8
    also_moved: F64

    @classmethod
    def of(cls, works: Sequence[Work]) -> Self:
        """Collect the component GEMMs of distinct calls."""
        call = [at for at, work in enumerate(works) for _ in work.parts]
        parts = [part for work in works for part in work.parts]
        shapes = [
            (p.batch, p.m, p.n, p.k, p.item_bytes, p.result_bytes or p.item_bytes, p.reuse)
            for p in parts
        ]
        return cls(
            np.array(call, dtype=np.int64),
            np.array([p.times for p in parts], dtype=np.float64),
            np.array([p.launches for p in parts], dtype=np.float64),
            np.array(shapes, dtype=np.float64).reshape(-1, 7),
            np.array([p.kernel for p in parts], dtype=np.uint8),
            np.array([p.also_moved for p in parts], dtype=np.float64),
        )

    def of_calls(self, calls: I64) -> tuple[Self, I64]:
        """Return the component GEMMs of `calls`, and each one's index into `calls`."""
        # `call` ascends, so the GEMMs of a call are consecutive.
        first, last = (np.searchsorted(self.call, calls, side) for side in ("left", "right"))
        counts = last - first
        owner = np.repeat(np.arange(len(calls)), counts)
        rows = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows += np.repeat(first, counts)
        parts = type(self)(
            self.call[rows],
            self.times[rows],
            self.launches[rows],
            self.shapes[rows],
            self.kernels[rows],
            self.also_moved[rows],
        )
        return parts, owner

    @property
    def calls_in_steps(self) -> I64:
        """Calls whose GEMMs are launched one by one, as the steps of a recurrent layer."""
        return np.unique(self.call[self.launches > 0])

    @property
    def expert_calls(self) -> I64:
        """Calls that run the experts of an MoE layer by an inference engine's kernels."""
        engines = np.isin(self.kernels, EXPERT_KERNELS)
        return np.unique(self.call[engines])

    @property
    def grouped_calls(self) -> I64:
        """Calls whose GEMMs are grouped by expert, of any library."""
        grouped = np.isin(self.kernels, (*EXPERT_KERNELS, PartKernel.GROUPED))
        return np.unique(self.call[grouped])

    @property
    def flops(self) -> F64:
        """FLOPs of one repetition of each GEMM."""
        batch, m, n, k = self.shapes.T[:4]
        return 2 * batch * m * n * k

    @property
    def bytes(self) -> F64:
        """Bytes that one repetition of each GEMM reads and writes."""
        batch, m, n, k, item, result, reuse = self.shapes.T
        return batch * (item * (m * k / reuse + k * n) + result * m * n)


_OPERAND_BYTES = GemmShape._fields.index("operand_bytes")
_BATCH = AttentionShape._fields.index("batch")
_BACKWARD = AttentionShape._fields.index("backward")

# Bytes that the last-level cache serves per SM and cycle. Vectorised kernels of PyTorch whose
# operands of 1.2 to 25 MB fit into half of it reach 5 to 6.3 TB/s on an H100 and 5 to 7.3 on an
# H200, 20 to 28 bytes; of 34 to 50 MB 5 to 6 TB/s on an H200, and 3.3 to 3.6 on an H100 (steps of a
# Llama-8B and of DeepSeek-V3's layers, torch 2.11, 2026-11-23 to 27).
_CACHE_BYTES_PER_CYCLE = 20.0

# In the same steps, kernels that handle elements one by one handle 1.4 to 2.2 per SM and cycle in
# place of 1.34 where the cache serves their operands.
_FASTER_IN_CACHE = 1.25

# A first load from memory over one from the cache: kernels of `exp`, `square`, `clamp` and `add`
# with operands of 4 to 25 kB take an H100 1.47 to 1.54 us where other kernels ran since, and 1.22
# where the kernel before wrote the operand.
_MISS_S = 0.27e-6

_HOPPER = 90

# Threads whose instructions an SM issues per cycle: four warps, on NVIDIA GPUs since Volta.
_LANES = 128

# Temporaries of the model's arithmetic for this many kernels stay in a CPU core's cache.
_BLOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Operations per second for each node's class of work; nan if there is no rate.

    Attributes:
        peak: datasheet peak, float64[n]; for vector units the sustained rate, because no power cap
            limits them.
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
        matmul: whether the FLOPs are those of GEMMs, bool[n].
        matmul_class: whether the class is GEMM or attention, with or without known FLOPs, bool[n].
        over_link: whether it is a copy over the host link or to another GPU, or communication
            without a recorded group, bool[n].
        transfer: whether it is a copy or fill by a copy engine, bool[n].
        constant: whether it writes one value to all of its bytes, bool[n].
        dtype: positions in `dtypes`, int64[n].
        dtypes: dtypes of GEMM operands; "" for none.
        call: positions in `gemm` and `attention`, int64[n].
        gemm: `GemmShape` of the distinct calls, or zeros, float64[d, 6].
        scales: the `Scales` of each call, uint8[d].
        attention: `AttentionShape` of the distinct calls, or zeros, float64[d, 12].
        operator_ns: time of all kernels of the operator instance, float64[n].
        floor_share: shortest kernel of its class as a share of the description's launch floor,
            float64[n].
        passes: number of times that the operator's kernels stream the bytes, float64[n].
        cached_passes: the same where an SM's cache keeps the rows of its blocks, float64[n].
        rereads: number of times that memory, not the cache, serves them, float64[n].
        cycles: least SM cycles for its elements, float64[n].
        arithmetic: whether these are of arithmetic, not of loads that a cache shortens, bool[n].
        chain: loads that wait for each other, float64[n].
        far_load: time of such a load from memory over one from the cache, float64[n].
        tail: loads from the cache that follow all other work, float64[n].
        unknown_layout: whether the time depends on strides that are not known, bool[n].
        from_torch: whether PyTorch's operator launches it, bool[n]. Other libraries' kernels reach
            less of the bandwidth.
        sequence_state: whether it is an operator of layers with a state per sequence whose kernels
            were measured on Hopper, bool[n].
        instructions: instructions, summed over its threads; 0 if not known, float64[n].
        reuse: the operands that each reads, and how long ago they were last used.
        parts: component GEMMs of composite calls, in the order of their calls.
        timing: what predicted times are of, and measured ones.
    """

    duration_ns: F64
    flops: F64
    bytes: F64
    matmul: Mask
    matmul_class: Mask
    over_link: Mask
    transfer: Mask
    constant: Mask
    dtype: I64
    dtypes: tuple[str, ...]
    call: I64
    gemm: F64
    scales: U8
    attention: F64
    operator_ns: F64
    floor_share: F64
    passes: F64
    cached_passes: F64
    rereads: F64
    cycles: F64
    arithmetic: Mask
    chain: F64
    far_load: F64
    tail: F64
    unknown_layout: Mask
    from_torch: Mask
    sequence_state: Mask
    instructions: F64
    reuse: OperandReuse
    parts: ComponentGemms = field(default_factory=lambda: ComponentGemms.of([]))
    timing: Timing = Timing.STEP

    @classmethod
    def of(cls, graph: Graph, costs: OpCosts) -> "KernelFeatures":
        """Collect the features of the compute nodes of `graph` from their costs."""
        nodes, index = graph.nodes, costs.index
        copies = nodes.kind[index] == Kind.MEMCPY
        transfer = copies | (nodes.kind[index] == Kind.MEMSET)
        known = (costs.bytes_read >= 0) & (costs.bytes_written >= 0)
        moved = costs.bytes_read.astype(np.float64) + costs.bytes_written
        return cls(
            duration_ns=nodes.duration_ns[index].astype(np.float64),
            flops=np.where(costs.flops >= 0, costs.flops, np.nan),
            bytes=np.where(known, moved, np.nan),
            matmul=costs.matmul,
            matmul_class=costs.is_class(OpClass.GEMM, OpClass.ATTENTION),
            over_link=(copies & ~device_copies(graph)[index])
            | costs.is_class(OpClass.COMMUNICATION),
            transfer=transfer,
            constant=costs.is_class(OpClass.MEMSET),
            dtype=costs.dtype,
            dtypes=costs.dtypes,
            call=costs.call,
            gemm=_shape_rows([work.gemm for work in costs.works], GemmShape),
            scales=np.array([work.scales for work in costs.works], dtype=np.uint8),
            attention=_shape_rows([work.attention for work in costs.works], AttentionShape),
            operator_ns=costs.operator_ns,
            floor_share=np.array([floor_share_of(name) for name in CLASSES])[costs.op_class]
            * np.where(transfer, 1, np.array([w.floor_factor for w in costs.works])[costs.call]),
            passes=np.array([work.passes for work in costs.works])[costs.call],
            cached_passes=_cached_passes(costs.works)[costs.call],
            rereads=np.array([work.rereads for work in costs.works])[costs.call],
            cycles=np.array([work.cycles for work in costs.works])[costs.call],
            arithmetic=np.array([work.arithmetic for work in costs.works], bool)[costs.call],
            chain=np.array([work.chain for work in costs.works])[costs.call],
            far_load=np.array([work.far_load for work in costs.works])[costs.call],
            tail=np.array([work.tail for work in costs.works])[costs.call],
            unknown_layout=np.array([w.unknown_layout for w in costs.works], bool)[costs.call],
            # cuSOLVER and cuFFT launch several kernels for a call.
            from_torch=_of_operators(graph, index, lambda name: name.startswith(_TORCH))
            & ~costs.is_class(OpClass.DECOMPOSITION, OpClass.FFT),
            sequence_state=_of_operators(graph, index, MEASURED.__contains__),
            instructions=np.maximum(nodes.instructions[index], 0).astype(np.float64),
            reuse=OperandReuse.of(graph, costs),
            parts=ComponentGemms.of(costs.works),
        )

    def select(self, rows: slice | I64) -> "KernelFeatures":
        """Return the features of the nodes at `rows`."""
        # Indexed by call or dtype, not by node.
        shared = ("dtypes", "gemm", "scales", "attention", "parts", "reuse", "timing")
        columns = {
            f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name not in shared
        }
        return replace(self, **columns, reuse=self.reuse.select(rows))

    def blocks(self) -> Iterator[tuple[slice, "KernelFeatures"]]:
        """Yield (rows, their features) in blocks whose temporaries fit into a CPU core's cache."""
        for start in range(0, len(self.call), _BLOCK):
            rows = slice(start, start + _BLOCK)
            yield rows, self.select(rows)

    @property
    def per_call(self) -> bool:
        """Whether times are those of calls in a benchmark."""
        return self.timing is Timing.CALL

    @property
    def is_fused_attention(self) -> Mask:
        """Whether each node is a call of fused attention with known sizes, bool[n]."""
        return (self.attention[:, _BATCH] > 0)[self.call]

    @property
    def is_attention_backward(self) -> Mask:
        """Whether each node is the backward pass of fused attention, bool[n]."""
        return (self.attention[:, _BACKWARD] > 0)[self.call]

    def has_dtype(self, *names: str) -> Mask:
        """Return whether each node's operands have one of the dtypes, bool[n]."""
        return np.array([name in names for name in self.dtypes], dtype=bool)[self.dtype]

    @property
    def has_narrow_operands(self) -> Mask:
        """Whether each node is a GEMM of operands in 8 or 4 bits, bool[n]."""
        item = self.gemm[:, _OPERAND_BYTES]
        return ((item > 0) & (item <= 1))[self.call]

    @property
    def has_four_bit_operands(self) -> Mask:
        """Whether each node is a GEMM of operands in 4 bits, bool[n]."""
        item = self.gemm[:, _OPERAND_BYTES]
        return ((item > 0) & (item < 1))[self.call]

    @property
    def share_of_operator(self) -> F64:
        """Share of its operator instance's time that each node takes; 1 if not measured."""
        measured = self.operator_ns > 0
        whole = np.ones(len(self.operator_ns))
        return np.divide(self.duration_ns, self.operator_ns, out=whole, where=measured)

    def cached_share(self, gpu: Gpu) -> F64:
        """Return the share of each kernel's bytes that the last-level cache serves, float64[n].

        1 for operands of up to half of the cache, which the previous kernel wrote; falls linearly
        to 0 for operands as large as the cache.
        """
        # Other vendors' GPUs and libraries were not measured.
        if not gpu.is_nvidia or gpu.l2_bytes is None:
            return np.zeros(len(self.call))
        share = self.reuse.cached_share(np.nan_to_num(self.bytes), gpu.l2_bytes)
        return share * (self.from_torch & ~(self.matmul_class | self.transfer))

    def s_per_byte(self, gpu: Gpu) -> F64:
        """Return the mean time of a byte, from the cache or from memory, in s, float64[n]."""
        cache = max(gpu.bandwidth_bytes_per_s, _CACHE_BYTES_PER_CYCLE * gpu.issue_rate_hz)
        share = self.cached_share(gpu)
        return share / cache + (1 - share) / gpu.bandwidth_bytes_per_s

    def miss_s(self, gpu: Gpu) -> F64:
        """Return the latency of operands that no cache has, in seconds, float64[n].

        Other vendors' GPUs and libraries were not measured.
        """
        if not gpu.is_nvidia or gpu.l2_bytes is None:
            return np.zeros(len(self.call))
        missed = 1 - self.reuse.kept_share(np.nan_to_num(self.bytes), gpu.l2_bytes)
        return _MISS_S * missed * (self.from_torch & ~(self.matmul_class | self.transfer))

    def issue_s(self, gpu: Gpu) -> F64:
        """Return the time of elements that are handled one by one, in seconds, float64[n]."""
        # `cycles` is of the whole operator, unlike FLOPs and
        # bytes, which `node_costs` divides among its kernels.
        issue = self.cycles * self.share_of_operator / gpu.issue_rate_hz
        cached = np.where(self.arithmetic, 0.0, self.cached_share(gpu))
        return issue / (1 + (_FASTER_IN_CACHE - 1) * cached)

    def instructions_s(self, gpu: Gpu) -> F64:
        """Return the time to issue a kernel's instructions, in seconds, float64[n].

        The clock is the boost clock, because steps of training run below the highest one. Other
        vendors' GPUs were not measured.
        """
        if not gpu.is_nvidia or not self.instructions.any():
            return np.zeros(len(self.instructions))
        return self.instructions / (_LANES * gpu.sm_count * gpu.clock_hz)

    def passes_on(self, gpu: Gpu) -> F64:
        """Return the number of times that the operator's kernels stream the bytes, float64[n]."""
        cached = gpu.is_nvidia and (gpu.capability or 0) >= _HOPPER
        return self.cached_passes if cached else self.passes

    def chain_loads(self, gpu: Gpu) -> F64:
        """Return the loads that wait for each other, in loads from the cache, float64[n].

        If the operands exceed half of the cache, every load counts as one from memory.
        """
        from_memory = self.cached_share(gpu) < 1
        return self.chain * self.share_of_operator * np.where(from_memory, self.far_load, 1)

    def floor_ns(self, gpu: Gpu) -> F64:
        """Return the launch floor of each kernel's class on `gpu` in ns, float64[n]."""
        return self.floor_share_on(gpu) * gpu.launch_floor_ns

    def floor_share_on(self, gpu: Gpu) -> F64:
        """Return the shortest kernel of each one's class as a share of `gpu`'s launch floor."""
        # Shares below 1 were measured on NVIDIA GPUs only; on an
        # MI300X no class is shorter than a GEMM (see `op_classes.py`).
        if gpu.is_nvidia:
            return shares_on(self.floor_share, gpu)
        return np.maximum(self.floor_share, 1)

    def floor_ratio(self, source: Gpu, target: Gpu) -> F64:
        """Return each kernel class's launch floor on `target` over that on `source`."""
        gemm_ratio = target.launch_floor_ns / source.launch_floor_ns
        return gemm_ratio * (self.floor_share_on(target) / self.floor_share_on(source))

    def launch_change_ns(self, source: Gpu, target: Gpu) -> F64:
        """Return how much longer a kernel's launch takes on a GPU of the architecture, float64[n].

        GEMMs and attention change with `launch_floor_ns`, all others with the shortest elementwise
        kernels. Of 11,752 kernels that an H100 and an H200 ran (small operators and short GEMMs,
        2026-11-27), those of 1 to 10 us are 0.16 to 0.19 us shorter on the H200 in the median,
        whatever their length and class; cuBLAS's GEMMs 0.03 to 0.1 us. Fills by the driver are
        0.03 to 0.1 us shorter, half of their spread, and keep their launch's time.
        """
        products, others = (
            target_ns - source_ns
            for source_ns, target_ns in zip(_launches_ns(source), _launches_ns(target), strict=True)
        )
        change = np.where(self.matmul_class, products, others)
        fills = self.transfer & self.constant
        return np.where(self.over_link | fills, 0.0, change)

    def matmul_dtypes(self, gpu: Gpu) -> list[str]:
        """Return the dtype in which `gpu` multiplies operands of each of `dtypes`."""
        return [_matmul_dtype(dtype, gpu) for dtype in self.dtypes]

    def rates(self, gpu: Gpu) -> KernelRates:
        """Return the rates of `gpu` for each node's work."""
        used = self.matmul_dtypes(gpu)
        peak = _rates(used, gpu.peak_tensor_flops_per_s)[self.dtype]
        sustained = _rates(used, gpu.tensor_flops_per_s)[self.dtype]
        vector = gpu.vector_flops_per_s or np.nan
        wider = np.array([a != b for a, b in zip(used, self.dtypes, strict=True)], dtype=bool)
        return KernelRates(
            np.where(self.matmul, peak, vector),
            np.where(self.matmul, sustained, vector),
            wider[self.dtype] & self.matmul,
        )


def _launches_ns(gpu: Gpu) -> tuple[float, float]:
    """Return the time of the shortest GEMMs and of the shortest elementwise kernels."""
    elementwise = shares_on(np.array([floor_share_of(OpClass.ELEMENTWISE)]), gpu)
    return gpu.launch_floor_ns, float(elementwise[0]) * gpu.launch_floor_ns


_TORCH = "aten::"


def _of_operators(graph: Graph, index: I64, selected: Callable[[str], bool]) -> Mask:
    """Return whether the nodes at `index` belong to operators of selected names, bool[n]."""
    codes, code_index = np.unique(graph.nodes.op[index], return_inverse=True)
    return np.array([selected(graph.strings[int(code)]) for code in codes], dtype=bool)[code_index]


def _shape_rows(
    shapes: Sequence[GemmShape | AttentionShape | None],
    columns: type[GemmShape] | type[AttentionShape],
) -> F64:
    """Return one row per call, zeros for a call without shape, float64[d, fields]."""
    width = len(columns._fields)
    rows = [shape or (0,) * width for shape in shapes]
    return np.array(rows, dtype=np.float64).reshape(-1, width)


def kernels_of(works: Sequence[Work], duration_ns: F64) -> KernelFeatures:
    """Return the features of d calls outside any graph, one kernel each.

    Args:
        works: their costs.
        duration_ns: their durations, 0 if not measured, float64[d].
    """
    count = len(works)
    dtypes = tuple(dict.fromkeys(work.dtype for work in works))
    flops = np.array([work.flops for work in works], dtype=np.float64)
    moved = [work.bytes_read + max(work.bytes_written, _result_bytes(work)) for work in works]
    matmul = np.array([work.matmul for work in works], dtype=bool)
    no_kernel = np.zeros(count, dtype=bool)
    return KernelFeatures(
        duration_ns=duration_ns,
        flops=flops,
        bytes=np.array(moved, dtype=np.float64),
        matmul=matmul,
        matmul_class=matmul,
        over_link=no_kernel,
        transfer=no_kernel,
        constant=no_kernel,
        dtype=np.array([dtypes.index(work.dtype) for work in works], dtype=np.int64),
        dtypes=dtypes,
        call=np.arange(count),
        gemm=_shape_rows([work.gemm for work in works], GemmShape),
        scales=np.array([work.scales for work in works], dtype=np.uint8),
        attention=_shape_rows([work.attention for work in works], AttentionShape),
        operator_ns=duration_ns,
        floor_share=np.array([work.floor_share for work in works]),
        passes=np.array([work.passes for work in works]),
        cached_passes=_cached_passes(works),
        rereads=np.array([work.rereads for work in works]),
        cycles=np.array([work.cycles for work in works]),
        arithmetic=np.array([work.arithmetic for work in works], dtype=bool),
        chain=np.array([work.chain for work in works]),
        far_load=np.array([work.far_load for work in works]),
        tail=np.array([work.tail for work in works]),
        unknown_layout=np.array([work.unknown_layout for work in works], dtype=bool),
        from_torch=np.ones(count, dtype=bool),
        sequence_state=no_kernel,
        instructions=np.zeros(count),
        reuse=OperandReuse.unknown(count),
        parts=ComponentGemms.of(works),
    )


def _cached_passes(works: Sequence[Work]) -> F64:
    return np.array([work.cached_passes or work.passes for work in works])


def _result_bytes(work: Work) -> int:
    shape = work.gemm
    return shape.batch * shape.m * shape.n * shape.result_bytes if shape else 0


_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")

# dtype -> wider dtypes that represent its values, the narrowest first. Libraries use them where
# units are missing: cuBLAS multiplies bfloat16 on a V100 in float32, and quantised weights are
# widened before the GEMM. No integer dtype is widened.
_WIDER = {
    "bfloat16": ("float32",),
    "float16": ("float32",),
    "tfloat32": ("float32",),
    **dict.fromkeys(_FP8, ("bfloat16", "float16")),
    "float4_e2m1fn_x2": ("float8_e4m3fn", "bfloat16", "float16"),
}


def _matmul_dtype(dtype: str, gpu: Gpu) -> str:
    """Return the dtype in which `gpu` multiplies operands of `dtype`; itself without units."""
    candidates = (dtype, *_WIDER.get(dtype, ()))
    return next((name for name in candidates if gpu.tensor_flops_per_s(name)), dtype)


def _rates(dtypes: list[str], rate: Callable[[str], float | None]) -> F64:
    return np.array([rate(dtype) or np.nan for dtype in dtypes], dtype=np.float64)


def matmul_ratio(source: Gpu, target: Gpu, *, sustained: bool) -> float | None:
    """Return the source's rate of 16-bit GEMMs over the target's; None if one has no such rate.

    For GEMMs whose operands were not recorded; bfloat16, or float16 if bfloat16 is missing.
    """
    # A V100 or a T4 has units for float16 only.
    for dtype in ("bfloat16", "float16"):
        rates = [
            gpu.tensor_flops_per_s(dtype) if sustained else gpu.peak_tensor_flops_per_s(dtype)
            for gpu in (source, target)
        ]
        if rates[0] and rates[1]:
            return rates[0] / rates[1]
    return None
