"""How many boxes a detector selects, where no device computed their scores.

A detector of torchvision selects boxes by their scores, by non-maximum suppression, and by how well
they match the labels. Each step has a limit in the model's configuration: 2,000 proposals for an
image, of which 512 are trained on, a quarter of them positive. Enough boxes are assumed to reach
these limits, as in a model that is trained. Boxes spread evenly over the levels of a feature
pyramid.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onerank.capture.no_device.operators.operator_calls import OperatorCall, tensors_in
from onerank.ir.notes import Note

_DETECTION = "torchvision.models.detection"

# Modules that select boxes. The loss of Ultralytics takes the anchors that match a label, whose
# number has no limit but that of all anchors; little of the step depends on it.
_DETECTORS = (_DETECTION, "ultralytics.utils")

_POOLING = "torchvision.ops.poolers"

# Attributes of a tensor: of a mask the number of selected elements; of indices, and of what they
# select, the number of positive samples among them.
_SELECTED, _POSITIVE = "_onerank_selected", "_onerank_positive"

_MOVES = frozenset("unbind select squeeze view detach alias slice".split())

_UNITES = frozenset("bitwise_or __or__ logical_or".split())


class Detections:
    """Follows the masks and samples of a detector, and gives the sizes of what they select."""

    def __init__(self) -> None:
        self._used = False

    def selected(self, call: OperatorCall) -> Any:
        """Return the result of a selection by unknown numbers; None outside a detector."""
        if not any(map(frame_of, _DETECTORS)):
            return None
        if call.schema.name == "torchvision::nms":
            boxes = call.tensors[0]
            self._used = True
            return boxes.new_empty(boxes.shape[0], dtype=torch.int64)
        if call.schema.base != "nonzero":
            return None
        self._used = True
        mask = call.tensors[0]
        indices = mask.new_empty((_count(mask), mask.dim()), dtype=torch.int64)
        _copy_counts(mask, indices)
        return indices

    def follow(self, call: OperatorCall, result: Any) -> None:
        """Mark what an operator of a detector makes of masks and samples."""
        if _DETECTION not in sys.modules or not call.tensors:
            return
        base, tensors = call.schema.base, call.tensors
        if base == "index_put_" and tensors[0].dim() == 1:
            # A mask of zeros, and the indices of the boxes that it selects.
            _mark(result, _SELECTED, tensors[1].numel())
        elif base in _UNITES and all(hasattr(tensor, _SELECTED) for tensor in tensors):
            _mark(result, _SELECTED, sum(map(_count, tensors)))
            # A sample has its positive boxes first.
            _mark(result, _POSITIVE, _count(tensors[0]))
        elif base == "eq" and len(tensors) == 2 and tensors[0].dim() == tensors[1].dim() == 2:
            # The best box of each label: one in each row.
            _mark(result, _SELECTED, min(tensor.numel() for tensor in tensors))
        elif base == "eq" and (frame := frame_of(_POOLING)):
            levels = len(frame.f_locals.get("x_filtered") or [None])
            _mark(result, _SELECTED, -(-tensors[0].numel() // levels))
        elif base == "cat":
            for name in (_SELECTED, _POSITIVE):
                if all(hasattr(tensor, name) for tensor in tensors):
                    _mark(result, name, sum(getattr(tensor, name) for tensor in tensors))
        elif base == "index" and len(tensors) == 2:
            _mark(result, _POSITIVE, getattr(tensors[1], _POSITIVE, None))
        elif base == "gt" and len(tensors) == 1 and hasattr(tensors[0], _POSITIVE):
            _mark(result, _SELECTED, getattr(tensors[0], _POSITIVE))
        elif base in _MOVES:
            for tensor in tensors_in((result,)):
                _copy_counts(tensors[0], tensor)

    def notes(self) -> Sequence[Note]:
        """Return a note on the selections, if any."""
        if not self._used:
            return []
        return [
            Note(
                "no device computed the scores of boxes, so the detector selects as many as its "
                "limits allow, and spreads them evenly over the levels of its features",
                code="no-device-detections",
            )
        ]


def frame_of(module: str) -> Any:
    """Return the innermost frame that runs a module, or one in it; None without one."""
    if module not in sys.modules:
        return None
    frame: Any = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(module):
            return frame
        frame = frame.f_back
    return None


def _count(mask: Tensor) -> int:
    return min(getattr(mask, _SELECTED, mask.numel()), mask.numel())


def _mark(result: Any, name: str, value: int | None) -> None:
    if value is not None:
        for tensor in tensors_in((result,)):
            setattr(tensor, name, value)


def _copy_counts(source: Tensor, target: Tensor) -> None:
    for name in (_SELECTED, _POSITIVE):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))
