"""Work handles of asynchronous calls, and marks where they are awaited."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch._C import _distributed_c10d as distributed_c10d

from onerank.capture.patches import untraced
from onerank.ir.errors import CaptureError

# Futures, work objects and the profiler's ranges have no public names or no types in torch.
_torch: Any = torch
_c10d: Any = distributed_c10d

WAIT_MARK = "onerank::wait"


def completed_future(tensors: Sequence[Tensor], *, asynchronous: bool) -> Any:
    """Return a future that holds `tensors`, done once the current streams come to here.

    Only that of an asynchronous call has other streams wait.
    """
    # DDP's reducer and `work.get_future().value()` read the tensors from the future; it must know
    # the devices, to have the waiting stream wait.
    devices = {tensor.device for tensor in tensors if tensor.is_cuda} if asynchronous else ()
    future = _torch.futures.Future(devices=list(devices))
    future.set_result(tensors)
    return future


class AsyncWork(_c10d.Work):
    """What an asynchronous call returns.

    On CUDA it ends when its stream gets there, and whoever waits makes their current stream wait;
    until then the call's tensors are kept, as ProcessGroupNCCL keeps them. Each wait is marked in
    the profiler's streams by a range `onerank::wait` with the call's number. torch's C++ code waits
    through here too, except for DDP's reducer: it asks for the future.
    """

    def __init__(
        self,
        sequence: int,
        outputs: Sequence[Tensor],
        kept: Sequence[Tensor],
        stream: torch.cuda.Stream | None,
        pending: Pending,
    ) -> None:
        """Make the handle.

        Args:
            sequence: number of the call.
            outputs: what the call returns.
            kept: every tensor it touches.
            stream: CUDA's that it runs on, None for a CPU.
            pending: handles not waited for yet.
        """
        super().__init__()
        self._sequence = sequence
        self._outputs: list[Tensor] = list(outputs)
        self._faded: list[weakref.ref[Tensor]] = []
        self._kept: Sequence[Tensor] = kept
        self._pending = pending
        self._stream = stream
        self._event: Any = stream.record_event() if stream is not None else None
        pending.add(self)

    @untraced
    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait for the call."""
        text = msgspec.json.encode({"sequence": self._sequence}).decode()
        mark = _torch.autograd._record_function_with_args_enter(WAIT_MARK, text)
        try:
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device_index).wait_event(self._event)
        finally:
            _torch.autograd._record_function_with_args_exit(mark)
        self._kept = ()
        self._pending.discard(self)
        return True

    def synchronize(self) -> None:
        """Wait, as ProcessGroupNCCL's handle does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait, as ProcessGroupNCCL's handle does."""
        self.wait()

    def get_future(self) -> Any:
        """Return the call's future; waiting for the future leaves no mark."""
        if self._stream is None:
            return completed_future(self.result(), asynchronous=True)
        with torch.cuda.stream(self._stream):
            return completed_future(self.result(), asynchronous=True)

    def result(self) -> list[Tensor]:
        """Return the call's outputs.

        Raises:
            CaptureError: they were freed because no caller waited in time.
        """
        found = self._outputs or [tensor for ref in self._faded if (tensor := ref()) is not None]
        if len(found) < len(self._faded):
            raise CaptureError(
                f"the tensors of asynchronous call {self._sequence} are gone: keep them, or wait "
                "for the call, before you ask for its result",
                code="work-tensors-freed",
            )
        return found

    def is_completed(self) -> bool:
        """Whether the call is over."""
        return self._event is None or self._event.query()

    def is_success(self) -> bool:
        """Whether the call went well: always."""
        return True

    def exception(self) -> None:
        """Return what went wrong: nothing."""

    def release(self) -> None:
        """Stop keeping the tensors of a call that is over."""
        self._faded = [weakref.ref(tensor) for tensor in self._outputs]
        self._outputs, self._kept = [], ()


class Pending:
    """Handles that no caller has waited for yet.

    torch's C++ code may keep a handle after Python has dropped it, which would lose its methods.
    All handles are therefore kept. Their tensors are kept until the call is over, as
    ProcessGroupNCCL does.
    """

    def __init__(self) -> None:
        self._running: dict[int, AsyncWork] = {}
        self._over: dict[int, AsyncWork] = {}
        self._lock = threading.Lock()  # backward issues calls from autograd's threads

    def add(self, work: AsyncWork) -> None:
        """Keep a handle, and let go of the tensors of calls that are over."""
        with self._lock:
            if not _capturing():
                for key, earlier in list(self._running.items()):
                    if earlier.is_completed():
                        earlier.release()
                        self._over[key] = self._running.pop(key)
            self._running[id(work)] = work

    def discard(self, work: AsyncWork) -> None:
        """Forget a handle that was waited for."""
        with self._lock:
            self._running.pop(id(work), None)
            self._over.pop(id(work), None)


def _capturing() -> bool:
    """Whether a CUDA graph is being captured, which forbids to ask for an event."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
