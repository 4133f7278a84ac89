"""Windows under a profiler: profiled steps, uncontended step, structure step.

Steps with nested or compressed sparse tensors need a workaround in the structure step. The
execution trace observer keeps a stack of callers per thread
(torch/csrc/profiler/standalone/execution_trace_observer.cpp). It does not push an operator whose
operands it cannot read: a nested tensor has no sizes, a sparse CSR tensor has no strides. It pops
when the operator ends. The backward of attention over jagged tensors, or of a product with a CSR
matrix, does this so often that the stack underflows, which kills the process. So the stack first
gets as many placeholders as the step has operators. Callers recorded from placeholders are wrong
and are not read: the converter derives callers from times.
"""

import contextlib
import errno
import gzip
import re
import shutil
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import record_function
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from onerank.capture.patches import live
from onerank.capture.profiling.allocator_snapshots import recorded
from onerank.capture.profiling.module_scopes import Modules, ProfilerScopes
from onerank.capture.profiling.step_memory import StepMemory
from onerank.capture.profiling.step_timers import StepTimer
from onerank.capture.profiling.step_variance import StepWork
from onerank.capture.profiling.window_observations import OtherRanks, Window, WindowContext
from onerank.converters.sources.kineto import (
    STRUCTURE,
    UNCONTENDED,
    history_name,
    profile_name,
)
from onerank.converters.sources.kineto.read.execution_trace import PLACEHOLDERS
from onerank.ir.errors import ScriptError
from onerank.ir.notes import Note

_torch: Any = torch  # the observer has no public name

# Operators that show that a step has tensors without sizes or strides.
_UNREADABLE = re.compile(
    "nested|to_padded_tensor|sparse_compressed|sparse_[cb]s[cr]|c(row|col)_indices", re.IGNORECASE
)

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def count_events_with_unreadable(profiler: profile) -> int:
    """Count the profiled events if the step has tensors that the observer cannot read, else 0."""
    inner: Any = profiler.profiler
    events = inner.kineto_results.events()
    named = any(_UNREADABLE.search(event.name()) for event in events)
    # The forward of a product with a CSR matrix runs no operator that names its layout.
    if named or any(tensor.layout in _COMPRESSED for tensor in live(Tensor)):
        return len(events)
    return 0


def push_placeholders(count: int, *, on_gpu: bool) -> None:
    """Put `count` placeholders on the stacks of a registered observer that is not running.

    Args:
        count: placeholders per thread that runs operators of the step.
        on_gpu: whether backward runs in the autograd thread of a GPU.
    """
    _push_placeholders(count)
    if on_gpu:
        with torch.enable_grad():
            on_device = torch.zeros((), device="cuda", requires_grad=True)
            _PushInBackward.apply(on_device, count).backward()


class _PushInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _push_placeholders(ctx.count)
        return grads[0], None


def _push_placeholders(count: int) -> None:
    """Push `count` placeholders on the observer's stack of this thread."""
    # Ranges that begin while the observer runs and end while it does not stay on its stack.
    ranges = [record_function(PLACEHOLDERS) for _ in range(count)]
    _torch._C._profiler._enable_execution_trace_observer()
    # The observer writes only ranges that end while it runs.
    with record_function(PLACEHOLDERS):
        pass
    for scope in ranges:
        scope.__enter__()
    with record_function(PLACEHOLDERS):
        pass
    _torch._C._profiler._disable_execution_trace_observer()
    for scope in reversed(ranges):
        scope.__exit__(None, None, None)


OPERATOR_END_S = 0.5
"""Wait before the observer is freed, in seconds: longer than nearly every operator."""


class _Profile(profile):
    """A Kineto profiler that also works for the NCCL backend on a torch built without NCCL."""

    def _get_distributed_info(self) -> Any:
        # torch reads NCCL's version for this record, which needs a torch built with NCCL.
        base: Any = super()
        without = dist.is_initialized() and dist.get_backend() == "nccl"
        return None if without and not dist.is_nccl_available() else base._get_distributed_info()


