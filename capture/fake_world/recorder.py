"""Run one process as rank R of a world of W ranks, and record every communication call.

The process gets torch's `fake` process group with real group objects. Every `c10d::*` operator is
overridden in the dispatcher (`c10d_ops`): DDP's C++ reducer, FSDP2, functional collectives and
compiled code all pass through it. Each call becomes a `CommCall`, and a profiler range named
`onerank::comm`. The execution trace contains the call as JSON. The ranks of its group are in
`Recorder.groups`, once per group. Kineto contains only the range's name; `rf_id` joins the two.
Everything inside the range is emulation, not work of the job.

The other ranks of the job: absent and emulated, or real processes under torchrun.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from onerank.capture.collective_kernels import CollectiveEmulation
from onerank.capture.fake_world.c10d_ops import C10dOperators
from onerank.capture.fake_world.c10d_patches import C10dPatches
from onerank.capture.fake_world.call_log import CallLog, Messages
from onerank.ir.errors import CaptureError


class Recorder(CallLog):
    """Makes this process rank `rank` of `world_size` while started, and records its calls.

    Attributes:
        operators: the emulated `c10d` operators.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        messages: Messages | None = None,
        emulation: CollectiveEmulation | None = None,
    ) -> None:
        """Create a recorder that is not started; arguments as for `CallLog`."""
        super().__init__(rank, world_size, messages, emulation)
        self._undo = contextlib.ExitStack()
        self.operators = C10dOperators(self)

    def start(self) -> None:
        """Patch torch.distributed, and create the world if it has several ranks.

        Raises:
            CaptureError: a default process group exists already.
        """
        if dist.is_initialized():
            raise CaptureError(
                "a default process group exists already, and the recorder needs to create it: "
                "start before init_process_group, and stop a recorder that is still running",
                code="group-exists",
            )
        with contextlib.ExitStack() as undo:
            # Registered first, so it runs last: torch's own functions destroy the group.
            undo.callback(self._leave)
            patches = C10dPatches(self)
            patches.install(undo)
            # In a world of one rank only the script decides whether a process group exists.
            if self.world_size > 1:
                patches.create_world()
            self.operators.install(undo)
            undo.enter_context(self._purposes.recorded())
            undo.enter_context(self._exchanges.watched())
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Undo all patches of `start` and destroy the world; the recorded calls stay."""
        self._undo.close()

    def _leave(self) -> None:
        # A script may have called destroy_process_group.
        if dist.is_initialized():
            dist.destroy_process_group()
        # They are keyed by groups that are destroyed now.
        self._known.clear()


RENDEZVOUS_S = 10.0
"""Longest wait for the other ranks; setting up any profiler takes less."""


class Peers(Protocol):
    """The other ranks as a capture uses them: a world and its process groups."""

    groups: dict[str, tuple[int, ...]]

    def start(self) -> None:
        """Set up the world for the script."""
        ...

    def stop(self) -> None:
        """Tear the world down."""
        ...

    def new_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the process group of `ranks`, this one among them."""
        ...


class RealPeers:
    """The other processes of a torchrun launch, with real communication and no recorder.

    A capture of the real job is the reference for a captured slice.

    Attributes:
        groups: global ranks of each group that this rank created, by name.
        paced: False: the real network gives collectives their duration.
        communicated: 0: calls are not counted.
        call_times: None: no call is emulated.

    Raises:
        CaptureError: torchrun launched another rank or world size, or did not launch this process.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        launched = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if launched != (str(rank), str(world_size)):
            actual = "nothing" if None in launched else f"rank {launched[0]} of {launched[1]}"
            raise CaptureError(
                f"expected a torchrun launch of rank {rank} of {world_size}, but torchrun launched "
                f"{actual}: launch {world_size} processes with torchrun",
                code="real-job-rank-count",
            )
        self.groups: dict[str, tuple[int, ...]] = {}
        self.paced = False
        self.communicated = 0
        self.call_times = None
        self._size = world_size
        self._rendezvous_count = 0
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    def start(self) -> None:
        """Do nothing: the script, or the first `new_group`, creates the default process group."""

    def stop(self) -> None:
        """Wait for the other ranks, which may still communicate, and destroy the process group."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def rendezvous(self) -> bool:
        """Wait for the other ranks for up to `RENDEZVOUS_S`; return whether all arrived.

        It counts arrivals in the default store. A collective would appear in the profile.
        """
        if not dist.is_initialized():
            return True
        store = dist.distributed_c10d._get_default_store()
        self._rendezvous_count += 1
        key = f"onerank/rendezvous/{self._rendezvous_count}"
        latest = time.monotonic() + RENDEZVOUS_S
        arrived = store.add(key, 1)
        while arrived < self._size and time.monotonic() < latest:
            time.sleep(1e-4)
            arrived = store.add(key, 0)
        return arrived >= self._size

    def new_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Create the group together with its other members; the ranks outside it take no part."""
        if not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        self.groups[name] = tuple(ranks)
        group = dist.new_group(list(ranks), group_desc=name, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group


def peers_of(
    rank: int,
    world_size: int,
    *,
    real: bool,
    messages: Messages | None = None,
    emulation: CollectiveEmulation | None = None,
) -> Recorder | RealPeers:
    """Return the other ranks of a job, as rank `rank` sees them.

    Args:
        rank: global rank.
        world_size: ranks of the job.
        real: whether the other ranks are processes of the same torchrun launch.
        messages: objects and small integers that absent ranks send.
        emulation: how collectives with absent ranks run on CUDA.
    """
    if real:
        return RealPeers(rank, world_size)
    return Recorder(rank, world_size, messages, emulation)
