"""Launch one kernel per emulated call, on the stream that NCCL would use.

The kernel is a marker, or paced: it lasts as long as the collective would. Streams follow
ProcessGroupNCCL since torch 2.8. A call with `async_op=False` runs on the caller's stream. Any
other call runs on its group's stream, or outside a batch on the stream of its pair of ranks; that
stream first waits for the caller's stream.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from onerank.capture.collective_kernels.kernels import CollectiveKernels, Move
from onerank.capture.collective_kernels.launch_plan import (
    CollectiveEmulation,
    LaunchPlan,
    plan_launch,
)

if TYPE_CHECKING:
    from onerank.capture.collective_record import CommCall
    from onerank.converters.nccl import Interconnect


class Streams:
    """One stream per key and device, created on first use."""

    def __init__(self) -> None:
        self._streams: dict[tuple[Hashable, torch.device], torch.cuda.Stream] = {}

    def enter(
        self, key: Hashable, device: torch.device, *, high_priority: bool
    ) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Make the key's stream current; it waits for the current stream's work so far.

        Returns:
            The previous stream, and the key's stream.
        """
        stream_key = (key, device)
        if stream_key not in self._streams:
            high = high_priority or os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "0") == "1"
            self._streams[stream_key] = torch.cuda.Stream(device, priority=-1 if high else 0)
        side = self._streams[stream_key]
        previous = torch.cuda.current_stream(device.index)  # an index is faster than a device
        side.wait_event(previous.record_event())
        torch.cuda.set_stream(side)
        return previous, side


class Engine:
    """Launches the collective kernels of one process, on all its GPUs."""

    def __init__(self, emulation: CollectiveEmulation) -> None:
        self._emulation = emulation
        self._paced = emulation.network is not None
        self._kernels: dict[torch.device, CollectiveKernels] = {}
        self._plans: dict[tuple[str, int, str, str | None], LaunchPlan] = {}
        self._streams = Streams()

    @property
    def paced(self) -> bool:
        """Whether calls last as long as on the network; always False without a network."""
        return self._paced

    @paced.setter
    def paced(self, on: bool) -> None:
        self._paced = on and self._emulation.network is not None

    def enter(
        self, key: Hashable, device: torch.device, *, high_priority: bool
    ) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Make the stream current that NCCL would use for an asynchronous call."""
        return self._streams.enter(key, device, high_priority=high_priority)

    def mark(self, device: torch.device) -> None:
        """Launch a marker on the current stream."""
        self._on(device).mark()

    def pace(self, call: CommCall, device: torch.device, moves: Sequence[Move]) -> None:
        """Move the call's bytes on the current stream, in the time of the network.

        Raises:
            CaptureError: the network has no entry for the group.
        """
        kernels = self._on(device)
        # Planning each call again would take the host longer than NCCL's own launch.
        key = (call.collective, call.bytes, call.group, call.reduction)
        if key not in self._plans:
            self._plans[key] = self._plan(call, kernels.interconnect)
        kernels.pace(call.collective, self._plans[key], moves)

    def _plan(self, call: CommCall, interconnect: Interconnect) -> LaunchPlan:
        network = self._emulation.network
        assert network is not None, "no network to pace for"
        return plan_launch(
            call.collective,
            call.bytes,
            call.group,
            call.group_ranks,
            network=network,
            interconnect=interconnect,
            scaled=call.reduction in ("avg", "premul_sum"),
        )

    def _on(self, device: torch.device) -> CollectiveKernels:
        if device not in self._kernels:
            self._kernels[device] = CollectiveKernels(
                device, paced=self._emulation.network is not None
            )
        return self._kernels[device]
