"""Run one process as rank R of a world of W ranks, and record every communication call.

The process gets torch's `fake` process group with real group objects. Every `c10d::*` operator is
overridden in the dispatcher (`c10d_ops`): DDP's C++ reducer, FSDP2, functional collectives and
compiled code all pass through it. Each call becomes a `CommCall`, marked in the profile by a range
named `onerank::comm`. The execution trace holds the call as JSON without the group's ranks, which
`Recorder.groups` holds once; Kineto holds only the name; `rf_id` joins the two. Everything inside
the range is emulation, not work of the job.
"""

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from onerank.capture.collective_kernels import CollectiveEmulation
from onerank.capture.collective_kernels.engine import Engine
from onerank.capture.collective_record import CommCall, Group, Payload, payload_of
from onerank.capture.fake_world import c10d_ops as emulate
from onerank.capture.fake_world.async_work import Pending
from onerank.capture.fake_world.c10d_patches import C10dPatches
from onerank.capture.fake_world.object_collectives import Messages
from onerank.capture.fake_world.p2p_phases import Key, StagePurposes, StepPurposes
from onerank.capture.fake_world.vocab_partial_sums import PartialSums
from onerank.ir.errors import CaptureError

c10d: Any = distributed_c10d  # the group registry has no public names and no types in torch

WORLD = "world"

_LARGEST_WORLD = 10_000_000


