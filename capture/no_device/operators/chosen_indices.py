"""Which tensors hold indices that a model chose: experts, actions, predicted classes, beams.

The scores are unknown without a device. A choice of experts decides how many tokens each computes,
and gets its numbers by `--moe-routing`. A choice that the script only reads, or compares with
labels, decides no shape, so it needs no numbers and counts as no router's.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from onerank.capture.fake_tensors import is_integral
from onerank.capture.no_device.operators.operator_calls import OperatorCall, tensors_in
from onerank.capture.no_device.operators.zero_patterns import MOVES
from onerank.capture.no_device.tensor_values import CHOSEN

_CHOOSE = frozenset("topk argmax argmin max min multinomial sort argsort".split())

_COMPARE = frozenset(("eq", "ne"))


def _no_router() -> None:
    """Do nothing: no router made the choice."""


class ChosenIndices:
    """Follows chosen indices through operators that move them, up to the first that uses them."""

    def __init__(self) -> None:
        self._any = False

    def follow(self, call: OperatorCall, result: Any, use: Callable[[], None] | None) -> None:
        """Mark what an operator chose or moved, and report the choices that it uses.

        Args:
            call: the operator.
            result: its results.
            use: called at the first use of what the operator chose; None if no router chose it.
        """
        base = call.schema.base
        if base in _CHOOSE and call.tensors and call.tensors[0].dtype.is_floating_point:
            self._any = True
            self._mark(result, use or _no_router)
            return
        if not self._any:
            return
        chosen = [tensor for tensor in call.tensors if hasattr(tensor, CHOSEN)]
        if not chosen or (base in _COMPARE and _have_one_shape(call.tensors)):
            return
        if not self._moves(call, len(chosen)):
            self.use(chosen)
        else:
            self._mark(result, _all_of([getattr(tensor, CHOSEN) for tensor in chosen]))

    def use(self, operands: Iterable[Any]) -> None:
        """Report the choices among the operands of an operator or a kernel."""
        if self._any:
            for operand in operands:
                getattr(operand, CHOSEN, _no_router)()

    def _moves(self, call: OperatorCall, count: int) -> bool:
        """Return whether an operator moves the elements of the `count` chosen among its tensors."""
        base = call.schema.base
        if base == "copy_":
            # Also what `_to_copy` calls, of its result and its operand.
            return hasattr(call.args[1], CHOSEN)
        if base in _JOIN:
            return True  # a sequence of a prompt and generated tokens, too
        if base in _TAKE and is_integral(call.tensors[0].dtype):
            # A token by its rank among the candidates that `topk` chose, or by its place in a list.
            return True
        moves = base == "_to_copy" or base in MOVES or call.schema.is_view
        return moves and count == 1 and hasattr(call.tensors[0], CHOSEN)

    def _mark(self, result: Any, use: Callable[[], None]) -> None:
        for tensor in tensors_in((result,)):
            if is_integral(tensor.dtype):
                setattr(tensor, CHOSEN, use)


def _all_of(uses: list[Callable[[], None]]) -> Callable[[], None]:
    """Return a function that calls all of these."""
    if len(uses) == 1:
        return uses[0]

    def use() -> None:
        for each in uses:
            each()

    return use


# Operators whose results have elements of several operands.
_JOIN = frozenset(("cat", "stack", "where", "masked_fill"))

# Operators that take elements of their first tensor by indices.
_TAKE = frozenset(("gather", "index_select", "index", "take"))


def _have_one_shape(tensors: tuple[Tensor, ...]) -> bool:
    return len(tensors) == 2 and tensors[0].shape == tensors[1].shape
