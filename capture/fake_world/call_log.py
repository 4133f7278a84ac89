"""The calls and process groups of an emulated rank, and the state its emulated operators share."""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from onerank.capture.collective_kernels import CollectiveEmulation
from onerank.capture.collective_kernels.kernels import Engine
from onerank.capture.collective_record import CommCall, Group, Payload, payload_of
from onerank.capture.fake_world.async_work import EmulatedCallTimes, Pending
from onerank.capture.fake_world.p2p_phases import Key, Purpose, StagePurposes, StepPurposes
from onerank.capture.fake_world.vocab_partial_sums import PartialSums
from onerank.ir.all_to_all import AllToAllBuffer, exchanged_bytes
from onerank.ir.errors import CaptureError

# torch's group registry has no public names and no types.
c10d: Any = distributed_c10d

WORLD = "world"

_LARGEST_WORLD = 10_000_000  # ranks; the tuples of larger groups do not fit into memory

_symmetric: ContextVar[bool] = ContextVar("_symmetric", default=False)

Address = int | tuple[int, int]
"""The receiver of a message: a global rank, or a group as (size, hash of its tuple of ranks)."""


@contextmanager
def symmetric_memory_calls() -> Generator[None]:
    """Record the calls of this context as those of symmetric memory."""
    token = _symmetric.set(True)
    try:
        yield
    finally:
        _symmetric.reset(token)


class Messages(Protocol):
    """Python objects that ranks send to one another, and the values of small integer tensors."""

    @property
    def collects_sends(self) -> bool:
        """Whether another rank may still need what this process's rank sends."""
        ...

    def send(self, to: Address, objects: list[Any]) -> None:
        """Record what this process's rank sends to a rank, or to a whole group."""
        ...

    def receive(self, src: int, to: Address | None = None) -> list[Any]:
        """Return the next message from rank `src` to this process's rank, or to a whole group."""
        ...

    def skip(self, src: int, to: Address) -> None:
        """Count a message from rank `src` to a whole group whose content is not needed."""
        ...

    def next_step(self) -> None:
        """Count a step of the script."""
        ...


