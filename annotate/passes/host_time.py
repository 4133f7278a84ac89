"""Host time of a graph: add it to a graph of kernels, estimate its spread over hosts, scale it."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from onerank.annotate.hosts.host import HOST_OP_KINDS, Host
from onerank.annotate.op_costs.op_classes import CLASSES, OpClass, base_name, classify
from onerank.ir import Edges, Evidence, Graph, Job, Kind, Nodes, Reason
from onerank.ir.arrays import F64, I32, I64, Mask
from onerank.ir.dtypes import operand_list
from onerank.ir.errors import AnnotateError, TargetError
from onerank.ir.measurement import HostOverhead
from onerank.ir.notes import Note
from onerank.ir.python_calls import (
    PYTHON_CALLS,
    REDUCER,
    UNTRACKED,
    autograd_functions,
    python_calls_of,
)
from onerank.ir.start_delays import launches
from onerank.ir.steady_state import with_host_factor

# Classes that decide the kind of an operator with several launches, the strongest first.
_PRIORITY = (OpClass.COMMUNICATION, OpClass.ATTENTION, OpClass.GEMM, OpClass.OPTIMIZER)

_KIND_OF_CLASS = dict(zip(_PRIORITY, ("collective", "attention", "gemm", "optimizer"), strict=True))

# Kind of other operators, by the number of the phase. Without a phase they are input data.
_KIND_OF_PHASE = ("forward", "forward", "backward", "optimizer")

_CODE = {kind: code for code, kind in enumerate(HOST_OP_KINDS)}

# Kinds whose figures do not depend on autograd.
_ALWAYS_THEIRS = [_CODE[kind] for kind in ("collective", "optimizer", "recurrent", "reducer")]

_RECURRENT, _FEW_LAUNCHES = ("_cudnn_rnn", "_cudnn_rnn_backward"), 16


@dataclass(frozen=True, slots=True)
class HostCalls:
    """The launching operators of a step, in the order in which the host calls them.

    Attributes:
        first: the first node that each call launches, int64[c].
        kind: position of its kind in `HOST_OP_KINDS`, int64[c].
        times: how often the time of the kind counts, int64[c]: for each tensor in the list of an
            optimizer's operator, for each launch of a recurrent layer, else once.
        node: nodes on the device, int64[n].
        call: the call that launches each of them, int64[n].
        python: kind of `PYTHON_CALLS` -> calls of Python before each call, int64[c]. A GPU capture
            counts only autograd functions, and operators of subclasses of Tensor.
    """

    first: I64
    kind: I64
    times: I64
    node: I64
    call: I64
    python: Mapping[str, I64]

    def host_ns(self, host: Host, percentile: str) -> F64:
        """Return the time of the host for each call, float64[c].

        Args:
            host: the description.
            percentile: "p10_ns", "p50_ns" or "p90_ns"; over hosts.
        """
        host_ns = self.own_ns(host, percentile) + self.python_ns(host, percentile)
        step_ns: float = getattr(host.figures["optimizer_step"], percentile)
        host_ns[np.flatnonzero(self.kind == _CODE["optimizer"])[:1]] += step_ns
        return host_ns

    def own_ns(self, host: Host, percentile: str) -> F64:
        """Return the time of each call's tensors and launches, float64[c]; see `host_ns`."""
        figures = [getattr(host.figures[kind], percentile) for kind in HOST_OP_KINDS]
        each_ns: F64 = np.array(figures, dtype=np.float64)[self.kind]
        # A kernel takes up to 320 chunks of 65,536 elements, so the launches of an operator on a
        # list follow from the sizes of its tensors. Figures of other operators include launches.
        launches = np.bincount(self.call, minlength=len(self.first))
        launch_ns: float = getattr(host.figures["optimizer_launch"], percentile)
        with_list = (self.kind == _CODE["optimizer"]) & (self.times > 1)
        return each_ns * self.times.astype(np.float64) + with_list * launches * launch_ns

    def python_ns(self, host: Host, percentile: str) -> F64:
        """Return what calls of Python add to the time of each call, float64[c]; see `host_ns`."""
        total_ns = np.zeros(len(self.first))
        for kind, counts in self.python.items():
            total_ns += counts * getattr(host.figures[kind], percentile)
        return total_ns

    def step_ns(self, host: Host, percentile: str) -> float:
        """Return the time of the host for the whole step, in ns."""
        rest_ns: float = getattr(host.figures["step"], percentile)
        return float(self.host_ns(host, percentile).sum()) + rest_ns

    def interval_ns(self, host: Host) -> tuple[float, float]:
        """Return the 80% interval of the host's time for the whole step, in ns.

        The job runs on a host that was not measured. The percentiles of a few measured hosts are
        too narrow for it, so the interval is that of a further host, except for Python's calls.
        """
        low_ns, high_ns = (self.step_ns(host, name) for name in ("p10_ns", "p90_ns"))
        if host.further is None:
            return low_ns, high_ns
        python_ns = {
            name: float(self.python_ns(host, name).sum()) for name in ("p10_ns", "p50_ns", "p90_ns")
        }
        own_ns = self.step_ns(host, "p50_ns") - python_ns["p50_ns"]
        return (
            own_ns * host.further.p10 + python_ns["p10_ns"],
            own_ns * host.further.p90 + python_ns["p90_ns"],
        )


