"""Give the kernels of a replayed CUDA graph the operators that the graph was captured from.

A replay launches many kernels with one call, and runs no operator. `capture` therefore records each
graph while the script captures it: operators, shapes, modules and launches, in the order in which
they became nodes. `with_replayed_operators` inserts these operators into the interval of the call
that launches the graph, and links each operation of the replay to the launch that made its node.
All later steps of the conversion then treat the operations as launched one by one.

The inserted operators fill the interval of the launch call: a replay does no other work on the
host.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import msgspec
import numpy as np

from onerank.converters.sources.kineto.link.host_timeline import (
    NONE,
    HostTimeline,
    host_timeline,
    named,
)
from onerank.converters.sources.kineto.link.link_kernels import GRAPH_LAUNCHES, KERNEL_CATEGORY
from onerank.converters.sources.kineto.read.execution_trace import load_execution_trace
from onerank.converters.sources.kineto.read.kineto_trace import load_kineto
from onerank.converters.sources.kineto.read.schema import Args
from onerank.converters.sources.kineto.read.trace_columns import (
    NO_CALL,
    ExecutionTrace,
    GpuRows,
    HostRows,
    KinetoTrace,
    LaunchRows,
    concatenated,
    last_of,
)
from onerank.ir import StringTable
from onerank.ir.arrays import I64, Mask
from onerank.ir.errors import TraceError
from onerank.ir.notes import Note

GRAPH_REPLAY = "onerank::graph::"
"""Prefix of the profiler range around a replay of a CUDA graph; the graph's number follows."""

# Calls that add to the graph a node that a profile shows. The profiler records a runtime call
# without the driver's call inside it, so none counts twice (torch 2.11, CUDA 13).
_NODE_CALL = re.compile(
    r"(cu|cuda|hip)((Ext)?(Module)?Launch(Cooperative)?Kernel|Memcpy|Memset)\w*"
)

# Each observer numbers its records from the start. The number of the graph, above these bits, keeps
# the ids of different recordings apart.
_ID_BITS = 40


def graph_name(number: int) -> str:
    """Return the name of the Kineto trace of the recording of graph `number`, from 0."""
    return f"graph.{number}.json.gz"


def graph_et_name(number: int) -> str:
    """Return the name of the execution trace of the recording of graph `number`, from 0."""
    return f"graph.{number}.et.json.gz"


def graph_kernels_name(number: int) -> str:
    """Return the name of the list of the kernels of graph `number`, from 0, by node."""
    return f"graph.{number}.kernels.json"


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """A CUDA graph as it was recorded.

    Attributes:
        number: number of the graph.
        host: operators and ranges around its launches, ordered by start.
        launches: the launches that became its nodes, in order.
        calls: arguments of collectives; rows of `host` hold indices into it.
        kernels: mangled name of the kernel of each node, "" of copies; () if not recorded.
    """

    number: int
    host: HostRows
    launches: LaunchRows
    calls: list[Args]
    kernels: tuple[str, ...] = ()


class RecordedGraphs:
    """The recordings of a capture's CUDA graphs, each read at its first use.

    Args:
        directory: directory with the files of the recordings; None without any.
        strings: table for their texts.

    Attributes:
        strings: the table.
        different: graph -> launches in its recording and operations in its replay, where these
            numbers differ.
        by_start: graphs on several streams whose replay does not show the nodes of its operations.
    """

    def __init__(self, directory: Path | None, strings: StringTable) -> None:
        self.different: dict[int, tuple[int, int]] = {}
        self.by_start: set[int] = set()
        self._directory = directory
        self.strings = strings
        self._graphs: dict[int, RecordedGraph | None] = {}

    def graph(self, number: int) -> RecordedGraph | None:
        """Return the recording of a graph; None if it was not recorded."""
        if self._directory is None:
            return None
        if number not in self._graphs:
            path = self._directory / graph_name(number)
            self._graphs[number] = _read(path, number, self.strings) if path.exists() else None
        return self._graphs[number]

    def with_execution_traces(self, et: ExecutionTrace) -> ExecutionTrace:
        """Return an execution trace with the operators of the graphs that were replayed."""
        for graph in filter(None, self._graphs.values()):
            assert self._directory is not None
            path = self._directory / graph_et_name(graph.number)
            wanted = graph.host.rf_id - (graph.number + 1 << _ID_BITS)
            other = load_execution_trace(path, self.strings, wanted)
            et = replace(
                et,
                id=np.concatenate([et.id, other.id + et.id.max(initial=0) + 1]),
                name=np.concatenate([et.name, other.name]),
                rf_id=np.concatenate([et.rf_id, other.rf_id + (graph.number + 1 << _ID_BITS)]),
                tid=np.concatenate([et.tid, other.tid]),
                operands=np.concatenate([et.operands, other.operands], axis=1),
            )
        return et

    def notes(self) -> list[Note]:
        """Return notes on graphs whose recording could not be used, or not for certain."""
        different = [
            Note(
                f"the recording of CUDA graph {number} has {recorded} launches and its replay "
                f"{replayed} operations, so its kernels have no operators",
                code="graph-recording-differs",
            )
            for number, (recorded, replayed) in self.different.items()
        ]
        by_start = [
            Note(
                f"the trace does not show which node of CUDA graph {number} each operation of its "
                "replay is: they are assigned in order of start, which is wrong where streams "
                "overlap",
                code="graph-nodes-by-start",
            )
            for number in sorted(self.by_start)
        ]
        return different + by_start


