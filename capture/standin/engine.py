"""Puts a kernel in the place of each call: a marker, or one that paces like NCCL's."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from onerank.capture.standin.kernel import Kernels, Move
from onerank.capture.standin.plan import StandIn, plan
from onerank.capture.standin.streams import Streams

if TYPE_CHECKING:
    from onerank.capture.calls import CommCall


class Engine:
    """Stand-ins of one process.

    Attributes:
        paced: whether calls hold the GPU as on the stand-in's network; else they leave a marker.
            Always off without a network.
    """

    def __init__(self, standin: StandIn) -> None:
        self._standin = standin
        self._paced = standin.network is not None
        self._kernels: dict[torch.device, Kernels] = {}
        self._streams = Streams()

    @property
    def paced(self) -> bool:
        """Whether calls take their time on the network."""
        return self._paced

    @paced.setter
    def paced(self, on: bool) -> None:
        self._paced = on and self._standin.network is not None

    @contextlib.contextmanager
    def placed(
        self, key: Hashable, device: torch.device, *, asynchronous: bool, high_priority: bool
    ) -> Generator[None]:
        """Run the body on the stream that NCCL would use."""
        with contextlib.ExitStack() as stack:
            if asynchronous:
                stack.enter_context(self._streams.entered(key, device, high_priority=high_priority))
            yield

    def mark(self, device: torch.device) -> None:
        """Leave a marker on the current stream."""
        self._on(device).mark()

    def pace(self, call: CommCall, device: torch.device, moves: Sequence[Move]) -> None:
        """Move the call's bytes on the current stream, in the time of the network.

        Raises:
            CaptureError: the network has no entry for the group.
        """
        network = self._standin.network
        assert network is not None, "no network to pace for"
        major, minor = torch.cuda.get_device_capability(device)
        made = plan(
            call.collective,
            call.bytes,
            call.group,
            call.group_ranks,
            network=network,
            capability=10 * major + minor,
        )
        self._on(device).pace(call.collective, made, moves)

    def _on(self, device: torch.device) -> Kernels:
        if device not in self._kernels:
            self._kernels[device] = Kernels(device, paced=self._standin.network is not None)
        return self._kernels[device]
