"""How torch's `reduce_kernel` divides a reduction among thread blocks and threads.

Follows `setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh, for a contiguous operand.
"""

from dataclasses import dataclass
from itertools import groupby
from math import ceil, prod

from onerank.annotate.op_costs.operands import Call, numbers_of

# Reductions whose axis is an integer, not a list.
_ONE_AXIS = ("max", "min", "argmax", "argmin", "all", "any", "prod")

NEED_AXES = frozenset(
    "sum mean nansum amax amin std var var_mean linalg_vector_norm norm logsumexp max min argmax "
    "argmin all any prod".split()
)
"""Operators, by base name, whose division depends on axes, which are among the input values."""

_THREADS, _LEAST_VALUES, _MOST_VALUES = 512, 16, 256

# Values that a thread loads at a time: a vector, or `vt0` independent ones.
_LOADED_TOGETHER = 4

SM_COUNT = 132
"""SMs of an H100, with which reductions were measured: they determine how many blocks share an
output."""

# Resident threads of an SM of a data-centre GPU. An SM of other GPUs has 1536, which would change
# the number of blocks that share an output on those GPUs; that is not modelled.
_THREADS_OF_SM = 2048


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a reduction.

    Attributes:
        block: threads of a block in x and in y. x is along the input if `along_input`, else along
            the output.
        columns: blocks that have different outputs.
        values: values that a thread reads if no other block shares its output.
        across_warps: whether the warps of a block share an output.
        along_input: whether adjacent threads read adjacent values of an output.
        vector: outputs of a thread.
    """

    block: tuple[int, int]
    columns: int
    values: int
    across_warps: bool
    along_input: bool = True
    vector: int = 1

    @property
    def _may_share_outputs(self) -> bool:
        """Whether several blocks share an output if the GPU has room for them."""
        return self.across_warps and self.values >= _MOST_VALUES

    def rows(self, sm_count: int) -> int:
        """Return the number of blocks that share an output."""
        wanted = sm_count * (_THREADS_OF_SM // prod(self.block))
        if not self._may_share_outputs or self.columns > wanted:
            return 1
        rows = min(ceil(wanted / self.columns), ceil(self.values / _LEAST_VALUES))
        return max(rows, ceil(self.values / _MOST_VALUES))

    @property
    def values_read(self) -> int:
        """The fewest values of each of its outputs that a thread reads; see `loads`."""
        return _LEAST_VALUES if self._may_share_outputs else self.values

    @property
    def loads(self) -> int:
        """The number of a thread's loads that wait for each other.

        A lower bound where blocks share an output: it assumes that the GPU has room for enough
        blocks to leave each thread the fewest values.
        """
        return ceil(self.values_read / _LOADED_TOGETHER)


def division_of(call: Call) -> Division | None:
    """Return the division of a reduction; None if its axes or sizes are not known."""
    reduced = _reduced(call)
    tensor = call.tensor(0)
    if tensor is None or reduced is None or not tensor.numel:
        return None
    sizes = [(size, axis in reduced) for axis, size in enumerate(tensor.shape) if size > 1]
    inputs = prod(size for size, is_reduced in sizes if is_reduced)
    outputs = tensor.numel // inputs
    vector = 1
    if not sizes or sizes[-1][1]:
        first, second, along_input = inputs, outputs, True
        # Adjacent reduced axes coalesce into one.
        runs = sum(is_reduced for is_reduced, _ in groupby(sizes, key=lambda size: size[1]))
        # `reduce_kernel` loads four values per thread along a contiguous axis of 128 elements or
        # more.
        first //= _LOADED_TOGETHER if inputs >= 128 and runs == 1 else 1
    else:
        inner = 1
        for size, is_reduced in reversed(sizes):
            if is_reduced:
                break
            inner *= size
        vector = next(width for width in (4, 2, 1) if inner % width == 0)
        first, second, along_input = outputs // vector, inputs, False
    most = _THREADS // vector
    first, second = (min(_power_of_two_below(size), most) for size in (first, second))
    width = min(first, 32)
    height = min(second, most // width)
    width = min(first, most // height)
    input_step, output_step = (width, 1) if along_input else (1, width)
    values = ceil(inputs / input_step)
    across_warps = values >= min(height * 16, _MOST_VALUES)
    if across_warps:
        input_step *= height
    else:
        output_step *= height
    columns = ceil(outputs // vector / output_step)
    values = ceil(inputs / input_step)
    return Division((width, height), columns, values, across_warps, along_input, vector)


def _power_of_two_below(size: int) -> int:
    """Return the largest power of two that is at most `size`, or 1."""
    return 1 << (max(1, size).bit_length() - 1)


def _reduced(call: Call) -> set[int] | None:
    """Return the axes of a reduction; None if neither values nor shapes determine them."""
    tensor, result = call.tensor(0), call.output()
    if tensor is None or result is None:
        return None
    axes = len(tensor.shape)
    # PyTorch accepts an axis of a scalar, which has none.
    if result.numel == 1 or not axes:
        return set(range(axes))
    for value in call.values[1:3]:
        if listed := numbers_of(value):
            return {int(axis) % axes for axis in listed}
    if len(result.shape) == axes:
        return {at for at in range(axes) if tensor.shape[at] != result.shape[at]}
    if call.op in _ONE_AXIS and isinstance(call.value(1), int):
        return {call.value(1) % axes}
    return None
