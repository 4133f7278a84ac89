"""Serialize communication and compute."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.op_costs.node_costs import compute_mask
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Kind, Reason
from onerank.ir.edges import topological_order
from onerank.ir.errors import AnnotateError

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SerializeOverlap:
    """Remove all overlap of communication and compute.

    Device work follows the order of issue: the start of the launching operator, or its own start
    without a launch. Where compute and communication follow each other in that order, the later
    waits for the earlier (reason SYNC). Compute on several streams, and communication of several
    groups, still overlap among themselves.
    """

    def apply(self, graph: Graph, target: Gpu | None = None) -> Graph:
        """Return the graph with these edges, and kernels at their uncontended times if known.

        Starts stay as captured: they keep the order, and edges determine the times.

        Args:
            graph: captured, not coarsened.
            target: unused, since times are those of the graph.

        Raises:
            AnnotateError: the graph has no communication or no compute, or its edges already
                separate them.
        """
        del target
        source, waiter = _turns(graph)
        edges = graph.edges
        there = np.isin(waiter * len(graph) + source, edges.target * len(graph) + edges.source)
        source, waiter = source[~there], waiter[~there]
        if not len(source):
            raise AnnotateError(
                "no communication can run beside compute in this graph: its edges already hold "
                "them apart, so that there is no overlap to leave out",
                code="serialize-already-serial",
            )
        sync = np.full(len(source), Reason.SYNC, dtype=np.uint8)
        joined = Edges.from_pairs(
            len(graph),
            np.concatenate([edges.source, source]),
            np.concatenate([edges.target, waiter]),
            np.concatenate([edges.reason, sync]),
        )
        duration, evidence = graph.nodes.duration_ns.copy(), graph.nodes.evidence
        alone = graph.nodes.uncontended_ns
        known = compute_mask(graph) & (alone != UNKNOWN) & (evidence == Evidence.MEASURED)
        duration[known] = alone[known]
        made = replace(graph, edges=joined).with_columns(duration_ns=duration)
        note = (
            f"Overlap off: {len(source)} edges more let communication and compute wait for each "
            f"other in the order of their issue; {int(known.sum())} kernels have the time that was "
            "measured with no communication beside them."
        )
        told = made.job.measurement.untimed(note)
        _, leftover = topological_order(joined)
        if len(leftover):
            raise AnnotateError(
                f"the order of issue contradicts the edges of {len(leftover)} nodes, so that "
                "communication and compute cannot take turns in it; convert the trace anew",
                code="serialize-order-conflict",
            )
        return replace(made, job=msgspec.structs.replace(made.job, measurement=told))


def _turns(graph: Graph) -> tuple[I64, I64]:
    """Return (earlier, later) of the edges that separate compute from communication.

    Of a run of the same kind the last node of each stream is awaited, and the first node of each
    stream in the next run waits; the streams' own edges do the rest.
    """
    nodes = graph.nodes
    compute, communicates = compute_mask(graph), graph.communication
    if not compute.any() or not communicates.any():
        lacking = "communication" if compute.any() else "compute"
        raise AnnotateError(
            f"the graph has no {lacking}, so there is no overlap to leave out",
            code="serialize-nothing-overlaps",
        )
    device = np.flatnonzero(compute | communicates)
    order = device[_in_issue_order(graph, device)]
    sort = communicates[order]
    run = np.cumsum(np.concatenate([[0], sort[1:] != sort[:-1]]))
    lane = np.where(nodes.stream[order] != UNKNOWN, nodes.stream[order], -1 - nodes.thread[order])
    last = _last_of(run, lane)
    first = len(run) - 1 - _last_of(run[::-1], lane[::-1])
    ends, starts = last[run[last] < run[-1]], first[run[first] > 0]
    begin = np.searchsorted(run[starts], run[ends] + 1)
    count = np.searchsorted(run[starts], run[ends] + 1, side="right") - begin
    offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    earlier, later = np.repeat(ends, count), starts[np.repeat(begin, count) + offset]
    apart = lane[earlier] != lane[later]  # a stream's own order holds the others
    return order[earlier[apart]], order[later[apart]]


def _last_of(run: I64, lane: I64) -> I64:
    """Return the place of the last of each lane in each run, ascending by run."""
    keys = np.stack([run, lane])
    _, place = np.unique(keys[:, ::-1], axis=1, return_index=True)
    last = np.sort(len(run) - 1 - place)
    return last[np.argsort(run[last], kind="stable")]


def _in_issue_order(graph: Graph, device: I64) -> I64:
    """Return positions of device nodes in the order in which they were issued."""
    edges, start = graph.edges, graph.nodes.start_ns
    issued = start.copy()
    launches = edges.reason == Reason.LAUNCH
    issued[edges.target[launches]] = start[edges.source[launches]]
    issued = np.where(graph.nodes.kind == Kind.HOST_OP, start, issued)
    return np.lexsort((start[device], issued[device]))
