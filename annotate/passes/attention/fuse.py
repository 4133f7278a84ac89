"""Replace eager attention by one fused kernel per pass."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_kernels import Resolution, resolve_alone
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import Alone
from onerank.annotate.models.error_model import Uncertainty
from onerank.annotate.models.features import F64, U8, KernelFeatures
from onerank.annotate.models.intervals import intervals
from onerank.annotate.models.learned import predict_alone
from onerank.annotate.op_costs.node_costs import OpCosts, characters
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.passes.attention.dataflow import Flow
from onerank.annotate.passes.attention.fused_operator import (
    BY_TORCH,
    backward_columns,
    forward_columns,
)
from onerank.annotate.passes.attention.match_eager import EagerCall, eager_calls, softmaxes
from onerank.annotate.passes.attention.score_memory import without_scores
from onerank.annotate.passes.remove_nodes import contract
from onerank.annotate.passes.tensor_access import TEXTS
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Kind, Measurement, Reason
from onerank.ir.errors import AnnotateError

I64 = npt.NDArray[np.int64]

Mask = npt.NDArray[np.bool_]


class Taken(NamedTuple):
    """What goes and what stays in its place.

    Attributes:
        dropped: nodes that go, bool[n].
        heads: of each pass of each call, the operation in whose place the fused kernel runs.
        launchers: the host operator that launches it, -1 for none.
        unused: calls that made nothing but masks and the like for eager attention.
    """

    dropped: Mask
    heads: list[int]
    launchers: list[int]
    unused: set[int]


def taken(graph: Graph, flow: Flow, found: list[EagerCall]) -> Taken:
    """Return everything to remove with calls of eager attention.

    All their operations but one per pass; the operations that made their masks, if nothing else
    reads them; and the host operators that launched these, with preceding ones that launch nothing
    (views, allocations, autograd nodes).
    """
    members = {at for call in found for at in call.members}
    unused = _unused(flow, members, {one for call in found for one in call.inputs})
    dropped = np.zeros(len(graph), dtype=bool)
    for at in members | unused:
        dropped[list(flow.calls[at].nodes)] = True
    heads, launching = list[int](), list[int]()
    for one in (one for call in found for one in call.passes):
        product = flow.calls[one.product]
        nodes = np.array(product.nodes)
        heads.append(int(nodes[np.argmax(graph.nodes.duration_ns[nodes])]))
        launching.append(product.launcher)
    dropped[heads] = False
    made = {one.content for at in members for one in flow.calls[at].writes}
    passing = [one for one in flow.passing if one[2] in made]
    dropped[[node for node, _, _ in passing]] = True
    if not graph.job.device.runs_operators:
        gone = {flow.calls[at].launcher for at in members | unused} - {-1}
        gone |= {launcher for _, launcher, _ in passing} - {-1}
        dropped[_host_operators(graph, gone - set(launching), set(launching))] = True
    return Taken(dropped, heads, launching, unused)


def _unused(flow: Flow, members: set[int], inputs: set[int]) -> set[int]:
    """Return calls all of whose results are read, and by none but the members and one another.

    Who makes the inputs of the fused kernels is not among them.
    """
    gone = set[int]()
    waiting = list(members)
    while waiting:
        for content in {one.content for one in flow.calls[waiting.pop()].reads}:
            at = flow.contents[content].maker
            if at < 0 or at in members or at in gone:
                continue
            results = {one.content for one in flow.calls[at].writes}
            others = members | gone
            if not results & inputs and all(_read_by(flow, one, others) for one in results):
                gone.add(at)
                waiting.append(at)
    return gone


def _read_by(flow: Flow, content: int, calls: set[int]) -> bool:
    """Return whether a content is read, and by none but these calls."""
    read = flow.readers[content]
    return bool(read) and set(read) | set(flow.beside[content]) <= calls


def _host_operators(graph: Graph, gone: set[int], kept: set[int]) -> list[int]:
    """Return the host operators that go: launchers, and what launches nothing before each.

    Args:
        graph: captured.
        gone: launchers of which all operations go.
        kept: those that launch fused kernels.
    """
    nodes = graph.nodes
    launches = np.zeros(len(graph), dtype=bool)
    edges = graph.edges
    launches[edges.source[edges.reason == Reason.LAUNCH]] = True
    asks = {code for code in np.unique(nodes.op).tolist()
            if op_class(graph.strings[code]) is OpClass.COMMUNICATION}  # fmt: skip
    host = np.flatnonzero(graph.mask(Kind.HOST_OP))
    found = list[int]()
    for thread in np.unique(nodes.thread[host]).tolist():
        own = host[nodes.thread[host] == thread]
        own = own[np.argsort(nodes.start_ns[own], kind="stable")]
        run, after_gone = list[int](), False
        for node in own.tolist():
            if node in gone:
                found += [*run, node]
            elif node in kept and after_gone:
                found += run
            elif not launches[node] and int(nodes.op[node]) not in asks:
                run.append(node)
                continue
            run, after_gone = [], node in gone
    return found


def without(graph: Graph, dropped: Mask) -> Graph:
    """Return the graph without nodes; those that follow start as much sooner as they took."""
    start = _sooner(graph, dropped)
    edges, on_host = graph.edges, graph.mask(Kind.HOST_OP)
    source, target = edges.source, edges.target
    ends = dropped[target] & (edges.reason == Reason.LAUNCH)
    ends |= dropped[target] & on_host[target] & ~on_host[source]
    ends |= dropped[source] & ~on_host[source] & on_host[target] & graph.mask(Kind.MEMCPY)[source]
    left = Edges.from_pairs(len(graph), source[~ends], target[~ends], edges.reason[~ends])
    source, target, reason = contract(left, dropped)
    kept, place = np.flatnonzero(~dropped), np.cumsum(~dropped) - 1
    joined = Edges.from_pairs(len(kept), place[source], place[target], reason)
    made = graph.with_columns(start_ns=start)
    return replace(made, nodes=made.nodes.take(kept), edges=joined)


def _sooner(graph: Graph, dropped: Mask) -> I64:
    """Return when each node starts if the host spends no time on operators that go.

    What the device runs keeps its distance from its launch, and its order on each stream.
    """
    nodes = graph.nodes
    start = nodes.start_ns.copy()
    host = np.flatnonzero(graph.mask(Kind.HOST_OP))
    if not dropped[host].any():
        return start
    order = host[np.argsort(nodes.start_ns[host], kind="stable")]
    saved = np.zeros(len(order), dtype=np.int64)
    last = dict[int, int]()
    for rank in reversed(range(len(order))):
        node = int(order[rank])
        following = last.get(int(nodes.thread[node]))
        if dropped[node]:
            saved[rank] = nodes.duration_ns[node]
            if following is not None and dropped[following]:
                saved[rank] = nodes.start_ns[following] - nodes.start_ns[node]
        last[int(nodes.thread[node])] = node
    until = np.concatenate([[0], np.cumsum(saved)])
    sooner = until[np.searchsorted(nodes.start_ns[order], nodes.start_ns, side="left")]
    edges = graph.edges
    launched = edges.reason == Reason.LAUNCH
    sooner[edges.target[launched]] = sooner[edges.source[launched]]
    start -= sooner
    for stream in _streams(graph):
        start[stream] = np.maximum.accumulate(start[stream])
    return start


def _streams(graph: Graph) -> Iterable[I64]:
    """Return the operations of each stream in order."""
    nodes = graph.nodes
    device = np.flatnonzero(~graph.mask(Kind.HOST_OP) & (nodes.stream >= 0))
    device = device[np.argsort(nodes.start_ns[device], kind="stable")]
    return [device[nodes.stream[device] == one] for one in np.unique(nodes.stream[device])]


class LookedUpDurations(NamedTuple):
    """Durations from a kernel database, in addition to a model's.

    Attributes:
        moved_ns: durations, float64[n].
        rules: a `Rule` for each, uint8[n].
        evidence: of each, `DATASHEET` if the database has no row, uint8[n].
        doubt: uncertainty of look-ups.
        notes: statements on the quality of the result.
    """

    moved_ns: F64
    rules: U8
    evidence: U8
    doubt: Uncertainty
    notes: tuple[str, ...]


LookUp = Callable[[Graph, OpCosts, KernelFeatures, tuple[F64, U8], Mask], LookedUpDurations]

"""(graph, what its nodes do, as cost models see it, what a model says, which to look up)."""


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Replace eager attention by a fused kernel.

    Attributes:
        kernel: "fused" for the kernel that PyTorch runs on the target, or a family of
            `attention_kernels`.
        alone: the cost model of unmeasured kernels.
        look_up: how to query the kernel databases; None for no query.
    """

    kernel: str = "fused"
    alone: Alone = predict_alone
    look_up: LookUp | None = None

    def apply(self, graph: Graph, target: Gpu) -> Graph:
        """Return the graph with a forward and a backward kernel per call of eager attention.

        Each kernel runs where the product with the values, or the first product of backward, ran.
        Operations that made masks only for eager attention are removed, and so are host operators
        that launched removed operations; the fused kernel's launch takes the time of that product's
        launch. The new kernels are unmeasured: their evidence is DATASHEET, or that of the
        databases. In a CPU capture they get no time here.

        Args:
            graph: re-costed for `target`, or captured on it or on a CPU.
            target: the GPU they run on.

        Raises:
            AnnotateError: the graph has no recognisable eager attention, or the target does not run
                the kernel.
        """
        resolution = resolve_alone(target, self.kernel)
        flow = Flow.of(graph)
        found = [] if graph.job.measurement.depths is not None else eager_calls(flow)
        if not found:
            raise AnnotateError(_lacking(graph, softmaxes(flow)), code="fuse-no-eager-attention")
        gone = taken(graph, flow, found)
        told, peak = without_scores(graph, flow, found, gone.unused)
        before = int(graph.nodes.duration_ns[gone.dropped & graph.gpu_compute].sum())
        before += int(graph.nodes.duration_ns[gone.heads].sum())
        kernels = int((gone.dropped & graph.gpu_compute).sum()) + len(gone.heads)
        hosts = int((gone.dropped & graph.mask(Kind.HOST_OP)).sum())
        made = _with_kernels(graph, found, (gone.heads, gone.launchers), resolution.runs)
        made = without(made, gone.dropped)
        new = np.flatnonzero(np.isin(made.nodes.id, graph.nodes.id[gone.heads]))
        runs = resolution.runs or "one kernel"
        notes = tuple[str, ...]()
        note = f"What if attention were fused ({runs}): {len(found)} calls, "
        if graph.job.device.runs_operators:
            note += f"{int(gone.dropped.sum()) + len(new)} operators become {len(new)}; {peak}"
        else:
            made, notes = self._timed(made, new, target, resolution)
            after = int(made.nodes.duration_ns[new].sum())
            note += (
                f"{kernels} kernels become {len(new)}, {before} ns become {after} ns on "
                f"{target.name}, {hosts} host operators go; {peak}"
            )
        note += _assumed(found) + _left(softmaxes(flow) - len(found))
        told = _relinked(told, graph, gone.dropped).untimed(note, *notes)
        return replace(made, job=msgspec.structs.replace(made.job, measurement=told))

    def _timed(
        self, graph: Graph, new: I64, target: Gpu, kernel: Resolution
    ) -> tuple[Graph, tuple[str, ...]]:
        """Return the graph with times of the new kernels, and what a reader should know of them."""
        found = characters(graph)
        kernels = KernelFeatures.of(graph, found)
        moved, rules = self.alone(kernels, target)
        evidence = np.full(len(rules), Evidence.DATASHEET, dtype=np.uint8)
        mine = np.isin(found.index, new)
        told = LookedUpDurations(moved, rules, evidence, Uncertainty.none(len(rules)), ())
        if self.look_up is not None and kernel.runs in BY_TORCH:
            told = self.look_up(graph, found, kernels, (moved, rules), mine)
        backward = (kernels.attention[:, 8] > 0)[kernels.call]
        factor = np.where(backward, kernel.backward, kernel.forward)
        factor = np.where(told.evidence == Evidence.DATASHEET, factor, 1.0)
        above = np.maximum(told.moved_ns - target.launch_floor_ns, 0)
        moved = told.moved_ns + above * (factor - 1)
        ends, _ = intervals(kernels, (moved, told.rules), None, target, shipped(), doubt=told.doubt)
        counts = ("flops", "bytes_read", "bytes_written")
        names = ("duration_ns", "p10_ns", "p90_ns", "evidence", *counts)
        columns = {name: getattr(graph.nodes, name).copy() for name in names}
        for name, values in zip(("duration_ns", "p10_ns", "p90_ns"), (moved, *ends), strict=True):
            columns[name][found.index[mine]] = np.rint(values[mine]).astype(np.int64)
        columns["evidence"][found.index[mine]] = told.evidence[mine]
        for name in counts:
            columns[name][found.index[mine]] = getattr(found, name)[mine]
        return graph.with_columns(**columns), told.notes


