"""Operators as a capture without a device meets them: their properties, and their calls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onerank.capture.no_device.event_log import WrappedNumber
from onerank.capture.no_device.operators.gpu_operators import has_preparation

# torch's dispatcher has no types.
_torch: Any = torch

FUNCTIONAL = ("_c10d_functional", "_dtensor")
"""Namespaces of DTensor's collectives."""

_RANDOM = frozenset(
    "uniform_ normal_ bernoulli_ random_ exponential_ cauchy_ geometric_ log_normal_ rand randn "
    "randint randperm rand_like randn_like randint_like bernoulli normal multinomial "
    "native_dropout".split()
)

# In-place operators that change the shape: only their fake implementation gives the result.
_RESHAPES_IN_PLACE = frozenset(
    "resize_ resize_as_ set_ t_ transpose_ squeeze_ unsqueeze_ detach_ as_strided_".split()
)

# Operators whose result or its size the host reads, so that it waits for their stream
# (`cudaStreamSynchronize` in their CUDA implementations).
_READ_BY_HOST = frozenset(
    "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive "
    "unique_dim_consecutive bincount equal _linalg_check_errors".split()
)

# Prefixes of operators with a CUDA kernel: a GPU does not run their composite kernel.
_OF_A_GPU = (
    "_foreach_",
    "_fused_",
    "_amp_",
    "convolution",
    "_convolution",
    "_batch_norm",
    "_native_batch_norm",
    "_grouped_mm",
    "_scaled_dot_product",
    "_grid_sampler",
    "_pin_memory",
    "linalg_lstsq",
    "copy_",
    "lift",
    "detach",
)


@dataclass(frozen=True, slots=True)
class OperatorSchema:
    """Properties of an operator that decide how the mode runs and records it.

    Attributes:
        name: with its namespace, as a profile has it.
        namespace: "aten", "c10d" ...
        base: without namespace.
        arguments: (name, default) in order.
        tensors: places of the arguments that are tensors.
        is_view: whether its results share memory with an input that it does not write.
        writes_first: whether it writes its first argument and returns it.
        is_random: whether it draws random numbers.
        is_composite: whether its kernel for every backend calls other operators, which a profile
            shows inside it.
        is_decomposed: whether its only implementation calls other operators, on all devices.
        written: places and names of the arguments that it writes.
        is_prepared: whether its CUDA implementation calls other operators first.
    """

    name: str
    namespace: str
    base: str
    arguments: tuple[tuple[str, Any], ...]
    tensors: tuple[int, ...]
    is_view: bool
    writes_first: bool
    is_random: bool
    is_composite: bool
    is_decomposed: bool
    written: tuple[tuple[int, str], ...]
    is_prepared: bool

    @property
    def communicates(self) -> bool:
        """Whether the operator is a communication call or a wait for one."""
        return self.namespace.startswith(("c10d", *FUNCTIONAL))

    @classmethod
    def of(cls, func: Any) -> "OperatorSchema":
        """Return the properties of an operator, from its schema and its kernels."""
        schema = func._schema
        namespace, _, base = schema.name.partition("::")
        aliases = [argument.alias_info for argument in schema.returns]
        reads = any(alias is not None and not alias.is_write for alias in aliases)
        is_view = reads or base in ("_unsafe_view", "_reshape_alias", "lift_fresh")
        first = schema.arguments[0].alias_info if schema.arguments else None
        writes_first = (
            first is not None
            and first.is_write
            and len(aliases) == 1
            and aliases[0] is not None
            and aliases[0].is_write
            and base not in _RESHAPES_IN_PLACE
            and str(schema.returns[0].type) == "Tensor"
        )
        return cls(
            schema.name,
            namespace,
            base,
            tuple((argument.name, argument.default_value) for argument in schema.arguments),
            tuple(n for n, a in enumerate(schema.arguments) if str(a.type) == "Tensor"),
            is_view,
            writes_first,
            base in _RANDOM,
            not is_view
            and namespace == "aten"
            and not base.startswith(_OF_A_GPU)
            and base not in _RANDOM
            and _has_kernel(func, "CompositeExplicitAutograd")
            and not _has_kernel(func, "CPU"),
            namespace == "aten"
            and _has_kernel(func, "CompositeImplicitAutograd")
            and not _has_kernel(func, "CUDA"),
            tuple(
                (n, a.name)
                for n, a in enumerate(schema.arguments)
                if a.alias_info is not None and a.alias_info.is_write
            ),
            has_preparation(schema.name),
        )


