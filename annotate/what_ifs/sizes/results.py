"""How the results of one call grow, given how its operands do."""

from collections.abc import Sequence

from onerank.annotate.what_ifs.sizes.dimensions import Powers
from onerank.annotate.what_ifs.sizes.operand_rules import RULES
from onerank.annotate.what_ifs.sizes.sizing import CONSTANT, Power
from onerank.annotate.work.shapes import Call, Tensor

Shape = tuple[int, ...]


def powers_of_results(
    call: Call, tensors: list[Tensor], inputs: list[Powers], results: Sequence[Shape]
) -> tuple[list[Powers], bool]:
    """Return the powers of each result, and whether a rule told them, not their sizes alone.

    Args:
        call: what was called.
        tensors: its input tensors, lists laid out flat.
        inputs: the powers of each.
        results: the shape of each result.
    """
    by_place = _by_place(call, inputs)
    rule = RULES.get(call.op)
    outputs: list[Powers] = []
    ruled = True
    for place, shape in enumerate(results):
        known = rule(call, by_place, place, shape) if rule else None
        if known is None or len(known) != len(shape):
            known = _alike(tensors, inputs, shape) or _broadcast(tensors, inputs, shape)
        if known is None:
            known, ruled = _by_size(tensors, inputs, shape), not shape and ruled
        outputs.append(known)
    return outputs, ruled


def _by_place(call: Call, inputs: Sequence[Powers]) -> list[tuple[Powers, ...]]:
    """Return the powers by argument."""
    made, start = list[tuple[Powers, ...]](), 0
    for operand in call.inputs:
        count = len(operand or ())
        made.append(tuple(inputs[start : start + count]))
        start += count
    return made


def _alike(tensors: list[Tensor], inputs: list[Powers], shape: Shape) -> Powers | None:
    """Return the powers of the first input of the same shape."""
    return next((p for t, p in zip(tensors, inputs, strict=True) if t.shape == shape), None)


def _broadcast(tensors: list[Tensor], inputs: list[Powers], shape: Shape) -> Powers | None:
    """Return the powers of a result that the inputs are broadcast to, or None."""
    made: list[Power] = [CONSTANT] * len(shape)
    reached: list[bool] = [size == 1 for size in shape]
    for tensor, powers in zip(tensors, inputs, strict=True):
        offset = len(shape) - len(tensor.shape)
        if offset < 0:
            return None
        for place, (size, power) in enumerate(zip(tensor.shape, powers, strict=True), offset):
            if size == shape[place]:
                reached[place] = True
                made[place] = made[place] if made[place] != CONSTANT else power
            elif size != 1:
                return None
    return tuple(made) if all(reached) else None


def _by_size(tensors: list[Tensor], inputs: list[Powers], shape: Shape) -> Powers:
    """Return for each size the powers of the first input's dimension of that size, each once."""
    free = [
        pair for t, p in zip(tensors, inputs, strict=True) for pair in zip(t.shape, p, strict=True)
    ]
    made: list[Power] = []
    for size in shape:
        found = next((pair for pair in free if pair[0] == size), None)
        if found is not None:
            free.remove(found)
        made.append(found[1] if found else CONSTANT)
    return tuple(made)