def has_eager_attention(graph: Graph) -> bool:
    """Return whether a graph has attention that `FusedAttention` can put together."""
    if graph.job.measurement.depths is not None:
        return False
    return bool(eager_calls(Flow.of(graph)))


def _with_kernels(
    graph: Graph, found: list[EagerCall], places: tuple[list[int], list[int]], family: str
) -> Graph:
    """Return the graph with fused kernels in place of the first nodes, launchers renamed."""
    texts = {name: graph.text(name) for name in TEXTS}
    columns = [forward_columns(call, family) if one is call.forward
               else backward_columns(call, family)
               for call in found for one in call.passes]  # fmt: skip
    for head, launcher, told in zip(*places, columns, strict=True):
        for name in TEXTS:
            texts[name][head] = told[name]
            if launcher >= 0:
                texts[name][launcher] = told["op"] if name == "name" else told[name]
    nodes, heads = graph.nodes, np.array(places[0])
    if graph.job.device.runs_operators:
        return graph.with_columns(**texts)
    names = ("kind", "evidence", "spread_ns", "samples", "uncontended_ns", "flops", "bytes_read",
             "bytes_written")  # fmt: skip
    values = (Kind.KERNEL, Evidence.DATASHEET, 0, 0, *[UNKNOWN] * 4)
    changed = {name: getattr(nodes, name).copy() for name in names}
    for name, value in zip(names, values, strict=True):
        changed[name][heads] = value
    return graph.with_columns(**texts, **changed)


