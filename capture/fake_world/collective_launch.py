"""Launch one emulated call: its result, its stream and its work handle.

Every peer is assumed to contribute this rank's value. A sum of up to 16 elements is therefore
multiplied by the group size: scripts act on such numbers (a loss, a squared norm, a token count).
A larger sum keeps this rank's part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import ScriptObject, Tensor
from torch._C import _distributed_c10d as distributed_c10d

from onerank.capture.collective_kernels.kernels import DeviceRange, device_range
from onerank.capture.collective_record import CommCall, as_json
from onerank.capture.fake_tensors import is_fake, is_small, mark_written, on_gpu
from onerank.capture.fake_world.async_work import AsyncWork, completed_future, profiler_runs
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    from onerank.capture.collective_kernels.kernels import Move
    from onerank.capture.collective_record import Group
    from onerank.capture.fake_world.call_log import CallLog

# torch's profiler ranges have no public names and no types.
_profiling: Any = torch.autograd

# Not `record_param_comms`: torch's observers parse ranges of that name, and a range of that name
# from Python crashes the process (SIGSEGV).
COMM_RANGE = "onerank::comm"


class CallRange:
    """Context manager: the profiler range of one call; does nothing unless a profiler runs."""

    # This class and `CollectiveLaunch` avoid `contextlib.contextmanager`, whose generators cost
    # host time in every call, and so in the step that is measured.
    __slots__ = ("_call", "_range", "_tensors")

    def __init__(self, call: CommCall, tensors: Sequence[Tensor] = ()) -> None:
        """Prepare the range of a call that reads or writes these tensors."""
        self._call, self._tensors, self._range = call, tensors, None

    def __enter__(self) -> None:
        """Begin the range."""
        # In the timed steps no profiler runs, and a range costs the host more than half of what a
        # call of c10d does.
        if profiler_runs():
            self._range = _profiling._record_function_with_args_enter(
                COMM_RANGE, *self._tensors, as_json(self._call)
            )

    def __exit__(self, *_: object) -> None:
        """End the range."""
        if self._range is not None:
            _profiling._record_function_with_args_exit(self._range)


# Megatron-LM rescales gradients only above a norm limit, and scripts compare a sum of ones with the
# world size. No script acts on the magnitude of larger sums, and multiplying them takes GPU time.
_SMALL_SUM_ELEMENTS = 16


def sum_equal_parts(part: Tensor, ranks: int) -> None:
    """Multiply a small sum by the group size in place, as if all ranks contributed this part.

    Args:
        part: this rank's part, any shape; more than 16 elements stay unchanged.
        ranks: size of the group.
    """
    if part.numel() > _SMALL_SUM_ELEMENTS or ranks == 1:
        return
    narrow = part.dtype == torch.bool or (part.is_floating_point() and part.element_size() == 1)
    if not narrow:  # torch multiplies no float8 tensors
        with torch.no_grad(), torch.inference_mode(part.is_inference()):
            # Through `data`, which leaves autograd's version counter alone, as NCCL's write does.
            part.data.mul_(ranks)


# Foreach copies and work objects have no public names and no types in torch.
_torch: Any = torch

_c10d: Any = distributed_c10d

Fill = tuple[Tensor, Tensor]
"""(target, source): the source is repeated over the target."""


class CollectiveLaunch:
    """Context manager: one emulated call, inside its profiler range.

    The operator declares what the call writes and reads; `finish` launches the call's kernel. On
    CUDA everything runs on the stream that NCCL would use. The last kernel, which the converters
    recognise by its name, moves the call's bytes in the time of the network, or is a marker.

    Attributes:
        group: the group of the call.
        paced: whether the call lasts as long as on the network.
    """

    def __init__(
        self,
        recorder: CallLog,
        group: Group,
        call: CommCall,
        tensors: Sequence[Tensor],
        key: object = None,
        *,
        begun_ns: int,
    ) -> None:
        """Prepare a call.

        Args:
            recorder: the recorder that has recorded the call.
            group: the group of the call.
            call: the record of the call.
            tensors: every tensor that it reads or writes.
            key: selects one of the group's streams for an asynchronous call.
            begun_ns: the host's clock when the emulation of the call began.
        """
        self._begun_ns = begun_ns
        self.group = group
        self._recorder = recorder
        self._call = call
        self._tensors = tensors
        self._key = (group.name, key)
        self._range = CallRange(call, tensors)
        self._device = _device_of(tensors)
        self.paced = self._device is not None and recorder.paced and group.size > 1
        self._moves: list[Move] = []
        self._caller_stream: torch.cuda.Stream | None = None
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> CollectiveLaunch:
        """Begin the range, and switch to the stream where the call runs."""
        self._range.__enter__()
        # A synchronous call runs on the caller's stream, as ProcessGroupNCCL's do since torch 2.8.
        if self._device is not None and self._call.asynchronous:
            self._caller_stream, self._stream = self._recorder.engine.enter(
                self._key, self._device, high_priority=self.group.high_priority
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Switch back to the caller's stream, and end the range."""
        if self._caller_stream is not None:
            torch.cuda.set_stream(self._caller_stream)
        self._range.__exit__()
        call = self._call
        self._recorder.pending.times.add(
            call.collective,
            time.perf_counter_ns() - self._begun_ns,
            asynchronous=call.asynchronous,
        )

    def fill(self, fills: Sequence[Fill]) -> None:
        """Fill each target from its source, in the call's paced kernel where memory allows it."""
        copies: list[Fill] = []
        for target, source in fills:
            if self.paced and _same_memory(target, source):
                self._moves.append((device_range(source), device_range(target)))
            elif _lacks_numbers(target):
                mark_written(target, zero=False)
            else:
                copies.append((target, source))
        if copies:
            tile_each([target for target, _ in copies], [source for _, source in copies])

    def reduce(self, tensors: Sequence[Tensor]) -> None:
        """Reduce in place: keep this rank's part, or fill a sum that lacks rows of absent peers."""
        sums = self._recorder.partial_sums
        for tensor in tensors:
            if self._recorder.script_communicates and self._call.reduction == "sum":
                sum_equal_parts(tensor, self.group.size)
            candidate = sums.may_lack_rows(tensor)
            random_sum = sums.filled_sum(self._call, tensor) if candidate else None
            if random_sum is None:
                self.keep([tensor])
            else:
                self.fill([(tensor, random_sum)])

    def reduce_scatter(self, target: Tensor, source: Tensor) -> None:
        """Fill the target with this rank's part of the source, and read the other parts."""
        size, rank = target.numel(), self.group.rank
        sums, random_sum = self._recorder.partial_sums, None
        if sums.may_lack_rows(target):
            part = flat(source).narrow(0, rank * size, size).view(target.shape)
            random_sum = sums.filled_sum(self._call, part)
        if random_sum is not None:
            self.fill([(target, random_sum)])
            self.read([source])
        elif self.paced and _same_memory(target, source):
            source_memory, size = device_range(source), target.nbytes
            part_memory = DeviceRange(source_memory.start + rank * size, size)
            end = part_memory.start + size
            self._moves += [
                (part_memory, device_range(target)),
                (DeviceRange(source_memory.start, part_memory.start - source_memory.start), None),
                (DeviceRange(end, source_memory.start + source_memory.bytes - end), None),
            ]
        elif _lacks_numbers(target):
            mark_written(target, zero=False)
        else:
            tile(target, flat(source).narrow(0, rank * size, size))

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Keep the values of tensors that the call reads and writes."""
        if self.paced:
            self._moves += [
                (device_range(t), device_range(t)) for t in tensors if t.is_contiguous()
            ]

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Declare tensors that the call only reads."""
        if self.paced:
            self._moves += [(device_range(t), None) for t in tensors if t.is_contiguous()]

    def finish(self, outputs: Sequence[Tensor]) -> ScriptObject:
        """Launch the call's kernel and return its work handle."""
        engine, call = self._recorder.engine, self._call
        if self.paced and self._device is not None:
            engine.pace(call, self._device, self._moves)
        elif self._device is not None:
            engine.mark(self._device)
        if call.asynchronous:
            pending = self._recorder.pending
            return AsyncWork(call.sequence, outputs, self._tensors, self._stream, pending).boxed()
        return _c10d._create_work_from_future(completed_future(outputs)).boxed()


