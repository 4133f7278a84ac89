"""Scale host operators to a faster, slower or free host."""

from dataclasses import replace

import msgspec
import numpy as np

from onerank.ir import Evidence, Graph, Kind
from onerank.ir.errors import AnnotateError
from onerank.ir.replay import with_host_factor


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
    measurement = job.measurement.untimed(
        f"another host: {int(host.sum())} host operators {effect}"
    )
    annotations = job.annotations
    if annotations:
        details = {**annotations[-1].details, "host_factor": factor}
        annotation = msgspec.structs.replace(annotations[-1], details=details)
        annotations = (*annotations[:-1], annotation)
    job = msgspec.structs.replace(scaled.job, measurement=measurement, annotations=annotations)
    return replace(scaled, job=job)
