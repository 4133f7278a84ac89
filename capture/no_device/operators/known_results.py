"""Numbers of results, computed on the CPU from the known numbers of an operator's operands."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from onerank.capture.fake_tensors import KNOWN_ELEMENTS, is_computable, is_small, most_known
from onerank.capture.no_device.operators.detections import frame_of
from onerank.capture.no_device.operators.operator_calls import OperatorCall, tensors_in
from onerank.capture.no_device.operators.router_choices import CHOICES, RouterChoices
from onerank.capture.no_device.tensor_values import Known, UnknownValues

# Operators that create constants in the shape or the dtype of a tensor.
_CONSTANTS = frozenset("zeros_like ones_like full_like new_zeros new_ones new_full".split())

# Operators that draw numbers, and the functions by which they are drawn. Normal numbers stand for
# inputs and noise, which choose nothing.
_DRAWN: dict[str, Callable[..., Tensor]] = {
    "randperm": torch.randperm,
    "randint": torch.randint,
    "rand": torch.rand,
}

# The module of SyncBatchNorm's autograd function, whose masks select among ranks.
_SYNC_BATCH_NORM = "torch.nn.modules._functions"

# Operators that are given nothing but the sizes of a result, whose dtype has a default.
_OF_SIZES = ("empty", "zeros", "ones", "rand")


class KnownResults:
    """Computes what the known numbers of operands say about an operator's results."""

    def __init__(self, known: Known, unknown: UnknownValues, routers: RouterChoices) -> None:
        """Create the computation.

        Args:
            known: numbers of small fake tensors.
            unknown: decides what a script reads from an unknown tensor.
            routers: gives the choices of routers.
        """
        self._known = known
        self._unknown = unknown
        self._routers = routers
        self._draws = torch.Generator(device="cpu").manual_seed(0)

    def numbers(self, call: OperatorCall) -> Any:
        """Return the numbers of the results; None if they are not known or not small.

        Of several results, those without numbers are None.
        """
        if call.schema.base in _CONSTANTS:
            return self._constants(call)
        if call.schema.base in CHOICES and self._known.get(call.tensors[0]) is None:
            return self._routers.results(call.schema.base, call.operands)
        return self._computed(call)

    def _computed(self, call: OperatorCall) -> Any:
        """Return the results computed from known numbers, else None."""
        # Numbers of large tensors would make the capture as slow as a real step on the CPU.
        computable = all(map(is_computable, call.tensors))
        if not computable or call.schema.namespace != "aten":
            return None
        if call.schema.is_random:
            return self._drawn(call)
        if (answer := _answer_on_finiteness(call)) is not None:
            with unset_fake_temporarily():
                return torch.full(call.tensors[0].shape, answer, device="cpu")
        numbers = {id(tensor): self._known.get(tensor) for tensor in call.tensors}
        known = all(value is not None for value in numbers.values())
        if not known and call.schema.base == "isin":
            # Generated tokens against the end of a sequence: a generation must reach its length.
            with unset_fake_temporarily():
                answer = self._unknown.answer()
                return torch.full(call.tensors[0].shape, answer, device="cpu")
        if not known or (not numbers and not _is_small_factory(call)):
            return None
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: numbers[id(tensor)], (call.args, dict(call.kwargs))
        )
        results = _run_with_numbers(call, args, kwargs)
        limit = is_computable if numbers else is_small
        fits = all(map(limit, tensors_in((results,))))
        return results if fits else None

    def _drawn(self, call: OperatorCall) -> Any:
        """Return a few random integers or uniform numbers; None of other random operators.

        A permutation shuffles data, integers stand for labels and for steps of noise, and uniform
        numbers choose masked tokens or where a segment begins. Any draw is as good as another, but
        a model that selects the valid labels, or cuts the segment out, needs one.
        """
        draw = _DRAWN.get(call.schema.base)
        if draw is None or not _is_small_factory(call):
            return None
        with unset_fake_temporarily():
            # A generator of the GPU has no state here, and the CPU's is the script's.
            numbers = [value for value in call.args if not isinstance(value, torch.Generator)]
            dtype = call.kwargs.get("dtype")
            return draw(*numbers, generator=self._draws, dtype=dtype, device="cpu")

    def _constants(self, call: OperatorCall) -> Any:
        """Return what is created like a tensor whose numbers do not matter; None if it is large."""
        first = call.tensors[0]
        shape = first.shape if call.schema.base.endswith("_like") else call.args[1]
        dtype = call.kwargs.get("dtype") or first.dtype
        if not is_small(torch.empty(shape, dtype=dtype, device="meta")):
            return None
        with unset_fake_temporarily():
            like = torch.empty((), dtype=first.dtype, device="cpu").expand(first.shape)
        kwargs = {name: value for name, value in call.kwargs.items() if name != "memory_format"}
        return _run_with_numbers(call, (like, *call.args[1:]), kwargs)

    def selected_by_masks(self, call: OperatorCall) -> Any:
        """Return the elements of a tensor that masks of known numbers select.

        None if a mask is unknown, and for operators other than `index` and `masked_select`.

        A loss often takes the rows of hidden states whose labels are not padding. SyncBatchNorm
        takes the statistics of the ranks that have samples: all of them.
        """
        if call.schema.base == "masked_select":
            mask = self._known.get(call.operands[1])
            if mask is None:
                return None
            with unset_fake_temporarily():
                shape = torch.broadcast_shapes(call.operands[0].shape, mask.shape)
                count = int(mask.expand(shape).sum())
            return call.operands[0].new_empty(count)
        if call.schema.base != "index":
            return None
        tensor, indices = call.operands
        positions: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                positions.append(index)
                continue
            mask = self._known.get(index)
            if mask is not None:
                with unset_fake_temporarily():
                    count = int(mask.count_nonzero())
            elif frame_of(_SYNC_BATCH_NORM) is not None:
                count = index.numel()
            else:
                return None
            # A mask of n dimensions stands for n indices, one for each of them.
            selected = tensor.new_empty(count, dtype=torch.int64)
            positions += [selected] * index.dim()
        return call.func(tensor, positions)


