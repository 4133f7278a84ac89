"""Re-cost a graph for a target GPU by a named model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import find_gpu, load_gpu
from onerank.annotate.models.attention_kernels import FUSED
from onerank.annotate.models.cost_model import MODELS, CostModel
from onerank.annotate.op_costs.node_costs import characters, compute_mask
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.passes.attention.fuse import FusedAttention, has_eager_attention
from onerank.annotate.passes.attention.unfuse import EagerAttention
from onerank.annotate.passes.fuse_kernels import Fuse
from onerank.annotate.passes.nvlink_active import AwakeLinks
from onerank.annotate.passes.overlap import CHOICES
from onerank.annotate.passes.overlap.maximize import Overlap
from onerank.annotate.passes.overlap.serialize import NoOverlap
from onerank.annotate.passes.pass_config import AS_USUAL, WhatIf
from onerank.annotate.passes.swap_kernels import check_resolves
from onerank.annotate.recost import from_counts as counted
from onerank.annotate.recost import from_cpu as cpu_capture
from onerank.annotate.recost import from_gpu as measured
from onerank.annotate.recost.predict import rows_of
from onerank.ir import UNKNOWN, Evidence, Graph
from onerank.ir.arrays import among
from onerank.ir.errors import AnnotateError
from onerank.ir.workload_counts import is_counted

_PREDICTED = (
    Evidence.DATASHEET,
    Evidence.SCALED,
    Evidence.CALIBRATED,
    Evidence.INTERPOLATED,
    Evidence.LOOKED_UP,
)


def check_capture_on_cpu(source: str | None) -> None:
    """Refuse what only a trace of GPU kernels has.

    Raises:
        AnnotateError: a GPU that measured it is named.
    """
    if source is not None:
        raise AnnotateError(
            f"the trace was captured on a CPU, so no GPU such as {source} has measured it; "
            "leave `--source` out"
        )


def check_measured(graph: Graph) -> None:
    """Refuse a graph whose durations are predictions: errors would add up unseen.

    Raises:
        AnnotateError: some are.
    """
    compute = compute_mask(graph)
    predicted = graph.nodes.evidence[compute]
    resized = (predicted == Evidence.EXTRAPOLATED) & (graph.nodes.low_ns[compute] != UNKNOWN)
    count = int((among(predicted, _PREDICTED) | resized).sum())
    if count:
        last = graph.job.annotations[-1] if graph.job.annotations else None
        made = f", predicted for {last.target} by the {last.model} model" if last else ""
        raise AnnotateError(
            f"{count} of {len(predicted)} compute nodes are not measured{made}; start from the "
            "measured trace, so that one prediction is not built on another"
        )


def source_gpu(graph: Graph, source: str | None) -> Gpu:
    """Return the GPU a graph was measured on: `source`, else by the name of its device.

    Raises:
        AnnotateError: the device is not known.
        TargetError: `source` names no GPU description.
    """
    if source is not None:
        return load_gpu(source)
    name = graph.job.device.name
    found = find_gpu(name) if name else None
    if found is None:
        measured = (
            f'on "{name}", which is no GPU known here' if name else "on a device it does not name"
        )
        raise AnnotateError(
            f"the trace was measured {measured}; give the GPU it was measured on with `--source` "
            "(a name, or the path of a description)"
        )
    return found


def recost(
    graph: Graph,
    target: str | Gpu,
    *,
    model: str = "auto",
    source: str | None = None,
    what_if: WhatIf = AS_USUAL,
    databases: Sequence[str | Path] = (),
) -> Graph:
    """Return `graph` with the duration of every compute node predicted for another GPU.

    Args:
        graph: a captured or converted graph. Of a CPU capture, every model makes the GPU graph
            it stands for, costed from shapes and the target's description alone.
        target: a GPU description, its name or its path.
        model: cost model, one of `MODELS`.
        source: GPU the graph was measured on, as `target`; None: by the name of its device.
        what_if: another data type, attention kernel, sequence length, micro-batch, fused kernels,
            other overlap or awake links; they go together. By default the target's usual kernels.
        databases: kernel databases of the target beside the shipped ones; for "auto" alone.

    Raises:
        TargetError: target or source is unknown or its description malformed.
        AnnotateError: the model is unknown, the graph was re-costed before, its device is
            not known, what `what_if` asks for cannot be, or a database is of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a database cannot be read.
    """
    if model not in MODELS:
        raise AnnotateError(f'unknown cost model "{model}"; known are {", ".join(MODELS)}')
    if what_if.overlap not in CHOICES:
        known = ", ".join(CHOICES)
        raise AnnotateError(f'overlap "{what_if.overlap}" is not known; known are {known}')
    gpu = load_gpu(target) if isinstance(target, str) else target
    apart = NoOverlap() if what_if.overlap == "off" else None
    if apart and not graph.job.device.runs_operators:
        graph = apart.apply(graph, gpu)  # its kernels' times alone are those of the source
        apart = None
    fused = _fused(graph, MODELS[model], what_if)
    if fused and graph.job.device.runs_operators:
        graph, fused = fused.apply(graph, gpu), None
    made = _recosted(graph, gpu, MODELS[model], source, _of_captured(graph, what_if), databases)
    if what_if.overlap == "on":
        made = Overlap().apply(made, gpu)  # while each kernel tells which tensors it uses
    if fused:
        look_up = rows_of(graph, gpu, MODELS[model], databases)
        made = _without_interval(replace(fused, look_up=look_up).apply(made, gpu))
    if what_if.attention == "eager":
        made = _without_interval(EagerAttention(MODELS[model].alone).apply(made, gpu))
    if what_if.fuse is not None:
        made = _without_interval(Fuse(what_if.fuse).apply(made, gpu))
    if what_if.links_awake:
        made = AwakeLinks().apply(made, gpu)
    return apart.apply(made, gpu) if apart else made


def _fused(graph: Graph, model: CostModel, what_if: WhatIf) -> FusedAttention | None:
    """Return what makes a fused kernel of eager attention, None where that is not asked for."""
    asked = what_if.attention
    if asked not in FUSED or (asked != "fused" and not has_eager_attention(graph)):
        return None
    if asked != "fused":
        check_resolves(model, asked)
    return FusedAttention(asked, model.alone)


def _of_captured(graph: Graph, what_if: WhatIf) -> WhatIf:
    """Return what is asked of fused attention that a graph has."""
    asked = what_if.attention
    if asked not in FUSED:
        return what_if
    if asked != "fused" and characters(graph).is_class(OpClass.ATTENTION).any():
        return what_if
    return replace(what_if, attention="usual")


def _recosted(  # noqa: PLR0917
    graph: Graph,
    target: Gpu,
    model: CostModel,
    source: str | None,
    what_if: WhatIf,
    databases: Sequence[str | Path],
) -> Graph:
    """Return the graph by the sort of its times: of operators, counted, or measured on a GPU."""
    check_measured(graph)
    if graph.job.device.runs_operators:
        check_capture_on_cpu(source)
        return cpu_capture.to_gpu(graph, target, model, what_if, databases=databases)
    if is_counted(graph):
        if source is not None or what_if != AS_USUAL or databases:
            raise AnnotateError(
                "the trace's nodes have counts of work, no times and no shapes, so there is "
                "nothing to scale or to change; give `--target` alone"
            )
        return counted.to_gpu(graph, target)
    gpus = source_gpu(graph, source), target
    return measured.to_gpu(graph, gpus, model, what_if, databases=databases)


def _without_interval(graph: Graph) -> Graph:
    """Return the graph without the interval of the step, which held for other kernels."""
    *before, last = graph.job.annotations
    details = {name: value for name, value in last.details.items() if name != "interval"}
    last = msgspec.structs.replace(last, details=details)
    return replace(graph, job=msgspec.structs.replace(graph.job, annotations=(*before, last)))