def _device_of(tensors: Sequence[Tensor]) -> torch.device | None:
    """Return the GPU of a call; None where its kernels do not run."""
    # The emulation kernels are CUDA code, which ROCm does not run.
    if torch.version.cuda is None:
        return None
    for tensor in tensors:
        if on_gpu(tensor):
            return tensor.device
    return None


def _same_memory(target: Tensor, source: Tensor) -> bool:
    """Return whether a copy of bytes fills the target: contiguous CUDA memory of equal dtype."""
    plain = target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
    return plain and source.numel() > 0 and source.is_cuda and target.is_cuda


def _lacks_numbers(target: Tensor) -> bool:
    # Without a device, the views and copies of a fill took an eighth of a capture's time.
    return is_fake(target) and not is_small(target)


def raw(tensor: Tensor) -> Tensor:
    """Return an alias without autograd history or version counter, as NCCL would write it."""
    return tensor.data


def check_contiguous(tensor: Tensor) -> None:
    """Raise `CaptureError` for a tensor whose elements are not contiguous."""
    if not tensor.is_contiguous():
        raise CaptureError(
            f"a collective got a tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}: pass a contiguous one, from .contiguous()",
            code="collective-not-contiguous",
        )


def flat(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view of a contiguous tensor's memory."""
    check_contiguous(tensor)
    return raw(tensor).view(-1)


def tile(output: Tensor, source: Tensor) -> None:
    """Repeat `source` over `output`: equal sizes copy, W times the size replicates W times."""
    target, piece = flat(output), flat(source)
    if target.numel() == piece.numel():
        target.copy_(piece)
        return
    target, piece = _widen(target, piece)
    size, total = piece.numel(), target.numel()
    if size == 0:  # this rank contributes no element to repeat
        target.zero_()
        return
    # One broadcasting copy: a copy for each rank would be 1,024 kernels at W = 1024.
    whole_pieces = total // size * size
    if whole_pieces:
        target[:whole_pieces].view(-1, size).copy_(piece.expand(total // size, size))
    if whole_pieces < total:
        target[whole_pieces:].copy_(piece[: total - whole_pieces])


def _widen(*tensors: Tensor) -> list[Tensor]:
    # A broadcasting copy moves one element per thread. The widest dtype, complex128, moves 16
    # bytes at a time where sizes and offsets are multiples of 16 bytes.
    step = 16 // tensors[0].element_size()
    same_dtype = len({tensor.dtype for tensor in tensors}) == 1
    if same_dtype and not any(t.numel() % step or t.storage_offset() % step for t in tensors):
        return [tensor.view(torch.complex128) for tensor in tensors]
    return list(tensors)


def tile_each(outputs: list[Tensor], sources: list[Tensor]) -> None:
    """Fill each output from the source of the same index, in one call if shapes are equal."""
    pairs = list(zip(outputs, sources, strict=True))
    if any(output.shape != source.shape for output, source in pairs):
        for output, source in pairs:
            tile(output, source.contiguous())
    elif len(pairs) == 1:
        raw(outputs[0]).copy_(raw(sources[0]))
    elif pairs:
        _torch._foreach_copy_(
            [raw(output) for output in outputs], [raw(source) for source in sources]
        )
