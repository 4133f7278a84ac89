"""Replace each operator of a CPU capture by the kernels that it launches on the target."""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.op_costs.node_costs import OpCosts, compute_mask
from onerank.annotate.op_costs.op_classes import (
    CLASSES,
    OpClass,
    classify,
    floor_share_of,
    op_class,
    shares_on,
)
from onerank.annotate.op_costs.operands import (
    Call,
    Piece,
    UnknownDtypeError,
    operands_of_launches,
    without_tensors,
)
from onerank.annotate.passes.launch_rules import (
    Launch,
    base_name,
    launches_need_strides,
    launches_need_values,
    launches_of,
)
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Kind, Nodes, Reason
from onerank.ir.arrays import F64, I32, I64, U8, Mask, deduplicate
from onerank.ir.notes import Note

# Share of an operator's time that its helpers may take where its work needs more than the rest.
_MOST_HELPERS = 0.5

_OPERANDS = (
    "input_values",
    "input_shapes",
    "input_types",
    "input_strides",
    "output_values",
    "output_shapes",
    "output_types",
)


# Classes whose models were fitted on the time of whole operators, helpers included.
_TIMED_WHOLE = (OpClass.GEMM, OpClass.ATTENTION, OpClass.NORM)


def further_launches_ns(
    graph: Graph, costs: OpCosts, predicted_ns: F64, target: Gpu, attention: str
) -> F64:
    """Return the time of the operators' launches that the models leave out, float64[n].

    The models of products, attention and norms were fitted on the time of whole operators, which
    take at least the floors of their launches. Every other operator was predicted as one kernel:
    each further launch adds its floor, and the time of the buffers that it reads and writes.

    Args:
        graph: with one node per operator.
        costs: work of the n operators.
        predicted_ns: times of the operators, float64[n].
        target: the GPU; the time is 0 for other vendors' GPUs than NVIDIA's.
        attention: requested kernel for attention that was captured on a CPU.
    """
    # The rules for launches are those of PyTorch's kernels, cuBLAS and cuDNN on NVIDIA's GPUs.
    if not target.is_nvidia:
        return np.zeros_like(predicted_ns)
    calls, call = _distinct_calls(graph, costs.index, target, attention)
    least, more = np.array([launch_times(*item, target) for item in calls]).reshape(-1, 2).T
    # Their floors are in the fitted time, so only a time below the sum of floors grows.
    fitted = np.array([all(launch.fitted for launch in item[1]) for item in calls], dtype=bool)
    whole = costs.is_class(*_TIMED_WHOLE) & fitted[call]
    added = np.where(whole, np.maximum(least[call] - predicted_ns, 0), more[call])
    further = [len(launches) > 1 or launches[0].floors > 0 for _, launches in calls]
    return np.where(np.array(further, dtype=bool)[call], added, 0.0)


def launch_times(op: str, launches: list[Launch], target: Gpu) -> tuple[float, float]:
    """Return (least time of all launches of an operator, the same without one floor) in ns."""
    least_ns = sum(_least_ns(op, launch, launch.internal_bytes, target) for launch in launches)
    return least_ns, least_ns - _floor_ns(op, Launch(share=1.0), target)


class _Templates(NamedTuple):
    """The launches of d distinct calls, as columns of all launches.

    Attributes:
        first: the first launch of each call, int64[d].
        launches: launches of each call, int64[d].
        share: share of the call's work; 0 for helpers, float64[t].
        written: bytes of the call's results that a helper writes, int64[t].
        helper_ns: time of a helper; 0 for others, float64[t].
        kind: kind of node, uint8[t].
        texts: codes of the columns name, op, grid and block; -1: as the operator's, int32[t] each.
        pieces: the part of the call's lists of tensors that each takes; () for all operands.
    """

    first: I64
    launches: I64
    share: F64
    written: I64
    helper_ns: F64
    kind: U8
    texts: dict[str, I32]
    pieces: list[tuple[Piece, ...]]


