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
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from math import prod
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from onerank.capture.no_device.emulated_gpu import EmulatedGpu
from onerank.capture.no_device.generated_kernels import (
    FLOPS_COMMENT,
    GeneratedKernel,
    KernelAccesses,
)
from onerank.capture.no_device.generated_wrappers import (
    first_stream,
    load_wrapper,
    nothing,
    triton_modules,
)
from onerank.capture.no_device.graph_numbers import GraphNumbers
from onerank.capture.no_device.graph_transforms import (
    JOINT_GRAPH,
    PARTITIONERS,
    PROXY_TENSOR,
    folded_constants,
    propagated_constants,
    recomputed_random_operators,
)
from onerank.capture.no_device.operators.fake_operators import FakeOperators
from onerank.capture.patches import after_import, patched, rebound, resolve
from onerank.capture.script.runner import environment
from onerank.ir.notes import Note
from onerank.ir.output_files import scratch_directory

_torch: Any = torch
_modes: Any = _python_dispatch

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
    "compile_threads": 1,  # no kernel of a GPU is compiled
    # Graphs of constants run on the CPU, so they are compiled, one small kernel each. These would
    # compile test programs and torch's headers before, 6 s of CPU time: nothing is cached here.
    "cpp.vec_isa_ok": False,
    "cpp_cache_precompile_headers": False,
}


_CONVERT_FRAME = "torch._dynamo.convert_frame"
_SPLIT_SCAN = "torch._inductor.codegen.triton_split_scan"

_ANSWERS = (
    *("get_device_properties", "get_device_capability", "get_device_name", "current_device"),
    *("is_available", "is_bf16_supported", "device_count"),
)
"""Functions of torch.cuda whose answer is a constant of a graph."""

_FLEX_ATTENTION = "torch.nn.attention.flex_attention"

_CHECKPOINT_FILE = "torch/utils/checkpoint.py"
_COMPILED_CALL_FILE = "torch/_dynamo/eval_frame.py"

_BACKEND_BREAK = "Backend compiler exception"
"""Dynamo's name for a graph break at an error in AOTAutograd or Inductor, such as a missing number
of a fake tensor. The emulation can cause one."""

_LONGEST_REASON = 120
"""Characters of an error's first line in a note."""


