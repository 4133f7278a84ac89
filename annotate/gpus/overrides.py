"""A GPU with figures of its description overridden."""

from collections.abc import Mapping

import msgspec

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import check_gpu
from onerank.annotate.gpus.spec_schema import (
    INSTEAD_OF,
    RANGES,
    RISES_WITH,
    Figure,
    measured_of,
    refuse_unknown,
)


def with_figures(gpu: Gpu, values: Mapping[str, float]) -> Gpu:
    """Return a GPU that differs in some figures, and tells so in its name.

    What was measured on it stays the same part of a peak that changes; of a fraction that is set
    nothing measured takes the place. Figures set to what they are change nothing.

    Raises:
        TargetError: there is no such figure, or its value is outside what can be.
    """
    refuse_unknown(dict(values), RANGES, "figure")
    if not any(_differs(gpu, name, value) for name, value in values.items()):
        return gpu
    changed = {n: Figure(float(value), "set", "estimated") for n, value in values.items()}
    told = ", ".join(f"{name}={value:g}" for name, value in values.items())
    kept = {
        name: figure
        for name, figure in gpu.figures.items()
        if not changed.keys() & INSTEAD_OF.get(name, ())
    }
    for measured, peak in (*measured_of(gpu.figures), *RISES_WITH.items()):
        if peak in changed and peak in kept and measured in kept:
            factor = changed[peak].value / kept[peak].value
            changed.setdefault(measured, Figure(kept[measured].value * factor, "set", "estimated"))
    made = msgspec.structs.replace(
        gpu,
        name=f"{gpu.name} ({told})",
        aliases=(),
        sources={**gpu.sources, "set": "set by the user: what if"},
        figures={**kept, **changed},
        before=gpu.as_described,
    )
    check_gpu(made)
    return made


def _differs(gpu: Gpu, name: str, value: float) -> bool:
    """Return whether a GPU is another one with this value: nothing measured counts instead yet."""
    measured = any(name in INSTEAD_OF.get(one, ()) for one in gpu.figures)
    return measured or name not in gpu.figures or gpu.figures[name].value != value
