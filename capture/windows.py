"""The windows of a capture: which steps of the script are watched, and how.

Each instrument disturbs what the next would see, so each has steps of its own: warm-up, pure
(no profiler: step time), profiled (Kineto: times and memory), structure (Kineto and execution
trace: operators, shapes, record ids). Host time is never read from the structure window, whose
observer slows every operator tenfold.
"""

import contextlib
import gc
import statistics
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onerank.capture.clock import StepClock
from onerank.capture.scopes import ModuleScopes
from onerank.converters.kineto import PROFILE, STRUCTURE

PLAIN_EXECUTION_TRACE = "et.json"  # the observer writes no gzip

SETTLED_SPREAD = 0.02
MAX_WARM_UP_FACTOR = 4

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How many steps each window takes.

    Attributes:
        warm_up: steps before anything is kept; on a GPU at most four times as many, until the
            last three differ by under 2%.
        pure: steps timed without a profiler.
        settle: whether to go on warming up until the steps are even; ranks that communicate must
            not, since each would stop at a step of its own.
    """

    warm_up: int = 3
    pure: int = 5
    settle: bool = True

    @property
    def least_steps(self) -> int:
        """Steps the script must take: the windows', and one that warms the profiler up."""
        return self.warm_up + self.pure + 3


@dataclass
class Observed:
    """What the windows saw; the traces lie in the directory given."""

    on_gpu: bool = False
    step_ns: tuple[int, ...] = ()
    profiled_step_ns: int = 0
    start_memory_bytes: int = 0
    peak_memory_bytes: int = 0
    notes: list[str] = field(default_factory=list[str])


class Windows:
    """Walks through the windows; `boundary` is called after every optimizer step."""

    def __init__(
        self, plan: Plan, directory: Path, scopes: ModuleScopes, progress: Progress
    ) -> None:
        self.observed = Observed()
        self.steps = 0
        self.complete = False
        self._plan = plan
        self._directory = directory
        self._scopes = scopes
        self._progress = progress
        self._schedule = self._windows()

    def boundary(self) -> None:
        """End a step of the script and begin the next; sets `complete` after the last."""
        self.steps += 1
        try:
            next(self._schedule)
        except StopIteration:
            self.complete = True

    @property
    def least_steps(self) -> int:
        """Steps the script must take for the windows to complete."""
        return self._plan.least_steps

    def close(self) -> None:
        """Leave a window that the script ended in."""
        self._schedule.close()

    def _windows(self) -> Generator[None, None, None]:
        """Each `yield` lets the script take one step; the first was taken before the start."""
        self.observed.on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        yield from self._warm_up()
        yield from self._pure()
        self._progress("profiler warm-up")
        with self._kineto(record_shapes=False):
            yield
        yield from self._profiled()
        yield from self._structure()

    def _warm_up(self) -> Generator[None, None, None]:
        settles = self.observed.on_gpu and self._plan.settle
        limit = self._plan.warm_up * (MAX_WARM_UP_FACTOR if settles else 1)
        clock = StepClock(on_gpu=self.observed.on_gpu)
        clock.mark()
        for step in range(2, limit + 1):
            last = clock.durations_ns()[-3:] if self.observed.on_gpu else ()
            if step > self._plan.warm_up and len(last) == 3 and _spread(last) < SETTLED_SPREAD:
                return
            self._progress(f"warm-up, step {step} of {limit}")
            yield
            clock.mark()
        last = clock.durations_ns()[-3:]
        if len(last) == 3 and _spread(last) >= SETTLED_SPREAD:
            self.observed.notes.append(
                f"the last three warm-up steps still differed by {_spread(last):.1%}"
            )

    def _pure(self) -> Generator[None, None, None]:
        clock = StepClock(on_gpu=self.observed.on_gpu)
        clock.mark()
        for step in range(1, self._plan.pure + 1):
            self._progress(f"pure, step {step} of {self._plan.pure}")
            yield
            clock.mark()
        self.observed.step_ns = clock.durations_ns()

    def _profiled(self) -> Generator[None, None, None]:
        self._progress("profiled step: times and memory")
        clock = StepClock(on_gpu=self.observed.on_gpu)
        with self._kineto(record_shapes=False) as profiler:
            if self.observed.on_gpu:
                torch.cuda.reset_peak_memory_stats()
                self.observed.start_memory_bytes = torch.cuda.memory_allocated()
            else:
                self.observed.start_memory_bytes = _live_bytes()
            clock.mark()
            yield
            clock.mark()
            self.observed.profiled_step_ns = clock.durations_ns()[0]
            if self.observed.on_gpu:
                self.observed.peak_memory_bytes = torch.cuda.max_memory_allocated()
        profiler.export_chrome_trace(str(self._directory / PROFILE))

    def _structure(self) -> Generator[None, None, None]:
        self._progress("structure step: operators and shapes")
        observer = ExecutionTraceObserver()
        observer.register_callback(str(self._directory / PLAIN_EXECUTION_TRACE))
        try:
            with self._kineto(record_shapes=True) as profiler:
                observer.start()
                yield
                observer.stop()
        finally:
            observer.unregister_callback()
        profiler.export_chrome_trace(str(self._directory / STRUCTURE))

    @contextlib.contextmanager
    def _kineto(self, *, record_shapes: bool) -> Generator[profile]:
        activities = [ProfilerActivity.CPU]
        if self.observed.on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        profiler = profile(
            activities=activities,
            record_shapes=record_shapes,
            profile_memory=True,
            acc_events=True,  # without it torch 2.11 warns that events of a cycle are lost
            experimental_config=_ExperimentalConfig(enable_cuda_sync_events=self.observed.on_gpu),
        )
        self._scopes.active = True
        try:
            with profiler:
                yield profiler
                if self.observed.on_gpu:
                    torch.cuda.synchronize()
        finally:
            self._scopes.active = False


def _spread(durations_ns: tuple[int, ...]) -> float:
    return (max(durations_ns) - min(durations_ns)) / statistics.median(durations_ns)


def _live_bytes() -> int:
    """Return the bytes of all live tensors' storages; the CPU allocator keeps no such figure."""
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):
            continue
        if is_traceable_wrapper_subclass(candidate):
            continue  # a DTensor or the like: the tensors inside it are counted
        with contextlib.suppress(RuntimeError):  # torch.compile leaves tensors without a storage
            grad = candidate.grad if candidate.is_leaf else None
            for tensor in (candidate, grad):
                if tensor is not None and tensor.device.type == "cpu" and not tensor.is_sparse:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