def host_calls(
    graph: Graph, node: I64, first: Mask, tensors: I64, *, with_lists: bool = True
) -> HostCalls:
    """Return the calls that launch nodes.

    Args:
        graph: the graph.
        node: nodes on the device in the order of their launches, int64[n].
        first: whether each is the first launch of a call, bool[n]; the first one is.
        tensors: tensors in the first input of each call, int64[c].
        with_lists: whether the capture shows which operators of the optimizer take lists. On a CPU
            optimizers take tensors one by one by default, so each tensor counts as one of a list.
    """
    call = np.cumsum(first) - 1
    by_phase = np.array([_CODE[kind] for kind in _KIND_OF_PHASE])
    kind = by_phase[graph.nodes.phase[node[first]]]
    codes = classify(graph, node)
    codes[graph.communication[node]] = CLASSES.index(OpClass.COMMUNICATION)
    # The strongest class is written last and wins.
    for op_class in reversed(_PRIORITY):
        kind[call[codes == CLASSES.index(op_class)]] = _CODE[_KIND_OF_CLASS[op_class]]
    if graph.job.inference is not None:
        # Without autograd an operator takes the host half of its time in training, or less. The
        # measured decodes give one time for all operators.
        kind[kind != _CODE["collective"]] = _CODE["inference"]
    operators = graph.nodes.op[node]
    recurrent = [
        code
        for code in np.unique(operators).tolist()
        if base_name(graph.strings[code]) in _RECURRENT
    ]
    count = np.bincount(call)
    # A layer that runs as one kernel counts as a GEMM.
    steps = np.isin(operators, recurrent) & (count[call] > _FEW_LAUNCHES)
    kind[call[steps]] = _CODE["recurrent"]
    if with_lists:
        # A tensor that is not in a list costs as much as any operator without autograd.
        kind[(kind == _CODE["optimizer"]) & (tensors == 1)] = _CODE["inference"]
    times = np.where(kind == _CODE["optimizer"], tensors, np.int64(1))
    times = np.where(kind == _CODE["recurrent"], count, times)
    return HostCalls(node[first], kind, times, node, call, {})


def _tensors(graph: Graph, node: I64) -> I64:
    """Return the number of tensors in the first input of each node, int64[n]; 1 for no list.

    Raises:
        AnnotateError: the shapes of a node are no list.
    """
    columns = graph.nodes.input_shapes[node]
    codes, first, which = np.unique(columns, return_index=True, return_inverse=True)
    counts: list[int] = []
    for code, place in zip(codes.tolist(), first.tolist(), strict=True):
        try:
            shapes = operand_list(graph.strings[code])
        except ValueError as error:
            found = graph.node(int(node[place]))
            raise AnnotateError(
                f"node {found.id} ({found.name!r}): cannot read the shapes of its inputs: {error}\n"
                "  convert the trace again",
                code="operands-unreadable",
            ) from None
        listed: Any = shapes[0] if shapes else None
        # The first input of a foreach operator is its list of tensors, of others a single shape.
        counts.append(len(listed) if listed and isinstance(listed[0], list) else 1)
    return np.array(counts, dtype=np.int64)[which]


