"""Operators, module calls and allocations in the order of a program.

Times are positions in the program: each begin and each end takes one tick. They order events and
mean no duration. `raw_traces` writes a log.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from onerank.annotate.memory.allocator import round_size
from onerank.capture.fake_tensors import sparse_parts
from onerank.capture.no_device.device_memory import DeviceMemory
from onerank.ir import GeneratedWork
from onerank.ir.dtypes import TENSOR_TYPES
from onerank.ir.notes import Note

Category = Literal["cpu_op", "user_annotation"]

_TYPES = {
    getattr(torch, dtype): name for dtype, name in TENSOR_TYPES.items() if hasattr(torch, dtype)
}

# The number by which an execution trace names a dtype: c10::ScalarType.
_DTYPE_CODES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
}

GENERATED = "triton_"
"""Prefix of the kernels that Inductor generates."""

_NUMBER_BYTES = 8

_NOTED_BYTES = 2**20
"""Least operand bytes of an operator on the CPU that a note names; smaller ones are short."""

_UNKNOWN_TYPE = "Tensor(unknown)"

Operands = tuple[list[Any], list[Any], list[str], list[Any]]
"""Values, shapes, types and strides, as an execution trace has them."""

_NO_OPERANDS: Operands = ([], [], [], [])


class Shaped:
    """An operand of which only shape, dtype and perhaps strides are known."""

    def __init__(
        self,
        like: Tensor,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] = (),
    ) -> None:
        self.storage = like
        self.shape = list(like.shape if shape is None else shape)
        self.dtype = dtype
        self.strides = list(strides)


@dataclass(frozen=True)
class WrappedNumber:
    """A Python number that an operator takes as a tensor; an execution trace shows it as one."""

    value: complex

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that torch makes of it."""
        match self.value:
            case bool():
                return torch.bool
            case int():
                return torch.int64
            case float():
                return torch.float64
            case _:
                return torch.complex128


@dataclass(slots=True)
class RecordedEvent:
    """An operator or an annotation.

    Attributes:
        name: as the profiler would name it.
        category: Kineto's.
        thread: number of its thread, from 1.
        begin: tick of its begin.
        end: tick of its end, 0 until it ends.
        inputs: operands it reads.
        outputs: operands it returns.
        sequence: autograd's number of a forward operator's node, or of a backward's; -1 for none.
        forward_thread: of a backward, the thread of its forward; else 0.
        on_device: whether it reads or writes memory of the device.
        of_autograd: whether it is the range of an autograd node.
        node: that node while the event is open, else None. A node holds the tensors that it saved,
            and schedules that split a backward run it twice.
        stream: number of the stream that was current when it began, 0 for the default stream.
        work: of a kernel that Inductor generated.
        python_calls: calls of Python since the event before, by kind.
        untracked: whether it is an operator that autograd does not record.
    """

    name: str
    category: Category
    thread: int
    begin: int
    end: int = 0
    inputs: Operands = _NO_OPERANDS
    outputs: Operands = _NO_OPERANDS
    sequence: int = -1
    forward_thread: int = 0
    on_device: bool = False
    of_autograd: bool = False
    node: object = None
    stream: int = 0
    work: GeneratedWork = field(default_factory=GeneratedWork)
    python_calls: Counter[str] = field(default_factory=Counter[str])
    untracked: bool = False

    @property
    def is_operator(self) -> bool:
        """Whether the event is an operator, and no annotation, autograd node or function."""
        named = "::" in self.name or self.name.startswith(GENERATED)
        return self.category == "cpu_op" and not self.of_autograd and named


@dataclass(slots=True)
class Allocation:
    """Bytes that were allocated, or freed if negative.

    Attributes:
        tick: when.
        thread: on which thread.
        storage: number of the storage.
        bytes: requested, as the allocator rounds it.
        allocated: total of these bytes since the process began.
        reserved: bytes that the allocator then holds.
        stream: number of the stream.
    """

    tick: int
    thread: int
    storage: int
    bytes: int
    allocated: int
    reserved: int
    stream: int


@dataclass(frozen=True, slots=True)
class RecordedWait:
    """A stream, or the host, waits for what a stream was given before.

    Attributes:
        tick: when the wait was issued.
        stream: number of the stream that waits; None for the host.
        awaited: number of the stream that it waits for; None for all streams.
        until: tick before which the awaited operators began.
    """

    tick: int
    stream: int | None
    awaited: int | None
    until: int