def _read(path: Path, number: int, strings: StringTable) -> RecordedGraph:
    trace = load_kineto(path, strings)
    launches = trace.launches
    captures = named(launches.name, strings, lambda name: name.endswith("StreamBeginCapture"))
    ends = named(launches.name, strings, lambda name: name.endswith("StreamEndCapture"))
    # Launches before the capture are no nodes: torch fills the seeds of random numbers there.
    begin_ns = int(launches.start_ns[captures].max(initial=0))
    end_ns = int(launches.start_ns[ends].max()) if ends.any() else np.iinfo(np.int64).max
    graph = _between(trace, host_timeline(trace), number, begin_ns, end_ns)
    names = path.parent / graph_kernels_name(number)
    if not names.exists():
        return graph
    return replace(graph, kernels=msgspec.json.decode(names.read_bytes(), type=tuple[str, ...]))


def _between(
    trace: KinetoTrace, timeline: HostTimeline, number: int, begin_ns: int, end_ns: int
) -> RecordedGraph:
    """Return the graph whose capture began and ended at these times.

    Args:
        trace: the recording.
        timeline: its host events.
        number: number of the graph.
        begin_ns: start of the capture.
        end_ns: end of the capture.
    """
    launches, strings = trace.launches, trace.strings
    is_node = named(launches.name, strings, lambda name: _NODE_CALL.fullmatch(name) is not None)
    is_node &= (launches.start_ns > begin_ns) & (launches.start_ns < end_ns)
    nodes = launches.take(np.flatnonzero(is_node))
    nodes = nodes.take(np.argsort(nodes.start_ns, kind="stable"))
    # The trace also has host events outside the capture: keep those around a node's launch.
    around = timeline.innermost(nodes.thread, nodes.start_ns)
    needed = np.zeros(len(timeline), dtype=bool)
    while (around >= 0).any():
        around = around[around >= 0]
        around = np.unique(around[~needed[around]])
        needed[around] = True
        around = timeline.parent[around]
    host = timeline.rows.take(np.flatnonzero(needed))
    host = host.take(np.argsort(host.start_ns, kind="stable"))
    host.rf_id[:] += np.where(host.rf_id != 0, number + 1 << _ID_BITS, 0)
    return RecordedGraph(number, host, nodes, trace.calls)


def with_replayed_operators(
    trace: KinetoTrace, graphs: RecordedGraphs, captures: "CapturedGraphs | None" = None
) -> KinetoTrace:
    """Return a trace with the operators of each graph that it replays.

    Args:
        trace: the trace.
        graphs: graphs that a capture recorded, whose replays are in ranges of the capture.
        captures: graphs of an engine, whose replays have no such ranges; None for none.
    """
    host: list[HostRows] = [trace.host]
    launches: list[LaunchRows] = [trace.launches]
    correlation, external_id = trace.gpu.correlation.copy(), trace.gpu.external_id.copy()
    calls = [*trace.calls]
    next_correlation = 1 + max(
        int(trace.launches.correlation.max(initial=0)), int(correlation.max(initial=0))
    )
    next_external = 1 + max(
        int(trace.host.external_id.max(initial=0)), int(trace.launches.external_id.max(initial=0))
    )
    for replayed, operations in _replays(trace, graphs, captures):
        inserted, inserted_launches = replayed.rows(next_external, next_correlation, len(calls))
        host.append(inserted)
        launches.append(inserted_launches)
        correlation[operations] = inserted_launches.correlation
        external_id[operations] = inserted_launches.external_id
        calls += replayed.graph.calls
        next_external = 1 + int(inserted.external_id.max(initial=next_external))
        next_correlation += len(operations)
    if len(host) == 1:
        return trace
    return replace(
        trace,
        host=concatenated(host),
        launches=concatenated(launches),
        gpu=replace(trace.gpu, correlation=correlation, external_id=external_id),
        calls=calls,
    )


