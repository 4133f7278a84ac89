"""How operands and results of a call grow with sequence and batch: the reading that fits best."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from onerank.annotate.op_costs.gemm import CONVOLUTIONS
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Call, Tensor, flatten
from onerank.annotate.passes.resize.result_growth import Shape, powers_of_results
from onerank.annotate.passes.resize.size_change import (
    CONSTANT,
    SEQ,
    Power,
    Powers,
    Sizing,
    numel,
    readings,
    total,
)

# Cost of operands that disagree on a dimension: above the cost of any plausible reading.
_MISMATCH_COST = 50.0

# Reward for a part of a tensor that grows like the whole.
_KEPT_GROWTH_REWARD = 0.4

# Cost of a product whose result has the batch of both operands.
_SQUARED_BATCH_COST = 5.0

Growth = Power | None
"""Growth of a tensor's number of elements; None while unknown."""


@dataclass(frozen=True, slots=True)
class CallPowers:
    """The powers of every dimension of a call's tensors, lists flattened.

    Attributes:
        inputs: of each input tensor.
        outputs: of each result.
        ruled: whether a rule determined the results, not their sizes.
    """

    inputs: tuple[Powers, ...]
    outputs: tuple[Powers, ...]
    ruled: bool


_MATMULS = {
    **dict.fromkeys(
        "mm bmm matmul mv dot _int_mm _scaled_mm _scaled_mm_v2 fp8_scaled_mm".split(), (0, 1)
    ),
    **dict.fromkeys(
        ("addmm", "addmm_", "baddbmm", "baddbmm_", "addmv", "_addmm_activation"), (1, 2)
    ),
}

_GROUPED = frozenset({"_grouped_mm", "_scaled_grouped_mm"})

# Ranks of a grouped product's operands -> their axes of rows, which are split over experts.
_ROW_AXES: dict[tuple[int, ...], tuple[int | None, int | None]] = {
    (2, 3): (0, None),
    (3, 2): (None, 1),
    (2, 2): (1, 0),
}

_RESULT_ROW_AXIS: dict[tuple[int, ...], int] = {(2, 3): 0, (3, 2): 1}

# A script's token ids and labels; their shape says how they grow. In a micro-batch of one, the
# first call that reads them may take [1, sequence] for a sequence.
DRAWN = ("random_", "randint")

MASKS = frozenset({"triu", "triu_", "tril", "tril_"})

BROADCASTS = (OpClass.ELEMENTWISE, OpClass.COPY, OpClass.RANDOM, OpClass.MEMSET)


def infer_powers(call: Call, growths: Sequence[Growth], sizing: Sizing) -> CallPowers:
    """Return the most plausible reading of a call that agrees with the known growth of inputs.

    Args:
        call: shapes, types and, for `NEED_VALUES`, values.
        growths: growth of each input tensor, lists flattened.
        sizing: captured and new sizes.
    """
    tensors = flatten(call.inputs)
    results = [tensor.shape for tensor in flatten(call.outputs)]
    if call.op in _MATMULS or call.op == "linear":
        powers = _matmul(call, tensors, growths, sizing)
        if powers is not None:
            return powers
    if call.op in _GROUPED:
        powers = _grouped_matmul(call, tensors, growths, sizing)
        if powers is not None:
            return powers
    if call.op in DRAWN:
        shapes = [tensor.shape for tensor in tensors], results
        ids = (tuple(cheapest_reading(shape, sizing, None) for shape in side) for side in shapes)
        return CallPowers(*ids, ruled=True)
    # `triu` and `tril` of a new matrix make a causal mask, which has no batch.
    if call.op in MASKS and growths[0] is None:
        mask = tuple(SEQ if size in sizing.lengths else CONSTANT for size in tensors[0].shape)
        return CallPowers((mask,), (mask,) * len(results), ruled=True)
    inputs = _inputs_powers(call, tensors, growths, sizing)
    if call.op == "gather":
        inputs = _gathered(call, inputs, growths, sizing)
    # A channel count may equal the sequence length, but weights fix it.
    if call.op in CONVOLUTIONS:
        inputs = [
            _constant_channels(*tensor, sizing)
            for tensor in zip(tensors, inputs, growths, strict=True)
        ]
    outputs, ruled = powers_of_results(call, tensors, inputs, results)
    return CallPowers(tuple(inputs), tuple(outputs), ruled)


def cheapest_reading(shape: Shape, sizing: Sizing, growth: Growth) -> Powers:
    """Return the cheapest reading that agrees; if none agrees, the cheapest of all."""
    candidates = readings(shape, sizing, growth) or readings(shape, sizing, None)
    return candidates[0][1]


