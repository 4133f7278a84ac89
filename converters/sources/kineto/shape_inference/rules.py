"""The rule of each operator (`results_of`), and the rules of operators over lists of tensors."""

from collections.abc import Callable

from onerank.converters.sources.kineto.shape_inference import elementwise, matmul, rowwise
from onerank.converters.sources.kineto.shape_inference.inputs import Inputs, Result, Tensor


def _cat(inputs: Inputs) -> tuple[Result, ...] | None:
    # torch.cat ignores an empty 1-d tensor among tensors of any rank.
    tensors = [tensor for tensor in inputs.tensors(0) if tensor.shape != (0,)]
    dim = inputs.value(1)
    if not tensors or type(dim) is not int:
        return None
    first = tensors[0].shape
    if not first or not -len(first) <= dim < len(first):
        return None
    place = dim % len(first)
    size = sum(tensor.shape[place] for tensor in tensors if len(tensor.shape) == len(first))
    return (Tensor((*first[:place], size, *first[place + 1 :]), tensors[0].type),)


def _scalar_per_tensor(inputs: Inputs) -> tuple[Result, ...] | None:
    return tuple(Tensor((), tensor.type) for tensor in inputs.tensors(0)) or None


def results_like_first_list(inputs: Inputs) -> tuple[Result, ...] | None:
    """Return results with the shapes and types of the first list's tensors."""
    return inputs.tensors(0) or None


def in_place_result(inputs: Inputs) -> tuple[Result, ...] | None:
    """Return the result of an in-place operator: its first tensor, nothing for a list."""
    tensor = inputs.tensor(0)
    if tensor is None:
        return () if inputs.tensors(0) else None
    return (tensor,)


RULES = {"cat": _cat, **dict.fromkeys(("_foreach_norm", "_foreach_max"), _scalar_per_tensor)}

_RULES: dict[str, Callable[[Inputs], tuple[Result, ...] | None]] = {
    **elementwise.RULES,
    **rowwise.RULES,
    **matmul.RULES,
    **RULES,
}

_ATEN = "aten::"

_COMPILED = "triton_"


def results_of(name: str, inputs: Inputs) -> tuple[Result, ...] | None:
    """Return the results of a call; None without a rule.

    Kernels that torch.compile generated write into their arguments and return nothing.
    """
    if name.startswith(_COMPILED):
        return ()
    if not name.startswith(_ATEN):
        return None
    operator = name.removeprefix(_ATEN).partition(".")[0]
    rule = _RULES.get(operator)
    if rule is None and operator.endswith("_") and not operator.endswith("__"):
        rule = in_place_result
    elif rule is None and operator.startswith("_foreach_"):
        rule = results_like_first_list
    return rule(inputs) if rule else None