@contextlib.contextmanager
def kineto(modules: Modules, *, on_gpu: bool, record_shapes: bool) -> Generator[profile]:
    """Profile the body of the context, with memory events and one scope per module call.

    Args:
        modules: modules of the script.
        on_gpu: whether to profile the GPU too; the host synchronizes with it at both ends.
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
    with modules.listened_by(ProfilerScopes()), unparsed(profiler):
        yield profiler
        end_open_ranges()
        if on_gpu:
            torch.cuda.synchronize()


def end_open_ranges() -> None:
    """End every `record_function` range that is open; its later exit then does nothing.

    A script such as DLRM opens a range around backward and optimizer step. A step ends inside it.
    """
    # torch 2.11 and 2.13 corrupt the heap where a range begins in one profile and ends in the next:
    # `onFunctionExit` in torch/csrc/autograd/profiler_kineto.cpp writes the end into the event of
    # the first profile, which freed its events when it stopped.
    for scope in live(record_function):
        # A second call of this operator for a range does nothing, so ended ranges do not matter.
        if scope.record is not None and scope.run_callbacks_on_exit:
            _torch.ops.profiler._record_function_exit._RecordFunction(scope.record)


@contextlib.contextmanager
def unparsed(profiler: profile) -> Generator[None]:
    """Run a profiler without parsing its events into Python objects when it stops."""
    with profiler:
        # With acc_events torch builds an object per event on exit, which takes longer than the
        # step. Without it torch 2.11 warns at the start that events of earlier cycles are lost.
        # So the option is set for the start and cleared for the exit.
        inner = profiler.profiler
        assert inner is not None
        inner.acc_events = False
        yield


# A trace is a quarter larger than at level 6, and is compressed in a third of the time. Most traces
# are read once and deleted.
_GZIP_LEVEL = 3


def compress(source: Path, target: Path) -> None:
    """Compress a file with gzip to `target`, and remove it."""
    with source.open("rb") as plain, gzip.open(target, "wb", compresslevel=_GZIP_LEVEL) as packed:
        shutil.copyfileobj(plain, packed)
    source.unlink()


def write(profiler: profile, file: Path) -> None:
    """Write the profile as a gzipped Chrome trace."""
    # torch can gzip the trace itself, but does so line by line.
    plain = file.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    if not plain.exists():  # Kineto logs a failed write and goes on
        raise OSError(errno.EIO, "the profiler could not write its trace", str(plain))
    compress(plain, file)


@contextlib.contextmanager
def execution_trace(file: Path) -> Generator[ExecutionTraceObserver]:
    """Write the operators that run between the observer's start and stop to `file`."""
    observer = ExecutionTraceObserver()
    observer.register_callback(str(file))
    try:
        yield observer
    finally:
        observer.stop()
        _let_operators_end()
        observer.unregister_callback()


def _let_operators_end() -> None:
    """Wait for operators in other threads of the script that began while the observer ran."""
    # `onFunctionExit` in torch/csrc/profiler/standalone/execution_trace_observer.cpp uses the
    # observer at the end of an operator without checking whether it has been freed.
    if threading.active_count() > 1:
        time.sleep(OPERATOR_END_S)


PLAIN_EXECUTION_TRACE = "et.json"  # the observer writes no gzip

# How often the structure window retries, until its step does the work of the profiled one.
_MOST_RETRIES = 7

# How many pairs of a profiled and a structure step are tried where input shapes differ. n profiled
# and n structure steps have n^2 chances to agree: 32 pairs suffice in 9 of 10 captures with 400
# equally likely shapes.
_MOST_PAIRS = 32

# How many steps may pass unobserved after skipped ones. Without a limit, a script that skips every
# second step would never be profiled.
_MOST_PASSED = 7


