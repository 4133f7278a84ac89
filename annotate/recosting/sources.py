"""What measured a graph: which GPU, or none; and that it is a measurement."""

from onerank.annotate.gpus.descriptions import find_gpu, load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.work.characters import compute_mask
from onerank.ir import UNKNOWN, Evidence, Graph
from onerank.ir.arrays import among
from onerank.ir.errors import AnnotateError

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
