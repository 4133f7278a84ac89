"""Memory of the profiled steps: resident tensors, peak, history, and Python's garbage collector.

Tensors in reference cycles live until the collector runs. It runs after a number of allocations of
Python objects, so at another point in each step and under each instrument. The peak would depend on
chance.
"""

import contextlib
import gc
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onerank.capture.patches import live
from onerank.capture.profiling.allocator_snapshots import (
    EMPTY_SNAPSHOT,
    LastStepHistory,
    Pools,
    StepHistory,
    Storage,
    history_of,
    is_complete,
    last_step_recorded,
    lingering_as,
    resident_by_class,
    sizes_of,
)
from onerank.capture.profiling.window_observations import Observations, RepeatedForward
from onerank.converters.sources.kineto import History, history_name
from onerank.ir.notes import Note

# Share of the peak memory below which collector runs get no note.
_NOTED_SHARE = 0.01


class CollectorMemory:
    """Measures the memory that Python's garbage collector frees in a step.

    Attributes:
        most_bytes: the largest amount freed by one run since the step began.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self._before = 0

    def begin_step(self) -> None:
        """Reset `most_bytes` at the begin of a step."""
        self.most_bytes = 0

    def note(self, peak_bytes: int) -> Note | None:
        """Return a note on the last step; None if the collector freed under 1% of the peak."""
        if self.most_bytes < _NOTED_SHARE * peak_bytes:
            return None
        return Note(
            f"tensors in reference cycles wait for Python's garbage collector, which freed up to "
            f"{self.most_bytes} bytes at once: peak memory depends on when it runs, in the job as "
            "in this capture, and may differ by as much from step to step",
            code="memory-waits-for-collector",
        )

    def _called(self, phase: Literal["start", "stop"], _: object) -> None:
        allocated = torch.cuda.memory_allocated()
        if phase == "start":
            self._before = allocated
        self.most_bytes = max(self.most_bytes, self._before - allocated)

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Measure collector runs while the context lasts."""
        gc.callbacks.append(self._called)
        try:
            yield
        finally:
            gc.callbacks.remove(self._called)


