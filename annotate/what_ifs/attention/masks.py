"""What masks of eager attention tell: whether queries see later keys, by where they are from."""

from collections.abc import Iterable

from onerank.annotate.what_ifs.attention.eager import Sizes
from onerank.annotate.what_ifs.attention.flow import OUTSIDE, Call, Flow, Operand

_COMPARES = frozenset("le lt ge gt".split())
_TRIANGLES = frozenset("tril triu tril_ triu_".split())


def masked(flow: Flow, masks: list[Operand], sizes: Sizes) -> tuple[str, bool]:
    """Return how a mask is known to be causal, and whether there is one that is not."""
    causal, padded = "", False
    for mask in masks:
        shape = mask.tensor.shape
        if len(shape) < 2 or shape[-2:] != (sizes.rows, sizes.keys):
            padded = True
            continue
        if any(_compares(one) for one in origins(flow, (mask,))):
            causal = "made"
        elif _is_of_all(flow, mask):
            causal = causal or "square"
        else:
            padded = True
    return causal, padded


def _is_of_all(flow: Flow, mask: Operand) -> bool:
    """Return whether a square mask, the same for all sequences, was there before the step."""
    shape = mask.tensor.shape
    if shape[-1] != shape[-2] or any(size > 1 for size in shape[:-2]):
        return False
    at = flow.contents[mask.content].maker
    if at == OUTSIDE:
        return True
    return any(_is_of_all(flow, one) for one in flow.calls[at].reads if len(one.tensor.shape) > 1)


def _compares(call: Call) -> bool:
    """Return whether a call compares the positions of rows and keys, or cuts off a triangle."""
    if call.op in _TRIANGLES:
        return True
    several = [one for one in call.reads if one.tensor.numel > 1]
    return call.op in _COMPARES and len(several) > 1


def origins(flow: Flow, operands: Iterable[Operand], since: int = OUTSIDE) -> list[Call]:
    """Return the calls that tensors come from, those later than one."""
    found, seen = list[Call](), set[int]()
    waiting = [one.content for one in operands]
    while waiting:
        content = waiting.pop()
        at = flow.contents[content].maker
        if content in seen or at <= since:
            continue
        seen.add(content)
        found.append(flow.calls[at])
        waiting += [one.content for one in flow.calls[at].reads]
    return found