@dataclass(frozen=True, slots=True)
class OperatorsToKernels:
    """Replace each predicted operator by its launches, in order on its stream.

    The launches share the operator's FLOPs, bytes and time. Helpers, such as a memset or a sum of
    partial results, have no FLOPs, and only the bytes of the operator's results that they write.
    Intervals keep their ratio to the time.

    Attributes:
        attention: requested kernel for attention that was captured on a CPU.
    """

    attention: str = "usual"

    def apply(self, graph: Graph, target: Gpu) -> Graph:
        """Return the graph of launches.

        Args:
            graph: of a CPU capture, predicted for `target`: one kernel per operator.
            target: an NVIDIA GPU.
        """
        index = np.flatnonzero(compute_mask(graph) & graph.mask(Kind.KERNEL))
        strings = graph.strings.copy()
        graph = replace(graph, strings=strings)
        calls, call = _distinct_calls(graph, index, target, self.attention)
        # Overridden figures change the time that is divided, not the helpers' part of it.
        target_as_described = target.as_described
        templates = _columns_of(calls, graph, target_as_described)
        launches = templates.launches[call]
        # A single kernel keeps its operator's node as it is; a copy to the host is another kind.
        other_kind = templates.kind[templates.first[call]] != Kind.KERNEL
        if not len(index) or not ((launches > 1) | other_kind).any():
            return graph
        counts = np.ones(len(graph), dtype=np.int64)
        counts[index] = launches
        first = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(graph)), counts)
        template = np.full(len(graph), -1, dtype=np.int64)
        template[index] = templates.first[call]
        changed = counts > 1
        changed[index] |= other_kind
        rows = np.flatnonzero(changed[owner])
        which = template[owner[rows]] + rows - first[owner[rows]]
        new = _NewLaunches(rows, owner[rows], templates, which)
        nodes = _with_launches(graph, owner, new, target_as_described)
        edges = _chained(graph, first, first + counts - 1, rows, owner)
        expanded = replace(graph, nodes=nodes, edges=edges)
        return _noted(graph, expanded, len(index), int(launches.sum()), target)


# (operator, its launches) of each distinct call.
_Calls = list[tuple[str, list[Launch]]]


def _distinct_calls(graph: Graph, index: I64, target: Gpu, attention: str) -> tuple[_Calls, I64]:
    """Return the distinct calls of the nodes at `index`, and the call of each node, int64[n]."""
    nodes, strings = graph.nodes, graph.strings
    ops = np.unique(nodes.op[index])
    with_values = ops[[launches_need_values(strings[int(op)]) for op in ops]] if len(ops) else ops
    values = np.zeros(len(index), dtype=np.int64)
    where = np.flatnonzero(np.isin(nodes.op[index], with_values))
    values[where], value_texts = without_tensors(graph, nodes.input_values[index[where]])
    with_strides = [int(op) for op in ops if launches_need_strides(strings[int(op)])]
    has_strides = np.isin(nodes.op[index], with_strides)
    strides = np.where(has_strides, nodes.input_strides[index], strings.encode([""])[0])
    names = ("input_shapes", "input_types", "output_shapes", "output_types")
    columns: list[npt.NDArray[Any]] = [nodes.op[index], values, strides]
    columns += [getattr(nodes, name)[index] for name in names]
    first, call = deduplicate(columns)
    rows: list[list[int]] = np.stack([column[first] for column in columns], axis=1).tolist()
    calls: _Calls = []
    tf32 = graph.job.measurement.tf32_convolutions
    for row in rows:
        op, *texts = strings[row[0]], *(strings[code] for code in row[2:])
        parsed = _parsed(op, texts, value_texts[row[1]])
        launches = [Launch(share=1.0)]
        if parsed is not None:
            launches = list(launches_of(op, parsed, target, attention, tf32=tf32))
        calls.append((op, launches))
    return calls, call


def _parsed(op: str, texts: list[str], values: str) -> Call | None:
    """Return a call from the text of its strides and operands; None: it has an unknown dtype."""
    strides, *operands = texts
    inputs, outputs = (operands[0], operands[1]), (operands[2], operands[3])
    try:
        return Call.parse(base_name(op), inputs, outputs, values, strides)
    except UnknownDtypeError:
        return None