@dataclass
class EventLog:
    """Records what the script does; `recording` chooses which part is kept.

    Attributes:
        recording: whether events are kept.
        events: in the order of their begin.
        allocations: of the device, in order.
        live_bytes: requested at present, as the allocator rounds requests.
        memory: the device's memory. Its blocks may be larger than what was requested: how much
            depends on all sizes, so `allocations` have the requests, from which a plan derives
            those of another size.
        stream: number of the current stream, 0 for the default stream.
        waits: of streams for each other and of the host, in order.
    """

    recording: bool = False
    events: list[RecordedEvent] = field(default_factory=list[RecordedEvent])
    allocations: list[Allocation] = field(default_factory=list[Allocation])
    live_bytes: int = 0
    memory: DeviceMemory = field(default_factory=DeviceMemory)
    stream: int = 0
    waits: list[RecordedWait] = field(default_factory=list[RecordedWait])
    _python_calls: Counter[str] = field(default_factory=Counter[str])
    _tick: int = 0
    _stream_of: dict[int, int] = field(default_factory=dict[int, int])
    _threads: dict[int, int] = field(default_factory=lambda: {threading.get_ident(): 1})
    _open: dict[int, list[RecordedEvent]] = field(default_factory=dict[int, list[RecordedEvent]])

    def begin_step(self) -> None:
        """Forget what was recorded, and keep events from here on."""
        self.events.clear()
        self.allocations.clear()
        self.waits.clear()
        self._python_calls = Counter()
        self._open.clear()
        self._tick = 0
        self.memory.reset_peaks()
        self.recording = True

    def end_step(self) -> None:
        """Keep no more events; end those that are open."""
        self.recording = False
        if self.events:
            # What follows the last operator of a step precedes the first of the next one.
            self.events[0].python_calls += self._python_calls
        for stack in self._open.values():
            while stack:
                self._end(stack.pop())

    def begin(
        self, name: str, category: Category = "cpu_op", **details: Any
    ) -> RecordedEvent | None:
        """Begin an event on this thread; None while nothing is recorded."""
        if not self.recording:
            return None
        thread = self._thread()
        event = RecordedEvent(
            name,
            category,
            thread,
            self._next(),
            stream=self.stream,
            python_calls=self._python_calls,
            **details,
        )
        self._python_calls = Counter()
        self.events.append(event)
        self._open.setdefault(thread, []).append(event)
        return event

    def call_python(self, kind: str, count: int = 1) -> None:
        """Count calls of Python of a kind of `PYTHON_CALLS`, for the next event."""
        if self.recording and count:
            self._python_calls[kind] += count

    def end(self, event: RecordedEvent | None) -> None:
        """End an event, and those that began within it and are open."""
        if event is None or event.end:
            return
        stack = self._open[event.thread]
        while stack:
            innermost = stack.pop()
            self._end(innermost)
            if innermost is event:
                return

    def now(self) -> int:
        """Return the current tick."""
        return self._next()

    def wait(self, stream: int, awaited: int, until: int) -> None:
        """Record that a stream waits for what another one was given before a tick."""
        if self.recording and stream != awaited:
            self.waits.append(RecordedWait(self._next(), stream, awaited, until))

    def wait_on_host(self, awaited: int | None, until: int | None = None) -> None:
        """Record that the host waits, as in `cudaStreamSynchronize`.

        Args:
            awaited: number of the stream; None for the whole device.
            until: tick of the event that it waits for; None for all that was given so far.
        """
        if self.recording:
            tick = self._next()
            self.waits.append(RecordedWait(tick, None, awaited, tick if until is None else until))

    def notes(self) -> list[Note]:
        """Return a note on the operators that compute on the CPU, if a step on the GPU has any."""
        if not any(event.on_device for event in self.events):
            return []
        names: Counter[str] = Counter()
        for event in self.events:
            if event.is_operator and not event.on_device:
                taken = _operand_bytes(event.inputs[0])
                if taken >= _NOTED_BYTES:
                    names[event.name] += taken
        if not names:
            return []
        largest = ", ".join(name for name, _ in names.most_common(3))
        return [
            Note(
                f"operators on CPU tensors are no nodes, so the step lacks their time: {largest}",
                code="no-device-cpu-operators",
            )
        ]

    def mark(self) -> int:
        """Return a place in the log for `forget_since`."""
        return len(self.events)

    def forget_since(self, mark: int) -> None:
        """Remove the events that began after a place in the log, and have ended.

        The Python calls before them count for the next event.
        """
        for event in self.events[mark:]:
            self._python_calls += event.python_calls
        del self.events[mark:]

    def generated_work(self) -> tuple[GeneratedWork, ...]:
        """Return the work of each launch of a kernel that Inductor generated, in order."""
        return tuple(event.work for event in self.events if event.name.startswith(GENERATED))

    def innermost(self) -> RecordedEvent | None:
        """Return the innermost open event of this thread."""
        stack = self._open.get(self._thread())
        return stack[-1] if stack else None

    def in_function(self) -> bool:
        """Return whether the forward of an autograd function with a node is open on this thread."""
        stack = self._open.get(self._thread(), ())
        return any(event.sequence >= 0 and not event.is_operator for event in stack)

    def innermost_node(self) -> object:
        """Return the autograd node of the innermost open range on this thread, else None."""
        stack = self._open.get(self._thread(), ())
        return next((event.node for event in reversed(stack) if event.node is not None), None)

    def allocate(self, storage: int, size: int) -> int:
        """Record an allocation; return the bytes that it takes."""
        if not size:
            return 0
        taken = round_size(size, self.memory.settings.roundup_divisions)
        if self.stream:
            self._stream_of[storage] = self.stream
        self.memory.allocate(storage, size, self.stream)
        self._account(storage, taken, self.stream)
        return taken

    def free(self, storage: int, taken: int) -> None:
        """Record the free of an allocation that took these bytes."""
        self.memory.free(storage)
        # A block returns to the pool of the stream on which it was allocated.
        self._account(storage, -taken, self._stream_of.pop(storage, 0))

    def _account(self, storage: int, change: int, stream: int) -> None:
        self.live_bytes += change
        if self.recording:
            totals = self.live_bytes, self.memory.reserved_bytes
            self.allocations.append(
                Allocation(self._next(), self._thread(), storage, change, *totals, stream)
            )

    def _end(self, event: RecordedEvent) -> None:
        event.end, event.node = self._next(), None

    def _next(self) -> int:
        self._tick += 1
        return self._tick

    def _thread(self) -> int:
        return self._threads.setdefault(threading.get_ident(), len(self._threads) + 1)


