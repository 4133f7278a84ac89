"""What is received of peers that are not there."""

from __future__ import annotations

import torch
from torch import Tensor

from onerank.capture.world.issue import raw

# The spread of freshly initialised weights: a receive often fills parameters or activations.
RECEIVED_STD = 0.02


class Receiver:
    """Fills what a peer would have sent, from generators of its own.

    The job's global generators stay as they were: a dropout mask must not depend on the recorder.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def fill(self, tensor: Tensor) -> None:
        """Fill with small normal values, or zeros (valid ids) where the dtype is not floating."""
        tensor = raw(tensor)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.is_meta:
            return
        if not tensor.is_floating_point():
            tensor.zero_()
        elif tensor.element_size() == 1:  # no float8 kernel draws random numbers
            wide = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
            tensor.copy_(wide.normal_(0.0, RECEIVED_STD, generator=self._on(tensor.device)))
        else:
            tensor.normal_(0.0, RECEIVED_STD, generator=self._on(tensor.device))

    def _on(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]
