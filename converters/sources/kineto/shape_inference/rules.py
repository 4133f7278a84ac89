"""The inference rule of each operator."""

from collections.abc import Callable

from onerank.converters.sources.kineto.shape_inference import elementwise as pointwise
from onerank.converters.sources.kineto.shape_inference import matmul as products
from onerank.converters.sources.kineto.shape_inference import rowwise as rows
from onerank.converters.sources.kineto.shape_inference import tensor_lists as lists
from onerank.converters.sources.kineto.shape_inference.inputs import Inputs, Result

_RULES: dict[str, Callable[[Inputs], tuple[Result, ...] | None]] = {
    **pointwise.RULES,
    **rows.RULES,
    **products.RULES,
    **lists.RULES,
}
_ATEN = "aten::"
_COMPILED = "triton_"


def results_of(name: str, given: Inputs) -> tuple[Result, ...] | None:
    """Return the results of a call; None where no rule tells them.

    Kernels that torch.compile generated write into their arguments and return nothing.
    """
    if name.startswith(_COMPILED):
        return ()
    if not name.startswith(_ATEN):
        return None
    own = name.removeprefix(_ATEN).partition(".")[0]
    rule = _RULES.get(own)
    if rule is None and own.endswith("_") and not own.endswith("__"):
        rule = lists.changed
    elif rule is None and own.startswith("_foreach_"):
        rule = lists.each_like_the_first
    return rule(given) if rule else None
