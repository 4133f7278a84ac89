"""How the operands of one call grow with sequence and batch, and so its results."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from onerank.annotate.what_ifs.sizes.dimensions import Powers, readings
from onerank.annotate.what_ifs.sizes.operand_rules import CONVOLUTIONS
from onerank.annotate.what_ifs.sizes.results import powers_of_results
from onerank.annotate.what_ifs.sizes.sizing import CONSTANT, SEQ, Power, Sizing, numel, total
from onerank.annotate.work.classes import OpClass, op_class
from onerank.annotate.work.shapes import Call, Operand, Tensor

Shape = tuple[int, ...]
_UNLIKE = 50.0
_KEPT = 0.4  # that a part of a tensor grows as the whole
_SQUARED_BATCH = 5.0  # of a result: both operands' batch, unsummed

Growth = Power | None
"""How a tensor's number of elements grows; None: nobody has told yet."""


@dataclass(frozen=True, slots=True)
class Read:
    """The powers of every dimension of a call's tensors, lists laid out flat.

    Attributes:
        inputs: of each input tensor.
        outputs: of each result.
        ruled: whether a rule told the results, not their sizes alone.
    """

    inputs: tuple[Powers, ...]
    outputs: tuple[Powers, ...]
    ruled: bool


_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot", "_int_mm", "_scaled_mm"), (0, 1)),
    **dict.fromkeys(
        ("addmm", "addmm_", "baddbmm", "baddbmm_", "addmv", "_addmm_activation"), (1, 2)
    ),
}
_GROUPED = frozenset({"_grouped_mm", "_scaled_grouped_mm"})
_ROWS: dict[tuple[int, ...], tuple[int | None, int | None]] = {
    (2, 3): (0, None),
    (3, 2): (None, 1),
    (2, 2): (1, 0),
}
"""Ranks of a grouped product's operands -> their axes of rows, which each expert has some of."""
_RESULT_ROWS: dict[tuple[int, ...], int] = {(2, 3): 0, (3, 2): 1}
MASKS = frozenset({"triu", "triu_", "tril", "tril_"})
BROADCASTS = (OpClass.ELEMENTWISE, OpClass.COPY, OpClass.RANDOM, OpClass.MEMSET)


def read(call: Call, grows: Sequence[Growth], sizing: Sizing) -> Read:
    """Return the likeliest reading of a call that agrees with how its inputs are known to grow.

    Args:
        call: shapes, types and, for `NEED_VALUES`, values.
        grows: of each input tensor, lists laid out flat.
        sizing: captured and new sizes.
    """
    tensors = flat(call.inputs)
    results = [one.shape for one in flat(call.outputs)]
    if call.op in _PRODUCTS or call.op == "linear":
        made = _product(call, tensors, grows, sizing)
        if made is not None:
            return made
    if call.op in _GROUPED:
        made = _grouped(call, tensors, grows, sizing)
        if made is not None:
            return made
    if call.op in MASKS and grows[0] is None:
        mask = tuple(SEQ if n in sizing.lengths else CONSTANT for n in tensors[0].shape)
        return Read((mask,), (mask,) * len(results), ruled=True)
    inputs = _together(call, tensors, grows, sizing)
    if call.op in CONVOLUTIONS or call.op == "convolution_backward":
        inputs = [_of_channels(*one, sizing) for one in zip(tensors, inputs, grows, strict=True)]
    outputs, ruled = powers_of_results(call, tensors, inputs, results)
    return Read(tuple(inputs), tuple(outputs), ruled)


def flat(operands: Sequence[Operand]) -> list[Tensor]:
    """Return the tensors of all arguments, lists laid out."""
    return [tensor for operand in operands for tensor in operand or ()]


def likeliest(shape: Shape, sizing: Sizing, grows: Growth) -> Powers:
    """Return the cheapest reading; of a tensor that cannot grow as told, the cheapest of any."""
    found = readings(shape, sizing, grows) or readings(shape, sizing, None)
    return found[0][1]


def part(shape: Shape, sizing: Sizing, grows: Power) -> Powers:
    """Return the cheapest reading of a part of a tensor, which grows as it does if it may."""

    def price(one: tuple[float, Powers]) -> float:
        kept = total(one[1])
        return one[0] - _KEPT * (min(kept[0], grows[0]) + min(kept[1], grows[1]))

    return min(readings(shape, sizing, None), key=price)[1]


def _product(
    call: Call, tensors: list[Tensor], grows: Sequence[Growth], sizing: Sizing
) -> Read | None:
    """Read `[..., m, k] x [..., k, n]`: the inner sizes are one, and so are the batches."""
    at = _PRODUCTS.get(call.op, (0, 1))
    left, right = call.tensor(at[0]), call.tensor(at[1])
    if left is None or right is None or not left.shape or not right.shape:
        return None
    place = _first_of(call)
    first, second = place[at[0]], place[at[1]]
    inner = -1 if call.op == "linear" or len(right.shape) == 1 else -2
    best: tuple[float, Powers, Powers] | None = None
    for (a, one), (b, two) in product(
        _readings(left.shape, sizing, grows[first]), _readings(right.shape, sizing, grows[second])
    ):
        if one[-1] != two[inner]:
            continue
        outer = [*one[:-1], *(p for i, p in enumerate(two) if i - len(two) != inner)]
        batches = zip(reversed(one[:-2]), reversed(two[:-2]), strict=False)
        unlike = sum(x != y for x, y in batches) * _UNLIKE
        doubled = sum(p[1] for p in outer) - sum(p[1] for p in two[:-2]) > 1
        cost = a + b + unlike + _SQUARED_BATCH * doubled
        if best is None or cost < best[0]:
            best = cost, one, two
    if best is None:
        return None
    _, one, two = best
    columns = two[-1:] if inner == -2 else two[:-1] if call.op == "linear" else ()
    batch = one[:-2] if len(one) >= len(two) else two[:-2]
    rows = one[:-1] if call.op == "linear" else (*batch, *one[-2:-1])
    out = (*rows, *columns)
    powers: list[Powers] = []
    for index, tensor in enumerate(tensors):
        known = {first: one, second: two}.get(index)
        powers.append(known or _aligned(tensor.shape, out, sizing, grows[index]))
    results = [out if len(t.shape) == len(out) else likeliest(t.shape, sizing, total(out))
               for t in flat(call.outputs)]  # fmt: skip
    return Read(tuple(powers), tuple(results), ruled=True)