def launched_calls(graph: Graph, called_ns: I64) -> HostCalls:
    """Return the calls of a GPU capture, which records the operator that launches each node.

    Args:
        graph: the capture.
        called_ns: start of each host operator, int64[n]; the order of the calls.
    """
    launch = np.flatnonzero(launches(graph))
    source, node = graph.edges.source[launch], graph.edges.target[launch]
    # An operator's launches stay together: its source sorts before the start of its kernels.
    order = np.lexsort((graph.nodes.start_ns[node], source, called_ns[source]))
    # A node that an operator and its caller launch counts for the later of the two.
    order = order[np.sort(len(order) - 1 - np.unique(node[order][::-1], return_index=True)[1])]
    source, node = source[order], node[order]
    first = np.diff(source, prepend=-1) != 0
    python = _python_calls(graph, called_ns, called_ns[source[first]])
    return replace(host_calls(graph, node, first, _tensors(graph, node[first])), python=python)


def _predicted_calls(graph: Graph, captured: Graph) -> tuple[HostCalls, I64]:
    """Return the calls of a graph predicted from a CPU capture, and when each began there.

    They are in the order of the capture. Of the launches of an operator one has the operator's id;
    the others stand next to it.
    """
    ids = np.argsort(captured.nodes.id)
    nearest = np.searchsorted(captured.nodes.id[ids], graph.nodes.id)
    place = ids[np.minimum(nearest, len(ids) - 1)]
    known = captured.nodes.id[place] == graph.nodes.id
    device = np.flatnonzero(graph.compute | graph.communication)
    # Passes append and reorder nodes; on one stream, start times keep the order of launches.
    order = device[np.argsort(graph.nodes.start_ns[device], kind="stable")]
    owner = _owners(graph.nodes.module[order], known[order])
    called_ns = captured.nodes.start_ns[place][order][owner]
    program = np.lexsort((owner, called_ns))
    first = np.diff(owner[program], prepend=-1) != 0
    began_ns = called_ns[program[first]]
    python = _python_calls(captured, captured.nodes.start_ns, began_ns)
    # A launch has the tensors that it takes, its operator in the capture the whole list. A call
    # that begins with a helper without operands, such as the fill of a norm's results, counts once.
    operator = place[order][owner][program[first]]
    tensors = _tensors(captured, operator)
    has_operands = graph.nodes.input_shapes[order[program[first]]] > 0
    with_lists = captured.job.device.type != "cpu"
    tensors = np.where(has_operands, tensors, 1)
    calls = host_calls(graph, order[program], first, tensors, with_lists=with_lists)
    untracked = _untracked(captured, operator)
    # Most of the time of such operators is that of Python between modules: a loop of operators in
    # one function takes less than half of it. That of steps which only infer holds both.
    entering = np.diff(captured.nodes.module[operator], prepend=-1) != 0
    entering &= captured.job.inference is None
    of_reducer = python.pop(REDUCER, np.zeros(len(began_ns), dtype=np.int64)) > 0
    kind = np.where(of_reducer, _CODE["reducer"], calls.kind)
    kind = np.where(
        untracked & ~np.isin(kind, _ALWAYS_THEIRS),
        np.where(entering, _CODE["entering"], _CODE["inference"]),
        kind,
    )
    return replace(calls, kind=kind, python=python), began_ns


def _untracked(captured: Graph, node: I64) -> Mask:
    """Return whether autograd recorded none of these operators, bool[n]."""
    codes = captured.nodes.python_calls[node]
    marked = [
        code
        for code in np.unique(codes).tolist()
        if UNTRACKED in python_calls_of(captured.strings[code])
    ]
    return np.isin(codes, marked)


