"""Run one process as rank R of a world of W ranks, and record every communication call.

The process gets torch's `fake` process group with real group objects. Every `c10d::*` operator is
overridden in the dispatcher (`c10d_ops`): DDP's C++ reducer, FSDP2, functional collectives and
compiled code all pass through it. Each call becomes a `CommCall`, and a profiler range named
`onerank::comm`. The execution trace contains the call as JSON. The ranks of its group are in
`Recorder.groups`, once per group. Kineto contains only the range's name; `rf_id` joins the two.
Everything inside the range is emulation, not work of the job.
"""

import contextlib

import torch.distributed as dist

from onerank.capture.collective_kernels import CollectiveEmulation
from onerank.capture.fake_world.c10d_ops import C10dOperators
from onerank.capture.fake_world.c10d_patches import C10dPatches
from onerank.capture.fake_world.call_log import CallLog, Messages
from onerank.ir.errors import CaptureError


class Recorder(CallLog):
    """Makes this process rank `rank` of `world_size` while started, and records its calls."""

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
            undo.callback(self._leave)
            patches = C10dPatches(self)
            patches.install(undo)
            # In a world of one rank the script alone decides whether a process group exists.
            if self.world_size > 1:
                patches.create_world()
            C10dOperators(self).install(undo)
            undo.enter_context(self._purposes.recorded())
            undo.enter_context(self._exchanges.watched())
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Undo all patches of `start` and destroy the world; the recorded calls stay."""
        self._undo.close()

    def _leave(self) -> None:
        if dist.is_initialized():  # a script may have called destroy_process_group
            dist.destroy_process_group()
        self._known.clear()
