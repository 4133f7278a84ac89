"""Which elements of the whole model a slice holds, told by slicing parameters of positions."""

import torch
from torch import Tensor, nn

from onerank.ir.errors import SliceError


def fill_with_positions(model: nn.Module, starts: dict[str, int]) -> None:
    """Let every parameter hold the places of its elements among all of the model's, from 1 on."""
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        values = torch.arange(count, dtype=torch.float64, device=parameter.device)
        parameter.data = (values + starts[name]).view(parameter.shape)


def origin_of(name: str, places: Tensor, starts: dict[str, int]) -> tuple[str, Tensor]:
    """Return the whole model's parameter that a slice's stems from, and the places in it.

    Places are -1 where the slice was padded.
    """
    rounded = places.round()
    if not torch.equal(rounded, places):
        raise SliceError(
            f"{name}: slicing changed values and did not only move them, so that the slice cannot "
            "be held against the whole model"
        )
    first = int(rounded.max()) if rounded.numel() else starts.get(name, 1)
    origin = max((n for n, start in starts.items() if start <= first), key=starts.__getitem__)
    own = torch.where(rounded > 0, rounded - starts[origin], -1).long()
    if bool((own < -1).any()):
        raise SliceError(
            f"{name}: its slice holds elements of several parameters of the whole model, so that "
            "it cannot be held against it"
        )
    return origin, own
