"""Re-cost a graph for a named GPU by a named model."""

from onerank.annotate.gpu import Gpu, load_gpu
from onerank.annotate.model import MODELS
from onerank.annotate.retarget import retarget
from onerank.annotate.what_if import AS_USUAL, WhatIf
from onerank.ir import Graph
from onerank.ir.errors import AnnotateError


def recost(
    graph: Graph,
    target: str | Gpu,
    *,
    model: str = "auto",
    source: str | None = None,
    what_if: WhatIf = AS_USUAL,
) -> Graph:
    """Return `graph` with the duration of every compute node predicted for another GPU.

    Args:
        graph: a captured or converted graph. Of a CPU capture, every model makes the GPU graph
            it stands for, costed from the target's datasheet.
        target: a GPU description, its name or its path.
        model: cost model, one of `MODELS`.
        source: GPU the graph was measured on, as `target`; None: by the name of its device.
        what_if: another data type or attention kernel; by default the target's usual ones.

    Raises:
        TargetError: target or source is unknown or its description malformed.
        AnnotateError: the model is unknown, the graph was re-costed before, its device is
            not known, or what `what_if` asks for cannot be.
    """
    if model not in MODELS:
        raise AnnotateError(f'unknown cost model "{model}"; known are {", ".join(MODELS)}')
    gpu = load_gpu(target) if isinstance(target, str) else target
    return retarget(graph, gpu, MODELS[model], source, what_if)