def view_reading(shape: Shape, sizing: Sizing, growth: Power) -> Powers:
    """Return the cheapest reading of a part of a tensor, preferring the growth of the whole."""

    def cost(reading: tuple[float, Powers]) -> float:
        view_growth = total(reading[1])
        return reading[0] - _KEPT_GROWTH_REWARD * (
            min(view_growth[0], growth[0]) + min(view_growth[1], growth[1])
        )

    return min(readings(shape, sizing, None), key=cost)[1]


def _matmul(
    call: Call, tensors: list[Tensor], growths: Sequence[Growth], sizing: Sizing
) -> CallPowers | None:
    """Read `[..., m, k] x [..., k, n]`: inner dimensions agree, and so do batch dimensions."""
    factor_arguments = _MATMULS.get(call.op, (0, 1))
    left, right = call.tensor(factor_arguments[0]), call.tensor(factor_arguments[1])
    if left is None or right is None or not left.shape or not right.shape:
        return None
    first_tensors = _first_tensor_indices(call)
    first, second = first_tensors[factor_arguments[0]], first_tensors[factor_arguments[1]]
    inner_axis = -1 if call.op == "linear" or len(right.shape) == 1 else -2
    best: tuple[float, Powers, Powers] | None = None
    for (left_cost, left_powers), (right_cost, right_powers) in product(
        _readings(left.shape, sizing, growths[first]),
        _readings(right.shape, sizing, growths[second]),
    ):
        if left_powers[-1] != right_powers[inner_axis]:
            continue
        outer = [
            *left_powers[:-1],
            *(power for i, power in enumerate(right_powers) if i - len(right_powers) != inner_axis),
        ]
        batches = zip(reversed(left_powers[:-2]), reversed(right_powers[:-2]), strict=False)
        mismatch_cost = sum(x != y for x, y in batches) * _MISMATCH_COST
        is_squared = (
            sum(power[1] for power in outer) - sum(power[1] for power in right_powers[:-2]) > 1
        )
        cost = left_cost + right_cost + mismatch_cost + _SQUARED_BATCH_COST * is_squared
        if best is None or cost < best[0]:
            best = cost, left_powers, right_powers
    if best is None:
        return None
    _, left_powers, right_powers = best
    columns = (
        right_powers[-1:] if inner_axis == -2 else right_powers[:-1] if call.op == "linear" else ()
    )
    batch = left_powers[:-2] if len(left_powers) >= len(right_powers) else right_powers[:-2]
    rows = left_powers[:-1] if call.op == "linear" else (*batch, *left_powers[-2:-1])
    out = (*rows, *columns)
    powers: list[Powers] = []
    for index, tensor in enumerate(tensors):
        known = {first: left_powers, second: right_powers}.get(index)
        powers.append(known or _addend_reading(tensor.shape, out, sizing, growths[index]))
    results = [
        out if len(tensor.shape) == len(out) else cheapest_reading(tensor.shape, sizing, total(out))
        for tensor in flatten(call.outputs)
    ]
    return CallPowers(tuple(powers), tuple(results), ruled=True)


def _grouped_matmul(
    call: Call, tensors: list[Tensor], growths: Sequence[Growth], sizing: Sizing
) -> CallPowers | None:
    """Read `[rows, k] x [experts, k, n]`, or of a weight's gradient `[k, rows] x [rows, n]`.

    Rows are tokens. All other dimensions belong to weights, as do scales and row offsets.
    """
    ranks = tuple(len(tensor.shape) for tensor in tensors[:2])
    row_axes = _ROW_AXES.get(ranks)
    if row_axes is None:
        return None
    rows = [(operand, axis) for operand, axis in enumerate(row_axes) if axis is not None]
    row_growths = [growths[operand] for operand, _ in rows]
    operand, axis = rows[0]
    size = tensors[operand].shape[axis]
    power = (
        next((growth for growth in row_growths if growth is not None), None)
        or cheapest_reading((size,), sizing, None)[0]
    )
    axes = [*row_axes, *(None for _ in tensors[2:])]
    inputs = tuple(
        tuple(power if axis == row_axis else CONSTANT for axis in range(len(tensor.shape)))
        for tensor, row_axis in zip(tensors, axes, strict=True)
    )
    result_axis = _RESULT_ROW_AXIS.get(ranks)
    results = tuple(
        tuple(power if axis == result_axis else CONSTANT for axis in range(len(tensor.shape)))
        for tensor in flatten(call.outputs)
    )
    return CallPowers(inputs, results, ruled=True)