class Recorder:
    """Stands for rank `rank` of `world_size` while started.

    Attributes:
        rank: global rank.
        world_size: ranks of the job.
        messages: what other ranks send as Python objects, if it can be known.
        calls: every call so far, in issue order.
        groups: global ranks of each group that this rank belongs to, by name.
        refused: the last call that could not be recorded, None if all could.
        engine: what takes the collectives' place on CUDA.
        pending: handles of asynchronous calls that nobody has waited for.
        partial_sums: what is made up of sums that need absent peers, of a script's own calls.
        steps: how many a script that distributes itself has taken.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        messages: Messages | None = None,
        emulation: CollectiveEmulation | None = None,
    ) -> None:
        """Prepare to stand for a rank.

        Args:
            rank: global rank.
            world_size: ranks of the job.
            messages: what other ranks send as Python objects, if it can be known.
            emulation: what takes a collective's place on CUDA; None leaves markers.

        Raises:
            CaptureError: there is no such world, or no such rank in it.
        """
        if world_size > _LARGEST_WORLD:
            raise CaptureError(
                f"a world of {world_size} ranks: expected up to {_LARGEST_WORLD}, whose groups fit "
                "into memory",
                code="world-too-large",
            )
        if not 0 <= rank < world_size:
            raise CaptureError(
                f"rank {rank} of a world of {world_size}: ranks are 0 to {world_size - 1}",
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
        self.partial_sums = PartialSums(watching=self.script_communicates)
        self.steps = 0
        self._known: dict[dist.ProcessGroup, Group] = {}
        self._purposes = StagePurposes()
        self._exchanges = StepPurposes()
        self._lock = threading.Lock()  # backward issues calls from autograd's threads
        self._undo = contextlib.ExitStack()

    @property
    def script_communicates(self) -> bool:
        """Whether the script distributes itself: else what communicates is ours."""
        return self.messages is not None

    @property
    def paced(self) -> bool:
        """Whether collectives on CUDA take their time on the network, or only leave a marker."""
        return self.engine.paced

    @paced.setter
    def paced(self, on: bool) -> None:
        self.engine.paced = on

    @property
    def communicated(self) -> int:
        """Communication calls so far."""
        return len(self.calls)

    def rendezvous(self) -> bool:
        """Go on: absent ranks are never late."""
        return True

    def start(self) -> None:
        """Create the world of several ranks, and record what calls torch.distributed.

        Raises:
            CaptureError: there is a default process group already.
        """
        if dist.is_initialized():
            raise CaptureError(
                "a default process group exists already, and the recorder needs to create it: "
                "start before init_process_group, and stop a recorder that is still running",
                code="group-exists",
            )
        with contextlib.ExitStack() as undo:
            undo.callback(self._leave)
            facade = C10dPatches(self)
            facade.install(undo)
            if self.world_size > 1:  # alone, a script has no process group that it did not create
                facade.create_world()
            emulate.Kernels(self).install(undo)
            undo.enter_context(self._purposes.recorded())
            undo.enter_context(self._exchanges.watched())
            self._undo = undo.pop_all()

    def next_step(self) -> None:
        """Take note that the script, which distributes itself, has taken a step."""
        self.steps += 1
        if self.messages is not None:
            self.messages.next_step()
        self._exchanges.next_step()
        self.partial_sums.next_step()

    def stop(self) -> None:
        """Undo all that `start` did; the calls stay."""
        self._undo.close()

    def _leave(self) -> None:
        if dist.is_initialized():  # a script may have destroyed it itself
            dist.destroy_process_group()
        self._known.clear()

    def new_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Create a process group whose calls are recorded under `name`.

        Args:
            name: a name not in use for other ranks.
            ranks: global ranks of its members, this one among them.

        Raises:
            CaptureError: this rank is not among them, or the name is in use.
        """
        members = tuple(sorted(ranks))
        if self.rank not in members:
            raise CaptureError(
                f"group {name!r} has ranks {members} without rank {self.rank}, which this process "
                "stands for: create only the groups that it belongs to",
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
        """Give a group its name: what its creator called it, made unique by torch's own name."""
        name = group.group_desc
        if name == "default_pg":
            name = WORLD
        elif name in ("", "undefined"):
            name = group.group_name
        if self.groups.setdefault(name, ranks) != ranks:
            name = f"{name}/{group.group_name}"
            self.groups[name] = ranks
        self._known[group] = Group(name, ranks, ranks.index(self.rank), high_priority)

    def group_of(self, group: dist.ProcessGroup | None) -> Group:
        """Look a group up; None is the world.

        Raises:
            CaptureError: it was not made through torch.distributed since `start`.
        """
        found: dist.ProcessGroup = group or c10d._get_default_group()
        if found not in self._known:
            raise CaptureError(
                f"process group {found.group_name!r} ({found.group_desc!r}) was not created "
                "through torch.distributed while the recorder was on: use dist.new_group",
                code="group-unknown",
            )
        return self._known[found]

    def group_if_member(self, group: dist.ProcessGroup | None) -> Group | None:
        """Look a group up, which is None where this rank is no member of it."""
        return None if c10d._rank_not_in_group(group) else self.group_of(group)

    def record(
        self,
        collective: str,
        group: Group,
        counted: Payload | Sequence[Tensor],
        *,
        peer: int | None = None,
        tag: int | None = None,
        asynchronous: bool = False,
        in_split_sizes: Sequence[int] = (),
        out_split_sizes: Sequence[int] = (),
        reduction: str | None = None,
    ) -> CommCall:
        """Keep a call, the next in order.

        Args:
            collective: as in `CommCall`.
            group: the group asked.
            counted: the tensors whose bytes count, or their sum; of a scatter, one rank's.
            peer: rank of the peer or root within the group.
            tag: as in `CommCall`.
            asynchronous: as in `CommCall`.
            in_split_sizes: as in `CommCall`.
            out_split_sizes: as in `CommCall`.
            reduction: as in `CommCall`.

        Raises:
            CaptureError: the group has no such peer, or a type is not known.
        """
        if peer is not None and not 0 <= peer < group.size:
            raise CaptureError(
                f"{collective} with rank {peer} of group {group.name!r}: its ranks are 0 to "
                f"{group.size - 1}",
                code="peer-out-of-range",
            )
        payload = counted if isinstance(counted, Payload) else payload_of(collective, counted)
        if collective == "scatter":  # a part for each, which the root alone has
            payload = payload.times(group.size)
        purpose = None
        if collective in ("send", "recv") and not isinstance(counted, Payload):
            purpose = self._purposes.of(collective, counted)
            if purpose is None:
                key = Key(collective, group.name, peer, payload.bytes)
                purpose = self._exchanges.of(key, counted)
        with self._lock:
            call = CommCall(
                sequence=len(self.calls),
                collective=collective,
                group=group.name,
                group_ranks=group.ranks,
                bytes=payload.bytes,
                dtype=payload.dtype,
                elements=payload.elements,
                peer=None if peer is None else group.ranks[peer],
                tag=tag,
                asynchronous=asynchronous,
                in_split_sizes=tuple(in_split_sizes),
                out_split_sizes=tuple(out_split_sizes),
                phase=purpose and purpose.phase,
                micro_batch=purpose and purpose.micro_batch,
                reduction=reduction,
            )
            self.calls.append(call)
        return call
