"""Which elements of a tensor are zero, where their numbers are unknown.

A router may scatter the weights of the chosen experts into zeros, and select the tokens of an
expert by `nonzero(gates)` or `gates > 0`. The weights depend on parameters, but once
`--moe-routing` has chosen the experts, their places do not. So each such tensor has a mask of the
elements that may differ from zero, from which each operator derives the masks of its results. Each
unknown number counts as above 0.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from onerank.capture.fake_tensors import MOST_KNOWN_BOOLS
from onerank.capture.no_device.event_log import WrappedNumber
from onerank.capture.no_device.operators.operator_calls import OperatorCall, tensors_in
from onerank.capture.no_device.tensor_values import Known, Storages, UnknownValues
from onerank.ir.notes import Note

ZERO_PATTERN = "_onerank_nonzero"
"""Attribute of a fake tensor: its mask, the number of its storage, and that storage's write count.

The storage's number is kept because `tensor.data = other` changes the storage, but not attributes.
"""

_ZEROS = frozenset("zeros zeros_like new_zeros zero".split())

MOVES = frozenset(
    "alias detach clone expand permute transpose t select slice unsqueeze squeeze unbind split "
    "split_with_sizes index index_select gather cat stack flip roll".split()
)
"""Operators that move elements: of a mask they make the mask of their result."""

# The mask may have other strides than the tensor, so that it has no such view.
_RESHAPES = frozenset("view _unsafe_view _reshape_alias".split())

# Operators that write elements of their second tensor, or a number, at known places of the first.
_SCATTERS = frozenset("scatter scatter_add index_put".split())

# Functions of each element that are 0 at 0 and above 0 above it.
_OF_EACH_ELEMENT = frozenset("div sqrt square abs relu _to_copy".split())

_COMBINES = frozenset("mul where masked_fill".split())

_REDUCTIONS = frozenset("sum mean amax".split())

# Comparisons with 0: whether the mask is the answer, or its opposite is.
_IS_ABOVE = {"gt": True, "ne": True, "eq": False, "le": False}

_OF_THE_MASK = frozenset("nonzero count_nonzero logical_not".split())


class ZeroPatterns:
    """Masks of the elements that may differ from zero, of tensors with unknown numbers."""

    def __init__(self, known: Known, storages: Storages, unknown: UnknownValues) -> None:
        """Create the patterns.

        Args:
            known: numbers of small fake tensors.
            storages: numbers the storages of tensors.
            unknown: names the script's lines.
        """
        self._known = known
        self._storages = storages
        self._unknown = unknown
        # A write makes the masks of other views of the memory invalid.
        self._writes: dict[int, int] = {}
        self._lines: set[str] = set()

    def numbers(self, call: OperatorCall) -> Tensor | None:
        """Return the numbers of a result that only depend on which elements are zero, else None."""
        base = call.schema.base
        compared = base in _IS_ABOVE and len(call.tensors) == 1 and call.args[1] == 0
        # A conversion runs as `_to_copy`, which calls `copy_` of its result and its operand.
        copied = base == "copy_" and call.args[0].dtype == torch.bool
        converted = copied or (base == "_to_copy" and call.kwargs.get("dtype") == torch.bool)
        if not compared and not converted and base not in _OF_THE_MASK:
            return None
        mask = self._attached(call.tensors[1 if copied else 0])
        if mask is None or (copied and mask.shape != call.args[0].shape):
            return None
        self._lines.add(self._unknown.place())
        with unset_fake_temporarily():
            if base in _OF_THE_MASK:
                return call.func(mask, *call.args[1:], **call.kwargs)
            return mask.clone() if converted or _IS_ABOVE[base] else ~mask

    def of_results(self, call: OperatorCall) -> list[Tensor] | None:
        """Return the masks of an operator's results, before it runs; None if they are unknown."""
        base = call.schema.base.removesuffix("_")
        if base == "_index_put_impl":
            base = "index_put"
        if base in _ZEROS:
            with unset_fake_temporarily():
                return [torch.zeros((), dtype=torch.bool, device="cpu")]
        # The second operand may be the larger one, as where zeros are prepended to a tensor.
        largest = max((tensor.numel() for tensor in call.tensors), default=0)
        if not call.tensors or largest > MOST_KNOWN_BOOLS or "out" in call.kwargs:
            return None
        if base in _SCATTERS:
            mask = self._scattered(call, base)
        elif base in _COMBINES:
            mask = self._combined(call, base)
        elif all(self._attached(tensor) is None for tensor in call.tensors):
            return None
        else:
            mask = self._derived(call, base)
        if mask is None:
            return None
        return [*tensors_in((mask,))]

    def follow(self, call: OperatorCall, result: Any, masks: list[Tensor] | None) -> None:
        """Attach masks to an operator's results, and forget those of memory that it wrote."""
        for tensor in call.written():
            self.forget(tensor)
        results = [*tensors_in((result,))]
        if masks is None or len(masks) != len(results):
            return
        for tensor, mask in zip(results, masks, strict=True):
            if isinstance(tensor, FakeTensor) and tensor.numel() <= MOST_KNOWN_BOOLS:
                number = self._storages.number(tensor)
                writes = self._writes.setdefault(number, 0)
                with unset_fake_temporarily():
                    setattr(tensor, ZERO_PATTERN, (mask.expand(tensor.shape), number, writes))

    def forget(self, tensor: Tensor) -> None:
        """Forget the masks of a tensor's memory, which is written."""
        # A sparse tensor has no storage, and no mask.
        if tensor.layout != torch.strided:
            return
        number = self._storages.number(tensor)
        if number in self._writes:
            self._writes[number] += 1

    def notes(self) -> list[Note]:
        """Return a note on the answers, if any."""
        if not self._lines:
            return []
        return [
            Note(
                "the script reads which elements of a tensor are 0, as of a router's weights; "
                f"those that it wrote count as above 0: {', '.join(sorted(self._lines))}",
                code="no-device-nonzero-weights",
            )
        ]

    def _attached(self, tensor: Any) -> Tensor | None:
        """Return the mask that follows a tensor, else None."""
        mask, number, writes = getattr(tensor, ZERO_PATTERN, (None, 0, 0))
        if mask is None or number != self._storages.number(tensor):
            return None
        return mask if writes == self._writes[number] else None

    def _mask(self, operand: Any) -> Tensor:
        """Return the mask of an operand, which is a tensor or a number."""
        if not isinstance(operand, Tensor):
            return torch.tensor(_number(operand) != 0, device="cpu")
        mask = self._attached(operand)
        if mask is not None:
            return mask
        numbers = self._known.get(operand)
        if numbers is not None:
            return numbers != 0
        return torch.ones((), dtype=torch.bool, device="cpu").expand(operand.shape)

    def _scattered(self, call: OperatorCall, base: str) -> Tensor | None:
        """Return the mask after a write at known places, else None."""
        target, first, second = call.operands[:3]
        puts = base == "index_put"
        source = second if puts else call.operands[3]
        numbers = {id(one): self._known.get(one) for one in tensors_in((first, second)[: 2 - puts])}
        if "reduce" in call.kwargs or any(known is None for known in numbers.values()):
            return None
        with unset_fake_temporarily():
            into = self._mask(target)
            if into.all():
                return None
            written = self._mask(source)
            places: Any = tree_map_only(
                Tensor, lambda one: numbers[id(one)], first if puts else second
            )
            if puts:
                mask = into.index_put(places, written)
            else:
                written = written if written.dim() else written.expand(places.shape)
                mask = into.scatter(first, places, written)
            adds = base == "scatter_add" or (puts and call.operands[3])
            return mask | into if adds else mask

    def _combined(self, call: OperatorCall, base: str) -> Tensor | None:
        """Return the mask of a product, or of a selection by a known condition, else None."""
        condition, *operands = call.operands
        if base == "mul":
            condition, operands = None, call.operands[:2]
        elif base == "masked_fill":
            condition, operands = operands[0], [operands[1], condition]
        # An operator with `out` has the written tensor as its last operand.
        operands = operands[:2]
        shapes = [one.shape for one in (condition, *operands) if isinstance(one, Tensor)]
        with unset_fake_temporarily():
            # Most products have no operand with zeros, and need no mask.
            if all(self._may_not_vanish(operand) for operand in operands):
                return None
            if torch.broadcast_shapes(*shapes).numel() > MOST_KNOWN_BOOLS:
                return None
            first, second = (_without_repeats(self._mask(operand)) for operand in operands)
            if condition is None:
                mask = first & second
            else:
                selects = self._known.get(condition)
                mask = first | second if selects is None else torch.where(selects, first, second)
            return None if mask.all() else mask

    def _may_not_vanish(self, operand: Any) -> bool:
        """Return whether nothing is known of which elements of an operand are 0, or it has few."""
        if not isinstance(operand, Tensor):
            return _number(operand) != 0
        if self._attached(operand) is not None:
            return False
        numbers = self._known.get(operand)
        return numbers is None or (numbers.dim() == 0 and bool(numbers != 0))

    def _derived(self, call: OperatorCall, base: str) -> Any:
        """Return the masks of results of an operator on tensors with masks, else None."""
        mask: Any = None
        with unset_fake_temporarily():
            if base in _OF_EACH_ELEMENT or (base == "clamp_min" and _is_zero(call.args[1])):
                mask = self._attached(call.tensors[0])
            elif base == "copy":
                mask = self._mask(call.args[1]).expand(call.args[0].shape)
            elif base in _REDUCTIONS:
                numbers = self._mask(call.tensors[0]).float()
                kwargs = {name: value for name, value in call.kwargs.items() if name != "dtype"}
                mask = call.func(numbers, *call.args[1:], **kwargs) != 0
            elif base == "add" and len(call.tensors) == 2:
                first, second = (_without_repeats(self._mask(one)) for one in call.tensors)
                mask = first | second
            elif base in _RESHAPES and not isinstance(call.args[1], torch.dtype):
                mask = self._mask(call.args[0]).reshape(call.args[1])
            elif base in MOVES:
                mask = self._moved(call)
        return mask

    def _moved(self, call: OperatorCall) -> Any:
        """Return the masks of results of an operator that moves elements to known places."""
        first, *rest = call.args
        numbers = {id(one): self._known.get(one) for one in tensors_in(rest)}
        if any(known is None for known in numbers.values()):
            return None
        mask = self._mask(first) if isinstance(first, Tensor) else [*map(self._mask, first)]
        others: Any = tree_map_only(Tensor, lambda one: numbers[id(one)], rest)
        kwargs = {name: value for name, value in call.kwargs.items() if name != "memory_format"}
        return call.func(mask, *others, **kwargs)


def _without_repeats(mask: Tensor) -> Tensor:
    """Return one element of each dimension along which a mask repeats; `follow` expands it again.

    A rotary embedding multiplies the heads of all tokens by sines, of which the first are 0: masks
    of each head took a seventh of the CPU time of a capture.
    """
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if size > 1 and stride == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _is_zero(operand: Any) -> bool:
    return not isinstance(operand, Tensor) and _number(operand) == 0


def _number(operand: Any) -> Any:
    return operand.value if isinstance(operand, WrappedNumber) else operand