class ProfiledWindows:
    """Write traces of steps to the directory, and their memory and times to `observed`.

    Attributes:
        work: work of the profiled step that the graph has; of the last one until `select`.
    """

    def __init__(
        self, context: WindowContext, memory: StepMemory, others: OtherRanks | None
    ) -> None:
        self.work = StepWork(0, 0)
        self._profiles: list[StepWork] = []
        self._structures: list[StepWork] = []
        self._uncontended: StepWork | None = None
        self._plan = context.plan
        self._directory = context.directory
        self._modules = context.modules
        self._progress = context.progress
        self._observed = context.observed
        self._memory = memory
        self._steps = context.steps
        self._others = others
        self._restore = context.forward.restore if context.forward else lambda: None
        self._passed = 0
        self._placeholders = 0

    def warm_up(self) -> Window:
        """Profile a step and discard it: the first profile includes the profiler's setup."""
        self._progress("profiler warm-up")
        self._restore()
        with self._kineto(record_shapes=False):
            skipped = yield
        yield from self._pass_after(skipped=skipped)

    @property
    def structured(self) -> bool:
        """Whether the structure of a step was recorded."""
        return bool(self._structures)

    def step(self) -> Window:
        """Profile times and memory of a step."""
        skipped, number = True, len(self._profiles)
        while skipped:
            several = 1 < number + 1 <= self._plan.repeat or number + 1 < self._plan.repeat
            of = f" {number + 1} of {self._plan.repeat}" if several else ""
            self._progress(f"profiled step{of}: times and memory")
            on_gpu = self._observed.on_gpu
            clock = StepTimer(on_gpu=on_gpu)
            self._restore()
            with self._kineto(record_shapes=False) as profiler, recorded(on_gpu=on_gpu) as history:
                start = self._memory.at_start(history)
                self._wait_for_ranks()
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
                self._profiles.append(self.work)
                self._observed.start_memory_bytes.append(start)
                self._observed.peak_memory_bytes.append(peak)
                self._observed.profiled_step_ns.append(step_ns)
                self._observed.profiled_host_ns.append(host_ns)
                self._placeholders = count_events_with_unreadable(profiler)
                write(profiler, self._directory / profile_name(number))
                self._memory.keep(history, number)
            yield from self._pass_after(skipped=skipped)

    def uncontended(self, others: OtherRanks) -> Window:
        """Profile a step whose collectives occupy no GPU time, after one such step unprofiled."""
        self._progress("profiled step: kernels without concurrent communication")
        others.paced = False
        self._restore()
        try:
            skipped = yield
            yield from self._pass_after(skipped=skipped)
            tries = 0
            while self._uncontended is None or (
                tries <= _MOST_RETRIES and not self._uncontended.has_inputs_of(self.work)
            ):
                self._restore()
                with self._kineto(record_shapes=False) as profiler:
                    skipped = yield
                if not skipped:
                    tries += 1
                    self._uncontended = self._steps.by_step[-1]
                    write(profiler, self._directory / UNCONTENDED)
                yield from self._pass_after(skipped=skipped)
        finally:
            others.paced = True

    def structure(self) -> Window:
        """Record the structure of a step that does the same work as a profiled one.

        Where input shapes differ between steps, further steps are profiled too, until a profiled
        step and a structure step agree.
        """
        tries = 0
        while True:
            yield from self._structure_step()
            tries += 1
            if not self._plan.settle or self._is_paired():
                return
            if tries > (_MOST_RETRIES if self._have_equal_inputs() else _MOST_PAIRS - 1):
                return
            if not self._have_equal_inputs():
                # Unequal gaps: where shapes alternate, all profiled steps would have one shape.
                for _ in range(tries % 4):
                    yield
                yield from self.step()
                if self._is_paired():
                    return

    def _structure_step(self) -> Window:
        number = len(self._structures)
        # The script may end within the step: only a complete one gets its final names.
        begun = self._directory / f"begun.{PLAIN_EXECUTION_TRACE}"
        skipped = True
        try:
            while skipped:
                self._progress("structure step: operators and shapes")
                trace = self._execution_trace(begun)
                self._restore()
                with trace as observer, self._kineto(record_shapes=True) as profiler:
                    observer.start()
                    skipped = yield
                    # The observer writes only ranges that end while it runs.
                    end_open_ranges()
                    observer.stop()
                if not skipped:
                    write(profiler, self._directory / f"{number}.{STRUCTURE}")
                    begun.replace(self._directory / f"{number}.{PLAIN_EXECUTION_TRACE}")
                    self._structures.append(self._steps.by_step[-1])
                yield from self._pass_after(skipped=skipped)
        finally:
            begun.unlink(missing_ok=True)

    def _have_equal_inputs(self) -> bool:
        works = [*self._profiles, *self._structures]
        return all(work.has_inputs_of(works[0]) for work in works)

    def _is_paired(self) -> bool:
        """Return whether a structure step does the work of enough profiled steps."""
        if self._have_equal_inputs():
            return self._structures[-1] == self.work
        return any(self._profiles.count(s) >= self._plan.repeat for s in self._structures)

    def select(self) -> None:
        """Keep one structure step and the profiled steps whose inputs have its shapes.

        Sets `work`, and removes the files and observations of all other steps.

        Raises:
            ScriptError: no profiled step has the shapes of a structure step.
        """

        def quality(number: int) -> tuple[int, int, int]:
            structure = self._structures[number]
            equal = sum(work.has_inputs_of(structure) for work in self._profiles)
            return min(equal, 1), self._profiles.count(structure), number

        chosen = max(range(len(self._structures)), key=quality)
        structure = self._structures[chosen]
        profiles = [
            number for number, work in enumerate(self._profiles) if work.has_inputs_of(structure)
        ]
        if not profiles:
            if self._plan.settle:
                raise ScriptError(
                    f"the shapes of model inputs differ in every step: no two of "
                    f"{len(self._profiles)} profiled and {len(self._structures)} structure steps "
                    "agree, so no times belong to recorded shapes\n  pad batches to one length "
                    "(padding='max_length'), or to a few (pad_to_multiple_of)",
                    code="script-shapes-vary",
                )
            # Ranks of a real job cannot take further steps: each would stop at a different one.
            profiles = [*range(len(self._profiles))]
            self._observed.notes.append(
                Note(
                    "no profiled step has the input shapes of the structure step: times and shapes "
                    "belong to different steps",
                    code="times-of-other-shapes",
                )
            )
        self.work = self._profiles[profiles[-1]]
        self._keep(profiles, chosen)

    def _keep(self, profiles: list[int], structure: int) -> None:
        observed = self._observed
        for values in (
            observed.start_memory_bytes,
            observed.peak_memory_bytes,
            observed.profiled_step_ns,
            observed.profiled_host_ns,
        ):
            values[:] = [values[number] for number in profiles]
        for name in (profile_name, history_name):
            kept = [self._directory / name(number) for number in profiles]
            for number in range(len(self._profiles)):
                if number not in profiles:
                    (self._directory / name(number)).unlink(missing_ok=True)
            # Ascending, so that no target holds another kept step.
            for number, path in enumerate(kept):
                if path.exists():
                    path.replace(self._directory / name(number))
        for number in range(len(self._structures)):
            for name in (STRUCTURE, PLAIN_EXECUTION_TRACE):
                path = self._directory / f"{number}.{name}"
                if number == structure:
                    path.replace(self._directory / name)
                else:
                    path.unlink(missing_ok=True)
        if self._uncontended is not None and not self._uncontended.has_inputs_of(self.work):
            (self._directory / UNCONTENDED).unlink()
            observed.notes.append(
                Note(
                    "kernel times without concurrent communication are unknown: no such step had "
                    "the input shapes of the profiled one",
                    code="uncontended-step-missing",
                )
            )

    def _pass_after(self, *, skipped: bool) -> Window:
        """Let the steps after a skipped one pass unobserved."""
        # A skipped step changes the next one: DeepSpeed's ZeRO-3 gathers parameters in the
        # optimizer step, and in the next forward if that was skipped.
        while skipped and self._passed < _MOST_PASSED:
            self._passed += 1
            self._progress("unobserved step after one that a loss scaler skipped")
            skipped = yield

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks of a real job are ready to begin the profiled step."""
        # Profilers start at different times on different ranks, and a collective that waits for a
        # late rank slows the kernels that overlap it.
        if self._others is not None and not self._others.rendezvous():
            self._observed.notes.append(
                Note(
                    "a profiled step began before all ranks were ready: kernels that overlap a "
                    "collective waiting for a late rank are slower than in other steps",
                    code="ranks-not-ready",
                )
            )

    @contextlib.contextmanager
    def _execution_trace(self, file: Path) -> Generator[ExecutionTraceObserver]:
        with execution_trace(file) as observer:
            if self._placeholders:
                push_placeholders(self._placeholders, on_gpu=self._observed.on_gpu)
            yield observer

    def _kineto(self, *, record_shapes: bool) -> contextlib.AbstractContextManager[profile]:
        return kineto(self._modules, on_gpu=self._observed.on_gpu, record_shapes=record_shapes)
