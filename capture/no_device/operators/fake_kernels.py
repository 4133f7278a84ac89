"""Results of operators on fake tensors without torch's fake implementation.

Operators of a GPU whose fake implementation is missing or wrong in torch have a formula. A call
that repeats an earlier one has results of the same shapes.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch._library import custom_ops, utils
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from onerank.capture.fake_tensors import fake_on
from onerank.capture.no_device.operators import flash_attention_3
from onerank.capture.no_device.operators.operator_calls import is_same_data
from onerank.capture.no_device.operators.recurrent_layers import (
    packed_sequence,
    results_of_backward,
    results_of_forward,
    results_of_gru_cell,
    results_of_gru_cell_backward,
)

_library: Any = utils  # private in torch, without types
_custom: Any = custom_ops
_torch: Any = torch


def lacks_fake(func: Any) -> bool:
    """Return whether an operator has no fake implementation, which gives its results' shapes."""
    definition = _custom.OPDEFS.get(func._schema.name)
    # torch gives each custom operator an implementation that may only raise.
    if definition is not None:
        return definition._abstract_fn is None
    return not _library.has_fake_kernel(func)


def _statistics(source: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return a mean and a scale per channel, in 32 bits for inputs of 16."""
    dtype = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    channels = source.shape[1]
    mean = source.new_empty((channels,), dtype=dtype)
    return mean, torch.empty_like(mean)


def _gathered_statistics(_: Tensor, means: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    """Return the statistics of all ranks, from (ranks, channels) means."""
    return means.new_empty(means.shape[1:]), means.new_empty(means.shape[1:])


def _gradient_sums(*args: Any) -> tuple[Tensor | None, ...]:
    """Return the sums for the gradients of input, weight and bias, of those that are wanted."""
    _, _, mean, _, weight, of_input, of_weight, of_bias = args
    sums = [torch.empty_like(mean) if of_input else None for _ in range(2)]
    like = weight if weight is not None else mean
    return *sums, *(torch.empty_like(like) if wanted else None for wanted in (of_weight, of_bias))


def _like_second(_: Tensor, second: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(second)


def _like_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first)


def _grouped_product(
    left: Tensor,
    right: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the products of groups of rows, of inner elements or of matrices.

    torch's fake implementation refuses types other than bfloat16, which a GPU takes.
    """
    del bias
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == 2 and right.dim() == 2:
        # Two matrices are grouped along their inner size, so torch requires the ends of groups.
        assert ends is not None
        shape: tuple[int, ...] = (ends.shape[0], rows, columns)
    elif left.dim() == 3 and right.dim() == 3:
        shape = (left.shape[0], rows, columns)
    else:
        shape = (rows, columns)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _attention_gradients(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *__: Any, **___: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and bias.

    torch's fake implementation lacks the argument `out`, so it takes each later one for the next.
    """
    like_bias = query.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), like_bias


def _least_squares(
    matrix: Tensor,
    right: Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return solution, residuals, rank and singular values of systems [..., m, n].

    A GPU has the driver `gels`, which returns no rank and no singular values. torch's fake
    implementation refuses, because other drivers return residuals by rank.
    """
    del rcond, driver
    rows, columns = matrix.shape[-2:]
    is_vector = right.dim() == matrix.dim() - 1
    sides = () if is_vector else right.shape[-1:]
    batch = matrix.shape[:-2]
    return (
        matrix.new_empty((*batch, columns, *sides)),
        matrix.new_empty((*batch, *sides) if rows > columns else (0,)),
        matrix.new_empty(0, dtype=torch.int64),
        matrix.new_empty(0),
    )


# cuBLAS's products of 8-bit integers: more rows than these, and sizes that are multiples.
_INT_ROWS, _INT_MULTIPLE = 16, 8


def _int_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the int32 product of int8 matrices.

    torch's fake implementation lacks the checks of `_int_mm_out_cuda` (Blas.cpp). torchao relies on
    them: where they fail it multiplies in float32.

    Raises:
        RuntimeError: as on a GPU.
    """
    if left.shape[0] <= _INT_ROWS:
        raise RuntimeError(
            f"self.size(0) needs to be greater than {_INT_ROWS}, but got {left.shape[0]}"
        )
    for name, size in (("self", left.shape[1]), ("mat2", right.shape[1])):
        if size == 0 or size % _INT_MULTIPLE:
            raise RuntimeError(
                f"{name}.size(1) needs to be greater than 0 and a multiple of {_INT_MULTIPLE}, "
                f"but got {size}"
            )
    return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.int32)


def _quantised_rows(source: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows of 8-bit integers, the scale of each, and the columns of outliers.

    How many columns have outliers depends on values. Here none has, as in a model with random
    weights; `LLM.int8()` (arXiv:2208.07339) multiplies those columns in 16 bits.
    """
    rows = source.numel() // source.shape[-1]
    outliers = source.new_empty(0, dtype=torch.int64) if threshold > 0 else None
    return (
        source.new_empty(source.shape, dtype=torch.int8),
        source.new_empty(rows, dtype=torch.float32),
        outliers,
    )


def _quantised_rows_and_columns(source: Tensor, threshold: float = 0.0) -> tuple[Any, ...]:
    """Return 8-bit integers by rows and by columns, their scales, and the columns of outliers."""
    rows, scales, outliers = _quantised_rows(source, threshold)
    column_scales = source.new_empty(source.shape[-1], dtype=torch.float32)
    return rows, torch.empty_like(rows), scales, column_scales, outliers


def _mixed_product(source: Tensor, rows: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the product of quantised rows and weights, and an input without outliers."""
    return source.new_empty((*rows.shape[:-1], weight.shape[0])), source.new_empty(0)


def _runs_cudnn_ctc(log_probs: Tensor, targets: Tensor, lengths: Any, _: Any, blank: int) -> bool:
    """Return whether cuDNN computes a CTC loss (`_use_cudnn_ctc_loss` in aten's cudnn/LossCTC.cpp).

    cuDNN takes labels of up to 255 per sequence; whether they are fewer is not known here.
    """
    packed = targets.dim() == 1 and targets.dtype == torch.int32
    plain = log_probs.dim() == 3 and log_probs.dtype == torch.float32
    # Lengths in a list need their labels on the CPU; in a tensor they are 32-bit integers, too.
    placed = lengths.dtype == torch.int32 if isinstance(lengths, Tensor) else not targets.is_cuda
    return torch.backends.cudnn.enabled and blank == 0 and packed and plain and placed


def _runs_miopen_ctc(*_: Any) -> bool:
    """Return whether AMD's library computes a CTC loss: never on the emulated GPUs."""
    return False


def _cudnn_ctc(log_probs: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of each sequence and the gradient, which cuDNN computes with it."""
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, _: Any, lengths: Any, *__: Any
) -> tuple[Tensor, Tensor]:
    """Return the CTC loss of each sequence, and the state of each label and time step.

    A sequence has a state for each label, one between two labels, and one at each end. If the
    lengths are in a tensor, the longest sequence has as many labels as their shape allows, or, if
    labels are packed, as all sequences have in the mean.
    """
    times, batch = log_probs.shape[:2]
    if not isinstance(lengths, Tensor):
        labels = max(lengths)
    else:
        labels = targets.shape[1] if targets.dim() == 2 else ceil(targets.shape[0] / batch)
    return log_probs.new_empty(batch), log_probs.new_empty((batch, times, 2 * labels + 1))


# fbgemm_gpu's numbers of dtypes (SparseType in split_embedding_configs.py).
_TABLE_TYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}

_LOOKUPS = re.compile(r"fbgemm::split_embedding_codegen_forward_(un)?weighted_pt2_wrapper")
_UPDATES = re.compile(r"fbgemm::split_embedding_backward_codegen_\w+_(un)?weighted_pt2_wrapper")


def _pooled_rows(*args: Any) -> Tensor:
    """Return the pooled rows of batched tables, by table next to each other: (batch, columns).

    The implementation for shapes is in fbgemm_gpu's build for CUDA. Its schema has over 18
    arguments, which are read by their places here and in `shapes_of`.
    """
    columns_of_tables, columns, indices, offsets = args[6], args[7], args[10], args[11]
    tables = columns_of_tables.numel() - 1
    batch = (offsets.numel() - 1) // tables
    return indices.new_empty((batch, columns), dtype=_TABLE_TYPES[args[17]])


def _updated_tables(gradient: Tensor, *_: Any) -> Tensor:
    """Return the empty gradient of tables that the backward has updated."""
    return gradient.new_empty(0, dtype=torch.float32)


def _quantised_as_is(values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return values rounded as a quantisation does, and which of them it does not clamp."""
    return torch.empty_like(values), torch.empty_like(values, dtype=torch.bool)


def _shifted(operator: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return the shift of flags, which torch's fake implementation refuses.

    A kernel shifts them as the integers of their promoted type.
    """

    def shift(flags: Tensor, other: Any) -> Tensor:
        return operator(flags.to(torch.result_type(flags, other)), other)

    return shift


SHAPES: dict[str, Callable[..., Any]] = {
    "is_set_to": is_same_data,
    "bitsandbytes::int8_mixed_scaled_mm": _mixed_product,
    "bitsandbytes::int8_vectorwise_quant": _quantised_rows,
    "bitsandbytes::int8_double_quant": _quantised_rows_and_columns,
    "_pack_padded_sequence": packed_sequence,
    "_use_cudnn_ctc_loss": _runs_cudnn_ctc,
    "_use_miopen_ctc_loss": _runs_miopen_ctc,
    "_cudnn_ctc_loss": _cudnn_ctc,
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": _like_second,
    "_cudnn_rnn": results_of_forward,
    "_cudnn_rnn_backward": results_of_backward,
    "_thnn_fused_gru_cell": results_of_gru_cell,
    "_thnn_fused_gru_cell_backward": results_of_gru_cell_backward,
    "_efficient_attention_backward": _attention_gradients,
    "flash_attn_3::fwd": flash_attention_3.results_of_forward,
    "flash_attn_3::bwd": flash_attention_3.results_of_backward,
    "fake_quantize_per_tensor_affine_cachemask": _quantised_as_is,
    "fake_quantize_per_channel_affine_cachemask": _quantised_as_is,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _quantised_as_is,
    "_fake_quantize_learnable_per_tensor_affine": _like_first,
    "_fake_quantize_learnable_per_channel_affine": _like_first,
    "_logcumsumexp": _like_first,
    "batch_norm_stats": _statistics,
    "batch_norm_gather_stats_with_counts": _gathered_statistics,
    "batch_norm_elemt": _like_first,
    "batch_norm_backward_reduce": _gradient_sums,
    "batch_norm_backward_elemt": _like_second,
}
"""Operator, of torch without `aten::` -> function of its arguments that returns empty results."""

_SHIFTS: dict[str, Callable[..., Any]] = {
    "__lshift__": torch.bitwise_left_shift,
    "__rshift__": torch.bitwise_right_shift,
    "bitwise_left_shift": torch.bitwise_left_shift,
    "bitwise_right_shift": torch.bitwise_right_shift,
}


# Operators that do less on a GPU than torch's fake implementation allows for.
_ON_GPU: dict[str, Callable[..., Any]] = {
    "_int_mm": _int_product,
    "linalg_lstsq": _least_squares,
}


def shapes_of(base: str, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the function that gives the results of an operator; None if torch has one.

    Args:
        base: its name, of torch's own operators without `aten::`.
        args: its positional arguments.
    """
    if base == "_grouped_mm" and args[0].dtype != torch.bfloat16:
        return _grouped_product
    if base in _ON_GPU and args[0].is_cuda:
        return _ON_GPU[base]
    if _LOOKUPS.fullmatch(base) and args[17] in _TABLE_TYPES:
        return _pooled_rows
    if _UPDATES.fullmatch(base):
        return _updated_tables
    if base in _SHIFTS and args[0].dtype == torch.bool:
        return _shifted(_SHIFTS[base])
    return SHAPES.get(base)


_CPU = _torch._C.DispatchKey.CPU

_DECIDED_BY_NUMBERS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


CPU_OPERAND_BYTES = 1 << 30
"""Most bytes of operands with which an operator runs on the CPU for the shapes of its results."""


def shapes_by_cpu(func: Any) -> Callable[..., Any] | None:
    """Return a function that gives the results of torch's operator by running it on the CPU.

    The operands are zeros. The function returns None if an operand or a result is sparse, or a
    result is a number.

    Returns:
        None if the CPU has no implementation, if the operator writes to its operands, and if the
        numbers of operands decide the shapes of its results.
    """
    schema = func._schema
    decided = set(_DECIDED_BY_NUMBERS) & set(func.tags)
    on_cpu = _torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _CPU)
    if not schema.name.startswith("aten::") or schema.is_mutable or decided or not on_cpu:
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        operands = args, kwargs
        tensors = [each for each in tree_leaves(operands) if isinstance(each, Tensor)]
        if any(each.layout != torch.strided for each in tensors):
            return None
        device = tensors[0].device
        with unset_fake_temporarily():
            args, kwargs = tree_map_only(Tensor, _zeros_on_cpu, operands)
            results = func(*args, **kwargs)
        # A number would be that of zeros.
        leaves = tree_leaves(results)
        if not all(isinstance(each, Tensor) and each.layout == torch.strided for each in leaves):
            return None
        return tree_map_only(Tensor, lambda result: _empty_like(result, device), results)

    return run


def _zeros_on_cpu(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def _empty_like(result: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=device)


# Repeated calls ---------------------------------------------------------------------------------

_PLAIN_VALUES = (
    *(int, float, complex, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True, slots=True)
class _Result:
    """A dense fake tensor without numbers.

    Attributes:
        shape: its shape; `stride` and `offset` are in elements.
        dtype: its dtype.
        device: its fake device.
        shares: index of the call's tensor whose storage it shares; None: a new storage.
        state: the attributes that torch gave it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    shares: int | None
    state: dict[str, Any]

    def build(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a new tensor for a call with these tensors."""
        base = None if self.shares is None else tensors[self.shares]
        if base is not None and torch.is_inference_mode_enabled() and not base.is_inference():
            # In inference mode too a view of such a tensor shares its version counter.
            with torch.inference_mode(mode=False):
                return self._build(base)
        return self._build(base)

    def _build(self, base: Tensor | None) -> Tensor:
        with _torch._C._DisableTorchDispatch():
            if base is None:
                plain = torch.empty_strided(
                    self.shape, self.stride, dtype=self.dtype, device="meta"
                )
            else:
                # Not `torch.empty`: nanotron replaces it while a model is built.
                plain = torch.empty_strided((0,), (1,), dtype=self.dtype, device="meta")
                plain.set_(base.untyped_storage(), self.offset, self.shape, self.stride)
            return fake_on(plain, self.device, self.state)


class RepeatedCalls:
    """Results of operators whose operands have the shapes of an earlier call.

    The layers of a model repeat their operators. FakeTensorMode has such a cache, too, but its
    lookups and results took a third of the time of a capture.
    """

    def __init__(self) -> None:
        self._results: dict[Any, tuple[type | None, tuple[_Result, ...]]] = {}
        self._repeatable: dict[Any, bool] = {}

    def run(
        self,
        function: Callable[..., Any],
        func: Any,
        tensors: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the result of a function.

        Args:
            function: returns the result of a call that repeats no earlier one.
            func: the operator that it implements.
            tensors: the tensors among the arguments.
            args: positional arguments.
            kwargs: arguments by name.
        """
        repeatable = self._repeatable.get(func)
        if repeatable is None:
            repeatable = self._repeatable[func] = _is_repeatable(func)
        if not repeatable:
            return function(*args, **kwargs)
        try:
            # The dtype of a division of integers is the default one. A factory may name a GPU
            # without its index.
            device = None if tensors else torch.cuda.current_device()
            defaults = torch.get_default_dtype(), device
            key = func, _key(args), _key(kwargs.items()), *defaults
            known = self._results.get(key)
        except TypeError:  # also of symbolic sizes, which have no hash
            return function(*args, **kwargs)
        if known is not None:
            kind, results = known
            if kind is None:
                return results[0].build(tensors)
            return kind(result.build(tensors) for result in results)
        result = function(*args, **kwargs)
        kind = type(result) if type(result) in (tuple, list) else None
        results = _results(tensors, result if kind is not None else (result,))
        if results is not None:
            self._results[key] = kind, results
        return result


def _is_repeatable(func: Any) -> bool:
    """Return whether the shapes of an operator's operands decide its results."""
    schema = func._schema
    implicit = _torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        schema.name.startswith("aten::")
        and not schema.name.startswith("aten::lift")
        and not schema.is_mutable
        and not set(_DECIDED_BY_NUMBERS) & set(func.tags)
        # Such operators, as `reshape`, return a view or a copy.
        and not _torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit)
    )


def _key(values: Any) -> Any:
    """Return a key that is equal for calls whose results have equal shapes.

    Raises:
        TypeError: an argument is of another kind.
    """
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or not _is_plain(value):
                raise TypeError
            place = value.stride(), value.storage_offset(), value.fake_device
            parts.append((value.shape, *place, value.dtype, value.fake_mode))
        elif kind in _PLAIN_VALUES:
            # With its type, because 1, 1.0 and True are equal.
            parts.append((kind, value))
        elif kind in (list, tuple):
            parts.append(_key(value))
        else:
            raise TypeError
    return tuple(parts)


def _results(tensors: Sequence[Tensor], results: Sequence[Any]) -> tuple[_Result, ...] | None:
    """Return the results of a call; None if they cannot be built again."""
    storages = [_storage(tensor) for tensor in tensors]
    built: list[_Result] = []
    for result in results:
        if type(result) is not FakeTensor or not _is_plain(result) or result.constant is not None:
            return None
        if result.requires_grad or any(result is tensor for tensor in tensors):
            return None
        storage = _storage(result)
        shares = storages.index(storage) if storage in storages else None
        shape, stride = tuple(result.shape), result.stride()
        if shares is None:
            extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            expected = extent * result.element_size() if result.numel() else 0
            # A result that is a part of a new storage cannot be built without the rest of it.
            if result.storage_offset() or result.untyped_storage().nbytes() != expected:
                return None
        built.append(
            _Result(
                shape,
                stride,
                int(result.storage_offset()),
                result.dtype,
                result.fake_device,
                shares,
                dict(vars(result)),
            )
        )
    new = [_storage(r) for r, each in zip(results, built, strict=True) if each.shares is None]
    return tuple(built) if len({*new}) == len(new) else None


def _storage(tensor: Any) -> int:
    """Return the address of a tensor's storage object, which no other live storage has."""
    return tensor.untyped_storage()._cdata


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