def _operand_bytes(values: Sequence[Any]) -> int:
    """Return the bytes of described operands; a tensor is its place and the device."""
    total = 0
    for value in values:
        match value:
            case [_, _, _, int(elements), int(size), str()]:
                total += elements * size
            case list():
                total += _operand_bytes(value)
            case _:
                pass
    return total


class Describer:
    """Describes operands as an execution trace does.

    Args:
        storage_of: returns the number of a tensor's storage.
    """

    def __init__(self, storage_of: Callable[[Tensor], int]) -> None:
        self._storage_of = storage_of

    def __call__(self, operands: Sequence[Any]) -> Operands:
        """Return values, shapes, types and strides of operands."""
        columns: Operands = ([], [], [], [])
        for operand in operands:
            for column, item in zip(columns, self._one(operand), strict=True):
                column.append(item)
        return columns

    def _one(self, operand: Any) -> tuple[Any, Any, str, Any]:
        match operand:
            case Tensor():
                return self._tensor(operand)
            case Shaped():
                value = self._tensor(operand.storage)[0]
                type_ = _TYPES.get(operand.dtype, _UNKNOWN_TYPE)
                return value, operand.shape, type_, operand.strides
            case WrappedNumber():
                return [0, 0, 0, 1, _NUMBER_BYTES, "cpu"], [], _TYPES[operand.dtype], []
            case list() | tuple():
                values, shapes, types, strides = self(operand)
                return values, shapes, f"GenericList[{','.join(types)}]", strides
            case _:
                value, type_ = _plain(operand)
                return value, [], type_, []

    def _tensor(self, tensor: Tensor) -> tuple[Any, Any, str, Any]:
        type_ = _TYPES.get(tensor.dtype, _UNKNOWN_TYPE)
        if tensor.layout == torch.sparse_coo:
            # A kernel reads or writes its values; the indices are a few bytes for each row.
            _, values = sparse_parts(tensor)
            return "<Object>", list(values.shape), type_, list(values.stride())
        # Tensors of other layouts have no storage to number.
        if tensor.layout != torch.strided:
            return "<Object>", [], type_, []
        storage = self._storage_of(tensor)
        place = [storage, storage, tensor.storage_offset(), tensor.numel(), tensor.element_size()]
        return [*place, str(tensor.device)], list(tensor.shape), type_, list(tensor.stride())


def _plain(operand: Any) -> tuple[Any, str]:  # noqa: PLR0911  a type per line
    """Return the value and the type of an operand without tensors."""
    match operand:
        case None:
            return "<None>", "None"
        case bool():
            return operand, "Bool"
        case int():
            return operand, "Int"
        case float():
            return operand if math.isfinite(operand) else str(operand), "Double"
        case str():
            return operand, "String"
        case torch.dtype():
            return _DTYPE_CODES.get(operand, -1), "Int"
        case torch.device():
            return str(operand), "Device"
        case torch.layout() | torch.memory_format():
            return 0, "Int"  # an enumeration that no converter reads
        case _:
            return "<Object>", "Object"