def _grouped(
    call: Call, tensors: list[Tensor], grows: Sequence[Growth], sizing: Sizing
) -> Read | None:
    """Read `[rows, k] x [experts, k, n]`, or of a weight's gradient `[k, rows] x [rows, n]`.

    Rows are tokens, the rest is of the weights; so are scales and where each expert's rows end.
    """
    ranks = tuple(len(tensor.shape) for tensor in tensors[:2])
    at = _ROWS.get(ranks)
    if at is None:
        return None
    rows = [(place, axis) for place, axis in enumerate(at) if axis is not None]
    told = [grows[place] for place, _ in rows]
    place, axis = rows[0]
    size = tensors[place].shape[axis]
    power = (
        next((one for one in told if one is not None), None) or likeliest((size,), sizing, None)[0]
    )
    axes = [*at, *(None for _ in tensors[2:])]
    inputs = tuple(
        tuple(power if axis == own else CONSTANT for axis in range(len(tensor.shape)))
        for tensor, own in zip(tensors, axes, strict=True)
    )
    grown = _RESULT_ROWS.get(ranks)
    results = tuple(
        tuple(power if axis == grown else CONSTANT for axis in range(len(one.shape)))
        for one in flat(call.outputs)
    )
    return Read(inputs, results, ruled=True)


def _together(
    call: Call, tensors: list[Tensor], grows: Sequence[Growth], sizing: Sizing
) -> list[Powers]:
    """Read the inputs; those of an operator that broadcasts agree where they meet."""
    if not tensors:
        return []
    if op_class(f"aten::{call.op}") not in BROADCASTS or len(tensors) == 1 or _is_list(call):
        return [likeliest(t.shape, sizing, g) for t, g in zip(tensors, grows, strict=True)]
    told = [index for index, growth in enumerate(grows) if growth is not None]
    main = max(
        told or range(len(tensors)), key=lambda i: (len(tensors[i].shape), numel(tensors[i].shape))
    )
    best: tuple[float, list[Powers]] | None = None
    for price_of_main, own in _readings(tensors[main].shape, sizing, grows[main]):
        chosen: list[Powers] = []
        cost = price_of_main
        for index, tensor in enumerate(tensors):
            if index == main:
                chosen.append(own)
                continue
            options = [
                (price + _UNLIKE * _clashes(tensor.shape, powers, tensors[main].shape, own), powers)
                for price, powers in _readings(tensor.shape, sizing, grows[index])
            ]
            price, powers = min(options, key=lambda one: one[0])
            chosen.append(powers)
            cost += price
        if best is None or cost < best[0]:
            best = cost, chosen
    assert best is not None, "a tensor has at least one reading"
    return best[1]


def _of_channels(tensor: Tensor, powers: Powers, grows: Growth, sizing: Sizing) -> Powers:
    """Return the reading of an operand of a convolution: its channels, [n, channels, ...], stay."""
    found = (one for _, one in _readings(tensor.shape, sizing, grows) if one[1:2] == (CONSTANT,))
    return next(found, powers)


def _readings(shape: Shape, sizing: Sizing, grows: Growth) -> tuple[tuple[float, Powers], ...]:
    return readings(shape, sizing, grows) or readings(shape, sizing, None)


def _clashes(shape: Shape, powers: Powers, other: Shape, theirs: Powers) -> float:
    """Return in how many dimensions two tensors that broadcast are as long and grow otherwise.

    A dimension of one of either may broadcast, so that it hardly counts.
    """
    pairs = zip(reversed(tuple(zip(shape, powers, strict=True))),
                reversed(tuple(zip(other, theirs, strict=True))), strict=False)  # fmt: skip
    return sum((1 if a > 1 else 1e-3) for (a, x), (b, y) in pairs if a == b and x != y)


def _aligned(shape: Shape, out: Powers, sizing: Sizing, grows: Growth) -> Powers:
    """Return the reading of an operand that is added to a result: a bias, or all of it."""
    want = out[len(out) - len(shape) :]
    options = _readings(shape, sizing, grows)
    return min(options, key=lambda one: sum(a != b for a, b in zip(one[1], want, strict=False)))[1]


def _is_list(call: Call) -> bool:
    return any(operand is not None and len(operand) > 1 for operand in call.inputs)


def _first_of(call: Call) -> list[int]:
    """Return where each argument's first tensor is among all laid out flat."""
    places, count = list[int](), 0
    for operand in call.inputs:
        places.append(count)
        count += len(operand or ())
    return places