def _columns_of(calls: _Calls, graph: Graph, target: Gpu) -> _Templates:
    """Collect the launches of distinct calls as columns."""
    count = np.array([len(launches) for _, launches in calls], dtype=np.int64)
    flat = [(op, launch) for op, launches in calls for launch in launches]
    strings = graph.strings
    texts: dict[str, list[int]] = {"name": [], "op": [], "grid": [], "block": []}
    for _, launch in flat:
        texts["name"].append(strings.encode([launch.name])[0] if launch.name else -1)
        texts["op"].append(strings.encode([launch.op])[0] if launch.op else -1)
        for axis, sizes in (("grid", launch.grid), ("block", launch.block)):
            text = msgspec.json.encode(sizes).decode().replace(",", ", ") if sizes else ""
            texts[axis].append(int(strings.encode([text])[0]))
    return _Templates(
        first=np.cumsum(count) - count,
        launches=count,
        share=np.array([launch.share for _, launch in flat], dtype=np.float64),
        written=np.array([launch.written_bytes for _, launch in flat], dtype=np.int64),
        helper_ns=np.array([_helper_ns(op, launch, target) for op, launch in flat]),
        kind=np.array([launch.kind for _, launch in flat], dtype=np.uint8),
        texts={name: np.array(codes, dtype=np.int32) for name, codes in texts.items()},
        pieces=[launch.pieces for _, launch in flat],
    )


def _helper_ns(op: str, launch: Launch, target: Gpu) -> float:
    """Return a helper's time on `target` in ns: its floor and its bytes, or its cycles."""
    if launch.share:
        return 0.0
    moved = launch.written_bytes + launch.internal_bytes
    return _least_ns(op, launch, moved, target)


def _least_ns(op: str, launch: Launch, moved: int, target: Gpu) -> float:
    """Return the time of a launch in ns that moves so many bytes, without its operator's work."""
    moved_ns = _floor_ns(op, launch, target) + moved / target.bandwidth_bytes_per_s * 1e9
    return max(moved_ns, launch.cycles / target.issue_rate_hz * 1e9)


def _floor_ns(op: str, launch: Launch, target: Gpu) -> float:
    """Return the shortest time of a launch on `target` in ns."""
    share = floor_share_of(op_class(launch.op or op, launch.name, launch.kind))
    floors = launch.floors or float(shares_on(np.array(share), target))
    return floors * target.launch_floor_ns


@dataclass(frozen=True, slots=True)
class _NewLaunches:
    """The r new nodes of operators whose node changes.

    Attributes:
        rows: their positions among all new nodes, int64[r].
        operator: the operator of each, int64[r]; those of one operator are adjacent.
        templates: launches of the distinct calls.
        which: position of each among the templates' launches, int64[r].
    """

    rows: I64
    operator: I64
    templates: _Templates
    which: I64

    @property
    def share(self) -> F64:
        """Share of the operator's work of each; 0 for helpers, float64[r]."""
        return self.templates.share[self.which]

    @property
    def main(self) -> Mask:
        """Which is the first of its operator that does a part of the work, bool[r]."""
        return _first_of_each(self.operator, self.share > 0)


