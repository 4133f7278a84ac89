"""Run `torch.compile` without a GPU: Inductor schedules for the emulated one.

Dynamo and AOTAutograd trace what the script compiles, and Inductor fuses and schedules it, all on
fake tensors. Inductor then writes Triton kernels, and a Python wrapper that allocates buffers,
launches the kernels and calls libraries. Neither Triton nor a GPU is needed up to here. The wrapper
runs on shapes alone: it allocates fake tensors, its library calls are recorded as other operators
are, and a launch of a kernel records the kernel's name and what it reads and writes.
"""

import contextlib
import functools
import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from onerank.capture.no_device.emulated_gpu import EmulatedGpu
from onerank.capture.no_device.fake_operators import FakeOperators
from onerank.capture.no_device.gpu_operators import Shaped
from onerank.capture.patches import after_import, patched, resolve, untraced
from onerank.ir.notes import Note

_torch: Any = torch

_INTERFACE = "torch._dynamo.device_interface"

_CUDA_NAMES = (
    "current_device",
    "set_device",
    "device_count",
    "stream",
    "current_stream",
    "set_stream",
    "synchronize",
    "get_device_properties",
    "exchange_device",
    "maybe_exchange_device",
    "memory_allocated",
    "is_bf16_supported",
)
"""Functions of `torch.cuda` that Dynamo's interface of a device holds from its import on."""

_FUSION_SHORTENS = (
    "on an H100, Inductor shortened the eager steps of a GPT-2 by 56% and of a network of "
    "convolutions by 30%"
)
"""Measured on 2026-11-26, torch 2.11: 40.1 to 17.6 ms (padding of products included), and 9.4 to
6.6 ms."""

_SETTINGS = {
    # These choose among kernels by timing them.
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "triton.autotune_at_compile_time": False,
    "triton.cudagraphs": False,  # a replay calls no operators
    "force_disable_caches": True,  # a cached graph may be of another GPU
    "compile_threads": 1,  # nothing is compiled
}


class InductorOnShapes:
    """Compiles for a GPU that is not there.

    Attributes:
        graphs: compiled graphs, forward and backward apart.
        eager: what the script compiles otherwise than by Inductor, as keys in order.
    """

    def __init__(self, operators: FakeOperators, gpu: EmulatedGpu) -> None:
        self.graphs = 0
        self.eager: dict[str, None] = {}
        self._operators = operators
        self._gpu = gpu
        self._compile = torch.compile
        self._settings = contextlib.ExitStack()
        self._failed_before = 0

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Let `torch.compile` and Inductor run without a GPU, while the context lasts."""
        triton = "torch._inductor.codegen.triton"
        self._failed_before = _failed_frames()
        with (
            self._settings,
            patched("torch", {"compile": self._compiled}),
            after_import(_INTERFACE, _interface),
            after_import("torch._inductor.scheduler", _scheduler),
            after_import(triton, lambda: patched(triton, {"gen_attr_descriptor_import": _text})),
            patched("torch.utils._triton", {"triton_hash_with_backend": _text}),
            after_import(_JOINT_GRAPH, _constants),
            after_import(_PADDING, self._padding),
            after_import("torch._inductor.async_compile", self._kernels),
            after_import("torch._inductor.codecache", self._wrappers),
        ):
            yield

    def _compiled(
        self,
        model: Any = None,
        *,
        backend: Any = "inductor",
        disable: bool = False,
        dynamic: bool | None = None,
        **_: Any,
    ) -> Any:
        """Return what the script compiles, compiled by Inductor; `torch.compile`.

        A mode and options choose among kernels by timing them, and `fullgraph` would turn what
        this module cannot compile into an error of the script.
        """
        if model is None:
            return functools.partial(
                self._compiled, backend=backend, disable=disable, dynamic=dynamic
            )
        if disable:
            return model
        if backend != "inductor":
            self.eager[str(backend)] = None
            return model
        self._configure()
        return self._compile(model, backend="inductor", dynamic=dynamic)

    def _configure(self) -> None:
        """Set what Dynamo and Inductor do, which the script may have set otherwise."""
        dynamo: Any = importlib.import_module("torch._dynamo.config")
        inductor: Any = importlib.import_module("torch._inductor.config")
        # What neither can compile runs eager, as `notes` says.
        self._settings.enter_context(dynamo.patch(suppress_errors=True))
        self._settings.enter_context(inductor.patch(_SETTINGS))

    def _padding(self) -> contextlib.AbstractContextManager[None]:
        """Let Inductor pad products by computed times in the place of measured ones."""
        module = importlib.import_module(_PADDING)

        def should_pad(match: Any, mat1: Tensor, mat2: Tensor, *_: Any, **__: Any) -> bool:
            return _is_padded(module, match, (mat1, mat2), self._gpu)

        return patched(_PADDING, {"_should_pad": should_pad, "has_triton": _yes})

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Let generated kernels be recorded in the place of compiling them."""

        def triton(_: Any, name: str, source: str, *__: Any, **___: Any) -> _Kernel:
            return _Kernel(name, _Accesses.of(name, source), self._operators)

        return patched("torch._inductor.async_compile.AsyncCompile", {"triton": triton})

    def _wrappers(self) -> contextlib.AbstractContextManager[None]:
        """Let the generated wrappers run on fake tensors."""
        cache = "torch._inductor.codecache.PyCodeCache"

        def load(
            _: Any, key: str, path: str, linemap: Any = None, attrs: dict[str, Any] | None = None
        ) -> ModuleType:
            self.graphs += 1
            wrapper = _load(key, path)
            vars(wrapper).update(attrs or {})
            return wrapper

        return patched(cache, {"load_by_key_path": classmethod(load)})

    def notes(self) -> list[Note]:
        """Return notes on compiled code."""
        notes: list[Note] = []
        if self.graphs:
            notes.append(
                Note(
                    f"{self.graphs} graphs were compiled by Inductor as scheduled for this GPU, "
                    "without tuning: products run in cuBLAS",
                    code="inductor-as-scheduled",
                )
            )
        if failed := _failed_frames() - self._failed_before:
            notes.append(
                Note(
                    "functions under torch.compile that Dynamo or Inductor could not compile, so "
                    f"that they were captured eager: {failed}; {_FUSION_SHORTENS}",
                    code="compile-failed",
                )
            )
        if self.eager:
            notes.append(
                Note(
                    f"code compiled by the backend {', '.join(self.eager)} was captured eager: "
                    f"what that backend fuses reads and writes less memory; {_FUSION_SHORTENS}",
                    code="compile-backend-eager",
                )
            )
        return notes


