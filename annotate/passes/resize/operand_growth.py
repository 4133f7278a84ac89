"""How operands and results of a call grow with sequence and batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

from onerank.annotate.op_costs.convolutions import FORMULAS
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Call, Operand, Tensor
from onerank.annotate.passes.resize.dimensions import Powers, readings
from onerank.annotate.passes.resize.size_change import CONSTANT, SEQ, Power, Sizing, numel, total

Shape = tuple[int, ...]

NEED_VALUES = frozenset(
    "sum mean amax amin prod norm linalg_vector_norm std var any all argmax argmin logsumexp "
    "max min cat stack index_select".split()
)
"""Operators whose results depend on argument values."""

Rule = Callable[[Call, list[tuple[Powers, ...]], int, Shape], Powers | None]
"""(call, powers by argument, index of the result, its shape) -> its powers; None: no rule."""


def _reduced(call: Call, by_place: list[tuple[Powers, ...]], _: int, shape: Shape) -> Powers | None:
    """Rule for reductions: drop the reduced dimensions, or make them constant."""
    x, (powers, *_rest) = call.tensor(0), by_place[0] or ((),)
    if x is None or not shape:
        return ()
    lists = [cast("list[Any]", v) for v in call.values[1:] if isinstance(v, list)]
    over: list[Any] = lists[0] if lists else [v for v in call.values[1:2] if type(v) is int]
    gone = {int(axis) % len(x.shape) for axis in over if isinstance(axis, int)}
    if len(shape) == len(x.shape):
        pairs = enumerate(zip(shape, x.shape, powers, strict=True))
        return tuple(p if a == b and axis not in gone else CONSTANT for axis, (a, b, p) in pairs)
    kept = tuple(p for axis, p in enumerate(powers) if axis not in gone)
    return kept if len(kept) == len(shape) else None


def _joined(call: Call, by_place: list[tuple[Powers, ...]], _: int, shape: Shape) -> Powers | None:
    """Rule for `cat`: the largest power of any part per dimension."""
    parts = [p for p in by_place[0] if len(p) == len(shape)]
    return tuple(max(p[axis] for p in parts) for axis in range(len(shape))) if parts else None


def _stacked(call: Call, by_place: list[tuple[Powers, ...]], _: int, shape: Shape) -> Powers | None:
    axis = call.value(1)
    if not by_place[0] or not isinstance(axis, int):
        return None
    made = list(by_place[0][0])
    made.insert(axis % len(shape), CONSTANT)
    return tuple(made)


def _picked(_: Call, by_place: list[tuple[Powers, ...]], __: int, ___: Shape) -> Powers | None:
    """Rule for `embedding`: one row of the table per index."""
    return (*by_place[1][0], *by_place[0][0][1:]) if by_place[0] and by_place[1] else None


def _selected(call: Call, by_place: list[tuple[Powers, ...]], _: int, ___: Shape) -> Powers | None:
    """Rule for `index_select`: the axis has the powers of the indices."""
    axis = call.value(1)
    if not isinstance(axis, int) or len(by_place) < 3:
        return None
    if not by_place[0] or not by_place[2] or not by_place[2][0]:
        return None
    made = list(by_place[0][0])
    made[axis % len(made)] = by_place[2][0][0]
    return tuple(made)


def _indexed(call: Call, by_place: list[tuple[Powers, ...]], _: int, shape: Shape) -> Powers | None:
    """Rule for `index` by integers: their dimensions replace the indexed ones.

    Sizes show which dimensions are indexed, because a call does not record omitted indices.
    """
    x, indices = call.tensor(0), call.inputs[1] if len(call.inputs) > 1 else None
    if x is None or not indices or not by_place[0] or any(one.dtype == "bool" for one in indices):
        return None
    powers, inner, count = by_place[0][0], by_place[1][0], len(indices)
    for lead in range(len(powers) - count + 1):
        if (*x.shape[:lead], *indices[0].shape, *x.shape[lead + count :]) == shape:
            return (*powers[:lead], *inner, *powers[lead + count :])
    made = (*inner, *powers[count:])
    return made if len(made) == len(shape) else None


def _of_index(_: Call, by_place: list[tuple[Powers, ...]], __: int, ___: Shape) -> Powers | None:
    """Rule for `gather`: the powers of the indices."""
    return by_place[2][0] if len(by_place) > 2 and by_place[2] else None


def _of_table(_: Call, __: list[tuple[Powers, ...]], ___: int, shape: Shape) -> Powers:
    """Rule for an embedding's gradient: weights do not grow."""
    return (CONSTANT,) * len(shape)


