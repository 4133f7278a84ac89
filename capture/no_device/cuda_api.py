"""`torch.cuda` and `torch.accelerator` as on a GPU that is not there."""

import contextlib
import itertools
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from onerank.capture.no_device.emulated_gpu import EmulatedGpu
from onerank.capture.no_device.event_log import EventLog
from onerank.capture.no_device.legacy_types import (
    default_tensor_type,
    legacy_types,
    tensor_type,
)
from onerank.capture.patches import patched, rebound
from onerank.ir.errors import CaptureError

_CUDA_VERSION = "13.0"
_NCCL_VERSION = (2, 27, 5)
_ARCHITECTURES = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


class Stream:
    """A CUDA stream on which nothing runs.

    Attributes:
        number: 0 for the default stream.
    """

    def __init__(self, device: Any = None, priority: int = 0, **named: Any) -> None:
        self.number = next(_numbers)
        self.device = torch.device("cuda", 0)
        # torch compares these two with c10::DeviceType::CUDA (1).
        self.device_index, self.device_type = 0, 1
        self.priority = priority
        self.stream_id = self.cuda_stream = named.get("stream_id", id(self))

    def wait_event(self, event: "Event") -> None:
        """Record that this stream waits for the event."""
        if event.log is not None:
            event.log.wait(self.number, event.stream, event.until)

    def wait_stream(self, stream: "Stream") -> None:
        """Record that this stream waits for all that the other one was given."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Record that the host waits for all that this stream was given."""
        for log in _logs[-1:]:
            log.wait_on_host(self.number)

    def query(self) -> bool:
        """Return True: nothing is pending."""
        return True

    def is_capturing(self) -> bool:
        """Return False: no CUDA graph is captured."""
        return False

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event, recorded on this stream."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        _current.append(self)
        _follow_current()
        return self

    def __exit__(self, *_: object) -> None:
        _current.pop()
        _follow_current()


def _follow_current() -> None:
    for log in _logs:
        log.stream = _current[-1].number


class Event:
    """A CUDA event that is reached at once.

    Attributes:
        log: that of the capture in which it was recorded; None if it was not.
        stream: number of the stream that it was recorded on.
        until: tick of the record.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.log: EventLog | None = None
        self.stream = self.until = 0

    def record(self, stream: Stream | None = None) -> None:
        """Note what the stream was given so far."""
        self.log = _logs[-1] if _logs else None
        self.stream = (stream or _current[-1]).number
        self.until = self.log.now() if self.log is not None else 0

    def wait(self, stream: Stream | None = None) -> None:
        """Record that a stream waits for the event."""
        (stream or _current[-1]).wait_event(self)

    def synchronize(self) -> None:
        """Record that the host waits for the event."""
        if self.log is not None:
            self.log.wait_on_host(self.stream, self.until)

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, _: object) -> float:
        """Return 1 ms: scripts divide by it."""
        return 1.0


_torch: Any = torch
_TorchGenerator: Any = _torch._C.Generator  # torch.Generator, without its patch
_TorchType: Any = type(_TorchGenerator)


class _GeneratorType(_TorchType):
    """Lets generators that torch creates count as instances of the replaced class."""

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _TorchGenerator)


class RandomGenerator(_TorchGenerator, metaclass=_GeneratorType):
    """`torch.Generator`; one of the GPU draws no numbers, so the CPU's serves."""

    def __new__(cls, device: object = "cpu") -> Any:
        """Create a generator for the device."""
        del device
        return super().__new__(cls, "cpu")

    def set_state(self, state: Any) -> Any:
        """Set the state; ignore a fake tensor, which has no numbers.

        Ranks broadcast a state through the GPU, so that all draw the same numbers. The captured
        rank draws from its present state instead.
        """
        return self if isinstance(state, FakeTensor) else super().set_state(state)


class _DefaultGenerator(RandomGenerator):
    """The GPU's own generator, whose state has no meaning."""

    def get_state(self) -> Any:
        """Return a state, as `torch.cuda.get_rng_state` does."""
        return _random_state()

    def set_state(self, state: object) -> Any:
        """Do nothing: states of the CPU have another size."""
        del state
        return self

    def clone_state(self) -> Any:
        """Return a generator of the same state."""
        return self

    graphsafe_get_state = clone_state
    graphsafe_set_state = set_state