def _failed_frames() -> int:
    """Return how many functions of this process Dynamo or Inductor could not compile."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    frames = dynamo.counters["frames"] if dynamo is not None else {}
    return frames.get("total", 0) - frames.get("ok", 0)


def _interface() -> contextlib.AbstractContextManager[None]:
    owner = f"{_INTERFACE}.CudaInterface"
    interface = resolve(owner)
    answers: dict[str, Any] = {
        name: staticmethod(_ask_cuda(name)) for name in _CUDA_NAMES if hasattr(interface, name)
    }
    answers["get_raw_stream"] = staticmethod(_first_stream)
    answers["raise_if_triton_unavailable"] = staticmethod(_nothing)
    return patched(owner, {n: v for n, v in answers.items() if hasattr(interface, n)})


def _ask_cuda(name: str) -> Callable[..., Any]:
    # `torch.cuda` has these two under private names.
    own = f"_{name}" if name.endswith("exchange_device") else name

    def ask(*args: Any, **kwargs: Any) -> Any:
        return getattr(torch.cuda, own)(*args, **kwargs)

    return ask


def _scheduler() -> contextlib.AbstractContextManager[None]:
    return patched("torch._inductor.scheduler", {"has_triton": _yes})


_JOINT_GRAPH = "torch._inductor.fx_passes.joint_graph"


class _OnCpu(TorchDispatchMode):
    """Creates on the CPU what is to be created on the GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.device, _cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


def _cpu(_: torch.device) -> torch.device:
    return torch.device("cpu")


def _constants() -> contextlib.AbstractContextManager[None]:
    """Let Inductor compute constants of one value, which it folds, on the CPU."""
    owner = f"{_JOINT_GRAPH}.UniformValueConstantFolder"
    run = resolve(owner).run

    def run_on_cpu(folder: Any, *args: Any, **kwargs: Any) -> Any:
        with _OnCpu():
            return run(folder, *args, **kwargs)

    return patched(owner, {"run": run_on_cpu})


_PADDING = "torch._inductor.fx_passes.pad_mm"

# A bf16 product of GPT-2, (8192 x 768) x (768 x 50264), took 0.88 ms on an H100; with 50257
# columns, which are not aligned, 4.25 ms.
_UNALIGNED_SLOWDOWN = 4.85

# A transposed copy of 4096 x 4096 in bf16 took 132 us on an H100, 20 us at its memory bandwidth.
_TRANSPOSED_COPY_SLOWDOWN = 6.6

# torch pads for this speedup or more (`is_padded_faster`).
_LEAST_GAIN = 1.1


def _is_padded(module: Any, match: Any, operands: tuple[Tensor, Tensor], gpu: EmulatedGpu) -> bool:
    """Return whether a product is faster with padded operands, copies included."""
    left, right = operands
    alignment = module.get_alignment_size(left)
    (rows, inner), columns = left.shape[-2:], right.shape[-1]
    if not gpu.flops_per_s or all(size % alignment == 0 for size in (rows, inner, columns)):
        return False
    product_s = 2 * left[..., 0].numel() * inner * columns / gpu.flops_per_s
    moved = sum(tensor.numel() * tensor.element_size() for tensor in operands)
    if product_s < moved / gpu.bandwidth_bytes_per_s:
        return False  # bound by memory: torch does not measure it either
    copies_s = 0.0
    for name, tensor in zip(("mat1", "mat2"), operands, strict=True):
        if all(size % alignment == 0 for size in tensor.shape[-2:]):
            continue
        # The kernel that computes an operand writes it padded, unless a library computes it.
        if module.should_exclude_padding_time(match, name):
            continue
        copied = 2 * tensor.numel() * tensor.element_size() / gpu.bandwidth_bytes_per_s
        copies_s += copied * (1.0 if tensor.is_contiguous() else _TRANSPOSED_COPY_SLOWDOWN)
    return product_s * _UNALIGNED_SLOWDOWN > (product_s + copies_s) * _LEAST_GAIN