def _inputs_powers(
    call: Call, tensors: list[Tensor], growths: Sequence[Growth], sizing: Sizing
) -> list[Powers]:
    """Read the inputs; broadcast operands must agree on shared dimensions."""
    if not tensors:
        return []
    if op_class(f"aten::{call.op}") not in BROADCASTS or len(tensors) == 1 or _is_list(call):
        return [
            cheapest_reading(tensor.shape, sizing, growth)
            for tensor, growth in zip(tensors, growths, strict=True)
        ]
    # An operand whose growth is known leads, since the others have to agree with it.
    known = [index for index, growth in enumerate(growths) if growth is not None]
    main = max(
        known or range(len(tensors)),
        key=lambda index: (len(tensors[index].shape), numel(tensors[index].shape)),
    )
    best: tuple[float, list[Powers]] | None = None
    for main_cost, main_powers in _readings(tensors[main].shape, sizing, growths[main]):
        chosen: list[Powers] = []
        cost = main_cost
        for index, tensor in enumerate(tensors):
            if index == main:
                chosen.append(main_powers)
                continue
            options = [
                (
                    option_cost
                    + _MISMATCH_COST
                    * _mismatches(tensor.shape, powers, tensors[main].shape, main_powers),
                    powers,
                )
                for option_cost, powers in _readings(tensor.shape, sizing, growths[index])
            ]
            option_cost, powers = min(options, key=lambda option: option[0])
            chosen.append(powers)
            cost += option_cost
        if best is None or cost < best[0]:
            best = cost, chosen
    assert best is not None, "a tensor has at least one reading"
    return best[1]


def _gathered(
    call: Call, inputs: list[Powers], growths: Sequence[Growth], sizing: Sizing
) -> list[Powers]:
    """Return the inputs' readings, with the one of the indices that agrees with the table's.

    Indices and table of a `gather` have equal dimensions except along the axis that it gathers.
    """
    # An embedding expands its indices over the table's columns, whose number may equal the tokens.
    table, axis, index = call.tensor(0), call.value(1), call.tensor(2)
    if table is None or index is None or not isinstance(axis, int):
        return inputs
    if not index.shape or len(index.shape) != len(table.shape):
        return inputs
    axis %= len(index.shape)
    positions = _first_tensor_indices(call)
    table_powers = inputs[positions[0]]

    def cost(reading: tuple[float, Powers]) -> float:
        pairs = zip(table.shape, table_powers, index.shape, reading[1], strict=True)
        return reading[0] + _MISMATCH_COST * sum(
            size == other and power != other_power
            for at, (size, power, other, other_power) in enumerate(pairs)
            if at != axis
        )

    best = min(_readings(index.shape, sizing, growths[positions[2]]), key=cost)[1]
    # The result and, as an operand, the memory that it is written to have the shape of the indices.
    return [best if at >= positions[2] else powers for at, powers in enumerate(inputs)]


def _constant_channels(tensor: Tensor, powers: Powers, growth: Growth, sizing: Sizing) -> Powers:
    """Return the reading of a convolution's operand [n, channels, ...] with constant channels."""
    matches = (
        reading
        for _, reading in _readings(tensor.shape, sizing, growth)
        if reading[1:2] == (CONSTANT,)
    )
    return next(matches, powers)


def _readings(shape: Shape, sizing: Sizing, growth: Growth) -> tuple[tuple[float, Powers], ...]:
    return readings(shape, sizing, growth) or readings(shape, sizing, None)


def _mismatches(shape: Shape, powers: Powers, other: Shape, other_powers: Powers) -> float:
    """Return the number of equal dimensions of two broadcast tensors that grow differently.

    A dimension of size 1 may broadcast, so it counts as 0.001.
    """
    pairs = zip(reversed(tuple(zip(shape, powers, strict=True))),
                reversed(tuple(zip(other, other_powers, strict=True))), strict=False)  # fmt: skip
    return sum((1 if a > 1 else 1e-3) for (a, x), (b, y) in pairs if a == b and x != y)


def _addend_reading(shape: Shape, out: Powers, sizing: Sizing, growth: Growth) -> Powers:
    """Return the reading of an addend of a product: a bias or a full matrix."""
    expected = out[len(out) - len(shape) :]
    options = _readings(shape, sizing, growth)
    return min(
        options, key=lambda option: sum(a != b for a, b in zip(option[1], expected, strict=False))
    )[1]


def _is_list(call: Call) -> bool:
    return any(operand is not None and len(operand) > 1 for operand in call.inputs)


def _first_tensor_indices(call: Call) -> list[int]:
    """Return the index of each argument's first tensor in the flattened list."""
    indices, count = list[int](), 0
    for operand in call.inputs:
        indices.append(count)
        count += len(operand or ())
    return indices