def _replays(
    trace: KinetoTrace, graphs: RecordedGraphs, captures: "CapturedGraphs | None"
) -> Iterator[tuple["_Replay", I64]]:
    """Yield each replay of a recorded graph, and its operations in the order of the launches."""
    for number, mark, launch in _marked_replays(trace):
        operations = np.flatnonzero(trace.gpu.correlation == trace.launches.correlation[launch])
        if (graph := graphs.graph(number)) is None or not len(operations):
            continue
        if len(operations) != len(graph.launches):
            graphs.different[number] = len(graph.launches), len(operations)
            continue
        rows = trace.gpu.take(operations)
        order, is_shown = _node_order(rows, graph, trace.strings)
        if not is_shown:
            graphs.by_start.add(number)
        event_index = int(trace.host.event_index[mark])
        yield _Replay(graph, trace, event_index, launch), operations[order]
    if captures is None:
        return
    is_launch = named(
        trace.launches.name, trace.strings, lambda name: name.startswith(GRAPH_LAUNCHES)
    )
    # Sorted once: vLLM launches a graph for each layer, 25 in a step of a public recording.
    by_correlation = np.argsort(trace.gpu.correlation, kind="stable")
    correlation = trace.gpu.correlation[by_correlation]
    for launch in np.flatnonzero(is_launch).tolist():
        wanted = trace.launches.correlation[launch]
        first, end = np.searchsorted(correlation, [wanted, wanted + 1])
        operations = by_correlation[first:end]
        if not len(operations):
            continue
        rows = trace.gpu.take(operations)
        match = captures.match(rows, int(trace.launches.start_ns[launch]))
        if match is not None:
            graph, order = match
            # A launch call has no `Ev Idx`, and no range is around it.
            yield _Replay(graph, trace, 0, launch), operations[order]


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    """A graph that an engine captured while the profiler recorded.

    Attributes:
        graph: its operators and launches.
        size: sequences or tokens that it was captured for; None if not recorded.
        is_kernel: which launches are kernels, and not copies, bool[n].
        is_named: which launches have the name of their kernel, bool[n].
        content: operators with shapes and types, and launched kernels: equal for the layers of a
            model, whose pieces vLLM captures one by one.
    """

    graph: RecordedGraph
    size: int | None
    is_kernel: Mask
    is_named: Mask
    content: tuple[bytes, ...]

    @classmethod
    def of(cls, graph: RecordedGraph, size: int | None, strings: StringTable) -> "_CapturedGraph":
        """Return a graph that was captured for a size."""
        host, launches = graph.host, graph.launches
        # Without the values of operands, which differ from layer to layer.
        columns = host.name, host.operands[:, 1:], launches.name, launches.kernel
        return cls(
            graph,
            size,
            named(launches.name, strings, lambda name: "Launch" in name),
            launches.kernel != strings.intern(""),
            tuple(column.tobytes() for column in columns),
        )

    def fits(self, rows: GpuRows) -> bool:
        """Return whether operations are of the launched kinds, and of their names if recorded."""
        if ((rows.category == KERNEL_CATEGORY) != self.is_kernel).any():
            return False
        return bool((self.graph.launches.kernel == rows.name)[self.is_named].all())


# vLLM patched by AMD annotates a capture (capture_32_FULL); SGLang names a file after it
# (DecodeCudaGraphRunner_bs_32_rank0.json.gz).
_CAPTURE = re.compile(r"capture_(\d+)_\w+")
_CAPTURE_FILE = re.compile(r"(?:^|_)bs_(\d+)_")


class EngineCaptures:
    """The graphs of an engine that was profiled while it captured them.

    Args:
        files: the recordings, Kineto traces.
        strings: table for their texts.

    Attributes:
        by_length: number of launches -> the graphs with so many.
    """

    def __init__(self, files: Sequence[Path], strings: StringTable) -> None:
        graphs: list[_CapturedGraph] = []
        for path in files:
            graphs += _captured_in(load_kineto(path, strings, operands=True), len(graphs))
        if files and not graphs:
            raise TraceError(
                f"{files[0]}: no stream capture with launches in {len(files)} files: record an "
                "engine while it captures its CUDA graphs",
                code="graph-captures-not-found",
            )
        self.by_length: dict[int, list[_CapturedGraph]] = {}
        for graph in graphs:
            self.by_length.setdefault(len(graph.graph.launches), []).append(graph)