def _bagged(_: Call, by_place: list[tuple[Powers, ...]], place: int, shape: Shape) -> Powers | None:
    """Rule for `_embedding_bag`: one row per bag; further results are per index or per bag."""
    indices, bags = by_place[1], by_place[2]
    if not indices or not bags:
        return None
    return ((bags[0][0], CONSTANT), indices[0], bags[0])[place] if place < 3 else None


def _of_second(_: Call, by_place: list[tuple[Powers, ...]], __: int, ___: Shape) -> Powers | None:
    return by_place[1][0] if len(by_place) > 1 and by_place[1] else None


def _of_first(_: Call, by_place: list[tuple[Powers, ...]], __: int, ___: Shape) -> Powers | None:
    return by_place[0][0] if by_place and by_place[0] else None


def _attended(
    _: Call, by_place: list[tuple[Powers, ...]], place: int, shape: Shape
) -> Powers | None:
    """Rule for attention: results have the query's powers, log-sums its first three."""
    query = by_place[0][0]
    if place == 0:
        return query
    return query[: len(shape)] if len(shape) in (3, 4) and shape[-1] != 1 else None


def _convolved(_: Call, by_place: list[tuple[Powers, ...]], __: int, shape: Shape) -> Powers | None:
    """Rule for convolutions: batch and spatial dimensions keep their powers."""
    x = by_place[0][0]
    return (x[0], CONSTANT, *x[2:]) if len(x) == len(shape) else None


def _recurrent(
    _: Call, by_place: list[tuple[Powers, ...]], place: int, shape: Shape
) -> Powers | None:
    """Rule for recurrent layers: one state per token, and a workspace for backward."""
    x = by_place[0][0]
    if place == 0 and len(x) == len(shape):
        return (*x[:-1], CONSTANT)
    return (total(x),) if place == 3 and len(shape) == 1 else None


def _chosen(_: Call, by_place: list[tuple[Powers, ...]], __: int, shape: Shape) -> Powers | None:
    """Rule for `topk`: a constant number of elements in the last dimension."""
    x = by_place[0][0] if by_place and by_place[0] else ()
    return (*x[:-1], CONSTANT) if len(x) == len(shape) > 0 else None


BAGS = ("_embedding_bag", "_embedding_bag_forward_only")

CONVOLUTIONS = FORMULAS.keys() - {"convolution_backward"}

RULES: dict[str, Rule] = {
    **dict.fromkeys(NEED_VALUES, _reduced),
    "cat": _joined,
    "stack": _stacked,
    "embedding": _picked,
    "index_select": _selected,
    "gather": _of_index,
    "index": _indexed,
    **dict.fromkeys(BAGS, _bagged),
    "_embedding_bag_dense_backward": _of_table,
    "embedding_dense_backward": _of_table,
    "embedding_backward": _of_table,
    "nll_loss_backward": _of_second,
    **dict.fromkeys(CONVOLUTIONS, _convolved),
    **dict.fromkeys(("copy_", "constant_pad_nd", "pad", "sort", "scatter_add_"), _of_first),
    "topk": _chosen,
    "mkldnn_rnn_layer": _recurrent,
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
         "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
         "scaled_dot_product_attention", "_flash_attention_forward", "_cudnn_attention_forward",
         "_efficient_attention_forward"), _attended,
    ),
}  # fmt: skip


def powers_of_results(
    call: Call, tensors: list[Tensor], inputs: list[Powers], results: Sequence[Shape]
) -> tuple[list[Powers], bool]:
    """Return the powers of each result, and whether a rule determined them, not only their sizes.

    Args:
        call: the call.
        tensors: its input tensors, lists flattened.
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


_UNLIKE = 50.0  # cost of operands that disagree on a dimension; above any plausible reading

_KEPT = 0.4  # reward for a part of a tensor that grows like the whole

_SQUARED_BATCH = 5.0  # cost of a product whose result has the batch of both operands

Growth = Power | None
"""Growth of a tensor's number of elements; None while unknown."""


