"""Launch one emulated call: its result, its stream and its work handle.

Small sums over absent peers are multiplied by the group size, since every peer is assumed to hold
this rank's value. Scripts act on such numbers (a loss, a squared norm, a token count):
Megatron-LM rescales gradients only above a norm limit, and scripts compare a sum of ones with the
world size. Larger sums keep this rank's part, because no script acts on their magnitude and a
multiplication takes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch._C import _distributed_c10d as distributed_c10d

from onerank.capture.collective_kernels.kernels import Memory, memory
from onerank.capture.collective_record import CommCall, as_json
from onerank.capture.fake_world.async_work import AsyncWork, completed_future
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    from onerank.capture.collective_kernels.kernels import Move
    from onerank.capture.collective_record import Group
    from onerank.capture.fake_world.recorder import Recorder

_profiling: Any = torch.autograd  # its ranges have no public names and no types in torch

# Not `record_param_comms`: the observers parse ranges of that name and crash on one of ours.
MARK = "onerank::comm"


class Mark:
    """The range of one call."""

    # No generator of `contextmanager`: the host has little time here. So it is with
    # `CollectiveLaunch`.
    __slots__ = ("_range", "_tensors", "_text")

    def __init__(self, call: CommCall, tensors: Sequence[Tensor] = ()) -> None:
        """Prepare the range of a call that reads or writes these tensors."""
        self._text, self._tensors = as_json(call), tensors

    def __enter__(self) -> None:
        """Begin it."""
        self._range = _profiling._record_function_with_args_enter(MARK, *self._tensors, self._text)

    def __exit__(self, *_: object) -> None:
        """End it."""
        _profiling._record_function_with_args_exit(self._range)


_FEW = 16


@torch.no_grad()
def sum_equal_parts(part: Tensor, operation: Any, ranks: int) -> None:
    """Make a few numbers of this rank what as many ranks alike have for a sum, in place.

    Args:
        part: this rank's part, of any shape; left alone where it has more than a few elements.
        operation: the reduction, as `c10d` operators are given it; left alone are all but sums.
        ranks: how many ranks the group has.
    """
    if part.numel() > _FEW or ranks == 1 or operation.op() != dist.ReduceOp.SUM:
        return
    narrow = part.dtype == torch.bool or (part.is_floating_point() and part.element_size() == 1)
    if not narrow:  # a bool is no number, and of float8 no kernel takes a product
        with torch.inference_mode(part.is_inference()):
            part.data.mul_(ranks)


# Foreach copies and work objects have no public names and no types in torch.
_torch: Any = torch

_c10d: Any = distributed_c10d

Fill = tuple[Tensor, Tensor]
"""(target, source): the target is filled with the source, over and over."""


class CollectiveLaunch:
    """A call between its entry and its return, within the profiler's mark.

    The emulation says what the call writes and reads; `done` ends it. On CUDA all that runs lies on
    the stream where NCCL would be, and ends in a kernel that the converters know by its name: one
    that moves the call's bytes in the time of the network, or a marker.

    Attributes:
        group: the group asked.
        paced: whether the call takes its time on the network.
    """

    def __init__(
        self,
        recorder: Recorder,
        group: Group,
        call: CommCall,
        tensors: Sequence[Tensor],
        key: object = None,
    ) -> None:
        """Prepare a call.

        Args:
            recorder: who keeps it.
            group: the group asked.
            call: what was asked.
            tensors: all that it reads and writes.
            key: names the group's stream on which an asynchronous call runs.
        """
        self.group = group
        self._recorder = recorder
        self._call = call
        self._tensors = tensors
        self._key = (group.name, key)
        self._mark = Mark(call, tensors)
        self._device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if torch.version.cuda is None:  # the kernels are CUDA's
            self._device = None
        self.paced = self._device is not None and recorder.paced and group.size > 1
        self._moves: list[Move] = []
        self._before: torch.cuda.Stream | None = None
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> CollectiveLaunch:
        """Begin the mark, and go to the stream where the call runs."""
        self._mark.__enter__()
        if self._device is not None and self._call.asynchronous:
            self._before, self._stream = self._recorder.engine.enter(
                self._key, self._device, high_priority=self.group.high_priority
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Go back, and end the mark."""
        if self._before is not None:
            torch.cuda.set_stream(self._before)
        self._mark.__exit__()

    def fill(self, fills: Sequence[Fill]) -> None:
        """Fill each target from its source."""
        rest: list[Fill] = []
        for target, source in fills:
            if self.paced and _same_memory(target, source):
                self._moves.append((memory(source), memory(target)))
            else:
                rest.append((target, source))
        if rest:
            tile_each([target for target, _ in rest], [source for _, source in rest])

    def reduce(self, tensors: Sequence[Tensor], operation: Any) -> None:
        """Leave this rank's part in each tensor, or what is made up of a sum that needs others."""
        rows = self._recorder.partial_sums
        for tensor in tensors:
            if self._recorder.script_communicates:
                sum_equal_parts(tensor, operation, self.group.size)
            asks = rows.may_lack_rows(tensor)
            made_up = rows.filled_sum(self._call, tensor, operation) if asks else None
            if made_up is None:
                self.keep([tensor])
            else:
                self.fill([(tensor, made_up)])

    def reduce_scatter(self, target: Tensor, source: Tensor, operation: Any) -> None:
        """Fill the target with its part of the source, and read the other parts."""
        size, rank = target.numel(), self.group.rank
        rows, made_up = self._recorder.partial_sums, None
        if rows.may_lack_rows(target):
            part = flat(source).narrow(0, rank * size, size).view(target.shape)
            made_up = rows.filled_sum(self._call, part, operation)
        if made_up is not None:
            self.fill([(target, made_up)])
            self.read([source])
        elif self.paced and _same_memory(target, source):
            whole, size = memory(source), target.nbytes
            own = Memory(whole.start + rank * size, size)
            after = own.start + size
            self._moves += [
                (own, memory(target)),
                (Memory(whole.start, own.start - whole.start), None),
                (Memory(after, whole.start + whole.bytes - after), None),
            ]
        else:
            tile(target, flat(source).narrow(0, rank * size, size))

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Leave tensors as they are, although the call reads and writes them."""
        if self.paced:
            self._moves += [(memory(t), memory(t)) for t in tensors if t.is_contiguous()]

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Leave tensors as they are; the call reads them."""
        if self.paced:
            self._moves += [(memory(t), None) for t in tensors if t.is_contiguous()]

    def done(self, outputs: Sequence[Tensor]) -> ScriptObject:
        """End the call and return its handle."""
        engine, call = self._recorder.engine, self._call
        if self.paced and self._device is not None:
            engine.pace(call, self._device, self._moves)
        elif self._device is not None:
            engine.mark(self._device)
        if call.asynchronous:
            pending = self._recorder.pending
            return AsyncWork(call.sequence, outputs, self._tensors, self._stream, pending).boxed()
        return _c10d._create_work_from_future(completed_future(outputs, asynchronous=False)).boxed()


