"""Windows under a profiler: profiled steps, uncontended step, structure step.

Steps with nested tensors need a workaround in the structure step. The execution trace observer
keeps a stack of callers per thread (torch/csrc/profiler/standalone/execution_trace_observer.cpp).
It does not push an operator whose operands it cannot read, such as a nested tensor's sizes, but
pops when the operator ends. The backward of attention over jagged tensors does this so often that
the stack underflows, which kills the process. So the stack first gets as many placeholders as the
step has operators. Callers recorded from placeholders are wrong and are not read: the converter
derives callers from times.
"""

import contextlib
import re
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore
from torch.autograd.profiler import record_function
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from onerank.capture.profiling.allocator_snapshots import recorded
from onerank.capture.profiling.clock import StepClock
from onerank.capture.profiling.module_scopes import Modules, ProfilerScopes
from onerank.capture.profiling.raw_traces import compress
from onerank.capture.profiling.step_memory import StepMemory
from onerank.capture.profiling.step_variance import Work, WorkOfSteps
from onerank.capture.profiling.window_plan import Others, Watch, Window
from onerank.converters.sources.kineto import STRUCTURE, UNCONTENDED, profile_name
from onerank.converters.sources.kineto.read.execution_trace import PLACEHOLDERS

_torch: Any = torch  # the observer has no public name

_NESTED = re.compile("nested|to_padded_tensor", re.IGNORECASE)


def operators_beside_nested(profiler: profile) -> int:
    """Return how many events were profiled; 0 where no operator of nested tensors is among them."""
    inner: Any = profiler.profiler
    events = inner.kineto_results.events()
    return len(events) if any(_NESTED.search(event.name()) for event in events) else 0


def deepen(count: int, *, on_gpu: bool) -> None:
    """Put `count` placeholders on the stacks of a registered observer that is not running.

    Args:
        count: for each thread that runs operators of the step.
        on_gpu: whether backward runs in a thread of the GPU's.
    """
    _deepen(count)
    if on_gpu:
        with torch.enable_grad():
            _Deepened.apply(torch.zeros((), device="cuda", requires_grad=True), count).backward()  # pyright: ignore


class _Deepened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _deepen(ctx.count)
        return grads[0], None


def _deepen(count: int) -> None:
    """Begin ranges while the observer runs, and end them while it does not: they stay."""
    ranges = [record_function(PLACEHOLDERS) for _ in range(count)]
    _torch._C._profiler._enable_execution_trace_observer()
    with record_function(PLACEHOLDERS):  # written, as those between are not
        pass
    for one in ranges:
        one.__enter__()
    with record_function(PLACEHOLDERS):
        pass
    _torch._C._profiler._disable_execution_trace_observer()
    for one in reversed(ranges):
        one.__exit__(None, None, None)


OPERATOR_S = 0.5
"""Longer than nearly every operator takes."""


class _Profile(profile):
    """Kineto's, also where a script names NCCL and torch is built without: as for a CPU.

    torch would ask NCCL for its version.
    """

    def _get_distributed_info(self) -> Any:
        base: Any = super()
        without = dist.is_initialized() and dist.get_backend() == "nccl"
        return None if without and not dist.is_nccl_available() else base._get_distributed_info()


@contextlib.contextmanager
def kineto(modules: Modules, *, on_gpu: bool, record_shapes: bool) -> Generator[profile]:
    """Profile what runs inside, with memory, and with the modules as scopes.

    Args:
        modules: what the script calls.
        on_gpu: whether to profile the GPU too; it is waited for at both ends.
        record_shapes: whether to keep operand shapes, which slows every operator.
    """
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    profiler = _Profile(
        activities=activities,
        record_shapes=record_shapes,
        profile_memory=True,
        acc_events=True,  # see `unparsed`
        experimental_config=_ExperimentalConfig(enable_cuda_sync_events=on_gpu),
    )
    with modules.heard_by(ProfilerScopes()), unparsed(profiler):
        yield profiler
        if on_gpu:
            torch.cuda.synchronize()


@contextlib.contextmanager
def unparsed(profiler: profile) -> Generator[None]:
    """Run a profiler whose events nobody asks torch for.

    Told to accumulate events, torch makes an object of each as it stops, which takes longer than
    the step; not told so, torch 2.11 warns that events of a cycle are lost.
    """
    with profiler:
        inner = profiler.profiler
        assert inner is not None
        inner.acc_events = False
        yield


def write(profiler: profile, file: Path) -> None:
    """Write what was profiled as a Chrome trace, gzipped: torch does that line by line."""
    plain = file.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    compress(plain, file)


@contextlib.contextmanager
def execution_trace(file: Path) -> Generator[ExecutionTraceObserver]:
    """Write to `file` what operators ran between the observer's start and stop."""
    observer = ExecutionTraceObserver()
    observer.register_callback(str(file))
    try:
        yield observer
    finally:
        observer.stop()
        _let_operators_end()
        observer.unregister_callback()


def _let_operators_end() -> None:
    """Wait for what other threads of the script began under an observer, which is then freed.

    An operator tells the observer of its end (`onFunctionExit` in
    torch/csrc/profiler/standalone/execution_trace_observer.cpp) without asking whether it lives.
    """
    if threading.active_count() > 1:
        time.sleep(OPERATOR_S)


