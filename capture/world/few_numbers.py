"""Sums of a few numbers over absent peers, each of which is taken to hold what this rank does.

A loss, the square of a norm, a count of tokens: scripts go by their size. Megatron-LM multiplies
gradients only where their norm exceeds a limit, and sums of ones are held against the world's size.
Larger sums stay this rank's part: nothing goes by their size, and multiplying takes time.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FEW = 16


@torch.no_grad()
def sum_alike(part: Tensor, operation: Any, ranks: int) -> None:
    """Make a few numbers of this rank what as many ranks alike have for a sum, in place.

    Args:
        part: this rank's part, of any shape; left alone where it has more than a few elements.
        operation: the reduction, as `c10d` operators are given it; left alone are all but sums.
        ranks: how many ranks the group has.
    """
    if part.numel() > _FEW or ranks == 1 or operation.op() != dist.ReduceOp.SUM:
        return
    narrow = part.dtype == torch.bool or (part.is_floating_point() and part.element_size() == 1)
    if not narrow:  # a bool is no number, and of float8 no kernel takes a product
        with torch.inference_mode(part.is_inference()):
            part.data.mul_(ranks)
