"""Record the CUDA graphs that a script captures, and mark their replays.

A replay launches a graph's kernels by one call and runs no operator. So the operators, shapes and
launches are recorded while the script captures the graph, in a Kineto trace and an execution trace
for each graph. `converters.sources.kineto.link.graph_replays` replaces the replays by them.
"""

import contextlib
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch.autograd.profiler import record_function
from torch.profiler import profile

from onerank.capture.patches import patched
from onerank.capture.profiling.module_scopes import Modules, profiler_on
from onerank.capture.profiling.profiled_windows import (
    PLAIN_EXECUTION_TRACE,
    compress,
    end_open_ranges,
    execution_trace,
    kineto,
    write,
)
from onerank.converters.sources.kineto import (
    GRAPH_REPLAY,
    graph_et_name,
    graph_kernels_name,
    graph_name,
)
from onerank.ir.notes import Note
from onerank.ir.output_files import scratch_directory


@dataclass(frozen=True)
class _Recording:
    """A recording that runs while the script captures a graph.

    Attributes:
        number: number of the graph.
        profiler: receives launches and operators.
        running: the contexts of profiler and observer.
    """

    number: int
    profiler: profile
    running: contextlib.ExitStack


@contextlib.contextmanager
def recorded_graphs(
    modules: Modules, directory: Path, *, on_device: bool
) -> Generator["GraphRecorder"]:
    """Record the CUDA graphs that are captured while the context lasts.

    Args:
        modules: modules of the script, whose scopes the recordings have.
        directory: directory with the traces of the first windows.
        on_device: whether the script runs on the machine's devices, not on shapes alone.
    """
    if not (on_device and torch.cuda.is_available()):
        yield GraphRecorder(modules, directory, directory)  # not installed: records nothing
        return
    with scratch_directory() as recordings:
        recorder = GraphRecorder(modules, recordings, directory)
        with recorder.installed():
            yield recorder


class GraphRecorder:
    """Records the CUDA graphs that a script captures, and marks their replays under a profiler.

    A graph that is captured while a profiler runs is not recorded.

    Args:
        modules: modules of the script, whose scopes the recordings have.
        recordings: directory for the recordings of all graphs.
        directory: the first value of the attribute.

    Attributes:
        directory: directory with the traces of the current windows; receives the recordings of the
            graphs that a profiled step replays.
    """

    def __init__(self, modules: Modules, recordings: Path, directory: Path) -> None:
        self.directory = directory
        self._modules = modules
        self._recordings = recordings
        self._count = 0
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._current: WeakKeyDictionary[Any, _Recording] = WeakKeyDictionary()
        self._kept: set[tuple[Path, int]] = set()
        self._is_incomplete = False

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch the methods of graphs while the context lasts."""
        kind: Any = torch.cuda.CUDAGraph
        capture_begin, capture_end, replay = kind.capture_begin, kind.capture_end, kind.replay

        def begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            self._begin(graph)
            capture_begin(graph, *args, **kwargs)

        def end(graph: Any) -> None:
            kernels = _kernels_of_capture() if graph in self._current else []
            try:
                capture_end(graph)
            finally:
                self._end(graph, kernels)

        def marked(graph: Any) -> None:
            if not profiler_on():
                replay(graph)
                return
            number = self._numbers.get(graph)
            if number is None:
                self._is_incomplete = True
                replay(graph)
                return
            self._keep(number)
            with record_function(f"{GRAPH_REPLAY}{number}"):
                replay(graph)

        replacements = {"capture_begin": begin, "capture_end": end, "replay": marked}
        with patched("torch.cuda.CUDAGraph", replacements):
            yield

    def notes(self) -> list[Note]:
        """Return a note if a profiled step replayed a graph that was not recorded."""
        if not self._is_incomplete:
            return []
        return [
            Note(
                "a CUDA graph was captured while a profiler ran, so its kernels have no operators: "
                "let the script capture it in an earlier step",
                code="graph-not-recorded",
            )
        ]

    def _begin(self, graph: Any) -> None:
        # The listener of a window would miss the calls within the capture.
        if profiler_on() or self._modules.listener is not None:
            return
        running = contextlib.ExitStack()
        observer = running.enter_context(execution_trace(self._recordings / PLAIN_EXECUTION_TRACE))
        # Before the capture begins: a capture forbids to synchronise with the GPU.
        profiler = running.enter_context(kineto(self._modules, on_gpu=True, record_shapes=True))
        observer.start()
        running.callback(observer.stop)
        # The observer writes only ranges that end while it runs.
        running.callback(end_open_ranges)
        self._current[graph] = _Recording(self._count, profiler, running)
        self._count += 1

    def _end(self, graph: Any, kernels: list[str]) -> None:
        recording = self._current.pop(graph, None)
        if recording is None:
            return
        recording.running.close()
        number, directory = recording.number, self._recordings
        write(recording.profiler, directory / graph_name(number))
        compress(directory / PLAIN_EXECUTION_TRACE, directory / graph_et_name(number))
        if kernels:
            (directory / graph_kernels_name(number)).write_bytes(msgspec.json.encode(kernels))
        self._numbers[graph] = number

    def _keep(self, number: int) -> None:
        """Copy a recording to the traces of the current windows, once."""
        if (self.directory, number) in self._kept:
            return
        self._kept.add((self.directory, number))
        for name in (graph_name(number), graph_et_name(number), graph_kernels_name(number)):
            if (self._recordings / name).exists():
                shutil.copyfile(self._recordings / name, self.directory / name)


def _kernels_of_capture() -> list[str]:
    """Return the mangled name of each node of the graph that the current stream captures.

    Nodes that are no kernels have an empty name. Without NVIDIA's Python bindings the list is
    empty.
    """
    try:
        from cuda.bindings import driver, runtime
    except ImportError:
        return []
    api: Any = runtime
    nvidia_driver: Any = driver
    # The position of the graph in this result differs between versions of the runtime.
    info = api.cudaStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)
    graph = next((value for value in info if isinstance(value, api.cudaGraph_t)), None)
    if graph is None:
        return []
    count = api.cudaGraphGetNodes(graph, 0)[-1]
    names: list[str] = []
    for node in api.cudaGraphGetNodes(graph, count)[1][:count]:
        _, kind = api.cudaGraphNodeGetType(node)
        name = b""
        if kind == api.cudaGraphNodeType.cudaGraphNodeTypeKernel:
            node_of_driver = nvidia_driver.CUgraphNode(int(node))
            _, parameters = nvidia_driver.cuGraphKernelNodeGetParams(node_of_driver)
            _, name = nvidia_driver.cuFuncGetName(parameters.func)
        names.append((name or b"").decode())
    return names
