"""Serialize communication and compute."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.op_costs.node_costs import compute_mask
from onerank.ir import UNKNOWN, Edges, Evidence, Graph, Kind, Reason
from onerank.ir.errors import AnnotateError
from onerank.ir.graph import topological_order

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
        source, waiter = _separating_edges(graph)
        edges = graph.edges
        exists = np.isin(waiter * len(graph) + source, edges.target * len(graph) + edges.source)
        source, waiter = source[~exists], waiter[~exists]
        if not len(source):
            raise AnnotateError(
                "no communication overlaps compute in this graph: its edges already separate them",
                code="serialize-already-serial",
            )
        sync = np.full(len(source), Reason.SYNC, dtype=np.uint8)
        new_edges = Edges.from_pairs(
            len(graph),
            np.concatenate([edges.source, source]),
            np.concatenate([edges.target, waiter]),
            np.concatenate([edges.reason, sync]),
        )
        duration, evidence = graph.nodes.duration_ns.copy(), graph.nodes.evidence
        uncontended = graph.nodes.uncontended_ns
        known = compute_mask(graph) & (uncontended != UNKNOWN) & (evidence == Evidence.MEASURED)
        duration[known] = uncontended[known]
        serialized = replace(graph, edges=new_edges).with_columns(duration_ns=duration)
        note = (
            f"Overlap off: {len(source)} added edges make communication and compute wait for each "
            f"other in issue order; {int(known.sum())} kernels have the time measured without "
            "concurrent communication."
        )
        measurement = serialized.job.measurement.untimed(note)
        _, leftover = topological_order(new_edges)
        if len(leftover):
            raise AnnotateError(
                f"the issue order contradicts the edges of {len(leftover)} nodes, so communication "
                "and compute cannot be serialized in it\n  convert the trace again",
                code="serialize-order-conflict",
            )
        return replace(
            serialized, job=msgspec.structs.replace(serialized.job, measurement=measurement)
        )


def _separating_edges(graph: Graph) -> tuple[I64, I64]:
    """Return (earlier, later) of the edges that separate compute from communication.

    In issue order, the graph alternates between sections of compute and of communication. The
    first node of each stream in a section waits for the last node of each stream in the section
    before; the edges of the streams imply the rest.
    """
    nodes = graph.nodes
    compute, communicates = compute_mask(graph), graph.communication
    if not compute.any() or not communicates.any():
        lacking = "communication" if compute.any() else "compute"
        raise AnnotateError(
            f"the graph has no {lacking}, so there is no overlap to remove",
            code="serialize-nothing-overlaps",
        )
    device = np.flatnonzero(compute | communicates)
    order = device[_in_issue_order(graph, device)]
    is_call = communicates[order]
    section = np.cumsum(np.concatenate([[0], is_call[1:] != is_call[:-1]]))
    lane = np.where(nodes.stream[order] != UNKNOWN, nodes.stream[order], -1 - nodes.thread[order])
    last = _last_of(section, lane)
    first = len(section) - 1 - _last_of(section[::-1], lane[::-1])
    ends, starts = last[section[last] < section[-1]], first[section[first] > 0]
    begin = np.searchsorted(section[starts], section[ends] + 1)
    count = np.searchsorted(section[starts], section[ends] + 1, side="right") - begin
    offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    earlier, later = np.repeat(ends, count), starts[np.repeat(begin, count) + offset]
    across_lanes = lane[earlier] != lane[later]  # nodes of one stream are ordered by its edges
    return order[earlier[across_lanes]], order[later[across_lanes]]


def _last_of(section: I64, lane: I64) -> I64:
    """Return the position of the last node of each lane in each section, ascending by section."""
    keys = np.stack([section, lane])
    _, position = np.unique(keys[:, ::-1], axis=1, return_index=True)
    last = np.sort(len(section) - 1 - position)
    return last[np.argsort(section[last], kind="stable")]


def _in_issue_order(graph: Graph, device: I64) -> I64:
    """Return positions of device nodes in the order in which they were issued."""
    edges, start = graph.edges, graph.nodes.start_ns
    issued = start.copy()
    launches = edges.reason == Reason.LAUNCH
    issued[edges.target[launches]] = start[edges.source[launches]]
    issued = np.where(graph.nodes.kind == Kind.HOST_OP, start, issued)
    return np.lexsort((start[device], issued[device]))