@dataclass(frozen=True, slots=True)
class Read:
    """The powers of every dimension of a call's tensors, lists flattened.

    Attributes:
        inputs: of each input tensor.
        outputs: of each result.
        ruled: whether a rule determined the results, not only their sizes.
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
"""Ranks of a grouped product's operands -> their axes of rows, which are split over experts."""

_RESULT_ROWS: dict[tuple[int, ...], int] = {(2, 3): 0, (3, 2): 1}

MASKS = frozenset({"triu", "triu_", "tril", "tril_"})

BROADCASTS = (OpClass.ELEMENTWISE, OpClass.COPY, OpClass.RANDOM, OpClass.MEMSET)


def read(call: Call, grows: Sequence[Growth], sizing: Sizing) -> Read:
    """Return the most plausible reading of a call that agrees with the known growth of inputs.

    Args:
        call: shapes, types and, for `NEED_VALUES`, values.
        grows: growth of each input tensor, lists flattened.
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
    """Return the tensors of all arguments, with lists flattened."""
    return [tensor for operand in operands for tensor in operand or ()]


def likeliest(shape: Shape, sizing: Sizing, grows: Growth) -> Powers:
    """Return the cheapest reading that agrees; if none agrees, the cheapest of all."""
    found = readings(shape, sizing, grows) or readings(shape, sizing, None)
    return found[0][1]


def part(shape: Shape, sizing: Sizing, grows: Power) -> Powers:
    """Return the cheapest reading of a part of a tensor, preferring the growth of the whole."""

    def price(one: tuple[float, Powers]) -> float:
        kept = total(one[1])
        return one[0] - _KEPT * (min(kept[0], grows[0]) + min(kept[1], grows[1]))

    return min(readings(shape, sizing, None), key=price)[1]


def _product(
    call: Call, tensors: list[Tensor], grows: Sequence[Growth], sizing: Sizing
) -> Read | None:
    """Read `[..., m, k] x [..., k, n]`: inner dimensions agree, and so do batch dimensions."""
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

    Rows are tokens. All other dimensions belong to weights, as do scales and row offsets.
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
    """Read the inputs; broadcast operands must agree on shared dimensions."""
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
    """Return the reading of a convolution's operand [n, channels, ...] with constant channels."""
    found = (one for _, one in _readings(tensor.shape, sizing, grows) if one[1:2] == (CONSTANT,))
    return next(found, powers)


def _readings(shape: Shape, sizing: Sizing, grows: Growth) -> tuple[tuple[float, Powers], ...]:
    return readings(shape, sizing, grows) or readings(shape, sizing, None)


def _clashes(shape: Shape, powers: Powers, other: Shape, theirs: Powers) -> float:
    """Return the number of equal dimensions of two broadcast tensors that grow differently.

    A dimension of size 1 may broadcast, so it counts as 0.001.
    """
    pairs = zip(reversed(tuple(zip(shape, powers, strict=True))),
                reversed(tuple(zip(other, theirs, strict=True))), strict=False)  # fmt: skip
    return sum((1 if a > 1 else 1e-3) for (a, x), (b, y) in pairs if a == b and x != y)


def _aligned(shape: Shape, out: Powers, sizing: Sizing, grows: Growth) -> Powers:
    """Return the reading of an addend of a product: a bias or a full matrix."""
    want = out[len(out) - len(shape) :]
    options = _readings(shape, sizing, grows)
    return min(options, key=lambda one: sum(a != b for a, b in zip(one[1], want, strict=False)))[1]


def _is_list(call: Call) -> bool:
    return any(operand is not None and len(operand) > 1 for operand in call.inputs)


def _first_of(call: Call) -> list[int]:
    """Return the index of each argument's first tensor in the flattened list."""
    places, count = list[int](), 0
    for operand in call.inputs:
        places.append(count)
        count += len(operand or ())
    return places