class CapturedGraphs:
    """Matches the replays of a recorded engine with the graphs that it captured.

    Args:
        captures: the graphs.
        sizes: start of each engine step, ascending, and its new tokens, None if not known. They
            choose among graphs that differ in size.

    Attributes:
        unmatched: number of operations of a replay whose graph is not certain -> number of such
            replays.
    """

    def __init__(self, captures: EngineCaptures, sizes: Sequence[tuple[int, int | None]]) -> None:
        self.unmatched = Counter[int]()
        self._by_length = captures.by_length
        self._sizes = sizes

    def match(self, rows: GpuRows, launch_ns: int) -> tuple[RecordedGraph, I64] | None:
        """Return the graph of a replay and the order of its operations; None if not certain.

        Args:
            rows: operations of the replay.
            launch_ns: host time of the replay.
        """
        # The nodes of a graph on several streams are in the order of the capture only by their ids.
        if rows.graph_node.all() or len(np.unique(rows.stream)) == 1:
            order = np.lexsort((rows.start_ns, rows.graph_node))
            fitting = [
                graph
                for graph in self._by_length.get(len(rows), [])
                if graph.fits(rows.take(order))
            ]
            if len({graph.content for graph in fitting}) > 1:
                fitting = _least_size(fitting, self._new_tokens(launch_ns))
            if len({graph.content for graph in fitting}) == 1:
                return fitting[0].graph, order
        self.unmatched[len(rows)] += 1
        return None

    def _new_tokens(self, launch_ns: int) -> int | None:
        place = bisect_right(self._sizes, launch_ns, key=itemgetter(0))
        return self._sizes[place - 1][1] if place else None

    def notes(self) -> list[Note]:
        """Return a note on replays whose graph is not recorded or not certain."""
        if not self.unmatched:
            return []
        most = ", ".join(f"{n} of {length}" for length, n in self.unmatched.most_common(3))
        return [
            Note(
                f"{self.unmatched.total()} replays of CUDA graphs match no recorded capture, or "
                f"several of other operators; most by number of operations: {most}",
                code="graph-replays-unmatched",
            )
        ]


def _least_size(graphs: list[_CapturedGraph], new_tokens: int | None) -> list[_CapturedGraph]:
    """Return the graphs of the smallest size that holds a batch: engines pad the batch to it."""
    sizes = [graph.size for graph in graphs if graph.size is not None]
    if new_tokens is None or len(sizes) < len(graphs):
        return graphs
    least = min((size for size in sizes if size >= new_tokens), default=None)
    return [graph for graph in graphs if graph.size == least]


def _captured_in(trace: KinetoTrace, first: int) -> list[_CapturedGraph]:
    """Return the graphs captured in a trace; `first` is the number of the first."""
    launches, host, strings = trace.launches, trace.host, trace.strings
    begins = named(launches.name, strings, lambda name: name.endswith("StreamBeginCapture"))
    ends = named(launches.name, strings, lambda name: name.endswith("StreamEndCapture"))
    end_times = np.sort(launches.start_ns[ends])
    timeline = host_timeline(trace)
    in_name = _CAPTURE_FILE.search(trace.path.name)
    labels = [
        (int(host.start_ns[row]), int(host.end_ns[row]), int(match[1]))
        for row in np.flatnonzero(~host.is_operator).tolist()
        if (match := _CAPTURE.fullmatch(strings[int(host.name[row])]))
    ]
    graphs: list[_CapturedGraph] = []
    for begin_ns in np.sort(launches.start_ns[begins]).tolist():
        after = end_times[end_times > begin_ns]
        if not len(after):
            # The recording ended during this capture. A note counts its replays as unmatched.
            continue
        graph = _between(trace, timeline, first + len(graphs), begin_ns, int(after[0]))
        if len(graph.launches):
            sizes = [size for start, end, size in labels if start <= begin_ns < end]
            size = sizes[0] if sizes else int(in_name[1]) if in_name else None
            graphs.append(_CapturedGraph.of(graph, size, strings))
    return graphs


