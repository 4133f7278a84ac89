"""Work handles of asynchronous calls, and a profiler range for each wait."""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch._C import _distributed_c10d as distributed_c10d

from onerank.capture.fake_tensors import on_gpu
from onerank.capture.patches import untraced
from onerank.ir import EmulatedCalls
from onerank.ir.errors import CaptureError

# Futures, work objects and the profiler's ranges have no public names or no types in torch.
_torch: Any = torch
_c10d: Any = distributed_c10d

WAIT_RANGE = "onerank::wait"


def profiler_runs() -> bool:
    """Return whether a profiler records ranges of this thread; autograd's threads inherit it."""
    return _torch.autograd._profiler_enabled()


def completed_future(tensors: Sequence[Tensor]) -> Any:
    """Return a future of the tensors of a blocking call, which completes at once."""
    # The class of torch.futures only adds Python methods to this one, for which the host waits.
    future = _torch._C.Future([])
    future.set_result(tensors)
    return future


class CallFuture(_torch._C.Future):
    """The future of an asynchronous call: who waits for it waits for the call.

    DDP's reducer waits in C++, which calls no method of this class.
    """

    def __init__(self, work: AsyncWork, tensors: Sequence[Tensor]) -> None:
        """Create the future of `tensors`, which completes with the current streams' work so far.

        Args:
            work: the handle of the call.
            tensors: its outputs, which the reducer and `value()` read.
        """
        # Without the devices the future would not make the waiting stream wait.
        super().__init__(list({tensor.device for tensor in tensors if on_gpu(tensor)}))
        self._work = work
        self.set_result(tensors)

    @untraced
    def wait(self) -> Any:
        """Make the current stream wait for the call, and return its outputs."""
        self._work.wait()
        return super().wait()


class AsyncWork(_c10d.Work):
    """The work handle of an asynchronous call.

    On CUDA the call completes when its stream reaches its event, and `wait` makes the current
    stream wait for that event. Like ProcessGroupNCCL's handle, it keeps the call's tensors alive
    until then. Each wait is a profiler range `onerank::wait` with the call's sequence number.
    torch's C++ code also waits through `wait`, except DDP's reducer, which waits for the future.
    """

    def __init__(
        self,
        sequence: int,
        outputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        stream: torch.cuda.Stream | None,
        pending: Pending,
    ) -> None:
        """Record the call's end on its stream, and add the handle to `pending`.

        Args:
            sequence: number of the call.
            outputs: the tensors that the call returns.
            kept: every tensor that the call reads or writes.
            stream: the CUDA stream of the call; None on a CPU.
            pending: the handles that have not been waited for.
        """
        super().__init__()
        self._sequence = sequence
        self._outputs: list[Tensor] = list(outputs)
        self._released: list[weakref.ref[Tensor]] = []
        self._kept: Sequence[Tensor] = kept
        self._pending = pending
        self._stream = stream
        self._event: Any = stream.record_event() if stream is not None else None
        pending.add(self)

    @untraced
    def wait(self, timeout: object = None) -> bool:
        """Make the current stream wait for the call."""
        begun = time.perf_counter_ns()
        if profiler_runs():
            text = msgspec.json.encode({"sequence": self._sequence}).decode()
            wait_range = _torch.autograd._record_function_with_args_enter(WAIT_RANGE, text)
            try:
                self._wait_on_stream()
            finally:
                _torch.autograd._record_function_with_args_exit(wait_range)
        else:
            self._wait_on_stream()
        # The current stream has the event in its queue now, so torch's allocator cannot reuse the
        # tensors too early.
        self._kept = ()
        self._pending.discard(self)
        self._pending.times.add(WAIT_RANGE, time.perf_counter_ns() - begun)
        return True

    def _wait_on_stream(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device_index).wait_event(self._event)

    def synchronize(self) -> None:
        """Wait, as ProcessGroupNCCL's handle does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait, as ProcessGroupNCCL's handle does."""
        self.wait()

    def get_future(self) -> Any:
        """Return the call's future."""
        # A CPU has no streams: the call has completed.
        if self._stream is None:
            return CallFuture(self, self.result())
        with torch.cuda.stream(self._stream):
            return CallFuture(self, self.result())

    def result(self) -> list[Tensor]:
        """Return the call's outputs.

        Raises:
            CaptureError: the script dropped them, and the call completed before it waited.
        """
        live = self._outputs or [tensor for ref in self._released if (tensor := ref()) is not None]
        if len(live) < len(self._released):
            raise CaptureError(
                f"{len(self._released) - len(live)} of {len(self._released)} tensors of "
                f"asynchronous call {self._sequence} are freed: keep them, or call wait() before "
                "result()",
                code="work-tensors-freed",
            )
        return live

    def is_completed(self) -> bool:
        """Return whether the call has completed."""
        return self._event is None or self._event.query()

    def is_success(self) -> bool:
        """Return True: an emulated call cannot fail."""
        return True

    def exception(self) -> None:
        """Return None: an emulated call cannot fail."""

    def release(self) -> None:
        """Keep only weak references to the tensors of a completed call."""
        self._released = [weakref.ref(tensor) for tensor in self._outputs]
        self._outputs, self._kept = [], ()


class EmulatedCallTimes:
    """Host time of emulated calls and of waits, while it is enabled.

    Attributes:
        enabled: whether `add` keeps times.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._ns: defaultdict[tuple[str, bool], list[int]] = defaultdict(list)

    def add(self, kind: str, host_ns: int, *, asynchronous: bool = False) -> None:
        """Add a call of a collective, or a wait (`WAIT_RANGE`)."""
        if self.enabled:
            self._ns[kind, asynchronous].append(host_ns)

    def per_step(self, steps: int) -> EmulatedCalls | None:
        """Return the calls of each of `steps` steps; None if they had none."""
        counts = {key: len(times) for key, times in self._ns.items()}
        waits = counts.pop((WAIT_RANGE, False), 0)
        if not counts or not steps:
            return None
        # The median: a call may find the GPU's launch queue full, and then waits for the GPU.
        host_ns = sum(len(times) * statistics.median(times) for times in self._ns.values())
        asynchronous = sum(count for (_, is_async), count in counts.items() if is_async)
        return EmulatedCalls(
            synchronous=round((sum(counts.values()) - asynchronous) / steps),
            asynchronous=round(asynchronous / steps),
            waits=round(waits / steps),
            host_ns=round(host_ns / steps),
        )


class Pending:
    """Handles that have not been waited for.

    Attributes:
        times: host time of calls and waits.
    """

    # torch's C++ code may keep a handle after Python has dropped it, which would lose its Python
    # methods: so handles of completed calls stay too, without their tensors.

    def __init__(self) -> None:
        self.times = EmulatedCallTimes()
        self._running: dict[int, AsyncWork] = {}
        self._completed: dict[int, AsyncWork] = {}
        # Backward issues calls from autograd's threads.
        self._lock = threading.Lock()

    def add(self, work: AsyncWork) -> None:
        """Add a handle, and release the tensors of completed calls."""
        with self._lock:
            # During a capture every handle stays as if its call were running.
            if self._running and not _capturing():
                for key, earlier in list(self._running.items()):
                    if earlier.is_completed():
                        earlier.release()
                        self._completed[key] = self._running.pop(key)
            self._running[id(work)] = work

    def discard(self, work: AsyncWork) -> None:
        """Remove a handle that was waited for."""
        with self._lock:
            self._running.pop(id(work), None)
            self._completed.pop(id(work), None)


def _capturing() -> bool:
    """Return whether a CUDA graph is being captured, which forbids event queries."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
