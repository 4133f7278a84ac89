"""Replace eager attention by one fused kernel per pass.

The new nodes have PyTorch's operator, operands and results of the fused kernel.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_kernels import Resolution, resolve_unmeasured
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.intervals import Uncertainty, intervals
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.op_costs.cost_record import AttentionSizes
from onerank.annotate.op_costs.node_costs import OpCosts, op_costs_of
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.passes.attention.match_eager import EagerCall, eager_calls, softmaxes
from onerank.annotate.passes.attention.score_memory import without_scores
from onerank.annotate.passes.dataflow import TEXTS, Flow, Operand, as_text
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Kind, Measurement, Reason
from onerank.ir.arrays import F64, I64, U8, Mask
from onerank.ir.edges import edges_without
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note

BY_TORCH = frozenset({"flash2", "cudnn", "aotriton"})
"""Kernel families that operators of PyTorch run."""

# Kernel names (forward, backward) that `attention_kernels.family_of` recognises.
_KERNELS = {
    "flash2": ("flash_fwd_kernel", "flash_bwd_kernel"),
    "flash3": ("FlashAttnFwdSm90", "FlashAttnBwdSm90"),
    "cudnn": ("cudnn sdpa flash_fprop", "cudnn sdpa flash_bprop"),
    "aotriton": ("attn_fwd", "bwd_kernel_fuse"),
    "ck": ("ck_tile fmhafwd", "ck_tile fmhabwd"),
    "aiter": ("fmha_fwd_hd", "fmha_bwd_hd"),
}


class Removal(NamedTuple):
    """The nodes to remove, and the nodes that fused kernels replace.

    Attributes:
        dropped: nodes to remove, bool[n].
        heads: per pass of each call, the operation that the fused kernel replaces.
        launchers: per head, the host operator that launches it; -1 for none.
        mask_makers: calls that only build masks for eager attention.
    """

    dropped: Mask
    heads: list[int]
    launchers: list[int]
    mask_makers: set[int]


def find_removal(graph: Graph, flow: Flow, calls: list[EagerCall]) -> Removal:
    """Return everything to remove with calls of eager attention.

    These are all operations of the calls except one per pass, the operations that only build their
    masks, and the host operators that launched both. Host operators that launch nothing (views,
    allocations, autograd nodes) go with the removed launcher that follows them.
    """
    members = {index for call in calls for index in call.members}
    mask_makers = _find_mask_makers(
        flow, members, {content for call in calls for content in call.inputs}
    )
    dropped = np.zeros(len(graph), dtype=bool)
    for index in members | mask_makers:
        dropped[list(flow.calls[index].nodes)] = True
    heads, launchers = list[int](), list[int]()
    for pass_ in (pass_ for call in calls for pass_ in call.passes):
        product = flow.calls[pass_.product]
        nodes = np.array(product.nodes)
        # Of a split product the longest kernel stays, not the sum of its parts.
        heads.append(int(nodes[np.argmax(graph.nodes.duration_ns[nodes])]))
        launchers.append(product.launcher)
    dropped[heads] = False
    written = {operand.content for index in members for operand in flow.calls[index].writes}
    # Dropout with p = 0 returns the probabilities themselves; without them it has nothing to
    # return.
    identities = [identity for identity in flow.identities if identity[2] in written]
    dropped[[node for node, _, _ in identities]] = True
    # In a CPU capture the operators are the compute, and `members` already has them.
    if not graph.job.device.runs_operators:
        removed = {flow.calls[index].launcher for index in members | mask_makers} - {-1}
        removed |= {launcher for _, launcher, _ in identities} - {-1}
        dropped[_removable_host_operators(graph, removed - set(launchers), set(launchers))] = True
    return Removal(dropped, heads, launchers, mask_makers)


def _find_mask_makers(flow: Flow, members: set[int], inputs: set[int]) -> set[int]:
    """Return calls whose results are read, and only by the members and by one another.

    Calls that write inputs of the fused kernels are excluded.
    """
    mask_makers = set[int]()
    queue = list(members)
    while queue:
        for content in {operand.content for operand in flow.calls[queue.pop()].reads}:
            writer = flow.contents[content].writer
            if writer < 0 or writer in members or writer in mask_makers:
                continue
            results = {operand.content for operand in flow.calls[writer].writes}
            removed = members | mask_makers
            if not results & inputs and all(
                _read_only_by(flow, content, removed) for content in results
            ):
                mask_makers.add(writer)
                queue.append(writer)
    return mask_makers


def _read_only_by(flow: Flow, content: int, calls: set[int]) -> bool:
    """Return whether a content is read, and only by these calls."""
    read = flow.readers[content]
    return bool(read) and set(read) | set(flow.remainder_readers[content]) <= calls


def _removable_host_operators(graph: Graph, removed: set[int], kept: set[int]) -> list[int]:
    """Return the host operators to remove: launchers, and preceding ones that launch nothing.

    Args:
        graph: captured.
        removed: launchers whose operations are all removed.
        kept: launchers of fused kernels.
    """
    nodes = graph.nodes
    launches = np.zeros(len(graph), dtype=bool)
    edges = graph.edges
    launches[edges.source[edges.reason == Reason.LAUNCH]] = True
    # A capture emulates collectives, so their operators may launch nothing and still matter.
    communication_ops = {code for code in np.unique(nodes.op).tolist()
            if op_class(graph.strings[code]) is OpClass.COMMUNICATION}  # fmt: skip
    host = np.flatnonzero(graph.mask(Kind.HOST_OP))
    result = list[int]()
    for thread in np.unique(nodes.thread[host]).tolist():
        on_thread = host[nodes.thread[host] == thread]
        on_thread = on_thread[np.argsort(nodes.start_ns[on_thread], kind="stable")]
        pending, after_removed = list[int](), False
        for node in on_thread.tolist():
            if node in removed:
                result += [*pending, node]
            # Views between a removed launcher and the kept one prepared operands of the removed
            # product.
            elif node in kept and after_removed:
                result += pending
            elif not launches[node] and int(nodes.op[node]) not in communication_ops:
                pending.append(node)
                continue
            pending, after_removed = [], node in removed
    return result


def remove_and_shift(graph: Graph, dropped: Mask) -> Graph:
    """Return the graph without the dropped nodes; later nodes start earlier by their host time."""
    start = _shifted_starts(graph, dropped)
    edges, on_host = graph.edges, graph.mask(Kind.HOST_OP)
    source, target = edges.source, edges.target
    # Contracting these edges would make a successor wait for what only a dropped node waited for:
    # its launch, or a wait of the host for the GPU (a copy to the host that only the mask needed).
    cut = dropped[target] & (edges.reason == Reason.LAUNCH)
    cut |= dropped[target] & on_host[target] & ~on_host[source]
    cut |= dropped[source] & ~on_host[source] & on_host[target] & graph.mask(Kind.MEMCPY)[source]
    cut_edges = Edges.from_pairs(len(graph), source[~cut], target[~cut], edges.reason[~cut])
    source, target, reason = edges_without(cut_edges, dropped)
    kept, new_index = np.flatnonzero(~dropped), np.cumsum(~dropped) - 1
    edges_of_kept = Edges.from_pairs(len(kept), new_index[source], new_index[target], reason)
    shifted = graph.with_columns(start_ns=start)
    return replace(shifted, nodes=shifted.nodes.take(kept), edges=edges_of_kept)


def _shifted_starts(graph: Graph, dropped: Mask) -> I64:
    """Return start times without the host time of dropped operators, int64[n].

    Device operations keep their distance from their launch, and their order on each stream.
    """
    nodes = graph.nodes
    start = nodes.start_ns.copy()
    host = np.flatnonzero(graph.mask(Kind.HOST_OP))
    if not dropped[host].any():
        return start
    order = host[np.argsort(nodes.start_ns[host], kind="stable")]
    saved = np.zeros(len(order), dtype=np.int64)
    next_of_thread = dict[int, int]()
    for rank in reversed(range(len(order))):
        node = int(order[rank])
        following = next_of_thread.get(int(nodes.thread[node]))
        if dropped[node]:
            saved[rank] = nodes.duration_ns[node]
            if following is not None and dropped[following]:
                # Up to the next dropped operator, so that the host time between the two goes as
                # well.
                saved[rank] = nodes.start_ns[following] - nodes.start_ns[node]
        next_of_thread[int(nodes.thread[node])] = node
    saved_total = np.concatenate([[0], np.cumsum(saved)])
    saved_before = saved_total[np.searchsorted(nodes.start_ns[order], nodes.start_ns, side="left")]
    edges = graph.edges
    launched = edges.reason == Reason.LAUNCH
    saved_before[edges.target[launched]] = saved_before[edges.source[launched]]
    start -= saved_before
    # Launch distances differ, so a shift can reorder a stream: push later operations back.
    for stream in _nodes_by_stream(graph):
        start[stream] = np.maximum.accumulate(start[stream])
    return start


def _nodes_by_stream(graph: Graph) -> Iterable[I64]:
    """Return the operations of each stream in order."""
    nodes = graph.nodes
    device = np.flatnonzero(~graph.mask(Kind.HOST_OP) & (nodes.stream >= 0))
    device = device[np.argsort(nodes.start_ns[device], kind="stable")]
    return [device[nodes.stream[device] == stream] for stream in np.unique(nodes.stream[device])]


class LookedUpDurations(NamedTuple):
    """Durations from a kernel database, in addition to a model's.

    Attributes:
        moved_ns: durations, float64[n].
        rules: a `Rule` for each, uint8[n].
        evidence: of each duration, `DATASHEET` if the database has no row, uint8[n].
        uncertainty: of the look-ups.
        notes: statements on the quality of the result.
    """

    moved_ns: F64
    rules: U8
    evidence: U8
    uncertainty: Uncertainty
    notes: tuple[Note, ...]


LookUp = Callable[[Graph, OpCosts, KernelFeatures, tuple[F64, U8], Mask], LookedUpDurations]
"""(graph, costs of its nodes, their features, the model's prediction, nodes to look up)."""


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Replace eager attention by a fused kernel.

    Attributes:
        kernel: "fused" for the kernel that PyTorch runs on the target, or a family of
            `attention_kernels`.
        from_description: the cost model of unmeasured kernels.
        look_up: how to query the kernel databases; None for no query.
    """

    kernel: str = "fused"
    from_description: PredictFromDescription = predict_from_description
    look_up: LookUp | None = None

    def apply(self, graph: Graph, target: Gpu) -> Graph:
        """Return the graph with a forward and a backward kernel per call of eager attention.

        Each kernel replaces the product with the values, or the first product of backward.
        Operations that build masks only for eager attention are removed, and so are host operators
        that launched removed operations. The fused kernel's launch takes the time of that product's
        launch. The new kernels are unmeasured: their evidence is DATASHEET, or that of the
        databases. In a CPU capture they get their time later, from the prediction of all operators.

        Args:
            graph: re-costed for `target`, or captured on it or on a CPU.
            target: the GPU they run on.

        Raises:
            AnnotateError: the graph has no recognisable eager attention, or the target does not run
                the kernel.
        """
        resolution = resolve_unmeasured(target, self.kernel)
        flow = Flow.of(graph)
        calls = [] if graph.job.measurement.depths is not None else eager_calls(flow)
        if not calls:
            raise AnnotateError(
                _reason_none(graph, softmaxes(flow)), code="fuse-no-eager-attention"
            )
        removal = find_removal(graph, flow, calls)
        measurement, peak_note = without_scores(graph, flow, calls, removal.mask_makers)
        before_ns = int(graph.nodes.duration_ns[removal.dropped & graph.gpu_compute].sum())
        before_ns += int(graph.nodes.duration_ns[removal.heads].sum())
        kernels = int((removal.dropped & graph.gpu_compute).sum()) + len(removal.heads)
        host_operators = int((removal.dropped & graph.mask(Kind.HOST_OP)).sum())
        fused = _with_kernels(graph, calls, (removal.heads, removal.launchers), resolution.runs)
        fused = remove_and_shift(fused, removal.dropped)
        # By id, because the removal has changed the indices.
        fused_nodes = np.flatnonzero(np.isin(fused.nodes.id, graph.nodes.id[removal.heads]))
        kernel_name = resolution.runs or "one kernel"
        notes = tuple[Note, ...]()
        text = f"What if attention were fused ({kernel_name}): {len(calls)} calls, "
        if graph.job.device.runs_operators:
            before = int(removal.dropped.sum()) + len(fused_nodes)
            text += f"{before} operators become {len(fused_nodes)}; {peak_note}"
        else:
            fused, notes = self._predict(fused, fused_nodes, target, resolution)
            after_ns = int(fused.nodes.duration_ns[fused_nodes].sum())
            text += (
                f"{kernels} kernels ({before_ns / 1e6:.3f} ms) become {len(fused_nodes)} "
                f"({after_ns / 1e6:.3f} ms on {target.name}), {host_operators} host operators are "
                f"removed; {peak_note}"
            )
        notes = (
            Note(text, code="what-if-fused-attention"),
            *_mask_notes(calls),
            *_remaining_note(softmaxes(flow) - len(calls)),
            *notes,
        )
        measurement = _without_dropped_nodes(measurement, graph, removal.dropped).untimed(*notes)
        return replace(fused, job=msgspec.structs.replace(fused.job, measurement=measurement))

    def _predict(
        self, graph: Graph, fused_nodes: I64, target: Gpu, kernel: Resolution
    ) -> tuple[Graph, tuple[Note, ...]]:
        """Return the graph with times of the new kernels, and notes on them."""
        costs = op_costs_of(graph)
        kernels = KernelFeatures.of(graph, costs)
        predicted_ns, rules = self.from_description(kernels, target)
        evidence = np.full(len(rules), Evidence.DATASHEET, dtype=np.uint8)
        is_fused = np.isin(costs.index, fused_nodes)
        durations = LookedUpDurations(
            predicted_ns, rules, evidence, Uncertainty.none(len(rules)), ()
        )
        # The databases have times of the kernels that PyTorch's operators launch. Another family,
        # such as FlashAttention 3, has the same operator here and would get their times.
        if self.look_up is not None and kernel.runs in BY_TORCH:
            durations = self.look_up(graph, costs, kernels, (predicted_ns, rules), is_fused)
        backward = kernels.is_attention_backward
        factor = np.where(backward, kernel.backward, kernel.forward)
        # A looked-up time is of the kernel itself and already includes its slowdown.
        factor = np.where(durations.evidence == Evidence.DATASHEET, factor, 1.0)
        # The launch floor does not depend on the kernel: only the time above it changes.
        above = np.maximum(durations.moved_ns - target.launch_floor_ns, 0)
        predicted_ns = durations.moved_ns + above * (factor - 1)
        ends, _ = intervals(
            kernels,
            (predicted_ns, durations.rules),
            None,
            target,
            shipped(),
            uncertainty=durations.uncertainty,
        )
        counts = ("flops", "bytes_read", "bytes_written")
        names = ("duration_ns", "p10_ns", "p90_ns", "evidence", *counts)
        columns = {name: getattr(graph.nodes, name).copy() for name in names}
        for name, values in zip(
            ("duration_ns", "p10_ns", "p90_ns"), (predicted_ns, *ends), strict=True
        ):
            columns[name][costs.index[is_fused]] = np.rint(values[is_fused]).astype(np.int64)
        columns["evidence"][costs.index[is_fused]] = durations.evidence[is_fused]
        for name in counts:
            columns[name][costs.index[is_fused]] = getattr(costs, name)[is_fused]
        return graph.with_columns(**columns), durations.notes


def has_eager_attention(graph: Graph) -> bool:
    """Return whether a graph has eager attention that `FusedAttention` can fuse."""
    if graph.job.measurement.depths is not None:
        return False
    return bool(eager_calls(Flow.of(graph)))


def _with_kernels(
    graph: Graph,
    calls: list[EagerCall],
    heads_and_launchers: tuple[list[int], list[int]],
    family: str,
) -> Graph:
    """Return the graph with fused kernels in place of the heads, and with renamed launchers."""
    texts = {name: graph.text(name) for name in TEXTS}
    columns = [_forward_columns(call, family) if pass_ is call.forward
               else _backward_columns(call, family)
               for call in calls for pass_ in call.passes]  # fmt: skip
    for head, launcher, text in zip(*heads_and_launchers, columns, strict=True):
        for name in TEXTS:
            texts[name][head] = text[name]
            if launcher >= 0:
                texts[name][launcher] = text["op"] if name == "name" else text[name]
    nodes, heads = graph.nodes, np.array(heads_and_launchers[0])
    if graph.job.device.runs_operators:
        return graph.with_columns(**texts)
    names = ("kind", "evidence", "spread_ns", "samples", "uncontended_ns", "flops", "bytes_read",
             "bytes_written")  # fmt: skip
    values = (Kind.KERNEL, Evidence.DATASHEET, 0, 0, *[UNKNOWN] * 4)
    changed = {name: getattr(nodes, name).copy() for name in names}
    for name, value in zip(names, values, strict=True):
        changed[name][heads] = value
    return graph.with_columns(**texts, **changed)


def _reason_none(graph: Graph, softmaxes_: int) -> str:
    """Return the message of the error for a graph without attention to fuse."""
    if graph.job.measurement.depths is not None:
        return (
            "the graph was extrapolated, and its copied layers share the tensors of one layer, so "
            "eager attention cannot be matched\n  capture all layers"
        )
    if graph.job.compilation is not None:
        return (
            "the step was compiled, and generated kernels do not record their operands, so eager "
            "attention cannot be matched\n  capture it without torch.compile"
        )
    if softmaxes_:
        return (
            f"{softmaxes_} calls of eager attention cannot be fused: other operators read their "
            "scores, they add a bias per head, or part of their backward pass is missing"
        )
    return (
        "the graph has no eager attention to fuse (a GEMM, its softmax, and a GEMM with it)\n"
        "  matching needs recorded operands: an execution trace of an eager, uncoarsened step"
    )


def _mask_notes(calls: list[EagerCall]) -> tuple[Note, ...]:
    """Return notes on the assumptions about masks and dropout."""
    counts = (
        (
            sum(call.causal == "compared" for call in calls),
            "are causal, because their masks come from comparing positions",
            "fused-causal",
        ),
        (
            sum(call.causal == "square" for call in calls),
            "are assumed to be causal: they add a square mask shared by all sequences, whose "
            "values the trace does not record",
            "fused-assumed-causal",
        ),
        (
            sum(call.padded for call in calls),
            "lose a mask that is not causal (padding), which fused kernels do not read",
            "fused-without-padding",
        ),
        (
            sum(call.dropout for call in calls),
            "use dropout, which adds no time to the predicted fused kernel",
            "fused-dropout",
        ),
    )
    return tuple(
        Note(f"Fused attention: {count} calls {what}.", code=code)
        for count, what, code in counts
        if count
    )


def _remaining_note(count: int) -> tuple[Note, ...]:
    if not count:
        return ()
    text = (
        f"Fused attention: {count} more calls stay eager, because other operators read their "
        "scores, they add a bias per head, or part of their backward pass is missing."
    )
    return (Note(text, code="fused-stays-eager"),)


def _without_dropped_nodes(measurement: Measurement, graph: Graph, dropped: Mask) -> Measurement:
    """Return the measurement with memory blocks that do not refer to dropped nodes."""
    if measurement.memory is None:
        return measurement
    ids = {int(id_) for id_ in graph.nodes.id[dropped]}
    blocks = measurement.memory.blocks
    node = tuple(-1 if id_ in ids else id_ for id_ in blocks.node)
    blocks = msgspec.structs.replace(blocks, node=node)
    memory = msgspec.structs.replace(measurement.memory, blocks=blocks)
    return msgspec.structs.replace(measurement, memory=memory)


_NO_SIZES: list[int] = []


class _Argument(NamedTuple):
    """Type, shape and value of an argument, as stored in the node columns."""

    type: str
    shape: list[int]
    value: Any


_NONE = _Argument("None", _NO_SIZES, "<None>")


class _Tensors(NamedTuple):
    """Operands and results of both passes.

    Attributes:
        query: queries.
        key: keys.
        value: values.
        out: result of forward.
        log_sums: log-sum of the softmax per row.
        out_gradient: gradient of the output; `_NONE` without backward.
        gradients: gradients of query, key and value; empty without backward.
    """

    query: _Argument
    key: _Argument
    value: _Argument
    out: _Argument
    log_sums: _Argument
    out_gradient: _Argument
    gradients: tuple[_Argument, ...]


def _forward_columns(call: EagerCall, family: str) -> dict[str, str]:
    """Return the text columns of the forward kernel.

    The operators are those that launch the kernels, `_cudnn_attention_forward` or
    `_flash_attention_forward`, with arguments in the order of their schemas (torch 2.11 and 2.13).
    A capture and the kernel databases have these operators, so look-ups find the new kernels.

    Args:
        call: the call of eager attention.
        family: the kernel's family; "" for an unknown kernel.
    """
    cudnn = family == "cudnn"
    t, causal = _tensors(call, cudnn=cudnn), _flag(value=bool(call.causal))
    lengths = [_number("Int", size) for size in (call.sizes.rows, call.sizes.keys)]
    off, scale = _flag(value=False), _number("Double", call.sizes.d**-0.5)
    inputs = [t.query, t.key, t.value, _NONE, _NONE]
    if cudnn:
        inputs += [_NONE, *lengths, _flag(value=True), _dropout(call), causal, off, scale]
    else:
        inputs += [*lengths, _dropout(call), causal, off, scale]
    return _text_columns(
        _kernel_name(family, 0), f"{_library(family)}_forward", inputs, [t.out, t.log_sums]
    )


def _backward_columns(call: EagerCall, family: str) -> dict[str, str]:
    """Return the text columns of the backward kernel; `family` as in `_forward_columns`."""
    cudnn = family == "cudnn"
    t, causal = _tensors(call, cudnn=cudnn), _flag(value=bool(call.causal))
    lengths = [_number("Int", size) for size in (call.sizes.rows, call.sizes.keys)]
    scale = _number("Double", call.sizes.d**-0.5)
    inputs = [t.out_gradient, t.query, t.key, t.value, t.out, t.log_sums]
    if cudnn:
        seeds = [_unrecorded_tensor("Tensor(long int)", [])] * 2
        inputs += [*seeds, _NONE, _NONE, _NONE, *lengths, _dropout(call), causal, scale]
    else:
        seeds = [_unrecorded_tensor("Tensor(unsigned long)", shape) for shape in ([2], [])]
        inputs += [_NONE, _NONE, *lengths, _dropout(call), causal, *seeds, scale]
    operator = f"{_library(family)}_backward"
    return _text_columns(_kernel_name(family, 1), operator, inputs, list(t.gradients))


def _library(family: str) -> str:
    """Return the library in the name of PyTorch's operator; flash-attention if unknown."""
    return "cudnn" if family == "cudnn" else "flash"


def _kernel_name(family: str, pass_: int) -> str:
    return _KERNELS[family][pass_] if family else ("attention forward", "attention backward")[pass_]


def _text_columns(
    name: str, operator: str, inputs: list[_Argument], outputs: list[_Argument]
) -> dict[str, str]:
    library, pass_ = operator.split("_")
    columns = {
        "name": f"{name} (in place of eager attention)",
        "op": f"aten::_{library}_attention_{pass_}",
        "grid": "",
        "block": "",
    }
    for side, arguments in (("input", inputs), ("output", outputs)):
        for field, column in enumerate(("types", "shapes", "values")):
            columns[f"{side}_{column}"] = as_text([argument[field] for argument in arguments])
    return columns


def _tensors(call: EagerCall, *, cudnn: bool) -> _Tensors:
    """Return the tensors of a call: heads first for cuDNN, rows first for flash-attention."""
    s: AttentionSizes = call.sizes

    def with_layout(operand: Operand, heads: int, rows: int, width: int) -> _Argument:
        shape = [s.batch, heads, rows, width] if cudnn else [s.batch, rows, heads, width]
        count = s.batch * heads * rows * width
        return _Argument(
            operand.type, shape, [*operand.place, count, operand.tensor.item_bytes, ""]
        )

    def query_key_value(query: Operand, key: Operand, value: Operand) -> tuple[_Argument, ...]:
        return (
            with_layout(query, s.heads, s.rows, s.d),
            with_layout(key, s.key_heads, s.keys, s.d),
            with_layout(value, s.key_heads, s.keys, s.dv),
        )

    query, key, value = query_key_value(*call.tensors[:3])
    gradients = call.gradients
    return _Tensors(
        query,
        key,
        value,
        with_layout(call.tensors.out, s.heads, s.rows, s.dv),
        _unrecorded_tensor("Tensor(float)", [s.batch, s.heads, s.rows, 1][: 4 if cudnn else 3]),
        with_layout(gradients.out, s.heads, s.rows, s.dv) if gradients else _NONE,
        query_key_value(*gradients[1:]) if gradients else (),
    )


def _unrecorded_tensor(kind: str, shape: list[int]) -> _Argument:
    """Return a tensor of unknown storage."""
    return _Argument(kind, shape, [0, 0, 0, 0, 0, ""])


def _dropout(call: EagerCall) -> _Argument:
    """Return the dropout probability, which the trace does not record."""
    return _NONE if call.dropout else _number("Double", 0.0)


def _flag(*, value: bool) -> _Argument:
    return _Argument("Bool", _NO_SIZES, value)


def _number(kind: str, value: float) -> _Argument:
    return _Argument(kind, _NO_SIZES, value)
