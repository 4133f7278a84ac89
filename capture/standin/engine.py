"""Puts a kernel in the place of each call: a marker, or one that paces like NCCL's."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from onerank.capture.standin.kernel import Kernels
from onerank.capture.standin.moves import Move
from onerank.capture.standin.plan import Plan, StandIn, plan
from onerank.capture.standin.streams import Streams

if TYPE_CHECKING:
    from onerank.capture.calls import CommCall
    from onerank.converters.nccl import Board


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
        self._plans: dict[tuple[str, int, str, str | None], Plan] = {}
        self._streams = Streams()

    @property
    def paced(self) -> bool:
        """Whether calls take their time on the network."""
        return self._paced

    @paced.setter
    def paced(self, on: bool) -> None:
        self._paced = on and self._standin.network is not None

    def enter(
        self, key: Hashable, device: torch.device, *, high_priority: bool
    ) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Go to the stream that NCCL would use for an asynchronous call; see `Streams.enter`."""
        return self._streams.enter(key, device, high_priority=high_priority)

    def mark(self, device: torch.device) -> None:
        """Leave a marker on the current stream."""
        self._on(device).mark()

    def pace(self, call: CommCall, device: torch.device, moves: Sequence[Move]) -> None:
        """Move the call's bytes on the current stream, in the time of the network.

        Raises:
            CaptureError: the network has no entry for the group.
        """
        kernels = self._on(device)
        # Made anew for each call, plans would take the host longer than NCCL's own launches do.
        key = (call.collective, call.bytes, call.group, call.reduction)
        if key not in self._plans:
            self._plans[key] = self._plan(call, kernels.board)
        kernels.pace(call.collective, self._plans[key], moves)

    def _plan(self, call: CommCall, board: Board) -> Plan:
        network = self._standin.network
        assert network is not None, "no network to pace for"
        return plan(
            call.collective,
            call.bytes,
            call.group,
            call.group_ranks,
            network=network,
            board=board,
            scaled=call.reduction in ("avg", "premul_sum"),
        )

    def _on(self, device: torch.device) -> Kernels:
        if device not in self._kernels:
            self._kernels[device] = Kernels(device, paced=self._standin.network is not None)
        return self._kernels[device]