def _answer_on_finiteness(call: OperatorCall) -> bool | None:
    """Return whether each number is, or is not, finite; None if the operator does not ask that.

    All numbers count as finite. torch asks by comparing a tensor with itself and with infinity.
    """
    base, args = call.schema.base, call.args
    if base in ("isnan", "isinf", "isfinite"):
        return base == "isfinite"
    if base not in ("eq", "ne"):
        return None
    with_itself = len(call.tensors) == 2 and call.tensors[0] is call.tensors[1]
    if with_itself:
        return base == "eq"
    infinite = isinstance(args[1], float) and math.isinf(args[1])
    return base == "ne" if infinite else None


def _run_with_numbers(call: OperatorCall, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU; None if only GPUs have it, () if it returns nothing.

    Args:
        call: the call.
        args: its positional arguments, with numbers.
        kwargs: its arguments by name, with numbers.
    """
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    with unset_fake_temporarily():
        try:
            results = call.func(*args, **kwargs)
        except RuntimeError:
            return None
        if call.schema.base.startswith(("empty", "new_empty")):
            # Collectives write parts of it, which are known then.
            results.zero_()
        return () if results is None else results


def _is_small_factory(call: OperatorCall) -> bool:
    """Return whether a factory is given small sizes, so that its numbers may be computed."""
    total = 1
    for value in call.args:
        if isinstance(value, list | tuple):
            for size in value:
                total *= size if isinstance(size, int) else KNOWN_ELEMENTS + 1
        elif isinstance(value, int) and not isinstance(value, bool):
            total = max(total, value)
    if call.schema.base in _OF_SIZES:
        return total <= most_known(call.kwargs.get("dtype") or torch.get_default_dtype())
    return total <= KNOWN_ELEMENTS