def _with_launches(graph: Graph, owner: I64, new: _NewLaunches, target: Gpu) -> Nodes:
    """Return the nodes of all launches.

    Args:
        graph: with one node per operator.
        owner: the operator of each new node, int64[m].
        new: the nodes that differ from those of their operators.
        target: where they run.
    """
    nodes = graph.nodes.take(owner)
    rows, templates, which = new.rows, new.templates, new.which
    share, main = new.share, new.main
    changed: dict[str, npt.NDArray[Any]] = {
        spec.name: getattr(nodes, spec.name).copy()
        for spec in fields(Nodes)
        if spec.name in _CHANGED
    }
    # The node that does the work keeps the id, which the log of allocations refers to.
    others = rows[~main]
    last_id = int(graph.nodes.id.max(initial=0))
    changed["id"][others] = np.arange(last_id + 1, last_id + 1 + len(others), dtype=np.uint64)
    for name in ("bytes_allocated", "bytes_freed"):
        changed[name][others] = 0
    changed["kind"][rows] = templates.kind[which]
    for name, codes in templates.texts.items():
        given = codes[which] >= 0
        changed[name][rows[given]] = codes[which][given]
    empty = graph.strings.encode([""])[0]
    # A helper with the operands of attention would count as one more call of it.
    for name in _OPERANDS:
        changed[name][rows[share == 0]] = empty
    _divide_operands(changed, graph, new)
    _divide_work(changed, new)
    duration_ns = _durations(graph, new, target)
    before_ns = graph.nodes.duration_ns[new.operator].astype(np.float64)
    for name in ("p10_ns", "p90_ns"):
        bound = getattr(graph.nodes, name)[new.operator]
        scaled = bound * np.divide(
            duration_ns, before_ns, out=np.zeros(len(rows)), where=before_ns > 0
        )
        changed[name][rows] = np.where(bound == UNKNOWN, UNKNOWN, np.rint(scaled))
    changed["duration_ns"][rows] = _rounded_parts(
        new.operator, main, duration_ns, graph.nodes.duration_ns
    )
    # A helper's time follows from the description, even if that of its operator was looked up.
    changed["evidence"][rows[share == 0]] = Evidence.DATASHEET
    changed["start_ns"] = _starts(graph, owner, changed["duration_ns"])
    return replace(nodes, **changed)


_CHANGED = (
    "id",
    "kind",
    "name",
    "op",
    "grid",
    "block",
    "bytes_allocated",
    "bytes_freed",
    "flops",
    "bytes_read",
    "bytes_written",
    "duration_ns",
    "p10_ns",
    "p90_ns",
    "evidence",
    "start_ns",
    *_OPERANDS,
)


def _first_of_each(group: I64, chosen: Mask) -> Mask:
    """Return the first chosen row of each group, bool[r]; groups are runs of equal numbers."""
    first = np.zeros(len(group), dtype=bool)
    places = np.flatnonzero(chosen)
    first[places[np.unique(group[places], return_index=True)[1]]] = True
    return first


def _divide_operands(columns: dict[str, npt.NDArray[Any]], graph: Graph, new: _NewLaunches) -> None:
    """Give each launch of an operator on lists of tensors the tensors that it takes.

    An optimizer of a 70B model has 27,000 launches; with the whole lists each would take 90 kB.
    """
    templates, operator = new.templates, new.operator
    is_piece = np.array([bool(pieces) for pieces in templates.pieces], dtype=bool)[new.which]
    places = np.flatnonzero(is_piece)
    starts = np.flatnonzero(np.diff(operator[places], prepend=-1))
    for of_operator in np.split(places, starts[1:]) if len(places) else ():
        owner, template = int(operator[of_operator[0]]), new.which[of_operator]
        texts = {name: graph.strings[int(getattr(graph.nodes, name)[owner])] for name in _OPERANDS}
        # An operator within the call, such as `mul` of `_foreach_mul`, takes single tensors.
        divided = operands_of_launches(
            texts,
            [templates.pieces[int(number)] for number in template],
            in_lists=int(templates.texts["op"][template[0]]) < 0,
        )
        for name, of_launches in divided.items():
            columns[name][new.rows[of_operator]] = graph.strings.encode(of_launches)


def _divide_work(columns: dict[str, npt.NDArray[Any]], new: _NewLaunches) -> None:
    """Divide FLOPs and bytes of each operator by the shares of its launches, exactly in sum."""
    rows, group, share = new.rows, new.operator, new.share
    written = new.templates.written[new.which]
    for name in ("flops", "bytes_read", "bytes_written"):
        total = columns[name][rows].astype(np.int64)
        fixed = np.minimum(written, total) if name == "bytes_written" else np.zeros_like(written)
        fixed = np.maximum(fixed, 0)
        taken = np.bincount(group, weights=fixed, minlength=int(group.max()) + 1)
        divided = np.maximum(total - taken[group].astype(np.int64), 0)
        # Differences of rounded running sums, so that the parts add up to the total.
        until = _running(group, share)
        parts = np.rint(divided * until) - np.rint(divided * (until - share))
        parts = _exact(group, share, parts, divided)
        columns[name][rows] = np.where(total == UNKNOWN, UNKNOWN, parts + fixed)