def _same_memory(target: Tensor, source: Tensor) -> bool:
    """Whether bytes can be moved as they are."""
    plain = target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
    return plain and source.numel() > 0 and source.is_cuda and target.is_cuda


def raw(tensor: Tensor) -> Tensor:
    """The same memory without autograd history or version counter, as NCCL would write it."""
    return tensor.data


def check_contiguous(tensor: Tensor) -> None:
    """Raise `CaptureError` for a tensor whose elements are not contiguous."""
    if not tensor.is_contiguous():
        raise CaptureError(
            f"a collective got a tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}; it must be contiguous: call .contiguous() on it first",
            code="collective-not-contiguous",
        )


def flat(tensor: Tensor) -> Tensor:
    """A one-dimensional view of a contiguous tensor's memory."""
    check_contiguous(tensor)
    return raw(tensor).view(-1)


def tile(output: Tensor, source: Tensor) -> None:
    """Fill `output` with `source`, over and over: equal sizes copy, W times the size replicates."""
    target, piece = flat(output), flat(source)
    if target.numel() == piece.numel():
        target.copy_(piece)
        return
    target, piece = _widen(target, piece)
    size, room = piece.numel(), target.numel()
    if size == 0:  # no byte of ours to repeat
        target.zero_()
        return
    whole = room // size * size
    if whole:
        target[:whole].view(-1, size).copy_(piece.expand(room // size, size))
    if whole < room:
        target[whole:].copy_(piece[: room - whole])


def _widen(*tensors: Tensor) -> list[Tensor]:
    # A replicating copy moves one element a thread: 16 bytes at a time, where they divide.
    step = 16 // tensors[0].element_size()
    same = len({tensor.dtype for tensor in tensors}) == 1
    if same and not any(t.numel() % step or t.storage_offset() % step for t in tensors):
        return [tensor.view(torch.complex128) for tensor in tensors]
    return list(tensors)


def tile_each(outputs: list[Tensor], sources: list[Tensor]) -> None:
    """Fill each output from the source of the same place, all in one call where shapes agree."""
    pairs = list(zip(outputs, sources, strict=True))
    if any(output.shape != source.shape for output, source in pairs):
        for output, source in pairs:
            tile(output, source.contiguous())
    elif len(pairs) == 1:
        raw(outputs[0]).copy_(raw(sources[0]))
    elif pairs:
        _torch._foreach_copy_([raw(output) for output in outputs], [raw(own) for own in sources])
