"""Replace fused attention by the kernels, memory and time of eager attention.

The kernels are those of transformers' `eager`. Forward: copy keys and values for each query head
that shares them, scores = Q K^T, scale, add the mask, softmax in float32, round to the operands'
dtype, multiply by V. Backward: dP = dO V^T, dV = P^T dO, dP to float32, softmax backward, scale,
dQ = dS K, dK = dS^T Q, and the sums over heads that share keys. A causal mask hides half of the
scores and saves no work.

The float16 softmax reads float16 and its backward writes it; the bfloat16 one is float32 on both
sides, with a copy before and after. On a GPU its backward first multiplies dP by P in a separate
kernel (aten/src/ATen/native/SoftMax.cpp and cuda/SoftMax.cu of PyTorch).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.intervals import intervals
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.op_costs.cost_record import AttentionSizes
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.passes.attention.score_memory import (
    CallMemory,
    eager_memory,
    with_score_memory,
)
from onerank.annotate.passes.dataflow import TEXTS, as_text
from onerank.ir import (
    UNKNOWN,
    Edges,
    Evidence,
    Graph,
    Kind,
    Nodes,
    Reason,
)
from onerank.ir.arrays import I64
from onerank.ir.dtypes import TENSOR_TYPES
from onerank.ir.edges import one_per_pair
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note

# Dtypes whose eager kernels `_forward` and `_backward` describe.
_SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")


_FLOAT, _BFLOAT = TENSOR_TYPES["float32"], TENSOR_TYPES["bfloat16"]

Operand = tuple[tuple[int, ...], str]


class EagerKernel(NamedTuple):
    """One kernel: its operator, operands and results as (shape, type)."""

    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


def _forward(s: AttentionSizes, dtype: str) -> list[EagerKernel]:
    """Return the kernels of the forward pass."""
    kind = TENSOR_TYPES[dtype]
    merged = s.batch * s.heads
    scores = (s.batch, s.heads, s.rows, s.keys)
    flat = (merged, s.rows, s.keys)
    query, out = (merged, s.rows, s.d), (merged, s.rows, s.dv)
    softmax_dtype = _softmax_dtype(kind)
    # transformers' `repeat_kv` copies shared keys and values before the products.
    kernels = [_repeat_heads(s, width, kind) for width in (s.d, s.dv) if s.heads != s.key_heads]
    return [
        *kernels,
        _kernel("bmm", [(query, kind), ((merged, s.d, s.keys), kind)], (flat, kind)),
        _kernel("mul", [(scores, kind), ((), "Tensor(double)")], (scores, kind)),
        _kernel("add", [(scores, kind), ((s.batch, 1, s.rows, s.keys), kind)], (scores, kind)),
        *_cast(scores, kind, softmax_dtype),
        _kernel("_softmax", [(scores, softmax_dtype)], (scores, _FLOAT)),
        *_cast(scores, _FLOAT, kind),
        _kernel("bmm", [(flat, kind), ((merged, s.keys, s.dv), kind)], (out, kind)),
    ]


def _backward(s: AttentionSizes, dtype: str) -> list[EagerKernel]:
    """Return the kernels of the backward pass."""
    kind = TENSOR_TYPES[dtype]
    merged = s.batch * s.heads
    scores, flat = (s.batch, s.heads, s.rows, s.keys), (merged, s.rows, s.keys)
    out = (merged, s.rows, s.dv)
    transposed = (merged, s.keys, s.rows)
    softmax_dtype = _softmax_dtype(kind)
    kernels = [
        _kernel("bmm", [(transposed, kind), (out, kind)], ((merged, s.keys, s.dv), kind)),
        _kernel("bmm", [(out, kind), ((merged, s.dv, s.keys), kind)], (flat, kind)),
        *_cast(scores, kind, _FLOAT),
        _kernel("mul", [(scores, _FLOAT), (scores, _FLOAT)], (scores, _FLOAT)),
        _kernel(
            "_softmax_backward_data", [(scores, _FLOAT), (scores, _FLOAT)], (scores, softmax_dtype)
        ),
        *_cast(scores, softmax_dtype, kind),
        _kernel("mul", [(scores, kind), ((), "Tensor(double)")], (scores, kind)),
        _kernel(
            "bmm", [(flat, kind), ((merged, s.keys, s.d), kind)], ((merged, s.rows, s.d), kind)
        ),
        _kernel(
            "bmm", [((merged, s.d, s.rows), kind), (flat, kind)], ((merged, s.d, s.keys), kind)
        ),
    ]
    if s.heads != s.key_heads:
        kernels += [_sum_heads(s, width, kind) for width in (s.dv, s.d)]
    return kernels


def _softmax_dtype(kind: str) -> str:
    """Return the dtype that softmax reads and its backward writes, for operands of a dtype."""
    return _FLOAT if kind == _BFLOAT else kind


def _cast(shape: tuple[int, ...], before: str, after: str) -> list[EagerKernel]:
    """Return the copy from one dtype to another; empty if they are equal."""
    return [_kernel("copy_", [(shape, after), (shape, before)], (shape, after))] * (before != after)


def _kernel(op: str, inputs: list[Operand], output: Operand) -> EagerKernel:
    return EagerKernel(f"aten::{op}", tuple(inputs), (output,))


def _repeat_heads(s: AttentionSizes, width: int, kind: str) -> EagerKernel:
    """Return the copy of keys or values for each query head that shares them."""
    shape = (s.batch, s.key_heads, s.heads // s.key_heads, s.keys, width)
    return _kernel("copy_", [(shape, kind), (shape, kind)], (shape, kind))


def _sum_heads(s: AttentionSizes, width: int, kind: str) -> EagerKernel:
    shape = (s.batch, s.key_heads, s.heads // s.key_heads, s.keys, width)
    summed = (s.batch, s.key_heads, s.keys, width)
    return EagerKernel("aten::sum", ((shape, kind), ((), "None")), ((summed, kind),))


class _FusedCall(NamedTuple):
    """The kernels of one call of fused attention, and the eager kernels that replace them."""

    members: tuple[int, ...]
    launcher: int
    sizes: AttentionSizes
    is_backward: bool
    dtype: str
    kernels: tuple[EagerKernel, ...]

    @property
    def first(self) -> int:
        """The node that begins the call: its launcher, or its first kernel without a launch."""
        return self.launcher if self.launcher >= 0 else self.members[0]


@dataclass(frozen=True, slots=True)
class EagerAttention:
    """Replace fused attention by eager attention, as transformers' `eager` runs it.

    Attributes:
        from_description: the cost model of unmeasured kernels.
    """

    from_description: PredictFromDescription = predict_from_description

    def apply(self, graph: Graph, target: Gpu) -> Graph:
        """Return the graph with each call of fused attention as products, softmax and casts.

        The new kernels run one after another in place of the fused ones, with one launch. They are
        unmeasured, so their evidence is DATASHEET. They include no dropout.

        Args:
            graph: re-costed for `target`, or captured on it; with GPU kernels.
            target: the GPU they run on.

        Raises:
            AnnotateError: the graph has no fused attention with known sizes.
        """
        fused_calls = _fused_calls(graph)
        if not fused_calls:
            raise AnnotateError(
                "the graph has no fused attention of known sizes to replace; expected a fused "
                "kernel with recorded operands (eager attention is GEMMs and a softmax already)",
                code="unfuse-no-fused-attention",
            )
        expanded, new = _replace_calls(graph, fused_calls)
        expanded = self._predict(expanded, new, target)
        before = sum(int(graph.nodes.duration_ns[list(call.members)].sum()) for call in fused_calls)
        after = int(expanded.nodes.duration_ns[new].sum())
        call_memory = [
            CallMemory(
                int(graph.nodes.start_ns[call.first]),
                eager_memory(call.sizes, call.dtype),
                call.is_backward,
            )
            for call in fused_calls
        ]
        measurement, peak_note = with_score_memory(graph, call_memory)
        text = (
            f"What if attention were eager: {sum(len(call.members) for call in fused_calls)} fused "
            f"attention kernels ({before / 1e6:.3f} ms) become {len(new)} eager kernels "
            f"({after / 1e6:.3f} ms, predicted from {target.name}'s datasheet); {peak_note}"
        )
        notes = [Note(text, code="what-if-eager-attention")]
        if remaining := _remaining(graph, fused_calls):
            text = (
                f"Eager attention: {remaining} more attention kernels of unknown sizes or other "
                "dtypes stay fused."
            )
            notes.append(Note(text, code="eager-stays-fused"))
        measurement = measurement.untimed(*notes)
        return replace(expanded, job=msgspec.structs.replace(expanded.job, measurement=measurement))

    def _predict(self, graph: Graph, new: I64, target: Gpu) -> Graph:
        costs = op_costs_of(graph)
        kernels = KernelFeatures.of(graph, costs)
        predicted = self.from_description(kernels, target)
        (low, high), _ = intervals(kernels, predicted, None, target, shipped())
        is_new = np.isin(costs.index, new)
        counts = ("flops", "bytes_read", "bytes_written")
        columns = {name: getattr(graph.nodes, name).copy()
                   for name in ("duration_ns", "p10_ns", "p90_ns", *counts)}  # fmt: skip
        for name, values in (
            ("duration_ns", predicted.duration_ns),
            ("p10_ns", low),
            ("p90_ns", high),
        ):
            columns[name][costs.index[is_new]] = np.rint(values[is_new]).astype(np.int64)
        for name in counts:
            columns[name][costs.index[is_new]] = getattr(costs, name)[is_new]
        return graph.with_columns(**columns)


def _remaining(graph: Graph, calls: list[_FusedCall]) -> int:
    """Return the number of attention kernels that stay fused."""
    costs = op_costs_of(graph)
    fused = costs.index[costs.is_class(OpClass.ATTENTION) & graph.mask(Kind.KERNEL)[costs.index]]
    return len(np.setdiff1d(fused, [node for call in calls for node in call.members]))


def _fused_calls(graph: Graph) -> list[_FusedCall]:
    """Return the calls of fused attention, each with its kernels in order."""
    costs = op_costs_of(graph)
    launcher = graph.launchers()
    members: dict[tuple[int, int], list[int]] = {}
    cost_row = dict[tuple[int, int], int]()
    fused = np.array(
        [bool(work.attention) and work.dtype in _SUPPORTED_DTYPES for work in costs.works],
        dtype=bool,
    )
    rows = np.flatnonzero(fused[costs.call] & graph.mask(Kind.KERNEL, Kind.MEMSET)[costs.index])
    for row in rows[np.argsort(graph.nodes.start_ns[costs.index[rows]], kind="stable")].tolist():
        node = int(costs.index[row])
        key = (int(launcher[node]), -1) if launcher[node] >= 0 else (-1, node)
        members.setdefault(key, []).append(node)
        cost_row[key] = int(costs.call[row])
    calls: list[_FusedCall] = []
    for key, nodes in members.items():
        work = costs.works[cost_row[key]]
        assert work.attention is not None, "only calls with a shape are collected"
        sizes, is_backward = work.attention.sizes, bool(work.attention.backward)
        kernels = (_backward if is_backward else _forward)(sizes, work.dtype)
        calls.append(
            _FusedCall(tuple(nodes), key[0], sizes, is_backward, work.dtype, tuple(kernels))
        )
    return calls


def _replace_calls(graph: Graph, calls: list[_FusedCall]) -> tuple[Graph, I64]:
    """Return the graph with the new kernels, and their indices."""
    nodes, count = graph.nodes, len(graph)
    removed = np.zeros(count, dtype=bool)
    rows, order_keys = list[int](), list[float]()
    first_of, last_of = np.arange(count), np.arange(count)
    chain: list[tuple[int, int, Reason]] = []
    for call in calls:
        members, first = list(call.members), count + len(rows)
        removed[members] = True
        for offset in range(len(call.kernels)):
            rows.append(members[0])
            # Fractions put the new kernels between the first fused kernel and the next node.
            order_keys.append(members[0] + (offset + 1) / (len(call.kernels) + 1))
            if offset:
                chain.append((first + offset - 1, first + offset, Reason.STREAM_ORDER))
        first_of[members], last_of[members] = first, first + len(call.kernels) - 1
    joined = Nodes.joined([nodes, _new_nodes(nodes, rows)])
    texts = {name: graph.strings.decode(getattr(joined, name)) for name in TEXTS}
    for offset, kernel in enumerate(kernel for call in calls for kernel in call.kernels):
        for name, value in _columns(kernel).items():
            texts[name][count + offset] = value
    expanded = replace(graph, nodes=joined, edges=Edges.from_pairs(
        len(joined), graph.edges.source, graph.edges.target, graph.edges.reason))  # fmt: skip
    expanded = expanded.with_columns(**texts)
    edges = graph.edges
    links = np.array([pair[:2] for pair in chain], dtype=np.int64).reshape(-1, 2)
    source = np.concatenate([last_of[edges.source], links[:, 0]])
    waiter = np.concatenate([first_of[edges.target], links[:, 1]])
    reason = np.concatenate([edges.reason, np.array([link[2] for link in chain], dtype=np.uint8)])
    internal = np.concatenate([  # edges between kernels of one fused call
        removed[edges.source] & removed[edges.target]
        & (first_of[edges.source] == first_of[edges.target]),
        np.zeros(len(links), dtype=bool),
    ])  # fmt: skip
    source, waiter, reason = one_per_pair(source[~internal], waiter[~internal], reason[~internal])
    order = np.argsort(
        np.concatenate([np.arange(count, dtype=np.float64), order_keys]), kind="stable"
    )
    kept = order[~np.concatenate([removed, np.zeros(len(rows), dtype=bool)])[order]]
    new_index = np.full(len(joined), -1, dtype=np.int64)
    new_index[kept] = np.arange(len(kept))
    expanded = replace(
        expanded,
        nodes=expanded.nodes.take(kept),
        edges=Edges.from_pairs(len(kept), new_index[source], new_index[waiter], reason),
    )
    return expanded, np.sort(new_index[count:])


def _new_nodes(nodes: Nodes, rows: list[int]) -> Nodes:
    """Return one new kernel per row, on the stream of the kernel at the row."""
    copies = nodes.take(np.array(rows, dtype=np.int64))
    unknown = np.full(len(rows), UNKNOWN, dtype=np.int64)
    zero = np.zeros(len(rows), dtype=np.int64)
    first = int(nodes.id.max(initial=0)) + 1
    positions = np.array(rows)
    # Distinct start times keep the kernels of a call in order; rows of one call are neighbours.
    offset = np.arange(len(rows)) - np.searchsorted(positions, positions)
    columns = {
        "id": np.arange(first, first + len(rows)).astype(np.uint64),
        "kind": np.full(len(rows), Kind.KERNEL, dtype=np.uint8),
        "evidence": np.full(len(rows), Evidence.DATASHEET, dtype=np.uint8),
        "start_ns": copies.start_ns + offset,
    }
    zeroed = ("duration_ns", "spread_ns", "samples", "bytes_allocated", "bytes_freed")
    unknown_columns = ("uncontended_ns", "p10_ns", "p90_ns", "flops", "bytes_read", "bytes_written")
    columns |= dict.fromkeys(zeroed, zero) | dict.fromkeys(unknown_columns, unknown)
    return replace(copies, **{n: v.astype(getattr(copies, n).dtype) for n, v in columns.items()})


def _columns(kernel: EagerKernel) -> dict[str, str]:
    """Return the text columns of a kernel."""
    return {
        "name": f"eager attention: {kernel.op.removeprefix('aten::')}",
        "op": kernel.op,
        "grid": "",
        "block": "",
        "input_shapes": as_text([list(shape) for shape, _ in kernel.inputs]),
        "input_types": as_text([kind for _, kind in kernel.inputs]),
        "input_values": "",
        "output_shapes": as_text([list(shape) for shape, _ in kernel.outputs]),
        "output_types": as_text([kind for _, kind in kernel.outputs]),
        "output_values": "",
    }
