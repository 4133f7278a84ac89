"""The streams on which NCCL would run each call.

As torch's ProcessGroupNCCL has it since 2.8: a call with `async_op=False` runs on the caller's
stream. Any other runs on the group's own stream, or on that of the pair of ranks for a send or
receive outside of a batch; that stream waits for the caller's first.
"""

import os
from collections.abc import Hashable

import torch


class Streams:
    """One stream per key and device, made when first asked for."""

    def __init__(self) -> None:
        self._made: dict[tuple[Hashable, torch.device], torch.cuda.Stream] = {}

    def enter(
        self, key: Hashable, device: torch.device, *, high_priority: bool
    ) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Go to the key's stream, behind what the current stream was given so far.

        Returns:
            The stream that was the current one, and the one that now is.
        """
        place = (key, device)
        if place not in self._made:
            high = high_priority or os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "0") == "1"
            self._made[place] = torch.cuda.Stream(device, priority=-1 if high else 0)
        side = self._made[place]
        before = torch.cuda.current_stream(device.index)  # torch looks an index up sooner
        side.wait_event(before.record_event())
        torch.cuda.set_stream(side)
        return before, side
