"""Communication beside compute as far as the data allow."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.what_ifs.overlap.lanes import Lanes
from onerank.annotate.what_ifs.overlap.needs import Needs, needs_of
from onerank.annotate.what_ifs.overlap.rewired import rewired
from onerank.annotate.what_ifs.overlap.turns import turns_of
from onerank.annotate.work.characters import compute_mask
from onerank.ir import Graph
from onerank.ir.edges import topological_order
from onerank.ir.errors import AnnotateError

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Overlap:
    """What if communication ran beside compute as far as the data allow.

    A call begins when what it reads is written and nobody uses any more what it writes; what
    computes waits for it where it uses what the call wrote, or overwrites what it reads. Streams,
    events and the host hold back neither. The host issues a call right behind the operator that
    made its data, as a hook would (see `turns_of`), on a stream of its group. Among themselves
    kernels and host operators keep the order they were captured in.
    """

    def apply(self, graph: Graph, target: Gpu | None = None) -> Graph:
        """Return the graph with these edges.

        All durations stay, those of kernels that now have a call beside them too; memory stays as
        captured, although buffers are held as long as a call uses them. Calls that tell no tensors
        stay where they are. A call that moves starts where its data were ready as captured; the
        starts of all else stay.

        Args:
            graph: captured, not coarsened.
            target: not looked at, for the times are those of the graph.

        Raises:
            AnnotateError: the graph has no communication or no compute, is extrapolated, does not
                tell which tensors its calls use, or its calls overlap already as far as they can.
        """
        del target
        _check(graph)
        lanes = Lanes.from_graph(graph)
        captured = lanes.before(graph.edges, lanes.order), lanes.after(graph.edges, lanes.order)
        needs = needs_of(graph, lanes, *captured)
        if not needs.of:
            raise AnnotateError(
                f"none of the graph's {len(needs.fixed)} calls tells which tensors it uses, so "
                "what could run beside it is not known; capture the step with `capture run`"
            )
        made = rewired(graph, lanes, needs, turns_of(graph, lanes, needs))
        order, leftover = topological_order(made.edges)
        assert not len(leftover), "calls are issued in an order that their data allow"
        calls = np.array(list(needs.of), dtype=np.int64)
        was = lanes.beside(calls, *captured)
        now = lanes.beside(calls, lanes.before(made.edges, order), lanes.after(made.edges, order))
        if not (now > was).any():
            raise AnnotateError(
                "no communication can run beside more compute than it does: what waits for each of "
                f"the {len(calls)} calls needs its data"
            )
        told = made.job.measurement.untimed(_note(needs, was, now))
        return replace(made, job=msgspec.structs.replace(made.job, measurement=told))


def _check(graph: Graph) -> None:
    """Refuse graphs in which nothing can overlap, or data cannot be followed.

    Raises:
        AnnotateError: it is one.
    """
    compute, communicates = compute_mask(graph).any(), graph.communication.any()
    if not compute or not communicates:
        lacking = "communication" if compute else "compute"
        raise AnnotateError(f"the graph has no {lacking}, so there is nothing to overlap")
    if graph.job.measurement.depths is not None:
        raise AnnotateError(
            "the trace was extrapolated, so its copied layers name the tensors of others; for "
            "--overlap on capture all layers"
        )


def _note(needs: Needs, was: I64, now: I64) -> str:
    """Say how many calls moved, and how many did not."""
    moved = now > was
    unread = ~moved & np.isin(list(needs.of), list(needs.unread))
    rest = ~moved & ~unread
    parts = (
        (int(moved.sum()), "beside more compute than captured"),
        (int((rest & (now > 0)).sum()), "beside it already as far as their data allow"),
        (int((rest & (now == 0)).sum()), "exposed, as what follows needs their data"),
        (int(unread.sum()), "awaited as captured, as nothing in the step reads what they write"),
        (len(needs.fixed), "as captured, as they tell no tensors"),
    )
    told = "; ".join(f"{count} {what}" for count, what in parts if count)
    return (
        f"Overlap on: of {len(needs.of) + len(needs.fixed)} calls {told}. Kernels beside them last "
        "as captured (beside communication they take longer), and memory is as captured."
    )
