"""Re-cost a generated workload whose nodes have work counts and no times."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.models.roofline import MODEL
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.recost.bookkeeping import details_of, job_for
from onerank.ir import UNKNOWN, Annotation, Evidence, Graph
from onerank.ir.chakra.other_tools import MOST, counts_elements
from onerank.ir.dtypes import ITEM_BYTES
from onerank.ir.errors import AnnotateError

I64 = npt.NDArray[np.int64]

_DTYPES = ("bfloat16", "float16", "float32")


def recost_counts(graph: Graph, target: Gpu) -> Graph:
    """Return the graph with durations from work counts: launch floor and roofline.

    The rate is that of sustained bf16 GEMMs, or of the first of fp16 and fp32 that the target has,
    since a count names neither dtype nor operator. Sizes in elements are elements of that dtype,
    also for communication. Nodes without a count keep a duration of 0; there are no intervals.

    Raises:
        AnnotateError: the target's description has no such rate, or a size is out of range.
    """
    rates = {dtype: rate for dtype in _DTYPES if (rate := target.tensor_flops_per_s(dtype))}
    if not rates:
        raise AnnotateError(
            f"the description of {target.name} has no tensor rate in {', '.join(_DTYPES)}, and the "
            "trace's counts need one\n  add it to the description",
            code="recost-counts-no-rate",
        )
    # The first in the order of `_DTYPES`: training runs in bf16 where a GPU has units for it.
    dtype, rate = next(iter(rates.items()))
    elements = counts_elements(graph)
    if elements:
        graph = _in_bytes(graph, ITEM_BYTES[dtype])
    nodes = graph.nodes
    counted = graph.gpu_compute & (nodes.flops != UNKNOWN)
    compute = nodes.flops[counted] / rate
    memory = (nodes.bytes_read + nodes.bytes_written)[counted] / target.bandwidth_bytes_per_s
    columns = {"duration_ns": nodes.duration_ns.copy(), "evidence": nodes.evidence.copy()}
    predicted_ns = target.launch_floor_ns + 1e9 * np.maximum(compute, memory)
    columns["duration_ns"][counted] = np.rint(predicted_ns).astype(np.int64)
    columns["evidence"][counted] = Evidence.DATASHEET
    timed = graph.with_columns(**columns)

    costs = op_costs_of(graph)
    counted_columns = {name: getattr(nodes, name)[costs.index] for name in ("flops", "bytes_read")}
    costs = replace(costs, bytes_written=nodes.bytes_written[costs.index], **counted_columns)
    rules = np.full(len(costs.index), Rule.NO_DURATION, dtype=np.uint8)
    rules[counted[costs.index]] = np.where(compute > memory, Rule.COMPUTE, Rule.MEMORY)
    annotation = Annotation(target.name, MODEL, "no GPU", details_of(timed, costs, rules))
    unit = f"elements of {ITEM_BYTES[dtype]} bytes, also for communication"
    note = (
        f"No time was measured: {int(counted.sum())} durations are predicted for {target.name} "
        f"from the num_ops and tensor_size ({unit if elements else 'bytes'}) that the trace's "
        f"generator counted, at the rate of {dtype} products, the weakest evidence; there are no "
        "intervals."
    )
    return replace(timed, job=job_for(graph.job, target, annotation, note))


def _in_bytes(graph: Graph, item_bytes: int) -> Graph:
    """Return the graph with sizes converted from elements to bytes.

    Raises:
        AnnotateError: a size in bytes would not fit int64.
    """
    columns: dict[str, I64] = {}
    for name in ("bytes_read", "bytes_written", "comm_bytes"):
        size = getattr(graph.nodes, name)
        if size.max(initial=0) > MOST:
            node = graph.node(int(size.argmax()))
            raise AnnotateError(
                f"node {node.id} ({node.name!r}) has {name} of {size.max()} elements: expected "
                f"at most {MOST}",
                code="recost-counts-too-large",
            )
        columns[name] = np.where(size == UNKNOWN, UNKNOWN, item_bytes * size)
    return graph.with_columns(**columns)