def _yes() -> bool:
    return True


def _text() -> str:
    return ""


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _first_stream(_: int) -> int:
    return 0


def _load(key: str, path: str) -> ModuleType:
    """Run a wrapper's source, with fake tensors in the place of the device's."""
    wrapper = ModuleType(f"onerank_inductor_{key}")
    wrapper.__file__ = path
    with open(path, encoding="utf-8") as file:
        source = file.read()
    # Only a CUDA build of torch has this function.
    raw_stream = "from torch._C import _cuda_getCurrentRawStream as get_raw_stream"
    source = source.replace(raw_stream, "get_raw_stream = None")
    stubs: dict[str, Any] = {}
    # The wrapper imports triton, and does not use it.
    if "triton" not in sys.modules:
        stubs = {name: ModuleType(name) for name in ("triton", "triton.language")}
        stubs["triton"].language = stubs["triton.language"]
    with mock.patch.dict(sys.modules, stubs):
        exec(compile(source, path, "exec"), vars(wrapper))
    vars(wrapper).update(
        get_raw_stream=_first_stream,
        empty_strided_cuda=_empty,
        reinterpret_tensor=_reinterpret,
        # Addresses of fake tensors are made up, so their alignment means nothing.
        copy_if_misaligned=_same,
        assert_size_stride=_nothing,
        assert_alignment=_nothing,
    )
    return wrapper


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, int(tensor.storage_offset()) + offset)


def _same(tensor: Any) -> Any:
    return tensor


@dataclass(frozen=True)
class _Accesses:
    """What a generated kernel reads and writes.

    Attributes:
        parameters: names of its parameters, in order.
        loads: pointer -> distinct places from which each iteration reads.
        stores: the same for writes.
        sizes: iterations along each axis that the source states.
    """

    parameters: tuple[str, ...]
    loads: dict[str, int]
    stores: dict[str, int]
    sizes: dict[str, int]

    @classmethod
    def of(cls, name: str, source: str) -> "_Accesses":
        """Read a kernel's source."""
        signature = re.search(rf"def {re.escape(name)}\(([^)]*)\)|def triton_\(([^)]*)\)", source)
        text = (signature.group(1) or signature.group(2) or "") if signature else ""
        parameters = tuple(part.split(":")[0].strip() for part in text.split(","))
        # The source states the sizes that Inductor knows; others are arguments of the launch.
        sizes = re.findall(r"^    (\w+numel) = (\d+)$", source, re.MULTILINE)
        return cls(
            parameters,
            _places(r"tl\.load\((\w+) \+ (\([^\n]*?\)),", source),
            _places(r"tl\.(?:store|atomic_add)\((\w+) \+ (\([^\n]*?\)),", source),
            {axis: int(size) for axis, size in sizes},
        )

    def operands(self, args: tuple[Any, ...]) -> tuple[list[Shaped], list[Shaped]]:
        """Return the tensors that a launch reads, and those that it writes.

        Each has as many elements as the launch touches: one of an embedding's table for each
        iteration, and the whole of a tensor that has fewer.
        """
        by_name = dict(zip(self.parameters, args, strict=False))
        axes = {name: value for name, value in by_name.items() if name.endswith("numel")}
        iterations = prod(
            size for size in (axes | self.sizes).values() if isinstance(size, int) and size > 0
        )
        return _touched(by_name, self.loads, iterations), _touched(by_name, self.stores, iterations)


def _places(pattern: str, source: str) -> dict[str, int]:
    found = set(re.findall(pattern, source))
    return dict(Counter(pointer for pointer, _ in found))


def _touched(by_name: dict[str, Any], places: dict[str, int], iterations: int) -> list[Shaped]:
    touched: list[Shaped] = []
    for name, tensor in by_name.items():
        if name in places and isinstance(tensor, Tensor):
            elements = places[name] * iterations
            whole = tensor.numel() <= elements
            shape = list(tensor.shape) if whole else [elements]
            touched.append(Shaped(tensor, tensor.dtype, shape))
    return touched


class _Kernel:
    """A generated kernel that nothing compiles."""

    def __init__(self, name: str, accesses: _Accesses, operators: FakeOperators) -> None:
        self._name = name
        self._accesses = accesses
        self._operators = operators

    def run(self, *args: Any, stream: Any = None, **_: Any) -> None:
        """Record a launch."""
        reads, writes = self._accesses.operands(args)
        self._operators.launch_generated(self._name, reads, writes)


# Dynamo must not trace the recording of a step.
untraced(_Kernel.run)