def _marked_replays(trace: KinetoTrace) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each replayed graph, the row of its range, and that of its launch."""
    host, launches = trace.host, trace.launches
    is_mark = named(host.name, trace.strings, lambda name: name.startswith(GRAPH_REPLAY))
    is_launch = named(launches.name, trace.strings, lambda name: name.startswith(GRAPH_LAUNCHES))
    rows = np.flatnonzero(is_launch)
    for mark in np.flatnonzero(is_mark).tolist():
        within = (launches.start_ns[rows] >= host.start_ns[mark]) & (
            launches.start_ns[rows] < host.end_ns[mark]
        )
        inside = rows[within & (launches.thread[rows] == host.thread[mark])]
        number = trace.strings[int(host.name[mark])].removeprefix(GRAPH_REPLAY)
        if len(inside) and number.isdecimal():
            yield int(number), mark, int(inside[0])


def _node_order(rows: GpuRows, graph: RecordedGraph, strings: StringTable) -> tuple[I64, bool]:
    """Return a replay's operations in the order of their nodes, and whether the trace shows it.

    Without recorded nodes or kernel names that match, several streams get the order of start.
    """
    # Newer profilers record the node. On one stream, nodes run in the order in which they joined.
    order = np.lexsort((rows.start_ns, rows.graph_node))
    if rows.graph_node.all() or len(np.unique(rows.stream)) == 1:
        return order, True
    if len(graph.kernels) != len(order):
        return order, False
    pending: list[int] = order.tolist()
    words = [frozenset(_WORD.findall(strings[int(code)])) for code in rows.name.tolist()]
    is_kernel: list[bool] = (rows.category == KERNEL_CATEGORY).tolist()
    by_name: list[int] = []
    for kernel in graph.kernels:
        expected = _identifiers(kernel)
        place = next(
            (
                place
                for place in pending
                if is_kernel[place] == bool(kernel) and expected <= words[place]
            ),
            None,
        )
        if place is None:
            return order, False
        pending.remove(place)
        by_name.append(place)
    return np.array(by_name, dtype=np.int64), True


_WORD = re.compile(r"\w+")

# Numbers in a mangled name: a literal (`Li4E`), a reference to an earlier part (`S0_`, `T1_`), the
# number of a lambda (`E0_`), or the length of the identifier that follows.
_NUMBER = re.compile(r"L[a-z]n?\d+E|[STE]\d_|(\d+)")


def _identifiers(mangled: str) -> frozenset[str]:
    """Return the identifiers in a mangled name of C++; of any other name, the name."""
    if not mangled.startswith("_Z"):
        return frozenset(_WORD.findall(mangled))
    identifiers: set[str] = set()
    place = 0
    while match := _NUMBER.search(mangled, place):
        place = match.end() + int(match[1] or 0)
        identifiers.add(mangled[match.end() : place])
    return frozenset(name for name in identifiers if name and not name.startswith("_GLOBAL__N_"))


@dataclass(frozen=True, slots=True)
class _Replay:
    """A replay of a graph.

    Attributes:
        graph: the graph.
        trace: the trace with the replay.
        event_index: `Ev Idx` of the inserted host events.
        launch: row of the launch call.
    """

    graph: RecordedGraph
    trace: KinetoTrace
    event_index: int
    launch: int

    def rows(
        self, first_external: int, first_correlation: int, first_call: int
    ) -> tuple[HostRows, LaunchRows]:
        """Return the operators and launches of the recording, at the time of the replay.

        Args:
            first_external: external ids of this number and above are free.
            first_correlation: correlations of this number and above are free.
            first_call: place of the first of the graph's calls among the trace's.
        """
        host, launches = self.graph.host, self.graph.launches
        times = np.concatenate([host.start_ns, host.end_ns, launches.start_ns])
        distinct, rank = np.unique(times, return_inverse=True)
        begin = int(self.trace.launches.start_ns[self.launch])
        duration = int(self.trace.launches.end_ns[self.launch]) - begin
        # By rank and not by time: distinct times of short operators stay distinct after rounding,
        # and the nesting of operators is read from them.
        mapped = begin + rank.reshape(-1) * duration // max(1, len(distinct))
        start, end, launched = np.split(mapped, [len(host), 2 * len(host)])
        thread = int(self.trace.launches.thread[self.launch])
        lowest = min(
            int(host.external_id.min(initial=np.iinfo(np.int64).max)),
            int(launches.external_id[launches.external_id > 0].min(initial=np.iinfo(np.int64).max)),
        )
        shift = first_external - lowest
        inserted = replace(
            host,
            thread=np.full(len(host), thread),
            start_ns=start,
            end_ns=end,
            external_id=host.external_id + shift,
            # One index for all: host events of equal times keep the recorded order.
            event_index=np.full(len(host), self.event_index),
            call=np.where(host.call == NO_CALL, NO_CALL, host.call + first_call),
        )
        known = last_of(host.external_id, launches.external_id) != NONE
        inserted_launches = replace(
            launches,
            name=np.full(len(launches), self.trace.launches.name[self.launch], dtype=np.int32),
            thread=np.full(len(launches), thread),
            start_ns=launched,
            end_ns=launched,
            correlation=first_correlation + np.arange(len(launches)),
            external_id=np.where(known, launches.external_id + shift, 0),
        )
        return inserted, inserted_launches