class StepMemory:
    """Writes resident memory to `observed`, and the allocator history of each profiled step.

    A profiler changes how long freed memory lingers and how much memory is reserved, so both are
    taken from the steps before the profiler starts.
    """

    def __init__(
        self, observed: Observations, directory: Path, forward: RepeatedForward | None = None
    ) -> None:
        self._observed = observed
        self._directory = directory
        self._forward = forward
        self._pools = Pools()
        self._reserved_bytes = 0
        self._unprofiled: History | None = None

    @contextlib.contextmanager
    def unprofiled(self) -> Generator[LastStepHistory | None]:
        """Record the steps inside; the last one gives how long freed memory lingers."""
        with last_step_recorded(on_gpu=self._observed.on_gpu) as history:
            yield history
            last = history.last() if history is not None else None
        if last is not None:
            self._unprofiled = history_of(
                EMPTY_SNAPSHOT, last, torch.cuda.current_device(), self._pools
            )

    def note_reserved(self) -> None:
        """Store the peak of the allocator's reserved memory so far."""
        if self._observed.on_gpu:
            self._reserved_bytes = torch.cuda.max_memory_reserved()

    def at_start(self, history: StepHistory) -> int:
        """Write the memory resident at the begin of a step to `observed`; return its bytes."""
        caches = self._forward.cache_tensors() if self._forward is not None else ()
        storages = resident_storages("cuda" if self._observed.on_gpu else "cpu", caches=caches)
        self._observed.resident_bytes = sizes_of(storages)
        if not self._observed.on_gpu:
            return sum(sum(sizes) for sizes in self._observed.resident_bytes.values())
        if history.before is not None:
            device = torch.cuda.current_device()
            sizes_and_pools = resident_by_class(history.before, device, storages, self._pools)
            self._observed.resident_bytes, self._observed.resident_pools = sizes_and_pools
        # Last: the peak must not include the scan above.
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Return the most bytes allocated since the step began; 0 on a CPU, which reports none."""
        return torch.cuda.max_memory_allocated() if self._observed.on_gpu else 0

    def keep(self, history: StepHistory, number: int) -> None:
        """Write the allocator history of a profiled step, if one was recorded."""
        if history.before is None or history.after is None:
            return
        device = torch.cuda.current_device()
        snapshots = history.before, history.after
        if not is_complete(*snapshots, device):
            self._observed.notes.append(
                Note(
                    f"profiled step {number + 1}: the memory history that the script records is "
                    "incomplete for this step, so the streams of its blocks are not known",
                    code="memory-history-incomplete",
                )
            )
            return
        recorded_history = history_of(*snapshots, device, self._pools, self._reserved_bytes)
        if self._unprofiled is not None:
            recorded_history = lingering_as(recorded_history, self._unprofiled)
        if not recorded_history.lingers and recorded_history.action:
            self._observed.notes.append(
                Note(
                    f"profiled step {number + 1}: how long memory lingers without a profiler is "
                    "not known; it is taken as under the profiler",
                    code="memory-linger-unknown",
                )
            )
        (self._directory / history_name(number)).write_bytes(msgspec.json.encode(recorded_history))

    def compare_peaks(self) -> None:
        """Add a note if the peaks of the profiled steps differ."""
        peaks = self._observed.peak_memory_bytes
        if len(set(peaks)) > 1:
            self._observed.notes.append(
                Note(
                    f"peak memory differs between profiled steps, from {min(peaks)} to "
                    f"{max(peaks)} bytes; the graph records the largest",
                    code="peak-memory-varies",
                )
            )


def resident_storages(
    device_type: str, *, fake: bool = False, caches: Iterable[torch.Tensor] = ()
) -> dict[str, tuple[Storage, ...]]:
    """Return the storages of all live tensors on a type of device, by class.

    The classes are "parameters", "gradients", "optimizer" (its state), "kv_cache" and "other"
    (buffers, data and other tensors of the script). A storage counts once, in the first class with
    a tensor of it. The largest storage comes first. Memory that libraries allocate without a Python
    tensor (cuBLAS workspaces, DistributedDataParallel's buckets) is not included.

    Args:
        device_type: "cuda" or "cpu".
        caches: tensors of the KV cache.
        fake: whether fake tensors count, in a capture without a device; otherwise real ones do.
    """
    with _unrecorded():
        tensors, optimizers = live(torch.Tensor), live(torch.optim.Optimizer)
        parameters = [tensor for tensor in tensors if _is_parameter(tensor)]
        # An optimizer may step tensors that are no nn.Parameter, such as flat shards.
        for optimizer in optimizers:
            parameters += [tensor for group in optimizer.param_groups for tensor in group["params"]]
        states = (value for optimizer in optimizers for value in _values(optimizer.state))
        grads = (_gradient(tensor, fake=fake) for tensor in [*parameters, *tensors])
        seen: set[int] = set()
        return {
            name: tuple(
                sorted(_storages(group, device_type, seen, fake=fake), key=lambda s: -s.bytes)
            )
            for name, group in (
                ("parameters", parameters),
                ("gradients", (grad for grad in grads if grad is not None)),
                ("optimizer", states),
                ("kv_cache", caches),
                ("other", tensors),
            )
            if name != "kv_cache" or caches
        }


@contextlib.contextmanager
def _unrecorded() -> Generator[None]:
    """Keep operators of the context out of the profile."""
    # The scan runs while the profiler is on. Reading the parts of a sparse tensor runs operators,
    # which would be in the profiled step and not in the structure step.
    autograd: Any = torch.autograd
    autograd._enable_record_function(False)
    try:
        yield
    finally:
        autograd._enable_record_function(True)


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter; torch marks fake ones, which keep their class."""
    if isinstance(tensor, FakeTensor):
        return isinstance(tensor, nn.Parameter)
    return issubclass(type(tensor), nn.Parameter)


def _gradient(tensor: torch.Tensor, *, fake: bool) -> torch.Tensor | None:
    # The fake tensors of torch.compile have no gradient to read.
    if isinstance(tensor, FakeTensor) and not fake:
        return None
    # torch.compile leaves tensors without a storage.
    with contextlib.suppress(RuntimeError):
        return tensor.grad if tensor.is_leaf else None
    return None


def _values(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an optimizer's state, at any depth."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _values(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _values(value)


def _storages(
    tensors: Iterable[torch.Tensor], device_type: str, seen: set[int], *, fake: bool
) -> list[Storage]:
    storages: list[Storage] = []
    for tensor in tensors:
        for dense in _inside(tensor):
            if isinstance(dense, FakeTensor) != fake:
                continue
            # Parameters of lazy modules raise ValueError until their first forward.
            with contextlib.suppress(RuntimeError, ValueError):
                if dense.device.type != device_type:
                    continue
                storage = dense.untyped_storage()
                address = storage.data_ptr()
                if address not in seen and storage.nbytes():
                    seen.add(address)
                    storages.append(Storage(storage.nbytes(), address))
    return storages


_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
# Layout of a sparse tensor -> methods that return its dense parts.
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _COLUMNS),
}


def _inside(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in a tensor: a DTensor's local tensor, the parts of a sparse one."""
    # A ShardedTensor's shards are live tensors too. Without a shard, its `device` needs a GPU.
    if isinstance(tensor, ShardedTensor):
        return
    if tensor.layout in _PARTS:
        for part in _PARTS[tensor.layout]:
            yield getattr(tensor, part)().detach()
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        inner = getattr(tensor, name)
        # A DTensor names its mesh as well.
        if isinstance(inner, torch.Tensor):
            yield from _inside(inner)
