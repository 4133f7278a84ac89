"""Which optimizers update element by element, so that a slice of a parameter does for itself.

Others need the whole matrix (its rows, columns, norm or singular values), or all parameters at
once. Libraries have classes of their own by these names, so optimizers are known by name.
"""

import torch
from torch.optim import Optimizer

from onerank.capture.live import live

_WHOLE = frozenset("adafactor came lamb lars lbfgs muon shampoo soap sparseadam".split())


def elementwise(optimizer: Optimizer) -> bool:
    """Whether neither its class nor one that it is made from is known to need whole parameters."""
    return not any(kind.__name__.lower() in _WHOLE for kind in type(optimizer).__mro__)


def note_of_slices() -> str | None:
    """Return what to tell of optimizers that step on slices of --tp, None where all is well."""
    kinds = {
        type(one).__name__
        for one in live(Optimizer)
        if not elementwise(one) and _steps_on_matrices(one)
    }
    if not kinds:
        return None
    return (
        f"{', '.join(sorted(kinds))} does not update element by element: each rank of --tp does it "
        "for its slices alone, and communicates nothing"
    )


def _steps_on_matrices(optimizer: Optimizer) -> bool:
    groups = vars(optimizer).get("param_groups", [])  # a wrapper shows another's
    return any(isinstance(p, torch.Tensor) and p.ndim > 1 for g in groups for p in g["params"])