def _python_calls(captured: Graph, called_ns: I64, began_ns: I64) -> dict[str, I64]:
    """Return the calls of Python before each call by kind, int64[c] each.

    Args:
        captured: the capture.
        called_ns: start of each of its nodes, int64[n].
        began_ns: start of each call, ascending, int64[c].

    Raises:
        AnnotateError: the text of a node's calls of Python is malformed.
    """
    nodes = captured.nodes

    def before_calls(counted: I64) -> I64:
        # Operators that launch nothing pass their calls to the next one that does, the last ones to
        # the last.
        place = np.searchsorted(began_ns, called_ns[counted])
        return np.bincount(np.minimum(place, len(began_ns) - 1), minlength=len(began_ns))

    by_kind: dict[str, I64] = {}
    for code in np.unique(nodes.python_calls).tolist():
        of_code = before_calls(np.flatnonzero(nodes.python_calls == code))
        for kind, count in python_calls_of(captured.strings[code]).items():
            if kind == UNTRACKED:
                continue  # of the operator itself; see `_untracked`
            by_kind[kind] = by_kind.get(kind, np.int64(0)) + of_code * count
    if "function" not in by_kind:
        # A capture without a device counts autograd functions. A profiler records them by name.
        codes = np.unique(nodes.name).tolist()
        functions = autograd_functions(captured.strings[code] for code in codes)
        named = [code for code in codes if captured.strings[code] in functions]
        if named:
            by_kind["function"] = before_calls(np.flatnonzero(np.isin(nodes.name, named)))
    return by_kind


def _host_waits(captured: Graph, calls: HostCalls, called_ns: I64) -> tuple[I64, I64, int]:
    """Return the nodes that the host awaits, the calls that follow its waits, and waits left out.

    The first two are int64[w] each. A capture without a device marks the operator before which the
    host waited, with an edge from the last operator that it awaited. A wait that no launch of the
    step follows would delay the next step, and is left out.

    Args:
        captured: the capture.
        calls: the calls predicted from it.
        called_ns: start of each in the capture, ascending, int64[c].
    """
    edges, nodes = captured.edges, captured.nodes
    is_wait = (edges.reason == Reason.SYNC) & (nodes.blocked_ns[edges.target] > 0)
    # The wait for a collective holds back a stream, not the host.
    waits = np.flatnonzero(is_wait & ~captured.communication[edges.source])
    # Operators that launch nothing are no calls: the awaited one is then the one before.
    awaited = np.searchsorted(called_ns, nodes.start_ns[edges.source[waits]], side="right") - 1
    delayed = np.searchsorted(called_ns, nodes.start_ns[edges.target[waits]])
    late = delayed == len(called_ns)
    # A wait before the first launch, or for operators that launch nothing, waits for nothing.
    kept = (awaited >= 0) & (awaited < delayed) & ~late
    last = np.flatnonzero(np.diff(calls.call, append=len(called_ns)) != 0)
    return calls.node[last[awaited[kept]]], delayed[kept], int(late.sum())


def _owners(module: I32, known: Mask) -> I64:
    """Return for each launch the launch that has its operator's id, as positions, int64[n].

    A memset stands before the GEMM that it serves, a sum of partial results after it.
    """
    position = np.arange(len(known))
    before = np.maximum.accumulate(np.where(known, position, -1))
    after = np.minimum.accumulate(np.where(known, position, len(known))[::-1])[::-1]
    last = len(known) - 1
    # The one before by default, the one after only if it alone has the module.
    is_next = (before < 0) | ((module != module[before]) & (after <= last))
    is_next &= (before < 0) | (module == module[np.minimum(after, last)])
    return np.minimum(np.where(is_next, after, before), last)


def with_host(graph: Graph, captured: Graph, host: Host | None) -> Graph:
    """Return a re-costed graph with host operators, or with an interval of its host time.

    A graph from a capture without a GPU gets host operators. A GPU capture has measured ones; on
    another GPU, whose host is not known, the step gets an interval over hosts. Graphs of other
    tools stay unchanged.

    Args:
        graph: the re-costed graph.
        captured: the graph before.
        host: the description; None changes nothing.
    """
    if host is None:
        return graph
    if captured.job.device.runs_operators:
        return add_host(graph, captured, host)
    last = graph.job.annotations[-1]
    # A target with overridden figures has them after its name, and the host that was measured.
    same_board = last.source == last.target.split(" (", 1)[0]
    if same_board or captured.job.measurement.host_overhead is None:
        return graph
    return _with_interval(graph, captured, host)


