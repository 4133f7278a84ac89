"""Update the job of a re-costed graph: counts, new device, figures that no longer apply."""

from typing import Any

import msgspec

from onerank.annotate.gpus.datasheet_estimates import estimate_notes
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.memory.memory_report import non_allocator_bytes
from onerank.annotate.models.features import U8
from onerank.annotate.models.intervals import Interval
from onerank.annotate.models.prediction_terms import Rule, by_evidence
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.ir import UNKNOWN, Annotation, Device, Graph, Job


def details_of(
    graph: Graph, costs: OpCosts, rules: U8, interval: Interval | None = None
) -> dict[str, Any]:
    """Return the counts that an annotation keeps of the compute nodes in `costs`."""
    interval_entry: dict[str, Any] = {}
    if interval is not None:
        total_ns = int(graph.nodes.duration_ns[costs.index].sum())
        interval = interval.widened(total_ns, graph.job.measurement.input_spread)
        interval_entry = {"interval": [interval.p10_ns, interval.p90_ns]}
    return {
        **interval_entry,
        "nodes": len(costs.index),
        "evidence": by_evidence(graph, costs.index),
        "rules": {rule.label: int((rules == rule).sum()) for rule in Rule if (rules == rule).any()},
        "unknown_class": int(costs.is_class(OpClass.UNKNOWN).sum()),
        "no_formula": int((costs.flops == UNKNOWN).sum()),
    }


def target_notes(graph: Graph, target: Gpu) -> tuple[str, ...]:
    """Return sentences on estimated figures of the target, and on memory that it lacks."""
    return (*estimate_notes(target), *_memory_notes(graph, target))


def _memory_notes(graph: Graph, target: Gpu) -> tuple[str, ...]:
    peak, non_allocator = graph.job.measurement.peak_memory_bytes, non_allocator_bytes(graph)
    if peak + non_allocator <= target.memory_bytes:
        return ()
    return (
        f"The step would not fit: its peak is {peak} bytes, non-allocator memory takes about "
        f"{non_allocator}, and {target.name} has {target.memory_bytes}.",
    )


def job_for(
    job: Job, target: Gpu, annotation: Annotation, *notes: str, as_measured: bool = False
) -> Job:
    """Return the job on its new device.

    Unless everything is as measured, figures timed on the old device are dropped: steps, modules
    and GPU busy time.
    """
    measurement = job.measurement
    # Timed steps and modules of the old device would contradict the new durations.
    if as_measured:
        measurement = msgspec.structs.replace(measurement, notes=(*measurement.notes, *notes))
    else:
        measurement = measurement.untimed(*notes)
    return msgspec.structs.replace(
        job,
        device=Device("cuda", target.name, target.memory_bytes, target.sm_count),
        measurement=measurement,
        annotations=(*job.annotations, annotation),
    )