def _has_kernel(func: Any, key: str) -> bool:
    return _torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call of an operator.

    Attributes:
        func: the operator.
        schema: properties of the operator.
        args: positional arguments.
        kwargs: arguments by name.
        tensors: the tensors among both.
    """

    func: Any
    schema: OperatorSchema
    args: Any
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def is_fake(self) -> bool:
        """Whether all its tensors are fake and dense."""
        return all(
            isinstance(tensor, FakeTensor) and tensor.layout == torch.strided
            for tensor in self.tensors
        )

    @property
    def operands(self) -> list[Any]:
        """All arguments in the schema's order, defaults included."""
        rest = self.schema.arguments[len(self.args) :]
        values = [*self.args, *(self.kwargs.get(name, default) for name, default in rest)]
        for place in self.schema.tensors:
            if isinstance(values[place], int | float | complex):
                values[place] = WrappedNumber(values[place])
        return values

    def given_results(self) -> tuple[Tensor, ...]:
        """Return the tensors that an out-variant returns; none for any other operator."""
        names = (argument.name for argument in self.func._schema.arguments if argument.is_out)
        return tuple(self.kwargs[name] for name in names if self.kwargs.get(name) is not None)

    def written(self) -> Iterator[Tensor]:
        """Yield the tensors that the operator writes."""
        for position, name in self.schema.written:
            given = position < len(self.args)
            value = self.args[position] if given else self.kwargs.get(name)
            yield from tensors_in((value,))


def tensors_in(operands: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among operands and in lists of operands."""
    for operand in operands:
        if isinstance(operand, Tensor):
            yield operand
        elif isinstance(operand, list | tuple):
            yield from tensors_in(operand)


def is_same_data(target: Tensor, source: Tensor) -> bool:
    """Return whether two tensors are the same elements, which `copy_` leaves as they are.

    Python copies so at the end of `x[:n] += y`.
    """
    storages: list[Any] = [tensor.untyped_storage() for tensor in (target, source)]
    return (
        storages[0]._cdata == storages[1]._cdata
        and target.storage_offset() == source.storage_offset()
        and target.shape == source.shape
        and target.stride() == source.stride()
        and target.dtype == source.dtype
    )


def blocks_host(call: OperatorCall, name: str) -> bool:
    """Return whether the host waits for the stream within an operator on the device.

    A copy between host and device waits unless it is `non_blocking` (`copy_kernel_cuda`). Indexing
    with a mask calls `nonzero`, which waits. `repeat_interleave` reads the sum of its repeats,
    unless the size of its result is given (Repeat.h).

    Args:
        call: the call.
        name: the operator that it is recorded as.
    """
    if call.schema.base == "copy_":
        target, source = call.tensors[:2]
        return target.is_cuda != source.is_cuda and not call.operands[2]
    if name in ("index", "_index_put_impl_"):
        return any(
            index.dtype in (torch.bool, torch.uint8) for index in tensors_in(call.operands[1])
        )
    if name == "repeat_interleave":
        return call.operands[-1] is None
    return name in _READ_BY_HOST


def is_on_gpu(tensor: Any) -> bool:
    """Return whether a tensor is on the emulated GPU."""
    # `is_cuda` of a fake tensor takes ten times as long.
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type == "cuda"


def is_cuda_device(device: Any) -> bool:
    """Return whether a `device` argument, which may be None, names a GPU."""
    return device is not None and torch.device(device).type == "cuda"