def _with_interval(graph: Graph, captured: Graph, host: Host) -> Graph:
    """Return a GPU capture with the interval of its step that 80% of hosts fall into.

    The interval has two parts: factors on the host's time, and the unexplained time of a step. The
    capture's own host is one of the hosts, so the first contains 1 and the second the measured
    residual.
    """
    calls = launched_calls(captured, captured.nodes.start_ns)
    host_step_ns = captured.job.measurement.host_step_ns
    typical_ns = calls.step_ns(host, "p50_ns")
    # A capture that recorded no host time counts as a host of p50.
    measured_ns = statistics.median(host_step_ns) if host_step_ns else typical_ns
    _check_host_time(measured_ns, host)
    low_ns, high_ns = (calls.step_ns(host, name) for name in ("p10_ns", "p90_ns"))
    further, residual = host.further, dict[str, list[int]]()
    overhead = captured.job.measurement.host_overhead
    if further is not None and overhead is not None:
        low_ns, high_ns = typical_ns * further.p10, typical_ns * further.p90
        count, measured_residual_ns = len(calls.first), overhead.residual_ns
        residual["host_residual_ns"] = [
            min(round(count * further.residual_p10_ns), measured_residual_ns),
            max(round(count * further.residual_p90_ns), measured_residual_ns),
        ]
    *earlier, annotation = graph.job.annotations
    details = {
        **annotation.details,
        "host": host.name,
        "host_interval": [min(low_ns / measured_ns, 1), max(high_ns / measured_ns, 1)],
        **residual,
    }
    annotation = msgspec.structs.replace(annotation, details=details)
    job = msgspec.structs.replace(graph.job, annotations=(*earlier, annotation))
    return replace(graph, job=job)


def add_host(graph: Graph, captured: Graph, host: Host) -> Graph:
    """Return the graph with a host operator before the launches of each operator.

    The host runs ahead of the GPU, as in the capture of a GPU: a kernel starts when the host has
    called its operator and the stream is free. Where the script reads a value from the GPU, the
    host waits. The step's time is then replayed in steady state.

    The ranks of a job wait for the slowest of their hosts, so the rank gets the time of that one.

    Args:
        graph: kernels and communication, predicted from a CPU capture.
        captured: that capture.
        host: its host.
    """
    calls, began_ns = _predicted_calls(graph, captured)
    if not len(calls.first):
        return graph
    host = host.slowest_of(graph.job.world.size)
    awaited, delayed, late = _host_waits(captured, calls, began_ns)
    added = _host_operators(graph, calls, host)
    edges, host_op = graph.edges, len(graph) + np.arange(len(added))
    edges = Edges.from_pairs(
        len(graph) + len(added),
        np.concatenate([edges.source, host_op[:-1], host_op[calls.call], awaited]),
        np.concatenate([edges.target, host_op[1:], calls.node, host_op[delayed]]),
        np.concatenate([
            edges.reason,
            np.full(len(added) - 1, Reason.PROGRAM_ORDER, dtype=np.uint8),
            np.full(len(calls.node), Reason.LAUNCH, dtype=np.uint8),
            np.full(len(awaited), Reason.SYNC, dtype=np.uint8),
        ]),
    )  # fmt: skip
    job = _job_with_host(graph.job, calls, host, int(added.duration_ns.sum()), late)
    return replace(graph, nodes=Nodes.joined([graph.nodes, added]), edges=edges, job=job)


def _host_operators(graph: Graph, calls: HostCalls, host: Host) -> Nodes:
    """Return a host operator for each call, one after another."""
    nodes, count = graph.nodes, len(calls.first)
    p10_ns, p50_ns, p90_ns = (
        np.rint(calls.host_ns(host, name)).astype(np.int64)
        for name in ("p10_ns", "p50_ns", "p90_ns")
    )
    last_id = int(nodes.id.max())
    operator = np.where(nodes.op[calls.first] > 0, nodes.op[calls.first], nodes.name[calls.first])
    return Nodes.of(
        count,
        id=np.arange(last_id + 1, last_id + 1 + count),
        name=operator,
        op=operator,
        kind=np.full(count, Kind.HOST_OP),
        thread=np.zeros(count),
        # Each call launches at its start. A launch after the call's own time would move all kernels
        # by one call, some 30 us, and change no step time.
        start_ns=int(nodes.start_ns.min()) + np.cumsum(p50_ns) - p50_ns,
        duration_ns=p50_ns,
        p10_ns=p10_ns,
        p90_ns=p90_ns,
        evidence=np.full(count, Evidence.SCALED),
        module=nodes.module[calls.first],
        phase=nodes.phase[calls.first],
        micro_batch=nodes.micro_batch[calls.first],
    )