PLAIN_EXECUTION_TRACE = "et.json"  # the observer writes no gzip

_UNLIKE_TRIES = 7
"""How many more steps the last window may see, until one does the work of the profiled one."""

_MOST_PASSED = 7
"""How many steps behind skipped ones may pass by: where every other is skipped, all would."""


class ProfiledWindows:
    """Traces of steps, into the directory; what they held and took, into `observed`.

    Attributes:
        work: that of the last profiled step.
        structured: whether a step's structure was taken.
    """

    def __init__(
        self, watch: Watch, memory: StepMemory, steps: WorkOfSteps, others: Others | None
    ) -> None:
        self.work = Work(0, 0)
        self.structured = False
        self._plan = watch.plan
        self._directory = watch.directory
        self._modules = watch.modules
        self._progress = watch.progress
        self._observed = watch.observed
        self._memory = memory
        self._steps = steps
        self._others = others
        self._passed = 0
        self._beside_nested = 0

    def warm_up(self) -> Window:
        """Profile a step that nobody keeps: the first sets the profiler up."""
        self._progress("profiler warm-up")
        with self._kineto(record_shapes=False):
            skipped = yield
        yield from self._behind(skipped=skipped)

    def step(self, number: int) -> Window:
        """Profile times and memory of a step, the `number`-th from 0."""
        skipped = True
        while skipped:
            of = f" {number + 1} of {self._plan.repeat}" if self._plan.repeat > 1 else ""
            self._progress(f"profiled step{of}: times and memory")
            on_gpu = self._observed.on_gpu
            clock = StepClock(on_gpu=on_gpu)
            with self._kineto(record_shapes=False) as profiler, recorded(on_gpu=on_gpu) as history:
                start = self._memory.at_start(history)
                self._meet()
                clock.mark()
                begun = time.perf_counter_ns()
                skipped = yield
                host_ns = time.perf_counter_ns() - begun
                clock.mark()
                step_ns = clock.durations_ns()[0]
                peak = self._memory.peak()
                history.end()
            if not skipped:
                self.work = self._steps.by_step[-1]
                self._observed.start_memory_bytes.append(start)
                self._observed.peak_memory_bytes.append(peak)
                self._observed.profiled_step_ns.append(step_ns)
                self._observed.profiled_host_ns.append(host_ns)
                self._beside_nested = operators_beside_nested(profiler)
                write(profiler, self._directory / profile_name(number))
                self._memory.keep(history, number)
            yield from self._behind(skipped=skipped)

    def alone(self, others: Others) -> Window:
        """Profile a step in which collectives leave markers alone, after one to settle in."""
        self._progress("profiled step: kernels with no communication beside them")
        others.paced = False
        try:
            skipped = yield
            yield from self._behind(skipped=skipped)
            skipped = True
            while skipped:
                with self._kineto(record_shapes=False) as profiler:
                    skipped = yield
                if not skipped:
                    write(profiler, self._directory / UNCONTENDED)
                yield from self._behind(skipped=skipped)
        finally:
            others.paced = True

    def structure(self) -> Window:
        """Take the structure of a step that does the work of the profiled one.

        Each try is kept until a later one has ended: the script may end before that.
        """
        begun = self._directory / f"begun.{PLAIN_EXECUTION_TRACE}"
        skipped, alike, tries = True, False, 0
        try:
            while skipped or (self._plan.settle and not alike and tries <= _UNLIKE_TRIES):
                tries += 1
                self._progress("structure step: operators and shapes")
                trace = self._execution_trace(begun)
                with trace as observer, self._kineto(record_shapes=True) as profiler:
                    observer.start()
                    skipped = yield
                    observer.stop()
                alike = self._steps.by_step[-1] == self.work
                if not skipped:
                    write(profiler, self._directory / STRUCTURE)
                    begun.replace(self._directory / PLAIN_EXECUTION_TRACE)
                    self.structured = True
                yield from self._behind(skipped=skipped)
        finally:
            begun.unlink(missing_ok=True)

    def _behind(self, *, skipped: bool) -> Window:
        """Let the step behind a skipped one pass by, which may make up for that.

        DeepSpeed's ZeRO-3 gathers parameters as it steps; behind a skipped step the next forward
        does.
        """
        while skipped and self._passed < _MOST_PASSED:
            self._passed += 1
            self._progress("a step behind one that a loss scaler skipped passes by")
            skipped = yield

    def _meet(self) -> None:
        """Begin with the other ranks: instruments take each another time to set up.

        A collective that waits for a late rank slows the kernels beside it meanwhile.
        """
        if self._others is not None and not self._others.rendezvous():
            self._observed.notes.append(
                "a profiled step began before all ranks were ready: kernels that overlap a "
                "collective waiting for a late rank are slower than in other steps"
            )

    @contextlib.contextmanager
    def _execution_trace(self, file: Path) -> Generator[ExecutionTraceObserver]:
        with execution_trace(file) as observer:
            if self._beside_nested:
                deepen(self._beside_nested, on_gpu=self._observed.on_gpu)
            yield observer

    def _kineto(self, *, record_shapes: bool) -> contextlib.AbstractContextManager[profile]:
        return kineto(self._modules, on_gpu=self._observed.on_gpu, record_shapes=record_shapes)
