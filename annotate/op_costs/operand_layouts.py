"""How operands of elementwise kernels lie in memory, as far as the kernels' time depends on it.

PyTorch's `TensorIterator` has kernels with vector loads for operands of one dtype that are dense
and of equal strides. Other kernels compute the address of each element, or load it by a switch of
the dtype.
"""

from math import prod

from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.op_costs.operands import Call

# Kernels for these have their own code, which divides the index of each element by sizes.
_BY_INDEX = frozenset({"triu", "triu_", "tril", "tril_", "flip", "repeat"})


def computes_addresses(call: Call, operator_class: OpClass) -> bool:
    """Return whether an elementwise kernel computes each element's addresses from its index."""
    # A copy without a cast changes the layout.
    permutes = call.op == "copy_" and not casts(call) and has_unknown_layout(call, operator_class)
    if call.op in _BY_INDEX or permutes:
        return True
    if operator_class is not OpClass.ELEMENTWISE and call.op != "copy_":
        return False
    elements = max(call.output_numel, call.numel(0))
    operands = (
        operand for operand in (*call.inputs, *call.outputs) if operand and len(operand) == 1
    )
    # Operands of one element: see `reads_device_scalar`.
    spread = any(1 < operand[0].numel < elements for operand in operands)
    return spread or _strides_differ(call)


def concatenates_strided(call: Call) -> bool:
    """Return whether a call concatenates tensors of which one is not contiguous."""
    tensors = (call.inputs[0] if call.inputs else None) or ()
    return call.op == "cat" and not all(tensor.contiguous for tensor in tensors)


def mixes_dtypes(call: Call, operator_class: OpClass) -> bool:
    """Return whether tensors of an elementwise operator have different floating-point dtypes."""
    operands = (operand[0] for operand in call.inputs if operand and len(operand) == 1)
    dtypes = {each.dtype for each in operands if each.numel > 1 and "float" in each.dtype}
    return operator_class is OpClass.ELEMENTWISE and len(dtypes) > 1


# Axes of more than one element from which operands of unknown strides may be permuted: heads before
# tokens. In captures of a Llama-8B on an H100 and an H200 all 17 copies of such tensors are
# transpositions, and take 1.8 to 2.7 times as long as contiguous ones; of 30 elementwise calls 24
# compute addresses; with fewer axes 27 of 141 do, and no copy of 30.
_PERMUTED_AXES = 3


def has_unknown_layout(call: Call, operator_class: OpClass) -> bool:
    """Return whether a kernel's time depends on strides that were not recorded."""
    if operator_class is not OpClass.ELEMENTWISE and call.op != "copy_":
        return False
    operands = [operand[0] for operand in call.inputs if operand and len(operand) == 1]
    if any(operand.recorded_strides for operand in operands):
        return False
    return any(sum(size > 1 for size in each.shape) >= _PERMUTED_AXES for each in operands)


def is_expanded(call: Call, operator_class: OpClass) -> bool:
    """Return whether an elementwise kernel reads an operand that is expanded, with stride 0."""
    if operator_class is not OpClass.ELEMENTWISE and call.op != "copy_":
        return False
    operands = (operand[0] for operand in call.inputs if operand and len(operand) == 1)
    return any(
        size > 1 and not stride
        for operand in operands
        if operand.numel > 1 and operand.recorded_strides
        for size, stride in zip(operand.shape, operand.strides, strict=True)
    )


# Dtypes that Python's numbers have as operands.
_OF_NUMBERS = frozenset({"bool", "int64", "float64", "complex128"})


def reads_device_scalar(call: Call, operator_class: OpClass) -> bool:
    """Return whether an elementwise kernel reads a 0-d tensor on the GPU.

    `gpu_kernel_with_scalars` passes a 0-d tensor on the CPU, such as a number, as a parameter; one
    on the GPU is an operand with stride 0, so the kernel has no vector loads. `where` moves its
    scalars to the GPU. Whether a 0-d tensor is on the CPU is not recorded; the dtypes of numbers
    are taken to be.
    """
    if operator_class is not OpClass.ELEMENTWISE:
        return False
    operands = [operand[0] for operand in call.inputs if operand and len(operand) == 1]
    scalars = [each for each in operands if not each.shape]
    if not scalars or max(each.numel for each in operands) == 1:
        return False
    return call.op == "where" or any(each.dtype not in _OF_NUMBERS for each in scalars)


def transposes(call: Call) -> bool:
    """Return whether operands of one shape differ in the axis of adjacent elements."""
    return len({*innermost_sizes(call)}) > 1


def innermost_sizes(call: Call) -> list[tuple[int, int]]:
    """Return axis and size of the adjacent elements of each operand of the largest shape."""
    operands = [operand[0] for operand in call.inputs if operand and len(operand) == 1]
    shape = max((operand.shape for operand in operands), key=prod, default=())
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    innermost = [
        min(axes, key=operand.strides.__getitem__)
        for operand in operands
        # An expanded operand has no adjacent elements.
        if operand.shape == shape and axes and all(operand.strides[axis] for axis in axes)
    ]
    return [(axis, shape[axis]) for axis in innermost]


def _strides_differ(call: Call) -> bool:
    """Return whether no order of the elements is that of every operand in memory.

    `TensorIterator` reorders the dimensions; if all operands are then dense and have the same
    strides, its kernels read and write vectors of adjacent elements. A new result takes the order
    of the operands.
    """
    operands = [operand[0] for operand in call.inputs if operand and len(operand) == 1]
    if not any(operand.recorded_strides for operand in operands):
        return False
    shape = max((operand.shape for operand in operands), key=prod)
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    orders = {
        tuple(operand.strides[axis] for axis in axes)
        for operand in operands
        if operand.shape == shape
    }
    # An expanded operand does not slow the backward of a mean: 1.57 elements per SM and cycle.
    orders = [order for order in orders if 0 not in order]
    if len(orders) != 1:
        return len(orders) > 1
    dense = 1
    for stride, size in sorted(zip(orders[0], (shape[axis] for axis in axes), strict=True)):
        if stride != dense:
            return True
        dense *= size
    return False


_NARROWED_BY_VECTORS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def casts(call: Call) -> bool:
    """Return whether a copy changes the dtype by `unrolled_elementwise_kernel`.

    Copy.cu has kernels that narrow float32 by vectors, such as `float_to_bfloat16_copy_kernel`.
    """
    to, of = call.tensor(0), call.tensor(1)
    if to is None or of is None or to.dtype == of.dtype:
        return False
    return of.dtype != "float32" or to.dtype not in _NARROWED_BY_VECTORS