def _job_with_host(job: Job, calls: HostCalls, host: Host, calls_ns: int, late: int) -> Job:
    """Return the job with the host's time of a step, its interval and notes on it.

    Args:
        job: of the predicted graph.
        calls: the calls.
        host: their host.
        calls_ns: time of all calls.
        late: number of waits that no launch follows.
    """
    rest_ns = round(host.figures["step"].p50_ns)
    python_ns = calls.python_ns(host, "p50_ns").sum()
    # Python's share is what differs most between hosts and versions of torch.
    share = f", of which {python_ns / 1e6:.3f} ms in {_python_text(calls)}" if python_ns else ""
    ranks = job.world.size
    factor = host.slowest_factor(ranks)
    slowest = (
        f" The slowest of {ranks} ranks takes {factor:.3f} times as long." if factor > 1 else ""
    )
    note = Note(
        f"{len(calls.first)} calls take {(calls_ns + rest_ns) / 1e6:.3f} ms of host time in a "
        f'step{share}, by the description "{host.name}"; no host was measured.{slowest}',
        code="host-described",
    )
    notes = [*job.measurement.notes, note]
    if late:
        text = f"{late} waits of the host for the GPU are left out: no launch of the step follows"
        notes.append(Note(text, code="host-waits-at-end"))
    measurement = msgspec.structs.replace(
        job.measurement,
        host_overhead=HostOverhead(1.0, inter_step_host_ns=rest_ns, residual_ns=0),
        notes=tuple(notes),
    )
    *earlier, annotation = job.annotations
    p50_ns, (low_ns, high_ns) = calls.step_ns(host, "p50_ns"), calls.interval_ns(host)
    _check_host_time(p50_ns, host)
    details = {
        **annotation.details,
        "host": host.name,
        "host_interval": [low_ns / p50_ns, high_ns / p50_ns],
    }
    annotation = msgspec.structs.replace(annotation, details=details)
    return msgspec.structs.replace(job, measurement=measurement, annotations=(*earlier, annotation))


def _check_host_time(step_ns: float, host: Host) -> None:
    """Raise a TargetError if the host takes no time for a step: its interval is factors on it."""
    if not step_ns:
        raise TargetError(
            f'the host "{host.name}" takes 0 ns for all calls of this step; at least one of their '
            "p50_ns must be more than 0\n  for kernels without a host: --host none",
            code="host-file-malformed",
        )


def _python_text(calls: HostCalls) -> str:
    """Return the counts of calls of Python, for a note."""
    sums = {kind: int(counts.sum()) for kind, counts in calls.python.items()}
    listed = ", ".join(f"{kind} {sums[kind]}" for kind in PYTHON_CALLS if sums.get(kind))
    return f"calls of Python ({listed})"


def scale_host(graph: Graph, factor: float) -> Graph:
    """Return the graph with the self time of every host operator times `factor`; 0: a free host.

    See `with_host_factor`.

    Raises:
        AnnotateError: the graph is a CPU capture, whose host operators are its compute.
    """
    if factor == 1:
        return graph
    if graph.job.device.runs_operators:
        raise AnnotateError(
            "the trace was captured on a CPU, where host operators are the compute\n"
            "  re-cost it for a GPU before scaling its host",
            code="host-scale-cpu-capture",
        )
    scaled = with_host_factor(graph, factor)
    host = graph.mask(Kind.HOST_OP) & (graph.nodes.duration_ns > 0)
    scaled = scaled.with_columns(evidence=np.where(host, Evidence.SCALED, graph.nodes.evidence))
    effect = "take no time" if factor == 0 else f"take {factor:g} times as long as measured"
    job = graph.job
    text = f"another host: {int(host.sum())} host operators {effect}"
    measurement = job.measurement.untimed(Note(text, code="host-scaled"))
    annotations = job.annotations
    if annotations:
        details = {**annotations[-1].details, "host_factor": factor}
        annotation = msgspec.structs.replace(annotations[-1], details=details)
        annotations = (*annotations[:-1], annotation)
    job = msgspec.structs.replace(scaled.job, measurement=measurement, annotations=annotations)
    return replace(scaled, job=job)
