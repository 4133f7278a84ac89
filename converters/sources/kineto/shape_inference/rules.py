"""The rule of each operator (`results_of`), and the rules of operators over lists of tensors."""

from collections.abc import Callable

from onerank.converters.sources.kineto.shape_inference import elementwise as pointwise
from onerank.converters.sources.kineto.shape_inference import matmul as products
from onerank.converters.sources.kineto.shape_inference import rowwise as rows
from onerank.converters.sources.kineto.shape_inference.inputs import Inputs, Result, Tensor


def _cat(given: Inputs) -> tuple[Result, ...] | None:
    tensors = [one for one in given.tensors(0) if one.shape != (0,)]  # empty ones of any rank fit
    dim = given.value(1)
    if not tensors or type(dim) is not int:
        return None
    first = tensors[0].shape
    if not first or not -len(first) <= dim < len(first):
        return None
    place = dim % len(first)
    size = sum(one.shape[place] for one in tensors if len(one.shape) == len(first))
    return (Tensor((*first[:place], size, *first[place + 1 :]), tensors[0].type),)


def _one_number_each(given: Inputs) -> tuple[Result, ...] | None:
    return tuple(Tensor((), one.type) for one in given.tensors(0)) or None


def each_like_the_first(given: Inputs) -> tuple[Result, ...] | None:
    """Return results like the tensors of the first list."""
    return given.tensors(0) or None


def changed(given: Inputs) -> tuple[Result, ...] | None:
    """Return what an operator in place gives back: its first tensor, nothing of a list."""
    own = given.tensor(0)
    if own is None:
        return () if given.tensors(0) else None
    return (own,)


RULES = {"cat": _cat, **dict.fromkeys(("_foreach_norm", "_foreach_max"), _one_number_each)}

_RULES: dict[str, Callable[[Inputs], tuple[Result, ...] | None]] = {
    **pointwise.RULES,
    **rows.RULES,
    **products.RULES,
    **RULES,
}

_ATEN = "aten::"

_COMPILED = "triton_"


def results_of(name: str, given: Inputs) -> tuple[Result, ...] | None:
    """Return the results of a call; None without a rule.

    Kernels that torch.compile generated write into their arguments and return nothing.
    """
    if name.startswith(_COMPILED):
        return ()
    if not name.startswith(_ATEN):
        return None
    own = name.removeprefix(_ATEN).partition(".")[0]
    rule = _RULES.get(own)
    if rule is None and own.endswith("_") and not own.endswith("__"):
        rule = changed
    elif rule is None and own.startswith("_foreach_"):
        rule = each_like_the_first
    return rule(given) if rule else None