def _lacking(graph: Graph, softmaxes_: int) -> str:
    """Return why there is nothing to fuse."""
    if graph.job.measurement.depths is not None:
        return (
            "the graph was extrapolated from other depths, and its copied layers have the tensors "
            "of one, so that no eager attention can be told; capture it whole"
        )
    if graph.job.compilation is not None:
        return (
            "the step was compiled, and generated kernels do not tell their operands, so that no "
            "eager attention can be told; capture it without torch.compile"
        )
    if softmaxes_:
        return (
            f"{softmaxes_} calls of eager attention cannot be fused: others read their scores, or "
            "they add a bias for each head, or part of their backward pass is missing"
        )
    return (
        "no eager attention was found (a product, a softmax of it, and a product with that), so "
        "that there is none to fuse; kernels of an execution trace tell their operands, those of "
        "a compiled step, a Kineto trace alone or a coarsened one do not"
    )


def _assumed(found: list[EagerCall]) -> str:
    """Return what was assumed of masks."""
    told = ""
    if made := sum(call.causal == "made" for call in found):
        told += f" {made} are causal, as their masks are made by comparing positions."
    if square := sum(call.causal == "square" for call in found):
        told += (
            f" {square} are taken to be causal: they add a square mask that all sequences share, "
            "whose values the trace does not tell."
        )
    if padded := sum(call.padded for call in found):
        told += f" {padded} lose a mask that is not causal (padding), which no fused kernel reads."
    if dropout := sum(call.dropout for call in found):
        told += f" {dropout} drop probabilities, which adds no time to the fused kernel here."
    return told


def _left(count: int) -> str:
    if not count:
        return ""
    return (
        f" {count} more calls stay eager: others read their scores, they add a bias for each head, "
        "or part of their backward pass is missing."
    )


def _relinked(told: Measurement, graph: Graph, dropped: npt.NDArray[np.bool_]) -> Measurement:
    """Return the measurement whose blocks name no node that went."""
    if told.memory is None:
        return told
    ids = {int(one) for one in graph.nodes.id[dropped]}
    blocks = told.memory.blocks
    node = tuple(-1 if one in ids else one for one in blocks.node)
    blocks = msgspec.structs.replace(blocks, node=node)
    memory = msgspec.structs.replace(told.memory, blocks=blocks)
    return msgspec.structs.replace(told, memory=memory)