class _DefaultGenerators:
    """`torch.cuda.default_generators`: one for each GPU of the node that the script sees."""

    def __init__(self) -> None:
        self._generator = _DefaultGenerator()

    def __len__(self) -> int:
        return torch.cuda.device_count()

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._generator


def _set_rng_state(state: Any) -> None:
    """Set the state of the CPU's default generator, as `RandomGenerator.set_state` does."""
    if not isinstance(state, FakeTensor):
        torch.default_generator.set_state(state)


def _random_state() -> Any:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


class _Ranges:
    """NVTX, with no profiler to read its ranges."""

    def __getattr__(self, _: str) -> Callable[..., int]:
        return _call(lambda: 0)


class CudaGraph:
    """`torch.cuda.CUDAGraph` and `torch.cuda.graph`, which no capture without a device takes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise CaptureError(
            "CUDA graphs cannot be captured without a device: a replay calls no operators\n"
            "  run the script without CUDA graphs, or capture on a GPU",
            code="no-device-cuda-graph",
        )


_numbers = itertools.count()
_DEFAULT = Stream(stream_id=0)
_current = [_DEFAULT]
# The log of the capture that runs: streams and events, which scripts create, write to it.
_logs: list[EventLog] = []


def _set_stream(stream: Stream) -> None:
    """`torch.cuda.set_stream`."""
    _current[-1] = stream
    _follow_current()


@contextlib.contextmanager
def _entered(stream: Stream | None) -> Generator[None]:
    """`torch.cuda.stream`."""
    with stream if stream is not None else contextlib.nullcontext():
        yield


def _nothing() -> None:
    """Do nothing."""


def _call(answer: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that ignores its arguments, most of which name the device.

    Each call returns another function: Dynamo has handlers by function, and refuses one of two
    names.
    """

    def answered(*_: Any, **__: Any) -> Any:
        return answer()

    return answered


class _Counters(dict[str, int]):
    """Counters of an allocator; a counter that the log does not keep is 0."""

    def __missing__(self, _: str) -> int:
        return 0


