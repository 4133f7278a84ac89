"""torch's profilers about one step: Kineto, and the observer of the execution trace."""

import contextlib
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

from onerank.capture.raw import compress
from onerank.capture.windows.scopes import Modules, ProfilerScopes

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