class CallLog:
    """The communication calls and process groups of an emulated rank.

    The emulated operators write to it and read from it. `Recorder` adds the patches that route
    torch's calls to these operators.

    Attributes:
        rank: global rank.
        world_size: ranks of the job.
        messages: objects and small integers that other ranks send; None if the script does not
            distribute itself.
        calls: every call so far, in issue order.
        groups: global ranks of each group that this rank belongs to, by name.
        refused: the error of the last unsupported call, even if the script caught it; else None.
        engine: launches the kernels that emulate collectives on CUDA.
        pending: work handles of asynchronous calls that have not been waited for.
        partial_sums: fills rows of a script's sums that only absent ranks contribute to.
        steps: steps so far of a script that distributes itself.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        messages: Messages | None = None,
        emulation: CollectiveEmulation | None = None,
    ) -> None:
        """Create an empty log.

        Args:
            rank: global rank.
            world_size: ranks of the job.
            messages: objects and small integers that other ranks send, for a script that
                distributes itself.
            emulation: how collectives run on CUDA; None launches marker kernels.

        Raises:
            CaptureError: the world is too large, or the rank is not in it.
        """
        if world_size > _LARGEST_WORLD:
            raise CaptureError(
                f"a world of {world_size} ranks: groups of more than {_LARGEST_WORLD} ranks do "
                "not fit into memory",
                code="world-too-large",
            )
        if not 0 <= rank < world_size:
            raise CaptureError(
                f"rank {rank} is not in a world of {world_size}: ranks are 0 to {world_size - 1}",
                code="rank-out-of-range",
            )
        self.rank = rank
        self.world_size = world_size
        self.messages = messages
        self.refused: CaptureError | None = None
        self.calls: list[CommCall] = []
        self.groups: dict[str, tuple[int, ...]] = {}
        self.engine = Engine(emulation or CollectiveEmulation())
        self.pending = Pending()
        self.partial_sums = PartialSums(enabled=self.script_communicates)
        self.steps = 0
        self._known: dict[dist.ProcessGroup, Group] = {}
        self._purposes = StagePurposes()
        self._exchanges = StepPurposes()
        # Backward issues calls from autograd's threads.
        self._lock = threading.Lock()

    @property
    def script_communicates(self) -> bool:
        """Whether the script distributes itself; otherwise onerank's parallelization does."""
        return self.messages is not None

    @property
    def paced(self) -> bool:
        """Whether collectives on CUDA last as long as on the network; otherwise, markers."""
        return self.engine.paced

    @paced.setter
    def paced(self, on: bool) -> None:
        self.engine.paced = on

    @property
    def call_times(self) -> EmulatedCallTimes:
        """Host time of emulated calls and of waits."""
        return self.pending.times

    @property
    def communicated(self) -> int:
        """Communication calls so far."""
        return len(self.calls)

    def rendezvous(self) -> bool:
        """Return True at once: absent ranks are never late."""
        return True

    def next_step(self) -> None:
        """Count a step of a script that distributes itself."""
        self.steps += 1
        if self.messages is not None:
            self.messages.next_step()
        self._exchanges.next_step()
        self.partial_sums.next_step()

    def new_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Create a process group whose calls are recorded under `name`.

        Args:
            name: a name not in use for other ranks.
            ranks: global ranks of its members, this one among them.

        Raises:
            CaptureError: this rank is not a member, or the name is in use for other ranks.
        """
        # torch sorts the ranks of a group too (`new_group`).
        members = tuple(sorted(ranks))
        if self.rank not in members:
            raise CaptureError(
                f"group {name!r} has ranks {members} without the captured rank {self.rank}: "
                "create only the groups that it belongs to",
                code="group-without-rank",
            )
        if self.groups.get(name, members) != members:
            raise CaptureError(
                f"group {name!r} exists with ranks {self.groups[name]}: "
                f"choose another name for ranks {members}",
                code="group-redefined",
            )
        return c10d.new_group(list(members), group_desc=name)

    def register(
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], *, high_priority: bool = False
    ) -> None:
        """Name a group by its description; append torch's name if that is in use for other ranks.

        A group without a description gets torch's name.
        """
        ranks = tuple(map(int, ranks))  # nanotron takes them from an array of NumPy
        name = group.group_desc
        # torch's description of the default group.
        if name == "default_pg":
            name = WORLD
        elif name in ("", "undefined"):
            name = group.group_name
        # Scripts give the same description to the groups of all replicas, and a name must mean one
        # set of ranks.
        if self.groups.setdefault(name, ranks) != ranks:
            name = f"{name}/{group.group_name}"
            self.groups[name] = ranks
        self._known[group] = Group(name, ranks, ranks.index(self.rank), high_priority)

    def group_of(self, group: dist.ProcessGroup | None) -> Group:
        """Return the record of a process group; None is the world.

        Raises:
            CaptureError: it was not created through torch.distributed since `start`.
        """
        process_group: dist.ProcessGroup = group or c10d._get_default_group()
        if process_group not in self._known:
            raise CaptureError(
                f"process group {process_group.group_name!r} ({process_group.group_desc!r}) was "
                "not created through torch.distributed while the recorder was started: use "
                "dist.new_group",
                code="group-unknown",
            )
        return self._known[process_group]

    def group_if_member(self, group: dist.ProcessGroup | None) -> Group | None:
        """Return the record of a process group; None if this rank is not a member."""
        return None if c10d._rank_not_in_group(group) else self.group_of(group)

    def record(
        self,
        collective: str,
        group: Group,
        payload: Payload | Sequence[Tensor],
        *,
        peer: int | None = None,
        tag: int | None = None,
        asynchronous: bool = False,
        exchange: tuple[AllToAllBuffer, AllToAllBuffer] | None = None,
        reduction: str | None = None,
    ) -> CommCall:
        """Append a call to `calls` and return it.

        Args:
            collective: as in `CommCall`.
            group: the group of the call.
            payload: the tensors whose bytes count, or their total; of a scatter, one rank's part.
            peer: rank of the peer or root within the group.
            tag: as in `CommCall`.
            asynchronous: as in `CommCall`.
            exchange: input and output of an all-to-all.
            reduction: as in `CommCall`.

        Raises:
            CaptureError: the group has no such peer, or a dtype is unknown.
        """
        _check_peer(collective, group, peer)
        tensors = None if isinstance(payload, Payload) else payload
        total = payload if isinstance(payload, Payload) else payload_of(collective, payload)
        # NCCL counts the parts of all ranks, on every rank.
        if collective == "scatter":
            total = total.times(group.size)
        purpose = None
        if collective in ("send", "recv") and tensors is not None:
            purpose = self._purpose(Key(collective, group.name, peer, total.bytes), tensors)
        sent_rows, received_rows = (buffer.rows for buffer in exchange) if exchange else ((), ())
        exchanged = exchanged_bytes(*exchange, group.rank, group.size) if exchange else None
        with self._lock:
            call = CommCall(
                sequence=len(self.calls),
                collective=collective,
                group=group.name,
                group_ranks=group.ranks,
                bytes=total.bytes,
                dtype=total.dtype,
                elements=total.elements,
                peer=None if peer is None else group.ranks[peer],
                tag=tag,
                asynchronous=asynchronous,
                in_split_sizes=tuple(sent_rows),
                out_split_sizes=tuple(received_rows),
                phase=purpose.phase if purpose else None,
                micro_batch=purpose.micro_batch if purpose else None,
                reduction=reduction,
                symmetric=_symmetric.get(),
                exchanged_bytes=exchanged,
            )
            self.calls.append(call)
        return call

    def _purpose(self, key: Key, tensors: Sequence[Tensor]) -> Purpose | None:
        """Return what a send or receive that is issued now transfers; None if unknown."""
        # Stages of torch.distributed.pipelining know; a pipeline written by hand is classified by
        # its backwards.
        return self._purposes.of(key.collective, tensors) or self._exchanges.of(key, tensors)


def _check_peer(collective: str, group: Group, peer: int | None) -> None:
    if peer is not None and not 0 <= peer < group.size:
        raise CaptureError(
            f"{collective} with rank {peer} of group {group.name!r}, whose ranks are 0 to "
            f"{group.size - 1}",
            code="peer-out-of-range",
        )