class _CudaRuntime:
    """CUDA's runtime, whose functions scripts call: they do nothing, and report success (0)."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *_: 0


_CUDA_RUNTIME = _CudaRuntime()


# What functions of `torch.cuda` return on every GPU, whatever their arguments.
_CUDA_ANSWERS: dict[str, Callable[[], Any]] = {
    # One GPU, which is initialised.
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_is_compiled": lambda: True,
    "_lazy_init": _nothing,
    "init": _nothing,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _nothing,
    "_exchange_device": lambda: 0,
    "_maybe_exchange_device": lambda: 0,
    "get_arch_list": lambda: list(_ARCHITECTURES),
    "can_device_access_peer": lambda: True,
    "ipc_collect": _nothing,
    "current_stream": lambda: _current[-1],
    "default_stream": lambda: _DEFAULT,
    # No number on the GPU has a meaning, so its random state has none either.
    "manual_seed": _nothing,
    "manual_seed_all": _nothing,
    "seed": _nothing,
    "seed_all": _nothing,
    "initial_seed": lambda: 0,
    "get_rng_state": _random_state,
    "get_rng_state_all": lambda: [_random_state()],
    "set_rng_state": _nothing,
    "set_rng_state_all": _nothing,
    # Readings of NVML, which trainers log.
    "utilization": lambda: 0,
    "memory_usage": lambda: 0,
    "temperature": lambda: 0,
    "power_draw": lambda: 0,
    "clock_rate": lambda: 0,
    "list_gpu_processes": str,
    # What trainers call around steps.
    "set_sync_debug_mode": _nothing,
    "get_sync_debug_mode": lambda: 0,
    "get_allocator_backend": lambda: "native",
    "memory_summary": str,
    "memory_snapshot": list,
    "host_memory_stats": _Counters,
    "host_memory_stats_as_nested_dict": dict,
    "reset_accumulated_memory_stats": _nothing,
    "reset_accumulated_host_memory_stats": _nothing,
    "reset_peak_host_memory_stats": _nothing,
    # A history of allocations, which trainers write for torch's viewer: an empty one.
    "_record_memory_history": _nothing,
    "_snapshot": lambda: {"segments": [], "device_traces": [], "allocator_settings": {}},
    "cudart": lambda: _CUDA_RUNTIME,
}

_RANGE_OF_PROFILER = {"start": _nothing, "stop": _nothing}
"""Functions of `torch.cuda.profiler`, which mark what Nsight Systems records."""

_NCCL_ANSWERS: dict[str, Callable[[], Any]] = {
    "version": lambda: _NCCL_VERSION,
    "is_available": lambda: True,
}

_TENSOR_ANSWERS: dict[str, Callable[[], Any]] = {
    "is_pinned": lambda: False,
    "record_stream": _nothing,
}

# Functions of `torch.accelerator`.
_ACCELERATOR = (
    *("is_available", "device_count", "synchronize", "current_stream"),
    *("current_device_index", "current_device_idx", "set_device_index", "set_device_idx"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_stats", "reset_peak_memory_stats", "empty_cache"),
)


@contextlib.contextmanager
def emulated_cuda(gpu: EmulatedGpu, log: EventLog) -> Generator[None]:
    """Let `torch.cuda` answer as on `gpu`, with the memory that `log` counts."""
    cuda = _cuda_functions(gpu, log)
    # `torch.cuda` re-exports functions of these modules, and scripts import them from either.
    memory = {name: cuda[name] for name in cuda if hasattr(torch.cuda.memory, name)}
    random = {name: cuda[name] for name in cuda if hasattr(torch.cuda.random, name)}
    with contextlib.ExitStack() as undo:
        _logs.append(log)
        undo.callback(_logs.pop)
        for owner, names in (
            ("torch.cuda", cuda),
            ("torch.accelerator", _accelerator_functions(gpu, log)),
            ("torch.cuda.memory", memory),
            ("torch.cuda.random", random),
            ("torch.cuda.nccl", _functions(_NCCL_ANSWERS)),
            ("torch.cuda.profiler", _functions(_RANGE_OF_PROFILER)),
            ("torch.cuda.nvtx", {"_nvtx": _Ranges()}),
            # A CUDA build keeps its version: torchvision refuses a torch of another CUDA version.
            ("torch.version", {"cuda": torch.version.cuda or _CUDA_VERSION}),
            ("torch.Tensor", {"pin_memory": _same, **_functions(_TENSOR_ANSWERS)}),
            ("torch.Tensor", {"type": tensor_type()}),
            ("torch", {"Generator": RandomGenerator, "Stream": Stream, "Event": Event}),
            ("torch", {"set_default_tensor_type": default_tensor_type()}),
        ):
            undo.enter_context(patched(owner, {n: v for n, v in names.items() if _has(owner, n)}))
        # It would be called where memory runs out; a CPU build has no such function.
        observer = {"_cuda_attach_out_of_memory_observer": _nothing}
        undo.enter_context(patched("torch._C", _functions(observer)))
        undo.enter_context(rebound("torch.random", {"set_rng_state": _set_rng_state}))
        yield


def _cuda_functions(gpu: EmulatedGpu, log: EventLog) -> dict[str, Any]:
    """Return what replaces functions and classes of `torch.cuda`, by name."""
    memory = _Memory(gpu, log)
    properties = _properties(gpu)
    return {
        **_functions(_CUDA_ANSWERS),
        **_functions(memory.answers()),
        **_functions(
            {
                "get_device_name": lambda: gpu.name,
                "get_device_capability": lambda: gpu.capability,
                "get_device_properties": lambda: properties,
                "is_bf16_supported": lambda: gpu.capability[0] >= 8,
                "synchronize": lambda: log.wait_on_host(None),
            }
        ),
        "set_per_process_memory_fraction": memory.set_fraction,
        "caching_allocator_enable": memory.enable_caching,
        "set_stream": _set_stream,
        "stream": _entered,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CudaGraph,
        "graph": CudaGraph,
        "is_current_stream_capturing": lambda: False,
        "default_generators": _DefaultGenerators(),
        **legacy_types(),
    }


def _accelerator_functions(gpu: EmulatedGpu, log: EventLog) -> dict[str, Any]:
    """Return what replaces functions of `torch.accelerator`, by name."""
    answers = {
        **_CUDA_ANSWERS,
        **_Memory(gpu, log).answers(),
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": _nothing,
        "set_device_idx": _nothing,
        "synchronize": lambda: log.wait_on_host(None),
    }
    return {**_functions({name: answers[name] for name in _ACCELERATOR}), "set_stream": _set_stream}


def _properties(gpu: EmulatedGpu) -> SimpleNamespace:
    """Return `torch.cuda.get_device_properties` of the GPU."""
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.sm_count,
        # Of sm_80 and sm_90; sm_86 and sm_89 have 1536.
        max_threads_per_multi_processor=2048,
        shared_memory_per_block=49152,
        # The limits of sm_90 and sm_80 in the CUDA C++ programming guide (227 KB and 163 KB per
        # block).
        shared_memory_per_block_optin=232448 if major >= 9 else 166912,
        shared_memory_per_multiprocessor=233472 if major >= 9 else 167936,
        regs_per_multiprocessor=65536,
        warp_size=32,
        L2_cache_size=gpu.l2_bytes,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
    )


class _Memory:
    """The functions of `torch.cuda` on memory, answered from what a log counts."""

    def __init__(self, gpu: EmulatedGpu, log: EventLog) -> None:
        self._gpu = gpu
        self._allocator = log.memory
        self._fraction = 1.0

    def answers(self) -> dict[str, Callable[[], Any]]:
        """Return the functions whose arguments do not matter."""
        allocator = self._allocator
        return {
            "memory_stats": self._statistics,
            "memory_stats_as_nested_dict": self._nested_statistics,
            "memory_allocated": lambda: allocator.allocated_bytes,
            "max_memory_allocated": lambda: allocator.peak_allocated_bytes,
            "memory_reserved": lambda: allocator.reserved_bytes,
            "max_memory_reserved": lambda: allocator.peak_reserved_bytes,
            "device_memory_used": lambda: allocator.reserved_bytes,
            "mem_get_info": self._info,
            "empty_cache": allocator.empty_cache,
            "reset_peak_memory_stats": allocator.reset_peaks,
            "reset_max_memory_allocated": allocator.reset_peaks,
            "get_per_process_memory_fraction": lambda: self._fraction,
        }

    def set_fraction(self, fraction: float, *_: Any, **__: Any) -> None:
        """`torch.cuda.set_per_process_memory_fraction`, which raises these errors."""
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if fraction < 0 or fraction > 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self._fraction = fraction
        self._allocator.limit(fraction)

    def enable_caching(self, value: bool = True) -> None:
        """`torch.cuda.caching_allocator_enable`; without the cache memory is not simulated."""
        if not value:
            self._allocator.note_unsimulated("caching_allocator_enable(False)")

    def _info(self) -> tuple[int, int]:
        # Never negative: a step that does not fit this GPU is captured, too.
        free = max(0, self._gpu.memory_bytes - self._allocator.reserved_bytes)
        return free, self._gpu.memory_bytes

    def _statistics(self) -> dict[str, int]:
        allocator = self._allocator
        current, peak = allocator.allocated_bytes, allocator.peak_allocated_bytes
        return _Counters(
            {
                "allocated_bytes.all.current": current,
                "allocated_bytes.all.peak": peak,
                "reserved_bytes.all.current": allocator.reserved_bytes,
                "reserved_bytes.all.peak": allocator.peak_reserved_bytes,
                "active_bytes.all.current": current,
                "active_bytes.all.peak": peak,
            }
        )

    def _nested_statistics(self) -> dict[str, dict[str, dict[str, int]]]:
        """`memory_stats` by counter, pool and figure."""
        nested: dict[str, dict[str, dict[str, int]]] = {}
        for name, value in self._statistics().items():
            counter, pool, figure = name.split(".")
            nested.setdefault(counter, {}).setdefault(pool, {})[figure] = value
        return nested


def _functions(answers: dict[str, Callable[[], Any]]) -> dict[str, Callable[..., Any]]:
    """Return functions that ignore their arguments, most of which name the device."""
    return {name: _call(answer) for name, answer in answers.items()}


def _has(owner: str, name: str) -> bool:
    target: Any = torch
    for part in owner.split(".")[1:]:
        target = getattr(target, part)
    return hasattr(target, name)


def _same(tensor: Any, *_: Any) -> Any:
    return tensor