def _running(group: I64, share: F64) -> F64:
    """Return the running sum of the shares within each group, float64[r]."""
    running = np.cumsum(share)
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    before = running[starts] - share[starts]
    return running - np.repeat(before, np.diff(np.append(starts, len(group))))


def _exact(group: I64, share: F64, parts: F64, total: I64) -> I64:
    """Return the parts as integers; the first of each group takes the rounding's remainder."""
    whole: I64 = np.where(share > 0, parts, 0).astype(np.int64)
    main = _first_of_each(group, share > 0)
    sums = np.bincount(group, minlength=int(group.max()) + 1).astype(np.int64) * 0
    np.add.at(sums, group, whole)
    whole[main] += total[main] - sums[group[main]]
    return whole


def _durations(graph: Graph, new: _NewLaunches, target: Gpu) -> F64:
    """Return the time of each launch in ns, float64[r]; they sum to their operators' times."""
    group, share, helper_ns = new.operator, new.share, new.templates.helper_ns[new.which]
    total_ns = graph.nodes.duration_ns[group].astype(np.float64)
    classes = np.zeros(len(graph), dtype=np.uint8)
    distinct = np.unique(group)
    classes[distinct] = classify(graph, distinct)
    size = int(group.max()) + 1
    helpers = np.bincount(group, weights=helper_ns, minlength=size)[group]
    of_class = np.array([floor_share_of(name) for name in CLASSES])
    floor_ns = shares_on(of_class, target)[classes[group]]
    floor_ns *= target.launch_floor_ns
    working = np.bincount(group, weights=share > 0, minlength=size)[group]
    # A looked-up time can be shorter than its helpers are predicted.
    most = np.maximum(total_ns - working * floor_ns, _MOST_HELPERS * total_ns)
    scale = np.minimum(1, most / np.maximum(helpers, 1e-9))
    rest = total_ns - helpers * scale
    floor_ns = np.minimum(floor_ns, rest / np.maximum(working, 1))
    return np.where(share > 0, floor_ns + share * (rest - working * floor_ns), helper_ns * scale)


def _rounded_parts(group: I64, main: Mask, duration_ns: F64, total_ns: I64) -> I64:
    """Return the times as integers that sum to the operator's; the main launch takes the rest."""
    parts = np.rint(duration_ns).astype(np.int64)
    sums = np.zeros(len(total_ns), dtype=np.int64)
    np.add.at(sums, group, parts)
    parts[main] += total_ns[group[main]] - sums[group[main]]
    return parts


def _starts(graph: Graph, owner: I64, duration_ns: I64) -> I64:
    """Return the start times: the launches of an operator one after another, int64[m]."""
    running = _running(owner, duration_ns.astype(np.float64)).astype(np.int64)
    return graph.nodes.start_ns[owner] + running - duration_ns


def _chained(graph: Graph, first: I64, last: I64, rows: I64, owner: I64) -> Edges:
    """Return the edges: operators' launches in a chain, others from its last and to its first."""
    edges = graph.edges
    linked = rows[:-1][owner[rows[:-1]] == owner[rows[1:]]]
    return Edges.from_pairs(
        len(owner),
        np.concatenate([last[edges.source], linked]),
        np.concatenate([first[edges.target], linked + 1]),
        np.concatenate([edges.reason, np.full(len(linked), Reason.STREAM_ORDER, dtype=np.uint8)]),
    )


def _noted(graph: Graph, expanded: Graph, operators: int, launches: int, target: Gpu) -> Graph:
    """Return the graph with the number of launches in its annotation and its notes."""
    *earlier, annotation = graph.job.annotations
    details = {**annotation.details, "launches": launches}
    annotation = msgspec.structs.replace(annotation, details=details)
    measurement = graph.job.measurement
    note = Note(
        f"{operators} operators launch {launches} kernels, copies and fills on {target.name}, by "
        "rules for the kernels of PyTorch 2.11, cuBLAS and cuDNN.",
        code="launches-by-rules",
    )
    measurement = msgspec.structs.replace(measurement, notes=(*measurement.notes, note))
    job = msgspec.structs.replace(
        graph.job, annotations=(*earlier, annotation), measurement=measurement
    )
    return replace(expanded, job=job)
