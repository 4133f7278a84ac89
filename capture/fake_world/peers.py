"""Peers of the rank: absent ones, or real ones under torchrun."""

import os
import time
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from onerank.capture.collective_kernels import CollectiveEmulation
from onerank.capture.fake_world.object_collectives import Messages
from onerank.capture.fake_world.recorder import Recorder
from onerank.ir.errors import CaptureError

RENDEZVOUS_S = 10.0
"""Longer than any instrument takes to set up."""


class Peers(Protocol):
    """What a capture needs of the other ranks."""

    groups: dict[str, tuple[int, ...]]

    def start(self) -> None:
        """Make the world there for the script."""
        ...

    def stop(self) -> None:
        """Leave the world."""
        ...

    def new_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the process group of `ranks`, this one among them."""
        ...


class RealPeers:
    """The other processes of a torchrun launch; nothing is recorded, all is communicated.

    For holding a slice against the job it stands for.

    Attributes:
        paced: False, since they take the time of their own network.
        communicated: 0, since nobody counts their calls.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        launched = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if launched != (str(rank), str(world_size)):
            found = "nothing" if None in launched else f"rank {launched[0]} of {launched[1]}"
            raise CaptureError(
                f"real peers were asked for as rank {rank} of {world_size}, but torchrun launched "
                f"{found}: launch {world_size} processes with torchrun",
                code="real-job-rank-count",
            )
        self.groups: dict[str, tuple[int, ...]] = {}
        self.paced = False
        self.communicated = 0
        self._size = world_size
        self._meetings = 0
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    def start(self) -> None:
        """Leave the process group to the script, or to the first group asked for."""

    def stop(self) -> None:
        """Leave together, so that no rank tears down what another still uses."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def rendezvous(self) -> bool:
        """Wait for the other ranks, without a collective; after `RENDEZVOUS_S` go on without them.

        Returns whether all came.
        """
        if not dist.is_initialized():
            return True
        store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        self._meetings += 1
        key = f"onerank/meeting/{self._meetings}"
        latest = time.monotonic() + RENDEZVOUS_S
        here = store.add(key, 1)
        while here < self._size and time.monotonic() < latest:
            time.sleep(1e-4)
            here = store.add(key, 0)
        return here >= self._size

    def new_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Create the group with its peers; each rank asks for the groups that it belongs to."""
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
    """Return the peers of a rank.

    Args:
        rank: global rank.
        world_size: ranks of the job.
        real: whether the others are there.
        messages: what absent ones send as Python objects.
        emulation: what takes the place of absent ones' collectives.
    """
    if real:
        return RealPeers(rank, world_size)
    return Recorder(rank, world_size, messages, emulation)