class InductorOnShapes:
    """Inductor, scheduling for the emulated GPU.

    Attributes:
        graphs: compiled graphs, forward and backward apart.
        eager: backends other than Inductor that the script compiles with, as keys in order.
        failed: functions that were not compiled, each with the reason, in order.
        unbreakable: functions that ran eager because they need a graph break where Dynamo allows
            none, such as in a loop; each with the reason, in order.
        unfused: calls of flex attention outside of compiled code.
        checkpointed: calls of flex attention in a checkpoint within compiled code.
    """

    def __init__(self, operators: FakeOperators, gpu: EmulatedGpu) -> None:
        self.graphs = 0
        self.eager: dict[str, None] = {}
        self.failed: list[str] = []
        self.unbreakable: dict[str, None] = {}
        self.unfused = self.checkpointed = 0
        self._operators = operators
        self._gpu = gpu
        self._compile = torch.compile
        self._settings = contextlib.ExitStack()
        self._configured = threading.local()
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Let `torch.compile` and Inductor run without a GPU, while the context lasts."""
        triton = "torch._inductor.codegen.triton"
        self._thread = threading.get_ident()
        with (
            # Inductor writes the source of each graph to a new directory, and leaves it there.
            scratch_directory() as sources,
            environment({"TORCHINDUCTOR_CACHE_DIR": str(sources)}),
            self._settings,
            after_import(_CONVERT_FRAME, self._skipping_failures),
            after_import(PROXY_TENSOR, propagated_constants),
            patched("torch", {"compile": self._compiled}),
            after_import(_INTERFACE, _interface),
            after_import("torch._inductor.scheduler", _scheduler),
            after_import(triton, lambda: patched(triton, {"gen_attr_descriptor_import": _text})),
            after_import(triton, _counted),
            patched("torch.utils._triton", {"triton_hash_with_backend": _text}),
            after_import(JOINT_GRAPH, folded_constants),
            after_import(PARTITIONERS, recomputed_random_operators),
            after_import(_PADDING, self._padding),
            after_import("torch._inductor.async_compile", self._kernels),
            after_import(_SPLIT_SCAN, _scans),
            after_import("torch._inductor.codecache", self._wrappers),
            after_import(_FLEX_ATTENTION, self._flex_attention_apart),
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
            self.eager[getattr(backend, "__name__", str(backend))] = None
            return model
        self._configure()
        return self._compile(model, backend="inductor", dynamic=dynamic)

    @contextlib.contextmanager
    def _skipping_failures(self) -> Generator[None]:
        """Leave a function that cannot be compiled to the interpreter, with all that it calls."""
        owner = f"{_CONVERT_FRAME}.ConvertFrameAssert"
        convert = resolve(owner).__call__
        types: Any = importlib.import_module("torch._dynamo.types")
        errors: Any = importlib.import_module("torch._dynamo.exc")
        # Of Dynamo's own errors, these end a script.
        of_emulation = (
            errors.BackendCompilerFailed,
            errors.InternalTorchDynamoError,
            errors.TorchRuntimeError,
        )
        log = logging.getLogger(_CONVERT_FRAME)

        def ends_script(error: BaseException) -> bool:
            """Return whether an error would end a script on a GPU: then the emulation causes it."""
            of_dynamo = isinstance(error, errors.TorchDynamoException)
            return isinstance(error, of_emulation) or not of_dynamo

        def convert_or_skip(converter: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            # Settings are those of a thread, and a backward compiles in another one.
            if not hasattr(self._configured, "done"):
                self._configure()
            try:
                # Dynamo does this itself, but not for a DDP module, whose graph it splits by
                # buckets.
                with _modes._disable_current_modes():
                    return convert(converter, frame, *args, **kwargs)
            except Exception as error:
                # After other errors Dynamo continues with the functions that this one calls, as on
                # a GPU.
                name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
                # Dynamo compiles no generator by itself; what it calls is compiled.
                generates = frame.f_code.co_flags & inspect.CO_GENERATOR
                if isinstance(error, errors.Unsupported) and not generates:
                    unsupported: Any = error
                    if unsupported.gb_type == _BACKEND_BREAK:
                        self.failed.append(f"{name}: {_reason(unsupported.__cause__ or error)}")
                    else:
                        self.unbreakable[f"{name}: {_reason(error)}"] = None
                if ends_script(error):
                    self.failed.append(f"{name}: {_reason(error)}")
                    # Otherwise Dynamo traces every function below the failed one, which for a T5
                    # of 48 layers took more than ten minutes.
                    skip = types.FrameAction.SKIP
                    failure: Any = error
                    failure.frame_exec_strategy = types.FrameExecStrategy(skip, skip)
                raise

        def without_noted(record: logging.LogRecord) -> bool:
            # `notes` reports these failures instead of their tracebacks.
            error = record.exc_info and record.exc_info[1]
            return not (error and ends_script(error))

        log.addFilter(without_noted)
        try:
            with patched(owner, {"__call__": convert_or_skip}):
                yield
        finally:
            log.removeFilter(without_noted)

    def _override(self, config: Any, settings: Mapping[str, Any]) -> None:
        """Change settings until the capture ends."""
        # Settings belong to the process in torch 2.11, and to a thread in 2.13. Those of threads of
        # a backward stay: they end with the process, and this thread could not restore them.
        ours = threading.get_ident() == self._thread
        for name, value in settings.items():
            if ours or not isinstance(config._config[name].user_override, ContextVar):
                self._settings.callback(setattr, config, name, getattr(config, name))
            setattr(config, name, value)

    def _configure(self) -> None:
        """Override settings of Dynamo and Inductor that the script may have changed."""
        dynamo: Any = importlib.import_module("torch._dynamo.config")
        inductor: Any = importlib.import_module("torch._inductor.config")
        # What neither can compile runs eager, as `notes` says.
        if not hasattr(self._configured, "done"):
            self._inline_answers()
        self._configured.done = True
        self._override(dynamo, {"suppress_errors": True})
        self._override(inductor, _SETTINGS)

    def _inline_answers(self) -> None:
        """Let Dynamo trace the replacements of `torch.cuda`'s functions like a script's functions.

        Dynamo has rules for torch's own functions, by name or by identity. Without a rule, it would
        take the replacements for operators, or break the graph at a result that is not of torch's
        class.
        """
        rules: dict[Any, Any] = importlib.import_module("torch._dynamo.trace_rules").__dict__
        known = rules["get_torch_obj_rule_map"]()
        traced = importlib.import_module("torch._dynamo.variables.functions").UserFunctionVariable
        for function in (getattr(torch.cuda, name) for name in _ANSWERS):
            known[function] = traced
            self._settings.callback(known.pop, function, None)

    def _padding(self) -> contextlib.AbstractContextManager[None]:
        """Let Inductor pad products by computed times in the place of measured ones."""
        module = importlib.import_module(_PADDING)

        def should_pad(match: Any, mat1: Tensor, mat2: Tensor, *_: Any, **__: Any) -> bool:
            return _is_padded(module, match, (mat1, mat2), self._gpu)

        return patched(_PADDING, {"_should_pad": should_pad, "has_triton": _yes})

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Let generated kernels be recorded in the place of compiling them."""

        def triton(_: Any, name: str, source: str, *__: Any, **___: Any) -> GeneratedKernel:
            return GeneratedKernel(name, KernelAccesses.of(name, source), self._operators)

        return patched("torch._inductor.async_compile.AsyncCompile", {"triton": triton})

    def _wrappers(self) -> contextlib.AbstractContextManager[None]:
        """Let the generated wrappers run on fake tensors."""
        cache = "torch._inductor.codecache.PyCodeCache"

        def load(
            _: Any, key: str, path: str, linemap: Any = None, attrs: dict[str, Any] | None = None
        ) -> ModuleType:
            self.graphs += 1
            virtualized: Any = importlib.import_module("torch._inductor.virtualized")
            wrapper = load_wrapper(key, path, GraphNumbers(virtualized.V.graph, self._operators))
            vars(wrapper).update(attrs or {})
            return wrapper

        return patched(cache, {"load_by_key_path": classmethod(load)})

    @contextlib.contextmanager
    def _flex_attention_apart(self) -> Generator[None]:
        """Let Dynamo leave flex attention out of the graphs around it.

        Inductor generates its kernel from a template with the help of Triton. As an operator it is
        recorded with its block mask.
        """
        flex = resolve(f"{_FLEX_ATTENTION}.flex_attention")

        def run(args: Any, kwargs: Any, compiled: bool) -> Any:
            checkpointed = _in_compiled_checkpoint()
            self.checkpointed += checkpointed
            self.unfused += not compiled and not checkpointed
            return flex(*args, **kwargs)

        reason = "its kernel is generated from a template"
        disabled: Any = _torch.compiler.disable(run, reason=reason)

        # A wrapper, because `torch.compile(flex_attention)` of the disabled function itself would
        # compile its body.
        @functools.wraps(flex)
        def apart(*args: Any, **kwargs: Any) -> Any:
            # In compiled code Dynamo evaluates `is_compiling` to True before it leaves the graph.
            return disabled(args, kwargs, compiled=torch.compiler.is_compiling())

        # Unless this is set, a call outside of compiled code warns and compiles flex attention with
        # the backend "eager".
        uncompiled = {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}
        with (
            patched(_FLEX_ATTENTION, uncompiled),
            rebound(_FLEX_ATTENTION, {"flex_attention": apart}),
        ):
            yield

    def notes(self) -> list[Note]:
        """Return notes on compiled code."""
        notes: list[Note] = []
        if self.graphs:
            notes.append(
                Note(
                    f"{self.graphs} graphs were compiled by Inductor as scheduled for this GPU, "
                    "without tuning: GEMMs run in cuBLAS",
                    code="inductor-as-scheduled",
                )
            )
        if self.failed:
            notes.append(
                Note(
                    f"{len(self.failed)} functions under torch.compile were captured eager, "
                    "because Dynamo or Inductor could not compile them without a GPU; the first is "
                    f"{self.failed[0]}; {_FUSION_SHORTENS}",
                    code="compile-failed",
                )
            )
        if self.unbreakable:
            notes.append(
                Note(
                    f"{len(self.unbreakable)} functions under torch.compile ran eager, as on a "
                    "GPU, because they need a graph break where Dynamo allows none; the first is "
                    f"{next(iter(self.unbreakable))}",
                    code="compile-graph-unbroken",
                )
            )
        if self.checkpointed:
            notes.append(
                Note(
                    f"{self.checkpointed} calls of flex attention are in a checkpoint under "
                    "torch.compile: without a device each breaks the graph, so the checkpoint ran "
                    "eager; a GPU fuses the operators around attention; "
                    f"{_FUSION_SHORTENS}",
                    code="compile-checkpoint-eager",
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
        if self.unfused:
            notes.append(
                Note(
                    f"{self.unfused} calls of flex attention are recorded as a fused kernel, but "
                    "are outside of torch.compile: a GPU would compute and keep all scores",
                    code="flex-attention-unfused",
                )
            )
        return notes


def _in_compiled_checkpoint() -> bool:
    """Return whether an activation checkpoint runs within a compiled function."""
    frame: Any = sys._getframe(1)
    checkpointed = False
    while frame is not None:
        path = frame.f_code.co_filename
        checkpointed = checkpointed or path.endswith(_CHECKPOINT_FILE)
        if checkpointed and path.endswith(_COMPILED_CALL_FILE):
            return True
        frame = frame.f_back
    return False


def _reason(error: BaseException) -> str:
    """Return the first line of what Dynamo's error is about."""
    cause = getattr(error, "inner_exception", None) or error
    first = next(iter(str(cause).splitlines()), "")
    return f"{type(cause).__name__}: {first[:_LONGEST_REASON]}"


def _interface() -> contextlib.AbstractContextManager[None]:
    owner = f"{_INTERFACE}.CudaInterface"
    interface = resolve(owner)
    answers: dict[str, Any] = {
        name: staticmethod(_ask_cuda(name)) for name in _CUDA_NAMES if hasattr(interface, name)
    }
    answers["get_raw_stream"] = staticmethod(first_stream)
    answers["raise_if_triton_unavailable"] = staticmethod(nothing)
    return patched(owner, {n: v for n, v in answers.items() if hasattr(interface, n)})


def _ask_cuda(name: str) -> Callable[..., Any]:
    # `torch.cuda` has these two under private names.
    private = f"_{name}" if name.endswith("exchange_device") else name

    def ask(*args: Any, **kwargs: Any) -> Any:
        return getattr(torch.cuda, private)(*args, **kwargs)

    return ask


def _scheduler() -> contextlib.AbstractContextManager[None]:
    return patched("torch._inductor.scheduler", {"has_triton": _yes})


# Operations of an iteration that compute nothing, by their names in Inductor's loops. Random
# numbers have no FLOPs, as in eager operators.
_NO_FLOPS = frozenset(
    "load store store_reduction constant index_expr to_dtype to_dtype_bitcast masked get_index "
    "indirect_indexing check_bounds device_assert_async identity load_seed rand randn randint64 "
    "bucketize output placeholder partial_accumulate getitem get_item".split()
)


def _counted() -> contextlib.AbstractContextManager[None]:
    """Append a generated kernel's FLOPs to its source.

    A launch has only the source, and only the scheduled loops tell the FLOPs.
    """
    owner = "torch._inductor.codegen.triton.TritonScheduling"
    define = resolve(owner).define_kernel

    def define_kernel(scheduling: Any, source: str, schedule: Any, kernel: Any) -> Any:
        flops = _flops_of(schedule)
        counted = source if flops is None else f"{source}\n{FLOPS_COMMENT}{flops}\n"
        return define(scheduling, counted, schedule, kernel)

    return patched(owner, {"define_kernel": define_kernel})


def _flops_of(schedule: Sequence[Any]) -> int | None:
    """Return the FLOPs of the loops that a kernel fuses: one for each operation of an iteration.

    None if one of them is no loop, such as a template, or has a size that is not known.
    """
    total = 0
    for entry in schedule:
        # Entries without nodes only mark where a reduction begins and ends.
        for node in entry.get_nodes() if hasattr(entry, "get_nodes") else ():
            body = getattr(node, "_body", None)
            sizes = [size for axis in body.sizes for size in axis] if body is not None else []
            if body is None or not all(str(size).isdigit() for size in sizes):
                return None
            counts = body.op_counts.items()
            each = sum(count for operation, count in counts if operation not in _NO_FLOPS)
            # A variance takes a difference and its square, as in eager operators.
            each += str(node.node.get_reduction_type()).startswith("welford")
            total += each * prod(map(int, sizes))
    return total


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


def _scans() -> contextlib.AbstractContextManager[None]:
    """Let Inductor write kernels of long sums along a dimension without Triton's data types."""
    kernel = resolve(_SPLIT_SCAN).TritonSplitScanKernel
    write = kernel.scan

    def scan(*args: Any) -> Any:
        with mock.patch.dict(sys.modules, triton_modules()):
            return write(*args)

    return patched(f"{_SPLIT_SCAN}.TritonSplitScanKernel", {"scan": scan})
